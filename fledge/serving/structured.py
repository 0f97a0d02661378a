"""Structured output: grammars whose masks apply at every verified position, so that speculation stays lossless."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import xgrammar
from torch import Tensor

from fledge.errors import RequestError
from fledge.kernels.bits import pack_bits
from fledge.serving.errors import ApiError
from fledge.serving.grammar_process import GrammarProcess
from fledge.serving.grammar_worker import compile_grammar
from fledge.serving.json_patterns import FORMATS
from fledge.serving.limits import Limits, check_grammar_size
from fledge.serving.mask_thread import MaskThread, MaskTimeout
from fledge.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20
# The limit on all masks of a step together, as a multiple of the limit on one mask.
STEP_MASKS = 10
# Slow masks after which an answer ends. A single one may contain a garbage collection, which runs on whatever thread allocates
# and takes 0.12 s over a large heap. In an hour of hostile traffic two ordinary answers ended, probably for that.
SLOW_MASKS = 2
TOO_SLOW = "the grammar's token masks take too long to compute, as those of an ambiguous grammar do; make it simpler"


class Grammar(NamedTuple):
    compiled: xgrammar.CompiledGrammar
    is_json: bool = False
    is_plain: bool = False  # its masks take microseconds in any state


class MaskClock:
    """Sums the CPU seconds of masks in the current step, over all requests of the engine."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.spent = 0.0

    def new_step(self) -> None:
        self.spent = 0.0

    def is_too_much(self, seconds: float) -> bool:
        """Whether a mask that took `seconds` is too slow: it exceeds the limit, or is a slow one in a slow step."""
        self.spent += seconds
        return seconds > self.limit or (self.spent > STEP_MASKS * self.limit and seconds > self.limit / STEP_MASKS)


class GrammarCompiler:
    """Compiles clients' grammars for one vocabulary, with a cache. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        self.vocab_size, self.end_token_ids, self.limits = vocab_size, sorted(end_token_ids), limits or Limits()
        self.info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.for_transformers, vocab_size=vocab_size, stop_token_ids=self.end_token_ids
        )
        self.clock, self.mask_thread = MaskClock(self.limits.max_mask_seconds), MaskThread()
        self._process = GrammarProcess(self.info.serialize_json(), self.limits)
        self._cache: OrderedDict[tuple[str, str], xgrammar.CompiledGrammar] = OrderedDict()
        self._cache_bytes = 0
        self._lock = threading.Lock()
        # JSON allows no raw control characters, but the library does in strings with a bounded length.
        controls = [token for token, text in enumerate(self.info.decoded_vocab) if any(byte < 0x20 for byte in text)]
        num_words = xgrammar.allocate_token_bitmask(1, vocab_size).shape[1]
        self.never_in_json = torch.from_numpy(pack_bits(controls, num_words))

    def close(self) -> None:
        self._process.close()
        self.mask_thread.close()

    def json_object(self) -> Grammar:
        """Returns the grammar of any JSON object, compiled in this process: it is trusted, and quick to compile."""
        kind, text = "JSON schema", '{"type": "object"}'
        with self._lock:
            if (kind, text) not in self._cache:
                compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)
                self._keep((kind, text), compile_grammar(compiler, kind, text))
            return Grammar(self._cache[kind, text], is_json=True, is_plain=True)

    def json_schema(self, schema: dict[str, Any] | bool | str) -> Grammar:
        """Compiles a schema, or its JSON text, as rewritten by `supported_schema`: the library ignores other keywords."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        # JSON's syntax is unambiguous, so masks are quick. A regular expression in a schema (`pattern`, `patternProperties`)
        # may be ambiguous; those of formats are not.
        ours = sum(text.count(f'"pattern": {json.dumps(pattern)}') for pattern in FORMATS.values() if pattern is not None)
        return Grammar(self._compile("JSON schema", text), is_json=True, is_plain=text.count('"pattern') == ours)

    def regex(self, pattern: str) -> Grammar:
        return Grammar(self._compile("regular expression", pattern))

    def ebnf(self, text: str) -> Grammar:
        return Grammar(self._compile("grammar", text))

    def choice(self, choices: Sequence[str]) -> Grammar:
        if not choices:
            raise RequestError("a choice needs at least one text to choose")
        text = "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=True) for choice in choices)
        return Grammar(self._compile("grammar", text), is_plain=True)

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        check_grammar_size(kind, len(text), self.limits)
        with self._lock:
            if (found := self._cache.get((kind, text))) is not None:
                self._cache.move_to_end((kind, text))
                return found
        compiled = xgrammar.CompiledGrammar.deserialize_json(self._process.compile(kind, text), self.info)
        with self._lock:
            self._keep((kind, text), compiled)
        return compiled

    def _keep(self, key: tuple[str, str], compiled: xgrammar.CompiledGrammar) -> None:
        if key in self._cache:
            return
        self._cache[key] = compiled
        self._cache_bytes += compiled.memory_size_bytes
        while self._cache_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].memory_size_bytes

    def processor(self, grammar: Grammar, begin_mark: Sequence[int] = (), caller: str = "") -> GrammarProcessor:
        """Returns a processor for one answer. `begin_mark`: tokens after which the grammar applies; (): from the beginning."""
        return GrammarProcessor(self, grammar, list(begin_mark), caller)


