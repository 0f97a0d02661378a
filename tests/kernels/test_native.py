"""The native kernels equal plain torch, and native layers equal the model's layers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fledge.engine.build import Speculation, fit
from fledge.families import FAMILIES
from fledge.kernels import native
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import HostLayouts, PagedKV, SequenceLayout
from fledge.kernels.linear.packed import pack_linears
from fledge.kernels.native_layers import NativeBatch, NativeLayer, NativeLayers
from fledge.kernels.quantization import dequantize, quantize
from fledge.models.layers import MLP, Attention, Layer, RMSNorm
from fledge.ops.base import Ops
from fledge.ops.cpu_ops import CpuOps
from fledge.ops.torch_ops import TorchOps
from fledge.sampling import SamplingParams
from fledge.speculation.methods.eagle import EagleSpeculator
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-3) -> None:
    """Equal within `share` of the largest number: entries near zero are sums of large terms and have their rounding."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=share * expected.abs().max().item())


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize(("inputs", "outputs"), [(37, 51), (64, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows, inputs, outputs, bias):
    weight, x = torch.randn(outputs, inputs).half(), torch.randn(rows, inputs)
    offset = torch.randn(outputs) if bias else None
    expected = F.linear(x, weight.float(), offset)
    assert_near(native.NativeLinear(weight, offset)(x), expected, 1e-4)
    assert_near(native.NativeLinear(weight.float(), offset)(x), expected, 1e-4)


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 51), (576, 96)])
@pytest.mark.parametrize(
    ("bits", "group_size", "offsets"), [(8, 32, False), (8, 96, False), (4, 32, True), (4, 32, False), (4, 8, True)]
)
def test_quantised_linear(rows, inputs, outputs, bits, group_size, offsets):
    quantised = quantize(torch.randn(outputs, inputs), bits, group_size, offsets=offsets)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    linear, weight = native.NativeLinear(quantised, bias), dequantize(quantised)
    assert_near(linear(x), F.linear(x, weight, bias), 2e-4)
    x[:, 5] *= 300  # activations have such channels; their rounding must not affect the others
    assert_near(linear(x), F.linear(x, weight, bias), 1e-3)


def test_zeros():
    quantised = quantize(torch.zeros(40, 64), 4)
    assert not native.NativeLinear(quantised, None)(torch.randn(2, 64)).any()
    quantised = quantize(torch.randn(40, 64), 4)
    assert not native.NativeLinear(quantised, None)(torch.zeros(2, 64)).any()


def _weights(outputs: int, inputs: int) -> list:
    weight = torch.randn(outputs, inputs)
    return [weight, weight.half(), quantize(weight, 8), quantize(weight, 4), quantize(weight, 4, offsets=False)]


def test_a_row_does_not_depend_on_other_rows():
    """Because of this, speculative output on CPU equals plain output bit for bit."""
    x = torch.randn(13, 96)
    for weight in _weights(100, 96):
        linear = native.NativeLinear(weight, None)
        together = linear(x)
        for rows in range(1, 9):
            for first in range(14 - rows):
                assert torch.equal(linear(x[first : first + rows]), together[first : first + rows])


