"""The KV page pool: records which request owns each page, and what it holds. The storage is `kernels.attention.paged.PagedKV`.

    text     |---- page 0 ----|---- page 1 ----|-- page 2 …        a full page's key: a hash of all tokens up to its end
    key 1    |<------------------------------->|x                  and of the one after, x

Requests with a common prefix share its full pages, which are never written again. The drafter's cache uses the same pages, and
its entry for a page's last position is computed from the next token: that is why x is in the key.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from hashlib import sha256


class PageKeys:
    """The keys of a text's full pages, computed as the text grows."""

    def __init__(self, tokens: list[int], page_size: int, *, drafted: bool) -> None:
        """`tokens`: the growing text itself, not a copy. `drafted`: the pages hold, or must hold, the drafter's KV too."""
        self.tokens, self.page_size, self.drafted = tokens, page_size, drafted
        self._before = b"target and drafter" if drafted else b"target"
        self._keys: list[bytes] = []
        self.num_shared = 0  # pages of the text that other requests can find; set by the pool

    def up_to(self, num_tokens: int) -> list[bytes]:
        """The keys of the pages within the first `num_tokens` that have a token after them."""
        count, size = min(num_tokens, len(self.tokens) - 1) // self.page_size, self.page_size
        for index in range(len(self._keys), count):
            tokens = array("q", self.tokens[index * size : (index + 1) * size + 1])
            self._before = sha256(self._before + tokens.tobytes()).digest()
            self._keys.append(self._before)
        return self._keys[:count]


class PagePool:
    """Allocates pages so that a sequence's pages tend to be consecutive: the CPU then reads them sequentially.

    used |###|..............|####|......|      a new sequence starts in the middle of the widest gap,
    new  |###|.......N......|####|......|      so that its neighbour on the left can keep growing

    A page with a key and no owner counts as free, but keeps its content until no blank page is left.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_queried = self.num_found = 0  # tokens of admitted texts, and how many of them were cached
        self._is_blank = bytearray(b"\1") * num_pages
        self._num_blank = num_pages
        self._num_owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unowned: OrderedDict[int, None] = OrderedDict()  # pages with a key and no owner, least recently used first
        self._forgotten: set[int] = set()  # owned pages that lost their key

    @property
    def num_free(self) -> int:
        return self._num_blank + len(self._unowned)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int, spare_tokens: int = 0) -> bool:
        """Extends `pages` in place to hold `num_tokens`; returns False and changes nothing if too few pages are free.

        `spare_tokens`: for how many more tokens pages must stay free afterwards.
        """
        missing = self.pages_for(num_tokens) - len(pages)
        if missing + self.pages_for(spare_tokens) > self.num_free:
            return False
        while missing > self._num_blank:
            self._forget_oldest()
        for left in range(missing, 0, -1):
            follower = pages[-1] + 1 if pages else self.num_pages
            page = follower if follower < self.num_pages and self._is_blank[follower] else self._place(left)
            self._is_blank[page] = 0
            self._num_blank -= 1
            self._num_owners[page] = 1
            pages.append(page)
        return True

    def find(self, keys: PageKeys | None) -> list[int]:
        """The pages of a text's longest cached prefix; at least the text's last token is left to compute."""
        found: list[int] = []
        for key in keys.up_to(len(keys.tokens)) if keys is not None else ():
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def take(self, pages: list[int], found: list[int], keys: PageKeys | None) -> int:
        """Makes the pages `found` the first of a sequence's `pages`; returns how many tokens they hold."""
        assert not pages
        for page in found:
            self._num_owners[page] += 1
            self._unowned.pop(page, None)
        pages.extend(found)
        if keys is not None:
            keys.num_shared = len(found)
        return len(found) * self.page_size

    def share(self, pages: list[int], keys: PageKeys | None, num_tokens: int) -> None:
        """Lets other requests find the pages of the first `num_tokens`, which are computed and do not change any more."""
        if keys is None or num_tokens // self.page_size <= keys.num_shared:
            return
        names = keys.up_to(num_tokens)
        for index in range(keys.num_shared, len(names)):
            if names[index] not in self._page_of:  # otherwise another request has computed the same page meanwhile
                self._page_of[names[index]] = pages[index]
                self._forgotten.discard(pages[index])
                self._key_of[pages[index]] = names[index]
        keys.num_shared = len(names)

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):  # so that a text's end is evicted before its beginning
            assert self._num_owners[page], f"page {page} released twice"
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            if page in self._key_of:
                self._unowned[page] = None
            else:
                self._forgotten.discard(page)
                self._is_blank[page] = 1
                self._num_blank += 1
        pages.clear()

    def forget(self) -> None:
        """Drops all keys: no request can find a page any more. Requests keep the pages they own."""
        while self._unowned:
            self._forget_oldest()
        self._forgotten |= self._key_of.keys()
        self._page_of.clear()
        self._key_of.clear()

    def _forget_oldest(self) -> None:
        page, _ = self._unowned.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self._is_blank[page] = 1
        self._num_blank += 1

    def _place(self, num_pages: int) -> int:
        """The page at which the next `num_pages` of a sequence start: in the widest gap, with room for all if possible."""
        start, end = max((gap.span() for gap in re.finditer(b"\1+", self._is_blank)), key=lambda gap: gap[1] - gap[0])
        return start and max(start, min((start + end) // 2, end - num_pages))

    def check_integrity(self, owners: list[list[int]]) -> None:
        """Asserts that every page is owned, kept for its content, or blank; only pages with a key may have several owners."""
        assert all(len(set(pages)) == len(pages) for pages in owners), "a sequence has a page twice"
        owned = Counter(page for pages in owners for page in pages)
        assert all(owned[page] == count for page, count in enumerate(self._num_owners)), "a page's owners are miscounted"
        known = self._key_of.keys() | self._forgotten
        assert all(page in known for page, count in owned.items() if count > 1), "a page without a key has two owners"
        assert self._forgotten <= owned.keys() - self._key_of.keys(), "a forgotten page has no owner, or a key"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages do not match"
        assert set(self._unowned) == self._key_of.keys() - owned.keys(), "a page that is kept was lost"
        blank = set(range(self.num_pages)) - owned.keys() - self._key_of.keys()
        assert {page for page, is_blank in enumerate(self._is_blank) if is_blank} == blank, "a blank page was lost"
        assert len(blank) == self._num_blank, "the count of blank pages is off"
