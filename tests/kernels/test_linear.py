"""Linear layers with norm, gate and residual: correct, and a row's result has the same bits whatever else is computed.

Tiles of different shapes sum in the same order on a GPU only: the interpreter computes a tile's product with numpy.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from fledge.kernels.linear import dispatch, measured, summation
from fledge.kernels.linear import tiles as tiles_module
from fledge.kernels.linear.cublas import cublas_is_exact, cublas_linear
from fledge.kernels.linear.dispatch import Case, Shape, choose_kernel, linear, table
from fledge.kernels.linear.reference import Norm, linear_reference
from fledge.kernels.linear.register_mma import register_mma
from fledge.kernels.linear.staged_mma import CONFIGS, LaunchConfig, programs_at_once, staged_mma
from fledge.kernels.linear.summation import Summation, inputs_of_a_sum
from fledge.kernels.linear.tiles import LARGE, SMALL, Tile, choose_tile, tiled_linear
from fledge.kernels.linear.tma_tiles import MEMORY, PROGRAMS, REGISTERS, supports_wgmma, tma_tiles
from fledge.kernels.linear.tma_tiles import LaunchConfig as TmaConfig
from fledge.kernels.quantization import dequantize, kept_fp8, quantize
from fledge.kernels.triton_support import MEASURED_SHARED_MEMORY, shared_memory
from tests.kernels.support import INTERPRETED, device_of_kernels, fp8_weight, runs_triton

on_card = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")]
INTEGERS = {"int8": (8, False), "int4": (4, False), "int4 with offsets": (4, True)}
FORMATS = ["plain", *INTEGERS, "fp8", "fp8 in blocks"]
SURROUNDINGS = ["nothing", "norm", "norm and gate", "residual", "all with bias"]
CARD = torch.device("cuda", 0)


def plain(x, weight, bias, norm, gated, residual):
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    out = x @ weight.t() + (bias if bias is not None else 0)
    if gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out + residual if residual is not None else out


def some_weight(format: str, outputs: int, size: int, device: str, group: int = 32):
    weight = torch.randn(outputs, size, device=device) / size**0.5
    if format.startswith("fp8"):
        return kept_fp8(fp8_weight(weight, (32, 32) if "blocks" in format else None))
    if format == "plain":
        return weight
    bits, offsets = INTEGERS[format]
    return quantize(weight, bits, group, offsets=offsets)


def some_case(size, outputs, rows, surroundings, device, format="plain", dtype=torch.float32):
    gated = surroundings in ("norm and gate", "all with bias")
    weight = some_weight(format, outputs * (2 if gated else 1), size, device)
    weight = weight.to(dtype) if format == "plain" else weight
    lines = outputs * (2 if gated else 1)
    drawn = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    bias = drawn(lines) if surroundings == "all with bias" else None
    norm = Norm(drawn(size), 1e-5) if surroundings not in ("nothing", "residual") else None
    residual = drawn(rows, outputs) if surroundings in ("residual", "all with bias") else None
    return drawn(rows, size), weight, bias, norm, gated, residual


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_reference(format, surroundings):
    x, weight, bias, norm, gated, residual = some_case(96, 40, 3, surroundings, "cpu", format)
    found = linear_reference(x, weight, bias, norm=norm, gated=gated, residual_MO=residual)
    exact = weight if format == "plain" else dequantize(weight)
    torch.testing.assert_close(found, plain(x, exact, bias, norm, gated, residual), atol=1e-4, rtol=1e-4)


def test_rows_of_the_reference_do_not_depend_on_their_number():
    x, weight = torch.randn(200, 300), torch.randn(70, 300)
    together = linear_reference(x, weight)
    assert all(torch.equal(linear_reference(x[i : i + 1], weight)[0], together[i]) for i in range(200))


TILES = {
    "beside": (1, Tile(16, 16, 32, 4, 2), False),
    "apart": (5, Tile(16, 16, 32, 2, 2), True),
    "after": (19, Tile(32, 16, 32, 4, 2), False),
}


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("surroundings", [name for name in SURROUNDINGS if name != "norm"])
def test_tiles(config, slices, format, surroundings):
    """Inputs that are no multiple of a step, outputs that are no multiple of a tile."""
    rows, tile, split = TILES[config]
    size, device = 288 if format == "plain" else 576, device_of_kernels()
    x, weight, bias, norm, gated, residual = some_case(size, 40, rows, surroundings, device, format)
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    exact = weight if format == "plain" else dequantize(weight)
    scale = None
    if norm is not None:
        scale = 1 / (x.square().mean(-1) + norm.eps).sqrt()
    wanted = plain(x if scale is None else x * scale[:, None], exact, bias, None, gated, residual)
    options = {"gated": gated, "residual_MO": residual, "scale_M": scale}
    found = tiled_linear(x, weight, bias, order=order, tile=tile, split=split and slices > 1, **options)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


test_tiles.pytestmark += runs_triton


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("group", [32, 96, 128, 256])
@pytest.mark.parametrize("format", ["int8", "int4 with offsets"])
def test_groups_of_any_size(format, group, split):
    """Quantised checkpoints may have groups that extend from one slice into the next."""
    size, device = 768, device_of_kernels()
    weight = some_weight(format, 40, size, device, group)
    x, order = torch.randn(3, size, device=device), Summation(4, False, 192)
    found = tiled_linear(x, weight, order=order, tile=Tile(16, 16, 64, 4, 2), split=split)
    torch.testing.assert_close(found, x @ dequantize(weight).t(), atol=1e-4, rtol=1e-4)


test_groups_of_any_size.pytestmark += runs_triton


def test_tiles_by_rows():
    one, two, four = Summation(1, False, 4096), Summation(2, False, 7168), Summation(4, True, 192)
    memory = MEASURED_SHARED_MEMORY
    assert choose_tile(16, 4096, one, 16, memory)[0].rows == 16
    assert choose_tile(64, 28672, one, 16, memory)[0].outputs == 128
    assert choose_tile(16, 4096, two, 16, memory) == (tiles_module.BESIDE[2], False)
    assert choose_tile(17, 4096, four, 4, memory)[1], "quantised slices are programs of their own"
    assert not choose_tile(17, 28672, four, 4, memory)[1], "where there are few outputs"
    assert choose_tile(200, 960, four, 16, memory) == (SMALL, False)
    assert choose_tile(200, 4096, two, 16, memory) == (LARGE, True)
    assert choose_tile(512, 4096, two, 16, memory) == (LARGE, False)


def test_tiles_have_fewer_stages_where_shared_memory_is_small(monkeypatch):
    """On an H200 all measured shapes use the table's tiles; with 99 KB only four slices side by side do not fit."""
    monkeypatch.setattr(summation, "supports_registers", lambda *_: False)
    memory = (MEASURED_SHARED_MEMORY, 99 << 10, 64 << 10)
    for (inputs, outputs, gated), bits, rows in itertools.product(
        measured.CONFIGS, (16, 8), (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024)
    ):
        order = summation.summation(inputs, outputs, torch.bfloat16, CARD, gated=gated)
        table = tiles_module._measured_tile(rows, outputs, order, bits)
        (large, split), (middle, _), (small, _) = (choose_tile(rows, outputs, order, bits, size) for size in memory)
        assert (large, split) == table
        assert middle == (large if large is not tiles_module.BESIDE[4] else large._replace(stages=4))
        assert small._replace(stages=large.stages) == large, "nothing else changes"
        beside = tiles_module.slices_beside(large, split, order, bits)
        for tile, size in zip((large, middle, small), memory, strict=True):
            assert (tile.stages - 1) * 2 * tile.inputs * (tile.outputs + tile.rows) * beside <= size


