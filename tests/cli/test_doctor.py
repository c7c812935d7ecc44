"""attn-backend doctor: it reports the state of the machine and fails only if something is broken."""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvcc import FakeKernels, cubin

from attn_backend.cli import doctor
from attn_backend.cli.main import main
from attn_backend.jit import compilers, cubins, kernel_cache
from attn_backend.kernels.native import library_path as host_library_path


def _by_subject() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.findings()}


def test_reports_host_library_and_kernels() -> None:
    found = _by_subject()
    assert found["host library"].mark == "ok"
    assert {"torch", "nvcc", "cache", "cubins sm_90a", "cubins sm_80", "vllm", "sglang"} <= set(found)


def test_exit_status_says_whether_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor,
        "findings",
        lambda: [doctor.Finding("ok", "a", "fine"), doctor.Finding("--", "b", "absent", "install b")],
    )
    assert main(["doctor"]) == 0
    assert "-> install b" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("!!", "a", "broken")])
    assert main(["doctor"]) == 1


def test_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", "/proc/attn_backend")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    finding = _by_subject()["cache"]
    assert finding.mark == "!!"
    assert "ATTN_BACKEND_CACHE" in finding.advice


@pytest.mark.parametrize(
    ("engine", "release", "mark"),
    [("vllm", "0.32.0+cpu", "ok"), ("sglang", "0.5.17", "ok"), ("vllm", "0.99.0", "--")],
)
def test_releases_that_were_checked_are_told(engine: str, release: str, mark: str) -> None:
    finding = doctor.engine_release(engine, release)
    assert finding.mark == mark
    assert finding.text.startswith(f"{release}, ")
    assert f"checked against {doctor.RELEASES[engine][0]} to {doctor.RELEASES[engine][-1]}" in finding.text
    assert bool(finding.advice) == (mark == "--")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    return FakeKernels(tmp_path, monkeypatch)


def kernels() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor._kernels()}


def test_cached_kernels_are_counted_if_they_are_whole(fake: FakeKernels) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    assert (kernels()["cubins sm_90a"].mark, kernels()["cubins sm_90a"].text) == (
        "ok",
        "0 of 1 in the package, 1 in the cache",
    )
    path.write_bytes(path.read_bytes()[:-1])
    finding = kernels()["cubins sm_90a"]
    assert finding.mark == "--"
    assert finding.text == f"0 of 1 in the package, 0 in the cache; {path} is truncated"
    assert finding.advice.endswith("`attn-backend compile` compiles them now")
    assert main(["compile", "--arch", "sm_90a"]) == 0
    assert kernels()["cubins sm_90a"].mark == "ok"


def test_kernels_of_variants_and_cpus_are_checked_in_the_cache(fake: FakeKernels) -> None:
    assert "compiled kernels" not in kernels(), "there are none"
    library = fake.cache / f"{platform.machine()}_avx2" / "attention_cpu_float32_mine-0.so"
    variant = fake.cache / "sm_90a" / "attention_sm90_bf16_d128_mine-0.cubin"
    shared = Path(host_library_path()).read_bytes()
    for path, content in ((library, shared), (variant, cubin())):
        kernel_cache.prepare(path)
        kernel_cache.store(path, content, "a report")
    assert kernels()["compiled kernels"] == doctor.Finding("ok", "compiled kernels", f"2 in {fake.cache}")
    for path, damaged, reason in (
        (library, shared[:-1000], "is truncated"),
        (variant, cubin(b"another"), "has another SHA-256 than it had when it was compiled"),
    ):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        finding = kernels()["compiled kernels"]
        assert (finding.mark, finding.text) == ("--", f"1 in {fake.cache}; {path} {reason}")
        assert "compiled again when it is needed" in finding.advice
        path.write_bytes(whole)


def test_missing_pyelftools_is_named(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels()["pyelftools"].mark == "ok"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *package: None if name == "elftools" else find_spec(name, *package),
    )
    finding = kernels()["pyelftools"]
    assert finding.mark == "--"
    assert (
        finding.text
        == "not installed; kernels that this machine compiles run a few percent slower on a GPU; the kernels "
        "of the package are unaffected"
    )
    assert finding.advice.startswith("pip install pyelftools")


def test_kernels_of_the_package_are_counted_if_they_are_whole(fake: FakeKernels) -> None:
    fake.sources = {name: f"// kernel {name}" for name in ("a", "b", "k")}
    shipped = [cubins.shipped_kernel(name, "sm_90a") for name in ("a", "b", "k")]
    shipped[0].parent.mkdir(parents=True)
    for path in shipped:
        path.write_bytes(cubin())
    assert (kernels()["cubins sm_90a"].mark, kernels()["cubins sm_90a"].text) == (
        "ok",
        "all 3 in the package",
    )
    shipped[0].write_bytes(b"")
    shipped[2].write_bytes(b"garbage")
    finding = kernels()["cubins sm_90a"]
    text = f"1 of 3 in the package; {shipped[0]} is empty, and 1 more that are not used"
    assert finding == doctor.Finding("!!", "cubins sm_90a", text, "reinstall attn-backend")


def test_a_cache_that_others_may_write_is_named_and_the_private_one_counted(
    fake: FakeKernels, caplog: pytest.LogCaptureFixture
) -> None:
    fake.cache.mkdir()
    fake.cache.chmod(0o777)
    cubins.compile_kernel("k", "sm_90a")
    caplog.clear()
    found = kernels()
    assert found["cache"].mark == "!!"
    assert f"since {fake.cache} is writable by everybody" in found["cache"].text
    assert "chmod" in found["cache"].advice
    assert found["cubins sm_90a"].text == "0 of 1 in the package, 1 in the cache"
    assert not caplog.records


