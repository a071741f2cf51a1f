//! Causal attention over the paged cache, with an online softmax in f32.
//!
//! ```text
//! item   rows of one sequence × the query heads of one key/value head × a run of blocks
//! block  128 consecutive positions, counted from the start of the sequence
//! ```
//!
//! Per block and query head: scores, their maximum `m`, `l = Σ exp(s - m)` and `Σ exp(s - m) · v`; blocks
//! are folded in rising order. Few long sequences are split into one item a block, whose results wait in
//! scratch memory and are folded by the same function in the same order.
//!
//! **Invariant:** block borders depend on positions alone, a query row's arithmetic inside a block on
//! its own visible length alone. So the result of a row is the same bit for bit in any batch, chunk or split.

use super::rope::HEAD_DIM_MAX;
use super::simd::LANES;
use super::table::Kernels;
use crate::device::cpu::kv::PlaneRef;
use crate::device::cpu::pool::{Pool, Scatter};

/// Positions of a block.
pub(crate) const BLOCK: usize = 128;
/// Query rows times heads of one item at most.
pub(crate) const ROW_HEADS_MAX: usize = 32;
/// Items a thread under which long sequences are split by blocks.
const SPLIT_ITEMS_PER_THREAD: usize = 4;
/// Before the accumulators of a split row-head: its `m` and `l`.
pub(crate) const PARTIAL_HEAD: usize = 2;

/// Memory that calls reuse.
pub(crate) struct AttendScratch {
    items: Vec<AttendItem>,
    partials: Vec<f32>,
}

/// Largest shapes that an [`AttendScratch`] must serve.
#[derive(Copy, Clone, Debug)]
pub(crate) struct AttendBounds {
    pub(crate) tokens: usize,
    pub(crate) seqs: usize,
    pub(crate) context: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) threads: usize,
}

impl AttendScratch {
    /// Memory for all calls within `bounds`.
    pub(crate) fn new(bounds: AttendBounds) -> Self {
        let AttendBounds { tokens, seqs, context, q_heads, kv_heads, head_dim, threads } = bounds;
        let blocks = context.div_ceil(BLOCK);
        let split_seqs = seqs.min((threads * SPLIT_ITEMS_PER_THREAD).div_ceil(kv_heads.max(1)));
        let items = (tokens + seqs) * kv_heads + split_seqs * kv_heads * blocks;
        let partials = split_seqs * q_heads * blocks * (PARTIAL_HEAD + head_dim);
        Self { items: Vec::with_capacity(items), partials: vec![0.0; partials] }
    }
}

/// One call. `x` and `out` are `[rows, q·head_dim]`, planes `[pages, page_tokens, kv, head_dim]`.
pub(crate) struct AttendCall<'a> {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_tokens: usize,
    pub(crate) x: &'a [f32],
    pub(crate) k_plane: PlaneRef<'a>,
    pub(crate) v_plane: PlaneRef<'a>,
    /// `[seqs + 1]`.
    pub(crate) query_starts: &'a [u32],
    /// `[seqs]`.
    pub(crate) kv_lens: &'a [u32],
    /// `[seqs, table_stride]`.
    pub(crate) block_tables: &'a [u32],
    pub(crate) table_stride: usize,
    pub(crate) out: &'a mut [f32],
    pub(crate) scratch: &'a mut AttendScratch,
}

/// An [`AttendCall`] as items see it.
pub(crate) struct AttendTask<'a> {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_tokens: usize,
    pub(crate) x: &'a [f32],
    pub(crate) k_plane: PlaneRef<'a>,
    pub(crate) v_plane: PlaneRef<'a>,
    pub(crate) block_tables: &'a [u32],
    pub(crate) table_stride: usize,
    pub(crate) out: Scatter<'a, f32>,
    pub(crate) partials: Scatter<'a, f32>,
}

/// What one task computes.
#[derive(Copy, Clone, Debug)]
pub(crate) struct AttendItem {
    pub(crate) seq: usize,
    pub(crate) kv_head: usize,
    /// First row, in the batch.
    pub(crate) row: usize,
    pub(crate) rows: usize,
    /// Positions that the first row sees; each further row sees one more.
    pub(crate) visible: usize,
    pub(crate) work: Work,
}

#[derive(Copy, Clone, Debug)]
pub(crate) enum Work {
    /// All blocks, result to `out`.
    Whole,
    /// One block, result to the partials at `at`.
    Block { block: usize, at: usize },
    /// Folds `blocks` partials from `at` on, result to `out`.
    Fold { blocks: usize, at: usize },
}

