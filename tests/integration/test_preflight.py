"""The checks of the machine: each problem is named with its fix, and all are listed together."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_backend import machine
from attn_backend.machine import Problem, cache_folder
from attn_backend.settings import Settings
from integration import preflight
from integration.preflight import Space

PYTHONS = preflight.PYTHONS
ROOT = Path(__file__).resolve().parents[2]
NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement torch (from versions: "
    "none)\nERROR: No matching distribution found for torch"
)
FOUND = "torch (2.13.0)\nAvailable versions: 2.13.0, 0.32, 2.12.0\n"
BROKEN = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError('<connection object at 0x1>: no route')': /simple/vllm/\n"
)


@pytest.fixture(autouse=True)
def a_machine_that_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "PYTHONS", (sys.version_info[:2],))
    monkeypatch.setattr(preflight, "ask_pip", lambda *arguments: (0, ""))
    monkeypatch.setattr(preflight.compilers, "cpp_compiler", lambda: ["/usr/bin/g++"])
    monkeypatch.setattr(preflight.network_problem, "__defaults__", (lambda *arguments: (0, ""),))
    monkeypatch.chdir(tmp_path)


def problems(**arguments: object) -> list[str]:
    """Subjects of the problems that check() lists."""
    with pytest.raises(preflight.NotReadyError) as raised:
        preflight.check(**arguments)  # type: ignore[arg-type]
    text = str(raised.value)
    assert "nothing was downloaded" in text
    listed = re.findall(r"^  - ([\w+ ]+): .*\n      -> .", text, re.MULTILINE)
    assert len(listed) == text.count("  - ")
    return listed


def test_a_machine_that_is_ready_passes(tmp_path: Path) -> None:
    preflight.check(
        environment=tmp_path / "venv", needs=[Space(tmp_path, 1, "x", "y")], requirements=["torch"]
    )


def test_all_problems_are_listed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PYTHONS", ((2, 7),))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight.compilers, "cpp_compiler", lambda: None)
    monkeypatch.setattr(preflight.compilers, "nvcc", lambda: None)
    monkeypatch.setattr(preflight.network_problem, "__defaults__", (lambda *arguments: (1, NOT_FOUND),))
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "file" / "cache"))
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    needs = [Space(tmp_path, 1 << 60, "the environment", "use another disk")]
    found = problems(
        environment=tmp_path / "file" / "venv", needs=needs, requirements=["torch"], needs_nvcc=True
    )
    assert found == [
        "path",
        "cache",
        "Python",
        "virtual environments",
        "environment",
        "C++ compiler",
        "nvcc",
        "disk",
        "network",
    ]


@pytest.mark.parametrize(
    "name",
    ["a b", "it's", "a$b", "a#b", "a:b", 'a"b', "a%b", "a;b", "a(b", "a*b", "a\\b", "a\tb", "a\nb", "a&b"],
)
def test_a_path_that_make_or_a_shell_splits_is_refused(name: str, tmp_path: Path) -> None:
    (problem,) = filter(None, [preflight.path_problem([tmp_path, tmp_path / name])])
    unusable = (
        next(character for character in name if not character.isalnum() and character not in "'")
        if name != "it's"
        else "'"
    )
    assert repr(unusable) in problem.text
    assert repr(str(tmp_path / name)) in problem.text


@pytest.mark.parametrize("name", ["a", "a-b_c.d", "München", "a+b,c@d~e=f"])
def test_other_paths_are_fine(name: str, tmp_path: Path) -> None:
    assert preflight.path_problem([Path("/home") / name]) is None


def test_disk_problems_give_the_numbers_of_each_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    devices = {one: 1, other: 2}
    free = {one: 5 * 10**9, other: 10**9}

    def parent(path: Path) -> SimpleNamespace:
        root = next(root for root in devices if root in (path, *path.parents))
        return SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=devices[root]), root=root)

    monkeypatch.setattr(preflight, "existing_parent", parent)
    monkeypatch.setattr(preflight, "folder_problem", lambda folder: "")
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.root])
    )
    environment = Space(one / "venv", 4 * 10**9, "the environment", "set VENV")
    temporary = Space(one / "tmp", 900_000_000, "temporary files", "set TMPDIR")
    cache = Space(other / "cache", 900_000_000, "uv's cache", "set UV_CACHE_DIR")
    assert preflight.disk_problems([environment, temporary, cache]) == []
    (problem,) = preflight.disk_problems([environment, temporary, cache, temporary])
    assert "5.0 GB are free" in problem.text
    assert "5.8 GB are needed" in problem.text
    assert "4.0 GB for the environment" in problem.text
    assert problem.remedy == "make room; or set VENV; or set TMPDIR"
    (problem,) = preflight.disk_problems([environment, cache, cache])
    assert "1.0 GB are free" in problem.text
    assert "1.8 GB are needed" in problem.text


@pytest.mark.parametrize(
    ("variables", "folder", "is_linked"),
    [
        ({}, "home/.cache/uv", True),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/uv", True),
        ({"XDG_CACHE_HOME": "xdg", "UV_CACHE_DIR": "own"}, "own", True),
        ({"UV_LINK_MODE": "copy"}, "home/.cache/uv", False),
    ],
)
def test_the_cache_of_uv_needs_space_unless_the_environment_links_to_it(
    variables: dict[str, str], folder: str, is_linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR", "UV_LINK_MODE", "UV_NO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "home"} | variables).items():
        monkeypatch.setenv(name, value if name == "UV_LINK_MODE" else str(tmp_path / value))
    space = preflight.uv_space(tmp_path / "venv", 9)
    assert (space.folder, space.num_bytes) == (tmp_path / folder, 0 if is_linked else 9)
    device = {tmp_path / "venv": 1}
    monkeypatch.setattr(
        preflight,
        "existing_parent",
        lambda path: SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=device.get(path, 2))),
    )
    space = preflight.uv_space(tmp_path / "venv", 9)
    assert (space.folder, space.num_bytes) == (tmp_path / folder, 9)
    assert "UV_CACHE_DIR" in space.remedy


@pytest.mark.parametrize(
    ("answers", "asked", "text"),
    [
        # the index answers: pip does the rest
        ({"torch": (0, FOUND), "vllm": (1, NOT_FOUND)}, ["torch"], None),
        # all are installed
        ({"torch": (0, BROKEN + FOUND), "vllm": (0, BROKEN + FOUND)}, ["torch", "vllm"], None),
        (
            {"torch": (0, BROKEN + FOUND), "vllm": (0, BROKEN + "Available versions: 0.3.1, 0.32.1")},
            ["torch", "vllm"],
            "vllm==0.32, only other versions (no route)",
        ),
        (
            {"torch": (0, BROKEN + FOUND), "vllm": (1, BROKEN + NOT_FOUND)},
            ["torch", "vllm"],
            "pip does not find vllm==0.32 (no route)",
        ),
        ({"torch": (1, NOT_FOUND)}, ["torch"], "pip does not find torch>=2 (Could not find a version"),
        ({"torch": (1, "pip did not answer in 120 s")}, ["torch"], "(pip did not answer in 120 s)"),
    ],
)
def test_the_network_is_what_pip_reaches(
    answers: dict[str, tuple[int, str]], asked: list[str], text: str | None
) -> None:
    calls: list[str] = []

    def ask(*arguments: str) -> tuple[int, str]:
        calls.append(arguments[2])
        return answers[arguments[2]]

    problem = preflight.network_problem(["torch>=2", "vllm==0.32"], ask)
    assert calls == asked
    if text is None:
        assert problem is None
    else:
        assert problem is not None
        assert text in problem.text
        assert "PIP_INDEX_URL" in problem.remedy


def test_nothing_is_asked_of_the_network_if_nothing_is_downloaded() -> None:
    def ask(*arguments: str) -> tuple[int, str]:
        raise AssertionError(arguments)

    assert preflight.network_problem([], ask) is None


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all folders read-only; root may write to a folder of any mode."""

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", refuse)