def test_more_threads_than_cores():
    """Threads that wake late find a finished round, or the next one."""
    linears, x = [native.NativeLinear(torch.randn(outputs, 32), None) for outputs in (70, 2000, 300)], torch.randn(1, 32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [linear(x) for linear in linears]
        for turn in range(600):
            torch.set_num_threads(2 + turn % 7)
            assert torch.equal(linears[turn % 3](x), expected[turn % 3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_a_forked_process_starts_its_own_threads():
    """The parent's threads do not exist in the child."""
    linear, x, before = native.NativeLinear(torch.randn(256, 64), None), torch.randn(2, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = linear(x)
        time.sleep(0.05)  # until the helper thread sleeps: its condition variable is copied while a thread waits on it
        child = os.fork()
        if not child:
            signal.alarm(30)
            for _ in range(3):
                if not torch.equal(linear(x), expected) or len(os.listdir("/proc/self/task")) != 2:
                    os._exit(1)
                time.sleep(0.05)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


def test_rms_norm_into_columns():
    x, weight, wide = torch.randn(5, 37), torch.rand(37), torch.zeros(5, 80)
    native.rms_norm(x, weight, 1e-5, wide[:, 40:77])
    torch.testing.assert_close(wide[:, 40:77], F.rms_norm(x, (37,), weight, 1e-5))
    assert not wide[:, :40].any()
    assert not wide[:, 77:].any()


def test_best_of():
    logits = 4 * torch.randn(3, 1000)
    logits[1, 999] = 50.0
    logits[2, 5] = logits[2, 700] = 60.0  # of equal logits the first is chosen
    index, shares = native.best_of(logits, probability=True)
    assert index == logits.argmax(-1).tolist()
    assert index[1:] == [999, 5]
    torch.testing.assert_close(torch.tensor(shares), logits.softmax(-1).max(-1).values, rtol=1e-4, atol=1e-6)


class Heads:
    """A layer with random weights that fp16 represents exactly, and no input norm, for tests of attention."""

    def __init__(self, H: int, K: int, E: int, window: int | None, qk_norm: bool) -> None:
        self.attention = Attention(
            0, 2 * E, H * E, H, K, E, qkv_bias=True, qk_norm_eps=1e-5 if qk_norm else None, window=window
        ).requires_grad_(False)
        self.mlp = MLP(H * E, 64).requires_grad_(False)
        self.post = RMSNorm(H * E, 1e-5).requires_grad_(False)
        self.layer = Layer(0)
        self.layer.first = True  # it has no input norm
        self.layer.self_attn, self.layer.mlp, self.layer.post_attention_layernorm = self.attention, self.mlp, self.post
        for norm in (self.attention.q_norm, self.attention.k_norm):
            if norm is not None:
                norm.weight.uniform_(0.5, 1.5)
        for module in (self.attention, self.mlp):
            for linear in module.children():
                if isinstance(linear, torch.nn.Linear):
                    linear.weight.copy_(linear.weight.half())  # packing keeps fp16


@pytest.mark.parametrize(
    ("T", "kv_len", "tree"),
    [(1, 1, 0), (1, 90, 0), (6, 6, 0), (6, 77, 0), (23, 130, 0), (5, 60, 9), (3, 1100, 0), (5, 515, 9), (23, 1040, 0)],
)
@pytest.mark.parametrize("window", [None, 5, 64, 700])
@pytest.mark.parametrize("E", [64, 8, 80])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_layer(T, kv_len, tree, window, E, qk_norm, threads):
    H, K, page, first_page = 6, 2, 8, 2
    heads = Heads(H, K, E, window, qk_norm)
    mask = None
    if tree:
        mask = torch.rand(T, tree) < 0.5
        mask[range(T), range(tree - T, tree)] = True
    num_pages = first_page + kv_len // page + 1
    layout = SequenceLayout(list(range(first_page, num_pages)), T, kv_len, mask)
    x, normed = torch.randn(T, H * E), torch.randn(T, 2 * E)
    cos, sin = torch.randn(T, 1, E), torch.randn(T, 1, E)
    caches = [PagedKV(1, K, E, num_pages, page, torch.float32, "cpu") for _ in range(2)]
    for cache in caches:
        cache.keys.copy_(torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(1)))
        cache.values.copy_(torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(2)))
    meta = AttentionMetadata.from_layouts([layout], torch.arange(T), page)
    expected = heads.layer(x, meta, TorchOps(caches[0], lambda *_: (cos, sin)), attention_input=normed)
    pack_linears(heads.attention)
    pack_linears(heads.mlp)
    layer = NativeLayer(heads.layer, caches[1].keys[0], caches[1].values[0])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        NativeLayers([layer])(NativeBatch(meta.host, [(cos, sin)], torch.arange(T)), x, normed)
    finally:
        torch.set_num_threads(before)
    assert_near(caches[1].keys, caches[0].keys, 1e-4)
    assert_near(caches[1].values, caches[0].values, 1e-4)
    assert_near(x, expected)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=["float32", "float16", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3, 24])  # 24: more than some linears have panels
def test_rows_of_a_long_text_do_not_depend_on_other_rows(window, dtype, threads):
    """With few rows the threads split the keys, with many rows they split the rows."""
    H, K, E, page, T, kv_len = 6, 2, 64, 16, 20, 1040
    heads = Heads(H, K, E, window, False)
    pack_linears(heads.attention)
    pack_linears(heads.mlp)
    x, normed = torch.randn(T, H * E), torch.randn(T, 2 * E)
    cos, sin = torch.randn(T, 1, E), torch.randn(T, 1, E)
    empty = PagedKV(1, K, E, kv_len // page, page, dtype, "cpu")
    earlier = [torch.randint(0, 60, cache.shape).to(dtype) for cache in (empty.keys, empty.values)]
    results, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in (1, 3, 8, T):
            keys, values = (part.clone() for part in earlier)
            layer, out = NativeLayer(heads.layer, keys[0], values[0]), x.clone()
            for first in range(0, T, step):
                rows = slice(first, min(first + step, T))
                layout = SequenceLayout(list(range(kv_len // page)), rows.stop - first, kv_len - T + rows.stop)
                host, some = HostLayouts([layout], page, torch.device("cpu")), out[rows].clone()
                positions = torch.arange(first, rows.stop)
                NativeLayers([layer])(NativeBatch(host, [(cos, sin)], positions), some, normed[rows].clone())
                out[rows] = some
            results.append((out, keys, values))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))


@pytest.mark.parametrize(("T", "kv_len", "tree"), [(1, 1, 0), (1, 90, 0), (6, 77, 0), (23, 130, 0), (5, 60, 9), (5, 1026, 9)])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("E", [64, 8, 80, 24])
@pytest.mark.parametrize("page", [16, 8, 5])
def test_page_order_does_not_change_bits(T, kv_len, tree, window, E, page):
    H, K, num_pages = 6, 2, 60 + kv_len // 3
    heads = Heads(H, K, E, window, False)
    pack_linears(heads.attention)
    pack_linears(heads.mlp)
    mask = torch.ones(T, tree, dtype=torch.bool).tril(tree - T) if tree else None
    used = -(-kv_len // page)
    scattered = torch.randperm(num_pages).tolist()
    shared = [*range(used + 30, used + 30 + used // 2), *range(2, 2 + used - used // 2)]  # a shared prefix, then own pages
    x, normed = torch.randn(T, H * E), torch.randn(T, 2 * E)
    cos, sin = torch.randn(T, 1, E), torch.randn(T, 1, E)
    keys, values = torch.randn(2, K, used * page, E)
    results = []
    for pages in (list(range(7, 7 + used)), scattered, shared):
        cache = PagedKV(1, K, E, num_pages, page, torch.float32, "cpu")
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        slots = torch.tensor([pages[place // page] * page + place % page for place in range(used * page)])
        cache.keys[0, :, slots], cache.values[0, :, slots] = keys, values
        layer = NativeLayer(heads.layer, cache.keys[0], cache.values[0])
        host, out = HostLayouts([SequenceLayout(pages, T, kv_len, mask)], page, torch.device("cpu")), x.clone()
        NativeLayers([layer])(NativeBatch(host, [(cos, sin)], torch.arange(T)), out, normed)
        results.append((out, cache.keys[0, :, slots], cache.values[0, :, slots]))
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_native_pass_equals_the_torch_model(family):
    decoder = fit(tiny_decoder(3, family, windows=(7, None, 7, None)), replace(CPU, dtype="float16"))
    caches = [PagedKV(4, 2, 8, 32, 8, torch.float32, "cpu") for _ in range(2)]
    layouts = [SequenceLayout(list(range(4)), 9, 9), SequenceLayout(list(range(10, 16)), 14, 14)]
    tokens, positions = torch.randint(0, 128, (23,)), torch.cat([torch.arange(9), torch.arange(14)])
    taps = (0, 2, 4)
    assert CpuOps.serves(decoder, caches[1])
    found = []
    for ops in (TorchOps(caches[0], *decoder.rotaries), CpuOps(decoder, caches[1])):
        meta = AttentionMetadata.from_layouts(layouts, positions, 8, 14)
        x, aux = decoder.run(decoder.embed(tokens), meta, ops, taps)
        found.append([ops.norm(decoder.norm, x), *aux])
    for mine, theirs in zip(*found, strict=True):
        assert_near(theirs, mine)


@pytest.mark.parametrize("lengths", [(9, 14), (2, 3)], ids=["many rows", "few rows, streamed"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_pass_in_one_call_equals_separate_calls(family, streamed, lengths, monkeypatch):
    decoder = fit(tiny_decoder(3, family, windows=(7, None, 7, None)), replace(CPU, dtype="float16"))
    one, other = lengths
    layouts = [SequenceLayout(list(range(4)), one, one), SequenceLayout(list(range(10, 16)), other, other)]
    tokens, positions = torch.randint(0, 128, (one + other,)), torch.cat([torch.arange(one), torch.arange(other)])
    found = []
    for target_pass, cache_bytes in ((Ops.target_pass, 0), (CpuOps.target_pass, 1 if streamed else 0)):
        monkeypatch.setattr(native, "cache_bytes", lambda size=cache_bytes: size)
        ops = CpuOps(decoder, PagedKV(4, 2, 8, 32, 8, torch.float32, "cpu"))
        meta = AttentionMetadata.from_layouts(layouts, positions, 8, other)
        logits, taps, x = target_pass(ops, decoder, tokens, meta, (4, 0, 2), [one - 1, one + other - 1])
        found.append([logits, *taps, x])
    assert bool(decoder.lm_head.native.arguments.streamed) is streamed
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_native_drafter_equals_the_torch_drafter(flags, num_layers):
    network = fit(tiny_drafter(tiny_drafter_config(num_layers=num_layers, **flags)), replace(CPU, dtype="float16"))
    config = network.config
    network.share(torch.nn.Embedding(config.vocab_size, config.hidden_size), None)
    caches = [PagedKV(num_layers, config.num_kv_heads, config.head_dim, 32, 8, torch.float32, "cpu") for _ in range(2)]
    layouts = [SequenceLayout(list(range(4)), 9, 9)]
    tokens, positions = torch.randint(0, config.vocab_size, (9,)), torch.arange(9)
    taps = [torch.randn(9, config.target_hidden_size) for _ in config.aux_layer_ids]
    plain_ops, quick_ops = TorchOps(caches[0], network.rotary), CpuOps(network, caches[1])
    h = network.fuse(taps)
    assert_near(network.fuse(taps, quick_ops), h)
    with torch.inference_mode():
        plain, quick = (
            network.step(tokens, h, AttentionMetadata.from_layouts(layouts, positions, 8, 8), ops)
            for ops in (plain_ops, quick_ops)
        )
    assert_near(quick.hidden_ND, plain.hidden_ND)
    assert_near(quick.feedback_ND, plain.feedback_ND)


@pytest.mark.parametrize(
    "flags", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}, {"norm_before_residual": True}]
)
@pytest.mark.parametrize("depth", [4, "auto"])
def test_a_chain_drafted_in_one_call_equals_separate_steps(flags, depth, monkeypatch):
    seen = []
    in_one_call = EagleSpeculator._draft_in_one_call

    def both_ways(self, spans, taps):
        found = in_one_call(self, spans, taps)
        if found is not None:
            expected = self._draft(spans, taps)
            assert (found[0].tokens, found[0].parents) == (expected[0].tokens, expected[0].parents)
            assert found[0].confidences == pytest.approx(expected[0].confidences, rel=1e-5)
            seen.append(len(found[0]))
        return found

    monkeypatch.setattr(EagleSpeculator, "_draft_in_one_call", both_ways)
    config = replace(CPU, dtype="float16", page_size=8)
    network = tiny_drafter(tiny_drafter_config(num_layers=2, **dict.fromkeys(flags, True)))
    engine = engine_with(tiny_decoder(), Speculation(network, depth).fixed_depth(), config)
    run(engine, [list(range(40))], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    assert len(seen) > 10
    assert max(seen) <= 6
    before = len(seen)
    run(engine, [[3, 7], [9, 11]], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))  # two requests: separate steps
    assert len(seen) == before


def test_a_token_outside_the_vocabulary_is_refused():
    network = fit(tiny_drafter(tiny_drafter_config()), replace(CPU, dtype="float16"))
    config = network.config
    network.share(torch.nn.Embedding(config.vocab_size, config.hidden_size), None)
    ops = CpuOps(network, PagedKV(1, config.num_kv_heads, config.head_dim, 8, 8, torch.float32, "cpu"))
    meta = AttentionMetadata.from_layouts([SequenceLayout([0], 1, 1)], torch.arange(1), 8, 0)
    with pytest.raises(IndexError, match="beyond the vocabulary"):
        network.step(torch.tensor([config.vocab_size]), torch.randn(1, config.hidden_size), meta, ops)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_speculation_with_packed_weights_is_lossless(tree):
    config = replace(CPU, dtype="float16")
    prompts = [[3, 7, 100], [55], list(range(40))]
    params = SamplingParams(max_tokens=60, temperature=0)
    engine = engine_with(tiny_decoder(), Speculation("none"), config)
    assert isinstance(engine.executor.ops, CpuOps)
    plain = run(engine, prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    packed = engine.decoder
    oracle = OracleSpeculator(answers, 5, tree=tree, reach=lambda length: length % 6)
    assert run(engine_with(packed, oracle, config), prompts, params) == plain
