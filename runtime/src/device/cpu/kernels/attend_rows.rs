//! The arithmetic of one attention item: scores, weights and weighted values of a block, and their fold.
//!
//! Each row-head's operations are the same, in the same order, whatever other row-heads the item has:
//! tiles put chains side by side, and what a row-head does not see is never added to it.

use super::attend::{AttendItem, AttendTask, BLOCK, PARTIAL_HEAD, ROW_HEADS_MAX, Work};
use super::rope::HEAD_DIM_MAX;
use super::simd::{LANES, Simd, prefetch};
use crate::device::cpu::kv::PlaneRef;
use std::mem::MaybeUninit;

/// Score chains side by side.
const SCORE_ROWS: usize = 8;
/// Value chains side by side: rows × vectors.
const VALUE_ROWS: usize = 4;
const VALUE_VECTORS: usize = 4;
/// Bytes of a cache line.
const CACHE_LINE: usize = 64;
/// How many positions ahead of their use keys are fetched; values are fetched while keys are at work.
const FETCH_AHEAD: usize = 2 * LANES;
/// An element of a plane.
trait Element: Copy {
    /// Sixteen of them as f32.
    ///
    /// # Safety
    /// As for [`Simd::load`].
    unsafe fn load<V: Simd>(from: *const Self) -> V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const Self) -> V {
        // SAFETY: by the caller.
        unsafe { V::load(from) }
    }
}

impl Element for u16 {
    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const Self) -> V {
        // SAFETY: by the caller.
        unsafe { V::load_bf16(from) }
    }
}

/// Computes one item.
///
/// # Safety
/// `V`'s instruction set must be available, and no other item that writes the same rows, heads and
/// partials may run.
#[inline(always)]
pub(crate) unsafe fn attend_item<V: Simd>(task: &AttendTask<'_>, item: &AttendItem) {
    // SAFETY: by the caller.
    unsafe {
        match (task.k_plane, task.v_plane) {
            (PlaneRef::F32(k), PlaneRef::F32(v)) => Rows::new(task, item).run::<V, f32>(k, v),
            (PlaneRef::Bf16(k), PlaneRef::Bf16(v)) => Rows::new(task, item).run::<V, u16>(k, v),
            (PlaneRef::F32(_), PlaneRef::Bf16(_)) | (PlaneRef::Bf16(_), PlaneRef::F32(_)) => unreachable!("a pool has one element type"),
        }
    }
}

/// The row-heads of one item and where they stand: number `r` is row `r / group`, head `r % group`.
struct Rows<'a> {
    task: &'a AttendTask<'a>,
    item: &'a AttendItem,
    group: usize,
    count: usize,
    m: [f32; ROW_HEADS_MAX],
    l: [f32; ROW_HEADS_MAX],
    /// Whether a block was folded in.
    started: [bool; ROW_HEADS_MAX],
}

/// Memory of one block.
struct Block {
    /// Element offset of each position's key and value.
    offsets: [usize; BLOCK],
    positions: usize,
    /// Positions that each row-head sees.
    valid: [usize; ROW_HEADS_MAX],
    /// Scores, then weights: `[row-head][BLOCK]`.
    scores: MaybeUninit<[f32; ROW_HEADS_MAX * BLOCK]>,
    /// Factors of what was folded and of this block.
    factors: [[f32; 2]; ROW_HEADS_MAX],
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn new(task: &'a AttendTask<'a>, item: &'a AttendItem) -> Self {
        let group = task.q_heads / task.kv_heads;
        let count = group * item.rows;
        Self { task, item, group, count, m: [0.0; ROW_HEADS_MAX], l: [0.0; ROW_HEADS_MAX], started: [false; ROW_HEADS_MAX] }
    }

    /// Where a row-head's query and output start.
    #[inline(always)]
    fn at(&self, row_head: usize) -> usize {
        let row = self.item.row + row_head / self.group;
        let head = self.item.kv_head * self.group + row_head % self.group;
        (row * self.task.q_heads + head) * self.task.head_dim
    }

