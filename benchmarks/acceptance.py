"""Measures the acceptance length of drafters on prompt sets: micro, greedy, chain, by depth; looping answers separately.

    python benchmarks/acceptance.py --data FOLDER --sets mt_bench,humaneval,gsm8k --drafter A --drafter B --json OUT

The target answers the first turn of every prompt greedily (stops honoured). Each drafter then drafts from every position of
those answers, which gives what a speculative run accepts at every depth (a test checks that this equals the engine's own
count). Standard errors treat answers as the independent samples; drafters are compared answer by answer.
`--context FILE` puts a document before each prompt, to measure acceptance in a long context.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fledge import LLM, SamplingParams
from fledge.bench.loops import is_looping
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drift.metrics import Count, acceptance_length, length_ratio, walk
from fledge.drift.rollout import roll_out
from fledge.drift.texts import in_groups, read_texts
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sources import resolve
from fledge.speculation.stats import AcceptanceStats

DEPTHS = (3, 5, 7)
TOKENS_AT_ONCE = 1 << 13


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--context", type=Path, help="a text put before each prompt")
    parser.add_argument("--context-tokens", type=int, default=6000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--commit", help="commit of the code, if there is no git")
    parser.add_argument("--answers", type=Path, help="the target's answers: read from here if it exists, else written")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sets = {}
    for name in args.sets.split(","):
        rows = [json.loads(line) for line in (args.data / f"{name}.jsonl").read_text().splitlines()]
        sets[name] = [row["turns"][0] for row in rows[: args.limit]]
    answers = kept_answers(args, sets)
    decoder = load_decoder(resolve(args.model), torch.float32, args.device)
    drafters = {folder: load_drafter(folder, decoder.config).to(args.device) for folder in args.drafter}
    figures: dict[str, dict[str, object]] = {folder: {} for folder in drafters}
    for name, texts in answers.items():
        for folder, found in measure(decoder, drafters, texts).items():
            figures[folder][name] = found
            print(f"{Path(folder).name:28s} {name:10s} depth 3/5/7: {shown(found)}", flush=True)
    if args.json:
        looping = {name: sum(is_looping(tokens[start:]) for tokens, start in texts) for name, texts in answers.items()}
        write_json(
            args.json,
            {
                "model": args.model,
                "max_tokens": args.max_tokens,
                "prompts": {name: len(texts) for name, texts in answers.items()},
                "looping_answers": looping,
                "context": {"file": args.context.name, "tokens": args.context_tokens} if args.context else None,
                "definition": "micro: 1 + accepted / steps; greedy chain; first turn; stops honoured",
                "drafters": {Path(folder).name: result for folder, result in figures.items()},
                "provenance": provenance([prompt for prompts in sets.values() for prompt in prompts])
                | ({"commit": args.commit} if args.commit else {}),
            },
        )


def measure(
    decoder: Decoder, drafters: Mapping[str, EagleDrafter], texts: Sequence[tuple[list[int], int]]
) -> dict[str, dict[str, Any]]:
    """Figures of each drafter over all answers, looping answers and the others, by depth. `texts`: as `answer` returns them."""
    counts = {name: {"all": stats(), "looping": stats(), "others": stats()} for name in drafters}
    by_answer: dict[str, dict[int, list[Count]]] = {name: {depth: [] for depth in DEPTHS} for name in drafters}
    for group in in_groups([len(tokens) for tokens, _ in texts], TOKENS_AT_ONCE):
        chosen = [texts[index] for index in group]
        loops = [is_looping(tokens[start:]) for tokens, start in chosen]
        read = None
        for name, drafter in drafters.items():
            read = read or read_texts(decoder, chosen, drafter.config.aux_layer_ids)
            drafter.share(decoder.embed_tokens, decoder.lm_head)
            rollout = roll_out(drafter, read, max(DEPTHS), probe=False)
            rows_of_text = torch.bincount(rollout.text_M, minlength=len(read)).tolist()
            for loop, matched in zip(loops, torch.tensor(rollout.matched_M).split(rows_of_text), strict=True):
                for depth in DEPTHS:
                    one = walk(matched.tolist(), depth)
                    by_answer[name][depth].append(Count(one.accepted, one.steps))
                    counts[name]["all"][depth].merge(one)
                    counts[name]["looping" if loop else "others"][depth].merge(one)
    figures: dict[str, dict[str, Any]] = {}
    for name in drafters:
        figures[name] = {
            kind: {
                depth: {"acceptance_length": one.acceptance_length, "by_position": one.unconditional_rates, "steps": one.steps}
                for depth, one in by_depth.items()
            }
            for kind, by_depth in counts[name].items()
        }
        for depth, one in figures[name]["all"].items():
            one["standard_error"] = acceptance_length(by_answer[name][depth]).error
            one["over"] = {
                Path(other).name: length_ratio(by_answer[name][depth], by_answer[other][depth])._asdict()
                for other in drafters
                if other != name
            }
    return figures


def shown(found: Mapping[str, Any]) -> str:
    return "   ".join(
        f"{kind} " + "/".join(f"{found[kind][depth]['acceptance_length']:.2f}" for depth in DEPTHS)
        for kind in ("all", "others", "looping")
    )


def stats() -> dict[int, AcceptanceStats]:
    return {depth: AcceptanceStats() for depth in DEPTHS}


def kept_answers(args: argparse.Namespace, sets: dict[str, list[str]]) -> dict[str, list[tuple[list[int], int]]]:
    """The target's answers, from the file of `--answers` if it exists: they do not depend on the drafter."""
    question = json.loads(json.dumps([args.model, args.max_tokens, str(args.context), args.context_tokens, sets]))
    if args.answers and args.answers.exists():
        kept = json.loads(args.answers.read_text())
        if kept["question"] != question:
            raise SystemExit(f"{args.answers} holds answers to other prompts or settings; name another file")
        return kept["answers"]
    answers = answer(args, sets)
    if args.answers:
        write_json(args.answers, {"question": question, "answers": answers})
    return answers


def answer(args: argparse.Namespace, sets: dict[str, list[str]]) -> dict[str, list[tuple[list[int], int]]]:
    """Answers all prompts. Returns per set a list of (prompt and answer tokens, index where the answer starts)."""
    llm = LLM(args.model, "none", max_num_seqs=16, device=args.device)
    document = ""
    if args.context:
        ids = llm.tokenizer.encode(args.context.read_text())[: args.context_tokens]
        document = llm.tokenizer.decode(ids) + "\n\n"
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    answered = {}
    for name, prompts in sets.items():
        began = time.time()
        encoded = [llm.chat_prompt([{"role": "user", "content": document + prompt}]) for prompt in prompts]
        completions = llm.generate(encoded, params)
        answered[name] = [(prompt + done.token_ids, len(prompt)) for prompt, done in zip(encoded, completions, strict=True)]
        count = sum(len(done.token_ids) for done in completions)
        print(f"{name}: {len(prompts)} answers, {count} tokens in {time.time() - began:.0f} s", flush=True)
    return answered


if __name__ == "__main__":
    main()
