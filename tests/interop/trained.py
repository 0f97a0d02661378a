"""A tiny target and drafters that predict it well, trained within seconds on an artificial language.

The next word follows one of several cycles through all words. Which cycle depends on the word two before the last,
and on whether the text begins with the role `user`. So a drafter needs more than the last token.
Initial weights are large, so that layers, norms and positions matter and a wrongly read checkpoint is detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.config import DrafterConfig, RopeConfig
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.drafter import EagleDrafter
from fledge.training.ttt import Unroll, step_masks
from tests.tiny import tiny_drafter_config, tiny_model_config

FIRST_WORD, USER, KINDS = 5, 3, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "max_positions": 512,
    "rope": RopeConfig(theta=8.0),
    "eos_token_ids": (1,),
    "bos_token_id": 0,
}
LENGTH, BATCH, GROWTH, SHARPNESS, BACK = 32, 24, 1.6, 4.0, 2


def cycles() -> Tensor:
    """[2 * KINDS, V]: the word that follows each word, for each cycle."""
    generator = torch.Generator().manual_seed(11)
    tables = []
    for _ in range(2 * KINDS):
        order = torch.randperm(SIZES["vocab_size"] - FIRST_WORD, generator=generator) + FIRST_WORD
        table = torch.full((SIZES["vocab_size"],), int(order[0]))
        table[order] = order.roll(-1)
        tables.append(table)
    return torch.stack(tables)


def texts(count: int, generator: torch.Generator, noise: float, roles: bool = True) -> Tensor:
    """Random texts [count, LENGTH]. `noise`: the probability of a random word instead of the next one in the cycle."""
    table, size = cycles(), SIZES["vocab_size"]
    text = torch.randint(FIRST_WORD, size, (count, LENGTH), generator=generator)
    jump = torch.rand(count, LENGTH, generator=generator) < noise
    if roles:
        text[torch.rand(count, generator=generator) < 1 / 3, 0] = USER
    with_role = text[:, 0] == USER
    for t in range(1 + BACK, LENGTH):
        dialect = KINDS * with_role + text[:, t - 1 - BACK] % KINDS
        text[:, t] = torch.where(jump[:, t], text[:, t], table[dialect, text[:, t - 1]])
    return text


def trained_target(steps: int = 220) -> Decoder:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    decoder = Decoder(tiny_model_config(**SIZES))
    for depth, layer in enumerate(decoder.layers):  # each layer adds about as much to the residual stream as all before it
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(3 * GROWTH**depth)
    positions = torch.arange(LENGTH).repeat(BATCH)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for _ in range(steps):
        text = texts(BATCH, generator, noise=0.2)
        hidden = decoder(text.flatten(), positions, causal_attend([LENGTH] * BATCH)).hidden_ND
        logits = decoder.logits(hidden).unflatten(0, (BATCH, LENGTH))[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return decoder.eval().requires_grad_(False)


def _sharpen(drafter: EagleDrafter) -> None:
    """Scales the queries and keys up for sharper attention, so that positions matter."""
    config, attention = drafter.config, drafter.layers[0].self_attn
    if config.mla is None:
        num_qk = (config.num_heads + config.num_kv_heads) * config.head_dim
        attention.qkv_proj.weight.data[:num_qk].mul_(SHARPNESS)
    else:
        queries = attention.q_b_proj.weight if config.mla.q_lora_rank else attention.qkv_a_proj.weight[: attention.query_size]
        queries.data.mul_(SHARPNESS**2)


def trained_drafter(
    target: Decoder, steps: int = 120, seed: int = 2, roles: bool = True, unroll: int = 3, **settings: Any
) -> EagleDrafter:
    """Trains a drafter on the target's greedy choices. `roles`: whether some texts begin with the role `user`."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(3)
    defaults = {"aux_layer_ids": (2, 4, 5), "rope": target.config.rope}
    config: DrafterConfig = tiny_drafter_config(target.config, **{**defaults, **settings})
    drafter = EagleDrafter(config)
    for norm in (drafter.norm, drafter.layers[0].hidden_norm):
        norm.weight.data.mul_(torch.randn(config.hidden_size).sign())
    _sharpen(drafter)
    if config.draft_vocab_size < config.vocab_size:  # leave out the first words
        left_out = config.vocab_size - config.draft_vocab_size
        kept = torch.cat([torch.arange(FIRST_WORD), torch.arange(FIRST_WORD + left_out, config.vocab_size)])
        drafter.d2t.copy_(kept - torch.arange(config.draft_vocab_size))
    draft_ids = torch.full((config.vocab_size,), -100)  # the index that cross-entropy ignores
    draft_ids[torch.arange(config.draft_vocab_size) + drafter.d2t] = torch.arange(config.draft_vocab_size)
    drafter.share(target.embed_tokens, target.lm_head)
    if config.own_embedding and config.hidden_size == target.config.hidden_size:
        drafter.embed_tokens.weight.data.copy_(target.embed_tokens.weight)
    run = Unroll(drafter)
    masks = step_masks(torch.zeros(BATCH, LENGTH, dtype=torch.int32), unroll, config.window, flex=False)
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    drafter.rotary.reserve(LENGTH + unroll)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps)
    for _ in range(steps):
        text = texts(BATCH, generator, 0.1, roles)
        with torch.no_grad():
            output = target(text.flatten(), positions.flatten(), causal_attend([LENGTH] * BATCH), config.aux_layer_ids)
            choices = draft_ids[target.logits(output.hidden_ND).argmax(-1)].unflatten(0, (BATCH, LENGTH))
        loss = torch.zeros(())
        for step, hidden in enumerate(run(output.taps, text, positions, masks)):
            logits = drafter.logits(hidden).unflatten(0, (BATCH, LENGTH))[:, : -1 - step]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), choices[:, 1 + step :].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    fresh = EagleDrafter(config)  # without the target's shared modules
    fresh.load_state_dict(drafter.state_dict())
    return fresh.eval().requires_grad_(False)
