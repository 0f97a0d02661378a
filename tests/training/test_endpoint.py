"""Training with hidden states from an endpoint: states, losses and errors."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from fledge.checkpoints import ends
from fledge.checkpoints.hf import load_decoder, save_decoder
from fledge.cli.make import make
from fledge.errors import ModelError
from fledge.training.datagen import answers as make_answers
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, RecipeError, build_recipe
from fledge.training.targets import states_client, toy
from fledge.training.targets.continuations import continuations
from fledge.training.targets.endpoint import EndpointAnswers, EndpointTarget
from fledge.training.targets.states_client import EndpointError
from fledge.training.targets.target import DecoderTarget, documents
from fledge.training.trainer import train
from tests.tiny import tiny_decoder
from tests.training.chat import prompts_of_toy
from tests.training.fake_endpoint import FakeEndpoint, serving
from tests.training.test_target import DOCUMENT, packed

TAPS, LAYERS = (0, 2, 3), (0, 2, 3, 4)
CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path) -> Path:
    return save_decoder(tiny_decoder(), tmp_path / "model")


@pytest.fixture
def endpoint(tmp_path):
    with serving(FakeEndpoint(tiny_decoder(), LAYERS, tmp_path / "states")) as running:
        yield running


def connect(endpoint: FakeEndpoint, model: Path, **settings) -> EndpointTarget:
    settings = {"taps": TAPS, "num_layers": 4, "storage": str(endpoint.folder)} | settings
    url = settings.pop("url", endpoint.url)
    return EndpointTarget(url, ends.load_ends(model, torch.float32, CPU), ends.text_config(model), **settings)


def assert_same_states(ours, theirs) -> None:
    real = (DOCUMENT > 0).flatten()
    torch.testing.assert_close(ours.hidden_ND[real], theirs.hidden_ND[real], rtol=1e-3, atol=1e-3)
    for a, b in zip(ours.taps, theirs.taps, strict=True):
        torch.testing.assert_close(a[real], b[real], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("taps", [TAPS, (1, 4)])
def test_states_are_those_of_our_decoder(endpoint, model, taps):
    endpoint.layers = tuple(dict.fromkeys([*taps, 4]))
    target = connect(endpoint, model, taps=taps)
    assert_same_states(target.states(packed()), DecoderTarget(tiny_decoder(), taps).states(packed()))
    assert not list(endpoint.folder.iterdir()), "files are deleted after they are read"
    target.close()


def test_a_folder_served_over_http(endpoint, model):
    target = connect(endpoint, model, storage=endpoint.url.replace("/v1", "/files"))
    endpoint.write_seconds = 0.05
    assert_same_states(target.states(packed()), DecoderTarget(tiny_decoder(), TAPS).states(packed()))
    target.close()


def test_prefetched_states_are_requested_once(endpoint, model):
    target = connect(endpoint, model)
    endpoint.requests.clear()
    for _ in range(2):
        target.prefetch(packed())
    assert_same_states(target.states(packed()), target.states(packed()))
    assert len(endpoint.requests) == 2 * len(list(documents(packed())))
    target.close()


def test_failed_requests_are_retried(endpoint, model):
    target = connect(endpoint, model)
    endpoint.failures = 3
    assert_same_states(target.states(packed()), DecoderTarget(tiny_decoder(), TAPS).states(packed()))
    target.close()


def test_slow_files_are_waited_for(endpoint, model):
    endpoint.write_seconds = 0.1
    target = connect(endpoint, model)
    assert_same_states(target.states(packed()), DecoderTarget(tiny_decoder(), TAPS).states(packed()))
    target.close()


def test_missing_server_or_folder_is_reported(endpoint, model, tmp_path, monkeypatch):
    monkeypatch.setattr(states_client, "FIRST_CONTACT_S", 0.3)
    with pytest.raises(EndpointError, match=r"does not answer.*start it with: vllm serve"):
        connect(endpoint, model, url="http://127.0.0.1:9/v1")
    with pytest.raises(EndpointError, match=r"target\.endpoint_states"):
        connect(endpoint, model, storage=str(tmp_path / "elsewhere"))


def test_mistakes_are_named(endpoint, model):
    with pytest.raises(EndpointError, match="an example: http"):
        connect(endpoint, model, url="localhost:8000")
    with pytest.raises(EndpointError, match=r"refused|not JSON"):
        connect(endpoint, model, url=endpoint.url.replace("/v1", ""))
    with pytest.raises(EndpointError, match="4 states of size 32 per token, but the recipe needs 3 of size 32, after layers"):
        connect(endpoint, model, taps=(0, 2))
    with pytest.raises(EndpointError, match=r"takes at most 511 tokens.*--max-model-len 2049"):
        connect(endpoint, model).require_length(2048)
    endpoint.extra_token = True
    with pytest.raises(EndpointError, match="adds or drops tokens"):
        connect(endpoint, model)
    endpoint.extra_token, endpoint.hands_out_states = False, False
    with pytest.raises(EndpointError, match=r"no hidden states.*ExampleHiddenStatesConnector"):
        connect(endpoint, model)


def test_wrong_last_layer_or_model_is_refused(endpoint, model, tmp_path):
    endpoint.layers = (0, 1, 2, 3)
    with pytest.raises(EndpointError, match="do not give the server's own probabilities"):
        connect(endpoint, model)
    endpoint.layers = LAYERS
    with pytest.raises(EndpointError, match="do not give the server's own probabilities"):
        connect(endpoint, save_decoder(tiny_decoder(1), tmp_path / "other"))


def test_long_outage_ends_with_an_error(endpoint, model, monkeypatch):
    monkeypatch.setattr(states_client, "OUTAGE_S", 2.0)
    target = connect(endpoint, model)
    endpoint.failures = 10**6
    with pytest.raises(EndpointError, match=r"does not answer \(503 still loading\), tried for 2 s"):
        target.states(packed())
    target.close()


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    return toy.make(tmp_path_factory.mktemp("toy"), num_answers=120, steps=10)


@pytest.fixture
def recipe(toy_folder, tmp_path) -> Recipe:
    content = {
        "output": str(tmp_path / "online"),
        "target": {"model": str(toy_folder / "target")},
        "data": {
            "train": [str(toy_folder / "answers.jsonl")],
            "held_out_samples": 3,
            "sequence_length": 128,
            "micro_batch_size": 2,
        },
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 3, "log_every": 1, "evaluate_every": 3, "device": "cpu"},
        "evaluation": {"max_new_tokens": 8, "depths": [2], "select_depth": 2},
    }
    return build_recipe(content)


@pytest.mark.parametrize("hidden_states", ["online", "offline"])
def test_training_from_an_endpoint_equals_training_beside_the_target(recipe, tmp_path, hidden_states):
    def lines(recipe):
        return [line for line in read_journal(Path(recipe.output) / "log.jsonl") if line["kind"] == "train"]

    here = train(recipe)
    decoder = load_decoder(recipe.target.model)
    with serving(FakeEndpoint(decoder, (1, 2, 3, 4), tmp_path / "states")) as endpoint:
        elsewhere = replace(
            recipe,
            output=str(tmp_path / "elsewhere"),
            target=replace(recipe.target, endpoint=endpoint.url, endpoint_states=str(endpoint.folder)),
            run=replace(recipe.run, hidden_states=hidden_states),
        )
        there = train(elsewhere)
    assert len(lines(elsewhere)) == 3
    for ours, theirs in zip(lines(elsewhere), lines(recipe), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert there.evaluations[-1]["acceptance_length"] == pytest.approx(here.evaluations[-1]["acceptance_length"], rel=1e-6)


def test_backend_and_endpoint_exclude_each_other(recipe):
    content = recipe.to_dict()
    content["target"] |= {"endpoint": "http://host/v1", "backend": "fledge"}
    with pytest.raises(RecipeError, match="exclude each other"):
        build_recipe(content)


# --- fledge make ---------------------------------------------------------------------------------------------------


def run_make(folder: Path, endpoint: FakeEndpoint, prompts: Path, states: Path) -> Result:
    app = typer.Typer()
    app.command()(make)
    options = {"--hours": 0.004, "--prompts": prompts, "--endpoint": endpoint.url, "--endpoint-states": states}
    words = [str(word) for pair in options.items() for word in pair]
    return CliRunner().invoke(app, [str(folder / "target"), "--out", str(folder / "out"), "--device", "cpu", *words])


@pytest.fixture
def toy_server(toy_folder, tmp_path):
    """A folder with the toy target, a server of it, and a file of prompts."""
    shutil.copytree(toy_folder / "target", tmp_path / "target")
    prompts = prompts_of_toy(tmp_path / "prompts.jsonl", 24)
    with serving(FakeEndpoint(load_decoder(tmp_path / "target"), (1, 2, 3, 4), tmp_path / "states", max_answer=16)) as running:
        yield tmp_path, running, prompts


def test_make_with_endpoint_leaves_no_state_files(toy_server):
    folder, endpoint, prompts = toy_server
    done = run_make(folder, endpoint, prompts, endpoint.folder)
    assert done.exit_code == 0, done.output
    target = load_decoder(folder / "target")
    lines = [json.loads(line) for line in (folder / "out" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) >= make_answers.MIN_ANSWERS  # a busy machine may not finish all 24
    for turn in (line["turns_ids"][0] for line in lines):
        assert continuations(target, [turn["prompt_ids"]], len(turn["answer_ids"]), [toy.END]) == [turn["answer_ids"]]
    record = json.loads((folder / "out" / "drafter" / "provenance.json").read_text())
    assert record["recipe"]["target"]["endpoint"] == endpoint.url
    assert max(line["step"] for line in read_journal(folder / "out" / "run" / "log.jsonl")) > 0
    asked = set(map(tuple, endpoint.requests))
    trained = [json.loads(line)["turns_ids"][0] for line in (folder / "out" / "data" / "train.jsonl").open()]
    assert any((*turn["prompt_ids"], *turn["answer_ids"]) in asked for turn in trained)  # the training texts' states
    assert not list(endpoint.folder.iterdir())


@pytest.mark.parametrize("named", ["{other}/x.safetensors", "http://elsewhere:1/x.safetensors"])
def test_make_refuses_states_outside_the_given_folder(toy_server, monkeypatch, named):
    """Refused before the first answer is saved, because the server's folder would fill up."""
    folder, endpoint, prompts = toy_server
    monkeypatch.setattr(states_client, "FIRST_CONTACT_S", 0.3)
    other = folder / "other"
    other.mkdir()
    for name in ("x.safetensors", "x.safetensors.lock"):
        (other / name).write_bytes(b"x")
    path = named.format(other=other)
    complete = endpoint.complete
    endpoint.complete = lambda body: complete(body) | {"kv_transfer_params": {"hidden_states_path": path}}
    done = run_make(folder, endpoint, prompts, endpoint.folder)
    assert isinstance(done.exception, EndpointError)
    assert ("another host" if "://" in named else f"wrote states to {path[:60]}") in str(done.exception)
    assert len(list(other.iterdir())) == 2  # neither read nor deleted
    assert not (folder / "out" / "answers.jsonl").exists() or not (folder / "out" / "answers.jsonl").read_text()


