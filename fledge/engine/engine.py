"""THE loop: every request, on every device, with every sampling option.

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
    """Work beside the steps, on the engine's thread; it changes no text. See `fledge.learning.hook`."""

    def warm_up(self) -> list[str]:
        """Prepares what it needs, after the executor has; lines for the log."""
        ...

    def before_step(self) -> None:
        """The output of the step before has been handed over; may work for a moment."""
        ...

    def after_step(self, deltas: Sequence[Delta]) -> None:
        """Sees what a step emitted. Short: the output waits for it."""
        ...

    def idle(self, *, is_quiet: bool = True) -> bool:
        """Nothing runs: works for a moment, longer if it `is_quiet`. False: there is nothing to do before more requests were
        served, or it is quiet."""
        ...

    def due_in(self) -> float | None:
        """Seconds until `idle` has something to do though no request comes; None: it will not."""
        ...

    def stats(self) -> dict[str, Any]:
        """Figures for metrics, fit for JSON. Called from any thread."""
        ...

    def history(self) -> dict[str, Any]:
        """What it did so far, fit for JSON. Called from the engine's thread."""
        ...

    def close(self) -> None: ...


class Engine:
    """Requests in, tokens out. A request carries everything it needs; the engine holds no text of its own."""

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
        """Refuses, by name and before anything runs, what cannot be served; the parameters with bad words as tokens."""
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
        """`learn`: the hook may keep it in memory to learn from. `client`: whose it is, for shares. `with_text`: False leaves
        making text to whoever reads the tokens, unless stop strings are to be found in it."""
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
        """Frees a request's pages at once; its text so far stays with it."""
        if not request.finished:
            try:
                request.finish("abort")
            except Exception as failure:  # its decoder
                request.fail(failure)
            self._leave([request])

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Delta]:
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
        """While nothing runs: lets the hook work for a moment, and the executor once it `is_quiet`: requests would wait longer
        for it. False: neither has anything to do before more requests come, or before it is quiet."""
        if self.requests:
            return False
        return (is_quiet and self.executor.idle()) or (self.hook is not None and self.hook.idle(is_quiet=is_quiet))

    def _commit(self, outputs: list[Output]) -> list[Delta]:
        """Appends new tokens to their requests; those that end leave. What is wrong with one request ends it alone."""
        deltas = []
        for output in outputs:
            request = output.request
            if request.finished:  # aborted meanwhile
                continue
            try:
                if output.failure is not None:
                    raise output.failure
                delta = request.append(output.tokens, output.drafted, self.config.max_model_len, output.passes)
            except Exception as failure:  # its logits processor, its decoder or its stop strings
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
        """Prepares what the first requests need; lines for the log."""
        return self.executor.warm_up() + (self.hook.warm_up() if self.hook is not None else [])

    def forget_drafts(self) -> None:
        """The drafter has other weights from now on: cached pages, which hold its keys, are not found any more, acceptance is
        learnt anew and the drift guard judges anew. What runs goes on."""
        self.pool.forget()
        for request in self.scheduler.running:
            request.page_keys = None
        self.controller.acceptance.forget()
        if self.controller.guard is not None:
            self.controller.guard.renew()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
