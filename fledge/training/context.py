"""Builds the context of a run from its recipes: target, data, draft vocabulary, drafters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fledge import sources
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.fingerprint import target_fingerprint
from fledge.checkpoints.tensors import read_json
from fledge.config import DrafterConfig, MLAConfig, is_supported
from fledge.devices import resolve_device
from fledge.errors import ModelError, UserError
from fledge.models.drafter import EagleDrafter
from fledge.tokenizer import Tokenizer
from fledge.training.data.loading import DataReport, data_hash, load_samples, tokenizer_hash
from fledge.training.data.samples import SampleSet
from fledge.training.data.vocabulary import DraftVocabulary
from fledge.training.distributed import DistributedContext
from fledge.training.drafter import drafter_config, start_from_drafter, start_from_target, start_random
from fledge.training.evaluate import HeldOut
from fledge.training.recipe import DataRecipe, Recipe, RecipeError
from fledge.training.targets import toy
from fledge.training.targets.loading import find_target, load_target
from fledge.training.targets.target import DecoderTarget, Target

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainingContext:
    recipe: Recipe  # resolved
    device: torch.device
    target: Target
    stop_ids: tuple[int, ...]
    train: SampleSet
    prompts: list[list[int]]
    vocabulary: DraftVocabulary | None
    drafter: EagleDrafter
    provenance: dict[str, Any]
    target_folder: Path


def resolve(recipe: Recipe, dist: DistributedContext, before: Mapping[str, Any] | None = None) -> Recipe:
    """Replaces each "auto" by its value on this machine, and makes the toy model if the recipe asks for it.

    `before`: the settings of the run that is resumed; the batch size of its steps is kept.
    """
    try:
        device = str(resolve_device(recipe.run.device))
    except UserError as error:
        raise RecipeError(f"run.device is {recipe.run.device}, but {error}") from None
    if device == "cuda" and dist.size > 1:
        device = f"cuda:{dist.local_rank}"
    on_gpu = device.startswith("cuda")
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    compute = dtype if recipe.run.compute_dtype == "auto" else recipe.run.compute_dtype
    compiled = ("yes" if on_gpu else "no") if recipe.run.compile == "auto" else recipe.run.compile
    target = replace(recipe.target, dtype=dtype if recipe.target.dtype == "auto" else recipe.target.dtype)
    data = _batch_sizes(recipe.data, dist.size, before["data"]["global_batch_size"] if before else None)
    if "toy" in (target.model, *data.train):
        folder = Path(recipe.output) / "toy"
        if dist.is_first:
            toy.make(folder)
        dist.barrier()
        if target.model == "toy":
            target = replace(target, model=str(folder / "target"))
        data = replace(data, train=tuple(str(folder / "answers.jsonl") if f == "toy" else f for f in data.train))
    if target.backend == "auto" and target.endpoint is None:
        known = is_supported(read_json(sources.resolve(target.model) / "config.json"))
        target = replace(target, backend="fledge" if known else "transformers")
    if recipe.run.shard_target and target.backend != "fledge":
        where = "at its endpoint" if target.endpoint is not None else "through transformers"
        raise RecipeError(
            f"run.shard_target distributes the layers of Fledge's own decoder, but this target runs {where}; for a target "
            "that does not fit, use target.endpoint"
        )
    run = replace(recipe.run, device=device, compute_dtype=compute, compile=compiled)
    return replace(recipe, target=target, data=data, run=run)


def _batch_sizes(data: DataRecipe, num_processes: int, earlier: int | None) -> DataRecipe:
    """Sets the rows of a step, and the largest micro-batch size that divides each process's share of them."""
    rows = data.global_batch_size or earlier or data.micro_batch_size * num_processes
    share, rest = divmod(rows, num_processes)
    if rest:
        raise RecipeError(
            f"data.global_batch_size: {rows} rows per step cannot be divided equally among {num_processes} processes; "
            "use a multiple of the number of processes"
        )
    micro = max(size for size in range(1, min(share, data.micro_batch_size) + 1) if share % size == 0)
    return replace(data, micro_batch_size=micro, global_batch_size=rows)


