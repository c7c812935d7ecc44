"""A serving engine without a model: continuous batching, chunked prefill, and a paged KV cache that finds
full pages by their content.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from attn_backend import BSRView, PageTable

PageKey = Callable[[int], Hashable | None]


@dataclass(eq=False)
class Request:
    """A prompt and its answer.

    Attributes:
        input_length, output_length: tokens; both at least 1.
        page_key: for page j of prompt and answer: a key that is equal in requests that can share the page, or
            None. Equal keys imply equal keys before them.
        follows: the next turn of a conversation, which becomes ready some steps after this one has finished.
        pages: int32, ids of the pages of prompt and answer, set at admission.
        computed: tokens whose K and V are in the cache.
        scheduled: tokens in the current step.
    """

    input_length: int
    output_length: int
    page_key: PageKey
    follows: list[Request] = field(default_factory=list)
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    computed: int = 0
    scheduled: int = 0

    @property
    def length(self) -> int:
        """Tokens of the cache at the end: the last token of the answer is never fed back."""
        return self.input_length + self.output_length - 1


class PageCache:
    """Pages with users.

    A full page without users keeps its content and can be found by its key until its memory is needed: least
    recently used first.
    """

    def __init__(self, num_pages: int) -> None:
        self._empty = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._key: list[Hashable | None] = [None] * num_pages
        self._page: dict[Hashable, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages without users."""
        return len(self._empty) + len(self._unused)

    def match(self, page_key: PageKey, most: int) -> list[int]:
        """The leading pages in the cache, at most `most`."""
        found = []
        for j in range(most):
            page = self._page.get(page_key(j))
            if page is None:
                break
            found.append(page)
        return found

    def take(self, found: list[int], count: int) -> list[int] | None:
        """Makes the caller a user of the pages `found`, and of new ones up to `count`. Returns None, and
        changes nothing, if there are too few.
        """
        if count - len(found) > self.available - sum(self._users[page] == 0 for page in found):
            return None
        for page in found:
            self._users[page] += 1
            self._unused.pop(page, None)
        return found + [self._new() for _ in range(count - len(found))]

    def fill(self, page: int, key: Hashable | None) -> None:
        """The page is full: from now on it can be found, unless another page has the same content."""
        if key is not None and self._key[page] is None and key not in self._page:
            self._key[page] = key
            self._page[key] = page

    def release(self, pages: list[int]) -> None:
        """Ends one use of each page. The last pages of a request go first, since fewer requests share
        them."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._key[page] is None:
                    self._empty.append(page)
                else:
                    self._unused[page] = None

    def _new(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            del self._page[self._key[page]]
            self._key[page] = None
        self._users[page] = 1
        return page


class Engine:
    """Steps of continuous batching.

    Requests are admitted in order as soon as the batch limit, the step's token budget and the cache allow it.
    A request gets all its pages at admission, so none is ever preempted. A step first serves the running
    requests in order of admission: one token for each decode, a chunk for each prefill.

    Args:
        waiting: requests in order.
        batch_limit: maximum number of running requests.
        cache_tokens: capacity of the KV cache in tokens.
        page_size: tokens.
        token_budget: maximum number of tokens in a step.
        think_steps: steps from the end of a request until its followers are ready; they go before requests
            that never ran.
    """

    def __init__(
        self,
        waiting: list[Request],
        batch_limit: int,
        cache_tokens: int,
        page_size: int = 16,
        token_budget: int = 8192,
        think_steps: int = 300,
    ) -> None:
        self.waiting = deque(waiting)
        self.batch_limit, self.page_size, self.token_budget, self.think_steps = (
            batch_limit,
            page_size,
            token_budget,
            think_steps,
        )
        self.cache = PageCache(cache_tokens // page_size)
        self.running: list[Request] = []
        self.returning: deque[tuple[int, Request]] = deque()
        self.steps = 0
        self.input_tokens = self.found_tokens = 0  # of admitted requests; cached

    def begin_step(self) -> list[Request]:
        """Schedules a step; returns its requests, with `scheduled` set."""
        budget = self.token_budget
        for request in self.running:
            request.scheduled = min(max(request.input_length - request.computed, 1), budget)
            budget -= request.scheduled
            self._fill(request)
        while budget > 0 and len(self.running) < self.batch_limit and self._admit():
            request = self.running[-1]
            request.scheduled = min(request.input_length - request.computed, budget)
            budget -= request.scheduled
            self._fill(request)
        return [request for request in self.running if request.scheduled]

    def end_step(self) -> None:
        """K and V of the scheduled tokens are in the cache; finished requests leave."""
        self.steps += 1
        for request in self.running:
            request.computed += request.scheduled
            if request.computed == request.length:
                self.cache.release(request.pages.tolist())
                self.returning.extend(
                    (self.steps + self.think_steps, follower) for follower in request.follows
                )
        self.running = [request for request in self.running if request.computed < request.length]

    def view(self, step: list[Request]) -> BSRView:
        """The step's BSR view, with a CSR page table."""
        kv_lens = np.array([request.computed + request.scheduled for request in step])
        counts = -(-kv_lens // self.page_size)
        qo_indptr, kv_indptr = (
            torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
            for lens in ([request.scheduled for request in step], counts)
        )
        pages = np.concatenate([request.pages[:count] for request, count in zip(step, counts, strict=True)])
        last_page_len = torch.tensor(kv_lens - (counts - 1) * self.page_size, dtype=torch.int32)
        return BSRView(
            qo_indptr, PageTable.csr(kv_indptr, torch.from_numpy(pages), last_page_len, self.page_size)
        )

    def _admit(self) -> bool:
        returns = bool(self.returning) and self.returning[0][0] <= self.steps
        if not returns and not self.waiting:
            return False
        request = self.returning[0][1] if returns else self.waiting[0]
        # The last token of the input is always computed: it gives the first token of the output.
        found = self.cache.match(request.page_key, (request.input_length - 1) // self.page_size)
        pages = self.cache.take(found, -(-request.length // self.page_size))
        if pages is None:
            if not self.running:
                raise ValueError(
                    f"cache_tokens is too small: a request of {request.length} tokens does not fit into the "
                    f"empty cache"
                )
            return False
        (self.returning if returns else self.waiting).popleft()
        request.pages = np.array(pages, np.int32)
        request.computed = len(found) * self.page_size
        self.input_tokens += request.input_length
        self.found_tokens += request.computed
        self.running.append(request)
        return True

    def _fill(self, request: Request) -> None:
        """Pages that this step fills: requests admitted from now on can share them, even in this step."""
        for j in range(
            request.computed // self.page_size, (request.computed + request.scheduled) // self.page_size
        ):
            self.cache.fill(int(request.pages[j]), request.page_key(j))
