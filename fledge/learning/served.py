"""The served drafter weights: candidates are swapped in between two steps, and rolled back when live acceptance falls."""

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
    """The weights and figures before a swap, kept while a roll-back is possible."""

    weights: dict[str, Tensor]
    generation: int
    live: Live


class ServedDrafter:
    def __init__(self, engine: Engine, weights: dict[str, Tensor], d2t: Tensor, journal: Journal) -> None:
        """`weights`: the weights that are served now, in fp32; `d2t`: the drafter's vocabulary."""
        assert isinstance(engine.drafter, EagleSpeculator)
        self.engine, self.drafter, self.network = engine, engine.drafter, engine.drafter.network
        self.journal, self.d2t = journal, d2t
        self.stages_in_parts = self.engine.decoder.norm.weight.device.type == "cpu"
        self.weights, self.generation = weights, 0
        self.newest = 0  # the highest number used so far; the number of a rolled-back generation is not used again
        # Weights of generation 0 after a restart with a later one, until they have been measured on the fixed set.
        self.first_weights: dict[str, Tensor] | None = None
        self.live = Live()
        self.before: Before | None = None
        self.ngram_tokens = self.ngram_passes = 0  # answer tokens and target passes while n-grams draft
        self.num_swaps = self.num_rollbacks = 0

    def stage(self, weights: dict[str, Tensor]) -> tuple[StagedWeights, Iterator[Kind]]:
        """Returns the staged weights and the micro-steps that fill them: one per module on a CPU, a single one on a GPU."""
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
        self.newest += 1  # before anything below can fail, so that the log names the generation that is served
        self.weights, self.generation = weights, self.newest
        if self.before is None or self.live.requests >= LEAST_REQUESTS:  # with too few requests the older baseline stays
            self.before = before
        if self.drafter.fallback is not None:
            self.before = None  # live figures of n-grams are no baseline for these weights
        self._serves_another()
        self.num_swaps += 1
        log.info("learning: generation %d is served: %s", self.generation, decision.reason)
        self.journal.record("swap", generation=self.generation, **decision.to_dict())
        self.save(decision.to_dict())

    def roll_back(self, reason: str) -> None:
        """Serves the previous generation again."""
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
        log.warning("learning: rolled back from generation %d to generation %d: %s", fallen, self.generation, reason)
        self.journal.record("rollback", fallen=fallen, reason=reason)
        self.journal.choose(self.generation)

    def refused(self, decision: Decision) -> None:
        log.info("learning: candidate refused: %s", decision.reason)
        self.journal.record("refused", **decision.to_dict())

    def has_fallen(self) -> bool:
        """Whether live acceptance is clearly lower than before the swap. The comparison ends after `COMPARED_REQUESTS`
        requests, because by then the traffic may have changed as well as the weights."""
        if self.before is None:
            return False
        if has_fallen(self.before.live, self.live):
            return True
        if self.live.requests >= COMPARED_REQUESTS:
            self.before = None
        return False

    def note_passes(self, tokens: int, accepted: int) -> None:
        """Counts a finished request's answer tokens and target passes: each token that is not an accepted draft took a pass."""
        if self.drafter.fallback is not None:
            self.ngram_tokens += tokens
            self.ngram_passes += tokens - accepted

    def choose_drafts(self, decision: Decision) -> None:
        """Ends n-gram drafting once the drafter's acceptance length on held-out texts exceeds the n-grams' tokens per target
        pass. Called before the decision is acted on."""
        if self.drafter.fallback is None or not self.ngram_passes:
            return
        if (decision.recent_after if decision.accepted else decision.recent_before) > self.ngram_tokens / self.ngram_passes:
            self.drafter.fallback, self.before = None, None
            self.live = Live()  # the figures so far are of n-grams
            log.info("learning: the drafter now replaces n-gram drafting")

    def save(self, figures: dict[str, Any]) -> None:
        if self.journal.generations is None:
            return
        with torch.device("meta"):
            copy = EagleDrafter(self.network.config)
        state = {name: value.cpu() for name, value in self.weights.items()}
        copy.load_state_dict({**state, "d2t": self.d2t.cpu()}, assign=True)
        needed = [] if self.before is None else [self.before.generation]  # the target of a roll-back
        has_ngrams = self.drafter.fallback is not None
        self.journal.save(copy, self.generation, {**figures, "has_ngrams": has_ngrams}, needed)

    def release(self) -> None:
        """Frees the weights after learning has stopped; the served network stays as it is."""
        self.weights, self.before, self.first_weights = {}, None, None

    def _serves_another(self) -> None:
        """Resets what belongs to the previous weights: live figures, the drafter's cached KV pages, the guard's records."""
        self.live = Live()
        self.engine.forget_drafts()


def weights_of(drafter: EagleDrafter) -> dict[str, Tensor]:
    """Returns a copy of the drafter's weights in fp32, on its device."""
    return {name: value.detach().float().clone() for name, value in drafter.named_parameters()}


def are_finite(weights: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def staged_bytes(network: EagleDrafter) -> int:
    """Returns the temporary memory of `StagedWeights`: all weights that are served in another type or layout than fp32."""
    modules = list(network.modules())
    plain = [one for module in modules for one in module.parameters(recurse=False) if one.dtype != torch.float32]
    return sum(one.nbytes for one in plain) + sum(one.num_bytes for one in modules if isinstance(one, PackedLinear))


class StagedWeights:
    """New weights for a served network in its types and layouts. They are prepared separately, then copied in place, so that
    CUDA graphs and C pointers stay valid. The engine runs no step during `apply`."""

    def __init__(self, network: EagleDrafter) -> None:
        self.network = network
        self.copies: list[tuple[Tensor, Tensor]] = []  # (to, from)
        self.packed: list[tuple[PackedLinear, PackedLinear]] = []  # (to, from) of modules without C code

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Casts and packs the weights module by module; yields after each."""
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
        """Copies the weights into the served network; on a GPU the copies are enqueued after all launched work."""
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
