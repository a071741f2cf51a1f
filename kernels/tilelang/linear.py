"""What the projection families share: the shapes of every profile and their artifact declarations.

All families read row-major weights `[n][k]`; gate and up rows alternate in groups of eight, so that
the accumulators of a gate and of its up value always belong to one thread.
"""

from dataclasses import dataclass

from artifact import ROWS, TOKENS, WRITE, Artifact, Operand
from contracts import BIAS, NORM_WEIGHT, OUT, RESIDUAL, WEIGHT, X, contract, linear
from shapes import MODELS

GROUP = 8
"""Rows of gate, then rows of up."""


@dataclass(frozen=True)
class Projection:
    """A projection of a profile: its width, depth and epilogue."""

    role: str
    n: int
    k: int
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    f32: bool = False

    @property
    def width(self):
        """Elements of an output row."""
        return self.n // 2 if self.swiglu else self.n

    @property
    def symbol(self):
        """The dynamic dimension: logit rows for the head, tokens elsewhere."""
        return "rows" if self.f32 else "tokens"

    def contract(self, norm=None):
        """The operator contract; `norm` is an epsilon if the kernel normalises its input."""
        act = "swi_glu" if self.swiglu else "none"
        op = {"linear": linear(self.n, self.k, norm, self.bias, act, self.residual)}
        return contract(op, "f32" if self.f32 else "bf16")


def projections(model):
    """The five projections of a layer stack and its head."""
    return (
        Projection("qkv", model.qkv, model.dim, bias=model.qkv_bias),
        Projection("o", model.dim, model.attn, residual=True),
        Projection("gate_up", 2 * model.ffn, model.dim, swiglu=True),
        Projection("down", model.dim, model.ffn, residual=True),
        Projection("head", model.vocab, model.dim, f32=True),
    )


def all_projections():
    """Every projection of every profile, each shape once."""
    return list(dict.fromkeys(p for m in MODELS for p in projections(m)))


def operands(p, norm=False):
    """Bindings of the parameter names that the families use."""
    bound = {"x": Operand(X), "weight": Operand(WEIGHT), "out": Operand(OUT, WRITE)}
    if p.bias:
        bound["bias"] = Operand(BIAS)
    if p.residual:
        bound["residual"] = Operand(RESIDUAL)
    if norm:
        bound["norm_weight"] = Operand(NORM_WEIGHT)
    return bound


def declare(name, p, make, domain, norm=None, **more):
    """The artifact of a projection kernel."""
    return Artifact(name, p.contract(norm), make, operands(p, norm is not None), domain, {"tokens": TOKENS, "rows": ROWS},
                    row_order={"interleave": GROUP} if p.swiglu else "concat", **more)
