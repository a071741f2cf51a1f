//! `explain`: one self-contained HTML file that shows a bundle to a person. No script, no external asset.
//!
//! Owns the sheet's order; [`lanes`] draws steps, [`arena`] draws buffers, [`page`] is markup and style.

mod arena;
mod lanes;
mod page;

use super::args::ExplainArgs;
use super::cost::{self, Cost};
use super::names;
use crate::cli::error::CliError;
use crate::cli::paths::refuse_overwriting;
use crate::cli::{output, size};
use crate::model::LoadOptions;
use oxide_bundle::Bundle;
use oxide_bundle::contract::Op;
use oxide_bundle::ids::{EntryId, KernelId};
use oxide_bundle::plan::{EntryDecl, Step};
use page::{escape, si, table};
use serde_json::json;

/// Length of every sequence in the sheet's numbers, where the bundle allows it.
const CONTEXT_SHOWN: u32 = 1024;

pub(super) fn run(args: &ExplainArgs, load: &LoadOptions) -> Result<(), CliError> {
    refuse_overwriting(&args.output, [load.path.as_path()])?;
    let bundle = super::open(load)?;
    let html = sheet(&bundle);
    super::write_file(&args.output, html.as_bytes())?;
    let value = json!({ "seal": bundle.seal().to_string(), "output": args.output, "bytes": html.len() });
    output::report(args.json, &value, || format!("wrote     {} ({})\n", args.output.display(), size::human(html.len() as u64)))
}

fn sheet(bundle: &Bundle) -> String {
    let context = CONTEXT_SHOWN.min(bundle.manifest().limits.context_max);
    let sections = [
        header(bundle),
        memory(bundle),
        lanes::section(bundle, context),
        costs(bundle, context),
        arena::section(bundle),
        kernels(bundle, context),
    ];
    page::document(&bundle.manifest().name, &sections.concat())
}

fn header(bundle: &Bundle) -> String {
    let manifest = bundle.manifest();
    let (model, limits) = (&manifest.model, &manifest.limits);
    let facts = [
        ("model", format!("{}, {} parameters, {} layers, width {}", model.family, si(model.parameters), model.layers, model.hidden)),
        ("heads", format!("{} query, {} key/value, width {}", model.heads, model.kv_heads, model.head_dim)),
        ("types", format!("weights {}, KV {}", model.weight_dtype, model.kv_dtype)),
        ("context", format!("{} tokens (from {})", limits.context_max, limits.context_origin)),
        ("sequences", format!("{} (from {})", limits.seqs_max, limits.seqs_origin)),
        ("compiler", bundle.provenance().compiler.clone()),
    ];
    let rows: String = facts.iter().map(|(name, text)| format!("<dt>{name}</dt><dd>{}</dd>", escape(text))).collect();
    format!(
        "<header><h1>{} <small>for {}</small></h1><p class=seal>seal {}</p><dl>{rows}</dl></header>\n",
        escape(&manifest.name),
        manifest.target,
        bundle.seal()
    )
}

fn memory(bundle: &Bundle) -> String {
    let ledger = &bundle.manifest().ledger;
    let parts = [
        ("weights", ledger.weight_bytes, "linear"),
        ("KV cache", ledger.kv_bytes_default, "attend"),
        ("arena", ledger.arena_bytes, "norm"),
        ("inputs", ledger.input_bytes, "embed"),
        ("outputs", ledger.output_bytes, "sample"),
    ];
    let total: u64 = parts.iter().map(|(_, bytes, _)| bytes).sum();
    let bar: String = parts
        .iter()
        .map(|(name, bytes, class)| format!("<i class={class} style='flex-grow:{bytes}' title='{name}: {bytes} B'></i>"))
        .collect();
    let legend: String = parts
        .iter()
        .map(|(name, bytes, class)| format!("<span><i class={class}></i>{name} <b>{}</b></span>", size::human(*bytes)))
        .collect();
    format!("<section><h2>Memory: {}</h2><div class=bar>{bar}</div><p class=legend>{legend}</p></section>\n", size::human(total))
}

