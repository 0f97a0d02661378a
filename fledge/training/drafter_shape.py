"""The drafter that a recipe asks for, in the shape of its target."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fledge.config import DrafterConfig, MLAConfig, RopeConfig, default_aux_layers
from fledge.errors import ModelError
from fledge.training.recipe import DrafterRecipe, LatentRecipe, RecipeError


def drafter_config(asked: DrafterRecipe, target: Any) -> DrafterConfig:
    """A drafter of the target's shape. `target`: a ModelConfig, or anything with its fields."""
    aux = asked.aux_layers or default_aux_layers(target.num_layers)
    if bad := [i for i in aux if not 0 <= i <= target.num_layers]:
        raise ModelError(f"drafter.aux_layers: the target has {target.num_layers} layers; it cannot be tapped after {bad}")
    if list(aux) != sorted(set(aux)):
        raise RecipeError(f"drafter.aux_layers: {list(aux)} must ascend without repetition")
    draft_vocab_size = asked.draft_vocab_size or target.vocab_size
    if not 0 < draft_vocab_size <= target.vocab_size:
        raise RecipeError(f"drafter.draft_vocab_size: {draft_vocab_size} is more than the target's {target.vocab_size} tokens")
    if not asked.own_head and draft_vocab_size != target.vocab_size:
        raise RecipeError("drafter.own_head: false shares the target's head, so draft_vocab_size must be null")
    is_31 = asked.version == "3.1"
    mla = latent_sizes(asked.mla, target) if asked.attention == "mla" else None
    rope = target.rope
    if rope.kind == "longrope" or (mla is not None and MLAConfig.rope_problem(rope)):
        rope = RopeConfig(theta=rope.theta)  # the drafter need not share the target's positions; plain ones will do
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=asked.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_heads if mla else target.num_kv_heads,
        head_dim=mla.qk_head_dim if mla else target.head_dim,
        max_positions=target.max_positions,
        aux_layer_ids=tuple(aux),
        num_layers=asked.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        fc_norm=is_31 if asked.fc_norm is None else asked.fc_norm,
        norm_output=is_31 if asked.norm_output is None else asked.norm_output,
        norm_before_fc=asked.norm_before_fc,
        norm_before_residual=asked.norm_before_residual,
        window=asked.window,
        own_embedding=asked.own_embedding,
        own_head=asked.own_head,
        qk_norm=asked.qk_norm,
        mla=mla,
    )


def latent_sizes(asked: LatentRecipe, target: Any) -> MLAConfig:
    """What the recipe says, else the target's own sizes, else DeepSeek's with heads as wide as the target's."""
    usual = MLAConfig(
        kv_lora_rank=512,
        qk_nope_head_dim=target.head_dim,
        qk_rope_head_dim=64,
        v_head_dim=target.head_dim,
        q_lora_rank=min(1536, target.hidden_size),
    )
    given = {name: size for name, size in asdict(asked).items() if size is not None}
    sizes = replace(getattr(target, "mla", None) or usual, **given)
    return replace(sizes, q_lora_rank=sizes.q_lora_rank or None)
