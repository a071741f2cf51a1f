//! Plans of the large profiles, without their checkpoints, and kernel closure on sm90.

use oxide_bundle::ids::BufferId;
use oxide_bundle::manifest::{GoldenStatus, Target};
use oxide_bundle::plan::{RawPlan, Step, Value};
use oxide_compile::compile::lower;
use oxide_compile::hub::Cache;
use oxide_compile::passes::LowerError;
use oxide_compile::profile::Profile;
use oxide_compile::{CompileError, Request};
use std::collections::BTreeMap;

fn request(profile: &str, target: Target) -> Request {
    Request {
        profile: Profile::load(profile).expect("shipped"),
        target,
        model: None,
        output: "unused.oxb".into(),
        context_max: None,
        seqs_max: None,
        golden: GoldenStatus::Unproven,
        artifacts: Some("nowhere".into()),
        cache: Cache::at("nowhere"),
    }
}

fn plan(profile: &str) -> RawPlan {
    lower(&request(profile, Target::Cpu)).expect("lowers").unit.plan.expect("a plan")
}

/// Buffers that live together in an entry share no byte; liveness is computed here from the steps.
fn check_arena(plan: &RawPlan) {
    for entry in &plan.entries {
        let mut lives: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for (index, step) in entry.steps.iter().enumerate() {
            let Step::Launch { operands, .. } = step else { panic!("no copies are planned") };
            for operand in operands {
                if let Value::Buffer(BufferId(id)) = operand.value {
                    lives.entry(id).or_insert((index, index)).1 = index;
                }
            }
        }
        let lives: Vec<_> = lives.into_iter().collect();
        for (i, &(a, (a_first, a_last))) in lives.iter().enumerate() {
            for &(b, (b_first, b_last)) in &lives[i + 1..] {
                let (x, y) = (&plan.buffers[a as usize], &plan.buffers[b as usize]);
                let together = a_first <= b_last && b_first <= a_last;
                let apart = x.offset_bytes + x.size_bytes <= y.offset_bytes || y.offset_bytes + y.size_bytes <= x.offset_bytes;
                assert!(!together || apart, "{} and {} overlap in {:?}", x.label, y.label, entry.class);
            }
        }
    }
}

#[test]
fn large_profiles_plan_on_cpu_in_little_memory() {
    for (profile, layers, arena_max) in [("qwen2.5-0.5b", 24, 40 << 20), ("qwen2.5-1.5b", 28, 44 << 20), ("smollm2-135m", 30, 16 << 20)] {
        let plan = plan(profile);
        check_arena(&plan);
        assert!(plan.arena_bytes <= arena_max, "{profile}: the arena has {} bytes", plan.arena_bytes);
        assert_eq!(plan.entries.len(), 11);
        for entry in &plan.entries {
            assert_eq!(entry.steps.len(), 1 + 8 * layers + 4, "{profile} {:?}", entry.class);
        }
        assert!(plan.buffers.iter().all(|buffer| buffer.offset_bytes.is_multiple_of(256)));
    }
}

#[test]
fn weights_are_aligned_by_tensor_and_by_layer() {
    let plan = plan("qwen2.5-1.5b");
    let mut end = 0;
    for weight in &plan.weights {
        assert!(weight.offset_bytes >= end && weight.offset_bytes.is_multiple_of(256), "{}", weight.name);
        end = weight.offset_bytes + weight.size_bytes;
        if weight.name.ends_with(".attn_norm") {
            assert!(weight.offset_bytes.is_multiple_of(64 << 10), "{} does not start a slab", weight.name);
        }
    }
    let names: Vec<_> = plan.weights.iter().take(3).map(|weight| weight.name.as_str()).collect();
    assert_eq!(names, ["embed", "rope.cos_sin", "layers.0.attn_norm"]);
    assert_eq!(plan.weights.iter().filter(|weight| weight.sources.contains(&"model.embed_tokens.weight".to_owned())).count(), 1);
}

#[test]
fn the_residual_stream_is_updated_in_place() {
    let plan = plan("oxide-tiny");
    let residual = |step: &Step| {
        let Step::Launch { operands, .. } = step else { return None };
        let by = |role| operands.iter().find(|operand| operand.role == role).map(|operand| operand.value);
        Some((by(oxide_bundle::contract::Role::Residual)?, by(oxide_bundle::contract::Role::Out)?))
    };
    for entry in &plan.entries {
        let pairs: Vec<_> = entry.steps.iter().filter_map(residual).collect();
        assert_eq!(pairs.len(), 8);
        assert!(pairs.iter().all(|&(residual, out)| residual == out && residual == pairs[0].0));
    }
}

#[test]
fn every_missing_kernel_of_sm90_is_listed_with_its_classes() {
    let error = lower(&request("qwen2.5-1.5b", Target::Sm90)).expect_err("nothing is there");
    assert_eq!(error.exit_code(), 20);
    let text = error.to_string();
    let CompileError::Lower(LowerError::MissingKernels { missing, .. }) = error else { panic!("{text}") };
    assert_eq!(missing.len(), 12);
    for expected in [
        "linear.bf16[n=2048 k=1536 +bias] -> bf16: decode(1)",
        "linear.bf16[n=151936 k=1536] -> f32",
        "attend_mixed.bf16[q=12 kv=2 d=128 page=16] -> bf16: mixed(",
        "sample.",
    ] {
        assert!(text.contains(expected), "`{expected}` is not in:\n{text}");
    }
    let decode = missing.iter().find(|m| m.contract.op.name() == "attend_decode").expect("listed");
    assert_eq!(decode.classes.len(), 9);
}

#[test]
fn the_committed_artifacts_close_every_shipped_profile() {
    let artifacts = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifacts/sm90");
    for profile in ["oxide-tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"] {
        let wanted = Request { artifacts: Some(artifacts.clone()), ..request(profile, Target::Sm90) };
        let plan = lower(&wanted).unwrap_or_else(|error| panic!("{profile}: {error}")).unit.plan.expect("a plan");
        check_arena(&plan);
        assert!(plan.kernels.iter().all(|kernel| kernel.code.is_some()));
    }
}
