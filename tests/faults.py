"""Put faults into a module of the package, one at a time, and see that tests catch each.

    python tests/faults.py optim/graph.py tests/test_optim_graph.py tests/test_weight.py

The faults are drawn from all that could be put in: a statement left out, a condition turned round, a comparison off by one, a
sum for a difference. The same arguments draw the same faults, so that a run before tests are cut tells what one after must
catch. Each fault runs the test files, up to the first failure, in a copy of the tree. What is missed is listed: some of it
changes nothing that anyone could see. The exit code is 1 if any is missed.
"""

import argparse
import ast
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from forked import run_script

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
HANGS, ENDS = "a test hangs", "the tests end early"
RUN = """
import os, sys
import pytest

root, tree, *arguments = sys.argv[1:]
os.chdir(tree)
os.environ["PYTHONPATH"] = tree
sys.path[:] = [tree, *(path for path in sys.path if not path.startswith(root) or ".venv" in path)]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *arguments]))
"""
_OTHER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_CONDITIONAL = ast.If | ast.While | ast.IfExp


class Fault(NamedTuple):
    """The part of a module from one place to another, (line, column in UTF-8), and what takes its place."""

    begin: tuple[int, int]
    end: tuple[int, int]
    new: str

    def put_into(self, text):
        lines = [line.encode() for line in text.splitlines(keepends=True)]
        (first, left), (last, right) = self.begin, self.end
        before, after = lines[first - 1][:left], lines[last - 1][right:]
        return b"".join([*lines[: first - 1], before, self.new.encode(), after, *lines[last:]]).decode()


def faults_of(text):
    for node in ast.walk(ast.parse(text)):
        changed = []
        is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield)
        if is_call or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
            changed.append((node, "pass"))
        elif isinstance(node, _CONDITIONAL):
            changed.append((node.test, f"not ({ast.unparse(node.test)})"))
        elif isinstance(node, ast.comprehension):
            changed += [(test, f"not ({ast.unparse(test)})") for test in node.ifs]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
            left, right = map(ast.unparse, (node.left, node.comparators[0]))
            changed.append((node, f"({left} {_OTHER[type(node.ops[0])]} {right})"))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            sign = "-" if isinstance(node.op, ast.Add) else "+"
            changed.append((node, f"({ast.unparse(node.left)} {sign} {ast.unparse(node.right)})"))
        for part, new in changed:
            yield Fault((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0), new)


def copy_tree(folder):
    """Copy what git knows here, as it stands in the working tree, and return where it is."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_bytes((ROOT / name).read_bytes())
    return Path(folder)


def failure(tree, *tests):
    """Return the first of these tests that fails in a tree; "" if none does."""
    try:
        run = run_script(RUN, str(ROOT), str(tree), *tests, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return HANGS
    # Of a test that has failed, or could not be collected.
    found = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if found:
        return found[0].partition(" ")[2].partition(" - ")[0]
    return ENDS if run.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="a path in the package")
    parser.add_argument("tests", nargs="+", help="test files, or tests")
    parser.add_argument("--count", type=int, default=20, help="faults, by default 20")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        module = tree / "speedtransfer" / options.module
        whole, missed = module.read_text(encoding="utf-8"), 0
        if failed := failure(tree, *options.tests):
            parser.error(f"{failed} fails without a fault")
        every = sorted(set(faults_of(whole)))
        chosen = random.Random(0).sample(every, min(options.count, len(every)))
        for fault in sorted(chosen):
            module.write_text(fault.put_into(whole), encoding="utf-8")
            failed = failure(tree, *options.tests)
            missed += not failed
            print(f"{options.module}:{fault.begin[0]}: {fault.new}: {failed or 'MISSED'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