@pytest.mark.parametrize("variable", ["TMPDIR", "UV_CACHE_DIR", "ATTN_BACKEND_CACHE"])
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_folder_of_the_users_that_cannot_be_filled_is_reported(
    variable: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("TMPDIR", "UV_CACHE_DIR", "ATTN_BACKEND_CACHE"):
        monkeypatch.setenv(name, str(bad if name == variable else tmp_path))
    monkeypatch.setenv("UV_LINK_MODE", "copy")

    def folder_problem(folder: Path) -> str:
        return f"{folder} is not writable" if fault == "read-only" and folder == bad else ""

    def disk_usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if fault == "full" and folder == bad else 10**12)

    stat = Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **options: SimpleNamespace(st_dev=-1) if path == bad else stat(path, **options),
    )
    for module in (machine, preflight):
        monkeypatch.setattr(module, "folder_problem", folder_problem)
    monkeypatch.setattr(preflight.shutil, "disk_usage", disk_usage)
    needs = [preflight.uv_space(tmp_path / "venv", 9), *preflight.shared_spaces()]
    with pytest.raises(preflight.NotReadyError) as raised:
        preflight.check(environment=tmp_path / "venv", needs=needs)
    assert f"set {variable} to a folder" in str(raised.value)
    assert str(bad) in str(raised.value)


