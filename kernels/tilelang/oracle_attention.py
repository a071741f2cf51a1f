"""Problems and float64 results of the attention contracts, in the terms of `oracle.py`.

Every problem permutes the pages of the pool, fills what no sequence owns with NaN (the rest of a last
page included), points unused table entries at such a page and pads the step up to the class bound with
empty sequences: a kernel that reads a token too many, or touches a padded row, is found out.
"""

import numpy as np

from oracle import BF16_TWICE, EXACT, NAN_BF16, Expect, Problem, output, random_bf16, sampled_rows, to_float

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 128, 129, 255, 512, 777, 1024, 2048, 5000)
"""Lengths that meet every edge of pages, units, chunks and tiles."""
DEPTH_MAX = 4000
"""Tokens in the cache before a chunk, at most."""
TABLE_STRIDE = 1031
"""Entries of a block-table row."""
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


def attend_decode(op, sizes, bound, rng):
    """One query row a sequence; every fifth sequence is empty where there are many."""
    page = op["heads"]["page_tokens"]
    longest = min((bound.kv_pages - 1) // sizes.seqs * page, LENGTHS[-1])
    edges = [n for n in LENGTHS if n <= longest][::-1][:sizes.seqs]
    lengths = edges + [int(n) for n in rng.integers(1, longest + 1, sizes.seqs - len(edges))]
    lengths = [lengths[i] for i in rng.permutation(sizes.seqs)]
    lengths = [0 if sizes.seqs > 4 and i % 5 == 4 else n for i, n in enumerate(lengths)]
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


PROBLEMS = {"attend": attend}
