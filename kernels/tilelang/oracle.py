"""What every contract computes, in numpy and float64, and random problems to check kernels on.

`problem(manifest, sizes, bound, rng)` fills every operand of a kernel and says what it must leave.
Needs numpy only. BF16 values are held as their bits in `uint16`. Rows of activations between the
step's size and the class bound are NaN: a kernel may compute them, nothing else may depend on them.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Callable

import numpy as np

NONE = 0xFFFFFFFF
NAN_BF16 = 0x7FC0
COLUMNS_MAX = 32768
"""Wider projections are compared on a sample of columns."""


@dataclass(frozen=True)
class Tolerance:
    """`|got − want| ≤ relative·|want| + of_rms·rms(want)`."""

    relative: float
    of_rms: float


EXACT = Tolerance(0.0, 0.0)
BF16_OUT = Tolerance(2.0**-8, 2.0**-9)
"""One rounding to BF16 is 2⁻⁹ relative; the rest covers float32 accumulation in another order."""
BF16_TWICE = Tolerance(2.0**-7, 2.0**-7)
"""A value rounded to BF16, used, and rounded again."""
F32_OUT = Tolerance(2e-5, 2e-4)
"""Tensor cores align the addends of a group before adding them in float32."""


@dataclass(frozen=True)
class Sizes:
    """Values of the symbols for one step."""

    tokens: int
    seqs: int
    rows: int
    kv_pages: int


@dataclass
class Expect:
    """What an operand must hold: `values` at the indices `rows` and `columns` (all if None)."""

    values: np.ndarray
    tolerance: Tolerance
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


@dataclass
class Problem:
    """Contents of every operand before the launch and expectations after it, by `role_key`."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    expected: dict[str, Expect] = field(default_factory=dict)


def role_key(role):
    """`x`, `input.positions`, `workspace.0`, …"""
    return role if isinstance(role, str) else ".".join(str(part) for part in next(iter(role.items())))


# ---- numbers -------------------------------------------------------------------------------------


def to_float(values):
    """Float64 of BF16 bits, or of any other array."""
    if values.dtype != np.uint16:
        return values.astype(np.float64)
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(values):
    """BF16 bits of floats, rounded to nearest even."""
    raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits):
    """The binary32 value stored as `bits`."""
    return float(np.uint32(bits).view(np.float32))


def random_bf16(rng, shape, scale=1.0):
    """Values of both signs and magnitude within a factor of eight, rms about `scale`; fast enough for gigabytes."""
    raw = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    exponent = 127 + int(np.floor(np.log2(scale))) - 2
    return (raw & 0x807F) | (((raw >> 7 & 3) + exponent) << 7).astype(np.uint16)


def activations(rng, count, bound, width):
    """`[bound, width]` of which the rows from `count` on are NaN."""
    values = random_bf16(rng, (bound, width))
    values[count:] = NAN_BF16
    return values


def sampled_rows(count, rng):
    """One row of every eight, and the first and last: enough to meet every tile."""
    starts = np.arange(0, count, 8)
    return np.unique(np.concatenate([[0, count - 1], np.minimum(starts + rng.integers(0, 8, len(starts)), count - 1)]))


def sampled_columns(n, rng):
    """All columns, or several of every tile of a wide projection."""
    if n <= COLUMNS_MAX:
        return None
    starts = np.arange(0, n, 32)
    return np.unique(np.concatenate([[n - 1], np.minimum(starts + rng.integers(0, 32, len(starts)), n - 1)]))


@lru_cache(maxsize=1)
def weights(n, k):
    """One random weight a shape: making gigabytes anew for every step takes longer than checking them."""
    return random_bf16(np.random.default_rng(n * k), (n, k), 2 / np.sqrt(k))


def output(bound, width, dtype):
    """A poisoned output."""
    return np.full((bound, width), NAN_BF16 if dtype == "bf16" else np.nan, np.uint16 if dtype == "bf16" else np.float32)


# ---- operators -----------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    """`x / sqrt(mean(x²) + eps) · weight`."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    """`x · sigmoid(x)`."""
    return x / (1 + np.exp(-x))


def swiglu(values, row_order):
    """`silu(gate) · up` of interleaved or concatenated columns."""
    group = row_order["interleave"] if isinstance(row_order, dict) else values.shape[1] // 2
    parts = values.reshape(len(values), -1, 2, group)
    return (silu(parts[:, :, 0]) * parts[:, :, 1]).reshape(len(values), -1)


def rotate(x, table):
    """Rotates `[count, heads, d]` by `[count, d/2, 2]` of cosines and sines; pairs `(i, i + d/2)`."""
    half = x.shape[-1] // 2
    low, high, cos, sin = x[..., :half], x[..., half:], table[:, None, :, 0], table[:, None, :, 1]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rope_table(context, head_dim, theta=1e6):
    """`[context, d/2, 2]` of cosines and sines."""
    angle = np.arange(context)[:, None] / theta ** (np.arange(0, head_dim, 2) / head_dim)
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


# ---- problems ------------------------------------------------------------------------------------


