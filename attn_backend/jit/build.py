"""Compiles standard kernels ahead of time, in parallel.

It fails if a source does not compile, if registers spill, or if ptxas serializes wgmma.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import compilers, cubins, kernel_cache, progress
from .cubins import compile_kernel, nvcc, nvcc_version
from .manifest import ARCHS

_REGISTERS = re.compile(r"Used (\d+) registers")
# ptxas inserts a wait after each wgmma, because other code touches registers of wgmmas in flight
_SERIALIZED = "instructions are serialized"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled_bytes(report: str) -> int:
    """Bytes of local memory used for register spills, from the compiler's report."""
    return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(report))


def fault(report: str) -> str:
    """The problem that the compiler reports for a kernel; empty if none."""
    if spilled_bytes(report) > 0:
        return "SPILLS"
    return "SERIALIZES WGMMA" if _SERIALIZED in report else ""


def build(tasks: list[tuple[str, str]], jobs: int, out: Path | None) -> int:
    """Compiles kernels, given by name and arch. Copies them to `out/<arch>/<name>.cubin` if `out` is given.

    Returns the number of failures.
    """
    failures = 0

    def one(task: tuple[str, str]) -> tuple[str, str, float, str, Path | None]:
        name, arch = task
        start = time.monotonic()
        try:
            path, report = compile_kernel(name, arch)
        except RuntimeError as error:
            return name, arch, time.monotonic() - start, str(error), None
        return name, arch, time.monotonic() - start, report, path

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, task) for task in tasks]
        try:
            for name, arch, seconds, report, path in (
                future.result() for future in progress.tracked(futures, "compiling")
            ):
                if path is None:
                    failures += 1
                    print(f"{arch:8} {name:28} FAILED\n{report}", flush=True)
                    continue
                registers = max((int(n) for n in _REGISTERS.findall(report)), default=0)
                spills = spilled_bytes(report)
                verdict = fault(report)
                failures += bool(verdict)
                kib = path.stat().st_size >> 10
                print(
                    f"{arch:8} {name:28} {registers:4} registers {spills:5} spilled bytes {kib:6} KiB "
                    f"{seconds:6.1f} s  {verdict}".rstrip(),
                    flush=True,
                )
                if out is not None:
                    target = out / arch / f"{name}.cubin"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        except BaseException:  # KeyboardInterrupt, for example, does not reach the compilers
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                compilers.stop_compilers()
                time.sleep(0.05)
            raise
    return failures


def add_arguments(parser: argparse.ArgumentParser, jobs: int, archs: Sequence[str] | None = ARCHS) -> None:
    """Adds the options of `run`. `jobs`: default number of parallel compilers. `archs`: valid values of
    --arch; None: the caller checks them.
    """
    others = "" if archs else "; for variants also cpu, sm_100, ..."
    parser.add_argument(
        "--arch", action="append", choices=archs, help=f"{', '.join(ARCHS)}{others}; repeatable; default: all"
    )
    parser.add_argument(
        "--jobs", type=_at_least_1, default=jobs, help="compilers to run in parallel (%(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="also copy the cubins to OUT/<arch>/<name>.cubin; `pip install .` ships build/cubins",
    )


def run(arguments: argparse.Namespace, kernels: Callable[[str], Iterable[str]] | None = None) -> int:
    """Compiles the kernels that `kernels` lists for each arch, or all. Returns the exit status."""
    archs = arguments.arch or list(ARCHS)
    try:
        compiler = nvcc()
        if compiler is None:
            raise RuntimeError(compilers.no_nvcc())
        nvcc_version(compiler)  # report a broken compiler once, not per kernel
        for arch in archs:
            kernel_cache.prepare(kernel_cache.place(kernel_cache.cache_dir() / arch / "any.cubin")[0])
        tasks = [(name, arch) for arch in archs for name in (kernels or cubins.kernel_sources)(arch)]
        return 1 if build(tasks, arguments.jobs, arguments.out) else 0
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, must be at least 1")
    return number
