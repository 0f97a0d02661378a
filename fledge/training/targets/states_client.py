"""Hidden states from a vLLM server that runs the target elsewhere.

The server keeps the states of each request's tokens (`extract_hidden_states`) and writes them to a folder
(`ExampleHiddenStatesConnector`): its answer names the file. The folder is read from here, as a shared one or over HTTP.
Of what the server names only the file's name counts: where it lies is the user's word alone, or else a server could have any
file read and deleted here. The API key goes to the server, and to the files' URL only where that is the same server.
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
OUTAGE_S = 600.0  # a server that restarts in the middle of a run is waited for
STATES_FOLDER = "/dev/shm/states"  # the server's, unless the user says otherwise
STATES_FILE = re.compile(r"[A-Za-z0-9_][\w.@:+=-]*\.safetensors")
FILE_S = 20.0  # from the answer to its file: shared folders show new files late


class EndpointError(UserError):
    """The server cannot be reached, or does not give what was asked for; says what to do."""


class Answer(NamedTuple):
    states_TLD: Tensor  # one row for each token, one column for each layer
    next_token: int
    log_probability: float  # of the next token


def launch_command(model: str, layers: Sequence[int], folder: str = STATES_FOLDER) -> str:
    """How the server must be started."""
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
    """Safe to use from several threads."""

    def __init__(self, url: str, layers: Sequence[int], hidden_size: int, storage: str | None, command: str) -> None:
        """`storage`: where the server's folder is seen from here, a folder or a URL; None: the folder that `launch_command`
        gives it. `command`: for error messages."""
        self.url, self.layers, self.hidden_size, self.command = url.rstrip("/"), tuple(layers), hidden_size, command
        self.storage = (storage or STATES_FOLDER).rstrip("/")
        key = os.environ.get("VLLM_API_KEY")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Redirects are not followed: they would take the key, or the request, somewhere else.
        timeout = httpx.Timeout(OUTAGE_S, connect=10.0)
        new_client = partial(httpx.Client, timeout=timeout, limits=limits, follow_redirects=False)
        self._http = new_client(headers=headers)
        self._files = self._http if _origin(self.storage) == _origin(self.url) else new_client()
        self._patience_s = FIRST_CONTACT_S
        self._closed, self._folder_seen = threading.Event(), False
        self._late: set[str] = set()  # files that were not there yet when they were to be deleted
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
        """What the target writes after the prompt, its stop token included, and why it ended; greedily unless said."""
        body = {"prompt": list(map(int, prompt)), "max_tokens": max_new_tokens, "temperature": 0, "return_token_ids": True}
        content = self._completion(body | {"stop_token_ids": list(stop_ids)} | sampling)
        self._discard(content)
        choice = content["choices"][0]
        return list(choice["token_ids"]), choice.get("finish_reason") or "stop"

    def close(self) -> None:
        """Nothing is tried again; what is under way may end, so that its files are removed. Late files are waited for."""
        self._closed.set()
        self.sweep(FILE_S)

    def sweep(self, wait_s: float = 0.0) -> None:
        """Deletes files that came late."""
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                self._late = {place for place in self._late if not _delete_unlocked(place)}
            if not self._late or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    # --- the conversation -----------------------------------------------------------------------------------------

    def _served_model(self) -> tuple[str, int]:
        content = self._ask("GET", "/models")
        try:
            served = content["data"][0]
            return served["id"], int(served["max_model_len"])
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.url}/models: the answer is not vLLM's; start the server by: {self.command}") from None

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        content = self._ask("POST", "/completions", {"model": self.model, **body})
        if not (content.get("kv_transfer_params") or {}).get("hidden_states_path"):
            raise EndpointError(f"{self.url}: the server hands out no hidden states; start it by: {self.command}")
        return content

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Tries again where that may help, until its patience ends."""
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
                    f"if it is not running, start it by: {self.command}"
                )
            wait = min(2 * wait, 15.0)

    # --- the files ------------------------------------------------------------------------------------------------

    def _place(self, content: dict[str, Any]) -> str:
        """Where the answer's file is seen from here."""
        named = _named(content)
        if "://" in named:
            raise EndpointError(f"{self.url}: it names states on another host, which are not fetched: {printable(named, 80)!r}")
        name = os.path.basename(named)
        if not STATES_FILE.fullmatch(name):
            raise EndpointError(f"{self.url}: it names a file of states that has no plain name: {printable(name, 80)!r}")
        return f"{self.storage}/{name}"

    def _discard(self, content: dict[str, Any]) -> None:
        """Deletes a file of states that is not needed, without reading it: now, or when it is there.

        Over HTTP nothing can be deleted. Until a first file was found where the user says, each is waited for: better no
        answers than a full disk.
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
        """Reads the answer's file, once it is whole, and deletes it where that is possible."""
        place = self._place(content)
        fetch = self._download if place.startswith(("http://", "https://")) else _read_unlocked
        deadline, wait = time.monotonic() + (FILE_S if self._folder_seen else FIRST_CONTACT_S), 0.002
        while True:
            data = fetch(place)
            if data is not None:
                try:
                    tensors = load(data)
                    break
                except SafetensorError:  # not whole yet
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
            f"{self.url}: it wrote states to {printable(_named(content), 80)}, which do not appear in {self.storage}; share "
            "that folder, or name where it is seen from here, as a folder or a URL, in target.endpoint_states "
            "(fledge make: --endpoint-states)"
        )

    def _download(self, url: str) -> bytes | None:
        try:
            response = self._files.get(url)
        except httpx.TransportError:
            return None
        return response.content if response.is_success else None

    def _check(self, tensors: dict[str, Tensor], tokens: list[int]) -> None:
        if "hidden_states" not in tensors or tensors.get("token_ids") is None:
            raise EndpointError(f"{self.url}: the file of states holds {', '.join(tensors)} alone; vLLM 0.32 is known to fit")
        shape, expected = tuple(tensors["hidden_states"].shape), (len(tokens), len(self.layers), self.hidden_size)
        if shape[1:] != expected[1:]:
            raise EndpointError(
                f"{self.url}: it gives {shape[1]} states of {shape[2]} for each token, the recipe needs {expected[1]} of "
                f"{expected[2]}, after layers {list(self.layers)}; start it by: {self.command}"
            )
        if shape[0] != expected[0] or tensors["token_ids"].tolist() != tokens:
            raise EndpointError(
                f"{self.url}: asked for the states of {expected[0]} tokens, it gave those of {shape[0]} others; its model adds "
                "or drops tokens, or something between changes the request"
            )


def _named(content: dict[str, Any]) -> str:
    return str(content["kv_transfer_params"]["hidden_states_path"])


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port; None for a folder."""
    if not url.startswith(("http://", "https://")):
        return None
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return None
    return parsed.scheme, parsed.host, parsed.port


def _read_unlocked(place: str) -> bytes | None:
    """The file's content once its writer has let go of it; None: not yet."""
    try:
        with _open_unlocked(place) as file:
            return file.read()
    except PermissionError:
        raise EndpointError(f"{place}: may not be read; the server writes for its own user alone: train as that user") from None
    except OSError:
        return None


def _delete_unlocked(place: str) -> bool:
    """Deletes a file and its lock once its writer has let go of it. False: not yet."""
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
    """Opens a file whose writer has let go of it; else an OSError."""
    with _open_plain(place + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with _open_plain(place) as file:
            yield file


def _open_plain(place: str) -> BinaryIO:
    """A file, and not a link to one or a pipe: the folder may be open to others."""
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