def _extent(manifest):
    """The symbol that counts this kernel's rows."""
    scalars = [p["value"]["sym"] for p in manifest["params"] if p["kind"] == "scalar"]
    grid = [e["sym"] for e in manifest["grid"]]
    return "rows" if "rows" in scalars + grid else "tokens"


def _linear_inputs(linear, manifest, count, bound, rng, columns=None):
    """Operands of a projection, and its float64 result before rounding on sampled rows."""
    n, k = linear["n"], linear["k"]
    arrays = {"x": activations(rng, count, bound, k), "weight": weights(n, k)}
    rows = sampled_rows(count, rng)
    x = to_float(arrays["x"][rows])
    if linear["norm"] is not None:
        arrays["norm_weight"] = random_bf16(rng, (k,))
        x = rms_norm(x, to_float(arrays["norm_weight"]), from_bits(linear["norm"]))
        if "norm" in manifest["numerics"]["rounding"]:
            x = to_float(to_bf16(x))
    result = x @ to_float(arrays["weight"] if columns is None else arrays["weight"][columns]).T
    if linear["bias"]:
        arrays["bias"] = random_bf16(rng, (n,))
        result += to_float(arrays["bias"])
    if linear["act"] == "swi_glu":
        result = swiglu(result, manifest["row_order"])
    return arrays, rows, result


