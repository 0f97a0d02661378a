"""Timed runs of a data set through an engine at a given concurrency, with or without speculation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fledge.bench.datasets import Item
from fledge.bench.identity import first_difference
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.linear.packed import PackedLinear
from fledge.kernels.quantization import QuantizedLinear
from fledge.sampling import SamplingParams
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.speculation.stats import AcceptanceStats, macro_acceptance_length

Encode = Callable[[list[dict[str, str]]], list[int]]  # a conversation -> prompt token ids
IsLooping = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Turn:
    """One answer of a run, with its times and acceptance."""

    item: str
    category: str
    number: int
    prompt_tokens: int
    tokens: list[int]
    first_token_seconds: float
    seconds: float
    stats: AcceptanceStats

    @property
    def tokens_per_second(self) -> float:
        """The user's decoding speed: tokens after the first, divided by the time after the first."""
        decode = self.seconds - self.first_token_seconds
        return (len(self.tokens) - 1) / decode if len(self.tokens) > 1 and decode > 0 else 0.0


@dataclass
class Run:
    """All answers of one pass over the data, in the order of the data."""

    turns: list[Turn]
    seconds: float
    engine_steps: int
    bytes_read: float  # weights and KV cache that the steps had to read, each counted once per step

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_per_user(self) -> float:
        """Decoded tokens of all answers, divided by the seconds that users waited for them."""
        waited = sum(turn.seconds - turn.first_token_seconds for turn in self.turns)
        return sum(len(turn.tokens) - 1 for turn in self.turns) / waited if waited else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass after prefill. A pass without a draft, as an n-gram drafter may have, gives one token."""
        decoded = sum(len(turn.tokens) - 1 for turn in self.turns)
        undrafted = decoded - sum(turn.stats.emitted for turn in self.turns)
        passes = undrafted + sum(turn.stats.steps for turn in self.turns)
        return decoded / passes if passes else 1.0

    @property
    def first_token_seconds(self) -> float:
        return sum(turn.first_token_seconds for turn in self.turns) / len(self.turns)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds if self.seconds else 0.0


@dataclass
class _Conversation:
    place: int  # index in the data
    item: Item
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def next_turn(self) -> int:
        return len(self.messages) // 2


def run_items(
    engine: Engine,
    items: Sequence[Item],
    encode: Encode,
    params: SamplingParams,
    concurrency: int,
    *,
    speculate: bool,
    on_turn: Callable[[int], None] = lambda _: None,
) -> Run:
    """Runs all conversations in a closed loop: when one ends, the next begins. Later turns follow the model's own answers.

    `on_turn` is called with the number of answers so far."""
    waiting = [_Conversation(place, item) for place, item in enumerate(items)]
    running: dict[str, tuple[_Conversation, Request]] = {}
    turns: dict[tuple[int, int], Turn] = {}
    weights = step_bytes(engine, speculate)
    per_token = _kv_bytes(engine)
    steps, read, began = 0, 0.0, time.perf_counter()

    def submit(conversation: _Conversation) -> None:
        conversation.messages.append({"role": "user", "content": conversation.item.turns[conversation.next_turn]})
        prompt = encode(conversation.messages)
        if len(prompt) + params.max_tokens > engine.config.max_model_len:
            where = f"{conversation.item.id}, turn {conversation.next_turn + 1}"
            raise UserError(
                f"{where}: {len(prompt)} prompt tokens and {params.max_tokens} of the answer exceed the context of "
                f"{engine.config.max_model_len}; lower --max-tokens or leave it out"
            )
        request = engine.add_request(prompt, params, speculate=speculate)
        running[request.id] = (conversation, request)

    while waiting or running:
        while waiting and len(running) < concurrency:
            submit(waiting.pop(0))
        deltas = engine.step()
        steps += 1
        read += weights + per_token * sum(request.num_computed for _, request in running.values())
        for delta in deltas:
            if not delta.finished:
                continue
            conversation, request = running.pop(delta.request.id)
            number = conversation.next_turn + 1
            turns[conversation.place, number] = _turn(conversation.item, number, request)
            on_turn(len(turns))
            conversation.messages.append({"role": "assistant", "content": request.text})
            if conversation.next_turn < len(conversation.item.turns):
                submit(conversation)
    seconds = time.perf_counter() - began
    order = [turns[place, n] for place, item in enumerate(items) for n in range(1, len(item.turns) + 1)]
    return Run(order, seconds, steps, read)


def _turn(item: Item, number: int, request: Request) -> Turn:
    first, end = request.first_token_time or request.arrival, request.finish_time or request.arrival
    return Turn(
        item.id,
        item.category,
        number,
        len(request.prompt),
        request.answer,
        first - request.arrival,
        end - request.arrival,
        request.stats,
    )


# --- bytes --------------------------------------------------------------------------------------------------------


def step_bytes(engine: Engine, speculate: bool) -> int:
    """Bytes of weights that one step reads: the target's once, and the drafter's once per drafted token."""
    read = network_bytes(engine.decoder)
    if speculate and isinstance(engine.drafter, EagleSpeculator):
        network = engine.drafter.network
        shared_head = 0 if "lm_head" in network._modules else _module_bytes(network.head)
        read += engine.drafter.depth.limit * (network_bytes(network) + shared_head)
    return read


def network_bytes(network: torch.nn.Module) -> int:
    """Bytes of all linears. An embedding is not counted, because a step reads only single rows of it."""
    return sum(_module_bytes(module) for module in network.modules())


def _module_bytes(module: torch.nn.Module) -> int:
    if isinstance(module, (PackedLinear, QuantizedLinear)):
        return module.num_bytes
    return module.weight.numel() * module.weight.element_size() if isinstance(module, torch.nn.Linear) else 0


def _kv_bytes(engine: Engine) -> int:
    model = engine.model
    return PagedKV.bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, engine.config.kv_dtype)


def copy_bandwidth(device: str, num_bytes: int = 0, repeats: int = 5) -> float:
    """Memory bandwidth in practice: bytes per second that a large copy reads and writes."""
    cuda = torch.device(device).type == "cuda"
    source = torch.ones((num_bytes or (1 << 30 if cuda else 1 << 28)) // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = 0.0
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        best = max(best, 2 * source.numel() * 4 / (time.perf_counter() - began))
    return best


# --- figures ------------------------------------------------------------------------------------------------------


def acceptance(turns: Sequence[Turn], is_looping: IsLooping) -> dict[str, Any]:
    """Acceptance by every definition, over all answers and over those that do not loop."""
    loops = [is_looping(turn.tokens) for turn in turns]
    straight = [turn for turn, looping in zip(turns, loops, strict=True) if not looping]
    return {
        **_acceptance(turns),
        "looping_answers": sum(loops),
        "not_looping": _acceptance(straight) if straight else None,
        "by_category": {
            category: _acceptance([turn for turn in turns if turn.category == category])
            for category in dict.fromkeys(turn.category for turn in turns)
        },
    }


def _acceptance(turns: Sequence[Turn]) -> dict[str, Any]:
    parts = [turn.stats for turn in turns]
    total = AcceptanceStats.total(parts)
    return {
        "acceptance_length_micro": total.acceptance_length,
        "acceptance_length_macro": macro_acceptance_length(parts),
        "by_position": total.unconditional_rates,
        "by_position_conditional": total.conditional_rates,
        "steps": total.steps,
    }


def identical(plain: Run, other: Run) -> dict[str, Any]:
    """How many answers are the same token by token, and where the first difference is."""
    pairs = list(zip(plain.turns, other.turns, strict=True))
    different = [(a, b) for a, b in pairs if a.tokens != b.tokens]
    first = None
    if different:
        a, b = different[0]
        first = {"item": a.item, "turn": a.number, "token": first_difference(a.tokens, b.tokens)}
    return {"same": len(pairs) - len(different), "of": len(pairs), "first_difference": first}
