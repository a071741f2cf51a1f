//! Sixteen f32 lanes, once for each instruction set.
//!
//! Kernels are written over [`Simd`] and marked `#[inline(always)]`; the wrappers in
//! [`super::table`] carry the `#[target_feature]` that the operations need. Each operation rounds as
//! IEEE 754 says, so a kernel differs between instruction sets only where [`Simd::fma`] does: fused on
//! AVX2 and AVX-512, two roundings on the portable build.

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// A vector of sixteen f32.
///
/// # Safety
///
/// Every method may be called only where the implementing type's instruction set is available.
/// Pointers need no alignment and must be valid for the lanes read or written.
pub(crate) unsafe trait Simd: Copy {
    /// Sixteen times `value`.
    unsafe fn splat(value: f32) -> Self;
    /// Sixteen consecutive f32.
    unsafe fn load(from: *const f32) -> Self;
    /// Sixteen consecutive bf16.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Sixteen pairs of bf16: the first ones, and the second ones.
    unsafe fn load_bf16_pairs(from: *const u16) -> [Self; 2];
    /// Writes sixteen consecutive f32.
    unsafe fn store(self, to: *mut f32);
    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`.
    unsafe fn sub(self, other: Self) -> Self;
    /// `self · other`.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self / other`.
    unsafe fn div(self, other: Self) -> Self;
    /// `self · factor + addend`.
    unsafe fn fma(self, factor: Self, addend: Self) -> Self;
    /// `self` where it is larger, else `other`: `other` wherever either is a NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// `self` where it is smaller, else `other`: `other` wherever either is a NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// `2^self` of whole numbers in `-126..=127`.
    unsafe fn exp2_whole(self) -> Self;

