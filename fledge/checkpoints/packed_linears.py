"""Quantised linears of a checkpoint as modules of a decoder: as they are where kernels read them, else as plain weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fledge.checkpoints.quantized import PackedWeight, merged
from fledge.kernels.formats.fp8 import Fp8Weight
from fledge.kernels.formats.packed_int import IntWeight
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, kept_fp8
from fledge.models.decoder import Decoder


def may_keep(owner: str, format: str, keep: Collection[str], device: torch.device, *, has_order: bool) -> bool:
    """Whether a linear stays in a format, where that holds it exactly. On a GPU head and experts read their inputs in order."""
    reads_in_order = device.type == "cuda" and (owner == "lm_head" or ".experts." in owner)
    return format in keep and not (has_order and reads_in_order)


class PackedLinears:
    """Collects the linears of a decoder while its other parameters are read."""

    def __init__(self, decoder: Decoder, keep: Collection[str], dtype: torch.dtype, device: str | torch.device) -> None:
        """`keep`: names of formats; see `quantized.KEPT`."""
        self.decoder, self.keep, self.dtype, self.device = decoder, keep, dtype, torch.device(device)
        self.kept: dict[str, tuple[QuantizedWeight, Tensor | None]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, parameter: str, parts: Sequence[PackedWeight], rows: Tensor | None) -> None:
        """`rows`: the order of the outputs, where the network's is another."""
        owner = parameter.rpartition(".")[0]
        weight = merged(parts)
        if weight is not None and rows is not None:
            weight = weight.rows(rows)
        exact = None
        if weight is not None and self._keeps(owner, weight):
            exact = weight.exact() if isinstance(weight, IntWeight) else kept_fp8(weight)
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
        """A linear of which all parameters are read: the quantised one that was kept of it, or itself."""
        if owner not in self.kept:
            return linear
        weight, order = self.kept.pop(owner)
        return QuantizedLinear(weight, linear.bias, None if order is None else order.to(self.device))

    def summary(self) -> str:
        """For people."""
        return ", ".join(f"{count} linears {how}" for how, count in self.counts.items()) or "no quantised linear in it"
