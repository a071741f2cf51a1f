"""Sampling: bias, mask, penalties, temperature, top-k, top-p, min-p, the draw, and log-probabilities.

The arithmetic is fixed to the bit by `SamplingRow` in `runtime/bundle/src/step.rs`: weights are 41-bit
integers, so sums have no order, every device draws the same id from equal logits, and the kept ids are
always a prefix of the order (falling logit, rising id), described by its total weight alone.

Several blocks scan a row for its maximum, each a part of it, and the last to arrive finishes the row.
A greedy row without log-probabilities ends there. Otherwise the finishing block counts ids and weights
in bins of 1/64 octave below the maximum; an id of a given rank or cumulative weight is then found in
its bin: the few ids of the bin (or of all bins up to it) are gathered and ranked against each other.
A bin of many ids is first refined, by finer digits of the distance and finally by logit and id.

The logits are overwritten with bias and penalties. Parameters are read before the wait on the producer
kernel, logits after it; blocks without a row leave without waiting. The log-probability of an id with penalties is computed from its penalised
logit by undoing them, which costs a few units in the last place of the logit.
"""

from artifact import READ_WRITE, ROWS, WRITE, Artifact, Operand, Scratch
from contracts import X, contract, counters, domain, input_slot, output_slot, span, sym, workspace
from primitives import F32, I32, THREADED, U32, U64, WARP, T
from shapes import MODELS, SEQS_MAX

THREADS, GRID, PARTS_MAX = 512, 264, 64
"""Threads of a block, blocks, and parts of a row at most."""
SHARED_AMONG = 132
"""Blocks that scan together: one an SM, all at once; the others leave. More than so many rows take two turns."""
PEAK_VECTORS, VECTORS = 8, 4
"""16-byte loads in flight in a thread while it looks for the maximum, and in the other passes."""
WARPS = THREADS // WARP
BINS, PER_THREAD = 2560, 5
"""Bins of 2⁻⁶ octave; bins scanned by a thread."""
BIN_SHIFT, FINE_SHIFT, DIGITS = 14, 5, 512
"""Bits of the distance below a bin, below a fine digit; digits of a refinement."""
LISTED = 256
"""Ids that are ranked against each other."""
TOP = 20
"""Alternatives of a row: `TOP_LOGPROBS_MAX`."""
OCTAVE = float(1 << 20)
LIMIT = 40 * OCTAVE
"""Distances from which on the weight is 0."""
LOG2E_OCTAVE = 1512775.375
"""log2(e) · 2²⁰ as binary32."""
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
NEG = -3.0e38
POLYNOMIAL = (-0.000944902712944895, 0.00920579582452774, -0.055297356098890305, 0.2401801347732544, -0.6931437253952026, 1.0)
"""2⁻ᶠ by falling powers; binary32 values."""
KEY_BITS, DIGIT_BITS = 50, 9
"""Bits of a rank key and of a digit of it."""

# Words of a SamplingRow.
TEMPERATURE, TOP_P, MIN_P, TOP_K, REPETITION, PRESENCE, FREQUENCY, LOGPROBS, SEED, COUNTER, TARGET, FLAGS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13
ROW_WORDS = 16
HAS_MASK, HAS_BIAS, HAS_HISTORY = 1, 2, 4
OCCURRENCES = 0x7FFFFFFF
"""Bits of a history count beside the mark of the prompt."""
NONE = 0xFFFFFFFF


# ---- exact arithmetic ----------------------------------------------------------------------------


