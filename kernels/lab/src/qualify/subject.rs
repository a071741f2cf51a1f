//! What is qualified: contracts of the cpu device's table, by instruction set, or sealed artifacts.
//!
//! A subject draws its own cases: edges of its domain first, then random ones.

use super::case::{Case, Spec};
use super::problems::{self, Draw, Weights};
use super::values::{Style, below, pick, shuffle};
use crate::random::Random;
use anyhow::{Context, bail};
use oxide_bundle::artifact::{ArtifactManifest, Range};
use oxide_bundle::contract::{Activation, Contract, Heads, Linear, Op, Phase};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::plan::{Bindings, Sym, WeightLayout};
use oxide_runtime::device::cpu::{Isa, supports};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Tokens of the largest cpu case.
const CPU_TOKENS_MAX: u32 = 130;
/// Logit rows and sequences that a kernel without a bound of its own is given at most.
const SEQS_MAX: u32 = 256;
/// Tokens that a kernel without a bound of its own is given at most.
const TOKENS_MAX: u32 = 8192;
/// Sizes about which tiles, warps and pages begin and end.
const BOUNDARIES: [u32; 25] = [2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 255, 257, 511, 1023, 1025, 4097];

/// A kernel to qualify.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    /// Unique.
    pub(crate) name: String,
    /// The operator's name.
    pub(crate) family: &'static str,
    pub(crate) kind: Kind,
}

/// Where a subject's code is.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// In the cpu device's table.
    Cpu { isa: Isa, family: CpuFamily },
    /// In a cubin.
    Artifact { manifest: Box<ArtifactManifest>, code: Vec<u8> },
}

/// A row of the cpu device's table; shapes vary by case.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum CpuFamily {
    Embed,
    RmsNorm,
    AddRmsNorm,
    QkNorm,
    Linear,
    SwiGlu,
    RopeAppend,
    AttendDecode,
    AttendMixed,
    TakeRows,
    Sample,
}

const CPU_FAMILIES: [(CpuFamily, &str); 11] = [
    (CpuFamily::Embed, "embed"),
    (CpuFamily::RmsNorm, "rms_norm"),
    (CpuFamily::AddRmsNorm, "add_rms_norm"),
    (CpuFamily::QkNorm, "qk_norm"),
    (CpuFamily::Linear, "linear"),
    (CpuFamily::SwiGlu, "linear_swiglu"),
    (CpuFamily::RopeAppend, "rope_append"),
    (CpuFamily::AttendDecode, "attend_decode"),
    (CpuFamily::AttendMixed, "attend_mixed"),
    (CpuFamily::TakeRows, "take_rows"),
    (CpuFamily::Sample, "sample"),
];

/// Every contract of the cpu device on every instruction set of this processor.
pub(crate) fn cpu_subjects() -> Vec<Subject> {
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    let subject =
        |family, name: &'static str, isa: Isa| Subject { name: format!("{name}@{isa}"), family: name, kind: Kind::Cpu { isa, family } };
    CPU_FAMILIES.into_iter().flat_map(|(family, name)| isas.iter().map(move |isa| subject(family, name, *isa))).collect()
}

/// Every artifact of a folder, by name.
///
/// # Errors
/// If a manifest cannot be read, or a cubin is not what its manifest says.
pub(crate) fn artifact_subjects(folder: &Path) -> anyhow::Result<Vec<Subject>> {
    let mut subjects = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            subjects.push(artifact_subject(&path)?);
        }
    }
    subjects.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(subjects)
}

fn artifact_subject(path: &Path) -> anyhow::Result<Subject> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: ArtifactManifest = serde_json::from_slice(&text).with_context(|| format!("bad manifest {}", path.display()))?;
    let cubin = path.with_extension("cubin");
    let code = std::fs::read(&cubin).with_context(|| format!("cannot read {}", cubin.display()))?;
    let found: String = Sha256::digest(&code).iter().map(|byte| format!("{byte:02x}")).collect();
    if found != manifest.sha256 {
        bail!("{} has SHA-256 {found}, its manifest says {}", cubin.display(), manifest.sha256);
    }
    if manifest.weight_layout != WeightLayout::RowMajor {
        bail!("kernel {} reads weights as {:?}, which this tool cannot lay out", manifest.name, manifest.weight_layout);
    }
    let family = manifest.contract.op.name();
    Ok(Subject { name: manifest.name.clone(), family, kind: Kind::Artifact { manifest: Box::new(manifest), code } })
}

impl Subject {
    /// SHA-256 of its code object, if it has one.
    pub(crate) fn sha256(&self) -> Option<&str> {
        self.manifest().map(|manifest| manifest.sha256.as_str())
    }

