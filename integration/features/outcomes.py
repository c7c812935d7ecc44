"""The last result of each test or server that shows an engine feature: docs/features.json, the source of the
tables in docs/engines.md and docs/reports/features.md.

Run the tests of the tables and record how they ended. NAME is FILE::FUNCTION; default: all of them.

    python -m integration.features.outcomes [NAME ...]

Run their GPU cases, for the installed engine.

    python -m integration.features.outcomes --device cuda

Run the servers of the tables, and record how they ended.

    python -m integration.features.serve --record [RUN ...]

Write the tables into the pages.

    python -m integration.features.table

The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from integration.command_line import one_of
from integration.device import device_name
from integration.environment import REPOSITORY

FILE = REPOSITORY / "docs" / "features.json"
ENGINE_NAMES = ("vllm", "sglang")
DEVICE_NAMES = ("cpu", "cuda")
NO_CASE = "no case was run"


@dataclass(frozen=True)
class Seen:
    """How a test or a server ended.

    `date`: YYYY-MM-DD. `version`: of the engine. `reason`: of a failure. `gpu`: its name; empty: on a CPU.
    """

    engine: str
    version: str
    ok: bool
    date: str
    reason: str = ""
    gpu: str = ""

    @property
    def when(self) -> str:
        return f"{self.version}{f' on an {self.gpu}' if self.gpu else ''}, {self.date}"


Outcomes = dict[str, dict[str, Seen]]


def read_outcomes(file: Path = FILE) -> Outcomes:
    """The records of each of DEVICE_NAMES, by the names of tests and servers."""
    return {
        device: {name: Seen(**seen) for name, seen in of_device.items()}
        for device, of_device in json.loads(file.read_text()).items()
    }


def record(
    name: str, engine: str, ok: bool, reason: str = "", file: Path = FILE, device: str = "cpu", gpu: str = ""
) -> None:
    """Records it with the installed release and the day, and replaces the previous record for that device."""
    outcomes = read_outcomes(file)
    outcomes[device][name] = Seen(
        engine, version(engine).partition("+")[0], ok, time.strftime("%Y-%m-%d"), reason, gpu
    )
    written = {of: {key: asdict(outcomes[of][key]) for key in sorted(outcomes[of])} for of in DEVICE_NAMES}
    file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def read_junit(report: Path, name: str) -> tuple[bool, str]:
    """Whether at least one case of a test passed and none failed; otherwise also the first reason.

    Skipped cases do not count.
    """
    file, _, function = name.partition("::")
    module = file.removesuffix(".py").replace("/", ".")
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.get("classname") == module]
    cases = [case for case in cases if case.get("name", "").partition("[")[0] == function]
    wrong = [element for case in cases for element in case if element.tag in ("failure", "error")]
    if wrong:
        return False, wrong[0].get("message", "").partition("\n")[0][:200]
    passed = any(all(element.tag != "skipped" for element in case) for case in cases)
    return passed, "" if passed else NO_CASE


def main() -> None:
    from integration.features.table import named

    tests = {
        name: engine
        for engine in ENGINE_NAMES
        for name in named(engine)
        if "::" in name and importlib.util.find_spec(engine)
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", type=one_of(tests))
    parser.add_argument(
        "--device", choices=DEVICE_NAMES, default="cpu", help="whose cases are run; default: %(default)s"
    )
    given = parser.parse_args()
    names, all_ok, gpu = (
        given.names or list(tests),
        True,
        device_name("cuda") if given.device == "cuda" else "",
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        cases = ["-m", "gpu" if gpu else "not gpu"]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *cases, *names],
            check=False,
            cwd=REPOSITORY,
        )
        for name in names:
            ok, reason = read_junit(report, name)
            if gpu and reason == NO_CASE:
                continue  # the test has none for GPUs
            record(name, tests[name], ok, reason, device=given.device, gpu=gpu)
            all_ok &= ok
            print(f"{name}: {'ok' if ok else reason}")
    sys.exit(int(not all_ok))


if __name__ == "__main__":
    main()
