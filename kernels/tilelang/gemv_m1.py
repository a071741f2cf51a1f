"""The five projections of a one-token step, each one kernel and bound by the stream of its weights.

A warp computes whole rows: lane `l` holds elements `c·256 + l·8 … + 7` of the normalised input for
every chunk `c`, packed as BF16, and multiplies them with weights from registers (small kernels, which
request all their weights before they wait for their producer) or from a ring in shared memory (large
ones). A warp owns its ring: lane 0 fills slots by bulk copy, the whole warp drains them, nothing is
shared with other warps.

Before the wait a warp fills its ring *paced*: at most `pace` rows in flight. Flooding the memory
system there delays the small kernels that still run. Input norms are recomputed by every warp.

`qkv_rope_append` reads position and slot before the wait: step inputs are complete before the first
kernel of a step starts.
"""

from dataclasses import dataclass

from artifact import WRITE, Artifact, Operand
from contracts import (BIAS, K_PLANE, NORM_WEIGHT, OUT, ROPE_TABLE, V_PLANE, WEIGHT, X, contract, domain, heads, input_slot, linear,
                       span)
from linear import GROUP, declare, projections
from primitives import BF16, BULK, F32, I32, I64, THREADED, VEC, WARP, T, extern
from shapes import MODELS, PAGE_TOKENS

CHUNK = WARP * VEC
"""Elements of a row that a warp reads at once."""


