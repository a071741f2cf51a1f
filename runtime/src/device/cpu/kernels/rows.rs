//! Kernels that treat each row by itself: embedding, norms, row selection.

use super::simd::{LANES, Simd, bf16};
use super::table::Kernels;
use crate::device::cpu::pool::{Pool, Scatter};
use oxide_bundle::step::NONE;

/// Elements under which handing rows to other threads costs more than it saves.
const SERIAL_ELEMENTS_MAX: usize = 16 << 10;
/// Elements of one task.
const TASK_ELEMENTS: usize = 8 << 10;

/// Calls `job(first, last)` for runs of rows that cover `0..rows`.
fn for_row_runs(pool: &mut Pool, rows: usize, width: usize, job: &(dyn Fn(usize, usize) + Sync)) {
    if rows * width <= SERIAL_ELEMENTS_MAX {
        return job(0, rows);
    }
    let run = (TASK_ELEMENTS / width.max(1)).max(1);
    pool.run_all(rows.div_ceil(run), &|task| job(task * run, ((task + 1) * run).min(rows)));
}

/// How an embedding table is laid out.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum TableLayout {
    /// `[vocab][dim]`.
    RowMajor,
    /// `[vocab/16][dim/2][16][2]`.
    Panel16,
}

/// One call; `out` has a row for each id.
pub(crate) struct EmbedCall<'a> {
    pub(crate) table: &'a [u16],
    pub(crate) layout: TableLayout,
    pub(crate) ids: &'a [u32],
    /// Where not [`NONE`]: which of `sampled` is the id.
    pub(crate) sources: &'a [u32],
    pub(crate) sampled: &'a [u32],
    pub(crate) out: &'a mut [f32],
}

/// Looks up every id.
///
/// # Panics
/// If a slice is shorter than the shape says.
pub(crate) fn embed(pool: &mut Pool, call: EmbedCall<'_>) {
    let EmbedCall { table, layout, ids, sources, sampled, out } = call;
    let rows = ids.len();
    let Some(dim) = out.len().checked_div(rows) else { return };
    let out = Scatter::new(out);
    for_row_runs(pool, rows, dim, &|first, last| {
        for row in first..last {
            let id = match sources[row] {
                NONE => ids[row],
                source => sampled[source as usize],
            };
            // SAFETY: each row is visited once.
            embed_row(table, layout, id as usize, unsafe { out.slice_mut(row * dim, dim) });
        }
    });
}

/// Writes row `id` of a bf16 table to `out`; zeros if the table has no such row.
pub(crate) fn embed_row(table: &[u16], layout: TableLayout, id: usize, out: &mut [f32]) {
    let dim = out.len();
    match layout {
        TableLayout::RowMajor => match table.get(id * dim..(id + 1) * dim) {
            Some(row) => out.iter_mut().zip(row).for_each(|(out, bits)| *out = bf16(*bits)),
            None => out.fill(0.0),
        },
        TableLayout::Panel16 => {
            let panel = id / LANES * LANES * dim;
            let Some(panel) = table.get(panel..panel + LANES * dim) else { return out.fill(0.0) };
            for (pair, lanes) in out.chunks_exact_mut(2).zip(panel.chunks_exact(2 * LANES)) {
                let at = id % LANES * 2;
                pair[0] = bf16(lanes[at]);
                pair[1] = bf16(lanes[at + 1]);
            }
        }
    }
}

/// `out[r] = norm(x[r]) · weight`, after `residual[r] += x[r]; x = residual` if there is a residual.
pub(crate) struct NormCall<'a> {
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) eps: f32,
    pub(crate) x: &'a [f32],
    pub(crate) residual: Option<&'a mut [f32]>,
    pub(crate) weight: &'a [u16],
    pub(crate) out: &'a mut [f32],
}

/// Runs the norm.
///
/// # Panics
/// If a slice is shorter than the shape says.
pub(crate) fn norm(kernels: &Kernels, pool: &mut Pool, call: NormCall<'_>) {
    let NormCall { rows, dim, eps, x, residual, weight, out } = call;
    let weight = &weight[..dim];
    let x = &x[..rows * dim];
    let residual = residual.map(|residual| Scatter::new(&mut residual[..rows * dim]));
    let out = Scatter::new(&mut out[..rows * dim]);
    for_row_runs(pool, rows, dim, &|first, last| {
        for row in first..last {
            // SAFETY: each row is visited once; the table was chosen for this processor.
            unsafe {
                let out = out.slice_mut(row * dim, dim);
                let x = &x[row * dim..][..dim];
                match residual {
                    None => (kernels.norm_row)(x, weight, eps, out),
                    Some(residual) => {
                        let residual = residual.slice_mut(row * dim, dim);
                        (kernels.add_row)(x, residual);
                        (kernels.norm_row)(residual, weight, eps, out);
                    }
                }
            }
        }
    });
}

