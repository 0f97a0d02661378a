"""vLLM's command lines work unchanged; flags that are not supported are refused with a reason."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from fledge.errors import UserError
from fledge.serving import server
from fledge.serving.build import quantization_of
from fledge.serving.flag_parser import OF_VLLM, human_int
from fledge.serving.flag_parser import parser as flag_parser
from fledge.serving.flags import ServeFlags, chosen_engine, parse
from fledge.serving.foreign_flags import LLAMA_CPP, MAY_BE, REFUSED, SAME, SGLANG
from fledge.serving.limits import Limits
from fledge.serving.logs import _is_not_startup


def test_defaults_are_vllms_except_for_the_address() -> None:
    flags = parse([])
    assert (flags.host, flags.port, flags.max_logprobs, flags.uvicorn_log_level) == ("127.0.0.1", 8000, 20, "info")
    assert flags.model == "smollm2-135m"
    assert flags.speculative_config.speculation.drafter == "auto"
    assert flags.api_key == ()


def test_another_model_is_served_without_speculation_by_default() -> None:
    assert parse(["some/model"]).speculative_config.speculation.drafter == "none"
    assert parse(["some/model", "--drafter", "ngram", "--depth", "3"]).speculative_config.speculation.depth == "3"


def test_a_vllm_command_line_is_accepted_unchanged() -> None:
    flags = parse(
        [
            "org/model", "--speculative-config", '{"method":"eagle3","model":"org/drafter","num_speculative_tokens":3}',
            "--host", "127.0.0.1", "--port", "9000", "--api-key", "a", "b", "--max-model-len", "4k", "--max-num-seqs", "32",
            "--served-model-name", "one", "two", "--dtype", "half", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--reasoning-parser", "qwen3", "--tensor-parallel-size", "1", "--enforce-eager", "--block-size=32",
            "--max_num_batched_tokens", "1K",
        ]
    )  # fmt: skip
    speculation = flags.speculative_config.speculation
    assert (speculation.drafter, speculation.depth) == ("org/drafter", 3)
    assert flags.names == ("one", "two")
    assert flags.api_key == ("a", "b")
    config = flags.engine_config
    assert (config.max_model_len, config.max_num_seqs, config.dtype, config.page_size) == (4000, 32, "float16", 32)
    assert config.max_batched_tokens == 1024


def test_keys_of_json_flags_may_be_dotted() -> None:
    flags = parse(["--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=4"])
    assert flags.speculative_config.speculation.drafter == "ngram"
    assert flags.speculative_config.speculation.depth == 4
    assert (flags.speculative_config.prompt_lookup_max, flags.speculative_config.prompt_lookup_min) == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size", "4"], ["--tensor-parallel-size", "--engine vllm"]),
        (["-tp=2"], ["--engine vllm"]),
        (["--quantization", "bitsandbytes"], ["--quantization", "bitsandbytes", "int8"]),
        (["--enable-lora"], ["merge", "--engine vllm"]),
        (["--max-modle-len", "8"], ["--max-modle-len", "--max-model-len"]),
        (["--speculative-config", "{"], ["--speculative-config", "JSON"]),
        (["--speculative-config", '{"method":"medusa"}'], ["medusa", "eagle3", "--engine vllm"]),
        (["--speculative-config", '{"method":"eagle3"}'], ["'model'"]),
        (["--speculative-config", '{"method":"ngram","speed":3}'], ["'speed'"]),
        (["--speculative-config", '{"model":"x","disable_by_batch_size":4}'], ["disable_by_batch_size", "load", "speculate"]),
        (["--speculative-config", '{"method":"ngram"}', "--drafter", "ngram"], ["--drafter"]),
        (["--speculative-num-steps", "3"], ["SGLang", "--depth"]),
        (["-np", "4"], ["llama.cpp", "--max-num-seqs"]),
        (["--alias=x"], ["llama.cpp", "--served-model-name"]),
        (["--speculative-modle", "x"], ["not a flag", "--speculative-config"]),
        (["--enable-auto-tool-choice"], ["--tool-call-parser"]),
        (["--tool-call-parser", "nonsense"], ["hermes"]),
        (["--chat-template", "no-such-file.jinja"], ["--chat-template"]),
        (["--port", "many"], ["--port"]),
        (["a", "--model", "b"], ["two models"]),
        (["--api-key", ""], ["--api-key"]),
        (["--log-interval", "0"], ["--log-interval", "at least"]),
        (["--log-interval", "nan"], ["--log-interval", "at least"]),
        (["--idle-timeout", "inf"], ["--idle-timeout", "finite"]),
        (["--max-model-len", "inf"], ["--max-model-len", "not a number"]),
        (["--tree-width", "0"], ["width of 1"]),
        (["--speculative-config", '{"model":5}'], ["'model'", "5"]),
    ],
)
def test_refusals_name_the_flag_and_the_alternative(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    for word in words:
        assert word in str(caught.value)


def test_prefix_caching_is_on_unless_switched_off() -> None:
    assert parse(["m"]).engine_config.prefix_caching
    assert parse(["m", "--enable-prefix-caching", "--enable-prompt-tokens-details"]).engine_config.prefix_caching
    assert not parse(["m", "--no-enable-prefix-caching"]).engine_config.prefix_caching
    assert not parse(["m", "--no_enable_prefix_caching"]).engine_config.prefix_caching


def test_every_refusal_gives_a_reason() -> None:
    for flag, reason in REFUSED.items():
        with pytest.raises(UserError, match="does not apply here: "):
            parse([flag, "1"])
        assert len(reason) > 10
    for flag, allowed in MAY_BE.items():
        assert isinstance(parse([flag, *allowed.values[:1]]), ServeFlags)


def test_a_chat_template_is_a_file_or_its_text(tmp_path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert parse(["--chat-template", str(file)]).chat_template == "{{ messages }}"
    assert parse(["--chat-template", "{{ x }}"]).chat_template == "{{ x }}"


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert parse([]).api_key == ("secret",)


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("auto", 0), ("-1", 0)]
)
def test_numbers_with_suffixes(text: str, number: int) -> None:
    assert human_int(text) == number


def test_the_engine_is_chosen_before_unknown_flags_are_refused() -> None:
    assert chosen_engine(["m", "--tensor-parallel-size", "4", "--engine", "vllm"]) == "vllm"
    assert chosen_engine(["m", "--engine=vllm"]) == "vllm"
    assert chosen_engine(["m"]) == "fledge"


def test_depth_rules_are_on_unless_switched_off():
    for words in (["m", "--drafter", "ngram"], ["m", "--speculative-config", '{"method": "ngram"}']):
        speculation = parse(words).speculative_config.speculation
        assert (speculation.adaptive, speculation.drift_guard) == (True, True)
        speculation = parse([*words, "--no-drift-guard", "--no-adaptive-depth"]).speculative_config.speculation
        assert (speculation.adaptive, speculation.drift_guard) == (False, False)


def test_every_limit_is_a_flag() -> None:
    """The website's table of limits is generated from the same class: tests/test_docs.py."""
    for one in fields(Limits):
        flag = f"--{one.name.replace('_', '-')}"
        value = "7"
        assert getattr(parse([flag, value]).limits, one.name) == one.metadata["kind"](value)
        with pytest.raises(UserError):
            parse([flag, "-3"])


