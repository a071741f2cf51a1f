//! Row blocks of a weight: reads rows of the sources in the weight's row order, as BF16, and lays them out.

use super::WeightError;
use crate::checkpoint::{SourceType, Tensor};
use half::{bf16, f16};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{RowOrder, WeightDecl, WeightLayout};
use rayon::prelude::*;

/// Rows of a block: the height of a [`WeightLayout::Panel16`] panel.
const BLOCK_ROWS: usize = 16;
/// Columns of a [`WeightLayout::PanelK64`] panel.
const PANEL_COLUMNS: usize = 64;
/// Bytes of a BF16.
const ELEMENT: usize = 2;

/// A weight and the tensors it is made from.
pub(super) struct Blocks<'a> {
    decl: &'a WeightDecl,
    sources: Vec<&'a Tensor>,
    rows: usize,
    columns: usize,
}

/// A run of rows that are neighbours in a source and in the weight.
struct Run {
    source: usize,
    first: usize,
    count: usize,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(decl: &'a WeightDecl, sources: Vec<&'a Tensor>) -> Result<Self, WeightError> {
        let rows = decl.shape.first().map_or(0, |&n| n as usize);
        let columns = decl.shape.iter().skip(1).map(|&n| n as usize).product();
        let blocks = Self { decl, sources, rows, columns };
        blocks.problem().map_or(Ok(()), |problem| Err(WeightError::Plan { weight: decl.name.clone(), problem }))?;
        Ok(blocks)
    }

    fn problem(&self) -> Option<String> {
        let heights: Vec<usize> = self.sources.iter().map(|source| source.shape.first().map_or(0, |&n| n as usize)).collect();
        if self.decl.dtype != DType::Bf16 {
            return Some(format!("element type {} is not made from tensors", self.decl.dtype));
        }
        if heights.iter().sum::<usize>() != self.rows {
            return Some(format!("its sources have {} rows, the plan says {}", heights.iter().sum::<usize>(), self.rows));
        }
        match (self.decl.rows, self.decl.layout) {
            (RowOrder::RotaryPairs, _) => Some("row order rotary_pairs is not implemented".to_owned()),
            (RowOrder::Interleave(group), _) if group == 0 || heights.len() != 2 || heights.iter().any(|n| n % group as usize != 0) => {
                Some(format!("rows of {heights:?} cannot alternate in groups of {group}"))
            }
            (_, WeightLayout::Panel16) if !self.columns.is_multiple_of(2) => Some(format!("{} columns are odd", self.columns)),
            (_, WeightLayout::PanelK64) if !self.columns.is_multiple_of(PANEL_COLUMNS) => {
                Some(format!("{} columns, not a multiple of 64", self.columns))
            }
            _ => None,
        }
    }

    /// Parts of whole blocks, from the first row to the last.
    pub(super) fn row_parts(&self, part_bytes: usize) -> impl Iterator<Item = Result<Vec<u8>, WeightError>> {
        let blocks = self.rows.div_ceil(BLOCK_ROWS);
        let block_bytes = BLOCK_ROWS * self.columns * ELEMENT;
        let step = (part_bytes / block_bytes.max(1)).max(1);
        (0..blocks).step_by(step).map(move |first| self.row_part(first, step.min(blocks - first), block_bytes))
    }

    fn row_part(&self, first: usize, count: usize, block_bytes: usize) -> Result<Vec<u8>, WeightError> {
        let padded = self.decl.layout == WeightLayout::Panel16;
        let rows = (self.rows - first * BLOCK_ROWS).min(count * BLOCK_ROWS);
        let mut part = vec![0; if padded { count * block_bytes } else { rows * self.columns * ELEMENT }];
        part.par_chunks_mut(block_bytes).enumerate().try_for_each(|(index, out)| self.block(first + index, out))?;
        Ok(part)
    }

    fn block(&self, block: usize, out: &mut [u8]) -> Result<(), WeightError> {
        let first = block * BLOCK_ROWS;
        let count = BLOCK_ROWS.min(self.rows - first);
        if self.decl.layout == WeightLayout::RowMajor {
            return self.read_rows(first, count, out);
        }
        let mut rows = vec![0; count * self.columns * ELEMENT];
        self.read_rows(first, count, &mut rows)?;
        panel16(&rows, self.columns, out);
        Ok(())
    }

    /// Parts of whole panels of 64 columns. Each part reads every row once.
    pub(super) fn column_parts(&self, part_bytes: usize) -> impl Iterator<Item = Result<Vec<u8>, WeightError>> {
        let panels = self.columns / PANEL_COLUMNS;
        let panel_bytes = self.rows * PANEL_COLUMNS * ELEMENT;
        let step = (2 * part_bytes / panel_bytes.max(1)).max(1);
        (0..panels).step_by(step).map(move |first| self.column_part(first, step.min(panels - first), panel_bytes))
    }