    /// Lane `j` of vector `i` becomes lane `i` of vector `j`.
    #[inline(always)]
    unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut lanes = [[0.0; LANES]; LANES];
        // SAFETY: arrays of sixteen f32.
        unsafe {
            for (i, row) in rows.into_iter().enumerate() {
                for (j, value) in row.lanes().into_iter().enumerate() {
                    lanes[j][i] = value;
                }
            }
            lanes.map(|lanes| Self::load(lanes.as_ptr()))
        }
    }

    /// The lanes.
    #[inline(always)]
    unsafe fn lanes(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` holds sixteen f32.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The sum of the lanes, always added as the same tree.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        fold(unsafe { self.lanes() }, |a, b| a + b)
    }

    /// The largest lane that is not a NaN.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        fold(unsafe { self.lanes() }, |a, b| if a > b { a } else { b })
    }

    /// `e^self`, to about one unit in the last place; NaN stays NaN; under -87 it stops falling, over 88 it stops rising.
    ///
    /// Range reduction by ln 2 in two parts (Cody and Waite), then the polynomial of Cephes' `expf`.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            // In this order a NaN passes through.
            let x = Self::splat(EXP_MIN).max(Self::splat(EXP_MAX).min(self));
            // Adding and taking away 1.5 · 2²³ rounds to a whole number.
            let magic = Self::splat(12_582_912.0);
            let whole = x.mul(Self::splat(std::f32::consts::LOG2_E)).add(magic).sub(magic);
            let r = whole.fma(Self::splat(-0.693_359_4), x);
            let r = whole.fma(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.fma(r, Self::splat(c));
            }
            let p = p.fma(r.mul(r), r).add(Self::splat(1.0));
            p.mul(whole.exp2_whole())
        }
    }
}

/// Largest argument of [`Simd::exp`] whose result is finite with `2^whole` in range.
const EXP_MAX: f32 = 88.0;
/// Smallest argument of [`Simd::exp`] whose result is normal.
const EXP_MIN: f32 = -87.0;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = op(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Asks for the cache line at `at` in the second-level cache; any address will do.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetches never fault, and SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The value of a bf16.
#[inline(always)]
pub(crate) fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 nearest to `value`, ties to even; a NaN stays one.
#[inline(always)]
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Plain Rust; the compiler makes of it what its default target allows.
#[derive(Copy, Clone)]
pub(crate) struct Portable([f32; LANES]);

#[inline(always)]
fn zip(a: Portable, b: Portable, op: impl Fn(f32, f32) -> f32) -> Portable {
    let mut out = a;
    for (out, b) in out.0.iter_mut().zip(b.0) {
        *out = op(*out, b);
    }
    out
}

// SAFETY: plain Rust needs no instruction set.
unsafe impl Simd for Portable {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: valid for sixteen f32 by the caller.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: valid for sixteen bf16 by the caller.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(bits.map(bf16))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> [Self; 2] {
        // SAFETY: valid for thirty-two bf16 by the caller.
        let bits = unsafe { from.cast::<[u32; LANES]>().read_unaligned() }.map(u32::from_le);
        [Self(bits.map(|pair| f32::from_bits(pair << 16))), Self(bits.map(|pair| f32::from_bits(pair & 0xffff_0000)))]
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: valid for sixteen f32 by the caller.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        zip(self, other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        zip(self, other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        zip(self, other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        zip(self, other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        zip(zip(self, factor, |a, b| a * b), addend, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        zip(self, other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        zip(self, other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(((x as i32 + 127) << 23) as u32)))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! AVX2 as two registers of eight lanes, AVX-512 as one of sixteen.

    use super::Simd;
    use std::arch::x86_64::*;

    /// AVX2 and FMA.
    #[derive(Copy, Clone)]
    pub(crate) struct Avx2(__m256, __m256);

    // SAFETY: callers vouch for AVX2 and FMA, and for the lanes behind pointers.
    unsafe impl Simd for Avx2 {
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: as stated at the impl.
            unsafe {
                let widen = |half: __m128i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)));
                Self(widen(_mm_loadu_si128(from.cast())), widen(_mm_loadu_si128(from.add(8).cast())))
            }
        }

        #[inline(always)]
        unsafe fn load_bf16_pairs(from: *const u16) -> [Self; 2] {
            // SAFETY: as stated at the impl.
            unsafe {
                let low = _mm256_loadu_si256(from.cast());
                let high = _mm256_loadu_si256(from.add(16).cast());
                let first = |pairs| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                let second = |pairs| _mm256_castsi256_ps(_mm256_and_si256(pairs, mask));
                [Self(first(low), first(high)), Self(second(low), second(high))]
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as stated at the impl.
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, addend: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1)) }
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn min(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
            let quarter = |first: usize, half: fn(Self) -> __m256| std::array::from_fn(|i| half(rows[first + i]));
            // SAFETY: as stated at the impl.
            unsafe {
                let [a, b] = [transpose8(quarter(0, |row| row.0)), transpose8(quarter(8, |row| row.0))];
                let [c, d] = [transpose8(quarter(0, |row| row.1)), transpose8(quarter(8, |row| row.1))];
                std::array::from_fn(|i| if i < 8 { Self(a[i], b[i]) } else { Self(c[i - 8], d[i - 8]) })
            }
        }

        #[inline(always)]
        unsafe fn exp2_whole(self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe {
                let power = |x| {
                    let biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
                };
                Self(power(self.0), power(self.1))
            }
        }
    }

    /// AVX-512 F.
    #[derive(Copy, Clone)]
    pub(crate) struct Avx512(__m512);

    /// Eight rows of eight.
    #[inline(always)]
    unsafe fn transpose8(rows: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: callers vouch for AVX2.
        unsafe {
            let pairs = |i: usize| (_mm256_unpacklo_ps(rows[i], rows[i + 1]), _mm256_unpackhi_ps(rows[i], rows[i + 1]));
            let [(a0, b0), (a1, b1), (a2, b2), (a3, b3)] = [pairs(0), pairs(2), pairs(4), pairs(6)];
            let quads = |x, y| [_mm256_shuffle_ps::<0x44>(x, y), _mm256_shuffle_ps::<0xee>(x, y)];
            let [c0, c1] = quads(a0, a1);
            let [c2, c3] = quads(b0, b1);
            let [d0, d1] = quads(a2, a3);
            let [d2, d3] = quads(b2, b3);
            let low = |c, d| _mm256_permute2f128_ps::<0x20>(c, d);
            let high = |c, d| _mm256_permute2f128_ps::<0x31>(c, d);
            [low(c0, d0), low(c1, d1), low(c2, d2), low(c3, d3), high(c0, d0), high(c1, d1), high(c2, d2), high(c3, d3)]
        }
    }

    // SAFETY: callers vouch for AVX-512 F, and for the lanes behind pointers.
    unsafe impl Simd for Avx512 {
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))) }
        }

        #[inline(always)]
        unsafe fn load_bf16_pairs(from: *const u16) -> [Self; 2] {
            // SAFETY: as stated at the impl.
            unsafe {
                let pairs = _mm512_loadu_si512(from.cast());
                let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                [Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))), Self(_mm512_castsi512_ps(second))]
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as stated at the impl.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_div_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, addend: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_max_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn min(self, other: Self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe { Self(_mm512_min_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
            // SAFETY: as stated at the impl.
            unsafe {
                // Four by four inside each quarter of the registers, then the quarters.
                let mut columns = [_mm512_setzero_ps(); 16];
                for four in 0..4 {
                    let [a, b, c, d] = std::array::from_fn(|i| rows[4 * four + i].0);
                    let [ab0, ab1] = [_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)];
                    let [cd0, cd1] = [_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)];
                    columns[four] = _mm512_shuffle_ps::<0x44>(ab0, cd0);
                    columns[4 + four] = _mm512_shuffle_ps::<0xee>(ab0, cd0);
                    columns[8 + four] = _mm512_shuffle_ps::<0x44>(ab1, cd1);
                    columns[12 + four] = _mm512_shuffle_ps::<0xee>(ab1, cd1);
                }
                let mut out = [Self(_mm512_setzero_ps()); 16];
                for column in 0..4 {
                    let [a, b, c, d] = std::array::from_fn(|four| columns[4 * column + four]);
                    let [ab0, ab1] = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b)];
                    let [cd0, cd1] = [_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d)];
                    out[column] = Self(_mm512_shuffle_f32x4::<0x88>(ab0, cd0));
                    out[4 + column] = Self(_mm512_shuffle_f32x4::<0x88>(ab1, cd1));
                    out[8 + column] = Self(_mm512_shuffle_f32x4::<0xdd>(ab0, cd0));
                    out[12 + column] = Self(_mm512_shuffle_f32x4::<0xdd>(ab1, cd1));
                }
                out
            }
        }

        #[inline(always)]
        unsafe fn exp2_whole(self) -> Self {
            // SAFETY: as stated at the impl.
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
            }
        }
    }
}
