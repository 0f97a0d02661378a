"""Runs transformers on given prompts: plain, prompt look-up and, with an assistant model, assisted generation. Batch 1, because
its assisted generation supports nothing else. Run by `baselines.py` as a script; imports nothing of this package."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


def main(task_file: str, out_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    device, dtype = task["device"], getattr(torch, task["dtype"])

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).to(device).eval()

    model = load(task["model"])
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    for depth in task["depths"]:
        ways[f"prompt look-up, depth {depth}"] = {"prompt_lookup_num_tokens": depth}
    if task["assistant"]:
        assistant = load(task["assistant"])
        for depth in task["depths"]:
            ways[f"assistant, depth {depth}"] = {"assistant_model": with_depth(assistant, depth)}
        ways["assistant, depth of its own"] = {"assistant_model": assistant}
    runs = []
    for label, options in ways.items():
        generate(model, task["prompts"][0], 8, options, FirstTokens())
        runs.append({"label": label, "concurrency": 1, **measure(model, task["prompts"], task["max_tokens"], options)})
        write(out_file, {"version": transformers.__version__, "dtype": task["dtype"], "runs": runs})


def write(out_file: str, found: dict) -> None:
    """Writes the results. Called after every run, so that an aborted benchmark keeps its finished runs."""
    with open(out_file + ".new", "w") as file:
        json.dump(found, file)
    os.replace(out_file + ".new", out_file)


def with_depth(assistant: Any, depth: int) -> Any:
    """The assistant with a fixed depth: by default it stops drafting when it is unsure."""
    fixed = copy.copy(assistant)
    fixed.generation_config = copy.deepcopy(assistant.generation_config)
    fixed.generation_config.num_assistant_tokens = depth
    fixed.generation_config.num_assistant_tokens_schedule = "constant"
    fixed.generation_config.assistant_confidence_threshold = 0.0
    return fixed


class FirstTokens(BaseStreamer):
    """Records when an answer's first tokens came, and how many: assisted generation gives several at once."""

    def __init__(self) -> None:
        self.prompt_seen, self.count, self.time = False, 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:  # the first call has the prompt
            self.prompt_seen = True
        elif not self.count:
            self.count, self.time = value.numel(), time.perf_counter()

    def end(self) -> None:
        pass


def measure(model: Any, prompts: list[list[int]], max_tokens: int, options: dict) -> dict:
    """Figures of one run. Total speed includes prefill; speed per user counts tokens after the first ones, as for others."""
    answers, later_tokens, waited, until_first = [], 0, 0.0, 0.0
    began = time.perf_counter()
    for prompt in prompts:
        first, asked = FirstTokens(), time.perf_counter()
        answers.append(generate(model, prompt, max_tokens, options, first))
        waited += time.perf_counter() - first.time
        until_first += first.time - asked
        later_tokens += max(0, len(answers[-1]) - first.count)
    seconds = time.perf_counter() - began
    tokens = sum(map(len, answers))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": until_first / len(prompts),
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_user": later_tokens / waited if waited else 0.0,
        "answers": answers,
    }


@torch.no_grad()
def generate(model: Any, prompt: list[int], max_tokens: int, options: dict, streamer: FirstTokens) -> list[int]:
    tokens = torch.tensor([prompt], device=model.device)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        **options,
    )
    return out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main(*sys.argv[1:3])
