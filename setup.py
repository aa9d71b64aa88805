"""What pyproject.toml cannot say by itself: the addresses, and README.md with links that work away from the repository."""

import re
import runpy
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["speedtransfer"]["repository"]
TAG = "v" + runpy.run_path(str(ROOT / "speedtransfer/version.py"))["__version__"]


def readme_for_an_index(text: str, repository: str, tag: str) -> str:
    """Lead relative links and pictures to this version in the repository; without its address leave their words alone."""
    relative = r"\((?!https?:|#)([^)\s]+)\)"
    if not repository:
        text = re.sub(rf"^!\[[^]]*]{relative}\n+", "", text, flags=re.MULTILINE)
        return re.sub(rf"\[([^]]*)]{relative}", r"\1", text)
    text = re.sub(rf"(!\[[^]]*]){relative}", rf"\1({repository}/raw/{tag}/\2)", text)
    return re.sub(rf"(\[[^]]*]){relative}", rf"\1({repository}/blob/{tag}/\2)", text)


setup(
    long_description=readme_for_an_index((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY, TAG),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    }
    if REPOSITORY
    else {},
)
