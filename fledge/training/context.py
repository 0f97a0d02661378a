"""From a recipe to the context of a run: target, data, draft vocabulary, drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fledge import sources
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.ends import fetch_ends, load_ends, load_last_layer, text_config
from fledge.checkpoints.fingerprint import target_fingerprint
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.checkpoints.tensors import read_json
from fledge.config import DrafterConfig, MLAConfig, ModelConfig, RopeConfig, default_aux_layers, is_supported
from fledge.devices import resolve_device
from fledge.errors import ModelError, UserError
from fledge.models.drafter import EagleDrafter
from fledge.tokenizer import Tokenizer
from fledge.training import toy
from fledge.training.data.loading import DataReport, data_hash, load_samples, tokenizer_hash
from fledge.training.data.samples import SampleSet
from fledge.training.data.vocabulary import DraftVocabulary
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut
from fledge.training.recipe import DataRecipe, LatentRecipe, Recipe, RecipeError
from fledge.training.targets.continuations import continuations, transformers_continuations
from fledge.training.targets.endpoint import EndpointTarget
from fledge.training.targets.target import DecoderTarget, Target, TransformersTarget, load_sharded
from fledge.training.warm_start import (
    last_layer,
    last_layer_of_transformers,
    start_from_drafter,
    start_from_target,
    start_random,
    usable,
)

Say = Callable[[str], None]


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


def resolve(recipe: Recipe, world: DistributedContext, before: Mapping[str, Any] | None = None) -> Recipe:
    """Replaces "auto" by what it comes to here; makes the toy if the recipe asks for it.

    `before`: the settings of the run that is resumed; its steps keep their size.
    """
    try:
        device = str(resolve_device(recipe.run.device))
    except UserError as error:
        raise RecipeError(f"run.device is {recipe.run.device}, but {error}") from None
    if device == "cuda" and world.size > 1:
        device = f"cuda:{world.local_rank}"
    on_gpu = device.startswith("cuda")
    dtype = "bfloat16" if on_gpu else "float32"
    compute = dtype if recipe.run.compute_dtype == "auto" else recipe.run.compute_dtype
    compiled = ("yes" if on_gpu else "no") if recipe.run.compile == "auto" else recipe.run.compile
    target = replace(recipe.target, dtype=dtype if recipe.target.dtype == "auto" else recipe.target.dtype)
    data = _batch_sizes(recipe.data, world.size, before["data"]["global_batch_size"] if before else None)
    if "toy" in (target.model, *data.train):
        folder = Path(recipe.output) / "toy"
        if world.is_first:
            toy.make(folder)
        world.barrier()
        if target.model == "toy":
            target = replace(target, model=str(folder / "target"))
        data = replace(data, train=tuple(str(folder / "answers.jsonl") if f == "toy" else f for f in data.train))
    if target.backend == "auto" and target.endpoint is None:
        known = is_supported(read_json(sources.resolve(target.model) / "config.json"))
        target = replace(target, backend="fledge" if known else "transformers")
    if recipe.run.shard_target and target.backend != "fledge":
        where = "at its endpoint" if target.endpoint is not None else "through transformers"
        raise RecipeError(
            f"run.shard_target spreads the layers of Fledge's own decoder, but this target runs {where} "
            "(target.endpoint serves a target that does not fit)"
        )
    run = replace(recipe.run, device=device, compute_dtype=compute, compile=compiled)
    return replace(recipe, target=target, data=data, run=run)


def _batch_sizes(data: DataRecipe, num_processes: int, earlier: int | None) -> DataRecipe:
    """The rows of a step, and the largest micro-batch that divides each process's share of them."""
    rows = data.global_batch_size or earlier or data.micro_batch_size * num_processes
    share, rest = divmod(rows, num_processes)
    if rest:
        raise RecipeError(
            f"data.global_batch_size: {rows} rows of a step cannot be shared equally by {num_processes} processes; "
            "use another number of them"
        )
    micro = max(size for size in range(1, min(share, data.micro_batch_size) + 1) if share % size == 0)
    return replace(data, micro_batch_size=micro, global_batch_size=rows)


