"""The conftest.py of the copied tests: selects a sample, emulates CUDA on a CPU, and writes the outcome of
each case.

FLASHINFER_SUITE (JSON) contains: device, sample, seed, max_tokens, gpu_memory (GiB, 0: all), results (a
file).
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import json
import math
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Generator
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attn_backend.flashinfer as ours

OPTIONS = json.loads(os.environ["FLASHINFER_SUITE"])
ON_CPU = OPTIONS["device"] == "cpu"
MAX_CPU_BYTES = 8 * 2**30  # memory limit on a CPU: references of large cases exceed a machine's memory
GPU_MEMORY = OPTIONS["gpu_memory"]
TOO_LARGE = "too large"
NOT_SUPPORTED = "is not supported by attn_backend.flashinfer"
# Tests that FlashInfer refuses to exceed a limit that this package lacks. They run, and count as this if
# nothing is refused.
NO_SUCH_LIMIT = "no such limit"
TESTS_OF_LIMITS = {
    "test_batch_decode_rejects_unequal_kv_strides_nvfp4_contract": "K and V may have different strides",
    "test_tensor_core_decode_rejects_mismatched_q_len": "several queries of a request with every backend",
    "test_batch_decode_workspace_size_rejects_unaligned_workspace_buffer": "workspace buffers are not used",
    "test_batch_prefill_workspace_size_rejects_unaligned_workspace_buffer": "workspace buffers are not used",
    "test_fp8_kv_plan_rejects_fp16_q": "Q may be float16 over latents of float8",
}


class _Absent(ModuleType):
    """A missing FlashInfer module: its names can be imported, and refuse calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        feature = f"{self.__name__.removeprefix('attn_backend.')}.{name}"

        def refuse(*_arguments: Any, **_options: Any) -> None:
            raise NotImplementedError(f"{feature} {NOT_SUPPORTED}")

        return type(name, (), {"__new__": refuse})  # a class: annotations may name it


def _declarations() -> ModuleType:
    """C++ that tests pass to jit_args, from the checkout."""
    spec = importlib.util.spec_from_file_location(
        "flashinfer_declarations", Path(__file__).with_name("flashinfer_declarations.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _found(name: str) -> ModuleType | None:
    """A module of this package, or None."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _stand_in_for_jit() -> None:
    """Tests import ahead-of-time compile functions from flashinfer.jit, which this package does not need."""
    names = (
        "jit",
        "jit.utils",
        "jit.attention",
        "jit.attention.variants",
        "fp4_quantization",
        "cutile",
        "cutile.cutile_common",
    )
    for name in (*names, "quantization.nvfp4_quantization_utils"):
        full = f"{ours.__name__}.{name}"
        if (found := _found(full)) is not None:
            found.__dict__["__getattr__"] = partial(_Absent.__getattr__, _Absent(full))
            continue
        module: Any = _declarations() if name.endswith("variants") else _Absent(full)
        module.__path__ = []
        sys.modules[full] = module
        parent, _, last = full.rpartition(".")
        setattr(sys.modules[parent], last, module)
    cutile: Any = sys.modules[f"{ours.__name__}.cutile.cutile_common"]
    cutile.is_cuda_tile_available = lambda: False
    ours.utils.GPUArchitectureError = type("GPUArchitectureError", (Exception,), {})  # type: ignore[attr-defined]
    utils: Any = sys.modules[f"{ours.__name__}.jit.utils"]
    if isinstance(utils, _Absent):
        utils.__dict__["filename_safe_dtype_map"] = {
            torch.float16: "f16",
            torch.bfloat16: "bf16",
            torch.float8_e4m3fn: "e4m3",
            torch.float8_e5m2: "e5m2",
        }


class _Nothing:
    """Replaces a stream, an event or a context: every call does nothing."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...
    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_error: object) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_arguments, **_options: None


class _Properties:
    """A GPU's reported properties: its memory is never full. A test that needs more is skipped."""

    total_memory = 2**40

    def __getattr__(self, name: str) -> Any:
        pytest.skip("asks a GPU about itself")


def _skip(reason: str) -> Callable[..., None]:
    return lambda *_arguments, **_options: pytest.skip(reason)


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    for name in (
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_device",
        "set_per_process_memory_fraction",
    ):
        setattr(cuda, name, lambda *_arguments: None)
    for name in ("Stream", "Event", "stream", "device", "current_stream"):
        setattr(cuda, name, _Nothing)
    cuda.CUDAGraph = cuda.graph = _skip("CUDA graphs need a GPU")
    cuda.get_device_properties = lambda *_arguments: _Properties()
    cuda.memory_reserved = lambda *_arguments: 0
    cuda.mem_get_info = lambda *_arguments: (MAX_CPU_BYTES, MAX_CPU_BYTES)
    cuda.get_device_capability = lambda *_arguments: (9, 0)
    run_process = subprocess.run

    def run(command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, list | tuple) and command[0] == sys.executable:
            pytest.skip("starts a process that looks for a GPU")
        return run_process(command, *arguments, **options)

    subprocess.run = run  # type: ignore[assignment]
    utils: Any = ours.utils
    utils.get_compute_capability = lambda _device: (9, 0)


_stand_in_for_jit()
ours.__path__.append(str(Path(__file__).with_name("modules")))  # FlashInfer's traces
if ON_CPU:
    _stand_in_for_cuda()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CPU_BYTES, MAX_CPU_BYTES))


