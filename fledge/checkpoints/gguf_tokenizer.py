"""Builds the tokenizer of a GGUF file, and writes it as `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fledge.chat_template import render
from fledge.checkpoints.gguf_file import GgufFile
from fledge.config_checks import shown
from fledge.errors import ModelError
from fledge.files import write_json
from fledge.tokenizer import Tokenizer as ModelTokenizer

MAX_PIECE_CHARACTERS = 64 << 20
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how sentencepiece spells a space

# The regular expression by which GPT-4 and its successors split words; models differ in how many digits stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "qwen2": WORDS.replace("DIGITS", r"\p{N}"),
    "llama-bpe": WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "dbrx": WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "gpt-4o": GPT_4O,
    "tekken": TEKKEN,
}
# `tokenizer.ggml.pre` -> how text is split; names on one line are synonyms
PRE_TOKENIZERS = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), "llama-bpe"),
    **dict.fromkeys(("gpt-2", "gpt2", "default"), "gpt-2"),
    "tekken": "tekken",
    "dbrx": "dbrx",  # Phi-4
    "gpt-4o": "gpt-4o",  # Phi-4-mini
}


class GgufTokenizer(ModelTokenizer):
    """The tokenizer of a GGUF file, built without transformers, whose import takes seconds."""

    def __init__(self, file: GgufFile) -> None:
        self._texts = {}
        self.path = file.path
        self._backend, self._named = build_tokenizer(file.metadata, str(file.path))
        self._template = file.metadata.get("tokenizer.chat_template")
        self._ids = {key: self._backend.token_to_id(piece) for key, piece in self._named.items()}

    def copy(self) -> GgufTokenizer:
        """Returns itself: it has no changing state, so threads may share it."""
        return self

    @cached_property
    def for_transformers(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend, clean_up_tokenization_spaces=False, chat_template=self._template, **self._named
        )

    @property
    def backend(self) -> Tokenizer:
        return self._backend

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        return self._ids.get("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._ids.get("eos_token")
        return () if eos is None else (eos,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id in self._ids.values() if token_id is not None)

    @property
    def chat_template(self) -> str | None:
        return self._template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self._backend.id_to_token(token_id) for token_id in ids]

    def _render(self, messages: list[dict[str, Any]], template: str | None, **options: Any) -> str:
        template = template or self._template
        assert template is not None, "`render_chat` checks that there is one"
        return render(template, messages, **(self._named | options))


def check_tokenizer(metadata: Mapping[str, Any], source: str) -> None:
    """Refuses tokenizer metadata whose values have the wrong type or whose lists have the wrong length."""
    pieces = metadata.get("tokenizer.ggml.tokens")
    kinds: dict[str, set[type]] = {"tokens": {str}, "merges": {str}, "scores": {int, float}, "token_type": {int}}
    for name, allowed in kinds.items():
        values = metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            continue
        if not isinstance(values, list) or not set(map(type, values)) <= allowed:
            raise ModelError(f"{source}: tokenizer.ggml.{name} holds values of the wrong kind")
        if name in ("scores", "token_type") and pieces and len(values) != len(pieces):
            raise ModelError(f"{source}: tokenizer.ggml.{name} has {len(values)} values for {len(pieces)} tokens")
    if any(" " not in merge for merge in metadata.get("tokenizer.ggml.merges") or ()):
        raise ModelError(f"{source}: tokenizer.ggml.merges holds a merge that is not two pieces")
    for name in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise ModelError(f"{source}: tokenizer.ggml.{name}_token_id must be a token id, not {shown(token)}")
    for name in ("model", "pre", "chat_template"):
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if not isinstance(metadata.get(key), str | None):
            raise ModelError(f"{source}: {key} must be text, not {shown(metadata[key])}")
    if pieces and sum(map(len, pieces)) > MAX_PIECE_CHARACTERS:
        raise ModelError(
            f"{source}: its tokens have {sum(map(len, pieces))} characters, at most {MAX_PIECE_CHARACTERS} are read"
        )


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer and its special tokens by Hugging Face's names. `metadata`: the file's key-value pairs."""
    check_tokenizer(metadata, source)
    pieces, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not pieces:
        raise ModelError(f"{source}: no tokenizer in the file")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, source)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, source), True
    else:
        raise ModelError(f"{source}: tokenizer type {model!r} is not supported; supported: gpt2, llama")

    for kind, is_special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        added = [
            AddedToken(piece, special=is_special, normalized=False)
            for piece, its in zip(pieces, kinds or (), strict=False)
            if its == kind
        ]
        tokenizer.add_tokens(added)

    named = {
        f"{key}_token": pieces[token_id]
        for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(token_id := metadata.get(f"tokenizer.ggml.{name}_token_id"), int) and 0 <= token_id < len(pieces)
    }
    _surround(
        tokenizer,
        named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return tokenizer, named


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, source: str) -> None:
    tokenizer, named = build_tokenizer(metadata, source)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        **named,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)


def _byte_level(metadata: Mapping[str, Any], source: str) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer, and whether it adds the BOS token if the file does not say so."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:  # the file is older than the key: the architecture decides how text is split
        name = "qwen2" if metadata.get("general.architecture") in ("qwen2", "qwen3", "qwen3moe") else "default"
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    # Llama 3 and Tekken encode a word that is a token as that token, even if no merges produce it.
    whole_words_first = kind in ("llama-bpe", "tekken")
    tokenizer = _bpe(metadata, source, merges, ignore_merges=whole_words_first)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in SPLITS)
    if kind in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind == "llama-bpe"


def _sentencepiece(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """A SentencePiece BPE tokenizer: the adjacent pair that makes the highest-scored piece is merged first."""
    pieces, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ModelError(f"{source}: the tokenizer's scores (tokenizer.ggml.scores) are missing")
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if unknown_id >= len(pieces):
        raise ModelError(f"{source}: tokenizer.ggml.unknown_token_id {unknown_id} is outside the vocabulary of {len(pieces)}")
    unknown = pieces[unknown_id]
    merges = _merges_by_score(pieces, scores)
    tokenizer = _bpe(metadata, source, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]:
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    ranked = []
    for piece, score in zip(pieces, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _bpe(metadata: Mapping[str, Any], source: str, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocab: dict[str, int] = {}
    for token_id, piece in enumerate(metadata["tokenizer.ggml.tokens"]):
        vocab.setdefault(piece, token_id)
    try:
        return Tokenizer(BPE(vocab, merges, **options))
    except Exception as error:  # tokenizers raises its own untyped errors
        raise ModelError(f"{source}: its tokenizer is inconsistent ({error})") from None


def _surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes the tokenizer add BOS and EOS tokens to every text."""
    if bos is None and eos is None:
        return
    marks = [mark for mark in (bos, eos) if mark is not None]
    before, after = [bos] if bos else [], [eos] if eos else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{mark}:1" for mark in before), "$B:1", *(f"{mark}:1" for mark in after)],
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in dict.fromkeys(marks)],
    )