/// Runs attention on all threads.
///
/// # Panics
/// If a slice is shorter than the shape says, or a page is out of range.
pub(crate) fn attend(kernels: &Kernels, pool: &mut Pool, call: AttendCall<'_>) {
    let AttendCall { q_heads, kv_heads, head_dim, page_tokens, x, k_plane, v_plane, .. } = call;
    let AttendCall { query_starts, kv_lens, block_tables, table_stride, out, scratch, .. } = call;
    let rows = query_starts.last().map_or(0, |rows| *rows as usize);
    let group = q_heads / kv_heads;
    assert!(group * kv_heads == q_heads && group <= ROW_HEADS_MAX && head_dim <= HEAD_DIM_MAX && head_dim.is_multiple_of(LANES));
    assert!(x.len() >= rows * q_heads * head_dim && query_starts.len() == kv_lens.len() + 1, "operand too short");
    let AttendScratch { items, partials } = scratch;
    items.clear();
    let seqs = Sequences { query_starts, kv_lens, kv_heads, rows_per_item: ROW_HEADS_MAX / group };
    let split = kv_lens.len() * kv_heads < pool.threads() * SPLIT_ITEMS_PER_THREAD;
    let folds = if split { seqs.list_split(items, group * (PARTIAL_HEAD + head_dim), partials.len()) } else { None };
    let folds = folds.unwrap_or_else(|| seqs.list_whole(items));
    let (out, partials) = (Scatter::new(out), Scatter::new(partials.as_mut_slice()));
    let task = AttendTask { q_heads, kv_heads, head_dim, page_tokens, x, k_plane, v_plane, block_tables, table_stride, out, partials };
    let (parts, folds) = items.split_at(folds);
    for items in [parts, folds] {
        // SAFETY: the table was chosen for this processor; items write rows, heads and partials of their own.
        pool.run_all(items.len(), &|index| unsafe { (kernels.attend_item)(&task, &items[index]) });
    }
}

/// The sequences of a call, and how their rows are cut.
struct Sequences<'a> {
    query_starts: &'a [u32],
    kv_lens: &'a [u32],
    kv_heads: usize,
    rows_per_item: usize,
}

impl Sequences<'_> {
    /// Sequence, rows and visible positions of the first row.
    fn each(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>, usize)> {
        self.kv_lens.iter().zip(self.query_starts.windows(2)).enumerate().map(|(seq, (kv_len, starts))| {
            let rows = starts[0] as usize..starts[1] as usize;
            let visible = (*kv_len as usize + 1).saturating_sub(rows.len());
            (seq, rows, visible)
        })
    }

    /// Lists items that each run over all blocks; returns their number. The longest rows come first, so
    /// that threads end together.
    fn list_whole(&self, items: &mut Vec<AttendItem>) -> usize {
        items.clear();
        for (seq, rows, visible) in self.each() {
            for first in rows.clone().step_by(self.rows_per_item).rev() {
                let count = (rows.end - first).min(self.rows_per_item);
                for kv_head in 0..self.kv_heads {
                    let visible = visible + first - rows.start;
                    items.push(AttendItem { seq, kv_head, row: first, rows: count, visible, work: Work::Whole });
                }
            }
        }
        items.len()
    }

    /// Lists items of one block each and the items that fold them, if every sequence has one row, any is
    /// longer than a block, and the partials fit. Returns the number of the former.
    fn list_split(&self, items: &mut Vec<AttendItem>, partial: usize, partials_max: usize) -> Option<usize> {
        let blocks_of = |visible: usize| visible.div_ceil(BLOCK);
        let mut blocks_sum = 0;
        let mut is_long = false;
        for (_, rows, visible) in self.each() {
            if rows.len() != 1 {
                return None;
            }
            blocks_sum += blocks_of(visible);
            is_long |= visible > BLOCK;
        }
        if !is_long || blocks_sum * self.kv_heads * partial > partials_max {
            return None;
        }
        for fold in [false, true] {
            let mut at = 0;
            for (seq, rows, visible) in self.each() {
                for kv_head in 0..self.kv_heads {
                    let item = |work| AttendItem { seq, kv_head, row: rows.start, rows: 1, visible, work };
                    let blocks = blocks_of(visible);
                    if fold {
                        items.push(item(Work::Fold { blocks, at }));
                    } else {
                        items.extend((0..blocks).map(|block| item(Work::Block { block, at: at + block * partial })));
                    }
                    at += blocks * partial;
                }
            }
        }
        Some(blocks_sum * self.kv_heads)
    }
}
