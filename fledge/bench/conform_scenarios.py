"""The scenarios of `fledge conform`: one per feature, each with its requests and a check of the answers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from fledge.bench.conform_client import Answer, Broken, Endpoint, Refused
from fledge.bench.conform_values import SCHEMA, TOOLS, Failed, first_difference, lost_call, parse_json, schema_problem

Body = dict[str, Any]
CHATS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the months of the year, one a line.",
    "Translate into French: The train to Paris leaves at nine in the morning.",
)
TEXTS = (
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n",
    "The first ten prime numbers are",
    "Dear Sir or Madam,\n",
)
REGEX = r"[A-Z][a-z]{2,8}-[0-9]{3}"
COLOURS = ["crimson red", "forest green", "navy blue"]
LONGEST_TEXT, SHORTEST_TEXT = 6000, 300  # characters of the long prompt: about 1,500 tokens, halved until the server accepts
SEED = 20_240
NUM_TOP = 5
# The schemas bound strings, so that even a model that writes four tokens per character ends within this limit.
STRUCTURED_TOKENS = 192


class NotSupported(Exception):
    """The server does not have this feature; the message says how that was found."""


@dataclass
class Probe:
    """State shared by scenarios: the server, the sizes, and the answers without the feature."""

    endpoint: Endpoint
    max_tokens: int = 48
    num_prompts: int = 2
    _plain: dict[str, Answer] = field(default_factory=dict)

    def chats(self) -> list[Body]:
        return [self.greedy(chat(text)) for text in CHATS[: self.num_prompts]]

    def texts(self) -> list[Body]:
        return [self.greedy({"prompt": text}) for text in TEXTS[: self.num_prompts]]

    def greedy(self, body: Body) -> Body:
        return body | {"max_tokens": self.max_tokens, "temperature": 0}

    async def plain(self, body: Body) -> Answer:
        """The answer without the feature (cached)."""
        key = json.dumps(body, sort_keys=True)
        if key not in self._plain:
            self._plain[key] = await self.endpoint.ask(body)
        return self._plain[key]


def chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


def seeded(bodies: list[Body]) -> list[Body]:
    return [body | {"temperature": 1.0, "seed": SEED + number} for number, body in enumerate(bodies)]


@dataclass(eq=False)
class Scenario:
    """Requests for one feature. Every answer is also compared streamed, repeated, under load, and without speculation."""

    name: str

    async def requests(self, probe: Probe) -> list[Body]:
        raise AssertionError("every scenario has requests of its own")

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        """Raises `Failed` if the answer is invalid."""


@dataclass(eq=False)
class Plain(Scenario):
    route: str
    sampled: bool = False

    async def requests(self, probe: Probe) -> list[Body]:
        bodies = probe.chats() if self.route == "chat" else probe.texts()
        return seeded(bodies) if self.sampled else bodies

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        choice = answer.first
        if choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise Failed(f"finish_reason is {choice.finish_reason!r}")
        if not (choice.text or choice.reasoning or choice.finish_reason == "stop"):
            raise Failed("the answer has no text")
        if answer.usage.get("completion_tokens", 0) > body["max_tokens"]:
            raise Failed(f"{answer.usage['completion_tokens']} tokens were counted, max_tokens is {body['max_tokens']}")
        if self.sampled and body["seed"] == SEED:
            others = [(await probe.endpoint.ask(body | {"seed": SEED + 1000 + more})).first.text for more in range(3)]
            if all(text == choice.text for text in others):
                raise Failed("four seeds gave one text: the seed or the temperature is ignored")


@dataclass(eq=False)
class Schema(Scenario):
    sampled: bool = False

    async def requests(self, probe: Probe) -> list[Body]:
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        prompts = ("Describe a city as JSON.", 'Describe the "eternal city" as JSON, with a note.')[: probe.num_prompts]
        bodies = [probe.greedy(chat(prompt)) | {"max_tokens": STRUCTURED_TOKENS, "response_format": form} for prompt in prompts]
        return seeded(bodies) if self.sampled else bodies

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        value = parse_json(answer.first)
        problem = schema_problem(value, SCHEMA)
        if problem:
            raise Failed(f"the answer is JSON but does not match the schema: {problem}")


@dataclass(eq=False)
class Constrained(Scenario):
    """A regular expression or a choice, in the first of the usual field names that has an effect on the server."""

    kind: str

    def obeyed(self, text: str) -> bool:
        return bool(re.fullmatch(REGEX, text)) if self.kind == "regex" else text in COLOURS

    async def requests(self, probe: Probe) -> list[Body]:
        wanted = REGEX if self.kind == "regex" else COLOURS
        prompt = "Give a licence plate, such as Abc-123." if self.kind == "regex" else "Which colour has the sky at night?"
        plain, refusal, ignored = probe.greedy(chat(prompt)), "", []
        spellings: list[Body] = [{"structured_outputs": {self.kind: wanted}}, {f"guided_{self.kind}": wanted}]
        spellings += [{"regex": wanted}] if self.kind == "regex" else []
        for field_ in spellings:
            try:
                answer = await probe.endpoint.ask(plain | field_)
            except Refused as error:
                refusal = refusal or str(error)
                continue
            if self.obeyed(answer.first.text) or answer.first.text != (await probe.plain(plain)).first.text:
                return [plain | field_, *seeded([plain | field_])]
            ignored.append(next(iter(field_)))
        raise NotSupported(refusal or f"ignored: {', '.join(ignored)}")

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        if not self.obeyed(answer.first.text):
            raise Failed(f"the answer {answer.first.text[:80]!r} does not obey the {self.kind}")


@dataclass(eq=False)
class Tools(Scenario):
    choice: str

    async def requests(self, probe: Probe) -> list[Body]:
        named = {"type": "function", "function": {"name": "get_weather"}}
        tools: Body = {"tools": TOOLS, "tool_choice": named if self.choice == "named" else self.choice}
        if self.choice == "required":
            tools["parallel_tool_calls"] = False  # a small model may never end a list of calls
        body = probe.greedy(chat("What will the weather be in Paris in the next three days, in celsius?"))
        body |= {"max_tokens": STRUCTURED_TOKENS, **tools}
        return [body, *seeded([body])]

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        choice, known = answer.first, {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        if not choice.calls:
            if self.choice != "auto":
                raise Failed(f"no tool call, although tool_choice is {self.choice}; the text is {choice.text[:80]!r}")
            if lost_call(choice.text, set(known)):
                raise Failed(f"a tool call was left in the text: {choice.text[:120]!r}")
            return
        for call in choice.calls:
            if call.name not in known or (self.choice == "named" and call.name != "get_weather"):
                raise Failed(f"a call of {call.name!r}, which was not asked for")
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                cut = " (cut off)" if choice.finish_reason == "length" else ""
                raise Failed(f"the arguments are not JSON{cut}: {call.arguments[:120]!r}") from None
            problem = "" if self.choice == "auto" else schema_problem(arguments, known[call.name])
            if problem:
                raise Failed(f"the arguments do not match the schema: {problem}")
        wanted = ("tool_calls", "stop") if self.choice == "named" else ("tool_calls",)
        if choice.finish_reason not in wanted:
            raise Failed(f"finish_reason is {choice.finish_reason!r} on a tool call, not {wanted[0]!r}")


@dataclass(eq=False)
class StopString(Scenario):
    """Stop strings from the middle of a known answer: the answer must be exactly the text before the first occurrence."""

    expected: dict[str, str] = field(default_factory=dict)

    async def requests(self, probe: Probe) -> list[Body]:
        bodies = []
        for body in [probe.chats()[0], probe.texts()[0]]:
            try:
                text = (await probe.plain(body)).first.text
            except Refused:
                continue
            places = range(len(text) // 3, len(text) - 5)
            at = next((at for at in places if text.find(text[at : at + 4]) == at and text[at : at + 4].isprintable()), None)
            if at is not None:
                bodies.append(body | {"stop": [text[at : at + 4]]})
                self.expected[json.dumps(bodies[-1])] = text[:at]
        if not bodies:
            raise NotSupported("the plain answers are too short to stop in")
        return bodies

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        choice, expected = answer.first, self.expected[json.dumps(body)]
        if choice.text != expected:
            raise Failed(f"stop {body['stop'][0]!r}: the text ends {choice.text[-30:]!r} and should end {expected[-30:]!r}")
        if choice.finish_reason != "stop":
            raise Failed(f"finish_reason is {choice.finish_reason!r}, not 'stop'")


class StopIds(Scenario):
    async def requests(self, probe: Probe) -> list[Body]:
        plain = probe.chats()[0]
        answer = await probe.plain(plain)
        try:
            ids = await probe.endpoint.token_ids(answer.first.text)
        except (Refused, Broken) as error:
            raise NotSupported(f"the server gives no token ids (/tokenize: {error})") from None
        if len(ids) < 6:
            raise NotSupported("the plain answer is too short to stop in")
        bodies = [plain | {"stop_token_ids": [ids[at]]} for at in (len(ids) // 2, 3 * len(ids) // 4)]
        stops = [body for body in bodies if (await probe.endpoint.ask(body)).first.text != answer.first.text]
        if not stops:
            raise NotSupported("stop_token_ids is ignored")
        # If the answer has invalid UTF-8, tokenizing its text does not give the generated ids, so a stop id may never occur.
        return stops if "\ufffd" in answer.first.text else bodies

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        plain = (await probe.plain({name: value for name, value in body.items() if name != "stop_token_ids"})).first.text
        if not plain.startswith(answer.first.text.rstrip("\ufffd")) or answer.first.text == plain:
            raise Failed(f"the text ends {answer.first.text[-40:]!r}: not a beginning of the answer without stop_token_ids")
        if answer.first.finish_reason != "stop":
            raise Failed(f"finish_reason is {answer.first.finish_reason!r}, not 'stop'")


@dataclass(eq=False)
class Logprobs(Scenario):
    route: str

    async def requests(self, probe: Probe) -> list[Body]:
        body = (probe.chats() if self.route == "chat" else probe.texts())[0]
        return [one | logprob_fields(one) for one in [body, *seeded([body])]]

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        logprobs, greedy = answer.first.logprobs, body["temperature"] == 0
        if not logprobs:
            raise Failed("the answer has no logprobs")
        for place, one in enumerate(logprobs):
            if one.logprob > 1e-4:
                raise Failed(f"token {place} ({one.token!r}) has log-probability {one.logprob:.4f}, above 0")
            total = sum(math.exp(value) for value in one.top.values())
            if total > 1.001:
                raise Failed(f"token {place} ({one.token!r}): the top probabilities add up to {total:.4f}")
            least = min(one.top.values(), default=math.inf)
            if one.token not in one.top and (greedy or one.logprob > least + 1e-4):
                raise Failed(f"token {place} ({one.token!r}) was chosen but is not among the top {len(one.top)}")
            if greedy and one.logprob < max(one.top.values()) - 1e-3:
                best, _ = max(one.top.items(), key=lambda item: item[1])
                raise Failed(f"token {place}: greedy chose {one.token!r} ({one.logprob:.4f}), {best!r} is better")
        counted = answer.usage.get("completion_tokens", len(logprobs))
        if counted - len(logprobs) not in (0, 1):  # the end token has no text, and may have no entry
            raise Failed(f"{len(logprobs)} logprobs for {counted} tokens")
        plain = await probe.endpoint.ask({name: value for name, value in body.items() if "logprobs" not in name})
        if plain.first.text != answer.first.text:
            raise Failed(f"asking for logprobs changes the text; {first_difference(answer.first.text, plain.first.text)}")


@dataclass(eq=False)
class Several(Scenario):
    n: int
    sampled: bool

    async def requests(self, probe: Probe) -> list[Body]:
        body = probe.chats()[0]
        return [(seeded([body])[0] if self.sampled else body) | {"n": self.n}]

    async def check(self, probe: Probe, body: Body, answer: Answer) -> None:
        texts = [choice.text for choice in answer.choices]
        if len(texts) != self.n:
            raise Failed(f"{len(texts)} answers instead of {self.n}")
        if self.sampled and len(set(texts)) == 1:
            raise Failed(f"all {self.n} sampled answers are the same text")
        if not self.sampled:
            alone = (await probe.plain(probe.chats()[0])).first.text
            for index, text in enumerate(texts):
                if text != alone:
                    raise Failed(f"answer {index} differs from the answer with n = 1; {first_difference(text, alone)}")


class LongPrompt(Scenario):
    """Two questions after the same long text: the second can reuse the first's prefix, if the server has a prefix cache."""

    async def requests(self, probe: Probe) -> list[Body]:
        size = LONGEST_TEXT if probe.num_prompts > 1 else LONGEST_TEXT // 4
        while True:
            words = (f"Item {number} of the list costs {number * 7 % 90 + 3} coins." for number in range(1, 1 + size // 35))
            text = " ".join(words)
            bodies = [probe.greedy(chat(f"{text}\n\n{question}")) for question in ("What costs most?", "Name three items.")]
            try:
                await probe.endpoint.ask(bodies[0])
                return bodies
            except Refused:
                size //= 2
                if size < SHORTEST_TEXT:
                    raise


def scenarios() -> list[Scenario]:
    return [
        Plain("chat, greedy", "chat"),
        Plain("chat, seeded", "chat", sampled=True),
        Plain("completions, greedy", "completions"),
        Plain("completions, seeded", "completions", sampled=True),
        Schema("JSON schema, greedy"),
        Schema("JSON schema, seeded", sampled=True),
        Constrained("regex", "regex"),
        Constrained("choice", "choice"),
        Tools("tools, auto", "auto"),
        Tools("tools, required", "required"),
        Tools("tools, named", "named"),
        StopString("stop strings"),
        StopIds("stop token ids"),
        Logprobs("logprobs, chat", "chat"),
        Logprobs("logprobs, completions", "completions"),
        Several("n = 2, greedy", 2, sampled=False),
        Several("n = 3, seeded", 3, sampled=True),
        LongPrompt("long prompt, shared prefix"),
    ]


def logprob_fields(body: Body) -> Body:
    return {"logprobs": True, "top_logprobs": NUM_TOP} if "messages" in body else {"logprobs": NUM_TOP}
