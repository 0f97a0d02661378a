"""New weights for a drafter that is being served: prepared beside it, then copied in place, so that captured graphs and C
pointers stay valid. Nothing is served between the two ends of `apply`: the engine runs no step meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fledge.kernels.linear.packed import PackedLinear
from fledge.models.drafter import EagleDrafter

Weights = Mapping[str, Tensor]


def weights_of(drafter: EagleDrafter) -> dict[str, Tensor]:
    """A copy in fp32, on its device."""
    return {name: value.detach().float().clone() for name, value in drafter.named_parameters()}


def are_finite(weights: Weights) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def staged_bytes(network: EagleDrafter) -> int:
    """What `StagedWeights` takes for a while: all that is served in another type or layout than fp32."""
    modules = list(network.modules())
    plain = [one for module in modules for one in module.parameters(recurse=False) if one.dtype != torch.float32]
    return sum(one.nbytes for one in plain) + sum(one.num_bytes for one in modules if isinstance(one, PackedLinear))


class StagedWeights:
    """Weights in the types and layouts of a served network."""

    def __init__(self, network: EagleDrafter) -> None:
        self.network = network
        self.copies: list[tuple[Tensor, Tensor]] = []  # to, from
        self.packed: list[tuple[PackedLinear, PackedLinear]] = []  # where there is no C code: to, from

    @torch.no_grad()
    def prepare(self, weights: Weights) -> Iterator[None]:
        """Casts and packs module by module; pauses after each."""
        for name, module in self.network.named_modules():
            if isinstance(module, PackedLinear):
                fresh = PackedLinear(_plain(weights[f"{name}.weight"], weights.get(f"{name}.bias")), module.asked_bits)
                self._stage_packed(module, fresh)
            else:
                for own, place in module.named_parameters(recurse=False):
                    self.copies.append((place, weights[f"{name}.{own}" if name else own].to(place)))
            yield

    @torch.no_grad()
    def apply(self) -> None:
        """Enqueued behind all launched work on a GPU; done when it returns on a CPU."""
        for place, value in self.copies:
            place.copy_(value)
        for module, fresh in self.packed:
            module.packed, module.bias = fresh.packed, fresh.bias

    def _stage_packed(self, module: PackedLinear, fresh: PackedLinear) -> None:
        if module.native is None:
            self.packed.append((module, fresh))
            return
        assert fresh.native is not None
        assert fresh.bits == module.bits
        self.copies += zip(module.native.panels, fresh.native.panels, strict=True)
        if module.native.bias is not None and fresh.native.bias is not None:
            self.copies.append((module.native.bias, fresh.native.bias))


def _plain(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI.cpu(), requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O.cpu(), requires_grad=False)
    return linear
