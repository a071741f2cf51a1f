//! Any bytes return: the fuzz entry points under random and under slightly wrong inputs.

mod fixture;

use fixture::*;
use oxide_bundle::container::{SectionKind, check_header};
use oxide_bundle::plan::RawPlan;
use oxide_bundle::{fuzz, msgpack};
use proptest::prelude::*;
use proptest::sample::Index;
use std::sync::LazyLock;

static SEALED: LazyLock<Vec<u8>> = LazyLock::new(sealed);

/// Overwrites bytes of `base` at random places, then cuts or extends it.
fn mutated(base: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let edits = prop::collection::vec((any::<Index>(), interesting()), 0..12);
    (edits, prop::option::of(any::<Index>())).prop_map(move |(edits, cut)| {
        let mut bytes = base.clone();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        bytes
    })
}

fn interesting() -> impl Strategy<Value = u8> {
    prop_oneof![any::<u8>(), prop::sample::select(vec![0, 1, 0x7f, 0x80, 0x8f, 0x9f, 0xc0, 0xcf, 0xd9, 0xdd, 0xdf, 0xff])]
}

fn bytes_of(kind: SectionKind) -> Vec<u8> {
    let section = section(&SEALED, kind);
    SEALED[section.offset as usize..section.end() as usize].to_vec()
}

/// Numbers that checks tend to get wrong.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![0..70_u32, any::<u32>(), Just(u32::MAX), Just(u32::MAX - 1), Just(1 << 31)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn superblock(bytes in prop_oneof![mutated(SEALED[..4096].to_vec()), prop::collection::vec(any::<u8>(), 0..4200)]) {
        fuzz::fuzz_superblock(&bytes);
    }

    #[test]
    fn table(bytes in prop_oneof![mutated(SEALED[4096..4096 + 11 * 128].to_vec()), prop::collection::vec(any::<u8>(), 0..2000)]) {
        let superblock = check_header(SEALED.first_chunk().expect("4 KiB")).expect("the header is sound");
        fuzz::fuzz_table(&superblock, &bytes);
    }

    #[test]
    fn manifest_and_other_sections(
        bytes in prop_oneof![
            mutated(bytes_of(SectionKind::MANI)),
            mutated(bytes_of(SectionKind::TMPL)),
            mutated(bytes_of(SectionKind::PROV)),
            mutated(bytes_of(SectionKind::WIDX)),
            mutated(msgpack::encode(&golden(2)).expect("golden vectors encode")),
            prop::collection::vec(any::<u8>(), 0..400),
        ]
    ) {
        fuzz::fuzz_manifest(&bytes);
    }

    #[test]
    fn plan_bytes(bytes in prop_oneof![mutated(bytes_of(SectionKind::PLAN)), prop::collection::vec(any::<u8>(), 0..400)]) {
        fuzz::fuzz_plan(&manifest(), &bytes);
    }

    /// Well-formed plans with wrong numbers anywhere: the msgpack of a sound plan with integers replaced.
    #[test]
    fn plan_numbers(edits in prop::collection::vec((any::<Index>(), number()), 1..6)) {
        let mut raw: RawPlan = plan();
        let mut numbers = numbers_of(&mut raw);
        for (at, value) in edits {
            let at = at.index(numbers.len());
            *numbers[at] = value;
        }
        fuzz::fuzz_raw_plan(&manifest(), raw);
    }

    #[test]
    fn starts_of_files(bytes in mutated(SEALED[..300_000].to_vec())) {
        fuzz::fuzz_bundle(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Sections with wrong bytes and right hashes: what a hostile writer can make.
    #[test]
    fn whole_files_with_right_hashes(edits in prop::collection::vec((1..10_usize, any::<Index>(), interesting()), 1..4)) {
        let mut bytes = SEALED.clone();
        for (kind, at, value) in edits {
            let section = section_of(SectionKind::ALL[kind]);
            bytes[section.start + at.index(section.len())] = value;
        }
        fixture::forge::rehash_all(&mut bytes);
        fuzz::fuzz_bundle(&bytes);
    }
}

fn section_of(kind: SectionKind) -> std::ops::Range<usize> {
    let at = fixture::forge::entry(&SEALED, kind);
    let offset = fixture::forge::u64_at(&SEALED, at + fixture::forge::OFFSET);
    offset..offset + fixture::forge::u64_at(&SEALED, at + fixture::forge::LENGTH)
}

/// Every `u32` of a plan that arithmetic is done with.
fn numbers_of(raw: &mut RawPlan) -> Vec<&mut u32> {
    let mut numbers: Vec<&mut u32> = Vec::new();
    let bounds = &mut raw.bounds;
    numbers.extend([&mut bounds.tokens_max, &mut bounds.seqs_max, &mut bounds.rows_max, &mut bounds.pages_per_seq_max]);
    numbers.extend([&mut bounds.bias_max, &mut bounds.history_max, &mut bounds.vocab]);
    let kv = &mut raw.kv;
    numbers.extend([&mut kv.layers, &mut kv.page_tokens, &mut kv.kv_heads, &mut kv.head_dim]);
    for buffer in &mut raw.buffers {
        numbers.extend([&mut buffer.elements.mul, &mut buffer.elements.div]);
    }
    for weight in &mut raw.weights {
        numbers.extend(&mut weight.shape);
    }
    for kernel in &mut raw.kernels {
        kernel_numbers(&mut kernel.contract.op, &mut numbers);
    }
    for entry in &mut raw.entries {
        entry_numbers(entry, &mut numbers);
    }
    numbers
}

fn kernel_numbers<'a>(op: &'a mut oxide_bundle::contract::Op, numbers: &mut Vec<&'a mut u32>) {
    use oxide_bundle::contract::Op;
    match op {
        Op::Embed { vocab, dim } => numbers.extend([vocab, dim]),
        Op::RmsNorm { dim, .. } | Op::AddRmsNorm { dim, .. } | Op::TakeRows { dim } => numbers.push(dim),
        Op::Linear(linear) => numbers.extend([&mut linear.n, &mut linear.k]),
        Op::RopeAppend { heads } | Op::Attend { heads, .. } | Op::QkNorm { heads, .. } | Op::QkvRopeAppend { heads, .. } => {
            numbers.extend([&mut heads.q, &mut heads.kv, &mut heads.dim, &mut heads.page_tokens]);
        }
        Op::Sample { vocab, vocab_known } => numbers.extend([vocab, vocab_known]),
    }
}

fn entry_numbers<'a>(entry: &'a mut oxide_bundle::plan::EntryDecl, numbers: &mut Vec<&'a mut u32>) {
    use oxide_bundle::plan::{BatchClass, Step, Value};
    match &mut entry.class {
        BatchClass::Decode { seqs } => numbers.push(seqs),
        BatchClass::Mixed { tokens, seqs } => numbers.extend([tokens, seqs]),
    }
    for step in &mut entry.steps {
        let Step::Launch { kernel, operands, .. } = step else { continue };
        numbers.push(&mut kernel.0);
        for operand in operands {
            match &mut operand.value {
                Value::Buffer(id) => numbers.push(&mut id.0),
                Value::Weight(id) => numbers.push(&mut id.0),
                Value::KPlane(layer) | Value::VPlane(layer) => numbers.push(layer),
                Value::Input(_) | Value::Output(_) | Value::Scalar(_) => {}
            }
        }
    }
}
