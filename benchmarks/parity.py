"""Compares families with transformers: one layer at a real model's width, random weights, few experts.

    python benchmarks/parity.py [--device cuda] [--json FILE]

Compares logits and states of the network in fp32 and bf16, and log-probabilities of the engine's answers (the CPU executor, or
captured cycles on a GPU). Checks that answers are the same with an EAGLE and a latent-attention drafter of random weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from fledge import progress
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.hf import load_decoder
from fledge.config import DrafterConfig, MLAConfig, ModelConfig
from fledge.engine.build import EngineConfig, Speculation, build_engine
from fledge.engine.request import Request
from fledge.models.decoder import causal_attend
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams

SMALL = {"vocab_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 512, "tie_word_embeddings": False}
TOKENS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("Llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    }),
    "Mistral-7B": ("Mistral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "sliding_window": 8,
    }),
    "Ministral-8B": ("Ministral", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 8, "layer_types": ["sliding_attention"],
    }),
    "Qwen2.5-1.5B": ("Qwen2", {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
    }),
    "Qwen3-1.7B": ("Qwen3", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }),
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
    "Gemma-2B": ("Gemma", {
        "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    }),
    "SmolLM3-3B": ("SmolLM3", {
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4,
        "no_rope_layers": [0],
    }),
    "Seed-OSS-36B": ("SeedOss", {
        "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True,
    }),
    "GLM-4-9B": ("Glm", {
        "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": True, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }),
    "GLM-4-9B-0414": ("Glm4", {
        "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": True, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }),
    "Phi-4-mini": ("Phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    }),
}  # fmt: skip
MLA = MLAConfig(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, q_lora_rank=96)
LENGTHS, ANSWER = (1, 30, 7, 19), 24


@dataclass(frozen=True)
class Differences:
    """The largest differences, relative to the largest logit and the largest state."""

    logits: float
    states: float


def reference(name: str, folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A transformers model, also saved in `folder`; its weights are rounded to bf16."""
    family, sizes = WIDTHS[name]
    kind = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**SMALL, **TOKENS, **sizes})).eval().requires_grad_(False)
    for parameter in model.parameters():  # larger than in a new model, so that logits have a realistic size
        parameter.copy_((3 * parameter if parameter.dim() > 1 else parameter).bfloat16())
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def network_differences(name: str, folder: Path, dtype: torch.dtype, device: str = "cpu") -> Differences:
    model, last = reference(name, folder, dtype).to(device), {}
    model.model.layers[-1].register_forward_hook(lambda _, __, output: last.update(hidden=output))
    decoder, tokens = load_decoder(folder, dtype).to(device), torch.randint(0, SMALL["vocab_size"], (24,), device=device)
    output = decoder(tokens, torch.arange(24, device=device), causal_attend(), taps=(0, 1))
    logits, wanted = decoder.logits(output.hidden_ND).float(), model(tokens[None]).logits[0].float()
    state = last["hidden"][0] if isinstance(last["hidden"], tuple) else last["hidden"]
    states = (output.taps[1] - state.reshape(24, -1)).abs().max() / state.abs().max()
    return Differences(float((logits - wanted).abs().max() / wanted.abs().max()), float(states))


def drafter(target: ModelConfig, mla: MLAConfig | None) -> EagleDrafter:
    """An EAGLE 3.1 drafter of random weights."""
    heads = (target.num_heads, target.num_kv_heads, target.head_dim) if mla is None else (8, 8, mla.qk_head_dim)
    sizes = (target.vocab_size, target.vocab_size, target.hidden_size, target.hidden_size, 512, *heads)
    torch.manual_seed(1)
    network = EagleDrafter(DrafterConfig(*sizes, target.max_positions, (0, 1), fc_norm=True, norm_output=True, mla=mla))
    return network.eval().requires_grad_(False)


def engine_answers(folder: Path, device: str, network: EagleDrafter | None) -> list[Request]:
    config = EngineConfig(device=device, max_model_len=256, max_num_seqs=4, kv_cache_tokens=2048)
    speculation = Speculation("none") if network is None else Speculation(network, 3).fixed_depth()
    engine = build_engine(load_decoder(folder), speculation, config)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, SMALL["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    options = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    requests = [engine.add_request(prompt, options) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
    return requests


def engine_row(folder: Path, model: transformers.PreTrainedModel, device: str) -> dict[str, Any]:
    """The largest difference of the engine's log-probabilities from transformers in fp32, and answers that drafters keep."""
    plain, furthest = engine_answers(folder, device, None), 0.0
    for request in plain:
        logits = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(request.answer)), request.answer]
        found = torch.tensor([one.logprob for one in request.logprobs])
        furthest = max(furthest, float((found - wanted).abs().max()))
    row: dict[str, Any] = {"logprobs": furthest, "answers": len(plain)}
    target = load_decoder(folder).config
    for kind, mla in (("EAGLE", None), ("latent attention", MLA)):
        found = engine_answers(folder, device, drafter(target, mla))
        row[kind] = sum(one.answer == other.answer for one, other in zip(found, plain, strict=True))
    return row


def rows(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with progress.task("comparing families", len(WIDTHS), "models") as shown:
        for name in WIDTHS:
            with tempfile.TemporaryDirectory() as folder:
                types = {"bf16": torch.bfloat16, "fp32": torch.float32}
                row = {kind: asdict(network_differences(name, Path(folder), dtype, device)) for kind, dtype in types.items()}
                row["engine"] = engine_row(Path(folder), reference(name, Path(folder), torch.float32), device)
            yield name, row
            shown.advance()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    options = parser.parse_args()
    found = {}
    for name, row in rows(options.device):
        found[name] = row
        print(name, row, flush=True)
    if options.json:
        what = (
            "one layer at a model's width, random weights: differences from transformers, answers that drafters do not change"
        )
        write_json(options.json, {"what": what, "device": options.device, "rows": found, "provenance": provenance()})


if __name__ == "__main__":
    main()
