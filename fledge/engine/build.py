"""From names to a running engine: files are found, read, packed for the machine and put together."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fledge import sources
from fledge.checkpoints.drafter_files import find_drafter
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drafters import default_drafter
from fledge.engine.config import EngineConfig
from fledge.engine.device_batch import DEVICE_PAGE_SIZE
from fledge.engine.device_engine import DeviceEngine, can_capture
from fledge.engine.engine import Engine, page_pool, paged_kv
from fledge.errors import UserError
from fledge.kernels.packed_linear import pack_linears
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.drafting import Drafter, EagleSpeculator
from fledge.speculation.ngram import NgramSpeculator
from fledge.tokenizer import Tokenizer

DEFAULT_DEPTH = 5
# On CPU a draft step is bound by reading the drafter's weights, and verification catches what rounding changes.
DRAFTER_BITS = 8


@dataclass(frozen=True)
class Speculation:
    """What to draft with and how far. `drafter`: auto, none, ngram, a shipped drafter's name, a folder or a hub id."""

    drafter: str | EagleDrafter | None = "auto"
    depth: int | str = DEFAULT_DEPTH  # a number, or "auto" to stop when confidence falls
    tree: TreeShape | None = None

    def resolve_drafter(self, model: str) -> str | Path | EagleDrafter | None:
        """The drafter's folder or network, `ngram`, or None for plain decoding."""
        name = self.drafter
        if name is None or name == "none":
            return None
        if name == "auto":
            return default_drafter(model) or "ngram"
        return name if name == "ngram" or isinstance(name, EagleDrafter) else find_drafter(name)


def build_engine(
    model: str | Decoder,
    speculation: Speculation | None = None,
    config: EngineConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Engine | DeviceEngine:
    speculation, config = speculation or Speculation(), config or EngineConfig()
    if config.threads:
        torch.set_num_threads(config.threads)
    if isinstance(model, Decoder):
        name, decoder = "", model
    else:
        name, folder = model, sources.resolve(model)
        tokenizer = tokenizer or Tokenizer(folder)
        decoder = load_decoder(folder, torch.float32 if _is_cpu(config) else torch.bfloat16)
    if not _is_cpu(config) and config.page_size == EngineConfig.page_size:
        config = replace(config, page_size=DEVICE_PAGE_SIZE)
    config = config.resolve(decoder.config)
    decoder = fit(decoder, config)
    pool = page_pool(config)
    drafter = _build_drafter(speculation, name, decoder, config, pool)
    if name:
        gc.freeze()  # what is loaded by now stays: looking through all of it takes 4 % of a decode step on CPU
    engine = Engine(decoder, config, drafter=drafter, tokenizer=tokenizer, pool=pool)
    # On a GPU requests run through captured cycles, except for what those do not do: see `DeviceEngine`.
    return engine if _is_cpu(config) or not can_capture(drafter) else DeviceEngine(engine)


def fit(network: Decoder | EagleDrafter, config: EngineConfig) -> Decoder | EagleDrafter:
    """Moves a network to its device and type. On CPU float16 means packed linears between fp32 activations."""
    network.eval().requires_grad_(False)
    if not _is_cpu(config):
        return network.to(device=config.device, dtype=config.weight_dtype)
    network = network.float()
    if config.dtype == "float16":
        if network.embed_tokens is not None:
            network.embed_tokens.weight = torch.nn.Parameter(network.embed_tokens.weight.half(), requires_grad=False)
        pack_linears(network, DRAFTER_BITS if isinstance(network, EagleDrafter) else 16)
    return network


def _build_drafter(speculation: Speculation, model: str, decoder: Decoder, config: EngineConfig, pool) -> Drafter | None:
    depth = DepthPolicy.parse(speculation.depth)
    found = speculation.resolve_drafter(model)
    if found is None:
        return None
    if found == "ngram":
        if speculation.tree is not None:
            raise UserError("the n-gram drafter proposes chains only; leave out --tree or name an EAGLE drafter")
        return NgramSpeculator(depth)
    network = found if isinstance(found, EagleDrafter) else load_drafter(found, decoder.config)
    decoder.check_taps(network.config.aux_layer_ids)
    network = fit(network, config).share(decoder.embed_tokens, decoder.lm_head)
    shape = network.config
    cache = paged_kv(config, pool, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    return EagleSpeculator(network, cache, depth, speculation.tree)


def _is_cpu(config: EngineConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
