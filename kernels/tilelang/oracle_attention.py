"""Problems and float64 results of the attention contracts, in the terms of `oracle.py`.

Every problem permutes the pages of the pool, fills what no sequence owns with NaN (the rest of a last
page included), points unused table entries at such a page and pads the step up to the class bound with
empty sequences: a kernel that reads a token too many, or touches a padded row, is found out.
"""

import numpy as np

from oracle import BF16_TWICE, NAN_BF16, Expect, Problem, output, random_bf16, to_float

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 128, 129, 255, 512, 777, 1024, 2048)
"""Lengths that meet every edge of pages, units, chunks and tiles."""


def attention(query, keys, values, positions):
    """`[rows, q, d]` of causal attention over `[n, kv, d]`; row i sees keys up to `positions[i]`."""
    group = query.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("rhd,nhd->rhn", query, keys) / np.sqrt(query.shape[2])
    scores = np.where(np.arange(len(keys))[None, None] <= positions[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rhn,nhd->rhd", weights / weights.sum(-1, keepdims=True), values)


def cache(heads, lengths, bound, pages, rng):
    """Planes of NaN with the given sequences written into them, block tables, and K and V by sequence."""
    page, kv, dim = heads["page_tokens"], heads["kv"], heads["dim"]
    needed = [-(-n // page) for n in lengths]
    stride = max(needed + [1]) + 3
    assert sum(needed) < pages, f"{sum(needed)} pages do not fit into a pool of {pages}"
    free = list(rng.permutation(pages))
    spare = free.pop()
    tables = np.full((bound, stride), spare, np.uint32)
    planes = [np.full((pages, page, kv, dim), NAN_BF16, np.uint16) for _ in "kv"]
    contents = []
    for seq, (length, count) in enumerate(zip(lengths, needed)):
        owned = np.array([free.pop() for _ in range(count)], np.int64)
        tables[seq, :count] = owned
        both = [random_bf16(rng, (length, kv, dim)) for _ in "kv"]
        for plane, rows in zip(planes, both):
            plane[owned[np.arange(length) // page], np.arange(length) % page] = rows
        contents.append([to_float(rows) for rows in both])
    return planes, tables, contents


def ragged(lengths, chunks, heads, bound, pages, rng):
    """A step whose sequence s has `lengths[s]` tokens in the cache, the last `chunks[s]` of them new."""
    q, dim = heads["q"], heads["dim"]
    planes, tables, contents = cache(heads, lengths, bound.seqs, pages, rng)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = random_bf16(rng, (bound.tokens, q * dim))
    query[starts[-1]:] = NAN_BF16
    rows, expected = [], []
    for seq, (length, chunk) in enumerate(zip(lengths, chunks)):
        if chunk == 0 or length == 0:
            continue
        own = np.arange(starts[seq], starts[seq + 1])
        x = to_float(query[own]).reshape(chunk, q, dim)
        result = attention(x, *contents[seq], np.arange(length - chunk, length))
        rows.append(own)
        expected.append(result.reshape(chunk, -1))
    rows, expected = np.concatenate(rows), np.concatenate(expected)
    out = output(bound.tokens, q * dim, "bf16")
    untouched = np.setdiff1d(np.arange(bound.tokens), rows)
    padded = lambda values, size, fill: np.concatenate([values, np.full(size - len(values), fill)]).astype(np.uint32)
    arrays = {
        "x": query, "k_plane": planes[0], "v_plane": planes[1], "out": out, "input.block_tables": tables,
        "input.kv_lens": padded(np.array(lengths), bound.seqs, 0),
        "input.query_starts": padded(starts, bound.seqs + 1, starts[-1]),
    }
    problem = Problem(arrays, {"out": Expect(expected, BF16_TWICE, rows)})
    problem.untouched = {"out": untouched}
    return problem


def some_lengths(count, pages, page, rng):
    """`count` lengths that fit into the pool: edges first, then random ones."""
    budget = (pages - 1) // count
    longest = max(budget * page, 1)
    edges = [n for n in LENGTHS if n <= longest]
    lengths = [int(edges[i]) if i < len(edges) else int(rng.integers(1, longest + 1)) for i in range(count)]
    return [lengths[i] for i in rng.permutation(count)]


def attend_decode(op, manifest, sizes, bound, rng):
    """One query row a sequence; every fifth sequence is empty where there are many."""
    lengths = some_lengths(sizes.seqs, sizes.kv_pages, op["heads"]["page_tokens"], rng)
    lengths = [0 if sizes.seqs > 4 and i % 5 == 4 else n for i, n in enumerate(lengths)]
    return ragged(lengths, [1] * sizes.seqs, op["heads"], bound, sizes.kv_pages, rng)


def attend_mixed(op, manifest, sizes, bound, rng):
    """Chunks of random sizes that add up to the step's tokens, half of them decode rows, over caches of random depth."""
    seqs, page = min(sizes.seqs, sizes.tokens), op["heads"]["page_tokens"]
    chunks = np.ones(seqs, np.int64)
    long = rng.permutation(seqs)[:max(1, seqs // 2)]
    extra = rng.multinomial(sizes.tokens - seqs, np.ones(len(long)) / len(long))
    chunks[long] += extra
    spare = sizes.kv_pages - 1 - int(sum(-(-c // page) for c in chunks))
    depth = max(spare // seqs, 0) * page
    lengths = [int(c + (rng.integers(0, depth + 1) if depth else 0)) for c in chunks]
    return ragged(lengths, [int(c) for c in chunks], op["heads"], bound, sizes.kv_pages, rng)


def attend(op, manifest, sizes, bound, rng):
    """Either phase."""
    return (attend_decode if op["phase"] == "decode" else attend_mixed)(op, manifest, sizes, bound, rng)


PROBLEMS = {"attend": attend}
