"""Builds an engine from model names: loads target and drafter, places them on the device, sizes the KV cache."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from fledge import sources
from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.gguf_file import open_gguf
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.checkpoints.hf import kept_bits, load_config, load_decoder, load_scheme
from fledge.checkpoints.provenance import Provenance
from fledge.checkpoints.quantized import KEPT
from fledge.config import ModelConfig
from fledge.devices import resolve_device
from fledge.engine.admission import AdmissionPolicy
from fledge.engine.config import EngineConfig, check_head_size
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.executors.eager import EagerExecutor
from fledge.engine.executors.graphs import without_collection
from fledge.engine.kv_pool import PagePool
from fledge.engine.memory import check_fits, give_back_code, give_back_heap
from fledge.engine.options import DEFAULT_DEPTH, Speculation
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.formats.fp8 import reads_fp8
from fledge.kernels.linear.packed import pack_linears
from fledge.kernels.quantization import quantize_linears, quantized_linear
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.moe import stack_experts
from fledge.speculation.controller import SpeculationController
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.methods.base import Drafter
from fledge.speculation.methods.eagle import EagleSpeculator, lookahead
from fledge.speculation.methods.ngram import NgramSpeculator
from fledge.tokenizer import Tokenizer

Network = TypeVar("Network", Decoder, EagleDrafter)
# On CPU a draft step's time goes into reading the drafter's weights. Rounding them changes no output, as drafts are verified.
# The head is two thirds of the weights: 4 bits lose 3 % of the acceptance length, 5 bits 1 %, 8 bits cost more than they gain.
DRAFTER_BITS, DRAFT_HEAD_BITS = 8, 5
__all__ = ["DEFAULT_DEPTH", "Speculation", "build_engine", "fit", "keeps_blocks", "paged_kv"]


# Loading creates many objects that stay alive: scanning them in repeated garbage collections takes a tenth of the load time.
@without_collection()
def build_engine(
    model: str | Decoder,
    speculation: Speculation | None = None,
    config: EngineConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    admission: AdmissionPolicy | None = None,
    capture: bool | None = None,
) -> Engine:
    """Builds an engine. `capture`: None means CUDA graphs on a GPU and eager execution on a CPU; False runs the captured
    executor's functions without graphs, on any device (for tests)."""
    speculation, config = speculation or Speculation(), config or EngineConfig()
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    is_cpu = resolve_device(config.device).type == "cpu"
    if is_cpu and not isinstance(model, Decoder):
        give_back_code()
    is_eager = is_cpu if capture is None else False
    if is_cpu and not is_eager:
        config = replace(config, kv_cache_dtype="float32")  # the captured functions need it on a CPU
    is_checked, kept = True, None
    if isinstance(model, Decoder):
        name, target, load = "", model.config, partial(_given, model)
        config = config.resolve(target)
    else:
        name, found = model, sources.find(model)
        # Done while a GGUF file's header is in memory: the matching shipped drafter is identified by the file's norm weights.
        speculation = replace(speculation, drafter=speculation.resolve_drafter(model))
        if found.is_file() and is_eager and keeps_blocks(config):
            if speculation.tree is not None:
                # Attention over a tree sums in another order than plain decoding, and 8-bit activations amplify the rounding
                # difference: 14 of 20 greedy answers differed from plain ones.
                raise UserError(
                    "a draft tree is not lossless with a GGUF file's own blocks; add --dtype float16, or leave out --tree"
                )
            file = open_gguf(found)
            tokenizer, target = tokenizer or GgufTokenizer(file), gguf.read_config(file)
            file.forget_lists()
            config = replace(config, quantization="gguf").resolve(target)
            load = partial(gguf.load_decoder, file)
            is_checked = False  # the file is memory-mapped: weights that do not fit are read from it again
        else:
            folder = sources.resolve(model)
            tokenizer, target = tokenizer or Tokenizer(folder), load_config(folder)
            config = config.resolve(target)
            # Quantising needs the checkpoint's exact values, so the weights are loaded as float32.
            exact = is_cpu or config.quantization != "none"
            if (scheme := load_scheme(folder)) is not None and config.quantization != "none":
                raise UserError(
                    f"--quantization {config.quantization}: {model} is quantised already ({scheme.description}); leave it out"
                )
            place = (torch.float32, "cpu") if exact else (config.weight_dtype, config.device)
            keep = kept_formats(config, pack=is_eager)
            load = partial(load_decoder, folder, *place, keep=keep, place=partial(fit_linear, config, is_eager))
            kept = kept_bits(folder, target, keep, config.device)
    # The drafter is loaded first: its files are unmapped before the target takes memory, and a bad one is refused early.
    network, coverage = _load_network(speculation, name, target, config, pack=is_eager)
    shape = network.config if isinstance(network, EagleDrafter) else None
    if name and is_checked:
        check_fits(config, target, shape, kept)
    decoder = load()
    if target.rope.kind == "longrope":
        decoder.set_rotary(config.max_model_len)  # longrope uses its short factors up to the original length
    decoder = fit(decoder, config, pack=is_eager)
    if isinstance(network, EagleDrafter):
        decoder.check_taps(network.config.aux_layer_ids)
        network.share(decoder.embed_tokens, decoder.lm_head)
    # Sized last: the weights are on the device by now, and the cache gets the remaining memory.
    config = config.with_cache(decoder.config, shape)
    depth = DepthPolicy.parse(speculation.depth, on_cpu=is_cpu)
    # Plus slots for a draft after the longest text, so that a cache of one context holds a request of that length.
    num_slots = config.kv_cache_tokens + (1 if network is None else lookahead(depth, speculation.tree))
    pool = PagePool(-(-num_slots // config.page_size), config.page_size)
    drafter = _drafter(network, depth, speculation.tree, coverage, config, pool)
    if name:
        give_back_heap()
        gc.freeze()  # loaded objects stay alive: scanning them in garbage collection takes 4 % of a decode step on CPU
    controller = SpeculationController(
        drafter.depth.limit if drafter is not None else 0,
        adaptive=speculation.adaptive,
        guard=speculation.drift_guard,
        coverage=getattr(drafter, "coverage", None),
    )
    cache = paged_kv(config, pool, decoder.config.num_layers, decoder.config.num_kv_heads, decoder.config.head_dim)
    parts = (decoder, config, pool, cache, controller, drafter)
    executor = EagerExecutor(*parts) if is_eager else CudaGraphExecutor(*parts, capture=capture is None)
    return Engine(config, executor, pool, controller, drafter=drafter, tokenizer=tokenizer, admission=admission)


def _given(decoder: Decoder) -> Decoder:
    return decoder


def kept_formats(config: EngineConfig, *, pack: bool) -> frozenset[str]:
    """The formats of a quantised checkpoint that the device's kernels read without conversion."""
    device = torch.device(config.device).type
    if device == "cpu" and (native.library() is None or not pack):
        return frozenset()
    return KEPT[device] if reads_fp8(torch.device(config.device)) else KEPT[device] - {"fp8"}


def keeps_blocks(config: EngineConfig) -> bool:
    """Whether the CPU computes with a GGUF file's quantised blocks directly: yes, unless another dtype is configured."""
    return config.dtype == "auto" and config.quantization in ("none", "gguf") and native.library() is not None


def fit(network: Network, config: EngineConfig, *, pack: bool = True) -> Network:
    """Places a network on its device in the configured dtype; quantises a target's linears if configured.

    On CPU, linears are packed for the native kernels as float16 or float32, with fp32 activations between them; a GGUF file's
    linears stay as they are. `pack`: False leaves unquantised linears unpacked, for the captured executor's functions.
    """
    network.eval().requires_grad_(False)
    if config.quantization != "none" and isinstance(network, Decoder):
        quantize_linears(network, config.quantization, config.device)
    if not config.is_cpu:
        network = network.to(device=config.device, dtype=config.weight_dtype)
        stack_experts(network, config.weight_dtype)
        return network
    if not pack:
        return network.float()
    # Packed before the rest becomes fp32: this way only one linear at a time needs the larger memory.
    embedding = network.embed_tokens
    if config.dtype == "float16" and isinstance(network, EagleDrafter):
        pack_linears(network, DRAFTER_BITS, DRAFT_HEAD_BITS)
    else:
        _pack(network, config)
    network = network.float()
    if config.dtype == "float16" and isinstance(embedding, torch.nn.Embedding):
        embedding.weight = torch.nn.Parameter(embedding.weight.half(), requires_grad=False)
    return network


def fit_linear(config: EngineConfig, pack: bool, name: str, linear: torch.nn.Module) -> torch.nn.Module:
    """Quantises and packs one of a target's linears as `fit` would."""
    linear.requires_grad_(False)
    if config.quantization != "none" and isinstance(linear, torch.nn.Linear):
        linear = quantized_linear(name, linear, config.quantization, config.device)
    if not config.is_cpu or not pack:
        return linear
    holder = torch.nn.ModuleDict({"linear": linear})
    _pack(holder, config)
    return holder["linear"]


def _pack(module: torch.nn.Module, config: EngineConfig) -> None:
    if config.dtype == "float16":
        pack_linears(module, 16)
    elif native.library() is not None:
        pack_linears(module, 32)


def _load_network(
    speculation: Speculation, model: str, target: ModelConfig, config: EngineConfig, *, pack: bool
) -> tuple[EagleDrafter | str | None, float | None]:
    """Returns the drafter's network on its device, `ngram` or None, and the recorded coverage of its draft vocabulary."""
    if config.deterministic and speculation.tree is not None:
        raise UserError(
            "--deterministic excludes draft trees: attention over a tree sums its keys in another order than plain decoding, "
            "which changes rounding; leave out --tree"
        )
    found = speculation.resolve_drafter(model)
    if speculation.tree is not None and (found is None or found == "ngram"):
        what = "without a drafter there is no tree to draft" if found is None else "the n-gram drafter proposes chains only"
        raise UserError(f"{what}; leave out --tree or name an EAGLE drafter")
    if found is None or isinstance(found, str):
        return found, None
    network = found if isinstance(found, EagleDrafter) else load_drafter(found, target, dtype=None)
    coverage = Provenance.read(found).coverage if isinstance(found, Path) else None
    return fit(network, config, pack=pack), coverage


def _drafter(
    network: EagleDrafter | str | None,
    depth: DepthPolicy,
    tree: TreeShape | None,
    coverage: float | None,
    config: EngineConfig,
    pool: PagePool,
) -> Drafter | None:
    if network is None:
        return None
    if not isinstance(network, EagleDrafter):
        return NgramSpeculator(depth)
    shape = network.config
    check_head_size(config.kv_cache_dtype, shape.head_dim)
    cache = paged_kv(config, pool, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    return EagleSpeculator(network, cache, depth, tree, coverage)


def paged_kv(config: EngineConfig, pool: PagePool, num_layers: int, num_kv_heads: int, head_dim: int) -> PagedKV:
    return PagedKV(num_layers, num_kv_heads, head_dim, pool.num_pages, pool.page_size, config.kv_dtype, config.device)
