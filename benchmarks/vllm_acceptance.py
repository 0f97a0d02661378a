"""Compares acceptance length per data set with vLLM on a CPU: the same drafter, prompts, depth and greedy text.

    FLEDGE_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.vllm_acceptance --data data/eval/*.jsonl --out table.json

`make test-vllm` makes that environment. Prints a Markdown table; exits with code 1 if the two differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from fledge import sources
from fledge.bench.datasets import load_items
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.export import plain_folder
from fledge.drafters import DEFAULTS, HERE
from fledge.tokenizer import Tokenizer
from tests.interop.runs import run_all_on_vllm, run_fledge

LARGEST_DIFFERENCE = 0.01


def main() -> int:
    options = _options()
    jobs = {Path(data).stem: _job(options, data) for data in options.data}
    with tempfile.TemporaryDirectory() as work:
        theirs = run_all_on_vllm(Path(work), jobs)
    if failed := [f"{name}: {result['error']}" for name, result in theirs.items() if "error" in result]:
        print("\n".join(failed), file=sys.stderr)
        return 1
    rows = [_row(name, job, run_fledge(job), theirs[name]) for name, job in jobs.items()]
    version = next(iter(theirs.values()))["version"]
    print(f"Acceptance length at depth {options.depth}, {options.max_tokens} tokens, greedy, float32, vLLM {version}\n")
    print("| data set | prompts | same text | Fledge | vLLM | difference |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| {data} | {prompts} | {same_text} | {fledge:.3f} | {vllm:.3f} | {difference:+.2%} |".format(**row))
    if options.out:
        settings = {key: getattr(options, key) for key in ("model", "depth", "max_tokens", "max_model_len")}
        prompts = [prompt for job in jobs.values() for prompt in job["prompts"]]
        drafter = options.drafter or DEFAULTS[options.model]
        definition = "1 + accepted drafts / verifications, over all prompts of a data set together"
        record = {"acceptance_length": definition, "vllm": version, "drafter": drafter, **settings, "rows": rows}
        write_json(options.out, {**record, "provenance": provenance(prompts)})
    return int(any(abs(row["difference"]) > LARGEST_DIFFERENCE for row in rows))


def _job(options: argparse.Namespace, data: str) -> dict[str, Any]:
    folder = sources.resolve(options.model)
    tokenizer, items = Tokenizer(folder), load_items(data)
    chats = [[{"role": "user", "content": item.turns[0]}] for item in items]
    prompts = [tokenizer.apply_chat_template(chat) for chat in chats]
    prompts = [prompt for prompt in prompts if len(prompt) + options.max_tokens < options.max_model_len]
    return {
        "target": str(folder),
        "drafter": options.drafter or str(plain_folder(HERE / DEFAULTS[options.model])),
        "prompts": prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts],
        "max_tokens": options.max_tokens,
        "depth": options.depth,
        "max_model_len": options.max_model_len,
        "ignore_eos": False,
    }


def _row(name: str, job: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    fledge, vllm = (1 + sum(run["accepted_at"]) / run["steps"] for run in (ours, theirs))
    return {
        "data": name,
        "prompts": len(job["prompts"]),
        "same_text": sum(a == b for a, b in zip(ours["token_ids"], theirs["token_ids"], strict=True)),
        "fledge": fledge,
        "vllm": vllm,
        "difference": fledge / vllm - 1,
        "accepted_at": {"fledge": ours["accepted_at"], "vllm": theirs["accepted_at"]},
        "verifications": {"fledge": ours["steps"], "vllm": theirs["steps"]},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="", help="a folder; empty: the drafter shipped for the model")
    parser.add_argument("--data", nargs="+", default=["builtin"])
    parser.add_argument("--prompts", type=int, default=8, help="prompts per data set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
