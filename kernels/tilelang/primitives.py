"""Types, pass configurations and the data-movement primitives that TileLang cannot spell.

All inline PTX of the project is in this file, and it moves data or synchronises: arithmetic stays
TileLang. `T.import_source(SOURCE)` makes the primitives known to a kernel.
"""

import toolchain  # noqa: F401  (prepares the process; must come before tilelang)
import tilelang.language as T

BF16, F32, I32 = "bfloat16", "float32", "int32"
VEC = 8
"""BF16 values in one 16-byte access."""
WARP = 32

PLAIN = {"tl.disable_safe_memory_legalize": True}
"""Bounds are checked by the kernel itself."""

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
