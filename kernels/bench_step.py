#!/usr/bin/env python3
"""Times whole decode steps of `qwen2.5-1.5b` on a GPU machine, and what each kind of kernel costs in them.

    python3 kernels/bench_step.py [--batches 8,32,64] [--context 256] [--candidates DIR] [--json FILE]

A step is the chain of kernels that a decode plan launches, captured as one graph with programmatic
dependent launch, over distinct weights and KV pages of 28 layers. Per batch size: the time of the step;
for each kind of kernel the time that leaving it out saves; and for each artifact of `--candidates`
(a folder as `artifacts/sm90`) that fulfils the contract of a kernel of the step, the time of the step
with it. Single kernels' rates do not predict a step: edges and co-residency decide. Nothing is checked
here; that is `oxide-lab qualify`'s business.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from check_on_gpu import STORE, Kernel, scratch
from driver import Driver
from oracle import Sizes, random_bf16
from oracle_attention import TABLE_STRIDE
from oracle_sampling import GREEDY, ROW

LAYERS, DIM, QKV, ATTN, FFN, VOCAB, KNOWN, CONTEXT = 28, 1536, 2048, 1536, 8960, 151936, 151665, 32768
HEADS = "q12_kv2_d128_p16"
PAGE_BYTES, PAGE_TOKENS = 16 * 2 * 128 * 2, 16
BOUNDS = (8, 16, 32, 64, 128, 256)

LAYER = ("norm", "qkv", "rope_append", "attend", "o", "norm", "gate_up", "down")
LAST = ("take_rows", "norm_rows", "head", "sample")
ORDER = [("embed", 0), *((kind, layer) for layer in range(LAYERS) for kind in LAYER), *((kind, 0) for kind in LAST)]
"""Kinds and layers in the order of launches."""


def step_names(batch):
    """Names of a step's kernels by kind."""
    bound = next(b for b in BOUNDS if batch <= b)
    attend = "few" if batch <= 8 else "some" if batch <= 64 else "wide"
    return {
        "embed": f"embed_{VOCAB}x{DIM}", "norm": f"rms_norm_{DIM}_tokens", "qkv": f"skinny_qkv_{QKV}x{DIM}_m{bound}",
        "rope_append": f"rope_append_{HEADS}", "attend": f"attend_decode_{attend}_{HEADS}", "o": f"skinny_o_{DIM}x{ATTN}_m{bound}",
        "gate_up": f"skinny_gate_up_{2 * FFN}x{DIM}_m{bound}", "down": f"skinny_down_{DIM}x{FFN}_m{bound}",
        "take_rows": f"take_rows_{DIM}", "norm_rows": f"rms_norm_{DIM}_rows", "head": f"skinny_head_{VOCAB}x{DIM}_m{bound}",
        "sample": f"sample_{VOCAB}_{KNOWN}",
    }


class Store:
    """Manifests of a folder by name, loaded on demand."""

    def __init__(self, driver, folder):
        self.driver, self.folder, self.loaded = driver, folder, {}
        self.manifests = {m["name"]: m for m in (json.loads(p.read_text()) for p in sorted(folder.glob("*.json")))}

    def kernel(self, name):
        """A loaded kernel."""
        if name not in self.loaded:
            manifest = self.manifests[name]
            self.loaded[name] = Kernel(self.driver, manifest, (self.folder / f"{manifest['sha256']}.cubin").read_bytes())
        return self.loaded[name]


