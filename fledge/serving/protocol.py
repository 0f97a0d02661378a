"""Request bodies: OpenAI's fields, vLLM's extensions, and three fields of Fledge's own.

`speculate: false` switches speculation off for one request. `learn: false` keeps `--learn` from training on it.
`include_speculation: true` asks for speculation figures and, in a stream, for which pieces of text the drafter had proposed.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

MAX_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Item = TypeVar("Item")
# Validation stops at the first invalid item: errors for a million items would take seconds and gigabytes.
Many = Annotated[list[Item], Field(fail_fast=True)]
Role = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]  # templates write it between control tokens
Name = Annotated[str, Field(pattern=r"^[^\s<|\\/>]+$", max_length=256)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


MAX_METADATA = 16  # pairs, as in OpenAI's API


def check_bias(given: Any) -> dict[int, float]:
    """Validates a logit bias. Stops at the first invalid pair, as `Many` does."""
    if not isinstance(given, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    for token, bias in given.items():
        if not (isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 11):
            raise ValueError(f"must map token ids to numbers; {token!r:.40} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"values must be between -100 and 100, not {bias!r:.40}")
    return {int(token): float(bias) for token, bias in given.items()}


def check_metadata(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or len(given) > MAX_METADATA or not all(isinstance(one, str) for one in given.values()):
        raise ValueError(f"must be an object with at most {MAX_METADATA} keys and string values")
    return given


class Payload(BaseModel):
    """The base of request bodies. Unknown fields are ignored, since OpenAI's clients may be newer than the server. Known fields
    that are not supported are refused, unless their value has no effect."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    # By field: the values that have no effect, and why others are refused.
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    # Fields with a default that do not allow null. OpenAI's clients send null for unset fields, so null means the default.
    NOT_NULL: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = cls.model_fields.items()
        cls.NOT_NULL = frozenset(
            name for name, field in fields if not field.is_required() and NoneType not in get_args(field.annotation)
        )

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (harmless, reason) in cls.REFUSED.items():
            value = data.get(name)
            if value is not None and value not in harmless:
                raise ValueError(f"{name} {reason}")
        nulls = [name for name in cls.NOT_NULL if name in data and data[name] is None]
        return {name: value for name, value in data.items() if name not in nulls} if nulls else data


class StreamOptions(Payload):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Payload):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Payload):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Payload):
    """vLLM's extension for structured output: exactly one of these."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


GUIDED = ("json", "regex", "choice", "grammar", "json_object")


class SamplingFields(Payload):
    """The fields that chat and completions share. None: the model's or the server's default."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(check_bias, json_schema_input_type=dict[str, float])] | None = None
    bad_words: Many[str] | None = None
    seed: Seed | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    speculate: bool = True
    learn: bool = True
    include_speculation: bool = False

    best_of: int | None = None

    REFUSED = {
        "prompt_logprobs": ((), "is not supported: ask for logprobs of the answer"),
        "use_beam_search": ((False,), "is not supported: use n and temperature"),
        "truncate_prompt_tokens": ((), "is not supported: shorten the prompt"),
        "allowed_token_ids": (([],), "is not supported: use structured_outputs or logit_bias"),
        "return_token_ids": ((False,), "is not supported: /tokenize gives the ids of a text"),
        "return_tokens_as_token_ids": ((False,), "is not supported: /tokenize gives the ids of a text"),
        "prompt_embeds": ((), "is not supported: send text or token ids"),
        "logits_processors": (([],), "is not supported over HTTP"),
        "cache_salt": ((), "is not supported: callers share the prefix cache; start with --no-enable-prefix-caching"),
        "guided_whitespace_pattern": ((), "is not supported"),
    }

    @model_validator(mode="before")
    @classmethod
    def read_guided(cls, data: Any) -> Any:
        """Converts vLLM's older fields `guided_…` to `structured_outputs`."""
        if not isinstance(data, dict):
            return data
        guided = {name: data[f"guided_{name}"] for name in GUIDED if data.get(f"guided_{name}") is not None}
        if guided and data.get("structured_outputs") is not None:
            raise ValueError("structured_outputs and guided_... exclude each other; give one")
        return data | {"structured_outputs": guided} if guided else data

    @model_validator(mode="after")
    def check_unsupported(self) -> SamplingFields:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of must equal n: all answers are returned")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs exclude each other; give one")
        return self


