"""Projections of 2 to 256 tokens, bound by the stream of the weights.

A block owns one tile, or a few in turn: a producer warp streams blocks of 64 of the depth into a ring,
weights before the wait on the previous kernel and activations after it; consumer warpgroups multiply
with wgmma. Two orientations:

- tokens on the 64-row side, weight rows on the free side, so that the number of tiles fits the SMs;
- swapped, weight rows on the 64-row side and tokens on the free side: for few tokens.

A deep projection is split over a cluster: each block leaves float32 partial sums in its shared
memory, and every block finishes an equal part of the columns, adding ranks in order. The result is
the same bytes in every run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from contracts import domain, span
from linear import GROUP, declare, projections
from primitives import BF16, CLUSTER, F32, I32, THREADED, WARP, T, round_up
from shapes import MODELS

CONFIG = THREADED | {"tl.disable_warp_specialized": True, "tl.enable_fast_math": True}
DEPTH = 64
"""Elements of the depth in a ring slot: one 128-byte swizzled row."""
PAD = 8
"""Keeps rows of partial sums in different banks."""
MINUS_LOG2E = -1.4426950408889634
SMS = 132


@dataclass(frozen=True)
class Tile:
    """How a projection is cut."""

    tokens: int
    rows: int
    stages: int
    swap: bool = False
    split: int = 1
    token_tiles: int = 1
    blocks: int | None = None
    resident: bool = False
    groups: int | None = None
    registers: int | None = None
    fold: int = 1
    """Blocks of the depth in a ring slot: fewer hand-overs where a step has little to multiply."""
    alternate: bool = False
    """Two warpgroups take turns on whole tiles, so that one multiplies while the other stores."""


class Geometry:
    """Numbers that follow from a projection and its tile."""

    def __init__(self, p, t):
        self.steps = p.k // (DEPTH * t.fold)
        self.row_tiles = -(-p.n // t.rows)
        self.tiles = self.row_tiles * t.token_tiles
        self.owners = t.blocks or self.tiles
        self.turns = -(-self.tiles // self.owners)
        self.row_slots = round_up(t.rows, 64) if t.swap else t.rows
        self.padded = self.row_slots != t.rows
        self.groups = t.groups or (1 if t.swap else t.tokens // 64)
        wide = self.row_slots if t.swap else t.tokens
        self.height = wide if t.alternate else wide // self.groups
        self.accumulator = (self.height, t.tokens) if t.swap else (self.height, t.rows)
        self.half = (self.height // (2 * GROUP), GROUP, t.tokens) if t.swap else (self.height, t.rows // 2)
        self.consumers = 128 * self.groups
        self.threads = self.consumers + (128 if t.registers else WARP)
        self.columns = t.rows // t.split
        self.has_addend = t.swap and t.split == 1 and (p.bias or p.residual)
        self.pieces = t.tokens * self.columns // 4
        self.piece_turns = -(-self.pieces // self.consumers)
        # TileLang drops the guard of a loop that runs once or not at all: the second group must have a tile in every block.
        assert not t.alternate or self.tiles // self.owners >= 2
        assert t.split == 1 or (self.turns == 1 and not p.swiglu and self.columns % 4 == 0)
        assert not p.swiglu or t.rows % (2 * GROUP) == 0
        assert p.k % (DEPTH * t.fold) == 0 and self.height % 64 == 0 and not (t.resident and t.fold > 1)


class Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    x: object
    w: object
    partial: object
    full: object
    empty: object
    resident: object
    turn: object


def store_macro(p, t, g, count):
    """Finishes a tile of accumulators that one block holds whole."""
    width, result, shift = p.width, F32 if p.f32 else BF16, 0
    bias, residual, is_swiglu = p.bias, p.residual, p.swiglu
    height, tokens, rows = g.height, t.tokens, t.rows
    half_rows, side = rows // 2, 2 * GROUP

    @T.macro
    def plain(acc, up, extra, out, token, row, part):
        if residual:
            for i, j in T.Parallel(height, rows):
                if token + i < count and row + j < width:
                    acc[i, j] += T.cast(extra[token + i, row + j], F32)
        if bias:
            for i, j in T.Parallel(height, rows):
                acc[i, j] += T.cast(extra[row + j], F32)
        for i, j in T.Parallel(height, rows):
            if token + i < count and row + j < width:
                out[token + i, row + j] = T.cast(acc[i, j], result)

    @T.macro
    def swiglu(acc, up, extra, out, token, row, part):
        for i, j in T.Parallel(height, half_rows):
            up[i, j] = acc[i, j // GROUP * side + GROUP + j % GROUP]
        for i, j in T.Parallel(height, half_rows):
            up[i, j] = up[i, j] * acc[i, j // GROUP * side + j % GROUP] / (
                1.0 + T.exp2(acc[i, j // GROUP * side + j % GROUP] * MINUS_LOG2E))
        for i, j in T.Parallel(height, half_rows):
            if token + i < count and row // 2 + j < width:
                out[token + i, row // 2 + j] = T.cast(up[i, j], BF16)

    @T.macro
    def swapped(acc, held, extra, out, token, row, part):
        if bias or residual:
            for i, j in T.Parallel(height, tokens):
                acc[i, j] += T.cast(held[i, j], F32)
        for i, j in T.Parallel(height, tokens):
            if j < count and part + i < rows and row + part + i < width:
                out[j, row + part + i] = T.cast(acc[i, j], result)

    @T.macro
    def swapped_swiglu(acc, up, extra, out, token, row, part):
        for a, b, j in T.Parallel(height // side, GROUP, tokens):
            up[a, b, j] = acc[a * side + GROUP + b, j]
        for a, b, j in T.Parallel(height // side, GROUP, tokens):
            up[a, b, j] = up[a, b, j] * acc[a * side + b, j] / (1.0 + T.exp2(acc[a * side + b, j] * MINUS_LOG2E))
        for a, b, j in T.Parallel(height // side, GROUP, tokens):
            if j < count and part // 2 + a * GROUP + b < half_rows and (row + part) // 2 + a * GROUP + b < width:
                out[j, (row + part) // 2 + a * GROUP + b] = T.cast(up[a, b, j], BF16)

    if t.swap:
        assert not (is_swiglu and (bias or residual))
        return swapped_swiglu if is_swiglu else swapped
    return swiglu if is_swiglu else plain


def addend_macro(p, t, g, count):
    """Reads bias or residual of a swapped tile while its weights are on their way."""
    height, tokens, rows, width, residual = g.height, t.tokens, t.rows, p.width, p.residual

    @T.macro
    def fetch(held, extra, row, part):
        for i, j in T.Parallel(height, tokens):
            held[i, j] = T.cast(0, BF16)
            if j < count and part + i < rows and row + part + i < width:
                if residual:
                    held[i, j] = extra[j, row + part + i]
                else:
                    held[i, j] = extra[row + part + i]

    return fetch


def partial_macro(t, g):
    """Leaves a tile of accumulators in shared memory for the cluster."""
    height, tokens, rows = g.height, t.tokens, t.rows

    @T.macro
    def straight(acc, partial, part):
        for i, j in T.Parallel(height, rows):
            partial[part + i, j] = acc[i, j]

    @T.macro
    def swapped(acc, partial, part):
        for i, j in T.Parallel(height, tokens):
            if part + i < rows:
                partial[j, part + i] = acc[i, j]

    return swapped if t.swap else straight


def reduce_macros(p, t, g, count):
    """Reads the epilogue's operand early, and adds the partial sums of the ranks in order."""
    split, columns, pieces, turns = t.split, g.columns, g.pieces, g.piece_turns
    consumers, tokens, width = g.consumers, t.tokens, p.width
    bias, residual, has_extra, result = p.bias, p.residual, p.bias or p.residual, F32 if p.f32 else BF16
    per_row = columns // 4

    @T.macro
    def fetch(extra, held, thread, token, row, rank):
        for turn in T.unroll(turns):
            piece = turn * consumers + thread
            line, column = piece // per_row, row + rank * columns + piece % per_row * 4
            if piece < pieces and token + line < count and column < width:
                if residual:
                    for q in T.vectorized(4):
                        held[turn * 4 + q] = extra[token + line, column + q]
                if bias:
                    for q in T.vectorized(4):
                        held[turn * 4 + q] = extra[column + q]

    @T.macro
    def finish(partial, held, addends, total, rounded, out, thread, token, row, rank):
        for turn in T.unroll(turns):
            piece = turn * consumers + thread
            line, local = piece // per_row, piece % per_row * 4
            column = row + rank * columns + local
            if piece < pieces and token + line < count and column < width:
                for r in T.unroll(split):
                    T.call_extern("handle", "ox_cluster_load4", T.access_ptr(addends[r * 4], "w"),
                                  T.access_ptr(partial[line, rank * columns + local], "r"), r)
                for q in T.unroll(4):
                    total[q] = T.cast(held[turn * 4 + q], F32) if has_extra else 0.0
                for r in T.unroll(split):
                    for q in T.unroll(4):
                        total[q] += addends[r * 4 + q]
                for q in T.unroll(4):
                    rounded[q] = T.cast(total[q], result)
                for q in T.vectorized(4):
                    out[token + line, column + q] = rounded[q]

    return fetch, finish