    /// The manifest of its code object, if it has one.
    pub(crate) fn manifest(&self) -> Option<&ArtifactManifest> {
        match &self.kind {
            Kind::Cpu { .. } => None,
            Kind::Artifact { manifest, .. } => Some(manifest),
        }
    }

    /// What it computes, in words.
    pub(crate) fn contract(&self) -> String {
        self.manifest().map_or_else(|| self.family.to_owned(), |manifest| manifest.contract.to_string())
    }

    /// The `index`-th case of a seed.
    pub(crate) fn case(&self, index: usize, seed: u64, weights: &mut Weights) -> Case {
        let mut random = Random::new(seed ^ name_hash(&self.name) ^ (index as u64).wrapping_mul(0x2545_F491_4F6C_DD1D));
        random.next();
        let style = Style::ALL[index % Style::ALL.len()];
        let (spec, sizes, bound) = match &self.kind {
            Kind::Cpu { family, .. } => cpu_problem(*family, index, &mut random),
            Kind::Artifact { manifest, .. } => artifact_problem(manifest, index, seed, &mut random),
        };
        problems::make(&mut Draw { random: &mut random, spec, style, sizes, bound, weights })
    }
}

fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// The `index`-th size of a range: its ends and one below, then boundaries in an order of the seed, then
/// random ones, small sizes as likely as large ones.
fn size(range: Range, index: usize, seed: u64, random: &mut Random) -> u32 {
    let mut boundaries = BOUNDARIES;
    shuffle(&mut Random::new(seed), &mut boundaries);
    let edges = [range.min, range.max, range.max.saturating_sub(1)].into_iter().chain(boundaries);
    let mut legal: Vec<u32> = Vec::new();
    for edge in edges.filter(|size| range.serves(*size)) {
        if !legal.contains(&edge) {
            legal.push(edge);
        }
    }
    // Every third case is random from the start, so that few cases meet both.
    if index % 3 != 2
        && let Some(edge) = legal.get(index - index / 3)
    {
        return *edge;
    }
    let octaves = (range.max / range.min.max(1)).ilog2() as usize + 1;
    let size = (range.min.max(1) << below(random, octaves)) + below(random, range.min.max(1) as usize) as u32;
    let size = size + below(random, size as usize) as u32;
    (size.min(range.max) / range.multiple.max(1) * range.multiple.max(1)).max(range.min)
}

/// A class somewhat larger than the step, inside the domain.
fn larger(size: u32, range: Range, random: &mut Random) -> u32 {
    let bound = (size + 1 + below(random, 40) as u32).min(range.max);
    (bound / range.multiple.max(1) * range.multiple.max(1)).max(size)
}

fn one_to(max: u32) -> Range {
    Range { min: 1, max, multiple: 1 }
}

fn artifact_problem(manifest: &ArtifactManifest, index: usize, seed: u64, random: &mut Random) -> (Spec, Bindings, Bindings) {
    let is_free = |range: Range| range.max == u32::MAX;
    let domain = manifest.domain;
    let by_rows =
        matches!(manifest.contract.op, Op::TakeRows { .. } | Op::Sample { .. }) || is_free(domain.tokens) && !is_free(domain.rows);
    let axis = if by_rows { Sym::Rows } else { Sym::Tokens };
    let range = |range: Range, max: u32| if is_free(range) { one_to(max) } else { range };
    let (tokens, seqs, rows) = (range(domain.tokens, TOKENS_MAX), range(domain.seqs, SEQS_MAX), range(domain.rows, SEQS_MAX));
    let spec = Spec { contract: manifest.contract, axis, is_sm90: true };
    let (mut sizes, mut bound) = drawn(axis, [tokens, seqs, rows], index, seed, random);
    // A step of prefill chunks may need no logits.
    if axis == Sym::Rows && index == 3 {
        sizes.rows = 0;
    }
    if matches!(manifest.contract.op, Op::Attend { phase: Phase::Decode, .. }) {
        (sizes.seqs, bound.seqs) = (sizes.tokens, bound.tokens);
    }
    (spec, sizes, bound)
}

fn drawn(axis: Sym, [tokens, seqs, rows]: [Range; 3], index: usize, seed: u64, random: &mut Random) -> (Bindings, Bindings) {
    let lead = if axis == Sym::Rows { rows } else { tokens };
    let leading = size(lead, index, seed, random);
    let lead_max = larger(leading, lead, random);
    let others = 1 + below(random, SEQS_MAX as usize) as u32;
    let sizes = match axis {
        Sym::Rows => Bindings { tokens: others.min(tokens.max), seqs: leading.min(seqs.max), rows: leading, kv_pages: 2 },
        Sym::Tokens | Sym::Seqs | Sym::KvPages => {
            Bindings { tokens: leading, seqs: others.min(leading).min(seqs.max), rows: others.min(rows.max), kv_pages: 2 }
        }
    };
    let mut bound = Bindings {
        tokens: larger(sizes.tokens, tokens, random),
        seqs: larger(sizes.seqs, seqs, random),
        rows: larger(sizes.rows, rows, random),
        kv_pages: sizes.kv_pages,
    };
    match axis {
        Sym::Rows => bound.rows = lead_max,
        Sym::Tokens | Sym::Seqs | Sym::KvPages => bound.tokens = lead_max,
    }
    (sizes, bound)
}

