"""Sampling on the device: reproducible noise, correct frequencies, and truncation by top-p, top-k and min-p."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from fledge.kernels.linear.dispatch import head_choice
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tiles import tiled_head
from fledge.kernels.quantization import dequantize, quantize
from fledge.kernels.rms_norm import rms_norm_triton
from fledge.kernels.sample import (
    SamplingState,
    choose_reference,
    choose_triton,
    gumbel_noise,
    picked,
    picked_or_none,
    sample_cpu,
    sample_reference,
)
from fledge.kernels.sample_cpu import MOST_NOISE, QUARTER, lowest_kept, philox_words
from fledge.kernels.truncation import TruncationParams, floor_reference, floor_triton
from fledge.sampling import SamplingParams
from tests.kernels.support import INTERPRETED, KERNELS, device_of_kernels, running, runs_triton
from tests.oracle import probabilities

SAMPLERS = ["cpu", *KERNELS]


def sample_triton(logits, temperatures, seeds, counters, truncation=None):
    return picked(choose_triton(logits, SamplingState(temperatures, seeds, counters, truncation)), logits.shape[1])


def sampler(kernel):
    run = {"cpu": sample_cpu, "reference": sample_reference, "triton": sample_triton}[kernel]
    return run, device_of_kernels() if kernel == "triton" else "cpu"


def test_philox_equals_published_values():
    """The known answers of Random123 for Philox 4x32-10 with the counter's upper half zero."""
    assert philox_words(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


@pytest.mark.parametrize("kernel", SAMPLERS)
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_greedy_is_argmax_and_ties_go_to_the_lower_id(kernel, vocab_size):
    run, device = sampler(kernel)
    logits = torch.randn(6, vocab_size, device=device)
    logits[0, [7, 30, 49]] = 99.0
    logits[1, [vocab_size - 1, 12]] = 99.0
    zeros = torch.zeros(6, dtype=torch.int64, device=device)
    chosen = run(logits, torch.zeros(6, device=device), zeros, zeros)
    assert chosen[:2].tolist() == [7, 12]
    assert chosen.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_samples_depend_only_on_seed_and_counter(kernel):
    run, device = sampler(kernel)
    logits = torch.randn(1, 5000, device=device).repeat(8, 1)
    temperatures = torch.full((8,), 0.7, device=device)
    seeds = torch.tensor([5, 5, 5, 2**62 + 5, 5, 9, 9, 5], device=device)
    counters = torch.tensor([0, 1, 0, 0, 2, 0, 1, 1], device=device)
    chosen = run(logits * 0.1, temperatures, seeds, counters).tolist()
    assert chosen[0] == chosen[2]
    assert chosen[1] == chosen[7]
    assert len(set(chosen)) == 6
    noise = gumbel_noise(seeds.cpu(), counters.cpu(), 5000)
    assert chosen == (logits.cpu() * 0.1 / 0.7 + noise).argmax(-1).tolist()


@pytest.mark.parametrize("kernel", SAMPLERS)
def test_frequencies_follow_the_distribution(kernel):
    run, device = sampler(kernel)
    draws = 400 if kernel == "triton" else 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0], device=device)
    chosen = run(
        logits.repeat(draws, 1),
        torch.full((draws,), 0.8, device=device),
        torch.full((draws,), 1234567890123, device=device),
        torch.arange(draws, device=device),
    )
    shares = torch.bincount(chosen.cpu(), minlength=5) / draws
    torch.testing.assert_close(shares, (logits.cpu() / 0.8).softmax(-1), atol=1.5 / draws**0.5, rtol=0)
    assert shares[4] == 0


PEAKED, FLAT = 8.0, 0.5
TRUNCATIONS = {
    "none": None,
    "top_p": (0.9, 0, 0.0),
    "top_k": (1.0, 50, 0.0),
    "min_p": (1.0, 0, 0.02),
    "all": (0.95, 300, 0.001),
    "nothing": (1.0, 0, 0.0),
    "tiny top_p": (1e-6, 0, 0.0),
}


