"""`fledge serve` of checkpoints that are quantised already says what their dequantised twins say."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import httpx
import pytest

from tests.checkpoints.packers import write_quantised
from tests.serving.model_folder import make_tokenizer
from tests.serving.thread_server import ThreadServer
from tests.tiny import tiny_decoder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int4", "fp8-block"])
def test_a_server_of_a_quantised_checkpoint(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fledge")
    size = make_tokenizer(tmp_path / "tokenizer")
    decoder = tiny_decoder(2, **SIZES, vocab_size=size, eos_token_ids=(2,))
    texts = []
    for folder in write_quantised(decoder, tmp_path, name):
        shutil.copytree(tmp_path / "tokenizer", folder, dirs_exist_ok=True)
        with ThreadServer([str(folder), "--device", "cpu", "--max-model-len", "256"]) as server:
            body = {"messages": [{"role": "user", "content": "What is the weather?"}], "temperature": 0, "max_tokens": 24}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            texts.append(answer["choices"][0]["message"]["content"])
            said = [line for line in server.log.lines if "linears" in line]
        if folder.name == name:
            assert said, "the log says what became of the weights"
            assert ("exact" in said[0]) == (name != "fp8-block")
    assert texts[0] == texts[1]
    assert texts[0]
