"""Text <-> token ids, chat templates, and streaming detokenisation."""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from fledge.errors import ModelError, RequestError, first_line, printable

Messages = Sequence[Mapping[str, Any]]
# SentencePiece's spelling of a space, and of bytes of characters that are not in its vocabulary.
_SPACE, _BYTE_TOKEN = "\u2581", re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer of a model folder, with its chat template."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        self._texts: dict[int, str] = {}
        self.path = Path(folder)
        odd = [file.name for file in sorted(Path(folder).glob("*")) if file.exists() and not (file.is_file() or file.is_dir())]
        if odd:  # reading a pipe would block forever
            raise ModelError(f"{folder}: {printable(odd[0])} is not a plain file")
        try:
            # Python code in the folder is never run, even if tokenizer_config.json asks for it.
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # transformers raises many types for a missing or damaged tokenizer
            raise ModelError(f"{folder}: its tokenizer cannot be loaded ({first_line(error)})") from error
        if self._tokenizer.chat_template is None:
            self._tokenizer.chat_template = _processor_template(Path(folder) / "chat_template.json")

    def copy(self) -> Tokenizer:
        """A copy that another thread can use at the same time."""
        other = copy.copy(self)
        other._tokenizer = copy.deepcopy(self._tokenizer)
        return other

    @property
    def for_transformers(self) -> Any:
        """The transformers tokenizer, for libraries that need one."""
        return self._tokenizer

    @property
    def backend(self) -> Any:
        """The tokenizer object of the `tokenizers` library."""
        return self._tokenizer.backend_tokenizer

    @cached_property
    def _byte_tables(self) -> tuple[list[bytes], list[bytes]] | None:
        """Two tables of each token's bytes, with and without special tokens; None if text is not the tokens' bytes joined."""
        from tokenizers.decoders import ByteLevel

        backend = self.backend
        if not isinstance(backend.decoder, ByteLevel):
            return None
        to_byte = _byte_level_alphabet()
        size = backend.get_vocab_size(with_added_tokens=True)
        tokens = [backend.id_to_token(token) or "" for token in range(size)]
        # A token with any other character, such as an added token, is its own text.
        table = [
            bytes(to_byte[char] for char in token) if all(char in to_byte for char in token) else token.encode()
            for token in tokens
        ]
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        return table, [b"" if token in special else data for token, data in zip(tokens, table, strict=True)]

    def incremental_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """The fastest streaming decoder for this tokenizer."""
        tables = self._byte_tables
        return (
            IncrementalDecoder(self, skip_special_tokens)
            if tables is None
            else ByteDecoder(tables[1 if skip_special_tokens else 0])
        )

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included; the model's embedding may be padded to more rows."""
        return len(self._tokenizer)

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @property
    def chat_template(self) -> str | None:
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        text = self._tokenizer.decode(list(ids), **options)
        assert isinstance(text, str)
        return text

    def text_of(self, token_id: int) -> str:
        """The text of one token inside a longer text (cached)."""
        if token_id not in self._texts:
            self._texts[token_id] = self.bytes_of(token_id).decode("utf-8", "replace")
        return self._texts[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes from the vocabulary: a token may be half a character, and decoding it alone may drop its space."""
        if (tables := self._byte_tables) is not None:
            return tables[0][token_id] if token_id < len(tables[0]) else b""
        token = self.token(token_id)
        if token is None:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if _SPACE in token:
            return token.replace(_SPACE, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if there is no such id."""
        return self.tokens([token_id])[0]

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation rendered by the chat template, as text that includes the special tokens."""
        if chat_template is None and not self.has_chat_template:
            raise RequestError("the model has no chat template; give one, or send a plain prompt")
        try:
            return self._render(
                [dict(message) for message in messages],
                chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except (TemplateError, TypeError, LookupError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            # Templates raise to refuse messages, and fail in many ways on messages they do not expect.
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def _render(self, messages: list[dict[str, Any]], template: str | None, **options: Any) -> str:
        text = self._tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        """The token ids of `render_chat`."""
        # The template has written the special tokens already.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _processor_template(file: Path) -> str | None:
    """The chat template in chat_template.json, where vision-language models keep it; None if there is no such file."""
    if not file.exists():
        return None
    try:
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{file}: holds no chat template ({first_line(error)}); fetch the model again") from None
    if not isinstance(template, str):
        raise ModelError(f"{file}: chat_template must be a text; fetch the model again")
    return template


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level tokenizers' spelling of bytes: printable Latin-1 characters as they are, others as characters from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class StreamDecoder(Protocol):
    """Turns a growing list of tokens into text deltas; joined, they are the text of the whole list."""

    def feed(self, ids: int | Iterable[int]) -> str:
        """Adds tokens and returns the text they complete; may be empty."""
        ...

    def flush(self) -> str:
        """Returns the text still held back, after the last token; an incomplete character becomes the replacement character."""
        ...


class ByteDecoder:
    """A `StreamDecoder` for byte-level tokenizers. Its table takes 1 us for a step's tokens, `IncrementalDecoder` 20 us.

    `table`: the bytes of each token; ids beyond it (rows that pad the embedding) have no text.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, ids: int | Iterable[int]) -> str:
        table = self._table
        try:
            if isinstance(ids, int):
                return self._decode(table[ids])
            return self._decode(b"".join([table[token] for token in ids]))
        except IndexError:
            known = [table[token] for token in ([ids] if isinstance(ids, int) else ids) if token < len(table)]
            return self._decode(b"".join(known))

    def flush(self) -> str:
        return self._decode(b"", True)


class IncrementalDecoder:
    """A `StreamDecoder` for any tokenizer.

        tokens   t0 t1 t2 t3 | t4 t5 | t6 …
                             ^       ^ emitted up to here
                             context: decoded again with what follows, so that a space which the tokenizer
                             drops at the beginning of a text is not dropped in the middle of one

    A piece is held back while its last character is incomplete.
    """

    REPLACEMENT = "\ufffd"  # what incomplete UTF-8 decodes to

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # the context, then what is held back
        self._num_context = 0

    def feed(self, ids: int | Iterable[int]) -> str:
        self._ids.extend([ids] if isinstance(ids, int) else ids)
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        known = self._decode(self._ids[: self._num_context])
        text = self._decode(self._ids)
        if len(text) <= len(known) or (text.endswith(self.REPLACEMENT) and not final):
            return ""
        # The last emission becomes the context, and the context before it is no longer needed.
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token ids of each word at the beginning of a text and after a space, as in vLLM.

    The ids after a space are listed only if they are as many and start with another token.
    """
    found: list[list[int]] = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found.append(spaced)
    return [word for word in found if word]