def set_gpu_memory(gib: float) -> None:
    """Limits the GPU memory of this process; 0: no limit. Unused memory is released."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory) if gib else 1.0
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    if GPU_MEMORY:
        set_gpu_memory(GPU_MEMORY)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory was too small; assert_close turns that into another error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A case that exceeds its process's memory limit runs once more without the limit.

    Only one such case runs at a time.
    """
    try:
        return (yield)
    except Exception as error:
        if not GPU_MEMORY or not is_out_of_memory(error):
            raise
    # they keep the case's allocations alive
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()
    with Path(__file__).with_name("memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.manual_seed(0)
        set_gpu_memory(0)
        try:
            item.runtest()
        finally:
            set_gpu_memory(GPU_MEMORY)


def tokens_of(parameters: dict[str, Any]) -> int:
    """The approximate size of a case: requests times their longest length, or times a thousandth of the
    vocabulary.
    """
    numbers = {name: value for name, value in parameters.items() if isinstance(value, int)}
    lengths = [value for name, value in numbers.items() if "len" in name]
    return numbers.get("batch_size", 1) * max([*lengths, numbers.get("vocab_size", 0) // 1000, 1])


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def captures_graph(item: pytest.Item) -> bool:
    return bool(parameters_of(item).get("use_cuda_graph")) or "cuda_graph" in item.name


def sample_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Some of a file's cases, in their order."""
    chosen = random.Random(OPTIONS["seed"]).sample(range(len(cases)), min(OPTIONS["sample"], len(cases)))
    return [cases[i] for i in sorted(chosen)]


def error_behind_skip(error: BaseException | None) -> Exception | None:
    """The error that a test caught and turned into a skip ("... unavailable"); it decides the outcome."""
    if isinstance(error, pytest.skip.Exception) and isinstance(error.__context__, Exception):
        return error.__context__
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    total = len(items)
    most = OPTIONS["max_tokens"] or math.inf
    kept = [item for item in items if not (ON_CPU and captures_graph(item))]
    # if all are larger, the smallest
    most = max(most, min((tokens_of(parameters_of(item)) for item in kept), default=0))
    kept = [item for item in kept if tokens_of(parameters_of(item)) <= most]
    if OPTIONS["sample"]:
        kept = [
            item for _file, cases in groupby(kept, lambda item: item.path) for item in sample_of(list(cases))
        ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    _write({"cases": total, "taken": len(kept)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcome = report.outcome
    error = call.excinfo.value if call.excinfo is not None else None
    if report.skipped and (caught := error_behind_skip(error)) is not None:
        error, outcome = caught, "failed"
        report.outcome = "failed"
        report.longrepr = f"skipped itself over {type(caught).__name__}: {caught}"
    text = str(error) if error is not None else ""
    # of a process that the test started
    is_refusal = isinstance(error, NotImplementedError) or "NotImplementedError: " in text
    if report.failed and is_refusal and NOT_SUPPORTED in text:
        outcome = "not supported"  # type: ignore[assignment]
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, text)
    if (
        report.failed
        and "DID NOT RAISE" in text
        and (reason := TESTS_OF_LIMITS.get(getattr(item, "originalname", item.name)))
    ):
        outcome, text = NO_SUCH_LIMIT, reason  # type: ignore[assignment]
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, text)
    if (
        report.failed
        and ON_CPU
        and ("can't allocate memory" in text or "bad_alloc" in text or isinstance(error, MemoryError))
    ):
        text = f"needs more than {MAX_CPU_BYTES >> 30} GiB of memory"
        outcome = report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, text)
    if report.failed and is_out_of_memory(error):
        outcome = TOO_LARGE  # type: ignore[assignment]
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, text)
    if report.when == "call" or outcome != "passed":
        _write(
            {
                "case": item.nodeid,
                "outcome": outcome,
                "why": text.split(NOT_SUPPORTED)[0].strip()[:300] if outcome != "passed" else "",
            }
        )
    return report


def _write(line: dict[str, Any]) -> None:
    with open(OPTIONS["results"], "a") as file:
        file.write(json.dumps(line) + "\n")
