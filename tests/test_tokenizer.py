"""Streaming detokenisation and chat templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import MappingProxyType

import pytest

from fledge.checkpoints.gguf import convert
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.errors import ModelError, RequestError
from fledge.tokenizer import ByteDecoder, IncrementalDecoder, Tokenizer, bad_word_token_ids
from fledge.training.targets import toy
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.test_gguf import sentencepiece_metadata
from tests.tiny import tiny_decoder

LETTERS = "he llo wor\n\t12,.é世界🎉👩‍👩‍👧 ñ\u200bЖ"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer loaded by transformers, and directly from the GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    metadata = sentencepiece_metadata() if request.param == "sentencepiece" else None
    file = write_gguf(folder / "tiny.gguf", tiny_decoder(vocab_size=288), "llama", metadata=metadata)
    return Tokenizer(convert(file, folder / "folder")), GgufTokenizer(GgufFile(file))


@pytest.fixture(scope="module", params=["folder", "file"])
def tokenizer(request: pytest.FixtureRequest, both: tuple[Tokenizer, Tokenizer]) -> Tokenizer:
    return both[request.param == "file"]


@pytest.mark.parametrize("seed", range(20))
def test_tokenizer_from_gguf_equals_transformers(both: tuple[Tokenizer, Tokenizer], seed: int) -> None:
    theirs, ours = both
    rng = random.Random(seed)
    text = "".join(rng.choices([*LETTERS, "<|im_start|>", "<s>", "<think>"], k=60))
    for marks in (True, False):
        ids = theirs.encode(text, add_special_tokens=marks)
        assert ours.encode(text, add_special_tokens=marks) == ids
        assert ours.decode(ids, marks) == theirs.decode(ids, marks)
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "special_ids", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert [ours.token(token_id) for token_id in ids] == [theirs.token(token_id) for token_id in ids]
    assert ours.tokens(ids) == theirs.tokens(ids)
    assert [ours.text_of(token_id) for token_id in ids] == [theirs.text_of(token_id) for token_id in ids]
    assert ours.copy().encode(text) == theirs.copy().encode(text) == ours.for_transformers.encode(text)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'user' %}\n    U:{{ m.content | trim }}\n"
    "  {% else %}A:{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
    "{% set ns.last = m.content %}{% endfor %}{{ ns.last }}{{ tools | tojson }}{{ mood is defined }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ m.reasoning_content }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ {'a': 1} | tojson }}{{ strftime_now('%Y') }}",
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(both: tuple[Tokenizer, Tokenizer], template: str) -> None:
    theirs, ours = both
    talk = [*HELLO, {"role": "assistant", "content": " well ", "thinking": "hm"}, {"role": "user", "content": "é\n ?  "}]
    for options in ({}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"mood": 1}, {"continue_final_message": True}):
        results = []
        for tokenizer in (theirs, ours):
            try:
                results.append(tokenizer.render_chat(talk, chat_template=template, **options))
            except RequestError:
                results.append(None)
        assert results[0] == results[1]


def test_chat_template_in_separate_file(tmp_path: Path) -> None:
    """The processors of Gemma 3 and Mistral 3 store the chat template in a separate file."""
    toy.save_tokenizer(tmp_path)
    template = Tokenizer(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not Tokenizer(tmp_path).has_chat_template
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": template}))
    assert template is not None
    assert Tokenizer(tmp_path).chat_template == template
    for broken in ("{", "[]", '{"chat_template": 3}', "{}"):
        file.write_text(broken)
        with pytest.raises(ModelError, match=r"chat_template\.json"):
            Tokenizer(tmp_path)


def test_a_template_stays_in_its_sandbox(both: tuple[Tokenizer, Tokenizer]) -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{% set n = namespace() %}{% set n.__x = 1 %}",
        "{{ messages.append(1) }}",
    ):
        for tokenizer in both:
            try:
                assert tokenizer.render_chat(HELLO, chat_template=template) == ""
            except RequestError:
                continue


@pytest.mark.parametrize("seed", range(20))
def test_streamed_pieces_add_up_to_the_text(tokenizer: Tokenizer, seed: int) -> None:
    """Streamed pieces add up to the whole text, fed one token or several at a time, with hidden special tokens between."""
    rng = random.Random(seed)
    text = "".join(rng.choices(LETTERS, k=60))
    ids = tokenizer.encode(text)
    for _ in range(3):
        ids.insert(rng.randrange(len(ids)), 1)
    # A special token inside a character's bytes breaks that character, so compare with decoding all ids at once.
    decoder, pieces, at = IncrementalDecoder(tokenizer), [], 0
    while at < len(ids):
        step = rng.choice([1, 1, 1, 2, 5])
        pieces.append(decoder.feed(ids[at : at + step] if step > 1 else ids[at]))
        at += step
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len([piece for piece in pieces if piece]) > 10  # most tokens produce text at once


def test_encode_decode_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(LETTERS)) == LETTERS


def test_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    before, *character = tokenizer.encode("h🎉", add_special_tokens=False)[-5:]
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.feed(before) == "h"
    assert [decoder.feed(token_id) for token_id in character] == ["", "", "", "🎉"]
    assert decoder.flush() == ""


def test_flush_shows_incomplete_character_as_replacement(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.feed(tokenizer.encode("🎉", add_special_tokens=False)[-4:-2]) == ""
    assert set(decoder.flush()) == {"\ufffd"}
    assert decoder.flush() == ""


def test_special_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    assert IncrementalDecoder(tokenizer).feed([1]) == ""
    assert IncrementalDecoder(tokenizer, skip_special_tokens=False).feed([1]) == tokenizer.token(1)


def test_chat_options(tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ mood }}"
    assert tokenizer.render_chat(HELLO, chat_template=template, mood="!") == "hello>!"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False, chat_template=template) == "hello"
    assert tokenizer.render_chat(HELLO, chat_template=template, continue_final_message=True) == "hello"
    ids = tokenizer.apply_chat_template(HELLO, chat_template=template)
    assert ids == tokenizer.encode("hello>", add_special_tokens=False)


def test_template_error_is_reported(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        tokenizer.render_chat(HELLO, chat_template="{{ raise_exception('roles must alternate') }}")


def test_no_chat_template(tmp_path: Path) -> None:
    decoder, metadata = tiny_decoder(vocab_size=288), {"tokenizer.chat_template": None}
    file = write_gguf(tmp_path / "tiny.gguf", decoder, "llama", metadata=metadata)
    tokenizer = Tokenizer(convert(file, tmp_path / "folder"))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat(HELLO)
    assert tokenizer.render_chat(HELLO, chat_template="{{ messages[0].content }}") == "hello"


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded") as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)


class WordTokenizer:
    """A word with a leading space has other tokens than the word alone; long words are two tokens."""

    ids = MappingProxyType({"cat": [1], " cat": [2], "zebra": [3, 4], " zebra": [5, 4], "12": [6, 7], " 12": [8, 6, 7]})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self.ids[text]


def test_bad_words_with_and_without_a_space() -> None:
    words = bad_word_token_ids(WordTokenizer(), ["cat", " zebra", "12"])
    # The variant with a separate space token adds nothing: the tokens after the space are banned already.
    assert words == [[1], [2], [3, 4], [5, 4], [6, 7]]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_byte_table_decoder_equals_decoding_at_once(tokenizer: Tokenizer, seed: int, skip_special_tokens: bool) -> None:
    """Also for ids that break characters, special tokens and ids out of range. Only byte-level tokenizers have the table."""
    decoder = tokenizer.incremental_decoder(skip_special_tokens)
    if any("\u2581" in token for token in tokenizer.tokens(tokenizer.encode("a b"))):  # sentencepiece
        assert isinstance(decoder, IncrementalDecoder)
        return
    assert isinstance(decoder, ByteDecoder)
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(300)] + tokenizer.encode("h\u00e9\U0001f389")[:-1]
    pieces, at = [], 0
    while at < len(ids):
        step = rng.choice([1, 1, 2, 5])
        pieces.append(decoder.feed(ids[at : at + step] if step > 1 else ids[at]))
        at += step
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)
