//! Text form of a plan, for `--dump plan`, `inspect --plan` and error reports. Write only.

use crate::contract::{Dim, Role};
use crate::ids::{BufferId, EntryId, KernelId, StepId, WeightId};
use crate::plan::{
    BatchClass, BufferDecl, BufferKind, EntryDecl, Extent, KernelDecl, Operand, RawPlan, RowOrder, Step, Sym, Value, WeightDecl,
    WeightLayout,
};
use crate::step::{InputSlot, OutputSlot};
use std::fmt;

/// Prints a plan.
pub struct PlanText<'a>(pub &'a RawPlan);

impl fmt::Display for PlanText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RawPlan { version, bounds, kv, arena_bytes, buffers, weights, kernels, entries } = self.0;
        writeln!(f, "plan v{version}")?;
        write!(f, "bounds tokens={} seqs={} rows={}", bounds.tokens_max, bounds.seqs_max, bounds.rows_max)?;
        write!(f, " pages_per_seq={} bias={} history={}", bounds.pages_per_seq_max, bounds.bias_max, bounds.history_max)?;
        writeln!(f, " vocab={}", bounds.vocab)?;
        writeln!(f, "kv layers={} page={} heads={} d={} {}", kv.layers, kv.page_tokens, kv.kv_heads, kv.head_dim, kv.dtype)?;
        writeln!(f, "arena {arena_bytes}")?;
        rows(f, "buffers", buffers, |f, index, buffer| buffer_row(f, BufferId(index), buffer))?;
        rows(f, "weights", weights, |f, index, weight| weight_row(f, WeightId(index), weight))?;
        rows(f, "kernels", kernels, |f, index, kernel| kernel_row(f, KernelId(index), kernel))?;
        (0..).zip(entries).try_for_each(|(index, entry)| entry_rows(f, EntryId(index), entry))
    }
}

fn rows<T>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    items: &[T],
    row: impl Fn(&mut fmt::Formatter<'_>, u32, &T) -> fmt::Result,
) -> fmt::Result {
    writeln!(f, "{title} {}", items.len())?;
    (0..).zip(items).try_for_each(|(index, item)| row(f, index, item))
}

fn buffer_row(f: &mut fmt::Formatter<'_>, id: BufferId, buffer: &BufferDecl) -> fmt::Result {
    let BufferDecl { label, dtype, elements, kind, offset_bytes, size_bytes } = buffer;
    let kind = match kind {
        BufferKind::Scratch => "",
        BufferKind::State => " state",
    };
    writeln!(f, "  {id} {label} {dtype}[{}] @{offset_bytes} +{size_bytes}{kind}", ExtentText(*elements))
}

fn weight_row(f: &mut fmt::Formatter<'_>, id: WeightId, weight: &WeightDecl) -> fmt::Result {
    let WeightDecl { name, sources, dtype, shape, layout, rows, offset_bytes, size_bytes } = weight;
    let layout = match layout {
        WeightLayout::RowMajor => "row_major",
        WeightLayout::Panel16 => "panel16",
        WeightLayout::PanelK64 => "panel_k64",
    };
    write!(f, "  {id} {name} {dtype}{shape:?} {layout}")?;
    match rows {
        RowOrder::Concat => {}
        RowOrder::Interleave(group) => write!(f, " interleave({group})")?,
        RowOrder::RotaryPairs => f.write_str(" rotary_pairs")?,
    }
    write!(f, " @{offset_bytes} +{size_bytes}")?;
    match sources.is_empty() {
        true => writeln!(f, " computed"),
        false => writeln!(f, " <- {}", sources.join(", ")),
    }
}

fn kernel_row(f: &mut fmt::Formatter<'_>, id: KernelId, kernel: &KernelDecl) -> fmt::Result {
    let contract = &kernel.contract;
    write!(f, "  {id} {contract} weight={} kv={} out={}", contract.weight, contract.kv, contract.out)?;
    match &kernel.code {
        None => writeln!(f),
        Some(code) => writeln!(f, " {}:{}", code.artifact, code.symbol),
    }
}

fn entry_rows(f: &mut fmt::Formatter<'_>, id: EntryId, entry: &EntryDecl) -> fmt::Result {
    match entry.class {
        BatchClass::Decode { seqs } => writeln!(f, "{id} decode seqs={seqs}")?,
        BatchClass::Mixed { tokens, seqs } => writeln!(f, "{id} mixed tokens={tokens} seqs={seqs}")?,
    }
    (0..).zip(&entry.steps).try_for_each(|(index, step)| step_row(f, StepId(index), step))
}

