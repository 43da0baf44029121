"""The operators that kernels implement, as PyTorch's dispatcher knows them: declared beside each kernel, gathered here.

A schema is known before its kernel is built, so that graphs that call it are made meanwhile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch


class Use(IntEnum):
    """How many programs call a kernel: what more of them call is built first."""

    ALL = 0
    MOST = 1
    SOME = 2
    FEW = 3


@dataclass(frozen=True)
class Kernel:
    """A file that implements operators.

    Attributes:
        name: the file's, without its suffix.
        operators: their names.
        use: how many programs call it.
    """

    name: str
    operators: tuple[str, ...]
    use: Use


_kernels: dict[str, Kernel] = {}


def declare_kernel(name: str, *schemas: str, use: Use = Use.FEW, suffix: str = "") -> None:
    """Declare a kernel and define its operators; what implements them is loaded later.

    Args:
        name: of its file.
        schemas: of its operators, each with ``{}`` where its name is to have the suffix.
        use: how many programs call it.
        suffix: of the operators' names, for a kernel of another dtype or size of window.

    Raises:
        ValueError: a kernel of this name is declared already.
    """
    if name in _kernels:
        raise ValueError(f"the kernel {name} is declared twice: give one of the two files another name")
    complete = [schema.replace("{}", suffix, 1) for schema in schemas]
    for schema in complete:
        _library().define(schema)  # type: ignore[no-untyped-call]
    _kernels[name] = Kernel(name, tuple(schema.partition("(")[0] for schema in complete), use)


def declared_kernels() -> tuple[str, ...]:
    """Return the names of all kernels, in the order in which they are built."""
    return tuple(kernel.name for kernel in sorted(_kernels.values(), key=lambda kernel: kernel.use))


def kernel_of(operator: str) -> str:
    """Return the name of the kernel that implements an operator."""
    return next(kernel.name for kernel in _kernels.values() if operator in kernel.operators)


@functools.cache
def _library() -> torch.library.Library:
    """Where operators are defined, as long as the process lives."""
    return torch.library.Library("burnish", "FRAGMENT")  # type: ignore[no-untyped-call]
