"""Whether a model fits is known before it is loaded; loading needs host memory for about one tensor at a time."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge import devices
from fledge.checkpoints.hf import kept_bits, load_decoder, save_decoder
from fledge.checkpoints.quantized import KEPT
from fledge.config import MoEConfig
from fledge.engine import build, memory
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.quantization import quantize_linears
from tests.checkpoints.packers import write_quantised
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_shapes")


def default_config(model, **changes) -> EngineConfig:
    """The configuration that `resolve` returns on a GPU; works without one."""
    base = {"max_model_len": model.max_positions, "max_num_seqs": 256, "max_batched_tokens": 8192, "page_size": 128}
    return EngineConfig(device="cuda", dtype="bfloat16", kv_cache_dtype="bfloat16", **(base | changes))


def with_memory(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda config: int(count))


@pytest.mark.parametrize(("name", "gigabytes"), [("8b", 80), ("14b", 80), ("32b", 139 * 1.074)])
def test_default_settings_fit(shapes, monkeypatch, name: str, gigabytes: float) -> None:
    model = shapes.SHAPES[name]
    drafter = shapes.drafter_config(model)
    config = default_config(model)
    with_memory(monkeypatch, gigabytes * 1e9)
    memory.check_fits(config, model, drafter)
    needs = memory.Needs.of(config, model, drafter)
    cache = needs.cache_bytes(int(gigabytes * 1e9) - needs.weights - needs.drafter)
    assert cache // needs.cache_per_token >= model.max_positions


def test_a_model_that_does_not_fit_is_refused_with_sizes(shapes, monkeypatch) -> None:
    model = shapes.SHAPES["32b"]
    with_memory(monkeypatch, 40e9)
    with pytest.raises(UserError, match=r"weights 61\.0 GiB.*37\.3 GiB are free; add --quantization int8 or int4"):
        memory.check_fits(default_config(model), model)
    memory.check_fits(default_config(model, quantization="int4", max_model_len=4096), model)
    with pytest.raises(UserError, match="raise --gpu-memory-utilization"):
        memory.check_fits(default_config(model, gpu_memory_utilization=0.3), model)


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does(shapes, monkeypatch) -> None:
    model = shapes.SHAPES["32b"]
    with_memory(monkeypatch, 80e9)
    with pytest.raises(UserError, match=r"lower --max-model-len to (\d+) or less") as refused:
        memory.check_fits(default_config(model), model)
    longest = int(str(refused.value).split("--max-model-len to ")[1].split()[0])
    memory.check_fits(default_config(model, max_model_len=longest), model)
    with pytest.raises(UserError):
        memory.check_fits(default_config(model, max_model_len=longest + 1), model)
    with pytest.raises(UserError, match="lower --kv-cache-tokens"):
        memory.check_fits(default_config(model, max_model_len=longest, kv_cache_tokens=2 * longest), model)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_counted_weights_equal_held_bytes(quantization: str, tied: bool) -> None:
    decoder = tiny_decoder(architecture="Qwen2ForCausalLM", tie_embeddings=tied)
    counted = memory.weight_bytes(decoder.config, torch.float32, quantization)
    if quantization != "none":
        quantize_linears(decoder, quantization)
    assert counted == memory.held_bytes(decoder, set())


def test_counted_drafter_weights_equal_held_bytes() -> None:
    config = tiny_drafter_config(fc_norm=True, norm_output=True)
    assert memory.drafter_bytes(config, torch.float32) == memory.held_bytes(tiny_drafter(config), set())


@pytest.mark.parametrize("name", ["awq", "gptq-8", "ct-fp8", "fp8-block"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_counted_weights_of_quantised_checkpoints_equal_held_bytes(name: str, device: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "head_dim": 32}
    decoder = tiny_decoder(**sizes)
    packed, _ = write_quantised(decoder, tmp_path, name)
    kept = kept_bits(packed, decoder.config, KEPT[device], device)
    counted = memory.weight_bytes(decoder.config, torch.float32, kept=kept)
    held = memory.held_bytes(load_decoder(packed, keep=KEPT[device]), set())
    assert held <= counted <= 1.06 * held  # scales are counted with their largest size


def test_experts_with_act_order_are_counted_in_16_bits_on_a_gpu(tmp_path: Path, monkeypatch) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 4, "head_dim": 32}
    decoder = tiny_decoder(architecture="MixtralForCausalLM", **sizes, moe=MoEConfig(4, 2, 128, layers=(0, 1, 2, 3)))
    for name, linears in (("gptq", 8 + 32), ("gptq-act-order", 8)):
        packed, _ = write_quantised(decoder, tmp_path / name, name)
        kept = kept_bits(packed, decoder.config, KEPT["cuda"], "cuda")
        assert len(kept) == linears
    plain, counted = (memory.weight_bytes(decoder.config, torch.bfloat16, kept=bits) for bits in (None, kept))
    assert 0.7 * plain < counted < plain
    with_memory(monkeypatch, counted / 2)
    with pytest.raises(UserError, match=r"does not fit cuda: weights .* are free; use a smaller model$"):
        memory.check_fits(default_config(decoder.config), decoder.config, kept=kept)


def test_a_model_that_does_not_fit_is_not_loaded(tmp_path: Path, monkeypatch) -> None:
    plain = save_decoder(tiny_decoder(), tmp_path / "plain")
    packed, _ = write_quantised(tiny_decoder(hidden_size=128, intermediate_size=256, head_dim=32), tmp_path, "awq")
    monkeypatch.setattr(build, "Tokenizer", lambda folder: None)
    monkeypatch.setattr(build, "load_decoder", lambda *_: pytest.fail("loaded"))
    with_memory(monkeypatch, 10_000)
    for folder, advice in ((plain, "add --quantization int8 or int4, or use"), (packed, "use a smaller model$")):
        with pytest.raises(UserError, match=rf"does not fit this machine: weights .* and 0\.0 GiB are free; {advice}"):
            build_engine(str(folder), Speculation(None), EngineConfig(device="cpu", dtype="float32"))


def test_gpu_memory_utilization_needs_a_gpu() -> None:
    model = tiny_decoder().config
    with pytest.raises(UserError, match="needs a GPU"):
        EngineConfig(device="cpu", gpu_memory_utilization=0.5).resolve(model)
    with pytest.raises(UserError, match="from 0 to 1"):
        EngineConfig(device="cpu", gpu_memory_utilization=1.5).resolve(model)


def test_gpu_memory_utilization_bounds_the_cache(monkeypatch) -> None:
    config = replace(default_config(tiny_decoder().config), gpu_memory_utilization=0.5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 << 30, 100 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 << 30)
    assert memory.memory_left(config) == 30 << 30
    assert memory.memory_left(replace(config, gpu_memory_utilization=0.0)) == 90 << 30


LOADING = """
import sys, threading, time, torch
from fledge.checkpoints.hf import load_decoder
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10

