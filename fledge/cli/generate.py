"""`fledge generate`: answers one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fledge.cli import options


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; '-' reads it from standard input.")],
    model: options.Model = "smollm2-135m",
    drafter: options.DrafterName = "auto",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Lowers tokens that were generated already; 0: off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time they were generated; 0: off.")] = 0.0,
    stop: options.Stop = None,
    seed: options.Seed = None,
    depth: options.Depth = "auto",
    tree: options.Tree = False,
    tree_width: options.TreeWidth = 4,
    tree_nodes: options.TreeNodes = 12,
    drift_guard: options.DriftGuard = True,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt unchanged, without the chat template.")] = False,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = 0,
    max_model_len: options.MaxModelLen = 0,
    deterministic: options.Deterministic = False,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt and stream the answer; accepted draft tokens are shown in green."""
    from fledge.cli.render import figures, print_delta
    from fledge.errors import RequestError
    from fledge.sampling import SamplingParams

    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise RequestError("the prompt is empty; give at least one character")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        seed=seed,
    )
    llm = options.load(
        model,
        drafter,
        depth,
        tree=tree,
        tree_width=tree_width,
        tree_nodes=tree_nodes,
        drift_guard=drift_guard,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        deterministic=deterministic,
    )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    templated = not raw and llm.tokenizer.has_chat_template
    tokens = llm.chat_prompt(messages) if templated else llm.tokenizer.encode(prompt)
    completion = llm.generate([tokens], params, on_delta=None if as_json else print_delta)[0]
    if as_json:
        options.print_json(completion.to_dict() | {"model": model, "tree": tree} | options.resolved(llm))
    else:
        print()
        print(figures(completion), file=sys.stderr)
        options.say_if_ngram(llm, model, drafter)
