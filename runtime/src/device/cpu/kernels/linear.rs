//! `out = act(x · Wᵀ + bias) + residual` over `Panel16` weights.
//!
//! ```text
//! weight   panel p: [k/2][16][2] bf16, rows 16p … 16p+15 side by side; one vector load is 16 rows × 2 k
//! tile     P panels × T tokens, one accumulator vector for each pair
//! group    the panels whose results are finished together (SwiGLU needs gate and up)
//! task     a run of groups × a block of tokens
//! ```
//!
//! **Invariant:** each output is one chain of fused multiply-adds over rising `k`, whatever the tile it
//! falls into. Tiles differ in how many chains run side by side, never in the order within one.
//!
//! bf16 widens to f32 by a shift, so activations stay f32. Splitting them into two bf16 for
//! `vdpbf16ps` takes as many multiply instructions and loses seven bits.

use super::amx::{BLOCK_K, CALL_PANELS_MAX, CALL_TOKENS_MAX, Matrix, MatrixCall, TILE_ROWS, parts_len};
use super::simd::{LANES, Simd, bf16, prefetch};
use super::table::Kernels;
use crate::device::cpu::pool::{Pool, Scatter};

/// Panels of one group at most.
pub(crate) const GROUP_PANELS: usize = 4;
/// Tokens of one tile at most.
pub(crate) const TILE_TOKENS_MAX: usize = CALL_TOKENS_MAX;
/// Tokens of one task at most: their activations stay in the second-level cache while panels pass by.
const BLOCK_TOKENS: usize = 96;
/// Weight bytes of one task at least, so that claiming it costs little.
const TASK_BYTES_MIN: usize = 64 << 10;
/// Tasks a thread, so that threads end together.
const TASKS_PER_THREAD: usize = 16;

/// What is added to the output.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Residual<'a> {
    /// Nothing.
    None,
    /// What the output holds.
    InPlace,
    /// Another buffer.
    Separate(&'a [f32]),
}

/// One projection. `x` is `[rows, k]`, `out` is `[rows, n]`, or `[rows, n/2]` with `swiglu`.
pub(crate) struct LinearCall<'a> {
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) swiglu: bool,
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [u16],
    pub(crate) bias: Option<&'a [u16]>,
    pub(crate) residual: Residual<'a>,
    pub(crate) out: &'a mut [f32],
    /// Memory for the parts of activations, [`parts_len`] long, where the kernels use a matrix unit.
    pub(crate) parts: &'a mut [u16],
}

/// A [`LinearCall`] as tasks see it.
pub(crate) struct LinearTask<'a> {
    rows: usize,
    n: usize,
    k: usize,
    out_width: usize,
    swiglu: bool,
    x: &'a [f32],
    weight: &'a [u16],
    bias: Option<&'a [u16]>,
    residual: Residual<'a>,
    out: Scatter<'a, f32>,
    /// Panels of a task; a multiple of a group's.
    panels_per_task: usize,
    panel_tasks: usize,
    group_panels: usize,
    /// Tokens of a full tile.
    tile_tokens: usize,
    matrix: Option<(Matrix, &'a [u16])>,
}

/// `out[p][t] = x[t] · panel[p]` for `P` panels and `T` tokens.
///
/// Arguments: panels, `x`, `k`, output, elements between a weight and what is prefetched with it.
///
/// # Safety
/// `P` panels, `T` rows of `x` and `P · T · 16` outputs must be there, `k` even, and the instruction set available.
pub(crate) type Tile = unsafe fn(*const u16, *const f32, usize, *mut f32, usize);

/// Runs the projection on all threads.
///
/// # Panics
/// If a slice is shorter than the shape says.
pub(crate) fn linear(kernels: &Kernels, pool: &mut Pool, call: LinearCall<'_>) {
    let LinearCall { rows, n, k, swiglu, x, weight, bias, residual, out, parts } = call;
    if rows == 0 {
        return;
    }
    let panels = n.div_ceil(LANES);
    let out_width = if swiglu { n / 2 } else { n };
    assert!(k.is_multiple_of(2) && (!swiglu || n.is_multiple_of(2 * LANES)), "shape not supported");
    assert!(x.len() >= rows * k && weight.len() >= panels * LANES * k && out.len() >= rows * out_width, "operand too short");
    assert!(bias.is_none_or(|bias| bias.len() >= n), "bias too short");
    if let Residual::Separate(residual) = residual {
        assert!(residual.len() >= rows * out_width, "residual too short");
    }
    let matrix = kernels.matrix.filter(|_| k.is_multiple_of(BLOCK_K));
    let matrix = matrix.map(|matrix| (matrix, split(kernels, pool, &x[..rows * k], k, parts)));
    let blocks = rows.div_ceil(BLOCK_TOKENS);
    let (tile_tokens, group_panels) = match matrix {
        Some(_) => (CALL_TOKENS_MAX, CALL_PANELS_MAX),
        None => (kernels.tile_tokens, kernels.group_panels(rows, swiglu)),
    };
    let panels_per_task = panels_per_task(panels, k, blocks, pool.threads()).next_multiple_of(group_panels);
    let panel_tasks = panels.div_ceil(panels_per_task);
    let task = LinearTask {
        rows,
        n,
        k,
        out_width,
        swiglu,
        x,
        weight,
        bias,
        residual,
        out: Scatter::new(out),
        panels_per_task,
        panel_tasks,
        group_panels,
        tile_tokens,
        matrix,
    };
    pool.run_all(blocks * panel_tasks, &|index| {
        // SAFETY: the table was chosen for this processor; `index` names each task once, so no two
        // tasks write the same outputs.
        unsafe { (kernels.linear_task)(&task, index) }
    });
}

