"""What needs no device: that the tests of one can be imported, and processes.py itself: what becomes of tests that hang,
crash or break what they run on.
"""

import importlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

CONFTEST = """
import os, pytest
from gpu import processes

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: one of these")
    if processes.ENVIRONMENT in os.environ:
        config.pluginmanager.register(processes.Reporter(config, lambda: "it smokes" if os.path.exists("broken") else ""))

def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.module.__name__ != "test_ordinary":
            item.add_marker(pytest.mark.gpu)
    if not processes.run_here(config):
        config.pluginmanager.register(processes.Processes(config, silence_s=1.0))
"""
START = """
import os, pytest, sys, time
open(f"{__name__}.pids", "a").write(f"{os.getpid()} ")
"""
FILES = {
    "apart": """
PROCESS = "apart"
def test_apart(): pass
""",
    "main1": """
def test_good(): pass
def test_bad(): assert 1 == 2, "as it says"
def test_skip(): pytest.skip("no reason")
@pytest.mark.parametrize("x", [1, 2])
def test_each(x): assert x == 1
@pytest.fixture
def untidy():
    yield
    raise KeyError("left over")
def test_teardown(untidy): pass
""",
    "main2": """
def test_crash(): os.abort()
def test_after_crash(): pass
def test_break():
    open("broken", "w")
    assert 0, "illegal address"
def test_after_break(): os.remove("broken")
def test_hang(): time.sleep(60)
""",
    "ordinary": """
def test_ordinary(): pass
""",
}
OUTCOMES = {
    "test_apart": "passed",
    "test_good": "passed",
    "test_bad": "failure",
    "test_skip": "skipped",
    "test_each[1]": "passed",
    "test_each[2]": "failure",
    "test_teardown": "error",
    "test_crash": "failure",
    "test_after_crash": "passed",
    "test_break": "failure",
    "test_after_break": "passed",
    "test_hang": "failure",
    "test_ordinary": "passed",
}


def test_every_module_can_be_imported():
    """Where there is no device nothing else would notice that a name they use is gone."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"gpu.{path.stem}")


def run(folder, files, *options):
    """Run files of tests in `folder` and return outcome and text of each test."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").touch()
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(START + text)
    paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    without = ("SPEEDTRANSFER_GPU_TESTS", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_PLUGINS")
    environment = {**{key: value for key, value in os.environ.items() if key not in without}, **paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (folder / "out").write_text(done.stdout)
    found = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        problem = [child for child in case if child.tag in ("failure", "error", "skipped")]
        found[case.get("name")] = (problem[0].tag, problem[0].text or "") if problem else ("passed", "")
    assert done.returncode == int(any(tag in ("failure", "error") for tag, _ in found.values())), done.stdout
    return found


def pids(folder, module):
    return (folder / f"test_{module}.pids").read_text().split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tests")


@pytest.fixture(scope="module")
def found(folder):
    return run(folder, FILES)


@pytest.mark.slow
def test_outcomes_are_those_of_the_tests(found):
    assert {name: tag for name, (tag, _) in found.items()} == OUTCOMES
    assert "as it says" in found["test_bad"][1]
    assert "no reason" in found["test_skip"][1]
    assert "left over" in found["test_teardown"][1]


@pytest.mark.slow
def test_what_is_said_of_a_process_that_was_lost(found, folder):
    assert "the process ended with SIGABRT" in found["test_crash"][1]
    assert "in test_crash" in found["test_crash"][1]  # faulthandler's
    assert "illegal address" in found["test_break"][1]
    assert "it smokes" in (folder / "out").read_text()
    assert "no sign of life for 1 s" in found["test_hang"][1]
    assert "in test_hang" in found["test_hang"][1]


@pytest.mark.slow
def test_the_processes(found, folder):
    first, *apart = pids(folder, "apart")  # the first one collects everything
    assert pids(folder, "ordinary") == [first]
    assert len(apart) == 1
    assert len({first, *apart, *pids(folder, "main1")}) == 3
    assert len(set(pids(folder, "main2"))) == 4  # the first, that of main1, and two more


def test_there_is_an_end_to_new_processes(tmp_path):
    found = run(tmp_path, {"one": "@pytest.mark.parametrize('n', range(5))\ndef test_a(n): os._exit(7)\n"})
    assert {tag for tag, _ in found.values()} == {"failure"}
    assert "the process ended with 7" in found["test_a[2]"][1]
    assert "not run: 3 processes were lost before" in found["test_a[3]"][1]
    assert len(pids(tmp_path, "one")) == 4
