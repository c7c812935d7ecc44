"""The Python sources of the engines' releases, for the test that compares the adapters with all of them. pip
fetches them once into the cache.

python -m integration.engine_sources          # fetches what is missing; about 600 MB, of which 60 MB are kept
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attn_backend.releases import RELEASES
from integration.cache import cache_folder, cached_folder

# The kept files: everything that the adapters may use.
KEPT = {
    "vllm": (
        *(
            "v1/",
            "config/",
            "model_executor/layers/attention",
            "model_executor/custom_op.py",
            "plugins/",
            "platforms/",
            "envs.py",
            "logger.py",
            "sampling_params.py",
        ),
        *(
            "distributed/parallel_state.py",
            "model_executor/layers/quantization/utils/quant_utils.py",
            "utils/torch_utils.py",
        ),
    ),
    "sglang": (
        *(
            f"srt/{name}/"
            for name in (
                "layers",
                "mem_cache",
                "model_executor",
                "sampling",
                "speculative",
                "plugins",
                "arg_groups",
                "configs",
            )
        ),
        *(
            f"srt/{name}"
            for name in (
                "managers/",
                "utils/",
                "server_args.py",
                "runtime_context.py",
                "models/deepseek_common/",
                "models/gemma4",
            )
        ),
        *(
            f"srt/models/{name}.py"
            for name in (
                "gpt_oss",
                "gemma3_mm",
                "llama4",
                "whisper",
                "bert",
                "baichuan",
                "deepseek_v2",
                "dflash",
                "mimo_v2",
            )
        ),
        "kernels/ops/speculative/spec_tree.py",
    ),
}
ARCHIVE = "sources.zip"
LISTS = {"vllm": "-3", "sglang": "-3"}  # a longer list has another name in the cache

# vLLM's wheels are ten times as large as its source distribution, and pip wants the source's metadata before
# it keeps it. This build backend returns PKG-INFO and builds nothing.
BUILD_BACKEND = """
import shutil
from email.parser import HeaderParser
from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    about = HeaderParser().parsestr(Path("PKG-INFO").read_text())
    info = Path(metadata_directory) / f"{about['Name']}-{about['Version']}.dist-info"
    info.mkdir()
    shutil.copy("PKG-INFO", info / "METADATA")
    return info.name
"""


class CannotFetch(RuntimeError):
    """There is no network, or the package index lacks the release; the message has pip's last lines."""


def releases_to_check() -> dict[str, tuple[str, ...]]:
    """The releases that tests compare with the adapters.

    Environment:
        ATTN_CHECK_RELEASES: other releases than the supported ones, such as `vllm==0.34.0 sglang==0.5.24`.
    """
    others = [word.split("==") for word in os.environ.get("ATTN_CHECK_RELEASES", "").split()]
    if not others:
        return dict(RELEASES)
    return {engine: tuple(version for name, version in others if name == engine) for engine in RELEASES}


def sources(engine: str, version: str, whole: bool = False) -> Path:
    """A zip file with the release's sources, fetched if it is not in the cache.

    Args:
        whole: keep all Python files, not only the files of KEPT.

    Raises:
        CannotFetch: see there.
    """
    name = f"{_name(engine, version)}{'-whole' if whole else ''}"
    return cached_folder(name, lambda folder: _fetch(engine, version, folder, whole)) / ARCHIVE


def is_cached(engine: str, version: str) -> bool:
    return (cache_folder() / _name(engine, version)).is_dir()


def _name(engine: str, version: str) -> str:
    return f"engine_sources/{engine}-{version}{LISTS[engine]}"


def _fetch(engine: str, version: str, folder: Path, whole: bool = False) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--dest",
            scratch,
            f"{engine}=={version}",
        ]
        if engine == "vllm":
            backend = Path(scratch, "backend", "setuptools")
            backend.mkdir(parents=True)
            (backend / "__init__.py").touch()
            (backend / "build_meta.py").write_text(BUILD_BACKEND)
            command = [
                "env",
                f"PYTHONPATH={backend.parent}",
                *command,
                "--no-binary",
                engine,
                "--no-build-isolation",
            ]
        else:
            command += [
                "--only-binary",
                engine,
                "--python-version",
                "3.11",
                "--platform",
                "manylinux_2_34_x86_64",
            ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        archives = [path for path in Path(scratch).iterdir() if path.suffix in (".gz", ".whl")]
        if done.returncode != 0 or not archives:
            raise CannotFetch(
                f"{engine} {version} cannot be fetched: " + " / ".join(done.stderr.strip().splitlines()[-3:])
            )
        _keep(engine, archives[0], folder / ARCHIVE, whole)


def _keep(engine: str, archive: Path, kept: Path, whole: bool = False) -> None:
    names = ("",) if whole else KEPT[engine]

    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as out:

        def keep(path: str, text: bytes) -> None:
            if path.endswith(".py") and path.startswith(tuple(f"{engine}/{name}" for name in names)):
                out.writestr(path, text)

        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                for path in wheel.namelist():
                    keep(path, wheel.read(path))
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.name.endswith(".py") else None
                    if file is not None:
                        keep(member.name.partition("/")[2], file.read())


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with ThreadPoolExecutor(2) as pool:
        for path in pool.map(
            lambda release: sources(*release),
            [(engine, version) for engine, versions in RELEASES.items() for version in versions],
        ):
            print(path)


if __name__ == "__main__":
    main()
