"""Every kind of attention metadata: the GPU's backend gives the same results as the reference with layouts from the host.

On CPU the kernels' torch references run; on a GPU or in Triton's interpreter, the kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fledge.config import MLAConfig
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV, SequenceLayout
from fledge.kernels.attention.rope_cache import store_kv_reference, store_kv_triton
from fledge.models.moe import stack_experts
from fledge.ops.base import device_tables
from fledge.ops.cuda_ops import CudaOps
from fledge.ops.torch_ops import TorchOps
from tests.kernels.support import DEVICE, INTERPRETED, device_of_kernels, runs_triton
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

PAGE = 8
PAGES = [[4, 1, 7, 9, 20, 21, 22, 23, 24, 25, 26, 27], [2, 3, 0, 11, 5, 6, 10, 12, 13, 14, 15, 16]]
MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
NETWORKS = {
    "target": {},
    "windows and norms": {"architecture": "Qwen3ForCausalLM", "windows": (7, None, 7, None)},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "shared expert": {"architecture": "Qwen2MoeForCausalLM"},
    "Gemma": {"architecture": "Gemma3ForCausalLM", "windows": (7, None, 7, None)},
    "Phi": {"architecture": "Phi3ForCausalLM"},
    "drafter": {"drafter": {"num_layers": 2}},
    "latent drafter": {"drafter": {"mla": MLA}},
    "latent drafter, window": {"drafter": {"mla": replace(MLA, q_lora_rank=20), "window": 6, "num_layers": 2}},
}
TARGETS = ["target", "windows and norms", "experts", "shared expert", "Gemma", "Phi"]


class Setup:
    """A network with two caches. Both hold the same prefixes of two texts, and NaN everywhere else."""

    def __init__(self, name: str, starts: list[int], ops=CudaOps) -> None:
        settings = dict(NETWORKS[name])
        device = "cpu" if INTERPRETED else DEVICE
        if drafter := settings.pop("drafter", None):
            self.network = tiny_drafter(tiny_drafter_config(**drafter)).share(torch.nn.Embedding(128, 32), None)
            self.network.embed_tokens.requires_grad_(False)
            config = self.network.config
            shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        else:
            self.network = tiny_decoder(3, **settings)
            shape = (4, 2, 8)
        self.network.to(device)
        stack_experts(self.network, torch.float32)
        self.network.embed_tokens.to(device)
        self.device, self.starts = torch.device(device), starts
        self.caches = [PagedKV(*shape, 32, PAGE, torch.float32, device) for _ in range(2)]
        generator = torch.Generator().manual_seed(5)
        keys, values = (torch.randn(shape[0], shape[1], 2, 96, shape[2], generator=generator) for _ in range(2))
        for cache in self.caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
            for text, start in enumerate(starts):
                slots = torch.tensor([self.slot(text, place) for place in range(start)], dtype=torch.long, device=device)
                cache.keys[:, :, slots] = keys[:, :, text, :start].to(device)
                cache.values[:, :, slots] = values[:, :, text, :start].to(device)
        self.reference = TorchOps(self.caches[0], *self.network.rotaries)
        self.ops = ops(self.caches[1], *device_tables(self.network, 128, self.device))

    @staticmethod
    def slot(text: int, place: int) -> int:
        return PAGES[text][place // PAGE] * PAGE + place % PAGE

    def tensor(self, numbers, dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def pass_over(self, x: torch.Tensor, meta: AttentionMetadata, ops) -> torch.Tensor:
        if hasattr(self.network, "fuse"):
            tokens = torch.arange(len(x), device=self.device)
            return self.network.run(self.network.inputs(tokens, x.clone(), ops), meta, ops)
        return self.network.run(x.clone(), meta, ops)[0]

    def expected(self, x: torch.Tensor, counts: list[int], positions: list[int], masks=(None, None)) -> torch.Tensor:
        layouts = [
            SequenceLayout(pages, count, start + count, mask)
            for pages, count, start, mask in zip(PAGES, counts, self.starts, masks, strict=True)
            if count
        ]
        meta = AttentionMetadata.from_layouts(layouts, self.tensor(positions, torch.long), PAGE)
        return self.pass_over(x, meta, self.reference)

    def assert_same_caches(self) -> None:
        for one, two in ((cache.keys, cache.values) for cache in self.caches):
            assert not one.isnan().all()
            assert torch.equal(one.isnan(), two.isnan())
        # Scores are rounded to a grid (`kernels.attention.exact`); experts amplify its 1e-4 to 4e-4 for the next layers.
        torch.testing.assert_close(self.caches[1].keys, self.caches[0].keys, atol=8e-4, rtol=1e-3, equal_nan=True)
        torch.testing.assert_close(self.caches[1].values, self.caches[0].values, atol=8e-4, rtol=1e-3, equal_nan=True)


@pytest.fixture(params=["reference", pytest.param("kernels", marks=runs_triton)], autouse=True)
def way(request, monkeypatch):
    if request.param == "reference" and DEVICE != "cpu":
        pytest.skip("references are tested without a GPU")
    if request.param == "kernels" and INTERPRETED:
        import sys

        for name, module in list(sys.modules.items()):
            if name.startswith("fledge.") and hasattr(module, "use_triton"):
                monkeypatch.setattr(module, "use_triton", lambda x: True)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("starts", "counts"), [([30, 17], [3, 3]), ([40, 9], [2, 0]), ([1, 64], [1, 3])])
def test_chains(name, starts, counts):
    """Some or all tokens of a row may be padding: these are not stored and not attended to."""
    setup, longest = Setup(name, starts), 3
    x = torch.randn(2 * longest, 32, device=setup.device)
    real = [row * longest + token for row in range(2) for token in range(counts[row])]
    positions = [starts[row] + token for row in range(2) for token in range(counts[row])]
    tokens = torch.tensor(real, device=setup.device)
    meta = AttentionMetadata.decode(setup.tensor(PAGES), setup.tensor(starts), setup.tensor(counts))
    if hasattr(setup.network, "fuse"):
        inputs = setup.network.inputs(torch.arange(len(x), device=setup.device), x.clone(), setup.ops)
        picked = [part[tokens] for part in inputs[:2]]
        layouts = [SequenceLayout(PAGES[row], counts[row], starts[row] + counts[row]) for row in range(2) if counts[row]]
        host = AttentionMetadata.from_layouts(layouts, setup.tensor(positions, torch.long), PAGE)
        wanted = setup.network.run(inputs._replace(x_N2D=picked[0], residual_ND=picked[1]), host, setup.reference)
        found = setup.network.run(inputs, meta, setup.ops)
    else:
        wanted = setup.expected(x[tokens], counts, positions)
        found = setup.pass_over(x, meta, setup.ops)
    assert_near(found[tokens], wanted)
    setup.assert_same_caches()


@pytest.mark.parametrize("name", NETWORKS)
def test_trees(name):
    """A pending token and the nodes of a tree after it, one tree per sequence."""
    parents = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 0, 3, 4]]
    num_nodes, starts = 6, [25, 40]
    masks, positions = [], []
    for text, tree in enumerate(parents):
        mask = torch.eye(num_nodes, dtype=torch.bool)
        for node, parent in enumerate(tree):
            if parent >= 0:
                mask[node] |= mask[parent]
        masks.append(mask)
        positions += [starts[text] + int(row.sum()) - 1 for row in mask]
    setup = Setup(name, starts)
    x = torch.randn(2 * num_nodes, 32, device=setup.device)
    wanted = setup.expected(x, [num_nodes] * 2, positions, masks)
    bits = torch.stack([(mask.long() << torch.arange(num_nodes)).sum(1) for mask in masks]).to(setup.device)
    slots = [setup.slot(text, starts[text] + node) for text in range(2) for node in range(num_nodes)]
    lengths = [start + num_nodes for start in starts]
    where = (setup.tensor(lengths), setup.tensor(positions, torch.long), setup.tensor(slots, torch.long))
    meta = AttentionMetadata.tree(setup.tensor(PAGES), *where, bits, num_nodes)
    assert_near(setup.pass_over(x, meta, setup.ops), wanted)
    setup.assert_same_caches()


@pytest.mark.parametrize(("starts", "counts"), [([0, 17], [9, 20]), ([0, 0], [9, 20]), ([16, 24], [13, 5]), ([32, 0], [24, 0])])
@pytest.mark.parametrize("name", NETWORKS)
def test_prompts(name, starts, counts):
    """A whole prompt next to one with a cached prefix, two prompts of each kind, and a chunk."""
    is_chunk = not counts[1]
    setup = Setup(name, starts)
    num_tokens = sum(counts)
    x = torch.randn(num_tokens + (not is_chunk), 32, device=setup.device)  # and one padding token
    positions = [starts[text] + i for text in range(2) for i in range(counts[text])]
    slots = [setup.slot(text, place) for text, place in zip([0] * counts[0] + [1] * counts[1], positions, strict=True)]
    wanted = setup.expected(x[:num_tokens], counts, positions)
    if is_chunk:
        where = (setup.tensor(positions, torch.long), setup.tensor(slots, torch.long))
        meta = AttentionMetadata.chunk(*where, setup.tensor(PAGES[0]), setup.tensor([56]))
    else:
        where = (setup.tensor([*positions, 0], torch.long), setup.tensor([*slots, -1], torch.long))
        offsets = setup.tensor([0, counts[0], num_tokens])
        meta = AttentionMetadata.packed(*where, setup.tensor(PAGES), setup.tensor(starts), offsets)
    assert_near(setup.pass_over(x, meta, setup.ops)[:num_tokens], wanted)
    setup.assert_same_caches()


@pytest.mark.parametrize("head_dim", [14, 192])
def test_keys_and_values_by_slot(head_dim, way, request):
    run = store_kv_reference if "reference" in request.node.name else store_kv_triton
    device = "cpu" if run is store_kv_reference else device_of_kernels()
    k, v = (torch.randn(5, 3, 2 * head_dim, device=device)[..., :head_dim] for _ in range(2))
    keys, values = torch.zeros(2, 3, 20, head_dim, device=device)
    run(k, v, torch.tensor([7, -1, 0, 19, -1], device=device), keys, values)
    for row, slot in ((0, 7), (2, 0), (3, 19)):
        assert torch.equal(keys[:, slot], k[row])
        assert torch.equal(values[:, slot], v[row])
    untouched = [slot for slot in range(20) if slot not in (7, 0, 19)]
    assert not keys[:, untouched].any()
    assert not values[:, untouched].any()


def test_two_backends_have_separate_arrival_counters():
    """Two engines on one device run in two streams and would disturb each other's counters."""
    one, two = (Setup("target", [0, 0]).ops for _ in range(2))
    assert one.arrivals.data_ptr() != two.arrivals.data_ptr()
