"""The robustness suites: the same question under many conditions, each a list of prompts that the target answers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fledge.bench.datasets import Item
from fledge.drift import templates
from fledge.drift.system_prompts import NONE_GIVEN, SYSTEM_PROMPTS
from fledge.errors import RequestError
from fledge.tokenizer import Tokenizer

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Condition:
    name: str
    prompts: dict[str, TokenIds]  # by what they ask: conditions of a suite are compared question by question
    note: str = ""


@dataclass(frozen=True)
class Suite:
    name: str
    explanation: str
    conditions: list[Condition] = field(default_factory=list)
    baseline: str | None = None  # the condition that others are measured against; None: their mean


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chosen(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of them over as many categories as possible."""
    by_category: dict[str, list[Item]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    rounds = max(len(group) for group in by_category.values())
    return [group[i] for i in range(rounds) for group in by_category.values() if i < len(group)][:count]


def domains(tokenizer: Tokenizer, items: Sequence[Item]) -> Suite:
    conditions = [
        Condition(category, {item.id: _own(tokenizer, [user(item.turns[0])]) for item in items if item.category == category})
        for category in dict.fromkeys(item.category for item in items)
    ]
    return Suite("domains", "What the prompts are about; the target's own chat template.", conditions)


def chat_templates(tokenizer: Tokenizer, items: Sequence[Item], names: Sequence[str] = templates.NAMES) -> Suite:
    rendered = {item.id: templates.all_templates(tokenizer, [user(item.turns[0])]) for item in items}
    conditions = []
    for name in names:
        prompts = {key: tuple(one[name]) for key, one in rendered.items() if one[name] is not None}
        if prompts:
            conditions.append(Condition(name, prompts))
    explanation = "The same prompts in the target's own chat template, without it, and in those of other models."
    return Suite("templates", explanation, conditions, "own")


def system_prompts(tokenizer: Tokenizer, items: Sequence[Item], names: Sequence[str]) -> Suite:
    conditions = []
    for name in names:
        text = SYSTEM_PROMPTS[name]
        system = [] if text is None else [{"role": "system", "content": text}]
        try:
            prompts = {item.id: _own(tokenizer, [*system, user(item.turns[0])]) for item in items}
        except RequestError:  # some templates refuse system prompts: they then lead the user's turn
            prompts = {item.id: _own(tokenizer, [user(f"{text}\n\n{item.turns[0]}")]) for item in items}
        conditions.append(Condition(name, prompts))
    return Suite("system prompts", "The same prompts after system prompts of many kinds.", conditions, NONE_GIVEN)


CONVERSATIONS: tuple[tuple[str, ...], ...] = (
    (
        "I want to grow tomatoes on a balcony. What do I need?",
        "The balcony faces east. Does that change anything?",
        "How often should I water them in July?",
        "Put everything into a short checklist.",
    ),
    (
        "Write a Python function that counts the vowels in a text.",
        "Make it count capital letters as well.",
        "Now return a dictionary with a count for each vowel.",
        "Write two tests for it.",
    ),
    (
        "Tell me the beginning of a tale about a fox and a clock.",
        "What does the clock say to the fox?",
        "How does the tale end?",
        "Give it a title, and say why you chose it.",
    ),
    (
        "What is inflation?",
        "Who gains and who loses from it?",
        "Explain that to a child with an example about sweets.",
        "Sum up our talk in three sentences.",
    ),
)

Answer = Callable[[list[TokenIds]], list[list[int]]]


def multi_turn(
    tokenizer: Tokenizer, items: Sequence[Item], count: int, answer: Answer, longest: int, end_ids: Sequence[int]
) -> Suite:
    """Later turns follow the target's own earlier answers, so that turns are made one after the other."""
    scripts = [*CONVERSATIONS, *(item.turns for item in items if len(item.turns) > 1)][:count]
    histories: list[list[dict[str, str]]] = [[] for _ in scripts]
    conditions = []
    for turn in range(max(map(len, scripts))):
        going = [number for number, script in enumerate(scripts) if turn < len(script)]
        for number in going:
            histories[number].append(user(scripts[number][turn]))
        prompts = {number: _own(tokenizer, histories[number]) for number in going}
        prompts = {number: prompt for number, prompt in prompts.items() if len(prompt) <= longest}
        if not prompts:
            break
        for number, tokens in zip(prompts, answer(list(prompts.values())), strict=True):
            text = tokenizer.decode([token for token in tokens if token not in end_ids])
            histories[number].append({"role": "assistant", "content": text})
        conditions.append(
            Condition(f"turn {turn + 1}", {f"conversation {number}": tokens for number, tokens in prompts.items()})
        )
    return Suite("multi-turn", "Conversations with the target's own earlier answers in them.", conditions, "turn 1")


def within(suite: Suite, longest: int) -> Suite:
    """Without prompts that the model has no room for; a condition that loses some says so, one that loses all goes."""
    kept = []
    for condition in suite.conditions:
        prompts = {key: prompt for key, prompt in condition.prompts.items() if 0 < len(prompt) <= longest}
        dropped = len(condition.prompts) - len(prompts)
        note = f"{dropped} prompts too long for the model" if dropped else condition.note
        if prompts:
            kept.append(replace(condition, prompts=prompts, note=note))
    return replace(suite, conditions=kept)


def _own(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> TokenIds:
    return tuple(templates.own(tokenizer, messages))
