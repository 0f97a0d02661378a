"""The interface of a drafting method: its state, how it follows the target, how it drafts.

A method has two implementations. The `Drafter` runs in the eager executor and works on lists of requests. The `CapturedMethod`
works on tensors of fixed shapes and is recorded into CUDA graphs, one for each (batch size, depth, sampling mode), so it never
waits for the device or reads a value on the host. A method without a `CapturedMethod` is refused on a GPU by an error. To add
a method, write both in a file here and add its name in `engine.build`.

One cycle of the captured executor, for every method (tensors and names as in `methods.tree`; B rows):

    drafted  = method.draft(pages, depth, sampled=…)                       N = method.num_drafted(depth) tokens per row
    x, aux   = target([pending token ; drafted.tokens], positions, attention, method.taps)
                   chain: causal attention, positions `starts` + 0 … N         tree: `tree.verify_attention`
    chosen   = the target's choice after each of the 1 + N rows                tree: random numbers by `tree.row_depths`
    only for a tree:  path = accept_tree(chosen, …);  chosen, drafts = collapse(chosen, …)      from here on it is a chain
    accepted = kernels.accept(state, chosen, drafts, depth + 1)            the same for all: stop ids, limits, emitted tokens
    only for a tree:  compact_path(the target's cache, …, path);  aux = along_path(aux, path)
    method.sync(aux, accepted, pages)

Attention in verification and acceptance depend on the shape of the draft, a chain or a tree, not on the method. So a method
consists of `draft`, `sync` and its state:

                 EAGLE chain               EAGLE tree              n-gram                    block drafter (planned)
    taps         the drafter's             the drafter's           none                      the drafter's
    row_state    the last output [R, D]    the same                none: it reads the texts  depends on the network
    own KV       pairs, in the target's pages (the pair at t in slot t)   none               states, in the target's pages
    prefill      pairs of all positions    the same                nothing                   states of all positions
    draft        depth passes, one row     depth - 1 passes of W   `ngram_drafts`            one pass of `depth` masked
                 each                      rows: `grow_tree`                                 positions: a chain
    sync         pairs of the accepted     the same                nothing                   states of the accepted span
                 span, from its states
    lookahead    depth + 1                 max(nodes + 1,          depth + 1                 depth + 1
                                           W * (depth - 1))
    plain cycles make its rows stale       make its rows stale     are followed              make its rows stale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fledge.kernels.accept import Accepted, RowState
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV, SequenceLayout
from fledge.kernels.sample import PartialArgmax, SamplingState
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.methods.tree import TreeDraft
from fledge.speculation.verification import Draft


class DraftedRequest(Protocol):
    """The properties of a request that a drafter reads."""

    tokens: list[int]  # prompt and answer
    pages: list[int]  # shared by the target's cache and the drafter's
    params: SamplingParams

    def __hash__(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def num_answer(self) -> int: ...


@dataclass
class AcceptedSpan:
    """One request after a target pass: the rows of the pass that became part of its text, and how far it may be drafted for."""

    request: Any  # a DraftedRequest
    start: int  # position of the first row
    rows: list[int]  # rows of the pass: the hidden states of positions start, start + 1, …
    max_draft_tokens: int = 0  # 0: no draft (its prompt is not completely prefilled, or the load is too high)


class Drafter(Protocol):
    """A drafting method: its properties, its implementation for the eager executor, and a way to make its captured one."""

    depth: DepthPolicy
    taps: tuple[int, ...]  # target layers whose outputs it reads; (): none
    lookahead: int  # KV slots past the text that drafting or verification may write
    description: str  # for log lines and error messages

    @property
    def knows_confidence(self) -> bool:
        """Whether the confidences of its greedy drafts estimate how often they are accepted."""
        ...

    def draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        """Processes the spans' hidden states, then drafts for each; empty drafts where none is wanted or possible."""
        ...

    def forget(self, request: DraftedRequest) -> None:
        """Frees what is kept for a finished, cancelled or preempted request besides its pages."""
        ...

    def captured(self, batch: Rows, max_positions: int, max_depth: int) -> CapturedMethod | None:
        """Makes its implementation for the CUDA-graph executor, for a batch of rows; None: it has none."""
        ...


class Rows(Protocol):
    """The parts of the batch state that captured methods read (`engine.executors.batch_state.BatchState`)."""

    seed: Tensor
    drafts: Tensor
    rows: RowState

    def draws(self, rows: slice | Tensor, *, truncated: bool) -> SamplingState: ...


class DraftObserver(Protocol):
    """Observes drafts while they are made, without changing them."""

    def begin(self, spans: Sequence[AcceptedSpan]) -> bool:
        """Called before a sync pass for these spans and the draft steps after it. Returns whether it will observe them."""
        ...

    def step(
        self, tokens: list[int], h: Tensor, positions: list[int], layouts: list[SequenceLayout]
    ) -> tuple[Tensor, Tensor] | None:
        """May run the drafter's step itself to record internals, and returns its results; None: it does not observe it."""
        ...

    def end(self, spans: Sequence[AcceptedSpan]) -> None: ...


class Drafted(NamedTuple):
    """The result of a captured `draft`; valid within one cycle."""

    tree: TreeDraft | None = None  # None: a chain, written to the batch's `drafts`, with valid ids in every row
    # A chain's last token as a partial argmax, which `verify_inputs` resolves: this saves a launch.
    last: PartialArgmax | None = None


class CapturedMethod(Protocol):
    """A drafting method's implementation for the CUDA-graph executor. It reads each row's text length, pending token and
    whether it is active from the batch state (`RowState` and the sampling state); for inactive rows it must not write to any
    KV slot. The first len(pages_BP) rows are the batch."""

    taps: tuple[int, ...]  # the same as the drafter's
    # Whether cycles without drafts (depth 0) keep its state up to date. If not, they make a row stale: it is drafted for
    # again only after its text was prefilled again.
    follows_plain_cycles: bool
    reads_text: bool  # `RowState.tokens` must hold a request's text when it takes a row
    # Whether penalties, bans and grammars can be applied along its drafts. If not, requests with any of them get no drafts.
    adjusts_drafts: bool

    @property
    def row_state(self) -> Sequence[Tensor]:
        """Tensors [R, …] whose rows belong to a request from cycle to cycle and move with it."""
        ...

    @property
    def cache(self) -> PagedKV | None:
        """The drafter's own KV cache, addressed by the target's pages; None: it has none."""
        ...

    def num_drafted(self, depth: int) -> int:
        """The drafted tokens per row that a cycle of this depth verifies. At most `depth` of them are accepted."""
        ...

    def prefill(
        self, aux: Sequence[Tensor], following_N: Tensor, meta: AttentionMetadata, rows_S: Tensor, last_S: Tensor
    ) -> None:
        """Prefills the method's state; captured after the target's pass over N tokens of S prompts and the choice of first
        tokens.

        `following_N`: the token after each one. `meta`: the pass's metadata, the same as the target's. `last_S`: index of
        each prompt's last token. `rows_S`: the row of each prompt.
        """
        ...

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        """Drafts; captured at the start of a cycle. `sampled`: some row is not greedy; drafts may be drawn with its noise."""
        ...

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Updates the method's state with the accepted tokens; captured at the end of a cycle.

        `aux`: [B * T, D] each, the states of positions `starts` … along the accepted path; `accepted.tokens_BT[:, t]` is the
        token after the t-th of them. Only a row's first `accepted.counts_B` are valid; 0: the row is empty or has ended.
        """
        ...
