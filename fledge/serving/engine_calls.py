"""The engine loop's records of HTTP processes, of their calls, and of running answers."""

from __future__ import annotations

import socket
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from fledge.engine.request import Delta, Request
from fledge.sampling import SamplingParams
from fledge.serving.channel import Channel
from fledge.serving.messages import Add, Finish, Output, ToEngine

if TYPE_CHECKING:
    from fledge.serving.structured import Grammar


class ApiServer(Channel[ToEngine]):
    """The connection to one HTTP process."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, ToEngine)
        self.is_prepared = False
        self.num_in_flight = 0  # answers accepted and not finished
        self.reported_in_flight = 0  # answers in flight in other HTTP processes, as last sent to this one
        self.outputs: list[Output] = []  # outputs of the current step, to be sent


@dataclass(eq=False)
class Call:
    """The answers that one HTTP request waits for."""

    api_server: ApiServer
    message: Add
    params: list[SamplingParams]
    grammar: Grammar | None
    num_unfinished: int


@dataclass(eq=False)
class Tracked:
    """A running answer."""

    call: Call
    index: int
    request: Request
    started: float | None = None  # when it left the queue
    last_token: float = 0.0

    def failure(self) -> Exception | None:
        """Returns the UserError or ApiError of a logits processor that failed, such as a grammar that takes too long."""
        failures = (getattr(processor, "failure", None) for processor in self.request.params.logits_processors)
        return next(filter(None, failures), None)

    def output(self, delta: Delta, is_first: bool) -> Output:
        request = self.request
        output = Output(self.call.message.id, self.index, delta.tokens)
        if is_first:
            output.num_cached = request.num_cached
        if request.decoder is not None:
            output.spans = delta.spans
        if request.params.logprobs is not None:
            output.logprobs, request.logprobs = request.logprobs, []
        if self.call.message.with_details:
            output.drafted = delta.drafted
            output.progress = (request.stats.steps, request.stats.accepted)
        if delta.finished:
            assert request.finish_reason is not None
            assert request.first_token_time is not None
            assert request.finish_time is not None
            times = request.first_token_time, request.finish_time
            output.finish = Finish(request.finish_reason, request.stop_reason, *times, list(astuple(request.stats)))
        return output
