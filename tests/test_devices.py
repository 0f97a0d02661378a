from __future__ import annotations

import pytest
import torch

from fledge.devices import resolve_device
from fledge.errors import UserError


@pytest.mark.parametrize(
    ("name", "gpus", "message"),
    [
        ("quantum", 1, "use cpu, cuda or auto"),
        ("meta", 1, "use cpu, cuda or auto"),
        ("", 1, "use cpu, cuda or auto"),
        ("cuda", 0, "use the device cpu"),
        ("cuda:9", 1, "there is no cuda:9 on this machine; use cuda:0"),
        ("cuda:2", 2, "use cuda:0 to cuda:1"),
    ],
)
def test_missing_devices_are_refused_by_name(name, gpus, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        resolve_device(name)


def test_auto_is_the_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert resolve_device("auto") == torch.device(kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