@pytest.mark.parametrize("blocked", ["file", "closed", "none"])
def test_the_cache_names_its_variable(blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parent" / "cache"
    if blocked == "file":
        folder.parent.write_text("")
    elif blocked == "closed":
        folder.mkdir(parents=True)
        refuse_writing(monkeypatch)
    else:
        monkeypatch.delenv("ATTN_BACKEND_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    if blocked != "none":
        monkeypatch.setenv("ATTN_BACKEND_CACHE", str(folder))
    problem = preflight.cache_problem()
    assert problem is not None
    assert "ATTN_BACKEND_CACHE" in problem.remedy
    assert {"file": "is not a folder", "closed": f"{folder} is not writable", "none": "no home directory"}[
        blocked
    ] in problem.text


@pytest.mark.parametrize("cache", [None, "", "~/elsewhere", "/somewhere"])
@pytest.mark.parametrize("xdg", [None, "", "/xdg"])
def test_the_checks_look_at_the_cache_that_the_settings_name(
    cache: str | None, xdg: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ATTN_BACKEND_CACHE", cache), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_folder(os.environ.get("ATTN_BACKEND_CACHE")) == Settings.read().cache_folder()


def test_the_checks_need_only_the_standard_library(tmp_path: Path) -> None:
    """They run before anything is installed."""
    code = (
        "import sys; import integration.preflight, integration.environment, integration.phases; "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert roots <= {
        *sys.stdlib_module_names,
        "attn_backend",
        "integration",
        "__main__",
        "sitecustomize",
        "usercustomize",
        "__mp_main__",
    }


def test_a_problem_reads_well() -> None:
    assert (
        str(Problem("C++ compiler", "none was found", "install g++"))
        == "C++ compiler: none was found\n      -> install g++"
    )


def test_cmake_names_a_missing_compiler(tmp_path: Path) -> None:
    """`pip install .` without g++."""
    tools = {
        name: shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        for name in ("cmake", "ninja")
    }
    if None in tools.values():
        pytest.skip("needs cmake and ninja")
    for name, path in tools.items():
        (tmp_path / name).symlink_to(str(path))
    variables = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")} | {
        "PATH": str(tmp_path)
    }
    command = [str(tools["cmake"]), "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no C++ compiler was found" in done.stderr
    assert "Install g++" in " ".join(done.stderr.split())
    assert "CMAKE_CXX_COMPILER" not in done.stderr


class TestMake:
    """The output of `make` on a machine that is not ready, before any download."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        """The files that set-up needs, in a path with a space."""
        folder = tmp_path / "a checkout"
        folder.mkdir()
        for name in ("Makefile", "attn_backend", "integration", "csrc", "pyproject.toml", "CMakeLists.txt"):
            (folder / name).symlink_to(ROOT / name)
        return folder

    @pytest.mark.parametrize("target", ["demo", "test", "check", "wheel", "docs"])
    def test_a_path_with_a_space_and_a_missing_compiler_are_named(self, target: str, checkout: Path) -> None:
        # a parent make exports its own
        variables = {
            name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ
        }
        variables |= {"CXX": "no-such-compiler", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
        command = ["make", target, f"BASE_PYTHON={sys.executable}"]
        done = subprocess.run(
            command, cwd=checkout, env=variables, check=False, capture_output=True, text=True, timeout=600
        )
        assert done.returncode != 0
        assert "path: " in done.stderr
        assert "' ', which make, shells or compilers split" in done.stderr
        assert ("CXX is 'no-such-compiler'" in done.stderr) == (target != "docs")
        assert "network: pip does not find" in done.stderr
        assert not [path.name for path in checkout.iterdir() if path.name.startswith(".venv")]


def test_the_pythons_of_the_preflight_are_promised_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [".".join(map(str, version)) for version in sorted(PYTHONS)]
    assert project["requires-python"] == f">={pythons[0]}"
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    assert promised == pythons
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (tested,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert re.findall(r"[\d.]+", tested) == pythons
    readme = (ROOT / "README.md").read_text()
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme
