"""The interface of a drafting method: what it keeps for a request, how it follows the target, how it drafts.

A method is a `Drafter`, which is its side of the eager executor and works on lists of requests. Its captured side works on
tensors of fixed shapes: it is recorded into CUDA graphs, one for each (batch size, depth, sampling mode), so it neither waits
for the device nor looks at a value. A method without a captured side is refused by name on a GPU. To add one: a file here with
both, and its name in `engine.build`.

One cycle of the captured executor, for every method (tensors and names as in `methods.tree`; B rows):

    drafted  = method.draft(pages, depth, sampled=…)                       N = method.num_drafted(depth) tokens a row
    x, aux   = target([pending token ; drafted.tokens], positions, attention, method.taps)
                   chain: causal attention, positions `starts` + 0 … N         tree: `tree.verify_attention`
    chosen   = what the target chooses after each of the 1 + N rows            tree: random numbers by `tree.row_depths`
    only for a tree:  path = accept_tree(chosen, …);  chosen, drafts = collapse(chosen, …)      from here on it is a chain
    accepted = kernels.accept(state, chosen, drafts, depth + 1)            the same for all: stop ids, limits, what is said
    only for a tree:  compact_path(the target's cache, …, path);  aux = along_path(aux, path)
    method.sync(aux, accepted, pages)

How verification attends and what is accepted follow from the shape of the draft, a chain or a tree, not from the method. So a
method is `draft`, `sync` and its state:

                 EAGLE chain               EAGLE tree              n-gram                    block drafter (to come)
    taps         the drafter's             the drafter's           none                      the drafter's
    row_state    the last output [R, D]    the same                none: it reads the texts  as the network needs
    own KV       pairs, in the target's pages (the pair at t in slot t)   none               likewise
    prefill      pairs of all positions    the same                nothing                   states of all positions
    draft        depth passes, one row     depth - 1 passes of W   `ngram_drafts`            one pass of `depth` masked
                 each                      rows: `grow_tree`                                 positions: a chain
    sync         pairs of the accepted     the same                nothing                   states of the accepted span
                 span, from its states
    lookahead    depth + 1                 max(nodes + 1,          depth + 1                 depth + 1
                                           W * (depth - 1))
    plain cycles make it stale             make it stale           are followed              make it stale
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
    """What a drafter may know of a request."""

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
    """One request after a target pass: which rows of the pass are now its text, and how far it may be drafted."""

    request: Any  # a DraftedRequest
    start: int  # position of the first row
    rows: list[int]  # rows of the pass, the hidden states of positions start, start + 1, …
    max_draft_tokens: int = 0  # 0: none wanted (its prompt is not prefilled yet, or nothing is drafted under this load)


class Drafter(Protocol):
    """A drafting method: what an engine knows of it, its side of the eager executor, and where its captured side is."""

    depth: DepthPolicy
    taps: tuple[int, ...]  # target layers whose outputs it reads; (): the target keeps none
    lookahead: int  # KV slots past the text that drafting or verification may write
    description: str  # for people

    @property
    def knows_confidence(self) -> bool:
        """Whether the confidences of its greedy drafts say how often they are accepted."""
        ...

    def draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        """Processes the spans' hidden states, then drafts for each; an empty draft where none is wanted or nothing is known."""
        ...

    def forget(self, request: DraftedRequest) -> None:
        """The request is finished, cancelled or preempted: what is kept for it beyond its pages goes."""
        ...

    def captured(self, batch: Rows, max_positions: int, max_depth: int) -> CapturedMethod | None:
        """Its side of the CUDA-graph executor, for a batch of rows; None: it has none."""
        ...


class Rows(Protocol):
    """What captured methods read of the batch (`engine.executors.batch_state.BatchState`)."""

    seed: Tensor
    drafts: Tensor
    rows: RowState

    def draws(self, rows: slice | Tensor, *, truncated: bool) -> SamplingState: ...


class DraftObserver(Protocol):
    """Looks at drafts as they are made; they stay what they are."""

    def begin(self, spans: Sequence[AcceptedSpan]) -> bool:
        """A sync pass for these spans, and then draft steps for those that are drafted for, are about to run: does it look?"""
        ...

    def step(
        self, tokens: list[int], h: Tensor, positions: list[int], layouts: list[SequenceLayout]
    ) -> tuple[Tensor, Tensor] | None:
        """May run the drafter's step itself, to see inside; None: it does not look at this one."""
        ...

    def end(self, spans: Sequence[AcceptedSpan]) -> None: ...


class Drafted(NamedTuple):
    """What a captured `draft` returns; lives within one cycle."""

    tree: TreeDraft | None = None  # None: a chain, written to the batch's `drafts`, valid ids in every row
    # A chain's last token while it is a partial argmax: `verify_inputs` resolves it, which saves a launch.
    last: PartialArgmax | None = None


class CapturedMethod(Protocol):
    """The side of the CUDA-graph executor. It is made with the batch state (`RowState` and the sampling state) and reads from
    it how long each row's text is, its pending token, and whether it runs; what it does for a row that does not run must
    touch no KV slot. The first len(pages_BP) rows are the batch."""

    taps: tuple[int, ...]  # as the drafter's
    # Whether cycles without drafts (depth 0) keep its state up to date. If not, they make a row stale: it is drafted for
    # again only after its text was prefilled again.
    follows_plain_cycles: bool
    reads_text: bool  # `RowState.tokens` must hold a request's text when it takes a row
    # Whether penalties, bans and grammars are followed along its drafts. If not, requests with any of them take no drafts.
    adjusts_drafts: bool

    @property
    def row_state(self) -> Sequence[Tensor]:
        """[R, …] each: belongs to a row from cycle to cycle and moves with it."""
        ...

    @property
    def cache(self) -> PagedKV | None:
        """Its own keys and values, in the target's pages."""
        ...

    def num_drafted(self, depth: int) -> int:
        """Tokens a row that a cycle of this depth verifies behind the pending one. At most `depth` of them are accepted."""
        ...

    def prefill(
        self, aux: Sequence[Tensor], following_N: Tensor, meta: AttentionMetadata, rows_S: Tensor, last_S: Tensor
    ) -> None:
        """Part of a prefill graph, after the target's pass over N tokens of S prompts and the choice of their first tokens.

        `following_N`: the token after each one. `meta`: of the pass, as the target had it. `last_S`: index of
        each prompt's last token, `rows_S`: the row it takes.
        """
        ...

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        """Part of a cycle's graph, at its start. `sampled`: some row is not greedy, so drafts may be drawn with its noise."""
        ...

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Part of a cycle's graph, at its end: takes in what the cycle accepted.

        `aux`: [B * T, D] each, the states of positions `starts` … along the accepted path; `accepted.tokens_BT[:, t]` is the
        token after the t-th of them. The first `accepted.counts_B` of a row count; 0: it is empty or has ended.
        """
        ...
