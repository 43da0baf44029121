"""Install commands for optional packages, for error messages.

A command names an extra of burnish, which pip resolves from the installed burnish, with or without an index. If burnish runs from
a checkout and is not installed, the command names the package.
"""

from __future__ import annotations

EXTRAS = {
    "PIL": ("images", "Pillow>=10.3"),
    "flwr": ("flower", "flwr>=1.41"),
    "matplotlib": ("report", "matplotlib>=3.9"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "mpi4py": ("mpi", "mpi4py>=4"),
    "onnxscript": ("torch", "onnxscript>=0.5"),
    "pyarrow": ("parquet", "pyarrow>=16"),
    "sklearn": ("demo", "scikit-learn>=1.5"),
    "tensorboardX": ("tensorboard", "tensorboardX>=2.6.5"),
    "tokenizers": ("text", "tokenizers>=0.20"),
    "torch": ("torch", "torch>=2.13"),
    "wandb": ("wandb", "wandb"),
}
"""Import name -> the extra that installs it and its requirement; the same as in ``pyproject.toml``."""


def install_command(module: str) -> str:
    """Return the shell command that installs a module.

    Args:
        module: import name, such as ``sklearn``; only the first part of a dotted name counts. A name that is not in ``EXTRAS`` is
            used as the package name.
    """
    name = module.partition(".")[0]
    extra, requirement = EXTRAS.get(name, (None, name))
    if extra in installed_extras():
        return f'pip install "burnish[{extra}]"'
    return f'pip install "{requirement}"' if ">" in requirement else f"pip install {requirement}"


def installed_extras() -> list[str]:
    """Return the extras of the installed burnish; empty if it is not installed."""
    from importlib import metadata

    try:
        return metadata.metadata("burnish").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
