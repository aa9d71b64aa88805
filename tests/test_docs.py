"""The documentation site builds without a warning, names everything that is public, and shows code and commands that work."""

from __future__ import annotations

import functools
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
import typer
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt
from markdown_it.token import Token
from myst_parser.slugs import github_slugify, unique_slug

import speedtransfer
from speedtransfer import errors, speedtorch, word2vec
from speedtransfer.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = (line for block in blocks(page, "bash") for line in block.replace("\\\n", "").splitlines())
    return [argv for line in lines if (argv := shlex.split(line, comments=True))]


CODE = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
ALL_COMMANDS = [(page, argv) for page in PAGES for argv in commands(page)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    strict = ["-W", "--keep-going", "-n", "-q"]
    argv = [sys.executable, "-m", "sphinx", *strict, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_public_name_is_in_the_api(site):
    api = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    described = set(re.findall(r'id="(?:module-)?(speedtransfer[\w.]*)"', api))
    assert "speedtransfer.__version__" in api
    wanted = {f"speedtransfer.{name}" for name in speedtransfer.__all__} - {"speedtransfer.__version__"}
    wanted |= {f"speedtransfer.word2vec.{name}" for name in word2vec.__all__}
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    wanted |= {f"speedtransfer.errors.{kind.__name__}" for kind in raised}
    wanted |= {f"speedtransfer.Table.{name}" for name in ("gather", "scatter", "torch", "engine", "uniform_", "stats")}
    wanted |= {f"speedtransfer.speedtorch.{name}" for name in speedtorch.__all__}
    assert wanted <= described, sorted(wanted - described)


# What each page must have: figures, flags of commands, tabs for each build of torch, code that can be copied.
SHOWN = {
    "benchmarks": ("results/", "transfer.png"),
    "optimizers": ("idle.png",),
    "word2vec": ("gensim", "--shared-negatives", "--checkpoint-every", "--restrict", "--max-words"),
    "migration": ("speedtorch_loop",),
    "quickstart": ("copybutton.js",),
    "memory": (),
}


@pytest.mark.slow
def test_every_page_is_built_and_filled_in(site):
    notebooks = {path.stem for path in ROOT.glob("notebooks/*.ipynb")}
    for page in (f"notebooks/{name}" for name in notebooks):
        assert (site / f"{page}.html").exists(), page
    text = {page: (site / f"{page}.html").read_text(encoding="utf-8") for page in PAGES}
    for page, words in SHOWN.items():
        assert all(word in text[page] for word in words), page
    for marker in re.findall(r"^<!-- table: .*-->$", "\n".join(PAGES.values()), re.MULTILINE):
        assert not any(marker in page for page in text.values())
    labels = BeautifulSoup(text["quickstart"], "html.parser").article.select("label.tab-label")
    assert [label.get_text(strip=True) for label in labels] == ["CPU", "CUDA 13", "CUDA 12"]


@pytest.fixture(scope="module")
def pages(site):
    """Every page that has a text of ours, parsed: all but the search and the indexes."""
    made = {"search.html", "genindex.html", "py-modindex.html"}
    paths = [path for path in sorted(site.rglob("*.html")) if path.name not in made and "_static" not in path.parts]
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in paths}


@pytest.mark.slow
def test_tables_and_code_scroll_in_their_box(pages):
    """A phone shows no page wider than itself: tables and code are in the containers for which furo has scrollbars."""
    count = 0
    for path, page in pages.items():
        for table in page.article.select("table.docutils"):
            assert "table-wrapper" in table.parent["class"], path.name
            count += 1
        for code in page.article.find_all("pre"):
            assert code.find_parent("div", class_="highlight"), path.name
    assert count > 50


@pytest.mark.slow
def test_links_lead_to_what_is_there(site, pages):
    named = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    for path, page in pages.items():
        for link in page.article.find_all("a", href=True):
            url = urlsplit(link["href"])
            if url.scheme:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), (path.name, link["href"])
            if url.fragment and target in named:
                assert unquote(url.fragment) in named[target], (path.name, link["href"])


