"""A captured executor in small: one cycle for every drafting method, over tiny networks and the kernels' references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.kernels.accept import Accepted, RowState, accept
from fledge.kernels.attention.decode_attention import decode_attention
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.compact_path import compact_path
from fledge.kernels.ngram import append_tokens, ngram_drafts
from fledge.kernels.sample import Choice, Draws, choose
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend
from fledge.speculation.depth import TreeShape
from fledge.speculation.methods.base import CapturedMethod, Drafted
from fledge.speculation.methods.tree import (
    DraftStep,
    Frontier,
    TreeAttention,
    TreePath,
    accept_tree,
    along_path,
    collapse,
    grow_tree,
    num_nodes,
    row_depths,
    tree_attention,
    verify_attention,
)

PAGE = 8


def attend_over(cache: PagedKV, page_table_BP: Tensor, meta: TreeAttention) -> Attend:
    """Stores the new keys and values, then attends, as `rope_cache` and `decode_attention` do on a GPU."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        slots = meta.slots_BT.flatten()
        stored = slots >= 0
        for storage, new in ((cache.keys, k), (cache.values, v)):
            storage[layer][:, slots[stored]] = new[stored].transpose(0, 1)
        return decode_attention(
            q.view(len(meta.kv_lens_B), -1, *q.shape[1:]),
            cache.keys[layer],
            cache.values[layer],
            page_table_BP,
            meta.kv_lens_B,
            cache.page_size,
            tail_bits_BT=meta.tail_bits_BT,
            tail=meta.tail,
            positions_BT=meta.positions_BT,
            window=window,
        ).flatten(0, 1)

    return attend


def chain_attention(starts_B: Tensor, active_B: Tensor, num_new: int, page_table_BP: Tensor, page_size: int) -> TreeAttention:
    """`num_new` consecutive tokens a row."""
    bits = (1 << torch.arange(1, num_new + 1)) - 1
    return tree_attention(
        starts_B, active_B, torch.arange(num_new), bits.repeat(len(starts_B), 1), num_new, page_table_BP, page_size
    )


def draft_step(network: EagleDrafter, cache: PagedKV, page_table_BP: Tensor, starts_B: Tensor, active_B: Tensor) -> DraftStep:
    def step(frontier: Frontier) -> tuple[Tensor, Tensor]:
        where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, page_table_BP, cache.page_size)
        meta = tree_attention(starts_B, active_B, *where)
        inputs = (frontier.tokens_BW.flatten(), frontier.h_BWD.flatten(0, 1), meta.positions_BT.flatten())
        hidden, h = network(*inputs, attend_over(cache, page_table_BP, meta))
        return tuple(x.unflatten(0, frontier.tokens_BW.shape) for x in (network.logits(hidden), h))

    return step


class Eagle:
    """What a chain and a tree have in common."""

    follows_plain_cycles = False

    def __init__(self, network: EagleDrafter, decoder: Decoder, state: RowState, num_pages: int) -> None:
        config = network.config
        self.network, self.state = network.share(decoder.embed_tokens, decoder.lm_head), state
        self.aux_layers = config.aux_layer_ids
        self.cache = PagedKV(config.num_layers, config.num_kv_heads, config.head_dim, num_pages, PAGE, torch.float32, "cpu")
        self.cache.take_memory()
        self.h = torch.zeros(len(state.active), config.hidden_size)
        self.row_state = [self.h]

    def start(self, row: int, text: Sequence[int]) -> None:
        pass

    def prefill(self, aux, following_N, attention, rows_S, last_S) -> None:
        pages, meta = attention
        attend = attend_over(self.cache, pages, meta)
        self.h[rows_S] = self.network(following_N, self.network.fuse(aux), meta.positions_BT[0], attend).feedback_ND[last_S]

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        batch, num_new = accepted.tokens_BT.shape
        meta = chain_attention(accepted.starts_B, accepted.counts_B, num_new, pages_BP, PAGE)
        inputs = (accepted.tokens_BT.flatten(), self.network.fuse(aux), meta.positions_BT.flatten())
        output = self.network(*inputs, attend_over(self.cache, pages_BP, meta))
        last = (accepted.counts_B.long() - 1).clamp(min=0)
        self.h[:batch] = output.feedback_ND.view(batch, num_new, -1)[torch.arange(batch), last]

    def logits(self, h: Tensor) -> Tensor:
        return self.network.logits(h if self.network.config.norm_output else self.network.norm(h))


