"""The loop: schedule, verify, accept, synchronise and draft, commit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.config import ModelConfig
from fledge.engine.config import EngineConfig
from fledge.engine.depth_control import DepthControl
from fledge.engine.invariant_decoder import InvariantDecoder, InvariantPass
from fledge.engine.kv_cache import PageKeys, PagePool
from fledge.engine.request import Delta, Request, TokenLogprob
from fledge.engine.runner import Runner, Verified
from fledge.engine.scheduler import Scheduled, Scheduler
from fledge.errors import RequestError, StepFailure
from fledge.kernels.native import best_of
from fledge.kernels.paged_attention import PagedKV
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams, check_params
from fledge.speculation.distribution import adjust, probabilities
from fledge.speculation.drafting import Drafter, Settled
from fledge.speculation.stats import AcceptanceStats
from fledge.speculation.verification import Draft, Verdict, verify_greedy, verify_sampled
from fledge.tokenizer import IncrementalDecoder, Tokenizer


class Engine:
    """Requests in, tokens out. Holds no text of its own: a request carries everything it needs."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        pool: PagePool | None = None,
        depth_control: DepthControl | None = None,
    ) -> None:
        self.config, self.drafter, self.tokenizer = config, drafter, tokenizer
        self.model: ModelConfig = decoder.config
        lookahead = drafter.lookahead if drafter is not None else 1
        self.pool = pool or page_pool(config)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_batched_tokens, config.max_model_len, lookahead)
        self.cache = paged_kv(config, self.pool, self.model.num_layers, self.model.num_kv_heads, self.model.head_dim)
        invariant = None
        if config.deterministic:
            invariant = InvariantPass(InvariantDecoder(decoder, self.cache, config.max_model_len + lookahead))
        self.runner = Runner(decoder, self.cache, drafter.taps if drafter is not None else (), invariant)
        self.depth_control = depth_control or DepthControl(drafter)
        self.requests: dict[str, Request] = {}
        self.stats = AcceptanceStats()
        self._ids = itertools.count()

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError for whatever `add_request` would refuse; changes nothing."""
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.model.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self.model.vocab_size)
            raise RequestError(f"prompt token {bad} is outside the model's vocabulary of {self.model.vocab_size}")
        check_params(params, self.model.vocab_size, self.model.eos_token_ids)
        self.scheduler.check(len(prompt), params.max_tokens)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        speculate: bool = True,
    ) -> Request:
        self.check_request(prompt, params)
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self.requests:
            raise RequestError(f"a request {request_id!r} is already running")
        request = Request(
            request_id,
            list(prompt),
            params,
            frozenset(self.model.eos_token_ids),
            IncrementalDecoder(self.tokenizer, params.skip_special_tokens) if self.tokenizer is not None else None,
            speculate,
        )
        if self.config.prefix_caching:
            request.page_keys = self._page_keys(request)
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def abort(self, request: Request) -> None:
        """Frees a request's pages at once; its text so far stays with it."""
        if not request.finished:
            request.finish("abort")
            self._leave(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        batch = self.scheduler.schedule()
        if not batch:
            return []
        clock = self.depth_control.clock
        began = clock()
        verified = self.runner.verify(batch)
        verdicts = self.accept(batch, verified)
        self.depth_control.plan(self.scheduler.running)
        deltas, settled = self.commit(batch, verified, verdicts)
        due, taps = self.depth_control.due(settled, verified.taps)
        committed = clock()
        if due:
            for item, draft in zip(due, self.drafter.draft(due, taps), strict=True):
                item.sequence.draft = draft
                self.scheduler.share(item.sequence, item.sequence.num_computed)
        self.depth_control.took(batch, due, committed - began, clock() - committed)
        return deltas

    def accept(self, batch: list[Scheduled], verified: Verified) -> list[Verdict | None]:
        """The verdict on every item whose pass reached the end of its text."""
        best = None
        verdicts: list[Verdict | None] = []
        for item, first in zip(batch, verified.logits_start, strict=True):
            params = item.request.params
            if first is None:
                verdicts.append(None)
            elif params.greedy and not params.adjusts_logits:
                best = best_of(verified.logits)[0] if best is None else best
                verdicts.append(verify_greedy(best[first : first + 1 + len(item.draft)], item.draft))
            else:
                try:
                    verdicts.append(self._accept_lazily(item.request, item.draft, verified.logits[first:]))
                except Exception as error:
                    raise StepFailure(item.request.id) from error
        return verdicts

    def _accept_lazily(self, request: Request, draft: Draft, logits: Tensor) -> Verdict:
        """Rows are turned into distributions only as the walk reaches them: penalties depend on the path taken."""
        params = request.params

        def adjusted(row: int, path: list[int]) -> Tensor:
            if not params.adjusts_logits:
                return logits[row].float()
            return adjust(logits[row], params, request.prompt, request.answer + path, sorted(request.end_token_ids))

        if params.greedy:
            return verify_greedy(_LazyChoice(lambda row, path: int(adjusted(row, path).argmax()), draft), draft)
        if self.config.deterministic:
            # A drafted token stands if the target draws the same one, with random numbers that belong to its place.
            def draw(row: int, path: list[int]) -> int:
                generator = request.generator_of(len(request.answer) + len(path))
                return int(torch.multinomial(probabilities(adjusted(row, path), params).cpu(), 1, generator=generator))

            return verify_greedy(_LazyChoice(draw, draft), draft)
        return verify_sampled(lambda row, path: probabilities(adjusted(row, path), params).cpu(), draft, request.generator)

    def commit(
        self, batch: list[Scheduled], verified: Verified, verdicts: list[Verdict | None]
    ) -> tuple[list[Delta], list[Settled]]:
        """Appends what stands; returns what each request gained, and what the drafter must take in."""
        deltas: list[Delta] = []
        settled: list[Settled] = []
        for index, (item, verdict) in enumerate(zip(batch, verdicts, strict=True)):
            request, first_row = item.request, verified.rows_start[index]
            rows = list(range(first_row, first_row + item.num_tokens))
            request.draft = Draft()
            if verdict is not None:
                delta = self._append(item, verdict, verified, index)
                deltas.append(delta)
                if request.finished:
                    if self._is_shared_at_once(request):
                        self.scheduler.share(request, item.start + item.num_tokens)
                    self._leave(request)
                    continue
                if not item.draft.is_chain:
                    self.runner.keep_path(item, verdict.accepted)
                rows += [first_row + item.num_tokens + node for node in verdict.accepted]
            request.num_computed = item.start + len(rows)
            if self.drafter is not None and request.speculate:
                settled.append(Settled(request, item.start, rows, self._room(request) if verdict is not None else 0))
            if self._is_shared_at_once(request):
                self.scheduler.share(request, request.num_computed)
        return deltas, settled

    def _append(self, item: Scheduled, verdict: Verdict, verified: Verified, index: int) -> Delta:
        request, draft = item.request, item.draft
        tokens = [draft.tokens[node] for node in verdict.accepted] + [verdict.next_token]
        drafted = [True] * len(verdict.accepted) + [False]
        delta = request.append(tokens, drafted, self.config.max_model_len)
        self.depth_control.saw(draft, verdict.accepted, delta)
        if len(draft):
            accepted = sum(delta.drafted)
            for stats in (request.stats, self.stats):
                stats.add_step(len(draft), draft.depth, accepted, len(delta.tokens))
        if request.params.logprobs is not None:
            first = verified.logits_start[index]
            nodes = [-1, *verdict.accepted][: len(delta.tokens)]
            rows = verified.logits[[first + 1 + node for node in nodes]].float().log_softmax(-1)
            chosen = zip(rows, delta.tokens, strict=True)
            request.logprobs += [_logprob(row, token, request.params.logprobs) for row, token in chosen]
        return delta

    def _is_drafted(self, request: Request) -> bool:
        """Whether the drafter has a cache of its own and keeps it up with the request."""
        return self.drafter is not None and bool(self.drafter.taps) and request.speculate

    def _is_shared_at_once(self, request: Request) -> bool:
        """Whether others find its pages as soon as the target has computed them, not when the drafter has."""
        return not self._is_drafted(request) or self.depth_control.is_apart(request)

    def _page_keys(self, request: Request) -> PageKeys:
        """In a crowd, where nobody will draft, pages without the drafter's pairs do, unless some with them are found."""
        size = self.pool.page_size
        keys = PageKeys(request.tokens, size, drafted=self._is_drafted(request))
        if self._is_drafted(request) and self.depth_control.may_wait(request, len(self.requests) + 1):
            apart = PageKeys(request.tokens, size, drafted=False)
            found, found_apart = len(self.pool.find(keys)), len(self.pool.find(apart))
            if found_apart > found or not found:
                self.depth_control.set_apart(request)
                return apart
        return keys

    def _room(self, request: Request) -> int:
        """How deep a draft may be: the pending token and the draft stay inside the context."""
        return max(0, min(self.config.max_model_len - len(request.tokens), self.depth_control.depth(request)))

    def _leave(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.requests.pop(request.id, None)
        self.depth_control.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()


class _LazyChoice(Sequence[int]):
    """The target's choice after each row, worked out when the walk gets there: `choose(row, path to it)`."""

    def __init__(self, choose: Callable[[int, list[int]], int], draft: Draft) -> None:
        self.choose, self.draft = choose, draft

    def __len__(self) -> int:
        return len(self.draft) + 1

    def __getitem__(self, row: int) -> int:
        path, node = [], row - 1
        while node >= 0:
            path.append(self.draft.tokens[node])
            node = self.draft.parents[node]
        return self.choose(row, path[::-1])


def _logprob(row: Tensor, token: int, count: int) -> TokenLogprob:
    top = row.topk(count) if count else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else []
    return TokenLogprob(token, float(row[token]), pairs)


def page_pool(config: EngineConfig) -> PagePool:
    return PagePool(-(-config.kv_cache_tokens // config.page_size), config.page_size)


def paged_kv(config: EngineConfig, pool: PagePool, num_layers: int, num_kv_heads: int, head_dim: int) -> PagedKV:
    return PagedKV(num_layers, num_kv_heads, head_dim, pool.num_pages, pool.page_size, config.activation_dtype, config.device)
