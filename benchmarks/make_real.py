"""Runs `fledge make` for a real target in a given time, then measures acceptance length on unseen prompts.

    python benchmarks/make_real.py smollm2-135m --seconds 1500 --prompts prompts.jsonl.gz --sets humaneval.jsonl,gsm8k.jsonl
        --out runs/smollm2 --json make-smollm2.json

`--twin` trains an EAGLE 3 drafter on the same batches. The target answers the first turn of every prompt greedily (stops
honoured), and drafters draft over those answers as in `acceptance.py`: micro, chain, standard errors over answers, looping
answers also separately. `--context FILE` repeats the first set's prompts after a long text.
Everything ends after `--seconds`. The JSON file is written after every part, so it has what was measured by then. If the time
for `fledge make` ends while it trains, the best drafter so far is measured. The same command continues a run.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from acceptance import DEPTHS, measure

from fledge.bench.loops import is_looping
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.devices import resolve_device
from fledge.sources import resolve
from fledge.tokenizer import Tokenizer
from fledge.training.journal import read_journal
from fledge.training.make import Interrupted, make
from fledge.training.targets.continuations import continuations

START_SECONDS = 20.0  # imports of torch and transformers, before the clock of `fledge make` starts
STOP_SECONDS = 30.0  # time that training gets to save its state after SIGTERM


class TimeOver(Exception):
    """Raised by the alarm at the end of `--seconds`."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, hub id, GGUF file or built-in name")
    parser.add_argument("--out", type=Path, required=True, help="folder of `fledge make`")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time for everything")
    parser.add_argument("--measure-seconds", type=float, default=150.0, help="part of it for acceptance on --sets")
    parser.add_argument("--prompts", type=Path, help="prompts to train on; default: the target writes them")
    parser.add_argument("--sets", default="", help="files of prompts to measure on, never trained on; with commas")
    parser.add_argument("--limit", type=int, default=80, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--context", type=Path, help="a text put before the first set's prompts, measured as another set")
    parser.add_argument("--context-tokens", type=int, default=6000)
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=FOLDER", help="another drafter to measure")
    parser.add_argument("--twin", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="commit of the code, if there is no git")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # set in the process that runs `fledge make`
    return parser.parse_args(words)


def run_make(args: argparse.Namespace, sets: Sequence[Path], seconds: float) -> int:
    """Runs `fledge make` in its own process, so that its memory is freed; stops it after `seconds`. Returns its exit code."""
    settings = {"hours": max(10.0, seconds - START_SECONDS) / 3600, "twin": args.twin, "device": args.device}
    paths = {"prompts": args.prompts and str(args.prompts), "decontaminate": [str(path) for path in sets]}
    words = [args.model, "--out", str(args.out), "--json", str(args.json), "--seconds", "0"]
    process = subprocess.Popen([sys.executable, __file__, *words, "--inside", json.dumps(settings | paths)])
    for wait, stop in ((seconds, process.terminate), (STOP_SECONDS, process.kill)):
        try:
            return process.wait(wait)
        except subprocess.TimeoutExpired:
            stop()
    return process.wait()


def make_inside(args: argparse.Namespace) -> None:
    settings: dict[str, Any] = json.loads(args.inside)
    settings["prompts"] = settings["prompts"] and Path(settings["prompts"])
    settings["decontaminate"] = [Path(path) for path in settings["decontaminate"]]

    def say(text: str) -> None:
        print(text, flush=True)
        with (args.out / "said.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    args.out.mkdir(parents=True, exist_ok=True)
    try:
        made = make(args.model, args.out, log=say, **settings)
    except Interrupted as error:
        sys.exit(str(error))
    if made is not None:
        write_json(args.out / "made.json", json.loads(json.dumps(asdict(made), default=str)))


def drafter_folders(args: argparse.Namespace) -> dict[str, Path]:
    """The drafters to measure: each finished one, or the best of an unfinished training, and those of `--drafter`."""
    run = args.out / "run"
    places = {
        "eagle3.1": [args.out / "drafter", run / "eagle3.1" / "best", run / "best"],
        "eagle3": [args.out / "twin", run / "eagle3" / "best"],
    }
    found = {name: next((p for p in paths if (p / "config.json").is_file()), None) for name, paths in places.items()}
    given = dict(text.split("=", 1) for text in args.drafter)
    return {name: Path(path) for name, path in (found | given).items() if path is not None}


def training_course(run: Path) -> dict[str, Any]:
    """Evaluations, speed and memory of each training in the run's folder."""
    course = {}
    for log in sorted([*run.glob("log.jsonl"), *run.glob("*/log.jsonl")]):
        lines = read_journal(log)
        steps = [line for line in lines if line["kind"] == "train"]
        names = ("step", "time", "acceptance_length", "standard_error", "rms")
        evaluations = [{name: line[name] for name in names} for line in lines if line["kind"] == "evaluation"]
        speeds = sorted(line["tokens_per_second"] for line in steps)
        last = {name: steps[-1].get(name) for name in ("step", "tokens", "epoch", "peak_memory_gib")} if steps else {}
        course[log.parent.name] = {"evaluations": evaluations, "tokens_per_second": speeds[len(speeds) // 2 :][:1], **last}
    return course


def prompt_sets(args: argparse.Namespace, sets: Sequence[Path], tokenizer: Tokenizer) -> Iterator[tuple[str, list[list[int]]]]:
    document = ""
    if args.context:
        document = tokenizer.decode(tokenizer.encode(args.context.read_text())[: args.context_tokens]) + "\n\n"
    for path, before in [*((path, "") for path in sets), *((path, document) for path in sets[:1] if document)]:
        asked = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()[: args.limit]]
        chats = [[{"role": "user", "content": before + text}] for text in asked]
        name = path.stem + (f", {args.context_tokens} tokens before it" if before else "")
        yield name, [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]


def measure_all(args: argparse.Namespace, sets: Sequence[Path], results: dict[str, Any]) -> None:
    """Measures set by set; each is added to the results and written to disk at once."""
    device, folder = resolve_device(args.device), resolve(args.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the same as in training
    tokenizer, decoder = Tokenizer(folder), load_decoder(folder, dtype, device)
    drafters = {
        name: load_drafter(path, decoder.config, dtype=dtype).to(device) for name, path in drafter_folders(args).items()
    }
    stops = tuple(dict.fromkeys([*decoder.config.eos_token_ids, *tokenizer.eos_token_ids]))
    for name, prompts in prompt_sets(args, sets, tokenizer):
        began = time.monotonic()
        answers = continuations(decoder, prompts, args.max_tokens, stops)
        texts = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
        results["sets"][name] = {
            "prompts": len(texts),
            "looping": sum(map(is_looping, answers)),
            "drafters": measure(decoder, drafters, texts),
            "seconds": time.monotonic() - began,
        }
        write_json(args.json, results)
        print(table(results), flush=True)


def table(results: dict[str, Any]) -> str:
    """A Markdown table of acceptance length ± standard error by depth, and the ratio to the EAGLE 3 twin, answer by answer."""
    lines = ["| set | drafter | " + " | ".join(f"depth {depth}" for depth in DEPTHS) + " | depth 5, no loops | over EAGLE 3 |"]
    lines.append("|---|---|" + "---:|" * (len(DEPTHS) + 2))
    for name, found in results["sets"].items():
        for drafter, figures in found["drafters"].items():
            whole, others = figures["all"], figures["others"][5]["acceptance_length"]
            cells = [f"{whole[d]['acceptance_length']:.2f} ± {whole[d]['standard_error'] or 0:.2f}" for d in DEPTHS]
            over = whole[5]["over"].get("eagle3")
            cells += [f"{others:.2f}", f"{over['value']:.3f} ± {over['error'] or 0:.3f}" if over else ""]
            asked = f"{name} ({found['prompts']}, {found['looping']} loop)"
            lines.append(f"| {asked} | {drafter} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    args, began = arguments(words), time.monotonic()
    if args.inside:
        make_inside(args)
        return
    sets = [Path(name) for name in args.sets.split(",") if name]
    where = provenance(map(str, sets)) | ({"commit": args.commit} if args.commit else {})
    results: dict[str, Any] = {"model": args.model, "max_tokens": args.max_tokens, "sets": {}, "provenance": where}
    results["definition"] = "micro: 1 + accepted / steps; greedy chain; first turn; stops honoured"
    results["make_exit_code"] = run_make(args, sets, args.seconds - args.measure_seconds)
    results["make_seconds"], results["training"] = time.monotonic() - began, training_course(args.out / "run")
    for name, key in (("made.json", "made"), ("make.json", "parts")):
        if (args.out / name).is_file():
            results[key] = json.loads((args.out / name).read_text())
    results["said"] = (args.out / "said.txt").read_text().splitlines() if (args.out / "said.txt").is_file() else []
    write_json(args.json, results)

    def alarm(number: int, frame: FrameType | None) -> None:
        raise TimeOver

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, args.seconds - (time.monotonic() - began)))
    try:
        measure_all(args, sets, results)
    except TimeOver:
        print(f"--seconds is over; measured: {', '.join(results['sets']) or 'nothing'}", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        results["seconds"] = time.monotonic() - began
        write_json(args.json, results)


if __name__ == "__main__":
    main()
