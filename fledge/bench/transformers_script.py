"""transformers on given prompts: plain, prompt look-up and, with an assistant model, assisted generation. Batch 1, as its
assisted generation is. Run by `baselines.py` as a script: imports nothing of this package."""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM


def main(task_file: str, out_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    device, dtype = task["device"], getattr(torch, task["dtype"])

    def load(name: str):
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

    model = load(task["model"])
    ways = {"plain": {}}
    for depth in task["depths"]:
        ways[f"prompt look-up, depth {depth}"] = {"prompt_lookup_num_tokens": depth}
    if task["assistant"]:
        assistant = load(task["assistant"])
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        for depth in task["depths"]:
            ways[f"assistant, depth {depth}"] = {"assistant_model": assistant, "num_assistant_tokens": depth}
    runs = []
    for label, options in ways.items():
        options = dict(options)
        if (depth := options.pop("num_assistant_tokens", None)) is not None:
            options["assistant_model"].generation_config.num_assistant_tokens = depth
        generate(model, task["prompts"][0], 8, options)
        answers, began = [], time.perf_counter()
        for prompt in task["prompts"]:
            answers.append(generate(model, prompt, task["max_tokens"], options))
        seconds = time.perf_counter() - began
        tokens = sum(map(len, answers))
        runs.append(
            {
                "label": label,
                "concurrency": 1,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "tokens_per_second_per_user": tokens / seconds,
                "answers": answers,
            }
        )
    with open(out_file, "w") as file:
        json.dump({"version": transformers.__version__, "dtype": task["dtype"], "runs": runs}, file)


@torch.no_grad()
def generate(model, prompt: list[int], max_tokens: int, options: dict) -> list[int]:
    tokens = torch.tensor([prompt], device=model.device)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main(*sys.argv[1:3])
