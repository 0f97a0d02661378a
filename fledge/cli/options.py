"""Options shared by several commands, so that a name means the same everywhere."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fledge.llm import LLM

# Exit codes; `fledge --help` and the documentation list them.
CHECK_FAILED = 3  # the command worked, but its check did not pass
Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, folder, GGUF file or hub id.")]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto (the one shipped for the model, else ngram), none, ngram, a shipped drafter's name, a folder or a hub id.",
    ),
]
Depth = Annotated[
    str, typer.Option(help="Maximum tokens drafted per step; auto: the fastest depth, up to 7 on a CPU and 6 on a GPU.")
]
DriftGuard = Annotated[
    bool,
    typer.Option("--drift-guard/--no-drift-guard", help="Lower the depth while acceptance is clearly lower than usual."),
]
Tree = Annotated[bool, typer.Option("--tree", help="Draft a tree instead of a chain.")]
TreeWidth = Annotated[int, typer.Option(help="Candidates per node, and nodes expanded per level.")]
TreeNodes = Annotated[int, typer.Option(help="Tree nodes verified per step.")]
Dtype = Annotated[str, typer.Option(help="Weight dtype: auto, float32, float16, bfloat16 (GPU).")]
Quantization = Annotated[
    str,
    typer.Option(
        help="The target's weights: none, fp8 (GPU), int8, int4; gguf: keep the file's quantised blocks (default for GGUF on "
        "CPU)."
    ),
]
KvCacheDtype = Annotated[str, typer.Option(help="Keys and values in the cache: auto; on a CPU also float32, float16 or q8_0.")]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a CPU without a C compiler: exact, slower kernels. Refuses --tree. Elsewhere no effect: output is exact.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice, which follows OMP_NUM_THREADS.")]
MaxModelLen = Annotated[int, typer.Option(min=0, help="Tokens of prompt and answer; 0: the model's limit.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
TopK = Annotated[int, typer.Option(help="0: off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the most likely token's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="1: off.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else; progress goes to standard error.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")]


def print_json(content: object) -> None:
    """Prints one JSON object on standard output. NaN and infinity become null: JSON has no such numbers."""
    text = json.dumps(_finite(content), ensure_ascii=False, default=str)
    print(text.encode(errors="backslashreplace").decode())  # a lone surrogate becomes its JSON escape


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def numbers(text: str, option: str) -> list[int]:
    """The numbers of a list such as 1,4; at least one, all positive."""
    from fledge.errors import UserError

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{option} takes positive numbers separated by commas, such as 1,4,16; not {text!r}")
    return found


def load(
    model: str,
    drafter: str,
    depth: str,
    *,
    tree: bool = False,
    tree_width: int = 4,
    tree_nodes: int = 12,
    **settings: Any,
) -> LLM:
    """Loads the model with its drafter. `settings`: further parameters of `LLM`."""
    from fledge import sources

    sources.check_file(model)
    from fledge.llm import LLM
    from fledge.speculation.depth import TreeShape

    return LLM(model, drafter, depth=depth, tree=TreeShape(tree_width, tree_nodes) if tree else None, **settings)


def say_if_ngram(llm: LLM, model: str, drafter: str) -> None:
    """Says on standard error that `auto` found no drafter and n-grams are used."""
    from fledge.errors import printable
    from fledge.speculation.methods.ngram import NgramSpeculator

    if drafter == "auto" and isinstance(llm.engine.drafter, NgramSpeculator):
        print(
            printable(f"[no drafter ships for {model}: drafting with n-grams; choose a drafter with --drafter]"),
            file=sys.stderr,
        )


def resolved(llm: LLM) -> dict[str, Any]:
    """The settings in use, for --json, with "auto" resolved."""
    config, drafter = llm.engine.config, llm.engine.drafter
    return {
        "drafter": "none" if drafter is None else drafter.description,
        "depth": 0 if drafter is None else drafter.depth.limit,
        "device": config.device,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "weights": config.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