def test_slices_follow_from_the_weight_alone(monkeypatch):
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    found = {
        (inputs, outputs, gated): summation.summation(inputs, outputs, torch.bfloat16, CARD, gated=gated)
        for inputs, outputs, gated in [
            (576, 960, False),
            (1536, 576, False),
            (1536, 3072, True),
            (8960, 1536, False),
            (4096, 4096, False),
            (14336, 4096, False),
            (25600, 5120, False),
        ]
    }
    assert [tuple(order) for order in found.values()] == [
        (4, True, 192),
        (4, True, 384),
        (4, False, 384),
        (4, False, 2240),
        (1, False, 4096),
        (2, False, 7168),
        (4, False, 6400),
    ]


def test_slices_of_quantised_weights():
    """They have more slices, on any device and in any type. A head has one, so that its logits need not be written."""
    sizes = [(576, 960, False), (4096, 6144, False), (4096, 28672, True), (14336, 4096, False), (4096, 128256, False)]
    for dtype, device in ((torch.bfloat16, CARD), (torch.float32, torch.device("cpu"))):
        found = [summation.summation(*size, dtype, device, gated=gated, quantised=True) for *size, gated in sizes]
        assert [tuple(order) for order in found] == [
            (4, False, 192),
            (8, False, 512),
            (4, False, 1024),
            (8, False, 1792),
            (1, False, 4096),
        ]


