"""Checkpoints that are quantised already: compressed-tensors, fp8, AWQ and GPTQ.

`quantization_config` of config.json is read strictly: what would change the weights and is not known is refused by its key.
Which linears are quantised is read off the tensors. Layouts: `kernels.formats.packed_int` and `kernels.formats.fp8`.

Kernels read some of these formats as they are (`KEPT`). The others become plain weights once, when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.tensors import TensorReader
from fledge.config_checks import mapping, shown, whole_number
from fledge.errors import ModelError
from fledge.kernels.formats.fp8 import Fp8Weight, read_fp8
from fledge.kernels.formats.packed_int import IntWeight, read_awq, read_compressed, read_gptq

PackedWeight = IntWeight | Fp8Weight
# For people: what is read, by `quant_method`.
METHODS = {
    "compressed-tensors": "pack-quantized (int4, int8), int-quantized (int8), float-quantized (FP8)",
    "fp8": "e4m3; a scale per tensor, per output or per block",
    "awq": "4 bits, gemm layout",
    "gptq": "4 and 8 bits, act-order, gptq and gptq_v2",
}
# What kernels read as it is, by device. Experts on a GPU, and what no such format holds exactly, become plain weights too.
KEPT = {"cpu": frozenset({"int4", "int8"}), "cuda": frozenset({"int4", "int8", "fp8"})}
# Scales of activations and caches: both stay unquantised here.
OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale", "activation_scale")


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's linears are quantised."""

    method: str
    bits: int = 8
    layout: str = "fp8"  # fp8 | int8 | packed | awq | gptq
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    has_zeros: bool = False
    quantizes_activations: bool = False

    @property
    def description(self) -> str:
        kind = "FP8" if self.layout == "fp8" else f"int{self.bits}"
        return self.method if self.method == "fp8" else f"{self.method}, {kind}"

    @property
    def marker(self) -> tuple[str, ...]:
        """A tensor that every quantised linear has one of."""
        packed = {"awq": ("qweight",), "gptq": ("qweight",), "packed": ("weight_packed",)}
        return packed.get(self.layout, ("weight_scale", "weight_scale_inv"))


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """From config.json; None: the weights are plain."""
    asked = mapping(config, "quantization_config")
    if not asked:
        return None
    method = asked.get("quant_method")
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
    if method not in readers:
        raise ModelError(f"quantization_config: quant_method {shown(method)} is not supported; supported: {', '.join(METHODS)}")
    return readers[str(method)](asked)


def _must(asked: Mapping[str, Any], key: str, *allowed: Any) -> Any:
    """The first of `allowed` is the default."""
    value = asked.get(key, allowed[0])
    if value not in allowed:
        known = ", ".join(map(str, allowed))
        raise ModelError(f"quantization_config: {key} {shown(value)} is not supported; supported: {known}")
    return value


def _awq(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "bits", 4)
    _must(asked, "version", "gemm", "GEMM")
    _must(asked, "zero_point", True)
    return Scheme("awq", 4, "awq", has_zeros=True)


def _gptq(asked: Mapping[str, Any]) -> Scheme:
    bits = _must(asked, "bits", 4, 8)
    _must(asked, "pack_dtype", "int32")
    version = _must(asked, "checkpoint_format", "gptq", "gptq_v2", None, "")
    if asked.get("dynamic"):
        raise ModelError("quantization_config: dynamic (bits by module) is not supported")
    return Scheme("gptq", bits, "gptq", zeros_less_one=version != "gptq_v2", has_zeros=True)


def _fp8(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "fmt", "e4m3", None)
    _must(asked, "activation_scheme", "dynamic", "static", None)
    return Scheme("fp8", block=_block(asked.get("weight_block_size")), quantizes_activations=True)


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ModelError(f"quantization_config: weight_block_size must be two sizes, not {shown(sizes)}")
    block = tuple(whole_number({"weight_block_size": size}, "weight_block_size") for size in sizes)
    if min(block) < 1:
        raise ModelError(f"quantization_config: weight_block_size must be positive, not {shown(sizes)}")
    return block[0], block[1]


