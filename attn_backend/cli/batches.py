"""The batches of `attn-backend plan`: from JSON, from a trace, or drawn from a named distribution."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..metadata import BSRView, PageTable
from ..metadata.values import check_page_ids, check_values
from ..settings import refusal
from ..validation import refuse, require

TRACE_BLOCK = 512  # tokens per hash id of a trace
_MAX_REQUESTS, _MAX_PAGES = 8192, 1 << 24  # per batch
_MAX_PREFIXES = 64  # nested prefixes in --shared-prefix
MAX_HASH_IDS = 1 << 24  # per trace
MAX_TEXT = 1 << 28  # characters in a batch, or in a line of a trace
_HOPPER_CTAS = 132  # one per SM of an H100
_MAX_HEADS = 256  # the text and the picture of a plan grow with its (row tile, head) pairs

# GPU kernels, by their names in Attention(kernel=...), and the CPU
Costs = Literal["hopper", "generic", "cpu"]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Counts = Annotated[list[Count], Field(fail_fast=True)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Run = Annotated[list[Count], Field(min_length=2, max_length=2)]


def _check_heads(text: str) -> str:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match:
        refuse("heads", text, "QO/KV, as 32/8")
    require(
        all(1 <= int(number) <= _MAX_HEADS for number in match.groups()),
        "heads",
        text,
        f"of 1 to {_MAX_HEADS} each",
    )
    return text


class PlanOptions(BaseModel):
    """Options of a plan, from the command line or a batch file. num_ctas None: 132, one per SM of an H100;
    with a CPU's costs 32.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    page_size: Annotated[int, Field(ge=1, lt=2**31)] = 16
    heads: Annotated[str, AfterValidator(_check_heads)] = "32/8"
    head_dim: Count = 128
    num_ctas: Count | None = None
    costs: Costs = "hopper"
    causal: bool = True
    window_left: Annotated[int, Field(gt=-(2**31), lt=2**31)] = -1
    head_dim_v: Count | None = None
    cascade: bool | Literal["always"] = True
    batch_invariant: bool = False

    @property
    def num_qo_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.heads.partition("/")[2])

    @property
    def ctas(self) -> int | None:
        """None: a CPU's own number, kCtas in csrc/attention/cpu/design.h."""
        return _HOPPER_CTAS if self.num_ctas is None and self.costs != "cpu" else self.num_ctas


class BatchFile(PlanOptions):
    """A batch (.json)."""

    qo_lens: Annotated[Counts, Field(min_length=1, max_length=_MAX_REQUESTS)]
    kv_lens: Annotated[Counts, Field(max_length=_MAX_REQUESTS)]
    block_table: Annotated[list[Counts], Field(fail_fast=True)] | None = None


class DumpFile(PlanOptions):
    """A batch (.json) that ATTN_BACKEND_DUMP wrote. Its lengths and page ids may be wrong."""

    fault: str
    qo_indptr: Annotated[list[Int64], Field(min_length=2, max_length=_MAX_REQUESTS + 1)]
    kv_lens: Annotated[list[Int64], Field(max_length=_MAX_REQUESTS)]
    block_table: list[list[Int32]] | None = None
    max_rows: Count
    max_batch: Count
    num_pages: Count | None = None
    variant: str | None = None  # its name; the command plans without it
    prompts: list[Int32] | None = None  # BSRView.prompts


class TraceLine(BaseModel):
    """A line of a trace; a pair [first, count] is a run of ids."""

    model_config = ConfigDict(strict=True)

    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: Annotated[list[Count | Run], Field(fail_fast=True)]


