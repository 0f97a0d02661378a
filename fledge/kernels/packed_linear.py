"""Linear layers with fp16 weights packed for the CPU: fp32 in and out, fp32 accumulation.

At 1 to 16 rows a linear is bound by reading its weights, so half the bytes is near half the time; PyTorch's fp32 `F.linear`
is slower still for 2 to 8 rows. Measured on 2 AVX-512 cores, one pass over the linears of SmolLM2-135M, 1 and 6 rows:
fp32 42 and 57 ms, FBGEMM's fp16 7.9 and 9.6 ms, ours (`cpu/linear.h`, where there is a C compiler) 6.8 and 9.0 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fledge.kernels import native

# The overload itself: looking it up by name costs two microseconds a call, and a token takes 121 of them.
_linear = torch.ops.quantized.linear_dynamic_fp16.default


class PackedLinear(nn.Module):
    """`bits` 8 where C code serves: half the bytes again, for a drafter, whose tokens are verified anyway."""

    def __init__(self, linear: nn.Linear, bits: int = 16) -> None:
        super().__init__()
        self.bits = bits if native.library() is not None else 16
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.native = self.packed = None
        if native.library() is not None:
            self.native = native.NativeLinear(linear.weight.detach(), bias, bits)
        else:
            self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), bias)

    @property
    def num_bytes(self) -> int:
        return self.in_features * self.out_features * self.bits // 8

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.packed) if self.native is None else self.native(x)


def packing_supported() -> bool:
    if native.library() is not None:
        return True
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


# The largest value fp16 holds: a weight beyond it would be clipped in silence.
FP16_MAX = 65504.0


def pack_linears(module: nn.Module, bits: int = 16) -> None:
    """Replaces every linear that fp16 can hold by a packed one, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if child.weight.abs().max() <= FP16_MAX:
                setattr(module, name, PackedLinear(child, bits))
        else:
            pack_linears(child, bits)
