"""Which kernel each linear of a model takes, by its number of rows: for people who ask why something is slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich import box
from rich.table import Table
from torch import nn

from fledge.config import ModelConfig
from fledge.engine.config import EngineConfig
from fledge.kernels.linear.dispatch import ROWS, Shape, table
from fledge.kernels.quantization import BITS, GROUP_SIZE
from fledge.models.decoder import Decoder
from fledge.models.layers import MLP
from fledge.models.moe import SparseMLP


def linear_shapes(config: ModelConfig, quantization: str = "none") -> list[Shape]:
    """The linears of one layer and the head. `quantization`: none, fp8, int8 or int4 (a GGUF file's formats are its own)."""
    with torch.device("meta"):
        decoder = Decoder(config)
    layer = decoder.layers[0]
    linears = {
        "qkv_proj": layer.self_attn.qkv_proj,
        "o_proj": layer.self_attn.o_proj,
        **_mlp_linears(layer.mlp),
        "lm_head": decoder.lm_head,
    }
    shapes = []
    for name, linear in linears.items():
        format, group_size = "plain", 1
        if quantization in BITS and name != "router":
            format, group_size = f"int{BITS[quantization][name == 'lm_head']}", GROUP_SIZE
            if quantization == "fp8":
                format, group_size = "fp8", linear.in_features
        gated = name.endswith("gate_up_proj")
        shapes.append(Shape(name, linear.in_features, linear.out_features, format, gated, group_size))
    return shapes


def _mlp_linears(mlp: MLP | SparseMLP) -> dict[str, nn.Linear]:
    """Of a plain MLP, or of a router and the shared expert; those that are chosen among have a kernel of their own."""
    if not isinstance(mlp, SparseMLP):
        return {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj}
    shared = mlp.shared_expert
    named = {} if shared is None else {"shared gate_up_proj": shared.gate_up_proj, "shared down_proj": shared.down_proj}
    return {"router": mlp.gate, **named}


def kernel_table(config: ModelConfig, engine: EngineConfig, rows: Sequence[int] = ROWS) -> Table:
    device = torch.device(engine.device)
    title = f"kernels of the linears on {device}, {engine.dtype}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("linear", "K", "N", "format", "slices", *(f"{count} rows" for count in rows)):
        shown.add_column(heading)
    for line in table(device, linear_shapes(config, engine.quantization), engine.activation_dtype, rows):
        shown.add_row(*map(str, line.values()))
    return shown