fn cpu_problem(family: CpuFamily, index: usize, random: &mut Random) -> (Spec, Bindings, Bindings) {
    let op = cpu_op(family, index, random);
    let axis = match family {
        CpuFamily::TakeRows | CpuFamily::Sample => Sym::Rows,
        CpuFamily::Linear | CpuFamily::RmsNorm if random.percent(30) => Sym::Rows,
        _ => Sym::Tokens,
    };
    let kv = pick(random, &[DType::F32, DType::Bf16]);
    let contract = Contract { op, act: DType::F32, weight: DType::Bf16, kv, out: DType::F32 };
    debug_assert!(supports(&contract), "{contract}");
    let seqs = one_to(33);
    let (mut sizes, mut bound) = drawn(axis, [one_to(CPU_TOKENS_MAX), seqs, one_to(40)], index, 0, random);
    if axis == Sym::Rows && index == 3 {
        sizes.rows = 0;
    }
    if family == CpuFamily::AttendDecode {
        sizes.tokens = sizes.tokens.min(33);
        (sizes.seqs, bound.tokens, bound.seqs) = (sizes.tokens, sizes.tokens + 5, sizes.tokens + 5);
    }
    (Spec { contract, axis, is_sm90: false }, sizes, bound)
}

fn cpu_op(family: CpuFamily, index: usize, random: &mut Random) -> Op {
    let eps = F32Bits::new(pick(random, &[1e-5, 1e-6]));
    let dim = edge_or(index, &[1, 15, 16, 17, 33, 576, 1000, 1536], || 1 + below(random, 1600) as u32);
    match family {
        CpuFamily::Embed => Op::Embed { vocab: 2 + below(random, 400) as u32, dim: (dim + 1) & !1 },
        CpuFamily::RmsNorm => Op::RmsNorm { dim, eps },
        CpuFamily::AddRmsNorm => Op::AddRmsNorm { dim, eps },
        CpuFamily::TakeRows => Op::TakeRows { dim },
        CpuFamily::QkNorm => Op::QkNorm { heads: heads(index, random), eps },
        CpuFamily::RopeAppend => Op::RopeAppend { heads: heads(index, random) },
        CpuFamily::AttendDecode => Op::Attend { heads: heads(index, random), phase: Phase::Decode },
        CpuFamily::AttendMixed => Op::Attend { heads: heads(index, random), phase: Phase::Mixed },
        CpuFamily::Linear => Op::Linear(linear(index, random)),
        CpuFamily::SwiGlu => {
            let (n, k) = edge_or(index, &[(32, 16), (64, 62), (96, 130), (320, 64)], || {
                (32 + 32 * below(random, 12) as u32, 2 + 2 * below(random, 300) as u32)
            });
            Op::Linear(Linear { act: Activation::SwiGlu, bias: random.percent(50), residual: random.percent(30), ..Linear::plain(n, k) })
        }
        CpuFamily::Sample => {
            let vocab = edge_or(index, &[1, 5, 64, 1000, 4096], || 2 + below(random, 5000) as u32);
            Op::Sample { vocab, vocab_known: vocab - below(random, vocab.min(20) as usize) as u32 }
        }
    }
}

fn linear(index: usize, random: &mut Random) -> Linear {
    let edges = [(1, 2), (16, 16), (17, 30), (40, 64), (100, 34), (192, 576), (32, 1536)];
    let (n, k) = edge_or(index, &edges, || (1 + below(random, 400) as u32, 2 + 2 * below(random, 500) as u32));
    Linear { bias: random.percent(50), residual: random.percent(50), ..Linear::plain(n, k) }
}

fn heads(index: usize, random: &mut Random) -> Heads {
    let edges =
        [(9, 3, 64, 16), (8, 1, 128, 1), (4, 4, 64, 7), (12, 2, 128, 64), (7, 1, 16, 32), (5, 1, 80, 16), (2, 2, 256, 16), (32, 1, 16, 16)];
    let (q, kv, dim, page_tokens) = edge_or(index, &edges, || {
        let kv = 1 + below(random, 4) as u32;
        (kv * (1 + below(random, 8) as u32), kv, 16 * (1 + below(random, 10) as u32), 1 + below(random, 64) as u32)
    });
    Heads { q, kv, dim, page_tokens }
}