torch.cat([torch.empty(1).to("meta")] * 2).contiguous()  # the first such call imports torch's compiler
before, most, done = anonymous(), 0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
if len(sys.argv) == 2:
    decoder = load_decoder(sys.argv[1], torch.bfloat16, "meta")
else:
    config = EngineConfig(device="cpu", quantization=sys.argv[2], max_model_len=64, max_num_seqs=1, kv_cache_tokens=64)
    build_engine(sys.argv[1], Speculation("none"), config, tokenizer=object())
done = True
thread.join()
print(max(most - before, 0))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_holds_few_tensors_in_host_memory(tmp_path: Path) -> None:
    """Weights go to the device in the file's type; beside the mapped file the host holds one or two tensors at a time."""
    decoder = tiny_decoder(hidden_size=512, intermediate_size=4096, num_layers=24, vocab_size=2048).bfloat16()
    save_decoder(decoder, tmp_path)
    total = (tmp_path / "model.safetensors").stat().st_size
    assert total > 300e6
    done = subprocess.run([sys.executable, "-c", LOADING, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < total / 8


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("kind", ["none", "int8", "awq"])
def test_each_linear_is_packed_when_it_is_read(kind: str, tmp_path: Path) -> None:
    """On a CPU the whole model is never in memory in fp32: the peak is the size computed beforehand."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_layers": 8, "vocab_size": 2048}
    decoder = tiny_decoder(**sizes, num_heads=8, num_kv_heads=4, head_dim=64)
    folder = save_decoder(decoder.bfloat16(), tmp_path / "plain") if kind in ("none", "int8") else None
    if folder is None:
        folder, _ = write_quantised(decoder, tmp_path, kind)
    quantization = kind if kind == "int8" else "none"
    done = subprocess.run([sys.executable, "-c", LOADING, folder, quantization], capture_output=True, text=True, check=True)
    config = EngineConfig(device="cpu", quantization=quantization).resolve(decoder.config)
    needs = memory.Needs.of(config, decoder.config, kept=kept_bits(folder, decoder.config, KEPT["cpu"], "cpu"))
    assert needs.weights / 2 < int(done.stdout) < needs.weights + needs.loading + (48 << 20)


def test_page_sizes_without_attention_kernels_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda"))
    model = tiny_decoder().config
    with pytest.raises(UserError, match=r"--block-size 48 .* power of two"):
        EngineConfig(page_size=48).resolve(model)
    assert EngineConfig(page_size=64).resolve(model).page_size == 64
    monkeypatch.undo()
    assert EngineConfig(device="cpu", page_size=48).resolve(model).page_size == 48
