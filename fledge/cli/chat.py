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
    seed: options.Seed = None,
    depth: options.Depth = "auto",
    tree: options.Tree = False,
    drift_guard: options.DriftGuard = True,
    system: options.System = None,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "none",
    device: options.Device = "auto",
) -> None:
    """Talk with the model. /reset starts over, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."""
    from fledge.cli.render import figures, print_delta
    from fledge.errors import RequestError
    from fledge.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = options.load(
        model, drafter, depth, tree=tree, dtype=dtype, device=device, quantization=quantization, drift_guard=drift_guard
    )
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
        except RequestError as error:  # most likely the conversation outgrew the context
            messages.pop()
            print(f"[{error}; /reset starts over]", file=sys.stderr)
            continue
        print()
        print(figures(completion), file=sys.stderr)
        messages.append({"role": "assistant", "content": completion.text})
