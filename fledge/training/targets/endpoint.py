"""A target that runs on a vLLM server: its states come over the network; embedding, final norm and head are loaded here."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.checkpoints.ends import Ends
from fledge.training.targets.states_client import FILE_S, EndpointError, StatesClient, launch_command
from fledge.training.targets.target import Document, Head, Target, TargetStates, documents
from fledge.training.ttt import TrainBatch

# Largest log-probability difference between the server (bf16, other kernels) and ours. With a wrong layer it is whole units.
LARGEST_DIFFERENCE = 0.3


class EndpointTarget(Target):
    """Fetches states ahead of training, with one request per document and up to `requests` at a time."""

    def __init__(
        self,
        url: str,
        ends: Ends,
        config: Mapping[str, Any],
        taps: Sequence[int],
        num_layers: int,
        *,
        model: str = "MODEL",
        storage: str | None = None,
        requests: int = 32,
    ) -> None:
        """`config`: the target's, for the scaling and soft cap of its logits. `storage`: see StatesClient."""
        self.embedding, self.norm, self.lm_head = ends.embedding, ends.norm, ends.lm_head
        scale = 1.0 / (config.get("logits_scaling") or 1.0) * (config.get("logit_scale") or 1.0)
        self.head = Head(ends.lm_head.weight.detach(), None, scale, config.get("final_logit_softcapping"))
        self.vocab_size, self.hidden_size = ends.embedding.weight.shape
        self.device, self.dtype = self.head.weight.device, self.head.weight.dtype
        self.taps = tuple(taps)
        self.layers = tuple(dict.fromkeys([*taps, num_layers]))  # the loss needs the last one, with norm and head applied
        self.client = StatesClient(url, self.layers, self.hidden_size, storage, launch_command(model, self.layers))
        self._pool = ThreadPoolExecutor(requests, thread_name_prefix="states")
        self._ahead: dict[str, list[Future[Tensor]]] = defaultdict(list)
        self._lock = threading.Lock()  # `prefetch` and `states` are called from different threads
        self._check_head()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Checks that norm and head applied here give the server's own log-probabilities: this proves that the layer is the
        last one, the checkpoint is the server's, and the norm is a plain one."""
        differences = []
        for seed in range(5):
            tokens = torch.randint(self.vocab_size, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
            answer = self.client.states(tokens)
            hidden = self.norm(answer.states_TLD[-1:, -1].to(self.device, self.dtype))
            ours = self.head(hidden).float().log_softmax(-1)[0, answer.next_token]
            differences.append(abs(float(ours) - answer.log_probability))
        if statistics.median(differences) > LARGEST_DIFFERENCE:
            raise EndpointError(
                f"{self.client.url}: the checkpoint's norm and head, applied to the server's states after layer "
                f"{self.layers[-1]}, do not give the server's own probabilities; it serves another model, or layers other "
                f"than {list(self.layers)}; start it with: {self.client.command}"
            )

    def require_length(self, num_tokens: int) -> None:
        if self.client.max_length <= num_tokens:
            raise EndpointError(
                f"{self.client.url}: the server takes at most {self.client.max_length - 1} tokens, but data.sequence_length is "
                f"{num_tokens}; start it with --max-model-len {num_tokens + 1}, or lower data.sequence_length"
            )

    def prefetch(self, batch: TrainBatch) -> None:
        for document in documents(batch):
            with self._lock:
                self._ahead[document.key].append(self._pool.submit(self._fetch, document.tokens))

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        asked = [(document, self._asked(document)) for document in documents(batch)]
        states = torch.zeros(batch.tokens_BT.numel(), len(self.layers), self.hidden_size, dtype=self.dtype)
        for document, future in asked:
            states[document.first : document.first + len(document.tokens)] = future.result()
        by_layer = dict(zip(self.layers, states.to(self.device).unbind(1), strict=True))
        with torch.no_grad():
            return TargetStates([by_layer[i] for i in self.taps], self.norm(states[:, -1].to(self.device)))

    def _asked(self, document: Document) -> Future[Tensor]:
        with self._lock:
            waiting = self._ahead[document.key]
            asked = waiting.pop(0) if waiting else self._pool.submit(self._fetch, document.tokens)
            if not waiting:
                del self._ahead[document.key]
            return asked

    def _fetch(self, tokens: np.ndarray) -> Tensor:
        return self.client.states(tokens.tolist()).states_TLD.to(self.dtype)

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        return list(self._pool.map(lambda prompt: self.client.continuation(prompt, max_new_tokens, stop_ids)[0], prompts))


class EndpointAnswers:
    """An `AnswerGenerator` for `regenerate` that uses the same server."""

    def __init__(self, client: StatesClient, requests: int) -> None:
        self.client, self.concurrency, self.max_model_len = client, requests, client.max_length

    def generate(
        self,
        prompts: Iterable[list[int] | None],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Callable[[int], int],
        stop_ids: Sequence[int],
    ) -> Iterator[tuple[int, list[int], str]]:
        """Implements `regenerate.AnswerGenerator.generate`."""
        coming, num_taken = iter(prompts), 0
        under_way: dict[Future[tuple[list[int], str]], int] = {}
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="answers")
        try:
            while True:
                while len(under_way) < self.concurrency and (prompt := next(coming, None)) is not None:
                    own_seed = seed(num_taken) if callable(seed) else seed + num_taken
                    sampling = {"temperature": temperature, "top_p": top_p, "seed": own_seed % 2**31}
                    request = pool.submit(self.client.continuation, prompt, max_tokens, stop_ids, **sampling)
                    under_way[request] = num_taken
                    num_taken += 1
                if not under_way:
                    return
                for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                    yield under_way.pop(done), *done.result()
        finally:  # waits for running requests, so that their files are removed; cancels the others
            pool.shutdown(cancel_futures=True)
            self.client.sweep(FILE_S)
