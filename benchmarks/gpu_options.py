"""Measures the cost of sampling options and drafting methods in captured cycles, for `gpu.py`.

Each option is compared with the same requests without it, in alternating closed loops; medians. Penalties and sampling change
the text, and so its acceptance length: `per_cycle` is the ratio corrected for that (tokens/s divided by acceptance length). For
structured output the benchmark uses its own mask, which bans a few tokens and takes FILL_US microseconds of host time per
position, about as long as a grammar library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpu_long import randomised
from gpu_loop import answering_seconds, closed_loop, record_ahead
from gpu_show import shown
from gpu_steps import step_time
from torch import Tensor

from fledge.config import DrafterConfig, MLAConfig, default_aux_layers
from fledge.engine.build import Speculation
from fledge.engine.engine import Engine
from fledge.engine.executors.batch_state import ADJUSTED, GREEDY
from fledge.engine.executors.graphs import size_for
from fledge.kernels.bits import num_words, pack_bits
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape

if TYPE_CHECKING:
    from gpu import Bench

OPTION_USERS = [1, 16]
FILL_US = 8  # time of a grammar's mask per position: xgrammar 0.2.8 with a JSON schema and 49,152 tokens takes 7 on average
TREE = TreeShape(width=4, nodes=12)
MIXED = "mixed"  # every request has another option


class BannedTokens:
    """A `TokenMask` that allows all but a few tokens, and takes as long as a grammar."""

    def __init__(self, banned: Sequence[int], vocab_size: int) -> None:
        self.banned = list(banned)
        self.allowed_W = torch.from_numpy(~pack_bits(self.banned, num_words(vocab_size)))

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        logits[self.banned] = -torch.inf
        return logits

    def fill(self, tokens: Sequence[int], mask_W: Tensor) -> None:
        began = time.perf_counter()
        mask_W &= self.allowed_W
        while time.perf_counter() - began < FILL_US / 1e6:
            pass


class Option(NamedTuple):
    settings: dict[str, Any]
    without: dict[str, Any]  # settings of the same requests without the option


def option_table(vocab_size: int, max_tokens: int) -> dict[str, Option]:
    """The options by name. They name only the vocabulary's last tokens, which are rarely generated, so texts stay the same."""
    rare = range(vocab_size - 5, vocab_size)
    greedy, sampled = {"temperature": 0.0}, {"temperature": 0.8, "seed": 1}

    def with_greedy(**settings: Any) -> Option:
        return Option(greedy | settings, greedy)

    return {
        "greedy": with_greedy(),
        "sampled": Option(sampled, greedy),
        "top-p 0.9": Option(sampled | {"top_p": 0.9}, sampled),
        "logprobs 5": with_greedy(logprobs=5),
        "penalties": with_greedy(repetition_penalty=1.1, presence_penalty=0.5),
        "bias": with_greedy(logit_bias=dict.fromkeys(rare, -1.0)),
        "min_tokens 32": with_greedy(min_tokens=min(32, max_tokens)),
        "JSON-like mask": with_greedy(logits_processors=(BannedTokens(rare, vocab_size),)),
    }


def mixed_settings(vocab_size: int, max_tokens: int) -> list[dict[str, Any]]:
    """Settings of sixteen requests, all different."""
    table = {name: option.settings for name, option in option_table(vocab_size, max_tokens).items()}
    rare = tuple(range(vocab_size - 20, vocab_size))
    sampled = table["sampled"]
    return [
        *table.values(),
        sampled | {"top_k": 20},
        sampled | {"min_p": 0.05},
        sampled | {"logprobs": 5},
        {"temperature": 0.0, "logprobs": 20},
        {"temperature": 0.0, "frequency_penalty": 0.3},
        {"temperature": 0.0, "bad_word_ids": (rare[:1], rare[1:3])},
        {"temperature": 0.0, "stop_token_ids": rare},
        sampled | {"top_p": 0.9, "repetition_penalty": 1.1},
    ]


def options(bench: Bench) -> dict[str, object]:
    found: dict[str, object] = {
        "what": "tokens_per_s_per_user: closed loop, prompts included; without: the same requests without the option; ratio: "
        "the one over the other; per_cycle: the ratio at equal acceptance length; *_us: microseconds a cycle",
        "mask": f"a mask that bans 5 tokens and takes {FILL_US} us a position, in place of a grammar library",
    }
    print(f"\n== options ({found['what']}; JSON-like mask: {found['mask']})")
    depth, parts = bench.args.option_depth, bench.args.option_parts.split(",")
    if "cycles" in parts:
        found["cycles"] = cycle_times(bench)
    ways = {}
    if bench.drafter is not None and "speculative" in parts:
        ways[f"depth {depth}"] = Speculation(bench.drafter, depth).fixed_depth()
    if "plain" in parts:
        ways["plain"] = None
    for name, speculation in ways.items():
        engine = bench.build(max(bench.args.option_users), speculation)
        for users in bench.args.option_users:
            found[f"{name}, {users} users"] = option_speeds(bench, engine, users, name)
        del engine
    return found


def num_requests(bench: Bench, users: int) -> int:
    """Requests of a closed loop. Fewer than four users get as many as four, so that a single prompt weighs less."""
    return bench.args.option_requests * max(users, 4)


