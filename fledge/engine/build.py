"""From names to a running engine: loads target and drafter, places them on the device, sizes the KV cache."""

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
# On CPU a draft step is bound by reading the drafter's weights, and verification catches what rounding changes. The head is two
# thirds of them: 4 bits lose 3 % of the acceptance length, 5 bits 1 %, and 8 bits cost more time than they gain.
DRAFTER_BITS, DRAFT_HEAD_BITS = 8, 5
__all__ = ["DEFAULT_DEPTH", "Speculation", "build_engine", "fit", "keeps_blocks", "paged_kv"]


# Loading makes much that stays: looking through it again and again takes a tenth of the time.
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
    """`capture`: None means CUDA graphs on a GPU and eager execution on a CPU. False runs the captured executor's functions
    without graphs, on any device (for tests)."""
    speculation, config = speculation or Speculation(), config or EngineConfig()
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    is_cpu = resolve_device(config.device).type == "cpu"
    if is_cpu and not isinstance(model, Decoder):
        give_back_code()
    is_eager = is_cpu if capture is None else False
    if is_cpu and not is_eager:
        config = replace(config, kv_cache_dtype="float32")  # as the captured functions have it on a CPU
    is_checked, kept = True, None
    if isinstance(model, Decoder):
        name, target, load = "", model.config, partial(_given, model)
        config = config.resolve(target)
    else:
        name, found = model, sources.find(model)
        # Now, while a GGUF file's header is in memory: the shipped drafter is found by the file's norms.
        speculation = replace(speculation, drafter=speculation.resolve_drafter(model))
        if found.is_file() and is_eager and keeps_blocks(config):
            if speculation.tree is not None:
                # A tree sums attention in another order than the text, and 8-bit activations make a rounding visible:
                # 14 of 20 greedy answers differed from plain ones.
                raise UserError(
                    "a draft tree is not lossless with a GGUF file's own blocks; add --dtype float16, or leave out --tree"
                )
            file = open_gguf(found)
            tokenizer, target = tokenizer or GgufTokenizer(file), gguf.read_config(file)
            file.forget_lists()
            config = replace(config, quantization="gguf").resolve(target)
            load = partial(gguf.load_decoder, file)
            is_checked = False  # mapped: what does not fit is read from the file again
        else:
            folder = sources.resolve(model)
            tokenizer, target = tokenizer or Tokenizer(folder), load_config(folder)
            config = config.resolve(target)
            # What was quantised in a file is found again only in exact weights.
            exact = is_cpu or config.quantization != "none"
            if (scheme := load_scheme(folder)) is not None and config.quantization != "none":
                raise UserError(
                    f"--quantization {config.quantization}: {model} is quantised already ({scheme.description}); leave it out"
                )
            place = (torch.float32, "cpu") if exact else (config.weight_dtype, config.device)
            keep = kept_formats(config, pack=is_eager)
            load = partial(load_decoder, folder, *place, keep=keep, place=partial(fit_linear, config, is_eager))
            kept = kept_bits(folder, target, keep, config.device)
    # The drafter first: its files are unmapped before the target takes memory, and a bad one is refused at once.
    network, coverage = _load_network(speculation, name, target, config, pack=is_eager)
    shape = network.config if isinstance(network, EagleDrafter) else None
    if name and is_checked:
        check_fits(config, target, shape, kept)
    decoder = load()
    if target.rope.kind == "longrope":
        decoder.set_rotary(config.max_model_len)  # up to the original length the short factors serve
    decoder = fit(decoder, config, pack=is_eager)
    if isinstance(network, EagleDrafter):
        decoder.check_taps(network.config.aux_layer_ids)
        network.share(decoder.embed_tokens, decoder.lm_head)
    # Sized last: the weights are on the device by now, and the cache gets what they left.
    config = config.with_cache(decoder.config, shape)
    depth = DepthPolicy.parse(speculation.depth, on_cpu=is_cpu)
    # Room for a draft behind the longest text: a cache of one context must serve a request of that length.
    num_slots = config.kv_cache_tokens + (1 if network is None else lookahead(depth, speculation.tree))
    pool = PagePool(-(-num_slots // config.page_size), config.page_size)
    drafter = _drafter(network, depth, speculation.tree, coverage, config, pool)
    if name:
        give_back_heap()
        gc.freeze()  # what is loaded by now stays: collecting through it takes 4 % of a decode step on CPU
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
    """Formats of a quantised checkpoint that the device's kernels read as they are."""
    device = torch.device(config.device).type
    if device == "cpu" and (native.library() is None or not pack):
        return frozenset()
    return KEPT[device] if reads_fp8(torch.device(config.device)) else KEPT[device] - {"fp8"}


def keeps_blocks(config: EngineConfig) -> bool:
    """Whether the CPU computes with a GGUF file's weights as they are: unless another type is asked for."""
    return config.dtype == "auto" and config.quantization in ("none", "gguf") and native.library() is not None


def fit(network: Network, config: EngineConfig, *, pack: bool = True) -> Network:
    """Places a network on its device in its type; a target's linears are quantised if so configured.

    On CPU linears are packed for the native kernels, float16 or float32, between fp32 activations; those of a GGUF file stay
    as they are. `pack`: False leaves plain ones as they are, for the captured executor's functions.
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
    # Packed before the rest becomes fp32: one linear at a time takes more memory than it had.
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
    """What `fit` makes of one of a target's linears."""
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
    """The drafter's network on its device, `ngram`, or None; and the recorded coverage of its vocabulary."""
    if config.deterministic and speculation.tree is not None:
        raise UserError(
            "--deterministic verifies chains only: a tree's tokens lie elsewhere in the cache than in the text, and are summed "
            "in another order; leave out --tree"
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