fn step_row(f: &mut fmt::Formatter<'_>, id: StepId, step: &Step) -> fmt::Result {
    match step {
        Step::Launch { kernel, grid, operands } => {
            write!(f, "  {id} {kernel}")?;
            if *grid != [Extent::lit(1); 3] {
                let [x, y, z] = grid.map(ExtentText);
                write!(f, " grid({x}, {y}, {z})")?;
            }
            operands.iter().try_for_each(|operand| operand_text(f, operand))?;
            writeln!(f)
        }
        Step::Copy { from, to, bytes } => writeln!(f, "  {id} copy {from} -> {to} {} bytes", ExtentText(*bytes)),
    }
}

fn operand_text(f: &mut fmt::Formatter<'_>, operand: &Operand) -> fmt::Result {
    match operand.role {
        Role::X => f.write_str(" x=")?,
        Role::Weight => f.write_str(" weight=")?,
        Role::NormWeight => f.write_str(" norm=")?,
        Role::Bias => f.write_str(" bias=")?,
        Role::Residual => f.write_str(" residual=")?,
        Role::Out => f.write_str(" out=")?,
        Role::RopeTable => f.write_str(" rope=")?,
        Role::KPlane => f.write_str(" k=")?,
        Role::VPlane => f.write_str(" v=")?,
        Role::Workspace(index) => write!(f, " workspace{index}=")?,
        Role::Counters(index) => write!(f, " counters{index}=")?,
        Role::Input(slot) => write!(f, " {}=", input_name(slot))?,
        Role::Output(slot) => write!(f, " {}=", output_name(slot))?,
        Role::Scalar(dim) => write!(f, " {}=", scalar_name(dim))?,
    }
    match operand.value {
        Value::Buffer(id) => write!(f, "{id}"),
        Value::Weight(id) => write!(f, "{id}"),
        Value::KPlane(layer) => write!(f, "kv.k{layer}"),
        Value::VPlane(layer) => write!(f, "kv.v{layer}"),
        Value::Input(slot) => write!(f, "in.{}", input_name(slot)),
        Value::Output(slot) => write!(f, "out.{}", output_name(slot)),
        Value::Scalar(extent) => write!(f, "{}", ExtentText(extent)),
    }
}

/// Name of an input slot in dumps.
pub const fn input_name(slot: InputSlot) -> &'static str {
    match slot {
        InputSlot::TokenIds => "token_ids",
        InputSlot::TokenSources => "token_sources",
        InputSlot::Positions => "positions",
        InputSlot::KvSlots => "kv_slots",
        InputSlot::BlockTables => "block_tables",
        InputSlot::QueryStarts => "query_starts",
        InputSlot::KvLens => "kv_lens",
        InputSlot::LogitRows => "logit_rows",
        InputSlot::Sampling => "sampling",
        InputSlot::BiasStarts => "bias_starts",
        InputSlot::BiasIds => "bias_ids",
        InputSlot::BiasValues => "bias_values",
        InputSlot::HistoryStarts => "history_starts",
        InputSlot::HistoryIds => "history_ids",
        InputSlot::HistoryCounts => "history_counts",
        InputSlot::Mask => "mask",
    }
}

/// Name of an output slot in dumps.
pub const fn output_name(slot: OutputSlot) -> &'static str {
    match slot {
        OutputSlot::SampledIds => "sampled_ids",
        OutputSlot::SampledLogprobs => "sampled_logprobs",
        OutputSlot::TopIds => "top_ids",
        OutputSlot::TopLogprobs => "top_logprobs",
    }
}

const fn scalar_name(dim: Dim) -> &'static str {
    match dim {
        Dim::Tokens => "tokens",
        Dim::Seqs => "seqs",
        Dim::Rows => "rows",
        Dim::KvPages => "kv_pages",
        Dim::TableStride => "table_stride",
        Dim::Constant => "constant",
    }
}

/// Prints an extent: `tokens*8/64`, `rows`, `96`.
pub struct ExtentText(pub Extent);

impl fmt::Display for ExtentText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Extent { sym, mul, div } = self.0;
        let sym = match sym {
            None => None,
            Some(Sym::Tokens) => Some("tokens"),
            Some(Sym::Seqs) => Some("seqs"),
            Some(Sym::Rows) => Some("rows"),
            Some(Sym::KvPages) => Some("kv_pages"),
        };
        match (sym, mul) {
            (None, mul) => write!(f, "{mul}")?,
            (Some(sym), 1) => f.write_str(sym)?,
            (Some(sym), mul) => write!(f, "{sym}*{mul}")?,
        }
        if div == 1 { Ok(()) } else { write!(f, "/{div}") }
    }
}
