"""A query row's attention has the same bits however the pass is composed, and is correct.

Triton's interpreter computes products with numpy, whose order of summation depends on the shape. The tests replace them by
products as a tensor core computes them: in groups of 16, one after another, with each group's sum rounded once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fledge.config import RopeConfig
from fledge.kernels.attention import prefill_attention as prefill_module
from fledge.kernels.attention import rope_attention as decode_module
from fledge.kernels.attention.launch_config import FEW, SOME, choose_programs
from fledge.kernels.attention.prefill_attention import prefill_attention_reference, prefill_attention_triton
from fledge.kernels.attention.rope_attention import rope_attention_reference, rope_attention_triton
from fledge.kernels.attention.rope_cache import rope_cache_reference, rope_cache_triton
from fledge.models.layers import Rotary
from tests.kernels.support import INTERPRETED, KERNELS, device_of_kernels, running

# Heads, head size, page size, window, norms, keys per split.
CASES = [((6, 2), 32, 64, None, False, 64), ((3, 1), 24, 16, None, True, 128), ((4, 4), 16, 128, 90, False, 64)]
LENGTH = 210


@pytest.fixture(autouse=True)
def tensor_core(monkeypatch):
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        sums = d.data
        for first in range(0, a.data.shape[1], 16):
            group = slice(first, first + 16)
            sums = (sums + a.data[:, group].astype(np.float64) @ b.data[group].astype(np.float64)).astype(np.float32)
        return TensorHandle(sums, d.dtype.scalar)

    def exp2(self, x):
        return TensorHandle(np.exp2(x.data.astype(np.float64)).astype(np.float32), x.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "create_exp2", exp2)


class Text:
    """One text with random heads, its keys in scattered pages of a cache of NaN, and its attention in a single prefill pass."""

    def __init__(self, kernel, heads, size, page, window, norms, dtype) -> None:
        self.kernel, self.heads, self.size, self.page, self.window = kernel, heads, size, page, window
        self.device = "cpu" if kernel == "reference" else device_of_kernels()
        num_pages = -(-LENGTH // page)
        self.pages = torch.randperm(num_pages + 2)[:num_pages].int().to(self.device)
        shape = (heads[1], (num_pages + 2) * page, size)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype, device=self.device) for _ in range(2))
        self.qkv = (2 * torch.randn(LENGTH, (heads[0] + 2 * heads[1]) * size, device=self.device)).to(dtype)
        self.table = Rotary(size, 512, RopeConfig()).device_table(512, torch.device(self.device))
        weights = [torch.randn(size, device=self.device).to(dtype) for _ in range(2)]
        self.norms = (weights[0], weights[1], 1e-6) if norms else None
        self.prompt = self.prefilled([(0, LENGTH)])

    def numbers(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def slots(self, first, last):
        place = torch.arange(first, last, device=self.device)
        return self.pages.long()[place // self.page] * self.page + place % self.page

    def prefilled(self, parts, **way):
        """The attention of parts of the text as sequences of one prefill pass; the last row is padding."""
        place = torch.cat([torch.arange(*part) for part in parts]).to(self.device)
        qkv = torch.cat([self.qkv[place], self.qkv[:1]])
        where = (torch.cat([place, place[:1]]), torch.cat([self.slots(*part) for part in parts] + [self.numbers([-1])]))
        store = rope_cache_reference if self.kernel == "reference" else rope_cache_triton
        store(qkv, self.table, *where, self.keys, self.values, self.norms)
        run = prefill_attention_reference if self.kernel == "reference" else prefill_attention_triton
        found = run(
            qkv.view(len(qkv), -1, self.size)[:, : self.heads[0]],
            self.keys,
            self.values,
            self.pages.expand(len(parts), -1),
            self.numbers([0] + [last - first for first, last in parts]).cumsum(0).int(),
            self.numbers([first for first, _ in parts]),
            self.page,
            window=self.window,
            **way,
        )
        assert not found[-1].any()
        return found[:-1].flatten(1)

    def decoded(self, starts, counts, num_new, **way):
        """The attention of chains [B, T, H * E]. For a single chain later slots are NaN before the call and must stay so."""
        keys, values = self.keys.clone(), self.values.clone()
        if len(starts) == 1:
            for cache in (keys, values):
                cache[:, self.slots(starts[0], LENGTH)] = torch.nan
        place = torch.tensor(starts)[:, None] + torch.arange(num_new)
        run = rope_attention_reference if self.kernel == "reference" else rope_attention_triton
        found = run(
            self.qkv[place.clamp(max=LENGTH - 1).to(self.device)].flatten(0, 1).contiguous(),
            self.table,
            self.numbers(starts),
            self.numbers(counts),
            keys,
            values,
            self.pages.expand(len(starts), -1),
            self.page,
            norms=self.norms,
            window=self.window,
            **way,
        )
        if len(starts) == 1:
            end = starts[0] + counts[0]
            for cache, wanted in ((keys, self.keys), (values, self.values)):
                assert torch.equal(cache[:, self.slots(0, end)], wanted[:, self.slots(0, end)])
                assert cache[:, self.slots(end, LENGTH)].isnan().all()
        return found.view(len(starts), num_new, -1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "page", "window", "norms", "split"), CASES)
def test_a_rows_attention_does_not_depend_on_the_pass(kernel, dtype, heads, size, page, window, norms, split, monkeypatch):
    for module in (decode_module, prefill_module):
        monkeypatch.setattr(module, "SPLIT", split)
    text = Text(kernel, heads, size, page, window, norms, dtype)
    wanted = text.prompt
    assert wanted.isfinite().all()
    if dtype == torch.float32:
        torch.testing.assert_close(wanted, by_formula(text), atol=1e-4, rtol=1e-4)

    parts = [(0, 1), (1, 60), (60, 65), (65, 130), (130, LENGTH)]
    assert torch.equal(text.prefilled(parts), wanted)
    assert torch.equal(torch.cat([text.prefilled([part]) for part in parts]), wanted)
    if kernel == "triton":
        assert torch.equal(text.prefilled([(0, LENGTH)], rows=32 if dtype == torch.float32 else 128), wanted)

    starts, counts = [0, 62, 128, 203, 77], [5, 4, 0, 5, 1]
    ways: list[dict] = [{}]
    if kernel == "triton":
        ways += [{"programs": 1, "streamed": True}, {"programs": 2, "config": SOME}, {"programs": 3, "config": FEW}]
    for way in ways:
        found = text.decoded(starts, counts, 5, **way)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert torch.equal(found[row, :count], wanted[start : start + count])
            assert count or not found[row].any()
        for start, count in ((62, 1), (63, 2), (203, 5)):
            assert torch.equal(text.decoded([start], [count], count, **way)[0], wanted[start : start + count])


def by_formula(text: Text) -> torch.Tensor:
    qkv = text.qkv.clone()
    nowhere = torch.full((LENGTH,), -1, device=text.device)
    rope_cache_reference(qkv, text.table, torch.arange(LENGTH, device=text.device), nowhere, text.keys, text.values, text.norms)
    q = qkv.view(LENGTH, -1, text.size)[:, : text.heads[0]]
    slots = text.slots(0, LENGTH)
    k, v = (cache[:, slots].repeat_interleave(text.heads[0] // text.heads[1], 0) for cache in (text.keys, text.values))
    ago = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    seen = ((ago >= 0) & (ago < (text.window or LENGTH))).to(text.device)
    scores = torch.einsum("the,hse->hts", q, k) / text.size**0.5
    return torch.einsum("hts,hse->the", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_before_a_text_are_zero(kernel):
    """A recorded chunk may begin before its text's first token: those rows are 0."""
    run, device = running(kernel, prefill_attention_reference, prefill_attention_triton)
    keys, values = (torch.randn(1, 16, 16, device=device) for _ in range(2))
    q = torch.randn(8, 3, 16, device=device)
    table, offsets = (torch.tensor(numbers, device=device, dtype=torch.int32) for numbers in ([[0]], [0, 8]))
    found = run(q, keys, values, table, offsets, torch.tensor([-2], device=device), 16)
    assert not found[:2].any()
    start = torch.tensor([0], device=device)
    whole = run(q[2:], keys, values, table, offsets.clamp(max=6), start, 16)
    assert torch.equal(found[2:], whole)


def test_the_number_of_programs_per_sequence():
    assert choose_programs(3, 1, 264, 100) == 1
    assert choose_programs(3, 16, 264, 100) == 16
    assert choose_programs(48, 16, 264, 100) == 8  # two splits each
    assert choose_programs(133, 16, 264, 100) == 1  # enough programs without splits
    assert choose_programs(3, 16, 264, 15) == 1  # too much memory
