//! Dot products on the matrix unit (Intel AMX), in bf16 and yet with f32 activations.
//!
//! Cutting an f32 after eight, sixteen and twenty-four significant bits gives three bf16 whose sum it
//! is. So three bf16 products stand for one f32 product, exactly, and the unit is still several times
//! faster than vector instructions. A `Panel16` block of 32 `k` is one tile of weights as it lies.
//!
//! ```text
//! parts   [token tile][k/32][part: high, middle, low][16 tokens][32] bf16, 1 KiB a tile
//! panel   [k/32][16 pairs][16 rows][2] bf16, 1 KiB a tile
//! tiles   0..=3 sums (panel + 2 · token tile), 4 and 5 parts, 6 and 7 weights
//! ```
//!
//! **Invariant:** each sum takes its products by rising block of `k`, high parts first, whatever else
//! shares the call.

use super::simd::{LANES, prefetch};

/// Tokens of one tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Tokens of one call at most.
pub(crate) const CALL_TOKENS_MAX: usize = 2 * TILE_ROWS;
/// Panels of one call at most.
pub(crate) const CALL_PANELS_MAX: usize = 2;
/// Width of a block.
pub(crate) const BLOCK_K: usize = 32;
/// bf16 of one tile.
const TILE_ELEMENTS: usize = TILE_ROWS * BLOCK_K;
/// Parts of an activation.
const PARTS: usize = 3;

/// One call: up to two panels by up to two tiles of tokens.
pub(crate) struct MatrixCall {
    /// First panel; the next one follows it.
    pub(crate) panels: *const u16,
    pub(crate) panel_count: usize,
    /// Parts of the first token tile; the next one's follow.
    pub(crate) parts: *const u16,
    pub(crate) tokens: usize,
    pub(crate) k: usize,
    /// Sums, `[panel][token][16]`.
    pub(crate) out: *mut f32,
    /// Elements between a weight and what is prefetched with it.
    pub(crate) ahead: usize,
}

/// Runs a [`MatrixCall`].
///
/// # Safety
/// The call's panels, parts and outputs must be there, `k` a multiple of [`BLOCK_K`], and the unit available.
pub(crate) type Matrix = unsafe fn(&MatrixCall);

/// bf16 of the parts of `rows` rows of `k`.
pub(crate) fn parts_len(rows: usize, k: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS) * k * PARTS
}

/// Splits the rows of one token tile into their parts.
#[inline(always)]
pub(crate) fn split_tile(x: &[f32], k: usize, parts: &mut [u16]) {
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (block, tiles) in x.chunks_exact(BLOCK_K).zip(parts.chunks_exact_mut(PARTS * TILE_ELEMENTS)) {
            let (high, rest) = tiles.split_at_mut(TILE_ELEMENTS);
            let (middle, low) = rest.split_at_mut(TILE_ELEMENTS);
            let at = row * BLOCK_K..(row + 1) * BLOCK_K;
            let parts = high[at.clone()].iter_mut().zip(&mut middle[at.clone()]).zip(&mut low[at]);
            for (x, ((high, middle), low)) in block.iter().zip(parts) {
                [*high, *middle, *low] = split(*x);
            }
        }
    }
}

/// Three bf16 whose sum is `x`, if none of them is subnormal.
#[inline(always)]
fn split(x: f32) -> [u16; PARTS] {
    let cut = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
    let high = cut(x);
    let middle = cut(x - high);
    let low = (x - high) - middle;
    [high, middle, low].map(|part| (part.to_bits() >> 16) as u16)
}

/// The unit's eight tiles.
///
/// # Safety
/// As the methods say; the implementing unit must be available.
unsafe trait Unit {
    /// Takes the unit: `rows` of each token tile, at least 1. All sums are 0.
    unsafe fn begin(rows: [usize; 2]) -> Self;

    /// Adds one block: `parts` is a block of each token tile, `weights` one of each panel.
    unsafe fn add_block(&mut self, parts: [*const u16; 2], weights: [*const u16; 2]);

    /// As [`Unit::add_block`] for the first token tile alone.
    unsafe fn add_block_one_tile(&mut self, parts: *const u16, weights: [*const u16; 2]);

    /// Writes the sums of a token tile and a panel, `[token][16]`.
    unsafe fn store(&self, token_tile: usize, panel: usize, out: *mut f32);

    /// Gives the unit back.
    unsafe fn end(self);
}

