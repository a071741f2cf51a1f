"""Problems and exact results of the sampling contract, in the terms of `oracle.py`.

`sample_row` follows the arithmetic of `SamplingRow` in `runtime/bundle/src/step.rs` operation by
operation; ids must agree exactly, log-probabilities to within rounding.
"""

import numpy as np

from oracle import EXACT, NONE, Expect, Problem, Tolerance

TOP = 20
MASK, BIAS, HISTORY = 1, 2, 4
IN_PROMPT = 1 << 31
LOGPROB = Tolerance(4e-6, 4e-6)
"""A sum of exponentials in binary32 and the logits' own rounding."""
ROW = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<u4"), ("repetition", "<f4"), ("presence", "<f4"),
                ("frequency", "<f4"), ("logprobs", "<u4"), ("seed", "<u8"), ("counter", "<u8"), ("target", "<u4"), ("flags", "<u4"),
                ("reserved", "<u4", 2)])
GREEDY = (0.0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, NONE, 0, 0, NONE, 0, (0, 0))
POLYNOMIAL = np.array([0x3F800000, 0xBF3171DE, 0x3E75F1C8, 0xBD627F7B, 0x3C16D3E8, 0xBA77B359], np.uint32).view(np.float32)
LOG2E_OCTAVE = np.uint32(0x49B8AA3B).view(np.float32)


def philox(seed, counter):
    """First word of Philox4x32-10 with key `seed` and counter `(counter, 0)`."""
    word = 0xFFFFFFFF
    c, key = [counter & word, counter >> 32, 0, 0], [seed & word, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & word, (first >> 32) ^ c[3] ^ key[1], first & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return c[0]


def power(fraction):
    """`P(f)` for `f = fraction / 2²⁰`. Binary64 holds the product and the sum of a step, so one rounding is left."""
    f = fraction * 2.0**-20
    value = np.full(fraction.shape, POLYNOMIAL[5], np.float32)
    for coefficient in POLYNOMIAL[4::-1]:
        value = (value.astype(np.float64) * f + np.float64(coefficient)).astype(np.float32)
    return value


def weights(logits, top, temperature):
    """Integer weights of logits that are not above `top`."""
    with np.errstate(all="ignore"):
        scale = np.float32(LOG2E_OCTAVE) / np.float32(temperature)
        distance = np.where(logits == top, np.float32(0), (np.float32(top) - logits) * scale)
    limit = np.float32(40 * 2**20)
    q = np.where(distance < limit, distance, 0).astype(np.int64)
    mantissa = (power(q & 0xFFFFF).astype(np.float64) * 2.0**24).astype(np.uint64)
    return np.where(distance < limit, (mantissa << np.uint64(16)) >> (q >> 20).astype(np.uint64), np.uint64(0))


def penalise(x, row, ids, counts):
    """Logits after repetition, presence and frequency penalties."""
    y = x.copy()
    with np.errstate(all="ignore"):
        for id, count in zip(ids, counts & ~np.uint32(IN_PROMPT)):
            if id >= len(y):
                continue
            value = y[id] / row["repetition"] if y[id] > 0 else y[id] * row["repetition"]
            if count > 0:
                value = (value - row["presence"]) - row["frequency"] * np.float32(count)
            y[id] = value
    return y


def in_order(values, count=None):
    """Ids above −∞ by falling value, ties by rising id, −0 equal to 0."""
    ids = np.flatnonzero(values > -np.inf)
    if count is not None and count < len(ids):
        ids = ids[values[ids] >= -np.partition(-values[ids], max(count - 1, 0))[max(count - 1, 0)]]
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def draw(y, row):
    """The id drawn from penalised logits that are not all −∞."""
    if row["temperature"] == 0 or row["top_k"] == 1 or row["top_p"] <= 0:
        return int(in_order(y, 1)[0])
    order = in_order(y)
    w = [int(v) for v in weights(y[order], y[order[0]], row["temperature"])]
    if row["top_k"]:
        w = w[:row["top_k"]]
    if row["top_p"] < 1:
        least = max(1, sum(w) * int(float(row["top_p"]) * 2**32) >> 32)
        w = w[:int(np.searchsorted(np.cumsum(np.array(w, np.uint64)), np.uint64(least))) + 1]
    if row["min_p"] > 0:
        least = int(float(row["min_p"]) * 2**40)
        w = [v for i, v in enumerate(w) if i == 0 or v >= least]
    target = sum(w) * (2 * philox(int(row["seed"]), int(row["counter"])) + 1) >> 33
    return int(order[np.searchsorted(np.cumsum(np.array(w, np.uint64)), np.uint64(target), side="right")])


def sample_row(logits, row, known, mask, bias, history):
    """(id, its log-probability, ids and log-probabilities of alternatives) of one row."""
    x = logits[:known].copy()
    if row["flags"] & BIAS:
        x[bias[0]] += bias[1]
    if row["flags"] & MASK:
        x[np.unpackbits(mask.view(np.uint8), bitorder="little")[:known] == 0] = -np.inf
    wanted = 0 if row["logprobs"] == NONE else min(int(row["logprobs"]), TOP)
    if np.isnan(x).any() or not (x > -np.inf).any():
        return NONE, None, np.full(wanted, NONE), np.full(wanted, -np.inf)
    top = x.max()
    logprobs = x.astype(np.float64) - (np.log(np.exp(x.astype(np.float64) - top).sum()) + top)
    best = in_order(x, wanted)
    fill = wanted - len(best)
    alternatives = np.concatenate([best, np.full(fill, NONE)]), np.concatenate([logprobs[best], np.full(fill, -np.inf)])
    if row["target"] != NONE:
        target = int(row["target"])
        return target, logprobs[target] if target < known else -np.inf, *alternatives
    y = penalise(x, row, *history) if row["flags"] & HISTORY else x
    id = draw(y, row)
    return id, logprobs[id], *alternatives


# ---- problems ------------------------------------------------------------------------------------


def some_row(rng, index, known, flags):
    """A row of random parameters; the first few indices go through the special cases."""
    row = np.array(GREEDY, ROW)
    row["flags"] = flags
    if index % 3 == 0:
        return row
    row["temperature"] = rng.choice([0.1, 0.7, 1.0, 1.3, 3.0])
    row["top_p"] = rng.choice([1.0, 1.0, 0.95, 0.5, 0.01])
    row["min_p"] = rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])
    row["top_k"] = rng.choice([0, 0, 2, 50, 1000, known])
    row["repetition"], row["presence"], row["frequency"] = rng.choice([1.0, 1.3]), rng.choice([0.0, 0.7]), rng.choice([0.0, 0.25])
    row["logprobs"] = rng.choice([NONE, NONE, 0, 5, TOP])
    row["seed"], row["counter"] = rng.integers(0, 2**63), rng.integers(0, 2**40)
    row["target"] = rng.choice([NONE] * 7 + [int(rng.integers(0, known))])
    return row


