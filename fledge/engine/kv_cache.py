"""Which pages of the cache belong to whom. The storage itself is `kernels.paged_attention.PagedKV`."""

from __future__ import annotations

from itertools import groupby


class PagePool:
    """Hands out pages so that a sequence's pages tend to be consecutive: then the CPU reads them as a view, without a copy.

    used |###|..............|####|......|      a new sequence starts in the middle of the widest gap,
    new  |###|.......N......|####|......|      so that its neighbour on the left can go on growing
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._is_free = bytearray(b"\1") * num_pages
        self.num_free = num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extends `pages` in place to hold `num_tokens`; False, and nothing changed, if too few pages are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            follower = pages[-1] + 1 if pages else self.num_pages
            page = follower if follower < self.num_pages and self._is_free[follower] else self._place()
            self._is_free[page] = 0
            pages.append(page)
        self.num_free -= max(missing, 0)
        return True

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"page {page} released twice"
            self._is_free[page] = 1
        self.num_free += len(pages)
        pages.clear()

    def _place(self) -> int:
        start, widest_start, widest = 0, 0, 0
        for free, run in groupby(self._is_free):
            length = sum(1 for _ in run)
            if free and length > widest:
                widest_start, widest = start, length
            start += length
        assert widest, "no free page"
        return widest_start if widest_start == 0 else widest_start + widest // 2

    def check_integrity(self, owners: list[list[int]]) -> None:
        """Every page is free or owned once."""
        owned = [page for pages in owners for page in pages]
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert all(not self._is_free[page] for page in owned), "an owned page is marked free"
        assert len(owned) + self.num_free == self.num_pages, "pages were lost"
        assert sum(self._is_free) == self.num_free, "the count of free pages is off"
