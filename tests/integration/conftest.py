"""Fixtures of the tests that start real servers, and of the tests of the tools."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from attn_backend.releases import RELEASES

# integration/ is not part of the installed package. At the end of the path, so that the source tree does not
# hide the installed package
sys.path.append(str(Path(__file__).resolve().parents[2]))


# Files whose tests of one engine take minutes. They start first and the shorter ones follow, since a worker
# that gets a long one last keeps the others waiting.
LONGEST = ("test_tiny_models_cpu.py", "test_serving_cpu.py", "test_soak_cpu.py", "test_features_cpu.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With --dist loadfile, tests of a file and an engine run in one worker, rather than all tests of a file.
    Otherwise idle workers would wait.

    A test's engine is the prefix of its first parameter.
    """
    from xdist.scheduler import LoadFileScheduling

    class OfFileAndEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            case = nodeid.partition("[")[2]
            return " ".join(
                [super()._split_scope(nodeid), *(name for name in RELEASES if case.startswith(name))]
            )

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests
    return OfFileAndEngine(config, log)


@pytest.fixture(scope="session")
def small_engines():
    """The environment of the engines.

    The workers of pytest-xdist share the cores. Each starts engines with one thread, and vLLM would bind all
    of them to the same core. torch compiles nothing. Otherwise every server would compile the engines'
    helpers for CPU attention again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        if os.environ.get("PYTEST_XDIST_WORKER"):
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="session")
def forks(small_engines, tmp_path_factory):
    """A function that returns the process whose forks run an engine's programs (forked_engines.py).

    It is created when first needed.
    """
    from forked_engines import MODULES, Forks

    from integration.engines import ENGINES
    from integration.processes import process_environment

    made = {}

    def of(engine):
        if engine not in made:
            environment = process_environment(ENGINES[engine].client_environment("cpu"))
            made[engine] = Forks(
                MODULES[engine], environment, tmp_path_factory.mktemp("forks") / f"{engine}.log"
            )
        return made[engine]

    yield of
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def forked_engines(forks):
    """Servers and clients of the module's tests start as forks of a process with one thread.

    Servers of the soaks start as a user's do.
    """
    from forked_engines import engine_of

    from integration import client, server
    from integration.processes import process_environment, start

    def start_fork(command, log, environment, own_session=False):
        engine = engine_of(command)
        if engine is None:
            return start(command, log, environment, own_session)
        return forks(engine).start(command[1:], log, process_environment(environment))

    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("PYTEST_XDIST_WORKER"):
            patch.setattr(client, "start", start_fork)
            patch.setattr(server, "start", start_fork)
        yield


@pytest.fixture(autouse=True)
def small_engines_of_a_test(request):
    if request.node.get_closest_marker("integration"):
        request.getfixturevalue("small_engines")


@pytest.fixture(scope="session")
def smollm2():
    from integration.model import resolve_model

    return resolve_model("smollm2", sys.executable)


@pytest.fixture(scope="session")
def sharegpt() -> Path:
    from integration.sharegpt import sharegpt_file

    return sharegpt_file()


@pytest.fixture(scope="session")
def need_engine():
    """A function that skips the test if a package is not installed.

    `make test` sets REQUIRE_ENGINES: there it fails instead.
    """

    def need(package: str) -> None:
        spec = importlib.util.find_spec(package)
        # the folders tests/adapters/vllm and sglang can be imported too, as namespace packages
        if spec is None or spec.origin is None:
            message = f"{package} is not installed in {sys.prefix}"
            if os.environ.get("REQUIRE_ENGINES") == "1":
                pytest.fail(message)
            pytest.skip(message)

    return need
