"""What a release says of itself: one version, links that work on an index, workflows whose actions cannot change."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import setuptools
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def release(monkeypatch):
    """A function that imports a script of release/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module


@pytest.fixture
def for_an_index(monkeypatch):
    """The function of setup.py that leads the links of a README away from the repository."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("setup").readme_for_an_index
    del sys.modules["setup"]


TEXT = """![A picture](bench/a.png)

See [this](docs/a.md#b), [that](https://example.org/x) and [below](#limits).
"""


def test_links_lead_to_the_version(for_an_index):
    assert for_an_index(TEXT, "https://example.org/o/r", "v1.2.3") == (
        "![A picture](https://example.org/o/r/raw/v1.2.3/bench/a.png)\n\n"
        "See [this](https://example.org/o/r/blob/v1.2.3/docs/a.md#b), [that](https://example.org/x) and [below](#limits).\n"
    )


def test_without_an_address_the_words_stay(for_an_index):
    assert for_an_index(TEXT, "", "v1.2.3") == "See this, [that](https://example.org/x) and [below](#limits).\n"


@pytest.mark.parametrize("repository", ["", "https://example.org/o/r"])
def test_no_link_of_the_readme_is_left(for_an_index, release, repository):
    relative = release("check").RELATIVE
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(relative.findall(text)) > 10
    assert not relative.findall(for_an_index(text, repository, "v1.2.3"))


@pytest.fixture
def tree(tmp_path, release):
    """The files that state the version, as they are."""
    for name in release("set_version").FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.1.0, unreleased\n\n- One.\n")
    return tmp_path


def stated(release, tree: Path) -> list[str]:
    """What each file states, and the first heading's date."""
    found = [re.search(p, (tree / name).read_text(), re.MULTILINE) for name, p in release("check").VERSIONS.items()]
    return [*(match[1] for match in found), found[-1][2]]


def test_files_state_one_version(release):
    version, cited, changed, _ = stated(release, ROOT)
    assert version == cited
    assert changed == version.partition(".dev")[0]


def test_a_release_and_what_comes_after(release, tree):
    set_version = release("set_version").set_version
    set_version(tree, "0.1.0", "2030-01-02")
    assert stated(release, tree) == ["0.1.0", "0.1.0", "0.1.0", "2030-01-02"]
    assert "\ndate-released: 2030-01-02\n" in (tree / "CITATION.cff").read_text()
    with pytest.raises(ValueError, match="no changes are waiting"):
        set_version(tree, "0.1.1", "2030-01-03")
    set_version(tree, "0.2.0.dev0", "2030-01-04")
    assert stated(release, tree) == ["0.2.0.dev0", "0.2.0.dev0", "0.2.0", "unreleased"]
    assert "date-released" not in (tree / "CITATION.cff").read_text()
    assert "## 0.1.0, 2030-01-02\n\n- One.\n" in (tree / "CHANGELOG.md").read_text()
    set_version(tree, "0.2.0rc1", "2030-01-05")
    assert stated(release, tree) == ["0.2.0rc1", "0.2.0rc1", "0.2.0rc1", "2030-01-05"]
    set_version(tree, "0.3.0.dev0", "2030-01-06")
    set_version(tree, "0.3.0.dev1", "2030-01-06")
    assert (tree / "CHANGELOG.md").read_text().count("unreleased") == 1


@pytest.mark.parametrize("version", ["", "1", "v1.2.3", "1.2.3.post1", "1.2.3\n"])
def test_what_is_no_version(release, tree, version):
    with pytest.raises(ValueError, match=re.escape("a version is 1.2.3, 1.2.3rc1 or 1.2.3.dev0")):
        release("set_version").set_version(tree, version, "2030-01-02")
    assert stated(release, tree) == stated(release, ROOT)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_may_do_little(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    used = re.findall(r"^ *(?:- )?uses: (.*)$", text, re.MULTILINE)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert workflow["permissions"] == {}
    allowed = [job["permissions"] for job in workflow["jobs"].values()]
    assert all(allow in ({"contents": "read"}, {"id-token": "write"}) for allow in allowed), allowed
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets


def test_every_supported_python_is_tried():
    """By the matrix of the workflow, as the classifiers say."""
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert [f'"{version}"' for version in named] == matrix.split(", ")
