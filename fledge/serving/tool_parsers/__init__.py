"""How models write tool calls, by the names that vLLM gives the formats."""

from fledge.serving.tool_parsers.base import ToolParser
from fledge.serving.tool_parsers.hermes import HermesParser
from fledge.serving.tool_parsers.kimi_k2 import KimiK2Parser
from fledge.serving.tool_parsers.llama3_json import Llama3JsonParser
from fledge.serving.tool_parsers.pythonic import PythonicParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,  # the marks around its calls are special tokens, which are not in the text
    "kimi_k2": KimiK2Parser,
}

__all__ = ["TOOL_PARSERS", "ToolParser"]
