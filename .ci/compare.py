"""Greedy ids of a bundle against a reference made by transformers (see profiles/oxide-tiny/reference.py).

    python compare.py OXIDE_RUN BUNDLE REFERENCE.json [GAP]

Equal ids are demanded up to the first step whose top two logits lie within GAP (0.05; 0.25 for BF16 arithmetic). Each prompt is run alone,
all of them together in one batch, and all of them again (a warm prefix cache) in the same process.
"""

import json
import subprocess
import sys
import tempfile

GAP = float(sys.argv[4]) if len(sys.argv) > 4 else 0.05


def binding(row):
    return next((i for i, gap in enumerate(row["gap_f32"]) if gap < GAP), len(row["gap_f32"]))


def generate(run, bundle, *args):
    command = [run, bundle, "generate", "--temperature", "0", "--ignore-eos", "--json", *args]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]


def check(name, how, row, ids):
    n = binding(row)
    if ids[:n] != row["greedy_f32"][:n]:
        at = next(i for i in range(n) if i >= len(ids) or ids[i] != row["greedy_f32"][i])
        sys.exit(f"{name} ({how}): id {at} differs: {ids[at:at + 3]} instead of {row['greedy_f32'][at:at + 3]}")
    return n


def main():
    run, bundle, path = sys.argv[1:4]
    rows = json.load(open(path, encoding="utf-8"))["prompts"]
    steps = len(rows[0]["greedy_f32"])
    bound = 0
    for row in rows:
        ids = ",".join(map(str, row["prompt_ids"]))
        (answer,) = generate(run, bundle, "--prompt-ids", ids, "--max-tokens", str(steps))
        bound += check(row["name"], "alone", row, answer["token_ids"])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        for row in rows + rows:
            f.write(json.dumps({"prompt_ids": row["prompt_ids"]}) + "\n")
        f.flush()
        answers = generate(run, bundle, "--prompts-file", f.name, "--max-tokens", str(steps))
    for row, answer in zip(rows + rows, answers, strict=True):
        check(row["name"], "in a batch", row, answer["token_ids"])
    print(f"{len(rows)} prompts, {bound} ids demanded of {steps * len(rows)}: equal alone and in a batch")


main()