def test_inputs_of_a_sum():
    """All inputs of a slice if they share a scale, else the inputs of a step that belong to one group."""
    weights = {group: quantize(torch.zeros(1, 768), 8, group) for group in (32, 96, 128, 256, 768)}
    assert [inputs_of_a_sum(Summation(4, False, 192), weight) for weight in weights.values()] == [32, 32, 64, 64, 192]
    assert [inputs_of_a_sum(Summation(2, False, 384), weight) for weight in weights.values()] == [32, 32, 128, 128, 384]
    assert inputs_of_a_sum(Summation(2, False, 384), quantize(torch.zeros(1, 768), 4, 768)) == 128, "offsets, too"


def kernels(rows, inputs, outputs, format="plain", gated=False, group_size=1):
    sizes = (inputs, outputs, format, torch.bfloat16, CARD, gated, group_size)
    return [choose_kernel(Case(count, *sizes))[0] for count in rows]


def test_kernels_by_size(monkeypatch):
    """For shapes that were not measured, on a card before Hopper and on one with the register kernels."""
    monkeypatch.setattr(dispatch, "CONFIGS", {})
    monkeypatch.setattr(summation, "supports_registers", lambda *_: False)
    assert kernels((1, 64, 512), 576, 960) == ["tiles", "tiles", "cublas"]
    assert kernels((64, 65), 4096, 28672, gated=True) == ["tiles", "cublas"]
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    assert kernels((1, 64, 65, 2048), 576, 960) == ["register_mma", "register_mma", "tiles", "tiles"]
    assert kernels((16, 17, 64, 65), 576, 3072, gated=True) == ["register_mma", "staged_mma", "staged_mma", "tiles"]
    assert kernels((16, 17, 256), 1536, 2048) == ["register_mma", "tiles", "tiles"]
    assert kernels((16, 17), 576, 960, "int8", group_size=32) == ["register_stream", "tiles"]
    assert kernels((1, 16, 17, 2048), 4096, 28672, "int4", True, 128) == ["register_stream"] * 2 + ["tiles"] * 2
    assert kernels((1, 17), 576, 960, "fp8", group_size=576) == ["register_stream", "tiles"]
    assert kernels((1,), 4096, 4096, "int8", group_size=16) == ["tiles"]
    assert kernels((1, 511, 512), 14336, 4096) == ["tiles", "tiles", "cublas"]


def test_cublas_scales_no_sums(monkeypatch):
    """Where a norm scales the sums, a measured config on cuBLAS is skipped: cuBLAS cannot apply the scale."""
    monkeypatch.setattr(dispatch, "CONFIGS", {(576, 960, False): ((1024, "cublas", ()),)})
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    case = Case(200, 576, 960, "plain", torch.bfloat16, CARD)
    assert case.order.scales_sums
    assert dispatch.choose_kernel(case) == ("tiles", ())
    monkeypatch.setattr(summation, "supports_registers", lambda *_: False)
    assert dispatch.choose_kernel(case) == ("cublas", ())


def test_the_head_uses_configs_of_tiles_only(monkeypatch):
    taken = []
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "tiled_head", lambda *_, **options: taken.append(options))
    monkeypatch.setattr(dispatch, "serves_plain", lambda *_: True)
    x, norm, weight = torch.zeros(1, 64).bfloat16(), Norm(torch.ones(64).bfloat16(), 1e-5), torch.zeros(4096, 64).bfloat16()
    for kernel, config in (("tiles", (64, 16, 128, 4, 5, 0)), ("register_mma", (16, 1)), ("cublas", ())):
        monkeypatch.setattr(dispatch, "CONFIGS", {(64, 4096, False): ((64, kernel, config),)})
        dispatch.head_choice(x, norm, weight)
    assert taken == [{"tile": Tile(64, 16, 128, 4, 5)}, {}, {}]


def test_measured_configs_come_first(monkeypatch):
    configs = ((16, "register_mma", (8, 1)), (64, "tiles", (64, 64, 64, 4, 4, 0)))
    monkeypatch.setattr(dispatch, "CONFIGS", {(576, 960, False): configs})
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    case = Case(1, 576, 960, "plain", torch.bfloat16, CARD)
    found = [dispatch.choose_kernel(case._replace(rows=rows)) for rows in (16, 17, 65)]
    assert found == [("register_mma", (8, 1)), ("tiles", (64, 64, 64, 4, 4, 0)), ("tiles", ())]
    assert dispatch.choose_kernel(case._replace(format="int8", group_size=32)) == ("register_stream", ())
    with monkeypatch.context() as other_card:
        other_card.setattr(dispatch, "multiprocessors", lambda device: 114)
        assert dispatch.choose_kernel(case._replace(rows=16)) == ("register_mma", ())
    monkeypatch.setattr(summation, "supports_registers", lambda *_: False)
    assert dispatch.choose_kernel(case._replace(rows=16)) == ("tiles", (64, 64, 64, 4, 4, 0)), "register_mma is skipped"


