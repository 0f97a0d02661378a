"""State and checks that all routes share: the engine, the tokenizers, sampling defaults and limits."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fledge.errors import RequestError
from fledge.sampling import SamplingParams, check_params
from fledge.serving.async_engine import AsyncEngine
from fledge.serving.channel import Channel
from fledge.serving.defaults import overriding_defaults
from fledge.serving.engine_host import EngineHost, EngineProcess, EngineThread
from fledge.serving.errors import ApiError
from fledge.serving.flags import ServeFlags
from fledge.serving.json_schema import supported_schema
from fledge.serving.limits import check_grammar_size, check_json
from fledge.serving.messages import Ready, ToApiServer
from fledge.serving.protocol import ChatRequest, SamplingFields
from fledge.serving.tokenizing import TokenizerThread
from fledge.tokenizer import Tokenizer, bad_word_token_ids

Result = TypeVar("Result")

# Below this, dividing logits by the temperature overflows; vLLM rounds up to the same value. 0 is greedy.
LEAST_TEMPERATURE = 0.01
# Short texts are tokenised on the event loop: 2,048 characters take about a millisecond, as does a switch to a thread.
SHORT_TEXT = 2048
# Texts longer than this are tokenised in a second thread, so that medium ones do not wait for them.
LONG_TEXT = 32_768
# The characters tokenised at a time when a prompt that may not fit the context is counted.
COUNTED_CHARACTERS = 65_536


class Service:
    """The state of one HTTP process. `connection`: to an engine started by another process; None: this one starts it."""

    def __init__(self, flags: ServeFlags, connection: socket.socket | None = None, build: Any = None) -> None:
        self.flags = flags
        self.limits = flags.limits
        self.defaults: dict[str, Any] = overriding_defaults(flags.override_generation_config)
        self.other_connections: list[socket.socket] = []  # to the engine, for the HTTP processes that this one starts
        host: EngineHost | None = None
        if connection is None:
            pairs = [socket.socketpair() for _ in range(flags.api_workers)]
            connection, *self.other_connections = [ours for ours, _ in pairs]
            theirs = [engine_side for _, engine_side in pairs]
            host = EngineProcess(flags, theirs) if flags.engine_process else EngineThread(flags, theirs, build)
        channel: Channel[ToApiServer] = Channel(connection, ToApiServer)
        self.engine = AsyncEngine(channel, host, self._prepare, flags.max_queue, self.limits.request_timeout)
        self._seeds = random.Random(flags.seed) if flags.seed is not None else None
        room, on_refusal = self.limits.max_tokenizer_queue, self.engine.count_rejected
        self._tokenizing = TokenizerThread("tokenizer", room, on_refusal)
        self._tokenizing_long = TokenizerThread("tokenizer-long", room, on_refusal)

    def _prepare(self, info: Ready) -> Tokenizer:
        """Loads and returns the tokenizer. Called in a thread when the engine is ready."""
        self.defaults = info.defaults | self.defaults
        path = Path(info.tokenizer)
        if path.is_file():
            from fledge.checkpoints.gguf_file import GgufFile
            from fledge.checkpoints.gguf_tokenizer import GgufTokenizer

            tokenizer: Tokenizer = GgufTokenizer(GgufFile(path))
        else:
            if self.flags.engine_process:
                # transformers imports torch if it is installed: 250 MB and seconds in each HTTP process, which does not use it.
                os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
                sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
            tokenizer = Tokenizer(path)
        tokenizer.incremental_decoder()  # builds its table now
        gc.collect()
        gc.freeze()  # what is loaded by now is never freed: collections that scan it would pause every stream
        return tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer for the event loop."""
        self.engine.check_ready()
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.check_ready().max_model_len

    @cached_property
    def thread_tokenizer(self) -> Tokenizer:
        """The tokenizer for the thread that takes texts of SHORT_TEXT to LONG_TEXT characters."""
        return self.tokenizer.copy()

    @cached_property
    def long_tokenizer(self) -> Tokenizer:
        """The tokenizer for the thread that takes texts above LONG_TEXT characters."""
        return self.tokenizer.copy()

    def check_limits(self, fields: SamplingFields, num_prompts: int = 1, caller: str = "") -> None:
        """Raises ApiError if a request exceeds a limit or the queue is full, before any work is done for it."""
        limits = self.limits
        stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        choices = fields.structured_outputs.choice if fields.structured_outputs is not None else None
        counts = {
            "prompt": (num_prompts, limits.max_prompts, "prompts", "max-prompts"),
            "n": (num_prompts * fields.n, limits.max_answers, "answers (prompts times n)", "max-answers"),
            "stop": (len(stops), limits.max_stop_strings, "stop strings", "max-stop-strings"),
            "stop_token_ids": (len(fields.stop_token_ids or ()), limits.max_stop_token_ids, "ids", "max-stop-token-ids"),
            "logit_bias": (len(fields.logit_bias or ()), limits.max_logit_bias, "tokens", "max-logit-bias"),
            "bad_words": (len(fields.bad_words or ()), limits.max_bad_words, "words", "max-bad-words"),
            "structured_outputs": (len(choices or ()), limits.max_json_items, "choices", "max-json-items"),
        }
        for param, (count, most, what, flag) in counts.items():
            self.check_count(param, count, most, what, flag)
        for param, texts in (("stop", stops), ("bad_words", fields.bad_words or [])):
            characters = sum(map(len, texts))
            self.check_count(param, characters, limits.max_stop_characters, f"characters of {param}", "max-stop-characters")
        self.engine.check_capacity(num_prompts * fields.n, caller)

    def check_chat_limits(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
        self.check_count("messages", len(messages), self.limits.max_messages, "messages", "max-messages")
        self.check_count("tools", len(tools or ()), self.limits.max_tools, "tools", "max-tools")

    def check_count(self, param: str, count: int, most: int, what: str, flag: str) -> None:
        if count > most:
            raise ApiError(f"the request has {count} {what}; the limit is {most} (--{flag})", param=param)

    def check_model(self, name: str | None) -> str:
        """Returns the model name for the response. ApiError: the requested model is not served."""
        self.engine.check_ready()
        if name and name not in self.flags.names:
            known = ", ".join(self.flags.names)
            raise ApiError(
                f"the model {name!r} is not served here; served: {known}", 404, param="model", code="model_not_found"
            )
        return name or self.flags.names[0]

    async def tokenize(self, work: Callable[[Tokenizer], Result], length: int = 0, caller: str = "") -> Result:
        """Runs `work` with a tokenizer, in a thread unless the text is short. `length`: the text's characters."""
        if length <= SHORT_TEXT:
            return work(self.tokenizer)
        is_long = length > LONG_TEXT
        tokenizer = self.long_tokenizer if is_long else self.thread_tokenizer
        thread = self._tokenizing_long if is_long else self._tokenizing
        return await thread.run(lambda: work(tokenizer), length, caller)

    def encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenises a prompt. One that cannot fit the context is refused before all of it is tokenised: 4 MB take 4 s."""
        longest = self.max_model_len
        if len(text) > max(4 * longest, LONG_TEXT):
            count = 0
            for at in range(0, len(text), COUNTED_CHARACTERS):
                count += len(tokenizer.encode(text[at : at + COUNTED_CHARACTERS], add_special_tokens=False))
                if count > longest + 64:  # a cut between two parts may split tokens
                    raise ApiError(
                        f"the context holds {longest} tokens; of {len(text)} characters of prompt, the first "
                        f"{min(len(text), at + COUNTED_CHARACTERS)} already give {count}. Shorten the prompt",
                        code="context_length_exceeded",
                    )
        return tokenizer.encode(text, add_special_tokens)

    async def compile_grammar(
        self, fields: SamplingFields, params: SamplingParams, caller: str, forced_schema: Any = None
    ) -> int | None:
        """Compiles the grammar that a request asks for, and returns its number; None: it asks for none."""
        wanted = self._grammar_of(fields, forced_schema)
        if wanted is None:
            return None
        kind, value = wanted
        # Checked before it is queued, and by the compiler again for the text that it writes. A choice is written as
        # alternatives, with 5 characters for the quotes and ` | ` of each.
        size = sum(len(one) + 5 for one in value) if isinstance(value, list) else len(value or "")
        check_grammar_size(
            {"json_schema": "JSON schema", "regex": "regular expression"}.get(kind, "grammar"), size, self.limits
        )
        if params.ignore_eos:
            raise ApiError("ignore_eos and structured output exclude each other; give one", param="ignore_eos")
        return await self.engine.compile(kind, value, caller)

    def _grammar_of(self, fields: SamplingFields, forced_schema: Any = None) -> tuple[str, Any] | None:
        """Returns the kind and value of the grammar that `response_format`, `structured_outputs` or a forced tool asks for."""
        wanted, extension = fields.response_format, fields.structured_outputs
        if forced_schema is not None:
            return "json_schema", self._schema(forced_schema)
        if wanted is not None and wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
            if schema is None:
                raise ApiError("response_format json_schema needs json_schema.schema", param="response_format")
            return "json_schema", self._schema(schema)
        if wanted is not None and wanted.type == "json_object":
            return "json_object", None
        if extension is None:
            return None
        kinds = {
            "json": ("json_schema", extension.json_),
            "regex": ("regex", extension.regex),
            "choice": ("choice", extension.choice),
            "grammar": ("ebnf", extension.grammar),
            "json_object": ("json_object", extension.json_object or None),
        }
        given = [(kind, value) for kind, value in kinds.values() if value is not None]
        if len(given) != 1:
            raise ApiError(f"structured_outputs takes exactly one of {', '.join(kinds)}", param="structured_outputs")
        kind, value = given[0]
        if kind == "json_schema":
            return kind, self._schema(value)
        return kind, None if kind == "json_object" else value

    def _schema(self, schema: Any) -> str:
        """Returns the JSON text of a schema, rewritten for the grammar library. RequestError names what is not supported."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        check_grammar_size("JSON schema", len(text), self.limits)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise RequestError("the JSON schema is not valid JSON") from None
            check_json(schema, self.limits)
        return json.dumps(supported_schema(schema))

    def max_tokens(self, prompt: Sequence[int], wanted: int | None) -> int:
        """Returns the maximum length of the answer: as requested, else the default, else what the context leaves."""
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
        """Returns the sampling parameters that all answers of a request share. Only their seeds differ: see `answer_seed`."""
        if logprobs is not None and logprobs > self.flags.max_logprobs:
            param = "top_logprobs" if isinstance(fields, ChatRequest) else "logprobs"
            raise ApiError(f"at most {self.flags.max_logprobs} log-probabilities per token are allowed", param=param)

        def pick(name: str, fallback: float) -> float:
            value = getattr(fields, name)
            return value if value is not None else self.defaults.get(name, fallback)

        temperature = pick("temperature", 1.0)
        if 0 < temperature < LEAST_TEMPERATURE:
            temperature = LEAST_TEMPERATURE
        info = self.engine.check_ready()
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=fields.min_tokens,
                temperature=temperature,
                top_p=pick("top_p", 1.0),
                top_k=int(pick("top_k", 0)),
                min_p=pick("min_p", 0.0),
                repetition_penalty=pick("repetition_penalty", 1.0),
                presence_penalty=fields.presence_penalty or 0.0,
                frequency_penalty=fields.frequency_penalty or 0.0,
                logit_bias=fields.logit_bias or None,
                bad_words=fields.bad_words or (),
                bad_word_ids=bad_word_token_ids(self.tokenizer, fields.bad_words or ()),
                stop=fields.stop or (),
                stop_token_ids=fields.stop_token_ids or (),
                ignore_eos=fields.ignore_eos,
                include_stop_str_in_output=fields.include_stop_str_in_output,
                skip_special_tokens=fields.skip_special_tokens and not special_tokens,
                logprobs=logprobs,
            )
            check_params(params, info.vocab_size, info.eos_token_ids)
        except RequestError as error:  # its message begins with the parameter's name
            param = str(error).partition(" ")[0]
            raise ApiError(str(error), param=param if hasattr(fields, param) else None) from None
        return params

    def answer_seed(self, seed: int | None, choice: int) -> int | None:
        """Returns the seed of one answer. Each answer of a request has its own, since equal seeds would give equal answers."""
        if seed is not None:
            return (seed + choice) % (1 << 63) if choice else seed
        return self._seeds.getrandbits(63) if self._seeds is not None else None