# Loads page after page into a frame of each width and writes the names of those that are wider than it into its own text.
IN_FRAMES = """<!doctype html><meta charset="utf-8"><body><iframe height="800" style="border: 0"></iframe><pre></pre><script>
const pages = PAGES, frame = document.querySelector("iframe"), wide = []
const load = (page, width) => new Promise(done => {
  frame.onload = () => {
    const shown = frame.contentDocument
    // On a phone furo lets the text as a whole scroll sideways; it should not have to.
    const boxes = [shown.documentElement, shown.querySelector(".content")]
    // Code scrolls in its cell of such a table; long messages break where there is room for a table at all.
    boxes.push(...shown.querySelectorAll(".table-wrapper:has(> table.cases)"))
    if (width > 390) boxes.push(...shown.querySelectorAll("#errors .table-wrapper"))
    for (const box of boxes)
      if (box.scrollWidth > box.clientWidth) wide.push(`${page}: ${box.scrollWidth} of ${box.clientWidth}, at ${width}`)
    done(frame.contentDocument.querySelectorAll("article").length)
  }
  frame.width = width
  frame.src = page
})
async function run() {
  let seen = 0
  for (const width of [390, 1280]) for (const page of pages) seen += await load(page, width)
  document.querySelector("pre").textContent = JSON.stringify({seen, wide})
}
run()
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_no_page_is_wider_than_the_screen(site, pages):
    """As a phone and a small desktop show it."""
    names = [path.relative_to(site).as_posix() for path in pages]
    (site / "in_frames.html").write_text(IN_FRAMES.replace("PAGES", json.dumps(names)), encoding="utf-8")
    argv = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    argv += [f"--user-data-dir={site.parent / 'browser'}", "--virtual-time-budget=600000", "--dump-dom"]
    argv += [(site / "in_frames.html").as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    found = json.loads(BeautifulSoup(done.stdout, "html.parser").pre.get_text())
    assert found == {"seen": 2 * len(names), "wide": []}


# --- the same of the sources, which takes no build -------------------------------------------------------------------------

SOURCES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def headings(tokens: list[Token]) -> list[tuple[str, str]]:
    """The tag and the text of each."""
    pairs = itertools.pairwise(tokens)
    return [(token.tag, text_of(inline)) for token, inline in pairs if token.type == "heading_open"]


def text_of(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [])


@functools.cache
def anchors(path: Path) -> set[str]:
    found: set[str] = set()
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


def test_code_fits_the_page():
    """As wide as a line may be that a window of 1,280 pixels shows without scrolling."""
    for page in PAGES:
        for language in ("python", "bash", "text", "diff", "toml"):
            for line in "".join(blocks(page, language)).splitlines():
                assert len(line) <= 110, (page, line)


def test_tables_that_the_site_takes_from_the_readme():
    """Those that a change of README.md can break; the slow tests build them all."""
    tables = runpy.run_path(str(DOCS / "reference_tables.py"))["TABLES"]
    assert "GPU" in tables["status"]()
    assert "Speed" in tables["first screen"]()


def test_classes_of_tables_have_a_style():
    style = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    tables = (DOCS / "reference_tables.py").read_text(encoding="utf-8")
    names = set(re.findall(r'(?:_classed\("|:class: |container\}\} )([a-z-]+)', tables))
    assert {"cases", "flags", "first-screen"} <= names
    for name in names:
        assert f".{name} " in style or f".{name}." in style, name


@pytest.mark.slow
def test_names_of_torch_lead_to_its_documentation(tmp_path):
    """With an inventory that knows them, as where there is a network: not in titles, links and code."""
    names = "torch.nn.Embedding py:class 1 generated/torch.nn.Embedding.html#$ -\nos.fork py:function 1 library/os.html#$ -\n"
    head = "".join(f"# {line}\n" for line in ("Sphinx inventory version 2", "Project: p", "Version: 1", "zlib"))
    (tmp_path / "made.inv").write_bytes(head.encode() + zlib.compress(names.encode()))
    (tmp_path / "conf.py").write_text(
        f"import runpy\nglobals().update(runpy.run_path({str(DOCS / 'conf.py')!r}))\nhtml_static_path = html_css_files = []\n"
        "intersphinx_mapping = {'torch': ('https://example.org/', 'made.inv')}\n"
    )
    (tmp_path / "index.md").write_text(
        "# `os.fork`\n\n`torch.nn.Embedding`, [`os.fork`](#os-fork), `torch.nn.Linear`, `os`\n\n```\ntorch.nn.Embedding\n```\n"
    )
    argv = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", str(tmp_path), str(tmp_path / "html")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = BeautifulSoup((tmp_path / "html" / "index.html").read_text(encoding="utf-8"), "html.parser")
    (link,) = page.article.find_all("a", href=re.compile("^https://example.org/"))
    assert link["href"] == "https://example.org/generated/torch.nn.Embedding.html#torch.nn.Embedding"
    assert link.get_text() == "torch.nn.Embedding"


@pytest.mark.slow
def test_code_of_the_api_is_shown(site, pages):
    source = site / "_modules" / "speedtransfer" / "nn" / "embedding.html"
    links = [a["href"] for a in pages[site / "api" / "modules.html"].article.select("a:has(.viewcode-link)")]
    assert "../_modules/speedtransfer/nn/embedding.html#Embedding" in links
    assert "class" in BeautifulSoup(source.read_text(encoding="utf-8"), "html.parser").pre.get_text()


def test_the_sidebar_is_in_groups():
    trees = re.findall(r"^```\{toctree}\n(.*?)\n\n(.*?)^```", PAGES["index"], re.MULTILINE | re.DOTALL)
    groups = {re.search(":caption: (.+)", options)[1]: entries.split() for options, entries in trees}
    assert all(len(entries) <= 7 for entries in groups.values())
    named = [entry for entries in groups.values() for entry in entries]
    assert sorted(named) == sorted({*PAGES, "api/index", "notebooks**"} - {"index", "notebooks"})


@pytest.mark.parametrize(("page", "number"), CODE, ids=[f"{page}-{number}" for page, number in CODE])
def test_python(page, number, tmp_path, monkeypatch):
    code = blocks(page, "python")[number]
    if "fullgraph=True" in code and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 a lookup breaks the graph")
    old_names = "speedtransfer.speedtorch" in code
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(), warnings.catch_warnings():
        if old_names and not torch.cuda.is_available():
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
    ours = [argv[1:] for argv in commands("word2vec") if argv[0] == "speedtransfer"]
    assert {argv[1] for argv in ours} == {"train", "nearest", "analogy", "evaluate", "plot", "convert"}
    for argv in ours:
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
        # tests/ranks/test_docs_processes.py runs them.
        assert f":caption: {arguments[-1]}\n" in PAGES[page]
    elif argv[:3] == ["pip", "install", "torch"]:
        assert argv[3] == "--index-url"
        assert re.fullmatch(r"https://download\.pytorch\.org/whl/(cpu|cu126)", argv[4])
    elif argv[:3] == ["python3", "-m", "venv"]:
        assert argv[4:] == ["&&", ".", f"{argv[3]}/bin/activate"]
    else:
        assert argv[:3] == ["pip", "install", "-e"]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
        assert set(filter(None, arguments[2].strip(".[]").split(","))) <= extras


def check_target(arguments: list[str]) -> None:
    """Check a call of make: the target, and the flags in ARGS by the script that it runs."""
    target, *variables = arguments
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe, target
    script = (
        "bench/record.py"
        if "RECORD" in recipe[1]
        else (re.findall(r"(?:bench|examples)/\w+\.py", recipe[1]) or [None])[0]
    )
    for name, value in (variable.split("=", 1) for variable in variables):
        assert f"$({name})" in recipe[1] + makefile.partition("RECORD =")[2].partition("\n")[0]
        if name == "ARGS":
            check_flags(script, shlex.split(value))


def check_flags(script: str, arguments: list[str]) -> None:
    """Look for the flags in the source: a script, or the settings that it makes flags of (idle_data.py beside idle.py)."""
    path = ROOT / script
    source = "".join(file.read_text(encoding="utf-8") for file in path.parent.glob(f"{path.stem}*.py"))
    for flag in (argument for argument in arguments if argument.startswith("--") and argument != "--help"):
        name = flag[2:].replace("-", "_")
        field = rf'^    ({name}|"{name}"): '
        assert f'"{flag}"' in source or re.search(field, source, re.MULTILINE), f"{script} has no {flag}"


def test_every_make_target_and_command_named_exists():
    text = "\n".join(PAGES.values())
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= targets
    names = typer.main.get_command(app).commands.keys()
    assert set(re.findall(r"`speedtransfer ([a-z0-9-]+)", text)) <= names