    #[inline(always)]
    unsafe fn run<V: Simd, E: Element>(&mut self, k: &[E], v: &[E]) {
        let mut sums = MaybeUninit::<[f32; ROW_HEADS_MAX * HEAD_DIM_MAX]>::uninit();
        let sums = sums.as_mut_ptr().cast::<f32>();
        let partial = PARTIAL_HEAD + self.task.head_dim;
        // SAFETY: `sums` has room for every row-head; partials belong to one item, or were written by
        // an earlier run of the pool.
        unsafe {
            match self.item.work {
                Work::Whole => {
                    let seen = self.item.visible + self.item.rows - 1;
                    for block in 0..seen.div_ceil(BLOCK) {
                        self.block::<V, E>(k, v, block, sums);
                    }
                    self.write_out::<V>(sums);
                }
                Work::Block { block, at } => {
                    self.block::<V, E>(k, v, block, sums);
                    let to = self.task.partials.slice_mut(at, self.count * partial);
                    for (r, to) in to.chunks_exact_mut(partial).enumerate() {
                        to[0] = self.m[r];
                        to[1] = self.l[r];
                        copy::<V>(sums.add(r * self.task.head_dim), &mut to[PARTIAL_HEAD..]);
                    }
                }
                Work::Fold { blocks, at } => {
                    let from = self.task.partials.slice_mut(at, blocks * self.count * partial);
                    for block in from.chunks_exact(self.count * partial) {
                        for (r, from) in block.chunks_exact(partial).enumerate() {
                            let factors = self.fold_scalars::<V>(r, from[0], from[1]);
                            let to = sums.add(r * self.task.head_dim);
                            for i in (0..self.task.head_dim).step_by(LANES) {
                                fold_sum(to.add(i), V::load(from[PARTIAL_HEAD + i..][..LANES].as_ptr()), factors);
                            }
                        }
                    }
                    self.write_out::<V>(sums);
                }
            }
        }
    }

    /// Attends to one block and folds it in.
    #[inline(always)]
    unsafe fn block<V: Simd, E: Element>(&mut self, k: &[E], v: &[E], block: usize, sums: *mut f32) {
        let mut memory = Block {
            offsets: [0; BLOCK],
            positions: 0,
            valid: [0; ROW_HEADS_MAX],
            scores: MaybeUninit::uninit(),
            factors: [[0.0; 2]; ROW_HEADS_MAX],
        };
        self.locate(block, &mut memory, k.len().min(v.len()));
        let scores = memory.scores.as_mut_ptr().cast::<f32>();
        // SAFETY: `locate` checked every offset against both planes.
        unsafe {
            self.scores::<V, E>(k, v, &memory, scores);
            self.weights::<V>(&mut memory, scores);
            self.values::<V, E>(v, &memory, scores, sums);
        }
    }

    /// Finds the block's positions in the pages.
    #[inline(always)]
    fn locate(&self, block: usize, memory: &mut Block, plane_len: usize) {
        let AttendTask { kv_heads, head_dim, page_tokens, block_tables, table_stride, .. } = *self.task;
        let start = block * BLOCK;
        let seen = self.item.visible + self.item.rows - 1;
        memory.positions = seen.saturating_sub(start).min(BLOCK);
        for (r, valid) in memory.valid[..self.count].iter_mut().enumerate() {
            *valid = (self.item.visible + r / self.group).saturating_sub(start).min(BLOCK);
        }
        let pages = &block_tables[self.item.seq * table_stride..][..table_stride];
        let (mut page, mut within) = (start / page_tokens, start % page_tokens);
        for offset in &mut memory.offsets[..memory.positions] {
            *offset = ((pages[page] as usize * page_tokens + within) * kv_heads + self.item.kv_head) * head_dim;
            assert!(*offset + head_dim <= plane_len, "page out of range");
            within += 1;
            if within == page_tokens {
                (page, within) = (page + 1, 0);
            }
        }
    }

    /// `scores[r][j] = q[r] · k[j] / sqrt(head_dim)`, sixteen keys at a time.
    #[inline(always)]
    unsafe fn scores<V: Simd, E: Element>(&self, k: &[E], v: &[E], memory: &Block, scores: *mut f32) {
        let dim = self.task.head_dim;
        let mut keys = MaybeUninit::<[f32; HEAD_DIM_MAX * LANES]>::uninit();
        let keys = keys.as_mut_ptr().cast::<f32>();
        for first in (0..memory.positions).step_by(LANES) {
            self.fetch(k, memory, first + FETCH_AHEAD);
            self.fetch(v, memory, first);
            // SAFETY: offsets were checked by `locate`; `keys` has room for sixteen of them.
            unsafe {
                for i in (0..dim).step_by(LANES) {
                    let rows = std::array::from_fn(|lane| {
                        // Past the end, any key will do: its score is not used.
                        let position = (first + lane).min(memory.positions - 1);
                        E::load::<V>(k.as_ptr().add(memory.offsets[position] + i))
                    });
                    for (lane, column) in V::transpose(rows).into_iter().enumerate() {
                        column.store(keys.add((i + lane) * LANES));
                    }
                }
                let mut r = 0;
                while r < self.count {
                    r += match self.count - r {
                        1 => self.score_rows::<V, 1>(r, keys, scores.add(first)),
                        2 => self.score_rows::<V, 2>(r, keys, scores.add(first)),
                        3 => self.score_rows::<V, 3>(r, keys, scores.add(first)),
                        4..SCORE_ROWS => self.score_rows::<V, 4>(r, keys, scores.add(first)),
                        _ => self.score_rows::<V, SCORE_ROWS>(r, keys, scores.add(first)),
                    };
                }
            }
        }
    }

