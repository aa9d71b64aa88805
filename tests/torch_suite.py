"""Run PyTorch's own tests of nn.Embedding and nn.EmbeddingBag, unchanged, with the modules of this library in their place.

The file is test/nn/test_embedding.py of PyTorch's repository, of the version that is installed; its wheel does not have it.

    python tests/torch_suite.py PATH/TO/test_embedding.py    # or: make torch-suite FILE=...
    python tests/torch_suite.py PATH/TO/test_embedding.py --match bfloat16

Every test that makes a module on the CPU with torch.nn runs a second time with `Embedding` and `EmbeddingBag` of this library.
Tests of the functions alone are left out. Prints each test that fails with its reason, then how many there are. Ends with
status 1 where fewer than ``--at-least`` pass (all, by default).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import speedtransfer

OURS = {"Embedding": speedtransfer.Embedding, "EmbeddingBag": speedtransfer.EmbeddingBag}
WIDTH = 300  # of a reason, in characters


class Result(unittest.TestResult):
    """Outcomes by the name of the test: "passed", or why not."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}
        self.made: set[str] = set()  # the tests that made a module
        self.running = ""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.running = test.id().split(".", 1)[-1]

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.outcomes.setdefault(self.running, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.outcomes[self.running] = f"skipped: {reason}"

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self.outcomes[self.running] = _reason(err)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self.outcomes[self.running] = _reason(err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.outcomes[self.running] = _reason(err)


def _reason(error: Any) -> str:
    text = str(error[1]).split("To execute this test")[0]  # and more that torch says of each
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{error[0].__name__}: {' '.join(lines)[:WIDTH]}"


@contextmanager
def in_place_of_torch() -> Iterator[None]:
    """Within, the names of torch.nn are the modules of this library."""
    before = {(space, name): getattr(space, name) for space in (nn, nn.modules, nn.modules.sparse) for name in OURS}
    for space, name in before:
        setattr(space, name, OURS[name])
    try:
        yield
    finally:
        for (space, name), value in before.items():
            setattr(space, name, value)


@contextmanager
def noted(result: Result) -> Iterator[None]:
    """Within, tests that make a module of the names that torch.nn has are noted."""
    classes = [getattr(nn, name) for name in OURS]
    inits = [kind.__init__ for kind in classes]

    def noting(init: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            result.made.add(result.running)
            init(*args, **kwargs)

        return call

    for kind, init in zip(classes, inits, strict=True):
        kind.__init__ = noting(init)
    try:
        yield
    finally:
        for kind, init in zip(classes, inits, strict=True):
            kind.__init__ = init


def load(path: Path) -> ModuleType:
    """Import the file of tests."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is no file of Python; pass the path of PyTorch's test/nn/test_embedding.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run(tests: list[unittest.TestCase]) -> Result:
    """Run tests one after the other."""
    result = Result()
    with noted(result), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unittest.TestSuite(tests).run(result)
    return result


def cases(module: ModuleType, names: set[str] | None = None, match: str = "") -> list[unittest.TestCase]:
    """Return the tests of a module, maybe only some."""

    def flat(suite: Any) -> Iterator[unittest.TestCase]:
        for item in suite:
            yield from flat(item) if isinstance(item, unittest.TestSuite) else (item,)

    found = flat(unittest.TestLoader().loadTestsFromModule(module))
    ids = [(test.id().split(".", 1)[-1], test) for test in found]
    return [test for name, test in ids if match in name and (names is None or name in names)]


def compare(path: Path, match: str = "") -> tuple[Result, Result, list[str]]:
    """Run the tests with torch.nn, and those that make a module with ours; return both and the names of the latter."""
    module = load(path)
    theirs = run(cases(module, match=match))
    names = sorted(name for name in theirs.made if not theirs.outcomes[name].startswith("skipped"))
    with in_place_of_torch():
        ours = run(cases(module, set(names)))
    return theirs, ours, names


def main(argv: list[str] | None = None) -> int:
    """Run the tests and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="test/nn/test_embedding.py of PyTorch")
    parser.add_argument("--match", default="", help="only tests whose names have this")
    parser.add_argument("--at-least", type=int, help="how many must pass; all by default")
    args = parser.parse_args(argv)
    theirs, ours, names = compare(args.path, args.match)
    for name in names:
        if ours.outcomes[name] != "passed":
            print(f"{name}\n    ours: {ours.outcomes[name]}\n    torch.nn: {theirs.outcomes[name]}")
    passed = sum(ours.outcomes[name] == "passed" for name in names)
    at_first = sum(theirs.outcomes[name] == "passed" for name in names)
    print(f"{len(names)} tests make a module: {at_first} pass with torch.nn, {passed} with speedtransfer")
    return int(not names or passed < (len(names) if args.at_least is None else args.at_least))


if __name__ == "__main__":
    sys.exit(main())
