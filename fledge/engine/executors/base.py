"""The executor interface: an executor runs the target and the drafter for the requests of a plan.

    eager.py        runs a step when it is submitted (CPU; tests compare the other executor with it)
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
        """Whether this chunk completes the prefill, so that the first token follows."""
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
    failure: Exception | None = None  # ends this request only


def not_numbers() -> RuntimeError:
    """The error for logits that are NaN."""
    return RuntimeError("the model's logits are not numbers (NaN): its weights are damaged or overflow; try --dtype float32")


class Executor(ABC):
    """Runs plans. The defaults here suit an executor that completes a step in `submit` and needs no preparation."""

    is_ragged: bool  # one pass mixes draft depths and prefill chunks; otherwise depths are equal and prefill is a pass apart
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
        """Raises for sampling options that this executor cannot serve, naming them."""
        return

    # A step

    @property
    def max_unread_tokens(self) -> int:
        """The most tokens that submitted but uncollected steps may have emitted for a request."""
        return 0

    def prepare(self, decoding: Sequence[Request], *, expects_requests: bool) -> None:
        """Called before a depth is chosen for these requests, so that `costs` are those of their batch."""
        return

    @abstractmethod
    def submit(self, plan: Plan) -> None:
        """Runs or enqueues a step."""

    @abstractmethod
    def collect(self) -> list[Output]:
        """Returns the output of submitted steps that can be read without idling the device; of all if nothing else runs."""

    def resume(self) -> None:
        """Continues a submitted step that needs the host between drafting and verification, after `collect`."""
        return

    @abstractmethod
    def release(self, requests: Sequence[Request]) -> None:
        """Frees the rows and state of requests that leave or are preempted, before their pages are given to others."""

    # Policy

    @abstractmethod
    def chunk_tokens(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> int:
        """How many of a request's `remaining` tokens to prefill in a step that already has these chunks; 0: none."""

    @abstractmethod
    def admits(self, remaining: int, budget: int, chunks: Sequence[Chunk]) -> bool:
        """Whether a waiting request with `remaining` tokens to prefill may join the step."""

    @abstractmethod
    def prefill_budget(self, num_decode_rows: int) -> int:
        """Tokens that a step may prefill beside its decoding rows."""

    def least_reuse(self, num_tokens: int) -> int:
        """The fewest cached tokens worth reusing: with fewer, prefilling the whole text is faster."""
        return 0

    @abstractmethod
    def page_keys(self, request: Request, num_requests: int) -> PageKeys:
        """The prefix-cache keys of a new request's pages; `num_requests`: how many already run or wait."""

    @property
    def prefill_seconds(self) -> float:
        """The least time that any prefill delays the running requests; 0: prefill shares their pass."""
        return 0.0

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """Seconds to prefill `num_tokens` again; None: not known, or never needed here."""
        return None

    def cycles_ahead(self, *, expects_requests: bool) -> int:
        """How many cycles to launch together."""
        return 1

    # Preparing

    def warm_up(self) -> list[str]:
        """Prepares what the first requests need; returns lines for the log."""
        return []

    def compile_kernels(self) -> None:
        """Compiles the kernels that offline runs need; their graphs are recorded on first use."""
        return

    def idle(self) -> bool:
        """Prepares more, for a moment, while no request runs. False: nothing is left to prepare."""
        return False

    # Hidden states, for learning

    @property
    def states(self) -> HostStates | DeviceStates | None:
        """The store of hidden states kept for learning; None: none are kept."""
        return None

    @abstractmethod
    def collect_states(self, *, limit: int) -> None:
        """Starts keeping the hidden states of requests that may be learnt from, up to `limit` tokens each: the outputs of the
        drafter's auxiliary layers and the residual stream before the final norm. Call before `warm_up`. `limit` 0 stops it."""

    def take_states(self, request: Request) -> tuple[int, list[Tensor]] | None:
        """Hands over a finished request's states, once: the first one's position, and one [T, D] per layer. None: not kept."""
        return None if self.states is None else self.states.take(request)

    def drop_states(self, requests: Collection[Request]) -> None:
        """Frees the states of finished requests that will not be taken."""
        if self.states is not None:
            self.states.drop(requests)

    def interrupted(self) -> None:
        """Call it when other work ran on the device, so that its time is not counted as a step's."""
        return

    @abstractmethod
    def check_integrity(self, running: Sequence[Request]) -> None: ...