class EagleTree(Eagle):
    description = "EAGLE tree"

    def __init__(self, shape: TreeShape, depth: int, *arguments) -> None:
        super().__init__(*arguments)
        self.shape, self.lookahead = shape, max(shape.nodes + 1, shape.width * (depth - 1))

    def num_drafted(self, depth: int) -> int:
        return num_nodes(self.shape, depth, self.network.config.draft_vocab_size)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        batch = len(pages_BP)
        h, starts, active = self.h[:batch], self.state.length[:batch] - 1, self.state.active[:batch]
        step = draft_step(self.network, self.cache, pages_BP, starts, active)
        tree = grow_tree(self.logits(h), h, step, self.shape, depth)
        return Drafted(tree.tokens_BN, tree)


class EagleChain(Eagle):
    description = "EAGLE chain"

    def __init__(self, depth: int, *arguments) -> None:
        super().__init__(*arguments)
        self.lookahead = depth + 1

    def num_drafted(self, depth: int) -> int:
        return depth

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        batch = len(pages_BP)
        h, starts, active = self.h[:batch], self.state.length[:batch] - 1, self.state.active[:batch]
        tokens = [self.logits(h).argmax(-1)]
        for step in range(depth - 1):
            meta = chain_attention(starts + step, active, 1, pages_BP, PAGE)
            attend = attend_over(self.cache, pages_BP, meta)
            hidden, h = self.network(tokens[-1], h, meta.positions_BT.flatten(), attend)
            tokens.append(self.network.logits(hidden).argmax(-1))
        return Drafted(torch.stack(tokens, 1))


class Ngram:
    description = "n-gram"
    aux_layers = ()
    follows_plain_cycles = True

    def __init__(self, depth: int, state: RowState, longest_text: int) -> None:
        self.state, self.lookahead = state, depth + 1
        self.texts = torch.zeros(len(state.active), longest_text + depth + 1, dtype=torch.int32)
        self.row_state = [self.texts]

    def num_drafted(self, depth: int) -> int:
        return depth

    def start(self, row: int, text: Sequence[int]) -> None:
        self.texts[row, : len(text)] = torch.tensor(text)

    def prefill(self, aux, following_N, attention, rows_S, last_S) -> None:
        pass

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        state, batch = self.state, len(pages_BP)
        # The first token of an answer comes from no cycle, so the pending token is written here.
        append_tokens(self.texts, state.token[:batch, None], state.length[:batch] - 2, state.active[:batch])
        return Drafted(ngram_drafts(self.texts, state.length, state.active, batch, depth))

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        append_tokens(self.texts, accepted.tokens_BT, accepted.starts_B, accepted.counts_B)


def batch_state(num_rows: int, limit: int, depth: int) -> RowState:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    return RowState(
        active=zeros(num_rows),
        token=zeros(num_rows, dtype=torch.int64),
        length=zeros(num_rows),
        answered=zeros(num_rows),
        answers=zeros(num_rows, limit + depth + 1),
        status=zeros(num_rows),
        report=zeros(num_rows, 2 + depth),
        limit=torch.full((num_rows,), limit, dtype=torch.int32),
        depth_limit=torch.full((num_rows,), depth, dtype=torch.int32),
        stop_ids=torch.full((num_rows, 1), -1),
    )


