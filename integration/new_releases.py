"""`make releases`: changes in new releases of the engines that concern this package, as a Markdown report.

python -m integration.new_releases --report releases.md

PyPI lists the releases. For each release that attn_backend/releases.py lacks, pip fetches the sources, and
two checks read them. No engine is installed, and no GPU is needed:

- tests/integration/test_engine_releases.py: names, arguments and settings that the adapters use.
- The places where models choose their own attention kernels, compared with the newest supported release.

Exit status: 0 without changes, 1 with changes, 2 if PyPI cannot be asked.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from attn_backend.adapters.own_kernels import ENGINE_NAMES, OWN_KERNELS, Missing
from attn_backend.releases import RELEASES
from integration.engine_sources import CannotFetch, sources

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/integration/test_engine_releases.py"
INDEX = "https://pypi.org/pypi/{engine}/json"
_SHOWN = 400  # characters of a failure


class Report(NamedTuple):
    """
    Attributes:
        failures: names of failed tests, with the first line of the reason.
        own_kernels: new places where a model chooses its kernels, or a failure to fetch them.
    """

    engine: str
    version: str
    failures: list[str]
    own_kernels: list[str]

    @property
    def has_changes(self) -> bool:
        return bool(self.failures or self.own_kernels)


def published(engine: str) -> dict[str, Any]:
    """PyPI's description of an engine.

    Raises:
        OSError: PyPI cannot be reached.
    """
    with urllib.request.urlopen(INDEX.format(engine=engine), timeout=60) as answer:
        described: dict[str, Any] = json.load(answer)
    return described


def new_releases(described: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    """Releases after the first of `known` that are missing there. Yanked ones and previews do not count.

    Args:
        described: PyPI's description.
    """
    found = [
        version
        for version, files in described["releases"].items()
        if re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", version) and any(not file.get("yanked") for file in files)
    ]
    return sorted((one for one in found if _key(one) > _key(known[0]) and one not in known), key=_key)


def _key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def failures_of(engine: str, version: str) -> list[str]:
    """The tests of the engine's interface that fail with a release."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"),
            *("-k", f"{version}]", TESTS),
        ]
        changes = {
            "ATTN_CHECK_RELEASES": f"{engine}=={version}",
            "REQUIRE_ENGINES": "1",
            "PYTHONSAFEPATH": "1",  # the installed package: the source tree has no built library
        }
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=os.environ | changes, capture_output=True, text=True
        )
        if not results.is_file():
            return [f"the tests did not run: {done.stdout.strip()[-_SHOWN:]}{done.stderr.strip()[-_SHOWN:]}"]
        return list(failed_tests(results.read_text()))


def failed_tests(results: str) -> Iterator[str]:
    """
    Args:
        results: of pytest, in JUnit's XML.
    """
    num_tests = 0
    for case in ElementTree.fromstring(results).iter("testcase"):
        num_tests += 1
        for kind in ("failure", "error"):
            failure = case.find(kind)
            if failure is not None:
                message = " ".join(failure.get("message", "").split())
                yield f"`{case.get('name', '').partition('[')[0]}`: {message[:_SHOWN]}"
    if num_tests == 0:
        yield "the tests did not run: none was selected"


def own_kernels(engine: str, archive: Path) -> set[str]:
    """The places where models choose their attention kernels, without numbers of lines, so that releases can
    be compared.
    """
    places: set[str] = set()
    with zipfile.ZipFile(archive) as sources_:
        for path in sources_.namelist():
            file = path.partition("/")[2]
            if not path.endswith(".py") or not _may_choose(engine, file):
                continue
            text = sources_.read(path).decode()
            if "attention_backend" in text or "attn_backend" in text:
                find = _choices_of_vllm if engine == "vllm" else _choices_of_sglang
                places |= {f"`{file}`: {what}" for what in find(ast.parse(text))}
    return places


def _may_choose(engine: str, file: str) -> bool:
    if engine == "sglang":
        return file.startswith(("srt/arg_groups/", "srt/models/")) or file.endswith("/attention_registry.py")
    of_others = any(f"/{device}/" in file for device in ("amd", "cpu", "xpu"))
    return file.startswith(("models/", "model_executor/models/")) and not of_others


