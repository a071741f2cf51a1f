//! Every kernel against the f64 reference, on every instruction set of this processor, and batch
//! invariance bit for bit.

mod attention;
mod device;
mod projection;
mod row_kernels;
mod sampling;

use super::isa::Isa;
use super::kernels::simd::{bf16, to_bf16};
use super::kernels::table::{Kernels, emulated_amx};
use super::pool::Pool;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Uniform in `-1..1`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn f32s(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    fn bf16s(&mut self, len: usize) -> Vec<u16> {
        (0..len).map(|_| to_bf16(self.unit())).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// The kernels of every instruction set that this processor has.
fn all_kernels() -> Vec<(Isa, &'static Kernels)> {
    Isa::ALL.into_iter().filter_map(|isa| Some((isa, Kernels::of(isa)?))).collect()
}

/// [`all_kernels`], and the way that feeds a matrix unit.
fn all_projections() -> Vec<(&'static str, &'static Kernels)> {
    let mut all: Vec<_> = all_kernels().into_iter().map(|(isa, kernels)| (isa.name(), kernels)).collect();
    all.push(("emulated amx_bf16", emulated_amx()));
    all
}

fn pool(threads: usize) -> Pool {
    Pool::start(threads).unwrap()
}

fn widen(bits: &[u16]) -> Vec<f32> {
    bits.iter().copied().map(bf16).collect()
}

/// Row-major `[n, k]` as `Panel16`.
fn panel16(weight: &[u16], n: usize, k: usize) -> Vec<u16> {
    let mut panels = vec![0; n.next_multiple_of(16) * k];
    for row in 0..n {
        for column in 0..k {
            panels[row / 16 * 16 * k + column / 2 * 32 + row % 16 * 2 + column % 2] = weight[row * k + column];
        }
    }
    panels
}

/// Rows of `[gate | up]` in alternating groups of sixteen.
fn interleave16(weight: &[u16], n: usize, k: usize) -> Vec<u16> {
    let half = n / 2 * k;
    let (gate, up) = weight.split_at(half);
    gate.chunks(16 * k).zip(up.chunks(16 * k)).flat_map(|(gate, up)| [gate, up].concat()).collect()
}

/// Panics unless each value lies within its tolerance.
fn assert_close(found: &[f32], wanted: &[f64], tolerance: impl Fn(usize) -> f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let error = (f64::from(*found) - wanted).abs();
        assert!(error <= tolerance(i), "{what}: value {i} is {found}, wanted {wanted}, tolerance {}", tolerance(i));
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