def build_contexts(recipes: Sequence[Recipe], dist: DistributedContext, log: Log) -> list[TrainingContext]:
    """Builds a context for each recipe, with its own drafter; target, data and draft vocabulary are shared. The recipes must
    be resolved, and equal in what they share (`recipe.arm_recipes`)."""
    recipe = recipes[0]
    device = torch.device(recipe.run.device)
    # First, because a file may be missing, and the target takes long to load.
    sources_of = [load_drafter(one.drafter.init_from) if one.drafter.init_from else None for one in recipes]
    folder = find_target(recipe)
    tokenizer = Tokenizer(folder)
    # Only the first process reads and tokenises the data; the others receive the result.
    train, held_out, prompts, report, hashes = dist.on_first(lambda: _data(recipe, tokenizer, log))

    loaded = load_target(recipe, dist, folder)
    target, config, shape = loaded.target, loaded.config, loaded.shape
    if config.rope != shape.rope:
        problem = MLAConfig.rope_problem(shape.rope) or "drafters have no longrope"
        log(f"the drafter gets plain positions (theta {config.rope.theta:g}): {problem}")
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{recipe.target.model}: its tokenizer has {tokenizer.vocab_size} tokens, but the model only {config.vocab_size}: "
            "they do not belong together"
        )
    stop_ids = tuple(dict.fromkeys([*loaded.stop_ids, *tokenizer.eos_token_ids]))

    vocabulary, counted = None, None  # None: the target's vocabulary
    if config.draft_vocab_size < config.vocab_size:
        vocabulary = dist.on_first(lambda: _vocabulary(recipe, config, train, hashes, tokenizer.special_ids))
        counted = {"size": len(vocabulary), "coverage": vocabulary.coverage, "held_out": vocabulary.coverage_of(held_out)}
        log(f"draft vocabulary: {vocabulary}, {counted['held_out']:.2%} of the held-out ones")
    some = train.tokens[: min(256, recipe.data.sequence_length)]
    drafters = []
    for one, source in zip(recipes, sources_of, strict=True):
        drafter = EagleDrafter(drafter_config(one.drafter, shape))
        if vocabulary is not None:
            drafter.d2t.copy_(vocabulary.d2t())
        drafter.requires_grad_(True)
        start_drafter(one, drafter, target, loaded.last_layer, some, log, source)
        drafters.append(drafter.to(device))
    provenance = {
        "target": recipe.target.model,
        "target_fingerprint": None if recipe.target.endpoint is not None else target_fingerprint(folder),
        "data": {
            "files": [Path(f).name for f in recipe.data.train],
            **hashes,
            "conversations": report.kept,
            "tokens": report.tokens,
            "answer_tokens": report.answer_tokens,
            "report": str(report),
        },
        "draft_vocabulary": counted,
        "target_positions": shape.max_positions,  # with longrope, the context length selects the factors
    }
    return [
        TrainingContext(one, device, target, stop_ids, train, prompts, vocabulary, drafter, provenance, folder)
        for one, drafter in zip(recipes, drafters, strict=True)
    ]


