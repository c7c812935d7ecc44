"""Cases of one variant after another. Several processes share the variants, and each compiles its own."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import attention_kernels
import torch

from attn_backend.jit import cubins
from attn_backend.kernels.native import library

from .catalogue import Entry, entries
from .problems import Form, random_problem

CPU_FORMS = ((torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 80))
GPU_FORMS = (
    (torch.bfloat16, 128),
    (torch.float16, 64),
    (torch.bfloat16, 64),
    (torch.float16, 128),
    (torch.bfloat16, 256),
    (torch.float16, 256),
)


@dataclass(frozen=True)
class Task:
    """A variant in one form, and its cases: first, first + stride, ... below last.

    A case has the same number, no matter what else runs.
    """

    place: int  # among entries()
    form: Form
    first: int
    last: int
    stride: int

    @property
    def entry(self) -> Entry:
        return entries()[self.place]

    @property
    def title(self) -> str:
        form = self.form
        return (
            f"{self.entry.name} ({form.kernel or 'cpu'}, {str(form.dtype).removeprefix('torch.')}, "
            f"head_dim {form.head_dim}{', sinks' if form.sinks else ''})"
        )


@dataclass
class Result:
    task: Task
    kinds: dict[str, int] = field(default_factory=dict)  # cases by kind
    failures: list[tuple[int, str]] = field(default_factory=list)  # number, message
    compiling: float = 0.0  # seconds
    seconds: float = 0.0


def tasks(device: torch.device, cases: int, names: list[str] | None = None) -> list[Task]:
    """Every variant in one of its forms, in turn, some with sinks; built-ins on a GPU with each kernel."""
    on_gpu = device.type == "cuda"
    kernels = (
        [kernel for kernel in attention_kernels.GPU_KERNELS if attention_kernels.is_available(kernel)]
        if on_gpu
        else [None]
    )
    chosen = []
    for place, entry in enumerate(entries()):
        if names and entry.name not in names:
            continue
        for kernel in kernels if entry.is_builtin else [kernels[place % len(kernels)]]:
            forms = GPU_FORMS if on_gpu else CPU_FORMS
            dtype, head_dim = forms[place // len(kernels) % len(forms)]
            chosen.append(
                (
                    place,
                    Form(
                        dtype, head_dim, kernel, device, sinks=entry.variant.uses_softmax and place % 5 == 2
                    ),
                )
            )
    return [Task(place, form, i, cases, len(chosen)) for i, (place, form) in enumerate(chosen) if i < cases]


def compile_variant(task: Task) -> None:
    """All kernels of the variant that a case may need."""
    form = task.form
    target = (
        "cpu"
        if form.device.type == "cpu"
        else cubins.target_of(torch.cuda.get_device_capability(form.device))
    )
    isa = library().current_isa() if target == "cpu" else "baseline"
    dtype = str(form.dtype).removeprefix("torch.")
    cubins.compile_ahead(task.entry.variant, [target], form.kernel, dtype, form.head_dim, isa, form.sinks)


def run_task(task: Task) -> Result:
    begin = time.monotonic()
    result = Result(task)
    try:
        compile_variant(task)
    except Exception:
        result.failures.append((task.first, traceback.format_exc()))
        return result
    result.compiling = time.monotonic() - begin
    for number in range(task.first, task.last, task.stride):
        kind, message = run_case(number, task.entry, task.form)
        result.kinds[kind] = result.kinds.get(kind, 0) + 1
        if message:
            result.failures.append((number, message))
    result.seconds = time.monotonic() - begin
    return result


def run_case(number: int, entry: Entry, form: Form) -> tuple[str, str]:
    """(kind, error or "")."""
    kind, text = "", ""
    try:
        problem, args = random_problem(number, entry, form)
        kind, text = problem.kind, problem.text
        problem.run(entry, form, args)
        problem.check(entry, form, args)
    except AssertionError as error:
        return kind, f"{kind}: {error}\n{text}"
    except Exception:
        return kind, f"{kind}: {traceback.format_exc()}\n{text}"
    return kind, ""


def run(chosen: list[Task], jobs: int) -> Iterator[Result]:
    """With this number of processes; 1: in the current one."""
    if jobs == 1:
        yield from map(run_task, chosen)
        return
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = {pool.submit(run_task, task): task for task in chosen}
        for future in as_completed(futures):
            try:
                yield future.result()
            except Exception as error:  # the process died
                yield Result(
                    futures[future], failures=[(futures[future].first, f"{type(error).__name__}: {error}")]
                )
