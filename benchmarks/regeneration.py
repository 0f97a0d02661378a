"""Measures `fledge regenerate` end to end: answer tokens/s from the start of the command to the last line written.

    python benchmarks/regeneration.py --prompts prompts.jsonl --count 20000 --max-tokens 320 --json figures.json
    python benchmarks/regeneration.py --decoder --checked 16     # also the decoder alone, and whether it is right

It runs the command's own function with the command's settings, including loading, rendering, detokenisation, loop detection and
JSON. `--decoder` then gives the first turns of the same prompts to the generator alone: the difference is the host's cost.
`--checked` runs greedy answers through the plain network: where its choice differs, the two logits must be a tie in bf16.
Without a file of prompts, questions are generated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

from fledge import sources
from fledge.engine.build import Speculation
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.offline import AnswerGenerator, answer_generator
from fledge.models.decoder import Decoder, causal_attend
from fledge.tokenizer import Tokenizer
from fledge.training.datagen.prompts import read_prompts
from fledge.training.datagen.regenerate import regenerate

ASKS = (
    "Explain {a} to a {who}, with two examples and one common mistake.",
    "Write a Python function that has to do with {a}. Describe its arguments, its result and its edge cases.",
    "Compare {a} and {b}. Which would you choose for a {who}, and why? Answer in a few paragraphs.",
    "A {who} has 24 boxes for {a} and gives away a third of them, then buys 7 more for {b}. How many are left? Show the steps.",
    "Write a short story in which a {who} learns something about {a} by way of {b}.",
    "Give me a plan for a week in which a {who} studies {a} in the morning and {b} in the evening.",
)
THINGS = [
    "sorting algorithms",
    "photosynthesis",
    "the French Revolution",
    "binary search trees",
    "bread baking",
    "compound interest",
    "plate tectonics",
    "string formatting",
    "chess openings",
    "vaccines",
    "regular expressions",
    "jazz harmony",
    "prime numbers",
    "urban planning",
    "recursion",
    "bird migration",
    "the water cycle",
    "supply and demand",
    "unit tests",
    "haiku",
]
PEOPLE = ["student", "nurse", "retired teacher", "software engineer", "ten-year-old", "journalist", "gardener", "museum guide"]
# In bf16, logits between 16 and 32 have a spacing of 1/8; both paths may be off by one such step.
TIE = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or built-in name")
    parser.add_argument("--prompts", type=Path, help="JSON lines, as the command reads them; default: generated questions")
    parser.add_argument("--count", type=int, default=20_000, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--drafter", default="none", help="as for the command")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--processes", type=int, help="worker processes; default: as the command decides")
    parser.add_argument("--out", type=Path, help="keep the answers in this file (must not exist); default: they are deleted")
    parser.add_argument("--decoder", action="store_true", help="also measure the generator alone")
    parser.add_argument("--checked", type=int, default=0, help="greedy answers compared with the plain network")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--commit", help="commit of the code; default: git's")
    return parser.parse_args()


def made_up(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        parts = rng.sample(ASKS, rng.randint(2, 6))
        asks.append(
            "\n".join(part.format(a=rng.choice(THINGS), b=rng.choice(THINGS), who=rng.choice(PEOPLE)) for part in parts)
        )
    return asks


def end_to_end(
    generator: AnswerGenerator, tokenizer: Tokenizer, prompts: Path, out: Path, args: argparse.Namespace, started: float
) -> dict[str, object]:
    load_seconds = time.monotonic() - started
    report = regenerate(
        generator,
        tokenizer,
        prompts,
        out,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        limit=args.count,
        model=args.model,
        processes=args.processes,
        started=started,
    )
    print(report)
    with out.open(encoding="utf-8") as file:
        written = [json.loads(line) for line in file]
    turns = [turn for conversation in written for turn in conversation["turns_ids"]]
    figures: dict[str, object] = {
        "concurrency": generator.concurrency,
        "answer_tokens_per_s": report.tokens_per_second,
        "answer_tokens_per_s_after_warm_up": report.warm_tokens_per_second,
        "seconds": report.seconds,
        "load_seconds": load_seconds,
        "warm_up_seconds": report.warm_up_seconds,
        "conversations": report.conversations,
        "answers": report.answers,
        "answer_tokens": report.answer_tokens,
        "mean_prompt_tokens": sum(len(turn["prompt_ids"]) for turn in turns) / len(turns),
        "mean_answer_tokens": report.answer_tokens / report.answers,
        "looping": report.looping,
        "cut_off": report.cut_off,
        # The file's contents must match the report.
        "file_agrees": len({conversation["id"] for conversation in written}) == report.conversations
        and sum(len(turn["answer_ids"]) for turn in turns) == report.answer_tokens,
    }
    return figures


def decoder_alone(generator: AnswerGenerator, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, object]:
    """Measures the generator alone, from token ids to token ids; everything is loaded and captured before."""
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    num_tokens = 0
    started = time.perf_counter()
    for _, tokens, _ in generator.generate(prompts, **options):
        num_tokens += len(tokens)
    seconds = time.perf_counter() - started
    return {
        "decoder_answer_tokens_per_s": num_tokens / seconds,
        "decoder_answers": len(prompts),
        "decoder_mean_prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "decoder_mean_answer_tokens": num_tokens / len(prompts),
    }


def first_turns(path: Path, tokenizer: Tokenizer, args: argparse.Namespace, longest: int) -> list[list[int]]:
    found = []
    for prompt in islice(read_prompts(path), args.count):
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        found.append(tokenizer.apply_chat_template([*system, {"role": "user", "content": prompt.turns[0]}]))
    return [ids for ids in found if len(ids) + args.max_tokens <= longest]


@torch.inference_mode()
def check(generator: AnswerGenerator, decoder: Decoder, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
    """Runs each answer through the plain network, which must choose the same tokens except at ties."""
    device = decoder.norm.weight.device
    widest, differing, total = 0.0, 0, 0
    for index, tokens, _ in generator.generate(prompts, max_tokens=max_tokens):
        text = torch.tensor(prompts[index] + tokens[:-1], device=device)
        hidden, _ = decoder(text, torch.arange(len(text), device=device), causal_attend())
        logits = decoder.logits(hidden[len(prompts[index]) - 1 :]).float()
        said = torch.tensor(tokens, device=device)
        gaps = logits.max(-1).values - logits.gather(-1, said[:, None])[:, 0]
        others = (gaps > 0).nonzero()[:, 0].tolist()
        total, differing = total + len(tokens), differing + len(others)
        widest = max(widest, float(gaps.max()))
        if others:
            print(f"  prompt {index}: first differs at token {others[0]} of {len(tokens)}, gap {gaps[others[0]]:.4f}")
    return {"checked_tokens": total, "differing_tokens": differing, "widest_gap": widest, "ties_only": widest <= TIE}


def provenance(args: argparse.Namespace, prompts: Path) -> dict[str, object]:
    commit = args.commit
    if commit is None:
        try:
            found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
            commit = found.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    return {
        "command": " ".join(sys.argv),
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": args.model,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> None:
    started = time.monotonic()
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = args.prompts, args.out or Path(folder) / "answers.jsonl"
        if out.exists():
            sys.exit(f"{out} exists: continuing a run would measure only a part of it; name another file")
        if prompts is None:
            prompts = Path(folder) / "prompts.jsonl"
            lines = (json.dumps({"id": str(n), "prompt": text}) for n, text in enumerate(made_up(args.count, args.seed)))
            prompts.write_text("\n".join(lines) + "\n")
        tokenizer = Tokenizer(sources.resolve(args.model))
        speculation = Speculation(args.drafter, args.depth)
        generator = answer_generator(args.model, device=args.device, concurrency=args.concurrency, speculation=speculation)
        figures = end_to_end(generator, tokenizer, prompts, out, args, started)
        if args.decoder or args.checked:
            turns = first_turns(prompts, tokenizer, args, generator.max_model_len)
        if args.decoder:
            figures |= decoder_alone(generator, turns, args)
        if args.checked and isinstance(generator.engine.executor, CudaGraphExecutor):
            chosen = random.Random(args.seed).sample(turns, min(args.checked, len(turns)))
            figures |= check(generator, generator.engine.decoder, chosen, min(args.max_tokens, 256))
        if torch.cuda.is_available():
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        figures |= provenance(args, prompts)
    for name, value in figures.items():
        print(f"{name:>34}  {value:,.4g}" if isinstance(value, float) else f"{name:>34}  {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if not figures["file_agrees"]:
        sys.exit("the contents of the file do not match the report")
    if not figures.get("ties_only", True):
        sys.exit("the answers differ from the plain network's by more than a tie")


if __name__ == "__main__":
    main()
