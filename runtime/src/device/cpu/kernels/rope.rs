//! Rotary embedding of q and k, and the append of k and v to the paged cache.
//!
//! Tasks are key/value heads with the query heads that share them: each writes its own columns of
//! every row and slot, so even a batch that names a slot twice is no data race.

use super::simd::{LANES, Simd, to_bf16};
use super::table::Kernels;
use crate::device::cpu::kv::PlaneMut;
use crate::device::cpu::pool::{Pool, Scatter};

/// Elements under which one thread does it alone.
const SERIAL_ELEMENTS_MAX: usize = 16 << 10;

/// One call. `x` is `[rows, (q + 2·kv)·head_dim]`, `out` is `[rows, q·head_dim]`, `table` is
/// `[context, head_dim/2, 2]`, planes are `[slots, kv, head_dim]`.
pub(crate) struct RopeCall<'a> {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) positions: &'a [u32],
    pub(crate) slots: &'a [u32],
    pub(crate) x: &'a [f32],
    pub(crate) table: &'a [f32],
    pub(crate) k_plane: PlaneMut<'a>,
    pub(crate) v_plane: PlaneMut<'a>,
    pub(crate) out: &'a mut [f32],
}

/// A [`RopeCall`] as tasks see it.
pub(crate) struct RopeTask<'a> {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    positions: &'a [u32],
    slots: &'a [u32],
    x: &'a [f32],
    table: &'a [f32],
    k_plane: ScatterPlane<'a>,
    v_plane: ScatterPlane<'a>,
    out: Scatter<'a, f32>,
}

enum ScatterPlane<'a> {
    F32(Scatter<'a, f32>),
    Bf16(Scatter<'a, u16>),
}

impl<'a> ScatterPlane<'a> {
    fn new(plane: PlaneMut<'a>) -> Self {
        match plane {
            PlaneMut::F32(plane) => Self::F32(Scatter::new(plane)),
            PlaneMut::Bf16(plane) => Self::Bf16(Scatter::new(plane)),
        }
    }
}

/// Runs it.
///
/// # Panics
/// If a slice is shorter than the shape says, or a slot or position is out of range.
pub(crate) fn rope_append(kernels: &Kernels, pool: &mut Pool, call: RopeCall<'_>) {
    let RopeCall { q_heads, kv_heads, head_dim, positions, slots, x, table, k_plane, v_plane, out } = call;
    let rows = positions.len();
    let width = (q_heads + 2 * kv_heads) * head_dim;
    assert!(x.len() >= rows * width && slots.len() == rows && head_dim.is_multiple_of(2), "operand too short");
    let task = RopeTask {
        q_heads,
        kv_heads,
        head_dim,
        positions,
        slots,
        x,
        table,
        k_plane: ScatterPlane::new(k_plane),
        v_plane: ScatterPlane::new(v_plane),
        out: Scatter::new(out),
    };
    // SAFETY: the table was chosen for this processor; each head is visited once.
    let run = |head: usize| unsafe { (kernels.rope_heads)(&task, head) };
    if rows * width <= SERIAL_ELEMENTS_MAX { (0..kv_heads).for_each(run) } else { pool.run_all(kv_heads, &run) }
}

/// Rotates and stores one key/value head and its query heads, for every row.
///
/// # Safety
/// `V`'s instruction set must be available, and no other task with this `head` may run.
#[inline(always)]
pub(crate) unsafe fn rope_heads<V: Simd>(task: &RopeTask<'_>, head: usize) {
    let dim = task.head_dim;
    let group = task.q_heads / task.kv_heads;
    let width = (task.q_heads + 2 * task.kv_heads) * dim;
    let mut rotated = [0.0_f32; HEAD_DIM_MAX];
    let rotated = &mut rotated[..dim];
    for (row, (position, slot)) in task.positions.iter().zip(task.slots).enumerate() {
        let angles = &task.table[*position as usize * dim..][..dim];
        let x = &task.x[row * width..][..width];
        for q in head * group..(head + 1) * group {
            // SAFETY: query heads belong to one task.
            unsafe { rotate::<V>(&x[q * dim..][..dim], angles, task.out.slice_mut((row * task.q_heads + q) * dim, dim)) };
        }
        // SAFETY: as for `rope_heads`.
        unsafe { rotate::<V>(&x[(task.q_heads + head) * dim..][..dim], angles, rotated) };
        let value = &x[(task.q_heads + task.kv_heads + head) * dim..][..dim];
        let at = (*slot as usize * task.kv_heads + head) * dim;
        // SAFETY: a head's columns of the planes belong to one task.
        unsafe {
            append(&task.k_plane, at, rotated);
            append(&task.v_plane, at, value);
        }
    }
}

/// Widest head.
pub(crate) const HEAD_DIM_MAX: usize = 256;

/// Turns the pairs `(i, i + dim/2)` of `x` by `angles` `[dim/2][cos, sin]`.
#[inline(always)]
unsafe fn rotate<V: Simd>(x: &[f32], angles: &[f32], out: &mut [f32]) {
    let half = x.len() / 2;
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    for i in 0..half {
        let (cos, sin) = (angles[2 * i], angles[2 * i + 1]);
        out_low[i] = low[i] * cos - high[i] * sin;
        out_high[i] = high[i] * cos + low[i] * sin;
    }
    // Wide vectors would need the table's pairs taken apart; the compiler's own vectors do.
    let _ = (LANES, std::marker::PhantomData::<V>);
}

/// # Safety
/// No other task may touch `plane[at..at + row.len()]`.
#[inline(always)]
unsafe fn append(plane: &ScatterPlane<'_>, at: usize, row: &[f32]) {
    match plane {
        // SAFETY: by the caller.
        ScatterPlane::F32(plane) => unsafe { plane.slice_mut(at, row.len()) }.copy_from_slice(row),
        // SAFETY: by the caller.
        ScatterPlane::Bf16(plane) => unsafe { plane.slice_mut(at, row.len()) }.iter_mut().zip(row).for_each(|(to, x)| *to = to_bf16(*x)),
    }
}