def test_by_default_the_server_listens_locally_and_allows_no_origin() -> None:
    flags = parse([])
    assert flags.host == "127.0.0.1"
    assert flags.allowed_origins == ()


@pytest.mark.parametrize(
    ("words", "engine"),
    [([], "fledge"), (["m"], "fledge"), (["m", "--engine", "vllm"], "vllm"), (["--engine=vllm"], "vllm"), (["--engine"], "")],
)
def test_the_engine_is_chosen_before_flags_are_parsed(words: list[str], engine: str) -> None:
    assert chosen_engine(words) == engine


def known_flags() -> set[str]:
    return {option for action in flag_parser()._actions for option in action.option_strings}


@pytest.mark.parametrize("table", [SGLANG, LLAMA_CPP])
def test_flags_suggested_for_those_of_other_engines_exist(table: dict[str, str]) -> None:
    named = {flag for text in table.values() for flag in re.findall(r"--[a-z][\w-]+", text)}
    assert named <= known_flags()
    assert not set(table) & (known_flags() | set(MAY_BE) | set(REFUSED) | set(SAME)), "these flags are handled elsewhere first"


def test_every_flag_listed_as_vllms_exists() -> None:
    assert known_flags() >= OF_VLLM


def test_flags_without_effect_are_reported() -> None:
    for words in (
        ["--enforce-eager"],
        ["--no-async-scheduling"],
        ["--speculative-config", '{"model":"x","enforce_eager":true}'],
    ):
        (note,) = parse(["m", *words]).notes
        assert "no effect" in note
    assert parse(["m", "--enable-chunked-prefill", "--speculative-config", '{"model":"x","enforce_eager":false}']).notes == ()


