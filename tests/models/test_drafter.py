"""The drafter equals plain arithmetic: the formulas of EAGLE 3 and 3.1, written out on a checkpoint's tensors.

The reference uses only a checkpoint's tensors and settings and computes one token at a time with elementary operations.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fledge.checkpoints.eagle3 import save_drafter
from fledge.models.drafter import EagleDrafter
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config, tiny_model_config

NUM_PROMPT, NUM_DRAFT = 11, 4


class PlainDrafter:
    """The reference drafter for one sequence; keeps keys and values of all earlier pairs in lists."""

    def __init__(self, weights: dict[str, Tensor], settings: dict, embedding: Tensor, head: Tensor) -> None:
        self.weights, self.settings = weights, settings
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.head = weights.get("lm_head.weight", head)
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(settings["num_layers"])]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (sum(float(v) ** 2 for v in x) / len(x) + self.settings["eps"]) ** -0.5
        return x * scale * self.weights[f"{name}.weight"]

    def fuse(self, taps: list[Tensor]) -> Tensor:
        x = torch.cat(taps)
        if self.settings["norm_before_fc"]:
            x = self.norm(x, "input_norm")
        if self.settings["fc_norm"]:
            size = len(x) // len(taps)
            chunks = [x[i * size : (i + 1) * size] for i in range(len(taps))]
            x = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)])
        return self.weights["fc.weight"] @ x

    def rotated(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        result = torch.empty_like(head)
        for i in range(half):
            angle = position * self.settings["theta"] ** (-2 * i / len(head))
            a, b = head[i], head[i + half]
            result[i] = a * math.cos(angle) - b * math.sin(angle)
            result[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return result

    def attention(self, layer: int, name: str, x: Tensor, position: int) -> Tensor:
        settings, size = self.settings, self.settings["head_dim"]

        def heads(part: str) -> list[Tensor]:
            split = (self.weights[f"{name}.self_attn.{part}_proj.weight"] @ x).split(size)
            norm = f"{name}.self_attn.{part}_norm"
            return [self.norm(head, norm) if f"{norm}.weight" in self.weights else head for head in split]

        queries = [self.rotated(head, position) for head in heads("q")]
        keys = torch.stack([self.rotated(head, position) for head in heads("k")])
        self.kept[layer].append((keys, torch.stack(heads("v"))))
        visible = self.kept[layer][-settings["window"] :] if settings["window"] else self.kept[layer]
        group = len(queries) // len(keys)
        outputs = []
        for i, query in enumerate(queries):
            scores = torch.stack([(query * key[i // group]).sum() / math.sqrt(size) for key, _ in visible])
            shares = (scores - scores.max()).exp()
            shares = shares / shares.sum()
            outputs.append(sum(share * value[i // group] for share, (_, value) in zip(shares, visible, strict=True)))
        return self.weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(outputs)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self.weights[f"{name}.mlp.gate_proj.weight"] @ x
        up = self.weights[f"{name}.mlp.up_proj.weight"] @ x
        return self.weights[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    def step(self, token: int, h: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (logits, state after the final norm, fed-back state)."""
        for layer in range(self.settings["num_layers"]):
            name = "midlayer" if layer == 0 else f"layers.{layer}"
            if layer == 0:
                normed = self.norm(h, f"{name}.hidden_norm")
                residual = normed if self.settings["norm_before_residual"] else h
                x = torch.cat([self.norm(self.embedding[token], f"{name}.input_layernorm"), normed])
            else:
                residual, x = h, self.norm(h, f"{name}.input_layernorm")
            r = residual + self.attention(layer, name, x, position)
            h = r + self.mlp(name, self.norm(r, f"{name}.post_attention_layernorm"))
        post = self.norm(h, "norm")
        return self.head @ post, post, post if self.settings["norm_output"] else h

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.weights["d2t"][draft_id]) if "d2t" in self.weights else draft_id


