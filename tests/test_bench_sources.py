"""bench/sources.py: which code a recorded result depends on."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
TREE = {
    "pkg/__init__.py": "if TYPE_CHECKING:\n    from pkg.core import Table\n",
    "pkg/core.py": (
        '"""Tables."""\nimport pkg.tools as tools\n\nROWS = 3\n\n\nclass Table:\n    """A table."""\n\n'
        "    def get(self):\n        return tools.help(ROWS)  # a remark\n\n\ndef other():\n    return tools.unused\n"
    ),
    "pkg/tools.py": "def help(x):\n    return x\n\n\ndef unused():\n    return 2\n\n\n@register\ndef _done():\n    return 4\n",
    "pkg/child.py": 'def work():\n    return 1\n\n\nif __name__ == "__main__":\n    work()\n',
    "speedtransfer/kernels/rows.cu": '#include "both.cuh"\nvoid rows();',
    "speedtransfer/kernels/both.cuh": "int both;",
    "bench/case.py": (
        "import sys\nimport pkg\n\n\ndef measure():\n    from pkg import child\n\n    child.work()\n"
        '    return pkg.Table().get(), "rows.cu"\n\n\ndef apart():\n    run("-m", "pkg.child")\n\n\n'
        'def show():\n    return "words"\n'
    ),
}


@pytest.fixture
def sources(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("sources")


def digest(sources, files, entry="case:measure"):
    return sources.Sources(files.get).digest([entry])


def changed(old, new, name):
    text = TREE[name].replace(old, new)
    assert text != TREE[name]
    return {**TREE, name: text}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pkg/core.py", "ROWS = 3", "ROWS = 4"),
        ("pkg/core.py", "tools.help(ROWS)", "tools.help(ROWS + 1)"),
        ("pkg/tools.py", "return x", "return x + 1"),
        ("pkg/tools.py", "return 4", "return 5"),  # nothing asks for it: it may be there for what it does
        ("pkg/child.py", "return 1", "return 2"),
        ("speedtransfer/kernels/rows.cu", "rows();", "rows(int);"),
        ("speedtransfer/kernels/both.cuh", "int both", "long both"),
        ("bench/case.py", "pkg.Table()", "pkg.Table(1)"),
    ],
)
def test_what_counts(sources, name, old, new):
    assert digest(sources, changed(old, new, name)) != digest(sources, TREE)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pkg/core.py", "Tables.", "All tables."),
        ("pkg/core.py", "A table.", "Rows."),
        ("pkg/core.py", "a remark", "another"),
        ("pkg/core.py", "return tools.unused", "return 0"),
        ("pkg/tools.py", "return 2", "return 3"),
        ("pkg/child.py", "    work()\n", "    work(1)\n"),
        ("bench/case.py", '"words"', '"other words"'),
        ("bench/case.py", "import sys\n", "import sys\n\n# Of the standard library.\n"),
    ],
)
def test_what_does_not_count(sources, name, old, new):
    assert digest(sources, changed(old, new, name)) == digest(sources, TREE)


def test_code_may_move(sources):
    moved = {
        **TREE,
        "pkg/base.py": TREE["pkg/core.py"],
        "pkg/__init__.py": TREE["pkg/__init__.py"].replace("core", "base"),
    }
    del moved["pkg/core.py"]
    assert digest(sources, moved) == digest(sources, TREE)


def test_a_name_that_means_something_else(sources):
    """Also where nothing but an import changes."""
    two = {**TREE, "pkg/others.py": "def help(x):\n    return -x\n\n\nunused = 1\n"}
    switched = {**two, "pkg/core.py": two["pkg/core.py"].replace("pkg.tools", "pkg.others")}
    assert digest(sources, two) == digest(sources, TREE)
    assert digest(sources, switched) != digest(sources, two)


def test_a_module_that_is_named_is_run_as_a_whole(sources):
    one = digest(sources, TREE, "case:apart")
    assert digest(sources, changed("    work()\n", "    work(1)\n", "pkg/child.py"), "case:apart") != one


def test_every_result_begins_somewhere(sources):
    store = importlib.import_module("store")
    found = store.Tree(store.ROOT).sources
    assert [entry for begins in store.BEGINS.values() for entry in begins if not found.has(entry)] == []
    assert {*store.BEGINS, *store.CHECKS} == {*store.PARTS, *store.OTHERS, store.NODE2VEC, store.GOWALLA, store.LAYOUT}