    /// Asks for sixteen rows of a plane from position `first` on. Pages lie anywhere, so nothing else
    /// would fetch them ahead of their use.
    #[inline(always)]
    fn fetch<E: Element>(&self, plane: &[E], memory: &Block, first: usize) {
        let end = memory.positions.min(first + LANES);
        for offset in &memory.offsets[first.min(end)..end] {
            for line in (0..self.task.head_dim).step_by(CACHE_LINE / size_of::<E>()) {
                prefetch(plane.as_ptr().wrapping_add(offset + line));
            }
        }
    }

    /// Scores of `R` row-heads from `r` on with sixteen keys; returns `R`.
    #[inline(always)]
    unsafe fn score_rows<V: Simd, const R: usize>(&self, r: usize, keys: *const f32, scores: *mut f32) -> usize {
        let dim = self.task.head_dim;
        let queries: [&[f32]; R] = std::array::from_fn(|i| &self.task.x[self.at(r + i)..][..dim]);
        // SAFETY: queries and keys have `dim` elements, scores a row for each row-head.
        unsafe {
            let mut sums = [V::splat(0.0); R];
            for i in 0..dim {
                let key = V::load(keys.add(i * LANES));
                for (sum, query) in sums.iter_mut().zip(&queries) {
                    *sum = key.fma(V::splat(*query.get_unchecked(i)), *sum);
                }
            }
            let scale = V::splat(1.0 / (dim as f32).sqrt());
            for (i, sum) in sums.into_iter().enumerate() {
                sum.mul(scale).store(scores.add((r + i) * BLOCK));
            }
        }
        R
    }

    /// Turns scores into weights and folds their maximum and sum.
    #[inline(always)]
    unsafe fn weights<V: Simd>(&mut self, memory: &mut Block, scores: *mut f32) {
        for r in 0..self.count {
            let valid = memory.valid[r];
            if valid == 0 {
                continue;
            }
            // SAFETY: each row has `BLOCK` scores, of which `scores` wrote whole vectors up to `valid`.
            unsafe {
                let row = scores.add(r * BLOCK);
                let end = valid.next_multiple_of(LANES);
                (valid..end).for_each(|j| *row.add(j) = f32::NEG_INFINITY);
                let mut largest = V::load(row);
                for j in (LANES..end).step_by(LANES) {
                    largest = V::load(row.add(j)).max(largest);
                }
                let largest = largest.largest();
                for j in (0..end).step_by(LANES) {
                    V::load(row.add(j)).sub(V::splat(largest)).exp().store(row.add(j));
                }
                (valid..end).for_each(|j| *row.add(j) = 0.0);
                let mut sum = V::load(row);
                for j in (LANES..end).step_by(LANES) {
                    sum = sum.add(V::load(row.add(j)));
                }
                memory.factors[r] = self.fold_scalars::<V>(r, largest, sum.sum());
            }
        }
    }

    /// Folds a block's maximum and sum; returns the factors for accumulators. The first block is taken as it is.
    #[inline(always)]
    unsafe fn fold_scalars<V: Simd>(&mut self, r: usize, m: f32, l: f32) -> [f32; 2] {
        if !self.started[r] {
            (self.m[r], self.l[r], self.started[r]) = (m, l, true);
            return [0.0, 1.0];
        }
        let largest = if m > self.m[r] { m } else { self.m[r] };
        // SAFETY: the caller vouches for the instruction set.
        let factor = |m: f32| unsafe { V::splat(m - largest).exp().lanes()[0] };
        let [old, new] = [factor(self.m[r]), factor(m)];
        self.m[r] = largest;
        self.l[r] = self.l[r] * old + l * new;
        [old, new]
    }

    /// Adds the weighted values of the block to the accumulators.
    #[inline(always)]
    unsafe fn values<V: Simd, E: Element>(&self, v: &[E], memory: &Block, weights: *const f32, sums: *mut f32) {
        let mut r = 0;
        while r < self.count {
            // SAFETY: as for `value_rows`.
            r += unsafe {
                match self.count - r {
                    1 => self.value_rows::<V, E, 1>(r, v, memory, weights, sums),
                    2 => self.value_rows::<V, E, 2>(r, v, memory, weights, sums),
                    3 => self.value_rows::<V, E, 3>(r, v, memory, weights, sums),
                    _ => self.value_rows::<V, E, VALUE_ROWS>(r, v, memory, weights, sums),
                }
            };
        }
    }

