"""Paged causal attention over ragged rows, warp-specialised: the fast form of `attend_mixed.py`.

A block has one producer warp, which brings pages by bulk tensor copies, and two consumer warpgroups of
64 rows each, which take turns on the tensor cores: the scores of the next key tile are issued before
the weighted sum of the current one, and a named barrier hands the tensor cores over. As in the plain
form, the query heads of a KV head are packed into the rows of a tile.

The grid is a bound from the step's tokens; blocks take tiles `block, block + grid, …` of a list that
they derive from the metadata: sequence by sequence, last query tile first, since it is the longest.
Key tiles start at multiples of `BLOCK_N` and go from the diagonal to the left; a masked key weighs
exactly 0, so a row's bits depend neither on how its prompt was cut nor on its tile or neighbours.

Blocks without a tile leave without waiting for the producer kernel, except the first, so that the
kernel never ends before its producer. A key tile is kept as two panels of 64 columns, so that a page is one box of a panel. What the boxes
bring from behind the last token is masked in the scores and zeroed in V before its first use.
"""

from artifact import SEQS, TOKENS, WRITE, Artifact, Operand, Scalar
from contracts import K_PLANE, OUT, V_PLANE, X, contract, domain, heads, input_slot, scalar, span, sym
from primitives import BF16, F32, I32, WARP, T
from shapes import MODELS, PAGE_TOKENS, SEQS_MAX, TOKENS_MAX

