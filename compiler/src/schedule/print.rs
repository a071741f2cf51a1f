//! Text form of schedules.

use super::{Call, Schedule};
use crate::graph::{layout_name, row_order_name, shape_text};
use oxide_bundle::plan::{BatchClass, BufferKind, Extent, Sym, Value};
use std::fmt::Write as _;

/// Prints buffers, weights and the calls of every entry.
pub fn print(schedule: &Schedule) -> String {
    let mut text = format!("schedule \"{}\" {{\n", schedule.name);
    for (id, buffer) in schedule.buffers.iter().enumerate() {
        let kind = match buffer.kind {
            BufferKind::Scratch => "",
            BufferKind::State => " state",
        };
        let _ = writeln!(text, "  b{id} = {}[{}]{kind}  // {}", buffer.dtype, extent(buffer.elements), buffer.label);
    }
    for (id, weight) in schedule.weights.iter().enumerate() {
        let (layout, rows) = (layout_name(weight.layout), row_order_name(weight.rows));
        let _ = writeln!(text, "  w{id} = {}{} {layout} {rows}  // {}", weight.dtype, shape_text(&weight.shape), weight.name);
    }
    for (id, entry) in schedule.entries.iter().enumerate() {
        let _ = writeln!(text, "  entry e{id} {} {{", class(entry.class));
        for (step, call) in entry.calls.iter().enumerate() {
            let _ = writeln!(text, "    s{step}: {}", call_line(call));
        }
        text.push_str("  }\n");
    }
    text.push_str("}\n");
    text
}

/// A class in words.
pub(crate) fn class(class: BatchClass) -> String {
    match class {
        BatchClass::Decode { seqs } => format!("decode({seqs})"),
        BatchClass::Mixed { tokens, seqs } => format!("mixed({tokens}, {seqs})"),
    }
}

/// An extent in words.
pub(crate) fn extent(extent: Extent) -> String {
    let sym = extent.sym.map(|sym| match sym {
        Sym::Tokens => "tokens",
        Sym::Seqs => "seqs",
        Sym::Rows => "rows",
        Sym::KvPages => "kv_pages",
    });
    let product = match (sym, extent.mul) {
        (None, mul) => mul.to_string(),
        (Some(sym), 1) => sym.to_owned(),
        (Some(sym), mul) => format!("{sym} * {mul}"),
    };
    if extent.div == 1 { product } else { format!("ceil({product} / {})", extent.div) }
}

fn call_line(call: &Call) -> String {
    let operands = call.operands.iter().map(|operand| format!("{:?}={}", operand.role, value(operand.value)));
    let mut line = format!("{} {}", call.contract, operands.collect::<Vec<_>>().join(" "));
    if let Some(artifact) = call.artifact {
        let grid = call.grid.map(extent).join(", ");
        let _ = write!(line, " a{artifact} grid({grid})");
    }
    line
}

fn value(value: Value) -> String {
    match value {
        Value::Buffer(id) => id.to_string(),
        Value::Weight(id) => id.to_string(),
        Value::KPlane(layer) => format!("k[{layer}]"),
        Value::VPlane(layer) => format!("v[{layer}]"),
        Value::Input(slot) => format!("in.{slot:?}"),
        Value::Output(slot) => format!("out.{slot:?}"),
        Value::Scalar(scalar) => extent(scalar),
    }
}
