//! The arena of activations: one block, from which each launch borrows disjoint slices.

use std::ops::Range;

/// Alignment of the arena's start: a cache line, and one AVX-512 register.
const ALIGN_BYTES: usize = 64;

/// Zeroed memory that starts at a cache line.
pub(crate) struct Aligned<T> {
    memory: Vec<T>,
    /// Elements before the first aligned one.
    skip: usize,
    len: usize,
}

impl<T: bytemuck::Zeroable> Aligned<T> {
    /// `len` zeros; `None` if memory is refused.
    pub(crate) fn new(len: usize) -> Option<Self> {
        let slack = ALIGN_BYTES / size_of::<T>();
        let memory: Vec<T> = bytemuck::allocation::try_zeroed_vec(len.checked_add(slack)?).ok()?;
        let skip = memory.as_ptr().align_offset(ALIGN_BYTES).min(slack);
        Some(Self { memory, skip, len })
    }

    /// All of it.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.memory[self.skip..self.skip + self.len]
    }
}

/// Zeroed f32 memory.
pub(crate) struct Arena(Aligned<f32>);

impl Arena {
    /// An arena of `bytes` bytes; `None` if memory is refused.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        Aligned::new(usize::try_from(bytes.div_ceil(4)).ok()?).map(Self)
    }

    /// One range.
    pub(crate) fn one(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut self.0.as_mut_slice()[range]
    }

    /// Several ranges.
    ///
    /// # Panics
    /// If they overlap or leave the arena; link has proven that they do not.
    pub(crate) fn disjoint<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [&mut [f32]; N] {
        self.0.as_mut_slice().get_disjoint_mut(ranges).expect("link proved the operands of a launch disjoint")
    }

    /// Copies one range over the start of another.
    pub(crate) fn copy(&mut self, from: Range<usize>, to: usize) {
        self.0.as_mut_slice().copy_within(from, to);
    }
}