@dataclass(frozen=True)
class Batch:
    """The requests of one step.

    Attributes:
        title: the source of the batch.
        qo_lens: rows of Q of each request.
        kv_lens: tokens of each request.
        block_table: int32, page ids of each request, as many as its tokens need; equal ids are the same page.
        page_size: tokens.
        settings: the file's PlanOptions, except page_size.
        fault: why ATTN_BACKEND_DUMP wrote the file; "": it did not.
        max_batch: most requests of the plan; None: as many as there are.
        prompts: BSRView.prompts, as a list.
    """

    title: str
    qo_lens: list[int]
    kv_lens: list[int]
    block_table: list[torch.Tensor]
    page_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    max_batch: int | None = None
    prompts: list[int] | None = None

    def __post_init__(self) -> None:
        for name, lens in (("qo_lens", self.qo_lens), ("kv_lens", self.kv_lens)):
            for i, length in enumerate(lens):
                require(length < 2**31, f"{name}[{i}]", length, "below 2^31")

    def view(self, causal: bool = True, window_left: int = -1) -> BSRView:
        """Converts the batch to tensors on the CPU."""
        pages = torch.cat(self.block_table)
        last_page_len = torch.tensor(
            [(kv_len - 1) % self.page_size + 1 for kv_len in self.kv_lens], dtype=torch.int32
        )
        table = PageTable.csr(_indptr(map(len, self.block_table)), pages, last_page_len, self.page_size)
        prompts = None if self.prompts is None else torch.tensor(self.prompts, dtype=torch.int32)
        return BSRView(_indptr(self.qo_lens), table, causal, window_left, prompts=prompts)


def read_batch(arguments: argparse.Namespace) -> Batch:
    """The batch that the arguments select.

    Raises:
        ValueError, OSError: an error, with the name of the option or field.
    """
    require(
        arguments.page_size is None or arguments.page_size >= 1,
        "--page-size",
        arguments.page_size,
        "at least 1 token",
    )
    require(arguments.batch is None or arguments.batch >= 1, "--batch", arguments.batch, "at least 1 request")
    if arguments.file is None or arguments.file.suffix != ".jsonl":
        for option, value in (("--batch", arguments.batch), ("--at", arguments.at)):
            if value is not None:
                refuse(option, value, "left out: it selects requests of a trace (.jsonl), and there is none")
    page_size = arguments.page_size or 16
    if arguments.decode is not None:
        return decode(arguments.decode, page_size, arguments.seed)
    if arguments.prefill is not None:
        return prefill(arguments.prefill, page_size, arguments.seed)
    if arguments.shared_prefix is not None:
        return shared_prefix(arguments.shared_prefix, page_size)
    if arguments.mixed is not None:
        return mixed(arguments.mixed, page_size)
    if arguments.file.suffix == ".jsonl":
        return from_trace(arguments.file, arguments.batch or 32, arguments.at or 0.0, page_size)
    return from_json(arguments.file, arguments.page_size)


def from_json(path: Path, page_size: int | None = None) -> Batch:
    """A batch from a file. Without block_table no page is shared. `page_size` overrides the file's."""
    with path.open(encoding="utf-8", errors="replace") as file:
        values = _parse(_text(file.read(MAX_TEXT + 1), str(path)), str(path))
    if "qo_indptr" in values:
        return _from_dump(_validated(DumpFile, values, str(path)), path.name, page_size)
    content = _validated(BatchFile, values, str(path))
    qo_lens, kv_lens, table = content.qo_lens, content.kv_lens, content.block_table
    require(len(kv_lens) == len(qo_lens), "len(kv_lens)", len(kv_lens), f"len(qo_lens) = {len(qo_lens)}")
    page_size = page_size or content.page_size
    pages = sum(_pages(kv_len, page_size) for kv_len in kv_lens)
    require(
        pages <= _MAX_PAGES, "pages of kv_lens", pages, f"at most {_MAX_PAGES}, of {page_size} tokens each"
    )
    if table is None:
        block_table = _own_pages(kv_lens, page_size)
    elif len(table) != len(kv_lens):
        refuse("block_table", table, f"a list of len(kv_lens) = {len(kv_lens)} lists of page ids")
    else:
        block_table = []
        for i, (ids, kv_len) in enumerate(zip(table, kv_lens, strict=True)):
            require(
                len(ids) * page_size >= kv_len,
                f"kv_lens[{i}]",
                kv_len,
                f"at most {len(ids) * page_size}: block_table[{i}] has {len(ids)} pages of {page_size} "
                f"tokens",
            )
            block_table.append(torch.tensor(ids[: _pages(kv_len, page_size)], dtype=torch.int32))
    settings = content.model_dump(
        exclude_unset=True, exclude={"qo_lens", "kv_lens", "block_table", "page_size"}
    )
    return Batch(path.name, qo_lens, kv_lens, block_table, page_size, settings)


