"""An inference engine in a few hundred lines: continuous batching, chunked prompts, a prefix cache, one plan
and one launch per layer for any batch.

    python examples/engine.py                              # a small random model: shows that it runs
    # or a folder with config.json, *.safetensors, tokenizer.json
    python examples/engine.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Requests whose prompts begin alike get the same physical pages. The engine does nothing else: `plan` finds
shared prefixes in the page tables.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

import llama
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, Rotary, append_qkv, sample

PAGE_SIZE = 16


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, then the generated tokens
    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose K and V are in the cache

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.num_prompt_tokens + self.max_new_tokens


class Engine:
    """`add()` takes requests, and `step()` computes the next tokens of all that fit."""

    def __init__(
        self,
        model: llama.Llama,
        device: str,
        *,
        num_pages: int = 1024,
        max_batch: int = 64,
        max_rows: int = 512,
        cascade: bool = True,
    ) -> None:
        self.model, self.device, self.max_batch, self.max_rows = model, device, max_batch, max_rows
        num_heads, num_kv_heads, head_dim = model.heads
        dtype = model.embedding.dtype
        # page 0 belongs to no request: unused entries of the block table name it
        shape = (num_pages, 2, PAGE_SIZE, num_kv_heads, head_dim)
        self.caches = [
            KVCache.from_tensor(torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(model.num_layers)
        ]
        self.attention = Attention(
            num_heads,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            cascade=cascade,
        )
        self.rotary = Rotary(model.frequencies.float().to(device))
        self.free_pages = list(range(num_pages - 1, 0, -1))
        self.users = [0] * num_pages  # requests that have a page
        # all tokens up to the end of a full page -> the page
        self.page_of_prefix: dict[tuple[int, ...], int] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> Request:
        self.waiting.append(request)
        return request

    def _admit(self, request: Request) -> bool:
        """Gives a request all its pages. It reuses cached pages of leading tokens, but always computes the
        last prompt token.
        """
        for end in range(PAGE_SIZE, request.num_prompt_tokens, PAGE_SIZE):
            page = self.page_of_prefix.get(tuple(request.tokens[:end]))
            if page is None:
                break
            request.pages.append(page)
        needed = -(-(request.num_prompt_tokens + request.max_new_tokens) // PAGE_SIZE) - len(request.pages)
        if needed > len(self.free_pages):
            request.pages.clear()
            return False
        request.num_computed = len(request.pages) * PAGE_SIZE
        request.pages += [self.free_pages.pop() for _ in range(needed)]
        for page in request.pages:
            self.users[page] += 1
        return True

    def _chunk(self, request: Request, rows: int) -> tuple[Request, int]:
        """Other requests can read the pages that it fills in the same step, since a layer appends before it
        attends."""
        count = min(len(request.tokens) - request.num_computed, rows)
        for number in range(
            request.num_computed // PAGE_SIZE,
            min(request.num_computed + count, request.num_prompt_tokens) // PAGE_SIZE,
        ):
            self.page_of_prefix.setdefault(
                tuple(request.tokens[: (number + 1) * PAGE_SIZE]), request.pages[number]
            )
        return request, count

    def _release(self, request: Request) -> None:
        for page in request.pages:
            self.users[page] -= 1
        unused = {page for page in request.pages if self.users[page] == 0}
        self.free_pages += unused
        self.page_of_prefix = {
            prefix: page for prefix, page in self.page_of_prefix.items() if page not in unused
        }

    def _schedule(self) -> list[tuple[Request, int]]:
        """(request, tokens to compute): decodes first, then running prompts, then new ones while there is
        room. A long prompt is cut into chunks.
        """
        batch = [
            self._chunk(request, 1)
            for request in self.running
            if request.num_computed == len(request.tokens) - 1
        ]
        rows = self.max_rows - len(batch)
        for request in self.running:
            if rows and request.num_computed < len(request.tokens) - 1:
                batch.append(self._chunk(request, rows))
                rows -= batch[-1][1]
        while rows and self.waiting and len(self.running) < self.max_batch and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            batch.append(self._chunk(self.running[-1], rows))
            rows -= batch[-1][1]
        return batch

    def step(self) -> list[Request]:
        """Computes the scheduled tokens of all requests in one pass; returns the finished requests."""
        batch = self._schedule()
        if not batch:
            raise RuntimeError(
                "nothing can run: a request needs more pages than the cache has, or there is none"
            )
        requests = [request for request, _ in batch]
        counts = torch.tensor([count for _, count in batch])
        starts = torch.tensor([request.num_computed for request in requests])
        block_table = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(request.pages, dtype=torch.int32) for request in requests], batch_first=True
        )
        row = torch.arange(int(counts.sum()))
        of_row = torch.arange(len(batch)).repeat_interleave(counts)
        positions = starts[of_row] + row - (counts.cumsum(0) - counts)[of_row]
        slots = block_table[of_row, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        tokens = torch.tensor(
            [token for request, count in batch for token in request.tokens[request.num_computed :][:count]]
        )
        qo_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        kv_lens, last_rows = (starts + counts).int(), counts.cumsum(0) - 1

        qo_indptr, kv_lens, block_table, slots, positions, tokens, last_rows = (
            tensor.to(self.device)
            for tensor in (qo_indptr, kv_lens, block_table, slots, positions, tokens, last_rows)
        )
        self.attention.plan(BSRView(qo_indptr, PageTable.block_table(block_table, kv_lens, PAGE_SIZE)))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            append_qkv(q, k, v, self.caches[layer], slots, rotary=self.rotary, positions=positions)
            return self.attention.run(q, self.caches[layer], after_append=True)

        logits = self.model.forward(tokens, attend, last_rows)
        temperature = torch.tensor([request.temperature for request in requests], device=self.device)
        seed = torch.tensor([request.seed for request in requests], device=self.device)
        new_tokens = sample(logits, temperature=temperature, seed=seed, position=kv_lens).token_ids.tolist()
        for (request, count), token in zip(batch, new_tokens, strict=True):
            request.num_computed += count
            if request.num_computed == len(request.tokens):  # not in the middle of a prompt
                request.tokens.append(token)
        done = [request for request in requests if request.is_done]
        self.running = [request for request in self.running if not request.is_done]
        for request in done:
            self._release(request)
        return done

    def generate(self, requests: list[Request]) -> list[str]:
        for request in requests:
            self.add(request)
        while self.waiting or self.running:
            self.step()
        return [self.model.decode(request.tokens[request.num_prompt_tokens :]) for request in requests]


SYSTEM = (
    "Below is a list of short questions about geography, each with a short and correct answer. The "
    "answers are given by a careful assistant.\n\n"
)
QUESTIONS = ("What is the capital of Japan?", "What is the capital of France?", "Which ocean is the largest?")


def main(argv: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name on the hub; default: small and random")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--max-new-tokens", type=int, default=24, help="tokens to generate for each prompt (%(default)s)"
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        default=[f"{SYSTEM}Question: {question}\nAnswer:" for question in QUESTIONS],
        help="default: three questions with a common prefix",
    )
    arguments = parser.parse_args(argv)
    device = llama.pick_device(arguments.device)
    model = llama.load(arguments.model, device)
    engine = Engine(model, device)
    texts = engine.generate(
        [Request(model.encode(prompt), arguments.max_new_tokens) for prompt in arguments.prompts]
    )
    for prompt, text in zip(arguments.prompts, texts, strict=True):
        print(
            f"{prompt.splitlines()[-2]}\n{prompt.splitlines()[-1]}{text}\n"
            if prompt.startswith(SYSTEM)
            else f"{prompt}{text}\n"
        )
    return texts


if __name__ == "__main__":
    main()
