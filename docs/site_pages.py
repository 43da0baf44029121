"""Pages of the site that are not in this folder: files at the top of the repository, and source files that pages link to.

A hook of MkDocs (``mkdocs.yml``). In the repository a page links to what lies beside ``docs`` by ``../``; in the site each such
target is a page of its own, so that every link leads somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
TOP = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".html": "html",
    ".js": "javascript",
    ".cpp": "cpp",
    ".c": "c",
    ".h": "c",
    ".sh": "sh",
    ".toml": "toml",
}
LONGEST = 200_000
"""Bytes of a file that is shown."""


def on_config(config: Any) -> Any:
    """Make the navigation of the sections of ``index.md`` and the pages that they list, in their order."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    nav: list[Any] = [{"burnish": "index.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        listed = re.findall(r"^- \[(?P<name>[^\]]+)\]\((?P<target>[^)#]+)\)", section, re.MULTILINE)
        nav.append({title: [{name: _in_site(target)} for name, target in listed]})
    nav.append({"Changes": "CHANGELOG.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file at the top, and for each file or folder beside ``docs`` that any page links to."""
    contents = {name: (ROOT / name).read_text(encoding="utf-8") for name in TOP}
    pages = [file for file in files if file.src_uri.endswith(".md")]
    texts = [*(page.content_string for page in pages), *contents.values()]
    targets = {path for text in texts for path in map(_outside, _targets(text)) if path is not None}
    for folder in [path for path in targets if path.is_dir()]:
        targets |= {path for path in folder.rglob("*") if path.is_file() and path.suffix in LANGUAGES}
    for name, text in contents.items():
        files.append(File.generated(config, name, content=_moved(text, "")))
    for path in sorted(targets):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that lead out of ``docs`` lead to the pages that stand for their targets."""
    return markdown if page.file.generated_by else _moved(markdown, "../")


def _targets(text: str) -> list[str]:
    return [match["target"] for match in LINK.finditer(text)]


def _outside(target: str) -> Path | None:
    """The file or folder of the repository that a link of a page leads to; None where it is a page, or elsewhere."""
    if re.match(r"[a-z]+:", target) or target.removeprefix("../") in TOP:
        return None
    path = (ROOT / "docs" / target).resolve() if target.startswith("../") else (ROOT / target).resolve()
    return path if path.is_relative_to(ROOT) and path.exists() and not path.is_relative_to(ROOT / "docs") else None


def _page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _in_site(target: str) -> str:
    path = _outside(target)
    return target.removeprefix("../") if path is None else _page_of(path)


def _moved(text: str, up: str) -> str:
    """A text of a page in ``docs``, or of a file at the top (no ``up``), with the links that the site needs."""

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if (path := _outside(target)) is not None:
            return f"]({_page_of(path)}{anchor if path.suffix == '.md' else ''})"
        if up and target.startswith(up) and target.removeprefix(up) in TOP:
            return f"]({target.removeprefix(up)}{anchor})"
        return f"]({target.removeprefix('docs/')}{anchor})" if not up else match[0]

    return LINK.sub(replaced, text)


def _shown(path: Path) -> str:
    """The page of a file, or of a folder: its files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in LANGUAGES)
        lines = [f"- [{file.relative_to(path).as_posix()}]({_from(path, file)})" for file in files]
        return f"# {name}\n\n" + "\n".join(lines) + "\n"
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")[:LONGEST]
    fence = "`" * 4
    return f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, '')}\n{text}\n{fence}\n"


def _from(folder: Path, file: Path) -> str:
    here, there = PurePosixPath(_page_of(folder)).parent, PurePosixPath(_page_of(file))
    return there.relative_to(here).as_posix()
