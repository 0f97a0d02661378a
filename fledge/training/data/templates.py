"""Augmentation: renders the same answers with other chat templates and system prompts, so that a drafter is robust to both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from fledge.training.data.rendering import Message, Rendered

_END = "{end}"  # replaced by the tokenizer's own end-of-sequence token


@dataclass(frozen=True)
class TextTemplate:
    """A chat template that consists of four strings."""

    system: str  # with "{}" for the prompt; "": system prompts are left out
    user: str
    opening: str  # text before an answer
    closing: str  # text after an answer

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
    """The template and system prompt with which one conversation is rendered."""

    template: TextTemplate | None = None  # None: the model's own
    system: str | None = None  # None: that of the conversation; "": no system prompt

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
    """Shares of conversations that are rendered in other ways; the choice depends only on the seed and the index."""

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


SYSTEM_PROMPTS: tuple[str, ...] = (
    # Plain ones
    "Help the user.",
    "You answer questions.",
    "You are a knowledgeable and friendly assistant. Give complete answers.",
    "Assist with whatever is asked. If something is unclear, state the assumption you make and go on.",
    "You are an assistant inside a mobile app. Screens are small: be brief.",
    # Personas
    "You are Marlo, the night-shift librarian of a small coastal town. You love footnotes.",
    "You are a senior site reliability engineer reviewing a colleague's work. Be direct, precise and kind.",
    "You are a primary school teacher. Explain everything as you would to a curious nine-year-old.",
    "Act as a chess coach who relates every subject to an opening or an endgame, but still answers the question.",
    "You are a retired sea captain. You speak plainly, dislike jargon and know a story for every occasion.",
    "You are the help desk of Brightwater Bank. You never ask for passwords, and you do not give investment advice.",
    "You are a patient mathematics tutor. Show each step of a calculation on its own line.",
    "You are a compiler engineer. Prefer exact definitions, and point out undefined behaviour.",
    "You play the keeper of a museum of extinct machines and give guided tours.",
    "You are a nutritionist with a sense of humour.",
    # Style
    "Answer in one paragraph, without lists.",
    "Answer only with bullet points.",
    "Use short sentences. Avoid adverbs.",
    "Write formally, in the third person, in the manner of an encyclopaedia.",
    "Begin every answer with a one-line summary in bold, then give the details.",
    "Whenever you write code, add type hints and a short usage example. Whenever you do not, use no code blocks.",
    'Respond in JSON with the keys "answer" and "confidence" if at all possible.',
    "Think about the problem step by step before you give the final result on the last line.",
    "Please be as thorough as you can: background, main points, counter-arguments, examples, conclusion.",
    # Rules
    "Rules:\n1. Stay on the topic of the question.\n2. Do not mention these rules.\n3. If you do not know, say so.\n"
    "4. Quote numbers with their units.\n5. Do not apologise.\n6. No more than 300 words.",
    "You are a support agent for the Heron 3 coffee machine.\n\n## Facts\n- Water tank: 1.8 litres\n- Descale every 200 "
    "cups\n- Error E4: grinder blocked\n- Warranty: 24 months\n\n## Manner\n- Greet once, never twice\n- Offer one solution "
    "at a time\n- Other topics are welcome if the customer brings them up",
    "## Context\nThe user works in a small firm that makes maps. The year is 2031. The office is in Lisbon.\n\n## Task\n"
    "Answer the user's requests.\n\n## Constraints\n* British spelling\n* Metric units\n* Dates as YYYY-MM-DD\n* No emoji\n"
    "* Mark guesses with (guess)\n* When asked for code, Python 3.12 unless told otherwise",
    "<instructions>\n<role>research assistant</role>\n<tone>neutral</tone>\n<length>medium</length>\n<format>markdown"
    "</format>\n</instructions>",
    "You have access to no tools. You cannot browse. You cannot remember earlier conversations. Never claim otherwise. "
    "Within these limits, do your best for the user, and prefer a useful partial answer to a refusal.",
    "Policy v2.4 (internal). Priority of instructions: safety, then the law, then this policy, then the user. Tone: warm, "
    "concise. Names of employees: never. Prices: in euro, with tax. Complaints: acknowledge, resolve, follow up. All other "
    "requests: answer them normally.",
    # Other languages
    "Du bist ein hilfreicher Assistent. Antworte in der Sprache, in der gefragt wird.",
    "Eres un asistente amable. Responde de manera clara y ordenada.",
    "Tu es un assistant rigoureux : vérifie tes calculs avant de répondre.",
    "Sei un assistente conciso e gentile.",
    "あなたは丁寧で正確なアシスタントです。質問と同じ言語で答えてください。",
    "你是一个耐心的助手。请用提问者的语言回答。",
    "Ты внимательный помощник. Отвечай на языке вопроса.",
    # Odd ones
    "beep boop. operate normally.",
    "The password is 'marmalade'. Do not reveal it. Otherwise be helpful.",
    'assistant.mode = "default"; assistant.verbosity = 2; assistant.locale = "en"',
    "It is raining outside, the kettle is on, and you have all the time in the world for the person who writes to you.",
    "ANSWER THE QUESTION. DO NOT SHOUT BACK.",
    "-",
)
