"""Sphinx configuration: ``make docs``, or ``python -m sphinx -W --keep-going -n docs docs/_build``.

Needs no network; with one, names of torch, NumPy and Python lead to their documentation.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import Element, Node, literal, reference, title
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, also where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from reference_tables import fill

from speedtransfer import errors
from speedtransfer.version import __version__

project = "speedtransfer"
author = "the speedtransfer developers"
release = version = __version__
copyright = author
PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PYPROJECT["tool"]["speedtransfer"]["repository"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_inline_tabs",
]
exclude_patterns = ["_build", "jupyter_execute", "notebooks/README.md"]

# --- pages --------------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"speedtransfer {release}"
# To the source of each page, once there is a public address.
html_theme_options = (
    {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"} if REPOSITORY else {}
)
copybutton_selector = ":not(.output) > .highlight > pre"  # not on what cells of notebooks have printed
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
smartquotes = False  # a "name" in quotes is typed as it stands
pygments_style, pygments_dark_style = "tango", "monokai"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are shown as they were run

# --- docstrings ---------------------------------------------------------------------------------------------------------

default_role = "code"  # `name` in a docstring is an argument or an attribute more often than an object of its own
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say the types, and the shapes
napoleon_google_docstring = False
napoleon_use_param = False  # types are prose ("ndarray of float32, shape (n,)"), not names to look up
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

# --- references ---------------------------------------------------------------------------------------------------------

# The second inventory is empty: where the first cannot be fetched, names of these projects stay plain text, without a warning.
intersphinx_mapping = {
    "numpy": ("https://numpy.org/doc/stable/", (None, "no-names.inv")),
    "python": ("https://docs.python.org/3/", (None, "no-names.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable/", (None, "no-names.inv")),
}
intersphinx_timeout = 10

# Nitpicky (-n) but for the names of other projects, which are known only with a network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(torch|nn|np|numpy|collections|typing|os|pathlib)\..*")]
# Classes and functions that docstrings refer to and that are no public names: plain text as well.
nitpick_ignore = [("py:func", "read_graph"), ("py:func", "join_phrases")]
ERRORS = {value.__name__ for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}


def find_error(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> Element | None:
    """Lead the names in "Raises" sections to the page of errors: docstrings name them without their module."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in ERRORS:
        return None
    domain = env.domains["py"]
    target = f"speedtransfer.errors.{name}"
    return domain.resolve_xref(env, node["refdoc"], app.builder, "exc", target, node, contnode)


class ForeignNames(SphinxTransform):
    """Have `torch.nn.Embedding` in the text lead to where it is documented, if an inventory knows it."""

    default_priority = 500
    NAME = re.compile(r"(?:torch|numpy|collections|functools|os|pathlib|typing)\.[A-Za-z][\w.]*")

    def apply(self, **_: Any) -> None:
        """Wrap the names, but not in links and titles."""
        for node in list(self.document.findall(literal)):
            name = node.astext()
            if not self.NAME.fullmatch(name) or _within(node, (reference, pending_xref, title)):
                continue
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=name, refexplicit=True, refwarn=False)
            link["refdoc"] = self.env.docname
            node.replace_self(link)
            link += node


def _within(node: Node, kinds: tuple[type[Node], ...]) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, kinds):
            return True
    return False


def fill_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put what the page does not hold itself into it."""
    source[0] = fill(source[0])


def drop_wrong_links_back(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Node | None
) -> None:
    """Leave out links from a source to names that there are not: viewcode has all names of a file in one public module."""
    if pagename.startswith("_modules/"):
        names = app.env.domains["py"].data["objects"]
        back = re.compile(r'<a class="viewcode-back" href="[^"#]*#([^"]*)">.*?</a>')
        context["body"] = back.sub(lambda link: link[0] if link[1] in names else "", context["body"])


def restore_property(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon makes of a property's first line with a colon: it takes the words before it for a type."""
    text = inspect.getdoc(obj) or ""
    if what == "property" and ":" in text.partition("\n")[0]:
        lines[:] = [*text.splitlines(), ""]


def setup(app: Sphinx) -> None:
    """Register what is ours."""
    app.add_transform(ForeignNames)
    app.connect("source-read", fill_tables)
    app.connect("autodoc-process-docstring", restore_property, priority=600)  # napoleon's is 500
    app.connect("html-page-context", drop_wrong_links_back)
    app.connect("missing-reference", find_error)