/// Splits activations into the parts that a matrix unit takes.
fn split<'a>(kernels: &Kernels, pool: &mut Pool, x: &[f32], k: usize, parts: &'a mut [u16]) -> &'a [u16] {
    let tiles = x.len().div_ceil(TILE_ROWS * k);
    let parts = &mut parts[..parts_len(tiles * TILE_ROWS, k)];
    let tile_parts = parts_len(TILE_ROWS, k);
    let scatter = Scatter::new(parts);
    pool.run_all(tiles, &|tile| {
        let rows = &x[tile * TILE_ROWS * k..x.len().min((tile + 1) * TILE_ROWS * k)];
        // SAFETY: each tile is visited once; the table was chosen for this processor.
        unsafe { (kernels.split_tile)(rows, k, scatter.slice_mut(tile * tile_parts, tile_parts)) }
    });
    parts
}

fn panels_per_task(panels: usize, k: usize, blocks: usize, threads: usize) -> usize {
    let smallest = (TASK_BYTES_MIN / (LANES * k * 2)).max(1);
    let even = panels.div_ceil((threads * TASKS_PER_THREAD).div_ceil(blocks));
    // A short projection is split evenly rather than by bytes.
    even.max(smallest).min(panels.div_ceil(threads)).max(1)
}

/// Computes one task.
///
/// # Safety
/// `V`'s instruction set must be available, and no other task with this `index` may run.
#[inline(always)]
pub(crate) unsafe fn run_task<V: Simd>(kernels: &Kernels, task: &LinearTask<'_>, index: usize) {
    let first_row = index / task.panel_tasks * BLOCK_TOKENS;
    let rows = (task.rows - first_row).min(BLOCK_TOKENS);
    let panels = task.n.div_ceil(LANES);
    let first = index % task.panel_tasks * task.panels_per_task;
    let last = (first + task.panels_per_task).min(panels);
    let tile_tokens = match task.matrix {
        Some(_) => task.tile_tokens,
        // Tiles of equal size, where a small rest would leave the multipliers idle.
        None => rows.div_ceil(rows.div_ceil(task.tile_tokens)),
    };
    let mut sums = [0.0_f32; GROUP_PANELS * TILE_TOKENS_MAX * LANES];
    for group in (first..last).step_by(task.group_panels) {
        let group_panels = task.group_panels.min(last - group);
        for tile in (0..rows).step_by(tile_tokens) {
            let tokens = (rows - tile).min(tile_tokens);
            let row = first_row + tile;
            // SAFETY: `linear` checked that all panels and rows are there.
            unsafe {
                group_sums(kernels, task, group, group_panels, row, tokens, tile == 0, &mut sums);
                finish::<V>(task, group, group_panels, row, tokens, &sums);
            }
        }
    }
}

/// The dot products of one group and one tile of tokens, as `[panel][token][16]`.
#[inline(always)]
unsafe fn group_sums(
    kernels: &Kernels,
    task: &LinearTask<'_>,
    group: usize,
    group_panels: usize,
    row: usize,
    tokens: usize,
    is_first_tile: bool,
    sums: &mut [f32; GROUP_PANELS * TILE_TOKENS_MAX * LANES],
) {
    // While the first tile is at work, the next group streams in: pages end the hardware's own streams
    // every 4 KiB. Later tiles find their weights in the cache.
    let ahead = if is_first_tile { task.group_panels * LANES * task.k } else { 0 };
    let panel = |panel: usize| task.weight[panel * LANES * task.k..].as_ptr();
    if let Some((matrix, parts)) = task.matrix {
        let parts = parts[row / TILE_ROWS * parts_len(TILE_ROWS, task.k)..].as_ptr();
        let (panels, out) = (panel(group), sums.as_mut_ptr());
        // SAFETY: the group lies inside the weight and the rows inside the parts; `sums` holds a whole group.
        unsafe { matrix(&MatrixCall { panels, panel_count: group_panels, parts, tokens, k: task.k, out, ahead }) };
        return;
    }
    let mut done = 0;
    while done < group_panels {
        let (panels, tile) = kernels.tile(group_panels - done, tokens);
        let x = task.x[row * task.k..].as_ptr();
        // SAFETY: the group lies inside the weight and the rows inside `x`; `sums` holds a whole group.
        unsafe { tile(panel(group + done), x, task.k, sums[done * tokens * LANES..].as_mut_ptr(), ahead) };
        done += panels;
    }
}

