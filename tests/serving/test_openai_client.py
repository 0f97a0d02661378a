"""OpenAI's official client against real server processes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.serving.processes import ServerProcess

HELLO = [{"role": "user", "content": "What is the weather like in Paris today?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
            "required": ["city", "size"],
        },
    },
}


@pytest.fixture(scope="module")
def smollm2_server() -> Iterator[ServerProcess]:
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--dtype", "float32", "--max-num-seqs", "4"]
    # One thread: on a busy machine two threads that wait for each other are far slower.
    with ServerProcess([*arguments, "--max-model-len", "2048", "--threads", "1"]) as server:
        yield server


@pytest.fixture(params=["tiny_server", pytest.param("smollm2_server", marks=pytest.mark.real)])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    server: ServerProcess = request.getfixturevalue(request.param)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_streamed_chat_equals_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    body = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 16}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    assert answer.usage.completion_tokens <= 16
    entries = answer.choices[0].logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer.choices[0].message.content
    )
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    cached = [one.prompt_tokens_details.cached_tokens for one in (answer.usage, usage)]
    assert cached[0] <= cached[1] < usage.prompt_tokens  # the second request reuses the prefix cached by the first


@pytest.mark.parametrize("extra", [{}, {"response_format": SCHEMA}, {"tools": [WEATHER], "tool_choice": "required"}])
def test_speculation_does_not_change_the_answer(client: openai.OpenAI, model: str, extra: dict) -> None:
    answers = []
    for speculate in (True, False):
        answer = client.chat.completions.create(
            model=model, messages=HELLO, temperature=0, max_tokens=48, extra_body={"speculate": speculate}, **extra
        )
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        answers.append((message.content, calls, answer.usage.completion_tokens))
    assert answers[0] == answers[1]


def test_json_schema(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, response_format=SCHEMA, temperature=0, max_tokens=64)
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"city", "size"}
    assert value["size"] in ("small", "large")


def test_tools(client: openai.OpenAI, model: str) -> None:
    body = {"model": model, "messages": HELLO, "tools": [WEATHER], "temperature": 0, "max_tokens": 96}
    body["parallel_tool_calls"] = False
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**body, tool_choice=choice).choices[0]
        call = answer.message.tool_calls[0]
        assert answer.finish_reason == "tool_calls"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["unit"] in ("celsius", "fahrenheit")
        streamed = ""
        for chunk in client.chat.completions.create(**body, tool_choice=choice, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                streamed += piece.function.arguments or ""
        assert streamed == call.function.arguments
    follow_up = [
        *HELLO,
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = client.chat.completions.create(**body | {"messages": follow_up, "max_tokens": 8}, tool_choice="auto")
    assert again.usage.prompt_tokens > 0


def test_tool_calls_with_tool_choice_auto(client: openai.OpenAI, model: str) -> None:
    """A grammar forces the model to write a call in the Hermes format after other text."""
    written = 'Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    body = {"model": model, "messages": HELLO, "tools": [WEATHER], "temperature": 0, "max_tokens": 96}
    body["extra_body"] = {"structured_outputs": {"choice": [written]}}
    answer = client.chat.completions.create(**body).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me see.")
    assert answer.message.tool_calls[0].function.name == "get_weather"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    content, names, arguments, reasons = "", [], "", []
    for chunk in client.chat.completions.create(**body, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    assert (content, names, json.loads(arguments)) == ("Let me see.", ["get_weather"], {"city": "Paris"})
    assert reasons[-1] == "tool_calls"
    untouched = client.chat.completions.create(**body, tool_choice="none").choices[0]
    assert untouched.message.content == written


def test_completions_and_responses(client: openai.OpenAI, model: str) -> None:
    text = client.completions.create(model=model, prompt="The cat", max_tokens=8, temperature=0, n=2, logprobs=1)
    assert text.choices[0].text == text.choices[1].text
    assert len(text.choices[0].logprobs.tokens) <= 8
    response = client.responses.create(model=model, input="The cat", max_output_tokens=8, temperature=0)
    assert response.output_text
    with client.responses.stream(model=model, input="The cat", max_output_tokens=8, temperature=0) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response() if "response.completed" in kinds else None
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    if final is not None:
        assert final.output_text == response.output_text


def test_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nonsense", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=HELLO, temperature=-1)
    assert "temperature" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=1_000_000)
    assert long.value.code == "context_length_exceeded"