@pytest.mark.parametrize("cut", TRUNCATIONS)
@pytest.mark.parametrize("spread", [PEAKED, 3.0, FLAT, 0.0])
@pytest.mark.parametrize("vocab_size", [40, 5003, 49152])
@pytest.mark.parametrize("mapped", [False, True])
def test_fast_cpu_sampling_equals_the_reference(cut, spread, vocab_size, mapped):
    count = 6 if vocab_size > 10000 else 24
    logits = (spread * torch.randn(count, vocab_size)).to(torch.bfloat16 if vocab_size == 5003 else torch.float32)
    logits[2], logits[3, 7:] = -torch.inf, -torch.inf
    temperatures = torch.rand(count) * 1.5 + 0.2
    temperatures[1] = 0.0
    seeds, counters = torch.randint(-(2**62), 2**62, (count,)), torch.randint(0, 100000, (count,))
    truncation = TRUNCATIONS[cut] and TruncationParams(*(torch.tensor([part] * count) for part in TRUNCATIONS[cut]))
    ids = torch.randperm(2 * vocab_size)[:vocab_size].sort().values if mapped else None
    expected = sample_reference(logits, temperatures, seeds, counters, truncation=truncation, ids_V=ids)
    assert sample_cpu(logits, temperatures, seeds, counters, truncation, ids).tolist() == expected.tolist()
    if truncation is not None and cut != "nothing":
        scaled = logits.float() * torch.where(temperatures > 0, 1.0 / temperatures, 1.0)[:, None]
        drawn = [0, *range(4, count)]  # rows with -inf logits may have another floor: no token lies in between
        found = [
            lowest_kept(scaled[row], *(x[row].item() for x in (truncation[0], truncation[1], truncation[2].log())))
            for row in drawn
        ]
        assert found == floor_reference(logits, temperatures, truncation)[drawn].tolist()


def test_the_upper_bound_of_the_noise():
    most = float(-torch.log(-torch.log(torch.tensor(1 - 0.5 * 2.0**-23))))
    assert MOST_NOISE - 1e-4 < most < MOST_NOISE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("vocab_size", [20, 5000])
def test_kept_tokens_equal_those_of_a_sort(kernel, vocab_size):
    run, device = running(kernel, floor_reference, floor_triton)
    logits = 3 * torch.randn(9, vocab_size, device=device)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.7, 1.5, 1.0], device=device)
    truncation = TruncationParams(
        torch.tensor([0.9, 0.5, 0.99, 0.9, 0.01, 1.0, 0.8, 0.9, 1.0], device=device),
        torch.tensor([0, 0, 0, 0, 0, 7, 12, 0, 3], device=device, dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.05], device=device),
    )
    floors = run(logits, temperatures, truncation)
    assert floors[3] == -torch.inf
    for row in (0, 1, 2, 4, 5, 6, 7, 8):
        top_p, top_k, min_p = (float(cut[row]) for cut in truncation)
        params = SamplingParams(temperature=float(temperatures[row]), top_p=top_p, top_k=int(top_k), min_p=min_p)
        scaled = (logits[row] * (1 / temperatures[row])).cpu()
        # The floor is a token's own value, so that rounding does not decide whether this token is kept.
        assert bool((scaled == floors[row].cpu()).any())
        kept, wanted = scaled >= floors[row].cpu(), probabilities(logits[row].cpu(), params) > 0
        # Another order of summation may move the floor past tokens near it, within the rounding of the sums.
        differing = (scaled[kept != wanted] - floors[row].cpu()).abs()
        assert differing.numel() <= 2
        assert bool((differing < 1e-2).all())
        assert abs(float(scaled.softmax(-1)[kept].sum() - scaled.softmax(-1)[wanted].sum())) < 1e-5
    tokens = (sample_reference if kernel == "reference" else sample_triton)(
        logits, temperatures, torch.arange(9, device=device), torch.arange(9, device=device), truncation
    )
    assert tokens[4] == logits[4].argmax()


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=runs_triton)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 5000, 20000])
def test_floors_of_16_bit_logits(kernel, dtype, vocab_size):
    """The floor is one of few distinct values; all tokens that share it are kept."""
    device = device_of_kernels()
    logits = (4 * torch.randn(6, vocab_size, device=device) + 12).to(dtype)
    logits[1, ::3] = -torch.inf
    logits[2] -= 40
    temperatures = torch.tensor([1.0, 0.8, 1.3, 0.7, 1.0, 5.0], device=device)
    truncation = TruncationParams(
        torch.tensor([0.9, 0.95, 0.5, 1.0, 0.9, 0.99], device=device),
        torch.tensor([0, 0, 0, 5, 40, 0], device=device, dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.02, 0.0], device=device),
    )
    found = floor_triton(logits, temperatures, truncation)
    assert torch.equal(found, floor_reference(logits, temperatures, truncation))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("kind", "mapped"), [("greedy", False), ("greedy", True), ("drawn", False), ("drawn", True), ("top_p", False)]
)
def test_choices_for_several_positions(kernel, kind, mapped):
    """Token j of a sequence is sampled with the noise of its position in the answer; columns may be mapped to other ids."""
    run, device = running(kernel, choose_reference, choose_triton)
    vocab_size, num_new, ahead = 5000, 3, 2
    ids = torch.randperm(20000)[:vocab_size].sort().values.to(device) if mapped else None
    logits = 3 * torch.randn(2 * num_new, vocab_size, device=device)
    draws = SamplingState(
        torch.tensor([0.7, 0.0], device=device),
        torch.tensor([11, 12], device=device),
        torch.tensor([4, 9], device=device),
        TruncationParams(*(torch.tensor(cut, device=device) for cut in ([0.5, 0.9], [0, 0], [0.0, 0.0])))
        if kind == "top_p"
        else None,
    )
    tokens = picked(run(logits, None if kind == "greedy" else draws, num_new, ahead, ids), vocab_size if ids is None else 20000)
    column_ids = torch.arange(vocab_size) if ids is None else ids.cpu()
    for row in range(2 * num_new):
        scores = logits[row].cpu()
        if kind != "greedy" and row < num_new:
            scores = scores / 0.7
            if kind == "top_p":
                keep = probabilities(logits[row].cpu(), SamplingParams(temperature=0.7, top_p=0.5)) > 0
                scores = scores.masked_fill(~keep, -torch.inf)
            noise = gumbel_noise(torch.tensor([11]), torch.tensor([4 + ahead + row]), 20000)[0]
            scores = scores + noise[column_ids]
        assert tokens[row] == column_ids[scores.argmax()]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("vocab_size", [5000, 2 * 4 * QUARTER])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "fused"])
