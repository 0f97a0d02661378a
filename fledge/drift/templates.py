"""Chat templates that a drafter may meet: the target's own, none, and those of other models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class ForeignTemplate:
    """Another model's chat format as text. Markers that the target's vocabulary lacks become ordinary text, as they would
    when someone serves a model with the wrong template."""

    system: str  # with "{}" for the content, as all of these
    user: str
    assistant: str
    opening: str  # before the answer
    preamble: str = ""  # stands first when there is no system prompt

    def render(self, messages: Messages) -> str:
        has_system = bool(messages) and messages[0]["role"] == "system"
        parts = ["" if has_system else self.preamble]
        parts += [getattr(self, message["role"]).replace("{}", message["content"]) for message in messages]
        return "".join(parts) + self.opening


FOREIGN: dict[str, ForeignTemplate] = {
    "ChatML": ForeignTemplate(
        system="<|im_start|>system\n{}<|im_end|>\n",
        user="<|im_start|>user\n{}<|im_end|>\n",
        assistant="<|im_start|>assistant\n{}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
    ),
    "Llama-3": ForeignTemplate(
        system="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        preamble="<|begin_of_text|>",
    ),
    "Alpaca": ForeignTemplate(
        system="{}\n\n",
        user="### Instruction:\n{}\n\n",
        assistant="### Response:\n{}\n\n",
        opening="### Response:\n",
        preamble="Below is an instruction that describes a task. Write a response that completes it.\n\n",
    ),
    "Vicuna": ForeignTemplate(
        system="{} ",
        user="USER: {} ",
        assistant="ASSISTANT: {}</s>",
        opening="ASSISTANT:",
        preamble="A chat between a curious user and an artificial intelligence assistant. ",
    ),
    "plain transcript": ForeignTemplate(
        system="({})\n\n", user="Human: {}\n\n", assistant="AI: {}\n\n", opening="AI:"
    ),
    "Gemma": ForeignTemplate(
        system="<bos><start_of_turn>user\n{}<end_of_turn>\n",
        user="<start_of_turn>user\n{}<end_of_turn>\n",
        assistant="<start_of_turn>model\n{}<end_of_turn>\n",
        opening="<start_of_turn>model\n",
        preamble="<bos>",
    ),
    "Mistral": ForeignTemplate(
        system="<s>[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]",
        user="[INST]{}[/INST]",
        assistant="{}</s>",
        opening="",
        preamble="<s>",
    ),
}  # fmt: skip

NAMES = ("own", "no template", "no BOS", *FOREIGN)
# The part of the suite that a quick run takes: less two that are hardly foreign to a model with ChatML or a transcript.
QUICK = tuple(name for name in NAMES if name not in ("ChatML", "Vicuna"))
# What training's augmentation calls a template that it renders the same way, but for a preamble or white space. All others
# are new to every drafter: training's transcript has other words.
TRAINED_AS = {"no template": "none", "ChatML": "chatml", "Llama-3": "llama3", "Alpaca": "alpaca", "Vicuna": "vicuna"}


def trained_on(trained: Mapping[str, Any]) -> list[str]:
    """Conditions of the suite that a drafter knows from its training, going by what is recorded of it."""
    if not trained.get("augmented"):
        return []
    known = trained.get("templates")
    if known is None:  # older records do not list them; recipes that do not either take all
        known = list(TRAINED_AS.values())
    return [name for name, training_name in TRAINED_AS.items() if training_name in known]


def own(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """The target's own template; a base model, which has none, gets the plain text."""
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return no_template(tokenizer, messages)


def no_template(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Nothing but the texts, with a blank line between; what the tokenizer itself adds (a BOS) stays."""
    return tokenizer.encode("\n\n".join(message["content"] for message in messages) + "\n\n")


def no_bos(tokenizer: Tokenizer, messages: Messages) -> list[int] | None:
    """The own template without the special token it begins with; None where it begins with none."""
    tokens = own(tokenizer, messages)
    is_special = tokens[0] == tokenizer.bos_token_id or not tokenizer.decode(tokens[:1])  # decoding leaves special ones out
    return tokens[1:] if is_special else None


def foreign(tokenizer: Tokenizer, name: str, messages: Messages) -> list[int]:
    return tokenizer.encode(FOREIGN[name].render(messages), add_special_tokens=False)


def all_templates(tokenizer: Tokenizer, messages: Messages) -> dict[str, list[int] | None]:
    """Every condition of the suite, the own one first."""
    return {
        "own": own(tokenizer, messages),
        "no template": no_template(tokenizer, messages),
        "no BOS": no_bos(tokenizer, messages),
        **{name: foreign(tokenizer, name, messages) for name in FOREIGN},
    }
