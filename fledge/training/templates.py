"""Augmentation: the same answers under other chat templates and system prompts, so that a drafter learns to live with both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from fledge.training.rendering import Message, Rendered
from fledge.training.system_prompts import SYSTEM_PROMPTS

_END = "{end}"  # replaced by the tokenizer's own end-of-sequence token


@dataclass(frozen=True)
class TextTemplate:
    """A chat template plain enough to be four strings."""

    system: str  # with "{}" for the prompt; "": system prompts are left out
    user: str
    opening: str  # what stands before an answer
    closing: str  # what stands after one

    def render(self, messages: Sequence[Message], end_token: str) -> Rendered:
        contexts, answers, context = [], [], ""
        for message in messages:
            if message["role"] == "assistant":
                contexts.append(context + self.opening)
                answers.append(message["content"])
                context = self.closing.replace(_END, end_token)
            elif message["role"] == "system":
                context += self.system.replace("{}", message["content"])
            else:
                context += self.user.replace("{}", message["content"])
        return Rendered((*contexts, context), tuple(answers))


TEXT_TEMPLATES: dict[str, TextTemplate] = {
    "chatml": TextTemplate(
        system="<|im_start|>system\n{}<|im_end|>\n",
        user="<|im_start|>user\n{}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
        closing="{end}\n",
    ),
    "llama3": TextTemplate(
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        closing="{end}",
    ),
    "alpaca": TextTemplate(
        system="{}\n\n", user="### Instruction:\n{}\n\n", opening="### Response:\n", closing="{end}\n\n"
    ),
    "vicuna": TextTemplate(system="{}\n\n", user="USER: {}\n", opening="ASSISTANT:\n", closing="{end}\n"),
    "transcript": TextTemplate(
        system="[{}]\n\n", user="Question: {}\n\n", opening="Answer:\n", closing="{end}\n\n"
    ),
}  # fmt: skip

NO_TEMPLATE = TextTemplate(system="", user="{}\n\n", opening="", closing="{end}\n\n")


@dataclass(frozen=True)
class Choice:
    """How one conversation is to be rendered."""

    template: TextTemplate | None = None  # None: the model's own
    system: str | None = None  # None: as the conversation has it; "": none at all

    @property
    def changes_nothing(self) -> bool:
        return self.template is None and self.system is None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        if self.system is None:
            return list(messages)
        others = [message for message in messages if message["role"] != "system"]
        return [{"role": "system", "content": self.system}, *others] if self.system else others


Probability = Annotated[float, Field(ge=0, le=1)]


def _chance(meaning: str) -> Probability:
    return Field(default=0.0, description=f"probability of {meaning}")


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Augmentation:
    """Which conversations are rendered differently; the same choice for the same seed and index."""

    template_probability: Probability = _chance("another chat template")
    no_template_probability: Probability = _chance("no template: the bare text")
    system_probability: Probability = _chance("a random system prompt")
    no_system_probability: Probability = _chance("leaving the conversation's system prompt out")
    seed: int = Field(default=0, description="of these choices")
    templates: tuple[str, ...] = Field(default=tuple(TEXT_TEMPLATES), description="the other chat templates")

    def __post_init__(self) -> None:
        for name in ("template", "system"):
            if getattr(self, f"{name}_probability") + getattr(self, f"no_{name}_probability") > 1:
                raise ValueError(f"{name}_probability and no_{name}_probability add up to more than 1")
        if unknown := set(self.templates) - set(TEXT_TEMPLATES):
            raise ValueError(f"unknown templates {sorted(unknown)}; there are {', '.join(TEXT_TEMPLATES)}")
        if self.template_probability and not self.templates:
            raise ValueError("template_probability is set, but templates is empty")

    @property
    def active(self) -> bool:
        probabilities = (self.template_probability, self.no_template_probability)
        return any((*probabilities, self.system_probability, self.no_system_probability))

    def choose(self, index: int) -> Choice:
        draw = random.Random(f"{self.seed}/{index}")
        template, system = None, None
        if (kind := draw.random()) < self.template_probability:
            template = TEXT_TEMPLATES[draw.choice(self.templates)]
        elif kind < self.template_probability + self.no_template_probability:
            template = NO_TEMPLATE
        if (kind := draw.random()) < self.system_probability:
            system = draw.choice(SYSTEM_PROMPTS)
        elif kind < self.system_probability + self.no_system_probability:
            system = ""
        return Choice(template, system)
