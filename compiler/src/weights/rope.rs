//! The rotary table: cosines and sines of every position, computed once at compile time.
//!
//! Angles are f32 products as `transformers` forms them; their cosine and sine are taken in f64 by a
//! portable implementation and rounded, so every machine writes the same bytes.

use super::WeightError;
use crate::profile::{Llama3Scaling, Numerics};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::WeightDecl;
use rayon::prelude::*;

/// Frequencies of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians a position, one for each pair of a head.
    pub frequencies: Vec<f32>,
}

impl RopeTable {
    /// Frequencies `theta^(-2i/head_dim)`, scaled as the profile says.
    pub fn new(numerics: &Numerics, head_dim: u32) -> Self {
        let theta = f64::from(numerics.rope_theta as f32);
        let frequency = |pair: u32| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / libm::pow(theta, f64::from(exponent)) as f32
        };
        let plain = (0..head_dim / 2).map(frequency);
        let frequencies = match numerics.rope_scaling {
            None => plain.collect(),
            Some(scaling) => plain.map(|frequency| scale(frequency, scaling)).collect(),
        };
        Self { frequencies }
    }

    /// `[cos, sin]` of each pair at a position.
    pub fn row(&self, position: u32) -> impl Iterator<Item = [f32; 2]> {
        self.frequencies.iter().map(move |frequency| {
            let angle = f64::from(position as f32 * frequency);
            [libm::cos(angle) as f32, libm::sin(angle) as f32]
        })
    }

    /// The table's bytes in parts of about `part_bytes`.
    ///
    /// # Errors
    /// If the weight has not the table's shape.
    pub(super) fn parts(&self, decl: &WeightDecl, part_bytes: usize) -> Result<impl Iterator<Item = Vec<u8>>, WeightError> {
        let pairs = self.frequencies.len();
        let positions = match decl.shape.as_slice() {
            &[context, half, 2] if half as usize == pairs && decl.dtype == DType::F32 => context,
            shape => {
                let problem = format!("{} {shape:?} is not a table of {pairs} rotary pairs", decl.dtype);
                return Err(WeightError::Plan { weight: decl.name.clone(), problem });
            }
        };
        let row_bytes = pairs * 8;
        let step = (part_bytes / row_bytes).max(1) as u32;
        Ok((0..positions).step_by(step as usize).map(move |first| self.part(first, step.min(positions - first), row_bytes)))
    }

    fn part(&self, first: u32, count: u32, row_bytes: usize) -> Vec<u8> {
        let mut part = vec![0; count as usize * row_bytes];
        part.par_chunks_mut(row_bytes).zip(first..first + count).for_each(|(out, position)| {
            for (to, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(self.row(position).flatten()) {
                *to = value.to_le_bytes();
            }
        });
        part
    }
}

/// Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, the band between blended.
fn scale(frequency: f32, scaling: Llama3Scaling) -> f32 {
    let Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context } = scaling;
    let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
    let original = original_context as f32;
    let wavelength = std::f32::consts::TAU / frequency;
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}
