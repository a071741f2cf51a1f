"""What a family declares for each kernel it ships, and the manifest made of it.

A family module offers `artifacts() -> list[Artifact]`. The manifest's shape is fixed by
`runtime/bundle/src/artifact.rs` and described in `docs/kernel-abi.md`.
"""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import toolchain
from contracts import scalar, sym

READ, WRITE, READ_WRITE = "read", "write", "read_write"


@dataclass(frozen=True)
class Operand:
    """What a pointer or tensor-map parameter is bound to."""

    role: object
    access: str = READ


@dataclass(frozen=True)
class Scalar:
    """What a dynamic dimension is bound to: a scalar role and its value as an extent, or None where the role says all."""

    role: object
    value: dict | None


@dataclass(frozen=True)
class Scratch:
    """Memory that the plan must provide beside the operands."""

    role: object
    dtype: str
    elements: dict
    zeroed: bool = False


TOKENS = Scalar(scalar("tokens"), sym("tokens"))
SEQS = Scalar(scalar("seqs"), sym("seqs"))
ROWS = Scalar(scalar("rows"), sym("rows"))


@dataclass(frozen=True)
class Artifact:
    """One kernel: its contract, its factory and the meaning of every parameter.

    `operands` and `scalars` are keyed by the names of the PrimFunc's buffers and dynamic dimensions.
    `defines` are the files beside the factory's own that shape the generated code.
    """

    name: str
    contract: dict
    make: Callable[[], object]
    operands: dict[str, Operand]
    domain: dict
    scalars: dict[str, Scalar] = field(default_factory=dict)
    weight_layout: str = "row_major"
    row_order: object = "concat"
    workspace: tuple[Scratch, ...] = ()
    rounding: tuple[str, ...] = ("out",)
    deterministic: bool = True
    pass_configs: dict = field(default_factory=dict)
    defines: tuple[str, ...] = ("primitives.py",)

    def source_sha256(self) -> str:
        """Hash of the family's file and of the files it builds on."""
        own = Path(inspect.getsourcefile(self.make)).name
        files = sorted({own, *self.defines})
        return toolchain.sha256("".join(f"{name}\0{(toolchain.HERE / name).read_text()}\0" for name in files))


def _align(param):
    return {"pointer": 16, "tensor_map": 16, "scalar": 4}[param["kind"]]


def _parameter(artifact, param, place):
    """One entry of `params`; `place` is where the cubin keeps it."""
    record = {"name": param["name"], "kind": param["kind"], "dtype": param["dtype"]}
    if param["kind"] == "scalar":
        bound = artifact.scalars[param["source"]]
        record |= {"role": bound.role, "access": READ}
    else:
        bound = artifact.operands[param["source"]]
        record |= {"role": bound.role, "access": bound.access}
    record |= {"align": _align(param), "offset": place.offset, "size": place.size}
    if param["kind"] == "scalar" and bound.value is not None:
        record["value"] = bound.value
    if param["kind"] == "tensor_map":
        record["tensor_map"] = param["tensor_map"]
    return record


def manifest(artifact, launch, code, generated_sha256):
    """The manifest of `artifact`, from the lowered launch and the compiled code."""
    return {
        "format": 1,
        "name": artifact.name,
        "sha256": toolchain.sha256(code.data),
        "size_bytes": len(code.data),
        "source_sha256": artifact.source_sha256(),
        "generated_source_sha256": generated_sha256,
        "target": toolchain.ARCH,
        "driver_min": toolchain.DRIVER_MIN,
        "contract": artifact.contract,
        "numerics": {"accumulate": "f32", "rounding": list(artifact.rounding), "deterministic": artifact.deterministic},
        "domain": artifact.domain,
        "weight_layout": artifact.weight_layout,
        "row_order": artifact.row_order,
        "symbol": launch.symbol,
        "grid": launch.grid,
        "block": launch.block,
        "cluster": launch.cluster,
        "shared_bytes": launch.shared_bytes,
        "registers": code.registers,
        "spill_bytes": code.spill_bytes,
        "pdl": launch.pdl,
        "cooperative": launch.cooperative,
        "params": [_parameter(artifact, param, place) for param, place in zip(launch.params, code.params, strict=True)],
        "workspace": [{"role": s.role, "dtype": s.dtype, "elements": s.elements, "zeroed": s.zeroed} for s in artifact.workspace],
        "toolchain": toolchain.identities(),
        "records": {"correctness": [], "sanitizer": [], "graph": [], "bench": []},
    }
