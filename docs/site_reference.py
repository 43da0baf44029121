"""The reference of the public names, one page for each public module, from their docstrings.

A hook of MkDocs (``mkdocs.yml``). Which names a module has is read from its ``__init__.py``; mkdocstrings reads their docstrings
from the source. Nothing of burnish is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = (
    "burnish",
    "burnish.training",
    "burnish.training.callbacks",
    "burnish.data",
    "burnish.losses",
    "burnish.metrics",
    "burnish.models",
    "burnish.optim",
    "burnish.optim.schedules",
    "burnish.norms",
    "burnish.surgery",
    "burnish.distributed",
    "burnish.federated",
    "burnish.engines",
    "burnish.comparison",
    "burnish.torch",
    "burnish.errors",
)
OPTIONS = {
    "burnish.compiler.compile.compile": "burnish.compiler.options.CompileOptions",
    "burnish.training.trainer.Trainer": "burnish.training.trainer_options.TrainerOptions",
}
"""What takes the options of a class as keyword arguments, which its source does not repeat: the class ends the page."""


def on_config(config: Any) -> Any:
    """Put the pages at the end of the navigation."""
    config.nav.append({"Reference": [{module: _page(module)} for module in MODULES]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages. What two modules export stands on the page of the first."""
    shown: set[str] = set()
    for module in MODULES:
        files.append(File.generated(config, _page(module), content=_content(module, shown)))
    return files


def _page(module: str) -> str:
    return f"reference/{module}.md"


def _content(module: str, shown: set[str]) -> str:
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = (ast.get_docstring(tree) or "").replace("\n", "\n\n", 1)
    defined, own = _defined(tree), _classes(tree)
    places = {name: defined.get(name, module) for name in _public(tree) if name in defined or name in own}
    places = {name: place for name, place in places.items() if f"{place}.{name}" not in shown}
    shown |= {f"{place}.{name}" for name, place in places.items()}
    blocks = [
        f"::: {place}.{name}\n    options:\n      heading: {module}.{name}\n      toc_label: {name}\n"
        for name, place in sorted(places.items(), key=lambda item: item[0].lower())
    ]
    named = [f"{place}.{name}" for name, place in places.items()]
    blocks += [f"::: {OPTIONS[each]}\n    options:\n      inherited_members: true\n" for each in named if each in OPTIONS]
    return f"# {module}\n\n{said}\n\n" + "\n".join(blocks)


def _public(tree: ast.Module) -> list[str]:
    """The names that a module exports: those in ``__all__``, else its classes."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
            return [str(name) for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return [name for name in _classes(tree) if not name.startswith("_")] or [*_defined(tree)]


def _classes(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def _defined(tree: ast.Module) -> dict[str, str]:
    """Where the names that a module imports from burnish are defined, modules and constants left out."""
    places = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("burnish."):
            for alias in node.names:
                name = alias.asname or alias.name
                if not name.startswith("_") and not name.isupper() and name == alias.name:
                    places[name] = str(node.module)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(to, ast.Name) and to.id == "_DEFINED_IN" for to in targets):
                places |= ast.literal_eval(node.value)
    return {name: _end(place, name) for name, place in places.items()}


def _end(module: str, name: str) -> str:
    """The module in which a name is defined, where the package that it is imported from imports it too."""
    path = SOURCE.joinpath(*module.split("."), "__init__.py")
    if not path.is_file():
        return module
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _end(str(node.module), name) if node.module != module else module
    return module
