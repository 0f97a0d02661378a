"""N-gram drafting in captured cycles: what followed the last few tokens before, looked up on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fledge.kernels.accept import Accepted
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.ngram import ngram_drafts
from fledge.speculation.methods.base import Drafted
from fledge.speculation.methods.eagle import Rows
from fledge.speculation.ngram import NgramSpeculator


class CapturedNgram:
    """Reads the rows' texts, which `kernels.accept` keeps up to date: it has no state of its own, and is never stale."""

    aux_layers: tuple[int, ...] = ()
    row_state: Sequence[Tensor] = ()
    follows_plain_cycles = True
    reads_text = True
    cache = None

    def __init__(self, batch: Rows, max_depth: int, drafter: NgramSpeculator) -> None:
        """`drafter`: says how many tokens are looked up; read when a cycle is recorded."""
        self.batch, self.max_depth, self.drafter = batch, max_depth, drafter
        self.lookahead = max_depth + 1
        self.description = "n-gram look-up"

    def num_drafted(self, depth: int) -> int:
        return depth

    def prefill(
        self, aux: Sequence[Tensor], following_N: Tensor, meta: AttentionMetadata, rows_S: Tensor, last_S: Tensor
    ) -> None:
        """The text is in its row already."""

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        state, size = self.batch.rows, len(pages_BP)
        assert state.tokens is not None, "`reads_text`"
        sizes = (self.drafter.longest, self.drafter.shortest)
        found = ngram_drafts(state.tokens, state.length, state.active, size, depth, *sizes)
        self.batch.drafts[:size, :depth].copy_(found)
        return Drafted()

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Nothing to do: the accepted tokens are in the text."""
