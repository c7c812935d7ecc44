"""`attn-backend doctor --model`: whether this backend serves a model, before a server starts."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ..adapters.checkpoint import PARTLY, REFUSED, SERVED, Checkpoint, Verdict
from ..adapters.served import number_ranges
from ..jit.manifest import SHIPPED_HEAD_DIMS
from ..releases import RELEASES, installed_release, was_checked
from .console import print_table

# 2 is the status of a wrong command line
STATUS = {SERVED: 0, REFUSED: 1, PARTLY: 3}
STATUS_OF_OTHER_RELEASES = 4  # not refused, but the release is not a supported one
_MARKS = {SERVED: "[ok]", REFUSED: "[!!]", PARTLY: "[--]"}


@dataclass(frozen=True)
class Answer:
    engine: str
    release: str
    device: str
    verdict: Verdict

    @property
    def text(self) -> str:
        ours, others = (number_ranges(layers) for layers in (self.verdict.ours, self.verdict.others))
        if self.verdict.answer == PARTLY:
            num_ours, num_others = len(self.verdict.ours), len(self.verdict.others)
            return (
                f"partly ours: {num_ours} of {num_ours + num_others} attention layers ({ours}). The model's "
                f"own kernels run the others ({others})"
            )
        if self.verdict.answer == REFUSED:
            return f"refused: {self.verdict.refusals[0].what}"
        if not self.verdict.ours:
            return "served: the model has no attention layers"
        return f"served: all {len(self.verdict.ours)} attention layers ({ours})"

    @property
    def is_of_supported_release(self) -> bool:
        return was_checked(self.engine, self.release)

    @property
    def mark(self) -> str:
        is_sure = self.is_of_supported_release or self.verdict.answer == REFUSED
        return _MARKS[self.verdict.answer] if is_sure else "[--]"

    @property
    def usage(self) -> str:
        if self.engine == "sglang":
            return "--attention-backend attn_backend"
        return "ATTN_BACKEND_VLLM_CPU=1" if self.device == "cpu" else "--attention-backend CUSTOM"


def judge(
    model: Checkpoint,
    engine: str,
    release: str,
    device: str = "cuda",
    options: Mapping[str, str] | None = None,
) -> Verdict:
    """The answer of an engine's adapter.

    Args:
        options: of the server, by their names without dashes.
    """
    rules = import_module(f"attn_backend.adapters.{engine}.rules")
    verdict: Verdict = rules.judge(model, device, options or {}, release)
    if verdict.answer == REFUSED:
        return verdict
    notes = []
    if release == installed_release(engine) and not has_class(engine, model.architecture):
        notes.append(
            f"{engine} {release} has no class {model.architecture}. It may fall back to transformers' code."
        )
    others = {layer.heads for layer in model.layers if layer.index in verdict.ours}
    others.difference_update(SHIPPED_HEAD_DIMS["standard"])
    if device == "cuda" and others:
        heads = ", ".join(str(dims).replace("_", "/") for dims in sorted(others))
        notes.append(
            f"The wheel has no kernels for heads of {heads}. They are compiled at the first start, which "
            "needs nvcc."
        )
    return replace(verdict, notes=(*verdict.notes, *notes))


def engines(chosen: str | None, release: str | None) -> list[tuple[str, str]]:
    """Engines and releases to answer for: the chosen ones, else the installed ones, else all with their
    newest releases.
    """
    if chosen is not None:
        return [(chosen, release or installed_release(chosen) or RELEASES[chosen][-1])]
    installed = [(engine, found) for engine in RELEASES if (found := installed_release(engine))]
    return installed or [(engine, releases[-1]) for engine, releases in RELEASES.items()]


def has_class(engine: str, architecture: str) -> bool:
    """Whether the sources of the installed engine name an architecture. The engine is not imported."""
    spec = find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    files = [folder / "model_executor/models/registry.py", *(folder / "srt/models").glob("*.py")]
    name = re.compile(rf"\b{re.escape(architecture)}\b")
    return any(name.search(file.read_text()) for file in files if file.is_file())


def parse_options(text: str) -> dict[str, str]:
    """Options of a server: `--name value`, `--name=value`, and flags, whose value is empty.

    Raises:
        ValueError: a word is no option and no value of one.
    """
    options: dict[str, str] = {}
    name = ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--server-args is {text!r}: {error}") from error
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            options[name] = value
        elif name and not options[name]:
            options[name] = word
        else:
            raise ValueError(f"{word!r} follows no option, must be a value of one such as `--name value`")
    return options


def status_of(answers: Iterable[Answer]) -> int:
    """The exit status. Among several engines a refusal counts most, then an unsupported release, then a
    partial answer.
    """
    answers = list(answers)
    found = {answer.verdict.answer for answer in answers}
    if REFUSED not in found and not all(answer.is_of_supported_release for answer in answers):
        return STATUS_OF_OTHER_RELEASES
    return STATUS[next(answer for answer in (REFUSED, PARTLY, SERVED) if answer in found)]


def _rows(answer: Answer) -> list[tuple[str, str, str]]:
    verdict = answer.verdict
    rows = [(answer.mark, f"{answer.engine} {answer.release}", answer.text)]
    for number, refusal in enumerate(verdict.refusals):
        if number:
            rows.append(("", "", f"also refused: {refusal.what}"))
        rows.append(("", "", f"-> {refusal.way_out}"))
    if verdict.answer != REFUSED:
        rows.append(("", "", f"-> {answer.usage}"))
    rows += [("", "", note) for note in verdict.notes]
    if not answer.is_of_supported_release:
        supported = RELEASES[answer.engine]
        rows.append(
            (
                "",
                "",
                f"{answer.release} is not supported, {supported[0]} to {supported[-1]} are: "
                "compare outputs with the engine's own backend",
            )
        )
    return rows


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers; returns the exit status.

    Raises:
        ValueError: an argument is wrong.
    """
    if arguments.release is not None and arguments.engine is None:
        raise ValueError(f"--release {arguments.release} needs --engine: {' or '.join(RELEASES)}")
    model = Checkpoint.read(Path(arguments.model))
    options = parse_options(arguments.server_args)
    device = arguments.device
    answers = [
        Answer(engine, release, device, judge(model, engine, release, device, options))
        for engine, release in engines(arguments.engine, arguments.release)
    ]
    if arguments.json:
        described = [
            {
                "engine": answer.engine,
                "release": answer.release,
                "device": device,
                "supported_release": answer.is_of_supported_release,
                "text": answer.text,
                "usage": answer.usage,
                **asdict(answer.verdict),
                "refusals": [refusal._asdict() for refusal in answer.verdict.refusals],
            }
            for answer in answers
        ]
        print(json.dumps({"model": model.architecture, "answers": described}, indent=1))
        return status_of(answers)
    print_table(
        [
            ("", "model", f"{model.architecture}, on {'a GPU' if device == 'cuda' else 'a CPU'}"),
            *(row for answer in answers for row in _rows(answer)),
        ]
    )
    return status_of(answers)
