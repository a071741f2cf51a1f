//! The arena of activations: one block, from which each launch borrows disjoint slices.

use std::ops::Range;

/// Alignment of the arena's start: a cache line, and one AVX-512 register.
const ALIGN_BYTES: usize = 64;

/// Zeroed f32 memory.
pub(crate) struct Arena {
    memory: Vec<f32>,
    /// Elements before the first aligned one.
    skip: usize,
    len: usize,
}

impl Arena {
    /// An arena of `bytes` bytes; `None` if memory is refused.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        let len = usize::try_from(bytes.div_ceil(4)).ok()?;
        let memory: Vec<f32> = bytemuck::allocation::try_zeroed_vec(len.checked_add(ALIGN_BYTES / 4)?).ok()?;
        let skip = memory.as_ptr().align_offset(ALIGN_BYTES).min(ALIGN_BYTES / 4);
        Some(Self { memory, skip, len })
    }

    /// One range.
    pub(crate) fn one(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut self.elements()[range]
    }

    /// Several ranges.
    ///
    /// # Panics
    /// If they overlap or leave the arena; link has proven that they do not.
    pub(crate) fn disjoint<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [&mut [f32]; N] {
        self.elements().get_disjoint_mut(ranges).expect("link proved the operands of a launch disjoint")
    }

    /// Copies one range over the start of another.
    pub(crate) fn copy(&mut self, from: Range<usize>, to: usize) {
        self.elements().copy_within(from, to);
    }

    fn elements(&mut self) -> &mut [f32] {
        &mut self.memory[self.skip..self.skip + self.len]
    }
}