def _compressed(asked: Mapping[str, Any]) -> Scheme:
    _must(asked, "quantization_status", "compressed", "frozen", None)
    for key in ("sparsity_config", "transform_config"):
        part = mapping(asked, key)
        if part and part.get("format", key) != "dense":
            raise ModelError(f"quantization_config: {key} is not supported")
    groups = list(mapping(asked, "config_groups").values())
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        raise ModelError("quantization_config: config_groups must describe at least one group of linears")
    schemes = {_compressed_group(group, group.get("format") or asked.get("format")) for group in groups}
    if len(schemes) > 1:
        raise ModelError("quantization_config: config_groups that differ in their formats are not supported")
    return schemes.pop()


def _compressed_group(group: Mapping[str, Any], format: Any) -> Scheme:
    weights = mapping(group, "weights")
    kind, bits = _must(weights, "type", "int", "float"), _must(weights, "num_bits", 4, 8)
    strategy = _must(weights, "strategy", "group", "channel", "tensor", "block")
    _must(weights, "dynamic", False, None)
    options: dict[str, Any] = {"quantizes_activations": bool(group.get("input_activations"))}
    known = {("int", "pack-quantized"): "packed", ("int", "int-quantized"): "int8", ("float", "float-quantized"): "fp8"}
    known |= {("float", "naive-quantized"): "fp8", ("int", "naive-quantized"): "int8"}
    layout = known.get((kind, format))
    if layout is None or (layout != "packed" and bits != 8):
        raise ModelError(f"quantization_config: format {shown(format)} of {bits}-bit {kind} weights is not supported")
    if strategy == "block":
        structure = weights.get("block_structure")
        if layout != "fp8" or structure is None:
            raise ModelError("quantization_config: strategy block is supported with a block_structure of FP8 weights only")
        options["block"] = _block([int(part) for part in structure.split("x")] if isinstance(structure, str) else structure)
    has_zeros = not weights.get("symmetric", True)
    if has_zeros and layout != "packed":
        raise ModelError("quantization_config: symmetric false is supported with pack-quantized weights only")
    return Scheme("compressed-tensors", bits, layout, has_zeros=has_zeros, **options)