def test_vllm_flags_with_another_name_here_work() -> None:
    assert parse(["m", "--disable-frontend-multiprocessing"]).engine_process is False
    assert parse(["m", "--api-server-count", "2"]).api_workers == 2


def test_tree_drafting_is_enabled_by_its_switch_or_its_shape() -> None:
    def tree(*words: str) -> tuple[int, int] | None:
        found = parse(["m", "--drafter", "d", *words]).speculative_config.speculation.tree
        return None if found is None else (found.width, found.nodes)

    assert (tree(), tree("--tree"), tree("--tree-nodes", "20")) == (None, (4, 12), (4, 20))


def test_zero_draft_tokens_are_not_replaced_by_the_default() -> None:
    """The engine refuses a depth of 0, so the parser must pass the 0 on."""
    config = '{"method": "ngram", "num_speculative_tokens": 0}'
    assert parse(["--speculative-config", config]).speculative_config.speculation.depth == 0


def test_the_method_of_a_quantised_checkpoint_may_be_named(tmp_path: Path) -> None:
    flags = parse(["m", "--quantization", "awq_marlin"])
    assert (flags.checkpoint_quantization, flags.engine_config.quantization) == ("awq", "none")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert quantization_of(tmp_path) == "awq"
    (tmp_path / "config.json").write_text("{}")
    assert quantization_of(tmp_path) is None


def test_a_quantization_method_other_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    from fledge.serving.build import build
    from fledge.serving.metrics import Metrics

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--quantization gptq: .* is not quantised; leave it out"):
        build(parse([str(tmp_path), "--quantization", "gptq"]), Metrics("m"))


def test_help_shows_the_defaults() -> None:
    text = " ".join(flag_parser().format_help().split())
    for words in ("(default 127.0.0.1)", "(default 8000)", "(default 256)", "0: 16 on CPU, 128 on GPU", "(default 10.0)"):
        assert words in text
    groups = [group.title for group in flag_parser()._action_groups if group._group_actions]
    assert groups[:4] == ["options", "Model", "Speculation", "Engine"]
    assert groups[-1] == "Limits on requests"


def test_ready_is_logged_once_and_only_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, said = SimpleNamespace(status="loading"), []
    monkeypatch.setattr(server.log, "info", said.append)
    tested = server.Server(uvicorn.Config("app"), SimpleNamespace(engine=engine))
    tested.ready_line = "ready: m at http://127.0.0.1:8000"
    asyncio.run(tested.on_tick(1))
    assert said == []
    engine.status = "ready"
    asyncio.run(tested.on_tick(2))
    asyncio.run(tested.on_tick(3))
    assert said == ["ready: m at http://127.0.0.1:8000"]


def test_uvicorns_startup_messages_are_not_logged() -> None:
    def is_shown(text: str) -> bool:
        return _is_not_startup(logging.makeLogRecord({"msg": text}))

    assert not is_shown("Application startup complete.")
    assert not is_shown("Uvicorn running on %s://%s:%d (Press CTRL+C to quit)")
    assert is_shown("Application startup failed. Exiting.")
    assert is_shown("Shutting down")
    assert is_shown("Application shutdown complete.")
