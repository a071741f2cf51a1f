"""Paged decode attention: one query row a sequence, K and V read once, one kernel, no second launch.

A *unit* is 16 tokens of one sequence and KV head. Each (sequence, KV head) is cut into equal *chunks*
of units; how many depends on the sequence's own length and on the bound of the batch class alone, so
that a row's bits depend neither on its neighbours nor on the block that happens to compute it. Blocks
take consecutive chunks of nearly equal total weight from a list that each of them derives from the
lengths on the device: one captured graph serves every set of lengths, and a row of length 0 is read
and written by nobody.

Inside a chunk a warp takes every `warps`-th unit, straight from global memory into MMA fragments:
Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ, with the query heads of the group on the 8-wide side. The next unit's K is
requested after the current QK, its V after the current PV. Warps merge in order through shared memory.
Chunks of a cut sequence leave partial sums in the workspace; the last one to arrive folds them in
order and returns the ticket to zero.

Lengths, block tables and old pages are read before the wait on the producer kernel; the newest unit
of a sequence and Q after it. Blocks without work leave without waiting, so that the next kernel finds
their room; the first block always waits, so that the kernel never ends before its producer. Token rows past the end are clamped to the last token, so neither the
rest of a page nor unused table entries need hold anything.
"""

from dataclasses import dataclass, replace

from artifact import READ_WRITE, SEQS, WRITE, Artifact, Operand, Scalar, Scratch
from contracts import K_PLANE, OUT, V_PLANE, X, contract, counters, domain, heads, input_slot, scalar, span, sym, workspace
from primitives import BF16, F32, I32, I64, THREADED, TRANSPOSE, WARP, T, mma_16x8x16
from shapes import MODELS, PAGE_TOKENS, SEQS_MAX

UNIT = 16
"""Tokens of a unit: the rows of one MMA. A page holds a whole number of units."""
HEADS = 8
"""Query heads of a group, padded: the columns of one MMA."""
FEW, SOME = 8, 64
"""Sequences up to which a step waits for latency, not bandwidth; and up to which one large block an SM is quicker than two."""
NEG = -1e30
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tuning:
    """How the work is cut. `grid` blocks of `warps` warps, `resident` of them on an SM."""

    seqs_max: int
    warps: int
    resident: int
    grid: int
    splits_max: int
    units_min: int
    units_max: int
    overhead: int
    """Cost of a chunk beside its units, in units."""
    batch: int
    """Partial sums in flight when a sequence is folded."""


LATENCY = Tuning(seqs_max=32, warps=8, resident=1, grid=132, splits_max=64, units_min=8, units_max=32, overhead=4, batch=16)
BALANCED = replace(LATENCY, seqs_max=SOME, units_min=16, units_max=128)
THROUGHPUT = Tuning(seqs_max=SEQS_MAX, warps=6, resident=2, grid=264, splits_max=32, units_min=8, units_max=128, overhead=4, batch=8)


