"""Seconds until a variant's kernel is ready: compiled with nvcc, NVRTC or the host's C++ compiler, found in
the cache, in races and after accidents. Needs no GPU.

    python -m benchmarks.compile [--case TEXT ...] [--repeats N] [--nvrtc FOLDER] \\
        [--json FILE] [--markdown FILE]

The variant is a soft cap for heads of 128 in bfloat16, with the Hopper kernel or the CPU kernel. Each
measurement starts a new process with an empty cache. It times only the call that finds the kernel, not the
start of Python and its imports. The table shows the smallest of all repeats, because other load can only add
time.

If torch did not install NVRTC, pass --nvrtc with a folder that holds NVIDIA's wheel
(`pip install --no-deps --target FOLDER nvidia-cuda-nvrtc`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import number, options, save, table, wanted

HIDDEN = {"nvcc": "compilers.nvcc_candidates = lambda: []", "NVRTC": "compilers.nvrtc = lambda: None"}
CHILD = """
import json, os, sys, time
import elftools.elf.elffile
from attn_backend.jit import compilers, cubins, manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.native import library
from attn_backend.variants import builtin
{hidden}
variant = builtin.soft_cap(30.0)
shape = manifest.KernelShape("bf16", HeadDims.of(128))
kernel = manifest.variant_kernels("sm_90a", manifest.DESIGNS["hopper"], shape, variant)["attention"]
isa = library().current_isa()
print("ready", flush=True)
sys.stdin.readline()
if {as_nobody}:
    os.seteuid(65534)  # root may write everywhere
begin = time.perf_counter()
try:
    if {on_cpu}:
        found = str(cubins.find_library(variant, isa, "bfloat16", 128))
    else:
        found = str(cubins.find_variant_kernel(variant, kernel, "sm_90a"))
except RuntimeError as error:
    found = f"RuntimeError: {{error}}"
print(json.dumps([time.perf_counter() - begin, found]))
"""


@dataclass(frozen=True)
class Found:
    """The result of a process. compiled: whether it compiled, according to its progress line."""

    seconds: float
    place: str
    said: str

    @property
    def compiled(self) -> bool:
        return "compiling variant" in self.said


class Child:
    """A process that looks for the kernel on command. hidden: compilers that it must not see."""

    def __init__(
        self, folder: Path, nvrtc: Path | None, *hidden: str, on_cpu: bool = False, as_nobody: bool = False
    ) -> None:
        program = CHILD.format(
            hidden="\n".join(HIDDEN[name] for name in hidden), on_cpu=on_cpu, as_nobody=as_nobody
        )
        environment = os.environ | {
            "ATTN_BACKEND_CACHE": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "CUDA_CACHE_DISABLE": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH", ""), *([str(nvrtc)] if nvrtc else [])])
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(self.process.communicate()[1])

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def found(self) -> Found:
        out, said = self.process.communicate()
        if self.process.returncode:
            raise RuntimeError(said)
        seconds, place = json.loads(out)
        return Found(seconds, place, said)


@contextmanager
def empty_cache() -> Iterator[Path]:
    """A folder for a cache and temporary files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "cache").mkdir()
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        yield folder


def find(folder: Path, nvrtc: Path | None, *hidden: str, **more: bool) -> Found:
    child = Child(folder, nvrtc, *hidden, **more)
    child.go()
    return child.found()


Case = Callable[[Path, Path | None], tuple[float, str]]


def cold(*hidden: str, on_cpu: bool = False) -> Case:
    def case(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
        found = find(folder, nvrtc, *hidden, on_cpu=on_cpu)
        if not found.compiled:
            raise RuntimeError(f"nothing was compiled: {found.place}\n{found.said}")
        return found.seconds, f"compiled, {Path(found.place).stat().st_size >> 10} KiB"

    return case


def warm(on_cpu: bool = False) -> Case:
    def case(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
        find(folder, nvrtc, on_cpu=on_cpu)
        found = find(folder, None, "nvcc", "NVRTC", on_cpu=on_cpu)
        return (
            found.seconds,
            "compiled" if found.compiled else "found, in a new process without a CUDA compiler",
        )

    return case


def race(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
    children = [Child(folder, nvrtc) for _ in range(2)]
    for child in children:
        child.go()
    found = [child.found() for child in children]
    same = "the same file" if len({one.place for one in found}) == 1 else "different files"
    return max(
        one.seconds for one in found
    ), f"{sum(one.compiled for one in found)} of 2 compiled; both got {same}"


def killed(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
    child = Child(folder, nvrtc)
    child.go()
    assert child.process.stderr is not None
    while "compiling variant" not in child.process.stderr.readline():
        pass
    time.sleep(0.5)
    child.process.send_signal(signal.SIGKILL)
    child.process.wait()
    found = find(folder, nvrtc)
    return found.seconds, "compiled again" if found.compiled else "not compiled"


def truncated(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
    entry = Path(find(folder, nvrtc).place)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    found = find(folder, nvrtc)
    is_whole = Path(found.place).read_bytes() == whole
    return (
        found.seconds,
        f"{'compiled again' if found.compiled else 'not compiled'}; the entry is "
        f"{'whole' if is_whole else 'damaged'}",
    )


def read_only(filled: bool) -> Case:
    def case(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
        if filled:
            find(folder, nvrtc)
        cache = folder / "cache"
        parts = [cache, *cache.rglob("*")]
        for path in parts:
            path.chmod(0o555 if path.is_dir() else 0o444)
        found = find(folder, nvrtc, as_nobody=os.geteuid() == 0)
        for path in parts:
            path.chmod(0o755 if path.is_dir() else 0o644)
        kept = (
            "in the cache"
            if found.place.startswith(str(cache))
            else "in a private folder, with a warning"
            if "private folder" in found.said
            else found.place
        )
        return found.seconds, f"{'compiled' if found.compiled else 'found'}; {kept}"

    return case


def no_compiler(folder: Path, nvrtc: Path | None) -> tuple[float, str]:
    found = find(folder, nvrtc, "nvcc", "NVRTC")
    return found.seconds, found.place.replace("\n", " ")


CASES: dict[str, Case] = {
    "nvcc, cold": cold("NVRTC"),
    "NVRTC, cold, nvcc hidden": cold("nvcc"),
    "warm": warm(),
    "two processes at once": race,
    "after a compile that was killed": killed,
    "over a truncated entry": truncated,
    "a filled cache that can only be read": read_only(filled=True),
    "an empty cache that can only be read": read_only(filled=False),
    "no compiler": no_compiler,
    "CPU, cold": cold(on_cpu=True),
    "CPU, warm": warm(on_cpu=True),
}


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--nvrtc", type=Path)
    arguments = parser.parse_args()
    lines = []
    for name, case in CASES.items():
        if not wanted(name, arguments):
            continue
        results = []
        for _ in range(arguments.repeats):
            with empty_cache() as folder:
                results.append(case(folder, arguments.nvrtc))
        what = sorted({text for _, text in results})
        lines.append(
            {"case": name, "seconds": min(seconds for seconds, _ in results), "what": "; or: ".join(what)}
        )
        print(lines[-1], flush=True)
        rows = [
            (str(line["case"]), number(float(str(line["seconds"])), 3), str(line["what"])) for line in lines
        ]
        save(
            arguments,
            table(["case", "seconds", "what happens"], rows),
            {"cores": os.cpu_count(), "lines": lines},
        )


if __name__ == "__main__":
    main()
