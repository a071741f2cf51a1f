"""Plain projections: any shape, any number of tokens, one kernel each.

A block computes a 64-row tile with asynchronous copies and wgmma. This family is the baseline of
correctness and serves every step that no faster family claims.
"""

from contracts import domain, span
from linear import GROUP, all_projections, declare
from primitives import BF16, F32, T
from shapes import SEQS_MAX, TOKENS_MAX

BLOCK_M, BLOCK_K, STAGES, THREADS = 64, 64, 4, 128
CONFIG = {"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True}


def epilogue(p, block_n, count):
    """The macro that finishes a tile of accumulators: bias, SwiGLU, residual, rounding, store."""
    half = block_n // 2
    result = F32 if p.f32 else BF16
    bias, residual = p.bias, p.residual

    @T.macro
    def swiglu(acc, up, out, row, column):
        for i, j in T.Parallel(BLOCK_M, half):
            up[i, j] = acc[i, j // GROUP * 2 * GROUP + GROUP + j % GROUP]
        for i, j in T.Parallel(BLOCK_M, half):
            up[i, j] = up[i, j] * acc[i, j // GROUP * 2 * GROUP + j % GROUP] / (
                1.0 + T.exp(-acc[i, j // GROUP * 2 * GROUP + j % GROUP]))
        for i, j in T.Parallel(BLOCK_M, half):
            if row + i < count:
                out[row + i, column // 2 + j] = T.cast(up[i, j], BF16)

    @T.macro
    def plain(acc, extra, out, row, column):
        if bias:
            for i, j in T.Parallel(BLOCK_M, block_n):
                acc[i, j] += T.cast(extra[column + j], F32)
        if residual:
            for i, j in T.Parallel(BLOCK_M, block_n):
                if row + i < count:
                    acc[i, j] += T.cast(extra[row + i, column + j], F32)
        for i, j in T.Parallel(BLOCK_M, block_n):
            if row + i < count:
                out[row + i, column + j] = T.cast(acc[i, j], result)

    return swiglu if p.swiglu else plain


def gemm(p, block_n):
    """`out[t] = epilogue(x[t] · weightᵀ)` in tiles of 64 × `block_n`."""
    symbol, swiglu = p.symbol, p.swiglu
    count = T.dynamic(symbol)
    finish = epilogue(p, block_n, count)

    @T.macro
    def body(x, weight, extra, out, bm, bn):
        x_tile = T.alloc_shared((BLOCK_M, BLOCK_K), BF16)
        w_tile = T.alloc_shared((block_n, BLOCK_K), BF16)
        acc = T.alloc_fragment((BLOCK_M, block_n), F32)
        T.clear(acc)
        T.pdl_trigger()
        T.pdl_sync()
        for step in T.Pipelined(p.k // BLOCK_K, num_stages=STAGES):
            T.copy(x[bm * BLOCK_M, step * BLOCK_K], x_tile)
            T.copy(weight[bn * block_n, step * BLOCK_K], w_tile)
            T.gemm(x_tile, w_tile, acc, transpose_B=True)
        if swiglu:
            up = T.alloc_fragment((BLOCK_M, block_n // 2), F32)
            finish(acc, up, out, bm * BLOCK_M, bn * block_n)
        else:
            finish(acc, extra, out, bm * BLOCK_M, bn * block_n)

    grid = (T.ceildiv(count, BLOCK_M), p.n // block_n)
    X, W = T.Tensor((count, p.k), BF16), T.Tensor((p.n, p.k), BF16)
    OUT = T.Tensor((count, p.width), F32 if p.f32 else BF16)
    if p.bias:

        @T.prim_func
        def main(x: X, weight: W, bias: T.Tensor((p.n,), BF16), out: OUT):
            with T.Kernel(*grid, threads=THREADS) as (bm, bn):
                body(x, weight, bias, out, bm, bn)

    elif p.residual:

        @T.prim_func
        def main(x: X, weight: W, residual: T.Tensor((count, p.n), BF16), out: OUT):
            with T.Kernel(*grid, threads=THREADS) as (bm, bn):
                body(x, weight, residual, out, bm, bn)

    else:

        @T.prim_func
        def main(x: X, weight: W, out: OUT):
            with T.Kernel(*grid, threads=THREADS) as (bm, bn):
                body(x, weight, x, out, bm, bn)

    return main


def artifacts():
    """One kernel a projection."""
    found = []
    for p in all_projections():
        steps = domain(rows=span(1, 2 * SEQS_MAX)) if p.f32 else domain(tokens=span(1, 2 * TOKENS_MAX))
        block_n = 128 if p.n % 128 == 0 and p.n >= 3072 else 64
        found.append(declare(f"gemm_{p.role}_{p.n}x{p.k}", p, lambda p=p, b=block_n: gemm(p, b), steps, pass_configs=CONFIG))
    return found