def _linear(linear, manifest, sizes, bound, rng):
    symbol = _extent(manifest)
    count, bound = getattr(sizes, symbol), getattr(bound, symbol)
    plain = not linear["bias"] and not linear["residual"] and linear["act"] == "none"
    columns = sampled_columns(linear["n"], rng) if plain else None
    arrays, rows, result = _linear_inputs(linear, manifest, count, bound, rng, columns)
    if linear["residual"]:
        arrays["residual"] = activations(rng, count, bound, linear["n"])
        result += to_float(arrays["residual"][rows])
    out = manifest["contract"]["out"]
    arrays["out"] = output(bound, linear["n"] // (2 if linear["act"] == "swi_glu" else 1), out)
    return Problem(arrays, {"out": Expect(result, BF16_OUT if out == "bf16" else F32_OUT, rows, columns)})


def _embed(op, manifest, sizes, bound, rng):
    ids = rng.integers(0, op["vocab"], bound.tokens, dtype=np.uint32)
    sampled = rng.integers(0, op["vocab"], 256, dtype=np.uint32)
    sources = np.where(rng.random(bound.tokens) < 0.5, rng.integers(0, 256, bound.tokens), NONE).astype(np.uint32)
    table = random_bf16(rng, (op["vocab"], op["dim"]))
    token = np.where(sources == NONE, ids, sampled[np.where(sources == NONE, 0, sources)])[:sizes.tokens]
    arrays = {"weight": table, "input.token_ids": ids, "input.token_sources": sources, "output.sampled_ids": sampled,
              "out": output(bound.tokens, op["dim"], "bf16")}
    return Problem(arrays, {"out": Expect(to_float(table[token]), EXACT, np.arange(sizes.tokens))})


def _rms_norm(op, manifest, sizes, bound, rng):
    symbol = _extent(manifest)
    count, bound = getattr(sizes, symbol), getattr(bound, symbol)
    arrays = {"x": activations(rng, count, bound, op["dim"]), "norm_weight": random_bf16(rng, (op["dim"],)),
              "out": output(bound, op["dim"], "bf16")}
    rows, expected = np.arange(count), {}
    x = to_float(arrays["x"][:count])
    if "add_rms_norm" in manifest["contract"]["op"]:
        arrays["residual"] = activations(rng, count, bound, op["dim"])
        x = to_float(to_bf16(x + to_float(arrays["residual"][:count])))
        expected["residual"] = Expect(x, EXACT, rows)
    expected["out"] = Expect(rms_norm(x, to_float(arrays["norm_weight"]), from_bits(op["eps"])), BF16_OUT, rows)
    return Problem(arrays, expected)


def _qk_norm(op, manifest, sizes, bound, rng):
    h = op["heads"]
    width, normed = (h["q"] + 2 * h["kv"]) * h["dim"], (h["q"] + h["kv"]) * h["dim"]
    x, weight = activations(rng, sizes.tokens, bound.tokens, width), random_bf16(rng, (2, h["dim"]))
    gain = np.repeat(to_float(weight), [h["q"], h["kv"]], axis=0)
    heads = to_float(x[:sizes.tokens, :normed]).reshape(sizes.tokens, -1, h["dim"])
    want = to_float(x[:sizes.tokens])
    want[:, :normed] = rms_norm(heads, gain, from_bits(op["eps"])).reshape(sizes.tokens, -1)
    return Problem({"x": x, "norm_weight": weight, "out": x.copy()}, {"out": Expect(want, BF16_OUT, np.arange(sizes.tokens))})


def _take_rows(op, manifest, sizes, bound, rng):
    x = activations(rng, sizes.tokens, bound.tokens, op["dim"])
    chosen = rng.integers(0, sizes.tokens, bound.rows, dtype=np.uint32)
    arrays = {"x": x, "input.logit_rows": chosen, "out": output(bound.rows, op["dim"], "bf16")}
    return Problem(arrays, {"out": Expect(to_float(x[chosen[:sizes.rows]]), EXACT, np.arange(sizes.rows))})


def _cache(heads, sizes, bound, rng):
    """Random planes, distinct slots with a gap now and then, positions and the rotary table."""
    slots = sizes.kv_pages * heads["page_tokens"]
    planes = [random_bf16(rng, (slots, heads["kv"], heads["dim"])) for _ in "kv"]
    where = rng.permutation(slots)[:bound.tokens].astype(np.uint32)
    where[rng.random(bound.tokens) < 0.05] = NONE
    where[sizes.tokens:] = NONE
    context = 2048
    return {"k_plane": planes[0], "v_plane": planes[1], "rope_table": rope_table(context, heads["dim"]),
            "input.kv_slots": where, "input.positions": rng.integers(0, context, bound.tokens, dtype=np.uint32)}


def _appended(arrays, heads, qkv, rows, tolerance):
    """Expectations of Q, K plane and V plane from float64 `[q | k | v]` of the token rows `rows`."""
    q, kv, dim = heads["q"], heads["kv"], heads["dim"]
    parts = qkv.reshape(len(rows), q + 2 * kv, dim)
    table = arrays["rope_table"].astype(np.float64)[arrays["input.positions"][rows]]
    rotated, slot = rotate(parts[:, :q + kv], table), arrays["input.kv_slots"][rows]
    kept = slot != NONE
    expected = {"out": Expect(rotated[:, :q].reshape(len(rows), -1), tolerance, rows)}
    for name, values in (("k_plane", rotated[:, q:]), ("v_plane", parts[:, q + kv:])):
        expected[name] = Expect(values[kept], tolerance, slot[kept].astype(np.int64))
    return expected


def _untouched(problem, count):
    """Slots that no token owns keep their contents bit for bit."""
    slots = problem.arrays["input.kv_slots"][:count]
    for name in ("k_plane", "v_plane"):
        plane = problem.arrays[name]
        others = np.setdiff1d(np.arange(len(plane)), slots[slots != NONE])
        problem.expected[f"{name}#untouched"] = Expect(to_float(plane[others]), EXACT, others)
    return problem


def _rope_append(op, manifest, sizes, bound, rng):
    heads = op["heads"]
    arrays = _cache(heads, sizes, bound, rng)
    arrays["x"] = activations(rng, sizes.tokens, bound.tokens, (heads["q"] + 2 * heads["kv"]) * heads["dim"])
    arrays["out"] = output(bound.tokens, heads["q"] * heads["dim"], "bf16")
    rows = np.arange(sizes.tokens)
    problem = Problem(arrays, _appended(arrays, heads, to_float(arrays["x"][rows]), rows, BF16_OUT))
    return _untouched(problem, sizes.tokens)


def _qkv_rope_append(op, manifest, sizes, bound, rng):
    heads, linear = op["heads"], op["linear"]
    arrays, rows, result = _linear_inputs(linear, manifest, sizes.tokens, bound.tokens, rng)
    arrays |= _cache(heads, sizes, bound, rng)
    arrays["out"] = output(bound.tokens, heads["q"] * heads["dim"], "bf16")
    return _untouched(Problem(arrays, _appended(arrays, heads, result, rows, BF16_OUT)), sizes.tokens)


PROBLEMS: dict[str, Callable] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "add_rms_norm": _rms_norm,
    "qk_norm": _qk_norm,
    "linear": _linear,
    "rope_append": _rope_append,
    "qkv_rope_append": _qkv_rope_append,
    "take_rows": _take_rows,
}
"""Problem makers by operator: `maker(op, manifest, sizes, bound, rng)`. Attention and sampling have files of their own."""


def problem(manifest, sizes, bound, rng):
    """A random problem for the kernel: step of `sizes`, buffers and tensor maps for the class `bound`."""
    import oracle_attention
    import oracle_sampling

    (name, op), = manifest["contract"]["op"].items()
    return (PROBLEMS | oracle_attention.PROBLEMS | oracle_sampling.PROBLEMS)[name](op, manifest, sizes, bound, rng)


def worst(got, expect):
    """Largest violation as a multiple of the tolerance, and the largest error relative to rms."""
    got = got if expect.rows is None else got[expect.rows]
    got = to_float(got if expect.columns is None else got[:, expect.columns]).reshape(expect.values.shape)
    want = expect.values
    if want.size == 0:
        return 0.0, 0.0
    rms = float(np.sqrt(np.mean(want * want))) or 1.0
    error = np.abs(got - want)
    if not np.isfinite(error).all():
        return float("inf"), float("inf")
    allowed = expect.tolerance.relative * np.abs(want) + expect.tolerance.of_rms * rms
    ratio = np.where(error == 0, 0.0, error / np.maximum(allowed, 1e-300))
    return float(ratio.max()), float(error.max() / rms)