/// Name of an operator's colour.
fn colour(op: &Op) -> &'static str {
    match op {
        Op::Embed { .. } | Op::TakeRows { .. } => "embed",
        Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::QkNorm { .. } => "norm",
        Op::Linear(_) => "linear",
        Op::RopeAppend { .. } | Op::QkvRopeAppend { .. } => "rope",
        Op::Attend { .. } => "attend",
        Op::Sample { .. } => "sample",
    }
}

fn costs(bundle: &Bundle, context: u32) -> String {
    let rows = (0..).map(EntryId).zip(bundle.plan().entries()).map(|(id, entry)| {
        let cost = cost::entry(bundle.plan(), entry, context);
        let per_byte = cost.flops as f64 / cost.bytes().max(1) as f64;
        vec![
            id.to_string(),
            names::class(entry.class),
            entry.steps.len().to_string(),
            size::human(cost.weight_bytes),
            size::human(cost.kv_bytes),
            size::human(cost.arena_bytes),
            si(cost.flops),
            format!("{per_byte:.1}"),
        ]
    });
    let head = ["entry", "class", "steps", "weights read", "KV moved", "arena moved", "FLOPs", "FLOPs/byte"];
    let rows = table(&head, 2, &rows.collect::<Vec<_>>());
    format!(
        "<section><h2>Cost of one step</h2><p>At the bound of each class, sequences of {context} tokens. Arithmetic, not a measurement.</p>{rows}</section>\n"
    )
}

fn kernels(bundle: &Bundle, context: u32) -> String {
    let ids = (0..bundle.plan().kernels().len() as u32).map(KernelId);
    let rows: Vec<Vec<String>> = ids.filter_map(|id| kernel_row(bundle, context, id)).collect();
    let head = ["kernel", "contract", "code", "launches by entry", "bytes", "FLOPs"];
    let rows = table(&head, 4, &rows);
    format!(
        "<section><h2>Kernels</h2><p>Bytes and FLOPs are of one launch in the largest class that uses the kernel.</p>{rows}</section>\n"
    )
}

fn kernel_row(bundle: &Bundle, context: u32, id: KernelId) -> Option<Vec<String>> {
    let kernel = bundle.plan().kernels().get(id.index())?;
    let launches = |entry: &EntryDecl| -> Vec<Cost> {
        let runs = |step: &&Step| matches!(step, Step::Launch { kernel, .. } if *kernel == id);
        entry.steps.iter().filter(runs).map(|step| cost::step(bundle.plan(), entry.class, context, step)).collect()
    };
    let uses: Vec<(EntryId, Vec<Cost>)> = (0..).map(EntryId).zip(bundle.plan().entries().iter().map(launches)).collect();
    let used: Vec<String> =
        uses.iter().filter(|(_, costs)| !costs.is_empty()).map(|(entry, costs)| format!("{entry}\u{a0}×{}", costs.len())).collect();
    let largest = uses.iter().flat_map(|(_, costs)| costs).copied().max_by_key(|cost| cost.flops.max(cost.bytes())).unwrap_or_default();
    let contract = &kernel.contract;
    let text = format!("{contract} weight={} kv={} out={}", contract.weight, contract.kv, contract.out);
    let swatch = format!("<i class={}></i>{id}", colour(&contract.op));
    Some(vec![swatch, escape(&text), code(bundle, id), used.join(", "), size::human(largest.bytes()), si(largest.flops)])
}

fn code(bundle: &Bundle, id: KernelId) -> String {
    let kernel = bundle.plan().kernels().get(id.index());
    let artifact = kernel.and_then(|kernel| kernel.code.as_ref()).and_then(|code| bundle.artifacts().get(code.artifact.index()));
    match artifact {
        None => "built in".to_owned(),
        Some(artifact) => {
            let manifest = &artifact.manifest;
            let threads: u32 = manifest.block.iter().product();
            format!(
                "{}: {} registers, {} shared, {threads} threads",
                artifact.sha256.short(),
                manifest.registers,
                size::human(manifest.shared_bytes.into())
            )
        }
    }
}