class Step:
    """Buffers of a decode step at one batch size."""

    def __init__(self, driver, batch, context, rng):
        self.driver, self.rng, self.batch, self.owned = driver, rng, batch, []
        self.pages = -(-context // PAGE_TOKENS)
        self.sizes = Sizes(batch, batch, batch, self.pages * batch)
        self.noise = self.put(random_bf16(rng, (64 << 20,), 0.03))
        self.noise_bytes, self.noise_at = 128 << 20, 0
        matrices = {"qkv": QKV * DIM, "o": DIM * ATTN, "gate_up": 2 * FFN * DIM, "down": DIM * FFN}
        self.weights = [{kind: self.random(2 * count) for kind, count in matrices.items()} for _ in range(LAYERS)]
        self.planes = [[self.random(self.pages * batch * PAGE_BYTES) for _ in "kv"] for _ in range(LAYERS)]
        self.table, self.gain, self.bias = self.random(2 * VOCAB * DIM), self.random(2 * DIM), self.random(2 * QKV)
        self.rope = self.put(rng.normal(size=(CONTEXT, 128)).astype(np.float32))
        widths = {"stream": DIM, "normed": DIM, "qkv_row": QKV, "q": ATTN, "attended": ATTN, "hidden": FFN, "taken": DIM}
        self.at = {name: self.random(2 * width * batch) for name, width in widths.items()}
        self.at["logits"] = self.put(rng.normal(0, 3, (batch, VOCAB)).astype(np.float32))
        self.inputs = self.make_inputs(context)
        self.scratch = {}

    def put(self, array):
        """A device copy."""
        address = self.driver.allocate(array.nbytes)
        self.driver.write(address, array)
        self.owned.append(address)
        return address

    def random(self, size):
        """Memory of noise."""
        address, at = self.driver.allocate(size), 0
        self.owned.append(address)
        while at < size:
            start = self.noise_at % (self.noise_bytes // 2)
            part = min(size - at, self.noise_bytes // 2)
            self.driver.copy(address + at, self.noise + start, part)
            at, self.noise_at = at + part, self.noise_at + 4096 * 37
        return address

    def make_inputs(self, context):
        """The slots of a greedy step at one context length."""
        batch, zero = self.batch, np.zeros(self.batch + 1, np.uint32)
        tables = np.zeros((batch, TABLE_STRIDE), np.uint32)
        tables[:, :self.pages] = self.rng.permutation(self.sizes.kv_pages).reshape(batch, self.pages)
        last = context - 1
        slots = tables[:, last // PAGE_TOKENS] * PAGE_TOKENS + last % PAGE_TOKENS
        arrays = {name: zero for name in ("bias_starts", "bias_ids", "bias_values", "history_starts", "history_ids", "history_counts")}
        arrays |= {
            "token_ids": self.rng.integers(0, KNOWN, batch).astype(np.uint32), "token_sources": np.full(batch, 0xFFFFFFFF, np.uint32),
            "positions": np.full(batch, last, np.uint32), "kv_slots": slots.astype(np.uint32), "kv_lens": np.full(batch, context, np.uint32),
            "block_tables": tables, "logit_rows": np.arange(batch, dtype=np.uint32), "query_starts": np.arange(batch + 1, dtype=np.uint32),
            "sampling": np.array([GREEDY] * batch, ROW).view(np.uint32), "mask": np.zeros((batch, -(-VOCAB // 32)), np.uint32),
        }
        inputs = {f"input.{name}": self.put(array) for name, array in arrays.items()}
        outputs = ("sampled_ids", "sampled_logprobs", "top_ids", "top_logprobs")
        return inputs | {f"output.{name}": self.put(np.zeros(256 * 20, np.uint32)) for name in outputs}

    def operands(self, kind, layer):
        """Addresses of a kernel's roles."""
        at, weights, planes = self.at, self.weights[layer], dict(zip(("k_plane", "v_plane"), self.planes[layer]))
        return self.inputs | {
            "embed": {"weight": self.table, "out": at["stream"]},
            "norm": {"x": at["stream"], "norm_weight": self.gain, "out": at["normed"]},
            "qkv": {"x": at["normed"], "weight": weights["qkv"], "bias": self.bias, "out": at["qkv_row"]},
            "rope_append": planes | {"rope_table": self.rope, "x": at["qkv_row"], "out": at["q"]},
            "attend": planes | {"x": at["q"], "out": at["attended"]},
            "o": {"x": at["attended"], "weight": weights["o"], "residual": at["stream"], "out": at["stream"]},
            "gate_up": {"x": at["normed"], "weight": weights["gate_up"], "out": at["hidden"]},
            "down": {"x": at["hidden"], "weight": weights["down"], "residual": at["stream"], "out": at["stream"]},
            "take_rows": {"x": at["stream"], "out": at["taken"]},
            "norm_rows": {"x": at["taken"], "norm_weight": self.gain, "out": at["normed"]},
            "head": {"x": at["normed"], "weight": self.table, "out": at["logits"]},
            "sample": {"x": at["logits"]},
        }[kind]

    def launcher(self, kernel, kind, layer):
        """One launch of the chain."""
        name = kernel.manifest["name"]
        if name not in self.scratch:
            self.scratch[name] = {key: self.put(image) for key, image in scratch(kernel.manifest, self.sizes).items()}
        return kernel.launcher(self.operands(kind, layer) | self.scratch[name], self.sizes, self.sizes, kernel.manifest["pdl"])

    def time(self, kernels, without=()):
        """Microseconds of the step."""
        launches = [self.launcher(kernels[kind], kind, layer) for kind, layer in ORDER if kind not in without]
        graph = self.driver.graph(lambda: [launch() for launch in launches])
        for _ in range(3):
            self.driver.replay(graph)
        self.driver.synchronize()
        samples = [self.driver.microseconds(lambda: self.driver.replay(graph)) for _ in range(15)]
        self.driver.destroy(graph)
        return round(statistics.median(samples), 1)

    def free(self):
        """Returns all memory."""
        for address in self.owned:
            self.driver.free(address)


def kind_of(contract, kernels):
    """The kind of a step's kernel that computes a contract."""
    return next((kind for kind, kernel in kernels.items() if kernel.manifest["contract"] == contract), None)


def serves(manifest, batch, current):
    """Whether a candidate is meant for this batch: projections are made for one class each."""
    limits = next(limits for limits in manifest["domain"].values() if limits["max"] != 0xFFFFFFFF)
    meant = "linear" not in manifest["contract"]["op"] or manifest["domain"] == current["domain"]
    return meant and limits["min"] <= batch <= limits["max"]


def try_candidate(step, kernels, kind, full):
    """The record of a step with one kernel exchanged."""
    time = step.time(kernels)
    record = {"kind": kind, "name": kernels[kind].manifest["name"], "step_us": time, "saved_us": round(full - time, 1)}
    print(f"  {kind:12s} {record['name']:60s} {time:8.1f} us, saves {record['saved_us']:6.1f}", flush=True)
    return record


def time_together(step, kernels, others, candidates):
    """The record of a step with the best candidate of every kind; `None` if fewer than two kinds have one that saves time."""
    rising = sorted((found for found in candidates if found["saved_us"] > 0), key=lambda found: found["saved_us"])
    best = {found["kind"]: found["name"] for found in rising}
    if len(best) < 2:
        return None
    time = step.time(kernels | {kind: others.kernel(name) for kind, name in best.items()})
    print(f"  together {time:8.1f} us:", *best.values(), flush=True)
    return {"names": list(best.values()), "step_us": time}


def bench(driver, batch, args, rng):
    """The record of one batch size."""
    store = Store(driver, STORE)
    kernels = {kind: store.kernel(name) for kind, name in step_names(batch).items()}
    step = Step(driver, batch, args.context, rng)
    full = step.time(kernels)
    record = {"batch": batch, "context": args.context, "step_us": full, "saved_without_us": {}, "candidates": []}
    print(f"batch {batch}: {full} us", flush=True)
    if not args.no_ablation:
        record["saved_without_us"] = {kind: round(full - step.time(kernels, {kind}), 1) for kind in kernels}
        print("  saved without:", record["saved_without_us"], flush=True)
    others = Store(driver, args.candidates) if args.candidates else None
    for name, manifest in sorted(others.manifests.items()) if others else ():
        kind = kind_of(manifest["contract"], kernels)
        if kind and serves(manifest, batch, kernels[kind].manifest):
            record["candidates"].append(try_candidate(step, kernels | {kind: others.kernel(name)}, kind, full))
    record["together"] = time_together(step, kernels, others, record["candidates"])
    step.free()
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--candidates", type=Path, metavar="DIR", help="artifacts to try in the step, one at a time")
    parser.add_argument("--no-ablation", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver, rng = Driver(), np.random.default_rng(7)
    records = [bench(driver, int(batch), args, rng) for batch in args.batches.split(",")]
    if args.json:
        args.json.write_text(json.dumps({"machine": driver.identity(), "steps": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
