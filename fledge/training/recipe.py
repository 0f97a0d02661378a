"""A training run's settings: a YAML file and `key=value` overrides into frozen dataclasses. Unknown keys are refused."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from fledge.errors import UserError
from fledge.training.templates import Augmentation


class RecipeError(UserError):
    """A recipe that cannot be used; names the key."""


@dataclass(frozen=True)
class Range:
    """What a number may be, both ends included unless `open` says that one of them is not."""

    least: float
    most: float = math.inf
    open: Literal["", "least", "most"] = ""

    def __contains__(self, value: float) -> bool:
        is_open_end = (self.open == "least" and value == self.least) or (self.open == "most" and value == self.most)
        return self.least <= value <= self.most and value != math.inf and not is_open_end

    def __str__(self) -> str:
        low = f"{'above' if self.open == 'least' else 'at least'} {self.least}"
        high = f"{'below' if self.open == 'most' else 'at most'} {self.most}"
        return low if self.most == math.inf else f"{low} and {high}"


Count = Annotated[int, Range(1)]
NotNegative = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open="least")]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, open="most")]
AboveZero = Annotated[float, Range(0, 1, open="least")]  # and at most 1


@dataclass(frozen=True)
class TargetRecipe:
    model: str  # folder, hub id, built-in name; "toy": a tiny one, made on the spot
    backend: Literal["auto", "fledge", "transformers"] = "auto"  # auto: ours where it knows the architecture
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on a GPU, else float32
    endpoint: str | None = None  # a vLLM server that runs the target, http://host:8000/v1; `model` gives its ends alone
    endpoint_states: str | None = None  # the server's folder as seen from here, or its URL; None: /dev/shm/states
    endpoint_requests: Count = 32  # at a time, of each process


@dataclass(frozen=True)
class LatentRecipe:
    """Sizes of latent attention. None: the target's where it has such attention itself, else as the comments say."""

    kv_lora_rank: Count | None = None  # 512, and
    qk_rope_head_dim: Count | None = None  # 64: as in DeepSeek and Kimi, for whose sum servers have kernels
    q_lora_rank: NotNegative | None = None  # 1536, or the hidden size if less; 0: none, which no server but this one reads
    qk_nope_head_dim: Count | None = None  # the target's head
    v_head_dim: Count | None = None  # the target's head


@dataclass(frozen=True)
class DrafterRecipe:
    version: Literal["3", "3.1"] = "3.1"
    fc_norm: bool | None = None  # None: by version; the two fixes of 3.1, one by one
    norm_output: bool | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    aux_layers: tuple[NotNegative, ...] | None = None  # None: (2, L//2, L−3)
    num_layers: Count = 1
    intermediate_size: Count | None = None  # None: the target's
    draft_vocab_size: Count | None = 16384  # None: the target's whole vocabulary
    window: Count | None = None  # attend to the last so many tokens only
    attention: Literal["gqa", "mla"] = "gqa"  # like the target's heads, or latent (DeepSeek, Kimi)
    mla: LatentRecipe = field(default_factory=LatentRecipe)
    qk_norm: bool = False  # norms on queries and keys, as in Qwen3
    own_head: bool = True
    own_embedding: bool = False
    init: Literal["target", "random"] = "target"
    init_from: str | None = None  # a drafter to go on from, whatever its version


@dataclass(frozen=True)
class DataRecipe:
    train: tuple[str, ...]  # chat JSONL; "toy": made on the spot
    held_out: tuple[str, ...] = ()  # prompts to evaluate on; none: `held_out_samples` are taken from the training data
    held_out_samples: Count = 64
    avoid: tuple[str, ...] = ()  # files of prompts; conversations that share a run of words with one of them are left out
    sequence_length: Annotated[int, Range(2)] = 2048  # a first token cannot be predicted
    batch_rows: Count = 16
    long: Literal["chunk", "drop"] = "chunk"
    remove_loops: bool = True
    position_offset_max: NotNegative = 0
    chat_template: str | None = None
    limit: Count | None = None  # conversations to read
    vocabulary: str | None = None  # a draft vocabulary counted before; None: counted, and kept in the output folder
    cache: str | None = None  # folder for tokenised data
    augmentation: Augmentation = field(default_factory=Augmentation)


@dataclass(frozen=True)
class ObjectiveRecipe:
    ttt_steps: Count = 5
    decay: AboveZero = 0.8
    loss: Literal["kl", "lk", "mix"] = "kl"
    lk_weight: Share = 0.5
    renormalise: bool = True
    chunk_rows: Count | None = None  # None: by the size of the draft vocabulary
    recompute: bool = False  # less memory, a third more time


@dataclass(frozen=True)
class OptimizerRecipe:
    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    muon_learning_rate: Positive | None = None
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    weight_decay: Annotated[float, Range(0)] = 0.0
    clip: Positive | None = 0.5  # None: not at all
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup: BelowOne = 0.02  # share of the run
    decay: AboveZero = 0.2  # wsd: share of the run
    floor: Share = 0.0  # share of the peak that is left at the end


