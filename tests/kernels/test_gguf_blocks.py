"""GGUF's formats in C: weights equal those of the `gguf` package's dequantiser, products those of the reference arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fledge.kernels import native
from fledge.kernels.formats.gguf_blocks import FORMATS, PLAIN, Blocks
from fledge.kernels.linear.packed import GgufEmbedding, GgufLinear, quantised_blocks
from tests.kernels.support import quantised_activations

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

# Byte offsets of a block's fp16 numbers; all other bytes may have any value.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}


def random_blocks(format: str, outputs: int, inputs: int) -> Blocks:
    entry, rng = FORMATS[format], np.random.default_rng(np.random.randint(1 << 31))
    if format in PLAIN:
        weight = torch.randn(outputs, inputs).to(getattr(torch, PLAIN[format]))
        return Blocks(format, inputs, weight.view(torch.uint8).numpy().reshape(outputs, -1))
    data = rng.integers(0, 256, (outputs, inputs // entry.inputs, entry.num_bytes), dtype=np.uint8)
    for place in HALVES.get(format, (0,)):
        data[..., place : place + 2] = rng.normal(0, 0.01, data.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    return Blocks(format, inputs, data.reshape(outputs, -1))


def activations(rows: int, inputs: int) -> torch.Tensor:
    x = torch.randn(rows, inputs)
    x[:, 5] *= 100  # real activations have such channels
    x[0, 32:64] = 0  # a unit of zeros, whose scale is 0
    return x


def expected_product(x: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64: the product of the kernels' inputs, and the sum of its terms' absolute values, which bounds their rounding."""
    x = (x if blocks.format in PLAIN else quantised_activations(x)).double()
    weight = blocks.dequantised().double()
    return F.linear(x, weight), F.linear(x.abs(), weight.abs())


def assert_product(actual: torch.Tensor, x: torch.Tensor, blocks: Blocks, bias: torch.Tensor | float = 0.0) -> None:
    expected, size = expected_product(x, blocks)
    assert ((actual.double() - expected - bias).abs() <= 3e-6 * (size + 1)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_equal_the_reference(format: str) -> None:
    blocks = random_blocks(format, 40, 512)
    embedding = GgufEmbedding(blocks)
    torch.testing.assert_close(embedding.weight, blocks.dequantised(), rtol=1e-6, atol=1e-7)
    tokens = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(embedding(tokens), embedding.weight[tokens])
    for outside in (40, -1):
        with pytest.raises(IndexError, match="beyond the table's 40"):
            embedding(torch.tensor([3, outside]))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 51), (768, 96), (1024, 8)])
def test_products(format: str, inputs: int, outputs: int) -> None:
    """1 to 16 rows are near the reference, and each row's bits do not depend on the other rows."""
    blocks, x, bias = random_blocks(format, outputs, inputs), activations(16, inputs), torch.randn(outputs)
    linear = GgufLinear([blocks], bias)
    together = linear(x)
    assert_product(together, x, blocks, bias)
    for rows in range(1, 17):
        for first in range(0, 17 - rows, 3):
            assert torch.equal(linear(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_equal_single_rows(format: str) -> None:
    blocks, x = random_blocks(format, 64, 256), activations(77, 256)
    linear = GgufLinear([blocks])
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))


def test_activations_are_rounded_like_the_references() -> None:
    """The product with a weight of ones in one unit gives that unit's sum."""
    x = activations(9, 1024)
    for unit in range(0, 1024, 32):
        weight = np.zeros((1, 32, 34), np.uint8)
        weight[0, unit // 32, :2] = np.array([1.0], np.float16).view(np.uint8)
        weight[0, unit // 32, 2:] = 1
        linear = GgufLinear([Blocks("Q8_0", 1024, weight.reshape(1, -1))])
        expected = quantised_activations(x)[:, unit : unit + 32].double().sum(-1)
        torch.testing.assert_close(linear(x)[:, 0].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_linear_with_several_formats() -> None:
    """As in a Q4_K_M file: query, key and value in three formats, with sizes that do not fill panels."""
    parts = [random_blocks("Q5_0", 96, 256), random_blocks("Q6_K", 40, 256), random_blocks("F16", 33, 256)]
    x, bias = activations(5, 256), torch.randn(169)
    linear = GgufLinear(parts, bias)
    for part, actual, offset in zip(parts, linear(x).split([96, 40, 33], -1), bias.split([96, 40, 33]), strict=True):
        assert_product(actual, x, part, offset)
    assert linear.weight.shape == (169, 256)
    assert linear.num_bytes == 96 * 176 + 40 * 210 + 33 * 512


def test_zeros_and_numbers_of_threads() -> None:
    linear = GgufLinear([random_blocks("Q4_K", 200, 256)])
    assert not linear(torch.zeros(3, 256)).any()
    x, before = activations(6, 256), torch.get_num_threads()
    expected = linear(x)
    try:
        for threads in range(1, 7):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "format", "steps"), [(8, "Q8_0", 254), (5, "Q5_1", 31), (4, "Q4_1", 15)])
def test_weights_are_rounded_to_nearest(bits: int, format: str, steps: int) -> None:
    """More rows than one chunk of the conversion. The largest error is half a step of a group's range."""
    weight = torch.randn(1100, 96) * torch.rand(1100, 1)
    blocks = quantised_blocks(weight, bits)
    assert (blocks.format, blocks.outputs, blocks.inputs) == (format, 1100, 96)
    groups = weight.unflatten(1, (-1, 32))
    extent = 2 * groups.abs().amax(-1) if bits == 8 else groups.amax(-1) - groups.amin(-1)
    error = (blocks.dequantised().unflatten(1, (-1, 32)) - groups).abs().amax(-1)
    assert (error <= 0.5 * extent / steps + 2e-3 * groups.abs().amax(-1)).all()
    assert (error > 0.2 * extent / steps).float().mean() > 0.9