    #[inline(always)]
    unsafe fn value_rows<V: Simd, E: Element, const R: usize>(
        &self,
        r: usize,
        v: &[E],
        memory: &Block,
        weights: *const f32,
        sums: *mut f32,
    ) -> usize {
        let dim = self.task.head_dim;
        let mut i = 0;
        while i < dim {
            // SAFETY: offsets were checked by `locate`; accumulators are there for every row-head.
            i += LANES
                * unsafe {
                    match (dim - i) / LANES {
                        1 => self.value_tile::<V, E, R, 1>(r, i, v, memory, weights, sums),
                        2 => self.value_tile::<V, E, R, 2>(r, i, v, memory, weights, sums),
                        3 => self.value_tile::<V, E, R, 3>(r, i, v, memory, weights, sums),
                        _ => self.value_tile::<V, E, R, VALUE_VECTORS>(r, i, v, memory, weights, sums),
                    }
                };
        }
        R
    }

    /// Weighted values of `R` row-heads from `r` on, `C` vectors from element `i` on; returns `C`.
    #[inline(always)]
    unsafe fn value_tile<V: Simd, E: Element, const R: usize, const C: usize>(
        &self,
        r: usize,
        i: usize,
        v: &[E],
        memory: &Block,
        weights: *const f32,
        sums: *mut f32,
    ) -> usize {
        let valid: [usize; R] = std::array::from_fn(|row| memory.valid[r + row]);
        let shared = valid.into_iter().min().unwrap_or(0);
        let value = |j: usize, c: usize| {
            // SAFETY: offsets were checked by `locate`.
            unsafe { E::load::<V>(v.as_ptr().add(memory.offsets.get_unchecked(j) + i + c * LANES)) }
        };
        // SAFETY: weights are there for every row-head and position, accumulators for every row-head.
        unsafe {
            let mut tile = [[V::splat(0.0); C]; R];
            for j in 0..shared {
                let values: [V; C] = std::array::from_fn(|c| value(j, c));
                for (row, tile) in tile.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add((r + row) * BLOCK + j));
                    for (tile, value) in tile.iter_mut().zip(values) {
                        *tile = value.fma(weight, *tile);
                    }
                }
            }
            for (row, tile) in tile.iter_mut().enumerate() {
                for j in shared..valid[row] {
                    let weight = V::splat(*weights.add((r + row) * BLOCK + j));
                    for (c, tile) in tile.iter_mut().enumerate() {
                        *tile = value(j, c).fma(weight, *tile);
                    }
                }
                if valid[row] > 0 {
                    for (c, tile) in tile.iter().enumerate() {
                        let to = sums.add((r + row) * self.task.head_dim + i + c * LANES);
                        fold_sum(to, *tile, memory.factors[r + row]);
                    }
                }
            }
        }
        C
    }

    /// `out = sums / l`.
    #[inline(always)]
    unsafe fn write_out<V: Simd>(&self, sums: *const f32) {
        let dim = self.task.head_dim;
        for r in 0..self.count {
            // SAFETY: rows and heads of the output belong to one item.
            unsafe {
                let out = self.task.out.slice_mut(self.at(r), dim);
                let scale = V::splat(1.0 / self.l[r]);
                for i in (0..dim).step_by(LANES) {
                    V::load(sums.add(r * dim + i)).mul(scale).store(out.as_mut_ptr().add(i));
                }
            }
        }
    }
}

/// `*to = *to · factors[0] + sum · factors[1]`, or `sum` where nothing was folded yet.
#[inline(always)]
unsafe fn fold_sum<V: Simd>(to: *mut f32, sum: V, factors: [f32; 2]) {
    // SAFETY: by the callers.
    unsafe {
        if factors[0] == 0.0 && factors[1] == 1.0 {
            sum.store(to);
        } else {
            sum.fma(V::splat(factors[1]), V::load(to).mul(V::splat(factors[0]))).store(to);
        }
    }
}

#[inline(always)]
unsafe fn copy<V: Simd>(from: *const f32, to: &mut [f32]) {
    for i in (0..to.len()).step_by(LANES) {
        // SAFETY: `from` has as many elements as `to`, a multiple of sixteen.
        unsafe { V::load(from.add(i)).store(to.as_mut_ptr().add(i)) };
    }
}
