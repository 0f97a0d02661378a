"""Messages between HTTP processes and the engine: msgpack over a socket.

HTTP process                       engine
------------                       ------
Compile, Forget   ------------->   a grammar, kept under the process's number for it until it is used
Add, Abort        ------------->   a call: one or more answers
Observe, AskFigures ----------->   figures for /metrics
                  <-------------   Ready or Failed, once
Prepared          ------------->   the process has a tokenizer and accepts requests
                  <-------------   Open: every HTTP process accepts requests
                  <-------------   Taken or Refused, Compiled, Figures: replies to the above
                  <-------------   Step: after each engine step, the new tokens of all requests of the process
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from fledge.engine.request import TokenLogprob
from fledge.sampling import SamplingParams
from fledge.serving.errors import ApiError

Span = tuple[str, bool]  # a piece of text, and whether the drafter had proposed it

# Fields of SamplingParams that a call's answers share, with their defaults: not the seed, nor processors, which are not data.
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams) if one.name not in ("seed", "logits_processors")}


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """The base of messages: an array of the kind and the fields."""


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """One answer of a call: the indices of its prompt and its parameters in the call, and its seed."""

    prompt: int
    params: int
    seed: int | None


# HTTP process to engine


class Add(_Message, tag=1, frozen=True):
    id: int
    caller: str
    arrival: float
    prompts: list[list[int]]
    params: list[dict[str, Any]]  # see `pack_params`
    answers: list[Answer]
    speculate: bool = True
    learn: bool = True
    with_details: bool = False  # report drafted tokens and figures so far with each step
    grammar: int | None = None  # the number that it was compiled under
    begin_mark: list[int] | None = None  # the grammar applies after these tokens of the answer; None: from the beginning


class Abort(_Message, tag=2, frozen=True):
    id: int


class Compile(_Message, tag=3, frozen=True):
    id: int
    caller: str
    kind: str  # the name of a method of GrammarCompiler
    value: Any = None


class Forget(_Message, tag=4, frozen=True):
    """Drops a grammar that will not be used."""

    id: int


class Observe(_Message, tag=5, frozen=True):
    """Measurements of an HTTP process: how late its event loop was, and the number of requests it refused."""

    lags: list[float]
    rejected: int


class AskFigures(_Message, tag=6, frozen=True):
    id: int
    of_learning: bool  # the body of /learning instead of that of /metrics


class Prepared(_Message, tag=7, frozen=True):
    """The HTTP process is ready to accept requests."""


ToEngine = Add | Abort | Compile | Forget | Observe | AskFigures | Prepared


# Engine to HTTP process


class Ready(_Message, tag=1, frozen=True):
    """The properties of the engine that an HTTP process needs."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int]
    drafter: str | None  # a description
    tokenizer: str  # a model folder or a GGUF file
    defaults: dict[str, Any]  # sampling defaults from the model's generation_config.json


class Failed(_Message, tag=2, frozen=True):
    """The engine failed or could not be built, and ends."""

    reason: str


class Taken(_Message, tag=3, frozen=True):
    id: int


class Refused(_Message, tag=4, frozen=True):
    """Refuses or ends a call, possibly a running one, or a compilation."""

    id: int
    message: str
    status: int
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = {}


class Compiled(_Message, tag=5, frozen=True):
    id: int


class Figures(_Message, tag=6, frozen=True):
    id: int
    text: bytes


class Finish(msgspec.Struct, array_like=True, frozen=True):
    reason: str
    stop_reason: str | int | None
    first_token_time: float
    finish_time: float
    stats: list[Any]  # fields of AcceptanceStats, in their order


class Output(msgspec.Struct, array_like=True):
    """New tokens of one answer. The HTTP process decodes them, unless the engine did so to find stop strings (`spans`)."""

    id: int
    index: int
    tokens: list[int]
    finish: Finish | None = None
    num_cached: int | None = None  # with its first tokens
    spans: list[Span] | None = None
    logprobs: list[TokenLogprob] | None = None
    drafted: list[bool] | None = None
    progress: tuple[int, int] | None = None  # verification passes and accepted tokens so far


class Step(_Message, tag=7, frozen=True):
    outputs: list[Output]
    others_in_flight: int  # answers in flight in other HTTP processes


class Open(_Message, tag=8, frozen=True):
    """Every HTTP process accepts requests, so /health may report it, whichever process the next connection reaches."""


ToApiServer = Ready | Failed | Taken | Refused | Compiled | Figures | Step | Open


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Returns the keywords of `SamplingParams` that differ from the defaults: most requests set two or three."""
    return {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default}


def refusal(call: int, error: ApiError) -> Refused:
    return Refused(call, error.message, error.status, error.param, error.code, error.headers)


def as_error(refused: Refused) -> ApiError:
    return ApiError(refused.message, refused.status, param=refused.param, code=refused.code, headers=refused.headers)
