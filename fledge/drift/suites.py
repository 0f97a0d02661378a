"""The robustness suites: the same questions under many conditions, each a list of prompts that the target answers itself.

Context lengths: a longer context changes the target's answer, and some answers are easier to draft than others. To isolate the
effect of length, every question is asked at every length, each answer begins with the first tokens that the target gave at the
shortest length, and lengths are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fledge.bench.datasets import Item
from fledge.drift.prompts import (
    NONE_GIVEN,
    QUICK_SYSTEM_PROMPTS,
    QUICK_TEMPLATES,
    SYSTEM_PROMPTS,
    TEMPLATE_NAMES,
    Document,
    all_templates,
    excerpt,
    own_template,
)
from fledge.drift.texts import TokenIds
from fledge.errors import RequestError
from fledge.tokenizer import Tokenizer


@dataclass(frozen=True)
class Condition:
    name: str
    prompts: dict[str, TokenIds]  # by question: conditions of a suite are compared question by question
    note: str = ""


@dataclass(frozen=True)
class Suite:
    name: str
    explanation: str
    conditions: list[Condition] = field(default_factory=list)
    baseline: str | None = None  # the condition that the others are compared with; None: their mean


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chosen(items: Sequence[Item], count: int) -> list[Item]:
    """Returns `count` items from as many categories as possible."""
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


def chat_templates(tokenizer: Tokenizer, items: Sequence[Item], names: Sequence[str] = TEMPLATE_NAMES) -> Suite:
    rendered = {item.id: all_templates(tokenizer, [user(item.turns[0])]) for item in items}
    conditions = []
    for name in names:
        prompts = {key: tuple(ids) for key, one in rendered.items() if (ids := one[name]) is not None}
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
        except RequestError:  # some templates refuse system prompts: the text is then put before the user's turn
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
    """Builds conversations turn by turn, since each turn contains the target's own earlier answers."""
    scripts = [*CONVERSATIONS, *(item.turns for item in items if len(item.turns) > 1)][:count]
    histories: dict[int, list[dict[str, str]]] = {number: [] for number in range(len(scripts))}
    conditions = []
    for turn in range(max(map(len, scripts))):
        # A conversation that has grown too long ends: its next turn would lack an answer before it.
        histories = {number: history for number, history in histories.items() if turn < len(scripts[number])}
        for number, history in histories.items():
            history.append(user(scripts[number][turn]))
        prompts = {number: _own(tokenizer, history) for number, history in histories.items()}
        prompts = {number: prompt for number, prompt in prompts.items() if len(prompt) <= longest}
        histories = {number: histories[number] for number in prompts}
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
    """Returns the suite without prompts longer than `longest` tokens. A condition that loses some gets a note, one that loses
    all is dropped. If that was the baseline, the suite has none."""
    kept = []
    for condition in suite.conditions:
        prompts = {key: prompt for key, prompt in condition.prompts.items() if 0 < len(prompt) <= longest}
        dropped = len(condition.prompts) - len(prompts)
        note = f"{dropped} prompts too long for the model" if dropped else condition.note
        if prompts:
            kept.append(replace(condition, prompts=prompts, note=note))
    baseline = suite.baseline if any(condition.name == suite.baseline for condition in kept) else None
    return replace(suite, conditions=kept, baseline=baseline)


