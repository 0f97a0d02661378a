"""Target states on disk can only be used with the weights that made them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fledge.checkpoints.hf import save_decoder
from fledge.errors import UserError
from fledge.training.targets.offline import StatesOnDisk, weights_fingerprint
from fledge.training.targets.target import DecoderTarget
from tests.tiny import tiny_decoder


def test_states_of_other_weights_are_refused(tmp_path):
    folder, decoder = tmp_path / "model", tiny_decoder()
    save_decoder(decoder, folder)
    target = DecoderTarget(decoder, (0, 1, 2))

    def states() -> StatesOnDisk:
        identity = {"model": "m", "weights": weights_fingerprint(folder)}
        return StatesOnDisk(target, 3, tmp_path / "states", identity)

    states()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert weights_fingerprint(copy) == weights_fingerprint(folder)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight += 0.01
    save_decoder(decoder, folder)
    with pytest.raises(UserError, match=r"another target \(weights differ\)"):
        states()
    identity = tmp_path / "states" / "identity-0.json"
    identity.write_text(json.dumps({"model": "n", "weights": weights_fingerprint(folder)}))
    with pytest.raises(UserError, match=r"another target \(model differ\)"):
        states()
    assert [path.name for path in identity.parent.iterdir()] == ["identity-0.json"]
