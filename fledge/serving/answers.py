"""Pieces of answers that several routes share: usage, speculation figures, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fledge.engine.request import Request, TokenLogprob
from fledge.serving.async_engine import Progress
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import Tokenizer

# JSON has no infinity: a token that was ruled out gets this, as in vLLM.
LEAST_LOGPROB = -9999.0


def usage(prompt_tokens: int, requests: Iterable[Request], with_speculation: bool = False) -> dict[str, Any]:
    requests = list(requests)
    completion = sum(request.num_answer for request in requests)
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
    if all(request.page_keys is not None for request in requests):
        # A prompt with several answers counts once; the first of them may have found it, the others always do.
        # Answers to one prompt share its list: comparing the tokens would take longer than a step, with each piece of a stream.
        cached = {id(request.prompt): request.num_cached or 0 for request in reversed(requests)}
        result["prompt_tokens_details"] = {"cached_tokens": sum(cached.values())}
    if with_speculation:
        stats = AcceptanceStats.total(request.stats for request in requests)
        result["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        }
        result["speculation"] = stats.to_dict() | speeds(requests)
    return result


def speeds(requests: Sequence[Request]) -> dict[str, float]:
    """Decoding speed (tokens after the first over the time after the first) and time to the first token, on average."""
    begun = [request for request in requests if request.first_token_time is not None]
    ended = [request for request in begun if request.finish_time is not None]
    seconds = sum(request.finish_time - request.first_token_time for request in ended)
    tokens = sum(request.num_answer - 1 for request in ended)
    waits = [request.first_token_time - request.arrival for request in begun]
    return {
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "time_to_first_token": sum(waits) / len(waits) if waits else 0.0,
    }


def spans(progress: Progress) -> dict[str, Any]:
    """For a stream that shows speculation at work: which pieces of the text the drafter had proposed."""
    stats = progress.request.stats
    return {
        "spans": [[text, drafted] for text, drafted in progress.spans],
        "tokens": progress.request.num_answer,
        "steps": stats.steps,
        "accepted": stats.accepted,
    }


def visible_logprobs(progress: Progress) -> list[TokenLogprob]:
    """Without the end token, which has no text."""
    request, logprobs = progress.request, progress.logprobs
    ended = progress.finish_reason == "stop" and logprobs and logprobs[-1].token in request.end_token_ids
    return logprobs[:-1] if ended else logprobs


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.text_of(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content}


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    def text(token: int) -> str:
        return tokenizer.text_of(token)

    texts = [text(one.token) for one in logprobs]
    offsets = []
    for piece in texts:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": texts,
        "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
        "top_logprobs": [
            {text(token): max(logprob, LEAST_LOGPROB) for token, logprob in [*one.top, (one.token, one.logprob)]}
            for one in logprobs
        ],
        "text_offset": offsets,
    }
