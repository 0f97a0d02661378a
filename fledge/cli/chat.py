"""`fledge chat`: a conversation in the terminal."""

from __future__ import annotations

import sys

from fledge.cli import options


def chat(
    model: options.Model = "smollm2-135m",
    drafter: options.DrafterName = "auto",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    seed: options.Seed = None,
    depth: options.Depth = "auto",
    tree: options.Tree = False,
    drift_guard: options.DriftGuard = True,
    system: options.System = None,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = 0,
    max_model_len: options.MaxModelLen = 0,
) -> None:
    """Talk with the model. /reset starts over, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."""
    from fledge.cli.render import figures, print_delta
    from fledge.errors import RequestError
    from fledge.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        seed=seed,
    )
    llm = options.load(
        model,
        drafter,
        depth,
        tree=tree,
        drift_guard=drift_guard,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
    )
    options.say_if_ngram(llm, model, drafter)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            completion = llm.chat(messages, params, on_delta=print_delta)
        except KeyboardInterrupt:
            messages.pop()
            print("\n[stopped]", file=sys.stderr)
            continue
        except RequestError as error:  # usually the conversation has become longer than the context
            messages.pop()
            print(f"[{error}; /reset starts over]", file=sys.stderr)
            continue
        print()
        print(figures(completion), file=sys.stderr)
        messages.append({"role": "assistant", "content": completion.text})
