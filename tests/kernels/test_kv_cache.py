"""KV cache types on a CPU: the C kernels equal the torch reference, and a row does not depend on other rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.memory import memory_plan
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import HostLayouts, PagedKV, SequenceLayout
from fledge.kernels.formats.kv_cache import KV_DTYPES, decode, encode
from fledge.kernels.linear.packed import pack_linears
from fledge.kernels.native_layers import NativeBatch, NativeLayer, NativeLayers
from fledge.ops.cpu_ops import CpuOps
from fledge.ops.torch_ops import TorchOps
from fledge.sampling import SamplingParams
from tests.kernels.test_native import Heads, assert_near
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder

TYPES = ["float32", "float16", "q8_0"]
needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def test_q8_0_blocks_equal_those_of_gguf():
    x = torch.randn(3, 5, 64) * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
    x[1, 2, :32] = 0.0
    stored = encode(x, torch.uint8)
    assert stored.shape == (3, 5, 68)
    read = dequantize(np.ascontiguousarray(stored.numpy()), GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(read), decode(stored, torch.float32))
    # Half a step of 1/127 of a block's largest number, plus the rounding of its scale (2**-25 for subnormal scales).
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(3, 5, 2, 32).flatten(-2)
    assert ((decode(stored, torch.float32) - x).abs() <= largest * (0.5 / 127 + 6e-4) + 127 * 2**-25).all()


@needs_compiler
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("T", "kv_len", "tree"), [(1, 1, 0), (1, 90, 0), (6, 77, 0), (23, 130, 0), (5, 60, 9)])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("E", [64, 96, 32])
def test_layer(name, T, kv_len, tree, window, E):
    """Stored keys and values and the layer's output equal those in torch."""
    H, K, page = 6, 2, 8
    heads, mask = Heads(H, K, E, window, False), None
    if tree:
        mask = torch.rand(T, tree) < 0.5
        mask[range(T), range(tree - T, tree)] = True
    layout = SequenceLayout(list(range(2, 25)), T, kv_len, mask)
    x, normed = torch.randn(T, H * E), torch.randn(T, 2 * E)
    cos, sin = torch.randn(T, 1, E), torch.randn(T, 1, E)
    caches = [PagedKV(1, K, E, 25, page, KV_DTYPES[name], "cpu") for _ in range(2)]
    for stored in ("keys", "values"):
        filled = encode(torch.randn(1, K, 25 * page, E), KV_DTYPES[name])
        for cache in caches:
            getattr(cache, stored).copy_(filled)
    meta = AttentionMetadata.from_layouts([layout], torch.arange(T), page)
    expected = heads.layer(x, meta, TorchOps(caches[0], lambda *_: (cos, sin)), attention_input=normed)
    pack_linears(heads.attention)
    pack_linears(heads.mlp)
    layer = NativeLayer(heads.layer, caches[1].keys[0], caches[1].values[0])
    NativeLayers([layer])(NativeBatch(meta.host, [(cos, sin)], torch.arange(len(x))), x, normed)
    for stored in ("keys", "values"):
        ours, theirs = (decode(getattr(cache, stored), torch.float32) for cache in reversed(caches))
        # A number on the edge between two quantised values may be rounded to either.
        assert_near(ours, theirs, {"float32": 1e-4, "float16": 1e-3, "q8_0": 1.01 / 127}[name])
        assert ((ours - theirs).abs() > 1e-4 * theirs.abs().max()).float().mean() < 0.01
    assert_near(x, expected, 5e-3 if name == "q8_0" else 1e-3)


@needs_compiler
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("page", [16, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_other_rows_or_page_order(name, window, page, threads):
    H, K, E, start, num_rows = 6, 2, 64, 61, 17
    heads = Heads(H, K, E, window, False)
    pack_linears(heads.attention)
    pack_linears(heads.mlp)
    used = -(-(start + num_rows) // page)
    x, normed = torch.randn(num_rows, H * E), torch.randn(num_rows, 2 * E)
    cos, sin = torch.randn(num_rows, 1, E), torch.randn(num_rows, 1, E)
    before = encode(torch.randn(2, K, used * page, E), KV_DTYPES[name])
    empty = 255 if name == "q8_0" else torch.nan  # a scale of these bytes is NaN, too
    results = []
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for pages, step in ((list(range(7, 7 + used)), num_rows), *((torch.randperm(40).tolist(), step) for step in (1, 4))):
            cache = PagedKV(1, K, E, 40, page, KV_DTYPES[name], "cpu")
            cache.keys.fill_(empty)
            cache.values.fill_(empty)
            slots = torch.tensor([pages[place // page] * page + place % page for place in range(start + num_rows)])
            cache.keys[0, :, slots[:start]], cache.values[0, :, slots[:start]] = before[:, :, :start]
            layer = NativeLayer(heads.layer, cache.keys[0], cache.values[0])
            out = x.clone()
            for first in range(0, num_rows, step):
                rows = slice(first, min(first + step, num_rows))
                layout = SequenceLayout(pages, rows.stop - first, start + rows.stop)
                host, part = HostLayouts([layout], page, torch.device("cpu")), out[rows].clone()
                batch = NativeBatch(host, [(cos, sin)], torch.arange(len(x))[rows])
                NativeLayers([layer])(batch, part, normed[rows].contiguous())
                out[rows] = part
            results.append((out, cache.keys[0, :, slots], cache.values[0, :, slots]))
    finally:
        torch.set_num_threads(torch_threads)
    assert not results[0][0].isnan().any()
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))


@needs_compiler
@pytest.mark.parametrize("name", TYPES)
def test_speculation_does_not_change_answers(name):
    config = replace(CPU, dtype="float16", kv_cache_dtype=name)
    prompts, params = [[3, 7, 100], [55], list(range(40))], SamplingParams(max_tokens=60, temperature=0)
    engine = engine_with(tiny_decoder(head_dim=32), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    assert engine.executor.cache.keys.dtype == KV_DTYPES[name]
    plain = run(engine, prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, reach=lambda length: length % 6)
    assert run(engine_with(engine.decoder, oracle, config), prompts, params) == plain


@needs_compiler
def test_the_default_type_follows_the_weights():
    model = tiny_decoder(head_dim=32).config
    found = {dtype: replace(CPU, dtype=dtype).resolve(model).kv_cache_dtype for dtype in ("float32", "float16")}
    assert found == {"float32": "float32", "float16": "float16"}
    plans = {}
    for name in TYPES:
        engine = build_engine(tiny_decoder(head_dim=32), Speculation("none"), replace(CPU, kv_cache_dtype=name))
        plans[name] = memory_plan(engine).cache_per_token
    assert plans["float16"] * 2 == plans["float32"] == 2 * model.num_layers * model.num_kv_heads * 32 * 4
    assert plans["q8_0"] * 64 == plans["float16"] * 34


def test_unsupported_types_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_decoder().config  # heads of 8
    with pytest.raises(UserError, match="--kv-cache-dtype fp8 is not supported on CPU; use auto, float32, float16, q8_0"):
        replace(CPU, kv_cache_dtype="fp8").resolve(model)
    if native.library() is not None:
        with pytest.raises(UserError, match="a multiple of 32, not 8"):
            replace(CPU, kv_cache_dtype="q8_0").resolve(model)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(UserError, match="needs a C compiler"):
        replace(CPU, kv_cache_dtype="float16").resolve(model)
    assert EngineConfig(device="cpu", dtype="float32").resolve(model).kv_cache_dtype == "float32"
