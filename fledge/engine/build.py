"""From names to a running engine: files are found, read, packed for the machine and put together."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fledge import sources
from fledge.checkpoints import gguf
from fledge.checkpoints.coverage import recorded_coverage
from fledge.checkpoints.drafter_files import find_drafter
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.checkpoints.hf import load_decoder
from fledge.drafters import default_drafter
from fledge.engine.captured import can_capture
from fledge.engine.config import EngineConfig
from fledge.engine.depth_control import DepthControl
from fledge.engine.device_batch import DEVICE_PAGE_SIZE
from fledge.engine.device_engine import DeviceEngine
from fledge.engine.engine import Engine, page_pool, paged_kv
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.packed_linear import pack_linears
from fledge.kernels.quantization import quantize_linears
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
    adaptive: bool = True  # less deep, down to not at all, where the load makes drafting slower than plain decoding
    drift_guard: bool = True  # less deep for a request whose drafts fare clearly worse than usual

    def as_asked(self) -> Speculation:
        """Always to the depth that was asked for, to measure what it is worth."""
        return replace(self, adaptive=False, drift_guard=False)

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
        name, found = model, sources.find(model)
        if found.is_file() and keeps_blocks(config):
            decoder, own_tokenizer = _load_gguf(found)
            tokenizer, config = tokenizer or own_tokenizer, replace(config, quantization="gguf")
        else:
            folder = sources.resolve(model)
            tokenizer = tokenizer or Tokenizer(folder)
            # What was quantised in a file is found again only in exact weights.
            exact = _is_cpu(config) or config.quantization != "none"
            decoder = load_decoder(folder, torch.float32 if exact else torch.bfloat16)
    if not _is_cpu(config) and config.page_size == EngineConfig.page_size:
        config = replace(config, page_size=DEVICE_PAGE_SIZE)
    config = config.resolve(decoder.config)
    decoder = fit(decoder, config)
    pool = page_pool(config)
    drafter = _build_drafter(speculation, name, decoder, config, pool)
    if name:
        native.give_back_memory()
        gc.freeze()  # what is loaded by now stays: looking through all of it takes 4 % of a decode step on CPU
    depth_control = DepthControl(drafter, guard=speculation.drift_guard, by_load=speculation.adaptive)
    engine = Engine(decoder, config, drafter=drafter, tokenizer=tokenizer, pool=pool, depth_control=depth_control)
    # On a GPU requests run through captured cycles, except for what those do not do: see `DeviceEngine`.
    return engine if _is_cpu(config) or not can_capture(drafter) else DeviceEngine(engine)


def _load_gguf(path: Path) -> tuple[Decoder, Tokenizer]:
    file = GgufFile(path)
    return gguf.load_decoder(file), GgufTokenizer(file)


def keeps_blocks(config: EngineConfig) -> bool:
    """Whether a GGUF file's weights are computed with as they are: on CPU, unless another type is asked for."""
    return _is_cpu(config) and config.dtype == "auto" and config.quantization == "none" and native.library() is not None


def fit(network: Decoder | EagleDrafter, config: EngineConfig) -> Decoder | EagleDrafter:
    """Moves a network to its device and type; a target's linears are quantised if so configured.

    On CPU linears are packed, float16 or float32, between fp32 activations; those of a GGUF file stay as they are.
    """
    network.eval().requires_grad_(False)
    if config.quantization != "none" and isinstance(network, Decoder):
        quantize_linears(network, config.quantization, config.device)
    if not _is_cpu(config):
        return network.to(device=config.device, dtype=config.weight_dtype)
    # Packed before the rest becomes fp32: one linear at a time takes more memory than it had.
    embedding = network.embed_tokens
    if config.dtype == "float16":
        pack_linears(network, DRAFTER_BITS if isinstance(network, EagleDrafter) else 16)
    elif native.library() is not None:
        pack_linears(network, 32)
    network = network.float()
    if config.dtype == "float16" and isinstance(embedding, torch.nn.Embedding):
        embedding.weight = torch.nn.Parameter(embedding.weight.half(), requires_grad=False)
    return network


def _build_drafter(speculation: Speculation, model: str, decoder: Decoder, config: EngineConfig, pool) -> Drafter | None:
    depth = DepthPolicy.parse(speculation.depth)
    if config.deterministic and speculation.tree is not None:
        raise UserError(
            "--deterministic verifies chains only: a tree's tokens lie elsewhere in the cache than in the text, and are summed "
            "in another order; leave out --tree"
        )
    found = speculation.resolve_drafter(model)
    if found is None:
        return None
    if found == "ngram":
        if speculation.tree is not None:
            raise UserError("the n-gram drafter proposes chains only; leave out --tree or name an EAGLE drafter")
        return NgramSpeculator(depth)
    network = found if isinstance(found, EagleDrafter) else load_drafter(found, decoder.config, dtype=None)
    decoder.check_taps(network.config.aux_layer_ids)
    network = fit(network, config).share(decoder.embed_tokens, decoder.lm_head)
    shape = network.config
    cache = paged_kv(config, pool, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    coverage = recorded_coverage(found) if isinstance(found, Path) else None
    return EagleSpeculator(network, cache, depth, speculation.tree, coverage)


def _is_cpu(config: EngineConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
