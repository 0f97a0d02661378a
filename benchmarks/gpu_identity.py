"""Checks that answers do not depend on batch, load, cache, chunks or speculation, with default settings; for `gpu.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gpu_show import shown

from fledge.bench.identity import compare_ways
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams

SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}


def compare(
    decoder: Decoder,
    drafter: EagleDrafter | None,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    device: str = "cuda",
    capture: bool | None = None,
) -> dict[str, Any]:
    """Compares every way of serving with plain decoding alone: how many answers are equal, and where the others differ."""
    prompts, found = prompts[: args.identity_prompts], {}
    longest = min(max(map(len, prompts)) + args.identity_tokens + 64, decoder.config.max_positions)
    users = min(64, len(prompts))

    def build(speculative: bool, **settings: Any) -> Engine:
        dtype = "bfloat16" if device == "cuda" else "float32"
        tokens = (users + 2) * (longest + 256)
        config = EngineConfig(device=device, dtype=dtype, max_model_len=longest, kv_cache_tokens=tokens, **settings)
        return build_engine(decoder, Speculation(drafter if speculative else "none"), config, capture=capture)

    for name, options in SAMPLING.items():
        params = [
            SamplingParams(max_tokens=args.identity_tokens, seed=index, ignore_eos=True, **options)
            for index in range(len(prompts))
        ]
        ways = compare_ways(build, prompts, params, users=users, speculate=drafter is not None)
        found[name] = ways.pairs()
        for way, pair in found[name].items():
            shown(f"{name}: {way}", pair)
        found[f"{name}: all equal"] = ways.holds
    return {"prompts": len(prompts), "tokens": args.identity_tokens, **found}
