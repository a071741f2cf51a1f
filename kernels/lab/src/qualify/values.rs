//! Values of operands: random of a seed, in styles that real models and hostile inputs have.
//!
//! Nothing here overflows or is NaN: a kernel must give finite results for all of it.

use crate::random::Random;
use half::bf16;
use oxide_bundle::dtype::DType;
use oxide_runtime::device::place::Image;
use rayon::prelude::*;

/// How the values of a case's activations look.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Both signs, within a factor of sixteen of one another.
    Plain,
    /// The same, some thousands.
    Large,
    /// Many zeros, and rows of nothing else.
    Zeros,
    /// Many denormal numbers, and rows of nothing else.
    Denormals,
    /// A few columns some ten thousand times larger, as trained models have.
    Outliers,
    /// Few distinct values, so that sums and maxima tie.
    Ties,
}

impl Style {
    /// Every style.
    pub(crate) const ALL: [Self; 6] = [Self::Plain, Self::Large, Self::Zeros, Self::Denormals, Self::Outliers, Self::Ties];

    /// Its name in reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Large => "large",
            Self::Zeros => "zeros",
            Self::Denormals => "denormals",
            Self::Outliers => "outliers",
            Self::Ties => "ties",
        }
    }
}

/// Exponent of the values that [`Style::Large`] and the outliers are multiplied by.
const LARGE_EXPONENT: i32 = 12;
/// Elements that one task fills.
const CHUNK: usize = 1 << 16;

/// A number below `end`.
pub(crate) fn below(random: &mut Random, end: usize) -> usize {
    random.below(end as u64) as usize
}

/// One of `items`.
pub(crate) fn pick<T: Copy>(random: &mut Random, items: &[T]) -> T {
    items[below(random, items.len())]
}

/// Shuffles.
pub(crate) fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(random, last + 1));
    }
}

/// Both signs, magnitude in `[1/4, 4) · 2^exponent`.
pub(crate) fn plain(random: &mut Random, exponent: i32) -> f32 {
    let bits = random.next() as u32;
    let scale = (125 + exponent + (bits >> 23 & 3) as i32) as u32;
    f32::from_bits(bits & 0x807F_FFFF | scale << 23)
}

/// `[rows, width]` activations of a style; bf16 numbers if the type is.
pub(crate) fn activations(random: &mut Random, style: Style, rows: usize, width: usize, dtype: DType) -> Image {
    let outlier = below(random, width.max(1));
    let mut values = Vec::with_capacity(rows * width);
    for _ in 0..rows {
        let is_whole = random.percent(40);
        for column in 0..width {
            values.push(one(random, style, is_whole, column == outlier || column == (outlier + 7) % width));
        }
    }
    as_type(values, dtype)
}

fn one(random: &mut Random, style: Style, is_whole: bool, is_outlier: bool) -> f32 {
    let value = plain(random, 0);
    match style {
        Style::Plain => value,
        Style::Large => value * f32::powi(2.0, LARGE_EXPONENT),
        Style::Zeros if is_whole || random.percent(50) => 0.0,
        Style::Denormals if is_whole || random.percent(50) => value * f32::powi(2.0, -130),
        Style::Zeros | Style::Denormals => value,
        Style::Outliers if is_outlier => value * f32::powi(2.0, LARGE_EXPONENT),
        Style::Outliers => value,
        Style::Ties => pick(random, &[-1.0, -0.5, 0.5, 1.0]),
    }
}

/// The values as f32, or rounded to bf16.
pub(crate) fn as_type(values: Vec<f32>, dtype: DType) -> Image {
    match dtype {
        DType::Bf16 => Image::Bf16(values.into_iter().map(|value| bf16::from_f32(value).to_bits()).collect()),
        DType::F32 | DType::F16 | DType::U32 => Image::F32(values),
    }
}

/// `[n, k]` bf16 weights of a seed, scaled so that a projection of plain values gives plain values. The
/// first row is zeros; of tall matrices one row is denormal and one large.
pub(crate) fn weights(seed: u64, n: usize, k: usize) -> Image {
    let exponent = 1 - (k as f32).sqrt().log2().floor() as i32;
    let mut bits = vec![0_u16; n * k];
    bits.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, bits)| {
        let mut random = Random::new(seed ^ (chunk as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        bits.iter_mut().for_each(|bits| *bits = (plain(&mut random, exponent).to_bits() >> 16) as u16);
    });
    if n > 8 {
        bits[..k].fill(0);
        let scaled = |bits: &mut [u16], exponent: i32| {
            bits.iter_mut().for_each(|bits| *bits = bf16::from_f32(bf16::from_bits(*bits).to_f32() * f32::powi(2.0, exponent)).to_bits());
        };
        scaled(&mut bits[(n / 2) * k..(n / 2 + 1) * k], -126);
        scaled(&mut bits[(n - 1) * k..], 6);
    }
    Image::Bf16(bits)
}

/// Norm weights, biases and the like: bf16 values within a factor of sixteen.
pub(crate) fn vector(random: &mut Random, len: usize) -> Image {
    Image::Bf16((0..len).map(|_| (plain(random, 0).to_bits() >> 16) as u16).collect())
}

/// Elements of an image as f32; integers are not touched by this.
pub(crate) fn widen(image: &Image, start: usize, len: usize) -> Vec<f32> {
    match image {
        Image::Bf16(bits) => bits[start..start + len].iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect(),
        Image::F32(values) => values[start..start + len].to_vec(),
        Image::U32(values) => values[start..start + len].iter().map(|value| *value as f32).collect(),
    }
}

/// One element as f64.
pub(crate) fn element(image: &Image, at: usize) -> f64 {
    match image {
        Image::Bf16(bits) => bf16::from_bits(bits[at]).to_f64(),
        Image::F32(values) => f64::from(values[at]),
        Image::U32(values) => f64::from(values[at]),
    }
}

/// The nearest bf16 number.
pub(crate) fn round_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}
