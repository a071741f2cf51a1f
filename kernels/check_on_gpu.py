#!/usr/bin/env python3
"""Checks and times every sm90 artifact on a GPU machine. Needs numpy and the CUDA driver, nothing else.

    python3 kernels/check_on_gpu.py --no-time --jobs 8 --json FILE     correctness, eight kernels at once
    python3 kernels/check_on_gpu.py --time-only --json FILE            times
    python3 kernels/check_on_gpu.py --only PATTERN                     both, for some

Per kernel and step size: random operands, poisoned outputs, NaN in rows beyond the step, buffers and
tensor maps of a larger class than the step; the result against the float64 oracle; guard bytes after
every operand; counters back at zero; a second run, a graph replay and a PDL launch give the same bytes;
residual and output in one buffer give the same bytes. Times are of a graph of chained launches over
rotating copies of the weights, plain and with PDL. Each kernel runs in a process of its own.

`--dry` makes the problems and packs the arguments without a GPU.
"""

import argparse
import concurrent.futures
import ctypes
import fnmatch
import json
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
STORE = HERE.parent / "artifacts" / "sm90"
sys.path.insert(0, str(HERE / "tilelang"))

import oracle  # noqa: E402
from driver import Driver  # noqa: E402
from oracle import Sizes, role_key  # noqa: E402
from oracle_attention import TABLE_STRIDE  # noqa: E402

GUARD = 4096
GUARD_BYTE = 0xA5
SYMBOL_SIZES = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 255, 256, 300, 1000, 1024, 2049, 4096, 8192)
TIME_SIZES = (1, 8, 32, 64, 128, 256, 1024, 2048, 4096, 8192)
KV_PAGES = 3000
ROTATED_BYTES = 320 << 20
"""Weights of all rotating copies together: several times the L2 cache."""


