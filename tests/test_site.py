"""The documentation site builds without a warning, so that no link is broken, names all that is public, and fits a phone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

import speedtransfer
from speedtransfer import errors, speedtorch, word2vec

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    strict = ["-W", "--keep-going", "-n", "-q"]
    argv = [sys.executable, "-m", "sphinx", *strict, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return folder / "html"


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


def test_every_page_is_built_and_filled_in(site):
    notebooks = {path.stem for path in ROOT.glob("notebooks/*.ipynb")}
    for page in (f"notebooks/{name}" for name in notebooks):
        assert (site / f"{page}.html").exists(), page
    text = {path.stem: (site / f"{path.stem}.html").read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert not [page for page, shown in text.items() if "<!-- table: " in shown]
    labels = BeautifulSoup(text["quickstart"], "html.parser").article.select("label.tab-label")
    assert [label.get_text(strip=True) for label in labels] == ["CPU", "CUDA 13", "CUDA 12"]


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


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_no_page_is_wider_than_the_screen(site):
    """As a phone and a small desktop show it: each that has a text of ours, all but the search and the indexes."""
    made = {"search.html", "genindex.html", "py-modindex.html"}
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if path.name not in made]
    names = [name for name in names if "_static/" not in name]
    (site / "in_frames.html").write_text(IN_FRAMES.replace("PAGES", json.dumps(names)), encoding="utf-8")
    argv = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    argv += [f"--user-data-dir={site.parent / 'browser'}", "--virtual-time-budget=600000", "--dump-dom"]
    argv += [(site / "in_frames.html").as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    found = json.loads(BeautifulSoup(done.stdout, "html.parser").pre.get_text())
    assert found == {"seen": 2 * len(names), "wide": []}
