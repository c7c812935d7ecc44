"""The cache of compiled kernels: which entries are trusted, which are rebuilt, and the message if nothing can
be stored.
"""

from __future__ import annotations

import grp
import os
import pwd
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_users import messages, mode, unprivileged
from fake_nvcc import FATBIN, FakeKernels, cubin, fake_nvcc

from attn_backend.jit import compilers, cubins, kernel_cache
from attn_backend.jit.manifest import ARCHS

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files away, or become another user"
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    return FakeKernels(tmp_path, monkeypatch)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# What is whole


def test_whole_cubins_and_fatbins() -> None:
    assert compilers.damage(cubin()) == ""
    assert compilers.damage(cubin(b"")) == ""
    assert compilers.damage(FATBIN) == ""


def test_what_is_cut_anywhere_is_no_cubin() -> None:
    for whole in (cubin(), FATBIN):
        assert all(compilers.damage(whole[:length]) for length in range(len(whole)))


def test_a_cubin_whose_table_comes_first_is_cut_in_its_sections() -> None:
    whole = bytearray(cubin(b"code" * 100))
    table = whole[-3 * 64 :]
    table[64 + 24 : 64 + 32] = (64 + len(table)).to_bytes(8, "little")  # offset of the section
    whole[40:48] = (64).to_bytes(8, "little")
    whole[64:] = table + b"code" * 100
    assert compilers.damage(bytes(whole)) == ""
    assert compilers.damage(bytes(whole[:-1])) == "is truncated"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"<html>not found</html>", "is neither a cubin nor a fatbin"),
        (bytes(4096), "is neither a cubin nor a fatbin"),
        (Path("/proc/self/exe").read_bytes()[:4096], "is an ELF file for another machine than a GPU"),
    ],
)
def test_what_is_something_else_is_named(content: bytes, reason: str) -> None:
    assert compilers.damage(content) == reason


@pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_compiler_makes_is_whole_and_truncation_is_noticed(arch: str) -> None:
    content = cubins.compile_kernel("append", arch)[0].read_bytes()
    assert compilers.damage(content) == ""
    assert all(
        compilers.damage(content[:length]) for length in (*range(0, len(content), 97), len(content) - 1)
    )


# What is believed


def test_what_is_whole_is_used_and_not_compiled_again(fake: FakeKernels) -> None:
    with umask(0o077):
        path, report = cubins.compile_kernel("k", "sm_90a")
    assert path.read_bytes() == cubin()
    assert report == "a report\n"
    assert {mode(file) for file in path.parent.iterdir()} == {0o644}, "readable for those who share the cache"
    assert cubins.compile_kernel("k", "sm_90a") == (path, report)
    assert cubins.find_kernel("k", "sm_90a") == path
    assert fake.runs() == 1
    assert fake.files() == [path.name, path.with_suffix(".txt").name]


def test_folders_are_writable_for_nobody_else_whatever_the_umask(fake: FakeKernels) -> None:
    with umask(0):
        path, _ = cubins.compile_kernel("k", "sm_90a")
    assert mode(path.parent) == mode(fake.cache) == 0o755
    assert kernel_cache.fault(path) == ""


def another(path: Path) -> None:
    """A complete cubin, but another than the compiled one."""
    path.write_bytes(cubin(b"somebody's code"))


