"""Contracts, roles, extents and domains as the bundle crate's serde encodes them.

The Rust definitions are `runtime/bundle/src/contract.rs` and `plan.rs`; this file mirrors them and
adds nothing.
"""

import struct

X, WEIGHT, NORM_WEIGHT, BIAS, RESIDUAL, OUT = "x", "weight", "norm_weight", "bias", "residual", "out"
ROPE_TABLE, K_PLANE, V_PLANE = "rope_table", "k_plane", "v_plane"


def workspace(index):
    """Scratch number `index` of a kernel."""
    return {"workspace": index}


def counters(index):
    """Zeroed state number `index` of a kernel."""
    return {"counters": index}


def input_slot(name):
    """A per-step input: `token_ids`, `positions`, …"""
    return {"input": name}


def output_slot(name):
    """A per-step output: `sampled_ids`, …"""
    return {"output": name}


def scalar(dim):
    """A scalar: `tokens`, `seqs`, `rows`, `kv_pages`, `table_stride`, `constant`."""
    return {"scalar": dim}


def lit(value):
    """A constant extent."""
    return {"sym": None, "mul": value, "div": 1}


def sym(name, mul=1, div=1):
    """`ceil(name · mul / div)`."""
    return {"sym": name, "mul": mul, "div": div}


def bits(value):
    """The bits of a binary32 value, as `F32Bits` stores it."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def heads(q, kv, dim, page_tokens):
    """Head geometry."""
    return {"q": q, "kv": kv, "dim": dim, "page_tokens": page_tokens}


def linear(n, k, norm=None, bias=False, act="none", residual=False):
    """Static part of a projection; `norm` is the epsilon or None."""
    return {"n": n, "k": k, "norm": None if norm is None else bits(norm), "bias": bias, "act": act, "residual": residual}


def contract(op, out="bf16"):
    """An operator on BF16 activations, weights and KV."""
    return {"op": op, "act": "bf16", "weight": "bf16", "kv": "bf16", "out": out}


ANY = (1, 0xFFFFFFFF, 1)


def span(low, high, multiple=1):
    """`low..=high` in steps of `multiple`."""
    return (low, high, multiple)


def domain(tokens=ANY, seqs=ANY, rows=ANY):
    """Step sizes that a kernel serves; `ANY` where it does not depend on the symbol."""
    name = lambda r: {"min": r[0], "max": r[1], "multiple": r[2]}
    return {"tokens": name(tokens), "seqs": name(seqs), "rows": name(rows)}
