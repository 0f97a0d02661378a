"""Hugging Face folders: they round-trip, and files that do not fit are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fledge.checkpoints import tensors
from fledge.checkpoints.hf import config_to_hf, load_config, load_decoder, save_decoder
from fledge.config import ModelConfig, RopeConfig
from fledge.errors import ModelError
from fledge.families import FAMILIES
from fledge.models.decoder import Decoder, causal_attend
from tests.tiny import FULL_ROPE, tiny_decoder, tiny_model_config

LONGROPE = RopeConfig(1e4, "longrope", 8.0, 64, attention_factor=1.5, short_factor=(1.0, 2.0, 3.0), long_factor=(2.0, 4.0, 6.0))


def assert_same_weights(left: Decoder, right: Decoder) -> None:
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tiny_decoder(eos_token_ids=(2,)), tmp_path / "model")


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors; None removes one. `__` in a name stands for a dot."""
    file = folder / "model.safetensors"
    content = load_file(file)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del content[name]
        else:
            content[name] = value
    save_file(content, file)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(architecture: str, tied: bool, tmp_path: Path) -> None:
    decoder = tiny_decoder(architecture=architecture, tie_embeddings=tied)
    loaded = load_decoder(save_decoder(decoder, tmp_path))
    assert_same_weights(decoder, loaded)
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied
    assert not any(value.is_meta for value in loaded.state_dict().values())
    assert not loaded.rotary.inverse_frequencies.is_meta


@pytest.mark.parametrize("architecture", FAMILIES)
@torch.no_grad()
def test_transformers_reads_saved_folders(architecture: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(architecture=architecture)
    folder = save_decoder(decoder, tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(40)
    ours = decoder.logits(decoder(tokens, tokens, causal_attend()).hidden_ND)
    assert (ours - model(tokens[None]).logits[0]).abs().max() < 1e-4 * ours.abs().max()


def test_dtype(folder: Path) -> None:
    decoder = load_decoder(folder, dtype=torch.float16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float16}
    assert decoder.rotary.inverse_frequencies.dtype == torch.float32


def test_saved_dtype_is_in_the_config(tmp_path: Path) -> None:
    save_decoder(tiny_decoder(), tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_tokenizer_files_are_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    save_decoder(tiny_decoder(), tmp_path / "copy", tokenizer_from=folder)
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "config",
    [
        tiny_model_config(rope=RopeConfig(5e5, "llama3", 8.0, 64), eos_token_ids=(1, 2), bos_token_id=0),
        tiny_model_config(rope=RopeConfig(1e4, "yarn", 4.0, 128, attention_factor=1.5, truncate=False)),
        tiny_model_config(rope=RopeConfig(1e4, "linear", 2.0, 512), qkv_bias=True, output_bias=True, mlp_bias=True),
        tiny_model_config("MistralForCausalLM", rope=RopeConfig(1e4, original_max_positions=512), windows=(16,) * 4),
        tiny_model_config("Qwen2ForCausalLM", rope=RopeConfig(1e6, "dynamic", 2.0, 256), windows=(None, None, 8, 8)),
        tiny_model_config("Qwen3ForCausalLM", rope=RopeConfig(1e6, original_max_positions=512), tie_embeddings=True),
        tiny_model_config("Qwen3MoeForCausalLM", rope=RopeConfig(1e6, original_max_positions=512)),
        tiny_model_config("Qwen2MoeForCausalLM", rope=RopeConfig(1e6, original_max_positions=512)),
        tiny_model_config("MixtralForCausalLM", rope=RopeConfig(1e6, original_max_positions=512)),
        tiny_model_config("Gemma3ForCausalLM", tie_embeddings=True),
        tiny_model_config("Phi3ForCausalLM", windows=(16,) * 4),
        tiny_model_config("Phi3ForCausalLM", rope=LONGROPE),
        tiny_model_config("MinistralForCausalLM", rope=FULL_ROPE),
        tiny_model_config("GemmaForCausalLM", rope=FULL_ROPE),
        tiny_model_config("SeedOssForCausalLM", rope=FULL_ROPE, output_bias=True),
        tiny_model_config("GlmForCausalLM", rope=FULL_ROPE, qkv_bias=False),
        tiny_model_config("Glm4ForCausalLM", rope=FULL_ROPE),
        tiny_model_config("SmolLM3ForCausalLM", rope=FULL_ROPE),
        tiny_model_config("SmolLM3ForCausalLM", rope=FULL_ROPE, windows=(None, 8, None, 8)),
    ],
    ids=lambda config: f"{config.architecture}-{config.rope.kind}",
)
def test_config_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(config_to_hf(config)) == config


def test_end_tokens_of_both_files_are_used(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_config(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_config(folder).eos_token_ids == (2, 9)


def test_missing_head_is_the_embedding(folder: Path) -> None:
    change_tensors(folder, lm_head__weight=None)
    change_config(folder, tie_word_embeddings=None)
    decoder = load_decoder(folder)
    assert decoder.config.tie_embeddings
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    change_config(folder, tie_word_embeddings=False)  # a checkpoint without its head
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing, and tie_word_embeddings is false"):
        load_decoder(folder)


def test_a_tied_model_may_repeat_its_embedding_and_have_no_other_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but lm_head\.weight is not the embedding"):
        load_decoder(folder)
    change_tensors(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    decoder = load_decoder(folder)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight


def test_computed_buffers_in_the_file_are_ignored(folder: Path) -> None:
    change_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    load_decoder(folder)


def test_tensors_that_do_not_fit_are_listed(folder: Path) -> None:
    change_tensors(
        folder,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__9__mlp__up_proj__weight=torch.zeros(2),
        model__norm__weight=torch.zeros(31),
    )
    with pytest.raises(ModelError) as error:
        load_decoder(folder)
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "not expected: model.layers.9.mlp.up_proj.weight;" in message
    assert "model.norm.weight is [31], the configuration says [32]" in message
    assert "\n" not in message


def test_shards(folder: Path) -> None:
    content = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors.write_tensors(folder, content.items(), shard_bytes=20_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert not list(folder.glob("*.partial"))
    assert_same_weights(load_decoder(folder), tiny_decoder())

    last = sorted(folder.glob("model-*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name}: named by the index but missing"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read as JSON"), ("{}", "no weight_map"), ("[]", "no JSON object")],
)
def test_broken_index(folder: Path, content: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_decoder(folder)


def test_index_with_missing_tensors(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.other": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index names tensors that it lacks: model\.other"):
        load_decoder(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_safetensors(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or truncated"):
        load_decoder(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="convert them to safetensors"):
        load_decoder(folder)


def test_unknown_architecture(folder: Path) -> None:
    change_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"):
        load_config(folder)


@pytest.mark.parametrize(("content", "message"), [("not json", "cannot be read as JSON"), ("3", "no JSON object")])
def test_broken_config(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_config(folder)
