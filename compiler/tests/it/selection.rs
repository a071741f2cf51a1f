//! Which of the kernels that could compute a node are taken: the shipped artifacts, with and without one
//! that rotates, appends and attends.

use crate::planning::{check_arena, request};
use oxide_bundle::artifact::{Access, Param, ParamKind};
use oxide_bundle::contract::{Heads, Op, Phase, Role};
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::BatchClass;
use oxide_bundle::step::InputSlot;
use oxide_compile::Request;
use oxide_compile::catalogue::{Catalogue, Kernel};
use oxide_compile::compile::lower;
use oxide_compile::graph::{self, Graph};
use oxide_compile::passes::{self, LowerError, Missing, Settings, Unit};
use std::path::Path;

const PROFILE: &str = "oxide-tiny";
const LAYERS: usize = 4;
const HEADS: Heads = Heads { q: 4, kv: 2, dim: 64, page_tokens: 16 };

/// The smallest shipped model, and the committed artifacts without any that rotates and attends.
fn shipped() -> (Graph, Settings) {
    let artifacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifacts/sm90");
    let lowered = lower(&Request { artifacts: Some(artifacts), ..request(PROFILE, Target::Sm90) }).expect("lowers");
    let mut settings = lowered.settings;
    let Catalogue::Artifacts(kernels) = &mut settings.catalogue else { panic!("sm90 has artifacts") };
    kernels.retain(|kernel| !matches!(kernel.manifest.contract.op, Op::RopeAttend { .. }));
    (lowered.graph, settings)
}

/// A kernel for up to `seqs_max` sequences, launched as the widest that only attends.
fn rope_attend(settings: &Settings, heads: Heads, seqs_max: u32) -> Kernel {
    let is_attend = |kernel: &&Kernel| kernel.manifest.contract.op == Op::Attend { heads: HEADS, phase: Phase::Decode };
    let widest = settings.catalogue.kernels().iter().filter(is_attend).max_by_key(|kernel| kernel.manifest.domain.seqs.max);
    let mut kernel = widest.expect("it is shipped").clone();
    let manifest = &mut kernel.manifest;
    manifest.name = format!("rope_attend_{seqs_max}");
    manifest.contract.op = Op::RopeAttend { heads };
    (manifest.domain.tokens.max, manifest.domain.seqs.max) = (seqs_max, seqs_max);
    for param in manifest.params.iter_mut().filter(|param| matches!(param.role, Role::KPlane | Role::VPlane)) {
        param.access = Access::ReadWrite;
    }
    let more = [(Role::RopeTable, "float32"), (Role::Input(InputSlot::Positions), "int32"), (Role::Input(InputSlot::KvSlots), "int32")];
    manifest.params.extend(more.map(|(role, dtype)| pointer(role, dtype)));
    kernel
}

fn pointer(role: Role, dtype: &str) -> Param {
    Param {
        name: format!("{role:?}"),
        kind: ParamKind::Pointer,
        dtype: dtype.to_owned(),
        role,
        access: Access::Read,
        align: 16,
        offset: 0,
        size: 8,
        value: None,
        tensor_map: None,
    }
}

fn with(settings: &Settings, kernel: Kernel) -> Settings {
    let mut kernels = settings.catalogue.kernels().to_vec();
    kernels.push(kernel);
    Settings { catalogue: Catalogue::Artifacts(kernels), ..settings.clone() }
}

/// Calls of an operator in a class.
fn calls(unit: &Unit, class: BatchClass, name: &str) -> usize {
    let selection = unit.selections.iter().find(|selection| selection.class == class).expect("the class is compiled");
    selection.choices.iter().filter(|choice| choice.contract.op.name() == name).count()
}

/// Calls of rotation alone, attention alone, both in one, and projection with rotation.
fn shape(unit: &Unit, class: BatchClass) -> [usize; 4] {
    let attend = if matches!(class, BatchClass::Decode { .. }) { "attend_decode" } else { "attend_mixed" };
    ["rope_append", attend, "rope_attend", "qkv_rope_append"].map(|name| calls(unit, class, name))
}

const TWO_KERNELS: [usize; 4] = [LAYERS, LAYERS, 0, 0];
const ONE_KERNEL: [usize; 4] = [0, 0, LAYERS, 0];
const AFTER_PROJECTION: [usize; 4] = [0, LAYERS, 0, LAYERS];