# --- embedding, head and last layer of a checkpoint ----------------------------------------------------------------


def test_only_embedding_head_and_last_layer_are_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    hub, here = save_decoder(tiny_decoder(), tmp_path / "hub"), tmp_path / "here"
    shards = _in_shards(hub)
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns=()):
        here.mkdir(exist_ok=True)
        asked.extend(allow_patterns)
        for file in hub.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (here / file.name).write_bytes(file.read_bytes())
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder = ends.fetch_ends("someone/huge")
    fetched = {file.name for file in folder.glob("*.safetensors")}
    assert fetched == {
        shards["model.embed_tokens.weight"],
        shards["model.layers.3.mlp.up_proj.weight"],
        shards["lm_head.weight"],
    }
    loaded, decoder = ends.load_ends(folder, torch.float32, CPU), tiny_decoder()
    assert torch.equal(loaded.embedding.weight, decoder.embed_tokens.weight)
    assert torch.equal(loaded.lm_head.weight, decoder.lm_head.weight)
    assert torch.equal(loaded.norm.weight, decoder.norm.weight)
    assert torch.equal(ends.load_last_layer(folder)["self_attn.qkv_proj.weight"], decoder.layers[3].self_attn.qkv_proj.weight)


def _in_shards(folder: Path) -> dict[str, str]:
    """Rewrites a checkpoint with one file per layer, one for the embedding and one for head and norm."""
    import json

    from safetensors.torch import load_file, save_file

    tensors, files = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        part = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else name.split(".")[-2]
        files.setdefault(f"model-{part}.safetensors", {})[name] = tensor
    files.setdefault("model-norm.safetensors", {})
    files["model-lm_head.safetensors"] |= files.pop("model-norm.safetensors")
    (folder / "model.safetensors").unlink()
    for file, content in files.items():
        save_file(content, folder / file)
    where = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_a_checkpoint_without_a_head_is_refused(model):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        ends.load_ends(model, torch.float32, CPU)


