"""The settings of a training run: a YAML file and `key=value` overrides, checked by pydantic. Unknown keys are errors."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticUndefined

from fledge.errors import UserError
from fledge.training.data.templates import Augmentation


class RecipeError(UserError):
    """A recipe that cannot be used. The message names the key."""


def _number(value: Any) -> Any:
    """Converts text such as 1e-3, which YAML does not read as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _word(value: Any) -> Any:
    """Converts values back to text that YAML reads as a number (3.1) or as a boolean (no)."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | float) else value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError(f"{value!r} must be auto, cpu, cuda, or cuda:N")
    return value


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[Integer, Field(ge=1)]
NotNegative = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]
AboveZero = Annotated[Number, Field(gt=0, le=1)]
Files = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_listed)]
Word = BeforeValidator(_word)

_STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def key(default: Any, meaning: str) -> Any:
    return Field(default=default, description=meaning)


@dataclass(frozen=True, config=_STRICT)
class TargetRecipe:
    """The model that the drafter will draft for."""

    model: Annotated[str, Field(description="folder, hub id or built-in name; toy: a tiny model, made by the run itself")]
    backend: Literal["auto", "fledge", "transformers"] = key("auto", "auto: Fledge's decoder where it knows the architecture")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "auto: bfloat16 on a GPU, else float32")
    endpoint: str | None = key(None, "URL of a vLLM server that runs the target, http://host:8000/v1; model names its files")
    endpoint_states: str | None = key(
        None, "the server's shared_storage_path as mounted on this machine, a folder or a URL; null: /dev/shm/states"
    )
    endpoint_requests: Count = key(32, "concurrent requests to the endpoint, per process")


@dataclass(frozen=True, config=_STRICT)
class LatentRecipe:
    """Sizes of latent attention (MLA); null: the target's sizes if it uses MLA, else the usual ones."""

    kv_lora_rank: Count | None = key(None, "usual: 512, as in DeepSeek and Kimi, for which servers have kernels")
    qk_rope_head_dim: Count | None = key(None, "usual: 64")
    q_lora_rank: NotNegative | None = key(None, "usual: 1536, or the hidden size if less; 0: none, which only Fledge serves")
    qk_nope_head_dim: Count | None = key(None, "usual: the target's head size")
    v_head_dim: Count | None = key(None, "usual: the target's head size")


@dataclass(frozen=True, config=_STRICT)
class DrafterRecipe:
    """The drafter's architecture and where its weights start."""

    version: Annotated[Literal["3", "3.1"], Word] = key("3.1", "EAGLE version; sets fc_norm and norm_output")
    fc_norm: Flag | None = key(None, "a norm on each captured target state; null: by version")
    norm_output: Flag | None = key(None, "feed back the state after the final norm; null: by version")
    norm_before_residual: Flag = key(False, "the residual stream starts from the normed state")
    norm_before_fc: Flag = key(False, "one norm over all captured states together")
    aux_layers: Annotated[tuple[NotNegative, ...], BeforeValidator(_listed)] | None = key(
        None, "target layers whose states are captured; null: (2, L//2, L-3)"
    )
    num_layers: Count = key(1, "layers of the drafter")
    intermediate_size: Count | None = key(None, "size of the MLP; null: the target's")
    draft_vocab_size: Count | None = key(16384, "tokens that the drafter can predict; null: the target's whole vocabulary")
    window: Count | None = key(None, "attend only to this many last tokens; null: to all")
    attention: Literal["gqa", "mla"] = key("gqa", "like the target's heads, or latent (DeepSeek, Kimi)")
    mla: LatentRecipe = field(default_factory=LatentRecipe)
    qk_norm: Flag = key(False, "norms on queries and keys, as in Qwen3")
    own_head: Flag = key(True, "a head of its own; false: the target's")
    own_embedding: Flag = key(False, "an embedding of its own; false: the target's")
    init: Literal["target", "random"] = key("target", "start from the target's last layer, or at random")
    init_from: str | None = key(None, "a drafter to continue from, of any version; overrides init")


