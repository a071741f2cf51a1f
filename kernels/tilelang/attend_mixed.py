"""Paged causal attention over ragged rows: prefill chunks and decode rows in one launch.

Sequence s owns the query rows `query_starts[s] .. query_starts[s + 1]`, which sit at the end of its
cache: row i is at position `kv_len - q_len + i` and sees everything up to itself. The query heads of a
KV head are packed into the rows of one tile, so K and V are read once a group and a decode row costs
`group` rows of a tile, not a tile.

A fixed grid of blocks walks the list of (sequence, query tile, KV head), which every block derives
from the metadata while it goes; no host value but the number of sequences is needed. Sequences with no
query row or no token in the cache have no tile. Key tiles start at multiples of `BLOCK_N` from the
beginning of the sequence and masked keys weigh exactly 0, so a row's bits do not depend on how its
prompt was cut into chunks, on the tile it falls into, or on its neighbours.

Token rows past the end are clamped to the last token, so neither the rest of a page nor unused table
entries need hold anything. Only the metadata is read before the wait on the producer kernel.
"""

from artifact import SEQS, TOKENS, WRITE, Artifact, Operand, Scalar
from contracts import K_PLANE, OUT, V_PLANE, X, contract, domain, heads, input_slot, scalar, span
from primitives import BF16, F32, I32, I64, T
from shapes import MODELS, PAGE_TOKENS, SEQS_MAX, TOKENS_MAX

