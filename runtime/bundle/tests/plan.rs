//! `Plan::verify` finds each kind of lie, names its place, and reports all of them at once.

mod fixture;

use fixture::*;
use oxide_bundle::contract::{Op, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::dump::PlanText;
use oxide_bundle::ids::{ArtifactId, BufferId, KernelId, WeightId};
use oxide_bundle::ledger;
use oxide_bundle::manifest::{Manifest, Target};
use oxide_bundle::plan::*;
use oxide_bundle::verify::PlanErrors;
use std::collections::BTreeSet;

fn launch(plan: &mut RawPlan, entry: usize, step: usize) -> (&mut KernelId, &mut [Extent; 3], &mut Vec<Operand>) {
    match &mut plan.entries[entry].steps[step] {
        Step::Launch { kernel, grid, operands } => (kernel, grid, operands),
        Step::Copy { .. } => panic!("the step launches"),
    }
}

fn operand(plan: &mut RawPlan, entry: usize, step: usize, role: Role) -> &mut Value {
    let operands = launch(plan, entry, step).2;
    &mut operands.iter_mut().find(|operand| operand.role == role).expect("the step has the role").value
}

/// Kind, place, part of the message, and the lie.
type Case = (&'static str, &'static str, &'static str, fn(&mut RawPlan, &mut Manifest));

const CASES: &[Case] = &[
    ("plan_encoding_version", "plan", "version is 2, allowed is 1", |plan, _| plan.version = 2),
    ("plan_count", "plan", "layers: 0, allowed is 1 to", |plan, _| plan.kv.layers = 0),
    ("plan_count", "plan", "sequences of a step: 4294967295", |plan, _| plan.bounds.seqs_max = u32::MAX),
    ("plan_count", "plan", "entries: 0", |plan, _| plan.entries.clear()),
    ("plan_count", "plan", "weights: 0", |plan, _| plan.weights.clear()),
    ("plan_manifest", "plan", "vocabulary: the plan gives 64, the manifest says 65", |_, manifest| manifest.model.vocab = 65),
    ("plan_manifest", "plan", "pages of a sequence: the plan gives 7, the manifest says 8", |_, manifest| {
        manifest.limits.context_max = 113
    }),
    ("plan_manifest", "plan", "arena bytes", |_, manifest| manifest.ledger.arena_bytes += 1),
    ("plan_manifest", "plan", "sequences running together: the manifest says 9", |_, manifest| manifest.limits.seqs_max = 9),
    ("plan_manifest", "plan", "special token 64 is outside", |_, manifest| manifest.tokens.eos.push(64)),
    ("plan_missing_buffer", "e0 s0", "Out is b9, the plan has 6", |plan, _| *operand(plan, 0, 0, Role::Out) = Value::Buffer(BufferId(9))),
    ("plan_missing_weight", "e1 s1", "Weight is w6, the plan has 6", |plan, _| {
        *operand(plan, 1, 1, Role::Weight) = Value::Weight(WeightId(6));
    }),
    ("plan_missing_kernel", "e2 s0", "launches k9, the plan has 9", |plan, _| *launch(plan, 2, 0).0 = KernelId(9)),
    ("plan_missing_plane", "e0 s2", "plane of layer 1, the plan has 1", |plan, _| *operand(plan, 0, 2, Role::KPlane) = Value::KPlane(1)),
    ("plan_buffer", "b5", "the arena has", |plan, _| plan.buffers[5].offset_bytes = 1 << 20),
    ("plan_buffer", "b5", "the arena has", |plan, _| plan.buffers[5].offset_bytes = u64::MAX - 255),
    ("plan_buffer", "b5", "not a multiple of 256", |plan, _| plan.buffers[5].offset_bytes += 4),
    ("plan_buffer", "b5", "divided by 0", |plan, _| plan.buffers[5].elements.div = 0),
    ("plan_buffer", "e1 s6", "has 512 bytes, Decode { seqs: 4 } needs 1024", |plan, _| plan.buffers[5].size_bytes = 512),
    ("plan_weight", "w1", "not a multiple of 256", |plan, _| plan.weights[1].offset_bytes += 1),
    ("plan_weight", "w1", "before the weight before it ends", |plan, _| plan.weights[1].offset_bytes = 256),
    ("plan_weight", "w0", "its shape [65, 16] needs 2560", |plan, _| plan.weights[0].shape[0] = 65),
    ("plan_weight", "w0", "impossible shape", |plan, _| plan.weights[0].shape = vec![u32::MAX; 4]),
    ("plan_weight", "w0", "does not read", |plan, _| plan.weights[0].layout = WeightLayout::PanelK64),
    ("plan_weight", "w1", "embed occurs twice", |plan, _| plan.weights[1].name = "embed".to_owned()),
    ("plan_weight", "plan", "the weight section has", |_, manifest| manifest.ledger.weight_bytes = 64),
    ("plan_kernel", "k8", "vocabulary 65", |plan, _| plan.kernels[8].contract.op = Op::Sample { vocab: 65, vocab_known: 60 }),
    ("plan_kernel", "k2", "do not fit the cache", |plan, _| {
        let Op::RopeAppend { heads } = &mut plan.kernels[2].contract.op else { panic!("k2 appends") };
        heads.kv = u32::MAX;
    }),
    ("plan_kernel", "k0", "names code object a0, target cpu has none", |plan, _| {
        plan.kernels[0].code = Some(KernelCode { artifact: ArtifactId(0), symbol: "f".to_owned() });
    }),
    ("plan_kernel", "k0", "names no code object, target sm90 needs one", |_, manifest| manifest.target = Target::Sm90),
    ("plan_entry", "e1", "decode classes come first", |plan, _| plan.entries.swap(0, 1)),
    ("plan_entry", "e2", "decode classes come first", |plan, _| plan.entries[2].class = BatchClass::Decode { seqs: 4 }),
    ("plan_entry", "e2", "beyond the plan's bounds", |plan, _| plan.entries[2].class = BatchClass::Mixed { tokens: 64, seqs: 4 }),
    ("plan_role", "e0 s0", "embed lacks Out", |plan, _| launch(plan, 0, 0).2.truncate(1)),
    ("plan_role", "e0 s0", "embed has no role Bias", |plan, _| {
        launch(plan, 0, 0).2.push(Operand { role: Role::Bias, value: Value::Weight(WeightId(1)) });
    }),
    ("plan_role", "e0 s0", "embed has Weight twice", |plan, _| {
        launch(plan, 0, 0).2.push(Operand { role: Role::Weight, value: Value::Weight(WeightId(0)) });
    }),
    ("plan_role", "e2 s3", "attend_decode cannot serve Mixed", |plan, _| *launch(plan, 2, 3).0 = KernelId(3)),
    ("plan_operand", "e0 s0", "Weight w1 norm is bf16[16], allowed is bf16[64, 16]", |plan, _| {
        *operand(plan, 0, 0, Role::Weight) = Value::Weight(WeightId(1));
    }),
    ("plan_operand", "e0 s2", "RopeTable w3 rope is f32[100, 4, 2], allowed is f32[112 or more, 4, 2]", |_, manifest| {
        manifest.limits.context_max = 112;
    }),
    ("plan_operand", "e0 s1", "X b0 x is bf16, allowed is f32", |plan, _| plan.buffers[0].dtype = DType::Bf16),
    ("plan_operand", "e2 s1", "X b0 x has 480 elements, 32 rows of 16 need 512", |plan, _| plan.buffers[0].elements.mul = 15),
    ("plan_operand", "e0 s0", "Out cannot be Weight", |plan, _| *operand(plan, 0, 0, Role::Out) = Value::Weight(WeightId(0))),
    ("plan_operand", "e0 s5", "X and Out in one buffer b0", |plan, _| *operand(plan, 0, 5, Role::Out) = Value::Buffer(BufferId(0))),
    ("plan_operand", "e0 s7", "Scalar(Rows) cannot be", |plan, _| {
        let value = Value::Scalar(Extent { sym: None, mul: 1, div: 0 });
        launch(plan, 0, 7).2.push(Operand { role: Role::Scalar(oxide_bundle::contract::Dim::Rows), value });
    }),
    ("plan_read_before_write", "e0 s0", "reads b0 x, which no step before it wrote", |plan, _| {
        plan.entries[0].steps.remove(0);
    }),
    ("plan_live_overlap", "e2 s1", "b1 qkv (1024..5120) shares bytes with b0 x (0..2048), which lives through s0 to s6", |plan, _| {
        plan.buffers[1].offset_bytes = 1024;
        plan.entries[2].steps[6] = plan.entries[2].steps[5].clone();
    }),
    ("plan_live_overlap", "e0 s3", "b3 attended", |plan, _| plan.buffers[3].offset_bytes = 6144),
    ("plan_live_overlap", "b2", "state buffer q shares bytes with b5 logits", |plan, _| {
        plan.buffers[2].kind = BufferKind::State;
        plan.buffers[2].offset_bytes = 4096;
    }),
    ("plan_grid", "e0 s0", "grid.x is 2, the cpu device allows 1 to 1", |plan, _| launch(plan, 0, 0).1[0] = Extent::lit(2)),
    ("plan_grid", "e2 s0", "grid.y is 96000, the sm90 device allows 1 to 65535", |plan, manifest| {
        manifest.target = Target::Sm90;
        launch(plan, 2, 0).1[1] = Extent::sym(Sym::Tokens, 3000);
    }),
    ("plan_grid", "e0 s0", "grid.z is 0", |plan, _| launch(plan, 0, 0).1[2] = Extent { sym: None, mul: 1, div: 0 }),
    ("plan_copy", "e0 s8", "copies b0 onto itself", |plan, _| plan.entries[0].steps.push(copy(0, 0))),
    ("plan_copy", "e0 s6", "copies 8192 bytes, b4 taken has 256", |plan, _| plan.entries[0].steps.insert(6, copy(0, 4))),
];

fn copy(from: u32, to: u32) -> Step {
    Step::Copy { from: BufferId(from), to: BufferId(to), bytes: Extent::lit(8192) }
}

fn refuse(lie: fn(&mut RawPlan, &mut Manifest)) -> PlanErrors {
    let (mut plan, mut manifest) = (plan(), manifest());
    lie(&mut plan, &mut manifest);
    Plan::verify(plan, &manifest).expect_err("the lie is found")
}

#[test]
fn the_fixture_verifies() {
    let plan = Plan::verify(plan(), &manifest()).expect("the fixture is sound");
    assert_eq!(plan.entries().len(), 3);
    assert_eq!(manifest().ledger, ledger::ledger(plan.raw(), 28));
}

#[test]
fn each_lie_is_found_at_its_place() {
    for (kind, place, message, lie) in CASES {
        let errors = refuse(*lie);
        let found =
            errors.iter().any(|error| error.kind.name() == *kind && error.place.to_string() == *place && error.message.contains(message));
        assert!(found, "wanted {kind} at {place} with {message:?} in: {errors}");
    }
}

#[test]
fn each_kind_has_its_own_exit_code() {
    let kinds: BTreeSet<(&str, u8)> = CASES
        .iter()
        .flat_map(|(.., lie)| refuse(*lie).iter().map(|error| (error.kind.name(), error.kind.exit_code())).collect::<Vec<_>>())
        .collect();
    let codes: BTreeSet<u8> = kinds.iter().map(|(_, code)| *code).collect();
    assert_eq!(codes.len(), kinds.len());
    assert_eq!(kinds.len(), 17, "every kind but a missing artifact occurs: {kinds:?}");
}

#[test]
fn all_errors_are_reported_together() {
    let errors = refuse(|plan, manifest| {
        plan.buffers[5].offset_bytes += 4;
        plan.weights[1].offset_bytes += 1;
        *launch(plan, 2, 0).0 = KernelId(9);
        manifest.ledger.arena_bytes += 1;
    });
    let places: Vec<String> = errors.iter().map(|error| error.place.to_string()).collect();
    for place in ["plan", "b5", "w1", "e2 s0"] {
        assert!(places.iter().any(|found| found == place), "{place} in {places:?}");
    }
    assert!(errors.to_string().contains("errors):\n  plan: arena bytes"), "{errors}");
}

#[test]
fn a_missing_code_object_is_listed() {
    let (mut plan, mut manifest) = (plan(), manifest());
    manifest.target = Target::Sm90;
    for weight in &mut plan.weights {
        weight.layout = WeightLayout::RowMajor;
    }
    for (index, kernel) in (0..).zip(&mut plan.kernels) {
        kernel.code = Some(KernelCode { artifact: ArtifactId(index), symbol: "f".to_owned() });
    }
    let plan = Plan::verify(plan, &manifest).expect("the plan is sound for sm90");
    let errors = plan.check_artifacts(&[]).expect_err("no code object is there");
    assert_eq!(errors.iter().count(), 9);
    assert_eq!(errors.first().kind.name(), "plan_missing_artifact");
}

#[test]
fn the_dump_names_everything_once() {
    let text = PlanText(&plan()).to_string();
    for line in [
        "plan v1",
        "bounds tokens=32 seqs=4 rows=4 pages_per_seq=7 bias=64 history=128 vocab=64",
        "kv layers=1 page=16 heads=1 d=8 f32",
        "  b1 qkv f32[tokens*32] @2048 +4096",
        "  w0 embed bf16[64, 16] panel16 @0 +2048 <- model.embed.weight",
        "  k3 attend_decode.f32[q=2 kv=1 d=8 page=16] weight=bf16 kv=f32 out=f32",
        "e2 mixed tokens=32 seqs=4",
        "  s2 k2 x=b1 rope=w3 k=kv.k0 v=kv.v0 out=b2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
}
