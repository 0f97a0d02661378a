"""`fledge bench --kernels` prints the dispatch table for a model's shapes without reading its weights."""

from __future__ import annotations

import sys
from contextlib import suppress

from fledge.bench.kernels import linear_shapes
from fledge.checkpoints.hf import save_decoder
from fledge.cli.main import main
from fledge.kernels.linear.dispatch import Shape
from tests.tiny import tiny_decoder, tiny_model_config


def test_the_shapes_of_a_model():
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


def test_the_table_is_printed(monkeypatch, capsys, tmp_path):
    folder = save_decoder(tiny_decoder(), tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["fledge", "bench", str(folder), "--kernels", "--device", "cpu"])
    monkeypatch.setenv("COLUMNS", "200")
    with suppress(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"))
