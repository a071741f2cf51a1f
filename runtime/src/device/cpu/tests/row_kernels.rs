//! Embedding, norms and rotary embedding.

use super::*;
use crate::device::cpu::kernels::rope::{RopeCall, rope_append};
use crate::device::cpu::kernels::rows::{NormCall, QkNormCall, TableLayout, embed_row, norm, qk_norm};
use crate::device::cpu::kernels::simd::Simd;
use crate::device::cpu::kv::PlaneMut;
use crate::device::reference;
use crate::device::tolerance::{BF16_STORE, CPU_NORM, CPU_ROPE};

#[test]
fn embed_reads_both_layouts() {
    let (vocab, dim) = (37, 22);
    let table = Random(1).bf16s(vocab * dim);
    let panels = panel16(&table, vocab, dim);
    for id in 0..vocab {
        let wanted = widen(&table[id * dim..(id + 1) * dim]);
        let mut out = vec![f32::NAN; dim];
        embed_row(&table, TableLayout::RowMajor, id, &mut out);
        assert_eq!(out, wanted);
        out.fill(f32::NAN);
        embed_row(&panels, TableLayout::Panel16, id, &mut out);
        assert_eq!(out, wanted);
    }
    let mut out = vec![f32::NAN; dim];
    embed_row(&panels, TableLayout::Panel16, u32::MAX as usize, &mut out);
    assert_eq!(out, vec![0.0; dim], "an id that was never drawn embeds as zeros");
}

#[test]
fn norms_match_the_reference() {
    let mut random = Random(2);
    for (isa, kernels) in all_kernels() {
        for (rows, dim) in [(1, 1), (3, 15), (1, 16), (2, 33), (1, 576), (70, 576), (5, 1000)] {
            let (x, residual, weight) = (random.f32s(rows * dim), random.f32s(rows * dim), random.bf16s(dim));
            let wide = widen(&weight);
            let eps = 1e-5;
            let mut out = vec![f32::NAN; rows * dim];
            norm(kernels, &mut pool(2), NormCall { rows, dim, eps, x: &x, residual: None, weight: &weight, out: &mut out });
            let wanted = reference::rms_norm(&x, &wide, eps);
            assert_close(&out, &wanted, |i| wanted[i].abs() * CPU_NORM, &format!("{isa} norm [{rows}, {dim}]"));

            let sums: Vec<f32> = x.iter().zip(&residual).map(|(x, residual)| residual + x).collect();
            let mut stream = residual.clone();
            let call = NormCall { rows, dim, eps, x: &x, residual: Some(&mut stream), weight: &weight, out: &mut out };
            norm(kernels, &mut pool(2), call);
            assert_eq!(bits(&stream), bits(&sums));
            let wanted = reference::rms_norm(&sums, &wide, eps);
            assert_close(&out, &wanted, |i| wanted[i].abs() * CPU_NORM, &format!("{isa} add norm [{rows}, {dim}]"));
        }
    }
}

#[test]
fn qk_norm_leaves_values_alone() {
    let mut random = Random(3);
    let (rows, q_heads, kv_heads, head_dim) = (5, 4, 2, 24);
    let width = (q_heads + 2 * kv_heads) * head_dim;
    for (isa, kernels) in all_kernels() {
        let (x, weight) = (random.f32s(rows * width), random.bf16s(2 * head_dim));
        let wide = widen(&weight);
        let mut qkv = x.clone();
        let call = QkNormCall { rows, q_heads, kv_heads, head_dim, eps: 1e-6, weight: &weight, qkv: &mut qkv };
        qk_norm(kernels, &mut pool(2), call);
        for (head, (found, x)) in qkv.chunks(head_dim).zip(x.chunks(head_dim)).enumerate() {
            let head = head % (q_heads + 2 * kv_heads);
            if head >= q_heads + kv_heads {
                assert_eq!(bits(found), bits(x));
                continue;
            }
            let weight = if head < q_heads { &wide[..head_dim] } else { &wide[head_dim..] };
            let wanted = reference::rms_norm(x, weight, 1e-6);
            assert_close(found, &wanted, |i| wanted[i].abs() * CPU_NORM, &format!("{isa} head {head}"));
        }
    }
}