BLOCK_M, BLOCK_N, THREADS, STAGES, GRID = 64, 64, 128, 2, 264
LOG2E = 1.4426950408889634
CONFIG = {"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True, "tl.disable_safe_memory_legalize": True}


def attend_mixed(q, kv, dim, page):
    """`out[t] = softmax(x[t] · Kᵀ / √dim) · V` over the keys of the row's sequence up to its position."""
    group = q // kv
    scale = float(dim**-0.5 * LOG2E)
    tokens, seqs, starts = T.dynamic("tokens"), T.dynamic("seqs"), T.dynamic("starts")
    slots, table_stride = T.dynamic("slots"), T.dynamic("table_stride")

    @T.macro
    def tiles_of(query_starts, kv_lens, at, rows):
        """Tiles of sequence `at[0]`, all KV heads together, in `at[2]`; its query rows in `rows[0]`."""
        at[2] = 0
        rows[0] = 0
        if at[0] < seqs:
            rows[0] = query_starts[at[0] + 1] - query_starts[at[0]]
            if rows[0] > 0 and kv_lens[at[0]] >= rows[0]:
                at[2] = (rows[0] * group + BLOCK_M - 1) // BLOCK_M * kv

    @T.macro
    def load_rows(plane, tables, seq, head, first, last, tile):
        for i, j in T.Parallel(BLOCK_N, dim):
            tile[i, j] = plane[
                T.cast(tables[seq, T.min(first + i, last) // page], I64) * page + T.min(first + i, last) % page, head, j]

    @T.prim_func
    def main(
        x: T.Tensor((tokens, q, dim), BF16),
        k_plane: T.Tensor((slots, kv, dim), BF16),
        v_plane: T.Tensor((slots, kv, dim), BF16),
        block_tables: T.Tensor((seqs, table_stride), I32),
        query_starts: T.Tensor((starts,), I32),
        kv_lens: T.Tensor((seqs,), I32),
        out: T.Tensor((tokens, q, dim), BF16),
    ):
        with T.Kernel(GRID, threads=THREADS) as block:
            q_tile = T.alloc_shared((BLOCK_M, dim), BF16)
            k_tile, v_tile = T.alloc_shared((BLOCK_N, dim), BF16), T.alloc_shared((BLOCK_N, dim), BF16)
            score, p = T.alloc_fragment((BLOCK_M, BLOCK_N), F32), T.alloc_fragment((BLOCK_M, BLOCK_N), BF16)
            acc = T.alloc_fragment((BLOCK_M, dim), F32)
            best, before = T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32)
            factor, part, total = T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32)
            at, rows = T.alloc_local((4,), I32), T.alloc_local((1,), I32)

            T.pdl_trigger()
            # at: 0 sequence, 1 first tile of the sequence, 2 its number of tiles, 3 this block's tile
            at[0] = 0
            at[1] = 0
            at[3] = block
            tiles_of(query_starts, kv_lens, at, rows)
            T.pdl_sync()
            while at[0] < seqs:
                while at[0] < seqs and at[3] >= at[1] + at[2]:
                    at[1] += at[2]
                    at[0] += 1
                    tiles_of(query_starts, kv_lens, at, rows)
                if at[0] < seqs:
                    seq = at[0]
                    head = (at[3] - at[1]) % kv
                    first = ((at[2] - 1 - (at[3] - at[1])) // kv) * BLOCK_M
                    past = kv_lens[seq] - rows[0]
                    row = query_starts[seq]
                    last = past + (T.min(first + BLOCK_M, rows[0] * group) - 1) // group
                    for i, j in T.Parallel(BLOCK_M, dim):
                        q_tile[i, j] = x[row + T.min((first + i) // group, rows[0] - 1), head * group + (first + i) % group, j]
                    T.clear(acc)
                    T.clear(total)
                    T.fill(best, -1e30)
                    for n in T.Pipelined(last // BLOCK_N + 1, num_stages=STAGES):
                        load_rows(k_plane, block_tables, seq, head, n * BLOCK_N, last, k_tile)
                        T.clear(score)
                        T.gemm(q_tile, k_tile, score, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        T.copy(best, before)
                        for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                            score[i, j] = T.if_then_else(n * BLOCK_N + j <= past + (first + i) // group, score[i, j] * scale, -1e30)
                        T.reduce_max(score, best, dim=1, clear=False)
                        for i in T.Parallel(BLOCK_M):
                            factor[i] = T.exp2(before[i] - best[i])
                        for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                            score[i, j] = T.exp2(score[i, j] - best[i])
                        T.reduce_sum(score, part, dim=1)
                        for i in T.Parallel(BLOCK_M):
                            total[i] = total[i] * factor[i] + part[i]
                        T.copy(score, p)
                        for i, j in T.Parallel(BLOCK_M, dim):
                            acc[i, j] *= factor[i]
                        load_rows(v_plane, block_tables, seq, head, n * BLOCK_N, last, v_tile)
                        T.gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(BLOCK_M, dim):
                        if first + i < rows[0] * group:
                            out[row + (first + i) // group, head * group + (first + i) % group, j] = T.cast(acc[i, j] / total[i], BF16)
                    at[3] += GRID

    return main


# ---- artifacts -----------------------------------------------------------------------------------

OPERANDS = {
    "x": Operand(X),
    "k_plane": Operand(K_PLANE),
    "v_plane": Operand(V_PLANE),
    "block_tables": Operand(input_slot("block_tables")),
    "query_starts": Operand(input_slot("query_starts")),
    "kv_lens": Operand(input_slot("kv_lens")),
    "out": Operand(OUT, WRITE),
}
SCALARS = {"tokens": TOKENS, "seqs": SEQS, "table_stride": Scalar(scalar("table_stride"), None)}


def _declare(q, kv, dim, page):
    op = {"attend": {"heads": heads(q, kv, dim, page), "phase": "mixed"}}
    return Artifact(f"attend_mixed_q{q}_kv{kv}_d{dim}_p{page}", contract(op), lambda: attend_mixed(q, kv, dim, page), OPERANDS,
                    domain(tokens=span(1, TOKENS_MAX), seqs=span(1, SEQS_MAX)), SCALARS, rounding=("probabilities", "out"),
                    pass_configs=CONFIG)


def artifacts():
    """One kernel for the head geometry of every model."""
    return [_declare(m.q, m.kv, m.head_dim, page) for m in MODELS for page in PAGE_TOKENS]