def test_a_norm_comes_before_the_stream(monkeypatch):
    """`register_stream` does not compute a norm."""
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "case_of", lambda *_: Case(2, 4096, 6144, "int8", torch.bfloat16, CARD, group_size=32))
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    ran = []
    monkeypatch.setattr(dispatch.streams, "register_stream", lambda x, *_, **options: ran.append(x))
    x, norm = torch.randn(2, 64).bfloat16(), Norm(torch.randn(64).bfloat16(), 1e-5)
    linear(x, quantize(torch.zeros(40, 64), 8), norm=norm)
    torch.testing.assert_close(ran, [torch.nn.functional.rms_norm(x, (64,), norm.weight, norm.eps)])


def test_table(monkeypatch):
    monkeypatch.setattr(dispatch, "CONFIGS", {})
    monkeypatch.setattr(summation, "supports_registers", lambda *_: False)
    shapes = [Shape("qkv", 576, 960), Shape("gate_up", 576, 30720, "int8", True, 32)]
    assert table(CARD, shapes, rows=(1, 512)) == [
        {"linear": "qkv", "K": 576, "N": 960, "format": "plain", "slices": 4, "1 rows": "tiles", "512 rows": "cublas"},
        {"linear": "gate_up", "K": 576, "N": 30720, "format": "int8", "slices": 4, "1 rows": "tiles", "512 rows": "tiles"},
    ]
    assert table(torch.device("cpu"), shapes[:1], rows=(1,))[0]["1 rows"] in ("native", "torch")


WEIGHTS = [(576, 960), (576, 576), (1536, 576), (1536, 2048), (8960, 1536), (4096, 4096), (14336, 4096), (576, 30720)]


# Plain weights in all SURROUNDINGS; quantised ones in the first and the last (nothing; everything, gated), in five shapes:
# few inputs, slices that are not full, eight slices, long slices, a head.
QUANTISED = [(576, 960), (8960, 1536), (4096, 4096), (14336, 4096), (576, 32000)]
CASES = [("plain", *weight, what) for weight in WEIGHTS for what in SURROUNDINGS]
CASES += [
    (format, *weight, what) for format in FORMATS[1:] for weight in QUANTISED for what in (SURROUNDINGS[0], SURROUNDINGS[-1])
]


@pytest.mark.parametrize(("format", "size", "outputs", "surroundings"), CASES)
def test_a_row_has_the_same_bits_in_every_kernel(format, size, outputs, surroundings):
    """All kernels that `linear` chooses, from one row to a prefill, are close to float64 and give the same bits."""
    rows = 1024
    outputs = outputs if surroundings not in ("norm and gate", "all with bias") else outputs // 2
    case = some_case(size, outputs, rows, surroundings, "cuda", format, torch.bfloat16)
    x, weight, bias, norm, gated, residual = case
    exact = weight if format == "plain" else dequantize(weight)
    wide = [None if part is None else part.double() for part in (x, exact, bias, residual)]
    wide_norm = None if norm is None else Norm(norm.weight.double(), norm.eps)
    wanted = plain(*wide[:3], wide_norm, gated, wide[3])

    def first(count: int) -> torch.Tensor:
        some = None if residual is None else residual[:count].contiguous()
        return linear(x[:count].contiguous(), weight, bias, norm=norm, gated=gated, residual_MO=some)

    together = first(rows)
    assert (together.double() - wanted).norm() / wanted.norm() < 6e-3
    for count in (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300, 512):
        assert torch.equal(first(count), together[:count]), count


test_a_row_has_the_same_bits_in_every_kernel.pytestmark += on_card


def measured_configs(kernel: str) -> list[tuple[int, ...]]:
    """Returns the numbers of a kernel's measured configs."""
    return [numbers for entries in measured.CONFIGS.values() for _, name, numbers in entries if name == kernel and numbers]