def link(path: Path) -> None:
    target = path.parent.parent / "somewhere"
    path.rename(target)
    path.symlink_to(target)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[70] ^= 1  # in the code
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is truncated"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "garbage": (lambda path: path.write_bytes(b"garbage" * 99), "is neither a cubin nor a fatbin"),
    "flipped": (flip, "has another SHA-256"),
    "another": (another, "has another SHA-256"),
    "link": (link, "is a link"),
    "dangling link": (dangling, "is a link"),
    "FIFO": (fifo, "is not a file"),
    "too large": (lambda path: os.truncate(path, 1 << 40), "is too large"),
    "missing": (Path.unlink, "cannot be read: No such file"),
    "no digest": (lambda path: path.with_suffix(".txt").unlink(), "cannot be read: No such file"),
    "no digest in the report": (
        lambda path: path.with_suffix(".txt").write_text("a report\n"),
        "has another SHA-256",
    ),
    "another report": (
        lambda path: path.with_suffix(".txt").write_text(path.with_suffix(".txt").read_text() + "more"),
        "has another SHA-256",
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_was_damaged_or_planted_is_compiled_again(how: str, fake: FakeKernels) -> None:
    spoil, reason = SPOILED[how]
    path, report = cubins.compile_kernel("k", "sm_90a")
    spoil(path)
    assert reason in kernel_cache.fault(path)
    assert cubins.find_kernel("k", "sm_90a") == path
    assert (path.read_bytes(), path.is_symlink()) == (cubin(), False)
    assert kernel_cache.fault(path) == ""
    assert cubins.compile_kernel("k", "sm_90a") == (path, report)
    assert fake.runs() == 2


def test_a_link_is_replaced_and_what_it_led_to_is_left_alone(fake: FakeKernels) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    precious = fake.folder / "precious"
    precious.write_text("text")
    path.unlink()
    path.symlink_to(precious)
    cubins.compile_kernel("k", "sm_90a")
    assert precious.read_text() == "text"


def test_a_folder_where_the_file_belongs_is_named(fake: FakeKernels) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    path.unlink()
    path.mkdir()
    with pytest.raises(RuntimeError, match=f"kept in {path.parent}: Is a directory; set ATTN_BACKEND_CACHE"):
        cubins.compile_kernel("k", "sm_90a")
    assert fake.files() == [path.with_suffix(".txt").name]


def compiled_in_a_process(_: int) -> tuple[str, bytes]:
    path = cubins.compile_kernel("k", "sm_90a")[0]
    return str(path), path.read_bytes()


def test_processes_that_need_the_same_kernel_compile_it_once(fake: FakeKernels) -> None:
    fake_nvcc(fake.nvcc, f"sleep 0.3; cp {fake.folder}/good $out; echo a report")
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        results = list(pool.map(compiled_in_a_process, range(4)))
    assert fake.runs() == 1
    assert {content for _, content in results} == {cubin()}
    (path,) = {Path(path) for path, _ in results}
    assert kernel_cache.fault(path) == ""
    assert fake.files() == [path.name, path.with_suffix(".txt").name]


# Whose files are used


@pytest.mark.parametrize("what", ["cache", "folder", "cubin", "report"])
@pytest.mark.parametrize(
    "how", ["writable by everybody", pytest.param("belongs to another user (4242)", marks=as_root)]
)
def test_where_others_may_write_a_private_folder_is_taken(
    what: str, how: str, fake: FakeKernels, caplog: pytest.LogCaptureFixture
) -> None:
    fake.sources["other"] = "// another kernel\n"
    path, _ = cubins.compile_kernel("k", "sm_90a")
    cubins.compile_kernel("other", "sm_90a")
    wrong = {"cache": fake.cache, "folder": path.parent, "cubin": path, "report": path.with_suffix(".txt")}[
        what
    ]
    if how == "writable by everybody":
        wrong.chmod(0o777)
    else:
        os.chown(wrong, 4242, -1)
    assert kernel_cache.fault(path).startswith(f"{wrong} ")
    assert how in kernel_cache.fault(path)

    private = fake.temporary / f"attn_backend-{os.geteuid()}"
    found = cubins.find_kernel("k", "sm_90a")
    assert found == private / "sm_90a" / path.name
    assert mode(private) == 0o700
    assert kernel_cache.fault(found) == ""
    cubins.find_kernel("other", "sm_90a")
    (message,) = messages(caplog)
    assert f"{wrong} " in message
    assert how in message
    assert f"instead: {private}" in message
    assert "ATTN_BACKEND_CACHE" in message
    assert path.read_bytes() == cubin(), "what is not ours is left alone"
    runs = fake.runs()
    assert cubins.compile_kernel("k", "sm_90a")[0] == found
    assert fake.runs() == runs, "the private folder is a cache, too"


GROUPS = {  # name and members of the group, whether it is the user's primary group; trusted
    "private": ("me", [], True, True),
    "private, the user is a member": ("me", ["me"], True, True),
    "shared": ("me", ["me", "somebody"], True, False),
    "of another name": ("developers", [], True, False),
    "of another number": ("me", [], False, False),
    "unknown": (None, [], True, False),
}


@pytest.mark.parametrize("what", ["cache", "folder", "cubin", "report"])
@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_may_write_is_used_if_the_group_is_the_users_own(
    group: str, what: str, fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    wrong = {"cache": fake.cache, "folder": path.parent, "cubin": path, "report": path.with_suffix(".txt")}[
        what
    ]
    wrong.chmod(0o775)
    name, members, is_first, trusted = GROUPS[group]
    groups = {} if name is None else {wrong.stat().st_gid: SimpleNamespace(gr_name=name, gr_mem=members)}
    monkeypatch.setattr(kernel_cache.grp, "getgrgid", groups.__getitem__)
    monkeypatch.setattr(
        kernel_cache.pwd,
        "getpwuid",
        lambda uid: SimpleNamespace(pw_name="me", pw_gid=wrong.stat().st_gid + (not is_first)),
    )
    fault = kernel_cache.fault(path)
    assert fault == "" if trusted else fault.startswith(f"{wrong} is writable by its group (")
    found = cubins.find_kernel("k", "sm_90a")
    assert found.is_relative_to(fake.cache if trusted else fake.temporary)
    assert fake.runs() == 2 - trusted


def test_what_is_made_under_a_umask_of_2_is_used(fake: FakeKernels) -> None:
    with umask(0o002):
        fake.cache.mkdir()
        path, _ = cubins.compile_kernel("k", "sm_90a")
    assert mode(fake.cache) == 0o775
    assert mode(path.parent) == 0o755
    user = pwd.getpwuid(os.geteuid())
    is_private = grp.getgrgid(user.pw_gid).gr_name == user.pw_name
    assert path.is_relative_to(fake.cache) is is_private


@as_root
def test_a_link_that_somebody_else_made_is_not_followed(fake: FakeKernels) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    link(path)
    os.chown(path, 4242, -1, follow_symlinks=False)
    assert "belongs to another user (4242)" in kernel_cache.fault(path)
    assert cubins.compile_kernel("k", "sm_90a")[0].is_relative_to(fake.temporary)


def test_what_root_compiled_is_for_all(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    owner = path.stat().st_uid
    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: owner + 1)
    assert ("belongs to another user" in kernel_cache.fault(path)) == (owner != 0)


@pytest.mark.parametrize("how", ["readable", "link", "file"])
def test_a_private_folder_that_is_not_private_is_refused(how: str, fake: FakeKernels) -> None:
    private = fake.temporary / f"attn_backend-{os.geteuid()}"
    if how == "readable":
        private.mkdir(mode=0o755)
    elif how == "link":
        (fake.folder / "elsewhere").mkdir(mode=0o700)
        private.symlink_to(fake.folder / "elsewhere")
    else:
        private.write_text("")
    fake.cache.mkdir()
    fake.cache.chmod(0o777)
    with pytest.raises(
        RuntimeError, match=f"{fake.cache} is writable by everybody, and .*{private}.*set ATTN_BACKEND_CACHE"
    ):
        cubins.compile_kernel("k", "sm_90a")
    assert fake.runs() == 0


# If nothing can be stored


def test_a_cache_that_is_a_file_is_named(fake: FakeKernels) -> None:
    fake.cache.write_text("mine")
    with pytest.raises(
        RuntimeError,
        match=f"kept in {fake.cache}/sm_90a: a file is in its place; set ATTN_BACKEND_CACHE to a folder",
    ):
        cubins.compile_kernel("k", "sm_90a")
    assert fake.cache.read_text() == "mine"
    assert fake.runs() == 0


@pytest.mark.parametrize("made", [False, True])
def test_a_cache_that_cannot_be_written_is_named_before_anything_is_compiled(
    made: bool, fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_the_key(fake, monkeypatch)
    (fake.cache / "sm_90a").mkdir(parents=True)
    if not made:
        shutil.rmtree(fake.cache)
    closed = fake.cache / "sm_90a" if made else fake.folder
    closed.chmod(0o555)
    try:
        with (
            unprivileged(fake.folder),
            pytest.raises(RuntimeError, match=r"Permission denied; set ATTN_BACKEND_CACHE to a folder"),
        ):
            cubins.compile_kernel("k", "sm_90a")
    finally:
        closed.chmod(0o755)
    assert fake.runs() == 0
    assert fake.files() == []


def know_the_key(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed package, which the key hashes, may be unreadable for another user."""
    kept = cubins.cached_kernel("k", "sm_90a", str(fake.nvcc))
    monkeypatch.setattr(cubins, "cached_kernel", lambda *_: kept)


def test_a_cache_of_roots_that_cannot_be_written_is_read(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_the_key(fake, monkeypatch)
    path, _ = cubins.compile_kernel("k", "sm_90a")
    path.parent.chmod(0o555)
    try:
        with unprivileged(fake.folder):
            assert cubins.find_kernel("k", "sm_90a") == path
    finally:
        path.parent.chmod(0o755)
    assert fake.runs() == 1


def test_a_full_cache_is_named_and_nothing_stays_behind(fake: FakeKernels) -> None:
    target = fake.cache / "sm_90a" / "k-0.cubin"
    kernel_cache.prepare(target)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as on a full disk, a file cannot grow
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(
            RuntimeError,
            match=f"kept in {target.parent}: File too large; set ATTN_BACKEND_CACHE to a folder .* has room",
        ):
            kernel_cache.store(target, cubin(), "a report" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fake.files() == []


def test_no_home_directory_is_named(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("ATTN_BACKEND_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        RuntimeError, match="there is no home directory to keep compiled kernels in: set ATTN_BACKEND_CACHE"
    ):
        cubins.find_kernel("k", "sm_90a")
