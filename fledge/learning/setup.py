"""Builds an engine that learns. Its drafter comes from the learn folder, from `--drafter`, or from the target's last layer."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fledge.checkpoints import gguf
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.provenance import Provenance
from fledge.config import DrafterConfig, ModelConfig
from fledge.devices import resolve_device
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.eager import EagerExecutor
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import prompts_of
from fledge.learning.generations import Generations, Origin, network_hash, target_hash
from fledge.learning.hook import Learning, is_out_of_memory
from fledge.learning.memory import reserved_bytes
from fledge.learning.served import StagedWeights, weights_of
from fledge.learning.target import ServedTarget, linear_weight, training_dtype
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.speculation.methods.ngram import NgramSpeculator
from fledge.tokenizer import Tokenizer
from fledge.training.drafter import drafter_config, last_layer, start_from_target
from fledge.training.recipe import DrafterRecipe

log = logging.getLogger("fledge.learning")

# Attention window of a drafter made at startup; without a window it would lose most of its acceptance in long texts.
WINDOW = 512
# Learning rates at the start. On translations, 64 steps at 1e-4 gained 10 % acceptance; a new drafter has nothing to lose.
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
    """Builds an engine (`build_engine`) with a `Learning` hook. `clock`: measures the budget and the rate of samples.

    `fixed_prompts`: prompts of the fixed set; None: those of `learn.replay`, or the built-in ones.
    """
    device = resolve_device(config.device)
    learn = learn.resolve(device)
    target = model.config if isinstance(model, Decoder) else gguf.target_config(model)
    generations = Generations(learn.folder, learn.keep_generations) if learn.folder is not None else None
    number = generations.lock().current if generations is not None else None
    found = speculation.resolve_drafter(model if isinstance(model, str) else "")
    given = None
    if found is not None and not isinstance(found, str):
        given = found if isinstance(found, EagleDrafter) else load_drafter(found, target)
    origin = Origin(target_hash(model), network_hash(given) if given is not None else None)
    is_warm_start = has_ngrams = False
    if generations is not None and number is not None:
        origin.check(generations)
        network = load_drafter(generations.path(number), target)
        is_warm_start = bool(generations.figures(0).get("is_warm_start"))
        has_ngrams = bool(generations.figures(number).get("has_ngrams"))
        log.info("learning: continues with generation %d of %s", number, generations.folder)
    elif given is None:
        network, is_warm_start, has_ngrams = EagleDrafter(initial_drafter_config(target)), True, True
    else:
        network = given
    if not learn.learning_rate:
        learn = replace(learn, learning_rate=NEW_RATE if is_warm_start else TRAINED_RATE)
    master = copy.deepcopy(network).float()
    if device.type == "cuda":
        copies_head = config.quantization != "none" or config.resolve(target).weight_dtype != training_dtype(device)
        reserved = reserved_bytes(
            master.config, learn, copies_head=copies_head, max_model_len=config.max_model_len or target.max_positions
        )
        config = replace(config, reserved_bytes=reserved)
    engine = build_engine(model, replace(speculation, drafter=network), config, tokenizer=tokenizer, capture=capture)
    assert isinstance(engine.drafter, EagleSpeculator)
    if isinstance(found, Path):
        engine.drafter.coverage.start_from(Provenance.read(found).coverage)
    if is_warm_start and number is None:
        _start(engine, master)
    if has_ngrams and isinstance(engine.executor, EagerExecutor) and engine.drafter.tree is None:
        engine.drafter.fallback = NgramSpeculator(engine.drafter.depth)  # n-grams draft until the drafter is better
    if fixed_prompts is None:
        fixed_prompts = prompts_of(engine, learn)
    try:
        learning = Learning(engine, master, learn, fixed_prompts, generations=generations, clock=clock)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.error("learning stops: out of memory; the server starts without learning")
        return engine
    if generations is not None:
        _go_on(learning, generations, number, target)
        if number is None:
            learning.served.save({"reason": "the first", "is_warm_start": is_warm_start, **asdict(origin)})
    if is_warm_start and number is None:
        log.info("learning: no drafter was given; a new one, made from the target's last layer, learns from the requests")
    return engine


def _go_on(learning: Learning, generations: Generations, number: int | None, target: ModelConfig) -> None:
    """Continues the numbering of a learn folder. `number`: the generation that was loaded."""
    served = learning.served
    served.newest = generations.newest  # even if current.json was deleted: no number is used twice
    if number:
        served.generation = number
        if generations.has(0):
            first = weights_of(load_drafter(generations.path(0), target))
            served.first_weights = {name: value.to(learning.target.device) for name, value in first.items()}


def initial_drafter_config(target: ModelConfig) -> DrafterConfig:
    """Returns the config of a new drafter. It shares the target's head, so no draft vocabulary has to be counted first."""
    few = tuple(sorted({target.num_layers // 2, target.num_layers - 1, target.num_layers}))  # the default taps need 8 layers
    aux_layers = None if target.num_layers >= 8 else few
    recipe = DrafterRecipe(draft_vocab_size=None, own_head=False, window=WINDOW, aux_layers=aux_layers)
    return drafter_config(recipe, target)


@torch.no_grad()
def _start(engine: Engine, master: EagleDrafter) -> None:
    """Initializes a new drafter from the weights of the served target's last layer."""
    assert isinstance(engine.drafter, EagleSpeculator)
    target = ServedTarget(engine.decoder, master.config.aux_layer_ids)
    vocab_size = target.vocab_size
    tokens = [(7 * place + 3) % vocab_size for place in range(64)]  # any tokens: only the states' median size is used
    taps = [tap.float().cpu() for tap in target.read([(tokens, 1)])[0].taps]
    start_from_target(master, last_layer(engine.decoder, linear_weight), target.head, engine.decoder.embed_tokens, taps)
    staged = StagedWeights(engine.drafter.network)
    for _ in staged.prepare(weights_of(master)):
        pass
    staged.apply()
