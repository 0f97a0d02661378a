"""Which weights are served: candidates are swapped in between two steps, and taken back when live acceptance falls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fledge.engine.engine import Engine
from fledge.kernels.linear.packed import PackedLinear
from fledge.learning.gate import COMPARED_REQUESTS, LEAST_REQUESTS, Decision, Live, has_fallen
from fledge.learning.journal import Journal
from fledge.learning.micro_steps import Kind
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator

log = logging.getLogger("fledge.learning")


@dataclass
class Before:
    """What was served before a swap, while a roll-back may go to it."""

    weights: dict[str, Tensor]
    generation: int
    live: Live


class ServedDrafter:
    def __init__(self, engine: Engine, weights: dict[str, Tensor], d2t: Tensor, journal: Journal) -> None:
        """`weights`: in fp32, that are served now; `d2t`: the drafter's vocabulary."""
        assert isinstance(engine.drafter, EagleSpeculator)
        self.engine, self.drafter, self.network = engine, engine.drafter, engine.drafter.network
        self.journal, self.d2t = journal, d2t
        self.stages_in_parts = self.engine.decoder.norm.weight.device.type == "cpu"
        self.weights, self.generation = weights, 0
        self.newest = 0  # the highest number given: that of a generation that fell is not given again
        # Of generation 0, after a restart with a later one, until the fixed set was measured with them.
        self.first_weights: dict[str, Tensor] | None = None
        self.live = Live()
        self.before: Before | None = None
        self.ngram_tokens = self.ngram_passes = 0  # of the target while n-grams draft
        self.num_swaps = self.num_rollbacks = 0

    def stage(self, weights: dict[str, Tensor]) -> tuple[StagedWeights, Iterator[Kind]]:
        """The weights as they are served, and the work to get there: on a CPU a module at a time, on a GPU all at once."""
        staged = StagedWeights(self.network)

        def work() -> Iterator[Kind]:
            yield Kind.STAGE
            for _ in staged.prepare(weights):
                if self.stages_in_parts:
                    yield Kind.STAGE

        return staged, work()

    def swap(self, weights: dict[str, Tensor], decision: Decision) -> Iterator[Kind]:
        staged, work = self.stage(weights)
        yield from work
        yield Kind.SWAP
        before = Before(self.weights, self.generation, self.live)
        staged.apply()
        self.newest += 1  # at once: if something below fails, the log names what is served
        self.weights, self.generation = weights, self.newest
        if self.before is None or self.live.requests >= LEAST_REQUESTS:  # too few say nothing: the one before stays
            self.before = before
        if self.drafter.fallback is not None:
            self.before = None  # what was seen of n-grams says nothing about these weights
        self._serves_another()
        self.num_swaps += 1
        log.info("learning: generation %d is served: %s", self.generation, decision.reason)
        self.journal.record("swap", generation=self.generation, **decision.to_dict())
        self.save(decision.to_dict())

    def roll_back(self, reason: str) -> None:
        """Serves the generation before again."""
        assert self.before is not None
        before, fallen = self.before, self.generation
        staged, work = self.stage(before.weights)
        for _ in work:
            pass
        staged.apply()
        self.weights, self.generation, self.before = before.weights, before.generation, None
        self._serves_another()
        self.live = before.live
        self.num_rollbacks += 1
        log.warning("learning: generation %d is taken back, generation %d is served again: %s", fallen, self.generation, reason)
        self.journal.record("rollback", fallen=fallen, reason=reason)
        self.journal.choose(self.generation)

    def refused(self, decision: Decision) -> None:
        log.info("learning: candidate refused: %s", decision.reason)
        self.journal.record("refused", **decision.to_dict())

    def has_fallen(self) -> bool:
        """Whether live acceptance is clearly lower than before the swap. Some hundred requests later traffic may have changed
        as well as the weights, and nothing is compared any more."""
        if self.before is None:
            return False
        if has_fallen(self.before.live, self.live):
            return True
        if self.live.requests >= COMPARED_REQUESTS:
            self.before = None
        return False

    def note_passes(self, tokens: int, accepted: int) -> None:
        """Of a finished request: so many tokens, of which so many were drafted; each other one took a pass of the target."""
        if self.drafter.fallback is not None:
            self.ngram_tokens += tokens
            self.ngram_passes += tokens - accepted

    def choose_drafts(self, decision: Decision) -> None:
        """Day 0: n-grams draft until the drafter's acceptance length on held-out texts exceeds their tokens per target pass.
        Asked before the decision is acted on."""
        if self.drafter.fallback is None or not self.ngram_passes:
            return
        if (decision.recent_after if decision.accepted else decision.recent_before) > self.ngram_tokens / self.ngram_passes:
            self.drafter.fallback, self.before = None, None
            self.live = Live()  # what was counted is n-grams'
            log.info("learning: the drafter drafts instead of n-grams from now on")

    def save(self, figures: dict[str, Any]) -> None:
        if self.journal.generations is None:
            return
        with torch.device("meta"):
            copy = EagleDrafter(self.network.config)
        state = {name: value.cpu() for name, value in self.weights.items()}
        copy.load_state_dict({**state, "d2t": self.d2t.cpu()}, assign=True)
        needed = [] if self.before is None else [self.before.generation]  # a roll-back would go to it
        has_ngrams = self.drafter.fallback is not None
        self.journal.save(copy, self.generation, {**figures, "has_ngrams": has_ngrams}, needed)

    def release(self) -> None:
        """Learning has stopped: the served network stays as it is."""
        self.weights, self.before, self.first_weights = {}, None, None

    def _serves_another(self) -> None:
        """The drafter's part of cached pages, and what the guard knows, belong to the weights before."""
        self.live = Live()
        self.engine.forget_drafts()


