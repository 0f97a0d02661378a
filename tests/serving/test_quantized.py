"""`fledge serve` on a folder of each quantised format gives the same text as on its dequantised copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fledge.kernels import native
from tests.checkpoints.packers import write_quantised
from tests.serving.model_folder import make_tokenizer
from tests.serving.thread_server import ThreadServer
from tests.tiny import tiny_decoder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
ASKED = {"messages": [{"role": "user", "content": "What is the weather like?"}], "max_tokens": 16, "temperature": 0}


@pytest.mark.skipif(native.library() is None, reason="quantised weights are kept only with the C kernels")
@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int4", "ct-int8", "fp8-block"])
def test_quantised_folders_give_the_text_of_their_dequantised_copy(name: str, tmp_path: Path) -> None:
    vocab_size = make_tokenizer(tmp_path / "tokenizer")
    decoder = tiny_decoder(2, "Qwen2ForCausalLM", **SIZES, vocab_size=vocab_size)
    packed, twin = write_quantised(decoder, tmp_path, name)
    texts = []
    for folder in (packed, twin):
        for file in (tmp_path / "tokenizer").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        options = ["--no-engine-process", "--device", "cpu", "--dtype", "float32", "--drafter", "none"]
        with ThreadServer([str(folder), *options, "--max-model-len", "128"]) as server, server.client() as client:
            answer = client.post("/v1/chat/completions", json=ASKED).raise_for_status().json()
        texts.append(answer["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10
