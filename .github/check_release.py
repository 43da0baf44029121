"""Compare the files that name burnish's version and repository with one another, and with the tag of a release.

``python .github/check_release.py`` compares the versions. The release workflow also gives ``--tag v0.2.0`` and
``--repository https://github.com/owner/name``: then the changelog must have the day of the release, the citation the same day,
``tests/files/released`` the files of the version, and all files the address of the repository. It prints every file that
differs, with the entry that is expected there, and then exits with 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/burnish/version.py"
CHANGELOG, CITATION, CLIENT, LOCK = "CHANGELOG.md", "CITATION.cff", "clients/js/package.json", "clients/js/package-lock.json"
RELEASED = "tests/files/released"
"""A folder for each release, which ``tests/files/released_files.py`` writes."""


def problems(root: Path = ROOT, tag: str | None = None, repository: str | None = None) -> list[str]:
    """Return a line for each file that differs, with what to write there; none if all agree."""
    version = runpy.run_path(str(root / SOURCE))["__version__"]
    client, lock = (json.loads((root / name).read_text(encoding="utf-8")) for name in (CLIENT, LOCK))
    citation = dict(re.findall(r"^([\w-]+): *(.*?) *$", (root / CITATION).read_text(encoding="utf-8"), re.MULTILINE))
    heading = re.search(r"^## (\S+) \((.*)\)$", (root / CHANGELOG).read_text(encoding="utf-8"), re.MULTILINE)
    newest, newest_day = heading.groups() if heading else ("", "")

    # File, what it is about there, what is there, what should be.
    rows = [
        (CLIENT, "version", client.get("version"), version),
        (LOCK, "version", lock.get("version"), version),
        (LOCK, 'packages[""].version', lock["packages"][""].get("version"), version),
        (CITATION, "version", citation.get("version"), version),
        (CHANGELOG, "the newest heading", newest, version),
    ]
    if tag is not None:
        day = newest_day if _is_day(newest_day) else "YYYY-MM-DD"
        rows += [
            ("the tag", "its name", tag, f"v{version}"),
            (CHANGELOG, "the day of the newest heading", newest_day, day),
            (CITATION, "date-released", citation.get("date-released"), day),
            (RELEASED, "the newest folder", _newest(root / RELEASED), version),
        ]
    if repository is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        rows += [
            ("pyproject.toml", "project.urls.Repository", project.get("urls", {}).get("Repository"), repository),
            (CLIENT, "repository.url", client.get("repository", {}).get("url"), f"git+{repository}.git"),
            (CITATION, "repository-code", citation.get("repository-code"), repository),
        ]
    return [
        f"{file}: {subject} is {'missing' if found is None else repr(found)}, expected {expected!r}"
        for file, subject, found, expected in rows
        if found != expected
    ]


def _newest(folder: Path) -> str | None:
    """Return the highest version that has a folder here; None if none has."""
    names = [path.name for path in folder.glob("*.*.*")]
    return max(names, key=lambda name: [int(part) for part in name.split(".")], default=None)


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag of the release, such as v0.2.0")
    parser.add_argument("--repository", help="the address of the repository, without a slash at its end")
    options = parser.parse_args()
    found = problems(tag=options.tag, repository=options.repository)
    print("\n".join(found) or "Every file agrees")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