def build_context(recipe: Recipe, world: DistributedContext, say: Say) -> TrainingContext:
    """`recipe` must be resolved."""
    device = torch.device(recipe.run.device)
    source = load_drafter(recipe.drafter.init_from) if recipe.drafter.init_from else None  # first: it may not be there
    folder = find_target(recipe)
    tokenizer = Tokenizer(folder)
    # One process reads and tokenises for all.
    train, held_out, prompts, report, hashes = world.on_first(lambda: _data(recipe, tokenizer, say))

    loaded = load_target(recipe, world, folder)
    target, config, shape = loaded.target, loaded.config, loaded.shape
    if config.rope != shape.rope:
        problem = MLAConfig.rope_problem(shape.rope) or "drafters have no longrope"
        say(f"the drafter gets plain positions (theta {config.rope.theta:g}): {problem}")
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{recipe.target.model}: its tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}: "
            "they do not belong together"
        )
    stop_ids = tuple(dict.fromkeys([*loaded.stop_ids, *tokenizer.eos_token_ids]))

    vocabulary, told = None, ""
    if config.draft_vocab_size < config.vocab_size:
        vocabulary = world.on_first(lambda: _vocabulary(recipe, config, train, hashes, tokenizer.special_ids))
        told = f"{vocabulary}, {vocabulary.coverage_of(held_out):.2%} of those held out"
        say(f"draft vocabulary: {told}")
    drafter = EagleDrafter(config)
    if vocabulary is not None:
        drafter.d2t.copy_(vocabulary.d2t())
    drafter.requires_grad_(True)
    start_drafter(
        recipe, drafter, target, loaded.last_layer, train.tokens[: min(256, recipe.data.sequence_length)], say, source
    )
    drafter.to(device)
    provenance = {
        "target": recipe.target.model,
        "target_fingerprint": None if recipe.target.endpoint is not None else target_fingerprint(folder),
        "data": {"files": [Path(f).name for f in recipe.data.train], **hashes, "report": str(report)},
        "draft_vocabulary": told or "the target's",
    }
    return TrainingContext(recipe, device, target, stop_ids, train, prompts, vocabulary, drafter, provenance, folder)


@dataclass(frozen=True)
class LoadedTarget:
    target: Target
    config: DrafterConfig  # of the recipe's drafter for it
    shape: Any  # its sizes: a ModelConfig, or what has its fields
    stop_ids: tuple[int, ...]
    last_layer: dict[str, Any]  # weights, see `warm_start.last_layer`


def find_target(recipe: Recipe) -> Path:
    """The folder of its files; behind an endpoint, of those with embedding, norm and head alone."""
    model = recipe.target.model
    return fetch_ends(model) if recipe.target.endpoint is not None else sources.resolve(model)


def load_target(recipe: Recipe, world: DistributedContext, folder: Path) -> LoadedTarget:
    """`recipe` must be resolved."""
    device, dtype = torch.device(recipe.run.device), getattr(torch, recipe.target.dtype)
    if recipe.target.endpoint is not None:
        shape, stop_ids = target_shape(folder)
        config = drafter_config(recipe, shape)
        target = _endpoint(recipe, folder, config, shape.num_layers)
        weights = load_last_layer(folder)
        weights = usable(weights, shape) if isinstance(shape, ModelConfig) else weights
        weights |= {"norm.weight": target.norm.weight.float().cpu()}
    elif recipe.target.backend == "fledge":
        shape = load_config(folder)
        config = drafter_config(recipe, shape)
        if sharded := recipe.run.shard_target and world.size > 1:
            decoder = load_sharded(lambda: load_decoder(folder, dtype), world, device)
        else:
            decoder = load_decoder(folder, dtype, device)
        target = DecoderTarget(decoder, config.aux_layer_ids, compile=recipe.run.compile == "yes", sharded=sharded)
        stop_ids, weights = shape.eos_token_ids, last_layer(decoder)
    else:
        model, shape = _transformers_model(folder, dtype, device)
        config = drafter_config(recipe, shape)
        target = TransformersTarget(model, config.aux_layer_ids)
        eos = model.generation_config.eos_token_id
        stop_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        weights = last_layer_of_transformers(model)
    return LoadedTarget(target, config, shape, stop_ids, weights)


