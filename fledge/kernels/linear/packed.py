"""Linear layers packed for the CPU: weights in 32, 16, 8, 5 or 4 bits, activations in fp32.

At 1 to 16 rows a linear is bound by reading its weights, so half the bytes take about half the time; PyTorch's fp32 `F.linear`
is even slower for 2 to 8 rows. Measured on 2 AVX-512 cores, one pass over the linears of SmolLM2-135M with 1 and 6 rows:
`F.linear` 42 and 57 ms, FBGEMM's fp16 7.9 and 9.6 ms, ours (`cpu/linear.h`, if there is a C compiler) 6.8 and 9.0 ms.
On one core fp16 takes 10.7 and 19 ms, 8 bits 6.2 and 10 ms, 4 bits (the head in 8) 4.5 and 10 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fledge.kernels import native
from fledge.kernels.formats.gguf_blocks import Blocks
from fledge.kernels.quantization import GROUP_SIZE, QuantizedLinear, QuantizedWeight, rounded

# The operator's overload: resolving it by name costs 2 µs per call, and a token needs 121 calls.
_linear = torch.ops.quantized.linear_dynamic_fp16.default

QUANTISED_ROWS = 1024


class PackedLinear(nn.Module):
    """A plain linear packed in 32, 16, 8, 5 or 4 bits, or a quantised one in its own format. Without the C code always 16 bits.

    `bits` counts a block's scales, too (5 asked bits are 6). `asked_bits`: the argument, for packing other weights alike.
    """

    def __init__(self, linear: nn.Linear | QuantizedLinear, bits: int = 16) -> None:
        super().__init__()
        self.in_features, self.out_features, self.asked_bits = linear.in_features, linear.out_features, bits
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.native = self.packed = None
        if native.library() is not None:
            order = linear.order if isinstance(linear, QuantizedLinear) else None
            self.native = native.NativeLinear(_as_bits(linear, bits), self.bias, order)
            self.bits, self.num_bytes = self.native.bits, self.native.num_bytes
        else:
            self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), self.bias)
            self.bits, self.num_bytes = 16, 2 * linear.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.packed) if self.native is None else self.native(x)

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked at every call, for code that reads them directly."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0] if self.native is None else self.native.weight


class GgufLinear(PackedLinear):
    """A linear of GGUF tensors in their own formats; the outputs of `parts` are concatenated. Needs the C code."""

    def __init__(self, parts: list[Blocks], bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.parts, self.bias, self.packed = parts, bias, None
        self.in_features, self.out_features = parts[0].inputs, sum(part.outputs for part in parts)
        self.native = native.NativeLinear(parts, bias)
        self.bits, self.num_bytes = self.native.bits, self.native.num_bytes

    @property
    def weight(self) -> Tensor:
        return torch.cat([native.look_up(part, torch.arange(part.outputs)) for part in self.parts])


class GgufEmbedding(nn.Module):
    """An embedding that reads rows of a GGUF tensor from the memory-mapped file."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.num_embeddings, self.embedding_dim = blocks.outputs, blocks.inputs

    def forward(self, tokens: Tensor) -> Tensor:
        return native.look_up(self.blocks, tokens)

    @property
    def weight(self) -> Tensor:
        """All rows in fp32, converted at every call."""
        return native.look_up(self.blocks, torch.arange(self.num_embeddings))


def _as_bits(linear: nn.Linear | QuantizedLinear, bits: int) -> Tensor | QuantizedWeight | list[Blocks]:
    if isinstance(linear, QuantizedLinear):
        return linear.quantized
    if bits <= 8 and linear.in_features % GROUP_SIZE == 0:
        return [quantised_blocks(linear.weight, bits)]
    return linear.weight.detach().to(torch.float32 if bits == 32 else torch.float16)


def quantised_blocks(weight_OI: Tensor, bits: int) -> Blocks:
    """Rounds a weight to Q8_0, Q5_1 or Q4_1, some rows at a time: rounding takes several times the memory of its input."""
    parts = []
    for rows in weight_OI.split(QUANTISED_ROWS):
        scales, lowest, codes = rounded(rows, bits)
        codes = codes.view(torch.uint8)
        headers = [half[..., None].view(torch.uint8) for half in (scales, lowest) if half is not None]
        if bits == 5:  # the fifth bits of a block's inputs, the first input's in the lowest bit
            bit = 1 << torch.arange(8, dtype=torch.uint8)
            headers.append(((codes >> 4).unflatten(-1, (-1, 8)) * bit).sum(-1, dtype=torch.uint8))
        if bits < 8:  # the second 16 inputs of a block are in the high nibbles
            codes = codes & 15
            codes = codes[..., :16] | codes[..., 16:] << 4
        parts.append(torch.cat([*headers, codes], -1).flatten(1))
    return Blocks({8: "Q8_0", 5: "Q5_1", 4: "Q4_1"}[bits], weight_OI.shape[1], torch.cat(parts).numpy())


def packing_supported() -> bool:
    if native.library() is not None:
        return True
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


# The largest finite value of fp16: larger weights would be clipped silently.
FP16_MAX = 65504.0


def pack_linears(module: nn.Module, bits: int = 16, head_bits: int | None = None) -> None:
    """Replaces linears by packed ones, in place: plain ones in `bits` (`head_bits` for `lm_head` if given), quantised ones in
    their own format. Below 32 bits, a linear with weights beyond fp16's range is left as it is.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, QuantizedLinear):
            setattr(module, name, PackedLinear(child))
        elif isinstance(child, nn.Linear):
            if bits == 32 or max(map(abs, map(float, child.weight.aminmax()))) <= FP16_MAX:
                setattr(module, name, PackedLinear(child, head_bits or bits if name == "lm_head" else bits))
        else:
            pack_linears(child, bits, head_bits)
