"""The decoder equals transformers: every family and rope type on tiny random models, and the real default model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fledge.checkpoints.hf import load_decoder
from fledge.errors import ModelError
from fledge.models.decoder import Decoder, causal_attend
from fledge.tokenizer import Tokenizer
from tests.tiny import tiny_decoder

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
GEMMA = {
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PHI = {"pad_token_id": 0, "eos_token_id": 2}
# transformers uses the short factors for texts of up to 64 tokens. Here the engine's maximum length decides.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
MROPE = {
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-grouping": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
    "llama-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", QWEN_WINDOW),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {}),
    "qwen3-window": ("Qwen3", QWEN_WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 16}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-some-layers": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen2-moe-no-bias": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "qkv_bias": False}),
    "qwen3-moe-window": ("Qwen3Moe", {**EXPERTS, **QWEN_WINDOW}),
    "qwen2-moe-window": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, **QWEN_WINDOW, "max_window_layers": 3}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-scaled": ("Gemma3", {**GEMMA, "rope_parameters": GEMMA_ROPES, "query_pre_attn_scalar": 5}),
    "gemma3-untied": ("Gemma3", {**GEMMA, "tie_word_embeddings": False}),
    "phi3": ("Phi3", PHI),
    "phi3-partial": ("Phi3", {**PHI, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3-longrope": ("Phi3", {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-window": ("Phi3", {**PHI, "sliding_window": 16}),
    "ministral": ("Ministral", {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "seed-oss": ("SeedOss", {}),
    "seed-oss-output-bias": ("SeedOss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", PHI),
    "smollm3-window": (
        "SmolLM3", {**PHI, "no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 16},
    ),
    "smollm3-yarn": ("SmolLM3", {**PHI, "rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "glm": ("Glm", PHI),
    "glm4": ("Glm4", {**PHI, "attention_bias": True}),
    "glm4-whole-heads": ("Glm4", {**PHI, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "gemma3-images": ("Gemma3", GEMMA),
    "mistral3-images": ("Mistral3", {"sliding_window": None}),
    "qwen2-vl": ("Qwen2VL", MROPE),
    "qwen2.5-vl": ("Qwen2_5_VL", MROPE),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}, "rope_theta": 1e6},
    ),
}  # fmt: skip
# Smallest possible vision towers of the multimodal models; they are never used.
VISION = {
    "Gemma3": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
    "Mistral3": {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "Qwen2VL": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32},
    "Qwen2_5_VL": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    "Qwen3VL": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}


def reference_model(family: str, *, images: bool = False, **settings: object) -> transformers.PreTrainedModel:
    settings = {**SIZES, "tie_word_embeddings": False, **settings}
    torch.manual_seed(0)
    if images:
        is_tied, text = settings.pop("tie_word_embeddings"), settings
        if family in ("Gemma3", "Mistral3"):
            text = getattr(transformers, {"Gemma3": "Gemma3TextConfig", "Mistral3": "MistralConfig"}[family])(**settings)
        elif family != "Qwen3VL":
            del settings["head_dim"]
        config = getattr(transformers, f"{family}Config")(
            text_config=text, vision_config=VISION[family], tie_word_embeddings=is_tied,
            image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
        )  # fmt: skip
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    else:
        config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape))
    return model


def logits_of(decoder: Decoder, sequences: list[list[int]]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return decoder.logits(decoder(tokens, positions, causal_attend(lengths)).hidden_ND)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    """Logits and every tap, for several sequences of different lengths in one pass, some longer than any window."""
    family, settings = CASES[case]
    images = case.endswith(("-images", "-vl"))
    model = reference_model(family, images=images, **settings)
    model.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    last, layers = {}, (model.model.language_model if images else model.model).layers
    layers[-1].register_forward_hook(lambda _, __, output: last.update(hidden=output))

    taps = range(len(decoder.layers) + 1)
    lengths = [66, 65, 70] if "longrope" in case else [40, 1, 70]
    sequences = [torch.randint(0, 128, (length,)) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])
    output = decoder(torch.cat(sequences), positions, causal_attend(lengths), taps=taps)
    logits = decoder.logits(output.hidden_ND).split(lengths)
    tapped = [tap.split(lengths) for tap in output.taps]
    for index, sequence in enumerate(sequences):
        expected = model(sequence[None], output_hidden_states=True)
        assert (logits[index] - expected.logits[0]).abs().max() < 1e-4
        # the last hidden state of transformers is taken after the final norm, the tap before it
        before_norm = last["hidden"][0] if isinstance(last["hidden"], tuple) else last["hidden"]
        states = [*expected.hidden_states[:-1], before_norm.reshape(1, len(sequence), -1)]
        for tap, state in zip(tapped, states, strict=True):
            # random weights give states of very different sizes: the tolerance is relative to the state
            assert (tap[index] - state[0]).abs().max() < 1e-5 * state.abs().max()


@torch.no_grad()
def test_a_window_changes_the_logits() -> None:
    """Otherwise the window tests above would also pass if both models ignored the window."""
    tokens = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    full = logits_of(tiny_decoder(architecture="MistralForCausalLM"), [tokens])
    windowed = logits_of(tiny_decoder(architecture="MistralForCausalLM", windows=(16,) * 4), [tokens])
    torch.testing.assert_close(full[:16], windowed[:16])
    assert (full[20:] - windowed[20:]).abs().max() > 0.1


@torch.no_grad()
def test_taps_keep_the_requested_order() -> None:
    decoder = tiny_decoder()
    tokens, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    up = decoder(tokens, positions, causal_attend(), taps=(0, 2, 4)).taps
    down = decoder(tokens, positions, causal_attend(), taps=(4, 0, 2)).taps
    for left, right in zip(up, (down[1], down[2], down[0]), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(up[0], decoder.embed(tokens))


def test_taps_outside_the_network_are_refused() -> None:
    with pytest.raises(ModelError, match=r"4 layers.*\[5, -1\]"):
        tiny_decoder().check_taps((0, 4, 5, -1))


PROMPTS = [
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "Explain why the sky is blue in two sentences.",
    "List three uses for an old newspaper.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Write a haiku about autumn leaves.",
    "How do I boil an egg?",
    "Name the planets of the solar system.",
    "Summarise: The cat sat on the mat while the dog slept by the fire.",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write a SQL query that counts the rows of a table called users.",
    "Tell me a short story about a brave mouse.",
    "What is the difference between a list and a tuple in Python?",
    "If a train travels 60 km in 45 minutes, how fast is it?",
    "Suggest a name for a bakery.",
    "Why do leaves change colour?",
    "Continue: Once upon a time in a small village",
]


@pytest.mark.real
@torch.no_grad()
def test_smollm2_equals_transformers(smollm2_folder: Path) -> None:
    """transformers generates 64 tokens greedily; one pass of the decoder over its output must predict each of them."""
    tokenizer = Tokenizer(smollm2_folder)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    width, pad = max(map(len, prompts)), 0
    padded = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # No end token: the batch stays rectangular, and tokens after an end are compared too.
    generated = model.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=64, min_new_tokens=64, pad_token_id=pad,
        eos_token_id=None,
    )[:, width:]  # fmt: skip
    decoder = load_decoder(smollm2_folder)
    for prompt, continuation in zip(prompts, generated.tolist(), strict=True):
        sequence = prompt + continuation
        logits = logits_of(decoder, [sequence])
        expected = model(torch.tensor([sequence])).logits[0]
        assert (logits - expected).abs().max() < 1e-3
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == continuation


def test_rope_frequencies_stay_fp32_when_the_model_is_cast():
    """bf16 frequencies would be off by parts in a hundred, which is whole turns at position 4000."""
    decoder = tiny_decoder()
    exact = decoder.rotary.inverse_frequencies.clone()
    decoder.to(torch.bfloat16)
    assert torch.equal(decoder.rotary.inverse_frequencies, exact)
    assert decoder.rotary(torch.tensor([400]))[0].dtype == torch.float32