def _data(
    recipe: Recipe, tokenizer: Tokenizer, say: Say
) -> tuple[SampleSet, SampleSet, list[list[int]], DataReport, dict[str, str]]:
    """(training samples, held-out samples, held-out prompts, what became of the data, its hashes)."""
    data = recipe.data
    settings = {
        "max_length": data.sequence_length,
        "long": data.long,
        "chat_template": data.chat_template,
        "remove_loops": data.remove_loops,
        "cache_dir": data.cache,
    }
    samples, report = load_samples(
        data.train, tokenizer, augmentation=data.augmentation, limit=data.limit, decontaminate=data.decontaminate, **settings
    )
    say(f"data: {report}")
    if data.held_out:
        asked, _ = load_samples(data.held_out, tokenizer, limit=4 * data.held_out_samples, **settings)
        held_out = asked
        if shared := int(np.isin(held_out.prompt_keys, samples.prompt_keys).sum()):
            say(f"held out: {shared:,} of {len(held_out):,} prompts are trained on too; data.decontaminate can leave them out")
    else:
        if samples.num_prompts < 2:
            raise UserError(
                "conversations that all begin with the same prompt cannot be split into training and held-out data: bring "
                "more, or name other ones in data.held_out"
            )
        samples, held_out = samples.split(min(data.held_out_samples, samples.num_prompts // 2), recipe.seed)
        asked = held_out.first_of_each_prompt()
        say(f"held out: {len(asked):,} prompts, with all {len(held_out):,} conversations that begin with them")
    limit = recipe.evaluation.max_prompt_tokens
    prompts = [asked.prompt(i) for i in range(len(asked))]
    short = [p for p in prompts if 1 < len(p) <= limit]
    if not short:
        raise UserError(f"no held-out prompt has at most {limit} tokens (evaluation.max_prompt_tokens)")
    if len(short) < len(prompts):
        unused = len(prompts) - len(short)
        say(f"held out: {unused:,} of {len(prompts):,} prompts left out, as longer than evaluation.max_prompt_tokens or empty")
    prompts = short[: data.held_out_samples]
    hashes = {"data_hash": data_hash(data.train), "tokenizer_hash": tokenizer_hash(tokenizer)}
    return samples, held_out, prompts, report, hashes


def drafter_config(recipe: Recipe, target: Any) -> DrafterConfig:
    """A drafter of the target's shape. `target`: a ModelConfig, or anything with its fields."""
    asked = recipe.drafter
    aux = asked.aux_layers or default_aux_layers(target.num_layers)
    if bad := [i for i in aux if not 0 <= i <= target.num_layers]:
        raise ModelError(f"drafter.aux_layers: the target has {target.num_layers} layers; it cannot be tapped after {bad}")
    if list(aux) != sorted(set(aux)):
        raise RecipeError(f"drafter.aux_layers: {list(aux)} must ascend without repetition")
    draft_vocab_size = asked.draft_vocab_size or target.vocab_size
    if not 0 < draft_vocab_size <= target.vocab_size:
        raise RecipeError(f"drafter.draft_vocab_size: {draft_vocab_size} is more than the target's {target.vocab_size} tokens")
    if not asked.own_head and draft_vocab_size != target.vocab_size:
        raise RecipeError("drafter.own_head: false shares the target's head, so draft_vocab_size must be null")
    is_31 = asked.version == "3.1"
    mla = latent_sizes(asked.mla, target) if asked.attention == "mla" else None
    rope = target.rope
    if rope.kind == "longrope" or (mla is not None and MLAConfig.rope_problem(rope)):
        rope = RopeConfig(theta=rope.theta)  # the drafter need not share the target's positions; plain ones will do
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=asked.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_heads if mla else target.num_kv_heads,
        head_dim=mla.qk_head_dim if mla else target.head_dim,
        max_positions=target.max_positions,
        aux_layer_ids=tuple(aux),
        num_layers=asked.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        fc_norm=is_31 if asked.fc_norm is None else asked.fc_norm,
        norm_output=is_31 if asked.norm_output is None else asked.norm_output,
        norm_before_fc=asked.norm_before_fc,
        norm_before_residual=asked.norm_before_residual,
        window=asked.window,
        own_embedding=asked.own_embedding,
        own_head=asked.own_head,
        qk_norm=asked.qk_norm,
        mla=mla,
    )


def latent_sizes(asked: LatentRecipe, target: Any) -> MLAConfig:
    """What the recipe says, else the target's own sizes, else DeepSeek's with heads as wide as the target's."""
    usual = MLAConfig(
        kv_lora_rank=512,
        qk_nope_head_dim=target.head_dim,
        qk_rope_head_dim=64,
        v_head_dim=target.head_dim,
        q_lora_rank=min(1536, target.hidden_size),
    )
    given = {name: size for name, size in asdict(asked).items() if size is not None}
    sizes = replace(getattr(target, "mla", None) or usual, **given)
    return replace(sizes, q_lora_rank=sizes.q_lora_rank or None)


@dataclass(frozen=True)
class _Shape:
    """What `drafter_config` needs of an architecture that we do not know."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    mla: MLAConfig | None = None


def _transformers_model(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, _Shape]:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, trust_remote_code=False).to(device)
    except Exception as error:  # transformers raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder}: transformers cannot load it ({reason})") from error
    text = model.config.get_text_config()
    return model, _shape(text, text.to_dict(), model.get_input_embeddings().weight.shape[0])


def _endpoint(recipe: Recipe, folder: Path, config: DrafterConfig, num_layers: int) -> EndpointTarget:
    asked = recipe.target
    ends = load_ends(folder, getattr(torch, asked.dtype), torch.device(recipe.run.device))
    target = EndpointTarget(
        asked.endpoint,
        ends,
        text_config(folder),
        config.aux_layer_ids,
        num_layers,
        model=asked.model,
        storage=asked.endpoint_states,
        requests=asked.endpoint_requests,
    )
    target.require_length(recipe.data.sequence_length)
    return target


def target_shape(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """The target's sizes and stop tokens by its files alone, whatever its architecture."""
    content = text_config(folder)
    if is_supported(content):
        shape = ModelConfig.from_hf(content, name=str(folder))
    else:
        try:
            shape = _shape(SimpleNamespace(**content), content, int(content["vocab_size"]))
        except (AttributeError, KeyError) as error:
            raise ModelError(f"{folder}: config.json does not say the model's sizes ({error})") from None
    said = content.get("eos_token_id")
    if (folder / "generation_config.json").exists():
        said = read_json(folder / "generation_config.json").get("eos_token_id", said)
    return shape, tuple(said) if isinstance(said, list) else (() if said is None else (said,))


def _shape(text: Any, content: dict[str, Any], vocab_size: int) -> _Shape:
    try:
        rope = RopeConfig.from_hf(content)
    except ModelError:  # the drafter need not share the target's positions; plain ones will do
        rope = RopeConfig()
    heads = text.num_attention_heads
    return _Shape(
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_positions=getattr(text, "max_position_embeddings", None) or 8192,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        rope=rope,
        mla=_latent_sizes_of(text),
    )


def _latent_sizes_of(text: Any) -> MLAConfig | None:
    sizes = {f.name: getattr(text, f.name, None) for f in fields(MLAConfig)}
    return MLAConfig(**sizes) if all(sizes[name] for name in sizes if name != "q_lora_rank") else None


def _vocabulary(
    recipe: Recipe,
    config: DrafterConfig,
    train: SampleSet,
    hashes: dict[str, str],
    special_ids: Sequence[int],
) -> DraftVocabulary:
    own = Path(recipe.output) / "vocabulary"
    given = recipe.data.vocabulary
    if given or own.with_name("vocabulary.json").exists():
        vocabulary = DraftVocabulary.load(given or own)
        vocabulary.check(vocab_size=config.vocab_size, tokenizer_hash=hashes["tokenizer_hash"])
        if given:
            vocabulary = vocabulary.for_data(train, hashes["data_hash"])  # counted elsewhere: that is what was asked for
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
    say: Say,
    source: EagleDrafter | None = None,
) -> None:
    """`tokens`: some of the data, to measure the target's states by. `source`: the drafter of `init_from`, if loaded."""
    head, embedding = target.head, target.embedding
    sample = [int(token) for token in tokens]
    states = HeldOut.of(target, [sample], [1], head.weight.device).states
    taps = [x[: len(sample)].float().cpu() for x in states.taps]
    if recipe.drafter.init_from:
        source = source or load_drafter(recipe.drafter.init_from)
        with torch.no_grad():
            start_random(drafter, head, embedding, recipe.seed)
        new = start_from_drafter(drafter, source, head, embedding, taps)
        say(f"starting from {recipe.drafter.init_from}" + (f"; new: {', '.join(new)}" if new else ""))
    elif recipe.drafter.init == "target":
        copied = start_from_target(drafter, weights, head, embedding, taps, recipe.seed)
        say(f"starting from the target's last layer: {', '.join(copied)}")
        if not {"qkv_proj", "qkv_a_proj"}.intersection(copied):
            say("the drafter's queries, keys and values start at random: the target's attention is of another kind or size")
    else:
        start_random(drafter, head, embedding, recipe.seed)


def greedy_answers(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]
) -> list[list[int]]:
    if isinstance(target, DecoderTarget):
        return continuations(target.decoder, prompts, max_new_tokens, stop_ids)
    if isinstance(target, EndpointTarget):
        return target.continuations(prompts, max_new_tokens, stop_ids)
    return transformers_continuations(target.model, prompts, max_new_tokens, stop_ids)


def held_out_texts(context: TrainingContext) -> HeldOut:
    """The target's greedy answers to the held-out prompts, and its states over them."""
    target = context.target
    answers = greedy_answers(target, context.prompts, context.recipe.evaluation.max_new_tokens, context.stop_ids)
    texts = [[*prompt, *answer] for prompt, answer in zip(context.prompts, answers, strict=True)]
    held_out = HeldOut.of(target, texts, [len(prompt) for prompt in context.prompts], context.device)
    # A target that runs elsewhere, or as another library's module, hides its attention: column 0, unless told otherwise.
    if isinstance(target, DecoderTarget) and context.recipe.evaluation.sink_column is None:
        held_out = held_out.with_sink(target.decoder)
    return held_out
