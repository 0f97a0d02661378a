"""A speculation cycle with draft trees over tiny networks: the order in which an executor composes the parts."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.accept import Accepted, RowState, accept
from fledge.kernels.compact_path import compact_path
from fledge.kernels.decode_attention import decode_attention
from fledge.kernels.paged_attention import PagedKV
from fledge.kernels.sample import Choice
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend
from fledge.speculation.depth import TreeShape
from fledge.speculation.methods.tree import (
    DraftStep,
    Frontier,
    TreeAttention,
    TreePath,
    accept_tree,
    along_path,
    collapse,
    grow_tree,
    tree_attention,
    verify_attention,
)


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


def draft_step(network: EagleDrafter, cache: PagedKV, page_table_BP: Tensor, starts_B: Tensor, active_B: Tensor) -> DraftStep:
    def step(frontier: Frontier) -> tuple[Tensor, Tensor]:
        where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, page_table_BP, cache.page_size)
        meta = tree_attention(starts_B, active_B, *where)
        attend = attend_over(cache, page_table_BP, meta)
        hidden, h = network(frontier.tokens_BW.flatten(), frontier.h_BWD.flatten(0, 1), meta.positions_BT.flatten(), attend)
        return tuple(x.unflatten(0, frontier.tokens_BW.shape) for x in (network.logits(hidden), h))

    return step


def chain_attention(starts_B: Tensor, counts_B: Tensor, num_new: int, page_table_BP: Tensor, page_size: int) -> TreeAttention:
    """`num_new` consecutive tokens a row; those past its count see and are stored like the others, behind the text."""
    bits = (1 << torch.arange(1, num_new + 1)) - 1
    return tree_attention(
        starts_B, counts_B, torch.arange(num_new), bits.expand(len(starts_B), -1), num_new, page_table_BP, page_size
    )


class TreeCycle:
    """Greedy requests from their prompts to their ends."""

    def __init__(
        self, decoder: Decoder, drafter: EagleDrafter, shape: TreeShape, depth: int, prompts: list[list[int]], limit: int
    ) -> None:
        self.decoder, self.drafter, self.shape, self.depth = decoder, drafter, shape, depth
        drafter.share(decoder.embed_tokens, decoder.lm_head)
        batch, page_size = len(prompts), 8
        pages_each = -(-(max(map(len, prompts)) + limit + 80) // page_size)
        self.page_table = torch.randperm(batch * pages_each).view(batch, pages_each).int()
        configs = (decoder.config, drafter.config)
        self.cache, self.drafter_cache = (
            PagedKV(c.num_layers, c.num_kv_heads, c.head_dim, batch * pages_each, page_size, torch.float32, "cpu")
            for c in configs
        )
        for cache in (self.cache, self.drafter_cache):
            cache.take_memory()
        self.state = RowState(
            active=torch.zeros(batch, dtype=torch.int32),
            token=torch.zeros(batch, dtype=torch.int64),
            length=torch.zeros(batch, dtype=torch.int32),
            answered=torch.zeros(batch, dtype=torch.int32),
            answers=torch.zeros(batch, limit + depth + 1, dtype=torch.int32),
            status=torch.zeros(batch, dtype=torch.int32),
            report=torch.zeros(batch, 2 + depth, dtype=torch.int32),
            limit=torch.full((batch,), limit, dtype=torch.int32),
            depth_limit=torch.full((batch,), depth, dtype=torch.int32),
            stop_ids=torch.full((batch, 1), -1),
        )
        self.h = torch.zeros(batch, drafter.config.hidden_size)
        self.paths: list[TreePath] = []
        for row, prompt in enumerate(prompts):
            self.prefill(row, prompt)

    def prefill(self, row: int, prompt: list[int]) -> None:
        state, pages, one = self.state, self.page_table[row : row + 1], torch.ones(1, dtype=torch.int32)
        meta = chain_attention(torch.zeros(1, dtype=torch.int32), one, len(prompt), pages, self.cache.page_size)
        attend = attend_over(self.cache, pages, meta)
        aux_layers = self.drafter.config.aux_layer_ids
        hidden, aux = self.decoder(torch.tensor(prompt), meta.positions_BT[0], attend, aux_layers)
        state.active[row], state.length[row] = 1, len(prompt)
        choice = Choice(torch.zeros(1, 1), self.decoder.logits(hidden[-1:]).argmax(-1, keepdim=True).int())
        accepted = accept(state, choice, torch.zeros(1, 1), 1, self.decoder.config.vocab_size, torch.tensor([row]))
        pairs = torch.tensor([*prompt[1:], int(accepted.tokens_BT)])
        attend = attend_over(self.drafter_cache, pages, meta)
        self.h[row] = self.drafter(pairs, self.drafter.fuse(aux), meta.positions_BT[0], attend).feedback_ND[-1]

    def step(self) -> None:
        """draft -> verify -> accept -> synchronise; this is what is captured."""
        state, pages, size = self.state, self.page_table, self.cache.page_size
        starts, active = state.length - 1, state.active.clone()
        logits = self.drafter.logits(self.h if self.drafter.config.norm_output else self.drafter.norm(self.h))
        step = draft_step(self.drafter, self.drafter_cache, pages, starts, active)
        tree = grow_tree(logits, self.h, step, self.shape, self.depth)

        meta = verify_attention(tree, starts, active, pages, size)
        tokens = torch.cat([state.token[:, None], tree.tokens_BN], 1)
        attend, aux_layers = attend_over(self.cache, pages, meta), self.drafter.config.aux_layer_ids
        hidden, aux = self.decoder(tokens.flatten(), meta.positions_BT.flatten(), attend, aux_layers)
        chosen = self.decoder.logits(hidden).argmax(-1).view(tokens.shape)

        path = accept_tree(chosen, tree, self.depth, active)
        self.paths.append(path)
        chosen, drafts = collapse(chosen, tree, path)
        choice = Choice(torch.zeros(chosen.numel(), 1), chosen.view(-1, 1).int())
        accepted = accept(state, choice, drafts, self.depth + 1, self.decoder.config.vocab_size)
        compact_path(self.cache.keys, self.cache.values, pages, size, starts, path.rows_BT, path.counts_B)
        self.sync([along_path(x, path) for x in aux], accepted)

    def sync(self, aux: list[Tensor], accepted: Accepted) -> None:
        num_new = self.depth + 1
        meta = chain_attention(accepted.starts_B, accepted.counts_B, num_new, self.page_table, self.cache.page_size)
        attend = attend_over(self.drafter_cache, self.page_table, meta)
        output = self.drafter(accepted.tokens_BT.flatten(), self.drafter.fuse(aux), meta.positions_BT.flatten(), attend)
        last = (accepted.counts_B.long() - 1).clamp(min=0)
        self.h = output.feedback_ND.view(len(last), num_new, -1)[torch.arange(len(last)), last]
