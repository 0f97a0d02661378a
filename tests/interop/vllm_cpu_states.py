"""vLLM's connector for hidden states, adapted to a CPU. vLLM loads it through `kv_connector_module_path`.

It replaces only what needs a GPU: pinned memory, and the check whether a copy is complete.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        original = torch.empty_like

        def unpinned(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
            return original(tensor, **options | {"pin_memory": False})

        with mock.patch.object(torch, "empty_like", unpinned):
            super()._submit_async_write(pending)
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