class PackedTensors:
    """The quantised linears of a folder."""

    def __init__(self, reader: TensorReader, scheme: Scheme) -> None:
        self.reader, self.scheme = reader, scheme

    def has(self, weight: str) -> bool:
        """Whether this linear is quantised, by the name that its plain weight would have."""
        return any(self._name(weight, part) in self.reader.shapes for part in self.scheme.marker)

    def expected(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, from those of the plain checkpoint. Of a shape that may differ, the one found."""
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            if name.endswith(".weight") and len(shape) == 2 and self.has(name):
                expected |= {self._name(name, part): size for part, size in self._parts(name, *shape).items()}
            else:
                expected[name] = shape
        return expected

    def ignored(self, name: str) -> bool:
        """A tensor that no network of ours has, and that changes nothing: AutoGPTQ wrote biases of zeros for all linears."""
        owner, _, part = name.rpartition(".")
        if part == "bias" and f"{owner}.qweight" in self.reader.shapes:
            return not self.reader.read(name).any()
        return part in OF_ACTIVATIONS

    def read(self, weight: str, shape: tuple[int, ...]) -> PackedWeight:
        layout, bits = self.scheme.layout, self.scheme.bits
        outputs, inputs = shape
        parts = {part: self._read(weight, part) for part in self._parts(weight, outputs, inputs)}
        if layout == "awq":
            return read_awq(parts["qweight"], parts["qzeros"], parts["scales"])
        if layout == "gptq":
            less_one = self.scheme.zeros_less_one
            g_idx = self._group_index(weight, parts.get("g_idx"), parts["scales"].shape[0])
            return read_gptq(parts["qweight"], parts["qzeros"], parts["scales"], g_idx, bits, zeros_less_one=less_one)
        if layout == "packed":
            scale = parts["weight_scale"]
            g_idx = self._group_index(weight, parts.get("weight_g_idx"), scale.shape[1])
            if parts["weight_shape"].tolist() != list(shape):
                raise ModelError(f"{weight}: weight_shape is {parts['weight_shape'].tolist()}, config.json says {list(shape)}")
            return read_compressed(parts["weight_packed"], scale, parts.get("weight_zero_point"), g_idx, shape[1], bits)
        codes, scale = parts["weight"], parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"]
        wanted = torch.int8 if layout == "int8" else torch.float8_e4m3fn
        if codes.dtype != wanted:
            raise ModelError(f"{weight}: is {codes.dtype}, and quantization_config says {wanted}")
        if layout == "int8":
            wide = scale.reshape(-1, 1).expand(shape[0], 1).contiguous()
            return IntWeight(codes.to(torch.int16), torch.zeros(wide.shape, dtype=torch.int16), wide, 8)
        return read_fp8(codes, scale, self._block(weight))

    def _group_index(self, weight: str, g_idx: Tensor | None, num_groups: int) -> Tensor | None:
        if g_idx is None:
            return None
        counts = torch.bincount(g_idx.long().clamp(0, num_groups), minlength=num_groups)
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= num_groups or not (counts == len(g_idx) // num_groups).all():
            raise ModelError(f"{weight}: its g_idx does not give each of {num_groups} groups as many inputs")
        return g_idx

    def _block(self, weight: str) -> tuple[int, int] | None:
        return self.scheme.block if self.scheme.block and len(self.reader.shapes[self._scale(weight)]) == 2 else None

    def _scale(self, weight: str) -> str:
        return next(name for part in self.scheme.marker if (name := self._name(weight, part)) in self.reader.shapes)

    def _parts(self, weight: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one linear. Group sizes are read off the scales."""
        layout, shapes, per_word = self.scheme.layout, self.reader.shapes, 32 // self.scheme.bits
        if layout in ("awq", "gptq"):
            groups = self._groups(weight, "scales", 0, inputs)
            packed = (inputs, outputs // per_word) if layout == "awq" else (inputs // per_word, outputs)
            parts: dict[str, tuple[int, ...]] = {"qweight": packed, "qzeros": (groups, outputs // per_word)}
            parts["scales"] = (groups, outputs)
            if layout == "gptq" and self._name(weight, "g_idx") in shapes:
                parts["g_idx"] = (inputs,)
            return parts
        if layout == "packed":
            groups = self._groups(weight, "weight_scale", 1, inputs)
            parts = {
                "weight_packed": (outputs, -(-inputs // per_word)),
                "weight_scale": (outputs, groups),
                "weight_shape": (2,),
            }
            if self.scheme.has_zeros:
                parts["weight_zero_point"] = (-(-outputs // per_word), groups)
            if self._name(weight, "weight_g_idx") in shapes:
                parts["weight_g_idx"] = (inputs,)
            return parts
        scale = self._scale(weight)
        block = self.scheme.block
        sizes = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if block is not None:
            sizes = [(-(-outputs // block[0]), -(-inputs // block[1]))]
        found = shapes[scale]
        return {"weight": (outputs, inputs), scale.rpartition(".")[2]: found if found in sizes else sizes[-1]}

    def _groups(self, weight: str, part: str, dim: int, inputs: int) -> int:
        shape = self.reader.shapes.get(self._name(weight, part), ())
        groups = shape[dim] if len(shape) == 2 else 0
        if groups < 1 or inputs % groups:
            raise ModelError(f"{self._name(weight, part)}: {list(shape)} does not cut {inputs} inputs into groups")
        return groups

    def _read(self, weight: str, part: str) -> Tensor:
        return self.reader.read(self._name(weight, part))

    @staticmethod
    def _name(weight: str, part: str) -> str:
        return weight.removesuffix("weight") + part


def merged(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """The outputs of several linears as one; None where their formats differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Fp8Weight):
        floats = [part for part in parts if isinstance(part, Fp8Weight) and part.group_size == first.group_size]
        if len(floats) < len(parts):
            return None
        codes = torch.cat([part.codes_OI.view(torch.uint8) for part in floats]).view(first.codes_OI.dtype)
        return Fp8Weight(codes, torch.cat([part.scales_OG for part in floats]), first.group_size)
    whole = [part for part in parts if isinstance(part, IntWeight) and _has_groups_of(part, first)]
    if len(whole) < len(parts):
        return None
    codes, zeros = torch.cat([part.codes_OI for part in whole]), torch.cat([part.zeros_OG for part in whole])
    return IntWeight(codes, zeros, torch.cat([part.scales_OG for part in whole]), first.bits, first.order_I)


def _has_groups_of(part: IntWeight, other: IntWeight) -> bool:
    if part.order_I is None or other.order_I is None:
        same_order = part.order_I is other.order_I
    else:
        same_order = torch.equal(part.order_I, other.order_I)
    return same_order and part.scales_OG.shape[1] == other.scales_OG.shape[1]
