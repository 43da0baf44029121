"""The command that installs an optional package, for messages that name a missing one.

It names an extra of burnish, which pip finds in the installed burnish, with or without an index. If burnish is not installed, but
a checkout on Python's path, it names the package.
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
"""By the name that is imported: the extra that installs it, and what that requires; as in ``pyproject.toml``."""


def install_command(module: str) -> str:
    """Return the command that installs a module, ready for a shell.

    Args:
        module: the name that is imported, such as ``sklearn``; of a submodule the first part counts. A name that is not in
            ``EXTRAS`` is taken for that of its package.
    """
    name = module.partition(".")[0]
    extra, requirement = EXTRAS.get(name, (None, name))
    if extra in installed_extras():
        return f'pip install "burnish[{extra}]"'
    return f'pip install "{requirement}"' if ">" in requirement else f"pip install {requirement}"


def installed_extras() -> list[str]:
    """Return the extras that the installed burnish has; none if it is not installed."""
    from importlib import metadata

    try:
        return metadata.metadata("burnish").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
