"""Renders conversations to tokens and marks the tokens that the assistant wrote.

A chat template only gives text, but training needs to know which part of it the assistant wrote. To find it, the
conversation is rendered twice, once with a marker in place of each answer: the text between the markers is context.

    contexts[0]                           answers[0]   contexts[1]                                  answers[1]
    <|im_start|>user\\nHi<|im_end|>…\\n    Hello!       <|im_end|>\\n<|im_start|>user\\n…assistant\\n  Bye!  …
                                          ^^^^^^^^^^   ^^^^^^^^^^ the end-of-turn token has a loss too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fledge.errors import UserError
from fledge.tokenizer import Tokenizer
from fledge.training.data.samples import Sample

Message = dict[str, Any]  # role, content, and fields that some chat templates know: tool_calls, reasoning_content, …
Options = dict[str, Any]  # arguments of a chat template in addition to the messages: tools, enable_thinking, …


class TemplateError(UserError):
    """Raised if a chat template refuses a conversation, or if the answers cannot be found in the rendered text."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, cut at the answers: contexts[0] answers[0] contexts[1] … answers[n-1] contexts[n]."""

    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    is_whole: tuple[bool, ...] = ()  # whether each answer contains everything in its message; (): all do


@dataclass(frozen=True)
class Answer:
    """An assistant's turn: the exact ids that the target produced, if they are known."""

    ids: Sequence[int] | None = None  # None: encode the text
    has_loss: bool = True


THOUGHT, THOUGHT_END = "<think>", "</think>"


def split_thought(message: Message) -> Message:
    """Moves the thought in an assistant's message to `reasoning_content`, where chat templates expect it."""
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message or THOUGHT_END not in content:
        return message
    thought, _, answer = content.partition(THOUGHT_END)
    # The opening tag may be missing: the generation prompt of some templates already contains it.
    return {**message, "content": answer.strip("\n"), "reasoning_content": thought.replace(THOUGHT, "", 1).strip("\n")}


def is_open_thought(message: Message) -> bool:
    """Whether an answer was cut off inside its thought."""
    return THOUGHT in message["content"] and THOUGHT_END not in message["content"]


def _marker(index: int) -> str:
    return f"⟦answer{index}⟧"


