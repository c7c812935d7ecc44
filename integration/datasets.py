"""The data sets of a benchmark, by their names on the command line:

    sharegpt                ShareGPT, downloaded when needed; or FILE.json in its form
    uniform:LOW-HIGH        prompt lengths drawn evenly from LOW ... HIGH tokens
    prefix:PREFIX+SUFFIX    every prompt is the same PREFIX tokens, then SUFFIX tokens of its own
    lengths:FILE.csv        prompt and output lengths: the first two numeric columns of a file with a header
    agents:CxN+OWN          agents share C contexts of N tokens; a turn is its context and OWN tokens
    agents:CxN+OWNxT        each agent takes T turns, and sends its earlier turns and their answers again
    documents:N+OWN         a question of OWN tokens after a document of N tokens
    documents:N+OWNxQ       Q questions to each document, one after another
    trace:FILE.jsonl        Mooncake's format: prompts share the blocks of 512 tokens whose hashes are equal

OWN and a document's N are a number or LOW-HIGH. OWN can also be `recorded`: the first turns of ShareGPT, and
the lengths of their answers.
"""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

from integration.shared_contexts import SharedContexts, agents, documents
from integration.sharegpt import dataset_file
from integration.trace import Trace, read_requests
from integration.workload import LONGEST_TOTAL, FileWorkload, SharedPrefix, ShareGPT, Workload

RECORDED = "recorded"
LENGTH = r"\d+(?:-\d+)?"
OWN = rf"\+(?P<own>{RECORDED}|{LENGTH})(?:x(?P<repeats>\d+))?"
SHARED_CONTEXTS = {
    "agents": re.compile(rf"(?P<number>\d+)x(?P<length>\d+){OWN}"),
    "documents": re.compile(rf"(?P<number>)(?P<length>{LENGTH}){OWN}"),
}


def make_workload(
    dataset: str,
    num_prompts: int,
    output_len: str | None,
    model_folder: Path,
    seed: int,
    samples: int = 1,
    max_model_len: int = LONGEST_TOTAL,
) -> Workload:
    """Parse a data set's name (see above).

    `output_len` is `N`, `LOW-HIGH` or None; `seed` draws lengths. Raises ValueError for unusable values.
    """
    kind, _, rest = dataset.partition(":")
    outputs = _parse_range("output-len", output_len) if output_len else None
    draw = random.Random(seed)
    if num_prompts < 1 or samples < 1:
        raise ValueError(f"num-prompts: {num_prompts}, samples: {samples}: both must be positive")
    if dataset == "sharegpt" or dataset.endswith(".json"):
        output = _one_length("ShareGPT", output_len)
        description = (
            f"ShareGPT, first turns, {f'{output} output tokens' if output else 'outputs as recorded'}"
        )
        return ShareGPT(
            num_prompts,
            samples,
            description,
            model_folder,
            dataset_file(dataset),
            output,
            max_model_len,
        )
    if kind == "lengths":
        prompts, answers = _read_lengths(Path(rest), num_prompts)
        if outputs:
            answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(
            len(prompts), samples, f"lengths of {Path(rest).name}", model_folder, prompts, answers
        )
    if kind == "trace":
        return _trace(Path(rest), num_prompts, samples, output_len, model_folder, max_model_len)
    if kind in SHARED_CONTEXTS:
        return _shared_contexts(dataset, num_prompts, samples, output_len, model_folder, draw, max_model_len)
    if outputs is None:
        raise ValueError(
            f"output-len: missing, and the data set {dataset!r} does not say how long answers are"
        )
    if kind == "uniform":
        low, high = _parse_range("dataset", rest)
        prompts = [draw.randint(low, high) for _ in range(num_prompts)]
        answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(
            num_prompts,
            samples,
            f"prompts of {low}-{high} tokens, outputs of {output_len}",
            model_folder,
            prompts,
            answers,
        )
    if kind == "prefix":
        prefix, _, suffix = rest.partition("+")
        if not (prefix.isdigit() and suffix.isdigit() and int(suffix) > 0) or outputs[0] != outputs[1]:
            raise ValueError(
                f"dataset: {dataset!r} with output-len {output_len!r}: expected prefix:PREFIX+SUFFIX, "
                f"numbers of tokens, and one output length"
            )
        total = int(prefix) + int(suffix)
        description = (
            f"one shared prefix of {prefix} tokens, then {suffix} of each prompt's own, "
            f"{output_len} output tokens"
        )
        return SharedPrefix(
            num_prompts,
            samples,
            description,
            model_folder,
            [total] * num_prompts,
            [outputs[0]] * num_prompts,
            int(prefix),
        )
    raise ValueError(
        f"dataset: {dataset!r} is none of sharegpt, FILE.json, uniform:LOW-HIGH, prefix:PREFIX+SUFFIX, "
        f"lengths:FILE.csv, agents:CxN+OWN, documents:N+OWN, trace:FILE.jsonl"
    )


