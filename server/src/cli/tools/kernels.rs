//! `kernels`: every kernel of the plan, the code object behind it, and the steps that run it.

use super::args::JsonArgs;
use super::names;
use crate::cli::error::CliError;
use crate::cli::output;
use crate::model::LoadOptions;
use oxide_bundle::Bundle;
use oxide_bundle::ids::{ArtifactId, EntryId, KernelId};
use oxide_bundle::plan::{EntryDecl, Step};
use oxide_bundle::section::ArtifactEntry;
use serde_json::{Value, json};

pub(super) fn run(args: JsonArgs, load: &LoadOptions) -> Result<(), CliError> {
    let bundle = super::open(load)?;
    output::report(args.json, &to_json(&bundle), || people(&bundle))
}

/// The steps of an entry that run a kernel.
fn steps(entry: &EntryDecl, kernel: KernelId) -> Vec<usize> {
    let runs = |step: &Step| matches!(step, Step::Launch { kernel: found, .. } if *found == kernel);
    entry.steps.iter().enumerate().filter(|(_, step)| runs(step)).map(|(index, _)| index).collect()
}

fn ids(bundle: &Bundle) -> impl Iterator<Item = KernelId> {
    (0..bundle.plan().kernels().len() as u32).map(KernelId)
}

fn artifact_of(bundle: &Bundle, kernel: KernelId) -> Option<ArtifactId> {
    bundle.plan().kernels().get(kernel.index())?.code.as_ref().map(|code| code.artifact)
}

fn to_json(bundle: &Bundle) -> Value {
    let artifacts = (0..).map(ArtifactId).zip(bundle.artifacts()).map(|(id, artifact)| artifact_json(bundle, id, artifact));
    json!({
        "seal": bundle.seal().to_string(),
        "target": bundle.manifest().target,
        "kernels": ids(bundle).map(|id| kernel_json(bundle, id)).collect::<Value>(),
        "artifacts": artifacts.collect::<Value>(),
    })
}

fn kernel_json(bundle: &Bundle, id: KernelId) -> Value {
    let Some(kernel) = bundle.plan().kernels().get(id.index()) else { return Value::Null };
    let contract = &kernel.contract;
    let uses = (0..)
        .map(EntryId)
        .zip(bundle.plan().entries())
        .map(|(entry_id, entry)| json!({ "entry": entry_id.to_string(), "class": names::class(entry.class), "steps": steps(entry, id) }));
    json!({
        "id": id.to_string(),
        "op": contract.op.name(),
        "contract": contract.to_string(),
        "types": { "act": contract.act, "weight": contract.weight, "kv": contract.kv, "out": contract.out },
        "artifact": artifact_of(bundle, id).map(|artifact| artifact.to_string()),
        "symbol": kernel.code.as_ref().map(|code| code.symbol.clone()),
        "uses": uses.filter(|used| used["steps"].as_array().is_some_and(|steps| !steps.is_empty())).collect::<Value>(),
    })
}

fn artifact_json(bundle: &Bundle, id: ArtifactId, artifact: &ArtifactEntry) -> Value {
    let manifest = &artifact.manifest;
    let kernels = ids(bundle).filter(|kernel| artifact_of(bundle, *kernel) == Some(id));
    json!({
        "id": id.to_string(),
        "name": manifest.name,
        "sha256": artifact.sha256.to_string(),
        "size_bytes": artifact.size_bytes,
        "target": manifest.target,
        "driver_min": manifest.driver_min,
        "registers": manifest.registers,
        "shared_bytes": manifest.shared_bytes,
        "spill_bytes": manifest.spill_bytes,
        "block": manifest.block,
        "cluster": manifest.cluster,
        "pdl": manifest.pdl,
        "cooperative": manifest.cooperative,
        "kernels": kernels.map(|kernel| kernel.to_string()).collect::<Vec<_>>(),
    })
}

fn people(bundle: &Bundle) -> String {
    let mut text = format!("target {}, {} kernels", bundle.manifest().target, bundle.plan().kernels().len());
    text += &format!(", {} code objects\n", bundle.artifacts().len());
    text.extend(ids(bundle).map(|id| kernel_text(bundle, id)));
    text
}

fn kernel_text(bundle: &Bundle, id: KernelId) -> String {
    let Some(kernel) = bundle.plan().kernels().get(id.index()) else { return String::new() };
    let contract = &kernel.contract;
    let mut text = format!("{:<5}{contract} weight={} kv={} out={}\n", id.to_string(), contract.weight, contract.kv, contract.out);
    let artifact = artifact_of(bundle, id).and_then(|artifact| Some((artifact, bundle.artifacts().get(artifact.index())?)));
    if let Some((artifact_id, artifact)) = artifact {
        let manifest = &artifact.manifest;
        text += &format!("     code  {artifact_id} {} {}\n", artifact.sha256.short(), manifest.name);
        let threads: u32 = manifest.block.iter().product();
        text += &format!(
            "           {} registers, {} B shared, {} B spilled, {threads} threads, {} B\n",
            manifest.registers, manifest.shared_bytes, manifest.spill_bytes, artifact.size_bytes
        );
    }
    for (entry_id, entry) in (0..).map(EntryId).zip(bundle.plan().entries()) {
        let steps = steps(entry, id);
        if !steps.is_empty() {
            text += &format!(
                "     {:<5} {} times in {}: steps {}\n",
                entry_id.to_string(),
                steps.len(),
                names::class(entry.class),
                list(&steps)
            );
        }
    }
    text
}

/// The first few numbers.
fn list(steps: &[usize]) -> String {
    const SHOWN: usize = 6;
    let shown: Vec<String> = steps.iter().take(SHOWN).map(usize::to_string).collect();
    let more = if steps.len() > SHOWN { ", …" } else { "" };
    shown.join(", ") + more
}