class Cycle:
    """Requests from their prompts to their ends. `make_method(state, number of pages)`."""

    def __init__(
        self,
        decoder: Decoder,
        make_method: Callable[[RowState, int], CapturedMethod],
        depth: int,
        prompts: list[list[int]],
        limit: int,
        temperature: float = 0.0,
    ) -> None:
        self.decoder, self.depth, batch = decoder, depth, len(prompts)
        self.state = batch_state(batch, limit, depth)
        self.temperatures, self.seeds = torch.full((batch,), temperature), torch.arange(batch)
        pages_each = -(-(max(map(len, prompts)) + limit + 80) // PAGE)
        self.pages = torch.randperm(batch * pages_each).view(batch, pages_each).int()
        config = decoder.config
        self.cache = PagedKV(
            config.num_layers, config.num_kv_heads, config.head_dim, self.pages.numel(), PAGE, torch.float32, "cpu"
        )
        self.cache.take_memory()
        self.method = make_method(self.state, self.pages.numel())
        assert self.method.lookahead <= 80
        self.paths: list[TreePath] = []
        for row, prompt in enumerate(prompts):
            self.prefill(row, prompt)

    def choose(self, hidden_ND: Tensor, rows: slice, ahead_BT: Tensor) -> Choice:
        """`ahead_BT`: tokens between the pending one and each row. The noise belongs to the token's place in its answer."""
        num_new = ahead_BT.shape[1]
        temperatures, seeds = (x[rows].repeat_interleave(num_new) for x in (self.temperatures, self.seeds))
        counters = (self.state.answered[rows, None] + ahead_BT).flatten()
        return choose(self.decoder.logits(hidden_ND), Draws(temperatures, seeds, counters))

    def prefill(self, row: int, prompt: list[int]) -> None:
        state, method, pages, rows = self.state, self.method, self.pages[row : row + 1], torch.tensor([row])
        method.start(row, prompt)
        meta = chain_attention(torch.zeros(1, dtype=torch.int32), torch.ones(1), len(prompt), pages, PAGE)
        attend = attend_over(self.cache, pages, meta)
        hidden, aux = self.decoder(torch.tensor(prompt), meta.positions_BT[0], attend, method.aux_layers)
        state.active[row], state.length[row] = 1, len(prompt)
        choice = self.choose(hidden[-1:], slice(row, row + 1), torch.zeros(1, 1, dtype=torch.int64))
        accepted = accept(state, choice, torch.zeros(1, 1), 1, self.decoder.config.vocab_size, rows)
        following = torch.tensor([*prompt[1:], int(accepted.tokens_BT)])
        method.prefill(aux, following, (pages, meta), rows, torch.tensor([len(prompt) - 1]))

    def step(self) -> None:
        """draft -> verify -> accept -> synchronise: what a graph records."""
        state, method, pages, depth = self.state, self.method, self.pages, self.depth
        starts, active = state.length - 1, state.active.clone()  # `accept` changes both
        drafted = method.draft(pages, depth, sampled=True)
        tree, drafts = drafted.tree, drafted.tokens_BN
        assert drafts.shape[1] == method.num_drafted(depth)

        tokens = torch.cat([state.token[:, None], drafts], 1)
        if tree is None:
            meta, ahead = chain_attention(starts, active, depth + 1, pages, PAGE), torch.arange(depth + 1).expand_as(tokens)
        else:
            meta, ahead = verify_attention(tree, starts, active, pages, PAGE), row_depths(tree)
        attend = attend_over(self.cache, pages, meta)
        hidden, aux = self.decoder(tokens.flatten(), meta.positions_BT.flatten(), attend, method.aux_layers)
        choice = self.choose(hidden, slice(len(pages)), ahead)

        path = None
        if tree is not None:
            chosen = choice.ids_NC.view(tokens.shape).long()  # `sample.picked` on a GPU
            path = accept_tree(chosen, tree, depth, active)
            self.paths.append(path)
            chosen, drafts = collapse(chosen, tree, path)
            choice = Choice(torch.zeros(chosen.numel(), 1), chosen.view(-1, 1).int())
        accepted = accept(state, choice, drafts, depth + 1, self.decoder.config.vocab_size)
        if path is not None:
            compact_path(self.cache.keys, self.cache.values, pages, PAGE, starts, path.rows_BT, path.counts_B)
            aux = [along_path(x, path) for x in aux]
        method.sync(aux, accepted, pages)