class FunctionCall(Payload):
    name: str
    arguments: str = ""


class ToolCall(Payload):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Payload):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Payload):
    role: Role
    content: str | Many[TextPart] | None = None
    name: Name | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Payload):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Payload):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Payload):
    name: str


class NamedTool(Payload):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatFields(Payload):
    """The fields that the chat template turns into a prompt."""

    messages: Many[ChatMessage] = Field(min_length=1)
    tools: Many[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_chat(self) -> ChatFields:
        if self.chat_template is not None:
            raise ValueError("chat_template is set when the server starts (--chat-template), not per request")
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other")
            if self.messages[-1].role != "assistant":
                raise ValueError("continue_final_message continues an assistant's message; the last one is not")
        return self


class ChatRequest(SamplingFields, ChatFields):
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True

    REFUSED = SamplingFields.REFUSED | {
        "functions": (([],), "is not supported: use tools"),
        "function_call": (("none", "auto"), "is not supported: use tools and tool_choice"),
        "echo": ((False,), "is not supported: the answer alone is returned"),
        "audio": ((), "is not supported: answers are text"),
        "modalities": ((["text"],), "is not supported: answers are text"),
        "web_search_options": ((), "is not supported"),
    }

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ValueError("top_logprobs must not be negative")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        elif self.tool_choice in ("auto", "required") and not names:
            raise ValueError(f"tool_choice {self.tool_choice!r} needs tools")
        return self


def check_prompt(given: Any) -> Any:
    """Checks the type of a prompt first: pydantic would try four types in turn, and report an error for each."""
    kinds = set(map(type, given)) if isinstance(given, list) else {type(given)}
    if kinds not in (set(), {str}, {int}, {list}) or (kinds == {int} and not isinstance(given, list)):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    return given


class CompletionRequest(SamplingFields):
    prompt: Annotated[str | Many[TokenId] | Many[str] | Many[Many[TokenId]], BeforeValidator(check_prompt)]
    max_tokens: Count | None = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def check_completion(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not supported: the model only continues text")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: log-probabilities of the prompt are not kept")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError("logprobs must not be negative")
        return self


class TokenizeRequest(Payload):
    """The body of /tokenize: a prompt, or messages as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = Field(None, min_length=1)
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Payload):
    model: str | None = None
    tokens: Many[TokenId]


class InputItem(Payload):
    """An input message of the responses API."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | Many[TextPart] = ""


class TextFormat(Payload):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Payload):
    format: TextFormat | None = None


class ResponsesRequest(Payload):
    """The body of /v1/responses, for text. The server keeps no state between calls."""

    model: str | None = None
    input: str | Many[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], PlainValidator(check_metadata, json_schema_input_type=dict[str, str])] | None = None
    user: str | None = None
    store: bool | None = None
    include: Many[str] | None = None
    speculate: bool = True
    learn: bool = True

    REFUSED = {
        "tools": (([],), "are served by /v1/chat/completions"),
        "tool_choice": (("none", "auto"), "is not supported: tools are served by /v1/chat/completions"),
        "top_logprobs": ((0,), "is not supported: /v1/chat/completions gives log-probabilities"),
        "previous_response_id": ((), "is not supported: no conversations are stored; send all messages as input"),
        "conversation": ((), "is not supported: no conversations are stored; send all messages as input"),
        "background": ((False,), "is not supported; stream instead"),
        "truncation": (("disabled",), "is not supported: shorten the input"),
        "prompt": ((), "is not supported: no prompts are stored; send messages as input"),
    }

    @model_validator(mode="after")
    def check_input(self) -> ResponsesRequest:
        if "message.output_text.logprobs" in (self.include or ()):
            raise ValueError("include: /v1/chat/completions gives log-probabilities")
        if isinstance(self.input, list):
            if not self.input:
                raise ValueError("input is empty; give at least one message")
            for item in self.input:
                if item.type != "message":
                    raise ValueError(f"input of type {item.type!r} is not supported; send messages")
        return self