@dataclass(frozen=True)
class RunRecipe:
    steps: Count | None = None  # one of steps, epochs, max_seconds at least; the first that is reached ends the run
    epochs: Positive | None = None
    max_seconds: Positive | None = None  # of training; evaluations and checkpoints come on top
    accumulate: Count = 1  # batches per optimiser step
    log_every: Count = 20
    save_every: Count = 500
    keep: Count = 2  # checkpoints
    evaluate_every: Count = 500
    patience: Count | None = None  # evaluations without a better acceptance until the run stops
    device: str = "auto"  # cpu, cuda, cuda:1 …
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "yes", "no"] = "auto"  # auto: on a GPU
    distributed: Literal["ddp", "fsdp"] = "ddp"  # under torchrun; fsdp also shards the target over the GPUs
    hidden_states: Literal["online", "offline"] = "online"  # offline: the target runs once, its states go to disk
    hidden_states_folder: str | None = None


@dataclass(frozen=True)
class EvaluationRecipe:
    depths: tuple[Count, ...] = (3, 5, 7)
    select_depth: int = 5  # the best checkpoint is chosen by the acceptance length at this depth
    max_new_tokens: Count = 128
    max_prompt_tokens: Annotated[int, Range(2)] = 1024  # longer prompts are not used
    sink_column: NotNegative | None = None  # where the target's sink token stands; None: found from its attention


@dataclass(frozen=True)
class Recipe:
    output: str
    target: TargetRecipe
    data: DataRecipe
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    drafter: DrafterRecipe = field(default_factory=DrafterRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        _check_ranges(self, "")
        run, data, objective, evaluation = self.run, self.data, self.objective, self.evaluation
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", run.device):
            raise RecipeError(f"run.device: {run.device!r} is none of auto, cpu, cuda, cuda:0, cuda:1 and so on")
        if run.steps is None and run.epochs is None and run.max_seconds is None:
            raise RecipeError("run: say when it ends, by steps, epochs or max_seconds")
        if not data.train:
            raise RecipeError("data.train names no file")
        if self.target.endpoint is not None and self.target.backend != "auto":
            raise RecipeError("target.backend says how the target runs here, target.endpoint that it does not: choose one")
        if self.drafter.aux_layers == ():
            raise RecipeError("drafter.aux_layers names no layer; null takes the usual three")
        if evaluation.sink_column is not None and evaluation.sink_column >= evaluation.max_prompt_tokens:
            raise RecipeError(
                f"evaluation.sink_column {evaluation.sink_column} lies behind every prompt "
                f"(evaluation.max_prompt_tokens is {evaluation.max_prompt_tokens})"
            )
        if evaluation.select_depth not in evaluation.depths:
            raise RecipeError(f"evaluation.select_depth {evaluation.select_depth} is not among depths {evaluation.depths}")
        if self.drafter.window is not None and self.drafter.window <= max(*evaluation.depths, objective.ttt_steps):
            raise RecipeError("drafter.window must be larger than the number of draft steps trained and evaluated")
        if self.drafter.attention != "mla" and self.drafter.mla != LatentRecipe():
            raise RecipeError("drafter.mla gives sizes of latent attention; set drafter.attention: mla too")
        if self.drafter.attention == "mla" and self.drafter.qk_norm:
            raise RecipeError("drafter.qk_norm goes with drafter.attention: gqa; latent attention has norms of its own")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """`overrides`: dotted keys and YAML values, as in `optimizer.learning_rate=5e-4`."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such recipe")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, found {type(content).__name__}")
    for override in overrides:
        _override(content, override)
    return build(Recipe, content, "")


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"{override!r}: overrides are written key=value, for example run.steps=1000")
    place = content
    *parents, last = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise RecipeError(f"{key}: {parent} has no keys of its own")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"{override!r}: the value is not YAML") from None


def build(kind: type, content: Any, where: str) -> Any:
    """A dataclass from a mapping; every key must be known, every value of its type."""
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where or 'the recipe'}: expected keys and values, found {content!r}")
    known = {f.name: f for f in fields(kind)}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {_dotted(where, near[0])}?" if near else f"known: {', '.join(known)}"
            raise RecipeError(f"unknown key {_dotted(where, str(key))}; {hint}")
    hints = typing.get_type_hints(kind)
    values = {key: _value(hints[key], value, _dotted(where, key)) for key, value in content.items()}
    try:
        return kind(**values)
    except TypeError:
        required = [n for n in known if n not in values and _is_required(known[n])]
        raise RecipeError(f"{', '.join(_dotted(where, n) for n in required)}: missing") from None


def _check_ranges(settings: Any, where: str) -> None:
    """Every number within what its type says, whoever made the settings."""
    for name, kind in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            _check_ranges(value, _dotted(where, name))
        elif value is not None and (allowed := _range(kind)) is not None:
            for number in value if isinstance(value, tuple) else (value,):
                if number not in allowed:
                    raise RecipeError(f"{_dotted(where, name)} must be {allowed}, not {number}")


def _range(kind: Any) -> Range | None:
    """Of a type, or of the one it is an optional or a tuple of."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return arguments[1]
    return next((found for a in arguments if (found := _range(a)) is not None), None)


def _is_required(f: Any) -> bool:
    import dataclasses

    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, where)
    if is_dataclass(kind):
        return build(kind, value, where)
    if origin is Literal:
        value = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
        value = str(value)
        if value not in arguments:
            raise RecipeError(f"{where}: {value!r} is none of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        if arguments[-1] is not Ellipsis and len(values) != len(arguments):
            raise RecipeError(f"{where}: expected {len(arguments)} values, found {value!r}")
        return tuple(_value(arguments[0], v, where) for v in values)
    if kind is float and isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def resolved(recipe: Recipe, **run: Any) -> Recipe:
    """The recipe with its "auto" settings replaced by what they came to."""
    return replace(recipe, run=replace(recipe.run, **run))
