"""Runs one engine in a new process, for `cpu_vs_llamacpp.py`: python cpu_worker.py fledge|transformers TASK.json OUT.json

Imports nothing that its engine does not need: the time from the command until the model is ready is one of the figures.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def fledge_worker(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a task with Fledge. `ready` is the time at which the model can take requests."""
    from fledge import LLM, SamplingParams

    options = {"threads": task["threads"], "max_model_len": task["context"], "kv_cache_dtype": task["kv_cache_dtype"]}
    llm = LLM(task["model"], task["drafter"], depth=task["depth"], prefix_caching=False, **options)
    found: dict[str, Any] = {"ready": time.time(), "weights": llm.engine.config.weights}
    found["kv_cache_dtype"] = llm.engine.config.kv_cache_dtype

    def answers(prompts: list[list[int]], tokens: int) -> list[Any]:
        # With ignore_eos every answer has its full length, so that all engines write equally many tokens.
        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=task["ignore_eos"], logprobs=task.get("num_best") or None
        )
        return [llm.generate([prompt], params)[0] for prompt in prompts]

    if task.get("prefill"):
        first = [answers([task["prefill"]], 1)[0].first_token_seconds for _ in range(2)]
        found["prefill_tokens_per_second"] = len(task["prefill"]) / first[1]
    answers(task["prompts"][:1], 8)
    done = answers(task["prompts"], task["max_tokens"])
    waited = sum(one.seconds - one.first_token_seconds for one in done)
    run: dict[str, Any] = {"answers": [one.token_ids for one in done]}
    run["tokens_per_second_per_user"] = sum(len(one.token_ids) - 1 for one in done) / waited
    if task.get("num_best"):
        run["best"] = [[one.top for one in completion.logprobs] for completion in done]
    drafted = [one.stats.acceptance_length for one in done]
    return found | {"runs": [run], "acceptance_length": sum(drafted) / len(drafted)}


def transformers_worker(task: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    from fledge.bench.transformers_script import FirstTokens, generate, measure

    torch.set_num_threads(task["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
    found: dict[str, Any] = {"ready": time.time(), "version": transformers.__version__}
    for _ in range(2):
        began = time.perf_counter()
        generate(model, task["prefill"], 1, {}, FirstTokens())
        found["prefill_tokens_per_second"] = len(task["prefill"]) / (time.perf_counter() - began)
    options = {"min_new_tokens": task["max_tokens"]}
    return found | {"runs": [measure(model, task["prompts"], task["max_tokens"], options)]}


def main(kind: str, task_file: str, out_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    found = (fledge_worker if kind == "fledge" else transformers_worker)(task)
    from fledge.bench.llamacpp_script import peak_bytes

    Path(out_file).write_text(json.dumps(found | {"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
