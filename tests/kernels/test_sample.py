"""Sampling on the device: reproducible noise, right frequencies, top-p by bisection."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.sample import (
    gumbel_noise,
    philox,
    sample_reference,
    sample_triton,
    top_p_floor_reference,
    top_p_floor_triton,
)
from fledge.sampling import SamplingParams
from fledge.speculation.distribution import probabilities
from tests.kernels.support import device_of_kernels, runs_triton

KERNELS = ["reference", pytest.param("triton", marks=runs_triton)]


def sampler(kernel):
    return (sample_reference, "cpu") if kernel == "reference" else (sample_triton, device_of_kernels())


def test_philox_is_the_published_one():
    """Known answers of Random123 for Philox 4x32-10 with the counter's upper half zero."""
    words = philox(torch.tensor(0), torch.tensor(0), torch.tensor(0))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("kernel", KERNELS)
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_draws_depend_on_seed_and_count_alone(kernel):
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_frequencies_follow_the_distribution(kernel):
    run, device = sampler(kernel)
    draws = 4000 if kernel == "reference" else 400
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("vocab_size", [20, 5000])
def test_top_p_keeps_what_a_sort_keeps(kernel, vocab_size):
    device = "cpu" if kernel == "reference" else device_of_kernels()
    run = top_p_floor_reference if kernel == "reference" else top_p_floor_triton
    logits = 3 * torch.randn(5, vocab_size, device=device)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0], device=device)
    top_ps = torch.tensor([0.9, 0.5, 0.99, 0.9, 0.01], device=device)
    floors = run(logits, temperatures, top_ps)
    assert floors[3] == -torch.inf
    for row in (0, 1, 2, 4):
        params = SamplingParams(temperature=float(temperatures[row]), top_p=float(top_ps[row]))
        kept = (logits[row] * (1 / temperatures[row]) >= floors[row]).cpu()
        assert torch.equal(kept, probabilities(logits[row].cpu(), params) > 0)
    tokens = (sample_reference if kernel == "reference" else sample_triton)(
        logits, temperatures, torch.arange(5, device=device), torch.arange(5, device=device), floors
    )
    assert tokens[4] == logits[4].argmax()