def _from_dump(dump: DumpFile, title: str, page_size: int | None) -> Batch:
    """Refuses wrong values with the messages of a plan and a run on a CPU."""
    kv_lens, table, page_size = dump.kv_lens, dump.block_table, page_size or dump.page_size
    require(
        len(dump.qo_indptr) == len(kv_lens) + 1,
        "len(qo_indptr)",
        len(dump.qo_indptr),
        f"len(kv_lens) + 1 = {len(kv_lens) + 1}",
    )
    prompts = dump.prompts
    require(
        prompts is None or len(prompts) == len(kv_lens),
        "prompts",
        prompts,
        f"a list of len(kv_lens) = {len(kv_lens)} numbers",
    )
    require(
        table is None or len(table) == len(kv_lens),
        "block_table",
        table,
        f"a list of len(kv_lens) = {len(kv_lens)} lists of page ids",
    )
    lens = [max(kv_len, 0) for kv_len in kv_lens]
    longest = max(map(len, table)) if table is not None else max(_pages(kv_len, page_size) for kv_len in lens)
    require(
        len(kv_lens) * longest <= _MAX_PAGES,
        "requests * pages of the longest",
        len(kv_lens) * longest,
        f"at most {_MAX_PAGES}, of {page_size} tokens each",
    )
    if table is None:
        pages = _own_pages(lens, page_size)
    else:
        pages = [torch.tensor(ids, dtype=torch.int32) for ids in table]
    dense = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    view = BSRView(
        torch.tensor(dump.qo_indptr), PageTable.block_table(dense, torch.tensor(kv_lens), page_size)
    )
    check_values(view, dump.max_rows)
    check_page_ids(view, dump.num_pages)
    return Batch(
        title,
        view.qo_indptr.diff().tolist(),
        kv_lens,
        pages,
        page_size,
        dump.model_dump(include=PlanOptions.model_fields.keys() - {"page_size"}, exclude_unset=True),
        dump.fault,
        dump.max_batch,
        prompts,
    )


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace in Mooncake's format.

    Attributes:
        arrival: seconds.
        input_length, output_length: tokens.
        hash_ids: one for every TRACE_BLOCK tokens of the input; the last one may cover fewer. Equal ids mean
            equal tokens after equal prefixes.
    """

    arrival: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads JSON lines with timestamp (ms), input_length, output_length and hash_ids. In hash_ids, a pair
    [first, count] is a run of ids.


    Raises:
        ValueError: names the line and the field.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(_trace_requests(file, path))


def _trace_requests(file: TextIO, path: Path) -> Iterator[TraceRequest]:
    num_ids = 0
    for number in itertools.count(1):
        where = f"{path}:{number}"
        line = _text(file.readline(MAX_TEXT + 1), where)
        if not line:
            return
        if not line.strip():
            continue
        values = _validated(TraceLine, _parse(line, where), where)
        num_blocks = -(-values.input_length // TRACE_BLOCK)
        num_ids += num_blocks
        require(
            num_ids <= MAX_HASH_IDS,
            f"{where}: input_length",
            values.input_length,
            f"smaller: a trace may have {MAX_HASH_IDS} blocks of {TRACE_BLOCK} tokens together",
        )
        runs = [(entry, 1) if isinstance(entry, int) else (entry[0], entry[1]) for entry in values.hash_ids]
        expanded = sum(count for _, count in runs)
        require(
            expanded == num_blocks,
            f"{where}: len(hash_ids)",
            expanded,
            f"input_length / {TRACE_BLOCK}, rounded up: {num_blocks}",
        )
        hash_ids = [id for first, count in runs for id in range(first, first + count)]
        yield TraceRequest(values.timestamp / 1e3, values.input_length, values.output_length, hash_ids)


def from_trace(path: Path, batch: int, at: float, page_size: int) -> Batch:
    """The first `batch` requests that arrive at or after `at` seconds, each decoding in the middle of its
    output. Pages of equal inputs are shared.
    """
    require(
        TRACE_BLOCK % page_size == 0,
        "page_size",
        page_size,
        f"a divisor of {TRACE_BLOCK}, the tokens of a trace's hash id",
    )
    requests = [request for request in read_trace(path) if request.arrival >= at][:batch]
    require(requests, "--at", at, f"the time of a request in {path} or before it, in seconds")
    kv_lens = [request.input_length + -(-request.output_length // 2) for request in requests]
    _check_size("--batch", batch, len(requests), sum(kv_lens), page_size)
    # The id of a full page is its block's number times the pages per block, plus its index in the block.
    # Pages that the input does not fill are private.
    ids = torch.tensor([id for request in requests for id in request.hash_ids], dtype=torch.int64)
    blocks, numbers = ids.unique(return_inverse=True)
    in_block = TRACE_BLOCK // page_size
    used = len(blocks) * in_block
    block_table = []
    for request, kv_len, of_request in zip(
        requests, kv_lens, numbers.split([len(request.hash_ids) for request in requests]), strict=True
    ):
        full = request.input_length // page_size
        own = _pages(kv_len, page_size) - full
        shared = (of_request[:, None] * in_block + torch.arange(in_block)).flatten()[:full]
        block_table.append(torch.cat([shared, torch.arange(used, used + own)]).int())
        used += own
    return Batch(
        f"{path.name}, {len(requests)} requests from {at:g} s on",
        [1] * len(requests),
        kv_lens,
        block_table,
        page_size,
    )


def decode(text: str, page_size: int, seed: int = 0) -> Batch:
    """`64xzipf:4096`: requests that decode one token, with KV lengths of that distribution and mean."""
    kv_lens = _distributed("--decode", text, page_size, seed)
    return Batch(f"decode {text}", [1] * len(kv_lens), kv_lens, _own_pages(kv_lens, page_size), page_size)


def prefill(text: str, page_size: int, seed: int = 0) -> Batch:
    """`16xconst:1024`: requests that prefill their whole prompt."""
    lens = _distributed("--prefill", text, page_size, seed)
    return Batch(f"prefill {text}", lens, lens, _own_pages(lens, page_size), page_size)


def mixed(text: str, page_size: int) -> Batch:
    """`1x2048@6144+63x4096`: terms of requests x rows of Q @ tokens of KV; without @, one row of Q."""
    qo_lens: list[int] = []
    kv_lens: list[int] = []
    for term in text.split("+"):
        match = re.fullmatch(r"(\d{1,18})x(?:(\d{1,18})@)?(\d{1,18})", term)
        if not match:
            refuse("--mixed", text, "REQUESTSx[ROWS@]TOKENS+..., as 1x2048@6144+63x4096")
        count, rows, tokens = int(match[1]), int(match[2] or 1), int(match[3])
        _check_size("--mixed", text, len(qo_lens) + count, sum(kv_lens) + count * tokens, page_size)
        qo_lens += [rows] * count
        kv_lens += [tokens] * count
    return Batch(f"mixed {text}", qo_lens, kv_lens, _own_pages(kv_lens, page_size), page_size)


def shared_prefix(text: str, page_size: int) -> Batch:
    """`128x8192+256`: decodes with a common prefix of 8192 tokens and 256 private tokens each.

    `16x8x4096+1024+256`: all share 4096, every 8 share another 1024.
    """
    match = re.fullmatch(r"((?:\d{1,18}x)+)(\d{1,18}(?:\+\d{1,18})+)", text)
    counts = [int(count) for count in match[1].split("x")[:-1]] if match else []
    lens = [int(length) for length in match[2].split("+")] if match else []
    if not match or len(lens) != len(counts) + 1 or len(counts) > _MAX_PREFIXES:
        refuse(
            "--shared-prefix", text, "REQUESTSxPREFIX+OWN, as 128x8192+256, or deeper as 16x8x4096+1024+256"
        )
    _check_size("--shared-prefix", text, math.prod(counts), math.prod(counts) * sum(lens), page_size)
    block_table = [torch.empty(0, dtype=torch.int32)]
    used = tokens = 0
    for depth, length in enumerate(lens):
        tokens += length
        # Only full pages are shared: the remainder starts the next page of each branch.
        end = tokens // page_size if depth < len(counts) else -(-tokens // page_size)
        for i, row in enumerate(block_table):
            pages = end - len(row)
            block_table[i] = torch.cat([row, torch.arange(used, used + pages, dtype=torch.int32)])
            used += pages
        if depth < len(counts):
            block_table = [row for row in block_table for _ in range(counts[depth])]
    return Batch(
        f"shared prefix {text}", [1] * len(block_table), [tokens] * len(block_table), block_table, page_size
    )


def lengths(distribution: str, batch: int, mean: int, seed: int = 0) -> list[int]:
    """`batch` lengths. const: all equal; uniform: from half of `mean` to `mean`; zipf: with that mean, a few
    very long.
    """
    if distribution == "const":
        return [mean] * batch
    import numpy

    require(seed >= 0, "seed", seed, "at least 0")
    generator = numpy.random.default_rng(seed)
    if distribution == "uniform":
        return [int(n) for n in generator.integers(mean // 2, mean + 1, batch)]
    weights = 1.0 / generator.permutation(numpy.arange(1, batch + 1))
    return [max(1, int(n)) for n in weights / weights.sum() * mean * batch]


def _distributed(option: str, text: str, page_size: int, seed: int) -> list[int]:
    match = re.fullmatch(r"(\d{1,18})x(const|uniform|zipf):(\d{1,18})", text)
    if not match:
        refuse(option, text, "REQUESTSx(const|uniform|zipf):TOKENS, as 64xzipf:4096")
    batch, mean = int(match[1]), int(match[3])
    _check_size(option, text, batch, batch * mean, page_size)
    return lengths(match[2], batch, mean, seed)


def _check_size(option: str, value: object, requests: int, tokens: int, page_size: int) -> None:
    require(
        1 <= requests <= _MAX_REQUESTS and tokens <= _MAX_PAGES * page_size,
        option,
        value,
        f"of 1 to {_MAX_REQUESTS} requests with at most {_MAX_PAGES} pages of {page_size} tokens together",
    )


def _pages(kv_len: int, page_size: int) -> int:
    return -(-kv_len // page_size)


def _own_pages(kv_lens: Iterable[int], page_size: int) -> list[torch.Tensor]:
    pages = [_pages(kv_len, page_size) for kv_len in kv_lens]
    return list(torch.arange(sum(pages), dtype=torch.int32).split(pages))


def _indptr(lens: Iterable[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int64)


def _text(text: str, where: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError(f"{where}: longer than {MAX_TEXT} characters")
    return text


_Model = TypeVar("_Model", bound=BaseModel)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
        raise ValueError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    if not isinstance(values, dict):
        refuse(where, values, "a JSON object")
    return values


def _validated(model: type[_Model], values: dict[str, Any], where: str) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {refusal(error, model.model_fields)}") from None