def test_a_head_that_a_family_ties_by_default_is_the_embedding(tmp_path):
    """Gemma 3 configs do not state that the head is tied. Norms, stored minus one, are unquantised in quantised files too."""
    folder = save_decoder(tiny_decoder(architecture="Gemma3ForCausalLM", tie_embeddings=True), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = ends.load_ends(folder, torch.float32, CPU)
    assert torch.equal(loaded.lm_head.weight, loaded.embedding.weight)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert torch.equal(ends.load_ends(folder, torch.float32, CPU).norm.weight, loaded.norm.weight)
    assert not ends.load_last_layer(folder)


@pytest.mark.parametrize("write_seconds", [0.0, 0.3])
def test_server_answers_equal_the_target_and_leave_no_files(endpoint, model, monkeypatch, write_seconds):
    """With `fledge make --endpoint` the server answers the prompts. The states that come with the answers are deleted unread,
    also those written after the last answer."""
    target = connect(endpoint, model)
    monkeypatch.setattr(states_client, "load", lambda data: pytest.fail("states of answers are not read"))
    endpoint.write_seconds = write_seconds
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
    answers = EndpointAnswers(target.client, requests=2)
    found = {
        index: ids for index, ids, _ in answers.generate(prompts, max_tokens=6, temperature=0.0, top_p=1.0, seed=0, stop_ids=[])
    }
    assert [found[index] for index in range(3)] == continuations(tiny_decoder(), prompts, 6, [])
    assert answers.max_model_len == endpoint.max_model_len
    assert not list(endpoint.folder.iterdir())
    target.close()


def test_states_of_answers_are_not_downloaded(endpoint, model, monkeypatch):
    target = connect(endpoint, model, storage=endpoint.url.replace("/v1", "/files"))
    monkeypatch.setattr(states_client.StatesClient, "_download", lambda *_: pytest.fail("gigabytes, for nothing"))
    assert target.continuations([[5, 6, 7]], 6, []) == continuations(tiny_decoder(), [[5, 6, 7]], 6, [])
    target.close()


@pytest.mark.parametrize("named", ["/etc/passwd", "../../secret.safetensors", "http://elsewhere:1/x.safetensors", ".", 5])
def test_server_cannot_choose_files_to_read_or_delete(endpoint, model, tmp_path, monkeypatch, named):
    """Only the file name of the server's path is used, inside the folder that the user gave."""
    target = connect(endpoint, model)
    monkeypatch.setattr(states_client, "FILE_S", 0.1)
    secret = tmp_path / "secret.safetensors"
    for file in (secret, tmp_path / "secret.safetensors.lock"):
        file.write_bytes(b"x")
    complete = endpoint.complete
    endpoint.complete = lambda body: complete(body) | {"kv_transfer_params": {"hidden_states_path": named}}
    asked = []
    monkeypatch.setattr(states_client.httpx.Client, "get", lambda _, url: asked.append(url))
    with pytest.raises(EndpointError):
        target.client.states([1, 2, 3])
    assert secret.exists()
    assert not asked
    target.close()


def test_links_and_pipes_among_the_states_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "secret")
    (tmp_path / "a.safetensors.lock").write_bytes(b"")
    os.mkfifo(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors.lock").write_bytes(b"")
    assert states_client._read_unlocked(str(tmp_path / "a.safetensors")) is None
    assert states_client._read_unlocked(str(tmp_path / "b.safetensors")) is None


def test_api_key_is_sent_only_to_the_server(endpoint, model, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    elsewhere = endpoint.url.replace("127.0.0.1", "localhost").replace("/v1", "/files")
    target = connect(endpoint, model, storage=elsewhere)
    assert "authorization" not in target.client._files.headers
    assert target.client._http.headers["authorization"] == "Bearer secret"
    target.close()
