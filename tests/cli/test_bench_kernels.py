"""`fledge bench --kernels` prints the dispatch table for a model's shapes without reading its weights."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import pytest

from fledge import sources
from fledge.bench.kernels import linear_shapes
from fledge.checkpoints.hf import save_decoder
from fledge.cli.main import main
from fledge.kernels import native
from fledge.kernels.linear.dispatch import Shape
from tests.checkpoints.gguf_files import write_gguf
from tests.tiny import tiny_decoder, tiny_model_config


def test_linear_shapes_of_a_model():
    config = tiny_model_config()
    assert linear_shapes(config) == [
        Shape("qkv_proj", 32, 64),
        Shape("o_proj", 32, 32),
        Shape("gate_up_proj", 32, 128, gated=True),
        Shape("down_proj", 64, 32),
        Shape("lm_head", 32, 128),
    ]
    formats = {shape.name: shape.format for shape in linear_shapes(config, "int4")}
    assert formats == dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "int4") | {"lm_head": "int8"}


def test_every_linear_is_in_the_printed_table(monkeypatch, capsys, tmp_path):
    folder = save_decoder(tiny_decoder(), tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["fledge", "bench", str(folder), "--kernels", "--device", "cpu"])
    monkeypatch.setenv("COLUMNS", "200")
    with suppress(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"))


@pytest.mark.skipif(native.library() is None, reason="a GGUF file's blocks need the C kernels")
def test_a_gguf_file_is_not_converted_to_list_its_formats(monkeypatch, capsys, tmp_path):
    quantised = {"attn_v": "Q8_0", "ffn_down": "Q8_0"}
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=300), "llama", others=quantised)
    monkeypatch.setattr(sources, "_converted", lambda *_: pytest.fail("converted only to read its configuration"))
    monkeypatch.setattr(sys, "argv", ["fledge", "bench", str(file), "--kernels", "--device", "cpu", "--json"])
    with suppress(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == "the GGUF file's own blocks"
    formats = {line["linear"]: line["format"] for line in found["linears"]}
    assert (formats["qkv_proj"], formats["down_proj"], formats["o_proj"]) == ("F32/Q8_0", "Q8_0", "F32")
