"""Runs vLLM on given prompts: plain, then with each EAGLE drafter at each depth. Run by `baselines.py` as a script, possibly
by another environment's Python; imports nothing of this package."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any


def main(task_file: str, out_file: str) -> None:
    import vllm
    from vllm import LLM, SamplingParams

    with open(task_file) as file:
        task = json.load(file)
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    longest = max(len(prompt) for prompt in task["prompts"]) + task["max_tokens"] + 32
    ignore_eos = task.get("ignore_eos", False)
    params = SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=ignore_eos, detokenize=False)
    ways: dict[str, dict[str, Any] | None] = {"plain": None} if task.get("plain", True) else {}
    for name, drafter in task["drafters"].items():
        for depth in task["depths"]:
            label = f"EAGLE {name}".strip() + f", depth {depth}"
            ways[label] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": depth}
    runs = []
    for label, speculation in ways.items():
        llm = LLM(
            task["model"],
            dtype=task["dtype"],
            max_model_len=longest,
            max_num_seqs=max(task["concurrencies"]),
            speculative_config=speculation,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.6,
            disable_log_stats=False,
        )
        for concurrency in task["concurrencies"]:
            asked = repeated(prompts, task.get("requests", {}).get(str(concurrency), len(prompts)))
            run_all(llm.llm_engine, asked[:concurrency], params, concurrency)
            before = counters(llm)
            answers, waited, seconds = run_all(llm.llm_engine, asked, params, concurrency)
            counted = {name: value - before.get(name, 0) for name, value in counters(llm).items()}
            tokens = sum(map(len, answers))
            drafts = counted.get("vllm:spec_decode_num_drafts", 0)
            accepted = counted.get("vllm:spec_decode_num_accepted_tokens", 0)
            runs.append(
                {
                    "label": label,
                    "concurrency": concurrency,
                    "tokens": tokens,
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    "tokens_per_second_per_user": (tokens - len(answers)) / waited if waited else 0.0,
                    "acceptance_length_micro": 1 + accepted / drafts if drafts else None,
                    "answers": answers,
                }
            )
            write(out_file, {"version": vllm.__version__, "dtype": task["dtype"], "runs": runs})
        del llm
        gc.collect()


def write(out_file: str, found: dict) -> None:
    """Writes the results. Called after every run, so that an aborted benchmark keeps its finished runs."""
    with open(out_file + ".new", "w") as file:
        json.dump(found, file)
    os.replace(out_file + ".new", out_file)


def repeated(prompts: list[dict], count: int) -> list[dict]:
    return [prompts[index % len(prompts)] for index in range(count)]


def run_all(engine: Any, prompts: list[dict], params: Any, concurrency: int) -> tuple[list[list[int]], float, float]:
    """Serves all prompts in a closed loop. Returns the answers, users' summed seconds after first tokens, and total seconds."""
    answers: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    waited, began = 0.0, time.perf_counter()
    waiting = list(range(len(prompts)))
    running: set[str] = set()
    while waiting or running:
        while waiting and len(running) < concurrency:
            identity = str(waiting.pop(0))
            engine.add_request(identity, prompts[int(identity)], params)
            running.add(identity)
        for out in engine.step():
            now = time.perf_counter()
            first.setdefault(out.request_id, now)
            if out.finished:
                answers[out.request_id] = list(out.outputs[0].token_ids)
                waited += now - first[out.request_id]
                running.discard(out.request_id)
    return [answers[str(number)] for number in range(len(prompts))], waited, time.perf_counter() - began


def counters(engine: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if isinstance(getattr(metric, "value", None), int | float):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:3])
