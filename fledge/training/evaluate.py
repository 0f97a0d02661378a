"""Acceptance of speculative decoding on held-out prompts, drafting with the drafter's own tokens; also with other chat
templates and system prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fledge.bench.datasets import Item
from fledge.bench.loops import is_looping
from fledge.checkpoints.eagle3 import load_drafter
from fledge.drift import suites
from fledge.drift.metrics import MetricAccumulator, by_text
from fledge.drift.probes import find_sink
from fledge.drift.rollout import roll_out
from fledge.drift.texts import TargetText, TokenIds, in_groups
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.progress import track
from fledge.tokenizer import Tokenizer
from fledge.training.data.packing import pack, pack_texts, places
from fledge.training.distributed import DistributedContext
from fledge.training.recipe import Recipe
from fledge.training.targets.loading import find_target, load_target
from fledge.training.targets.target import Target
from fledge.training.ttt import BLOCK, TrainBatch, document_starts

TOKENS_AT_ONCE = 1 << 15  # tokens of the texts in one batch
SINK_TEXTS = 4  # texts that are used to find the attention sink
ROBUSTNESS_DEPTH = 5


@dataclass(frozen=True)
class HeldOut:
    """Greedy texts of the target with its tapped states: everything that an evaluation needs from the target."""

    texts: list[TargetText]
    sink_column: int = 0  # `with_sink` finds it, if the target's attention is accessible

    @classmethod
    def of(cls, target: Target, texts: Sequence[Sequence[int]], answer_starts: Sequence[int], device: torch.device) -> HeldOut:
        """Runs the target once over the packed texts. `texts[i][answer_starts[i]:]`: the target's greedy answer."""
        lengths = np.array([len(text) for text in texts])
        length = -(-int(lengths.max()) // BLOCK) * BLOCK
        rows = pack(lengths, np.argsort(-lengths, kind="stable"), length)  # rows of text numbers
        tokens, document = pack_texts(texts, rows, length)
        start = document_starts(document)
        none = torch.zeros(0, dtype=torch.long)
        batch = TrainBatch(tokens, torch.arange(length) - start, start, none, none, none, none).to(device)
        target.reserve(length)
        taps = [tap.unflatten(0, tokens.shape) for tap in target.states(batch, skip_compile=True).taps]
        found = {
            number: TargetText(batch.tokens_BT[row, here], answer_starts[number], [tap[row, here] for tap in taps])
            for row, _, number, here in places(rows, lengths)
        }
        return cls([found[number] for number in range(len(texts))])

    def with_sink(self, decoder: Decoder) -> HeldOut:
        """Sets the sink to the column that gets the most attention of the target in the longest of these texts."""
        some = sorted((text.tokens_T.tolist() for text in self.texts), key=len)[-SINK_TEXTS:]
        return replace(self, sink_column=find_sink(decoder, some).column)


@torch.no_grad()
def evaluate(drafter: EagleDrafter, held_out: HeldOut, depths: Sequence[int], sink_column: int | None = None) -> dict[str, Any]:
    """Returns figures of greedy chain drafting over the held-out texts, with the probes of the drift lab.

    `sink_column`: column of the attention sink; None: that of `held_out`.

    acceptance_length   {depth: 1 + accepted / steps} over all texts together (micro), and its standard_error. Both also as
                        …_not_looping: without answers that loop, which are easy to draft (None: all loop)
    accuracy            by draft step, also after wrong drafts; out-of-vocabulary tokens are misses
    rms, sink_share, own_share, entropy, cosine   by draft step (see `drift.metrics`)
    """
    texts = held_out.texts
    sink = held_out.sink_column if sink_column is None else sink_column
    accumulator = MetricAccumulator(sorted(depths))
    for group in in_groups([len(text.tokens_T) for text in texts], TOKENS_AT_ONCE):
        rollout = roll_out(drafter, [texts[i] for i in group], max(depths), sink=sink)
        for index, figures in zip(group, by_text(rollout, len(group), accumulator.depths), strict=True):
            text = texts[index]
            accumulator.add(str(index), figures, is_looping(text.tokens_T[text.answer_start :].tolist()))
    whole = accumulator.to_dict()
    lengths = ("acceptance_length", "standard_error", "acceptance_length_not_looping", "standard_error_not_looping")
    names = (*lengths, "texts", "looping_texts", "accuracy", "rms", "sink_share", "own_share", "entropy", "cosine")
    return {name: whole[name] for name in names} | {"tokens": sum(text.num_rows for text in texts)}


class Judged(NamedTuple):
    """The figures by which drafters are selected and reported: acceptance without answers that loop, unless all loop."""

    length: dict[Any, float]  # by depth
    error: dict[Any, float | None]  # standard error; None: a single text
    num_looping: int

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Judged:
        """`figures`: the result of `evaluate`, or the same read from JSON."""
        length, error = figures["acceptance_length_not_looping"], figures["standard_error_not_looping"]
        if length is None:
            length, error = figures["acceptance_length"], figures["standard_error"]
        return cls(length, error, figures["looping_texts"])

    def __str__(self) -> str:
        return ", ".join(f"{with_error(value, self.error[depth])} at depth {depth}" for depth, value in self.length.items())


def with_error(value: float, error: float | None) -> str:
    return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"


def describe_lengths(figures: Mapping[str, Any]) -> str:
    """Describes acceptance lengths without answers that loop and, if there are any, with them."""
    judged = Judged.of(figures)
    if not judged.num_looping:
        return str(judged)
    if judged.num_looping == figures["texts"]:
        return f"{judged} (all {judged.num_looping} answers loop, which are easy to draft)"
    all_of_them = "/".join(f"{value:.2f}" for value in figures["acceptance_length"].values())
    return f"{judged} ({judged.num_looping} of {figures['texts']} answers loop and are left out; with them {all_of_them})"


# --- other templates and system prompts ---------------------------------------------------------------------------------

# From the drift suites. Training does not use them: its augmentation has other templates and prompts (`data.templates`).
FOREIGN_TEMPLATES, FOREIGN_SYSTEM = ("Gemma", "Mistral"), "odd: persona"


@dataclass(frozen=True)
class Retention:
    """Acceptance length at depth 5 under one condition, and its share of the one in normal serving."""

    setting: str
    acceptance_length: float
    standard_error: float | None
    share: float

    def __str__(self) -> str:
        return f"{self.setting}: {with_error(self.acceptance_length, self.standard_error)} at depth 5 ({self.share:.0%})"


def conditions(tokenizer: Tokenizer, questions: Sequence[str], *, texts: bool) -> dict[str, list[TokenIds]]:
    """Returns the questions' prompts as they are served, and under conditions on which no drafter was trained.

    `texts`: whether the tokenizer can encode the markers of other templates.
    """
    items = [Item(str(number), "", (question,)) for number, question in enumerate(questions)]
    own, *others = suites.chat_templates(tokenizer, items, ("own", *(FOREIGN_TEMPLATES if texts else ()))).conditions
    found = {"as served": own}
    if texts:
        (found["an odd system prompt (a persona)"],) = suites.system_prompts(tokenizer, items, [FOREIGN_SYSTEM]).conditions
    found |= {f"{one.name}'s chat template": one for one in others}
    return {name: list(condition.prompts.values()) for name, condition in found.items()}


def robustness(recipe: Recipe, drafter_folder: Path, questions: Sequence[str], *, texts: bool = True) -> list[Retention]:
    """Measures acceptance under other chat templates and system prompts. `recipe`: resolved. `questions`: user turns that were
    not trained on. `texts`: whether the tokenizer can encode the markers of other templates."""
    folder = find_target(recipe)
    tokenizer = Tokenizer(folder)
    loaded = load_target(recipe, DistributedContext(), folder)
    target, device = loaded.target, torch.device(recipe.run.device)
    dtype = getattr(torch, recipe.run.compute_dtype)
    drafter = load_drafter(drafter_folder, dtype=dtype, device=device).share(target.embedding, target.lm_head)
    stop_ids = tuple(dict.fromkeys([*loaded.stop_ids, *tokenizer.eos_token_ids]))

    found: list[Retention] = []
    settings, usual = conditions(tokenizer, questions, texts=texts), None
    for name, prompts in track(settings.items(), "checking acceptance under other templates", "templates"):
        prompts = [prompt for prompt in prompts if 1 < len(prompt) <= recipe.evaluation.max_prompt_tokens]
        if not prompts or prompts == usual:  # equal prompts: this template is the target's own
            continue
        usual = usual or prompts
        answers = target.continuations(prompts, recipe.evaluation.max_new_tokens, stop_ids)
        whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        held_out = HeldOut.of(target, whole, [len(prompt) for prompt in prompts], device)
        figures = evaluate(drafter, held_out, [ROBUSTNESS_DEPTH])
        judged = Judged.of(figures)
        length = judged.length[ROBUSTNESS_DEPTH]
        share = length / found[0].acceptance_length if found else 1.0
        found.append(Retention(name, length, judged.error[ROBUSTNESS_DEPTH], share))
    target.close()
    return found