def _trace(
    path: Path,
    num_prompts: int,
    samples: int,
    output_len: str | None,
    model_folder: Path,
    max_model_len: int,
) -> Trace:
    output = _one_length(f"trace:{path}", output_len)
    recorded = read_requests(path, num_prompts, output, max_model_len)
    prompts = [request.input_length for request in recorded]
    outputs = f"{output} output tokens" if output else "outputs as recorded"
    description = f"requests of {path.name}, prompts of {min(prompts)}-{max(prompts)} tokens, {outputs}"
    return Trace(num_prompts, samples, description, model_folder, recorded, output)


def _shared_contexts(
    dataset: str,
    num_prompts: int,
    samples: int,
    output_len: str | None,
    model_folder: Path,
    draw: random.Random,
    max_model_len: int,
) -> SharedContexts:
    kind, _, rest = dataset.partition(":")
    parsed = SHARED_CONTEXTS[kind].fullmatch(rest)
    if not parsed:
        raise ValueError(f"dataset: {dataset!r}, must be agents:CxN+OWN[xT] or documents:N+OWN[xQ]")
    number, length, own, repeats = (
        parsed["number"],
        parsed["length"],
        parsed["own"],
        int(parsed["repeats"] or 1),
    )
    if min(int(number or 1), repeats) < 1:
        raise ValueError(f"dataset: {dataset!r}: the numbers must be positive")
    low, high = _parse_range("dataset", length)
    if kind == "agents":
        of_prompt, talks = agents(int(number), repeats, num_prompts)
        description = f"turns of {max(talks) + 1} agents over {number} contexts of {length} tokens"
    else:
        of_prompt, talks = documents(repeats, num_prompts)
        description = f"questions about {max(of_prompt) + 1} documents of {length} tokens"
    contexts = [draw.randint(low, high) for _ in range(max(of_prompt) + 1)]
    if own == RECORDED:
        output = _one_length(dataset, output_len)
        outputs = f"{output} output tokens" if output else "outputs as recorded"
        return SharedContexts(
            num_prompts,
            samples,
            f"{description}, first turns of ShareGPT, {outputs}",
            model_folder,
            contexts,
            of_prompt,
            talks,
            None,
            None,
            max_model_len,
            dataset_file("sharegpt"),
            output,
        )
    if output_len is None:
        raise ValueError(
            f"output-len: missing, and the data set {dataset!r} does not say how long answers are"
        )
    owns, outputs_range = _parse_range("dataset", own), _parse_range("output-len", output_len)
    return SharedContexts(
        num_prompts,
        samples,
        f"{description}, {own} own tokens, {output_len} output tokens",
        model_folder,
        contexts,
        of_prompt,
        talks,
        [draw.randint(*owns) for _ in of_prompt],
        [draw.randint(*outputs_range) for _ in of_prompt],
        max_model_len,
    )


def _one_length(dataset: str, output_len: str | None) -> int | None:
    """None: as recorded. Raises ValueError for a range."""
    if output_len is None:
        return None
    low, high = _parse_range("output-len", output_len)
    if low != high:
        raise ValueError(
            f"output-len: {output_len!r}: {dataset} takes one number, or none for the recorded answers' "
            f"lengths"
        )
    return low


def _parse_range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit() or not 0 < int(low) <= int(high or low):
        raise ValueError(f"{name}: {text!r} is neither a positive number nor LOW-HIGH")
    return int(low), int(high or low)


def _read_lengths(path: Path, num_prompts: int) -> tuple[list[int], list[int]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1 : num_prompts + 1]
    if not rows:
        raise ValueError(f"dataset: {path} has no rows under its header")
    columns = [index for index, cell in enumerate(rows[0]) if cell.strip().isdigit()]
    if len(columns) < 2:
        raise ValueError(
            f"dataset: {path} has {len(columns)} columns of whole numbers, expected two: prompt and output "
            f"lengths"
        )
    return [max(int(row[columns[0]]), 1) for row in rows], [max(int(row[columns[1]]), 1) for row in rows]
