//! The arena over time: one picture a batch class, steps to the right, addresses upwards, a box for each buffer from its
//! first use to its last.

use super::lanes::step_colour;
use super::page::escape;
use crate::cli::size;
use crate::cli::tools::names;
use oxide_bundle::Bundle;
use oxide_bundle::ids::{BufferId, EntryId};
use oxide_bundle::plan::{BufferKind, EntryDecl, Step, Value};

const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 76.0;
const BOTTOM: f64 = 22.0;

/// A buffer's life in one entry.
struct Life {
    id: BufferId,
    first: usize,
    last: usize,
}

pub(super) fn section(bundle: &Bundle) -> String {
    let pictures: String = (0..).map(EntryId).zip(bundle.plan().entries()).map(|(id, entry)| picture(bundle, id, entry)).collect();
    format!(
        "<section><h2>Arena over time: {}</h2><p>Steps to the right, addresses upwards; a box is a buffer from its first use to its last, coloured by the operator that writes it first. Buffers that are never alive together share addresses.</p>{pictures}</section>\n",
        size::human(bundle.plan().arena_bytes())
    )
}

fn lives(bundle: &Bundle, entry: &EntryDecl) -> Vec<Life> {
    let of_step = |step: &Step| -> Vec<BufferId> {
        match step {
            Step::Copy { from, to, .. } => vec![*from, *to],
            Step::Launch { operands, .. } => {
                let buffer = |value| if let Value::Buffer(id) = value { Some(id) } else { None };
                operands.iter().filter_map(|operand| buffer(operand.value)).collect()
            }
        }
    };
    let used: Vec<Vec<BufferId>> = entry.steps.iter().map(of_step).collect();
    let ids = (0..bundle.plan().buffers().len() as u32).map(BufferId);
    let life = |id: BufferId| {
        let first = used.iter().position(|ids| ids.contains(&id))?;
        let last = used.iter().rposition(|ids| ids.contains(&id))?;
        Some(Life { id, first, last })
    };
    ids.filter_map(life).collect()
}

fn picture(bundle: &Bundle, id: EntryId, entry: &EntryDecl) -> String {
    let boxes: String = lives(bundle, entry).iter().map(|life| life_box(bundle, entry, life)).collect();
    let last_entry = id.index() + 1 == bundle.plan().entries().len();
    let open = if id.index() == 0 || last_entry { " open" } else { "" };
    let top = size::human(bundle.plan().arena_bytes());
    let (bottom, end) = (HEIGHT - BOTTOM, entry.steps.len());
    format!(
        "<details{open}><summary>{id} {}</summary><svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{boxes}<text class=axis x=4 y=14>{top}</text><text class=axis x=4 y={bottom}>0 B</text><text class=axis x={LEFT} y={}>step 0</text><text class=axis x={} y={} text-anchor=end>step {end}</text></svg></details>\n",
        names::class(entry.class),
        HEIGHT - 6.0,
        WIDTH - 6.0,
        HEIGHT - 6.0
    )
}

fn life_box(bundle: &Bundle, entry: &EntryDecl, life: &Life) -> String {
    let plan = bundle.plan();
    let Some(buffer) = plan.buffers().get(life.id.index()) else { return String::new() };
    let (steps, arena) = (entry.steps.len().max(1) as f64, plan.arena_bytes().max(1) as f64);
    // State lives from step to step, so it fills the lane.
    let (first, last) = match buffer.kind {
        BufferKind::Scratch => (life.first, life.last + 1),
        BufferKind::State => (0, entry.steps.len()),
    };
    let across = |step: usize| LEFT + (WIDTH - LEFT - 6.0) * step as f64 / steps;
    let up = |bytes: u64| (HEIGHT - BOTTOM) * (1.0 - bytes as f64 / arena);
    let (x, width) = (across(first), across(last) - across(first));
    let (y, height) = (up(buffer.offset_bytes + buffer.size_bytes), up(buffer.offset_bytes) - up(buffer.offset_bytes + buffer.size_bytes));
    let class = entry.steps.get(life.first).map_or("copy", |step| step_colour(bundle, step));
    let title = format!(
        "{} {} {}, at {}, steps {} to {}",
        life.id,
        buffer.label,
        size::human(buffer.size_bytes),
        buffer.offset_bytes,
        life.first,
        life.last
    );
    let mut out = format!(
        "<rect class={class} x={x:.1} y={y:.1} width={width:.1} height={:.1}><title>{}</title></rect>",
        height.max(1.0),
        escape(&title)
    );
    if width > 7.0 * buffer.label.len() as f64 && height > 13.0 {
        out += &format!("<text class=in x={:.1} y={:.1}>{}</text>", x + 4.0, y + height / 2.0 + 4.0, escape(&buffer.label));
    }
    out
}
