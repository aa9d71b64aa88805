"""All that can be checked of a release before it is one: ``make release-check``.

The last commit is built; the wheel and the source distribution are left in dist/. The wheel is installed in a new environment,
used away from the checkout, and tests of the source distribution run on it. RELEASE_TAG and RELEASE_REPOSITORY are what a
release must agree with, as .github/workflows/release.yml sets them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent
# Quick ones, from every layer; conftest.py and pyproject.toml want the packages beside pytest.
TESTS = ("kernels", "tables", "nn", "optim", "checkpoint", "vocabulary", "cli", "release")
FOR_TESTS = ("hypothesis", "psutil", "pytest", "pytest-timeout", "setuptools>=77")
# A link or a picture that leads nowhere from a page of an index.
RELATIVE = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


class CheckError(Exception):
    """A step found a fault; the message is its row in the table."""


def run(*argv: str | Path, cwd: Path) -> str:
    """Return what a program says; if it fails, show all of it and raise with its last line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    argv = tuple(map(str, argv))
    done = subprocess.run(argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
        raise CheckError(f"{Path(argv[0]).name}: {(done.stdout.strip() or 'failed').splitlines()[-1]}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line, without the colours of terminals."""
    return re.sub(r"\x1b\[[\d;]*m", "", text.strip().splitlines()[-1]).strip("= ")


class Release:
    """The steps, in order, each of which returns a line for the table. Later ones use what earlier ones have made."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.empty, self.sdist = folder / "tree", folder / "empty", folder / "sdist"
        self.python = folder / "env" / "bin" / "python"
        self.empty.mkdir()

    @property
    def wheel(self) -> Path:
        """The wheel that was built."""
        (path,) = (ROOT / "dist").glob("*.whl")
        return path

    def commit(self) -> str:
        """Take the files of the last commit."""
        archive = self.tree.with_suffix(".tar")
        run("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
        self.tree.mkdir()
        run("tar", "-xf", archive, "-C", self.tree, cwd=ROOT)
        changed = len(run("git", "status", "--porcelain", cwd=ROOT).splitlines())
        return run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip() + f"; {changed} files not committed" * bool(
            changed
        )

    def versions(self) -> str:
        """Compare the places that state the version, the date and the address."""
        text = {name: (self.tree / name).read_text(encoding="utf-8") for name in (*VERSIONS, "pyproject.toml")}
        found = {name: re.search(pattern, text[name], re.MULTILINE) for name, pattern in VERSIONS.items()}
        stated = {name: match and match[1] for name, match in found.items()}
        version = str(stated["speedtransfer/version.py"])
        wanted = {**dict.fromkeys(VERSIONS, version), "CHANGELOG.md": version.partition(".dev")[0]}
        if stated != wanted:
            raise CheckError(f"versions differ: {stated}")
        repository = re.search(r'^repository = "(.*)"$', text["pyproject.toml"], re.MULTILINE)
        address, dated = repository[1] if repository else "", str(found["CHANGELOG.md"][2])  # type: ignore[index]
        if tag := os.environ.get("RELEASE_TAG"):
            if tag != f"v{version}" or dated == "unreleased":
                raise CheckError(f"the tag is {tag}; the version is {version}, {dated}")
            if address != os.environ.get("RELEASE_REPOSITORY"):
                raise CheckError(f"repository in pyproject.toml is {address!r}, not that of this release")
        return f"{version}, {dated}; {address or 'no public address (pyproject.toml)'}"

    def build(self) -> str:
        """Build the source distribution, and from it the wheel."""
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        run(sys.executable, "-m", "build", "--outdir", ROOT / "dist", self.tree, cwd=self.empty)
        return ", ".join(
            f"{path.stat().st_size / 1e6:.1f} MB {path.suffix}" for path in sorted((ROOT / "dist").iterdir())
        )

    def twine(self) -> str:
        """Check the metadata and that an index can show the README."""
        run(sys.executable, "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir(), cwd=self.empty)
        return "passed, strict"

    def wheel_contents(self) -> str:
        """Check what is in the wheel."""
        return run(TOOLS / "check-wheel-contents", self.wheel, cwd=self.empty).rpartition(": ")[2].strip()

    def readme(self) -> str:
        """Look for links and pictures of the README that would lead nowhere on an index."""
        with zipfile.ZipFile(self.wheel) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            text = wheel.read(name).decode().partition("\n\n")[2]
        if found := RELATIVE.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
            raise CheckError(f"relative links: {', '.join(found)}")
        links = [link for link in re.findall(r"\]\((\S+?)\)", text) if link.startswith("http")]
        return f"{len(links)} links, none relative"

    def citation(self) -> str:
        """Validate CITATION.cff."""
        return last_line(run(TOOLS / "cffconvert", "--validate", "-i", self.tree / "CITATION.cff", cwd=self.empty))

    def workflows(self) -> str:
        """Have zizmor look for faults of security in the workflows."""
        return last_line(
            run(TOOLS / "zizmor", "--offline", "--no-progress", "--persona=pedantic", ".github", cwd=self.tree)
        )

    def install(self) -> str:
        """Install the wheel into a new environment."""
        run(sys.executable, "-m", "venv", self.python.parents[1], cwd=self.empty)
        self._pip(self.wheel)
        code = "import speedtransfer as st, torch; print(st.__file__, st.__version__, 'torch', torch.__version__)"
        where, _, versions = run(self.python, "-I", "-c", code, cwd=self.empty).strip().partition(" ")
        if not Path(where).is_relative_to(self.python.parents[1]):
            raise CheckError(f"imported from {where}")
        return versions

    def command_line(self) -> str:
        """Run the command line."""
        program = self.python.with_name("speedtransfer")
        run(program, "info", cwd=self.empty)
        return run(program, "--version", cwd=self.empty).strip()

    def training_step(self) -> str:
        """Run the first block of the README."""
        block = re.search(r"^```python\n(.*?)^```", (self.tree / "README.md").read_text(encoding="utf-8"), re.M | re.S)
        return last_line(run(self.python, "-I", "-c", block[1], cwd=self.empty))[:60] if block else "no block"

    def tests(self) -> str:
        """Run some tests of the source distribution on the installed wheel."""
        (archive,) = (ROOT / "dist").glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(self.sdist, filter="data")
        (unpacked,) = self.sdist.iterdir()
        self._pip(*FOR_TESTS)
        files = [f"tests/test_{name}.py" for name in TESTS]
        argv = [self.python.with_name("pytest"), "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *files]
        return last_line(run(*argv, cwd=unpacked))

    def _pip(self, *packages: str | Path) -> None:
        pip = [self.python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "-c", self.tree / "constraints.txt", *packages, cwd=self.empty)


VERSIONS = {
    "speedtransfer/version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$",
}
STEPS: Sequence[Callable[[Release], str]] = (
    Release.commit,
    Release.versions,
    Release.build,
    Release.twine,
    Release.wheel_contents,
    Release.readme,
    Release.citation,
    Release.workflows,
    Release.install,
    Release.command_line,
    Release.training_step,
    Release.tests,
)


def main() -> int:
    """Run the steps, and print a row for each as it ends."""
    names = [step.__name__.replace("_", "-") for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="STEP", help=f"of {', '.join(names)}")
    skip = parser.parse_args().skip
    failed = 0
    with tempfile.TemporaryDirectory(prefix="speedtransfer-release-") as folder:
        release = Release(Path(folder).resolve())
        for name, step in zip(names, STEPS, strict=True):
            if name in skip:
                continue
            begun = time.perf_counter()
            try:
                result, mark = step(release), "ok"
            except Exception as error:  # the steps after it are worth knowing, too
                result, mark = str(error) or type(error).__name__, "FAILED"
                failed += 1
            print(f"{name:15} {mark:6} {time.perf_counter() - begun:5.0f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