@dataclass(frozen=True, config=_STRICT)
class DataRecipe:
    """Data for training and evaluation."""

    train: Annotated[Files, Field(description="chat files (.jsonl, .jsonl.gz); toy: made by the run itself")]
    held_out: Files = key((), "chat files to evaluate on; none: held_out_samples prompts are taken out of train")
    held_out_samples: Count = key(64, "prompts to evaluate on")
    decontaminate: Files = key((), "files of prompts; conversations that share 13 words in a row with one are left out")
    sequence_length: Annotated[Integer, Field(ge=2)] = key(2048, "tokens of a packed row, and of the longest sample")
    micro_batch_size: Count = key(16, "most rows per pass on each GPU; lower it when memory runs out")
    global_batch_size: Count | None = key(
        None, "rows of an optimizer step over all GPUs; null: micro_batch_size x number of GPUs"
    )
    long: Literal["truncate", "drop"] = key("truncate", "samples longer than sequence_length: cut at their end, or left out")
    remove_loops: Flag = key(True, "cut answers where they begin to repeat themselves")
    position_offset_max: NotNegative = key(0, "each document's positions start at a random offset up to this")
    chat_template: str | None = key(None, "a Jinja template; null: the tokenizer's")
    limit: Count | None = key(None, "conversations to read; null: all")
    vocabulary: str | None = key(
        None, "an existing draft vocabulary, counted on any data; null: counted on train and saved in output"
    )
    cache: str | None = key(None, "folder for tokenised data; null: tokenised at each start")
    augmentation: Augmentation = field(default_factory=Augmentation)


@dataclass(frozen=True, config=_STRICT)
class ObjectiveRecipe:
    """The training objective."""

    ttt_steps: Count = key(5, "draft steps unrolled in training (training-time test)")
    decay: AboveZero = key(0.8, "the loss of draft step j is weighted by decay^j")
    loss: Literal["kl", "lk", "mix"] = key("kl", "cross-entropy, -log acceptance probability, or both")
    lk_weight: Share = key(0.5, "weight of lk in mix")
    outside_vocabulary: Literal["mask", "renormalise"] = key(
        "mask", "tokens outside the draft vocabulary: no loss there, or the target's distribution over the rest"
    )
    chunk_rows: Count | None = key(None, "positions scored at once; null: by the size of the draft vocabulary")
    recompute: Flag = key(False, "recompute activations in the backward pass: less memory, a third more time")


@dataclass(frozen=True, config=_STRICT)
class OptimizerRecipe:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = key("adamw", "muon: for the layers' matrices, adamw for the rest")
    learning_rate: Positive = key(1e-3, "peak learning rate")
    muon_learning_rate: Positive | None = key(None, "null: learning_rate")
    betas: tuple[BelowOne, BelowOne] = key((0.9, 0.95), "of AdamW")
    weight_decay: Annotated[Number, Field(ge=0)] = key(0.0, "of matrices; norms and biases have none")
    max_grad_norm: Positive | None = key(0.5, "gradients are clipped to this norm; null: no clipping")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = key("cosine", "learning rate schedule after the warm-up")
    warmup: BelowOne = key(0.02, "share of the run")
    decay: AboveZero = key(0.2, "wsd: share of the run")
    floor: Share = key(0.0, "share of the peak that is left at the end")


