"""Measures vLLM with dummy weights: step times by rows and depth, prefill and closed loop. Run by `gpu_sizes.py` as a script,
with vLLM on PYTHONPATH; imports nothing of this package.

The step time is the time between two outputs of vLLM's engine while all rows decode. Settings are vLLM's defaults, except that
CUDA graphs are captured only for the sizes that are timed (up to 512 tokens, vLLM's default limit), which saves minutes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from itertools import pairwise

LARGEST_GRAPH = 512
WARM, TIMED = 8, 24


def main(task_file: str, out_file: str) -> None:
    began = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    with open(task_file) as file:
        task = json.load(file)
    found: dict = {"version": vllm.__version__, "steps": {}, "ready_s": {}}
    count, length = task["prefill"]
    for depth in task["depths"]:
        started = time.perf_counter()
        sizes = [rows * (depth + 1) for rows in task["rows"] if rows * (depth + 1) <= LARGEST_GRAPH]
        speculation = {
            "method": "eagle3",
            "model": task["drafter"],
            "num_speculative_tokens": depth,
            # Loaded from the file: with dummy weights vLLM would use the target's head, which has another vocabulary.
            "draft_load_config": {"load_format": "auto"},
        }
        llm = LLM(
            task["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(*task["rows"], count),
            speculative_config=speculation if depth else None,
            enable_prefix_caching=False,
            gpu_memory_utilization=task["memory"],
            compilation_config={"cudagraph_capture_sizes": sorted({*sizes, 1, 2, 4, 8})} if sizes else None,
            generation_config="vllm",
            disable_log_stats=True,
        )
        engine = llm.llm_engine
        found["ready_s"][str(depth)] = time.perf_counter() - (began if depth == task["depths"][0] else started)
        say(f"depth {depth}: ready after {found['ready_s'][str(depth)]:.0f} s")
        write(out_file, found)

        def params(tokens: int) -> SamplingParams:
            return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

        for rows in task["rows"]:
            name = f"{rows} rows, depth {depth}" if depth else f"{rows} rows, plain"
            # Long enough even if every draft were accepted, although random weights never agree.
            tokens = (depth + 1) * (WARM + TIMED + 4) + rows // 16
            ends = run(engine, prompts(task, rows, task["context"]), params(tokens), rows)[1]
            us = 1e6 * step_seconds(ends, rows)
            found["steps"][name] = {"us": us}
            say(f"{name}: {us:.0f} us")
            write(out_file, found)
        if not depth:
            texts = prompts(task, count, length)
            times = [run(engine, texts, params(1), count)[2] for _ in range(task["rounds"] + 1)][1:]
            found["prefill"] = {"seconds": statistics.median(times), "tokens_per_s": count * length / statistics.median(times)}
            say(f"prefill: {found['prefill']['tokens_per_s']:.0f} tokens/s")
            write(out_file, found)
            found["loop"] = {}
            for users, requests in task["loops"].items():
                texts = prompts(task, requests, task["context"])
                done, _, seconds = run(engine, texts, params(task["loop_tokens"]), int(users))
                found["loop"][users] = {"tokens_per_s": done / seconds, "tokens_per_s_per_user": done / seconds / int(users)}
                say(f"{users} users: {done / seconds:.0f} tokens/s")
                write(out_file, found)
        del llm, engine
        gc.collect()


def prompts(task: dict, count: int, length: int) -> list[dict]:
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(task["vocab_size"]) for _ in range(length)]} for _ in range(count)]


def run(engine, texts: list[dict], params, users: int) -> tuple[int, list[tuple[float, int, int]], float]:
    """Serves all texts in a closed loop. Returns the number of tokens; for each output of the engine its time, its number of
    requests and how many of these ended; and the total seconds."""
    ends = []
    tokens, waiting, running = 0, list(enumerate(texts)), set()
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < users:
            number, text = waiting.pop(0)
            engine.add_request(str(number), text, params)
            running.add(str(number))
        outputs = engine.step()
        if not outputs:
            continue
        ended = [out for out in outputs if out.finished]
        ends.append((time.perf_counter(), len(outputs), len(ended)))
        tokens += sum(len(out.outputs[0].token_ids) for out in ended)
        running -= {out.request_id for out in ended}
    return tokens, ends, time.perf_counter() - began


def step_seconds(ends: list[tuple[float, int, int]], rows: int) -> float:
    """The median time between consecutive outputs of all rows in which no request ended; the first few are warm-up."""
    whole = [index for index, (_, count, ended) in enumerate(ends) if count == rows and not ended]
    gaps = [ends[two][0] - ends[one][0] for one, two in pairwise(whole) if two == one + 1]
    return statistics.median(gaps[WARM:][:TIMED])


def say(text: str) -> None:
    print(f"  vLLM, {text}", flush=True)


def write(out_file: str, found: dict) -> None:
    """Writes the results. Called after every figure, so that an aborted run keeps what it measured."""
    with open(out_file + ".new", "w") as file:
        json.dump(found, file)
    os.replace(out_file + ".new", out_file)


if __name__ == "__main__":
    main(*sys.argv[1:3])