@T.macro
def chunks_of(length, target, t, units, count, size):
    """Units of a sequence, the number of chunks that each of its KV heads is cut into, and their size."""
    units[0] = (length + UNIT - 1) // UNIT
    count[0] = T.max(T.min(target, (units[0] + t.units_min - 1) // t.units_min), (units[0] + t.units_max - 1) // t.units_max)
    count[0] = T.max(T.min(count[0], t.splits_max), 1)
    size[0] = (units[0] + count[0] - 1) // count[0]
    count[0] = (units[0] + T.max(size[0], 1) - 1) // T.max(size[0], 1)


def work_list(kv, t):
    """Macros that find a block's chunks.

    `start` fills the shared tables and leaves in `span` the block's window of the weighted list, and
    the sequence that it begins in. `settle` moves a cursor to the next chunk; `describe` explains it.
    """
    per_lane = t.seqs_max // WARP

    @T.macro
    def start(kv_lens, seqs, block, lane, length, count, size, span_):
        own = T.alloc_local((per_lane,), I32)
        units, n, s = T.alloc_local((1,), I32), T.alloc_local((1,), I32), T.alloc_local((1,), I32)
        total, upto, other = T.alloc_local((1,), I32), T.alloc_local((1,), I32), T.alloc_local((1,), I32)
        total[0] = 0
        for k in T.unroll(per_lane):
            own[k] = 0
            if lane * per_lane + k < seqs:
                own[k] = kv_lens[lane * per_lane + k]
        for k in T.unroll(per_lane):
            chunks_of(own[k], T.max(t.grid // (kv * seqs), 1), t, units, n, s)
            length[lane * per_lane + k] = own[k]
            count[lane * per_lane + k] = n[0]
            size[lane * per_lane + k] = s[0]
            own[k] = kv * n[0] * (s[0] + t.overhead)
            total[0] += own[k]
        upto[0] = total[0]
        for i in T.unroll(5):
            other[0] = T.shfl_up(upto[0], 1 << i)
            if lane >= (1 << i):
                upto[0] += other[0]
        other[0] = T.shfl_sync(upto[0], WARP - 1)
        n[0] = (other[0] + t.grid - 1) // t.grid
        s[0] = block * n[0]
        if lane == 0:
            span_[0] = s[0]
            span_[1] = T.min(s[0] + n[0], other[0])
            span_[2] = 0
            span_[3] = 0
        T.sync_warp()
        upto[0] -= total[0]
        for k in T.unroll(per_lane):
            if upto[0] <= s[0] and s[0] < upto[0] + own[k]:
                span_[2] = lane * per_lane + k
                span_[3] = upto[0]
            upto[0] += own[k]

    @T.macro
    def settle(at, end, count, size):
        while at[2] == kv * count[at[0]] and at[1] + at[2] * (size[at[0]] + t.overhead) < end:
            at[1] += at[2] * (size[at[0]] + t.overhead)
            at[0] += 1
            at[2] = 0
        at[3] = T.if_then_else(at[1] + at[2] * (size[at[0]] + t.overhead) < end, 1, 0)

    @T.macro
    def describe(at, length, count, size, warp, cur):
        cur[0] = at[0]
        cur[6] = count[at[0]]
        cur[1] = at[2] // cur[6]
        cur[7] = at[2] % cur[6]
        cur[2] = cur[7] * size[at[0]] + warp
        cur[4] = length[at[0]] - 1
        cur[5] = cur[4] // UNIT
        cur[3] = (T.max(T.min((cur[7] + 1) * size[at[0]], cur[5] + 1) - cur[2], 0) + t.warps - 1) // t.warps

    return start, settle, describe


# A cursor `at`: 0 sequence, 1 offset of the sequence in the list, 2 chunk within the sequence, 3 whether it is the block's.
# A chunk `cur`: 0 sequence, 1 KV head, 2 this warp's first unit, 3 its number of units, 4 last token, 5 last unit,
#                6 chunks of the sequence, 7 number of this one.


def fragments(kv, group, dim, page):
    """Macros that load Q, K and V of a unit in the layout of MMA fragments, and reorder them for the MMA.

    Head dimensions are permuted alike in Q and K, and output dimensions in V, so that every thread
    reads 16 bytes at a time: of K it holds dimensions `32 i + 8 c ..` of rows g and g + 8, of V
    dimensions `64 i + 8 g ..` of rows 2c, 2c + 1, 2c + 8 and 2c + 9.
    """
    k_row, v_row = dim // 4, dim // 8

    @T.macro
    def slot_of(tables, cur, unit, slot):
        slot[0] = T.cast(tables[cur[0], unit * UNIT // page], I64) * page + unit * UNIT % page

    @T.macro
    def load_q(x, cur, g, c, q):
        if g < group:
            for i in T.unroll(dim // 32):
                for k in T.vectorized(8):
                    q[i * 8 + k] = x[cur[0], cur[1] * group + T.min(g, group - 1), i * 32 + c * 8 + k]

    @T.macro
    def load_k(plane, slot, last, head, g, c, k_regs):
        for r in T.unroll(2):
            for i in T.unroll(dim // 32):
                for k in T.vectorized(8):
                    k_regs[r * k_row + i * 8 + k] = plane[slot + T.min(g + 8 * r, last), head, i * 32 + c * 8 + k]

    @T.macro
    def load_v(plane, slot, last, head, g, c, v_regs):
        for r in T.unroll(4):
            for i in T.unroll(dim // 64):
                for k in T.vectorized(8):
                    v_regs[r * v_row + i * 8 + k] = plane[slot + T.min(2 * c + r % 2 + r // 2 * 8, last), head, i * 64 + g * 8 + k]

    @T.macro
    def k_operand(k_regs, a):
        for s in T.unroll(dim // 16):
            for e in T.unroll(2):
                a[s * 8 + e] = k_regs[s * 4 + e]
                a[s * 8 + 2 + e] = k_regs[k_row + s * 4 + e]
                a[s * 8 + 4 + e] = k_regs[s * 4 + 2 + e]
                a[s * 8 + 6 + e] = k_regs[k_row + s * 4 + 2 + e]

    @T.macro
    def v_operand(v_regs, a):
        for s in T.unroll(dim // 16):
            for e in T.unroll(2):
                a[s * 8 + e * 2] = v_regs[s * 2 + e]
                a[s * 8 + e * 2 + 1] = v_regs[v_row + s * 2 + e]
                a[s * 8 + 4 + e * 2] = v_regs[2 * v_row + s * 2 + e]
                a[s * 8 + 5 + e * 2] = v_regs[3 * v_row + s * 2 + e]

    return slot_of, load_q, load_k, load_v, k_operand, v_operand


@T.macro
def softmax_step(score, unit, last, scale, g, state, p):
    """Online softmax over the 16 tokens of a unit; `score` holds rows g and g + 8, two heads, in two partial sums.

    `state`: running maxima of two heads, their sums, scratch, and in 6, 7 the factors for older sums.
    """
    for e in T.unroll(2):
        score[e] = T.if_then_else(unit * UNIT + g <= last, (score[e] + score[4 + e]) * scale, NEG)
        score[2 + e] = T.if_then_else(unit * UNIT + g + 8 <= last, (score[2 + e] + score[6 + e]) * scale, NEG)
    for e in T.unroll(2):
        state[4 + e] = T.max(score[e], score[2 + e])
        for i in T.unroll(3):
            state[4 + e] = T.max(state[4 + e], T.shfl_xor(state[4 + e], 4 << i))
        state[4 + e] = T.max(state[4 + e], state[e])
        state[6 + e] = T.exp2(state[e] - state[4 + e])
        state[e] = state[4 + e]
        score[e] = T.exp2(score[e] - state[e])
        score[2 + e] = T.exp2(score[2 + e] - state[e])
        state[2 + e] = state[2 + e] * state[6 + e] + score[e] + score[2 + e]
    for e in T.unroll(4):
        p[e] = T.cast(score[e], BF16)
    T.call_extern("handle", "ox_transpose_pair", p.data)


def attend_decode(q, kv, dim, page, t):
    """`out[s] = softmax(x[s] · Kᵀ / √dim) · V` for every sequence s with a length above 0."""
    group = q // kv
    threads = t.warps * WARP
    quads = dim // 4
    mergers = group * quads
    phases = min(2, threads // mergers)
    scale = float(dim**-0.5 * LOG2E)
    seqs, slots, table_stride = T.dynamic("seqs"), T.dynamic("slots"), T.dynamic("table_stride")
    start, settle, describe = work_list(kv, t)
    slot_of, load_q, load_k, load_v, k_operand, v_operand = fragments(kv, group, dim, page)
    assert page % UNIT == 0 and group <= HEADS and threads >= mergers and t.seqs_max % WARP == 0

    @T.macro
    def load_both(k_plane, v_plane, slot, unit, cur, g, c, k_regs, v_regs):
        load_k(k_plane, slot[0], cur[4] - unit * UNIT, cur[1], g, c, k_regs)
        load_v(v_plane, slot[0], cur[4] - unit * UNIT, cur[1], g, c, v_regs)

    @T.macro
    def store_row(out, cur, head, dims, value, total, pack):
        for e in T.unroll(4):
            pack[e] = T.cast(value[e] / total, BF16)
        for e in T.vectorized(4):
            out[cur[0], cur[1] * group + head, dims + e] = pack[e]

    @T.macro
    def fold(partial, weights, cur, phase, at, head, sums, best, total, value):
        """Folds every `phases`-th partial sum of a sequence, in order, into `value` and `total` at maximum `best`."""
        quad = T.alloc_local((4 * t.batch,), F32)
        top = T.alloc_local((2 * t.batch,), F32)
        for batch in T.serial(((cur[6] - phase + phases - 1) // phases + t.batch - 1) // t.batch):
            for j in T.unroll(t.batch):
                part = sums + T.min(phase + phases * (batch * t.batch + j), cur[6] - 1)
                top[j] = weights[part, head]
                top[t.batch + j] = weights[part, HEADS + head]
                for e in T.vectorized(4):
                    quad[j * 4 + e] = partial[part, at * 4 + e]
            best[1] = best[0]
            for j in T.unroll(t.batch):
                top[j] = T.if_then_else(phase + phases * (batch * t.batch + j) < cur[6], top[j], NEG)
                best[1] = T.max(best[1], top[j])
            best[2] = T.exp2(best[0] - best[1])
            best[0] = best[1]
            total[0] *= best[2]
            for e in T.unroll(4):
                value[e] *= best[2]
            for j in T.unroll(t.batch):
                best[2] = T.if_then_else(phase + phases * (batch * t.batch + j) < cur[6], T.exp2(top[j] - best[0]), 0.0)
                total[0] += top[t.batch + j] * best[2]
                for e in T.unroll(4):
                    value[e] += quad[j * 4 + e] * best[2]

    @T.prim_func
    def main(
        x: T.Tensor((seqs, q, dim), BF16),
        k_plane: T.Tensor((slots, kv, dim), BF16),
        v_plane: T.Tensor((slots, kv, dim), BF16),
        block_tables: T.Tensor((seqs, table_stride), I32),
        kv_lens: T.Tensor((seqs,), I32),
        partial: T.Tensor((seqs * kv * t.splits_max, group * dim), F32),
        weights: T.Tensor((seqs * kv * t.splits_max, 2 * HEADS), F32),
        tickets: T.Tensor((seqs * kv,), I32),
        out: T.Tensor((seqs, q, dim), BF16),
    ):
        with T.Kernel(t.grid, threads=threads) as block:
            if t.resident > 1:
                T.annotate_min_blocks_per_sm(t.resident)
            T.import_source(TRANSPOSE)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            g, c = lane // 4, lane % 4

            length = T.alloc_shared((t.seqs_max,), I32, scope="shared")
            count = T.alloc_shared((t.seqs_max,), I32, scope="shared")
            size = T.alloc_shared((t.seqs_max,), I32, scope="shared")
            span_ = T.alloc_shared((8,), I32, scope="shared")
            warp_sums = T.alloc_shared((t.warps, group, dim + 4), F32)
            warp_max = T.alloc_shared((t.warps, HEADS), F32, scope="shared")
            warp_total = T.alloc_shared((t.warps, HEADS), F32, scope="shared")
            second = T.alloc_shared((mergers if phases > 1 else 1, 8), F32)

            k_regs, v_regs = T.alloc_local((dim // 2,), BF16), T.alloc_local((dim // 2,), BF16)
            q_regs, a = T.alloc_local((dim // 4,), BF16), T.alloc_local((dim,), BF16)
            p, pack = T.alloc_local((4,), BF16), T.alloc_local((4,), BF16)
            acc, score, state = T.alloc_local((dim // 4,), F32), T.alloc_local((8,), F32), T.alloc_local((8,), F32)
            value, quad, best, total = T.alloc_local((4,), F32), T.alloc_local((4,), F32), T.alloc_local((3,), F32), T.alloc_local((1,), F32)
            at, cur, done = T.alloc_local((4,), I32), T.alloc_local((8,), I32), T.alloc_local((8,), I32)
            slot, ticket = T.alloc_local((1,), I64), T.alloc_local((1,), I32)

            T.pdl_trigger()
            if warp == 0:
                start(kv_lens, seqs, block, lane, length, count, size, span_)
            for i in T.unroll(dim // 4):
                q_regs[i] = T.cast(0, BF16)
            T.sync_threads()
            at[0] = span_[2]
            at[1] = span_[3]
            at[2] = 0
            at[3] = 0
            cur[3] = 0
            if span_[0] < span_[1]:
                at[2] = (span_[0] - at[1] + size[at[0]] + t.overhead - 1) // (size[at[0]] + t.overhead)
                settle(at, span_[1], count, size)
            if at[3] != 0:
                describe(at, length, count, size, warp, cur)
                if cur[3] > 0:
                    slot_of(block_tables, cur, cur[2], slot)
                    if cur[2] < cur[5]:
                        load_both(k_plane, v_plane, slot, cur[2], cur, g, c, k_regs, v_regs)
            if at[3] != 0 or block == 0:
                T.pdl_sync()
            if at[3] != 0:
                load_q(x, cur, g, c, q_regs)
                if cur[3] > 0 and cur[2] == cur[5]:
                    load_both(k_plane, v_plane, slot, cur[2], cur, g, c, k_regs, v_regs)

            while at[3] != 0:
                for i in T.unroll(dim // 4):
                    acc[i] = 0.0
                for e in T.unroll(2):
                    state[e] = NEG
                    state[2 + e] = 0.0
                if cur[3] > 1:
                    slot_of(block_tables, cur, cur[2] + t.warps, slot)
                for step in T.serial(cur[3]):
                    unit = cur[2] + step * t.warps
                    for i in T.unroll(8):
                        score[i] = 0.0
                    k_operand(k_regs, a)
                    for s in T.unroll(dim // 16):
                        mma_16x8x16(a, s * 8, q_regs, s * 4, score, s % 2 * 4)
                    if step + 1 < cur[3]:
                        load_k(k_plane, slot[0], cur[4] - (unit + t.warps) * UNIT, cur[1], g, c, k_regs)
                    softmax_step(score, unit, cur[4], scale, g, state, p)
                    for i in T.unroll(dim // 16):
                        for e in T.unroll(4):
                            acc[i * 4 + e] *= state[6 + e % 2]
                    v_operand(v_regs, a)
                    for s in T.unroll(dim // 16):
                        mma_16x8x16(a, s * 8, p, 0, acc, s * 4)
                    if step + 1 < cur[3]:
                        load_v(v_plane, slot[0], cur[4] - (unit + t.warps) * UNIT, cur[1], g, c, v_regs)
                        if step + 2 < cur[3]:
                            slot_of(block_tables, cur, unit + 2 * t.warps, slot)

                for i in T.unroll(8):
                    done[i] = cur[i]
                at[2] += 1
                settle(at, span_[1], count, size)
                if at[3] != 0:
                    describe(at, length, count, size, warp, cur)
                    if cur[3] > 0:
                        slot_of(block_tables, cur, cur[2], slot)
                        load_both(k_plane, v_plane, slot, cur[2], cur, g, c, k_regs, v_regs)
                    load_q(x, cur, g, c, q_regs)

                for e in T.unroll(2):
                    for i in T.unroll(3):
                        state[2 + e] += T.shfl_xor(state[2 + e], 4 << i)
                for h in T.unroll(2):
                    if 2 * c + h < group:
                        for i in T.unroll(dim // 32):
                            for e in T.unroll(4):
                                quad[e] = acc[(i * 4 + e) // 2 * 4 + (i * 4 + e) % 2 * 2 + h]
                            for e in T.vectorized(4):
                                warp_sums[warp, 2 * c + h, i * 32 + g * 4 + e] = quad[e]
                        if g == 0:
                            warp_max[warp, 2 * c + h] = state[h]
                            warp_total[warp, 2 * c + h] = state[2 + h]
                T.sync_threads()
                phase, merger = thread // mergers, thread % mergers
                head, column = merger // quads, merger % quads
                dims = column // 16 * 64 + column % 8 * 8 + column // 8 % 2 * 4
                sums = (done[0] * kv + done[1]) * t.splits_max
                if thread < mergers:
                    best[0] = NEG
                    total[0] = 0.0
                    for w in T.unroll(t.warps):
                        best[0] = T.max(best[0], warp_max[w, head])
                    for e in T.unroll(4):
                        value[e] = 0.0
                    for w in T.unroll(t.warps):
                        best[1] = T.exp2(warp_max[w, head] - best[0])
                        total[0] += warp_total[w, head] * best[1]
                        for e in T.vectorized(4):
                            quad[e] = warp_sums[w, head, column * 4 + e]
                        for e in T.unroll(4):
                            value[e] += quad[e] * best[1]
                    if done[6] == 1:
                        store_row(out, done, head, dims, value, total[0], pack)
                    else:
                        for e in T.vectorized(4):
                            partial[sums + done[7], merger * 4 + e] = value[e]
                        if column == 0:
                            weights[sums + done[7], head] = best[0]
                            weights[sums + done[7], HEADS + head] = total[0]
                T.sync_threads()
                if done[6] > 1:
                    if thread == 0:
                        ticket[0] = T.atomic_add(tickets[done[0] * kv + done[1]], 1, memory_order="acq_rel", return_prev=True)
                        span_[4] = ticket[0]
                    T.sync_threads()
                    if span_[4] == done[6] - 1:
                        if thread == 0:
                            tickets[done[0] * kv + done[1]] = 0
                        best[0] = NEG
                        total[0] = 0.0
                        for e in T.unroll(4):
                            value[e] = 0.0
                        if phase < phases:
                            fold(partial, weights, done, phase, merger, head, sums, best, total, value)
                        if phases > 1:
                            if phase == 1:
                                for e in T.vectorized(4):
                                    second[merger, e] = value[e]
                                second[merger, 4] = best[0]
                                second[merger, 5] = total[0]
                            T.sync_threads()
                            if phase == 0:
                                best[1] = T.max(best[0], second[merger, 4])
                                best[2] = T.exp2(second[merger, 4] - best[1])
                                best[0] = T.exp2(best[0] - best[1])
                                total[0] = total[0] * best[0] + second[merger, 5] * best[2]
                                for e in T.unroll(4):
                                    value[e] = value[e] * best[0] + second[merger, e] * best[2]
                        if phase == 0:
                            store_row(out, done, head, dims, value, total[0], pack)
                        T.sync_threads()

    return main


# ---- artifacts -----------------------------------------------------------------------------------


def _declare(q, kv, dim, page, variant, t, most):
    operands = {
        "x": Operand(X),
        "k_plane": Operand(K_PLANE),
        "v_plane": Operand(V_PLANE),
        "block_tables": Operand(input_slot("block_tables")),
        "kv_lens": Operand(input_slot("kv_lens")),
        "partial": Operand(workspace(0), READ_WRITE),
        "weights": Operand(workspace(1), READ_WRITE),
        "tickets": Operand(counters(0), READ_WRITE),
        "out": Operand(OUT, WRITE),
    }
    parts = kv * t.splits_max
    scratch = (
        Scratch(workspace(0), "float32", sym("seqs", parts * (q // kv) * dim)),
        Scratch(workspace(1), "float32", sym("seqs", parts * 2 * HEADS)),
        Scratch(counters(0), "int32", sym("seqs", kv), zeroed=True),
    )
    op = {"attend": {"heads": heads(q, kv, dim, page), "phase": "decode"}}
    return Artifact(
        f"attend_decode_{variant}_q{q}_kv{kv}_d{dim}_p{page}", contract(op), lambda: attend_decode(q, kv, dim, page, t), operands,
        domain(tokens=span(1, most), seqs=span(1, most)),
        {"seqs": SEQS, "table_stride": Scalar(scalar("table_stride"), None)},
        workspace=scratch, rounding=("probabilities", "out"), pass_configs=THREADED)


def artifacts():
    """For the head geometry of every model a kernel for many sequences, and for wide heads one for few and one for some."""
    found = []
    for m in MODELS:
        for page in PAGE_TOKENS:
            declare = lambda variant, t, most, m=m, page=page: _declare(m.q, m.kv, m.head_dim, page, variant, t, most)
            found.append(declare("wide", THROUGHPUT, SEQS_MAX))
            if m.head_dim == 128:
                found += [declare("few", LATENCY, FEW), declare("some", BALANCED, SOME)]
    return found