BLOCK_M, BLOCK_N, STAGES = 128, 128, 2
CONSUMERS, GROUP_THREADS = 256, 128
PANEL = 64
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
FEW_TOKENS = 512
TOKENS_A_BLOCK_FEW, TOKENS_A_BLOCK = 1, 6
"""The grid by tokens: room for a decode row a block in short steps, for a tile a block in long ones."""
TURN, ROWS, OWN = 1, 8, 6
"""Named barriers: whose turn it is (two), all consumers, one consumer warpgroup (two)."""
LOG2E = 1.4426950408889634
CONFIG = {"tl.disable_warp_specialized": True, "tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}


def tile_list(group, kv):
    """Macros that build the list of tiles in shared memory, and look one up."""
    per_lane = SEQS_MAX // WARP

    @T.macro
    def build(query_starts, kv_lens, seqs, lane, first):
        """First tile of each sequence, a KV head; the total behind them. By one warp."""
        own = T.alloc_local((per_lane,), I32)
        upto, other, rows = T.alloc_local((1,), I32), T.alloc_local((1,), I32), T.alloc_local((1,), I32)
        upto[0] = 0
        for k in T.unroll(per_lane):
            own[k] = 0
            if lane * per_lane + k < seqs:
                rows[0] = query_starts[lane * per_lane + k + 1] - query_starts[lane * per_lane + k]
                if rows[0] > 0 and kv_lens[lane * per_lane + k] >= rows[0]:
                    own[k] = (rows[0] * group + BLOCK_M - 1) // BLOCK_M
            upto[0] += own[k]
        rows[0] = upto[0]
        for i in T.unroll(5):
            other[0] = T.shfl_up(upto[0], 1 << i)
            if lane >= (1 << i):
                upto[0] += other[0]
        rows[0] = upto[0] - rows[0]
        for k in T.unroll(per_lane):
            first[lane * per_lane + k] = rows[0]
            rows[0] += own[k]
        if lane == WARP - 1:
            first[SEQS_MAX] = rows[0]

    @T.macro
    def find(first, tile, query_starts, kv_lens, at):
        """`at`: 0 sequence, 1 KV head, 2 first packed row, 3 query rows, 4 tokens before them, 5 first token row,
        6 key tiles, 7 key tiles without a mask."""
        at[0] = 0
        for i in T.unroll(8):
            if first[T.min(at[0] + (128 >> i), SEQS_MAX)] <= tile // kv:
                at[0] += 128 >> i
        at[1] = tile % kv
        at[2] = (first[at[0] + 1] - 1 - tile // kv) * BLOCK_M
        at[5] = query_starts[at[0]]
        at[3] = query_starts[at[0] + 1] - at[5]
        at[4] = kv_lens[at[0]] - at[3]
        at[6] = (at[4] + (T.min(at[2] + BLOCK_M, at[3] * group) - 1) // group) // BLOCK_N + 1
        at[7] = (at[4] + at[2] // group + 1) // BLOCK_N

    return build, find


def attend_mixed_ws(q, kv, dim, page, tokens_a_block):
    """`out[t] = softmax(x[t] · Kᵀ / √dim) · V` over the keys of the row's sequence up to its position."""
    group = q // kv
    scale = float(dim**-0.5 * LOG2E)
    pages = BLOCK_N // page
    tokens, seqs, starts = T.dynamic("tokens"), T.dynamic("seqs"), T.dynamic("starts")
    kv_pages, table_stride = T.dynamic("kv_pages"), T.dynamic("table_stride")
    blocks = T.ceildiv(tokens, tokens_a_block)
    full_row = T.GemmWarpPolicy.FullRow
    build, find = tile_list(group, kv)
    assert dim == 2 * PANEL and BLOCK_N % page == 0

    @T.macro
    def load(plane, tables, at, key_tile, left, right, stage, full, thread):
        for p in T.unroll(pages):
            entry = tables[at[0], T.min(key_tile * pages + p, (at[3] + at[4] - 1) // page)]
            T.tma_copy(plane[entry, 0:page, at[1], 0:PANEL], left[stage, p * page:(p + 1) * page, :], barrier=full[stage], leader_scope_threads=WARP)
            T.tma_copy(plane[entry, 0:page, at[1], PANEL:dim], right[stage, p * page:(p + 1) * page, :], barrier=full[stage], leader_scope_threads=WARP)
        T.sync_warp()
        if thread == CONSUMERS:
            T.barrier_arrive(full[stage])

    @T.macro
    def scores(q_tile, left, right, stage, score):
        T.wgmma_gemm(q_tile[:, 0:PANEL], left[stage, :, :], score, transpose_B=True, policy=full_row, clear_accum=True)
        T.wgmma_gemm(q_tile[:, PANEL:dim], right[stage, :, :], score, transpose_B=True, policy=full_row)

    @T.macro
    def weighted_sum(p, left, right, stage, acc_left, acc_right, first):
        T.wgmma_gemm(p, left[stage, :, :], acc_left, policy=full_row, clear_accum=first)
        T.wgmma_gemm(p, right[stage, :, :], acc_right, policy=full_row, clear_accum=first)

    @T.macro
    def zero_tail(left, right, stage, begin, thread, which):
        """Zeroes rows `begin..` of a V tile; both warpgroups write the same zeros, each waits for its own."""
        lane = thread % GROUP_THREADS
        for step in T.serial((BLOCK_N - begin + 15) // 16):
            if begin + step * 16 + lane // 8 < BLOCK_N:
                for k in T.vectorized(8):
                    left[stage, begin + step * 16 + lane // 8, lane % 8 * 8 + k] = T.cast(0, BF16)
                for k in T.vectorized(8):
                    right[stage, begin + step * 16 + lane // 8, lane % 8 * 8 + k] = T.cast(0, BF16)
        T.fence_proxy_async()
        T.sync_threads(OWN + which, GROUP_THREADS)

    @T.prim_func
    def main(
        x: T.Tensor((tokens, q, dim), BF16),
        k_plane: T.Tensor((kv_pages, page, kv, dim), BF16),
        v_plane: T.Tensor((kv_pages, page, kv, dim), BF16),
        block_tables: T.Tensor((seqs, table_stride), I32),
        query_starts: T.Tensor((starts,), I32),
        kv_lens: T.Tensor((seqs,), I32),
        out: T.Tensor((tokens, q, dim), BF16),
    ):
        with T.Kernel(blocks, threads=CONSUMERS + GROUP_THREADS) as block:
            q_tile = T.alloc_shared((BLOCK_M, dim), BF16)
            k_left, k_right = T.alloc_shared((STAGES, BLOCK_N, PANEL), BF16), T.alloc_shared((STAGES, BLOCK_N, PANEL), BF16)
            v_left, v_right = T.alloc_shared((STAGES, BLOCK_N, PANEL), BF16), T.alloc_shared((STAGES, BLOCK_N, PANEL), BF16)
            first = T.alloc_shared((SEQS_MAX + 8,), I32, scope="shared")
            k_full, v_full = T.alloc_barrier([1] * STAGES), T.alloc_barrier([1] * STAGES)
            k_empty, v_empty = T.alloc_barrier([CONSUMERS // WARP] * STAGES), T.alloc_barrier([CONSUMERS // WARP] * STAGES)
            at, ring, tile = T.alloc_local((8,), I32), T.alloc_local((1,), I32), T.alloc_local((1,), I32)
            thread = T.get_thread_binding()

            T.pdl_trigger()
            if thread < WARP:
                build(query_starts, kv_lens, seqs, thread, first)
            T.sync_threads()
            if block == 0 or block < first[SEQS_MAX] * kv:
                T.pdl_sync()
            tile[0] = block
            ring[0] = 0
            if thread >= CONSUMERS:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if thread < CONSUMERS + WARP:
                    while tile[0] < first[SEQS_MAX] * kv:
                        find(first, tile[0], query_starts, kv_lens, at)
                        for i in T.serial(at[6]):
                            stage = (ring[0] + i) % STAGES
                            parity = ((ring[0] + i) // STAGES & 1) ^ 1
                            T.barrier_wait(k_empty[stage], parity)
                            load(k_plane, block_tables, at, at[6] - 1 - i, k_left, k_right, stage, k_full, thread)
                            T.barrier_wait(v_empty[stage], parity)
                            load(v_plane, block_tables, at, at[6] - 1 - i, v_left, v_right, stage, v_full, thread)
                        ring[0] += at[6]
                        tile[0] += blocks
            else:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                score, p = T.alloc_fragment((BLOCK_M, BLOCK_N), F32), T.alloc_fragment((BLOCK_M, BLOCK_N), BF16)
                acc_left, acc_right = T.alloc_fragment((BLOCK_M, PANEL), F32), T.alloc_fragment((BLOCK_M, PANEL), F32)
                best, before = T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32)
                factor, part, total = T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32), T.alloc_fragment((BLOCK_M,), F32)
                limit = T.alloc_fragment((BLOCK_M,), I32)
                which = thread // GROUP_THREADS
                if which == 1:
                    T.named_barrier_arrive(TURN, CONSUMERS)
                while tile[0] < first[SEQS_MAX] * kv:
                    find(first, tile[0], query_starts, kv_lens, at)
                    for i, j in T.Parallel(BLOCK_M, dim):
                        q_tile[i, j] = x[at[5] + T.min((at[2] + i) // group, at[3] - 1), at[1] * group + (at[2] + i) % group, j]
                    for i in T.Parallel(BLOCK_M):
                        limit[i] = at[4] + (at[2] + i) // group
                    T.fill(best, -1e30)
                    T.clear(total)
                    T.fence_proxy_async()
                    T.sync_threads(ROWS, CONSUMERS)
                    T.barrier_wait(k_full[ring[0] % STAGES], ring[0] // STAGES & 1)
                    scores(q_tile, k_left, k_right, ring[0] % STAGES, score)
                    T.wait_wgmma(0)
                    if thread % WARP == 0:
                        T.barrier_arrive(k_empty[ring[0] % STAGES])
                    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                        score[i, j] = T.if_then_else((at[6] - 1) * BLOCK_N + j <= limit[i], score[i, j], -T.infinity(F32))
                    T.reduce_max(score, best, dim=1, clear=False)
                    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                        score[i, j] = T.exp2(score[i, j] * scale - best[i] * scale)
                    T.reduce_sum(score, total, dim=1)
                    T.copy(score, p)
                    T.barrier_wait(v_full[ring[0] % STAGES], ring[0] // STAGES & 1)
                    if at[6] * BLOCK_N > at[3] + at[4]:
                        zero_tail(v_left, v_right, ring[0] % STAGES, at[3] + at[4] - (at[6] - 1) * BLOCK_N, thread, which)
                    for i in T.serial(at[6] - 1):
                        step = ring[0] + i + 1
                        T.barrier_wait(k_full[step % STAGES], step // STAGES & 1)
                        T.sync_threads(TURN + which, CONSUMERS)
                        scores(q_tile, k_left, k_right, step % STAGES, score)
                        T.barrier_wait(v_full[(step - 1) % STAGES], (step - 1) // STAGES & 1)
                        weighted_sum(p, v_left, v_right, (step - 1) % STAGES, acc_left, acc_right, i == 0)
                        T.named_barrier_arrive(TURN + 1 - which, CONSUMERS)
                        T.wait_wgmma(2)
                        if thread % WARP == 0:
                            T.barrier_arrive(k_empty[step % STAGES])
                        T.copy(best, before)
                        if at[6] - 2 - i >= at[7]:
                            for r, j in T.Parallel(BLOCK_M, BLOCK_N):
                                score[r, j] = T.if_then_else((at[6] - 2 - i) * BLOCK_N + j <= limit[r], score[r, j], -T.infinity(F32))
                        T.reduce_max(score, best, dim=1, clear=False)
                        for r in T.Parallel(BLOCK_M):
                            factor[r] = T.exp2(before[r] * scale - best[r] * scale)
                        for r, j in T.Parallel(BLOCK_M, BLOCK_N):
                            score[r, j] = T.exp2(score[r, j] * scale - best[r] * scale)
                        T.reduce_sum(score, part, dim=1)
                        for r in T.Parallel(BLOCK_M):
                            total[r] = total[r] * factor[r] + part[r]
                        T.wait_wgmma(0)
                        if thread % WARP == 0:
                            T.barrier_arrive(v_empty[(step - 1) % STAGES])
                        for r, j in T.Parallel(BLOCK_M, PANEL):
                            acc_left[r, j] *= factor[r]
                        for r, j in T.Parallel(BLOCK_M, PANEL):
                            acc_right[r, j] *= factor[r]
                        T.copy(score, p)
                    ring[0] += at[6]
                    T.barrier_wait(v_full[(ring[0] - 1) % STAGES], (ring[0] - 1) // STAGES & 1)
                    weighted_sum(p, v_left, v_right, (ring[0] - 1) % STAGES, acc_left, acc_right, at[6] == 1)
                    T.wait_wgmma(0)
                    if thread % WARP == 0:
                        T.barrier_arrive(v_empty[(ring[0] - 1) % STAGES])
                    for i in T.Parallel(BLOCK_M):
                        total[i] = 1.0 / total[i]
                    for i, j in T.Parallel(BLOCK_M, PANEL):
                        acc_left[i, j] *= total[i]
                    for i, j in T.Parallel(BLOCK_M, PANEL):
                        acc_right[i, j] *= total[i]
                    T.sync_threads(ROWS, CONSUMERS)
                    T.copy(acc_left, q_tile[:, 0:PANEL])
                    T.copy(acc_right, q_tile[:, PANEL:dim])
                    T.sync_threads(ROWS, CONSUMERS)
                    for i, j in T.Parallel(BLOCK_M, dim):
                        if at[2] + i < at[3] * group:
                            out[at[5] + (at[2] + i) // group, at[1] * group + (at[2] + i) % group, j] = q_tile[i, j]
                    T.sync_threads(ROWS, CONSUMERS)
                    tile[0] += blocks

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
SCALARS = {"tokens": TOKENS, "seqs": SEQS, "table_stride": Scalar(scalar("table_stride"), None),
           "kv_pages": Scalar(scalar("kv_pages"), sym("kv_pages"))}


def _declare(q, kv, dim, page, most, tokens_a_block):
    op = {"attend": {"heads": heads(q, kv, dim, page), "phase": "mixed"}}
    return Artifact(f"attend_mixed_fast{most}_q{q}_kv{kv}_d{dim}_p{page}", contract(op),
                    lambda: attend_mixed_ws(q, kv, dim, page, tokens_a_block), OPERANDS,
                    domain(tokens=span(1, most), seqs=span(1, SEQS_MAX)), SCALARS, rounding=("probabilities", "out"), pass_configs=CONFIG)


def artifacts():
    """Kernels for short and for long steps, for the head geometry of every model with heads of 128."""
    found = []
    for m in MODELS:
        if m.head_dim == 2 * PANEL:
            for page in PAGE_TOKENS:
                found.append(_declare(m.q, m.kv, m.head_dim, page, FEW_TOKENS, TOKENS_A_BLOCK_FEW))
                found.append(_declare(m.q, m.kv, m.head_dim, page, TOKENS_MAX, TOKENS_A_BLOCK))
    return found
