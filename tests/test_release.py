"""A release: one version and one repository in every file, metadata that package indexes can show, workflows that are pinned."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import burnish

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/owner/name"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMPARED = (
    "CHANGELOG.md",
    "CITATION.cff",
    "clients/js/package-lock.json",
    "clients/js/package.json",
    "pyproject.toml",
    "src/burnish/version.py",
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")

specification = importlib.util.spec_from_file_location("check_release", ROOT / ".github" / "check_release.py")
check_release = importlib.util.module_from_spec(specification)
specification.loader.exec_module(check_release)


def change(path: Path, pattern: str, replacement: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert count == 1, f"{path.name} has no {pattern}"
    path.write_text(changed, encoding="utf-8")


def name_the_repository(root: Path) -> None:
    change(root / "pyproject.toml", r"^\[project\.scripts\]", f'[project.urls]\nRepository = "{REPOSITORY}"\n\n[project.scripts]')


@pytest.fixture
def released(tmp_path):
    """The files that name version and repository, as they are for the release of 1.2.3."""
    for name in COMPARED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in COMPARED:
        text = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(burnish.__version__, "1.2.3"), encoding="utf-8")
    change(tmp_path / "CHANGELOG.md", r"^## .*$", "## 1.2.3 (2031-02-28)")
    citation = (tmp_path / "CITATION.cff").read_text(encoding="utf-8")
    (tmp_path / "CITATION.cff").write_text(
        f"{citation}date-released: 2031-02-28\nrepository-code: {REPOSITORY}\n", encoding="utf-8"
    )
    client = json.loads((tmp_path / "clients/js/package.json").read_text(encoding="utf-8"))
    client["repository"] = {"type": "git", "url": f"git+{REPOSITORY}.git", "directory": "clients/js"}
    (tmp_path / "clients/js/package.json").write_text(json.dumps(client, indent=2), encoding="utf-8")
    name_the_repository(tmp_path)
    for version in ("1.2.3", "0.10.0", "0.9.0"):
        (tmp_path / "tests/files/released" / version).mkdir(parents=True)
    return tmp_path


def test_every_file_names_one_version():
    assert check_release.problems() == []


def test_a_release_agrees_with_its_tag(released):
    assert check_release.problems(released, "v1.2.3", REPOSITORY) == []


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "problem"),
    [
        ("clients/js/package.json", r'"version": "1\.2\.3"', '"version": "1.2.2"', "version is '1.2.2', expected '1.2.3'"),
        ("clients/js/package-lock.json", r'^  "version": "1\.2\.3",\n', "", "version is missing, expected '1.2.3'"),
        (
            "clients/js/package-lock.json",
            r'^      "version": "1\.2\.3"',
            '      "version": "2.0.0"',
            "packages[\"\"].version is '2.0.0', expected '1.2.3'",
        ),
        ("CITATION.cff", r"^version: .*$", "version: 1.2", "version is '1.2', expected '1.2.3'"),
        ("CITATION.cff", r"^date-released: .*$", "", "date-released is missing, expected '2031-02-28'"),
        ("CITATION.cff", r"^repository-code: .*$", "", f"repository-code is missing, expected '{REPOSITORY}'"),
        ("CHANGELOG.md", r"^## 1\.2\.3", "## 1.2.4", "the newest heading is '1.2.4', expected '1.2.3'"),
        (
            "pyproject.toml",
            r"owner/name",
            "other/name",
            f"project.urls.Repository is 'https://github.com/other/name', expected '{REPOSITORY}'",
        ),
        (
            "clients/js/package.json",
            r"owner/name",
            "other/name",
            f"repository.url is 'git+https://github.com/other/name.git', expected 'git+{REPOSITORY}.git'",
        ),
    ],
)
def test_a_file_that_differs_is_named(released, file, pattern, replacement, problem):
    change(released / file, pattern, replacement)
    assert check_release.problems(released, "v1.2.3", REPOSITORY) == [f"{file}: {problem}"]


@pytest.mark.parametrize("day", ["unreleased", "2031-02-30", "28 February 2031"])
def test_a_release_needs_its_day_in_the_changelog(released, day):
    change(released / "CHANGELOG.md", r"2031-02-28", day)
    assert check_release.problems(released, "v1.2.3", REPOSITORY) == [
        f"CHANGELOG.md: the day of the newest heading is '{day}', expected 'YYYY-MM-DD'",
        "CITATION.cff: date-released is '2031-02-28', expected 'YYYY-MM-DD'",
    ]
    assert check_release.problems(released) == []


def test_a_release_needs_its_files_among_those_that_later_versions_read(released):
    (released / "tests/files/released/1.2.3").rmdir()
    expected = "tests/files/released: the newest folder is '0.10.0', expected '1.2.3'"
    assert check_release.problems(released, "v1.2.3", REPOSITORY) == [expected]
    shutil.rmtree(released / "tests/files/released")
    assert check_release.problems(released, "v1.2.3", REPOSITORY) == [expected.replace("'0.10.0'", "missing")]
    assert check_release.problems(released) == []


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3"])
def test_another_tag_is_refused(released, tag):
    assert check_release.problems(released, tag) == [f"the tag: its name is '{tag}', expected 'v1.2.3'"]


def test_the_command_fails_for_a_wrong_tag():
    """The status is what stops the workflow."""
    command = [sys.executable, ROOT / ".github" / "check_release.py"]
    wrong = subprocess.run([*command, "--tag", "v9.9.9"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert f"the tag: its name is 'v9.9.9', expected 'v{burnish.__version__}'" in wrong.stdout
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "Every file agrees\n"


def metadata(folder: Path, *, named: bool) -> email.message.Message:
    """Return the metadata of a wheel of this checkout, of which a copy names a repository or not."""
    root = folder / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "built"))
    if named:
        name_the_repository(root)
    code = "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
    environment = {**os.environ, "BURNISH_INSTALLED_KERNELS": "none"}
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=root, env=environment, check=True, capture_output=True, text=True
    )
    (written,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_bytes(written.read_bytes())


def test_links_of_the_readme_are_absolute_on_package_indexes(tmp_path):
    written = metadata(tmp_path, named=True)
    assert written["Description-Content-Type"] == "text/markdown"
    assert written["Project-URL"] == f"Repository, {REPOSITORY}"
    targets = LINK.findall(written.get_payload())
    assert len(targets) == len(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) > 30
    for target in targets:
        kind, tag, path = target.removeprefix(f"{REPOSITORY}/").partition("#")[0].split("/", 2)
        assert tag == f"v{burnish.__version__}"
        assert (kind, (ROOT / path).exists()) == ("tree" if (ROOT / path).is_dir() else "blob", True), target


def test_without_a_repository_no_link_leads_nowhere(tmp_path):
    written = metadata(tmp_path, named=False)
    assert [target for target in LINK.findall(written.get_payload()) if not target.startswith("https://")] == []
    assert "Getting started: the same" in written.get_payload()
    assert written["Version"] == burnish.__version__


def test_the_readme_of_the_client_has_no_relative_links():
    targets = LINK.findall((ROOT / "clients" / "js" / "README.md").read_text(encoding="utf-8"))
    assert [target for target in targets if not target.startswith("https://")] == []


def test_classifiers_name_the_pythons_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))[1]
    assert classified == re.findall(r"3\.\d+", tested)
    assert project["requires-python"] == f">={classified[0]}"


def uses(path: Path) -> list[str]:
    return re.findall(r"uses: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_their_commits(path):
    """A tag can be moved to other code; the comment says which release the commit is."""
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\$/\.github/workflows/\w+\.yml")
    assert [use for use in uses(path) if not pinned.fullmatch(use)] == []


def test_an_action_has_one_commit_in_all_workflows():
    pins = {use for path in WORKFLOWS for use in uses(path) if not use.startswith("$/")}
    assert len(pins) >= 8
    assert len({pin.partition("@")[0] for pin in pins}) == len(pins)


def test_workflows_and_checklist_name_commands_that_the_makefile_has():
    files = [*WORKFLOWS, ROOT / "docs" / "release.md"]
    named = {target for path in files for target in re.findall(r"\bmake ([a-z][\w-]*)", path.read_text(encoding="utf-8"))}
    made = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"test", "site", "lint-workflows"} <= named
    assert named - made == set()
