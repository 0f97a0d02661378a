"""Quantised targets on CPU: speculation is lossless, and quantised files keep their format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fledge import LLM, SamplingParams
from fledge.bench.datasets import load_items
from fledge.bench.runs import network_bytes
from fledge.engine.build import Speculation, build_engine, fit
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.quantization import dequantize, quantize
from fledge.models.decoder import causal_attend
from fledge.ops.cpu_ops import CpuOps
from fledge.speculation.depth import TreeShape
from tests.checkpoints.gguf_files import write_gguf
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

QUANTISED = replace(CPU, dtype="float16")
PARAMS = SamplingParams(max_tokens=60, temperature=0)
PROMPTS = [[3, 7, 100], [55], list(range(40))]


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("tree", [None, TreeShape(3, 8)], ids=["chain", "tree"])
def test_speculation_is_lossless(quantization, dtype, tree):
    config = replace(CPU, dtype=dtype, quantization=quantization)
    engine = engine_with(tiny_decoder(), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)  # whole layers run in C
    plain = run(engine, PROMPTS, PARAMS)
    decoder = engine.decoder
    assert run(engine_with(decoder, Speculation(tiny_drafter(), 4, tree), config), PROMPTS, PARAMS) == plain
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, tree=tree is not None)
    assert run(engine_with(decoder, oracle, config), PROMPTS, PARAMS) == plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_engine_runs_the_quantised_weights(quantization):
    """Logits equal those of a model whose weights were rounded beforehand: nothing else is rounded noticeably."""
    rounded = tiny_decoder()
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear):
            bits = 8 if quantization == "int8" or name == "lm_head" else 4
            module.weight = torch.nn.Parameter(dequantize(quantize(module.weight, bits)), requires_grad=False)
    quantised = engine_with(tiny_decoder(), Speculation("none"), replace(CPU, quantization=quantization))
    exact = engine_with(rounded, Speculation("none"), CPU)
    for prompt in PROMPTS:
        tokens, positions = torch.tensor(prompt), torch.arange(len(prompt))
        logits = [engine.decoder.logits(states(engine, tokens, positions)) for engine in (quantised, exact)]
        torch.testing.assert_close(*logits, rtol=0, atol=5e-3 * logits[1].abs().max().item())


def states(engine, tokens, positions):
    return engine.decoder(tokens, positions, causal_attend()).hidden_ND


def test_bytes():
    sizes = {}
    for quantization in ("none", "int8", "int4"):
        decoder = fit(tiny_decoder(), replace(QUANTISED, quantization=quantization))
        sizes[quantization] = network_bytes(decoder)
    head = 128 * 32
    linears = sizes["none"] // 2 - head
    assert sizes["int8"] == (linears + head) * 17 // 16
    assert sizes["int4"] == linears * 5 // 8 + head * 17 // 16


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4), ("Q5_1", 8)])
def test_a_gguf_file_keeps_its_quantisation(kind, bits, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=272), "llama", kind)
    engines = {name: build_engine(str(file), Speculation("none"), replace(CPU, quantization=name)) for name in ("none", "gguf")}
    kept = [module.bits for module in engines["gguf"].decoder.modules() if hasattr(module, "bits")]
    assert set(kept) == {bits}
    if kind == "Q5_1":
        return  # no format represents it exactly: rounded to 8 bits
    tokens, positions = torch.arange(20), torch.arange(20)
    logits = [engine.decoder.logits(states(engine, tokens, positions)) for engine in engines.values()]
    torch.testing.assert_close(*logits, rtol=0, atol=5e-3 * logits[0].abs().max().item())


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(UserError, match="C compiler"):
        replace(CPU, quantization="int8").resolve(tiny_decoder().config)


@pytest.mark.real
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_real_model(smollm2_folder, quantization):
    params = SamplingParams(max_tokens=32, temperature=0)

    def answers(drafter: str, name: str) -> list[list[int]]:
        llm = LLM("smollm2-135m", drafter, quantization=name)
        prompts = [llm.chat_prompt([{"role": "user", "content": item.turns[0]}]) for item in load_items("builtin")[:6]]
        return [done.token_ids for done in llm.generate(prompts, params)]

    quantised = answers("none", quantization)
    assert answers("auto", quantization) == quantised
    # The model's file has 4-bit weights with offsets and an 8-bit head, so int4 changes almost nothing; int8 rounds a little.
    unquantised = answers("none", "none")
    begin_alike = sum(mine[:8] == theirs[:8] for mine, theirs in zip(quantised, unquantised, strict=True))
    assert begin_alike >= len(quantised) // 2