@pytest.mark.parametrize(("size", "outputs"), [(576, 960), (1536, 576), (1024, 1536)])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_every_config_has_the_same_bits(size, outputs, surroundings):
    rows, size = 200, min(size, 1024) if surroundings in ("norm and gate", "all with bias") else size
    x, weight, bias, norm, gated, residual = some_case(size, outputs, rows, surroundings, "cuda", "plain", torch.bfloat16)
    order = summation.summation(size, len(weight), torch.bfloat16, CARD, gated=gated)
    options = {"order": order, "norm": norm, "gated": gated}
    wanted = register_mma(x, weight, bias, residual_MO=residual, **options)
    configs = dict.fromkeys((*CONFIGS, *(LaunchConfig(*numbers) for numbers in measured_configs("staged_mma"))))
    # No config holds 1,024 inputs of a gated weight in registers.
    for config in (config for config in configs if programs_at_once(config, order, gated, shared_memory(CARD))):
        for count in (5, 17, 64, 77, rows):
            some = None if residual is None else residual[:count].contiguous()
            found = staged_mma(x[:count].contiguous(), weight, bias, config=config, residual_MO=some, **options)
            assert torch.equal(found, wanted[:count]), (config, count)
    for count, wide in dict.fromkeys(((8, 1), (16, 1), *measured_configs("register_mma"))):
        found = register_mma(x, weight, bias, residual_MO=residual, rows=count, wide=bool(wide), **options)
        assert torch.equal(found, wanted), (count, wide)


test_every_config_has_the_same_bits.pytestmark += on_card


TMA_CONFIGS = [
    TmaConfig(128, 128, 8, 6, REGISTERS),
    TmaConfig(128, 128, 8, 6, PROGRAMS),
    TmaConfig(128, 128, 4, 3, PROGRAMS, 2),
    TmaConfig(64, 128, 4, 4, REGISTERS, 2),
    TmaConfig(64, 64, 4, 6, REGISTERS, 2),
    TmaConfig(64, 64, 4, 6, PROGRAMS, 2),
    TmaConfig(128, 256, 8, 4, PROGRAMS),
    TmaConfig(128, 256, 8, 4, MEMORY),
    TmaConfig(64, 32, 4, 8, REGISTERS, 2, 1),
    TmaConfig(64, 64, 4, 12, REGISTERS, 1, 1),
    TmaConfig(64, 64, 4, 6, PROGRAMS, 1, 1),
]


@pytest.mark.parametrize(("size", "outputs"), [(576, 960), (1536, 2048), (1000, 1544), (8960, 1536), (14336, 4096)])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_tma_tiles_have_the_same_bits(size, outputs, surroundings):
    """The same bits as `tiles`, also for partial tiles, for several tiles per program, and in a CUDA graph."""
    if not supports_wgmma(CARD):
        pytest.skip("needs Hopper")
    rows = 2100
    gated = surroundings in ("norm and gate", "all with bias")
    outputs = outputs // 2 if gated else outputs
    x, weight, bias, norm, gated, residual = some_case(size, outputs, rows, surroundings, "cuda", "plain", torch.bfloat16)
    scale = None if norm is None else torch.rand(rows, device="cuda")
    order = summation.summation(size, len(weight), torch.bfloat16, CARD, gated=gated)

    def parts(count: int) -> dict:
        cut = {"residual_MO": residual, "scale_M": scale}
        cut = {name: None if part is None else part[:count].contiguous() for name, part in cut.items()}
        return {"order": order, "gated": gated} | cut

    wanted = tiled_linear(x, weight, bias, **parts(rows))
    for config in (config for config in TMA_CONFIGS if not (gated and config.sums == MEMORY)):
        for count in (1, 129, 256, 300, 1024, rows):
            found = tma_tiles(x[:count].contiguous(), weight, bias, config=config, **parts(count))
            assert torch.equal(found, wanted[:count]), (config, count)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = tma_tiles(x, weight, bias, config=config, **parts(rows))
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted), config


test_tma_tiles_have_the_same_bits.pytestmark += on_card


@pytest.mark.parametrize(("rows", "size", "outputs"), [(256, 4096, 28672), (1024, 14336, 4096), (2048, 8960, 1536)])
def test_cublas_is_used_where_it_sums_in_order(rows, size, outputs):
    """It is used where its bits match; with another order they differ, so the trial can fail."""
    weight = torch.randn(outputs, size, device="cuda").bfloat16()
    order = summation.summation(size, outputs, torch.bfloat16, CARD)
    assert cublas_is_exact(rows, weight, order, None)
    x = torch.randn(rows, size, device="cuda").bfloat16()
    other = order._replace(slices=8, slice_inputs=-(-size // 512) * 64)
    assert not torch.equal(cublas_linear(x, weight, order=other), tiled_linear(x, weight, order=order))


test_cublas_is_used_where_it_sums_in_order.pytestmark += on_card