/// RMS norm of each q and k head of `[q | k | v]` rows in place; `weight` is `[2, head_dim]`.
pub(crate) struct QkNormCall<'a> {
    pub(crate) rows: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) eps: f32,
    pub(crate) weight: &'a [u16],
    pub(crate) qkv: &'a mut [f32],
}

/// Runs the head norm.
///
/// # Panics
/// If a slice is shorter than the shape says.
pub(crate) fn qk_norm(kernels: &Kernels, pool: &mut Pool, call: QkNormCall<'_>) {
    let QkNormCall { rows, q_heads, kv_heads, head_dim, eps, weight, qkv } = call;
    let width = (q_heads + 2 * kv_heads) * head_dim;
    let weight = &weight[..2 * head_dim];
    let qkv = Scatter::new(&mut qkv[..rows * width]);
    for_row_runs(pool, rows, width, &|first, last| {
        for row in first..last {
            // SAFETY: each row is visited once; the table was chosen for this processor.
            let row = unsafe { qkv.slice_mut(row * width, width) };
            for (head, head_row) in row.chunks_exact_mut(head_dim).take(q_heads + kv_heads).enumerate() {
                let weight = if head < q_heads { &weight[..head_dim] } else { &weight[head_dim..] };
                // SAFETY: as above.
                unsafe { (kernels.norm_row_in_place)(head_row, weight, eps) };
            }
        }
    });
}

/// `to += x`.
///
/// # Safety
/// `V`'s instruction set must be available.
#[inline(always)]
pub(crate) unsafe fn add_row<V: Simd>(x: &[f32], to: &mut [f32]) {
    let whole = x.len() / LANES * LANES;
    assert_eq!(x.len(), to.len());
    for at in (0..whole).step_by(LANES) {
        // SAFETY: sixteen values from `at` are there in both.
        unsafe { V::load(to.as_ptr().add(at)).add(V::load(x.as_ptr().add(at))).store(to.as_mut_ptr().add(at)) };
    }
    for (to, x) in to[whole..].iter_mut().zip(&x[whole..]) {
        *to += x;
    }
}

/// `out = x / sqrt(mean(x²) + eps) · weight`.
///
/// # Safety
/// `V`'s instruction set must be available.
#[inline(always)]
pub(crate) unsafe fn norm_row<V: Simd>(x: &[f32], weight: &[u16], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && x.len() == weight.len());
    // SAFETY: `x` and `out` hold as many values as `weight`.
    unsafe { norm_raw::<V>(x.as_ptr(), weight, eps, out.as_mut_ptr()) }
}

/// [`norm_row`] in place.
///
/// # Safety
/// `V`'s instruction set must be available.
#[inline(always)]
pub(crate) unsafe fn norm_row_in_place<V: Simd>(x: &mut [f32], weight: &[u16], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let x = x.as_mut_ptr();
    // SAFETY: `x` holds as many values as `weight`; each is read before it is written.
    unsafe { norm_raw::<V>(x, weight, eps, x) }
}

/// # Safety
/// `x` and `out` hold as many values as `weight`; `V`'s instruction set must be available.
#[inline(always)]
unsafe fn norm_raw<V: Simd>(x: *const f32, weight: &[u16], eps: f32, out: *mut f32) {
    let len = weight.len();
    let whole = len / LANES * LANES;
    // SAFETY: by the caller; vectors stay under `whole`, single values under `len`.
    unsafe {
        let mut squares = V::splat(0.0);
        for at in (0..whole).step_by(LANES) {
            let x = V::load(x.add(at));
            squares = x.fma(x, squares);
        }
        let mut sum = squares.sum();
        for at in whole..len {
            sum += *x.add(at) * *x.add(at);
        }
        let scale = 1.0 / (sum / len as f32 + eps).sqrt();
        for at in (0..whole).step_by(LANES) {
            let weight = V::load_bf16(weight.as_ptr().add(at));
            V::load(x.add(at)).mul(V::splat(scale)).mul(weight).store(out.add(at));
        }
        for (at, weight) in weight.iter().enumerate().skip(whole) {
            *out.add(at) = *x.add(at) * scale * bf16(*weight);
        }
    }
}
