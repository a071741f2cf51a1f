#!/usr/bin/env python3
"""Times attention and sampling artifacts on a GPU machine at the shapes that PERFORMANCE records speak of.

    python3 kernels/bench_attention.py [--only PATTERN] [--json FILE]

Decode: every sequence of one length, and a mix of lengths, over rotating sets of random pages so that
nothing is found in the L2 cache. Mixed: single prompts, decode rows beside a prompt, many short chunks.
Sampling: greedy rows and nucleus sampling over normal logits. Times are microseconds a launch in a
chained graph, plain and with PDL; correctness is `check_on_gpu.py`'s business.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from check_on_gpu import STORE, Kernel, _chained, scratch
from driver import Driver
from oracle import Sizes, random_bf16
from oracle_attention import TABLE_STRIDE
from oracle_sampling import GREEDY, ROW

POOL_BYTES, COLD_BYTES, SETS_MAX = 2 << 30, 256 << 20, 64
DECODE_SEQS, DECODE_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 2048, 8192)
FLASHINFER = {1: (7.2, 8.9, 11.1), 8: (9.4, 14.1, 27.4), 32: (14.4, 27.6, 72.6), 64: (19.4, 43.8, 132.5), 128: (24.4, 69.5, 246), 256: (44.1, 131.6, 482.7)}
"""Microseconds of FlashInfer 0.6.14 at the three lengths; 12/2 heads of 128."""


def mixed_cases():
    """Name, cached lengths and chunks."""
    yield from ((f"prefill {n}", [n], [n]) for n in (512, 1024, 2048, 4096, 8192))
    yield "64 decodes at 1024 + 512 prefill", [1024] * 64 + [512], [1] * 64 + [512]
    yield "16 chunks of 64 at 1024", [1024] * 16, [64] * 16
    yield "4 prompts of 2048", [2048] * 4, [2048] * 4
    yield "256 decodes at 512", [512] * 256, [1] * 256
    yield "chunk of 512 at 8192", [8192], [512]


class Bench:
    """A driver with a page pool for one head geometry."""

    def __init__(self):
        self.driver = Driver()
        self.rng = np.random.default_rng(7)
        self.planes = [self.driver.allocate(POOL_BYTES) for _ in "kv"]
        block = random_bf16(self.rng, (32 << 20,))
        for plane in self.planes:
            self.driver.write(plane, block)
            for at in range(block.nbytes, POOL_BYTES, block.nbytes):
                self.driver.copy(plane + at, plane, block.nbytes)

    def put(self, array):
        """A device copy."""
        address = self.driver.allocate(array.nbytes)
        self.driver.write(address, array)
        return address

    def chained(self, kernel, addresses, sizes):
        """Plain and PDL times over rotating operands."""
        launchers = lambda pdl: [kernel.launcher(a, sizes, sizes, pdl) for a in addresses]
        return {"us": round(_chained(self.driver, launchers(False)), 2), "us_pdl": round(_chained(self.driver, launchers(True)), 2)}

    def attend(self, kernel, lengths, chunks):
        """One step of the given sequences."""
        heads = kernel.manifest["contract"]["op"]["attend"]["heads"]
        page_bytes = heads["page_tokens"] * heads["kv"] * heads["dim"] * 2
        pool = POOL_BYTES // page_bytes
        needed = [-(-n // heads["page_tokens"]) for n in lengths]
        sets = max(1, min(SETS_MAX, pool // sum(needed), -(-COLD_BYTES // (2 * sum(needed) * page_bytes))))
        sizes = Sizes(sum(chunks), len(lengths), len(lengths), pool)
        starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.uint32)
        width = heads["q"] * heads["dim"]
        common = {"x": self.put(random_bf16(self.rng, (sizes.tokens, width))), "out": self.driver.allocate(sizes.tokens * width * 2),
                  "k_plane": self.planes[0], "v_plane": self.planes[1], "input.query_starts": self.put(starts),
                  "input.kv_lens": self.put(np.array(lengths, np.uint32))}
        common |= {key: self.put(image) for key, image in scratch(kernel.manifest, sizes).items()}
        free = self.rng.permutation(pool).astype(np.uint32)
        rotating = []
        for index in range(sets):
            table, at = np.zeros((len(lengths), TABLE_STRIDE), np.uint32), index * sum(needed)
            for seq, count in enumerate(needed):
                table[seq, :count] = free[at:at + count]
                at += count
            rotating.append(common | {"input.block_tables": self.put(table)})
        times = self.chained(kernel, rotating, sizes)
        for address in {a for r in rotating for a in r.values()} - set(self.planes):
            self.driver.free(address)
        return times

    def sample(self, kernel, rows, row):
        """Rows of one kind of parameters over normal logits."""
        op = kernel.manifest["contract"]["op"]["sample"]
        sizes, words = Sizes(rows, rows, rows, 1), -(-op["vocab"] // 32)
        copies = max(2, min(16, -(-COLD_BYTES // (4 * rows * op["vocab"]))))
        logits = self.rng.normal(0, 3, (rows, op["vocab"])).astype(np.float32)
        parameters = np.array([row] * rows, ROW)
        parameters["seed"] = np.arange(rows)
        empty = np.zeros(rows + 1, np.uint32)
        common = {f"input.{name}": self.put(empty) for name in ("bias_starts", "bias_ids", "bias_values", "history_starts", "history_ids", "history_counts")}
        common |= {"input.sampling": self.put(parameters.view(np.uint32)), "input.mask": self.put(np.zeros((rows, words), np.uint32))}
        common |= {f"output.{name}": self.driver.allocate(rows * 80) for name in ("sampled_ids", "sampled_logprobs", "top_ids", "top_logprobs")}
        common |= {key: self.put(image) for key, image in scratch(kernel.manifest, sizes).items()}
        rotating = [common | {"x": self.put(logits)} for _ in range(copies)]
        times = self.chained(kernel, rotating, sizes)
        for address in {a for r in rotating for a in r.values()}:
            self.driver.free(address)
        return times


def decode_cases(limit):
    """Sequences, name and lengths."""
    for seqs in DECODE_SEQS:
        if seqs <= limit:
            yield from ((seqs, str(n), [n] * seqs) for n in DECODE_LENGTHS)
    if limit >= 64:
        rng = np.random.default_rng(5)
        yield 64, "mix 100-8192", [int(100 * (8192 / 100) ** rng.random()) for _ in range(64)]
        yield 64, "one 8192, 63 of 100", [8192] + [100] * 63


def bench_kernel(bench, kernel):
    """Records of one kernel."""
    manifest, records = kernel.manifest, []
    (name, op), = manifest["contract"]["op"].items()
    note = lambda record: (records.append(record), print(f"{manifest['name']:44s}", *(f"{k} {v}" for k, v in record.items()), flush=True))
    if name == "sample":
        nucleus = (0.7, 0.95, *GREEDY[2:])
        for rows in (1, 8, 32, 64, 128, 256):
            for label, row in (("greedy", GREEDY), ("nucleus", nucleus), ("top_k 50", (0.7, 1.0, 0.0, 50, *GREEDY[4:])),
                               ("logprobs 5", (*GREEDY[:7], 5, *GREEDY[8:]))):
                note({"case": label, "rows": rows} | bench.sample(kernel, rows, row))
        return records
    heads = op["heads"]
    if op["phase"] == "decode":
        for seqs, label, lengths in decode_cases(manifest["domain"]["seqs"]["max"]):
            record = {"case": label, "seqs": seqs} | bench.attend(kernel, lengths, [1] * seqs)
            record["gb_s"] = round(sum(lengths) * heads["kv"] * heads["dim"] * 4 / record["us"] / 1e3)
            if seqs in FLASHINFER and label.isdigit() and (heads["q"], heads["dim"]) == (12, 128):
                record["flashinfer_us"] = FLASHINFER[seqs][DECODE_LENGTHS.index(int(label))]
            note(record)
        return records
    for label, lengths, chunks in mixed_cases():
        if sum(chunks) <= manifest["domain"]["tokens"]["max"]:
            record = {"case": label} | bench.attend(kernel, lengths, chunks)
            work = sum(c * n - c * (c - 1) / 2 for n, c in zip(lengths, chunks))
            record["tflop_s"] = round(4 * heads["q"] * heads["dim"] * work / record["us"] / 1e6, 1)
            note(record)
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench, report = Bench(), {}
    for path in sorted(STORE.glob("*.json")):
        manifest = json.loads(path.read_text())
        (name, _), = manifest["contract"]["op"].items()
        if name in ("attend", "sample") and (not args.only or any(p in manifest["name"] for p in args.only)):
            code = path.with_suffix(".cubin").read_bytes()
            report[manifest["name"]] = {"sha256": manifest["sha256"], "cases": bench_kernel(bench, Kernel(bench.driver, manifest, code))}
    if args.json:
        args.json.write_text(json.dumps({"machine": bench.driver.identity(), "kernels": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