def test_a_cache_that_is_a_file_or_nowhere_is_named(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.cache.write_text("")
    assert kernels()["cache"].text == f"{fake.cache} is not a folder"
    assert kernels()["cubins sm_90a"].text == "0 of 1 in the package, 0 in the cache"
    monkeypatch.setenv("ATTN_BACKEND_CACHE", "~nobody-of-that-name/cache")
    found = kernels()
    assert found["cache"].mark == "!!"
    assert "set ATTN_BACKEND_CACHE" in found["cache"].text
    assert found["cubins sm_90a"].text == "0 of 1 in the package, 0 in the cache"


def test_a_compiler_that_does_not_work_is_named(fake: FakeKernels) -> None:
    fake.nvcc.write_text("#!/bin/sh\nexit 1\n")
    found = kernels()
    assert found["nvcc"].mark == "!!"
    assert "nvcc failed on its version" in found["nvcc"].text
    assert found["cubins sm_90a"].mark == "--"


def test_missing_nvcc_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.cubins, "nvcc", lambda: None)
    monkeypatch.setattr(doctor.cubins, "PACKAGE", doctor.cubins.PACKAGE / "nowhere")
    monkeypatch.setattr(doctor.cubins, "kernel_sources", lambda arch: {"plan": ""})
    found = _by_subject()
    assert found["nvcc"].mark == "--"
    assert found["cubins sm_90a"].mark == "--"
    assert "wheel" in found["cubins sm_90a"].advice


def test_compilers_of_variants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "cpp_compiler", lambda: ["/usr/bin/c++", "-m64"])
        assert kernels()["C++ compiler"] == doctor.Finding(
            "ok", "C++ compiler", "/usr/bin/c++ -m64, for variants on a CPU"
        )
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compilers, "nvrtc", lambda: None)
    found = kernels()
    assert found["C++ compiler"].mark == found["NVRTC"].mark == "--"
    assert "CXX is 'no-such-compiler', which is not a program here" in found["C++ compiler"].advice


def test_what_an_engine_says_is_shown_only_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def warns() -> None:
        print("welcome")
        print("only CUDA supports this", file=sys.stderr)

    def fails() -> None:
        warns()
        raise RuntimeError

    assert doctor.guarded("sglang plugin", lambda: warns, "registered").mark == "ok"
    assert capsys.readouterr() == ("", "")
    assert doctor.guarded("sglang plugin", lambda: fails, "registered").mark == "!!"
    assert capsys.readouterr().err == "welcome\nonly CUDA supports this\n"


def test_a_broken_plugin_is_reported_not_raised() -> None:
    def broken() -> None:
        raise ImportError("no such name in the engine")

    finding = doctor.guarded("vllm plugin", lambda: broken, "registered")
    assert finding.mark == "!!"
    assert "no such name" in finding.text


def test_runs_and_says_so_where_torch_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "attn_backend.cli.main", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[!!]  GPU " in done.stdout
    assert "no torch here" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arch", "mark", "text"),
    [
        ("", "ok", "A GPU, compute capability 9.0: kernels of sm_90a"),
        ("sm_80", "ok", "A GPU, compute capability 9.0: kernels of sm_80 (ATTN_BACKEND_ARCH is sm_80)"),
        ("sm_70", "!!", "A GPU: ATTN_BACKEND_ARCH is 'sm_70', must be 'sm_90a' or 'sm_80'"),
    ],
)
def test_the_arch_of_each_gpu_is_told(
    arch: str, mark: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("ATTN_BACKEND_ARCH", arch)
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "A GPU",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    finding = doctor.gpu_state()[0]
    assert (finding.mark, finding.subject, finding.text) == (mark, "GPU 0", text)
    assert bool(finding.advice) == (mark == "!!")
    assert "GPU" not in finding.advice


def test_settings_are_listed_with_value_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CASCADE", "0")
    monkeypatch.delenv("ATTN_BACKEND_DEBUG", raising=False)
    listed = {name: (value, meaning) for name, value, meaning in doctor.settings()}
    assert listed["ATTN_BACKEND_CASCADE"] == ("0", "look for shared prefixes in an engine's batches")
    assert listed["ATTN_BACKEND_DEBUG"][0] == "0 (default)"
    assert all(meaning for _, meaning in listed.values())


def test_settings_that_are_wrong_or_unknown_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))  # other processes add kernels to the user's
    monkeypatch.setattr(doctor, "ENGINES", ())  # each takes a minute to import

    def found() -> list[tuple[str, str, str]]:
        return [(finding.mark, finding.subject, finding.text) for finding in doctor.findings()]

    before = found()
    assert "settings" not in {subject for _, subject, _ in before}
    monkeypatch.setenv("ATTN_BACKEND_CASCAD", "0")
    monkeypatch.setenv("ATTN_BACKEND_CASCADE", "never")
    monkeypatch.setenv("ATTN_BACKEND_ARCH", "sm_70")
    after = found()
    assert [finding.advice for finding in doctor.findings() if "CASCAD is" in finding.text] == [
        "did you mean ATTN_BACKEND_CASCADE?"
    ]
    assert after == [
        *before,  # the rest of the output is unchanged and does not mention them
        ("--", "settings", "ATTN_BACKEND_CASCAD is unknown and has no effect"),
        ("!!", "settings", "ATTN_BACKEND_CASCADE is 'never', must be 0 or 1"),
        ("!!", "settings", "ATTN_BACKEND_ARCH is 'sm_70', must be 'sm_90a' or 'sm_80'"),
    ]
    assert os.environ["ATTN_BACKEND_CASCADE"] == "never"
    assert ("ATTN_BACKEND_ARCH", "sm_70") in [setting[:2] for setting in doctor.settings()]


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("attn-backend ")
