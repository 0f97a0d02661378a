"""Hostile files (wrong sizes, values of the wrong type, code) are refused by name, quickly, and their code is never run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.checkpoints.ends import fetch_ends, load_ends
from fledge.checkpoints.hf import load_config, load_decoder, save_decoder
from fledge.checkpoints.inspect import inspect_drafter
from fledge.config import ModelConfig
from fledge.errors import ModelError
from fledge.tokenizer import Tokenizer
from tests.checkpoints.gguf_files import write_gguf
from tests.serving.model_folder import make_tokenizer
from tests.tiny import tiny_decoder, tiny_drafter

VOCAB = 288


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tiny_decoder(), tmp_path / "model")


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", "small"), ("num_hidden_layers", "four")])
def test_embedding_and_head_of_an_unknown_family(folder: Path, key: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, architectures=["OtherForCausalLM"])
    load_ends(folder, torch.float32, torch.device("cpu"))
    change(folder, **{key: value})
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model.safetensors"}}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ModelError, match=f"{key} must be a"):
        load_ends(fetch_ends("org/model"), torch.float32, torch.device("cpu"))


ODD_VALUES = [
    ("architectures", 5),
    ("architectures", [5]),
    ("architectures", {"a": 1}),
    ("rope_theta", "x"),
    ("rope_theta", -1),
    ("rope_theta", [1]),
    ("rope_scaling", "yarn"),
    ("rope_scaling", {"rope_type": ["yarn"]}),
    ("rope_scaling", {"rope_type": "yarn", "factor": "x"}),
    ("rope_scaling", {"rope_type": "linear", "factor": -2}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", "four"),
    ("num_hidden_layers", 1.5),
    ("num_attention_heads", 0),
    ("num_attention_heads", -4),
    ("num_attention_heads", True),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", -2),
    ("num_key_value_heads", [2]),
    ("head_dim", 400_000),
    ("head_dim", 7),
    ("head_dim", -8),
    ("hidden_size", -32),
    ("hidden_size", 1e300),
    ("hidden_size", None),
    ("intermediate_size", {}),
    ("vocab_size", 0),
    ("vocab_size", 1 << 40),
    ("max_position_embeddings", 10**12),
    ("max_position_embeddings", -5),
    ("rms_norm_eps", "small"),
    ("rms_norm_eps", -1),
    ("eos_token_id", [[2]]),
    ("eos_token_id", {"a": 1}),
    ("eos_token_id", "2"),
    ("eos_token_id", 10**9),
    ("eos_token_id", -1),
]


@pytest.mark.parametrize(("key", "value"), ODD_VALUES)
def test_odd_values_of_a_configuration_are_refused(folder: Path, key: str, value: Any) -> None:
    change(folder, **{key: value})
    with pytest.raises(ModelError):
        load_decoder(folder)


@pytest.mark.parametrize("value", [[[2]], "2", 10**9, {"a": 1}])
def test_odd_end_tokens_of_the_generation_config_are_refused(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError):
        load_config(folder)


ODD_WINDOWS = [("sliding_window", -4), ("sliding_window", "x"), ("layer_types", ["full_attention"]), ("max_window_layers", "x")]


@pytest.mark.parametrize(("key", "value"), ODD_WINDOWS)
def test_odd_windows_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    folder = save_decoder(tiny_decoder(architecture="Qwen2ForCausalLM"), tmp_path / "model")
    change(folder, **{"use_sliding_window": True, "sliding_window": 16, key: value})
    with pytest.raises(ModelError):
        load_config(folder)


HANGS = 120  # seconds; importing transformers takes several on a busy machine


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
@pytest.mark.timeout(HANGS)
def test_pipe_does_not_block(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="plain file"):
        load_decoder(folder)


@pytest.mark.timeout(HANGS)
def test_pipe_among_tokenizer_files_does_not_block(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="plain file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", 5, ["a"]])
def test_index_may_name_only_files_in_its_folder(folder: Path, file: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelError, match="beside it"):
        load_decoder(folder)


def test_a_deeply_nested_json_is_no_configuration(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelError, match="JSON"):
        load_config(folder)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_models_own_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """transformers would ask on the terminal and run the code after a `y`."""
    make_tokenizer(tmp_path)
    mark = tmp_path / "was-run"
    (tmp_path / "evil.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast):\n    pass\n"
    )
    file = tmp_path / "tokenizer_config.json"
    extra = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | extra))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or answer)
    with contextlib.suppress(ModelError):
        Tokenizer(tmp_path)
    assert not asked
    assert not mark.exists()


# GGUF


def header(*parts: bytes, num_tensors: int = 0, num_values: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + b"".join(parts) + bytes(32)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


HEADERS = {
    "an array of 2^60 numbers": header(text(b"a"), struct.pack("<IIQ", 9, 4, 1 << 60)),
    "an array of 2^60 texts": header(text(b"a"), struct.pack("<IIQ", 9, 8, 1 << 60)),
    "an array of 2^40 arrays": header(text(b"a"), struct.pack("<IIQ", 9, 9, 1 << 40)),
    "arrays in arrays": header(text(b"a"), struct.pack("<IIQ", 9, 9, 1) * 50),
    "a text of 2^62 bytes": header(text(b"a"), struct.pack("<I", 8), text(b"x", 1 << 62)),
    "a name of 2^62 bytes": header(text(b"a", 1 << 62)),
    "2^60 values": header(num_values=1 << 60),
    "2^60 tensors": header(num_tensors=1 << 60, num_values=0),
    "a kind that is unknown": header(text(b"a"), struct.pack("<I", 77)),
    "a tensor of 2^31 dimensions": header(text(b"a"), struct.pack("<I", 1 << 31), num_tensors=1, num_values=0),
    "nothing": b"GGUF",
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.timeout(HANGS)
def test_false_headers_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(HEADERS[name])
    with pytest.raises(ModelError, match="damaged"):
        gguf.convert(file, tmp_path / "out")


def test_valid_file_is_accepted(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama")
    assert (gguf.convert(file, tmp_path / "out") / "config.json").is_file()


@pytest.mark.timeout(HANGS)
def test_a_pipe_is_no_gguf(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="plain file"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "out")


ODD_METADATA = [
    ("llama.block_count", "four"),
    ("llama.block_count", 1 << 30),
    ("llama.attention.head_count", "x"),
    ("llama.attention.head_count", 0),
    ("llama.attention.head_count_kv", 3),
    ("llama.attention.key_length", 400_000),
    ("llama.embedding_length", "x"),
    ("llama.context_length", "x"),
    ("llama.context_length", 0),
    ("llama.rope.freq_base", "x"),
    ("llama.rope.freq_base", 0.0),
    ("llama.rope.scaling.type", 5),
    ("llama.attention.layer_norm_rms_epsilon", "x"),
    ("llama.attention.layer_norm_rms_epsilon", math.inf),
    ("llama.expert_count", "many"),
    ("split.count", "x"),
    ("tokenizer.ggml.eos_token_id", "x"),
    ("tokenizer.ggml.eos_token_id", 1 << 30),
    ("tokenizer.ggml.bos_token_id", "x"),
    ("tokenizer.ggml.tokens", "abc"),
    ("tokenizer.ggml.tokens", 5),
    ("tokenizer.ggml.token_type", [1, 2]),
    ("tokenizer.ggml.merges", ["ab"]),
    ("tokenizer.ggml.model", 5),
    ("tokenizer.ggml.pre", 5),
    ("tokenizer.chat_template", 5),
]


@pytest.mark.parametrize(("key", "value"), ODD_METADATA)
def test_odd_values_in_a_gguf_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", metadata={key: value})
    with pytest.raises(ModelError):
        gguf.convert(file, tmp_path / "out")


# Drafters


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_drafter_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight.*finite"):
        load_drafter(folder)
    assert any("finite" in problem for problem in inspect_drafter(folder).problems)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5),
        ("architectures", [["a"]]),
        ("eagle_config", 5),
        ("head_dim", 400_000),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("rope_theta", "x"),
        ("eagle_aux_hidden_state_layer_ids", "abc"),
        ("draft_vocab_size", -5),
        ("vocab_size", 1 << 50),
    ],
)
def test_odd_values_of_a_drafters_configuration_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    change(folder, **{key: value})
    with pytest.raises(ModelError):
        load_drafter(folder)
    assert inspect_drafter(folder).problems


def test_valid_configuration_is_accepted() -> None:
    assert ModelConfig("LlamaForCausalLM", 128, 32, 64, 4, 4, 2, 8, 512).head_dim == 8
    assert torch.isfinite(tiny_drafter().fc.weight).all()
