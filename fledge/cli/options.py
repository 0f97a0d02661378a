"""Options that several commands share, so that a name means the same everywhere."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fledge.llm import LLM

# Exit codes; `fledge --help` and the documentation list them.
CHECK_FAILED = 3  # the command did its work, and the answer is no
Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, folder, GGUF file or hub id.")]
DrafterName = Annotated[
    str, typer.Option("--drafter", "-d", help="auto, none, ngram, a shipped drafter's name, a folder or a hub id.")
]
Depth = Annotated[str, typer.Option(help="Speculation depth: tokens drafted per step; 'auto' stops when confidence falls.")]
DriftGuard = Annotated[
    bool,
    typer.Option("--drift-guard/--no-drift-guard", help="Lower the depth while acceptance is clearly lower than usual."),
]
Tree = Annotated[bool, typer.Option("--tree", help="Draft a tree instead of a chain.")]
TreeWidth = Annotated[int, typer.Option(help="Candidates per node, and nodes expanded per level.")]
TreeNodes = Annotated[int, typer.Option(help="Tree nodes verified per step.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 (exact), float16 (packed on CPU) or bfloat16 (GPU).")]
Quantization = Annotated[
    str, typer.Option(help="The target's weights: none, fp8 (GPU), int8, int4, or gguf (a GGUF file's own).")
]
KvCacheDtype = Annotated[str, typer.Option(help="Keys and values in the cache: auto, float32, float16 or q8_0 (CPU).")]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Accepted, and changes nothing: answers do not depend on the batch or on speculation anyway.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
TopK = Annotated[int, typer.Option(help="0: off.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else; progress goes to standard error.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")]


def print_json(content: object) -> None:
    """One object on standard output. Figures that do not exist (NaN, infinity) are null: JSON has no such numbers."""
    text = json.dumps(_finite(content), ensure_ascii=False, default=str)
    print(text.encode(errors="backslashreplace").decode())  # half a surrogate: as JSON spells it


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def load(
    model: str,
    drafter: str,
    depth: str,
    *,
    tree: bool = False,
    tree_width: int = 4,
    tree_nodes: int = 12,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    prefix_caching: bool = True,
    drift_guard: bool = True,
) -> LLM:
    from fledge import sources

    sources.check_file(model)
    from fledge.llm import LLM
    from fledge.speculation.depth import TreeShape

    shape = TreeShape(tree_width, tree_nodes) if tree else None
    return LLM(
        model,
        drafter,
        depth=depth,
        tree=shape,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        prefix_caching=prefix_caching,
        drift_guard=drift_guard,
    )
