#!/usr/bin/env python3
"""Greedy ids of a Hugging Face checkpoint by transformers, for prompts of random token ids.

    python3 reference_ids.py MODEL_DIR OUT.json [--lengths 16,100,1000,4096] [--tokens 32] [--seed 1] [--device cuda]

Writes the format of profiles/*/reference.json: per prompt the float32 ids, the gap between the two
largest logits of every step, the log-probability of each id, and the ids in bfloat16. TF32 is off. Needs torch and transformers.
"""

import argparse
import json
import platform
import random

import torch
import transformers
from transformers import AutoModelForCausalLM

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


@torch.no_grad()
def greedy(model, ids, steps):
    """Ids, gaps and log-probabilities of a greedy continuation, token by token with the KV cache."""
    device = next(model.parameters()).device
    out, gaps, logprobs, cache, current = [], [], [], None, torch.tensor([ids], device=device)
    for _ in range(steps):
        result = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        values, _ = result.logits[0, -1].float().topk(2)
        best = int((result.logits[0, -1].float() == values[0]).nonzero()[0, 0])
        out.append(best)
        gaps.append(round(float(values[0] - values[1]), 5))
        logprobs.append(round(float(values[0] - result.logits[0, -1].float().logsumexp(-1)), 5))
        current = torch.tensor([[best]], device=device)
    return out, gaps, logprobs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--lengths", default="16,100,1000,4096")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--known", type=int, help="ids are drawn below this [default: the vocabulary]")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = {}
    for kind in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=kind).to(args.device).eval()
        known = args.known or model.config.vocab_size
        rng.seed(args.seed)
        for length in map(int, args.lengths.split(",")):
            ids = [rng.randrange(known) for _ in range(length)]
            found, gaps, logprobs = greedy(model, ids, args.tokens)
            row = rows.setdefault(length, {"name": f"random-{length}", "prompt_ids": ids})
            if kind == torch.float32:
                row |= {"greedy_f32": found, "gap_f32": gaps, "logprob_f32": logprobs}
            else:
                row |= {"greedy_bf16": found, "gap_bf16": gaps}
        del model
    made_with = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__, "device": args.device}
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump({"model": args.model, "made_with": made_with, "prompts": list(rows.values())}, file)
    for row in rows.values():
        same = next((i for i, (a, b) in enumerate(zip(row["greedy_f32"], row["greedy_bf16"])) if a != b), None)
        print(row["name"], "smallest gap", min(row["gap_f32"]), "bf16 diverges at", same)


main()