class KeepingAttend:
    """Attention for the network under test; keeps the keys and values of all earlier calls."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self.keys[layer] = torch.cat([self.keys.get(layer, k[:0]), k])
        self.values[layer] = torch.cat([self.values.get(layer, v[:0]), v])
        keys, values = self.keys[layer], self.values[layer]
        ago = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
        mask = (ago >= 0) & (ago < (window or len(keys) + 1))
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, keys, values)), attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)


VARIANTS = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "fc_norm only": {"fc_norm": True},
    "norm_output only": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "both norms before fc": {"norm_before_fc": True, "fc_norm": True},
    "norm_before_residual": {"norm_before_residual": True, "norm_output": True},
    "two layers": {"num_layers": 2, "norm_output": True},
    "four taps": {"aux_layer_ids": (0, 1, 3, 4), "fc_norm": True},
    "own embedding": {"own_embedding": True},
    "the target's head": {"own_head": False, "fc_norm": True, "norm_output": True},
    "draft vocabulary": {"draft_vocab_size": 48, "fc_norm": True, "norm_output": True},
    "narrower than the target": {"hidden_size": 24, "own_embedding": True, "fc_norm": True},
    "window": {"window": 5, "norm_output": True},
    "norms on queries and keys": {"qk_norm": True, "num_layers": 2, "fc_norm": True, "norm_output": True},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_states_and_logits_equal_the_formulas(tmp_path, settings):
    target = tiny_decoder()
    drafter = tiny_drafter(tiny_drafter_config(target.config, **settings)).double()
    target = target.double()
    config = drafter.config
    reference = PlainDrafter(
        load_file(save_drafter(drafter, tmp_path / "drafter") / "model.safetensors"),
        {
            "eps": config.rms_norm_eps,
            "theta": config.rope.theta,
            "head_dim": config.head_dim,
            "num_layers": config.num_layers,
            "window": config.window,
            **{flag: settings.get(flag, False) for flag in FLAGS},
        },
        target.embed_tokens.weight,
        target.lm_head.weight,
    )
    drafter.share(target.embed_tokens, target.lm_head)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (NUM_PROMPT + 1,), generator=generator)
    # each tap is larger than the one below, as in real targets
    taps = [
        torch.randn(NUM_PROMPT, config.target_hidden_size, generator=generator, dtype=torch.float64) * (i + 1)
        for i in range(len(config.aux_layer_ids))
    ]
    expected = plain_drafts(reference, tokens, taps)
    actual = network_drafts(drafter, tokens, taps)
    for name in ("logits", "hidden", "feedback"):
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert actual["drafts"] == expected["drafts"]
    if config.draft_vocab_size < config.vocab_size:
        assert any(draft >= config.draft_vocab_size for draft in actual["drafts"]), "no drafted token tests the vocabulary map"


FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def plain_drafts(reference: PlainDrafter, tokens: Tensor, taps: list[Tensor]) -> dict:
    steps, drafts = [], []
    for t in range(NUM_PROMPT):  # pairs (x1, g0), (x2, g1), …
        steps.append(reference.step(int(tokens[t + 1]), reference.fuse([tap[t] for tap in taps]), t))
    for position in range(NUM_PROMPT, NUM_PROMPT + NUM_DRAFT):
        logits, _, feedback = steps[-1]
        drafts.append(reference.target_id(int(logits.argmax())))
        steps.append(reference.step(drafts[-1], feedback, position))
    logits, hidden, feedback = (torch.stack(part) for part in zip(*steps, strict=True))
    return {"logits": logits, "hidden": hidden, "feedback": feedback, "drafts": drafts}


def network_drafts(drafter: EagleDrafter, tokens: Tensor, taps: list[Tensor]) -> dict:
    attend = KeepingAttend()
    out = drafter(tokens[1:], drafter.fuse(taps), torch.arange(NUM_PROMPT), attend)
    hidden, feedback, drafts = [out.hidden_ND], [out.feedback_ND], []
    for position in range(NUM_PROMPT, NUM_PROMPT + NUM_DRAFT):
        draft = drafter.target_ids(drafter.logits(hidden[-1][-1:]).argmax(-1))
        drafts.append(int(draft))
        out = drafter(draft, feedback[-1][-1:], torch.tensor([position]), attend)
        hidden.append(out.hidden_ND)
        feedback.append(out.feedback_ND)
    states = torch.cat(hidden)
    return {"logits": drafter.logits(states), "hidden": states, "feedback": torch.cat(feedback), "drafts": drafts}


@torch.no_grad()
def test_shared_target_weights_are_not_part_of_the_state_dict():
    target = tiny_decoder()
    drafter = tiny_drafter(tiny_drafter_config(tiny_model_config(), own_head=False))
    names = set(drafter.state_dict())
    drafter.share(target.embed_tokens, target.lm_head)
    assert set(drafter.state_dict()) == names
    assert drafter.lm_head is target.lm_head


def test_share_replaces_the_weights_of_an_earlier_target():
    """A deep copy of a drafter holds copies of the shared weights, on the first target's device."""
    first, second = tiny_decoder(), tiny_decoder(1)
    drafter = copy.deepcopy(tiny_drafter().share(first.embed_tokens, first.lm_head))
    own_head = drafter.lm_head
    drafter.share(second.embed_tokens, second.lm_head)
    assert drafter.embed_tokens is second.embed_tokens
    assert drafter.lm_head is own_head