def consume_macro(p, t, g, count):
    """The main loop of one consumer warpgroup."""
    stages, split, swap, resident, alternate = t.stages, t.split, t.swap, t.resident, t.alternate
    token_tiles, tokens, rows, owners = t.token_tiles, t.tokens, t.rows, g.owners
    height, padded, fold = g.height, g.padded, t.fold
    store, leave, fetch_addend, has_addend = store_macro(p, t, g, count), partial_macro(t, g), addend_macro(p, t, g, count), g.has_addend
    policy = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply(s, acc, group, slot, at, first):
        if swap:
            if padded:
                T.wgmma_gemm(s.w[slot * rows + group * height:slot * rows + (group + 1) * height, :], s.x[at, :, :], acc,
                             transpose_B=True, policy=policy, clear_accum=first)
            else:
                T.wgmma_gemm(s.w[slot, group * height:(group + 1) * height, :], s.x[at, :, :], acc, transpose_B=True, policy=policy,
                             clear_accum=first)
        elif alternate:
            T.wgmma_gemm(s.x[at, :, :], s.w[slot, :, :], acc, transpose_B=True, policy=policy, clear_accum=first)
        else:
            T.wgmma_gemm(s.x[at, group * height:(group + 1) * height, :], s.w[slot, :, :], acc, transpose_B=True, policy=policy,
                         clear_accum=first)

    @T.macro
    def release(s, done, thread):
        if thread % WARP == 0:
            T.barrier_arrive(s.empty[(done + stages - 1) % stages])

    @T.macro
    def consume(group, s, owner, turns, steps, thread, extra, out, acc, beside):
        done = s.turn
        done[0] = group * steps if alternate else 0
        if alternate:
            if group == 1:
                T.named_barrier_arrive(12, 256)
        for turn in T.serial((turns - group + 1) // 2 if alternate else turns):
            index = turn * 2 + group if alternate else turn
            tile = owner + index * owners
            token, row = tile % token_tiles * tokens, tile // token_tiles * rows
            if alternate:
                T.sync_threads(12 + group, 256)
            if has_addend:
                fetch_addend(beside, extra, row, group * height)
            for step in T.serial(steps):
                slot = done[0] % stages
                T.barrier_wait(s.full[slot], done[0] // stages & 1)
                if resident:
                    if index == 0:
                        T.barrier_wait(s.resident[step], 0)
                if fold == 1:
                    multiply(s, acc, group, slot, step if resident else slot, step == 0)
                else:
                    multiply(s, acc, group, slot * fold, slot * fold, step == 0)
                    for f in T.unroll(fold - 1):
                        multiply(s, acc, group, slot * fold + f + 1, slot * fold + f + 1, False)
                T.wait_wgmma(fold)
                if step > 0:
                    release(s, done[0], thread)
                done[0] = done[0] + 1
            if alternate:
                T.named_barrier_arrive(13 - group, 256)
            T.wait_wgmma(0)
            release(s, done[0], thread)
            if alternate:
                done[0] = done[0] + steps
            part = 0 if alternate else group * height
            if split > 1:
                leave(acc, s.partial, part)
            elif swap:
                store(acc, beside, extra, out, token, row, part)
            else:
                store(acc, beside, extra, out, token + part, row, part)

    return consume


def produce_macros(p, t, g):
    """The producer warp: weights before the wait, then weights and activations as slots free up."""
    stages, resident, token_tiles, tokens, rows, owners = t.stages, t.resident, t.token_tiles, t.tokens, t.rows, g.owners
    padded, consumers, all_steps, fold = g.padded, g.consumers, g.steps, t.fold

    @T.macro
    def load_weight(weight, s, row_tile, step, slot):
        for f in T.unroll(fold):
            if padded:
                T.tma_copy(weight[row_tile * rows:(row_tile + 1) * rows, (step * fold + f) * DEPTH:(step * fold + f + 1) * DEPTH],
                           s.w[(slot * fold + f) * rows:(slot * fold + f + 1) * rows, :], barrier=s.full[slot], leader_scope_threads=WARP,
                           eviction_policy="evict_first")
            else:
                T.tma_copy(weight[row_tile * rows:(row_tile + 1) * rows, (step * fold + f) * DEPTH:(step * fold + f + 1) * DEPTH],
                           s.w[slot * fold + f, :, :], barrier=s.full[slot], leader_scope_threads=WARP, eviction_policy="evict_first")

    @T.macro
    def load_tokens(x, s, token_tile, step, slot):
        for f in T.unroll(fold):
            T.tma_copy(x[token_tile * tokens:(token_tile + 1) * tokens, (step * fold + f) * DEPTH:(step * fold + f + 1) * DEPTH],
                       s.x[slot * fold + f, :, :], barrier=s.full[slot], leader_scope_threads=WARP)

    @T.macro
    def produce(x, weight, s, owner, turns, first, steps, thread):
        done = s.turn
        done[0] = 0
        for ahead in T.serial(stages):
            if ahead < steps * turns:
                load_weight(weight, s, (owner + ahead // steps * owners) // token_tiles, first + ahead % steps, ahead)
        T.pdl_sync()
        if resident:
            for step in T.serial(all_steps):
                T.tma_copy(x[0:tokens, step * DEPTH:(step + 1) * DEPTH], s.x[step, :, :], barrier=s.resident[step],
                           leader_scope_threads=WARP)
                T.sync_warp()
                if thread == consumers:
                    T.barrier_arrive(s.resident[step])
        for turn in T.serial(turns):
            tile = owner + turn * owners
            for step in T.serial(steps):
                slot = done[0] % stages
                T.barrier_wait(s.empty[slot], (done[0] // stages & 1) ^ 1)
                if done[0] >= stages:
                    load_weight(weight, s, tile // token_tiles, first + step, slot)
                if not resident:
                    load_tokens(x, s, tile % token_tiles, first + step, slot)
                T.sync_warp()
                if thread == consumers:
                    T.barrier_arrive(s.full[slot])
                done[0] = done[0] + 1

    return produce


def dispatch_macro(p, t, g, count):
    """Runs `consume` in every consumer warpgroup, each with accumulators of its own."""
    consume = consume_macro(p, t, g, count)
    groups, accumulator, half, is_swiglu, has_addend = g.groups, g.accumulator, g.half, p.swiglu, g.has_addend

    @T.macro
    def one(group, *rest):
        acc = T.alloc_fragment(accumulator, F32)
        beside = T.alloc_fragment(half, F32) if is_swiglu else T.alloc_fragment(accumulator, BF16) if has_addend else acc
        consume(group, *rest, acc, beside)

    @T.macro
    def dispatch(thread, *rest):
        if groups == 1:
            one(0, *rest)
        elif groups == 2:
            if thread < 128:
                one(0, *rest)
            else:
                one(1, *rest)
        else:
            if thread < 128:
                one(0, *rest)
            elif thread < 256:
                one(1, *rest)
            else:
                one(2, *rest)

    return dispatch


def skinny(p, t):
    """`out = epilogue(x · weightᵀ)` for up to `tokens · token_tiles` tokens."""
    g, symbol = Geometry(p, t), p.symbol
    count = T.dynamic(symbol)
    produce, dispatch = produce_macros(p, t, g), dispatch_macro(p, t, g, count)
    fetch, finish = reduce_macros(p, t, g, count)
    stages, split, tokens, rows, registers, resident, fold = t.stages, t.split, t.tokens, t.rows, t.registers, t.resident, t.fold
    token_tiles, residual, result = t.token_tiles, p.residual, F32 if p.f32 else BF16
    groups, steps, consumers, tiles, owners, row_slots = g.groups, g.steps, g.consumers, g.tiles, g.owners, g.row_slots
    padded, piece_turns, arrivals = g.padded, g.piece_turns, 4 if t.alternate else 4 * g.groups

    @T.macro
    def body(x, weight, extra, out, block):
        T.import_source(CLUSTER)
        x_ring = T.alloc_shared((steps if resident else stages * fold, tokens, DEPTH), BF16)
        w_shape = (stages * fold * rows + row_slots - rows, DEPTH) if padded else (stages * fold, rows, DEPTH)
        w_ring = T.alloc_shared(w_shape, BF16)
        partial = T.alloc_shared((tokens, rows + PAD), F32) if split > 1 else w_ring
        full = T.alloc_barrier([1] * stages)
        empty = T.alloc_barrier([arrivals] * stages)
        landed = T.alloc_barrier([1] * steps) if resident else empty
        turn = T.alloc_local((1,), I32)
        held = T.alloc_local((piece_turns * 4,), BF16)
        addends, total, rounded = T.alloc_local((split * 4,), F32), T.alloc_local((4,), F32), T.alloc_local((4,), result)
        s = Shared(x_ring, w_ring, partial, full, empty, landed, turn)
        thread = T.get_thread_binding()
        rank, owner = block % split, block // split
        turns = (T.max(tiles - owner, 0) + owners - 1) // owners
        first = rank * steps // split
        own_steps = (rank + 1) * steps // split - first
        token, row = owner % token_tiles * tokens, owner // token_tiles * rows
        T.pdl_trigger()
        if thread >= consumers:
            if registers:
                T.dec_max_nreg(24)
            if thread < consumers + WARP:
                produce(x, weight, s, owner, turns, first, own_steps, thread)
        else:
            if registers:
                T.inc_max_nreg(registers)
            if split > 1 or residual:
                T.pdl_sync()
            if split > 1:
                fetch(extra, held, thread, token, row, rank)
            dispatch(thread, s, owner, turns, own_steps, thread, extra, out)
        if split > 1:
            T.cluster_sync()
            if thread < consumers:
                finish(partial, held, addends, total, rounded, out, thread, token, row, rank)
            T.cluster_sync()

    cluster = {"cluster_dims": (split, 1, 1)} if split > 1 else {}
    blocks = owners * split
    X, W, OUT = T.Tensor((count, p.k), BF16), T.Tensor((p.n, p.k), BF16), T.Tensor((count, p.width), result)
    if p.bias:

        @T.prim_func
        def main(x: X, weight: W, bias: T.Tensor((p.n,), BF16), out: OUT):
            with T.Kernel(blocks, threads=g.threads, **cluster) as block:
                body(x, weight, bias, out, block)

    elif p.residual:

        @T.prim_func
        def main(x: X, weight: W, residual: T.Tensor((count, p.n), BF16), out: OUT):
            with T.Kernel(blocks, threads=g.threads, **cluster) as block:
                body(x, weight, residual, out, block)

    else:

        @T.prim_func
        def main(x: X, weight: W, out: OUT):
            with T.Kernel(blocks, threads=g.threads, **cluster) as block:
                body(x, weight, x, out, block)

    return main


# ---- artifacts -----------------------------------------------------------------------------------

BOUNDS = (8, 16, 32, 64, 128, 256)
"""Largest step of each class."""

TILES = {
    "qwen2.5-1.5b": {
        "qkv": (
            Tile(8, 64, 6, swap=True, split=4), Tile(16, 64, 6, swap=True, split=4), Tile(32, 64, 6, swap=True, split=4),
            Tile(64, 32, 4, split=2, fold=3), Tile(128, 32, 8, split=2), Tile(128, 64, 6, split=2, token_tiles=2),
        ),
        "o": (
            Tile(8, 64, 6, swap=True, split=4), Tile(16, 64, 6, swap=True, split=4), Tile(32, 64, 6, swap=True, split=4),
            Tile(64, 64, 6, swap=True, split=4), Tile(128, 32, 5, split=2, fold=2), Tile(128, 48, 6, split=2, token_tiles=2),
        ),
        "gate_up": (
            Tile(8, 144, 8, swap=True, groups=3), Tile(16, 144, 8, swap=True, groups=3), Tile(32, 144, 8, swap=True, groups=3),
            Tile(64, 144, 8), Tile(128, 144, 5), Tile(256, 144, 4, groups=2, registers=240),
        ),
        "down": (
            Tile(8, 64, 4, swap=True, split=4, fold=4), Tile(16, 64, 8, swap=True, split=4, fold=2),
            Tile(32, 64, 4, swap=True, split=4, fold=4), Tile(64, 64, 5, split=4, fold=2), Tile(128, 128, 4, split=8),
            Tile(128, 128, 4, split=4, token_tiles=2),
        ),
        "head": (
            Tile(8, 192, 7, swap=True, blocks=SMS, resident=True), Tile(16, 192, 7, swap=True, blocks=SMS, resident=True),
            Tile(32, 192, 4, swap=True, blocks=SMS, resident=True), Tile(64, 192, 6, swap=True, blocks=SMS, groups=3),
            Tile(128, 128, 6, blocks=SMS, groups=2, registers=240, alternate=True),
            Tile(256, 192, 4, blocks=SMS, groups=2, registers=240),
        ),
    },
    "qwen2.5-0.5b": {
        "qkv": (
            Tile(8, 64, 6, swap=True, split=4), Tile(16, 64, 6, swap=True, split=4), Tile(32, 64, 6, swap=True, split=4),
            Tile(64, 32, 8, split=2), Tile(64, 32, 5, split=2, token_tiles=2), Tile(64, 48, 6, token_tiles=4),
        ),
        "o": (
            Tile(8, 64, 6, swap=True, split=4), Tile(16, 64, 6, swap=True, split=4), Tile(32, 64, 6, swap=True, split=4),
            Tile(64, 64, 6, swap=True, split=4), Tile(64, 32, 5, split=2, token_tiles=2), Tile(64, 32, 6, token_tiles=4),
        ),
        "gate_up": (
            Tile(8, 80, 8, swap=True, groups=2), Tile(16, 80, 8, swap=True, groups=2), Tile(64, 80, 8), Tile(64, 80, 8),
            Tile(128, 80, 6), Tile(256, 80, 4, groups=2, registers=240),
        ),
        "down": (
            Tile(8, 64, 10, swap=True, split=8), Tile(16, 64, 10, swap=True, split=8), Tile(32, 64, 9, swap=True, split=8),
            Tile(64, 64, 8, split=8), Tile(128, 64, 6, split=8), Tile(128, 64, 6, split=4, token_tiles=2),
        ),
        "head": (
            Tile(8, 192, 7, swap=True, blocks=SMS, resident=True), Tile(16, 192, 7, swap=True, blocks=SMS, resident=True),
            Tile(32, 192, 5, swap=True, blocks=SMS, resident=True), Tile(64, 192, 6, swap=True, blocks=SMS, groups=3),
            Tile(128, 192, 5, blocks=SMS, groups=2, registers=240, alternate=True),
            Tile(128, 192, 5, token_tiles=2, blocks=SMS, groups=2, registers=240, alternate=True),
        ),
    },
    "smollm2-135m": {
        "qkv": (
            Tile(8, 64, 4, swap=True, split=4), Tile(16, 64, 4, swap=True, split=4), Tile(32, 64, 4, swap=True, split=4),
            Tile(64, 32, 5, split=2), Tile(64, 32, 5, split=2, token_tiles=2), Tile(64, 32, 6, token_tiles=4),
        ),
        "o": (
            Tile(8, 64, 4, swap=True, split=4), Tile(16, 64, 4, swap=True, split=4), Tile(32, 64, 4, swap=True, split=4),
            Tile(64, 64, 4, swap=True, split=4), Tile(64, 32, 5, split=2, token_tiles=2), Tile(64, 32, 6, token_tiles=4),
        ),
        "gate_up": (
            Tile(8, 32, 8, swap=True), Tile(16, 32, 8, swap=True), Tile(64, 32, 8), Tile(64, 32, 8), Tile(128, 32, 6),
            Tile(256, 32, 4, groups=2),
        ),
        "down": (
            Tile(8, 64, 4, swap=True, split=8), Tile(16, 64, 4, swap=True, split=8), Tile(32, 64, 4, swap=True, split=8),
            Tile(64, 64, 4, split=8), Tile(128, 64, 4, split=8), Tile(128, 64, 4, split=4, token_tiles=2),
        ),
        "head": (
            Tile(8, 192, 7, swap=True, blocks=SMS, resident=True), Tile(16, 192, 7, swap=True, blocks=SMS, resident=True),
            Tile(32, 192, 6, swap=True, blocks=SMS, resident=True), Tile(64, 192, 6, swap=True, blocks=SMS, groups=3),
            Tile(128, 192, 5, blocks=128, groups=2, registers=240, alternate=True),
            Tile(128, 192, 5, token_tiles=2, blocks=SMS, groups=2, registers=240, alternate=True),
        ),
    },
}
"""Tile of each projection at each bound: chosen for the 1.5B profile by the time of whole steps (`kernels/bench_step.py`), scaled
from it for the others."""


def _artifact(p, t, bound):
    steps = domain(rows=span(1, bound)) if p.f32 else domain(tokens=span(1, bound))
    return declare(f"skinny_{p.role}_{p.n}x{p.k}_m{bound}", p, lambda: skinny(p, t), steps, pass_configs=CONFIG,
                   defines=("primitives.py", "linear.py"))


def artifacts():
    """One kernel a projection and bound."""
    tiles = [(p, TILES.get(m.name, {}).get(p.role, ())) for m in MODELS for p in projections(m)]
    return [_artifact(p, t, bound) for p, chosen in tiles for t, bound in zip(chosen, BOUNDS)]
