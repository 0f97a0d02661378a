"""Parsers of the tool call formats of models, under vLLM's names."""

from fledge.serving.tool_parsers.base import ToolParser
from fledge.serving.tool_parsers.json_formats import HermesParser, Llama3JsonParser, MistralParser, Phi4Parser
from fledge.serving.tool_parsers.pythonic import PythonicParser
from fledge.serving.tool_parsers.tagged_formats import KimiK2Parser, Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,  # the markers around its calls are special tokens, which are not in the text
    "kimi_k2": KimiK2Parser,
    "mistral": MistralParser,
    "phi4_mini_json": Phi4Parser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}

__all__ = ["TOOL_PARSERS", "ToolParser"]
