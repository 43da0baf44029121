"""The first half hour of a new user: each quick start as printed, from an empty folder, in a new environment.

    python benchmarks/first_half_hour.py [TASK ...] [--environment FOLDER]

Clones this repository, installs it with ``pip install ".[demo,text]"`` and nothing else, and runs the snippets and commands of
each quick start in an empty folder with an empty home: get a model, train, evaluate on held-out data, predict one sample,
export. Prints the seconds of each page and its last evaluation, and a table of the code that each takes next to another tool's.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("images", "tables", "text", "audio", "detection")
FENCE = re.compile(r"^```(?P<language>python|sh)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
IN_PYTHON = "\n## In Python\n"
PEERS = {
    "images": ("fastai", 9, 22, "docs.fast.ai/quick_start.html"),
    "tables": ("fastai", 8, 17, "docs.fast.ai/quick_start.html"),
    "text": ("fastai", 4, 13, "docs.fast.ai/quick_start.html"),
    "audio": ("Keras", 96, 87, "tensorflow.org/tutorials/audio/simple_audio"),
    "detection": ("Ultralytics", 5, 10, "docs.ultralytics.com/usage/python"),
}
"""The other tool, its lines and names as ``measure`` counts them, and where its quick start is.

Downloads of data count as ours do not. Lines that only draw pictures do not count, such as those of the Keras page. Names of
files that stand for a model, a data set or a format of the tool count as names.
"""


def page(task: str) -> Path:
    return ROOT / "docs" / f"quick-start-{task}.md"


def code_in_python(task: str) -> str:
    """The Python code of a quick start that trains, evaluates, predicts and exports, without that which draws its data."""
    _, _, section = page(task).read_text(encoding="utf-8").partition(IN_PYTHON)
    return "".join(fence["body"] for fence in FENCE.finditer(section.split("\n## ")[0]) if fence["language"] == "python")


def measure(code: str) -> tuple[int, set[str]]:
    """Return how many lines code has, without imports, comments and blanks, and the names of a library that it uses.

    Names are functions, classes, methods, attributes and keyword arguments, and the names of families of models in text; neither
    those that the code gives, nor Python's own, nor modules.
    """
    tree = ast.parse(code)
    lines: set[int] = set()
    modules: set[str] = set()
    given: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.stmt):
            lines.update([node.lineno] if hasattr(node, "body") else range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else given).add(node.id)
        elif isinstance(node, ast.FunctionDef):
            given.add(node.name)
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create" and node.args:
            used.add(ast.unparse(node.args[0]))
    return len(lines), used - modules - given - set(dir(builtins))


def script_of(text: str) -> str:
    """Return a Python script that runs the blocks of a page in their order: commands in a shell, Python in one namespace."""
    parts = ["import subprocess\n"]
    for fence in FENCE.finditer(text):
        if fence["language"] == "python":
            parts.append(fence["body"])
        else:
            parts.append(f"subprocess.run({fence['body']!r}, shell=True, check=True, executable='/bin/sh')\n")
    return "".join(parts)


def environment(folder: Path) -> Path:
    """Install a clone of the last commit in a new environment, and return the folder of its programs."""
    clone, programs = folder / "clone", folder / "venv" / "bin"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    subprocess.run([str(programs / "pip"), "install", "--quiet", f"{clone}[demo,text]"], check=True)
    return programs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--environment", type=Path, help="programs of an environment with burnish, in place of a new one")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="first-half-hour-") as name:
        folder = Path(name)
        start = time.perf_counter()
        programs = options.environment or environment(folder)
        print(f"installed in {time.perf_counter() - start:.0f} s")
        for task in options.tasks or TASKS:
            place = folder / task
            for each in (place / "home", place / "work"):
                each.mkdir(parents=True)
            kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BURNISH", "XDG"))}
            variables = {**kept, "HOME": str(place / "home"), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
            start = time.perf_counter()
            script = script_of(page(task).read_text(encoding="utf-8"))
            done = subprocess.run(
                [str(programs / "python"), "-c", script], cwd=place / "work", env=variables, capture_output=True, text=True
            )
            seconds = time.perf_counter() - start
            (place / "output.txt").write_text(done.stdout)
            figures = re.findall(r"^(?:accuracy|mean_absolute_error|coco_map:0\.5) +[\d.]+", done.stdout, re.MULTILINE)
            said = " ".join(figures[-1].split()) if figures else "no evaluation printed"
            tuned = sum(path.name.endswith("tuned.onnx") for path in (place / "work").rglob("*.onnx"))
            print(f"{task:10} {'ok' if done.returncode == 0 else 'FAILED'} in {seconds:.0f} s; {said}; {tuned} tuned files")
            if done.returncode:
                failed.append(task)
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
    print(f"\n{'task':10} {'burnish':>16} {'other':>16}   (lines without imports, names)")
    for task in options.tasks or TASKS:
        lines, names = measure(code_in_python(task))
        tool, their_lines, their_names, _ = PEERS[task]
        print(f"{task:10} {lines:>9} {len(names):>6} {their_lines:>9} {their_names:>6}   {tool}: {', '.join(sorted(names))}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
