"""Parses vLLM's `--speculative-config` into the engine's options."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from fledge.engine.options import DEFAULT_DEPTH, Speculation
from fledge.errors import UserError
from fledge.speculation.depth import TreeShape

BOTH_GIVEN = "--speculative-config replaces --drafter and --depth; give one or the other"
METHODS = ("eagle3", "eagle", "ngram")
EAGER = "a GPU always runs captured CUDA graphs, a CPU never does"

# Keys of --speculative-config -> the values that are accepted, and why others are not.
FIXED = {
    "draft_tensor_parallel_size": ((1, None), "the drafter runs on one device; use --engine vllm for more"),
    "quantization": ((None,), "drafters are served in --dtype"),
    "max_model_len": ((None,), "the drafter follows the target's --max-model-len"),
    "revision": ((None,), "fetch the revision you want and give its folder as 'model'"),
    "disable_by_batch_size": (
        (None,),
        'the depth follows the load, down to 0, by measured cost; a request switches it off with "speculate": false',
    ),
    "speculative_token_tree": ((None,), "give --tree, and its shape with --tree-width and --tree-nodes"),
    "rejection_sample_method": ((None, "strict", "standard"), "verification is exact here; leave it out"),
    "parallel_drafting": ((None, False), "drafters that propose a block in one pass are not supported"),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """The parts of vLLM's `--speculative-config` that Fledge supports."""

    speculation: Speculation
    prompt_lookup_max: int | None = None  # n-gram: the longest match tried
    prompt_lookup_min: int | None = None
    notes: tuple[str, ...] = ()  # keys that have no effect, for the log

    @classmethod
    def parse(cls, text: str | dict[str, Any], tree: TreeShape | None = None) -> SpeculativeConfig:
        given = json_object("--speculative-config", text) if isinstance(text, str) else dict(text)
        for key, (values, reason) in FIXED.items():
            if given.pop(key, None) not in values:
                raise UserError(f"--speculative-config: {key!r} does not apply here: {reason}")
        eager = "--speculative-config: enforce_eager has no effect: " + EAGER
        notes = (eager,) if given.pop("enforce_eager", None) else ()
        model, method = given.pop("model", None), given.pop("method", None)
        depth = given.pop("num_speculative_tokens", None)
        longest, shortest = given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None)
        if given:
            known = ["method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"]
            raise UserError(f"--speculative-config: unknown key {next(iter(given))!r}; known: {', '.join(known)}")
        if method is None:
            method = "ngram" if model in (None, "ngram", "[ngram]") else "eagle3"
        if method not in METHODS:
            raise UserError(
                f"--speculative-config: method {method!r} is not supported; supported: {', '.join(METHODS)}. "
                "For others use --engine vllm"
            )
        if method != "ngram" and not model:
            raise UserError("--speculative-config: 'model' is missing; name the drafter's folder, or use method 'ngram'")
        if method == "ngram":
            longest = 5 if longest is None and shortest is None else longest or shortest
            shortest = shortest or longest
            if not all(isinstance(one, int) and one > 0 for one in (longest, shortest)) or shortest > longest:
                raise UserError("--speculative-config: prompt_lookup_min and _max must be whole numbers, 1 <= min <= max")
        elif longest is not None or shortest is not None:
            raise UserError("--speculative-config: prompt_lookup_min and _max belong to method 'ngram'")
        if method != "ngram" and not isinstance(model, str):
            raise UserError(f"--speculative-config: 'model' is a folder, a name or a hub id, not {model!r:.40}")
        speculation = Speculation("ngram" if method == "ngram" else model, DEFAULT_DEPTH if depth is None else depth, tree)
        return cls(speculation, longest, shortest, notes)

    def with_depth_rules(self, adaptive: bool, drift_guard: bool) -> SpeculativeConfig:
        return replace(self, speculation=replace(self.speculation, adaptive=adaptive, drift_guard=drift_guard))


def json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} is not valid JSON ({error}); put it in single quotes in a shell") from None
    if not isinstance(value, dict):
        raise UserError(f"{flag} must be a JSON object, not {text}")
    return value
