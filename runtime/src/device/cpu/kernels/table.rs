//! The kernels of each instruction set, as tables of functions.
//!
//! Here the generic kernels get their `#[target_feature]`. A table may be used only on a processor
//! that has its instruction set: [`Kernels::of`] is the only way to one, and checks.

use super::amx::{self, Matrix};
use super::attend::{AttendItem, AttendTask};
use super::attend_rows::attend_item;
use super::draw::{Histogram, weigh_row};
use super::linear::{LinearTask, Tile, run_task, tile};
use super::rope::{RopeTask, rope_heads};
use super::rows::{add_row, norm_row, norm_row_in_place};
use super::sample::{RowStats, exp_sum, scan_row};
use super::simd::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use crate::device::cpu::isa::Isa;

/// The kernels of one instruction set.
///
/// # Safety
/// The functions may be called only where the instruction set is available; having a `&Kernels` proves
/// that. Further demands are those of the generic function of the same name.
pub(crate) struct Kernels {
    /// Tokens of a full tile.
    pub(crate) tile_tokens: usize,
    /// Tiles by the logarithm of their panels, then by tokens less one.
    tiles: [&'static [Tile]; 3],
    /// Dot products on a matrix unit, instead of tiles.
    pub(crate) matrix: Option<Matrix>,
    pub(crate) split_tile: unsafe fn(&[f32], usize, &mut [u16]),
    pub(crate) linear_task: unsafe fn(&LinearTask<'_>, usize),
    pub(crate) norm_row: unsafe fn(&[f32], &[u16], f32, &mut [f32]),
    pub(crate) norm_row_in_place: unsafe fn(&mut [f32], &[u16], f32),
    pub(crate) add_row: unsafe fn(&[f32], &mut [f32]),
    pub(crate) rope_heads: unsafe fn(&RopeTask<'_>, usize),
    pub(crate) attend_item: unsafe fn(&AttendTask<'_>, &AttendItem),
    pub(crate) scan_row: unsafe fn(&[f32]) -> RowStats,
    pub(crate) exp_sum: unsafe fn(&[f32], f32) -> f64,
    pub(crate) weigh_row: unsafe fn(&[f32], f32, f32, &mut [u32], &mut Histogram),
}

impl Kernels {
    /// The kernels of `isa`, if this processor has it.
    pub(crate) fn of(isa: Isa) -> Option<&'static Self> {
        if !isa.is_available() {
            return None;
        }
        Some(match isa {
            Isa::Portable => &portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::KERNELS,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::AmxBf16 => &amx_bf16::KERNELS,
            #[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
            Isa::AmxBf16 => return None,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::AmxBf16 => return None,
        })
    }

    /// Panels whose results are finished together.
    pub(crate) fn group_panels(&self, rows: usize, swiglu: bool) -> usize {
        let panels = self.tile(4, rows.min(self.tile_tokens)).0;
        if swiglu { panels.max(2) } else { panels }
    }

    /// The tile of most panels, up to `panels`, for `tokens` tokens.
    pub(crate) fn tile(&self, panels: usize, tokens: usize) -> (usize, Tile) {
        for (log, tiles) in self.tiles.iter().enumerate().rev() {
            if 1 << log <= panels
                && let Some(tile) = tiles.get(tokens - 1)
            {
                return (1 << log, *tile);
            }
        }
        unreachable!("every table has tiles of one panel up to `tile_tokens`")
    }
}

macro_rules! table {
    ($isa:ident, $vector:ty, $matrix:expr, [$($tokens1:literal)*], [$($tokens2:literal)*], [$($tokens4:literal)*] $(, #[$feature:meta])?) => {
        mod $isa {
            use super::*;

            pub(super) static KERNELS: Kernels = Kernels {
                tile_tokens: [$($tokens1),*].len(),
                tiles: [&[$(tiles::<1, $tokens1>),*], &[$(tiles::<2, $tokens2>),*], &[$(tiles::<4, $tokens4>),*]],
                matrix: $matrix,
                split_tile: split,
                linear_task,
                norm_row: row_norm,
                norm_row_in_place: row_norm_in_place,
                add_row: row_add,
                rope_heads: rope,
                attend_item: attend,
                scan_row: scan,
                exp_sum: exp,
                weigh_row: weigh,
            };

            $(#[$feature])?
            unsafe fn tiles<const P: usize, const T: usize>(panels: *const u16, x: *const f32, k: usize, out: *mut f32, ahead: usize) {
                // SAFETY: the caller's promise.
                unsafe { tile::<$vector, P, T>(panels, x, k, out, ahead) }
            }

            $(#[$feature])?
            unsafe fn linear_task(task: &LinearTask<'_>, index: usize) {
                // SAFETY: the caller's promise.
                unsafe { run_task::<$vector>(&KERNELS, task, index) }
            }

            $(#[$feature])?
            unsafe fn split(x: &[f32], k: usize, parts: &mut [u16]) {
                amx::split_tile(x, k, parts);
            }

            $(#[$feature])?
            unsafe fn row_norm(x: &[f32], weight: &[u16], eps: f32, out: &mut [f32]) {
                // SAFETY: the caller's promise.
                unsafe { norm_row::<$vector>(x, weight, eps, out) }
            }

            $(#[$feature])?
            unsafe fn row_norm_in_place(x: &mut [f32], weight: &[u16], eps: f32) {
                // SAFETY: the caller's promise.
                unsafe { norm_row_in_place::<$vector>(x, weight, eps) }
            }

            $(#[$feature])?
            unsafe fn row_add(x: &[f32], to: &mut [f32]) {
                // SAFETY: the caller's promise.
                unsafe { add_row::<$vector>(x, to) }
            }

            $(#[$feature])?
            unsafe fn rope(task: &RopeTask<'_>, head: usize) {
                // SAFETY: the caller's promise.
                unsafe { rope_heads::<$vector>(task, head) }
            }

            $(#[$feature])?
            unsafe fn attend(task: &AttendTask<'_>, item: &AttendItem) {
                // SAFETY: the caller's promise.
                unsafe { attend_item::<$vector>(task, item) }
            }

            $(#[$feature])?
            unsafe fn scan(row: &[f32]) -> RowStats {
                // SAFETY: the caller's promise.
                unsafe { scan_row::<$vector>(row) }
            }

            $(#[$feature])?
            unsafe fn exp(row: &[f32], max: f32) -> f64 {
                // SAFETY: the caller's promise.
                unsafe { exp_sum::<$vector>(row, max) }
            }

            $(#[$feature])?
            unsafe fn weigh(logits: &[f32], max: f32, scale: f32, distances: &mut [u32], histogram: &mut Histogram) {
                // SAFETY: the caller's promise.
                unsafe { weigh_row(logits, max, scale, distances, histogram) }
            }
        }
    };
}

// Sixteen registers of four lanes.
table!(portable, Portable, None, [1 2], [], []);
// Sixteen registers of eight lanes: a pair for each accumulator.
#[cfg(target_arch = "x86_64")]
table!(avx2, Avx2, None, [1 2 3 4], [1], [], #[target_feature(enable = "avx2,fma")]);
// Thirty-two registers: up to 16 accumulators; with more the compiler tends to spill.
#[cfg(target_arch = "x86_64")]
table!(avx512, Avx512, None, [1 2 3 4 5 6 7 8], [1 2 3 4 5 6 7 8], [1 2 3 4], #[target_feature(enable = "avx512f,avx2,fma")]);
// Vectors as above beside the matrix unit.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
table!(amx_bf16, Avx512, Some(amx::matrix), [1 2 3 4 5 6 7 8], [1 2 3 4 5 6 7 8], [1 2 3 4], #[target_feature(enable = "avx512f,avx2,fma")]);
// The same with an emulated unit, for tests on any machine.
#[cfg(test)]
table!(emulated, Portable, Some(amx::emulated::matrix), [1 2], [], []);

/// The portable kernels with an emulated matrix unit.
#[cfg(test)]
pub(crate) fn emulated_amx() -> &'static Kernels {
    &emulated::KERNELS
}
