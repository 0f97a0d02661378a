"""Compares plain decoding of SmolLM2-135M on a CPU: Fledge and transformers' `generate` in fp32, in one run.

    python benchmarks/cpu_vs_transformers.py [--tokens 128] [--rounds 3] [--json FILE]

Rounds alternate between the engines, so that other load on the machine affects all of them; the median of the rounds counts.
llama.cpp runs too if `llama-cpp-python` is installed and `--gguf` names the Q4_1 file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fledge import LLM, SamplingParams, sources
from fledge.bench.provenance import provenance, write_json

PROMPT = "Explain how a sailing boat can move against the wind, step by step, and give an example."


def fledge_runner(dtype: str, tokens: int) -> Callable[[], tuple[float, list[int]]]:
    llm = LLM("smollm2-135m", "none", dtype=dtype, prefix_caching=False)
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}])
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    def run() -> tuple[float, list[int]]:
        start = time.perf_counter()
        completion = llm.generate([prompt], params)[0]
        return tokens / (time.perf_counter() - start), completion.token_ids

    return run


def transformers_runner(tokens: int) -> Callable[[], tuple[float, list[int]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sources.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    def run() -> tuple[float, list[int]]:
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return tokens / (time.perf_counter() - start), out[0, ids.shape[1] :].tolist()

    return run


def llama_cpp_runner(tokens: int, file: str) -> Callable[[], tuple[float, list[int]]] | None:
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    model = Llama(file, n_ctx=2048, n_threads=torch.get_num_threads(), verbose=False)
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenize(text.encode(), add_bos=False, special=True)

    def run() -> tuple[float, list[int]]:
        start, produced = time.perf_counter(), []
        model.reset()
        for token in model.generate(ids, temp=0):
            produced.append(token)
            if len(produced) == tokens:
                break
        return tokens / (time.perf_counter() - start), produced

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gguf", default="", help="the Q4_1 file, to run llama.cpp too")
    parser.add_argument("--json")
    options = parser.parse_args()

    runners = {
        "transformers float32": transformers_runner(options.tokens),
        "fledge float16 (default)": fledge_runner("float16", options.tokens),
        "fledge float32": fledge_runner("float32", options.tokens),
    }
    if options.gguf and (llama := llama_cpp_runner(options.tokens, options.gguf)):
        runners["llama.cpp Q4_1"] = llama
    for run in runners.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in runners}
    outputs = {}
    for _ in range(options.rounds):
        for name, run in runners.items():
            rate, outputs[name] = run()
            rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["transformers float32"]
    for name, rate in medians.items():
        print(f"{name:28s} {rate:7.1f} tokens/s   {rate / base:5.2f}x transformers")
    same = outputs["fledge float32"] == outputs["transformers float32"]
    print(f"fledge float32 and transformers give the same {options.tokens} tokens: {'yes' if same else 'no'}")
    if options.json:
        write_json(
            options.json,
            {
                "tokens_per_second": medians,
                "rounds": rates,
                "same_tokens": same,
                "tokens": options.tokens,
                "provenance": provenance([PROMPT]),
            },
        )


if __name__ == "__main__":
    main()