    fn column_part(&self, first: usize, count: usize, panel_bytes: usize) -> Result<Vec<u8>, WeightError> {
        let width = count * PANEL_COLUMNS * ELEMENT;
        let row_bytes = self.columns * ELEMENT;
        let start = first * PANEL_COLUMNS * ELEMENT;
        let mut slice = vec![0; self.rows * width];
        slice.par_chunks_mut(BLOCK_ROWS * width).enumerate().try_for_each(|(block, out)| {
            let count = BLOCK_ROWS.min(self.rows - block * BLOCK_ROWS);
            let mut rows = vec![0; count * row_bytes];
            self.read_rows(block * BLOCK_ROWS, count, &mut rows)?;
            for (to, from) in out.chunks_exact_mut(width).zip(rows.chunks_exact(row_bytes)) {
                to.copy_from_slice(&from[start..start + width]);
            }
            Ok(())
        })?;
        let mut part = vec![0; count * panel_bytes];
        part.par_chunks_mut(panel_bytes).enumerate().for_each(|(panel, out)| {
            let column = panel * PANEL_COLUMNS * ELEMENT;
            for (to, from) in out.chunks_exact_mut(PANEL_COLUMNS * ELEMENT).zip(slice.chunks_exact(width)) {
                to.copy_from_slice(&from[column..column + PANEL_COLUMNS * ELEMENT]);
            }
        });
        Ok(part)
    }

    /// Rows of the weight as BF16, row-major.
    fn read_rows(&self, first: usize, count: usize, out: &mut [u8]) -> Result<(), WeightError> {
        let mut rest = out;
        let mut row = first;
        while row < first + count {
            let run = self.run(row, first + count - row);
            let (head, tail) = rest.split_at_mut(run.count * self.columns * ELEMENT);
            self.read_run(&run, head)?;
            rest = tail;
            row += run.count;
        }
        Ok(())
    }

    /// The longest run from `row` on, of at most `count` rows.
    fn run(&self, row: usize, count: usize) -> Run {
        match self.decl.rows {
            RowOrder::Interleave(group) => {
                let group = group as usize;
                let (cycle, within) = (row / group, row % group);
                Run { source: cycle % 2, first: cycle / 2 * group + within, count: count.min(group - within) }
            }
            RowOrder::Concat | RowOrder::RotaryPairs => {
                let mut first = row;
                for (source, tensor) in self.sources.iter().enumerate() {
                    let height = tensor.shape.first().map_or(0, |&n| n as usize);
                    if first < height {
                        return Run { source, first, count: count.min(height - first) };
                    }
                    first -= height;
                }
                unreachable!("the sources' rows add up to the weight's")
            }
        }
    }

    fn read_run(&self, run: &Run, out: &mut [u8]) -> Result<(), WeightError> {
        let tensor = self.sources[run.source];
        let dtype = tensor.dtype.ok_or_else(|| WeightError::Plan {
            weight: self.decl.name.clone(),
            problem: format!("element type {} is not converted", tensor.dtype_name),
        })?;
        let size = dtype.bytes();
        let offset = tensor.offset + (run.first * self.columns) as u64 * size;
        let error = |source| WeightError::Read { weight: self.decl.name.clone(), file: tensor.file.name.clone(), source };
        if dtype == SourceType::Bf16 {
            return tensor.file.blob.read_at(out, offset).map_err(error);
        }
        let mut raw = vec![0; out.len() / ELEMENT * size as usize];
        tensor.file.blob.read_at(&mut raw, offset).map_err(error)?;
        convert(dtype, &raw, out);
        Ok(())
    }
}

/// Converts to BF16, rounding to nearest, ties to even.
fn convert(dtype: SourceType, raw: &[u8], out: &mut [u8]) {
    let (to, _) = out.as_chunks_mut::<2>();
    match dtype {
        SourceType::Bf16 => out.copy_from_slice(raw),
        SourceType::F16 => {
            for (to, from) in to.iter_mut().zip(raw.as_chunks::<2>().0) {
                *to = bf16::from_f32(f16::from_le_bytes(*from).to_f32()).to_le_bytes();
            }
        }
        SourceType::F32 => {
            for (to, from) in to.iter_mut().zip(raw.as_chunks::<4>().0) {
                *to = bf16::from_f32(f32::from_le_bytes(*from)).to_le_bytes();
            }
        }
    }
}

/// Up to sixteen rows of BF16 → `[k/2][16][2]`; rows that are not there stay zero.
fn panel16(rows: &[u8], columns: usize, out: &mut [u8]) {
    const PAIR: usize = 2 * ELEMENT;
    for (row, values) in rows.chunks_exact(columns * ELEMENT).enumerate() {
        let pairs = out.chunks_exact_mut(BLOCK_ROWS * PAIR);
        for (to, pair) in pairs.zip(values.as_chunks::<PAIR>().0) {
            to[row * PAIR..][..PAIR].copy_from_slice(pair);
        }
    }
}
