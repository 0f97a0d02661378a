"""The engine loop: every request, on every device, with every sampling option, goes through `Engine.step`.

plan = scheduler.schedule()      which requests, how many tokens each, how deep; may preempt
executor.submit(plan)            eager: done when it returns; captured: enqueued, the device runs ahead
outputs = executor.collect()     eager: of this step; captured: of the steps before it
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fledge.config import ModelConfig
from fledge.engine.admission import AdmissionPolicy, ArrivalBatching
from fledge.engine.config import EngineConfig
from fledge.engine.executors.base import Executor, Output
from fledge.engine.kv_pool import PagePool
from fledge.engine.request import Delta, Request
from fledge.engine.scheduler import Scheduler
from fledge.errors import RequestError
from fledge.kernels.adjustments import check_bad_words
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams, check_params
from fledge.speculation.controller import SpeculationController
from fledge.speculation.methods.base import Drafter
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import Tokenizer, bad_word_token_ids

log = logging.getLogger("fledge.engine")


class EngineHook(Protocol):
    """Work done between steps, on the engine's thread; it changes no output. See `fledge.learning.hook`."""

    def warm_up(self) -> list[str]:
        """Prepares what the hook needs, after the executor's own warm-up; returns lines for the log."""
        ...

    def before_step(self) -> None:
        """Called before a step, when the previous step's output has been delivered; may work for a moment."""
        ...

    def after_step(self, deltas: Sequence[Delta]) -> None:
        """Called with what a step emitted. Must be short: the output is delivered only afterwards."""
        ...

    def idle(self, *, is_quiet: bool = True) -> bool:
        """Works for a moment while no request runs, longer if `is_quiet`. False: nothing to do until more requests have been
        served or it is quiet."""
        ...

    def due_in(self) -> float | None:
        """Seconds until `idle` has work even if no request comes; None: it will have none."""
        ...

    def stats(self) -> dict[str, Any]:
        """Returns figures for metrics, serialisable as JSON. Called from any thread."""
        ...

    def history(self) -> dict[str, Any]:
        """Returns what the hook did so far, serialisable as JSON. Called from the engine's thread."""
        ...

    def close(self) -> None: ...


class Engine:
    """Turns requests into tokens. All state of a request is in its `Request`; the engine keeps only a table of them."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        pool: PagePool,
        controller: SpeculationController,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.config, self.executor, self.pool, self.controller = config, executor, pool, controller
        self.drafter, self.tokenizer = drafter, tokenizer
        self.scheduler = Scheduler(config, pool, executor, controller, admission or ArrivalBatching())
        self.requests: dict[str, Request] = {}
        self.hook: EngineHook | None = None
        self._ids = itertools.count()

    @property
    def decoder(self) -> Decoder:
        return self.executor.decoder

    @property
    def model(self) -> ModelConfig:
        return self.executor.decoder.config

    @property
    def stats(self) -> AcceptanceStats:
        return self.controller.stats

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Raises for a request that cannot be served, naming the option. Returns the parameters with bad words tokenised."""
        vocab_size = self.model.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise RequestError(f"prompt token {bad} is outside the model's vocabulary of {vocab_size}")
        check_params(params, vocab_size, self.model.eos_token_ids)
        self.scheduler.check(len(prompt), params.max_tokens)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give stop_token_ids")
        if params.bad_words and not params.bad_word_ids:
            if self.tokenizer is None:
                raise RequestError("bad_words needs a tokenizer; give bad_word_ids")
            params = replace(params, bad_word_ids=bad_word_token_ids(self.tokenizer, params.bad_words))
        check_bad_words(params.bad_word_ids)
        self.executor.check(params)
        return params

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        learn: bool = True,
        client: str = "",
        with_text: bool = True,
    ) -> Request:
        """Checks a request and queues it. `learn`: the hook may keep it in memory to learn from. `client`: who sent it, for
        fair shares in learning. `with_text`: False returns token ids only; stop strings still force detokenisation."""
        params = self.check_request(prompt, params)
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self.requests:
            raise RequestError(f"a request {request_id!r} is already running")
        decoder = None
        if self.tokenizer is not None and (with_text or params.stop):
            decoder = self.tokenizer.incremental_decoder(params.skip_special_tokens)
        request = Request(request_id, list(prompt), params, frozenset(self.model.eos_token_ids), decoder, speculate)
        request.learn, request.client = learn, client
        if self.config.prefix_caching:
            request.page_keys = self.executor.page_keys(request, len(self.requests))
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def abort(self, request: Request) -> None:
        """Cancels a request: frees its pages at once; it keeps its text so far."""
        if not request.finished:
            try:
                request.finish("abort")
            except Exception as failure:  # raised by the request's detokeniser
                request.fail(failure)
            self._leave([request])

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Delta]:
        """Runs one step and returns what is new for each request."""
        if self.hook is None:
            return self._step()
        self.hook.before_step()
        deltas = self._step()
        self.hook.after_step(deltas)
        return deltas

    @torch.inference_mode()
    def _step(self) -> list[Delta]:
        plan = self.scheduler.schedule()
        self.executor.submit(plan)
        deltas = self._commit(self.executor.collect())
        self.executor.resume()
        return deltas

    def idle(self, *, is_quiet: bool = True) -> bool:
        """While no request runs: lets the hook work for a moment, and the executor only if `is_quiet`, since a new request
        would wait longer for the executor. False: neither has work until more requests come or it is quiet."""
        if self.requests:
            return False
        return (is_quiet and self.executor.idle()) or (self.hook is not None and self.hook.idle(is_quiet=is_quiet))

    def _commit(self, outputs: list[Output]) -> list[Delta]:
        """Appends new tokens to their requests and removes finished ones. An error in one request ends only that request."""
        deltas = []
        for output in outputs:
            request = output.request
            if request.finished:  # aborted meanwhile
                continue
            try:
                if output.failure is not None:
                    raise output.failure
                delta = request.append(output.tokens, output.drafted, self.config.max_model_len, output.passes)
            except Exception as failure:  # raised by the request's logits processor, detokeniser or stop strings
                log.warning("request %s ended with an error: %.300r", request.id, failure)
                request.fail(failure)
                deltas.append(Delta(request, [], [], "", True, []))
                continue
            request.logprobs += output.logprobs[: len(delta.tokens)]
            deltas.append(delta)
        self.controller.observe(deltas)
        self._leave([delta.request for delta in deltas if delta.finished])
        return deltas

    def _leave(self, requests: list[Request]) -> None:
        if requests:
            self.scheduler.remove(requests)
            for request in requests:
                self.requests.pop(request.id, None)

    def warm_up(self) -> list[str]:
        """Prepares what the first requests need; returns lines for the log."""
        return self.executor.warm_up() + (self.hook.warm_up() if self.hook is not None else [])

    def forget_drafts(self) -> None:
        """Call it when the drafter's weights change: cached pages, which hold the old drafter's keys, are no longer found, and
        the acceptance model and the drift guard start anew. Running requests continue."""
        self.pool.forget()
        for request in self.scheduler.running:
            request.page_keys = None
        self.controller.acceptance.forget()
        if self.controller.guard is not None:
            self.controller.guard.renew()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
