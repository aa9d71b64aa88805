"""The files of this repository, as they lie in a folder or as a commit has them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

Read = Callable[[str], "str | None"]


def in_folder(root: Path) -> Read:
    """Return a function that reads a file of a folder by its name from `root` on; None where there is none."""

    def read(name: str) -> str | None:
        return (root / name).read_text(encoding="utf-8") if (root / name).is_file() else None

    return read


def in_commit(root: Path, commit: str, *folders: str) -> dict[str, str]:
    """Return the text files of a commit by name, those of `folders` (by default of all).

    Raises
    ------
    LookupError
        git is not there, or does not know the commit.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", "--end-of-options", commit]
    if not (root / ".git").exists():  # git would find whatever repository is around it
        raise LookupError(f"{root} is no git repository")
    try:
        packed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError(f"git cannot read commit {commit!r} ({error}); is it one of this repository?") from error
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and (not folders or member.name.startswith(folders)):
                found[member.name] = file.read().decode("utf-8", "replace")
    return found
