"""A client that gets hidden states from a vLLM server that runs the target.

The server extracts the states of each request's tokens (`extract_hidden_states`) and writes them to a folder
(`ExampleHiddenStatesConnector`); its answer names the file. The client reads it from a shared folder or over HTTP.
Only the file name is taken from the answer. The folder comes only from the user's settings; otherwise a server could make the
client read and delete any file. The API key is sent to the server, and to the files' URL only if it has the same origin.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import httpx
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fledge.errors import UserError, printable

FIRST_CONTACT_S = 5.0
OUTAGE_S = 600.0  # how long to retry when a server restarts during a run
STATES_FOLDER = "/dev/shm/states"  # default folder of the server
STATES_FILE = re.compile(r"[A-Za-z0-9_][\w.@:+=-]*\.safetensors")
FILE_S = 20.0  # how long to wait for the file after the answer, because shared folders show new files late


class EndpointError(UserError):
    """The server cannot be reached, or its answer cannot be used. The message says what to do."""


class Answer(NamedTuple):
    states_TLD: Tensor  # one row for each token, one column for each layer
    next_token: int
    log_probability: float  # of the next token


def launch_command(model: str, layers: Sequence[int], folder: str = STATES_FOLDER) -> str:
    """Returns the command with which the server must be started."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    options = (("--speculative-config", speculative), ("--kv-transfer-config", transfer))
    return f"vllm serve {model} " + " ".join(f"{name} {shlex.quote(json.dumps(value))}" for name, value in options)


