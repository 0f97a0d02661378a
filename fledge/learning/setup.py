"""An engine that learns: its drafter from a learn folder, by name, or made from the target's last layer where there is none."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fledge import sources
from fledge.bench.datasets import load_items
from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.hf import load_config
from fledge.config import DrafterConfig, ModelConfig
from fledge.devices import resolve_device
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.eager import EagerExecutor
from fledge.engine.executors.hidden_states import MAX_REQUESTS
from fledge.learning.batch import activation_bytes
from fledge.learning.config import LearnConfig
from fledge.learning.generations import Generations
from fledge.learning.hook import Learning, is_out_of_memory
from fledge.learning.learner import WEIGHT_BYTES
from fledge.learning.target import KEPT_DTYPE, MAX_PREFIXES, PREFIX_TOKENS, ServedTarget, linear_weight
from fledge.learning.weights import StagedWeights, weights_of
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.speculation.methods.ngram import NgramSpeculator
from fledge.tokenizer import Tokenizer
from fledge.training.drafter import drafter_config, last_layer, start_from_target
from fledge.training.recipe import DrafterRecipe

log = logging.getLogger("fledge.learning")

# The window of a drafter that is made on the spot: one without a window loses most of its acceptance in long texts.
WINDOW = 512
# Learning rates at first. On translations, 64 steps at 1e-4 brought 10 % of acceptance; a new drafter has nothing to lose.
TRAINED_RATE, NEW_RATE = 1e-4, 5e-4


def build_learning_engine(
    model: str | Decoder,
    speculation: Speculation,
    config: EngineConfig,
    learn: LearnConfig,
    *,
    tokenizer: Tokenizer | None = None,
    fixed_prompts: Sequence[Sequence[int]] | None = None,
    capture: bool | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """As `build_engine`, with a `Learning` hook. `fixed_prompts`: None: those of `learn.replay`, or the built-in ones.

    `clock`: what the budget and the rate of samples are measured with.
    """
    device = resolve_device(config.device)
    learn = learn.resolve(device)
    target = model.config if isinstance(model, Decoder) else _model_config(model)
    generations = Generations(learn.folder, learn.keep_generations) if learn.folder is not None else None
    number = generations.current if generations is not None else None
    found = speculation.resolve_drafter(model if isinstance(model, str) else "")
    is_warm_start = has_ngrams = False
    if generations is not None and number is not None:
        network = load_drafter(generations.path(number), target)
        is_warm_start = bool(generations.figures(0).get("is_warm_start"))
        has_ngrams = bool(generations.figures(number).get("has_ngrams"))
    elif found is None or isinstance(found, str):
        network, is_warm_start, has_ngrams = EagleDrafter(initial_drafter_config(target)), True, True
    else:
        network = found if isinstance(found, EagleDrafter) else load_drafter(found, target)
    if not learn.learning_rate:
        learn = replace(learn, learning_rate=NEW_RATE if is_warm_start else TRAINED_RATE)
    master = copy.deepcopy(network).float()
    if device.type == "cuda":
        reserved = reserved_bytes(master.config, learn, copies_head=config.quantization != "none")
        config = replace(config, reserved_bytes=reserved)
    engine = build_engine(model, replace(speculation, drafter=network), config, tokenizer=tokenizer, capture=capture)
    assert isinstance(engine.drafter, EagleSpeculator)
    if is_warm_start and number is None:
        _start(engine, master)
    if has_ngrams and isinstance(engine.executor, EagerExecutor) and engine.drafter.tree is None:
        engine.drafter.fallback = NgramSpeculator(engine.drafter.depth)  # they draft until the drafter is better
    if fixed_prompts is None:
        fixed_prompts = _fixed_prompts(engine, learn)
    try:
        learning = Learning(engine, master, learn, fixed_prompts, generations=generations, clock=clock)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.error("learning stops: out of memory; the server starts without it")
        return engine
    if generations is not None:
        learning.learner.newest = generations.newest  # also after current.json was deleted: no number is given twice
    if generations is not None and number is not None:
        learning.learner.generation = number
        if number and (generations.path(0) / "config.json").is_file():
            learning.learner.first = {
                name: value.to(learning.target.device)
                for name, value in weights_of(load_drafter(generations.path(0), target)).items()
            }
    if generations is not None and number is None:
        learning.save_first(is_warm_start=is_warm_start)
    if isinstance(found, str) or found is None:
        log.info("learning: no drafter was named; one made from the target's last layer learns from the requests")
    return engine


def initial_drafter_config(target: ModelConfig) -> DrafterConfig:
    """Of a drafter for a target that has none: it shares the target's head, so that no vocabulary has to be counted first."""
    few = tuple(sorted({target.num_layers // 2, target.num_layers - 1, target.num_layers}))  # the usual ones need eight
    aux_layers = None if target.num_layers >= 8 else few
    recipe = DrafterRecipe(draft_vocab_size=None, own_head=False, window=WINDOW, aux_layers=aux_layers)
    return drafter_config(recipe, target)


@torch.no_grad()
def _start(engine: Engine, master: EagleDrafter) -> None:
    """Day 0: weights from the target's last layer, as it is served."""
    assert isinstance(engine.drafter, EagleSpeculator)
    target = ServedTarget(engine.decoder, master.config.aux_layer_ids)
    vocab_size = target.vocab_size
    tokens = [(7 * place + 3) % vocab_size for place in range(64)]  # any: the median size of states over them counts
    taps = [tap.float().cpu() for tap in target.read([(tokens, 1)])[0].taps]
    start_from_target(master, last_layer(engine.decoder, linear_weight), target.head, engine.decoder.embed_tokens, taps)
    staged = StagedWeights(engine.drafter.network)
    for _ in staged.prepare(weights_of(master)):
        pass
    staged.apply()


def reserved_bytes(config: DrafterConfig, learn: LearnConfig, *, copies_head: bool) -> int:
    """Of a GPU's memory, that the KV cache must leave: as `Learning.num_bytes`, and for a step.

    `copies_head`: the target's head is served quantised; training reads it in 16 bits.
    """
    with torch.device("meta"):
        num_weights = sum(p.numel() for p in EagleDrafter(config).parameters())
    width = (len(config.aux_layer_ids) + 1) * config.target_hidden_size * KEPT_DTYPE.itemsize
    fixed = learn.fixed_texts * 2 * learn.fixed_tokens  # prompts are about as long as answers
    tokens = MAX_REQUESTS * learn.sample_tokens + MAX_PREFIXES * PREFIX_TOKENS + fixed
    weights = (WEIGHT_BYTES + 2) * num_weights  # in a swap, once more as they are served
    weights += 2 * config.vocab_size * config.target_hidden_size if copies_head else 0
    return weights + learn.memory_mb * 2**20 + tokens * width + activation_bytes(config, learn)


def _model_config(model: str) -> ModelConfig:
    found = sources.find(model)
    return gguf.read_config(GgufFile(found)) if found.is_file() else load_config(sources.resolve(model))


def _fixed_prompts(engine: Engine, learn: LearnConfig) -> list[list[int]]:
    """Single questions of the fixed set, as the chat template has them."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return []
    prompts: list[list[int]] = []
    for item in load_items(learn.replay or "builtin")[: learn.fixed_texts]:
        message = {"role": "user", "content": item.turns[0]}
        if tokenizer.has_chat_template:
            prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        else:
            prompt = tokenizer.encode(item.turns[0])
        if len(prompt) + learn.fixed_tokens <= min(learn.sample_tokens, engine.config.max_model_len):
            prompts.append(prompt)
    return prompts