#[inline(always)]
unsafe fn run<U: Unit>(call: &MatrixCall) {
    let MatrixCall { panels, panel_count, parts, tokens, k, out, ahead } = *call;
    let blocks = k / BLOCK_K;
    let rows = [tokens.min(TILE_ROWS), tokens.saturating_sub(TILE_ROWS)];
    // A panel that is not there is computed as the first one once more, and not stored.
    let second_panel = if panel_count == CALL_PANELS_MAX { k * LANES } else { 0 };
    // SAFETY: by `Matrix`'s contract; prefetches may point anywhere.
    unsafe {
        let mut unit = U::begin([rows[0], rows[1].max(1)]);
        for block in 0..blocks {
            let weights = [panels.add(block * TILE_ELEMENTS), panels.add(second_panel + block * TILE_ELEMENTS)];
            if ahead > 0 {
                for line in (0..TILE_ELEMENTS).step_by(BLOCK_K) {
                    prefetch(weights[0].wrapping_add(ahead + line));
                    prefetch(weights[1].wrapping_add(ahead + line));
                }
            }
            let first = parts.add(block * PARTS * TILE_ELEMENTS);
            if rows[1] == 0 {
                unit.add_block_one_tile(first, weights);
            } else {
                unit.add_block([first, first.add(blocks * PARTS * TILE_ELEMENTS)], weights);
            }
        }
        for panel in 0..panel_count {
            let out = out.add(panel * tokens * LANES);
            unit.store(0, panel, out);
            if rows[1] > 0 {
                unit.store(1, panel, out.add(TILE_ROWS * LANES));
            }
        }
        unit.end();
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use hardware::{is_available, matrix};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware {
    //! The unit itself, through assembly: its intrinsics are not stable.

    use super::{BLOCK_K, LANES, MatrixCall, TILE_ROWS, Unit, run};
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;

    /// `arch_prctl`, `ARCH_REQ_XCOMP_PERM` and the number of the tile data state (Linux, `asm/prctl.h`).
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    /// `CPUID.7.0:EDX`: AMX-BF16 and AMX-TILE.
    const AMX_BITS: u32 = 1 << 22 | 1 << 24;
    /// Bytes of a row of every tile.
    const ROW_BYTES: u16 = (BLOCK_K * 2) as u16;

    /// Whether the processor has the unit and the kernel lets this process use it.
    pub(crate) fn is_available() -> bool {
        __cpuid_count(7, 0).edx & AMX_BITS == AMX_BITS && request_permission()
    }

    fn request_permission() -> bool {
        let result: i64;
        // SAFETY: the call only widens what state the kernel saves for this process.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") SYS_ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    }

    /// [`super::Matrix`] on the unit.
    ///
    /// # Safety
    /// [`is_available`] must have said so.
    pub(crate) unsafe fn matrix(call: &MatrixCall) {
        // SAFETY: by the caller.
        unsafe { run::<Tiles>(call) }
    }

    /// The tile registers of this thread. The compiler never uses them.
    struct Tiles;

    /// What `ldtilecfg` loads.
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    // SAFETY: callers vouch for the unit and for the memory behind pointers.
    unsafe impl Unit for Tiles {
        #[inline(always)]
        unsafe fn begin(rows: [usize; 2]) -> Self {
            let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
            let [first, second] = rows.map(|rows| rows as u8);
            config.row_bytes[..8].fill(ROW_BYTES);
            config.rows[..8].copy_from_slice(&[first, first, second, second, first, second, TILE_ROWS as u8, TILE_ROWS as u8]);
            // SAFETY: the configuration is valid for palette 1: rows of 64 bytes, at most 16.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    config = in(reg) &raw const config,
                    options(nostack, preserves_flags),
                );
            }
            Self
        }

        #[inline(always)]
        unsafe fn add_block(&mut self, parts: [*const u16; 2], weights: [*const u16; 2]) {
            // SAFETY: by the caller.
            unsafe {
                asm!(
                    "tileloadd tmm6, [{w0} + {stride}*1]",
                    "tileloadd tmm4, [{p0} + {stride}*1]",
                    "tileloadd tmm7, [{w1} + {stride}*1]",
                    "tileloadd tmm5, [{p1} + {stride}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm4, [{p0} + {stride}*1 + 1024]",
                    "tileloadd tmm5, [{p1} + {stride}*1 + 1024]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm4, [{p0} + {stride}*1 + 2048]",
                    "tileloadd tmm5, [{p1} + {stride}*1 + 2048]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    p0 = in(reg) parts[0],
                    p1 = in(reg) parts[1],
                    w0 = in(reg) weights[0],
                    w1 = in(reg) weights[1],
                    stride = in(reg) u64::from(ROW_BYTES),
                    options(nostack, preserves_flags, readonly),
                );
            }
        }

        #[inline(always)]
        unsafe fn add_block_one_tile(&mut self, parts: *const u16, weights: [*const u16; 2]) {
            // SAFETY: by the caller.
            unsafe {
                asm!(
                    "tileloadd tmm6, [{w0} + {stride}*1]",
                    "tileloadd tmm4, [{p0} + {stride}*1]",
                    "tileloadd tmm7, [{w1} + {stride}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm4, [{p0} + {stride}*1 + 1024]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm4, [{p0} + {stride}*1 + 2048]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    p0 = in(reg) parts,
                    w0 = in(reg) weights[0],
                    w1 = in(reg) weights[1],
                    stride = in(reg) u64::from(ROW_BYTES),
                    options(nostack, preserves_flags, readonly),
                );
            }
        }

        #[inline(always)]
        unsafe fn store(&self, token_tile: usize, panel: usize, out: *mut f32) {
            let stride = (LANES * 4) as u64;
            // SAFETY: by the caller.
            unsafe {
                match (token_tile, panel) {
                    (0, 0) => {
                        asm!("tilestored [{out} + {stride}*1], tmm0", out = in(reg) out, stride = in(reg) stride, options(nostack, preserves_flags))
                    }
                    (0, _) => {
                        asm!("tilestored [{out} + {stride}*1], tmm1", out = in(reg) out, stride = in(reg) stride, options(nostack, preserves_flags))
                    }
                    (_, 0) => {
                        asm!("tilestored [{out} + {stride}*1], tmm2", out = in(reg) out, stride = in(reg) stride, options(nostack, preserves_flags))
                    }
                    (_, _) => {
                        asm!("tilestored [{out} + {stride}*1], tmm3", out = in(reg) out, stride = in(reg) stride, options(nostack, preserves_flags))
                    }
                }
            }
        }

        #[inline(always)]
        unsafe fn end(self) {
            // SAFETY: leaves the thread without tile state to save.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
        }
    }
}

/// The unit in plain Rust, so that what feeds it is tested on every machine.
#[cfg(test)]
pub(crate) mod emulated {
    use super::{LANES, MatrixCall, TILE_ELEMENTS, TILE_ROWS, Unit, run};
    use crate::device::cpu::kernels::simd::bf16;

    /// [`super::Matrix`], emulated.
    pub(crate) unsafe fn matrix(call: &MatrixCall) {
        // SAFETY: by the caller.
        unsafe { run::<Tiles>(call) }
    }

    struct Tiles {
        rows: [usize; 2],
        sums: [[f32; TILE_ROWS * LANES]; 4],
    }

    impl Tiles {
        unsafe fn add(&mut self, token_tile: usize, parts: *const u16, weights: [*const u16; 2]) {
            for part in 0..super::PARTS {
                for (panel, weights) in weights.into_iter().enumerate() {
                    for row in 0..self.rows[token_tile] {
                        for i in 0..TILE_ELEMENTS {
                            let (pair, lane, half) = (i / 32, i % 32 / 2, i % 2);
                            // SAFETY: by `Unit`'s contract.
                            let (x, w) = unsafe { (*parts.add(part * TILE_ELEMENTS + row * 32 + pair * 2 + half), *weights.add(i)) };
                            self.sums[panel + 2 * token_tile][row * LANES + lane] += bf16(x) * bf16(w);
                        }
                    }
                }
            }
        }
    }

    // SAFETY: plain memory accesses, as the contract allows.
    unsafe impl Unit for Tiles {
        unsafe fn begin(rows: [usize; 2]) -> Self {
            assert!(rows.iter().all(|rows| (1..=TILE_ROWS).contains(rows)));
            Self { rows, sums: [[0.0; TILE_ROWS * LANES]; 4] }
        }

        unsafe fn add_block(&mut self, parts: [*const u16; 2], weights: [*const u16; 2]) {
            // SAFETY: by the caller.
            unsafe {
                self.add(0, parts[0], weights);
                self.add(1, parts[1], weights);
            }
        }

        unsafe fn add_block_one_tile(&mut self, parts: *const u16, weights: [*const u16; 2]) {
            // SAFETY: by the caller.
            unsafe { self.add(0, parts, weights) }
        }

        unsafe fn store(&self, token_tile: usize, panel: usize, out: *mut f32) {
            let sums = &self.sums[panel + 2 * token_tile][..self.rows[token_tile] * LANES];
            // SAFETY: by the caller.
            unsafe { out.copy_from_nonoverlapping(sums.as_ptr(), sums.len()) }
        }

        unsafe fn end(self) {}
    }

    #[test]
    fn three_parts_are_the_whole() {
        for x in [1.0, -1.0 / 3.0, std::f32::consts::PI, 1e-20, -7.654_321e9, f32::MAX, 0.0] {
            let sum: f64 = super::split(x).into_iter().map(|part| f64::from(bf16(part))).sum();
            assert_eq!(sum, f64::from(x));
        }
        assert!(super::split(f32::NAN).into_iter().any(|part| bf16(part).is_nan()));
    }
}
