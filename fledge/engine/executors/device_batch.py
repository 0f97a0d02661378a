"""The target, its drafter, their caches and the rows they work on, on one device: the captured speculation cycle.

    step(size, depth, …)     draft `depth` tokens → verify them and the pending one → accept → commit → synchronise the drafter
    read_prompts(…)          new requests enter: their prompts through the target and the drafter, their first tokens said

All state between steps lies in `slots` and the caches, on the device; nothing here waits for it. Depth 0 is plain decoding and
leaves the drafter behind: a row that took part in such a step must not be drafted for afterwards (its depth limit is 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.engine.config import EngineConfig
from fledge.engine.executors.batch_state import MAX_DEPTH, MAX_STOP_IDS, NewRows, Slots
from fledge.engine.executors.chunked_prefill import MIDDLE, Piece, PiecePass
from fledge.engine.executors.graphs import StepGraphs, batch_sizes
from fledge.engine.executors.prefill import PromptPass, Prompts, Rests
from fledge.errors import UserError
from fledge.kernels.accept import Accepted, accept
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.attention.rope_attention import FEW_KEYS
from fledge.kernels.bits import KEEP
from fledge.kernels.sample import Choice
from fledge.kernels.step_inputs import verify_inputs
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.ops.cuda_ops import CudaOps, DeterministicOps
from fledge.speculation.methods.eagle import CapturedEagle

# How a step chooses tokens: each of these is a graph of its own. The later ones also do what the earlier ones do.
# CUT: sampled within top-k, min-p or top-p.
GREEDY, SAMPLED, CUT = range(3)
# A block of the attention kernel's keys lies in one page.
DEVICE_PAGE_SIZE = 128
# A long prompt is read in pieces of this size at most, between which the others go on.
PIECE = 1024


def how_chosen(temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0) -> int:
    if temperature <= 0:
        return GREEDY
    return CUT if top_p < 1 or top_k > 0 or min_p > 0 else SAMPLED


@dataclass
class Entry:
    """A request that enters a row."""

    row: int
    prompt: Sequence[int]
    pages: Sequence[int]
    limit: int  # most tokens of the answer
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    stop_ids: Sequence[int] = ()
    depth_limit: int = MAX_DEPTH
    cached: int = 0  # tokens of the prompt that the caches hold already, in its pages
    answered: int = 0  # tokens at the prompt's end that are the answer's: it was interrupted
    top_k: int = 0  # 0: none
    min_p: float = 0.0
    min_answer: int = 0  # fewest tokens of the answer

    @property
    def how(self) -> int:
        return how_chosen(self.temperature, self.top_p, self.top_k, self.min_p)


class DeviceBatch:
    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        drafter: EagleDrafter | None = None,
        capture: bool = True,
        cache: PagedKV | None = None,
        drafter_cache: PagedKV | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        """`cache`, `drafter_cache`: shared with another engine, page by page; None: own ones."""
        self.decoder, self.config, self.device = decoder, config, torch.device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)  # kernels are launched on the current device
        model, size = decoder.config, config.page_size
        self.lookahead = 0 if drafter is None else max_depth + 1
        longest = config.max_model_len + self.lookahead
        self.max_pages = -(-longest // size)
        self.num_pages = max(-(-config.kv_cache_tokens // size), self.max_pages)
        self.cache = cache or self._cache(model.num_layers, model.num_kv_heads, model.head_dim)
        rope_table = decoder.rotary.device_table(longest, self.device)
        self.ops = (DeterministicOps if config.deterministic else CudaOps)(self.cache, rope_table)
        self.slots = Slots(config.max_num_seqs, config.max_model_len, self.max_pages, model.vocab_size, self.device, max_depth)
        self.drafter: CapturedEagle | None = None
        if drafter is not None:
            refuse_unsupported(drafter)
            decoder.check_taps(drafter.config.aux_layer_ids)
            drafter.share(decoder.embed_tokens, decoder.lm_head)
            shape = drafter.config
            drafter_cache = drafter_cache or self._cache(shape.num_layers, shape.num_kv_heads, shape.head_dim)
            self.drafter = CapturedEagle(drafter, drafter_cache, self.slots, longest)
        self.taps = self.drafter.taps if self.drafter is not None else ()
        self.sizes = batch_sizes(config.max_num_seqs)
        self.graphs = StepGraphs(self.step, self.device, capture=capture, harmless=self.all_rows_empty)
        parts = (decoder, self.ops, self.drafter, self.slots, self.say_first)
        self.prompts = PromptPass(*parts, max_pages=self.max_pages, capture=capture)
        self.pieces = PiecePass(*parts, max_pages=self.max_pages, capture=capture)

    def _cache(self, num_layers: int, num_kv_heads: int, head_dim: int) -> PagedKV:
        size, dtype = self.config.page_size, self.config.activation_dtype
        return PagedKV(num_layers, num_kv_heads, head_dim, self.num_pages, size, dtype, self.device)

    def pages_for(self, length: int, limit: int) -> int:
        """Pages of a request: its prompt, its longest answer, and what is drafted past its end."""
        return -(-(length + limit + self.lookahead) // self.config.page_size)

    @torch.inference_mode()
    def step(self, size: int, depth: int, how: int, reach: int | None = None) -> None:
        """One cycle for the first `size` rows. `reach`: none of them has more keys than this; see `reach_for`."""
        slots, state = self.slots, self.slots.state
        pages = slots.page_table[:size, : None if reach is None else reach // self.config.page_size]
        last_draft = self.drafter.draft(pages, depth, sampled=how != GREEDY) if depth else None
        embedding = self.decoder.embed_tokens.weight
        x, starts, counts = verify_inputs(
            size, depth, state.token, slots.drafts, state.length, state.active, embedding, last_draft
        )
        meta = AttentionMetadata.decode(pages, starts, counts)
        x, taps = self.decoder.run(x, meta, self.ops, self.taps if depth else ())
        accepted = self.accept(self.choose(x, slice(size), depth + 1, how), depth + 1)
        if depth:
            self.drafter.sync(taps, accepted, pages)

    def reach_for(self, num_keys: int) -> tuple[int, ...]:
        """What a cycle's shape ends with where no row has more keys: attention over fewer is launched in another form.

        Not where rows must not depend on each other, as on whether another one is long.
        """
        is_near = num_keys <= FEW_KEYS < self.max_pages * self.config.page_size and not self.config.deterministic
        return (FEW_KEYS,) if is_near else ()

    def choose(self, x: Tensor, rows: slice | Tensor, num_new: int, how: int) -> Choice:
        draws = None if how == GREEDY else self.slots.draws(rows, cuts=how == CUT)
        return self.ops.head(x, self.decoder.norm, self.decoder.lm_head, draws, num_new)

    def accept(self, choice: Choice, num_new: int, rows: Tensor | None = None) -> Accepted:
        return accept(self.slots.state, choice, self.slots.drafts, num_new, self.decoder.config.vocab_size, rows)

    @contextmanager
    def all_rows_empty(self) -> Iterator[None]:
        active = self.slots.state.active.clone()
        self.slots.state.active.zero_()
        yield
        self.slots.state.active.copy_(active)

    @torch.inference_mode()
    def read_prompts(self, entries: Sequence[Entry]) -> None:
        """One pass over several prompts: keys and values into the caches, first tokens said, rows filled.

        Prompts of which nothing is cached attend over themselves, which is faster: they come apart from the others.
        """
        starts = [entry.cached for entry in entries]
        lengths = [len(entry.prompt) - entry.cached for entry in entries]
        sequence = np.repeat(np.arange(len(entries)), lengths)
        positions = np.concatenate([np.arange(entry.cached, len(entry.prompt)) for entry in entries])
        numbers, fractions, table = self.new_rows(entries)
        tokens = np.concatenate([np.asarray(entry.prompt[entry.cached :], dtype=np.int64) for entry in entries])
        where = self.cache_slots(table[sequence, :], positions)
        prompts = Prompts(tokens, positions, where, lengths, numbers, fractions, table)
        if any(starts):
            prompts = Rests(**vars(prompts), starts=starts)
        self.prompts.read(prompts, max(entry.how for entry in entries))

    @torch.inference_mode()
    def read_piece(self, entry: Entry, start: int) -> int:
        """The next piece of a long prompt, from `start`; returns how far it is read. After the last, the row runs."""
        length, size = len(entry.prompt), self.piece
        end = min(start + size, length)
        start = max(end - size, 0)
        numbers, fractions, table = self.new_rows([entry])
        positions = np.arange(start, end)
        tokens = np.asarray(entry.prompt[start:end], dtype=np.int64)
        following = np.asarray([*entry.prompt[start + 1 : end + 1], *([0] if end == length else [])], dtype=np.int64)
        piece = Piece(tokens, positions, self.cache_slots(table, positions), following, numbers, fractions, table)
        self.pieces.read(piece, entry.how if end == length else MIDDLE)
        return end

    @property
    def piece(self) -> int:
        """Tokens of one piece of a long prompt."""
        return min(PIECE, self.config.max_batched_tokens)

    def say_first(self, new: NewRows, x: Tensor, how: int) -> Tensor:
        """Requests take their rows and say their first tokens, which are returned; `x`: the states of their prompts' ends."""
        self.slots.fill(new)
        return self.accept(self.choose(x, new.rows, 1, how), 1, new.rows).tokens_BT[:, 0]

    def new_rows(self, entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `NewRows` has them."""
        numbers = [
            (e.row, 1, len(e.prompt), e.answered, e.limit, e.min_answer, e.depth_limit, e.seed, e.top_k) for e in entries
        ]
        stops = [self.stop_numbers(entry) for entry in entries]
        table = np.zeros((len(entries), self.max_pages), dtype=np.int64)
        for index, entry in enumerate(entries):
            table[index, : len(entry.pages)] = entry.pages
        fractions = np.array([[entry.temperature, entry.top_p, entry.min_p] for entry in entries], dtype=np.float64)
        return np.concatenate([np.array(numbers, dtype=np.int64), np.array(stops, dtype=np.int64)], 1), fractions, table

    def stop_numbers(self, entry: Entry) -> list[int]:
        """Stop ids as `NewRows` has them. More than fit there are set in the row's bits at once."""
        stop_ids = list(entry.stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            self.slots.set_stop_ids(entry.row, stop_ids)
            stop_ids = [KEEP]
        return [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]

    def cache_slots(self, tables: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self.config.page_size
        pages = np.take_along_axis(tables, (positions // size)[:, None], 1) if len(tables) > 1 else tables[0, positions // size]
        return pages.reshape(-1).astype(np.int64) * size + positions % size

    def upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy on the host that is there once the event has passed."""
        if self.device.type == "cpu":
            return tensor.clone(), None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return copy, self.mark()

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that was launched so far; None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def refuse_unsupported(drafter: EagleDrafter) -> None:
    if why := why_not_captured(drafter):
        raise UserError(f"{why}: the captured cycle cannot run it; use the eager engine")


def why_not_captured(drafter: EagleDrafter) -> str | None:
    """What keeps a drafter from the captured cycle; None: nothing does."""
    config = drafter.config
    if config.hidden_size != config.target_hidden_size and not config.own_embedding:
        return "the drafter's size differs from its embedding's"
    return None
