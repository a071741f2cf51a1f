"""Builds one kernel, or lists them. Run by `kernels/build.py`, one process a kernel under `setarch -R`:
TileLang's registries are single-threaded, and one of its layouts depends on addresses."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAMILIES = [f for f in ("elementwise", "gemm", "gemv_m1", "skinny", "prefill", "attend_decode", "attend_mixed", "attend_mixed_ws", "sample") if (HERE / f"{f}.py").exists()]


def catalogue(families):
    """Every artifact of the families by name."""
    found = {}
    for family in families:
        for artifact in importlib.import_module(family).artifacts():
            if artifact.name in found:
                raise ValueError(f"two artifacts are named {artifact.name}")
            found[artifact.name] = (family, artifact)
    return found


def list_artifacts(families):
    """One line of JSON: family, name and source hash of each artifact."""
    records = [{"family": family, "name": name, "source_sha256": a.source_sha256()} for name, (family, a) in catalogue(families).items()]
    print(json.dumps(records))


def _reusable(previous, generated):
    """Whether the cubin of an earlier build holds the same code."""
    import toolchain

    return previous and previous["generated_source_sha256"] == generated and previous["toolchain"] == toolchain.identities()


def _code(artifact, launch, source, generated, store, previous):
    import cubin

    if _reusable(previous, generated):
        data = (store / f"{previous['sha256']}.cubin").read_bytes()
        return cubin.Code(data, previous["registers"], previous["spill_bytes"], cubin.parameter_layout(data, launch.symbol))
    return cubin.build(artifact.name, launch.symbol, source, bool(artifact.pass_configs.get("tl.enable_fast_math")))


def build(artifact, out, store, previous, keep_source):
    """Builds `artifact` into `out` and returns a summary for the progress line."""
    import artifact as manifests
    import lowering
    import toolchain

    started = time.time()
    func, lowered = lowering.lower(artifact.name, artifact.make(), artifact.pass_configs)
    launch = lowering.describe(func, lowered, artifact.scalars)
    generated = toolchain.sha256(lowered.kernel_source)
    if keep_source:
        (out / f"{artifact.name}.cu").write_text(lowered.kernel_source)
    code = _code(artifact, launch, lowered.kernel_source, generated, store, previous)
    manifest = manifests.manifest(artifact, launch, code, generated)
    if previous and previous["sha256"] == manifest["sha256"]:
        manifest["records"] = previous["records"]
    (out / f"{manifest['sha256']}.cubin").write_bytes(code.data)
    (out / f"{manifest['sha256']}.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return {"sha256": manifest["sha256"], "seconds": round(time.time() - started, 1), "size_bytes": len(code.data),
            "registers": code.registers, "spill_bytes": code.spill_bytes, "shared_bytes": launch.shared_bytes}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--build", nargs=2, metavar=("FAMILY", "NAME"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--store", type=Path, help="folder of artifacts whose code may be reused")
    parser.add_argument("--previous", type=Path, help="manifest of an earlier build of this kernel")
    parser.add_argument("--keep-source", action="store_true")
    args = parser.parse_args()
    if args.list:
        return list_artifacts(args.families.split(","))
    family, name = args.build
    previous = json.loads(args.previous.read_text()) if args.previous else None
    print(json.dumps(build(catalogue([family])[name][1], args.out, args.store, previous, args.keep_source)))


if __name__ == "__main__":
    sys.exit(main())