/// The body of every [`Tile`].
#[inline(always)]
pub(crate) unsafe fn tile<V: Simd, const P: usize, const T: usize>(
    panels: *const u16,
    x: *const f32,
    k: usize,
    out: *mut f32,
    ahead: usize,
) {
    // SAFETY: `Tile`'s contract; a prefetch may point anywhere.
    unsafe {
        let mut sums = [[V::splat(0.0); T]; P];
        for pair in 0..k / 2 {
            let mut weights = [[V::splat(0.0); 2]; P];
            for (p, weights) in weights.iter_mut().enumerate() {
                let at = panels.add(p * LANES * k + pair * 2 * LANES);
                prefetch(at.wrapping_add(ahead));
                *weights = V::load_bf16_pairs(at);
            }
            for half in [0, 1] {
                for t in 0..T {
                    let x = V::splat(*x.add(t * k + pair * 2 + half));
                    for (sums, weights) in sums.iter_mut().zip(&weights) {
                        sums[t] = weights[half].fma(x, sums[t]);
                    }
                }
            }
        }
        for (p, sums) in sums.iter().enumerate() {
            for (t, sum) in sums.iter().enumerate() {
                sum.store(out.add((p * T + t) * LANES));
            }
        }
    }
}

/// Adds bias, applies the activation, adds the residual and writes the outputs of one group.
#[inline(always)]
unsafe fn finish<V: Simd>(task: &LinearTask<'_>, group: usize, group_panels: usize, row: usize, tokens: usize, sums: &[f32]) {
    let width = if task.swiglu { 2 } else { 1 };
    for part in (0..group_panels).step_by(width) {
        let column = (group + part) / width * LANES;
        let columns = (task.out_width - column).min(LANES);
        for token in 0..tokens {
            // SAFETY: the group's panels lie inside the weight; each output belongs to one task.
            unsafe {
                let value = if task.swiglu {
                    let gate = biased::<V>(task, group + part, sum_of::<V>(sums, part, tokens, token));
                    let up = biased::<V>(task, group + part + 1, sum_of::<V>(sums, part + 1, tokens, token));
                    silu(gate).mul(up)
                } else {
                    biased::<V>(task, group + part, sum_of::<V>(sums, part, tokens, token))
                };
                let start = (row + token) * task.out_width + column;
                write(task.residual, start, value, task.out.slice_mut(start, columns));
            }
        }
    }
}

#[inline(always)]
unsafe fn sum_of<V: Simd>(sums: &[f32], panel: usize, tokens: usize, token: usize) -> V {
    let start = (panel * tokens + token) * LANES;
    // SAFETY: the slice has sixteen values, or indexing panics.
    unsafe { V::load(sums[start..start + LANES].as_ptr()) }
}

#[inline(always)]
unsafe fn biased<V: Simd>(task: &LinearTask<'_>, panel: usize, sum: V) -> V {
    let Some(bias) = task.bias else { return sum };
    let mut lanes = [0.0; LANES];
    for (lane, bias) in lanes.iter_mut().zip(&bias[panel * LANES..task.n]) {
        *lane = bf16(*bias);
    }
    // SAFETY: `lanes` holds sixteen values.
    unsafe { sum.add(V::load(lanes.as_ptr())) }
}

/// `x · sigmoid(x)`.
#[inline(always)]
unsafe fn silu<V: Simd>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { x.div(V::splat(1.0).add(V::splat(0.0).sub(x).exp())) }
}

#[inline(always)]
unsafe fn write<V: Simd>(residual: Residual<'_>, start: usize, value: V, out: &mut [f32]) {
    // SAFETY: whole vectors are read and written only where sixteen values are there.
    unsafe {
        if out.len() == LANES {
            let value = match residual {
                Residual::None => value,
                Residual::InPlace => value.add(V::load(out.as_ptr())),
                Residual::Separate(from) => value.add(V::load(from[start..start + LANES].as_ptr())),
            };
            value.store(out.as_mut_ptr());
            return;
        }
        let lanes = value.lanes();
        for (i, (out, value)) in out.iter_mut().zip(lanes).enumerate() {
            *out = match residual {
                Residual::None => value,
                Residual::InPlace => value + *out,
                Residual::Separate(from) => value + from[start + i],
            };
        }
    }
}
