//! The only unsafe code: reads and writes through the caller's pointers. A driver has to trust its caller.

use crate::{Code, code};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_char};

/// Alignment of allocations; a driver promises 256.
const ALIGN: usize = 512;

/// Writes an out-parameter.
pub(crate) fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller passes a pointer to a value of this type, as the driver's interface demands.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads `from[index]`.
pub(crate) fn get<T: Copy>(from: *const T, index: usize) -> Result<T, Code> {
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller passes a pointer to that many values of this type, as the driver's interface demands.
    Ok(unsafe { from.wrapping_add(index).read_unaligned() })
}

/// Reads `count` values.
pub(crate) fn list<T: Copy>(from: *const T, count: usize) -> Result<Vec<T>, Code> {
    (0..count).map(|index| get(from, index)).collect()
}

/// Reads a NUL-terminated name.
pub(crate) fn text(from: *const c_char) -> Result<String, Code> {
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller passes a NUL-terminated string, as the driver's interface demands.
    Ok(unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

/// Copies between ranges that the books have found inside live allocations.
pub(crate) fn copy(to: u64, from: u64, bytes: usize) {
    // SAFETY: both ranges lie inside live allocations of [`Block`]; they may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

/// Fills a range that the books have found inside a live allocation.
pub(crate) fn fill(to: u64, word: u32, words: usize) {
    // SAFETY: the range lies inside a live allocation of [`Block`].
    let target = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, 4 * words) };
    target.chunks_exact_mut(4).for_each(|chunk| chunk.copy_from_slice(&word.to_le_bytes()));
}

/// Host memory that stands for device or pinned memory.
#[derive(Debug)]
pub(crate) struct Block {
    base: *mut u8,
    layout: Layout,
    bytes: usize,
}

// SAFETY: owned memory without thread affinity.
unsafe impl Send for Block {}

impl Block {
    /// Zeroed memory; the system gives its pages when they are touched.
    pub(crate) fn new(bytes: usize) -> Result<Self, Code> {
        // Aligned by hand: an allocator that is asked for alignment touches every page to zero it.
        let layout = Layout::from_size_align(bytes.saturating_add(ALIGN), 16).map_err(|_| code::INVALID_VALUE)?;
        // SAFETY: the layout has a size above zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() { Err(code::OUT_OF_MEMORY) } else { Ok(Self { base, layout, bytes }) }
    }

    pub(crate) fn address(&self) -> u64 {
        (self.base as u64).next_multiple_of(ALIGN as u64)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once.
        unsafe { dealloc(self.base, self.layout) };
    }
}