def _choices_of_vllm(tree: ast.Module) -> Iterator[str]:
    """Layers that name their backend themselves, and arguments that name it for a layer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(part, ast.FunctionDef) and part.name == "get_attn_backend" for part in node.body
        ):
            yield f"class {node.name}"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "attn_backend" and not isinstance(keyword.value, ast.Constant):
                    yield f"attn_backend={ast.unparse(keyword.value)}"
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "kwargs['attn_backend']":
            yield ast.unparse(node)


def _choices_of_sglang(tree: ast.Module) -> Iterator[str]:
    """Settings that replace the user's backend, checks of its name, and wrappers around it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and str(key.value).endswith("attention_backend"):
                    yield f"attention_backend: {ast.unparse(value)}"
        elif isinstance(node, ast.Assert) and _is_about_backends(node.test):
            yield f"assert {ast.unparse(node.test)}"
        elif isinstance(node, ast.If) and _is_about_backends(node.test):
            if any(isinstance(part, ast.Raise) for part in node.body):
                yield f"refuses if {ast.unparse(node.test)}"
        elif isinstance(node, ast.FunctionDef) and node.name == "attn_backend_wrapper":
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Backend"):
                    yield f"{node.name} makes {ast.unparse(call.func)}"


_BACKENDS = re.compile(r"(attention|attn|prefill|decode)_(backend|be)\b|\bbackend not in")


def _is_about_backends(test: ast.expr) -> bool:
    return bool(_BACKENDS.search(ast.unparse(test)))


def check(engine: str, version: str) -> Report:
    """Compares a release with the newest supported one."""
    newest = RELEASES[engine][-1]
    try:
        archive, of_newest = (sources(engine, one, whole=True) for one in (version, newest))
        places = own_kernels(engine, archive) - own_kernels(engine, of_newest)
        changes = [f"{place} (not in {newest})" for place in sorted(places)]
        changes += changed_architectures(engine, archive)
    except CannotFetch as error:
        changes = [str(error)]
    return Report(engine, version, failures_of(engine, version), changes)


def changed_architectures(engine: str, archive: Path) -> list[str]:
    """Architectures that a release has, or lacks, unlike attn_backend/adapters/own_kernels.py."""
    with zipfile.ZipFile(archive) as sources_:
        text = "".join(
            sources_.read(path).decode()
            for path in sources_.namelist()
            if path == "vllm/model_executor/models/registry.py" or path.startswith("sglang/srt/models/")
        )
    choices = [entry.choice(engine) for entry in OWN_KERNELS]
    return [
        f"{name}: {'now missing' if is_listed else 'a new model'}"
        for choice in choices
        if choice is not None
        for is_listed in [not isinstance(choice, Missing)]
        for name in choice.architectures
        if bool(re.search(rf"\b{name}\b", text)) != is_listed
    ]


def markdown(reports: Iterable[Report]) -> str:
    lines = ["# New releases of the engines", ""]
    for engine, versions in RELEASES.items():
        lines.append(f"- {ENGINE_NAMES[engine]}: {versions[0]} to {versions[-1]} are supported.")
    reports = list(reports)
    if not reports:
        lines += ["", "PyPI has no other releases."]
    for report in reports:
        lines += ["", f"## {ENGINE_NAMES[report.engine]} {report.version}", ""]
        if not report.has_changes:
            lines.append("Nothing that the adapters use has changed. Add it to `attn_backend/releases.py`.")
        if report.failures:
            lines += ["Changes of what the adapters use (`docs/internals/add_to_engines.md`):", ""]
            lines += [*(f"- {failure}" for failure in report.failures), ""]
        if report.own_kernels:
            lines += [
                "Models that may choose their own kernels (`attn_backend/adapters/own_kernels.py`):",
                "",
            ]
            lines += [f"- {place}" for place in report.own_kernels]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, help="also write the report to this file")
    parser.add_argument(
        "--release",
        action="append",
        metavar="ENGINE==VERSION",
        help="check this one, whatever PyPI has; may be repeated",
    )
    arguments = parser.parse_args()
    try:
        found = (
            [tuple(one.split("==")) for one in arguments.release]
            if arguments.release
            else [
                (engine, version)
                for engine, known in RELEASES.items()
                for version in new_releases(published(engine), known)
            ]
        )
    except OSError as error:
        print(f"error: PyPI cannot be asked: {error}", file=sys.stderr)
        return 2
    reports = [check(engine, version) for engine, version in found]
    text = markdown(reports)
    print(text)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(text)
    return int(any(report.has_changes for report in reports))


if __name__ == "__main__":
    sys.exit(main())