#[test]
fn a_decode_step_of_several_sequences_rotates_and_attends_in_one_kernel() {
    let (graph, settings) = shipped();
    let unit = passes::lower(graph, &with(&settings, rope_attend(&settings, HEADS, 256))).expect("lowers");
    for &class in &settings.classes {
        let expected = match class {
            BatchClass::Decode { seqs: 1 } => AFTER_PROJECTION,
            BatchClass::Decode { .. } => ONE_KERNEL,
            BatchClass::Mixed { .. } => TWO_KERNELS,
        };
        assert_eq!(shape(&unit, class), expected, "{class:?}");
    }
    check_arena(unit.plan.as_ref().expect("a plan"));
    let fused = unit.selections.iter().flat_map(|selection| &selection.choices);
    for choice in fused.filter(|choice| choice.contract.op == Op::RopeAttend { heads: HEADS }) {
        let roles: Vec<Role> = choice.operands.iter().map(|(role, _)| *role).collect();
        for role in [Role::X, Role::RopeTable, Role::KPlane, Role::VPlane, Role::Out, Role::Input(InputSlot::KvSlots)] {
            assert_eq!(roles.iter().filter(|found| **found == role).count(), 1, "{role:?} in {roles:?}");
        }
    }
}

#[test]
fn it_serves_only_the_classes_of_its_domain() {
    let (graph, settings) = shipped();
    let unit = passes::lower(graph, &with(&settings, rope_attend(&settings, HEADS, 8))).expect("lowers");
    for &class in &settings.classes {
        let expected = match class {
            BatchClass::Decode { seqs: 1 } => AFTER_PROJECTION,
            BatchClass::Decode { seqs: 2..=8 } => ONE_KERNEL,
            BatchClass::Decode { .. } | BatchClass::Mixed { .. } => TWO_KERNELS,
        };
        assert_eq!(shape(&unit, class), expected, "{class:?}");
    }
}

#[test]
fn without_such_a_kernel_the_plan_is_what_it_was() {
    let (graph, settings) = shipped();
    let without = passes::lower(graph.clone(), &settings).expect("lowers");
    for &class in settings.classes.iter().filter(|class| class.seqs_max() > 1) {
        assert_eq!(shape(&without, class), TWO_KERNELS, "{class:?}");
    }
    let other_heads = rope_attend(&settings, Heads { q: 8, ..HEADS }, 256);
    let beside = passes::lower(graph, &with(&settings, other_heads)).expect("lowers");
    assert_eq!(beside.plan, without.plan);
}

/// One layer whose queries are read by attention, and by `residual`.
fn layer(residual: &str) -> Graph {
    let text = format!(
        r#"graph "layer" {{
  weight @embed: bf16[64, 16] row_major concat = "embed"
  weight @rope: f32[64, 4, 2] row_major concat
  weight @qkv: bf16[32, 16] row_major concat = "qkv"
  weight @o: bf16[16, 16] row_major concat = "o"
  %h: bf16[tokens, 16] = embed @embed {{dtype = bf16}}
  %x: bf16[tokens, 32] = linear %h @qkv
  %q: bf16[tokens, 16], %c: cache(0) = rope_append %x @rope {{layer = 0, q = 2, kv = 1, d = 8}}
  %a: bf16[tokens, 16] = attend %q %c {{q = 2, kv = 1, d = 8}}
  %o: bf16[tokens, 16] = linear %a %{residual} @o
  %r: bf16[rows, 16] = take_rows %o
  %l: f32[rows, 64] = logits %r @embed
  %s: ids = sample %l {{known = 60}}
}}
"#
    );
    graph::parse(&text).expect("parses")
}

#[test]
fn queries_that_others_read_are_not_hidden_in_a_kernel() {
    let (_, settings) = shipped();
    let kernel = rope_attend(&settings, Heads { q: 2, kv: 1, dim: 8, page_tokens: 16 }, 256);
    let settings = Settings { catalogue: Catalogue::Artifacts(vec![kernel]), ..settings };
    let lacks = |residual: &str, name: &str| {
        let error = passes::lower_through("select_kernels", layer(residual), &settings).expect_err("most kernels are missing");
        let LowerError::MissingKernels { missing, .. } = error else { panic!("{error}") };
        let of_name = |missing: &&Missing| missing.contract.op.name() == name;
        missing.iter().find(of_name).is_some_and(|missing| missing.classes.contains(&BatchClass::Decode { seqs: 8 }))
    };
    for name in ["rope_append", "attend_decode"] {
        assert!(!lacks("h", name), "{name}: one kernel computes both");
        assert!(lacks("q", name), "{name}: the residual stream needs the queries");
    }
}