def test_nan_logits_are_reported(monkeypatch, kernel, vocab_size, kind):
    """A row with NaN between two valid rows."""
    if kernel == "triton" and INTERPRETED:  # on a GPU the maximum of NaN and a number is the number
        builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
        monkeypatch.setattr(builder, "create_maxnumf", lambda self, x, y: self.binary_op(x, y, np.fmax))
    device = "cpu" if kernel == "reference" else device_of_kernels()
    x, weight = torch.randn(3, 72, device=device), torch.randn(vocab_size, 72, device=device)
    x[1, 5] = float("nan")
    draws = None
    if kind == "sampled":
        ones = torch.ones(3, device=device)
        nothing_cut = TruncationParams(ones, ones.long() * 0, ones * 0)
        draws = SamplingState(ones, ones.long(), ones.long(), nothing_cut)
    if kind == "fused" and kernel == "triton":
        choice = fused_head(x, Norm(torch.ones(72, device=device), 1e-5), weight, None)
    else:
        choice = (choose_reference if kernel == "reference" else choose_triton)(x @ weight.t(), draws)
    found = picked_or_none(choice, vocab_size).tolist()
    assert found[1] == vocab_size
    assert max(found[0], found[2]) < vocab_size
    banned = torch.full((1, vocab_size), -torch.inf, device=device)
    choice = (choose_reference if kernel == "reference" else choose_triton)(banned)
    assert picked_or_none(choice, vocab_size).tolist() == [0], "a row whose tokens are all banned is not NaN"


def fused_head(x, norm, weight, ids):
    """The head as `head_choice` runs it for few rows of a large vocabulary."""
    return tiled_head(rms_norm_triton(x, norm.weight, norm.eps), weight, Summation(1, False, x.shape[1]), ids)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_fused_head_and_choice(kernel, mapped, rows):
    device = "cpu" if kernel == "reference" else device_of_kernels()
    x, weight = torch.randn(rows, 72, device=device), torch.randn(150, 72, device=device)
    weight[140] = weight[20]  # a tie in every row
    norm = Norm(torch.randn(72, device=device), 1e-5)
    ids = torch.randperm(500)[:150].sort().values.to(device) if mapped else None
    choice = head_choice(x, norm, weight, ids_V=ids) if kernel == "reference" else fused_head(x, norm, weight, ids)
    logits = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight) @ weight.t()
    column = torch.where(logits.argmax(-1) == 140, 20, logits.argmax(-1))
    assert picked(choice, 500).tolist() == (column if ids is None else ids[column]).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_fused_quantised_head_and_choice(kernel, mapped, rows):
    device = "cpu" if kernel == "reference" else device_of_kernels()
    x, weight = torch.randn(rows, 96, device=device), torch.randn(150, 96, device=device)
    weight[140] = weight[20]  # a tie in every row
    weight, norm = quantize(weight, 8), Norm(torch.randn(96, device=device), 1e-5)
    ids = torch.randperm(500)[:150].sort().values.to(device) if mapped else None
    choice = head_choice(x, norm, weight, ids_V=ids) if kernel == "reference" else fused_head(x, norm, weight, ids)
    logits = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight) @ dequantize(weight).t()
    column = torch.where(logits.argmax(-1) == 140, 20, logits.argmax(-1))
    assert picked(choice, 500).tolist() == (column if ids is None else ids[column]).tolist()