def _data(
    recipe: Recipe, tokenizer: Tokenizer, log: Log
) -> tuple[SampleSet, SampleSet, list[list[int]], DataReport, dict[str, str]]:
    """Returns (training samples, held-out samples, held-out prompts, data report, hashes)."""
    data = recipe.data
    load = partial(
        load_samples,
        tokenizer=tokenizer,
        max_length=data.sequence_length,
        long=data.long,
        chat_template=data.chat_template,
        remove_loops=data.remove_loops,
        cache_dir=data.cache,
    )
    augmentation = data.augmentation
    samples, report = load(data.train, augmentation=augmentation, limit=data.limit, decontaminate=data.decontaminate)
    log(f"data: {report}")
    if data.held_out:
        asked, _ = load(data.held_out, limit=4 * data.held_out_samples)
        held_out = asked
        if shared := int(np.isin(held_out.prompt_keys, samples.prompt_keys).sum()):
            log(f"held out: {shared:,} of {len(held_out):,} prompts are trained on too; data.decontaminate can leave them out")
    else:
        if samples.num_prompts < 2:
            raise UserError(
                "all conversations begin with the same prompt, so they cannot be split into training and held-out data: add "
                "more, or give held-out files in data.held_out"
            )
        samples, held_out = samples.split(min(data.held_out_samples, samples.num_prompts // 2), recipe.seed)
        asked = held_out.first_of_each_prompt()
        log(f"held out: {len(asked):,} prompts, with all {len(held_out):,} conversations that begin with them")
    limit = recipe.evaluation.max_prompt_tokens
    prompts = [sample.prompt.tolist() for sample in asked]
    short = [p for p in prompts if 1 < len(p) <= limit]
    if not short:
        raise UserError(f"no held-out prompt has at most {limit} tokens (evaluation.max_prompt_tokens)")
    if len(short) < len(prompts):
        unused = len(prompts) - len(short)
        log(f"held out: {unused:,} of {len(prompts):,} prompts skipped (longer than evaluation.max_prompt_tokens, or empty)")
    prompts = short[: data.held_out_samples]
    hashes = {"data_hash": data_hash(data.train), "tokenizer_hash": tokenizer_hash(tokenizer)}
    return samples, held_out, prompts, report, hashes


def _vocabulary(
    recipe: Recipe,
    config: DrafterConfig,
    train: SampleSet,
    hashes: dict[str, str],
    special_ids: Collection[int],
) -> DraftVocabulary:
    own = Path(recipe.output) / "vocabulary"
    given = recipe.data.vocabulary
    if given or own.with_name("vocabulary.json").exists():
        vocabulary = DraftVocabulary.load(given or own)
        vocabulary.check(vocab_size=config.vocab_size, tokenizer_hash=hashes["tokenizer_hash"])
        if given:
            vocabulary = vocabulary.for_data(train, hashes["data_hash"])  # a given vocabulary may come from other data
        else:
            vocabulary.check(data_hash=hashes["data_hash"])
        if len(vocabulary) != config.draft_vocab_size:
            raise UserError(
                f"{given or own}: the draft vocabulary has {len(vocabulary)} tokens, the recipe asks for "
                f"{config.draft_vocab_size}; use another output folder, or put draft_vocab_size back"
            )
    else:
        vocabulary = DraftVocabulary.count(train, config.draft_vocab_size, config.vocab_size, always=special_ids, **hashes)
    return vocabulary


def start_drafter(
    recipe: Recipe,
    drafter: EagleDrafter,
    target: Target,
    weights: dict[str, Any],
    tokens: Sequence[int],
    log: Log,
    source: EagleDrafter | None,
) -> None:
    """Initializes a drafter. `tokens`: data on which the target's states are measured. `source`: the drafter of `init_from`."""
    head, embedding = target.head, target.embedding
    sample = [int(token) for token in tokens]
    (text,) = HeldOut.of(target, [sample], [1], head.weight.device).texts
    taps = [tap.float().cpu() for tap in text.taps]
    if source is not None:
        start_random(drafter, head, embedding, recipe.seed)
        new = start_from_drafter(drafter, source, head, embedding, taps)
        log(f"starting from {recipe.drafter.init_from}" + (f"; new: {', '.join(new)}" if new else ""))
    elif recipe.drafter.init == "target":
        copied = start_from_target(drafter, weights, head, embedding, taps, recipe.seed)
        log(f"starting from the target's last layer: {', '.join(copied)}")
        if not {"qkv_proj", "qkv_a_proj"}.intersection(copied):
            log("the drafter's queries, keys and values start at random: the target's attention has another type or size")
    else:
        start_random(drafter, head, embedding, recipe.seed)


def held_out_texts(context: TrainingContext) -> HeldOut:
    """Returns the target's greedy answers to the held-out prompts, with its states."""
    target = context.target
    answers = target.continuations(context.prompts, context.recipe.evaluation.max_new_tokens, context.stop_ids)
    texts = [[*prompt, *answer] for prompt, answer in zip(context.prompts, answers, strict=True)]
    held_out = HeldOut.of(target, texts, [len(prompt) for prompt in context.prompts], context.device)
    # The attention of a target at an endpoint or in transformers is not accessible: the sink is column 0 unless configured.
    if isinstance(target, DecoderTarget) and context.recipe.evaluation.sink_column is None:
        held_out = held_out.with_sink(target.decoder)
    return held_out
