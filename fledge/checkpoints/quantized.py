"""Reads quantised checkpoints: their tensors, and their linears as modules of a decoder.

`quantization_config` gives the layout of the tensors; which linears are quantised follows from the names of the tensors.
Layouts: `kernels.formats.packed_int` and `kernels.formats.fp8`.

Kernels can use some of these formats directly (`KEPT`). The others are converted to plain weights at load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fledge.checkpoints.quantization_config import Scheme
from fledge.checkpoints.tensors import TensorReader
from fledge.errors import ModelError
from fledge.kernels.formats.fp8 import Fp8Weight, read_fp8
from fledge.kernels.formats.packed_int import IntWeight, read_awq, read_compressed, read_gptq
from fledge.kernels.quantization import GROUP_SIZE, QuantizedLinear, QuantizedWeight, kept_fp8
from fledge.models.decoder import Decoder

PackedWeight = IntWeight | Fp8Weight
# Formats that kernels use directly, by device. Weights that such a format cannot represent exactly become plain too.
KEPT = {"cpu": frozenset({"int4", "int8"}), "cuda": frozenset({"int4", "int8", "fp8"})}
# Scales of activations and caches, which Fledge does not quantise.
OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale", "activation_scale",
                  "input_scale_ub")  # fmt: skip


class PackedTensors:
    """The quantised linears of a folder."""

    def __init__(self, reader: TensorReader, scheme: Scheme) -> None:
        self.reader, self.scheme = reader, scheme

    def has(self, weight: str) -> bool:
        """Whether this linear is quantised, by the name that its plain weight would have."""
        return any(self._name(weight, part) in self.reader.shapes for part in self.scheme.marker)

    def expected(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, from the plain checkpoint's. Where several shapes are valid, the one found."""
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            if name.endswith(".weight") and len(shape) == 2 and self.has(name):
                expected |= {self._name(name, part): size for part, size in self._parts(name, *shape).items()}
            else:
                expected[name] = shape
        return expected

    def bits(self, weight: str, inputs: int) -> float:
        """Bits per weight, with its share of scales and offsets; an upper bound."""
        if self.scheme.layout == "fp8":
            return 8 + 32 / (self.scheme.block[1] if self.scheme.block else inputs)
        groups = {"awq": ("scales", 0), "gptq": ("scales", 0), "packed": ("weight_scale", 1)}.get(self.scheme.layout)
        return self.scheme.bits + 48 * (1 if groups is None else self._groups(weight, *groups, inputs)) / inputs

    def ignored(self, name: str) -> bool:
        """Whether a tensor can be ignored: scales of activations, and the zero biases that AutoGPTQ writes for all linears."""
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
            raise ModelError(f"{weight}: is {codes.dtype}, but quantization_config says {wanted}")
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
        """Names and shapes of one linear's tensors. Group sizes follow from the shape of the scales."""
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
            raise ModelError(f"{self._name(weight, part)}: {list(shape)} does not divide {inputs} inputs into groups")
        size = self.scheme.group_size
        if size is not None and groups != (1 if size == -1 else -(-inputs // size)):
            raise ModelError(
                f"{self._name(weight, part)}: {inputs} inputs are in groups of {inputs // groups}, but quantization_config "
                f"says group_size {size}"
            )
        return groups

    def _read(self, weight: str, part: str) -> Tensor:
        return self.reader.read(self._name(weight, part))

    @staticmethod
    def _name(weight: str, part: str) -> str:
        return weight.removesuffix("weight") + part


def may_keep(owner: str, format: str, keep: Collection[str], device: torch.device, *, has_order: bool) -> bool:
    """Whether a linear may stay quantised if its format is exact. On a GPU, head and experts cannot have act-order."""
    reads_in_order = device.type == "cuda" and (owner == "lm_head" or ".experts." in owner)
    return format in keep and not (has_order and reads_in_order)


class PackedLinears:
    """Collects the quantised linears of a decoder while its other parameters are read."""

    def __init__(self, decoder: Decoder, keep: Collection[str], dtype: torch.dtype, device: str | torch.device) -> None:
        """`keep`: formats that stay quantised; see `KEPT`."""
        self.decoder, self.keep, self.dtype, self.device = decoder, keep, dtype, torch.device(device)
        self.kept: dict[str, tuple[QuantizedWeight, Tensor | None]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, parameter: str, parts: Sequence[PackedWeight], rows: Tensor | None) -> None:
        """Adds one linear, made of `parts`. `rows`: the file's row for each output, if the network has another order."""
        owner = parameter.rpartition(".")[0]
        weight = merged(parts)
        if weight is not None and rows is not None:
            weight = weight.rows(rows)
        exact = None
        if weight is not None and self._keeps(owner, weight):
            exact = weight.exact() if isinstance(weight, IntWeight) else kept_fp8(weight)
            if exact is not None and self.device.type == "cuda" and exact.group_size % GROUP_SIZE:
                exact = None  # no product of tensor cores is as short as its groups
        if exact is not None:
            offsets = None if exact.offsets is None else exact.offsets.to(self.device)
            moved = replace(exact, codes=exact.codes.to(self.device), scales=exact.scales.to(self.device), offsets=offsets)
            order = weight.order_I if isinstance(weight, IntWeight) else None
            self.kept[owner] = (moved, order)
            self.counts[f"{exact.format}, exact" + (", act-order" if order is not None else "")] += 1
            return
        if weight is None:
            value = torch.cat([part.dequantize(self.dtype) for part in parts])
            value = value if rows is None else value[rows]
        else:
            value = weight.dequantize(self.dtype)
        module = self.decoder.get_submodule(owner)
        module.weight = nn.Parameter(value.to(self.device), requires_grad=False)
        self.counts[f"turned into {str(self.dtype).removeprefix('torch.')}"] += 1

    def _keeps(self, owner: str, weight: PackedWeight) -> bool:
        format, order = ("fp8", None) if isinstance(weight, Fp8Weight) else (f"int{weight.bits}", weight.order_I)
        return may_keep(owner, format, self.keep, self.device, has_order=order is not None)

    def finished(self, owner: str, linear: nn.Linear) -> nn.Linear | QuantizedLinear:
        """The module to use once all parameters of a linear are read: the kept quantised one, or the linear itself."""
        if owner not in self.kept:
            return linear
        weight, order = self.kept.pop(owner)
        return QuantizedLinear(weight, linear.bias, None if order is None else order.to(self.device))

    def summary(self) -> str:
        """How many linears were kept or dequantised, as text for the log."""
        return ", ".join(f"{count} linears {how}" for how, count in self.counts.items()) or "no quantised linear in it"


def merged(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Several linears joined along their outputs; None if their formats differ."""
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