def some_logits(rng, index, vocab):
    """Wide, narrow, rounded (ties), flat, and with infinities or a NaN."""
    kind = index % 7
    logits = rng.normal(0, (4.0, 1.0, 8.0, 0.25, 2.0, 3.0, 1.0)[kind], vocab).astype(np.float32)
    if kind == 2:
        logits = np.round(logits)
    if kind == 4 and index % 2:
        logits[:] = np.float32(rng.normal())
    if kind == 5:
        logits[rng.integers(0, vocab, vocab // 2)] = -np.inf
    if kind == 6 and index % 4 == 3:
        logits[rng.integers(0, vocab)] = np.nan
    return logits


def sample(op, manifest, sizes, bound, rng):
    """Rows of every kind of parameters over logits of every kind."""
    vocab, known, count = op["vocab"], op["vocab_known"], bound.rows
    words = -(-vocab // 32)
    kinds = np.stack([some_logits(rng, index, vocab) for index in range(28)])
    arrays = {
        "x": kinds[rng.integers(0, 28, count)],
        "input.mask": rng.integers(0, 2**32, (count, words), dtype=np.uint32),
        "output.sampled_ids": np.full(count, 0xABABABAB, np.uint32),
        "output.sampled_logprobs": np.full(count, np.nan, np.float32),
        "output.top_ids": np.full(count * TOP, 0xABABABAB, np.uint32),
        "output.top_logprobs": np.full(count * TOP, np.nan, np.float32),
    }
    arrays["x"][:, known:] = np.nan
    arrays["input.mask"][count // 2:] &= rng.integers(0, 2**32, (count - count // 2, words), dtype=np.uint32) >> 3
    flags = [int(rng.choice([0, 0, MASK, BIAS, HISTORY, MASK | BIAS | HISTORY])) for _ in range(count)]
    rows = np.array([some_row(rng, int(rng.integers(0, 6)), known, f) for f in flags], ROW)
    biased = [rng.permutation(known)[:rng.integers(0, 300)] if f & BIAS else np.zeros(0, np.int64) for f in flags]
    seen = [rng.permutation(known)[:rng.integers(0, 2000)] if f & HISTORY else np.zeros(0, np.int64) for f in flags]
    values = [rng.choice([-100.0, -1.5, 2.25, 5.0], len(ids)).astype(np.float32) for ids in biased]
    counts = [(rng.integers(0, 4, len(ids)) | rng.choice([0, IN_PROMPT], len(ids))).astype(np.uint32) for ids in seen]
    joined = lambda parts, dtype: np.concatenate([*parts, np.zeros(1)]).astype(dtype)
    starts = lambda parts: np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.uint32)
    arrays |= {
        "input.sampling": rows.view(np.uint32).reshape(count, 16),
        "input.bias_starts": starts(biased), "input.bias_ids": joined(biased, np.uint32), "input.bias_values": joined(values, np.float32),
        "input.history_starts": starts(seen), "input.history_ids": joined(seen, np.uint32), "input.history_counts": joined(counts, np.uint32),
    }
    results = [sample_row(arrays["x"][r], rows[r], known, arrays["input.mask"][r], (biased[r], values[r]), (seen[r], counts[r]))
               for r in range(sizes.rows)]
    return Problem(arrays, expectations(rows, results))


def expectations(rows, results):
    """What the output slots hold of rows that ask for it."""
    ids = np.array([r[0] for r in results], np.float64)
    scored = [i for i, r in enumerate(results) if rows[i]["logprobs"] != NONE and r[1] is not None and np.isfinite(r[1])]
    expected = {"output.sampled_ids": Expect(ids, EXACT, np.arange(len(ids)))}
    if scored:
        expected["output.sampled_logprobs"] = Expect(np.array([results[i][1] for i in scored]), LOGPROB, np.array(scored))
    listed = [i for i in range(len(ids)) if len(results[i][2])]
    at = np.array([i * TOP + k for i in listed for k in range(len(results[i][2]))], np.int64)
    if len(at):
        expected["output.top_ids"] = Expect(np.concatenate([results[i][2] for i in listed]).astype(np.float64), EXACT, at)
        values = np.concatenate([results[i][3] for i in listed])
        expected["output.top_logprobs"] = Expect(values[np.isfinite(values)], LOGPROB, at[np.isfinite(values)])
    return expected


PROBLEMS = {"sample": sample}
