"""Types, pass configurations and the data-movement primitives that TileLang cannot spell.

All inline PTX of the project is in this file, and it moves data or synchronises: arithmetic stays
TileLang. `T.import_source(SOURCE)` makes the primitives known to a kernel.
"""

import toolchain  # noqa: F401  (prepares the process; must come before tilelang)
import tilelang.language as T

BF16, F32, I32, I64 = "bfloat16", "float32", "int32", "int64"
VEC = 8
"""BF16 values in one 16-byte access."""
WARP = 32

PLAIN = {"tl.disable_safe_memory_legalize": True}
"""Bounds are checked by the kernel itself."""
THREADED = PLAIN | {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_data_race_check": True,
}
"""The kernel is written thread by thread and places its own barriers."""

TRANSPOSE = r"""
// Transposes two 8x8 matrices of 16-bit elements held by a warp, one register a matrix.
__device__ __forceinline__ void ox_transpose_pair(void* pair) {
  unsigned* r = (unsigned*)pair;
  unsigned low = r[0], high = r[1];
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(low) : "r"(low));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(high) : "r"(high));
  r[0] = low;
  r[1] = high;
}
"""

SOURCE = r"""
"""


def round_up(value, multiple):
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


@T.macro
def load8(local, at, row, column):
    """Eight consecutive elements of a row into registers."""
    for k in T.vectorized(VEC):
        local[at + k] = row[column + k]


@T.macro
def mma_16x8x16(a, a_at, b, b_at, c, c_at):
    """`c += a · b` of one warp on registers: BF16 16 × 16 by 16 × 8, F32 accumulators."""
    T.ptx_mma("float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", a.data, a_at, b.data, b_at, c.data, c_at, T.bool(False))
