"""Libraries that tests compile with g++ into the user's cache: compiled once for all workers, and again if an
input file has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
# a quarter of the time, for 200 libraries
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def compile_object(
    target: Path,
    source: Path,
    options: Sequence[str],
    includes: Sequence[Path],
    header: str | None = None,
    precompiled: Path | None = None,
) -> Path:
    """Compiles `target`, unless it exists.

    Args:
        options: of g++.
        includes: folders to search for headers, in this order.
        header: text of a kernels.h, found after all others.
        precompiled: a header that the source includes before anything else, as `<name>`. It is compiled once,
            into the folder of `target`, for all sources with these options.

    Raises:
        subprocess.CalledProcessError: g++ fails; it has said why.
    """
    if not target.exists():
        key = [_compiler_version(), *options, *map(_name, includes), _name(source), header]
        entry = _cache_folder() / f"{source.stem}-{_sha256(json.dumps(key).encode())[:32]}"
        entry.mkdir(parents=True, exist_ok=True)
        with (entry / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_current(entry):
                common = (
                    None
                    if precompiled is None
                    else _precompiled(target.parent, precompiled, options, includes)
                )
                _compile(entry, source, options, includes, header, common)
            partial = _partial(target)
            shutil.copyfile(entry / "made.o", partial)
        partial.rename(target)
    return target


def with_intrinsics(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """A compiler command that reads a precompiled <immintrin.h> before the source: a variant for a CPU
    compiles in a fifth of the time. The precompiled header names no file of a checkout, so it is kept in the
    cache.
    """
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
    made = _cache_folder() / f"intrinsics-{_sha256(json.dumps([*command, version, *options]).encode())[:32]}"
    made.mkdir(parents=True, exist_ok=True)
    header, target = made / "intrinsics.h", made / "intrinsics.h.gch"
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            header.write_text("#include <immintrin.h>\n")
            partial = _partial(target)
            subprocess.run(
                [*command, *options, "-x", "c++-header", str(header), "-o", str(partial)], check=True
            )
            partial.rename(target)
    return [*command, "-include", str(header)]


def link(target: Path, objects: Sequence[Path]) -> Path:
    """Links `target`, a shared library, unless it exists."""
    if not target.exists():
        partial = _partial(target)
        subprocess.run(
            [str(COMPILER), "-shared", *LINKER, *map(str, objects), "-o", str(partial)], check=True
        )
        partial.rename(target)
    return target


def _partial(target: Path) -> Path:
    """Renamed when complete, since workers may share its folder."""
    return target.with_name(f"{target.name}.{os.getpid()}")


def _precompiled(folder: Path, header: Path, options: Sequence[str], includes: Sequence[Path]) -> Path:
    """A folder with `header`, precompiled.

    Not kept in the cache, since it names the files of this checkout.
    """
    made = folder / f"{header.stem}-{_sha256(json.dumps(options).encode())[:16]}"
    made.mkdir(exist_ok=True)
    target = made / f"{header.name}.gch"
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = _partial(target)
            folders = [f"-I{include}" for include in includes]
            dependencies = ["-MMD", "-MF", str(made / "made.d")]
            subprocess.run(
                [
                    str(COMPILER),
                    *options,
                    *folders,
                    "-x",
                    "c++-header",
                    str(header),
                    "-o",
                    str(partial),
                    *dependencies,
                ],
                check=True,
            )
            partial.rename(target)
    return made


def _compile(
    entry: Path,
    source: Path,
    options: Sequence[str],
    includes: Sequence[Path],
    header: str | None,
    common: Path | None,
) -> None:
    digests = _digests()  # before the compiler reads the files
    made_of, dependencies = entry / "made_of.json", entry / "made.d"
    made_of.unlink(missing_ok=True)
    if header is not None:
        (entry / "kernels.h").write_text(header)
    # the compiler does not list its headers as read
    precompiled = [] if common is None else [common]
    folders = [f"-I{folder}" for folder in (*precompiled, *includes, entry)]
    subprocess.run(
        [
            str(COMPILER),
            *options,
            *folders,
            "-c",
            str(source),
            "-o",
            str(entry / "made.o"),
            "-MMD",
            "-MF",
            str(dependencies),
        ],
        check=True,
    )
    read = {
        name
        for file in (dependencies, *(folder / "made.d" for folder in precompiled))
        for name in _names_in(file)
    }
    made_of.write_text(json.dumps({name: digests[name] for name in read & digests.keys() | {""}}))


def _names_in(dependencies: Path) -> set[str]:
    """Names of the files that g++ has read, from its make dependencies."""
    return {_name(Path(path)) for path in dependencies.read_text().replace("\\\n", " ").split()[1:]}


def _is_current(entry: Path) -> bool:
    made_of = entry / "made_of.json"
    return made_of.exists() and json.loads(made_of.read_text()).items() <= _digests().items()


@cache
def _digests() -> dict[str, str]:
    """Digests of the files that may be included, by name. The key "" has the digest of these names, since a
    new file may shadow another one.
    """
    folders = (ROOT / "csrc", ROOT / "tests" / "csrc")
    files = {
        _name(path): path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cuh", ".cpp", ".cu")
    }
    return {"": _sha256(json.dumps(list(files)).encode())} | {
        name: _sha256(path.read_bytes()) for name, path in files.items()
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _name(path: Path) -> str:
    """The name of a file, the same in every checkout."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@cache
def _compiler_version() -> str:
    return subprocess.run([str(COMPILER), "--version"], check=True, capture_output=True, text=True).stdout


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backend" / "tests"