class StatesClient:
    """The client. Safe to use from several threads."""

    def __init__(self, url: str, layers: Sequence[int], hidden_size: int, storage: str | None, command: str) -> None:
        """`storage`: path or URL of the server's folder on this machine; None: the folder in `launch_command`. `command`:
        the command that starts the server, for error messages."""
        self.url, self.layers, self.hidden_size, self.command = url.rstrip("/"), tuple(layers), hidden_size, command
        self.storage = (storage or STATES_FOLDER).rstrip("/")
        key = os.environ.get("VLLM_API_KEY")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Redirects are not followed, because they would send the API key or the request to another server.
        timeout = httpx.Timeout(OUTAGE_S, connect=10.0)
        new_client = partial(httpx.Client, timeout=timeout, limits=limits, follow_redirects=False)
        self._http = new_client(headers=headers)
        self._files = self._http if _origin(self.storage) == _origin(self.url) else new_client()
        self._patience_s = FIRST_CONTACT_S
        self._closed, self._folder_seen = threading.Event(), False
        self._late: set[str] = set()  # files to delete that did not exist yet
        self._lock = threading.Lock()
        self.model, self.max_length = self._served_model()
        self._patience_s = OUTAGE_S

    def states(self, tokens: Sequence[int]) -> Answer:
        prompt = list(map(int, tokens))
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 0, "return_token_ids": True}
        for attempt in (1, 2, 3):
            content = self._completion(body)
            try:
                tensors = self._collect(content)
                break
            except FileNotFoundError:
                if attempt == 3 or not self._folder_seen or self._closed.is_set():
                    raise self._not_here(content) from None
        self._check(tensors, prompt)
        choice = content["choices"][0]
        return Answer(tensors["hidden_states"], choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0])

    def continuation(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int], **sampling: Any
    ) -> tuple[list[int], str]:
        """Returns the target's answer to a prompt, including its stop token, and the finish reason; greedy by default."""
        body = {"prompt": list(map(int, prompt)), "max_tokens": max_new_tokens, "temperature": 0, "return_token_ids": True}
        content = self._completion(body | {"stop_token_ids": list(stop_ids)} | sampling)
        self._discard(content)
        choice = content["choices"][0]
        return list(choice["token_ids"]), choice.get("finish_reason") or "stop"

    def close(self) -> None:
        """Stops all retries; running requests may finish, so that their files are removed. Waits for late files."""
        self._closed.set()
        self.sweep(FILE_S)

    def sweep(self, wait_s: float = 0.0) -> None:
        """Deletes late files that exist by now; tries for up to `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                self._late = {place for place in self._late if not _delete_unlocked(place)}
            if not self._late or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    # --- requests -------------------------------------------------------------------------------------------------

    def _served_model(self) -> tuple[str, int]:
        content = self._ask("GET", "/models")
        try:
            served = content["data"][0]
            return served["id"], int(served["max_model_len"])
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.url}/models: not a vLLM server; start one with: {self.command}") from None

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        content = self._ask("POST", "/completions", {"model": self.model, **body})
        if not (content.get("kv_transfer_params") or {}).get("hidden_states_path"):
            raise EndpointError(f"{self.url}: the server returns no hidden states; start it with: {self.command}")
        return content

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends a request; retries temporary errors until the time limit `_patience_s`."""
        deadline, wait = time.monotonic() + self._patience_s, 0.25
        while True:
            try:
                response = self._http.request(method, self.url + path, json=body)
                if response.is_success:
                    return response.json()
                reason = f"{response.status_code} {_reason(response)}"
                if response.status_code < 500 and response.status_code not in (408, 429):
                    raise EndpointError(f"{self.url}{path}: refused ({reason})")
            except httpx.InvalidURL as error:
                raise EndpointError(f"target.endpoint {self.url!r}: {error}; an example: http://host:8000/v1") from None
            except ValueError:
                raise EndpointError(f"{self.url}{path}: the answer is not JSON; is it vLLM's /v1?") from None
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                if isinstance(error, httpx.UnsupportedProtocol):
                    raise EndpointError(f"target.endpoint {self.url!r}: {reason}; an example: http://host:8000/v1") from None
            if time.monotonic() + wait > deadline or self._closed.wait(wait):
                raise EndpointError(
                    f"{self.url}: the server does not answer ({reason}), tried for {self._patience_s:.0f} s; "
                    f"if it is not running, start it with: {self.command}"
                )
            wait = min(2 * wait, 15.0)

    # --- the files ------------------------------------------------------------------------------------------------

    def _place(self, content: dict[str, Any]) -> str:
        """Returns the path or URL of the answer's file on this machine."""
        named = _named(content)
        if "://" in named:
            raise EndpointError(f"{self.url}: its states are on another host, which is refused: {printable(named, 80)!r}")
        name = os.path.basename(named)
        if not STATES_FILE.fullmatch(name):
            raise EndpointError(f"{self.url}: its file of states has an unsafe name: {printable(name, 80)!r}")
        return f"{self.storage}/{name}"

    def _discard(self, content: dict[str, Any]) -> None:
        """Deletes a file of states without reading it, now or once it exists.

        Over HTTP nothing can be deleted. Until a first file has been found in the given folder, this waits for each file and
        raises if it does not appear: if the folder is wrong, the server's disk would fill up.
        """
        place = self._place(content)
        if place.startswith(("http://", "https://")):
            return
        deadline = time.monotonic() + FIRST_CONTACT_S
        while not (deleted := _delete_unlocked(place)) and not self._folder_seen:
            if time.monotonic() > deadline:
                raise self._not_here(content)
            time.sleep(0.01)
        self._folder_seen = True
        if not deleted:
            with self._lock:
                self._late.add(place)
            self.sweep()

    def _collect(self, content: dict[str, Any]) -> dict[str, Tensor]:
        """Reads the answer's file once it is complete, and deletes it if it is in a folder."""
        place = self._place(content)
        fetch = self._download if place.startswith(("http://", "https://")) else _read_unlocked
        deadline, wait = time.monotonic() + (FILE_S if self._folder_seen else FIRST_CONTACT_S), 0.002
        while True:
            data = fetch(place)
            if data is not None:
                try:
                    tensors = load(data)
                    break
                except SafetensorError:  # not complete yet
                    pass
            if time.monotonic() > deadline:
                if fetch is _read_unlocked:
                    with self._lock:
                        self._late.add(place)
                raise FileNotFoundError(2, "not there", place)
            time.sleep(wait)
            wait = min(2 * wait, 0.2)
        if fetch is _read_unlocked:
            _delete(place)
        self._folder_seen = True
        return tensors

    def _not_here(self, content: dict[str, Any]) -> EndpointError:
        return EndpointError(
            f"{self.url}: the server wrote states to {printable(_named(content), 80)}, but they do not appear in "
            f"{self.storage}; share that folder, and set target.endpoint_states (fledge make: --endpoint-states) to its path "
            "or URL on this machine"
        )

    def _download(self, url: str) -> bytes | None:
        try:
            response = self._files.get(url)
        except httpx.TransportError:
            return None
        return response.content if response.is_success else None

    def _check(self, tensors: dict[str, Tensor], tokens: list[int]) -> None:
        if "hidden_states" not in tensors or tensors.get("token_ids") is None:
            raise EndpointError(f"{self.url}: the file of states only has {', '.join(tensors)}; vLLM 0.32 is known to work")
        shape, expected = tuple(tensors["hidden_states"].shape), (len(tokens), len(self.layers), self.hidden_size)
        if shape[1:] != expected[1:]:
            raise EndpointError(
                f"{self.url}: the server returns {shape[1]} states of size {shape[2]} per token, but the recipe needs "
                f"{expected[1]} of size {expected[2]}, after layers {list(self.layers)}; start it with: {self.command}"
            )
        if shape[0] != expected[0] or tensors["token_ids"].tolist() != tokens:
            raise EndpointError(
                f"{self.url}: asked for the states of {expected[0]} tokens, but got {shape[0]} with other token ids; the "
                "server adds or drops tokens, or a proxy changes the request"
            )


def _named(content: dict[str, Any]) -> str:
    return str(content["kv_transfer_params"]["hidden_states_path"])


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Returns scheme, host and port of a URL; None for a folder."""
    if not url.startswith(("http://", "https://")):
        return None
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return None
    return parsed.scheme, parsed.host, parsed.port


def _read_unlocked(place: str) -> bytes | None:
    """Returns the file's content if the server has released its lock; None otherwise."""
    try:
        with _open_unlocked(place) as file:
            return file.read()
    except PermissionError:
        raise EndpointError(f"{place}: no permission to read it; run the training as the server's user") from None
    except OSError:
        return None


def _delete_unlocked(place: str) -> bool:
    """Deletes a file and its lock file if the server has released the lock; returns False otherwise."""
    try:
        with _open_unlocked(place):
            _delete(place)
        return True
    except OSError:
        return False


def _delete(place: str) -> None:
    for file in (Path(place), Path(place + ".lock")):
        file.unlink(missing_ok=True)


@contextmanager
def _open_unlocked(place: str) -> Iterator[BinaryIO]:
    """Opens a file whose lock the server has released; raises OSError otherwise."""
    with _open_plain(place + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with _open_plain(place) as file:
            yield file


def _open_plain(place: str) -> BinaryIO:
    """Opens a regular file. Refuses links and pipes, because other users may be able to write to the folder."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", place)
    return os.fdopen(descriptor, "rb")


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200]
