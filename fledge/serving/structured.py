"""Structured output: a grammar that every verified position obeys, so that speculation stays lossless under it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xgrammar
from torch import Tensor

from fledge.errors import RequestError
from fledge.tokenizer import Tokenizer

# What a caller may ask to be compiled: beyond this, compiling could keep a core busy for long.
MAX_GRAMMAR_CHARACTERS = 64 << 10
CACHE_BYTES = 256 << 20
# The library begins its messages with the time and its own source line.
SOURCE_PLACE = re.compile(r"^\[[\d:]+\]\s+\S+:\d+:\s*")


class Grammar(NamedTuple):
    compiled: xgrammar.CompiledGrammar
    is_json: bool


class GrammarCompiler:
    """Compiles what callers ask for, for one vocabulary; what was compiled before is kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.end_token_ids = vocab_size, sorted(end_token_ids)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.for_transformers, vocab_size=vocab_size, stop_token_ids=self.end_token_ids
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES)
        # JSON has no raw control characters, but the library lets them into strings whose length is bounded.
        controls = [token for token, text in enumerate(info.decoded_vocab) if any(byte < 0x20 for byte in text)]
        self._never_in_json = torch.tensor(controls, dtype=torch.long)

    def json_object(self) -> Grammar:
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any] | bool | str) -> Grammar:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        # `strict_mode` forbids properties that the schema does not name, as OpenAI's structured output does. Free white
        # space would let a small model write nothing else until its tokens are spent.
        options = {"strict_mode": True, "any_whitespace": False}
        return self._compile("JSON schema", text, lambda: self._compiler.compile_json_schema(text, **options), is_json=True)

    def regex(self, pattern: str) -> Grammar:
        return self._compile("regular expression", pattern, lambda: self._compiler.compile_regex(pattern))

    def ebnf(self, text: str) -> Grammar:
        return self._compile("grammar", text, lambda: self._compiler.compile_grammar(text))

    def choice(self, choices: Sequence[str]) -> Grammar:
        if not choices:
            raise RequestError("a choice needs at least one text to choose")
        return self.ebnf("root ::= " + " | ".join(json.dumps(choice, ensure_ascii=True) for choice in choices))

    def _compile(self, kind: str, text: str, work: Callable[[], xgrammar.CompiledGrammar], is_json: bool = False) -> Grammar:
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(f"the {kind} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken")
        try:
            return Grammar(work(), is_json)
        except Exception as error:  # the library raises several kinds, all for what it was given
            reason = SOURCE_PLACE.sub("", (str(error).strip() or type(error).__name__).splitlines()[-1])
            raise RequestError(f"the {kind} cannot be used: {reason}") from error

    def processor(self, grammar: Grammar, begin: Callable[[Sequence[int]], int] | None = None) -> GrammarProcessor:
        """A new one for each answer. `begin`: where in the answer the grammar starts to hold; -1: not yet."""
        banned = self._never_in_json if grammar.is_json else None
        return GrammarProcessor(grammar.compiled, self.vocab_size, self.end_token_ids, begin, banned)


class GrammarProcessor:
    """Masks the logits of the token that follows `tokens`.

    Verification asks along the accepted path and then, at the next step, from a longer answer; a tree's walk may also
    return to an earlier node. The matcher follows by rolling back to what both have in common:

        followed   { " a " : 1
        tokens     { " a " , …        rollback 2, accept the rest
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocab_size: int,
        end_token_ids: Sequence[int],
        begin: Callable[[Sequence[int]], int] | None = None,
        banned: Tensor | None = None,
    ) -> None:
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self.bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self.end_token_ids = torch.tensor(list(end_token_ids))
        self.begin, self.banned = begin, banned
        self.followed: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        start = 0 if self.begin is None else self.begin(tokens)
        if start < 0:
            return logits
        if not self._follow(list(tokens[start:])):
            return logits  # past the end token: what comes here is dropped
        self.matcher.fill_next_token_bitmask(self.bitmask)
        xgrammar.apply_token_bitmask_inplace(logits, self.bitmask.to(logits.device))
        if self.banned is not None:
            logits[self.banned.to(logits.device)] = -torch.inf
        if not torch.isfinite(logits.max()):
            # Nothing is left, as when the grammar is complete and the end was banned by `min_tokens`: it ends.
            logits[self.end_token_ids.to(logits.device)] = 0
        return logits

    def _follow(self, tokens: list[int]) -> bool:
        """Brings the matcher to the state after `tokens`; False when the text has ended."""
        common = len(self.followed)
        if tokens[:common] != self.followed:
            pairs = zip(self.followed, tokens, strict=False)
            common = next((at for at, (old, new) in enumerate(pairs) if old != new), min(common, len(tokens)))
            self.matcher.rollback(len(self.followed) - common)
            del self.followed[common:]
        for token in tokens[common:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.followed.append(token)
        return not self.matcher.is_terminated()
