"""Domain clusters of texts, found as they come: which words they use decides. No text is kept, only counts of hashed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS = 512
# A text less like all centres than this opens a cluster of its own, while there is room. Two prompts of one template are at
# about 0.8, two languages below 0.2.
NOVEL_BELOW = 0.35
FOLLOW = 0.05  # how far a centre moves towards a text of its cluster
# A cluster that none of so many texts belonged to may give its place to a new one. Fewer, and a client that sends nothing but
# new words would replace what others still use.
RETIRE_AFTER = 512


class Domains:
    """Leader clustering of token histograms: one pass, fixed memory."""

    def __init__(self, max_clusters: int = 8) -> None:
        self.max_clusters = max_clusters
        self.centres_KB = np.zeros((0, BINS), np.float32)
        self.ids: list[int] = []  # of the clusters; a new one gets a new id
        self.last_used: list[int] = []  # by which text
        self.num_texts = self._next_id = 0

    def assign(self, tokens: Sequence[int]) -> tuple[int, float]:
        """The cluster of a text, and how novel the text is: 0 like its cluster, 1 like nothing before."""
        bins = (np.asarray(tokens, np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(55)  # 9 bits: BINS
        histogram = np.sqrt(np.bincount(bins.astype(np.int64), minlength=BINS)).astype(np.float32)
        histogram /= max(float(np.linalg.norm(histogram)), 1e-9)
        alike = self.centres_KB @ histogram
        best = int(alike.argmax()) if len(alike) else -1
        novelty = 1.0 - (float(alike[best]) if len(alike) else 0.0)
        self.num_texts += 1
        if 1.0 - novelty < NOVEL_BELOW:
            if len(self.ids) == self.max_clusters and not self._retire():
                return self.ids[best], novelty  # it does not belong there, and does not move the centre
            self.centres_KB = np.concatenate([self.centres_KB, histogram[None]])
            self.ids.append(self._next_id)
            self.last_used.append(self.num_texts)
            self._next_id += 1
            return self.ids[-1], 1.0
        centre = self.centres_KB[best] + FOLLOW * (histogram - self.centres_KB[best])
        self.centres_KB[best] = centre / np.linalg.norm(centre)
        self.last_used[best] = self.num_texts
        return self.ids[best], novelty

    def _retire(self) -> bool:
        """Drops the least recently used cluster; False: all are in use."""
        least = min(range(len(self.ids)), key=self.last_used.__getitem__)
        if self.num_texts - self.last_used[least] < RETIRE_AFTER:
            return False
        self.centres_KB = np.delete(self.centres_KB, least, axis=0)
        del self.ids[least], self.last_used[least]
        return True
