"""Embedding, norms, rotary embedding with KV append, and row gather: one block a row.

Every thread moves 16 bytes at a time. All kernels trigger their dependents at entry and wait for
their producers before the first activation is read; weights are read before the wait.
"""

from artifact import READ_WRITE, ROWS, TOKENS, WRITE, Artifact, Operand
from contracts import (K_PLANE, NORM_WEIGHT, OUT, RESIDUAL, ROPE_TABLE, V_PLANE, WEIGHT, X, bits, contract, domain,
                       heads, input_slot, output_slot, span)
from primitives import BF16, F32, I32, PLAIN, VEC, WARP, T, round_up
from shapes import MODELS, PAGE_TOKENS, SEQS_MAX, TOKENS_MAX


def embed(vocab, dim):
    """Rows of the table by token id, or by the id that the previous step sampled."""
    tokens, rows = T.dynamic("tokens"), T.dynamic("rows")

    @T.prim_func
    def main(
        token_ids: T.Tensor((tokens,), I32),
        token_sources: T.Tensor((tokens,), I32),
        sampled_ids: T.Tensor((SEQS_MAX,), I32),
        table: T.Tensor((vocab, dim), BF16),
        out: T.Tensor((tokens, dim), BF16),
    ):
        with T.Kernel(tokens, threads=dim // VEC) as row:
            at = T.get_thread_binding() * VEC
            token = T.alloc_local((1,), I32)
            T.pdl_trigger()
            T.pdl_sync()
            token[0] = token_ids[row]
            if token_sources[row] >= 0:
                token[0] = sampled_ids[token_sources[row]]
            if token[0] < 0 or token[0] >= vocab:
                token[0] = 0
            for k in T.vectorized(VEC):
                out[row, at + k] = table[token[0], at + k]

    return main


@T.macro
def block_sum(value, partial, thread, warps):
    """Sum of `value[0]` over the block, in warp order, left in `value[0]` of every thread."""
    value[0] = T.warp_reduce_sum(value[0])
    if warps > 1:
        if thread % WARP == 0:
            partial[thread // WARP] = value[0]
        T.sync_threads()
        value[0] = 0.0
        for w in T.unroll(warps):
            value[0] += partial[w]


def rms_norm(dim, eps, symbol, residual):
    """RMS norm of a row; with `residual` the row is first added to the residual stream."""
    count = T.dynamic(symbol)
    active = dim // VEC
    threads = round_up(active, WARP)
    warps = threads // WARP

    @T.macro
    def body(x, weight, out, stream, row):
        thread = T.get_thread_binding()
        at = thread * VEC
        a, b, w = T.alloc_local((VEC,), BF16), T.alloc_local((VEC,), BF16), T.alloc_local((VEC,), BF16)
        total = T.alloc_local((1,), F32)
        partial = T.alloc_shared((warps,), F32, scope="shared")
        total[0] = 0.0
        T.pdl_trigger()
        if thread < active:
            for k in T.vectorized(VEC):
                w[k] = weight[at + k]
        T.pdl_sync()
        if thread < active:
            for k in T.vectorized(VEC):
                a[k] = x[row, at + k]
            if residual:
                for k in T.vectorized(VEC):
                    b[k] = stream[row, at + k]
                for k in T.unroll(VEC):
                    a[k] = T.cast(T.cast(a[k], F32) + T.cast(b[k], F32), BF16)
                for k in T.vectorized(VEC):
                    stream[row, at + k] = a[k]
            for k in T.unroll(VEC):
                total[0] += T.cast(a[k], F32) * T.cast(a[k], F32)
        block_sum(total, partial, thread, warps)
        total[0] = T.rsqrt(total[0] / dim + eps)
        if thread < active:
            for k in T.unroll(VEC):
                a[k] = T.cast(T.cast(a[k], F32) * total[0] * T.cast(w[k], F32), BF16)
            for k in T.vectorized(VEC):
                out[row, at + k] = a[k]

    @T.prim_func
    def plain(x: T.Tensor((count, dim), BF16), weight: T.Tensor((dim,), BF16), out: T.Tensor((count, dim), BF16)):
        with T.Kernel(count, threads=threads) as row:
            body(x, weight, out, x, row)

    @T.prim_func
    def added(
        x: T.Tensor((count, dim), BF16),
        residual_stream: T.Tensor((count, dim), BF16),
        weight: T.Tensor((dim,), BF16),
        out: T.Tensor((count, dim), BF16),
    ):
        with T.Kernel(count, threads=threads) as row:
            body(x, weight, out, residual_stream, row)

    return added if residual else plain


def qk_norm(q, kv, head_dim, eps):
    """RMS norm of every Q and K head of `[q | k | v]`, one warp a head."""
    tokens = T.dynamic("tokens")
    width = (q + 2 * kv) * head_dim
    per_lane = head_dim // WARP

    @T.prim_func
    def main(x: T.Tensor((tokens, width), BF16), weight: T.Tensor((2, head_dim), BF16), out: T.Tensor((tokens, width), BF16)):
        with T.Kernel(tokens, threads=(q + kv) * WARP) as row:
            thread = T.get_thread_binding()
            head, lane = thread // WARP, thread % WARP
            value, gain = T.alloc_local((per_lane,), BF16), T.alloc_local((per_lane,), BF16)
            total = T.alloc_local((1,), F32)
            T.pdl_trigger()
            for k in T.vectorized(per_lane):
                gain[k] = weight[T.if_then_else(head < q, 0, 1), lane * per_lane + k]
            T.pdl_sync()
            for k in T.vectorized(per_lane):
                value[k] = x[row, head * head_dim + lane * per_lane + k]
            total[0] = 0.0
            for k in T.unroll(per_lane):
                total[0] += T.cast(value[k], F32) * T.cast(value[k], F32)
            total[0] = T.rsqrt(T.warp_reduce_sum(total[0]) / head_dim + eps)
            for k in T.unroll(per_lane):
                value[k] = T.cast(T.cast(value[k], F32) * total[0] * T.cast(gain[k], F32), BF16)
            for k in T.vectorized(per_lane):
                out[row, head * head_dim + lane * per_lane + k] = value[k]

    return main


def take_rows(dim):
    """The rows of the step that logits are wanted for."""
    tokens, rows = T.dynamic("tokens"), T.dynamic("rows")

    @T.prim_func
    def main(logit_rows: T.Tensor((rows,), I32), x: T.Tensor((tokens, dim), BF16), out: T.Tensor((rows, dim), BF16)):
        with T.Kernel(rows, threads=dim // VEC) as row:
            at = T.get_thread_binding() * VEC
            T.pdl_trigger()
            T.pdl_sync()
            for k in T.vectorized(VEC):
                out[row, at + k] = x[logit_rows[row], at + k]

    return main


def rope_append(q, kv, head_dim):
    """Rotates Q and K, writes Q out and K, V into the paged cache; eight rotary pairs a thread.

    A slot is `page · page_tokens + offset`, so the planes are addressed as `[slots, kv, head_dim]`.
    A token without a slot is rotated but not appended.
    """
    tokens, slots, context = T.dynamic("tokens"), T.dynamic("slots"), T.dynamic("context")
    width, half = (q + 2 * kv) * head_dim, head_dim // 2
    per_head = half // VEC
    units = (q + 2 * kv) * per_head

    @T.prim_func
    def main(
        x: T.Tensor((tokens, width), BF16),
        rope_table: T.Tensor((context, head_dim), F32),
        positions: T.Tensor((tokens,), I32),
        kv_slots: T.Tensor((tokens,), I32),
        k_plane: T.Tensor((slots, kv, head_dim), BF16),
        v_plane: T.Tensor((slots, kv, head_dim), BF16),
        out: T.Tensor((tokens, q * head_dim), BF16),
    ):
        with T.Kernel(tokens, threads=units) as row:
            unit = T.get_thread_binding()
            head, at = unit // per_head, unit % per_head * VEC
            low, high = T.alloc_local((VEC,), BF16), T.alloc_local((VEC,), BF16)
            angle = T.alloc_local((2 * VEC,), F32)
            pair = T.alloc_local((2,), F32)
            T.pdl_trigger()
            T.pdl_sync()
            position, slot = positions[row], kv_slots[row]
            for k in T.vectorized(VEC):
                low[k] = x[row, head * head_dim + at + k]
            for k in T.vectorized(VEC):
                high[k] = x[row, head * head_dim + half + at + k]
            if head < q + kv:
                for c in T.unroll(4):
                    for k in T.vectorized(4):
                        angle[c * 4 + k] = rope_table[position, at * 2 + c * 4 + k]
                for k in T.unroll(VEC):
                    pair[0] = T.cast(low[k], F32)
                    pair[1] = T.cast(high[k], F32)
                    low[k] = T.cast(pair[0] * angle[2 * k] - pair[1] * angle[2 * k + 1], BF16)
                    high[k] = T.cast(pair[1] * angle[2 * k] + pair[0] * angle[2 * k + 1], BF16)
            if head < q:
                for k in T.vectorized(VEC):
                    out[row, head * head_dim + at + k] = low[k]
                for k in T.vectorized(VEC):
                    out[row, head * head_dim + half + at + k] = high[k]
            elif slot >= 0:
                if head < q + kv:
                    for k in T.vectorized(VEC):
                        k_plane[slot, head - q, at + k] = low[k]
                    for k in T.vectorized(VEC):
                        k_plane[slot, head - q, half + at + k] = high[k]
                else:
                    for k in T.vectorized(VEC):
                        v_plane[slot, head - q - kv, at + k] = low[k]
                    for k in T.vectorized(VEC):
                        v_plane[slot, head - q - kv, half + at + k] = high[k]

    return main


# ---- artifacts -----------------------------------------------------------------------------------

ALL_TOKENS = domain(tokens=span(1, TOKENS_MAX))
ALL_ROWS = domain(rows=span(1, SEQS_MAX))


def _embed(vocab, dim):
    operands = {
        "token_ids": Operand(input_slot("token_ids")),
        "token_sources": Operand(input_slot("token_sources")),
        "sampled_ids": Operand(output_slot("sampled_ids")),
        "table": Operand(WEIGHT),
        "out": Operand(OUT, WRITE),
    }
    return Artifact(f"embed_{vocab}x{dim}", contract({"embed": {"vocab": vocab, "dim": dim}}), lambda: embed(vocab, dim), operands,
                    ALL_TOKENS, {"tokens": TOKENS}, rounding=(), pass_configs=PLAIN)


def _norm(dim, eps, symbol, residual):
    name = "add_rms_norm" if residual else "rms_norm"
    operands = {"x": Operand(X), "weight": Operand(NORM_WEIGHT), "out": Operand(OUT, WRITE)}
    if residual:
        operands["residual_stream"] = Operand(RESIDUAL, READ_WRITE)
    return Artifact(f"{name}_{dim}_{symbol}", contract({name: {"dim": dim, "eps": bits(eps)}}),
                    lambda: rms_norm(dim, eps, symbol, residual), operands, ALL_TOKENS if symbol == "tokens" else ALL_ROWS,
                    {"tokens": TOKENS, "rows": ROWS}, rounding=("residual", "out") if residual else ("out",), pass_configs=PLAIN)


def _qk_norm(q, kv, head_dim, page_tokens, eps):
    operands = {"x": Operand(X), "weight": Operand(NORM_WEIGHT), "out": Operand(OUT, WRITE)}
    op = {"qk_norm": {"heads": heads(q, kv, head_dim, page_tokens), "eps": bits(eps)}}
    return Artifact(f"qk_norm_q{q}_kv{kv}_d{head_dim}_p{page_tokens}", contract(op), lambda: qk_norm(q, kv, head_dim, eps), operands,
                    ALL_TOKENS, {"tokens": TOKENS}, pass_configs=PLAIN)


def _take_rows(dim):
    operands = {"logit_rows": Operand(input_slot("logit_rows")), "x": Operand(X), "out": Operand(OUT, WRITE)}
    return Artifact(f"take_rows_{dim}", contract({"take_rows": {"dim": dim}}), lambda: take_rows(dim), operands,
                    domain(tokens=span(1, TOKENS_MAX), rows=span(1, SEQS_MAX)), {"rows": ROWS}, rounding=(), pass_configs=PLAIN)


def _rope_append(q, kv, head_dim, page_tokens):
    operands = {
        "x": Operand(X),
        "rope_table": Operand(ROPE_TABLE),
        "positions": Operand(input_slot("positions")),
        "kv_slots": Operand(input_slot("kv_slots")),
        "k_plane": Operand(K_PLANE, WRITE),
        "v_plane": Operand(V_PLANE, WRITE),
        "out": Operand(OUT, WRITE),
    }
    return Artifact(f"rope_append_q{q}_kv{kv}_d{head_dim}_p{page_tokens}",
                    contract({"rope_append": {"heads": heads(q, kv, head_dim, page_tokens)}}), lambda: rope_append(q, kv, head_dim),
                    operands, ALL_TOKENS, {"tokens": TOKENS}, rounding=("q", "k"), pass_configs=PLAIN)


def artifacts():
    """Every kernel of this family."""
    found = []
    for m in MODELS:
        found += [_embed(m.vocab, m.dim), _take_rows(m.dim)]
        found += [_norm(m.dim, m.eps, symbol, residual) for symbol in ("tokens", "rows") for residual in (False, True)]
        found += [_rope_append(m.q, m.kv, m.head_dim, page) for page in PAGE_TOKENS]
    return found + [_qk_norm(16, 8, 128, page, 1e-6) for page in PAGE_TOKENS]
