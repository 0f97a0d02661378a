"""What all routes share: the engine, the tokenizer, sampling defaults and grammars."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fledge import sources
from fledge.drift.watching import coverage, watch_drafts
from fledge.engine.build import build_engine
from fledge.engine.engine import Engine
from fledge.engine.memory import memory_plan
from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.sampling import LogitsProcessor, SamplingParams
from fledge.serving.async_engine import AsyncEngine
from fledge.serving.errors import ApiError
from fledge.serving.flags import ServeFlags
from fledge.serving.metrics import Metrics
from fledge.serving.protocol import SamplingFields
from fledge.speculation.drafting import EagleSpeculator
from fledge.speculation.ngram import NgramSpeculator
from fledge.tokenizer import Tokenizer

Result = TypeVar("Result")
log = logging.getLogger("fledge.serving")

# What a model's generation_config.json may set for requests that leave it open.
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
# What of it captured cycles do not do, and the values that change nothing.
# Below this, dividing logits by the temperature overflows; vLLM rounds up to the same value. 0 is greedy.
LEAST_TEMPERATURE = 0.01
# Longer texts are tokenised in a thread apart, so that short ones do not wait for them.
LONG_TEXT = 32_768
# A step in which a long text's tokens are counted before they are made.
COUNTED_CHARACTERS = 65_536
# A caller may have so many grammars compiled at the same time; others take turns beside it.
COMPILING_PER_CALLER = 2


class Service:
    def __init__(self, flags: ServeFlags, build: Callable[[], Engine] | None = None) -> None:
        self.flags = flags
        self.metrics = Metrics(flags.names[0])
        self.limits = flags.limits
        self.engine = AsyncEngine(build or self._build, self.metrics, flags.max_queue, self.limits.request_timeout)
        self.defaults: dict[str, Any] = dict(flags.override_generation_config)
        self._seeds = random.Random(flags.seed) if flags.seed is not None else None
        # One thread for each tokenizer, which must not be entered twice; long texts have a tokenizer of their own.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._tokenizing_long = ThreadPoolExecutor(1, "tokenizer-long")
        self._compiling = ThreadPoolExecutor(self.limits.max_grammars_compiling, "grammar")
        self._grammars = None
        self._grammars_lock = threading.Lock()
        self._closed = False
        self._compiling_by_caller: dict[str, asyncio.Semaphore] = {}
        self._num_compiling: Counter[str] = Counter()

    def _build(self) -> Engine:
        flags = self.flags
        found = sources.find(flags.model)  # a GGUF file has no generation_config.json
        if flags.generation_config != "vllm":
            place = found if flags.generation_config == "auto" else Path(flags.generation_config)
            self.defaults = _generation_defaults(place) | self.defaults
        config = flags.engine_config
        if flags.gpu_memory_utilization is not None:
            config = replace(config, gpu_memory_utilization=flags.gpu_memory_utilization)
        speculative = flags.speculative_config
        if flags.learn is not None:
            from fledge.learning.setup import build_learning_engine  # brings all of training, which others need not wait for

            engine = build_learning_engine(flags.model, speculative.speculation, config, flags.learn)
        else:
            engine = build_engine(flags.model, speculative.speculation, config)
        log.info(memory_plan(engine).describe())
        if isinstance(engine.drafter, NgramSpeculator) and speculative.prompt_lookup_max:
            engine.drafter.longest, engine.drafter.shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        for line in engine.warm_up():
            log.info(line)
        if flags.engine_config.kv_cache_tokens:  # asked for: taken at once, so that the server's memory stays what it is
            for owner in (engine.executor, engine.drafter):
                if isinstance(cache := getattr(owner, "cache", None), PagedKV):
                    cache.take_memory()
        if flags.drift_probe_every and not isinstance(engine.drafter, EagleSpeculator):
            raise UserError("--drift-probe-every looks at EAGLE drafts; name an EAGLE drafter, or leave it out")
        if flags.drift_probe_every or engine.controller.guard is not None:
            self.metrics.probe = probe = watch_drafts(engine, flags.drift_probe_every or None)
            if probe is not None:
                log.info(coverage(engine, probe))
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.check_ready().tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.check_ready().config.max_model_len

    @cached_property
    def long_tokenizer(self) -> Tokenizer:
        """A second one, for the thread that takes long texts."""
        return self.tokenizer.copy()

    @property
    def grammars(self):
        """Made on first use: reading the vocabulary takes a moment."""
        with self._grammars_lock:
            if self._grammars is None:
                try:
                    from fledge.serving.structured import GrammarCompiler
                except ImportError:
                    raise ApiError("structured output needs xgrammar on the server: pip install xgrammar", 501) from None
                model = self.engine.engine.model
                self._grammars = GrammarCompiler(self.tokenizer, model.vocab_size, model.eos_token_ids, self.limits)
                self.engine.before_step = self._grammars.clock.new_step
                if self._closed:  # while it was made
                    self._grammars.close()
            return self._grammars

    def close(self) -> None:
        """Ends what is being compiled; callers that wait for it are told."""
        self._closed = True
        if self._grammars is not None:
            self._grammars.close()

    def check_limits(self, fields: SamplingFields, num_prompts: int = 1) -> None:
        """What a request asks for, before any of it is made."""
        limits = self.limits
        stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        choices = fields.structured_outputs.choice if fields.structured_outputs is not None else None
        counts = {
            "prompt": (num_prompts, limits.max_prompts, "prompts", "max-prompts"),
            "n": (num_prompts * fields.n, limits.max_answers, "answers (prompts times n)", "max-answers"),
            "stop": (len(stops), limits.max_stop_strings, "stop strings", "max-stop-strings"),
            "stop_token_ids": (len(fields.stop_token_ids or ()), limits.max_stop_token_ids, "ids", "max-stop-token-ids"),
            "logit_bias": (len(fields.logit_bias or ()), limits.max_logit_bias, "tokens", "max-logit-bias"),
            "structured_outputs": (len(choices or ()), limits.max_json_items, "choices", "max-json-items"),
        }
        for param, (count, most, what, flag) in counts.items():
            self.check_count(param, count, most, what, flag)
        characters = sum(map(len, stops))
        self.check_count("stop", characters, limits.max_stop_characters, "characters of stop strings", "max-stop-characters")
        self.engine.check_capacity(num_prompts * fields.n)

    def check_chat_limits(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
        self.check_count("messages", len(messages), self.limits.max_messages, "messages", "max-messages")
        self.check_count("tools", len(tools or ()), self.limits.max_tools, "tools", "max-tools")

    def check_count(self, param: str, count: int, most: int, what: str, flag: str) -> None:
        if count > most:
            raise ApiError(f"{count} {what} were given; at most {most} are taken (--{flag})", param=param)

    def check_model(self, name: str | None) -> str:
        """The name the answer bears."""
        self.engine.check_ready()
        if name and name not in self.flags.names:
            known = ", ".join(self.flags.names)
            raise ApiError(
                f"the model {name!r} is not served here; served: {known}", 404, param="model", code="model_not_found"
            )
        return name or self.flags.names[0]

    async def tokenize(self, work: Callable[[Tokenizer], Result], length: int = 0) -> Result:
        """Runs what uses the tokenizer, off the event loop. `length`: characters that it must take in."""
        is_long = length > LONG_TEXT
        tokenizer = self.long_tokenizer if is_long else self.tokenizer
        threads = self._tokenizing_long if is_long else self._tokenizing
        return await asyncio.get_running_loop().run_in_executor(threads, work, tokenizer)

    def encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a prompt. One that cannot fit the context is refused before all of it is tokenised: 4 MB take 4 s."""
        longest = self.max_model_len
        if len(text) > max(4 * longest, LONG_TEXT):
            count = 0
            for at in range(0, len(text), COUNTED_CHARACTERS):
                count += len(tokenizer.encode(text[at : at + COUNTED_CHARACTERS], add_special_tokens=False))
                if count > longest + 64:  # a cut may split a token or two
                    raise ApiError(
                        f"the context holds {longest} tokens; of {len(text)} characters of prompt, the first "
                        f"{min(len(text), at + COUNTED_CHARACTERS)} have {count} already. Shorten the prompt",
                        code="context_length_exceeded",
                    )
        return tokenizer.encode(text, add_special_tokens)

    async def compile(self, work: Callable[[], Result], caller: str = "") -> Result:
        """Runs `work` in a thread that waits for the process which compiles. Nobody takes all of these threads."""
        turn = self._compiling_by_caller.setdefault(caller, asyncio.Semaphore(COMPILING_PER_CALLER))
        self._num_compiling[caller] += 1
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._compiling, work)
        finally:
            self._num_compiling[caller] -= 1
            if not self._num_compiling[caller]:
                del self._num_compiling[caller], self._compiling_by_caller[caller]

    async def grammar(self, fields: SamplingFields, caller: str = "") -> Any | None:
        """The compiled grammar that a request asks for by `response_format` or `structured_outputs`."""
        wanted, extension = fields.response_format, fields.structured_outputs
        if wanted is not None and wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
            if schema is None:
                raise ApiError("response_format json_schema needs json_schema.schema", param="response_format")
            return await self.compile(lambda: self.grammars.json_schema(schema), caller)
        if wanted is not None and wanted.type == "json_object":
            return await self.compile(lambda: self.grammars.json_object(), caller)
        if extension is None:
            return None
        kinds = {
            "json": (extension.json_, lambda: self.grammars.json_schema(extension.json_)),
            "regex": (extension.regex, lambda: self.grammars.regex(extension.regex)),
            "choice": (extension.choice, lambda: self.grammars.choice(extension.choice)),
            "grammar": (extension.grammar, lambda: self.grammars.ebnf(extension.grammar)),
            "json_object": (extension.json_object or None, lambda: self.grammars.json_object()),
        }
        given = [work for value, work in kinds.values() if value is not None]
        if len(given) != 1:
            raise ApiError(f"structured_outputs takes exactly one of {', '.join(kinds)}", param="structured_outputs")
        return await self.compile(given[0], caller)

    def max_tokens(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How long the answer may get; as long as the context allows if the request does not say."""
        longest = self.max_model_len
        room = longest - len(prompt)
        if room < 1 or (wanted or 0) > room:
            asked = f" and {wanted} tokens of answer" if wanted else ""
            raise ApiError(
                f"the context holds {longest} tokens; the request has a prompt of {len(prompt)}{asked}. "
                "Shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        return wanted or min(room, int(self.defaults.get("max_new_tokens") or room))

    def sampling_params(
        self, fields: SamplingFields, max_tokens: int, logprobs: int | None = None, special_tokens: bool = False
    ) -> SamplingParams:
        """What all answers of a request share; `answer_params` has the rest."""
        if logprobs is not None and logprobs > self.flags.max_logprobs:
            raise ApiError(f"at most {self.flags.max_logprobs} log-probabilities a token are given", param="top_logprobs")

        def pick(name: str, fallback: float) -> float:
            value = getattr(fields, name)
            return value if value is not None else self.defaults.get(name, fallback)

        temperature, penalty = pick("temperature", 1.0), pick("repetition_penalty", 1.0)
        if not 0.01 <= penalty <= 100:
            raise ApiError("repetition_penalty must lie between 0.01 and 100", param="repetition_penalty")
        if 0 < temperature < LEAST_TEMPERATURE:
            temperature = LEAST_TEMPERATURE
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(fields.min_tokens, max_tokens),
            temperature=temperature,
            top_p=pick("top_p", 1.0),
            top_k=int(pick("top_k", 0)),
            min_p=pick("min_p", 0.0),
            repetition_penalty=penalty,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=_logit_bias(fields.logit_bias),
            stop=fields.stop or (),
            stop_token_ids=fields.stop_token_ids or (),
            ignore_eos=fields.ignore_eos,
            include_stop_str_in_output=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens and not special_tokens,
            logprobs=logprobs,
        )

    def answer_params(
        self, shared: SamplingParams, seed: int | None, choice: int = 0, processors: Sequence[LogitsProcessor] = ()
    ) -> SamplingParams:
        """Of one answer. `seed`: the request's; each of its answers has another, or they would all be the same."""
        if processors and shared.ignore_eos:
            raise ApiError("ignore_eos and structured output exclude each other", param="ignore_eos")
        if seed is not None:
            seed = (seed + choice) % (1 << 63) if choice else seed
        elif self._seeds is not None:
            seed = self._seeds.getrandbits(63)
        return shared.for_answer(seed, processors)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return {int(token): bias for token, bias in given.items()} if given else None
    except ValueError:
        raise ApiError("logit_bias maps token ids to numbers; a key is not an id", param="logit_bias") from None


def _generation_defaults(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); mend it, or give --generation-config vllm") from None
    return {name: given[name] for name in DEFAULTABLE if given.get(name) is not None}