def _own(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> TokenIds:
    return tuple(own_template(tokenizer, messages))


LENGTHS = (256, 512, 1024, 2048, 4096, 6144, 8192, 16384, 32768, 65536, 131072)
ABOUT_THE_TEXT = (
    "Summarise the most important points of the text above.",
    "Explain the main idea of the text above to a friend who has not read it.",
    "Which questions does the text above leave open? List three of them.",
)
OPENING = 16  # tokens that all answers to a question have in common (a quarter of the answer if that is less)
# Upper bound of characters per token: how much text to encode for a context of a given length.
CHARACTERS_A_TOKEN = 12


def questions(items: Sequence[Item], count: int, tokenizer: Tokenizer, room: int) -> list[str]:
    """Returns `count` questions, alternately about the text and from `items`; those of at most `room` tokens."""
    others = [item.turns[0] for item in items]
    others = [text for text in others if len(tokenizer.encode(text, add_special_tokens=False)) <= room]
    mixed: list[str] = []
    for number in range(max(len(ABOUT_THE_TEXT), len(others))):
        mixed += [*ABOUT_THE_TEXT[number : number + 1], *others[number : number + 1]]
    return mixed[:count]


def lengths(
    tokenizer: Tokenizer,
    documents: list[Document],
    items: Sequence[Item],
    sizes: Sequence[int],
    num_documents: int,
    num_questions: int,
    answer: Answer,
    longest: int,
    source: str,
) -> Suite:
    """Builds the context-length suite. `longest`: most tokens of a prompt; also a size if well above the last one that fits."""
    fitting = [size for size in sizes if size <= longest]
    if len(fitting) < len(sizes) and sizes[0] <= longest and longest > 1.2 * fitting[-1]:
        fitting.append(longest)
    explanation = (
        "The same questions, some of them about the text, behind real texts of growing length; all answers to a question "
        f"begin with the same tokens ({OPENING}, or a quarter of a short answer). Texts: {source}."
    )
    if not fitting:
        return Suite("context length", explanation)
    asked = questions(items, num_questions, tokenizer, fitting[0] // 2)
    pairs = {
        f"{documents[number % len(documents)].name} {number}, question {which}": (number, question)
        for number in range(num_documents)
        for which, question in enumerate(asked, 1)
    }

    def prompts(size: int, openings: dict[str, list[int]]) -> dict[str, TokenIds]:
        return {
            name: (*_prompt(tokenizer, documents, number, question, size - OPENING), *openings.get(name, ()))
            for name, (number, question) in pairs.items()
        }

    # With a template's own text (a default system prompt), the question may not fit into a short context.
    while not all((shortest := prompts(fitting[0], {})).values()):
        del fitting[0]
        if not fitting:
            return Suite("context length", explanation)
    answers = answer(list(shortest.values()))
    openings = {name: tokens[: min(OPENING, len(tokens) // 4)] for name, tokens in zip(shortest, answers, strict=True)}
    conditions = [Condition(f"{size} tokens", prompts(size, openings)) for size in fitting]
    return Suite("context length", explanation, conditions, conditions[0].name)


def _prompt(tokenizer: Tokenizer, documents: list[Document], number: int, question: str, size: int) -> TokenIds:
    text = excerpt(documents, number, size * CHARACTERS_A_TOKEN)[: size * CHARACTERS_A_TOKEN]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    keep = size - len(_own(tokenizer, [user(f"\n\n{question}")]))
    prompt: TokenIds = ()
    while keep > 0:  # a text cut inside a word may need one more token when it is encoded again
        prompt = _own(tokenizer, [user(f"{tokenizer.decode(tokens[:keep])}\n\n{question}")])
        if len(prompt) <= size:
            break
        keep -= len(prompt) - size
    return prompt


@dataclass(frozen=True)
class Settings:
    max_tokens: int = 128  # per answer
    depth: int = 16  # draft steps, on every suite
    probe_depth: int = 16  # draft steps, for the probes over all prompts
    prompts: int = 24  # per template and system prompt
    prompts_per_category: int = 0  # 0: all
    templates: tuple[str, ...] = TEMPLATE_NAMES
    system_prompts: tuple[str, ...] = tuple(SYSTEM_PROMPTS)
    lengths: tuple[int, ...] = LENGTHS
    documents: int = 4
    questions: int = 6  # per document
    noise: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    conversations: int = 8

    @classmethod
    def quick(cls) -> Settings:
        """Returns settings for a run of about two minutes on two CPU cores."""
        return cls(
            max_tokens=32,
            depth=7,
            prompts=3,
            prompts_per_category=1,
            templates=QUICK_TEMPLATES,
            system_prompts=QUICK_SYSTEM_PROMPTS,
            lengths=(256, 512, 1024),
            documents=1,
            questions=3,
            noise=(0.25, 0.5),
            temperatures=(0.0, 1.0),
            conversations=2,
        )