class GrammarProcessor:
    """Masks the logits of the token that follows `tokens`.

    Verification asks for each token of the accepted path, and at the next step for those of a longer answer. In a tree it may
    also return to an earlier node. The matcher rolls back to the common prefix and accepts the rest:

        followed   { " a " : 1
        tokens     { " a " , …        rollback 2, accept the rest
    """

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, begin_mark: list[int], caller: str) -> None:
        self.matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self.bitmask = xgrammar.allocate_token_bitmask(1, compiler.vocab_size)
        self.begin_mark, self.clock = begin_mark, compiler.clock
        self.end_token_ids = torch.tensor(compiler.end_token_ids)
        self.banned_bits = compiler.never_in_json if grammar.is_json else None
        self.run: Callable[[Callable[[], tuple[bool, float]]], tuple[bool, float]] | None = None  # None: in this thread
        if not grammar.is_plain:
            self.run = partial(compiler.mask_thread.run, limit=compiler.clock.limit, caller=caller)
        self.followed: list[int] = []
        self.num_slow = 0
        self.failure: RequestError | ApiError | None = None  # ends the request; no masks apply from there on

    def fill(self, tokens: Sequence[int], mask_W: Tensor) -> None:
        """`sampling.TokenMask`: clears the bits of the tokens that must not follow `tokens`."""
        if self._fill_bitmask(tokens):
            mask_W &= self.bitmask[0]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        if not self._fill_bitmask(tokens):
            return logits
        xgrammar.apply_token_bitmask_inplace(logits, self.bitmask.to(logits.device))
        if not torch.isfinite(logits.max()):
            # No token is allowed, for example if the grammar is complete and `min_tokens` bans the end: allow the end.
            logits[self.end_token_ids.to(logits.device)] = 0
        return logits

    def _fill_bitmask(self, tokens: Sequence[int]) -> bool:
        """Fills the bit mask. Returns False if no token is banned: the grammar does not apply yet, or the text has ended."""
        start = self._begin(tokens) if self.begin_mark else 0
        if start < 0 or self.failure is not None:
            return False
        work = partial(self._mask_after, list(tokens[start:]))
        try:
            has_mask, seconds = work() if self.run is None else self.run(work)
        except MaskTimeout:  # the thread still uses the matcher, so it is not used again
            self.failure = RequestError(TOO_SLOW)
            return False
        except ApiError as error:  # too many of the caller's masks have timed out and still run
            self.failure = error
            return False
        self.num_slow += self.clock.is_too_much(seconds)
        if self.num_slow == SLOW_MASKS:
            self.failure = RequestError(TOO_SLOW)
        if has_mask and self.banned_bits is not None:
            self.bitmask[0] &= ~self.banned_bits
        return has_mask

    def _begin(self, tokens: Sequence[int]) -> int:
        """Returns the index of the first token after the mark, where the grammar begins to apply; -1: no mark yet."""
        mark, at = self.begin_mark, -1
        while mark[0] in tokens[at + 1 :]:  # runs in C, unlike a loop over all indices
            at = tokens.index(mark[0], at + 1)
            if list(tokens[at : at + len(mark)]) == mark:
                return at + len(mark)
        return -1

    def _mask_after(self, tokens: list[int]) -> tuple[bool, float]:
        """Fills the bit mask. Returns whether a mask applies, and the CPU seconds."""
        began = time.thread_time()
        has_mask = self._follow(tokens)
        if has_mask:
            self.matcher.fill_next_token_bitmask(self.bitmask)
        return has_mask, time.thread_time() - began

    def _follow(self, tokens: list[int]) -> bool:
        """Brings the matcher to the state after `tokens`. Returns False if the text has ended."""
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
