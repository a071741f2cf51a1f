"""Problems and float64 results of the attention contracts, in the terms of `oracle.py`.

Every problem permutes the pages of the pool, fills what no sequence owns with NaN (the rest of a last
page included), points unused table entries at such a page and pads the step up to the class bound with
empty sequences: a kernel that reads a token too many, or touches a padded row, is found out.
"""

import numpy as np

from oracle import (BF16_OUT, BF16_TWICE, EXACT, NAN_BF16, NONE, Expect, Problem, appended, output, random_bf16, rope_table, rotate,
                    sampled_rows, to_bf16, to_float, untouched)

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 128, 129, 255, 512, 777, 1024, 2048, 5000)
"""Lengths that meet every edge of pages, units, chunks and tiles."""
DEPTH_MAX = 4000
"""Tokens in the cache before a chunk, at most."""
TABLE_STRIDE = 1031
"""Entries of a block-table row."""
CONTEXT = 2048
"""Positions of the rotary table."""
ROWS_MAX, BLOCK = 160, 32
"""Rows of a chunk that are computed, and rows computed at a time."""


def attention(query, keys, values, positions):
    """`[rows, q, d]` of causal attention over `[n, kv, d]`; row i sees keys up to `positions[i]`."""
    group = query.shape[1] // keys.shape[1]
    grouped = query.reshape(len(query), keys.shape[1], group, -1)
    scores = np.einsum("rkgd,nkd->rkgn", grouped, keys, optimize=True) / np.sqrt(query.shape[2])
    scores = np.where(np.arange(len(keys)) <= positions[:, None, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rkgn,nkd->rkgd", weights / weights.sum(-1, keepdims=True), values, optimize=True).reshape(query.shape)


def cache(heads, lengths, bound, rng):
    """Planes of NaN with the given sequences written into them, block tables, and K and V by sequence."""
    page, kv, dim = heads["page_tokens"], heads["kv"], heads["dim"]
    needed = [-(-n // page) for n in lengths]
    assert max(needed) <= TABLE_STRIDE, f"{max(lengths)} tokens do not fit into a block-table row"
    assert sum(needed) < bound.kv_pages, f"{sum(needed)} pages do not fit into a pool of {bound.kv_pages}"
    free = list(rng.permutation(bound.kv_pages))
    tables = np.full((bound.seqs, TABLE_STRIDE), free.pop(), np.uint32)
    planes = [np.full((bound.kv_pages, page, kv, dim), NAN_BF16, np.uint16) for _ in "kv"]
    contents = []
    for seq, (length, count) in enumerate(zip(lengths, needed)):
        owned = np.array([free.pop() for _ in range(count)], np.int64)
        tables[seq, :count] = owned
        both = [random_bf16(rng, (length, kv, dim)) for _ in "kv"]
        for plane, rows in zip(planes, both):
            plane[owned[np.arange(length) // page], np.arange(length) % page] = rows
        contents.append(both)
    return planes, tables, contents


def computed(chunk, rng):
    """Rows of a chunk that the oracle computes: all of a short one."""
    if chunk <= 64:
        return np.arange(chunk)
    rows = sampled_rows(chunk, rng)
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), ROWS_MAX)).astype(int))]


def ragged(lengths, chunks, heads, bound, rng):
    """A step whose sequence s has `lengths[s]` tokens in the cache, the last `chunks[s]` of them new."""
    q, dim = heads["q"], heads["dim"]
    planes, tables, contents = cache(heads, lengths, bound, rng)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = random_bf16(rng, (bound.tokens, q * dim))
    query[starts[-1]:] = NAN_BF16
    rows, expected, owned = [], [], []
    for seq, (length, chunk) in enumerate(zip(lengths, chunks)):
        if chunk == 0 or length == 0:
            continue
        own = computed(chunk, rng)
        keys, values = (to_float(v) for v in contents[seq])
        for at in range(0, len(own), BLOCK):
            some = own[at:at + BLOCK]
            x = to_float(query[starts[seq] + some]).reshape(-1, q, dim)
            expected.append(attention(x, keys, values, length - chunk + some).reshape(len(some), -1))
            rows.append(starts[seq] + some)
        owned.append(np.arange(starts[seq], starts[seq + 1]))
    out = output(bound.tokens, q * dim, "bf16")
    others = np.setdiff1d(np.arange(bound.tokens), np.concatenate(owned))
    out[others] = random_bf16(rng, (len(others), q * dim))
    padded = lambda values, size, fill: np.concatenate([values, np.full(size - len(values), fill)]).astype(np.uint32)
    arrays = {
        "x": query, "k_plane": planes[0], "v_plane": planes[1], "out": out, "input.block_tables": tables,
        "input.kv_lens": padded(np.array(lengths), bound.seqs, 0),
        "input.query_starts": padded(starts, bound.seqs + 1, starts[-1]),
    }
    expectations = {"out": Expect(np.concatenate(expected), BF16_TWICE, np.concatenate(rows))}
    expectations["out#untouched"] = Expect(to_float(out[others]), EXACT, others)
    return Problem(arrays, expectations)


def decode_lengths(page, sizes, bound, rng):
    """Lengths of sequences with one query row; every fifth is empty where there are many."""
    longest = min((bound.kv_pages - 1) // sizes.seqs * page, LENGTHS[-1])
    edges = [n for n in LENGTHS if n <= longest][::-1][:sizes.seqs]
    lengths = edges + [int(n) for n in rng.integers(1, longest + 1, sizes.seqs - len(edges))]
    lengths = [lengths[i] for i in rng.permutation(sizes.seqs)]
    return [0 if sizes.seqs > 4 and i % 5 == 4 else n for i, n in enumerate(lengths)]


def attend_decode(op, sizes, bound, rng):
    """One query row a sequence."""
    lengths = decode_lengths(op["heads"]["page_tokens"], sizes, bound, rng)
    return ragged(lengths, [1] * sizes.seqs, op["heads"], bound, rng)


def attend_mixed(op, sizes, bound, rng):
    """Chunks of random sizes that add up to the step's tokens, half of them decode rows, over caches of random depth."""
    seqs = min(sizes.seqs, sizes.tokens, 40)
    chunks = np.ones(seqs, np.int64)
    long = rng.permutation(seqs)[:max(1, seqs // 2)]
    chunks[long] += rng.multinomial(sizes.tokens - seqs, rng.dirichlet(np.ones(len(long))))
    page = op["heads"]["page_tokens"]
    depth = min((bound.kv_pages - 1 - int(sum(-(-chunks // page)))) // seqs * page, DEPTH_MAX)
    depth = min(depth, TABLE_STRIDE * page - int(max(chunks)))
    lengths = [int(c + rng.integers(0, depth + 1)) if rng.random() < 0.7 else int(c) for c in chunks]
    return ragged(lengths, [int(c) for c in chunks], op["heads"], bound, rng)


def attend(op, manifest, sizes, bound, rng):
    """Either phase."""
    return (attend_decode if op["phase"] == "decode" else attend_mixed)(op, sizes, bound, rng)


def rope_attend(op, manifest, sizes, bound, rng):
    """A decode step whose newest tokens the kernel appends itself.

    Their slots and the rest of their pages hold NaN, or what a sequence before left there. Some tokens
    have no slot: they are attended to and stored nowhere, and the table may have no page for them.
    Empty sequences have a slot that must not be written.
    """
    heads = op["heads"]
    q, kv, dim, page = heads["q"], heads["kv"], heads["dim"], heads["page_tokens"]
    lengths = np.array(decode_lengths(page, sizes, bound, rng))
    planes, tables, contents = cache(heads, lengths, bound, rng)
    planes, unowned = [plane.reshape(-1, kv, dim) for plane in planes], tables[0, -1]
    live = np.nonzero(lengths)[0]
    x = random_bf16(rng, (bound.tokens, (q + 2 * kv) * dim))
    x[np.setdiff1d(np.arange(bound.tokens), live)] = NAN_BF16
    slots = np.full(bound.tokens, unowned * page, np.uint32)
    for seq in live:
        last = lengths[seq] - 1
        slot, end = (int(tables[seq, last // page]) * page + last % page, (int(tables[seq, last // page]) + 1) * page)
        for plane in planes:
            plane[slot:end] = random_bf16(rng, (end - slot, kv, dim), 16.0) if rng.random() < 0.4 else NAN_BF16
        slots[seq] = slot if rng.random() < 0.85 else NONE
        if slots[seq] == NONE and last % page == 0:
            tables[seq, last // page] = unowned
    out = output(bound.tokens, q * dim, "bf16")
    arrays = {
        "x": x, "rope_table": rope_table(CONTEXT, dim), "k_plane": planes[0], "v_plane": planes[1], "out": out,
        "input.positions": rng.integers(0, CONTEXT, bound.tokens, dtype=np.uint32), "input.kv_slots": slots,
        "input.block_tables": tables, "input.kv_lens": np.pad(lengths, (0, bound.seqs - sizes.seqs)).astype(np.uint32),
    }
    expected = appended(arrays, heads, to_float(x[live]), live, BF16_OUT)
    angles = arrays["rope_table"].astype(np.float64)[arrays["input.positions"][live]]
    parts = to_float(x[live]).reshape(len(live), q + 2 * kv, dim)
    rotated = to_float(to_bf16(rotate(parts[:, :q + kv], angles)))
    results = []
    for at, seq in enumerate(live):
        keys, values = (to_float(rows) for rows in contents[seq])
        keys[-1], values[-1] = rotated[at, q:], parts[at, q + kv:]
        results.append(attention(rotated[at:at + 1, :q], keys, values, lengths[seq] - 1 + np.arange(1)).reshape(-1))
    expected["out"] = Expect(np.stack(results), BF16_TWICE, live)
    others = np.setdiff1d(np.arange(bound.tokens), live)
    out[others] = random_bf16(rng, (len(others), q * dim))
    expected["out#untouched"] = Expect(to_float(out[others]), EXACT, others)
    return untouched(Problem(arrays, expected), slots[live])


PROBLEMS = {"attend": attend, "rope_attend": rope_attend}