def horner(f):
    """2⁻ᶠ for 0 ≤ f < 1, each step one fused multiply-add."""
    value = T.float32(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        value = T.ieee_fmaf(value, f, T.float32(coefficient))
    return value


def wide(value):
    """An unsigned 64-bit value."""
    return T.cast(value, U64)


def joined(high, low):
    """The 64-bit value of two words."""
    return T.shift_left(wide(high), T.uint64(32)) | wide(low)


def low_word(value):
    """The low 32 bits of a 64-bit value."""
    return T.cast(value & T.uint64(0xFFFFFFFF), U32)


def high_word(value):
    """The high 32 bits of a 64-bit value."""
    return T.cast(T.shift_right(value, T.uint64(32)), U32)


@T.macro
def weigh(value, top, scale, distance, weight):
    """Distance of a logit above −∞ below the maximum, in 2⁻²⁰ octaves, and its weight."""
    real = T.alloc_local((2,), F32)
    real[0] = 0.0
    if value != top:
        real[0] = T.ieee_mul(T.ieee_sub(top, value), scale)
    distance[0] = T.cast(T.min(real[0], LIMIT - 1.0), I32)
    real[1] = horner(T.ieee_mul(T.cast(distance[0] & 0xFFFFF, F32), T.float32(2.0**-20)))
    weight[0] = T.shift_right(T.shift_left(wide(T.cast(T.ieee_mul(real[1], T.float32(2.0**24)), U32)), T.uint64(16)), wide(distance[0] >> 20))
    if real[0] >= LIMIT:
        weight[0] = T.uint64(0)


@T.macro
def rank_key(value, id, key):
    """A 50-bit key that rises along the order: falling logit, −0 equal to 0, then rising id."""
    bits = T.alloc_local((1,), U32)
    bits[0] = T.reinterpret(value, U32)
    if value == 0.0:
        bits[0] = T.uint32(0)
    if (bits[0] & T.uint32(0x80000000)) == T.uint32(0):
        bits[0] = bits[0] ^ T.uint32(0x7FFFFFFF)
    key[0] = T.shift_left(wide(bits[0]), T.uint64(18)) | wide(id)


@T.macro
def philox(words, random):
    """First word of Philox4x32-10 with key `words[0:2]` and counter `(words[2], words[3], 0, 0)`."""
    c = T.alloc_local((4,), U32)
    product = T.alloc_local((2,), U64)
    key = T.alloc_local((2,), U32)
    for i in T.unroll(2):
        key[i] = words[i]
        c[i] = words[2 + i]
        c[2 + i] = T.uint32(0)
    for _ in T.unroll(10):
        product[0] = wide(c[0]) * T.uint64(0xD2511F53)
        product[1] = wide(c[2]) * T.uint64(0xCD9E8D57)
        c[0] = high_word(product[1]) ^ c[1] ^ key[0]
        c[1] = low_word(product[1])
        c[2] = high_word(product[0]) ^ c[3] ^ key[1]
        c[3] = low_word(product[0])
        key[0] = key[0] + T.uint32(0x9E3779B9)
        key[1] = key[1] + T.uint32(0xBB67AE85)
    random[0] = c[0]


@T.macro
def scaled(total, factor, product):
    """`⌊total · factor / 2³²⌋` for `total < 2⁵⁸` and `factor ≤ 2³²`."""
    product[0] = T.shift_right(total, T.uint64(32)) * factor + T.shift_right((total & T.uint64(0xFFFFFFFF)) * factor, T.uint64(32))


@T.macro
def drawn(total, random, target):
    """`⌊total · (2 random + 1) / 2³³⌋` for `total < 2⁵⁸`."""
    part = T.alloc_local((2,), U64)
    part[0] = (total & T.uint64(0xFFFFFFFF)) * wide(random)
    part[1] = T.shift_right(total, T.uint64(1))
    target[0] = T.shift_right(total, T.uint64(32)) * wide(random)
    target[0] += T.shift_right(part[0], T.uint64(32)) + T.shift_right(part[1], T.uint64(32))
    target[0] += T.shift_right((part[0] & T.uint64(0xFFFFFFFF)) + (part[1] & T.uint64(0xFFFFFFFF)), T.uint64(32))


@T.macro
def penalise(value, count, words, result):
    """The penalised logit of an id seen; `count` as in the history slot."""
    result[0] = value
    if value > 0.0:
        result[0] = T.ieee_fdiv(value, T.reinterpret(words[REPETITION], F32))
    else:
        result[0] = T.ieee_mul(value, T.reinterpret(words[REPETITION], F32))
    if (count & OCCURRENCES) > 0:
        result[0] = T.ieee_sub(result[0], T.reinterpret(words[PRESENCE], F32))
        result[0] = T.ieee_sub(result[0], T.ieee_mul(T.reinterpret(words[FREQUENCY], F32), T.cast(count & OCCURRENCES, F32)))


@T.macro
def forgive(value, count, words, result):
    """The logit that `penalise` was given, to within rounding."""
    result[0] = value
    if (count & OCCURRENCES) > 0:
        result[0] += T.reinterpret(words[FREQUENCY], F32) * T.cast(count & OCCURRENCES, F32) + T.reinterpret(words[PRESENCE], F32)
    if result[0] > 0.0:
        result[0] = result[0] * T.reinterpret(words[REPETITION], F32)
    else:
        result[0] = result[0] / T.reinterpret(words[REPETITION], F32)


@T.macro
def log_probability(logit, peak, result):
    """`ln(exp(logit) / Σ exp)`; a maximum of +∞ takes all, shared by nobody."""
    result[0] = logit - peak[0] - T.log2(peak[2]) * LN2
    if peak[0] == T.infinity(F32):
        result[0] = T.if_then_else(logit == peak[0], 0.0, -T.infinity(F32))


# ---- maximum of a row ----------------------------------------------------------------------------

# A peak: 0 largest logit, 1 its id (as bits), 2 Σ exp(logit − largest), 3 whether there is a NaN.


@T.macro
def merge(a, b):
    """Peak `a` becomes that of both; equal logits go to the lower id."""
    ref = T.alloc_local((1,), F32)
    ref[0] = T.max(T.max(a[0], b[0]), NEG)
    a[2] = a[2] * T.exp2((T.max(a[0], NEG) - ref[0]) * LOG2E) + b[2] * T.exp2((T.max(b[0], NEG) - ref[0]) * LOG2E)
    if b[0] > a[0] or (b[0] == a[0] and T.reinterpret(b[1], U32) < T.reinterpret(a[1], U32)):
        a[0] = b[0]
        a[1] = b[1]
    a[3] = T.max(a[3], b[3])


@T.macro
def merge_lanes(peak, other):
    """The peak of all lanes of a warp, in every lane."""
    for s in T.unroll(5):
        for i in T.unroll(4):
            other[i] = T.shfl_xor(peak[i], 16 >> s)
        merge(peak, other)


@T.macro
def clear_peak(peak):
    """The peak of nothing."""
    peak[0] = -T.infinity(F32)
    peak[1] = T.reinterpret(T.uint32(NONE), F32)
    peak[2] = 0.0
    peak[3] = 0.0


@T.macro
def merge_block(peak, other, shared, thread):
    """The peak of all threads, in every thread. Ends with every thread having read `shared`."""
    merge_lanes(peak, other)
    if thread % WARP == 0:
        for i in T.unroll(4):
            shared[thread // WARP, i] = peak[i]
    T.sync_threads()
    clear_peak(peak)
    if thread % WARP < WARPS:
        for i in T.unroll(4):
            peak[i] = shared[thread % WARP, i]
    merge_lanes(peak, other)
    T.sync_threads()


def row_scan(vocab, known):
    """Macros that read a row: `load` of one round of vectors, and the peak of a range of vectors."""

    @T.macro
    def load(logits, mask, row, masked, first, end, thread, many, data):
        for u in T.unroll(many):
            if first + u * THREADS + thread < end:
                for k in T.vectorized(4):
                    data[u * 4 + k] = logits[row, (first + u * THREADS + thread) * 4 + k]
                if known % 4:
                    for k in T.unroll(4):
                        if (first + u * THREADS + thread) * 4 + k >= known:
                            data[u * 4 + k] = -T.infinity(F32)
                if masked != 0:
                    for k in T.unroll(4):
                        if ((mask[row, (first + u * THREADS + thread) // 8] >> ((first + u * THREADS + thread) % 8 * 4 + k)) & 1) == 0:
                            data[u * 4 + k] = -T.infinity(F32)
            else:
                for k in T.unroll(4):
                    data[u * 4 + k] = -T.infinity(F32)

    @T.macro
    def find_peak(logits, mask, row, masked, summed, begin, end, thread, data, peak):
        """The peak of a thread's share of vectors `begin..end`; the sum only if `summed`."""
        ref = T.alloc_local((2,), F32)
        best = T.alloc_local((1,), I32)
        clear_peak(peak)
        best[0] = -1
        for step in T.serial((T.max(end - begin, 0) + THREADS * PEAK_VECTORS - 1) // (THREADS * PEAK_VECTORS)):
            load(logits, mask, row, masked, begin + step * THREADS * PEAK_VECTORS, end, thread, PEAK_VECTORS, data)
            ref[0] = T.max(peak[0], NEG)
            for u in T.unroll(PEAK_VECTORS):
                for k in T.unroll(4):
                    if data[u * 4 + k] > peak[0]:
                        peak[0] = data[u * 4 + k]
                        best[0] = (begin + (step * PEAK_VECTORS + u) * THREADS + thread) * 4 + k
                    if (T.reinterpret(data[u * 4 + k], U32) & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000):
                        peak[3] = 1.0
            if summed != 0:
                ref[1] = T.max(peak[0], NEG)
                peak[2] = peak[2] * T.exp2((ref[0] - ref[1]) * LOG2E)
                for u in T.unroll(PEAK_VECTORS):
                    for k in T.unroll(4):
                        peak[2] += T.exp2((data[u * 4 + k] - ref[1]) * LOG2E)
        peak[1] = T.reinterpret(best[0], F32)

    return load, find_peak


# ---- bins ----------------------------------------------------------------------------------------


@T.macro
def deposit(count, low, high, bin, weight):
    """Adds an id to a bin: exact 64-bit sums out of 32-bit atomics, the carry seen by the addition that wraps."""
    before = T.alloc_local((1,), U32)
    carry = T.alloc_local((1,), U32)
    T.atomic_add(count[bin], T.uint32(1))
    before[0] = T.atomic_add(low[bin], low_word(weight), return_prev=True)
    carry[0] = high_word(weight)
    if before[0] + low_word(weight) < before[0]:
        carry[0] += T.uint32(1)
    if carry[0] != T.uint32(0):
        T.atomic_add(high[bin], carry[0])


@T.macro
def accumulate(count, low, high, per_thread, warp_count, warp_weight, thread):
    """Turns bins into what lies before each; entry `per_thread · THREADS` gets the total."""
    counts = T.alloc_local((2,), U32)
    weights = T.alloc_local((2,), U64)
    item = T.alloc_local((1,), U64)
    counts[0] = T.uint32(0)
    weights[0] = T.uint64(0)
    for k in T.unroll(per_thread):
        counts[0] += count[thread * per_thread + k]
        weights[0] += joined(high[thread * per_thread + k], low[thread * per_thread + k])
    counts[1] = counts[0]
    weights[1] = weights[0]
    for s in T.unroll(5):
        lane_count, lane_weight = T.alloc_local((1,), U32), T.alloc_local((2,), U32)
        lane_count[0] = T.shfl_up(counts[1], 1 << s)
        lane_weight[0] = T.shfl_up(low_word(weights[1]), 1 << s)
        lane_weight[1] = T.shfl_up(high_word(weights[1]), 1 << s)
        if thread % WARP >= (1 << s):
            counts[1] += lane_count[0]
            weights[1] += joined(lane_weight[1], lane_weight[0])
    if thread % WARP == WARP - 1:
        warp_count[thread // WARP] = counts[1]
        warp_weight[thread // WARP] = weights[1]
    T.sync_threads()
    counts[0] = counts[1] - counts[0]
    weights[0] = weights[1] - weights[0]
    for w in T.serial(thread // WARP):
        counts[0] += warp_count[w]
        weights[0] += warp_weight[w]
    for k in T.unroll(per_thread):
        counts[1] = count[thread * per_thread + k]
        item[0] = joined(high[thread * per_thread + k], low[thread * per_thread + k])
        count[thread * per_thread + k] = counts[0]
        low[thread * per_thread + k] = low_word(weights[0])
        high[thread * per_thread + k] = high_word(weights[0])
        counts[0] += counts[1]
        weights[0] += item[0]
    if thread == THREADS - 1:
        count[per_thread * THREADS] = counts[0]
        low[per_thread * THREADS] = low_word(weights[0])
        high[per_thread * THREADS] = high_word(weights[0])
    T.sync_threads()


@T.macro
def block_total(value, warp_weight, thread):
    """The sum of `value[0]` over all threads, in every thread."""
    word = T.alloc_local((2,), U32)
    for s in T.unroll(5):
        word[0] = T.shfl_xor(low_word(value[0]), 16 >> s)
        word[1] = T.shfl_xor(high_word(value[0]), 16 >> s)
        value[0] += joined(word[1], word[0])
    if thread % WARP == 0:
        warp_weight[thread // WARP] = value[0]
    T.sync_threads()
    value[0] = T.uint64(0)
    for w in T.unroll(WARPS):
        value[0] += warp_weight[w]
    T.sync_threads()


@T.macro
def before_bin(count, low, high, by_count, bin, result):
    """Ids, or their weight, before a bin."""
    result[0] = wide(count[bin])
    if by_count == 0:
        result[0] = joined(high[bin], low[bin])


@T.macro
def find_bin(count, low, high, per_thread, by_count, target, base, thread, found):
    """Leaves in `found[0]` the bin that holds the id with `target` ids, or weight, before it. Not before all threads have read it."""
    edge = T.alloc_local((2,), U64)
    for k in T.unroll(per_thread):
        before_bin(count, low, high, by_count, thread * per_thread + k, edge)
        edge[1] = edge[0]
        before_bin(count, low, high, by_count, thread * per_thread + k + 1, edge)
        if base + edge[1] <= target and target < base + edge[0]:
            found[0] = thread * per_thread + k
    T.sync_threads()


# ---- the kernel ----------------------------------------------------------------------------------


def sample(vocab, known):
    """One id a row."""
    load, find_peak = row_scan(vocab, known)
    vectors = -(-known // 4)
    rounds = -(-vectors // (THREADS * VECTORS))
    rows, entries, history, starts = T.dynamic("rows"), T.dynamic("entries"), T.dynamic("history"), T.dynamic("starts")
    assert vocab % 4 == 0 and known <= vocab <= 1 << 18

    @T.macro
    def add_bias(logits, ids, values, first, last, begin, end, row, thread):
        """Adds the bias of the ids in vectors `begin..end`, in place."""
        for step in T.serial((last - first + THREADS - 1) // THREADS):
            if first + step * THREADS + thread < last:
                id = ids[first + step * THREADS + thread]
                if id >= begin * 4 and id < T.min(end * 4, known):
                    logits[row, id] = T.ieee_add(logits[row, id], values[first + step * THREADS + thread])
        T.sync_threads()

    @T.macro
    def add_penalties(logits, ids, counts, first, last, words, row, thread):
        """Penalises the ids seen, in place."""
        result = T.alloc_local((1,), F32)
        for step in T.serial((last - first + THREADS - 1) // THREADS):
            if first + step * THREADS + thread < last:
                id = ids[first + step * THREADS + thread]
                if id >= 0 and id < known:
                    penalise(logits[row, id], counts[first + step * THREADS + thread], words, result)
                    logits[row, id] = result[0]
        T.sync_threads()

    @T.macro
    def fill_bins(logits, mask, row, masked, top, scale, least, thread, data, count, low, high, kept):
        """Every id above −∞ into its bin; `kept` is the weight of the thread's ids that weigh at least `least`."""
        distance, weight = T.alloc_local((1,), I32), T.alloc_local((1,), U64)
        for k in T.serial((BINS + 1 + THREADS - 1) // THREADS):
            if k * THREADS + thread <= BINS:
                count[k * THREADS + thread] = T.uint32(0)
                low[k * THREADS + thread] = T.uint32(0)
                high[k * THREADS + thread] = T.uint32(0)
        T.sync_threads()
        kept[0] = T.uint64(0)
        for step in T.serial(rounds):
            load(logits, mask, row, masked, step * THREADS * VECTORS, vectors, thread, VECTORS, data)
            for i in T.unroll(VECTORS * 4):
                if data[i] > -T.infinity(F32):
                    weigh(data[i], top, scale, distance, weight)
                    deposit(count, low, high, distance[0] >> BIN_SHIFT, weight[0])
                    if weight[0] >= least:
                        kept[0] += weight[0]
        T.sync_threads()

    @T.macro
    def refine(logits, mask, row, masked, top, scale, level, prefix, thread, data, count, low, high):
        """The ids of `prefix` into bins by the next digit."""
        distance, weight, key = T.alloc_local((1,), I32), T.alloc_local((1,), U64), T.alloc_local((1,), U64)
        digit = T.alloc_local((1,), I32)
        if thread <= DIGITS:
            count[thread] = T.uint32(0)
            low[thread] = T.uint32(0)
            high[thread] = T.uint32(0)
        if thread == 0:
            count[DIGITS] = T.uint32(0)
            low[DIGITS] = T.uint32(0)
            high[DIGITS] = T.uint32(0)
        T.sync_threads()
        for step in T.serial(rounds):
            load(logits, mask, row, masked, step * THREADS * VECTORS, vectors, thread, VECTORS, data)
            for i in T.unroll(VECTORS * 4):
                if data[i] > -T.infinity(F32):
                    weigh(data[i], top, scale, distance, weight)
                    rank_key(data[i], ((step * VECTORS + i // 4) * THREADS + thread) * 4 + i % 4, key)
                    if (distance[0] >> prefix[0]) == prefix[1] and T.shift_right(key[0], wide(prefix[3])) == level[1]:
                        digit[0] = (distance[0] >> FINE_SHIFT) & (DIGITS - 1)
                        if level[0] > T.uint64(1):
                            digit[0] = T.cast(T.shift_right(key[0], wide(prefix[4])) & T.uint64(DIGITS - 1), I32)
                        deposit(count, low, high, digit[0], weight[0])
        T.sync_threads()

    @T.macro
    def gather(logits, mask, row, masked, top, scale, key_prefix, prefix, thread, data, box, list_key, list_weight):
        """The ids of `prefix` into the list, in any order."""
        distance, weight, key = T.alloc_local((1,), I32), T.alloc_local((1,), U64), T.alloc_local((1,), U64)
        at = T.alloc_local((1,), I32)
        if thread == 0:
            box[1] = 0
        T.sync_threads()
        for step in T.serial(rounds):
            load(logits, mask, row, masked, step * THREADS * VECTORS, vectors, thread, VECTORS, data)
            for i in T.unroll(VECTORS * 4):
                if data[i] > -T.infinity(F32):
                    weigh(data[i], top, scale, distance, weight)
                    if (distance[0] >> prefix[0]) >= prefix[1] and (distance[0] >> prefix[0]) <= prefix[2]:
                        rank_key(data[i], ((step * VECTORS + i // 4) * THREADS + thread) * 4 + i % 4, key)
                        if T.shift_right(key[0], wide(prefix[3])) == key_prefix:
                            at[0] = T.atomic_add(box[1], 1, return_prev=True)
                            if at[0] < LISTED:
                                list_key[at[0]] = key[0]
                                list_weight[at[0]] = weight[0]
        T.sync_threads()

    @T.prim_func
    def main(
        logits: T.Tensor((rows, vocab), F32),
        sampling: T.Tensor((rows, ROW_WORDS), I32),
        bias_starts: T.Tensor((starts,), I32),
        bias_ids: T.Tensor((entries,), I32),
        bias_values: T.Tensor((entries,), F32),
        history_starts: T.Tensor((starts,), I32),
        history_ids: T.Tensor((history,), I32),
        history_counts: T.Tensor((history,), I32),
        mask: T.Tensor((rows, -(-vocab // 32)), I32),
        peaks: T.Tensor((rows * PARTS_MAX, 4), F32),
        tickets: T.Tensor((rows,), I32),
        sampled_ids: T.Tensor((rows,), I32),
        sampled_logprobs: T.Tensor((rows,), F32),
        top_ids: T.Tensor((rows, TOP), I32),
        top_logprobs: T.Tensor((rows, TOP), F32),
    ):
        with T.Kernel(GRID, threads=THREADS) as block:
            thread = T.get_thread_binding()
            count, low, high = T.alloc_shared((BINS + 1,), U32), T.alloc_shared((BINS + 1,), U32), T.alloc_shared((BINS + 1,), U32)
            fine_count, fine_low, fine_high = T.alloc_shared((DIGITS + 1,), U32), T.alloc_shared((DIGITS + 1,), U32), T.alloc_shared((DIGITS + 1,), U32)
            list_key, list_weight = T.alloc_shared((LISTED,), U64), T.alloc_shared((LISTED,), U64)
            warp_count, warp_weight = T.alloc_shared((WARPS,), U32), T.alloc_shared((WARPS,), U64)
            warp_peak = T.alloc_shared((WARPS, 4), F32)
            box, found = T.alloc_shared((4,), I32), T.alloc_shared((2,), U64)
            real = T.alloc_shared((2,), F32)

            data, peak, other = T.alloc_local((PEAK_VECTORS * 4,), F32), T.alloc_local((4,), F32), T.alloc_local((4,), F32)
            raw, words = T.alloc_local((4,), F32), T.alloc_local((ROW_WORDS,), I32)
            seed = T.alloc_local((4,), U32)
            share = T.alloc_local((4,), I32)
            state = T.alloc_local((8,), I32)
            covered, pick = T.alloc_local((2,), I32), T.alloc_local((4,), I32)
            prefix = T.alloc_local((5,), I32)
            level = T.alloc_local((2,), U64)
            base = T.alloc_local((2,), U64)
            total, kept, target, edge = T.alloc_local((1,), U64), T.alloc_local((1,), U64), T.alloc_local((1,), U64), T.alloc_local((2,), U64)
            rank, ahead = T.alloc_local((1,), U64), T.alloc_local((1,), U64)
            scale, value = T.alloc_local((1,), F32), T.alloc_local((1,), F32)
            random = T.alloc_local((1,), U32)

            # share: 0 blocks a row, 1 row, 2 and 3 the block's vectors of it
            share[0] = T.max(T.min(SHARED_AMONG // rows, PARTS_MAX), 1)
            share[1] = block // share[0]
            share[2] = (block % share[0]) * ((vectors + share[0] - 1) // share[0])
            share[3] = T.min(share[2] + (vectors + share[0] - 1) // share[0], vectors)
            row = share[1]
            T.pdl_trigger()
            if row < rows:
                for i in T.unroll(ROW_WORDS):
                    words[i] = sampling[row, i]
                T.pdl_sync()
                # ---- every block: the peak of its part
                # state: 0 masked, 1 log-probabilities wanted, 2 alternatives, 3 greedy, 4 penalties, 5 id, 6 whether the block finishes the row
                state[0] = words[FLAGS] & HAS_MASK
                state[1] = T.if_then_else(words[LOGPROBS] != -1, 1, 0)
                state[2] = T.if_then_else(words[LOGPROBS] != -1, T.min(words[LOGPROBS], TOP), 0)
                state[3] = 0
                if T.reinterpret(words[TEMPERATURE], F32) == 0.0 or words[TOP_K] == 1 or T.reinterpret(words[TOP_P], F32) <= 0.0:
                    state[3] = 1
                state[4] = words[FLAGS] & HAS_HISTORY
                if (words[FLAGS] & HAS_BIAS) != 0:
                    add_bias(logits, bias_ids, bias_values, bias_starts[row], bias_starts[row + 1], share[2], share[3], row, thread)
                find_peak(logits, mask, row, state[0], state[1], share[2], share[3], thread, data, peak)
                merge_block(peak, other, warp_peak, thread)
                state[6] = 1
                if share[0] > 1:
                    if thread == 0:
                        for i in T.unroll(4):
                            peaks[row * PARTS_MAX + block % share[0], i] = peak[i]
                        box[0] = T.atomic_add(tickets[row], 1, memory_order="acq_rel", return_prev=True)
                    T.sync_threads()
                    state[6] = T.if_then_else(box[0] == share[0] - 1, 1, 0)
                    T.sync_threads()
                    if state[6] != 0:
                        if thread == 0:
                            tickets[row] = 0
                        clear_peak(peak)
                        for k in T.unroll(PARTS_MAX // WARP):
                            if k * WARP + thread % WARP < share[0]:
                                for i in T.unroll(4):
                                    other[i] = peaks[row * PARTS_MAX + k * WARP + thread % WARP, i]
                                merge(peak, other)
                        merge_lanes(peak, other)
                if state[6] != 0:
                    # ---- the finishing block: all that is left
                    for i in T.unroll(4):
                        raw[i] = peak[i]
                    state[5] = T.reinterpret(peak[1], I32)
                    if peak[3] != 0.0:
                        state[5] = -1
                    if state[5] != -1 and words[TARGET] != -1:
                        state[5] = words[TARGET]
                    if thread < state[2]:
                        top_ids[row, thread] = -1
                        top_logprobs[row, thread] = -T.infinity(F32)
                    T.sync_threads()
                    for turn in T.serial(2):
                        # turn 0: alternatives by raw logit; turn 1: penalties, then the draw
                        if turn == 1 and state[5] != -1 and words[TARGET] == -1 and state[4] != 0:
                            T.sync_threads()
                            add_penalties(logits, history_ids, history_counts, history_starts[row], history_starts[row + 1], words, row, thread)
                            find_peak(logits, mask, row, state[0], 0, 0, vectors, thread, data, peak)
                            merge_block(peak, other, warp_peak, thread)
                            state[5] = T.reinterpret(peak[1], I32)
                        state[7] = 0
                        if state[5] != -1:
                            if turn == 0:
                                state[7] = state[2]
                            elif words[TARGET] == -1 and state[3] == 0:
                                state[7] = 3
                        if state[7] > 0:
                            scale[0] = LOG2E_OCTAVE
                            edge[0] = T.uint64(0)
                            if turn == 1:
                                scale[0] = T.ieee_fdiv(T.float32(LOG2E_OCTAVE), T.reinterpret(words[TEMPERATURE], F32))
                                edge[0] = T.cast(T.max(T.reinterpret(words[MIN_P], F32), 0.0) * T.float32(2.0**40), U64)
                            fill_bins(logits, mask, row, state[0], peak[0], scale[0], edge[0], thread, data, count, low, high, kept)
                            accumulate(count, low, high, PER_THREAD, warp_count, warp_weight, thread)
                            if turn == 0:
                                state[7] = T.min(state[7], T.cast(count[BINS], I32))
                            total[0] = joined(high[BINS], low[BINS])
                            covered[0] = 1
                            covered[1] = 0
                            if turn == 1:
                                if edge[0] > T.uint64(0):
                                    block_total(kept, warp_weight, thread)
                                    kept[0] = T.max(kept[0], T.uint64(1 << 40))
                                else:
                                    kept[0] = total[0]
                            for stage in T.serial(state[7]):
                                # pick: 0 whether to look for something, 1 by rank, 2 bin, digit or id, 3 ids in it
                                pick[0] = 1
                                pick[1] = 1
                                target[0] = wide(stage)
                                if turn == 1:
                                    if stage == 0:
                                        pick[0] = T.if_then_else(words[TOP_K] != 0 and T.cast(words[TOP_K], U32) < count[BINS], 1, 0)
                                        target[0] = wide(words[TOP_K] - 1)
                                    else:
                                        pick[1] = 0
                                        if stage == 1:
                                            pick[0] = T.if_then_else(T.reinterpret(words[TOP_P], F32) < 1.0, 1, 0)
                                            if pick[0] != 0:
                                                scaled(total[0], T.cast(T.reinterpret(words[TOP_P], F32) * T.float32(2.0**32), U64), target)
                                                target[0] = T.max(target[0], T.uint64(1)) - T.uint64(1)
                                        else:
                                            total[0] = T.min(total[0], kept[0])
                                            for i in T.unroll(2):
                                                seed[i] = T.cast(words[SEED + i], U32)
                                                seed[2 + i] = T.cast(words[COUNTER + i], U32)
                                            philox(seed, random)
                                            drawn(total[0], random[0], target)
                                if pick[0] != 0:
                                    base[0] = T.uint64(0)
                                    base[1] = T.uint64(0)
                                    find_bin(count, low, high, PER_THREAD, pick[1], target[0], T.uint64(0), thread, box)
                                    pick[2] = box[0]
                                    T.sync_threads()
                                    if pick[2] < covered[0] or pick[2] > covered[1]:
                                        prefix[0] = BIN_SHIFT
                                        prefix[1] = pick[2]
                                        prefix[2] = pick[2]
                                        prefix[3] = KEY_BITS
                                        prefix[4] = KEY_BITS
                                        level[0] = T.uint64(0)
                                        level[1] = T.uint64(0)
                                        covered[0] = pick[2]
                                        covered[1] = pick[2]
                                        pick[3] = T.cast(count[pick[2] + 1] - count[pick[2]], I32)
                                        if count[pick[2] + 1] <= T.uint32(LISTED):
                                            prefix[1] = 0
                                            covered[0] = 0
                                        if pick[3] > LISTED:
                                            covered[0] = 1
                                            covered[1] = 0
                                            base[0] = wide(count[pick[2]])
                                            base[1] = joined(high[pick[2]], low[pick[2]])
                                            while pick[3] > LISTED:
                                                level[0] += T.uint64(1)
                                                if level[0] > T.uint64(1):
                                                    prefix[4] = T.max(prefix[3] - DIGIT_BITS, 0)
                                                refine(logits, mask, row, state[0], peak[0], scale[0], level, prefix, thread, data, fine_count, fine_low, fine_high)
                                                accumulate(fine_count, fine_low, fine_high, 1, warp_count, warp_weight, thread)
                                                find_bin(fine_count, fine_low, fine_high, 1, pick[1], target[0], T.if_then_else(pick[1] != 0, base[0], base[1]), thread, box)
                                                pick[2] = box[0]
                                                T.sync_threads()
                                                pick[3] = T.cast(fine_count[pick[2] + 1] - fine_count[pick[2]], I32)
                                                base[0] += wide(fine_count[pick[2]])
                                                base[1] += joined(fine_high[pick[2]], fine_low[pick[2]])
                                                if level[0] == T.uint64(1):
                                                    prefix[0] = FINE_SHIFT
                                                    prefix[1] = prefix[1] * DIGITS + pick[2]
                                                    prefix[2] = prefix[1]
                                                else:
                                                    level[1] = T.shift_left(level[1], wide(prefix[3] - prefix[4])) | wide(pick[2] & ((1 << (prefix[3] - prefix[4])) - 1))
                                                    prefix[3] = prefix[4]
                                                T.sync_threads()
                                        gather(logits, mask, row, state[0], peak[0], scale[0], level[1], prefix, thread, data, box, list_key, list_weight)
                                    if covered[1] >= covered[0]:
                                        base[0] = wide(count[covered[0]])
                                        base[1] = joined(high[covered[0]], low[covered[0]])
                                    if thread < box[1]:
                                        rank[0] = base[0]
                                        ahead[0] = base[1]
                                        for j in T.serial(box[1]):
                                            if list_key[j] < list_key[thread]:
                                                rank[0] += T.uint64(1)
                                                ahead[0] += list_weight[j]
                                        if pick[1] != 0:
                                            if rank[0] == target[0]:
                                                found[0] = list_key[thread]
                                                found[1] = ahead[0] + list_weight[thread]
                                        elif ahead[0] <= target[0] and target[0] < ahead[0] + list_weight[thread]:
                                            found[0] = list_key[thread]
                                            found[1] = ahead[0] + list_weight[thread]
                                    T.sync_threads()
                                    total[0] = found[1]
                                    pick[2] = T.cast(found[0] & T.uint64((1 << 18) - 1), I32)
                                    T.sync_threads()
                                    if turn == 0:
                                        if thread == 0:
                                            top_ids[row, stage] = pick[2]
                                            log_probability(logits[row, pick[2]], raw, value)
                                            top_logprobs[row, stage] = value[0]
                                    elif stage == 2:
                                        state[5] = pick[2]
                    # ---- the id and its log-probability
                    if thread == 0:
                        sampled_ids[row] = state[5]
                    if state[1] != 0:
                        if thread == 0:
                            value[0] = -T.infinity(F32)
                            if state[5] >= 0 and state[5] < known:
                                value[0] = logits[row, state[5]]
                                if state[0] != 0:
                                    if ((mask[row, state[5] // 32] >> (state[5] % 32)) & 1) == 0:
                                        value[0] = -T.infinity(F32)
                            real[0] = value[0]
                        T.sync_threads()
                        if state[4] != 0 and state[5] != -1 and words[TARGET] == -1:
                            for step in T.serial((history_starts[row + 1] - history_starts[row] + THREADS - 1) // THREADS):
                                if history_starts[row] + step * THREADS + thread < history_starts[row + 1]:
                                    if history_ids[history_starts[row] + step * THREADS + thread] == state[5]:
                                        forgive(real[0], history_counts[history_starts[row] + step * THREADS + thread], words, value)
                                        real[0] = value[0]
                        T.sync_threads()
                        if thread == 0:
                            value[0] = -T.infinity(F32)
                            if state[5] != -1:
                                log_probability(real[0], raw, value)
                            sampled_logprobs[row] = value[0]

    return main


# ---- artifacts -----------------------------------------------------------------------------------

OPERANDS = {
    "logits": Operand(X, READ_WRITE),
    "sampling": Operand(input_slot("sampling")),
    "bias_starts": Operand(input_slot("bias_starts")),
    "bias_ids": Operand(input_slot("bias_ids")),
    "bias_values": Operand(input_slot("bias_values")),
    "history_starts": Operand(input_slot("history_starts")),
    "history_ids": Operand(input_slot("history_ids")),
    "history_counts": Operand(input_slot("history_counts")),
    "mask": Operand(input_slot("mask")),
    "peaks": Operand(workspace(0), READ_WRITE),
    "tickets": Operand(counters(0), READ_WRITE),
    "sampled_ids": Operand(output_slot("sampled_ids"), WRITE),
    "sampled_logprobs": Operand(output_slot("sampled_logprobs"), WRITE),
    "top_ids": Operand(output_slot("top_ids"), WRITE),
    "top_logprobs": Operand(output_slot("top_logprobs"), WRITE),
}
SCRATCH = (Scratch(workspace(0), "float32", sym("rows", PARTS_MAX * 4)), Scratch(counters(0), "int32", sym("rows"), zeroed=True))


def artifacts():
    """One kernel a vocabulary."""
    found = []
    for vocab, known in sorted({(m.vocab, m.vocab_known) for m in MODELS}):
        op = {"sample": {"vocab": vocab, "vocab_known": known}}
        found.append(Artifact(f"sample_{vocab}_{known}", contract(op), lambda vocab=vocab, known=known: sample(vocab, known), OPERANDS,
                              domain(rows=span(1, SEQS_MAX)), {"rows": ROWS}, workspace=SCRATCH, rounding=(), pass_configs=THREADED))
    return found
