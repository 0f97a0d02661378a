"""N-gram drafting: proposes the tokens that followed the last few tokens earlier. Good if an answer repeats its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fledge.kernels.accept import Accepted
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.ngram import ngram_drafts
from fledge.speculation.depth import DepthPolicy
from fledge.speculation.methods.base import AcceptedSpan, Drafted, DraftedRequest, Rows
from fledge.speculation.verification import Draft


class NgramSpeculator:
    """Proposes what followed the most recent earlier occurrence of the last n tokens, longest n first."""

    taps: tuple[int, ...] = ()
    knows_confidence = False

    def __init__(self, depth: DepthPolicy, longest: int = 4, shortest: int = 2) -> None:
        self.depth, self.longest, self.shortest = depth, longest, shortest
        self.lookahead = depth.limit + 1
        self.description = f"n-gram look-up, depth {depth}"
        self.indexes: dict[int, _NgramIndex] = {}

    def forget(self, request: DraftedRequest) -> None:
        self.indexes.pop(id(request), None)

    def captured(self, batch: Rows, max_positions: int, max_depth: int) -> CapturedNgram:
        return CapturedNgram(batch, self)

    def draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        drafts = []
        for span in spans:
            draft = Draft()
            if span.max_draft_tokens > 0:
                index = self.indexes.setdefault(id(span.request), _NgramIndex(self.longest, self.shortest))
                # Always to the limit: a look-up has no probability to stop at.
                draft = Draft.chain(index.lookup(span.request.tokens, min(span.max_draft_tokens, self.depth.limit)))
            drafts.append(draft)
        return drafts


class _NgramIndex:
    """The position at which each n-gram of a growing text last ended."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.last_end: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0  # n-grams that end before this position are indexed

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        # The n-gram at the text's end is indexed only by the next call, so that it never finds itself.
        for end in range(self.num_indexed, len(tokens)):
            for size in self.sizes:
                if end >= size:
                    self.last_end[tuple(tokens[end - size : end])] = end
        self.num_indexed = len(tokens)
        for size in self.sizes:
            found = self.last_end.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if found is not None:
                return tokens[found : found + count]
        return []


class CapturedNgram:
    """Drafts n-grams in captured cycles. It reads the rows' texts, which `kernels.accept` keeps up to date, so it has no state
    of its own and no row gets stale."""

    taps: tuple[int, ...] = ()
    row_state: Sequence[Tensor] = ()
    follows_plain_cycles = True
    reads_text = True
    adjusts_drafts = True
    cache = None

    def __init__(self, batch: Rows, drafter: NgramSpeculator) -> None:
        """`drafter`: gives the n-gram sizes, which are read when a cycle is recorded."""
        self.batch, self.drafter = batch, drafter

    def num_drafted(self, depth: int) -> int:
        return depth

    def prefill(
        self, aux: Sequence[Tensor], following_N: Tensor, meta: AttentionMetadata, rows_S: Tensor, last_S: Tensor
    ) -> None:
        """Does nothing: the text is in its row already."""

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        state, size = self.batch.rows, len(pages_BP)
        assert state.tokens is not None, "`reads_text`"
        sizes = (self.drafter.longest, self.drafter.shortest)
        found = ngram_drafts(state.tokens, state.length, state.active, size, depth, *sizes)
        self.batch.drafts[:size, :depth].copy_(found)
        return Drafted()

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Does nothing: the accepted tokens are in the text already."""
