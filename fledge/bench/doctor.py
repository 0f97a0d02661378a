"""Checks whether a drafter's acceptance is normal for its target, and if not, finds the known mistake that explains it.

It undoes each known mistake in turn and measures acceptance again. The target's greedy text does not depend on the drafter, so
every trial drafts for the same text and trials can be compared directly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fledge import progress
from fledge.bench.mistakes import SHIFTED, Change, changes, layer_searches
from fledge.bench.prompts import DEMO
from fledge.checkpoints import eagle3, origins
from fledge.checkpoints.drafter_files import DrafterFiles, find_drafter, read_drafter_files
from fledge.config import DrafterConfig, ModelConfig
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams

DEPTH = 4
# The first token of a drafter that fits its target is accepted in half of the steps or more; of a wrong one almost never.
SANE_FIRST = 0.3
# If the first token is accepted this often, layers are not searched.
GOOD_FIRST = 0.6
# A change is a repair if tokens accepted per step rise to at least this ratio times the old value plus this margin.
REPAIR_RATIO, REPAIR_MARGIN = 1.1, 0.1
# Another prompt format gives another text, so a larger gain is required.
FORMAT_RATIO, FORMAT_MARGIN = 1.5, 0.4
MOST_AT_LENGTH = 6
# Adjacent layers are similar, so ids that are off by one cost only a few percent. A shift that helps is measured again on
# answers LONGER times as long, and must help by CLEAR_ERRORS standard errors. The shipped drafter loses 7 % one layer higher:
# 1.5 standard errors with answers of the usual length, 5 with answers four times as long.
LONGER, CLEAR_ERRORS = 4, 3.0
# Past its position limit a drafter stops working. A limit below this is taken for a template's default, not a choice.
SMALLEST_SENSIBLE_POSITIONS = 4096
FETCH_AGAIN = "fetch the checkpoint again, or ask its maker"


@dataclass(frozen=True)
class Trial:
    """The acceptance measured for the drafter with one change."""

    fault: str  # the mistake that the change undoes; "": unchanged
    remedy: str
    accepted: float  # drafted tokens accepted per step
    first: float  # fraction of steps whose first drafted token was accepted
    steps: tuple[int, ...] = ()  # number of steps of each answer


@dataclass(frozen=True)
class Diagnosis:
    fault: str | None  # None: nothing wrong found
    explanation: str
    remedy: str
    unchanged: Trial | None  # None: it cannot be loaded
    repaired: Trial | None
    trials: list[Trial] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    storage: str = ""  # how the file stores the weights; empty: as plain numbers

    @property
    def healthy(self) -> bool:
        return self.fault is None

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


class AcceptanceMeter:
    """Measures drafters one after the other on the same prompts."""

    def __init__(
        self, model: str, prompts: Sequence[str], *, max_tokens: int = 32, device: str = "auto", dtype: str = "auto"
    ) -> None:
        # KV cache for one request only: the memory is not freed until the garbage collector finds this engine.
        plain = build_engine(model, Speculation("none"), EngineConfig(device=device, dtype=dtype, max_num_seqs=1))
        assert plain.tokenizer is not None, "a model with files has one"
        self.decoder, self.tokenizer = plain.decoder, plain.tokenizer
        self.formats = {"as text": [self.tokenizer.encode(prompt) for prompt in prompts]}
        if self.tokenizer.has_chat_template:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            self.formats = {"by the chat template": [self._chat(chat) for chat in chats], **self.formats}
        self.served = next(iter(self.formats))
        self._is_compiled = False
        # No larger than needed: every trial allocates its own KV cache.
        longest = max(len(tokens) for format in self.formats.values() for tokens in format)
        room = min(longest + LONGER * max_tokens + DEPTH, plain.config.max_model_len)
        self.num_tokens = {  # maximum answer length, by amount of text
            "brief": max(8, max_tokens // 2),
            "usual": max_tokens,
            "long": max(max_tokens, min(LONGER * max_tokens, room - longest - DEPTH)),
        }
        self.config = replace(
            plain.config, max_model_len=room, max_num_seqs=len(prompts), kv_cache_tokens=2 * room * len(prompts)
        )

    @property
    def target(self) -> ModelConfig:
        return self.decoder.config

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def measure(
        self,
        network: EagleDrafter,
        fault: str = "",
        remedy: str = "",
        prompt_format: str | None = None,
        *,
        text: str = "usual",
    ) -> Trial:
        """Measures one drafter. `text`: the amount of text; brief is 1/6 of usual, to choose among many; long is 4 times it."""
        engine = build_engine(self.decoder, Speculation(network, DEPTH).fixed_depth(), self.config, tokenizer=self.tokenizer)
        if not self._is_compiled:  # later trials use almost the same kernels
            engine.executor.compile_kernels()
            self._is_compiled = True
        prompts = self.formats[prompt_format or self.served]
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens[text])
        requests = [engine.add_request(prompt, params) for prompt in (prompts[::3] if text == "brief" else prompts)]
        while engine.has_unfinished():
            engine.step()
        rates = engine.stats.unconditional_rates
        steps = tuple(request.stats.steps for request in requests)
        return Trial(fault, remedy, engine.stats.acceptance_length - 1, rates[0] if rates else 0.0, steps)


def diagnose(
    drafter: str | Path,
    model: str,
    *,
    prompts: Sequence[str] | None = None,
    max_tokens: int = 32,
    device: str = "auto",
    dtype: str = "auto",
    thorough: bool = False,
    search_layers: bool = True,
    on_trial: progress.Report = progress.silent,
) -> Diagnosis:
    """Measures the drafter unchanged and with each known mistake undone. If the first drafted token is then accepted in less
    than `GOOD_FIRST` of the steps, also tries every layer in place of each tap: about ninety trials.

    `thorough`: always search layers; `search_layers` False: never; `on_trial` is told what is tried."""
    files = origins.canonical(read_drafter_files(find_drafter(drafter)))
    on_trial("loading the target")
    meter = AcceptanceMeter(
        model, prompts or [prompt.text for prompt in DEMO], max_tokens=max_tokens, device=device, dtype=dtype
    )
    config, problems = eagle3.check(files, meter.target)
    if config is None:
        return Diagnosis("unreadable", "; ".join(problems), FETCH_AGAIN, None, None, [], problems, files.storage)
    if foreign := _made_for_another(config, meter.target):
        return Diagnosis("wrong target", foreign, "name the target it was trained for", None, None, [], problems, files.storage)
    candidates = list(changes(files, config, meter.target))
    if problems:  # it cannot be loaded unchanged
        trials = _try_all(meter, None, candidates, on_trial)
        return _conclude(files, config, problems, None, trials, _best_repair(None, trials), meter)
    on_trial("drafting, unchanged")
    unchanged = meter.measure(_built(files, config))
    trials = _try_all(meter, _built(files, config), candidates, on_trial)
    trials += _try_formats(meter, files, config, on_trial)
    best = _best_repair(unchanged, trials)
    if search_layers and (thorough or (best or unchanged).first < GOOD_FIRST):
        searches = list(layer_searches(files, config, meter.target))
        trials += _try_all(meter, _built(files, config), searches, on_trial)
        best = _best_repair(unchanged, trials)
    if best is None:
        best = _clear_shift(meter, files, config, unchanged, trials, on_trial)
    return _conclude(files, config, problems, unchanged, trials, best, meter)


def _made_for_another(config: DrafterConfig, target: ModelConfig) -> str:
    differing = [
        f"{name} {mine}, the target has {theirs}"
        for name, mine, theirs in (
            ("hidden size", config.target_hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        )
        if mine != theirs
    ]
    return "made for a target of " + "; ".join(differing) if differing else ""


def _built(files: DrafterFiles, config: DrafterConfig) -> EagleDrafter:
    return eagle3.build_drafter(config, files, torch.float32, "cpu")


def _try(meter: AcceptanceMeter, change: Change, text: str = "usual") -> Trial | None:
    """Measures the drafter with a change; None if it cannot be loaded."""
    config, problems = eagle3.check(change.files, meter.target)
    if problems or config is None:
        return None
    return meter.measure(_built(change.files, config), change.fault, change.remedy, text=text)


def _try_all(
    meter: AcceptanceMeter, unchanged: EagleDrafter | None, candidates: list[Change], on_trial: progress.Report
) -> list[Trial]:
    """Measures all changes on brief text; then, at the usual length, those that beat the unchanged drafter and are within 20 %
    of the best."""
    brief = []
    for number, change in enumerate(candidates):
        on_trial(f"trying {change.short}", number, len(candidates))
        if (trial := _try(meter, change, "brief")) is not None:
            brief.append((trial, change))
    least = meter.measure(unchanged, text="brief").accepted if unchanged is not None else 0.0
    most = max((trial.accepted for trial, _ in brief), default=0.0)
    promising = [change for trial, change in brief if trial.accepted > least and trial.accepted >= 0.8 * most]
    on_trial("trying the best again, at length")
    return [trial for change in promising[:MOST_AT_LENGTH] if (trial := _try(meter, change))]


def _try_formats(meter: AcceptanceMeter, files: DrafterFiles, config: DrafterConfig, on_trial: progress.Report) -> list[Trial]:
    trials = []
    for name in meter.formats:
        if name != meter.served:
            on_trial(f"trying prompts {name}")
            remedy = f"serve prompts {name}, or train the drafter on prompts {meter.served}"
            trials.append(meter.measure(_built(files, config), "wrong template", remedy, name))
    return trials


def _best_repair(unchanged: Trial | None, trials: Sequence[Trial]) -> Trial | None:
    """The most likely (first) repair among those within 3 % of the best; None if no trial is a repair."""

    def repairs(trial: Trial) -> bool:
        if trial.first < SANE_FIRST:
            return False
        if unchanged is None:
            return True
        ratio, margin = REPAIR_RATIO, REPAIR_MARGIN
        if trial.fault == "wrong template":
            ratio, margin = FORMAT_RATIO, FORMAT_MARGIN
        return trial.accepted >= ratio * unchanged.accepted + margin

    able = [trial for trial in trials if repairs(trial)]
    if not able:
        return None
    most = max(trial.accepted for trial in able)
    likeliest = next(trial for trial in able if trial.accepted >= 0.97 * most)
    if "layers" in likeliest.fault:  # layers next to the right one help too, so the best is chosen
        return max((trial for trial in able if "layers" in trial.fault), key=lambda trial: trial.accepted)
    return likeliest


def _clear_shift(
    meter: AcceptanceMeter,
    files: DrafterFiles,
    config: DrafterConfig,
    unchanged: Trial,
    trials: Sequence[Trial],
    on_trial: progress.Report,
) -> Trial | None:
    """The trial with all layers shifted by one, if longer answers show that it is better by more than noise."""
    better = {trial.remedy: trial for trial in trials if trial.fault == SHIFTED and trial.accepted > unchanged.accepted}
    if not better:
        return None
    on_trial("trying layers off by one again, on longer answers")
    as_it_is = meter.measure(_built(files, config), text="long")
    for change in changes(files, config, meter.target):
        trial = _try(meter, change, "long") if change.remedy in better else None
        if trial is not None and gain_in_errors(as_it_is.steps, trial.steps) > CLEAR_ERRORS:
            return better[change.remedy]
    return None


def gain_in_errors(before: Sequence[int], after: Sequence[int]) -> float:
    """The relative saving in steps for the same answers, divided by its standard error (jackknife over the answers)."""
    if len(before) < 2:
        return 0.0
    all_before, all_after = sum(before), sum(after)
    without_one = [(all_before - one) / (all_after - other) for one, other in zip(before, after, strict=True)]
    error = math.sqrt((len(before) - 1) * statistics.pvariance(without_one))
    return (all_before / all_after - 1) / error if error else 0.0


def _conclude(
    files: DrafterFiles,
    config: DrafterConfig,
    problems: list[str],
    unchanged: Trial | None,
    trials: list[Trial],
    best: Trial | None,
    meter: AcceptanceMeter,
) -> Diagnosis:
    def diagnosis(fault: str | None, explanation: str, remedy: str = "") -> Diagnosis:
        return Diagnosis(fault, explanation, remedy, unchanged, best, trials, problems, files.storage)

    if best is not None:
        before = "it cannot be loaded" if unchanged is None else f"{unchanged.accepted:.2f} drafted tokens a step"
        return diagnosis(best.fault, f"{before} unchanged; {best.accepted:.2f} a step once repaired", best.remedy)
    if unchanged is None:
        return diagnosis("unreadable", "; ".join(problems), FETCH_AGAIN)
    never_filled = config.draft_vocab_size < config.vocab_size and not files.tensors["d2t"].any()
    if unchanged.first < SANE_FIRST and never_filled:
        said = f"{_sane(unchanged)}, and d2t is all zero: the map from draft to target ids was never filled"
        return diagnosis("d2t never filled", said, "take d2t and t2d from the run that trained it")
    if unchanged.first < SANE_FIRST:
        said = f"the first drafted token is accepted in {unchanged.first:.1%} of the steps, and no known mistake explains it"
        if _embedding_is_foreign(files, meter):
            said += "; its embedding is not the target's"
        remedy = "it fits another target or was trained too little: name its target, or train it further"
        return diagnosis("wrong target", said, remedy)
    limit = min(meter.target.max_positions, SMALLEST_SENSIBLE_POSITIONS)
    if config.max_positions < limit:
        return diagnosis(
            "position limit",
            f"{_sane(unchanged)} on short prompts, but max_position_embeddings is {config.max_positions}: "
            f"servers cut or clamp there, and the target's limit is {meter.target.max_positions}",
            "set max_position_embeddings to the length it was trained for",
        )
    return diagnosis(None, _sane(unchanged))


def _sane(trial: Trial) -> str:
    return f"{trial.accepted:.2f} drafted tokens accepted a step, the first one in {trial.first:.1%} of the steps"


def _embedding_is_foreign(files: DrafterFiles, meter: AcceptanceMeter) -> bool:
    """Whether the drafter's embedding is not the target's. Trainers copy and freeze it, so this means another target."""
    own = files.tensors.get("embed_tokens.weight")
    theirs = meter.decoder.embed_tokens.weight
    if own is None or own.shape != theirs.shape:
        return False
    return float(torch.cosine_similarity(own.float(), theirs.float().cpu(), dim=-1).mean()) < 0.9
