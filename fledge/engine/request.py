"""One request: its tokens, stop conditions, text and statistics."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from fledge.engine.kv_pool import PageKeys
from fledge.engine.stop_strings import StopMatcher
from fledge.sampling import SamplingParams
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import StreamDecoder

if TYPE_CHECKING:  # imports torch, which the server's HTTP processes do not load
    from fledge.speculation.verification import VerifiedPass


class TokenLogprob(NamedTuple):
    token: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely tokens with their log-probabilities


class Delta(NamedTuple):
    """The result of one step for one request."""

    request: Request
    tokens: list[int]
    drafted: list[bool]  # per token: it came from the drafter
    text: str  # new text that may be shown now; a possible start of a stop string is held back for a later step
    finished: bool
    spans: list[tuple[str, bool]]  # `text` in parts, each with whether the drafter proposed it
    passes: list[VerifiedPass] = []  # noqa: RUF012 - the target passes the tokens came from; never changed in place


@dataclass(eq=False)
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    decoder: StreamDecoder | None = None  # None: tokens are not turned into text
    speculate: bool = True
    learn: bool = True  # the drafter may learn from it; see `fledge.learning`
    client: str = ""  # who sent it
    arrival: float = field(default_factory=time.perf_counter)

    tokens: list[int] = field(init=False)  # prompt and answer; appended by `append`
    pages: list[int] = field(default_factory=list)  # set by the scheduler
    page_keys: PageKeys | None = None  # keys by which other requests find its pages; None: prefixes are not shared
    num_computed: int = 0  # tokens of the text that are prefilled or scheduled to be; set by the scheduler
    prefill_end: int = 0  # length of the text when it was admitted, all of which has to be prefilled
    num_cached: int | None = None  # tokens of the prompt that were cached when it was first admitted
    drafter_stale: bool = False  # the drafter lacks hidden states of part of the text, so it cannot draft for this request
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: str | int | None = None  # the stop string or id that ended it
    text: str = ""
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failure: Exception | None = None  # why it ended with the reason `error`
    num_preemptions: int = 0
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.stop_matcher = StopMatcher(tuple(self.params.stop)) if self.params.stop else None
        self._unsent: list[tuple[str, bool]] = []  # spans at the text's end that no delta has contained yet
        self._num_sent = 0  # characters that deltas have contained

    @cached_property
    def seed(self) -> int:
        """The seed. Draws depend on (seed, position) only, so on nothing else that runs. 62 bits, so that int64 maths works."""
        return random.getrandbits(62) if self.params.seed is None else self.params.seed % 2**62

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= self.prefill_end > 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_token_ids)

    def append(self, tokens: list[int], drafted: list[bool], max_len: int, passes: list[VerifiedPass] | None = None) -> Delta:
        """Appends tokens up to one that ends the request; later ones are dropped and not counted."""
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        if self.decoder is None:
            taken = self._take(tokens, max_len)
            return Delta(self, tokens[:taken], drafted[:taken], "", self.finished, [], passes or [])
        taken = 0
        for token, from_draft in zip(tokens, drafted, strict=True):
            self.tokens.append(token)
            taken += 1
            ends = self._ends(token, self.num_answer)
            part = self._decode(token, ends)
            self._unsent.append((part, from_draft))
            if ends:
                self.finish("stop", None if token in self.eos_token_ids else token)
            elif (found := self._stop_string(part)) is not None:
                self.finish("stop", found)
            elif self.num_answer >= self.params.max_tokens or len(self.tokens) >= max_len:
                self.finish("length")
            if self.finished:
                break
        spans = self._ready_spans()
        text = "".join(part for part, _ in spans)
        return Delta(self, tokens[:taken], drafted[:taken], text, self.finished, spans, passes or [])

    def _take(self, tokens: list[int], max_len: int) -> int:
        """Appends tokens without making text, up to one that ends the request; returns how many were appended."""
        answered = self.num_answer
        room = max(min(self.params.max_tokens - answered, max_len - len(self.tokens)), 1)
        taken = min(len(tokens), room)
        end = None
        if not self.end_token_ids.isdisjoint(tokens):
            end = next((place for place in range(taken) if self._ends(tokens[place], answered + place + 1)), None)
        if end is not None:
            taken = end + 1
        self.tokens += tokens[:taken]
        if end is not None:
            self.finish("stop", None if tokens[end] in self.eos_token_ids else tokens[end])
        elif taken == room:
            self.finish("length")
        return taken

    def _ends(self, token: int, number: int) -> bool:
        """Whether the token ends the answer as its `number`-th token: end tokens do not count before `min_tokens`."""
        return token in self.end_token_ids and number >= max(self.params.min_tokens, 1)

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        if self.finished:
            return
        if self.decoder is not None and reason != "stop":
            self.text += self.decoder.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.finish_time = time.perf_counter()

    def fail(self, failure: Exception) -> None:
        """Ends the request with an error. Its detokeniser is not flushed, because that may be what failed."""
        self.failure, self.finish_reason, self.finish_time = failure, "error", time.perf_counter()

    def _decode(self, token: int, ends: bool) -> str:
        assert self.decoder is not None
        if ends and not self.params.include_stop_str_in_output:
            piece = self.decoder.flush()
        else:
            piece = self.decoder.feed(token)
        self.text += piece
        return piece

    def _stop_string(self, piece: str) -> str | None:
        """Returns the stop string that `piece` completes and cuts it off the text unless it is to be included. None counts
        before `min_tokens`."""
        found = self.stop_matcher.push(piece) if self.stop_matcher is not None else None
        if found is None or self.num_answer <= self.params.min_tokens:
            return None
        self.text = self.text[: found.end if self.params.include_stop_str_in_output else found.end - len(found.stop)]
        return found.stop

    def _ready_spans(self) -> list[tuple[str, bool]]:
        """The spans that may be shown now: without text that a stop string cut off or that may be the start of one."""
        num_held = 0 if self.finished or self.stop_matcher is None else self.stop_matcher.num_held
        left = len(self.text) - self._num_sent  # characters of the text that were not shown yet
        if (flushed := left - sum(len(part) for part, _ in self._unsent)) > 0:  # flushed at the end, without a new token
            self._unsent.append((self.text[-flushed:], self._unsent[-1][1] if self._unsent else False))
        ready, spans, held = left - num_held, [], []
        for part, drafted in self._unsent:
            part, left = part[:left], max(left - len(part), 0)
            now, later = part[: max(ready, 0)], part[max(ready, 0) :]
            ready -= len(now)
            spans += [(now, drafted)] if now else []
            held += [(later, drafted)] if later else []
        self._unsent = held
        self._num_sent += sum(len(part) for part, _ in spans)
        return spans
