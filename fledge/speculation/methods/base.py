"""The interface of a drafting method: what it keeps for a request, how it follows the target, how it drafts.

A method has a side for each executor that can run it. The eager side works on lists of requests. The captured side works on
tensors of fixed shapes: it is recorded into CUDA graphs, one for each (batch size, depth, sampling mode), so it neither waits
for the device nor looks at a value. A method without a captured side is refused by name on a GPU.

One cycle of the captured executor, for every method (tensors and names as in `methods.tree`; B rows):

    drafted  = method.draft(pages, depth, sampled=…)                       N = method.num_drafted(depth) tokens a row
    x, aux   = target([pending token ; drafted.tokens], positions, attention, method.aux_layers)
                   chain: causal attention, positions `starts` + 0 … N         tree: `tree.verify_attention`
    chosen   = what the target chooses after each of the 1 + N rows            tree: random numbers by `tree.row_depths`
    only for a tree:  path = accept_tree(chosen, …);  chosen, drafts = collapse(chosen, …)      from here on it is a chain
    accepted = kernels.accept(state, chosen, drafts, depth + 1)            the same for all: stop ids, limits, what is said
    only for a tree:  compact_path(the target's cache, …, path);  aux = along_path(aux, path)
    method.sync(aux, accepted, pages)

How verification attends and what is accepted follow from the shape of the draft, a chain or a tree, not from the method. So a
method is `draft`, `sync` and its state:

                 EAGLE chain               EAGLE tree              n-gram                    block drafter (to come)
    aux_layers   the drafter's             the drafter's           none                      the drafter's
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
from typing import NamedTuple, Protocol

from torch import Tensor

from fledge.kernels.accept import Accepted
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.sample import Choice
from fledge.speculation.drafting import AcceptedSpan, DraftedRequest
from fledge.speculation.methods.tree import TreeDraft
from fledge.speculation.verification import Draft


class Method(Protocol):
    """What an engine knows of a drafting method before it runs, whichever executor runs it."""

    description: str  # for people
    aux_layers: tuple[int, ...]  # target layers whose outputs `sync` reads; (): the target keeps none
    lookahead: int  # KV slots past the text that drafting or verification may write, at the greatest depth


class EagerMethod(Method, Protocol):
    """The side of the eager executor: it syncs and drafts in one call."""

    def draft(self, spans: Sequence[AcceptedSpan], aux: Sequence[Tensor]) -> list[Draft]:
        """Processes the accepted span of each request, then drafts; an empty draft where nothing is wanted or known."""
        ...

    def forget(self, request: DraftedRequest) -> None:
        """The request is finished, cancelled or preempted: what is kept for it beyond its pages goes."""
        ...


class Drafted(NamedTuple):
    """What a captured `draft` returns; lives within one cycle."""

    tree: TreeDraft | None = None  # None: a chain, written to the batch's `drafts`, valid ids in every row
    # A chain's last token while it is a partial argmax: `verify_inputs` resolves it, which saves a launch.
    last: Choice | None = None


class CapturedMethod(Method, Protocol):
    """The side of the CUDA-graph executor. It is made with the batch state (`RowState` and the sampling state) and reads from
    it how long each row's text is, its pending token, and whether it runs; what it does for a row that does not run must
    touch no KV slot. The first len(pages_BP) rows are the batch."""

    # Whether cycles without drafts (depth 0) keep its state up to date. If not, they make a row stale: it is drafted for
    # again only after its text was prefilled again.
    follows_plain_cycles: bool
    reads_text: bool  # `RowState.tokens` must hold a request's text when it takes a row

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
