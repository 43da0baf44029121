"""The command that installs an optional package, for messages that name a missing one.

It names the package itself, not an extra of burnish, so that it works however burnish was installed: from a checkout, a wheel or
an index.
"""

from __future__ import annotations

REQUIREMENTS = {
    "PIL": "Pillow>=10.3",
    "flwr": "flwr>=1.41",
    "matplotlib": "matplotlib>=3.9",
    "mlflow": "mlflow-skinny",
    "mpi4py": "mpi4py>=4",
    "onnxscript": "onnxscript>=0.5",
    "pyarrow": "pyarrow>=16",
    "sklearn": "scikit-learn>=1.5",
    "tensorboardX": "tensorboardX>=2.6.5",
    "tokenizers": "tokenizers>=0.20",
    "torch": "torch>=2.13",
}
"""By the name that is imported; the versions are those of the extras in ``pyproject.toml``."""


def install_command(module: str) -> str:
    """Return the command that installs a module, ready for a shell.

    Args:
        module: the name that is imported, such as ``sklearn``; of a submodule the first part counts. A name that is not in
            ``REQUIREMENTS`` is taken for that of its package.
    """
    name = module.partition(".")[0]
    requirement = REQUIREMENTS.get(name, name)
    return f'pip install "{requirement}"' if ">" in requirement else f"pip install {requirement}"
