"""Parts of responses that several routes share: usage, speculation figures, log-probabilities, chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fledge.engine.request import TokenLogprob
from fledge.serving.generation import Answer, Progress
from fledge.serving.protocol import SamplingFields, StreamOptions
from fledge.serving.streaming import event
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import Tokenizer

# JSON has no infinity: a token that was ruled out gets this log-probability, as in vLLM.
LEAST_LOGPROB = -9999.0


def usage(prompt_tokens: int, answers: Iterable[Answer], with_speculation: bool = False) -> dict[str, Any]:
    answers = list(answers)
    completion = sum(answer.num_tokens for answer in answers)
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
    if all(answer.num_cached is not None for answer in answers):  # None: prefix caching is off
        # A prompt with several answers counts once, by its first answer: the others always find the prompt in the cache.
        # Answers to one prompt share its list, so its id is the key: comparing tokens in each chunk takes longer than a step.
        cached = {id(answer.prompt): answer.num_cached or 0 for answer in reversed(answers)}
        result["prompt_tokens_details"] = {"cached_tokens": sum(cached.values())}
    if with_speculation:
        stats = AcceptanceStats.total(answer.stats for answer in answers)
        result["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        }
        result["speculation"] = stats.to_dict() | speeds(answers)
    return result


def speeds(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns the decoding speed, counted from each answer's first token on, and the mean time to first token."""
    seconds = waits = 0.0
    tokens = num_ended = 0
    for answer in answers:
        if answer.first_token_time is not None and answer.finish_time is not None:
            num_ended += 1
            seconds += answer.finish_time - answer.first_token_time
            waits += answer.first_token_time - answer.arrival
            tokens += answer.num_tokens - 1
    return {
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "time_to_first_token": waits / num_ended if num_ended else 0.0,
    }


def spans(progress: Progress) -> dict[str, Any]:
    """Returns the speculation figures of a stream's chunk: text spans with whether they were drafted, and counts so far."""
    answer = progress.answer
    return {
        "spans": [[text, drafted] for text, drafted in progress.spans],
        "tokens": answer.num_tokens,
        "steps": answer.stats.steps,
        "accepted": answer.stats.accepted,
    }


def visible_logprobs(progress: Progress) -> list[TokenLogprob]:
    """Returns the log-probabilities without that of the token that ended the answer, unless its text is part of the answer."""
    answer, logprobs = progress.answer, progress.logprobs
    by_token = progress.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
    is_shown = answer.params.include_stop_str_in_output and answer.stop_reason is not None
    return logprobs[:-1] if by_token and not is_shown else logprobs


def num_last_tokens(texts: Sequence[str], length: int) -> int:
    """Returns how many tokens at the end of an answer fit into `length` characters."""
    count = 0
    for text in reversed(texts):
        length -= len(text)
        if length < 0:
            break
        count += 1
    return count


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        shown = {"token": tokenizer.text_of(token), "bytes": list(tokenizer.bytes_of(token))}
        return shown | {"logprob": max(logprob, LEAST_LOGPROB)}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content}


class CompletionLogprobs:
    """Formats the log-probabilities of one completion as its tokens arrive. `place`: the character offset of its text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, place: int) -> None:
        self.tokenizer, self.place = tokenizer, place
        self.decoder = tokenizer.incremental_decoder(skip_special_tokens)

    def read(self, logprobs: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        text_of = self.tokenizer.text_of
        offsets = []
        for one in logprobs:
            offsets.append(self.place)
            self.place += len(self.decoder.feed(one.token))
        return {
            "tokens": [text_of(one.token) for one in logprobs],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [
                {text_of(token): max(logprob, LEAST_LOGPROB) for token, logprob in [*one.top, (one.token, one.logprob)]}
                for one in logprobs
            ],
            "text_offset": offsets,
        }


class ChunkStream:
    """The events of a streamed chat or completion: chunks with one choice each, then the usage if it is asked for."""

    def __init__(self, payload: SamplingFields, envelope: dict[str, Any], num_prompt_tokens: int) -> None:
        self.payload, self.envelope, self.num_prompt_tokens = payload, envelope, num_prompt_tokens
        self.options = payload.stream_options or StreamOptions()
        self.answers: dict[int, Answer] = {}  # answers that the usage counts
        # Whether chunks hold nothing but text, which allows precomputed events. Routes add conditions.
        self.has_plain_text = not (payload.include_speculation or self.options.continuous_usage_stats)

    def end(self) -> bytes:
        if not (self.payload.include_speculation or self.options.include_usage):
            return b""
        figures = usage(self.num_prompt_tokens, self.answers.values(), self.payload.include_speculation)
        return event(self.envelope | {"choices": [], "usage": figures})

    def chunk(self, choice: dict[str, Any]) -> bytes:
        data = self.envelope | {"choices": [choice]}
        if self.options.continuous_usage_stats:
            data["usage"] = usage(self.num_prompt_tokens, self.answers.values())
        elif self.options.include_usage:
            data["usage"] = None
        return event(data)