def lane_macros(k):
    """Macros over a row of `k` elements spread over a warp; the last chunk may be partial."""
    chunks = -(-k // CHUNK)
    full = k // CHUNK

    @T.macro
    def load(local, row, lane):
        for c in T.unroll(full):
            for j in T.vectorized(VEC):
                local[c * VEC + j] = row[c * CHUNK + lane * VEC + j]
        if full < chunks:
            for j in T.unroll(VEC):
                local[full * VEC + j] = T.cast(0, BF16)
            if full * CHUNK + lane * VEC < k:
                for j in T.vectorized(VEC):
                    local[full * VEC + j] = row[full * CHUNK + lane * VEC + j]

    @T.macro
    def load_row(local, at, matrix, index, lane):
        for c in T.unroll(full):
            for j in T.vectorized(VEC):
                local[at + c * VEC + j] = matrix[index, c * CHUNK + lane * VEC + j]
        if full < chunks:
            for j in T.unroll(VEC):
                local[at + full * VEC + j] = T.cast(0, BF16)
            if full * CHUNK + lane * VEC < k:
                for j in T.vectorized(VEC):
                    local[at + full * VEC + j] = matrix[index, full * CHUNK + lane * VEC + j]

    @T.macro
    def normalise(x, gain, scale, eps):
        scale[0] = 0.0
        for j in T.unroll(chunks * VEC):
            scale[0] += T.cast(x[j], F32) * T.cast(x[j], F32)
        scale[0] = T.rsqrt(T.warp_reduce_sum(scale[0]) / k + eps)
        for j in T.unroll(chunks * VEC):
            x[j] = T.cast(T.cast(x[j], F32) * scale[0] * T.cast(gain[j], F32), BF16)

    @T.macro
    def dot(acc, at, w, w_at, x):
        acc[at] = 0.0
        acc[at + 1] = 0.0
        for c in T.unroll(chunks):
            for j in T.unroll(VEC):
                acc[at + c % 2] += T.cast(w[w_at + c * VEC + j], F32) * T.cast(x[c * VEC + j], F32)
        acc[at] = T.warp_reduce_sum(acc[at] + acc[at + 1])

    return chunks, load, load_row, normalise, dot


# ---- small kernels: every weight of a warp in registers before the wait ----------------------------


def rows_in_registers(n, k, warps):
    """`out = x · weightᵀ + residual`, one row a warp."""
    chunks, load, load_row, _, dot = lane_macros(k)

    @T.prim_func
    def main(x: T.Tensor((k,), BF16), weight: T.Tensor((n, k), BF16), residual: T.Tensor((n,), BF16), out: T.Tensor((n,), BF16)):
        with T.Kernel(n // warps, threads=warps * WARP) as block:
            thread = T.get_thread_binding()
            lane, row = thread % WARP, block * warps + thread // WARP
            w, a = T.alloc_local((chunks * VEC,), BF16), T.alloc_local((chunks * VEC,), BF16)
            acc, base = T.alloc_local((2,), F32), T.alloc_local((1,), F32)
            T.pdl_trigger()
            load_row(w, 0, weight, row, lane)
            T.pdl_sync()
            base[0] = T.cast(residual[row], F32)
            load(a, x, lane)
            dot(acc, 0, w, 0, a)
            if lane == 0:
                out[row] = T.cast(acc[0] + base[0], BF16)

    return main


def qkv_rope_append(m, warps):
    """Norm, QKV projection, bias, rotation and KV append; one rotary pair of rows a warp."""
    k, half, width, has_bias = m.dim, m.head_dim // 2, m.qkv, m.qkv_bias
    heads_q, heads_kv, head_dim, eps = m.q, m.kv, m.head_dim, m.eps
    chunks, load, load_row, normalise, dot = lane_macros(k)
    slots, context = T.dynamic("slots"), T.dynamic("context")

    @T.macro
    def body(x, norm_weight, weight, bias, rope_table, positions, kv_slots, k_plane, v_plane, out, block):
        T.annotate_min_blocks_per_sm(2)
        thread = T.get_thread_binding()
        lane, pair = thread % WARP, block * warps + thread // WARP
        head, i = pair // half, pair % half
        w = T.alloc_local((2 * chunks * VEC,), BF16)
        a, gain = T.alloc_local((chunks * VEC,), BF16), T.alloc_local((chunks * VEC,), BF16)
        acc, scale, b, angle = T.alloc_local((4,), F32), T.alloc_local((1,), F32), T.alloc_local((2,), F32), T.alloc_local((2,), F32)
        low, high = T.alloc_local((1,), F32), T.alloc_local((1,), F32)
        T.pdl_trigger()
        load_row(w, 0, weight, head * head_dim + i, lane)
        load_row(w, chunks * VEC, weight, head * head_dim + half + i, lane)
        load(gain, norm_weight, lane)
        b[0] = 0.0
        b[1] = 0.0
        if has_bias:
            b[0] = T.cast(bias[head * head_dim + i], F32)
            b[1] = T.cast(bias[head * head_dim + half + i], F32)
        slot, position = kv_slots[0], positions[0]
        angle[0] = rope_table[position, 2 * i]
        angle[1] = rope_table[position, 2 * i + 1]
        T.pdl_sync()
        load(a, x, lane)
        normalise(a, gain, scale, eps)
        dot(acc, 0, w, 0, a)
        dot(acc, 2, w, chunks * VEC, a)
        if lane == 0:
            low[0] = acc[0] + b[0]
            high[0] = acc[2] + b[1]
            if head < heads_q + heads_kv:
                acc[0] = low[0] * angle[0] - high[0] * angle[1]
                acc[2] = high[0] * angle[0] + low[0] * angle[1]
            else:
                acc[0] = low[0]
                acc[2] = high[0]
            if head < heads_q:
                out[head * head_dim + i] = T.cast(acc[0], BF16)
                out[head * head_dim + half + i] = T.cast(acc[2], BF16)
            elif slot >= 0:
                if head < heads_q + heads_kv:
                    k_plane[slot, head - heads_q, i] = T.cast(acc[0], BF16)
                    k_plane[slot, head - heads_q, half + i] = T.cast(acc[2], BF16)
                else:
                    v_plane[slot, head - heads_q - heads_kv, i] = T.cast(acc[0], BF16)
                    v_plane[slot, head - heads_q - heads_kv, half + i] = T.cast(acc[2], BF16)

    blocks, threads = width // 2 // warps, warps * WARP
    # One annotation object names one buffer: every parameter needs its own.
    vector, weights = lambda: T.Tensor((k,), BF16), lambda: T.Tensor((width, k), BF16)
    plane, table = lambda: T.Tensor((slots, heads_kv, head_dim), BF16), lambda: T.Tensor((context, head_dim), F32)
    one, query = lambda: T.Tensor((1,), I32), lambda: T.Tensor((heads_q * head_dim,), BF16)
    if has_bias:

        @T.prim_func
        def main(x: vector(), norm_weight: vector(), weight: weights(), bias: T.Tensor((width,), BF16), rope_table: table(), positions: one(),
                 kv_slots: one(), k_plane: plane(), v_plane: plane(), out: query()):
            with T.Kernel(blocks, threads=threads) as block:
                body(x, norm_weight, weight, bias, rope_table, positions, kv_slots, k_plane, v_plane, out, block)

    else:

        @T.prim_func
        def main(x: vector(), norm_weight: vector(), weight: weights(), rope_table: table(), positions: one(), kv_slots: one(), k_plane: plane(),
                 v_plane: plane(), out: query()):
            with T.Kernel(blocks, threads=threads) as block:
                body(x, norm_weight, weight, x, rope_table, positions, kv_slots, k_plane, v_plane, out, block)

    return main


# ---- large kernels: rings in shared memory ---------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """How a large weight is streamed: `blocks` × `warps`, a ring of `ring` rows a warp."""

    blocks: int
    warps: int
    ring: int
    pace: int


def normed_rows(n, k, eps, swiglu, how):
    """`norm(x) · weightᵀ` with SwiGLU to BF16, or plain to F32 logits.

    A unit is one output: a gate row and its up row, or one row. Unit `u · blocks · warps + block ·
    warps + warp` is a warp's `u`-th.
    """
    chunks, load, _, normalise, dot = lane_macros(k)
    per_unit = 2 if swiglu else 1
    width = n // per_unit
    blocks, warps, ring, pace = how.blocks, how.warps, how.ring, how.pace
    units = -(-width // (blocks * warps))
    rows, slots_used = units * per_unit, min(ring, units * per_unit)
    assert ring % per_unit == 0

    def row_of(sequence, block, warp):
        """The row that a warp reads `sequence`-th; past the end, a valid row."""
        unit = T.min((sequence // per_unit * blocks + block) * warps + warp, width - 1)
        return unit // GROUP * 2 * GROUP + sequence % per_unit * GROUP + unit % GROUP if swiglu else unit

    @T.prim_func
    def main(
        x: T.Tensor((k,), BF16),
        norm_weight: T.Tensor((k,), BF16),
        weight: T.Tensor((n, k), BF16),
        out: T.Tensor((width,), BF16 if swiglu else F32),
    ):
        with T.Kernel(blocks, threads=warps * WARP) as block:
            T.import_source(BULK)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            a, gain = T.alloc_local((chunks * VEC,), BF16), T.alloc_local((chunks * VEC,), BF16)
            w = T.alloc_local((VEC,), BF16)
            acc, scale = T.alloc_local((2 * per_unit,), F32), T.alloc_local((1,), F32)
            slot, parity = T.alloc_local((1,), I32), T.alloc_local((1,), I32)
            tile = T.alloc_shared((warps, ring, k), BF16)
            ready = T.alloc_shared((warps, ring), I64, scope="shared")

            T.pdl_trigger()
            if lane == 0:
                for s in T.unroll(ring):
                    extern("ox_barrier_init", T.access_ptr(ready[warp, s], "rw"), 1)
                extern("ox_barrier_publish")
                for s in T.serial(slots_used):
                    if pace:
                        if s >= pace:
                            extern("ox_barrier_wait", T.access_ptr(ready[warp, T.max(s - pace, 0)], "rw"), 0)
                    extern("ox_bulk_load", T.access_ptr(tile[warp, s, 0], "w"), T.access_ptr(weight[row_of(s, block, warp), 0], "r"),
                           2 * k, T.access_ptr(ready[warp, s], "rw"))
            T.sync_warp()
            load(gain, norm_weight, lane)
            T.pdl_sync()
            load(a, x, lane)
            normalise(a, gain, scale, eps)
            slot[0] = 0
            parity[0] = 0
            for u in T.serial(units):
                for r in T.unroll(per_unit):
                    extern("ox_barrier_wait", T.access_ptr(ready[warp, slot[0] + r], "rw"), parity[0])
                for r in T.unroll(2 * per_unit):
                    acc[r] = 0.0
                for c in T.unroll(chunks):
                    for r in T.unroll(per_unit):
                        if c * CHUNK + CHUNK <= k or lane * VEC < k - c * CHUNK:
                            for j in T.vectorized(VEC):
                                w[j] = tile[warp, slot[0] + r, c * CHUNK + lane * VEC + j]
                            for j in T.unroll(VEC):
                                acc[2 * r + c % 2] += T.cast(w[j], F32) * T.cast(a[c * VEC + j], F32)
                T.sync_warp()
                if lane == 0:
                    for r in T.unroll(per_unit):
                        if u * per_unit + r + ring < rows:
                            extern("ox_bulk_load", T.access_ptr(tile[warp, slot[0] + r, 0], "w"),
                                   T.access_ptr(weight[row_of(u * per_unit + r + ring, block, warp), 0], "r"), 2 * k,
                                   T.access_ptr(ready[warp, slot[0] + r], "rw"))
                slot[0] = slot[0] + per_unit
                if slot[0] == ring:
                    slot[0] = 0
                    parity[0] = 1 - parity[0]
                for r in T.unroll(per_unit):
                    acc[2 * r] = T.warp_reduce_sum(acc[2 * r] + acc[2 * r + 1])
                if lane == 0 and (u * blocks + block) * warps + warp < width:
                    if swiglu:
                        out[(u * blocks + block) * warps + warp] = T.cast(acc[0] / (1.0 + T.exp(-acc[0])) * acc[2 * per_unit - 2], BF16)
                    else:
                        out[(u * blocks + block) * warps + warp] = acc[0]

    return main


@dataclass(frozen=True)
class Split:
    """How a deep weight is cut: `parts` of its depth and `groups` of `rows` rows in each block."""

    parts: int
    groups: int
    rows: int
    ring: int
    pace: int


def split_depth(n, k, how):
    """`out = x · weightᵀ + residual` of few deep rows: warps of a block split the depth, sums in fixed order."""
    parts, rows, ring, pace = how.parts, how.rows, how.ring, how.pace
    block_rows, warps, depth = how.groups * rows, parts * how.groups, k // how.parts
    chunks, load, _, _, _ = lane_macros(depth)
    assert n % block_rows == 0 and k % (parts * CHUNK) == 0 and ring <= rows

    @T.prim_func
    def main(x: T.Tensor((k,), BF16), weight: T.Tensor((n, k), BF16), residual: T.Tensor((n,), BF16), out: T.Tensor((n,), BF16)):
        with T.Kernel(n // block_rows, threads=warps * WARP) as block:
            T.import_source(BULK)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            part, first = warp % parts, warp // parts * rows
            a, w = T.alloc_local((chunks * VEC,), BF16), T.alloc_local((VEC,), BF16)
            acc, total = T.alloc_local((2,), F32), T.alloc_local((1,), F32)
            slot, parity = T.alloc_local((1,), I32), T.alloc_local((1,), I32)
            tile = T.alloc_shared((warps, ring, depth), BF16)
            ready = T.alloc_shared((warps, ring), I64, scope="shared")
            partial = T.alloc_shared((block_rows, parts), F32, scope="shared")

            T.pdl_trigger()
            if lane == 0:
                for s in T.unroll(ring):
                    extern("ox_barrier_init", T.access_ptr(ready[warp, s], "rw"), 1)
                extern("ox_barrier_publish")
                for s in T.serial(ring):
                    if pace:
                        if s >= pace:
                            extern("ox_barrier_wait", T.access_ptr(ready[warp, T.max(s - pace, 0)], "rw"), 0)
                    extern("ox_bulk_load", T.access_ptr(tile[warp, s, 0], "w"),
                           T.access_ptr(weight[block * block_rows + first + s, part * depth], "r"), 2 * depth,
                           T.access_ptr(ready[warp, s], "rw"))
            T.sync_warp()
            T.pdl_sync()
            for c in T.unroll(chunks):
                for j in T.vectorized(VEC):
                    a[c * VEC + j] = x[part * depth + c * CHUNK + lane * VEC + j]
            total[0] = 0.0
            if thread < block_rows:
                total[0] = T.cast(residual[block * block_rows + thread], F32)
            slot[0] = 0
            parity[0] = 0
            for r in T.serial(rows):
                extern("ox_barrier_wait", T.access_ptr(ready[warp, slot[0]], "rw"), parity[0])
                acc[0] = 0.0
                acc[1] = 0.0
                for c in T.unroll(chunks):
                    for j in T.vectorized(VEC):
                        w[j] = tile[warp, slot[0], c * CHUNK + lane * VEC + j]
                    for j in T.unroll(VEC):
                        acc[j % 2] += T.cast(w[j], F32) * T.cast(a[c * VEC + j], F32)
                T.sync_warp()
                if lane == 0 and r + ring < rows:
                    extern("ox_bulk_load", T.access_ptr(tile[warp, slot[0], 0], "w"),
                           T.access_ptr(weight[block * block_rows + first + r + ring, part * depth], "r"), 2 * depth,
                           T.access_ptr(ready[warp, slot[0]], "rw"))
                slot[0] = slot[0] + 1
                if slot[0] == ring:
                    slot[0] = 0
                    parity[0] = 1 - parity[0]
                acc[0] = T.warp_reduce_sum(acc[0] + acc[1])
                if lane == 0:
                    partial[first + r, part] = acc[0]
            T.sync_threads()
            if thread < block_rows:
                for p in T.unroll(parts):
                    total[0] += partial[thread, p]
                out[block * block_rows + thread] = T.cast(total[0], BF16)

    return main


# ---- artifacts -----------------------------------------------------------------------------------

ONE_TOKEN = domain(tokens=span(1, 1))
ONE_ROW = domain(rows=span(1, 1))
DEFINES = ("primitives.py", "linear.py")


@dataclass(frozen=True)
class Plan:
    """Configurations of one profile's kernels; `down` is a depth split, or warps of the one-row-a-warp kernel."""

    qkv: int
    o: int
    gate_up: Stream
    down: Split | int
    head: Stream


PLANS = {
    "qwen2.5-1.5b": Plan(8, 12, Stream(128, 7, 8, 2), Split(7, 2, 6, 4, 2), Stream(132, 16, 4, 0)),
    "qwen2.5-0.5b": Plan(6, 7, Stream(128, 10, 8, 2), Split(19, 1, 7, 7, 0), Stream(132, 16, 6, 0)),
    "smollm2-135m": Plan(4, 6, Stream(128, 12, 2, 0), 6, Stream(132, 16, 8, 0)),
    "oxide-tiny": Plan(4, 4, Stream(128, 6, 2, 0), 4, Stream(128, 8, 4, 0)),
}


def _qkv(m, page_tokens, warps):
    p = projections(m)[0]
    geometry = heads(m.q, m.kv, m.head_dim, page_tokens)
    op = {"qkv_rope_append": {"linear": linear(p.n, p.k, m.eps, p.bias), "heads": geometry}}
    bound = {
        "x": Operand(X), "norm_weight": Operand(NORM_WEIGHT), "weight": Operand(WEIGHT), "rope_table": Operand(ROPE_TABLE),
        "positions": Operand(input_slot("positions")), "kv_slots": Operand(input_slot("kv_slots")),
        "k_plane": Operand(K_PLANE, WRITE), "v_plane": Operand(V_PLANE, WRITE), "out": Operand(OUT, WRITE),
    } | ({"bias": Operand(BIAS)} if p.bias else {})
    return Artifact(f"gemv_qkv_rope_append_{p.n}x{p.k}_p{page_tokens}", contract(op), lambda: qkv_rope_append(m, warps), bound,
                    ONE_TOKEN, rounding=("norm", "out"), pass_configs=THREADED, defines=DEFINES)


def _down(p, how):
    make = (lambda: split_depth(p.n, p.k, how)) if isinstance(how, Split) else (lambda: rows_in_registers(p.n, p.k, how))
    return declare(f"gemv_down_{p.n}x{p.k}", p, make, ONE_TOKEN, pass_configs=THREADED, defines=DEFINES)


def _model(m):
    plan = PLANS[m.name]
    _, o, gate_up, down, head = projections(m)
    normed = {"norm": m.eps, "rounding": ("norm", "out"), "pass_configs": THREADED, "defines": DEFINES}
    return [
        *(_qkv(m, page, plan.qkv) for page in PAGE_TOKENS),
        declare(f"gemv_o_{o.n}x{o.k}", o, lambda: rows_in_registers(o.n, o.k, plan.o), ONE_TOKEN, pass_configs=THREADED, defines=DEFINES),
        declare(f"gemv_gate_up_{gate_up.n}x{gate_up.k}", gate_up,
                lambda: normed_rows(gate_up.n, gate_up.k, m.eps, True, plan.gate_up), ONE_TOKEN, **normed),
        _down(down, plan.down),
        declare(f"gemv_head_{head.n}x{head.k}", head, lambda: normed_rows(head.n, head.k, m.eps, False, plan.head), ONE_ROW, **normed),
    ]


def artifacts():
    """Five kernels a profile."""
    return [artifact for m in MODELS for artifact in _model(m)]