@dataclass(frozen=True, config=_STRICT)
class RunRecipe:
    """Length of the run, device and intervals. Set at least one of steps, epochs, max_seconds; the first reached ends it."""

    steps: Count | None = key(None, "optimizer steps")
    epochs: Positive | None = key(None, "passes over the data")
    max_seconds: Positive | None = key(None, "seconds from the first step on, including evaluations and checkpoints")
    log_every: Count = key(20, "steps between log lines")
    save_every: Count = key(500, "steps between checkpoints")
    save_seconds: Positive | None = key(None, "also save after at most this many seconds of training")
    keep: Count = key(2, "checkpoints kept")
    evaluate_every: Count = key(500, "steps between evaluations")
    evaluate_seconds: Positive | None = key(None, "also evaluate after at most this many seconds of training")
    patience: Count | None = key(None, "stop after this many evaluations without a better acceptance length; null: never")
    device: Annotated[str, AfterValidator(_device)] = key("auto", "auto, cpu, cuda, cuda:1 ...")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = key("auto", "auto: bfloat16 on a GPU, else float32")
    compile: Annotated[Literal["auto", "yes", "no"], Word] = key("auto", "torch.compile; auto: on a GPU")
    shard_target: Flag = key(False, "with torchrun: shard the target's layers over the GPUs (FSDP)")
    hidden_states: Literal["online", "offline"] = key("online", "offline: the target runs once, its states are stored on disk")
    hidden_states_folder: str | None = key(None, "folder for offline states; null: output/states")


@dataclass(frozen=True, config=_STRICT)
class EvaluationRecipe:
    """Evaluation: acceptance in actual drafting on the held-out prompts."""

    depths: Counts = key((3, 5, 7), "draft depths")
    select_depth: Integer = key(5, "the best checkpoint is chosen by the acceptance length at this depth")
    max_new_tokens: Count = key(128, "of the target's answers")
    max_prompt_tokens: Annotated[Integer, Field(ge=2)] = key(1024, "longer prompts are not used")
    sink_column: NotNegative | None = key(None, "the target's attention sink; null: found from its attention")


@dataclass(frozen=True, config=_STRICT)
class Recipe:
    """A training run."""

    output: Annotated[str, Field(description="folder of the run: checkpoints, logs, curves, the best drafter")]
    target: TargetRecipe
    data: DataRecipe
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = key(0, "of weights, shuffling and sampling")
    drafter: DrafterRecipe = field(default_factory=DrafterRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        """Checks that concern more than one key."""
        drafter, run, data, evaluation = self.drafter, self.run, self.data, self.evaluation
        if run.steps is None and run.epochs is None and run.max_seconds is None:
            raise ValueError("run has no end: set steps, epochs or max_seconds")
        if not data.train:
            raise ValueError("data.train has no files")
        if self.target.endpoint is not None and self.target.backend != "auto":
            raise ValueError("target.backend (run the target locally) and target.endpoint (use a server) exclude each other")
        if drafter.aux_layers == ():
            raise ValueError("drafter.aux_layers is empty; null selects the three default layers")
        if evaluation.sink_column is not None and evaluation.sink_column >= evaluation.max_prompt_tokens:
            raise ValueError(
                f"evaluation.sink_column {evaluation.sink_column} must be less than evaluation.max_prompt_tokens "
                f"({evaluation.max_prompt_tokens})"
            )
        if evaluation.select_depth not in evaluation.depths:
            raise ValueError(f"evaluation.select_depth {evaluation.select_depth} is not among depths {evaluation.depths}")
        if drafter.window is not None and drafter.window <= max(*evaluation.depths, self.objective.ttt_steps):
            raise ValueError("drafter.window must be larger than the number of draft steps trained and evaluated")
        if drafter.attention != "mla" and drafter.mla != LatentRecipe():
            raise ValueError("drafter.mla sets sizes of latent attention, so it also needs drafter.attention: mla")
        if drafter.attention == "mla" and drafter.qk_norm:
            raise ValueError("drafter.qk_norm goes with drafter.attention: gqa; latent attention has its own norms")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe. `overrides`: dotted keys with YAML values, as in `optimizer.learning_rate=5e-4`."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such recipe")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, found {type(content).__name__}")
    return build_recipe(_overridden(content, overrides))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    return build_recipe(_overridden(recipe.to_dict(), overrides))


