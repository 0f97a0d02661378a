"""Log-probabilities of the chosen and the most likely tokens equal those from a sort."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.logprobs import token_logprobs_reference, token_logprobs_triton
from tests.kernels.support import KERNELS, running


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("vocab_size", "count"), [(12, 20), (300, 20), (5000, 20), (4100, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_sort(kernel, vocab_size, count, dtype):
    run, device = running(kernel, token_logprobs_reference, token_logprobs_triton)
    logits = (5 * torch.randn(5, vocab_size)).to(dtype)
    logits[1] = torch.randint(-3, 3, (vocab_size,))  # mostly ties
    logits[2, 3:] = -torch.inf
    logits[3] = -60.0 - logits[3].abs()
    logits[4, :2] = torch.tensor([-0.0, 0.0])
    tokens = torch.randint(0, vocab_size, (5,))
    chosen, values, ids = (part.cpu() for part in run(logits.to(device), tokens.to(device), count))
    expected = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert ids.dtype == torch.int32
    assert ids.tolist() == order.tolist()
    torch.testing.assert_close(values.double(), expected.gather(1, order), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(chosen.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=2e-6, atol=2e-6)