def evaluate(extent, sizes):
    """An Extent under the sizes of a step."""
    base = 1 if extent["sym"] is None else getattr(sizes, extent["sym"])
    return -(-base * extent["mul"] // extent["div"])


def in_domain(size, limits):
    """Whether a domain serves a size."""
    return limits["min"] <= size <= limits["max"] and size % limits["multiple"] == 0


def step_sizes(manifest, wanted, limit):
    """Steps to try: the wanted counts inside the domain, every symbol moving together where it may."""
    domain, steps = manifest["domain"], []
    free = {name for name, limits in domain.items() if limits["max"] == 0xFFFFFFFF}
    leading = next((name for name in ("tokens", "rows", "seqs") if name not in free), "tokens")
    for size in wanted:
        if size > limit or not in_domain(size, domain[leading]):
            continue
        others = {name: min(size, domain[name]["max"], 256) if name != leading else size for name in domain}
        steps.append(Sizes(others["tokens"], others["seqs"], others["rows"], KV_PAGES))
    return steps


def bound_of(manifest, sizes):
    """A class that is somewhat larger than the step, inside the domain."""
    grow = lambda name, value: max(value, min(value + 37, manifest["domain"][name]["max"], 8192 if name == "tokens" else 256))
    return Sizes(grow("tokens", sizes.tokens), grow("seqs", sizes.seqs), grow("rows", sizes.rows), sizes.kv_pages)


DTYPES = {"bfloat16": np.uint16, "float32": np.float32, "int32": np.uint32, "uint32": np.uint32, "int64": np.uint64}


@dataclass
class Buffers:
    """Device addresses and host images by role key."""

    images: dict
    addresses: dict


class Kernel:
    """A loaded artifact."""

    def __init__(self, driver, manifest, data):
        self.driver, self.manifest = driver, manifest
        self.function = None
        if driver:
            self.function = driver.load(data, manifest["symbol"], manifest["shared_bytes"], manifest["cluster"])
            for index, param in enumerate(manifest["params"]):
                found = driver.parameter(self.function, index)
                if found != (param["offset"], param["size"]):
                    raise AssertionError(f"parameter {param['name']} lies at {found}, the manifest says {param['offset'], param['size']}")

    def pack(self, addresses, sizes, bound):
        """Host addresses of the parameter values, and what keeps them alive."""
        keep, pointers = [], []
        for param in self.manifest["params"]:
            if param["kind"] == "scalar":
                value = ctypes.c_uint32(evaluate(param["value"], sizes) if "value" in param else TABLE_STRIDE)
            elif param["kind"] == "pointer":
                value = ctypes.c_uint64(addresses[role_key(param["role"])])
            else:
                raw, base = self._map(param["tensor_map"], addresses[role_key(param["role"])], bound)
                keep.append(raw)
                pointers.append(base)
                continue
            keep.append(value)
            pointers.append(ctypes.addressof(value))
        return pointers, keep

    def _map(self, m, address, bound):
        dims, strides = ([evaluate(e, bound) for e in m[key]] for key in ("dims", "strides_bytes"))
        assert all(s % 16 == 0 for s in strides) and all(1 <= b <= 256 for b in m["box"]), m
        if not self.driver:
            return None, 0
        return self.driver.tensor_map(address, m["dtype"], dims, strides, m["box"], m["element_strides"], m["interleave"],
                                      m["swizzle"], m["l2_promotion"], m["oob_fill"])

    def launcher(self, addresses, sizes, bound, pdl):
        """A function that launches once."""
        m = self.manifest
        pointers, keep = self.pack(addresses, sizes, bound)
        grid = [evaluate(e, sizes) for e in m["grid"]]

        def launch(keep=keep):
            self.driver.launch(self.function, grid, m["block"], m["shared_bytes"], m["cluster"], pdl, m["cooperative"], pointers)

        return launch


# ---- one step size -------------------------------------------------------------------------------


def scratch(manifest, bound):
    """Workspace images: zeroed state, poisoned scratch."""
    images = {}
    for item in manifest["workspace"]:
        count, kind = evaluate(item["elements"], bound), DTYPES[item["dtype"]]
        images[role_key(item["role"])] = np.full(count * np.dtype(kind).itemsize, 0 if item["zeroed"] else 0xFF, np.uint8).view(kind)
    return images


def upload(driver, images):
    """Allocates every image with a guard behind it."""
    addresses = {}
    for key, image in images.items():
        addresses[key] = driver.allocate(image.nbytes + GUARD)
    restore(driver, images, addresses)
    return addresses


def restore(driver, images, addresses, only=None):
    """Puts every operand, or those of `only`, back to its first contents."""
    for key, image in images.items():
        if only is None or key in only:
            driver.write(addresses[key], image)
        driver.fill(addresses[key] + image.nbytes, GUARD_BYTE, GUARD)


def written(manifest):
    """Role keys that the kernel writes."""
    return sorted({role_key(p["role"]) for p in manifest["params"] if p["access"] != "read"})


def results(driver, manifest, images, addresses):
    """Contents of the written operands; fails if a guard was touched."""
    found = {key: driver.read(addresses[key], np.empty_like(images[key])) for key in written(manifest)}
    for key, image in images.items():
        guard = driver.read(addresses[key] + image.nbytes, np.empty(GUARD, np.uint8))
        if (guard != GUARD_BYTE).any():
            raise AssertionError(f"bytes behind `{key}` were overwritten")
    for item in manifest["workspace"]:
        key = role_key(item["role"])
        if item["zeroed"] and driver.read(addresses[key], np.empty_like(images[key])).any():
            raise AssertionError(f"`{key}` was not left zeroed")
    return found


def same(first, second, expected, keys):
    """Whether the meaningful rows of two results are the same bytes."""
    for key in keys:
        rows = expected[key].rows if key in expected else None
        a, b = (first[key], second[key]) if rows is None else (first[key][rows], second[key][rows])
        if a.tobytes() != b.tobytes():
            return False
    return True


def check_step(driver, kernel, sizes, bound, seed):
    """One problem, all the ways of launching it."""
    manifest = kernel.manifest
    problem = oracle.problem(manifest, sizes, bound, np.random.default_rng(seed))
    images = problem.arrays | scratch(manifest, bound)
    missing = {role_key(p["role"]) for p in manifest["params"] if p["kind"] != "scalar"} - images.keys()
    assert not missing, f"the oracle gives no {missing}"
    record = {"tokens": sizes.tokens, "rows": sizes.rows, "seqs": sizes.seqs, "bound": max(bound.tokens, 0)}
    if not driver:
        kernel.pack({key: 0 for key in images}, sizes, bound)
        return record | {"ok": True, "dry": True}
    addresses = upload(driver, images)

    changing = set(written(manifest)) | {role_key(item["role"]) for item in manifest["workspace"]}

    def run(launch_with):
        restore(driver, images, addresses, changing)
        launch_with()
        driver.synchronize()
        return results(driver, manifest, images, addresses)

    try:
        eager = kernel.launcher(addresses, sizes, bound, False)
        first = run(eager)
        outputs = [key for key in written(manifest) if not key.startswith(("workspace", "counters"))]
        for key, expect in problem.expected.items():
            ratio, error = oracle.worst(first[key.split("#")[0]], expect)
            record.setdefault("errors", {})[key] = {"of_tolerance": round(ratio, 4), "of_rms": float(f"{error:.3g}")}
        record["accurate"] = all(e["of_tolerance"] <= 1 for e in record["errors"].values())
        record["repeatable"] = same(first, run(eager), problem.expected, outputs)
        record["pdl_equal"] = same(first, run(kernel.launcher(addresses, sizes, bound, True)), problem.expected, outputs)
        graph = driver.graph(eager)
        record["graph_equal"] = same(first, run(lambda: driver.replay(graph)), problem.expected, outputs)
        driver.destroy(graph)
        exact = kernel.launcher(addresses, sizes, sizes, False)
        record["exact_class_equal"] = same(first, run(exact), problem.expected, outputs)
        if "residual" in images and "residual" not in outputs and images["residual"].shape == images["out"].shape:
            record["in_place_equal"] = check_in_place(driver, kernel, sizes, bound, images, addresses, problem, first)
    finally:
        for address in addresses.values():
            driver.free(address)
    record["ok"] = all(value for value in record.values() if isinstance(value, bool))
    return record


def check_in_place(driver, kernel, sizes, bound, images, addresses, problem, first):
    """Residual and output in one buffer: the plan of a residual stream."""
    restore(driver, images, addresses)
    driver.write(addresses["out"], images["residual"])
    aliased = addresses | {"residual": addresses["out"]}
    kernel.launcher(aliased, sizes, bound, True)()
    driver.synchronize()
    found = {"out": driver.read(addresses["out"], np.empty_like(images["out"]))}
    return same({"out": first["out"]}, found, problem.expected, ["out"])


# ---- time ----------------------------------------------------------------------------------------


def time_step(driver, kernel, sizes, seed):
    """Microseconds a launch in a chained graph, plain and with PDL, over rotating weights."""
    manifest = kernel.manifest
    problem = oracle.problem(manifest, sizes, sizes, np.random.default_rng(seed))
    images = problem.arrays | scratch(manifest, sizes)
    addresses = upload(driver, images)
    weight = images.get("weight")
    copies = max(4, min(64, -(-ROTATED_BYTES // weight.nbytes))) if weight is not None else 1
    rotating = [addresses] + [addresses | {"weight": driver.allocate(weight.nbytes)} for _ in range(copies - 1)]
    for extra in rotating[1:]:
        driver.copy(extra["weight"], addresses["weight"], weight.nbytes)
    record = {"tokens": sizes.tokens, "rows": sizes.rows}
    for label, pdl in (("us", False), ("us_pdl", True)):
        if pdl and not manifest["pdl"]:
            continue
        record[label] = round(_chained(driver, [kernel.launcher(a, sizes, sizes, pdl) for a in rotating]), 3)
    if weight is not None:
        best = min(record[label] for label in ("us", "us_pdl") if label in record)
        record["weight_gb_s"] = round(weight.nbytes / best / 1e3, 1)
        record["tflop_s"] = round(2 * weight.size * max(sizes.tokens if oracle._extent(manifest) == "tokens" else sizes.rows, 1) / best / 1e6, 2)
    for address in [*addresses.values(), *(extra["weight"] for extra in rotating[1:])]:
        driver.free(address)
    return record


def _chained(driver, launchers):
    rounds = max(1, 56 // len(launchers))

    def record():
        for _ in range(rounds):
            for launch in launchers:
                launch()

    graph = driver.graph(record)
    for _ in range(3):
        driver.replay(graph)
    driver.synchronize()
    samples = [driver.microseconds(lambda: driver.replay(graph)) for _ in range(11)]
    driver.destroy(graph)
    return statistics.median(samples) / (rounds * len(launchers))


# ---- program -------------------------------------------------------------------------------------


def check_kernel(manifest, args):
    """The record of one kernel."""
    driver = None if args.dry else Driver()
    kernel = Kernel(driver, manifest, (STORE / f"{manifest['sha256']}.cubin").read_bytes())
    seed = zlib.crc32(manifest["name"].encode())
    steps = step_sizes(manifest, SYMBOL_SIZES, args.tokens_max)
    record = {"name": manifest["name"], "sha256": manifest["sha256"], "steps": [], "times": []}
    for index, sizes in enumerate([] if args.time_only else steps):
        record["steps"].append(check_step(driver, kernel, sizes, bound_of(manifest, sizes), seed + index))
    if not args.dry and not args.no_time:
        record["times"] = [time_step(driver, kernel, sizes, seed) for sizes in step_sizes(manifest, TIME_SIZES, args.tokens_max)]
    record["ok"] = bool(steps) and all(step["ok"] for step in record["steps"])
    return record


def check_isolated(name, args):
    """Checks one kernel in its own process."""
    command = [sys.executable, __file__, "--one", name, "--tokens-max", str(args.tokens_max)]
    command += ["--dry"] if args.dry else []
    command += ["--no-time"] if args.no_time else []
    command += ["--time-only"] if args.time_only else []
    started = time.time()
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"name": name, "ok": False, "error": f"no end after {args.timeout} s", "steps": [], "times": []}
    if result.returncode:
        return {"name": name, "ok": False, "error": result.stderr.strip()[-600:], "steps": [], "times": []}
    return json.loads(result.stdout.splitlines()[-1]) | {"seconds": round(time.time() - started, 1)}


def describe(record):
    """One line of the table."""
    errors = [e["of_tolerance"] for step in record["steps"] for e in step.get("errors", {}).values()]
    bad = [f"{step['tokens']}/{step['rows']}:{','.join(k for k, v in step.items() if v is False)}" for step in record["steps"] if not step["ok"]]
    times = " ".join(f"{t['rows'] if 'head' in record['name'] else t['tokens']}:{t.get('us_pdl', t['us'])}" for t in record["times"])
    state = "ok  " if record["ok"] else "FAIL"
    last = (record.get("error") or "").splitlines()[-1:]
    return f"{state} {record['name']:42s} {len(record['steps']):2d} steps  worst {max(errors, default=0):6.3f}  {record.get('seconds', 0):5.1f} s  {times} {' '.join(bad + last)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN")
    parser.add_argument("--json", type=Path, help="write all records here")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="kernels checked at once; more than 1 needs --no-time")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--tokens-max", type=int, default=8192)
    parser.add_argument("--timeout", type=int, default=300, help="seconds a kernel")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    manifests = {m["name"]: m for m in (json.loads(p.read_text()) for p in sorted(STORE.glob("*.json")))}
    if args.one:
        print(json.dumps(check_kernel(manifests[args.one], args)))
        return 0
    names = [n for n in sorted(manifests) if not args.only or any(p in n or fnmatch.fnmatch(n, p) for p in args.only)]
    if args.jobs > 1 and not (args.no_time or args.dry):
        parser.error("--jobs above 1 would disturb the times: add --no-time")
    records = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for record in pool.map(lambda name: check_isolated(name, args), names):
            records.append(record)
            print(describe(record), flush=True)
    report = {"records": records} if args.dry else {"machine": Driver().identity(), "records": records}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = [r["name"] for r in records if not r["ok"]]
    print(f"{len(records) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
