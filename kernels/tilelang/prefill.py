"""Projections of many tokens, bound by the tensor cores: persistent blocks, warp-specialised by hand.

One producer warp keeps a ring of tiles full by TMA, the first weights before the wait on the previous
kernel. Two consumer warpgroups either share every tile by rows, or take turns on whole tiles
(`alternate`), so that one multiplies while the other stores; the main loop is handed over with a named
barrier, because an mbarrier's parity cannot tell a warpgroup that runs two phases ahead. Results are
staged in shared memory and stored by TMA, which nobody waits for until the staging tile is needed
again; a residual tile is loaded into the same staging tile. Tiles are visited in groups of rows, for
the sake of L2.

Stores follow the tensor map: rows between the step's size and the class bound may be overwritten.
"""

from dataclasses import dataclass
from typing import NamedTuple

from contracts import domain, span
from linear import GROUP, declare, projections
from primitives import BF16, F32, I32, PLAIN, WARP, T
from shapes import MODELS
from tilelang.layout import make_full_bank_swizzled_layout, make_half_bank_swizzled_layout

CONFIG = PLAIN | {"tl.disable_warp_specialized": True, "tl.enable_fast_math": True}
BLOCK_M, DEPTH = 128, 64
ROW_GROUP = 16
"""Row tiles visited together."""
SMS = 132
CONSUMERS = 256
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
MINUS_LOG2E = -1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Columns of a tile, ring slots, and whether the warpgroups alternate."""

    rows: int
    stages: int
    alternate: bool = False


class Shared(NamedTuple):
    """Shared memory, barriers and loop state of a block."""

    x: object
    w: object
    full: object
    empty: object
    residual: object
    free: object
    tile_m: object
    tile_n: object
    done: object


def swizzled(buffer):
    """The layout of a staging tile that a tensor map can store."""
    full = int(buffer.shape[-1]) % 64 == 0
    return make_full_bank_swizzled_layout(buffer) if full else make_half_bank_swizzled_layout(buffer)


def locate_macro(row_tiles):
    """Tile number to coordinates: groups of `ROW_GROUP` row tiles, column tiles inside a group."""

    @T.macro
    def locate(tile, tiles_m, tile_m, tile_n):
        group = tile // (ROW_GROUP * row_tiles)
        height = T.min(tiles_m - group * ROW_GROUP, ROW_GROUP)
        inside = tile - group * (ROW_GROUP * row_tiles)
        tile_n[0] = inside // height
        tile_m[0] = inside - tile_n[0] * height + group * ROW_GROUP

    return locate


def finish_macro(p, t, height):
    """From accumulators to the staging tile."""
    rows, half = t.rows, t.rows // 2
    bias, residual, is_swiglu, side = p.bias, p.residual, p.swiglu, 2 * GROUP

    @T.macro
    def finish(acc, up, stage, extra, column):
        if residual:
            for i, j in T.Parallel(height, rows):
                acc[i, j] += T.cast(stage[i, j], F32)
        if bias:
            for i, j in T.Parallel(height, rows):
                acc[i, j] += T.cast(extra[column + j], F32)
        if is_swiglu:
            for i, j in T.Parallel(height, half):
                up[i, j] = acc[i, j // GROUP * side + GROUP + j % GROUP]
            for i, j in T.Parallel(height, half):
                up[i, j] = up[i, j] * acc[i, j // GROUP * side + j % GROUP] / (
                    1.0 + T.exp2(acc[i, j // GROUP * side + j % GROUP] * MINUS_LOG2E))
            T.copy(up, stage)
        else:
            T.copy(acc, stage)

    return finish


def consume_macro(p, t, height, width, row_tiles):
    """Everything that one consumer warpgroup does."""
    stages, rows, alternate, steps = t.stages, t.rows, t.alternate, p.k // DEPTH
    residual, turns_of = p.residual, 2 if t.alternate else 1
    locate, finish = locate_macro(row_tiles), finish_macro(p, t, height)
    policy = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply(s, acc, group, slot, first):
        if alternate:
            T.wgmma_gemm(s.x[slot, :, :], s.w[slot, :, :], acc, transpose_B=True, policy=policy, clear_accum=first)
        else:
            T.wgmma_gemm(s.x[slot, group * height:(group + 1) * height, :], s.w[slot, :, :], acc, transpose_B=True, policy=policy,
                         clear_accum=first)

    @T.macro
    def release(s, thread):
        if thread % WARP == 0:
            T.barrier_arrive(s.empty[(s.done[0] + stages - 1) % stages])

    @T.macro
    def own_stage(s, group, index):
        """Waits until the staging tile is this warpgroup's: filled with the residual, or free."""
        if residual:
            T.barrier_wait(s.residual[0 if alternate else group], index & 1)
        elif alternate:
            T.barrier_wait(s.free[0], (index & 1) ^ 1)
        else:
            T.tma_store_wait(0)
            T.sync_threads(9 + group, 128)

    @T.macro
    def store(s, group, stage, out, thread):
        T.fence_proxy_async()
        T.sync_threads(9 + group, 128)
        if thread < group * 128 + WARP:
            top = s.tile_m[0] * BLOCK_M + (0 if alternate else group * height)
            T.tma_copy(stage, out[top:top + height, s.tile_n[0] * width:(s.tile_n[0] + 1) * width], leader_scope_threads=WARP)
            if residual or alternate:
                T.tma_store_wait(0)
                T.sync_warp()
                if thread == group * 128:
                    T.barrier_arrive(s.free[0 if alternate else group])

    @T.macro
    def consume(group, s, block, tiles, tiles_m, thread, stage, extra, out, acc, up):
        s.done[0] = group * steps if alternate else 0
        if alternate:
            if group == 1:
                T.named_barrier_arrive(12, 256)
        for turn in T.serial((tiles - group + turns_of - 1) // turns_of if alternate else tiles):
            index = turn * turns_of + group if alternate else turn
            locate(block + index * SMS, tiles_m, s.tile_m, s.tile_n)
            if alternate:
                T.sync_threads(12 + group, 256)
            for step in T.serial(steps):
                slot = s.done[0] % stages
                T.barrier_wait(s.full[slot], s.done[0] // stages & 1)
                multiply(s, acc, group, slot, step == 0)
                T.wait_wgmma(1)
                if step > 0:
                    release(s, thread)
                s.done[0] = s.done[0] + 1
            if alternate:
                T.named_barrier_arrive(13 - group, 256)
            T.wait_wgmma(0)
            release(s, thread)
            if alternate:
                s.done[0] = s.done[0] + steps
            own_stage(s, group, index)
            finish(acc, up, stage, extra, s.tile_n[0] * rows)
            store(s, group, stage, out, thread)
        T.tma_store_wait(0)

    return consume


def produce_macro(p, t, height, width, row_tiles):
    """The producer warp."""
    stages, rows, alternate, steps, residual = t.stages, t.rows, t.alternate, p.k // DEPTH, p.residual
    fetch_at = steps // 2 if alternate else min(stages - 1, steps - 1)
    locate = locate_macro(row_tiles)

    @T.macro
    def load_weight(weight, s, step, slot):
        T.tma_copy(weight[s.tile_n[0] * rows:(s.tile_n[0] + 1) * rows, step * DEPTH:(step + 1) * DEPTH], s.w[slot, :, :],
                   barrier=s.full[slot], leader_scope_threads=WARP)

    @T.macro
    def load_residual(extra, s, stage, group, index, thread):
        top = s.tile_m[0] * BLOCK_M + group * height
        T.barrier_wait(s.free[group], (index & 1) ^ 1)
        T.tma_copy(extra[top:top + height, s.tile_n[0] * width:(s.tile_n[0] + 1) * width], stage, barrier=s.residual[group],
                   leader_scope_threads=WARP)
        T.sync_warp()
        if thread == CONSUMERS:
            T.barrier_arrive(s.residual[group])

    @T.macro
    def produce(x, weight, extra, s, block, tiles, tiles_m, thread, stage0, stage1):
        s.done[0] = 0
        if tiles > 0:
            locate(block, tiles_m, s.tile_m, s.tile_n)
            for slot in T.serial(stages):
                load_weight(weight, s, slot, slot)
        T.pdl_sync()
        for index in T.serial(tiles):
            locate(block + index * SMS, tiles_m, s.tile_m, s.tile_n)
            for step in T.serial(steps):
                slot = s.done[0] % stages
                T.barrier_wait(s.empty[slot], (s.done[0] // stages & 1) ^ 1)
                T.tma_copy(x[s.tile_m[0] * BLOCK_M:(s.tile_m[0] + 1) * BLOCK_M, step * DEPTH:(step + 1) * DEPTH], s.x[slot, :, :],
                           barrier=s.full[slot], leader_scope_threads=WARP)
                if s.done[0] >= stages:
                    load_weight(weight, s, step, slot)
                T.sync_warp()
                if thread == CONSUMERS:
                    T.barrier_arrive(s.full[slot])
                s.done[0] = s.done[0] + 1
                if residual:
                    if step == fetch_at:
                        load_residual(extra, s, stage0, 0, index, thread)
                        if not alternate:
                            load_residual(extra, s, stage1, 1, index, thread)

    return produce


def prefill(p, t):
    """`out = epilogue(x · weightᵀ)` for any number of tokens, in tiles of 128 tokens × `rows` weight rows."""
    symbol = p.symbol
    count = T.dynamic(symbol)
    height = BLOCK_M if t.alternate else BLOCK_M // 2
    width = t.rows // 2 if p.swiglu else t.rows
    row_tiles = -(-p.n // t.rows)
    stages, rows, alternate, is_swiglu, steps = t.stages, t.rows, t.alternate, p.swiglu, p.k // DEPTH
    assert steps >= stages and p.k % DEPTH == 0 and not p.f32
    consume, produce = consume_macro(p, t, height, width, row_tiles), produce_macro(p, t, height, width, row_tiles)
    arrivals, holders = (4, 1) if alternate else (8, 2)

    @T.macro
    def body(x, weight, extra, out, block):
        x_ring, w_ring = T.alloc_shared((stages, BLOCK_M, DEPTH), BF16), T.alloc_shared((stages, rows, DEPTH), BF16)
        stage0 = T.alloc_shared((height, width), BF16)
        stage1 = stage0 if alternate else T.alloc_shared((height, width), BF16)
        T.annotate_layout({stage: swizzled(stage) for stage in ([stage0] if alternate else [stage0, stage1])})
        full, empty = T.alloc_barrier([1] * stages), T.alloc_barrier([arrivals] * stages)
        loaded, free = T.alloc_barrier([1] * holders), T.alloc_barrier([1] * holders)
        tile_m, tile_n, done = T.alloc_local((1,), I32), T.alloc_local((1,), I32), T.alloc_local((1,), I32)
        s = Shared(x_ring, w_ring, full, empty, loaded, free, tile_m, tile_n, done)
        thread = T.get_thread_binding()
        tiles_m = T.ceildiv(count, BLOCK_M)
        tiles = (T.max(tiles_m * row_tiles - block, 0) + SMS - 1) // SMS
        T.pdl_trigger()
        if thread >= CONSUMERS:
            T.dec_max_nreg(PRODUCER_REGISTERS)
            if thread < CONSUMERS + WARP:
                produce(x, weight, extra, s, block, tiles, tiles_m, thread, stage0, stage1)
        else:
            T.inc_max_nreg(CONSUMER_REGISTERS)
            acc0 = T.alloc_fragment((height, rows), F32)
            up0 = T.alloc_fragment((height, width), F32) if is_swiglu else acc0
            acc1 = T.alloc_fragment((height, rows), F32)
            up1 = T.alloc_fragment((height, width), F32) if is_swiglu else acc1
            if thread < 128:
                consume(0, s, block, tiles, tiles_m, thread, stage0, extra, out, acc0, up0)
            else:
                consume(1, s, block, tiles, tiles_m, thread, stage1, extra, out, acc1, up1)

    threads = CONSUMERS + 128
    X, W, OUT = T.Tensor((count, p.k), BF16), T.Tensor((p.n, p.k), BF16), T.Tensor((count, p.width), BF16)
    if p.bias:

        @T.prim_func
        def main(x: X, weight: W, bias: T.Tensor((p.n,), BF16), out: OUT):
            with T.Kernel(SMS, threads=threads) as block:
                body(x, weight, bias, out, block)

    elif p.residual:

        @T.prim_func
        def main(x: X, weight: W, residual: T.Tensor((count, p.n), BF16), out: OUT):
            with T.Kernel(SMS, threads=threads) as block:
                body(x, weight, residual, out, block)

    else:

        @T.prim_func
        def main(x: X, weight: W, out: OUT):
            with T.Kernel(SMS, threads=threads) as block:
                body(x, weight, x, out, block)

    return main


# ---- artifacts -----------------------------------------------------------------------------------

SHORT, LONG = 1024, 8192
"""Largest steps of the tiles for few and for many tokens."""

TILES = {
    "qwen2.5-1.5b": {
        "qkv": {SHORT: Tile(128, 6, alternate=True), LONG: Tile(256, 3)},
        "o": {SHORT: Tile(96, 6), LONG: Tile(192, 4)},
        "gate_up": {LONG: Tile(192, 4, alternate=True)},
        "down": {SHORT: Tile(96, 6), LONG: Tile(192, 4)},
    },
    "qwen2.5-0.5b": {
        "qkv": {LONG: Tile(128, 6, alternate=True)},
        "o": {LONG: Tile(128, 6)},
        "gate_up": {LONG: Tile(192, 4, alternate=True)},
        "down": {LONG: Tile(128, 6)},
    },
    "smollm2-135m": {
        "qkv": {LONG: Tile(192, 4)},
        "o": {LONG: Tile(192, 4)},
        "gate_up": {LONG: Tile(192, 4, alternate=True)},
        "down": {LONG: Tile(192, 4)},
    },
    "oxide-tiny": {
        "qkv": {LONG: Tile(128, 4, alternate=True)},
        "o": {LONG: Tile(128, 4)},
        "gate_up": {LONG: Tile(192, 4, alternate=True)},
        "down": {LONG: Tile(128, 4)},
    },
}
"""Tile of each projection up to a number of tokens: measured for the 1.5B profile, scaled from it for the others."""


def _artifact(p, t, bound):
    return declare(f"prefill_{p.role}_{p.n}x{p.k}_m{bound}", p, lambda: prefill(p, t), domain(tokens=span(1, bound)),
                   pass_configs=CONFIG, defines=("primitives.py", "linear.py"))


def artifacts():
    """One kernel a projection and bound."""
    tiles = [(p, TILES.get(m.name, {}).get(p.role, {})) for m in MODELS for p in projections(m)]
    return [_artifact(p, t, bound) for p, chosen in tiles for bound, t in chosen.items()]
