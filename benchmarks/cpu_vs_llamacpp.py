"""Compares Fledge, plain and with a drafter, with llama.cpp and transformers on a CPU: one GGUF file, in one run.

    python benchmarks/cpu_vs_llamacpp.py FILE.gguf [--drafter NAME] [--quick] [--json FILE]
    python benchmarks/cpu_vs_llamacpp.py FILE.gguf --texts [--data FILE.jsonl --limit N]

All engines get the same file, prompts, threads and token counts. Every measurement is a new process; rounds alternate between
the engines, so that other load on the machine affects all of them; medians count. llama-cpp-python has its own environment,
`.venv-llamacpp`, which is made if it is missing (it compiles: five minutes on two cores). `--texts` compares greedy answers
instead of speed, and llama.cpp with itself when it prefills few tokens at a time: rounding alone makes as many answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fledge import sources
from fledge.bench import llamacpp_script
from fledge.bench.baselines import LLAMACPP_VENV, llamacpp_python
from fledge.bench.datasets import load_items
from fledge.bench.prompts import DEMO
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.drafters import default_drafter
from fledge.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
LLAMA, PLAIN, DRAFTER, TRANSFORMERS = "llama.cpp", "Fledge, plain", "Fledge, drafter", "transformers, fp32"
LLAMA_FEW = "llama.cpp, prompts read a few tokens at a time"
# The demo's prompts, and two more for --texts.
PROMPTS = [prompt.text for prompt in DEMO] + [
    "Write a SQL query that returns the three customers with the highest total of orders in 2023.",
    "Translate into French: The library opens at nine, and the reading room closes an hour before the rest.",
]
TEXT_TOKENS = 64
FEW = 7  # prompt tokens per pass when llama.cpp is compared with itself
# transformers takes ten times as long, so it gets one round with fewer prompts and tokens.
TRANSFORMERS_PROMPTS, TRANSFORMERS_TOKENS = 2, 32


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def install_llamacpp() -> str:
    """Makes the environment with llama-cpp-python if it is missing; returns its Python."""
    python = LLAMACPP_VENV / "bin" / "python"
    say(f"making {LLAMACPP_VENV} and compiling llama-cpp-python in it: about five minutes on two cores")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(LLAMACPP_VENV)], check=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-binary", "llama-cpp-python"]
    # Without the library for images, which takes a quarter of the compile time.
    done = subprocess.run([*command, "llama-cpp-python"], env=os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"})
    if done.returncode:
        raise UserError("llama-cpp-python could not be installed; it needs a C++ compiler and a package index")
    return str(python)


class Engine:
    """One row of the table: the command of its process, and the task it gets."""

    def __init__(self, name: str, command: list[str], task: dict[str, Any]) -> None:
        self.name, self.command, self.task = name, command, task

    def run(self) -> dict[str, Any]:
        """Runs the task. If other processes used more than 0.1 cores meanwhile, runs it again; the quieter run counts."""
        found = self._run()
        if found["other_work"] > 0.1:
            say(f"{self.name}: other processes used {found['other_work']:.1f} cores meanwhile; running it again")
            found = min(found, self._run(), key=lambda one: one["other_work"])
        return found

    def _run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            task, out = Path(folder) / "task.json", Path(folder) / "out.json"
            task.write_text(json.dumps(self.task))
            environment = os.environ | {"OMP_NUM_THREADS": str(self.task["threads"])}
            began, others = time.time(), other_seconds()
            done = subprocess.run([*self.command, str(task), str(out)], env=environment, capture_output=True, text=True)
            others = (other_seconds() - others) / (time.time() - began)
            if done.returncode or not out.exists():
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise UserError(f"{self.name} ended with code {done.returncode}: {lines[-1]}")
            found = json.loads(out.read_text())
        return found | {"ready_seconds": found["ready"] - began, "other_work": others}


def other_seconds() -> float:
    """CPU seconds of all cores used by other processes than those started here; 0 if the system does not report them."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    except OSError:
        return 0.0
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def engines(options: argparse.Namespace, file: Path, task: dict[str, Any]) -> list[Engine]:
    worker = [sys.executable, str(Path(__file__).with_name("cpu_worker.py"))]
    llama = [llamacpp_python() or install_llamacpp(), str(Path(llamacpp_script.__file__))]
    fledge = {"model": options.model, "depth": options.depth, "kv_cache_dtype": options.kv_cache_dtype}
    found = [
        Engine(LLAMA, llama, task | {"model": str(file)}),
        Engine(PLAIN, [*worker, "fledge"], task | fledge | {"drafter": "none"}),
    ]
    if options.texts:
        return [*found, Engine(LLAMA_FEW, llama, task | {"model": str(file), "chunk": FEW})]
    drafter = options.drafter or default_drafter(options.model)
    if drafter and drafter != "none":
        found.append(Engine(DRAFTER, [*worker, "fledge"], task | fledge | {"drafter": str(drafter)}))
    if options.transformers:
        say("converting the file for transformers, unless it is in the cache")
        short = {"prompts": task["prompts"][:TRANSFORMERS_PROMPTS], "max_tokens": TRANSFORMERS_TOKENS}
        folder = str(sources.resolve(options.model))
        found.append(Engine(TRANSFORMERS, [*worker, "transformers"], task | {"model": folder} | short))
    return found


