"""The suite of context lengths: the same questions, and answers that begin alike, behind ever more of the same documents.

A longer context changes what the target says, and some answers are easier to draft than others. So that length is what differs,
every question is asked at every length, each answer begins with the first tokens that the target gave at the shortest
length, and lengths are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fledge.bench.datasets import Item
from fledge.drift import templates
from fledge.drift.documents import Document, excerpt
from fledge.drift.suites import Condition, Suite, TokenIds, user
from fledge.tokenizer import Tokenizer

LENGTHS = (256, 512, 1024, 2048, 4096, 6144, 8192, 16384, 32768, 65536, 131072)
ABOUT_THE_TEXT = (
    "Summarise the most important points of the text above.",
    "Explain the main idea of the text above to a friend who has not read it.",
    "Which questions does the text above leave open? List three of them.",
)
OPENING = 16  # tokens that all answers to a question have in common, or a quarter of a short answer
# Characters a token stands for, at most: how much text to cut a context from.
CHARACTERS_A_TOKEN = 12

Answer = Callable[[list[TokenIds]], list[list[int]]]


def questions(items: Sequence[Item], count: int, tokenizer: Tokenizer, room: int) -> list[str]:
    """About the text and about anything else, in turn; short enough for `room` tokens."""
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
    """`longest`: tokens a prompt may have. Where the model's limit lies between two sizes, it is measured as well."""
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

    shortest = prompts(fitting[0], {})
    answers = answer(list(shortest.values()))
    openings = {name: tokens[: min(OPENING, len(tokens) // 4)] for name, tokens in zip(shortest, answers, strict=True)}
    conditions = [Condition(f"{size} tokens", prompts(size, openings)) for size in fitting]
    return Suite("context length", explanation, conditions, conditions[0].name)


def _prompt(tokenizer: Tokenizer, documents: list[Document], number: int, question: str, size: int) -> TokenIds:
    text = excerpt(documents, number, size * CHARACTERS_A_TOKEN)[: size * CHARACTERS_A_TOKEN]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    keep = size - len(_own(tokenizer, f"\n\n{question}"))
    prompt: TokenIds = ()
    while keep > 0:  # a cut in the middle of a word may take a token more
        prompt = _own(tokenizer, f"{tokenizer.decode(tokens[:keep])}\n\n{question}")
        if len(prompt) <= size:
            break
        keep -= len(prompt) - size
    return prompt


def _own(tokenizer: Tokenizer, text: str) -> TokenIds:
    return tuple(templates.own(tokenizer, [user(text)]))
