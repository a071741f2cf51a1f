//! The plan as lanes: one a batch class, one cell a step, as wide as the bytes that it moves.

use super::colour;
use super::page::{escape, si};
use crate::cli::size;
use crate::cli::tools::{cost, names};
use oxide_bundle::Bundle;
use oxide_bundle::ids::{EntryId, StepId};
use oxide_bundle::plan::{EntryDecl, Step};

const LEGEND: [(&str, &str); 7] = [
    ("embed", "gather"),
    ("norm", "norm"),
    ("linear", "projection"),
    ("rope", "rotary and append"),
    ("attend", "attention"),
    ("sample", "sampling"),
    ("copy", "copy"),
];

pub(super) fn section(bundle: &Bundle, context: u32) -> String {
    let lanes: String = (0..).map(EntryId).zip(bundle.plan().entries()).map(|(id, entry)| lane(bundle, context, id, entry)).collect();
    let used = |name: &str| bundle.plan().entries().iter().flat_map(|entry| &entry.steps).any(|step| step_colour(bundle, step) == name);
    let legend: String =
        LEGEND.iter().filter(|(class, _)| used(class)).map(|(class, name)| format!("<span><i class={class}></i>{name}</span>")).collect();
    format!(
        "<section><h2>Plan</h2><p>One lane a batch class, steps from left to right, each as wide as the bytes that it moves with sequences of {context} tokens. Point at a step to read it.</p><div class=lanes>{lanes}</div><p class=legend>{legend}</p></section>\n"
    )
}

fn lane(bundle: &Bundle, context: u32, id: EntryId, entry: &EntryDecl) -> String {
    let cells: String = (0..).map(StepId).zip(&entry.steps).map(|(step_id, step)| cell(bundle, context, entry, step_id, step)).collect();
    let total = cost::entry(bundle.plan(), entry, context);
    format!(
        "<span><b>{id}</b> {}</span><div class=lane>{cells}</div><span class=total>{} · {}FLOP</span>\n",
        names::class(entry.class),
        size::human(total.bytes()),
        si(total.flops)
    )
}

fn cell(bundle: &Bundle, context: u32, entry: &EntryDecl, id: StepId, step: &Step) -> String {
    let cost = cost::step(bundle.plan(), entry.class, context, step);
    let title = format!("{id} {}\n{} moved, {}FLOP", names::brief(bundle, step), size::human(cost.bytes()), si(cost.flops));
    format!("<i class={} style='flex-grow:{}' title='{}'></i>", step_colour(bundle, step), cost.bytes().max(1), escape(&title))
}

pub(super) fn step_colour(bundle: &Bundle, step: &Step) -> &'static str {
    match step {
        Step::Copy { .. } => "copy",
        Step::Launch { kernel, .. } => bundle.plan().kernels().get(kernel.index()).map_or("copy", |kernel| colour(&kernel.contract.op)),
    }
}
