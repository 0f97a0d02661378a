"""Acceptance length per data set, ours against real vLLM on CPU: the same drafter, prompts and greedy text.

    FLEDGE_VLLM_PYTHON=… python -m tests.interop.acceptance_table --data builtin more.jsonl --prompts 8 --out table.json

Prints a Markdown table; ends with code 1 where the two differ by more than one per cent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fledge import sources
from fledge.bench.datasets import load_items
from fledge.drafters import DEFAULTS, HERE
from fledge.tokenizer import Tokenizer
from tests.interop.runs import run_fledge, run_vllm

LARGEST_DIFFERENCE = 0.01


def main() -> int:
    options = _options()
    folder = sources.resolve(options.model)
    tokenizer = Tokenizer(folder)
    drafter = options.drafter or str(HERE / DEFAULTS[options.model])
    rows = []
    for data in options.data:
        items = load_items(data)
        chosen = items[:: max(1, len(items) // options.prompts)][: options.prompts]
        chats = [[{"role": "user", "content": item.turns[0]}] for item in chosen]
        prompts = [tokenizer.apply_chat_template(chat) for chat in chats]
        prompts = [prompt for prompt in prompts if len(prompt) + options.max_tokens < options.max_model_len]
        job = {
            "target": str(folder),
            "drafter": drafter,
            "prompts": prompts,
            "max_tokens": options.max_tokens,
            "depth": options.depth,
            "max_model_len": options.max_model_len,
            "ignore_eos": False,
        }
        with tempfile.TemporaryDirectory() as work:
            theirs = run_vllm(Path(work), job)
        ours = run_fledge(job)
        lengths = [1 + sum(run["accepted_at"]) / run["steps"] for run in (ours, theirs)]
        same = sum(a == b for a, b in zip(ours["token_ids"], theirs["token_ids"], strict=True))
        rows.append(
            {"data": Path(data).stem, "prompts": len(prompts), "same_text": same, "fledge": lengths[0], "vllm": lengths[1]}
        )
    print(
        f"Acceptance length at depth {options.depth}, {options.max_tokens} tokens, greedy, float32, vLLM {theirs['version']}\n"
    )
    print("| data set | prompts | same text | Fledge | vLLM | difference |\n|---|---|---|---|---|---|")
    for row in rows:
        row["difference"] = row["fledge"] / row["vllm"] - 1
        print("| {data} | {prompts} | {same_text} | {fledge:.3f} | {vllm:.3f} | {difference:+.2%} |".format(**row))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(abs(row["difference"]) > LARGEST_DIFFERENCE for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="")
    parser.add_argument("--data", nargs="+", default=["builtin"])
    parser.add_argument("--prompts", type=int, default=8, help="of each data set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