fn edge_or<T: Copy>(index: usize, edges: &[T], random: impl FnOnce() -> T) -> T {
    edges.get(index).copied().unwrap_or_else(random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qualify::lower::{Arrangement, WeightCache, lower};
    use oxide_runtime::device::cuda::{Argument, KernelLaunch};

    /// Elements of a weight that the test makes at most, but for one kernel.
    const WEIGHT_MAX: u64 = 16 << 20;

    fn artifacts() -> Vec<Subject> {
        artifact_subjects(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90")).expect("the shipped artifacts are readable")
    }

    fn weight_elements(op: Op) -> u64 {
        match op {
            Op::Linear(linear) | Op::QkvRopeAppend { linear, .. } => u64::from(linear.n) * u64::from(linear.k),
            Op::Embed { vocab, dim } => u64::from(vocab) * u64::from(dim),
            _ => 0,
        }
    }

    #[test]
    fn every_artifact_gets_operands_that_fit_its_parameters() {
        let (mut weights, mut cache, mut seen) = (Weights::default(), WeightCache::default(), 0);
        let mut subjects = artifacts();
        // Kernels of one shape follow each other, so that their weights are made once.
        subjects.sort_by_key(|subject| subject.contract());
        for subject in &subjects {
            let manifest = subject.manifest().expect("an artifact has a manifest");
            if weight_elements(manifest.contract.op) > WEIGHT_MAX {
                continue;
            }
            seen += 1;
            for index in [0, 2] {
                let case = subject.case(index, 1, &mut weights);
                for arrangement in [Arrangement::Padded, Arrangement::Exact] {
                    let lowered = lower(&case, Some(manifest), arrangement, &mut cache);
                    let step = lowered.step();
                    let launch = KernelLaunch::of(manifest, &step).unwrap_or_else(|reason| panic!("{}: {reason}", subject.name));
                    assert_eq!(launch.arguments.len(), manifest.params.len());
                    assert!(launch.grid.iter().all(|extent| (1..=0x7FFF_FFFF).contains(extent)), "{}: {:?}", subject.name, launch.grid);
                    for argument in &launch.arguments {
                        map_fits(&subject.name, argument, &step);
                    }
                    for (param, argument) in manifest.params.iter().zip(&launch.arguments) {
                        let is_written =
                            matches!(param.access, oxide_bundle::artifact::Access::Write | oxide_bundle::artifact::Access::ReadWrite);
                        if let Argument::Address { buffer } | Argument::TensorMap { buffer, .. } = argument {
                            assert!(!is_written || step.buffers[*buffer].is_written, "{}: {} is written", subject.name, param.name);
                        }
                    }
                }
            }
        }
        assert!(seen > 100, "{seen} artifacts");
    }

    /// What the driver demands of a tensor map, and that it stays inside its buffer.
    fn map_fits(name: &str, argument: &Argument, step: &oxide_runtime::device::place::KernelStep<'_>) {
        let Argument::TensorMap { buffer, dims, strides_bytes, .. } = argument else { return };
        let memory = &step.buffers[*buffer];
        let (outer, stride) = (dims[dims.len() - 1], strides_bytes[strides_bytes.len() - 1]);
        assert!(outer * stride <= (memory.len * memory.image.element_bytes()) as u64, "{name}: {dims:?} {strides_bytes:?}");
        assert!(strides_bytes.iter().all(|stride| stride.is_multiple_of(16)), "{name}: {strides_bytes:?}");
    }

    #[test]
    fn sizes_meet_the_ends_of_a_domain_and_stay_inside() {
        let range = Range { min: 1, max: 1024, multiple: 1 };
        let sizes: Vec<u32> = (0..40).map(|index| size(range, index, 1, &mut Random::new(index as u64))).collect();
        assert!(sizes.iter().all(|size| range.serves(*size)));
        assert!([1, 1024, 1023].iter().all(|edge| sizes.contains(edge)), "{sizes:?}");
        let even = Range { min: 8, max: 64, multiple: 8 };
        assert!((0..40).all(|index| even.serves(size(even, index, 1, &mut Random::new(index as u64)))));
        let one = Range { min: 1, max: 1, multiple: 1 };
        assert!((0..9).all(|index| size(one, index, 1, &mut Random::new(7)) == 1));
    }

    #[test]
    fn a_case_is_the_same_from_the_same_seed() {
        for subject in cpu_subjects() {
            let case = |seed| subject.case(5, seed, &mut Weights::default());
            assert_eq!(case(3).label(), case(3).label());
            assert_eq!(case(3).tensors[0].all().len(), case(3).tensors[0].all().len());
        }
    }
}
