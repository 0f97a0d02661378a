"""What the engine asks of an executor: it runs the target and the drafter for the requests of a plan.

    eager.py        runs a step when it is submitted (CPU; in tests, the twin of the other)
    cuda_graph.py   replays captured cycles and reads their output one submission late (GPU)

The executor owns device tensors, rows and graphs. The scheduler owns requests and KV pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fledge.engine.config import EngineConfig
from fledge.engine.executors.hidden_states import DeviceStates, HostStates
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.engine.request import Request, TokenLogprob
from fledge.kernels.attention.paged import PagedKV
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams
from fledge.speculation.controller import SpeculationController
from fledge.speculation.costs import StepCosts
from fledge.speculation.methods.base import Drafter
from fledge.speculation.verification import VerifiedPass


@dataclass(frozen=True)
class Chunk:
    """Part of a request's text to prefill."""

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def completes(self) -> bool:
        """Whether the whole text is prefilled with it, so that a token follows."""
        return self.end == self.request.prefill_end


@dataclass
class Plan:
    """One step: `cycles` decoding cycles for `decodes`, then `prefills`."""

    decodes: dict[Request, int] = field(default_factory=dict)  # with the speculation depth of each, in order of arrival
    prefills: list[Chunk] = field(default_factory=list)
    cycles: int = 1
    grown: list[tuple[Request, int]] = field(default_factory=list)  # requests with new pages, and how many they had before
    expects_requests: bool = False  # waiting requests will take the free rows

    @property
    def depth(self) -> int:
        return max(self.decodes.values(), default=0)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills)


@dataclass
class Output:
    """New tokens of one request, from one or several target passes."""

    request: Request
    tokens: list[int]
    drafted: list[bool]  # per token: the drafter proposed it
    passes: list[VerifiedPass]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failure: Exception | None = None  # the request cannot go on: it ends alone


def not_numbers() -> RuntimeError:
    return RuntimeError("the model's logits are not numbers: its weights are damaged, or overflow; try --dtype float32")


class Executor(ABC):
    """By default a step is complete when it was submitted, and there is nothing to prepare or to interrupt."""

    is_ragged: bool  # one pass holds drafts of different depths and prefill chunks; else depths are equal and prefill is apart
    lookahead: int  # KV slots needed past the text: drafted tokens are stored there before they are verified
    costs: StepCosts

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        pool: PagePool,
        cache: PagedKV,
        controller: SpeculationController,
        drafter: Drafter | None,
    ) -> None:
        self.decoder, self.config, self.pool, self.cache = decoder, config, pool, cache
        self.controller, self.drafter = controller, drafter

    def check(self, params: SamplingParams) -> None:
        """Refuses, by name, sampling options that it cannot serve."""
        return

    # A step

    @property
    def max_unread_tokens(self) -> int:
        """Tokens that a request may have been given by submitted steps that were not collected yet."""
        return 0

    def prepare(self, decoding: Sequence[Request], *, expects_requests: bool) -> None:
        """Before a depth is chosen for these requests, so that `costs` are those of their batch."""
        return

    @abstractmethod
    def submit(self, plan: Plan) -> None:
        """Runs or enqueues a step."""

    @abstractmethod
    def collect(self) -> list[Output]:
        """The output of all submitted steps that the device need not be waited for; of the rest when nothing else runs."""

    def resume(self) -> None:
        """Continues a submitted step that needs the host between drafting and verification, after `collect`."""
        return

    @abstractmethod
    def release(self, requests: Sequence[Request]) -> None:
        """Frees what belongs to requests that leave or are preempted, before their pages are given away."""

    # Policy

    @abstractmethod
    def chunk_tokens(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> int:
        """How many of a request's remaining tokens to prefill in a step that has these chunks already; 0: none."""

    @abstractmethod
    def admits(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> bool:
        """Whether a waiting request with so many tokens to prefill may join the step."""

    @abstractmethod
    def prefill_budget(self, num_decode_rows: int) -> int:
        """Tokens that a step may prefill beside its decoding rows."""

    def least_reuse(self, num_tokens: int) -> int:
        """Cached tokens of a text below which prefilling all of it is faster."""
        return 0

    @abstractmethod
    def page_keys(self, request: Request, num_requests: int) -> PageKeys:
        """Under which keys a new request's pages can be found by others; `num_requests` are running or waiting already."""

    @property
    def prefill_seconds(self) -> float:
        """What any prefill costs the running requests at least; 0: it shares their pass."""
        return 0.0

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """What prefilling so many tokens again takes; None: not known, or never needed here."""
        return None

    def cycles_ahead(self, *, expects_requests: bool) -> int:
        """Cycles to launch together."""
        return 1

    # Preparing

    def warm_up(self) -> list[str]:
        """Prepares what the first requests need; lines for the log."""
        return []

    def compile_kernels(self) -> None:
        """The part of `warm_up` that offline work needs, which records what it uses on the way."""
        return

    def idle(self) -> bool:
        """Nothing runs: prepares more, for a moment. False: there is nothing left to prepare."""
        return False

    # Hidden states, for learning

    @property
    def states(self) -> HostStates | DeviceStates | None:
        """What is kept of them."""
        return None

    @abstractmethod
    def collect_states(self, *, limit: int) -> None:
        """Keeps the hidden states of requests that may be learnt from, up to `limit` tokens each: the drafter's auxiliary
        layers and the residual stream before the final norm. Before `warm_up`. 0: not any more."""

    def take_states(self, request: Request) -> tuple[int, list[Tensor]] | None:
        """Of a finished request: the position of the first, and one [T, D] a layer; None: they were not kept. Once."""
        return None if self.states is None else self.states.take(request)

    def drop_states(self, requests: Collection[Request]) -> None:
        """Of finished requests: their states will not be taken."""
        if self.states is not None:
            self.states.drop(requests)

    def interrupted(self) -> None:
        """Something else ran on the device: what steps cost is measured from here."""
        return

    @abstractmethod
    def check_integrity(self, running: Sequence[Request]) -> None: ...
