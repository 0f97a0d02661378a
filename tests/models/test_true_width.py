"""One layer at the width of a real model against transformers, in fp32 and bf16: random weights, few experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fledge.checkpoints.hf import load_decoder
from fledge.models.decoder import causal_attend

SMALL = {"vocab_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 512, "tie_word_embeddings": False}
TOKENS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
WIDTHS = {
    "Qwen3-30B-A3B": ("Qwen3Moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
    "Mixtral-8x7B": ("Mixtral", {
        "hidden_size": 4096, "intermediate_size": 3584, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 2, "num_experts_per_tok": 1,
    }),
    "Gemma-3-4B": ("Gemma3", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 8,
    }),
    "Phi-4-mini": ("Phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    }),
}  # fmt: skip


def largest_differences(name: str, folder: Path, dtype: torch.dtype) -> tuple[float, float, float]:
    """Of the logits, of the state after the layer, and the largest logit; the weights are what a file in bf16 holds."""
    family, sizes = WIDTHS[name]
    kind = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**SMALL, **TOKENS, **sizes})).eval()
    for parameter in model.parameters():  # larger than a new model's, so that logits are of a usual size
        parameter.copy_((3 * parameter if parameter.dim() > 1 else parameter).bfloat16())
    model = model.to(dtype)
    model.save_pretrained(folder)
    last = {}
    model.model.layers[-1].register_forward_hook(lambda _, __, output: last.update(hidden=output))
    decoder, tokens = load_decoder(folder, dtype), torch.randint(0, 256, (24,))
    output = decoder(tokens, torch.arange(24), causal_attend(), taps=(0, 1))
    logits, wanted = decoder.logits(output.hidden_ND).float(), model(tokens[None]).logits[0].float()
    state = last["hidden"][0] if isinstance(last["hidden"], tuple) else last["hidden"]
    states = (output.taps[1] - state.reshape(24, -1)).abs().max() / state.abs().max()
    return float((logits - wanted).abs().max()), float(states), float(wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WIDTHS)
@torch.no_grad()
def test_one_layer(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    logits, states, largest = largest_differences(name, tmp_path, dtype)
    print(f"{name}, {dtype}: logits differ by {logits:.2g} of {largest:.3g}, states by {states:.2g} of the largest")
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert logits < tolerance * largest
    assert states < tolerance