class ChatFormat:
    """A tokenizer with one chat template: renders conversations and finds the answers in them."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.is_special = lru_cache(maxsize=None)(self._is_special)

    # --- text ---------------------------------------------------------------------------------------------------

    def require_template(self) -> None:
        """Checks the template with a short message before any data is read; raises TemplateError if it cannot render it."""
        try:
            self._text([{"role": "user", "content": "Hello"}], True)
        except TemplateError as error:
            raise TemplateError(f"data.chat_template cannot be used: {error}") from error

    def render(self, messages: Sequence[Message], options: Options | None = None, *, open_turn: bool = False) -> Rendered:
        """Renders a conversation. `open_turn`: end with the opening of the assistant's next turn, as for generation."""
        options = options or {}
        if any("tool_calls" in message or "reasoning_content" in message for message in messages):
            return self._render_turn_by_turn(messages, options, open_turn)
        if any(THOUGHT_END in message["content"] for message in messages if message["role"] == "assistant"):
            return self._render_thoughts(messages, options, open_turn)
        return self._render_marked(messages, options, open_turn)

    def _render_thoughts(self, messages: Sequence[Message], options: Options, open_turn: bool) -> Rendered:
        """Renders answers with a thought in their content: templates take it as reasoning, keep it as text, or remove it."""
        try:
            return self._render_turn_by_turn(list(map(split_thought, messages)), options, open_turn)
        except TemplateError:
            rendered = self._render_marked(messages, options, open_turn)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        content = messages[last]["content"]
        if open_turn or rendered.answers[-1].strip() == content.strip():
            return rendered
        # The template removes thoughts from past turns. The model wrote this one after its prompt, so it is put there.
        prompt = self._text(messages[:last], True, options)
        if prompt.rstrip().endswith(THOUGHT):
            content = content.partition(THOUGHT)[2].lstrip("\n") if content.lstrip().startswith(THOUGHT) else content
        earlier = len(rendered.answers) - 1
        contexts, answers = (*[""] * earlier, prompt, self._closing_text), (*[""] * earlier, content)
        return Rendered(contexts, answers, (*[False] * earlier, True))

    def _render_marked(self, messages: Sequence[Message], options: Options, open_turn: bool) -> Rendered:
        """Renders answers that consist of their content only: markers replace them, and the text between markers is context."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        marked = [dict(message) for message in messages]
        for number, i in enumerate(turns):
            marked[i]["content"] = _marker(number)
        full = self._text(messages, open_turn, options)
        rest = self._text(marked, open_turn, options) if turns else full
        contexts = []
        for number in range(len(turns)):
            context, found, rest = rest.partition(_marker(number))
            if not found:
                raise TemplateError("the chat template leaves out an answer")
            contexts.append(context)
        contexts.append(rest)
        answers = self._match(full, contexts, [messages[i]["content"] for i in turns])
        if answers is None:
            raise TemplateError("the chat template changes the answers, so they cannot be found in its text")
        return self._open_at_generation(Rendered(tuple(contexts), tuple(answers)))

    def _render_turn_by_turn(self, messages: Sequence[Message], options: Options, open_turn: bool) -> Rendered:
        """Renders answers with reasoning or tool calls: each is the text between its prompt and the end of its turn."""
        full, closing = self._text(messages, open_turn, options), self._closing_text
        if not closing:
            raise TemplateError("the chat template does not mark the end of an answer, so tool calls cannot be found in it")
        contexts, answers, is_whole, position = [], [], [], 0
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in turns:
            prompt = self._text(messages[:i], True, options)
            end = full.find(closing, len(prompt)) if full.startswith(prompt) else -1
            if end < 0:  # the template has since dropped reasoning from the prompt: this turn is only context for later ones
                contexts.append("")
                answers.append("")
                is_whole.append(False)
                continue
            begin, answer = len(prompt), full[len(prompt) : end]
            reasoning, calls = messages[i].get("reasoning_content", ""), messages[i].get("tool_calls", ())
            if not reasoning and not calls:  # the template itself puts an empty thought before an answer without thinking
                begin += max(0, answer.find(messages[i]["content"].strip()))
            is_whole.append(reasoning.strip() in answer and all(call["function"]["name"] in answer for call in calls))
            contexts.append(full[position:begin])
            answers.append(full[begin:end])
            position = end
        if turns and not is_whole[-1] and not open_turn:
            raise TemplateError("the chat template leaves out the reasoning or the tool calls of an answer")
        return Rendered((*contexts, full[position:]), tuple(answers), tuple(is_whole))

    @cached_property
    def _closing_text(self) -> str:
        turn = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _marker(0)}]
        return self._text(turn, False).partition(_marker(0))[2].rstrip()

    @staticmethod
    def _match(full: str, contexts: list[str], contents: list[str]) -> list[str] | None:
        """Returns the answers as they are in `full`, where templates may have stripped or changed them; None if not found."""
        if not full.startswith(contexts[0]):
            return None
        position, answers = len(contexts[0]), []
        for number, content in enumerate(contents):
            last = number == len(contents) - 1
            for variant in (content, content.strip(), content.rstrip(), content.lstrip()):
                if full.startswith(variant + contexts[number + 1], position):
                    break
            else:
                # The template rewrote the answer (for example, removed its thought): take the text up to the next context.
                end = len(full) - len(contexts[-1]) if last else full.find(contexts[number + 1] or "\0", position)
                if end < position or not full.endswith(contexts[-1]):
                    return None
                variant = full[position:end]
            answers.append(variant)
            position += len(variant) + len(contexts[number + 1])
        return answers if position == len(full) else None

    @cached_property
    def opening_gap(self) -> str:
        """White space that the template puts between the generation prompt and an answer ("[/INST]" + " Hello").

        The model writes it, so it belongs to the answer.
        """
        user = {"role": "user", "content": "Hello"}
        prompt = self._text([user], True)
        opened = self._text([user, {"role": "assistant", "content": _marker(0)}], False).partition(_marker(0))[0]
        gap = opened[len(prompt) :] if opened.startswith(prompt) else ""
        return gap if gap.isspace() else ""

    def _open_at_generation(self, rendered: Rendered) -> Rendered:
        if not rendered.answers or not (gap := self.opening_gap):
            return rendered
        contexts, answers = list(rendered.contexts), list(rendered.answers)
        for i, answer in enumerate(answers):
            if contexts[i].endswith(gap):
                contexts[i], answers[i] = contexts[i][: -len(gap)], gap + answer
        return Rendered(tuple(contexts), tuple(answers))

    def _text(self, messages: Sequence[Message], open_turn: bool, options: Options | None = None) -> str:
        try:
            return self.tokenizer.render_chat(messages, open_turn, self.chat_template, **(options or {}))
        except UserError as error:
            raise TemplateError(str(error)) from error

    def user_opening(self) -> tuple[list[int], list[int]]:
        """Returns (the ids that open a user's turn, the ids that may end it), with which the target can write user turns."""
        before, _, after = self._text([{"role": "user", "content": _marker(0)}], False).partition(_marker(0))
        return self.encode(before), self._ends(after)

    def stop_ids(self) -> list[int]:
        """Returns the ids that may end an answer; the template's own end-of-turn token is the first."""
        return self._ends(self._closing_text)

    def _ends(self, text: str) -> list[int]:
        ids = self.encode(text)
        closing = ids[: self._closing_length(ids)]
        return list(dict.fromkeys([*closing[-1:], *self.tokenizer.eos_token_ids]))

    def require_prompt(self, rendered: Rendered, messages: Sequence[Message], options: Options) -> None:
        """Raises TemplateError unless the text before the last answer is its prompt: some templates rewrite past turns."""
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        parts = [part for pair in zip(rendered.contexts, (*rendered.answers[:-1], ""), strict=False) for part in pair]
        if "".join(parts) != self._text(messages[:last], True, options):
            raise TemplateError("the chat template renders the prompt of an answer differently once the answer follows it")

    # --- tokens -------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def tokens(self, rendered: Rendered, answers: Sequence[Answer], *, bos: bool = False) -> Sample:
        """Returns ids and loss mask up to the last answer's end-of-turn token, inclusive."""
        ids, mask = self._assemble(rendered, answers, bos)
        end = len(mask) - np.argmax(mask[::-1]) if any(mask) else 0  # text after the last answer has no loss
        return Sample(np.array(ids[:end], np.int32), np.array(mask[:end], bool))

    def prompt_ids(self, messages: Sequence[Message], answers: Sequence[Answer], options: Options | None = None) -> list[int]:
        """Returns the prompt for the assistant's next turn. Earlier answers keep the ids that the target gave, unless the
        template rewrites them (drops old thinking): the target then sees the same text as in serving."""
        rendered = self.render(messages, options, open_turn=True)
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        kept = [
            answer if text.strip() == content.strip() else Answer()
            for answer, text, content in zip(answers, rendered.answers, contents, strict=True)
        ]
        return self._assemble(rendered, kept, bos=False)[0]

    def _assemble(self, rendered: Rendered, answers: Sequence[Answer], bos: bool) -> tuple[list[int], list[bool]]:
        assert len(answers) == len(rendered.answers)
        is_whole = rendered.is_whole or (True,) * len(answers)
        answers = [answer if whole else Answer(has_loss=False) for answer, whole in zip(answers, is_whole, strict=True)]
        # Templates contain the first token themselves; for text without a template the tokenizer adds it (`bos`).
        ids = self.tokenizer.encode("", add_special_tokens=True) if bos else []
        ids += self.encode(rendered.contexts[0])
        mask = [False] * len(ids)
        for answer, text, context in zip(answers, rendered.answers, rendered.contexts[1:], strict=True):
            answer_ids = self.encode(text) if answer.ids is None else list(answer.ids)
            context_ids = self.encode(context)
            num_closing = self._closing_length(context_ids)
            closing_has_loss = answer.has_loss
            if answer.ids is not None and answer_ids:
                if self.is_special(answer_ids[-1]):  # the answer includes its end-of-turn token
                    context_ids, num_closing = context_ids[num_closing:], 0
                else:  # cut off by a limit: the target did not end its turn here
                    closing_has_loss = False
            ids += answer_ids + context_ids
            mask += [answer.has_loss] * len(answer_ids) + [closing_has_loss] * num_closing
            mask += [False] * (len(context_ids) - num_closing)
        return ids, mask

    def _closing_length(self, context_ids: list[int]) -> int:
        """Returns how many ids end the assistant's turn: up to the first special one, if only white space precedes it."""
        for i, token_id in enumerate(context_ids):
            if self.is_special(token_id):
                return i + 1
            if self.tokenizer.decode([token_id]).strip():
                break
        return 0

    def _is_special(self, token_id: int) -> bool:
        return token_id in self.tokenizer.special_ids or not self.tokenizer.decode([token_id], skip_special_tokens=True)
