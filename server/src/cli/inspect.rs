//! `inspect`: what a bundle is, from its verified metadata; the weights are not read.

use super::args::InspectArgs;
use super::error::CliError;
use super::{output, size};
use crate::model::{LoadError, LoadOptions};
use oxide_bundle::manifest::{GenerationDefaults, Manifest};
use oxide_bundle::plan::{BatchClass, Plan};
use oxide_bundle::{Bundle, Mode};
use oxide_runtime::open::{OpenOptions, open_bundle};
use serde_json::{Value, json};

pub(super) fn run(args: &InspectArgs, load: &LoadOptions) -> Result<(), CliError> {
    let options = OpenOptions { access: load.access, mode: Mode::Metadata, expect: load.expect };
    let opened = open_bundle(&load.path, options).map_err(LoadError::from)?;
    let value = describe(&opened.bundle)?;
    output::report(args.json, &value, || people(&opened.bundle))
}

fn describe(bundle: &Bundle) -> Result<Value, CliError> {
    let manifest = bundle.manifest();
    let mut value = serde_json::to_value(manifest).map_err(|e| CliError::Engine(e.to_string()))?;
    value["generation"] = generation(&manifest.generation);
    value["model"]["rope_theta"] = json!(manifest.model.rope_theta.get());
    value["seal"] = json!(bundle.seal().to_string());
    value["sections"] = sections(bundle);
    value["entries"] = entries(bundle.plan());
    value["kernels"] = bundle.plan().kernels().iter().map(|kernel| json!(kernel.contract.to_string())).collect();
    value["tensors"] = json!(bundle.tensors().len());
    value["file_bytes"] = json!((**bundle.bytes()).as_ref().len());
    value["golden_vectors"] = golden_counts(bundle);
    value["provenance"] =
        json!({ "compiler": bundle.provenance().compiler, "options": bundle.provenance().options, "inputs": bundle.provenance().inputs });
    value["chat_template"] = json!(bundle.template().chat_template.is_some());
    value["tool_dialect"] = json!(bundle.template().tool_dialect);
    Ok(value)
}

fn generation(defaults: &GenerationDefaults) -> Value {
    let GenerationDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = defaults;
    let round = |number: f32| number.to_string().parse::<f64>().unwrap_or(f64::from(number));
    json!({
        "temperature": round(temperature.get()),
        "top_p": round(top_p.get()),
        "top_k": top_k,
        "min_p": round(min_p.get()),
        "repetition_penalty": round(repetition_penalty.get()),
    })
}

fn golden_counts(bundle: &Bundle) -> Value {
    let golden = bundle.golden();
    json!({ "greedy": golden.greedy.len(), "tokenizer": golden.tokenizer.len(), "template": golden.template.len() })
}

fn sections(bundle: &Bundle) -> Value {
    bundle
        .sections()
        .iter()
        .map(|section| json!({ "kind": section.kind.to_string(), "offset": section.offset, "length": section.length }))
        .collect()
}

fn entries(plan: &Plan) -> Value {
    plan.entries().iter().map(|entry| json!({ "class": class_name(entry.class), "steps": entry.steps.len() })).collect()
}

fn class_name(class: BatchClass) -> String {
    match class {
        BatchClass::Decode { seqs } => format!("decode {seqs}"),
        BatchClass::Mixed { tokens, seqs } => format!("mixed {tokens} tokens, {seqs} seqs"),
    }
}

fn people(bundle: &Bundle) -> String {
    let manifest: &Manifest = bundle.manifest();
    let (model, limits, ledger) = (&manifest.model, &manifest.limits, &manifest.ledger);
    let classes: Vec<String> = bundle.plan().entries().iter().map(|entry| class_name(entry.class)).collect();
    let lines = [
        ("name", format!("{} (profile {}, target {})", manifest.name, manifest.profile, manifest.target)),
        ("seal", bundle.seal().to_string()),
        ("golden", format!("{:?}", manifest.golden).to_lowercase()),
        (
            "model",
            format!(
                "{}, {} parameters, {} layers, hidden {}, heads {}/{} of {}",
                model.family, model.parameters, model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim
            ),
        ),
        ("vocabulary", format!("{} ids ({} known to the tokenizer)", model.vocab, model.vocab_known)),
        ("context", format!("{} tokens (from {})", limits.context_max, limits.context_origin)),
        ("sequences", format!("{} (from {})", limits.seqs_max, limits.seqs_origin)),
        ("classes", classes.join("; ")),
        ("weights", size::human(ledger.weight_bytes)),
        ("arena", size::human(ledger.arena_bytes)),
        ("in/outputs", format!("{} / {}", size::human(ledger.input_bytes), size::human(ledger.output_bytes))),
        (
            "kv cache",
            format!(
                "{} ({} pages of {} tokens, {} B a token)",
                size::human(ledger.kv_bytes_default),
                ledger.kv_pages_default,
                limits.page_tokens,
                ledger.kv_bytes_per_token
            ),
        ),
        ("compiler", bundle.provenance().compiler.clone()),
    ];
    lines.into_iter().map(|(name, text)| format!("{name:<12}{text}\n")).collect()
}
