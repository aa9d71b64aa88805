"""README.md, the pages of docs/ and the notebooks: their code and commands work, and links lead to what is there."""

import ast
import functools
import importlib.metadata
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import torch
import typer
from markdown_it import MarkdownIt
from myst_parser.slugs import github_slugify, unique_slug

from speedtransfer import word2vec
from speedtransfer.benchmark import measure
from speedtransfer.cli import app
from speedtransfer.engines import auto
from speedtransfer.engines.calibration import load
from speedtransfer.planning import timed_trial
from speedtransfer.word2vec import Settings, run_folder

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def commands(page):
    lines = (line for block in blocks(page, "bash") for line in block.replace("\\\n", "").splitlines())
    return [argv for line in lines if (argv := shlex.split(line, comments=True))]


CODE = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
ALL_COMMANDS = [(page, argv) for page in PAGES for argv in commands(page)]


# --- code ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "number"), CODE, ids=[f"{page}-{number}" for page, number in CODE])
def test_python(page, number, tmp_path, monkeypatch):
    # A million rows show no more.
    code = blocks(page, "python")[number].replace("1_000_000", "100_000").replace("999_999", "99_999")
    if "fullgraph=True" in code and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 a lookup breaks the graph")
    monkeypatch.chdir(tmp_path)
    # What a plan has measured does not matter here.
    monkeypatch.setattr(timed_trial, "_LIMIT_S", 0.0)
    # Here and not in a process of its own, which would take seconds to import torch.
    with torch.random.fork_rng(), warnings.catch_warnings():
        if "speedtransfer.speedtorch" in code and not torch.cuda.is_available():
            warnings.simplefilter("ignore")  # it says that it runs on the CPU
        exec(compile(code, f"{page}.md, block {number}", "exec"), {"__name__": "__main__"})