def weights_of(drafter: EagleDrafter) -> dict[str, Tensor]:
    """A copy in fp32, on its device."""
    return {name: value.detach().float().clone() for name, value in drafter.named_parameters()}


def are_finite(weights: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def staged_bytes(network: EagleDrafter) -> int:
    """What `StagedWeights` takes for a while: all that is served in another type or layout than fp32."""
    modules = list(network.modules())
    plain = [one for module in modules for one in module.parameters(recurse=False) if one.dtype != torch.float32]
    return sum(one.nbytes for one in plain) + sum(one.num_bytes for one in modules if isinstance(one, PackedLinear))


class StagedWeights:
    """New weights for a served network, in its types and layouts: prepared beside it, then copied in place, so that captured
    graphs and C pointers stay valid. The engine runs no step during `apply`."""

    def __init__(self, network: EagleDrafter) -> None:
        self.network = network
        self.copies: list[tuple[Tensor, Tensor]] = []  # to, from
        self.packed: list[tuple[PackedLinear, PackedLinear]] = []  # where there is no C code: to, from

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Casts and packs module by module; pauses after each."""
        for name, module in self.network.named_modules():
            if isinstance(module, PackedLinear):
                fresh = PackedLinear(_plain(weights[f"{name}.weight"], weights.get(f"{name}.bias")), module.asked_bits)
                self._stage_packed(module, fresh)
            else:
                for own, place in module.named_parameters(recurse=False):
                    self.copies.append((place, weights[f"{name}.{own}" if name else own].to(place)))
            yield

    @torch.no_grad()
    def apply(self) -> None:
        """Enqueued behind all launched work on a GPU; done when it returns on a CPU."""
        for place, value in self.copies:
            place.copy_(value)
        for module, fresh in self.packed:
            module.packed, module.bias = fresh.packed, fresh.bias

    def _stage_packed(self, module: PackedLinear, fresh: PackedLinear) -> None:
        if module.native is None:
            self.packed.append((module, fresh))
            return
        assert fresh.native is not None
        assert fresh.bits == module.bits
        self.copies += zip(module.native.panels, fresh.native.panels, strict=True)
        if module.native.bias is not None and fresh.native.bias is not None:
            self.copies.append((module.native.bias, fresh.native.bias))


def _plain(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI.cpu(), requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O.cpu(), requires_grad=False)
    return linear
