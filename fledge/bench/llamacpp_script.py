"""Runs llama.cpp on given prompts, one at a time, greedily. Run as a script by a Python that has llama-cpp-python; imports
nothing of this package.

Calls llama.cpp's C functions and not llama-cpp-python's Python loop, so that only llama.cpp is timed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

CHUNK = 512  # prompt tokens per pass: llama.cpp's default


class Model:
    """A loaded GGUF file. The KV cache is cleared before every answer."""

    def __init__(self, file: str, threads: int, context: int, chunk: int = CHUNK) -> None:
        """`chunk`: prompt tokens per pass."""
        import llama_cpp

        self.c = llama_cpp
        self.llama = llama_cpp.Llama(
            file, n_ctx=context, n_batch=max(chunk, 32), n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.context, self.chunk = self.llama.ctx, chunk
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.llama.model)
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def answer(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False, num_best: int = 0) -> dict[str, Any]:
        """Answers one prompt. `num_best`: how many of the highest logits to return per token, as [token, logit] pairs."""
        began = time.perf_counter()
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        tokens: list[int] = []
        best: list[list[list[float]]] = []
        for start in range(0, len(prompt), self.chunk):
            self._run(prompt[start : start + self.chunk])
        while True:
            tokens.append(self.c.llama_sampler_sample(self.sampler, self.context, -1))
            if len(tokens) == 1:
                first = time.perf_counter()
            if num_best:
                best.append(self._best(num_best))
            if len(tokens) == max_tokens or (not ignore_eos and self.c.llama_vocab_is_eog(self.vocabulary, tokens[-1])):
                break
            self._run(tokens[-1:])
        ended = time.perf_counter()
        return {"tokens": tokens, "first_token_seconds": first - began, "seconds": ended - began, "best": best}

    def _run(self, tokens: list[int]) -> None:
        numbers = (self.c.llama_token * len(tokens))(*tokens)  # the batch points to them
        if self.c.llama_decode(self.context, self.c.llama_batch_get_one(numbers, len(numbers))):
            raise RuntimeError(f"llama_decode failed on {len(tokens)} tokens")

    def _best(self, count: int) -> list[list[float]]:
        import numpy as np

        size = self.c.llama_vocab_n_tokens(self.vocabulary)
        logits = np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (size,))
        order = np.argsort(-logits)[:count]
        return [[int(token), float(logits[token])] for token in order]


def peak_bytes() -> int:
    """Peak memory of this process. Without /proc it is `getrusage`'s, which also counts the parent's memory before exec."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(model: Model, task: dict[str, Any]) -> dict[str, Any]:
    """Answers all prompts of a task and returns the run's figures."""
    model.answer(task["prompts"][0], 8, ignore_eos=True)
    ignore, num_best = task.get("ignore_eos", False), task.get("num_best", 0)
    answers = [model.answer(one, task["max_tokens"], ignore_eos=ignore, num_best=num_best) for one in task["prompts"]]
    tokens, seconds = sum(len(one["tokens"]) for one in answers), sum(one["seconds"] for one in answers)
    waited = seconds - sum(one["first_token_seconds"] for one in answers)
    run = {
        "label": "plain",
        "concurrency": 1,
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": (seconds - waited) / len(answers),
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_user": (tokens - len(answers)) / waited if waited else 0.0,
        "answers": [one["tokens"] for one in answers],
    }
    if num_best:
        run["best"] = [one["best"] for one in answers]
    return run


def main(task_file: str, out_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    model = Model(task["model"], task.get("threads") or os.cpu_count() or 1, task["context"], task.get("chunk", CHUNK))
    found: dict[str, Any] = {"ready": time.time(), "version": model.c.__version__}
    if task.get("prefill"):  # done first: it reads the whole file once, which also warms up the decode run
        model.answer(task["prefill"], 1)
        found["prefill_tokens_per_second"] = len(task["prefill"]) / model.answer(task["prefill"], 1)["seconds"]
    if task.get("texts"):
        found["tokenized"] = [model.llama.tokenize(text.encode(), add_bos=False, special=True) for text in task["texts"]]
    found["runs"] = [measure(model, task)]
    found["peak_bytes"] = peak_bytes()
    with open(out_file, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:3])