def option_speeds(bench: Bench, engine: Engine, users: int, way: str) -> dict[str, dict[str, float]]:
    count, vocab_size, tokens = num_requests(bench, users), engine.model.vocab_size, bench.args.tokens
    prompts = bench.some_prompts(count)
    every_mode = range(GREEDY, ADJUSTED + 1)
    record_ahead(engine, users, [engine.controller.limit], every_mode, [len(prompt) for prompt in prompts])

    def run(settings: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """Tokens/s per user and acceptance length."""
        common = {"max_tokens": tokens, "ignore_eos": True}
        params = [SamplingParams(**common, **settings[index % len(settings)]) for index in range(count)]
        before = replace(engine.stats)
        speed = closed_loop(engine, prompts, params, users).tokens_per_s / users
        steps = engine.stats.steps - before.steps
        return speed, 1 + (engine.stats.accepted - before.accepted) / steps if steps else 1.0

    table = option_table(vocab_size, tokens)
    runs = {name: ([option.settings], [option.without]) for name, option in table.items()}
    if users > 1:
        runs[MIXED] = (mixed_settings(vocab_size, tokens), [table["greedy"].settings])
    if names := [name for name in bench.args.option_names.split(",") if name]:
        runs = {name: pair for name, pair in runs.items() if name in names}
    found: dict[str, dict[str, float]] = {}
    for name, pair in runs.items():
        turns = [[run(settings) for settings in pair] for _ in range(bench.args.rounds + 1)][1:]  # the first warms up
        (speed, length), (base, base_length) = (
            [statistics.median(column) for column in zip(*(turn[which] for turn in turns), strict=True)] for which in (0, 1)
        )
        figures = {
            "tokens_per_s_per_user": speed,
            "without": base,
            "ratio": speed / base,
            "per_cycle": speed / base * base_length / length,
            "acceptance_length": length,
            "acceptance_length_without": base_length,
        }
        found[name] = shown(f"{way}, {users} users, {name}", figures)
    return found


# cycles


def cycle_times(bench: Bench) -> dict[str, dict[str, object]]:
    """Cycle times of each drafting method, greedy: `replay_us`, replays on the device with all rows running; `as_run_us`, wall
    clock in the engine's loop; `recorded_us`, replays with empty rows, which the engine's first cost estimate uses."""
    print("\n== cycles: microseconds")
    methods = {"plain": Speculation(None), "n-gram, depth 5": Speculation("ngram", 5)}
    if bench.drafter is not None:
        methods |= {f"chain, depth {depth}": Speculation(bench.drafter, depth) for depth in (3, 5)}
        methods["tree of 12, width 4, depth 5"] = Speculation(bench.drafter, 5, TREE)
    methods |= {f"MLA chain (random weights), depth {depth}": Speculation(latent_drafter(bench), depth) for depth in (3, 5)}
    found: dict[str, dict[str, object]] = {}
    for name, speculation in methods.items():
        engine = bench.build(max(bench.args.option_users), speculation.fixed_depth())
        for rows in bench.args.option_users:
            label = f"{name}, {rows} rows"
            found[label] = shown(label, one_cycle_time(bench, engine, rows))
        del engine
    return found


def one_cycle_time(bench: Bench, engine: Engine, rows: int) -> dict[str, object]:
    depth, batch = engine.controller.limit, engine.executor.batch
    prompts = bench.some_prompts(num_requests(bench, rows))
    params = [SamplingParams(max_tokens=bench.args.tokens, temperature=0, ignore_eos=True)] * len(prompts)
    record_ahead(engine, rows, [depth], [GREEDY], [len(prompt) for prompt in prompts])
    closed_loop(engine, prompts, params, rows)
    requests = closed_loop(engine, prompts, params, rows).requests
    cycles = [request.stats.steps if depth else request.num_answer - 1 for request in requests]
    shape = (size_for(batch.sizes, rows), depth, GREEDY)
    seconds = batch.graphs.seconds.get(shape)
    return {
        "captured": shape in batch.graphs.graphs,
        "replay_us": step_time(bench, batch, rows, depth, steps=40 if batch.graphs.capture else 2),
        "as_run_us": 1e6 * statistics.median(map(lambda one, n: answering_seconds(one) / max(n, 1), requests, cycles)),
        "recorded_us": None if seconds is None else 1e6 * seconds,
        "acceptance_length": statistics.mean(request.stats.acceptance_length for request in requests),
    }


def latent_drafter(bench: Bench) -> EagleDrafter:
    """A drafter of random weights, with latent attention in DeepSeek's proportions."""
    target = bench.decoder.config
    base = DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        aux_layer_ids=default_aux_layers(target.num_layers),
    )
    if bench.drafter is not None:  # the same sizes, so that the two can be compared
        base = replace(bench.drafter.config, attention_bias=False, mlp_bias=False, qk_norm=False)
    size = base.head_dim
    mla = MLAConfig(kv_lora_rank=4 * size, qk_nope_head_dim=size, qk_rope_head_dim=size // 2, v_head_dim=size)
    with torch.device(bench.device):
        drafter = EagleDrafter(replace(base, mla=mla, num_kv_heads=base.num_heads, head_dim=mla.qk_head_dim))
    if bench.drafter is not None:
        drafter.d2t.copy_(bench.drafter.d2t)
    return randomised(drafter.to(bench.config(1).weight_dtype))