#[test]
fn rope_rotates_and_appends() {
    let mut random = Random(4);
    for (isa, kernels) in all_kernels() {
        for (rows, q_heads, kv_heads, dim) in [(1, 9, 3, 64), (40, 8, 1, 128), (7, 2, 2, 32), (3, 4, 2, 6)] {
            let (context, slots) = (50, 64);
            let width = (q_heads + 2 * kv_heads) * dim;
            let (x, table) = (random.f32s(rows * width), random.f32s(context * dim));
            let positions: Vec<u32> = (0..rows).map(|_| random.below(context) as u32).collect();
            let mut slot_of: Vec<u32> = (0..slots as u32).collect();
            random.shuffle(&mut slot_of);
            slot_of.truncate(rows);
            let plane_len = slots * kv_heads * dim;
            let (mut k, mut v, mut out) = (vec![7.0; plane_len], vec![7.0; plane_len], vec![f32::NAN; rows * q_heads * dim]);
            let (mut k16, mut v16, mut out16) = (vec![0; plane_len], vec![0; plane_len], out.clone());
            let calls = [
                (PlaneMut::F32(&mut k), PlaneMut::F32(&mut v), &mut out),
                (PlaneMut::Bf16(&mut k16), PlaneMut::Bf16(&mut v16), &mut out16),
            ];
            for (k_plane, v_plane, out) in calls {
                let (positions, slots) = (&positions, &slot_of);
                let call = RopeCall { q_heads, kv_heads, head_dim: dim, positions, slots, x: &x, table: &table, k_plane, v_plane, out };
                rope_append(kernels, &mut pool(2), call);
            }
            assert_eq!(bits(&out), bits(&out16));
            for row in 0..rows {
                let angles = &table[positions[row] as usize * dim..][..dim];
                let head = |head: usize| &x[row * width + head * dim..][..dim];
                for q in 0..q_heads {
                    let found = &out[(row * q_heads + q) * dim..][..dim];
                    assert_close(found, &reference::rope(head(q), angles), |_| CPU_ROPE, &format!("{isa} q"));
                }
                for kv in 0..kv_heads {
                    let at = (slot_of[row] as usize * kv_heads + kv) * dim;
                    let wanted = reference::rope(head(q_heads + kv), angles);
                    assert_close(&k[at..at + dim], &wanted, |_| CPU_ROPE, &format!("{isa} k"));
                    let close = |i: usize| wanted[i].abs() * BF16_STORE + CPU_ROPE;
                    assert_close(&widen(&k16[at..at + dim]), &wanted, close, &format!("{isa} bf16 k"));
                    assert_eq!(&v[at..at + dim], head(q_heads + kv_heads + kv));
                    assert_eq!(v16[at..at + dim], head(q_heads + kv_heads + kv).iter().map(|v| to_bf16(*v)).collect::<Vec<_>>());
                }
            }
            let untouched = k.iter().filter(|value| **value == 7.0).count();
            assert_eq!(untouched, plane_len - rows * kv_heads * dim, "only the slots named are written");
        }
    }
}

#[test]
fn exp_is_accurate() {
    fn check<V: Simd>(isa: Isa) {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0;
            // SAFETY: callers check the instruction set.
            let found = unsafe { V::splat(x).exp().lanes() };
            let wanted = f64::from(x).exp();
            let ulps = (f64::from(found[0]) - wanted).abs() / wanted * f64::from(1 << 24);
            assert!(ulps < 4.0 && found.iter().all(|value| value.to_bits() == found[0].to_bits()), "{isa}: exp({x}) = {}", found[0]);
        }
        // SAFETY: as above.
        let [zero, nan] = unsafe { [V::splat(0.0).exp().lanes()[0], V::splat(f32::NAN).exp().lanes()[0]] };
        assert_eq!(zero, 1.0);
        assert!(nan.is_nan());
    }
    use crate::device::cpu::kernels::simd;
    check::<simd::Portable>(Isa::Portable);
    #[cfg(target_arch = "x86_64")]
    {
        if Isa::Avx2.is_available() {
            check::<simd::Avx2>(Isa::Avx2);
        }
        if Isa::Avx512.is_available() {
            check::<simd::Avx512>(Isa::Avx512);
        }
    }
}

#[test]
fn transpose_swaps_lanes() {
    fn check<V: Simd>() {
        let rows: [[f32; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| (i * 16 + j) as f32));
        // SAFETY: callers check the instruction set.
        let columns = unsafe { V::transpose(rows.map(|row| V::load(row.as_ptr()))).map(|column| column.lanes()) };
        for (i, row) in rows.iter().enumerate() {
            for (j, value) in row.iter().enumerate() {
                assert_eq!(columns[j][i], *value);
            }
        }
    }
    use crate::device::cpu::kernels::simd;
    check::<simd::Portable>();
    #[cfg(target_arch = "x86_64")]
    {
        if Isa::Avx2.is_available() {
            check::<simd::Avx2>();
        }
        if Isa::Avx512.is_available() {
            check::<simd::Avx512>();
        }
    }
}