def test_moved_script_gives_the_same_numbers(tmp_path, monkeypatch, capsys):
    (diff,) = blocks("move-your-model", "diff")
    lines = diff.splitlines()
    assert {line[:1] for line in lines} == {"", " ", "+"}
    printed = []
    monkeypatch.chdir(tmp_path)
    for kept in ((" ", ""), (" ", "", "+")):
        code = "\n".join(line[1:] for line in lines if line[:1] in kept)
        with torch.random.fork_rng():
            exec(compile(code, "move-your-model.md", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[1][:-2] == ["users: a table", "items: a table", "bias: a table"]
    ours, theirs = (re.split(r"(\d+\.\d+)", "\n".join(lines[-2:])) for lines in printed[::-1])
    assert ours[::2] == theirs[::2]
    # Rounding, which differs from CPU to CPU, may reach the last digit printed.
    assert [float(x) for x in ours[1::2]] == pytest.approx([float(x) for x in theirs[1::2]], rel=1e-3)


# --- commands -----------------------------------------------------------------------------------------------------------


def ours(page):
    return [argv[1:] for argv in commands(page) if argv[0] == "speedtransfer"]


@pytest.mark.slow
def test_commands_of_the_readme_run(tmp_path, monkeypatch):
    """All of them in this process: the demo in one epoch, and what measures with few rows and samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measure.EFFORT, True, {"turns": 1, "samples": 1, "budget_s": 0.0})
    monkeypatch.setattr(auto, "PLANE_BYTES", 1 << 20)
    monkeypatch.setattr(
        run_folder.run_demo, "__defaults__", (False, Settings(dim=8, epochs=1, block_words=20_000), print)
    )
    assert {argv[0] for argv in ours("README")} == {"info", "word2vec", "bench", "calibrate"}
    for argv in ours("README"):
        small = ["--rows", "100", "--table-bytes", "262144"] if argv[0] == "bench" else []
        assert not app([*argv, *small], standalone_mode=False), argv
    assert (tmp_path / "words.png").stat().st_size > 1000
    assert (tmp_path / "report" / "report.md").exists()
    assert load(torch.device("cpu")) is not None, "calibrate has kept what it measured"


@pytest.mark.slow
def test_word2vec_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["river", "water", "bank", "stone", "the", "of"]
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(2000))
    (tmp_path / "corpus.txt").write_text(text)
    (tmp_path / "sessions.txt").write_text("\n".join(text[i : i + 60] for i in range(0, 3000, 60)))
    (tmp_path / "pairs.txt").write_text("river water 9\nriver stone 3\nbank stone 5\nwater bank 4\n")
    (tmp_path / "questions.txt").write_text(": all\nriver water bank stone\nwater river stone bank\n")
    (tmp_path / "edges.txt").write_text("\n".join(f"n{i} n{(i + 1) % 20}" for i in range(20)))
    (tmp_path / "neighbours.txt").write_text("\n".join(f"n{i} n{(i + 1) % 20} n{(i + 5) % 20}" for i in range(20)))
    (tmp_path / "run.toml").write_text(blocks("word2vec", "toml")[0])
    assert {argv[1] for argv in ours("word2vec")} == {"train", "nearest", "analogy", "evaluate", "plot", "convert"}
    for argv in ours("word2vec"):
        assert not app(argv, standalone_mode=False), argv
    assert (tmp_path / "words.png").stat().st_size > 1000
    assert len(word2vec.Vectors.load("vectors.safetensors")) == len(words)


@pytest.mark.parametrize(("page", "argv"), ALL_COMMANDS, ids=[" ".join(argv)[:60] for _, argv in ALL_COMMANDS])
def test_commands_exist(page, argv):
    # Variables of the environment may come first.
    program, *arguments = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), argv)
    if program == "speedtransfer":
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(command.name, arguments)  # raises for a flag or a value that it does not take
    elif program == "make":
        check_target(arguments)
    elif program == "python":
        check_flags(arguments[0], arguments[1:])
    elif program == "torchrun":
        # tests/ranks/test_launched.py runs them.
        (script,) = (argument for argument in arguments if argument.endswith(".py"))
        assert f":caption: {script}\n" in PAGES[page] or (ROOT / script).is_file()
    elif argv[:3] == ["pip", "install", "torch"]:
        assert argv[3] == "--index-url"
        assert re.fullmatch(r"https://download\.pytorch\.org/whl/(cpu|cu126)", argv[4])
    elif argv[:3] == ["python3", "-m", "venv"]:
        assert argv[4:] == ["&&", ".", f"{argv[3]}/bin/activate"]
    elif argv[:3] == ["pip", "install", "-e"]:
        extras = importlib.metadata.metadata("speedtransfer").get_all("Provides-Extra", [])
        assert set(filter(None, arguments[2].strip(".[]").split(","))) <= set(extras)
    else:
        assert argv[:2] in (["git", "clone"], ["cd", "speedtransfer"])


def check_target(arguments):
    """Check a call of make: the target, and the flags in ARGS by the script that it runs."""
    target, *variables = arguments
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe, target
    scripts = ["bench/record.py"] if "RECORD" in recipe[1] else re.findall(r"(?:bench|examples)/\w+\.py", recipe[1])
    for name, value in (variable.split("=", 1) for variable in variables):
        assert f"$({name})" in recipe[1] + MAKEFILE.partition("RECORD =")[2].partition("\n")[0]
        if name == "ARGS":
            check_flags(scripts[0], shlex.split(value))


def check_flags(script, arguments):
    """Look for the flags in the source of a script, or in the settings that it makes flags of."""
    source = (ROOT / script).read_text(encoding="utf-8")
    for flag in (argument for argument in arguments if argument.startswith("--") and argument != "--help"):
        name = flag[2:].replace("-", "_")
        field = rf'^    ({name}|"{name}"): '
        assert f'"{flag}"' in source or re.search(field, source, re.MULTILINE), f"{script} has no {flag}"


def test_every_make_target_and_command_named_exists():
    text = "\n".join(PAGES.values())
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= targets
    names = typer.main.get_command(app).commands.keys()
    assert set(re.findall(r"`speedtransfer ([a-z0-9-]+)", text)) <= names


# --- pages --------------------------------------------------------------------------------------------------------------

SOURCES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def headings(tokens):
    pairs = itertools.pairwise(tokens)
    return [(token.tag, text_of(inline)) for token, inline in pairs if token.type == "heading_open"]


def text_of(inline):
    return "".join(child.content for child in inline.children or [])


@functools.cache
def anchors(path):
    found = set()
    for _, text in headings(MARKDOWN.parse(path.read_text(encoding="utf-8"))):
        found.add(unique_slug(github_slugify(text), found))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_titles_links_and_pictures(path):
    """One title a page; links lead to files and headings; pictures are there and say what they show."""
    tokens = MARKDOWN.parse(path.read_text(encoding="utf-8"))
    assert [tag for tag, _ in headings(tokens)].count("h1") == 1
    for part in (child for token in tokens for child in token.children or []):
        if part.type == "image":
            assert (path.parent / unquote(str(part.attrs["src"]))).stat().st_size > 0, part.attrs["src"]
            assert len(text_of(part).split()) > 1, part.attrs["src"]
        if part.type != "link_open" or (url := urlsplit(str(part.attrs["href"]))).scheme:
            continue
        target = (path.parent / unquote(url.path)).resolve() if url.path else path
        assert target.exists(), part.attrs["href"]
        # Names of the API are made by the build, which the slow tests look at.
        if url.fragment and target.suffix == ".md" and "api" not in target.parts:
            assert unquote(url.fragment) in anchors(target), part.attrs["href"]


def test_tables_of_the_pages_are_made(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    tables = dict(importlib.import_module("reference_tables").TABLES)
    del tables["plan hosts"]  # that takes as long as all others
    assert {name: len(make()) > 50 for name, make in tables.items()} == dict.fromkeys(tables, True)


def test_figures_are_those_of_the_results(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    assert importlib.import_module("readme").main(check=True) == 0, capsys.readouterr().err


# --- notebooks ----------------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 150_000  # of a notebook with its outputs: a repository keeps every version
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def convert(path, folder, **env):
    # A process of its own: the libraries around Jupyter warn of themselves, which is an error in this one.
    config = ROOT / "notebooks" / "nbconvert_config.py"
    argv = [sys.executable, "-m", "nbconvert", "--config", config, "--output-dir", folder, path]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False, env=env)


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_at_the_small_size(path, tmp_path):
    before = path.read_bytes()
    done = convert(path, tmp_path, SPEEDTRANSFER_SMALL="1", SPEEDTRANSFER_DATA="")
    assert done.returncode == 0, done.stderr
    assert [cell.execution_count for cell in code_of(tmp_path / path.name)] == list(range(1, len(code_of(path)) + 1))
    assert path.read_bytes() == before, "a small run leaves the outputs that readers see"


@every_notebook
def test_names_that_a_notebook_imports_are_there(path):
    found = 0
    for cell in code_of(path):
        for node in ast.parse(cell.source).body:
            names = [getattr(node, "module", None), *(each.name for each in getattr(node, "names", []))]
            if isinstance(node, ast.Import | ast.ImportFrom) and any("speedtransfer" in str(name) for name in names):
                exec(compile(ast.Module([node], []), str(path), "exec"), {})
                found += 1
    assert found


@every_notebook
def test_outputs_of_a_notebook(path):
    """What is shown is of one run from the top, without an error, a warning or a path of a machine."""
    notebook, cells = nbformat.read(path, as_version=4), code_of(path)
    nbformat.validate(notebook)
    assert f"({path.name})" in (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    places = {f"{place}/" for place in (Path.home(), ROOT, tempfile.gettempdir(), "/tmp", "/home", "/root")} - {"//"}
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        shown = [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/png")]
        text = "\n".join(map(str, [output.get("text", ""), *shown]))
        assert not [place for place in places if place in text]
    assert path.stat().st_size <= MOST_BYTES
    assert set(notebook.metadata) == {"kernelspec", "language_info"}, "it was not written by `make notebooks`"
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"mystnb"}
