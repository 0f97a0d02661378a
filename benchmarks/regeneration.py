"""Offline generation on one device: answer tokens/s, how full the batch was, where the time went, and whether it is right.

    python benchmarks/regeneration.py --model smollm2-135m --prompts 50000 --max-tokens 512
    python benchmarks/regeneration.py --model FOLDER --prompts-file prompts.jsonl --temperature 0.8 --top-p 0.95

A prompts file has one JSON object a line, with `messages`, `prompt` or `text`. Without one, questions are made up.
The check runs 16 greedy answers through the plain network: where its choice differs, the two logits must be a tie in bf16.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from fledge import sources
from fledge.engine.offline import AnswerGenerator, DeviceAnswers, answer_generator
from fledge.models.decoder import Decoder, causal_attend
from fledge.tokenizer import Tokenizer

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
# Logits of about 16 to 32 are an eighth apart in bf16; both paths may be off by one such step.
TIE = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or built-in name")
    parser.add_argument("--prompts", type=int, default=50_000, help="how many; a file with fewer is repeated")
    parser.add_argument("--prompts-file")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--checked", type=int, default=16, help="greedy answers compared with the plain network; 0: none")
    parser.add_argument("--json", help="also write the figures to this file")
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


def read_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    def ids(messages: list[dict[str, str]]) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)

    if args.prompts_file is None:
        distinct = made_up(min(args.prompts, 5000), args.seed)
        prompts = [ids([{"role": "user", "content": text}]) for text in distinct]
    else:
        prompts = []
        for line in Path(args.prompts_file).read_text().splitlines()[: args.prompts]:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row.get("prompt") or row["text"]}]
            prompts.append(ids([message for message in messages if message["role"] != "assistant"]))
    prompts = [prompt for prompt in prompts if len(prompt) < args.max_model_len]
    return [prompts[index % len(prompts)] for index in range(args.prompts)]


def measure(generator: AnswerGenerator, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, object]:
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    started = time.perf_counter()
    for _ in generator.generate(prompts[:64], **(options | {"max_tokens": 8})):
        pass  # graphs are recorded and kernels compiled
    warm_up = time.perf_counter() - started
    on_device = isinstance(generator, DeviceAnswers)
    if on_device:
        batch = generator.batch
        batch.progress, batch.timer.spans = type(batch.progress)(), type(batch.timer.spans)(list)
    num_tokens = stops = 0
    started = time.perf_counter()
    for _, tokens, reason in generator.generate(prompts, **options):
        num_tokens += len(tokens)
        stops += reason == "stop"
    seconds = time.perf_counter() - started
    figures: dict[str, object] = {
        "answer_tokens_per_s": num_tokens / seconds,
        "answer_tokens": num_tokens,
        "seconds": seconds,
        "warm_up_seconds": warm_up,
        "prompts": len(prompts),
        "mean_prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "mean_answer_tokens": num_tokens / len(prompts),
        "ended_by_stop": stops / len(prompts),
    }
    if on_device:
        progress = generator.batch.progress
        shares = {f"{name}_share": spent / seconds for name, spent in generator.batch.timer.seconds().items()}
        figures |= {
            "concurrency": generator.batch.config.max_num_seqs,
            "occupancy": progress.occupancy,
            "steps": progress.steps,
            "prompt_passes": progress.prompt_passes,
            **shares,
            "idle_share": 1 - sum(shares.values()),
            "ms_per_step": 1e3 * seconds * shares["decode_share"] / progress.steps,
        }
    if torch.cuda.is_available():
        figures["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


@torch.inference_mode()
def check(generator: AnswerGenerator, decoder: Decoder, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
    """Feeds each answer to the plain network, which must have chosen the same tokens, but for ties."""
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


def commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def main() -> None:
    args = arguments()
    folder = sources.resolve(args.model)
    prompts = read_prompts(args, Tokenizer(folder))
    generator = answer_generator(
        str(folder),
        device=args.device,
        concurrency=args.concurrency,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        profile=True,
    )
    figures = measure(generator, prompts, args)
    if args.checked and isinstance(generator, DeviceAnswers):
        chosen = random.Random(args.seed).sample(prompts, min(args.checked, len(prompts)))
        figures |= check(generator, generator.batch.decoder, chosen, min(args.max_tokens, 256))
    figures |= {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
    }
    for name, value in figures.items():
        print(f"{name:>22}  {value:,.4g}" if isinstance(value, float) else f"{name:>22}  {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if not figures.get("ties_only", True):
        sys.exit("the answers differ from the plain network's by more than a tie")


if __name__ == "__main__":
    main()
