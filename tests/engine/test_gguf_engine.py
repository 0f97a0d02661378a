"""GGUF files on the CPU: the file's blocks are used directly, speculation does not change answers, no conversion is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fledge.checkpoints import gguf
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.hf import load_decoder
from fledge.engine.build import Speculation, build_engine, fit
from fledge.engine.config import EngineConfig
from fledge.kernels import native
from fledge.kernels.formats.gguf_blocks import PLAIN
from fledge.kernels.linear.packed import GgufLinear, PackedLinear
from fledge.models.decoder import causal_attend
from fledge.ops.cpu_ops import CpuOps
from fledge.sampling import SamplingParams
from tests.checkpoints.gguf_files import FAMILIES, write_gguf
from tests.kernels.support import quantised_activations
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

# Several formats in one file, as in real files. Heads of 16 rows are smaller than a panel.
MIXED = {"attn_q": "Q5_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_up": "Q5_1", "attn_output": "F16", "token_embd": "Q8_0"}


def write(path: Path, arch: str = "llama", tied: bool = False) -> Path:
    family, settings = FAMILIES[arch]
    decoder = tiny_decoder(3, family, vocab_size=288, tie_embeddings=tied, **settings)
    return write_gguf(path, decoder, arch.partition("-")[0], "Q4_0", others=MIXED)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_give_the_same_model_as_conversion(arch: str, tied: bool, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", arch, tied)
    blocks, plain = gguf.load_decoder(GgufFile(file)), load_decoder(gguf.convert(file, tmp_path / "folder"))
    assert blocks.config == plain.config
    for name, module in plain.named_modules():
        if not hasattr(module, "weight"):
            continue
        ours = blocks.get_submodule(name)
        torch.testing.assert_close(ours.weight, module.weight, rtol=1e-6, atol=1e-7)
        if getattr(module, "bias", None) is not None:
            assert torch.equal(ours.bias, module.bias)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and blocks.get_submodule(name).parts[0].format not in PLAIN:
            module.register_forward_pre_hook(lambda _, inputs: (quantised_activations(inputs[0]),))
    tokens = torch.randint(0, 288, (20,))
    logits = [
        network.logits(network(tokens, torch.arange(20), causal_attend()).hidden_ND) for network in (fit(blocks, CPU), plain)
    ]
    # An activation whose two sums round to different quantised values differs by a step of 1/127.
    difference = (logits[0] - logits[1]).abs()
    assert difference.median() <= 1e-3 * logits[1].abs().max()
    assert difference.max() <= 5e-2 * logits[1].abs().max()


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma3", "phi3", "phi3-longrope"])
def test_every_family_runs_in_c_from_the_files_blocks(arch: str, tmp_path: Path) -> None:
    """Answers do not depend on how many tokens are verified at once."""
    file, config = write(tmp_path / "tiny.gguf", arch), EngineConfig(device="cpu", max_model_len=128, kv_cache_tokens=1024)
    engine = build_engine(str(file), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    prompts, params = [[3, 7, 100], [55], list(range(40))], SamplingParams(max_tokens=40, temperature=0)
    plain = run(engine, prompts, params)
    assert len({token for answer in plain for token in answer}) > 10
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, reach=lambda length: length % 6)
    assert run(engine_with(engine.decoder, oracle, engine.config), prompts, params) == plain


def test_blocks_are_the_default_on_cpu_unless_options_exclude_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    file = str(write(tmp_path / "tiny.gguf"))
    for quantization in ("gguf", "none"):  # set explicitly, or the default
        engine = build_engine(file, Speculation("none"), EngineConfig(device="cpu", quantization=quantization))
        assert isinstance(engine.decoder.layers[0].mlp.down_proj, GgufLinear)
        assert engine.config.weights == "the GGUF file's own blocks"
    assert not (tmp_path / "cache" / "models").exists()
    assert engine.tokenizer.decode(engine.tokenizer.encode("hello")) == "hello"
    for forced in ({"dtype": "float16"}, {"dtype": "float32"}, {"dtype": "float16", "quantization": "gguf"}):
        engine = build_engine(file, Speculation("none"), EngineConfig(device="cpu", **forced))
        linear = engine.decoder.layers[0].mlp.down_proj
        assert isinstance(linear, PackedLinear)
        assert not isinstance(linear, GgufLinear)
    engine = build_engine(file, Speculation("none"), EngineConfig(device="cpu"), capture=False)
    assert isinstance(engine.decoder.layers[0].mlp.down_proj, torch.nn.Linear)  # captured passes use plain linears


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_speculation_does_not_change_answers(tree: bool, tmp_path: Path) -> None:
    decoder = gguf.load_decoder(GgufFile(write(tmp_path / "tiny.gguf")))
    prompts = [[3, 7, 100], [55], list(range(40))]
    params = SamplingParams(max_tokens=60, temperature=0)
    engine = engine_with(decoder, Speculation("none"), CPU)
    assert isinstance(engine.executor.ops, CpuOps)  # a layer is one call to C
    plain = run(engine, prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, tree=tree, reach=lambda length: length % 6)
    assert run(engine_with(engine.decoder, oracle, CPU), prompts, params) == plain


HEAVY = ("transformers", "matplotlib", "fastapi", "tensorboard", "gguf", "sympy", "torch._dynamo", "huggingface_hub")


def test_generate_does_not_import_slow_packages_or_write_files(tmp_path: Path) -> None:
    """Each of the packages takes a second or more to import. Only the compiled C code is written to the cache."""
    file = write(tmp_path / "tiny.gguf")
    code = f"""
import sys
from fledge.cli.main import main
sys.argv = ["fledge", "generate", "hello", "--model", {str(file)!r}, "--drafter", "none", "--max-tokens", "4", "--json"]
try:
    main()
except SystemExit:
    pass
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    environment = os.environ | {"FLEDGE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"completion_tokens": 4' in done.stdout
    assert done.stdout.rstrip().endswith("imported:")
    assert not done.stderr.strip()
    written = {path.relative_to(tmp_path / "cache").parts[0] for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert written <= {"native"}