def _overridden(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        _override(content, override)
    return content


def _override(content: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise RecipeError(f"{override!r}: overrides are written key=value, for example run.steps=1000")
    place = content
    *parents, last = name.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise RecipeError(f"{name}: {parent} has no keys of its own")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"{override!r}: the value is not YAML") from None


def build_recipe(content: Mapping[str, Any]) -> Recipe:
    """Builds a recipe from nested keys and values. The error message names all mistakes."""
    try:
        return TypeAdapter(Recipe).validate_python(content)
    except ValidationError as error:
        raise RecipeError("; ".join(dict.fromkeys(map(_describe, error.errors())))) from None


def _describe(problem: Mapping[str, Any]) -> str:
    place = [part for part in problem["loc"] if isinstance(part, str)]
    where, kind, value = ".".join(place), problem["type"], problem["input"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(place)
    if kind in ("missing", "missing_argument"):
        return f"{'.'.join(map(str, problem['loc']))}: missing"
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"{where or 'the recipe'}: expected keys and values, found {value!r}"
    if kind == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    message = re.sub(r"^(Input|String|Tuple) should", "must", problem["msg"])
    return f"{where} {message}, not {value!r}" if message != problem["msg"] else f"{where}: {message}, not {value!r}"


def _unknown_key(place: list[str]) -> str:
    name = ".".join(place)
    section: Any = Recipe
    for part in place[:-1]:
        section = typing.get_type_hints(section)[part]
    known = list(section.__pydantic_fields__)
    near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*place[:-1], near[0]])}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {name}; {hint}"


def describe_keys() -> str:
    """Returns every key with its default and meaning, as a YAML file with comments."""
    return "\n".join(_key_lines(Recipe, "")) + "\n"


def _key_lines(section: Any, indent: str) -> Iterator[str]:
    for name, info in section.__pydantic_fields__.items():
        kind = typing.get_type_hints(section)[name]
        if is_dataclass(kind):
            yield f"{indent}{name}:  # {(kind.__doc__ or '').splitlines()[0]}"
            yield from _key_lines(kind, indent + "  ")
            continue
        default = "(required)" if info.default is PydanticUndefined else _in_yaml(info.default)
        allowed = _choices(kind)
        yield f"{indent}{name}: {default}  # {info.description}" + (f" [{', '.join(allowed)}]" if allowed else "")


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _in_yaml(value: Any) -> str:
    return yaml.safe_dump(_plain(value), default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip()


def _plain(value: Any) -> Any:
    """Converts tuples to lists, because YAML would tag tuples."""
    return json.loads(json.dumps(value))


def flat_settings(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flat_settings(value, f"{where}{name}.") if isinstance(value, Mapping) else {where + name: value}
    return flat


# --- arms -------------------------------------------------------------------------------------------------------------

# Sections in which arms may differ, and keys in them that must be equal: the target's pass and the batches depend on these.
OWN = ("drafter", "objective", "optimizer")
SHARED = (
    *("drafter.aux_layers", "drafter.draft_vocab_size"),
    *("objective.ttt_steps", "objective.outside_vocabulary", "objective.chunk_rows"),
)


def arm_recipes(recipe: Recipe, arms: Sequence[str]) -> list[Recipe]:
    """Parses arms, each `NAME=KEY=VALUE …`: the recipe with these keys, in a folder NAME of the output folder."""
    recipes: dict[str, Recipe] = {}
    for text in arms:
        name, equals, keys = text.partition("=")
        if not equals or not name or Path(name).name != name:
            raise RecipeError(f"--arms {text!r}: write NAME=KEY=VALUE with a plain NAME, as in eagle3=drafter.version=3")
        if name in recipes:
            raise RecipeError(f"--arms: {name} is given twice")
        recipes[name] = with_overrides(recipe, shlex.split(keys))
        was, now = flat_settings(recipe.to_dict()), flat_settings(recipes[name].to_dict())
        changed = [key for key, value in now.items() if value != was[key]]
        if refused := [key for key in changed if key.partition(".")[0] not in OWN or key in SHARED]:
            raise RecipeError(
                f"--arms {name}: {', '.join(refused)} must be the same in all arms, which share target, data and batches; "
                "set it for all of them"
            )
    if recipe.run.patience is not None:
        raise RecipeError("run.patience cannot be used with --arms, because all arms end at the same step; leave it out")
    return [replace(one, output=str(Path(recipe.output) / name)) for name, one in recipes.items()]
