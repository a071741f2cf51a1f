//! Projections.

use super::*;
use crate::device::cpu::kernels::amx::parts_len;
use crate::device::cpu::kernels::linear::{LinearCall, Residual, linear};
use crate::device::reference;
use crate::device::tolerance::{CPU_DOT, CPU_FINISH};

#[derive(Copy, Clone, Debug)]
struct Case {
    rows: usize,
    n: usize,
    k: usize,
    swiglu: bool,
    bias: bool,
    residual: u8,
}

struct Data {
    x: Vec<f32>,
    weight: Vec<u16>,
    bias: Vec<u16>,
    residual: Vec<f32>,
}

impl Case {
    fn out_width(self) -> usize {
        if self.swiglu { self.n / 2 } else { self.n }
    }

    fn data(self, random: &mut Random) -> Data {
        Data {
            x: random.f32s(self.rows * self.k),
            weight: random.bf16s(self.n * self.k),
            bias: random.bf16s(self.n),
            residual: random.f32s(self.rows * self.out_width()),
        }
    }

    fn panels(self, data: &Data) -> Vec<u16> {
        if self.swiglu {
            panel16(&interleave16(&data.weight, self.n, self.k), self.n, self.k)
        } else {
            panel16(&data.weight, self.n, self.k)
        }
    }

    fn run(self, kernels: &Kernels, pool: &mut Pool, data: &Data) -> Vec<f32> {
        let panels = self.panels(data);
        let bias = if self.swiglu { interleave16(&data.bias, self.n, 1) } else { data.bias.clone() };
        let mut out = if self.residual == 1 { data.residual.clone() } else { vec![f32::NAN; self.rows * self.out_width()] };
        let residual = match self.residual {
            0 => Residual::None,
            1 => Residual::InPlace,
            _ => Residual::Separate(&data.residual),
        };
        let call = LinearCall {
            rows: self.rows,
            n: self.n,
            k: self.k,
            swiglu: self.swiglu,
            x: &data.x,
            weight: &panels,
            bias: self.bias.then_some(&bias),
            residual,
            out: &mut out,
            parts: &mut vec![0; if kernels.matrix.is_some() { parts_len(self.rows, self.k) } else { 0 }],
        };
        linear(kernels, pool, call);
        out
    }

    fn check(self, kernels: &Kernels, pool: &mut Pool, random: &mut Random, isa: &str) {
        let data = self.data(random);
        let (weight, bias) = (widen(&data.weight), widen(&data.bias));
        let mut wanted = reference::linear(&data.x, &weight, self.k, self.bias.then_some(&bias));
        let abs = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
        let sizes = reference::linear(&abs(&data.x), &abs(&weight), self.k, None);
        if self.swiglu {
            wanted = reference::swiglu(&wanted, self.n);
        }
        if self.residual > 0 {
            wanted.iter_mut().zip(&data.residual).for_each(|(wanted, residual)| *wanted += f64::from(*residual));
        }
        let (width, n) = (self.out_width(), self.n);
        let tolerance = |i: usize| {
            let row = &sizes[i / width * n..][..n];
            let size = match self.swiglu {
                false => row[i % width],
                // The product's error grows with the other factor, whose size is at most its own sum.
                true => (row[i % width] + row[n / 2 + i % width]) * (1.0 + row[i % width].max(row[n / 2 + i % width]).sqrt()),
            };
            size * CPU_DOT + wanted[i].abs() * CPU_FINISH
        };
        assert_close(&self.run(kernels, pool, &data), &wanted, tolerance, &format!("{isa} {self:?}"));
    }
}

#[test]
fn matches_the_reference() {
    let mut random = Random(1);
    let mut pool = pool(2);
    for (isa, kernels) in all_projections() {
        for rows in [0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 33, 97, 100] {
            for (n, k) in [(1, 2), (16, 16), (17, 30), (40, 64), (100, 34), (192, 576), (32, 1536)] {
                let (bias, residual) = (random.below(2) == 0, random.below(3) as u8);
                Case { rows, n, k, swiglu: false, bias, residual }.check(kernels, &mut pool, &mut random, isa);
            }
            for (n, k) in [(32, 16), (64, 62), (96, 130), (320, 64)] {
                Case { rows, n, k, swiglu: true, bias: random.below(2) == 0, residual: 0 }.check(kernels, &mut pool, &mut random, isa);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut random = Random(2);
    for (isa, kernels) in all_projections() {
        for (n, k, swiglu) in [(100, 130, false), (192, 576, true), (960, 64, false)] {
            let case = Case { rows: 110, n, k, swiglu, bias: true, residual: 0 };
            let data = case.data(&mut random);
            let whole = case.run(kernels, &mut pool(3), &data);
            let width = case.out_width();
            for (first, rows) in [(0, 1), (109, 1), (5, 2), (17, 3), (1, 4), (30, 5), (2, 11), (3, 12), (40, 13), (10, 97)] {
                let part = Data {
                    x: data.x[first * k..(first + rows) * k].to_vec(),
                    weight: data.weight.clone(),
                    bias: data.bias.clone(),
                    residual: Vec::new(),
                };
                let found = Case { rows, ..case }.run(kernels, &mut pool(1 + rows % 2), &part);
                let wanted = &whole[first * width..(first + rows) * width];
                assert_eq!(bits(&found), bits(wanted), "{isa}: rows {first}.. {rows} of {case:?}");
            }
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    for (isa, kernels) in all_projections() {
        let case = Case { rows: 9, n: 64, k: 32, swiglu: true, bias: false, residual: 0 };
        let mut data = case.data(&mut Random(3));
        data.x[4 * 32 + 7] = f32::NAN;
        let out = case.run(kernels, &mut pool(2), &data);
        for (row, out) in out.chunks(32).enumerate() {
            assert!(out.iter().all(|value| value.is_nan() == (row == 4)), "{isa} row {row}");
        }
    }
}
