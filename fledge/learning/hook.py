"""Learning beside `Engine.step`: collects what finished requests showed, trains in the gaps, swaps weights between two steps.

    before_step   a piece of training, if the budget allows; an accepted candidate is copied in here
    after_step    samples and live acceptance of the requests that finished; cheap
    idle          a piece of training, while nothing runs

What goes wrong here ends learning, with a line in the log; serving goes on.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fledge.engine.engine import Engine
from fledge.engine.executors.hidden_states import MAX_REQUESTS
from fledge.engine.memory import readable
from fledge.engine.request import Delta, Request
from fledge.errors import UserError
from fledge.learning.admission import Admission
from fledge.learning.budget import Budget
from fledge.learning.config import LearnConfig
from fledge.learning.domains import Domains
from fledge.learning.fixed_set import FixedSet, answer
from fledge.learning.gate import LEAST_REQUESTS, Decision, Live, has_fallen
from fledge.learning.generations import Generations
from fledge.learning.journal import Journal
from fledge.learning.learner import Learner
from fledge.learning.samples import CLIENT_SHARE, LEAST_ANSWER, Sample, SampleRing
from fledge.learning.target import MAX_PREFIXES, ServedTarget
from fledge.learning.weights import StagedWeights, staged_bytes
from fledge.models.drafter import EagleDrafter
from fledge.speculation.methods.eagle import EagleSpeculator

log = logging.getLogger("fledge.learning")

# A piece of work that takes more than 0.5 s runs only while nothing is served, or once a minute: all requests wait for it. A
# training step takes a tenth of a second on a GPU, and seconds on a small CPU.
MAX_PAUSE, LONG_PIECE_EVERY = 0.5, 60.0
NOVEL_NEED, SHORTENED_NEED = 0.5, 1.0  # added to a sample's need
PROMPT_TOKENS = 64  # a domain is told by the answer and by so many tokens before it


class Learning:
    """The engine's hook. One for each engine; only the engine's thread calls it, other threads may read `stats`."""

    def __init__(
        self,
        engine: Engine,
        master: EagleDrafter,
        config: LearnConfig,
        fixed_prompts: Sequence[Sequence[int]] = (),
        *,
        generations: Generations | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`master`: the served drafter in fp32, not packed. `config` must be resolved. `fixed_prompts`: of the fixed set.
        `generations`: of `config.folder`."""
        assert isinstance(engine.drafter, EagleSpeculator)
        self.engine, self.config, self.clock = engine, config, clock
        self.network, self.fixed_prompts = engine.drafter.network, fixed_prompts
        self.target = ServedTarget(engine.decoder, master.config.aux_layer_ids)
        max_tokens = config.memory_mb * 2**20 // self.target.bytes_per_token()
        self.ring = SampleRing(
            max_tokens, config.held_out_texts, min_held_out=config.min_held_out, max_age=config.max_age, seed=config.seed
        )
        if self.ring.max_held_out_states < 2 * LEAST_ANSWER:  # the gate could not run
            needed = 4 * config.min_held_out * 2 * LEAST_ANSWER * self.target.bytes_per_token() // 2**20 + 1
            raise UserError(f"--learn-memory {config.memory_mb} is too little for this model; give {needed} MiB or more")
        depth = max(1, engine.controller.limit)
        self.learner = Learner(
            master, self.target, self.ring, FixedSet(), config, depth=depth, swap=self._swap, refused=self._refused
        )
        self.budget = Budget(config.budget, clock)
        self.domains = Domains()
        self.live = Live()  # of the generation that is served
        self.before: tuple[dict[str, Tensor], int, Live] | None = None  # weights, number and acceptance of the one before
        self.first: dict[int, float] = {}  # acceptance length by domain, before anything was learnt
        self.counts = {"swaps": 0, "rollbacks": 0, "opted_out": 0, "skipped": 0}
        self.requests = self.fixed_tokens = 0
        self.journal = Journal(generations, self._counts)
        self.stopped: str | None = None  # why nothing is learnt any more
        self._pieces = self.learner.pieces()
        self._has_work = True
        self._piece_seconds = 0.0  # decaying maximum of what pieces took
        self._worked_at = clock()  # when the last piece ended
        self._shortened: set[str] = set()  # ids of running requests that the drift guard shortened
        self.admission = Admission(config.samples_per_second, clock)
        self._salt = secrets.token_bytes(16)  # clients are told apart by a hash that means nothing elsewhere
        self.states_limit = min(config.sample_tokens, engine.config.max_model_len)  # tokens of a running request
        engine.executor.collect_states(limit=self.states_limit)
        engine.hook = self

    # The engine's hook

    def before_step(self) -> None:
        self.budget.serve()
        self._expire()
        is_short = self._piece_seconds <= MAX_PAUSE or self.clock() - self._worked_at > LONG_PIECE_EVERY
        if self.budget.allows and is_short:
            self._work()

    def after_step(self, deltas: Sequence[Delta]) -> None:
        if self.stopped is not None:
            return
        guard = self.engine.controller.guard
        if guard is not None and guard.counts.shortened:
            self._shortened &= self.engine.requests.keys() | {d.request.id for d in deltas}  # not of those that were aborted
            self._shortened |= {d.request.id for d in deltas if guard.depth(d.request) < guard.limit}
        finished = [delta.request for delta in deltas if delta.finished]
        if finished:
            began = self.clock()
            self._guarded(lambda: self._take_in(finished))
            self.budget.charge(self.clock() - began, collecting=True)
            self._guarded(self._check_live)
        if not self.engine.has_unfinished():
            self.budget.rest()

    def idle(self) -> bool:
        """A piece of work; False: there is none until more requests were served."""
        if self.budget.is_serving:
            self.budget.rest()
        self._expire()
        return self._work()

    def due_in(self) -> float | None:
        # Training may hold samples that have left the ring.
        oldest = min([self.target.oldest, *(one.arrival for one in self.learner.at_work)])
        at = min(self.ring.expires_at, oldest + self.config.max_age)
        return None if self.stopped is not None or math.isinf(at) else max(0.0, at - self.ring.clock())

    def warm_up(self) -> list[str]:
        """Answers the prompts of the fixed set, and makes one training step on nothing: a GPU compiles it."""
        lines: list[str] = []

        def prepare() -> None:
            if self.fixed_prompts:
                texts = answer(self.engine, self.fixed_prompts, self.config.fixed_tokens)
                self.learner.fixed = FixedSet.of(texts)
                self.fixed_tokens = sum(len(one.tokens) for one in texts)
                lines.append(f"learning: fixed set of {len(texts)} answers, half of them replayed, half for the gate")
            self.learner.warm_up()
            lines.append(self.describe())

        self._guarded(prepare)
        return lines if self.stopped is None else []

    def describe(self) -> str:
        """What is kept, where and for how long: said at the start."""
        config = self.config
        where = f"generations are kept in {config.folder}" if config.folder is not None else "nothing is written to disk"
        return (
            f"learning from requests: up to {config.memory_mb} MiB of their tokens and hidden states stay in memory, and the "
            f"states of {MAX_PREFIXES} cached prefixes, for {config.max_age / 3600:g} hours at most; the states of "
            f"{MAX_REQUESTS} requests while they run; counts of hashed tokens by domain until the process ends; {where}; "
            f'nothing leaves this machine; a request with "learn": false is not kept. Budget {config.budget:g} % of the time; '
            f"memory {readable(self.num_bytes)} in all"
        )

    def close(self) -> None:
        """Waits for what is being written."""
        self.journal.close()

    # Work

    def _work(self) -> bool:
        if self.stopped is not None or not self._has_work:
            return False
        began = self.clock()
        self._guarded(self._piece)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # else only the launch would be timed
        self.engine.executor.interrupted()
        seconds = self.clock() - began
        self._piece_seconds, self._worked_at = max(seconds, 0.9 * self._piece_seconds), self.clock()
        self.budget.charge(seconds)
        return self._has_work and self.stopped is None

    def _piece(self) -> None:
        # False: there is nothing to do until samples come.
        self._has_work = next(self._pieces)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                self._stop("out of memory")
            else:
                log.exception("learning failed")
                self._stop("it failed; see above")

    def _stop(self, reason: str) -> None:
        """Gives up what learning holds. The generation that is served stays."""
        self.stopped = reason
        log.error("learning stops: %s; serving goes on with generation %d", reason, self.learner.generation)
        self.ring.forget_all()
        self.target.release()
        self._shortened.clear()
        self.before = None
        self._pieces = iter(())
        self.engine.executor.collect_states(limit=0)
        self.learner.release()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    # Collecting

    def _take_in(self, requests: Sequence[Request]) -> None:
        for request in requests:
            shortened = request.id in self._shortened
            self._shortened.discard(request.id)
            if not request.learn:
                self.counts["opted_out"] += 1
                continue
            if request.finish_reason not in ("stop", "length") or not request.num_answer:
                continue
            self.requests += 1
            client = self._client(request.client)
            if not self.admission.admits(client):  # at thousands of tokens a second, looking at each would take the budget
                self.counts["skipped"] += 1
                continue
            tokens, start = request.tokens[: self.config.sample_tokens], len(request.prompt)
            domain, novelty = self.domains.assign([*request.prompt[-PROMPT_TOKENS:], *tokens[start:]])
            rejected = self._note_live(request, domain, client)
            if not self.budget.allows_collecting(1 - CLIENT_SHARE if self.admission.crowds(client) else 1.0):
                self.counts["skipped"] += 1
                continue
            need = rejected + NOVEL_NEED * novelty + SHORTENED_NEED * shortened
            sample = Sample(list(tokens), start, client, domain, need)
            if not self.ring.admit(sample):
                continue
            self._has_work = True
            if (states := self.engine.executor.take_states(request)) is None:
                continue
            if (text := self.target.collected(sample.tokens, start, *states)) is not None:
                sample.keep(text)
        self.engine.executor.drop_states(requests)  # of those that were not taken

    def _expire(self) -> None:
        """Drops all that was kept of requests, when it reaches the longest age."""
        if self.due_in() != 0:
            return
        self.ring.expire()
        oldest = self.ring.clock() - self.config.max_age
        self.target.forget_until(oldest)
        if any(one.arrival <= oldest for one in self.learner.at_work):  # the generator holds them
            self._restart_pieces()

    def _restart_pieces(self) -> None:
        self.learner.at_work, self._pieces = [], self.learner.pieces()

    def _client(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self._salt, digest_size=8).hexdigest()

    def _note_live(self, request: Request, domain: int, client: str) -> float:
        """Adds a request's acceptance to the live figures; the share of its drafts that was rejected."""
        stats = request.stats
        if not stats.steps:
            return 0.5
        deeper = zip(stats.accepted_at, stats.drafted_at[1:], strict=False)
        tried = stats.steps + sum(min(reached, drafted) for reached, drafted in deeper)
        if domain not in self.live.by_domain:  # a new cluster may have taken the place of a retired one
            self.live.keep(self.domains.ids)
            self.first = {one: length for one, length in self.first.items() if one in self.domains.ids}
        self.live.add(domain, client, stats.steps, stats.accepted, tried)
        if not self.counts["swaps"] and (length := self.live.length_of(domain)) is not None:
            self.first[domain] = length
        self.journal.add_request(stats.steps, stats.accepted)
        return 1 - stats.accepted / tried

    def _check_live(self) -> None:
        if self.before is None:
            return
        began = self.clock()
        if has_fallen(self.before[2], self.live):
            self.roll_back("live acceptance has fallen")
        self.budget.charge(self.clock() - began)  # not as collecting, whose share a roll-back would use up

    # Swaps

    def _swap(self, weights: dict[str, Tensor], decision: Decision) -> Iterator[None]:
        staged = StagedWeights(self.network)
        for _ in staged.prepare(weights):
            yield
        before = (self.learner.serving, self.learner.generation, self.live)
        staged.apply()
        number = self.learner.serve_next(weights)  # at once: if something below fails, the log names what is served
        if self.before is None or self.live.requests >= LEAST_REQUESTS:  # too few say nothing: the one before stays the measure
            self.before = before
        drafter = self.engine.drafter
        if isinstance(drafter, EagleSpeculator) and drafter.fallback is not None:
            self.before = None  # what was seen of n-grams says nothing about these weights
            if decision.recent_after > self.live.acceptance_length:
                drafter.fallback = None
        self._serves_another()
        self.counts["swaps"] += 1
        log.info("learning: generation %d is served: %s", number, decision.reason)
        self.journal.record("swap", generation=number, **decision.to_dict())
        if self.journal.generations is not None:
            self._save(weights, number, decision.to_dict())

    def save_first(self, *, is_warm_start: bool) -> None:
        """The generation that learning starts from, which all others are compared with."""
        figures = {"reason": "the first", "is_warm_start": is_warm_start}
        self._save(self.learner.serving, self.learner.generation, figures)

    def roll_back(self, reason: str) -> None:
        """Serves the generation before again."""
        assert self.before is not None
        weights, number, live = self.before
        staged = StagedWeights(self.network)
        for _ in staged.prepare(weights):
            pass
        staged.apply()
        fallen, self.before = self.learner.generation, None
        self.learner.serve_again(weights, number)
        # The generator may hold a candidate that was trained from the weights which fell.
        self._restart_pieces()
        self._has_work = True
        self._serves_another()
        self.live = live
        self.counts["rollbacks"] += 1
        log.warning("learning: generation %d is taken back, generation %d is served again: %s", fallen, number, reason)
        self.journal.record("rollback", fallen=fallen, reason=reason)
        self.journal.choose(number)

    def _serves_another(self) -> None:
        """The drafter's part of cached pages, and what the guard knows, belong to the weights before."""
        self.live = Live()
        self.engine.forget_drafts()

    def _refused(self, decision: Decision) -> None:
        log.info("learning: candidate refused: %s", decision.reason)
        self.journal.record("refused", **decision.to_dict())

    def _save(self, weights: dict[str, Tensor], number: int, figures: dict[str, Any]) -> None:
        with torch.device("meta"):
            copy = EagleDrafter(self.learner.master.config)
        state = {name: value.cpu() for name, value in weights.items()}
        copy.load_state_dict({**state, "d2t": self.learner.master.d2t.cpu()}, assign=True)
        drafter = self.engine.drafter
        has_ngrams = isinstance(drafter, EagleSpeculator) and drafter.fallback is not None
        needed = [] if self.before is None else [self.before[1]]  # a roll-back would go to it
        self.journal.save(copy, number, {**figures, "has_ngrams": has_ngrams}, needed)

    # Figures

    def _counts(self) -> dict[str, int]:
        return {"requests": self.requests, "generation": self.learner.generation, "steps": self.learner.counts.steps}

    @property
    def num_bytes(self) -> int:
        """What learning holds at most, apart from a step's activations."""
        if self.stopped is not None:
            return 0
        weights = self.learner.num_bytes + staged_bytes(self.network)
        samples = self.config.memory_mb * 2**20 + self.fixed_tokens * self.target.bytes_per_token()
        running = MAX_REQUESTS * self.states_limit * self.target.num_channels * self.target.decoder.dtype.itemsize
        return weights + samples + running + self.target.num_bytes

    def stats(self) -> dict[str, Any]:
        """Plain numbers, for metrics and the page."""
        spent, counts = self.budget.spent, self.learner.counts
        return {
            "generation": self.learner.generation,
            "requests": self.requests,
            "samples": len(self.ring),
            "sample_tokens": self.ring.num_tokens,
            "held_out": len(self.ring.held_out),
            "dropped": dict(self.ring.dropped),
            **{name: value for name, value in asdict(counts).items() if name != "loss"},
            "loss": counts.loss,
            **self.counts,
            "serving_seconds": spent.serving,
            "learning_seconds": spent.learning,
            "idle_seconds": spent.idle,
            "memory_bytes": self.num_bytes,
            "stopped": self.stopped or "",
            "acceptance_length": self.live.acceptance_length,
            "domains": {
                str(domain): {"before": self.first.get(domain), "after": self.live.length_of(domain)}
                for domain in self.domains.ids
            },
        }


def is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch tells of it by a RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
