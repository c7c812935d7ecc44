"""The cache of compiled kernels: its location, its trusted entries, and how entries are written.

An entry consists of two files: KERNEL.cubin (or KERNEL.so for a CPU), and KERNEL.txt with the compiler's
output, after a SHA-256 of both. The digest detects damage, but not who wrote an entry. So an entry is used
only if nobody but this user and root can have written it.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..settings import Settings
from .compilers import damage

_MOST_BYTES = 256 << 20  # larger files are not read
_ADVICE = "set ATTN_BACKEND_CACHE to a folder of yours that you can write to and that has room"


def cache_dir() -> Path:
    """The folder of compiled cubins: ATTN_BACKEND_CACHE, or attn_backend/ in the user's cache folder.

    Raises:
        RuntimeError: the variable is not set, and there is no home directory.
    """
    try:
        return Settings.read().cache_folder()
    except RuntimeError as error:
        raise RuntimeError(f"there is no home directory to keep compiled kernels in: {_ADVICE}") from error


def place(cubin: Path) -> tuple[Path, str]:
    """The location of a cache entry. If others may write to `cubin`, it is a folder that they cannot enter,
    and the reason is returned as well.

    Raises:
        RuntimeError: the private folder cannot be made.
    """
    reason = _foreign(cubin)
    return (private_place(cubin, reason) if reason else cubin), reason


def private_place(cubin: Path, reason: str) -> Path:
    """The location of an entry if the cache cannot be used for this reason: in a private folder below the
    temporary one, which others cannot enter.

    Raises:
        RuntimeError: that folder cannot be made.
    """
    return _private_folder(reason) / cubin.parent.name / cubin.name


def fault(cubin: Path) -> str:
    """Why an entry of the cache is not trusted; "" if it is."""
    if reason := _foreign(cubin):
        return reason
    contents = []
    for path in _files(cubin):
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
                return (
                    f"{path} is "
                    f"{'a link' if path.is_symlink() else 'too large' if path.is_file() else 'not a file'}"
                )
            contents.append(path.read_bytes())
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    content, text = contents
    if damaged := damage(content, for_gpu=cubin.suffix != ".so"):
        return f"{cubin} {damaged}"
    digest, _, said = text.partition(b"\n")
    return (
        ""
        if digest == _digest(content, said)
        else f"{cubin} has another SHA-256 than it had when it was compiled"
    )


def report(cubin: Path) -> str:
    """The compiler's output for an entry that has no fault."""
    return cubin.with_suffix(".txt").read_bytes().partition(b"\n")[2].decode()


def prepare(cubin: Path) -> None:
    """Makes the folder of an entry and checks that files can be written there, before time is spent on
    compiling.

    Raises:
        RuntimeError: it cannot be made or written to.
    """
    with _explained(cubin.parent):
        cubin.parents[2].mkdir(parents=True, exist_ok=True)
        for folder in (cubin.parents[1], cubin.parent):
            # whatever the umask: not writable by a group or by others
            folder.mkdir(mode=0o755, exist_ok=True)
        with tempfile.TemporaryFile(dir=cubin.parent):
            pass


def store(cubin: Path, content: bytes, said: str) -> None:
    """Writes a cubin and the compiler's output to the cache, readable for all.

    Each file is replaced atomically: others read an entry without a fault, or one whose digest differs.

    Raises:
        RuntimeError: it cannot be written; nothing is left behind.
    """
    text = _digest(content, said.encode()) + b"\n" + said.encode()
    partial: dict[Path, str] = {}
    try:
        with _explained(cubin.parent):
            for path, data in zip(_files(cubin), (content, text), strict=True):
                handle, partial[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
                with open(handle, "wb") as file:
                    file.write(data)
                    os.fchmod(handle, 0o644)
            for path, written in partial.items():
                os.replace(written, path)
    finally:
        for written in partial.values():
            with contextlib.suppress(OSError):
                os.unlink(written)


@contextlib.contextmanager
def locked(cubin: Path, seconds: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Prevents other threads and processes from making the same entry meanwhile.

    A caller that had to wait must check again whether the entry exists.

    If another caller makes the entry, it calls on_wait and waits for at most `seconds`. If the file system
    has no locks, it does not wait: both make the entry, and the last one stays. The lock of a killed process
    is released.
    """
    lock = cubin.with_name(f".{cubin.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        yield
        return
    try:
        _wait_for_lock(handle, seconds, on_wait)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # waiting processes keep it open, and check for the entry once they get the lock
        os.close(handle)


def _wait_for_lock(handle: int, seconds: float, on_wait: Callable[[], None]) -> None:
    end, waited = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not waited:
                on_wait()
                waited = True
            if time.monotonic() > end:
                return
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return


def _files(cubin: Path) -> tuple[Path, Path]:
    return cubin, cubin.with_suffix(".txt")


def _digest(cubin: bytes, said: bytes) -> bytes:
    return f"SHA-256 {hashlib.sha256(cubin + said).hexdigest()}".encode()


def _foreign(cubin: Path) -> str:
    """Why an entry may be another user's work, judged by its folders and files (for a link, by its owner)."""
    for path, follow in [
        *((folder, True) for folder in cubin.parents[:2][::-1]),
        *((file, False) for file in _files(cubin)),
    ]:
        try:
            info = path.stat(follow_symlinks=follow)
        except OSError:
            continue  # unreadable; `fault` or `prepare` report why
        if info.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user ({info.st_uid})"
        if info.st_mode & stat.S_IWOTH and not stat.S_ISLNK(info.st_mode):
            return f"{path} is writable by everybody"
        if (
            info.st_mode & stat.S_IWGRP
            and not stat.S_ISLNK(info.st_mode)
            and not _is_private_group(info.st_gid, info.st_uid)
        ):
            return f"{path} is writable by its group ({_group_name(info.st_gid)})"
    return ""


def _is_private_group(gid: int, owner: int) -> bool:
    """Whether the group is the owner's user-private group without other members.

    Ubuntu and Fedora set a umask of 002 for such groups, so the group can write all files of the user.
    """
    try:
        user, group = pwd.getpwuid(owner), grp.getgrgid(gid)
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (gid, group.gr_name) and {*group.gr_mem} <= {user.pw_name}


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _private_folder(reason: str) -> Path:
    try:
        folder = Path(tempfile.gettempdir()) / f"attn_backend-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise RuntimeError(
            f"{reason}, and {error.filename or 'a folder in its place'} cannot be made: {error.strerror}; "
            f"{_ADVICE}"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise RuntimeError(f"{reason}, and others may enter {folder}, too: remove it, or {_ADVICE}")
    return folder


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise RuntimeError(
            f"compiled kernels cannot be kept in {folder}: a file is in its place; {_ADVICE}"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"compiled kernels cannot be kept in {folder}: {error.strerror}; {_ADVICE}"
        ) from error