def measure(rows: list[Engine], rounds: int) -> dict[str, dict[str, Any]]:
    """Runs all rounds. Returns for each row the medians of its figures and the figures of all rounds."""
    runs: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            if number and row.name == TRANSFORMERS:
                continue
            found = row.run()
            rate = found["runs"][0]["tokens_per_second_per_user"]
            say(f"round {number + 1} of {rounds}: {row.name}: {rate:.1f} tokens/s, ready after {found['ready_seconds']:.2f} s")
            runs[row.name].append(found)
    return {name: summary(some) for name, some in runs.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures = {
        "tokens_per_second": [run["runs"][0]["tokens_per_second_per_user"] for run in runs],
        "prefill_tokens_per_second": [run["prefill_tokens_per_second"] for run in runs],
        "peak_bytes": [run["peak_bytes"] for run in runs],
        "ready_seconds": [run["ready_seconds"] for run in runs],
        "other_work": [run["other_work"] for run in runs],
    }
    kept = {name: runs[0][name] for name in ("version", "weights", "kv_cache_dtype", "acceptance_length") if name in runs[0]}
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return kept | medians | {"rounds": figures, "answers": runs[0]["runs"][0]["answers"]}


def table(rows: dict[str, dict[str, Any]], title: str) -> Table:
    shown = Table(title=title)
    shown.add_column("engine")
    for heading in ("tokens/s", "× llama.cpp", "prefill tokens/s", "× llama.cpp", "peak memory", "ready after"):
        shown.add_column(heading, justify="right")
    base = rows[LLAMA]
    for name, row in rows.items():
        rates = []
        for figure in ("tokens_per_second", "prefill_tokens_per_second"):
            rates += [f"{row[figure]:.1f}", f"{row[figure] / base[figure]:.2f}×"]
        shown.add_row(name, *rates, f"{row['peak_bytes'] / 1e6:.0f} MB", f"{row['ready_seconds']:.2f} s")
    return shown


def compare_texts(rows: list[Engine], tokenizer: GgufTokenizer, names: list[str]) -> dict[str, Any]:
    """Compares greedy answers: where they first differ, and how close the two tokens were in each engine's logits."""
    found = {}
    for row in rows:
        say(f"{row.name}: {len(names)} answers")
        found[row.name] = row.run()
    ours, theirs = found[PLAIN], found[LLAMA]
    same_prompts = sum(a == b for a, b in zip(theirs["tokenized"], rows[0].task["prompts"], strict=True))
    print(f"prompts that llama.cpp tokenizes the same way: {same_prompts} of {len(names)}")
    answers = []
    both = zip(names, *(one["runs"][0]["answers"] for one in (ours, theirs)), strict=True)
    for index, (prompt, our_tokens, their_tokens) in enumerate(both):
        shared = min(len(our_tokens), len(their_tokens))
        at = next((i for i in range(shared) if our_tokens[i] != their_tokens[i]), shared)
        if at == len(our_tokens) == len(their_tokens):
            answers.append({"prompt": prompt, "equal": True, "tokens": at})
            print(f"  equal for {at} tokens: {prompt[:60]}")
            continue
        pair = [tokens[at] if at < len(tokens) else None for tokens in (our_tokens, their_tokens)]
        gaps = [_gap(one["runs"][0]["best"][index], at, pair) for one in (ours, theirs)]
        words = [None if token is None else tokenizer.decode([token], skip_special_tokens=False) for token in pair]
        answers.append({"prompt": prompt, "equal": False, "tokens": at, "candidates": words, "logit_gaps": gaps})
        said = [f"{gap:+.3f}" if gap is not None else "not among its best" for gap in gaps]
        print(f"  differ after {at:2d} tokens: {prompt[:60]}")
        print(f"     Fledge {words[0]!r}, llama.cpp {words[1]!r}; logit gap {said[0]} in Fledge, {said[1]} in llama.cpp")
    equal = sum(one["equal"] for one in answers)
    itself = sum(a == b for a, b in zip(theirs["runs"][0]["answers"], found[LLAMA_FEW]["runs"][0]["answers"], strict=True))
    print(f"equal answers: {equal} of {len(answers)} for {TEXT_TOKENS} tokens; llama.cpp with itself: {itself}")
    return {
        "equal": equal,
        "llamacpp_with_itself": itself,
        "of": len(answers),
        "tokens": TEXT_TOKENS,
        "same_prompt_tokens": same_prompts,
        "answers": answers,
    }


def _gap(best: list[list[list[float]]], at: int, pair: list[int | None]) -> float | None:
    """The first token's logit minus the second's; None if one of them is not among the best logits."""
    if at >= len(best):
        return None
    logits = {int(token): logit for token, logit in best[at]}
    return logits[pair[0]] - logits[pair[1]] if pair[0] in logits and pair[1] in logits else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or a built-in name")
    parser.add_argument("--drafter", help="none, ngram, a name or a folder; default: the one that is shipped for the model")
    parser.add_argument("--depth", default="auto", help="tokens drafted per step, or auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help="Fledge's: auto, float32, float16, q8_0 (llama.cpp: float16)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--prompts", type=int, default=len(DEMO), help="number of the demo's prompts to use")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="four prompts of 48 tokens, without transformers")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--texts", action="store_true", help=f"compare {len(PROMPTS)} answers of {TEXT_TOKENS} tokens instead")
    parser.add_argument("--data", help="with --texts: a JSONL file of conversations, whose first turns are used instead")
    parser.add_argument("--limit", type=int, default=10, help="number of conversations of --data to use")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/cpu-vs-llamacpp-NAME.json")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.transformers = 4, 48, False

    file = sources.find(options.model)
    if not file.is_file():
        raise UserError(f"{options.model} is not a GGUF file; llama.cpp reads only these")
    tokenizer = GgufTokenizer(GgufFile(file))
    items = load_items(options.data)[: options.limit] if options.data else []
    questions = [item.turns[0] for item in items] or PROMPTS
    names = [item.id for item in items] or PROMPTS  # a data set's texts are not written into the results
    chats = [[{"role": "user", "content": text}] for text in questions]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    long = tokenizer.encode(" ".join(PROMPTS))
    long = (long * (options.prefill // len(long) + 1))[: options.prefill]
    task = {"threads": options.threads, "context": options.context}
    if options.texts:
        texts = [tokenizer.render_chat(chat, add_generation_prompt=True) for chat in chats]
        task |= {"prompts": prompts, "max_tokens": TEXT_TOKENS, "ignore_eos": False, "num_best": 20, "texts": texts}
    else:
        some = prompts[: min(options.prompts, len(DEMO))]
        task |= {"prompts": some, "max_tokens": options.tokens, "ignore_eos": True, "prefill": long}
    rows = engines(options, file, task)
    kind = "texts" if options.texts else "cpu"
    path = options.json or ROOT / "benchmarks" / "results" / f"{kind}-vs-llamacpp-{file.stem.lower()}.json"
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "model")} | {"file": file.name}
    if options.texts:
        content = compare_texts(rows, tokenizer, names)
    else:
        found = measure(rows, options.rounds)
        title = (
            f"{file.name}, {options.threads} threads, {len(some)} prompts, {options.tokens} tokens, medians of {options.rounds}"
        )
        Console(width=120).print(table(found, title))
        content = {"rows": found}
        if DRAFTER in found:
            content["identical"] = found[DRAFTER]["answers"] == found[PLAIN]["answers"]
            print(f"drafter over plain: {found[DRAFTER]['tokens_per_second'] / found[PLAIN]['tokens_per_second']:.2f}×, "
                  f"identical output: {'yes' if content['identical'] else 'NO'}")  # fmt: skip
        for row in found.values():
            row.pop("answers")
    write_json(path, content | {"settings": settings, "provenance": provenance(questions)})
    say(f"wrote {path}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
