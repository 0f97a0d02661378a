"""The captured speculation cycle: target, drafting method, their KV caches and the rows they work on, on one device.

    step(size, depth, mode)   draft `depth` tokens → verify them and the pending one → choose → accept → sync the drafter
    prefill(…)                puts new requests into rows, prefills target and drafter, chooses their first tokens

All state between cycles is on the device; nothing here waits for it. Depth 0 is plain decoding. It keeps no hidden states, so
a row that took part in it must not be drafted for afterwards unless the method follows plain cycles (n-gram does).

A cycle in ADJUSTED mode consists of several graphs, so that the host can fill grammar masks while the target runs:

    DRAFT   draft      VERIFY   target pass, logits      CHOICE   adjust, choose, accept, sync      LOGPROBS   if asked for
              └── the drafted tokens go to the host, which fills the masks ──┘
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.engine.config import EngineConfig
from fledge.engine.executors.batch_state import (
    ADJUSTED,
    GREEDY,
    MAX_STOP_IDS,
    NUM_INT_PARAMS,
    SAMPLED,
    TRUNCATED,
    BatchState,
    NewRows,
    RowInit,
)
from fledge.engine.executors.graphs import StepGraphs, batch_sizes
from fledge.engine.executors.hidden_states import DeviceStates
from fledge.engine.executors.prefill import MIDDLE, ChunkedPrefill, PrefillBatch, PrefillGraphs
from fledge.kernels import compile_ahead
from fledge.kernels.accept import Accepted, accept
from fledge.kernels.adjust import adjust
from fledge.kernels.adjustments import count_tokens
from fledge.kernels.attention.launch_config import FEW_KEYS
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.bits import KEEP
from fledge.kernels.compact_path import compact_path
from fledge.kernels.logprobs import MAX_LOGPROBS, pack_logprobs, token_logprobs
from fledge.kernels.sample import PartialArgmax, SamplingState, choose, picked_or_none
from fledge.kernels.verify_inputs import verify_inputs
from fledge.models.decoder import Decoder
from fledge.ops.base import device_tables
from fledge.ops.cuda_ops import CudaOps
from fledge.speculation.methods.base import CapturedMethod
from fledge.speculation.methods.tree import (
    TreeDraft,
    TreePath,
    accept_tree,
    along_path,
    collapse,
    row_depths,
    verify_attention,
)

# The stages of a cycle in ADJUSTED mode, as graph modes.
DRAFT, VERIFY, CHOICE, LOGPROBS = range(ADJUSTED, ADJUSTED + 4)
# Longer prompts are prefilled in chunks of this size, with decoding cycles in between; others whole, several per pass.
# 16 prompts of 1,900 tokens alone on an H200: 177 ms with 1.5B, 762 with 8B; with chunks of 1,024 tokens 232 and 893.
CHUNK_TOKENS = 2048


class Pending(NamedTuple):
    """The inputs of a verification pass."""

    x_ND: Tensor  # embeddings of the pending tokens and the drafts
    starts_B: Tensor  # position of each row's pending token
    counts_B: Tensor  # chains: number of tokens to verify; trees: 1; 0: the row is inactive
    tree: TreeDraft | None


class Verified(NamedTuple):
    """The outputs of a target pass over pending tokens and drafts."""

    x_ND: Tensor  # hidden states before the final norm
    aux_hidden_states: Sequence[Tensor]
    starts_B: Tensor  # position of each row's pending token
    active_B: Tensor
    tree: TreeDraft | None


class DeviceBatch:
    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        cache: PagedKV,
        *,
        max_depth: int = 0,
        lookahead: int = 0,
        capture: bool = True,
    ) -> None:
        """`lookahead`: KV slots that drafting and verification need past the text."""
        self.decoder, self.config, self.cache, self.lookahead = decoder, config, cache, lookahead
        self.device = torch.device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)  # kernels are launched on the current device
        self.max_positions = config.max_model_len + lookahead
        self.max_pages = -(-self.max_positions // config.page_size)
        self.ops = CudaOps(cache, *device_tables(decoder, self.max_positions, self.device))
        shape = (config.max_num_seqs, config.max_model_len, self.max_pages, decoder.config.vocab_size)
        self.state = BatchState(*shape, self.device, max_depth)
        self.method: CapturedMethod | None = None
        self.states: DeviceStates | None = None  # hidden states kept for learning
        self.sizes = batch_sizes(config.max_num_seqs)
        self.graphs = StepGraphs(self.step, self.device, capture=capture, idle=self.all_rows_inactive)
        # What one graph of an ADJUSTED cycle passes to the next, by size, depth and KV length bucket.
        self.pending: dict[tuple[int, ...], Pending] = {}
        self.verified: dict[tuple[int, ...], tuple[Verified, Tensor]] = {}  # with the logits
        self.accepted: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # tokens, with the logits they were chosen from
        # Packed log-probabilities. Key (): those of the last prefill, by row, in one tensor for prefill graphs of all shapes.
        width = 1 + 2 * min(MAX_LOGPROBS, decoder.config.vocab_size)
        first_logprobs = torch.zeros(len(self.state.seed), width, device=self.device)
        self.logprobs: dict[tuple[int, ...], Tensor] = {(): first_logprobs}
        self.prefills, self.chunks = PrefillGraphs(self), ChunkedPrefill(self)
        self.samples_truncated = False  # until the graphs of SAMPLED batches are recorded

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers whose output the drafting method reads."""
        return self.method.taps if self.method is not None else ()

    def use(self, method: CapturedMethod) -> None:
        """Sets the drafting method."""
        self.method, self.state.method_state = method, list(method.row_state)

    def keep_states(self, states: DeviceStates) -> None:
        """Makes passes with auxiliary states store them. Call before any graph is recorded."""
        assert not self.graphs.graphs, "recorded without it"
        self.states = states
        self.state.method_state.append(states.slot_R)

    # The cycle

    @torch.inference_mode()
    def step(self, size: int, depth: int, mode: int, kv_bucket: int | None = None) -> None:
        """Runs one cycle for the first `size` rows, or a stage of it. `kv_bucket`: most keys of a row; see `kv_bucket`."""
        pages = self.state.page_table[:size, : None if kv_bucket is None else -(-kv_bucket // self.config.page_size)]
        key = (size, depth) if kv_bucket is None else (size, depth, kv_bucket)
        if mode == LOGPROBS:
            tokens, logits = self.accepted[key]
            self.logprobs[key] = pack_logprobs(token_logprobs(logits, tokens.flatten()))
        elif mode == CHOICE:
            verified, logits = self.verified[key]
            accepted, path = self.accept_and_sync(verified, self.choose_adjusted(verified, logits, depth), depth, pages)
            self.accepted[key] = accepted.tokens_BT, logits if path is None else along_path(logits, path)
        elif mode == VERIFY:
            verified = self.verify(self.pending[key], pages, depth)
            self.verified[key] = verified, self.logits(verified.x_ND)
        else:
            pending = self.draft(pages, size, depth, sampled=mode != GREEDY)
            if mode == DRAFT:
                self.pending[key] = pending
            else:
                verified = self.verify(pending, pages, depth)
                self.accept_and_sync(verified, self.choose(verified, depth, mode), depth, pages)

    def draft(self, pages: Tensor, size: int, depth: int, *, sampled: bool) -> Pending:
        """Drafts `depth` tokens per row; returns the inputs of the verification pass."""
        state, method = self.state.rows, self.method
        drafted = method.draft(pages, depth, sampled=sampled) if depth and method is not None else None
        if drafted is not None and drafted.tree is not None:
            tokens = torch.cat([state.token[:size, None], drafted.tree.tokens_BN], 1)
            x = self.decoder.embed(tokens.flatten())
            return Pending(x, state.length[:size] - 1, state.active[:size].clone(), drafted.tree)
        last = drafted.last if drafted is not None else None
        embedding = self.decoder.embed_tokens.weight
        inputs = verify_inputs(size, depth, state.token, self.state.drafts, state.length, state.active, embedding, last)
        return Pending(self.decoder.scaled(inputs[0]), *inputs[1:], None)

    def verify(self, pending: Pending, pages: Tensor, depth: int) -> Verified:
        """Runs the target over the pending tokens and the drafts."""
        x, starts, counts, tree = pending
        if tree is None:
            meta = AttentionMetadata.decode(pages, starts, counts)
        else:
            meta = verify_attention(tree, starts, counts, pages, self.config.page_size)
        x, aux = self.decoder.run(x, meta, self.ops, self.aux_layers if depth else ())
        return Verified(x, aux, starts, counts, tree)

    def choose(self, verified: Verified, depth: int, mode: int) -> PartialArgmax:
        """The target's choice after each verified row."""
        size, tree = len(verified.starts_B), verified.tree
        draws = None if mode == GREEDY else self.state.draws(slice(size), truncated=mode >= TRUNCATED)
        num_new = depth + 1
        if tree is not None and draws is not None:
            draws, num_new = self._tree_draws(tree, size), 1
        return self.ops.head(verified.x_ND, self.decoder.norm, self.decoder.lm_head, draws, num_new)

    def _tree_draws(self, tree: TreeDraft, size: int) -> SamplingState:
        """The sampling state of a tree's nodes: the noise is indexed by position in the answer, so a node's depth is added."""
        depths = row_depths(tree)
        draws, times = self.state.draws(slice(size), truncated=True), depths.shape[1]
        counters = (draws.counters_B[:, None] + depths).flatten().to(draws.counters_B.dtype)
        temperatures, seeds = (x.repeat_interleave(times) for x in draws[:2])
        return draws._replace(
            temperatures_B=temperatures,
            seeds_B=seeds,
            counters_B=counters,
            truncation=None if draws.truncation is None else draws.truncation.repeated(times),
        )

    def logits(self, x_ND: Tensor) -> Tensor:
        return self.ops.linear(self.decoder.lm_head, self.ops.norm(self.decoder.norm, x_ND))

    def choose_adjusted(self, verified: Verified, logits_NV: Tensor, depth: int) -> PartialArgmax:
        size, tree, adjustments = len(verified.starts_B), verified.tree, self.state.make_adjustments()
        if tree is None:
            logits = adjust(logits_NV, self.state.rows, adjustments, self.state.drafts, depth + 1)
            return choose(logits, self.state.draws(slice(size), truncated=True), depth + 1)
        # Rows with adjustments accept no node (`CapturedMethod.adjusts_drafts`): only their first choice is used.
        logits = logits_NV.to(torch.float32, copy=True)  # the only copy of [B * (nodes + 1), V] in float32
        first_BV = logits.view(size, -1, logits.shape[1])[:, 0]
        first_BV.copy_(adjust(first_BV, self.state.rows, adjustments, self.state.drafts, 1))
        return choose(logits, self._tree_draws(tree, size), 1)

    def accept_and_sync(
        self, verified: Verified, choice: PartialArgmax, depth: int, pages: Tensor
    ) -> tuple[Accepted, TreePath | None]:
        state, method, vocab_size = self.state, self.method, self.decoder.config.vocab_size
        aux, drafts, path = verified.aux_hidden_states, state.drafts, None
        if verified.tree is not None:
            choice, drafts, path = self._collapse(verified, choice, depth)
        accepted = accept(state.rows, choice, drafts, depth + 1, vocab_size)
        if state.adjustments is not None:
            count_tokens(state.adjustments, accepted.tokens_BT, accepted.counts_B)
        if path is not None:
            keys, values = self.cache.keys, self.cache.values
            compact_path(keys, values, pages, self.config.page_size, verified.starts_B, path.rows_BT, path.counts_B)
            aux = [along_path(x, path) for x in aux]
        if self.states is not None and aux:
            x = verified.x_ND if path is None else along_path(verified.x_ND, path)
            self.states.store_cycle([*aux, x], verified.starts_B, verified.active_B)
        if method is not None and (depth or method.follows_plain_cycles):
            method.sync(aux, accepted, pages)
        return accepted, path

    def _collapse(self, verified: Verified, choice: PartialArgmax, depth: int) -> tuple[PartialArgmax, Tensor, TreePath]:
        """Turns a verified tree into the chain along its accepted path."""
        tree, vocab_size = verified.tree, self.decoder.config.vocab_size
        assert tree is not None
        chosen = picked_or_none(choice, vocab_size).view(len(verified.starts_B), -1)
        path = accept_tree(chosen, tree, depth, verified.active_B)
        chosen, drafts = collapse(chosen, tree, path)
        flat = chosen.reshape(-1, 1).int()
        return PartialArgmax(torch.zeros_like(flat, dtype=torch.float32), flat), drafts.contiguous(), path

    def kv_bucket(self, num_keys: int) -> tuple[int, ...]:
        """The last part of a cycle's shape: the KV length bucket if no row has more keys than that, else (). Attention over few
        keys is launched with another configuration."""
        is_short = num_keys <= FEW_KEYS < self.max_pages * self.config.page_size
        return (FEW_KEYS,) if is_short else ()

    def record(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Records cycles ahead of use. The recorded time of an ADJUSTED cycle is the sum of its graphs' times."""
        shapes = [shape for shape in shapes if shape not in self.graphs.graphs]
        if any(shape[2] == ADJUSTED for shape in shapes):
            self.state.make_adjustments()
        self.graphs.record(shapes)
        for size, depth, mode, *bucket in shapes:
            if mode == ADJUSTED and self.graphs.capture:
                stages = [(size, depth, stage, *bucket) for stage in (VERIFY, CHOICE, LOGPROBS)]
                self.graphs.record(stages)
                if not compile_ahead.is_tracing():
                    always = stages[:-1]
                    self.graphs.seconds[size, depth, ADJUSTED, *bucket] += sum(self.graphs.seconds[stage] for stage in always)

    def recorded_mode(self, mode: int) -> int:
        """The mode whose graph a batch of this mode uses. TRUNCATED graphs draw the same tokens as SAMPLED ones, but slower."""
        return TRUNCATED if mode == SAMPLED and self.samples_truncated else mode

    @contextmanager
    def all_rows_inactive(self) -> Iterator[None]:
        active = self.state.rows.active.clone()
        self.state.rows.active.zero_()
        yield
        self.state.rows.active.copy_(active)

    # Prefill

    @torch.inference_mode()
    def prefill(self, inits: Sequence[RowInit]) -> None:
        """Prefills several texts in one pass: stores keys and values, initialises rows, chooses first tokens."""
        self.start_rows(inits)
        starts = [init.num_cached for init in inits]
        lengths = [len(init.text) - init.num_cached for init in inits]
        sequence = np.repeat(np.arange(len(inits)), lengths)
        positions = np.concatenate([np.arange(init.num_cached, len(init.text)) for init in inits])
        int_params, float_params, table = self.new_rows(inits)
        tokens = np.concatenate([np.asarray(init.text[init.num_cached :], dtype=np.int64) for init in inits])
        slots = self.cache_slots(table[sequence, :], positions)
        batch = PrefillBatch(tokens, positions, slots, lengths, starts, int_params, float_params, table)
        self.prefills.run(batch, self.recorded_mode(max(init.mode for init in inits)))

    @torch.inference_mode()
    def prefill_chunk(self, init: RowInit, start: int) -> int:
        """Prefills the next chunk of a long text, from `start`; returns its end. After the last chunk the row is active."""
        length, size = len(init.text), self.chunk_tokens
        end = min(start + size, length)
        start = max(end - size, 0)
        if end == length:
            self.start_rows([init])
        int_params, float_params, table = self.new_rows([init])
        positions = np.arange(start, end)
        following = [*init.text[start + 1 : end + 1], *([0] if end == length else [])]
        tokens = np.array([init.text[start:end], positions, self.cache_slots(table, positions), following], dtype=np.int64)
        mode = self.recorded_mode(init.mode) if end == length else MIDDLE
        self.chunks.submit((len(positions), mode), [tokens, int_params, float_params, table, positions[-1:] + 1])
        return end

    @property
    def chunk_tokens(self) -> int:
        return min(CHUNK_TOKENS, self.config.max_batched_tokens)

    def start_rows(self, inits: Sequence[RowInit]) -> None:
        self.state.prepare_rows(inits, keeps_text=self.method is not None and self.method.reads_text)

    def choose_first(self, new: NewRows, x: Tensor, mode: int) -> Tensor:
        """Initialises rows and returns their first tokens; `x`: the hidden states of the texts' last tokens."""
        state, rows, vocab_size = self.state, new.rows, self.decoder.config.vocab_size
        state.init_rows(new)
        if mode < ADJUSTED:
            draws = None if mode == GREEDY else state.draws(rows, truncated=mode == TRUNCATED)
            choice = self.ops.head(x, self.decoder.norm, self.decoder.lm_head, draws, 1)
            return accept(state.rows, choice, state.drafts, 1, vocab_size, rows).tokens_BT[:, 0]
        logits, adjustments = self.logits(x), state.make_adjustments()
        adjusted = adjust(logits, state.rows, adjustments, state.drafts, 1, rows)
        choice = choose(adjusted, state.draws(rows, truncated=True), 1)
        accepted = accept(state.rows, choice, state.drafts, 1, vocab_size, rows)
        count_tokens(adjustments, accepted.tokens_BT, accepted.counts_B, rows)
        found = token_logprobs(logits, accepted.tokens_BT.flatten())
        self.logprobs[()].index_copy_(0, rows, pack_logprobs(found))
        return accepted.tokens_BT[:, 0]

    def new_rows(self, inits: Sequence[RowInit]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays of `NewRows` for these requests."""
        int_params = np.full((len(inits), NUM_INT_PARAMS + MAX_STOP_IDS), -1, dtype=np.int64)
        float_params = np.array([[init.temperature, init.top_p, init.min_p] for init in inits], dtype=np.float64)
        table = np.zeros((len(inits), self.max_pages), dtype=np.int64)
        for index, i in enumerate(inits):
            stop_ids = i.stop_ids if len(i.stop_ids) <= MAX_STOP_IDS else [KEEP]  # `prepare_rows` has set them
            numbers = (i.row, 1, len(i.text), i.num_answered, i.limit, i.min_answer, i.depth_limit, i.seed, i.top_k, *stop_ids)
            int_params[index, : len(numbers)] = numbers
            table[index, : len(i.pages)] = i.pages
        return int_params, float_params, table

    def cache_slots(self, tables: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self.config.page_size
        pages = np.take_along_axis(tables, (positions // size)[:, None], 1) if len(tables) > 1 else tables[0, positions // size]
        return pages.reshape(-1).astype(np.int64) * size + positions % size

    # Copies to the host

    def download(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Returns a copy on the host, which is complete once the event has passed."""
        if self.device.type == "cpu":
            return tensor.clone(), None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return copy, self.mark()

    def mark(self) -> torch.cuda.Event | None:
        """Records an event after everything launched so far; None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
