"""What `make demo` has installed, `make test` does not install again. Nothing is installed."""

from __future__ import annotations

import pytest

from integration import environment


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The steps that are taken, and other calls of pip."""
    taken = []

    def create(folder, with_pip):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment, "install", lambda python, requirements: taken.append(requirements))
    monkeypatch.setattr(environment, "pip", lambda python, *arguments: taken.append(arguments[0]))
    monkeypatch.setattr(environment, "adapt_to_cpu", lambda python: taken.append("adapt"))
    return taken


def test_the_tests_add_to_the_environment_of_the_demo(installed, tmp_path):
    torch, sglang, tools = environment.STEPS["cpu"]
    of_tests = environment.STEPS["test"][3]
    environment.make_environment(tmp_path, "cpu")
    assert installed == [torch, "uninstall", sglang, tools, "adapt"]
    installed.clear()
    environment.make_environment(tmp_path, "test")
    assert installed == [of_tests]
    installed.clear()
    for kind in ("cpu", "test"):
        environment.make_environment(tmp_path, kind)
    assert not installed


def test_another_version_is_installed_with_all_that_comes_after_it(installed, tmp_path, monkeypatch):
    environment.make_environment(tmp_path, "test")
    installed.clear()
    torch, sglang, tools, of_tests = environment.STEPS["test"]
    on_cpu = [torch, [*sglang, "gguf==1"], tools]
    monkeypatch.setattr(environment, "ENGINES_ON_CPU", on_cpu)
    monkeypatch.setitem(environment.STEPS, "test", [*on_cpu, of_tests])
    environment.make_environment(tmp_path, "test")
    assert installed == [on_cpu[1], tools, "adapt", of_tests]


def test_what_is_done_is_kept(installed, tmp_path, monkeypatch):
    first, second = environment.STEPS["check"]

    def fail(python, requirements):
        if requirements == second:
            raise environment.SetupError("no network")
        installed.append(requirements)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", fail)
        with pytest.raises(environment.SetupError):
            environment.make_environment(tmp_path, "check")
    environment.make_environment(tmp_path, "check")
    assert installed == [first, second]
