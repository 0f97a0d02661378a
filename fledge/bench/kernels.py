"""Lists which kernel each linear of a model uses, by its number of rows (`fledge bench --kernels`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from fledge import sources
from fledge.checkpoints import gguf
from fledge.checkpoints.gguf import target_config
from fledge.checkpoints.gguf_file import open_gguf
from fledge.checkpoints.layouts import file_names
from fledge.config import ModelConfig
from fledge.devices import resolve_device
from fledge.engine.build import keeps_blocks
from fledge.engine.config import EngineConfig
from fledge.kernels.linear.dispatch import ROWS, Shape, table
from fledge.kernels.quantization import BITS, GROUP_SIZE
from fledge.models.decoder import Decoder
from fledge.models.layers import MLP
from fledge.models.moe import SparseMLP


def linear_shapes(config: ModelConfig, quantization: str = "none") -> list[Shape]:
    """The shapes of one layer's linears and the head. `quantization`: none, fp8, int8 or int4; GGUF formats are set later."""
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
    """The linears of an MLP, or of router and shared expert; the routed experts have their own kernel and are left out."""
    if not isinstance(mlp, SparseMLP):
        return {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj}
    shared = mlp.shared_expert
    named = {} if shared is None else {"shared gate_up_proj": shared.gate_up_proj, "shared down_proj": shared.down_proj}
    return {"router": mlp.gate, **named}


def runs_blocks(path: Path, config: EngineConfig) -> bool:
    """Whether an engine with this configuration computes with the file's own blocks."""
    return path.is_file() and resolve_device(config.device).type == "cpu" and keeps_blocks(config)


def kernel_lines(model: str, asked: EngineConfig, rows: Sequence[int] = ROWS) -> dict[str, Any]:
    """The kernel of each linear of a model, by its number of rows. Does not read the weights."""
    path, config = sources.find(model), target_config(model)
    if runs_blocks(path, asked):
        asked = replace(asked, quantization="gguf")
    engine = asked.resolve(config)
    shapes = linear_shapes(config, engine.quantization)
    if engine.quantization == "gguf" and path.is_file():
        formats = _file_formats(path)
        shapes = [shape._replace(format=formats[shape.name]) for shape in shapes]
    device = torch.device(engine.device)
    lines = table(device, shapes, engine.activation_dtype, rows)
    return {"model": model, "device": str(device), "weights": engine.weights, "linears": lines}


def _file_formats(path: Path) -> dict[str, str]:
    """Formats of the linears in a GGUF file's first layer and of its head; a linear of several tensors may have several."""
    tensors = {gguf.hf_name(name): tensor for name, tensor in open_gguf(path).tensors.items()}
    linears = {
        "qkv_proj": "layers.0.self_attn.qkv_proj",
        "o_proj": "layers.0.self_attn.o_proj",
        "gate_up_proj": "layers.0.mlp.gate_up_proj",
        "down_proj": "layers.0.mlp.down_proj",
        "lm_head": "lm_head" if "lm_head.weight" in tensors else "embed_tokens",
    }
    return {
        name: "/".join(dict.fromkeys(tensors[part].blocks.format for part in file_names(f"{place}.weight")))
        for name, place in linears.items()
    }


def kernel_table(found: dict[str, Any]) -> Table:
    title = f"kernels of the linears on {found['device']}, {found['weights']}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in found["linears"][0]:
        shown.add_column("1 row" if heading == "1 rows" else heading)
    for line in found["linears"]:
        shown.add_row(*map(str, line.values()))
    return shown
