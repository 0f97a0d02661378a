"""Acceptance of a new drafter under other chat templates and system prompts than the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.progress import track
from fledge.tokenizer import Tokenizer
from fledge.training.data.rendering import ChatFormat, TemplateError
from fledge.training.data.templates import NO_TEMPLATE, SYSTEM_PROMPTS, TEXT_TEMPLATES, TextTemplate
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, evaluate
from fledge.training.recipe import Recipe
from fledge.training.targets.loading import find_target, greedy_answers, load_target

DEPTH = 5
AS_SERVED = "as served"


@dataclass(frozen=True)
class Retention:
    """Acceptance length at depth 5 in one setting, and what share it is of that in the usual one."""

    setting: str
    acceptance_length: float
    standard_error: float
    share: float


def robustness(recipe: Recipe, drafter_folder: Path, questions: Sequence[str], *, texts: bool = True) -> list[Retention]:
    """`recipe`: resolved. `questions`: users' turns that were not trained on. `texts`: whether the tokenizer can write other
    templates' marks."""
    folder = find_target(recipe)
    tokenizer = Tokenizer(folder)
    chat, world = ChatFormat(tokenizer), DistributedContext()
    loaded = load_target(recipe, world, folder)
    target, device = loaded.target, torch.device(recipe.run.device)
    dtype = getattr(torch, recipe.run.compute_dtype)
    drafter = load_drafter(drafter_folder, dtype=dtype, device=device).share(target.embedding, target.lm_head)
    stop_ids = tuple(dict.fromkeys([*loaded.stop_ids, *tokenizer.eos_token_ids]))

    def with_system(question: str) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM_PROMPTS[0]}, {"role": "user", "content": question}]
        return chat.prompt_ids(messages, [])

    def by(template: TextTemplate) -> Callable[[str], list[int]]:
        return lambda question: tokenizer.encode(template.user.replace("{}", question) + template.opening)

    settings = {AS_SERVED: lambda question: chat.prompt_ids([{"role": "user", "content": question}], [])}
    if texts:
        settings |= {
            "another system prompt": with_system,
            "another chat template": by(TEXT_TEMPLATES["vicuna"]),
            "no chat template": by(NO_TEMPLATE),
        }
    found: list[Retention] = []
    for name, render in track(settings.items(), "checking acceptance under other templates", "templates"):
        try:
            prompts = [render(question) for question in questions]
        except TemplateError:  # a template without system prompts, say
            continue
        prompts = [prompt for prompt in prompts if 1 < len(prompt) <= recipe.evaluation.max_prompt_tokens]
        if not prompts:
            continue
        answers = greedy_answers(target, prompts, recipe.evaluation.max_new_tokens, stop_ids)
        whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        held_out = HeldOut.of(target, whole, [len(prompt) for prompt in prompts], device)
        figures = evaluate(drafter, held_out, [DEPTH])
        length = figures["acceptance_length"][DEPTH]
        usual = found[0].acceptance_length if found else length
        found.append(Retention(name, length, figures["standard_error"][DEPTH], length / usual))
    target.close()
    return found
