"""Errors of failed exports, with the line of user code and the part of the module."""

from __future__ import annotations

import contextlib
import copy
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from burnish.errors import BurnishError, ConfigurationError, UnsupportedOperatorError
from burnish.warn import LIBRARIES, is_users


class OwnBackwardError(Exception):
    """A user's ``torch.autograd.Function``, whose backward a graph would lose."""


class ReturnedError(Exception):
    """The result of ``forward`` is not a structure of tensors."""


class FrozenValueError(Exception):
    """A Python random number or counter in ``forward`` would become a constant of the graph."""


class UnreadArgumentError(Exception):
    """An argument of an operator that its translation ignores."""


class UnregisteredError(Exception):
    """``forward`` reads a tensor that requires a gradient but is no parameter of the module."""


class PackingError(Exception):
    """Sequences packed by the values of lengths: extents of a graph cannot depend on values."""


_PLAIN = (FrozenValueError, OwnBackwardError, PackingError, ReturnedError, UnreadArgumentError, UnregisteredError)
"""Burnish's own errors, whose messages are complete."""

_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
"""A frame of a Python stack trace; the code line below it may contain quotes too."""


_TRACERS = ("torch", "onnxscript", "onnx", "onnx_ir", "sympy", "numpy", "burnish")

PARTIAL = "Or let burnish compute what it can, and PyTorch the rest: burnish.torch.wrap(module, example_inputs, partial=True)"


@contextlib.contextmanager
def named_refusal(module: torch.nn.Module) -> Iterator[None]:
    """Convert exceptions in this context to an error that names the line and the part of the module.

    Raises:
        UnsupportedOperatorError: something failed.
    """
    try:
        yield
    except BurnishError:
        raise
    except Exception as error:
        raise UnsupportedOperatorError(_described(error, module)) from error


def check_examples(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a copy of a module that could not be exported; if that fails too, the examples are to blame.

    Raises:
        ConfigurationError: PyTorch cannot call the module with the examples.
    """
    try:
        copied = copy.deepcopy(module).eval()
    except Exception:
        # The original is not called instead: that would change its buffers.
        return
    try:
        with torch.no_grad():
            copied(*args, **kwargs)
    except Exception as error:
        raise ConfigurationError(
            f"example_inputs: PyTorch cannot call {type(module).__name__} with them either ({_reason(error)}). Give inputs "
            "that its forward takes"
        ) from error


def _described(error: BaseException, module: torch.nn.Module) -> str:
    frames = [place for cause in _causes(error) for place in traceback.walk_tb(cause.__traceback__)]
    line, part = _place(frames, module)
    noted = next((value for frame, _ in frames if isinstance(value := frame.f_locals.get("node"), fx.Node)), None)
    if line is None and noted is not None:
        line, part = _noted_place(noted)
    where = "" if line is None else f" at {line}"
    inside = f", in the part '{part}' ({_kind(module, part)})" if part else ""
    if part:
        remedy = f"Leave '{part}' to PyTorch and give the parts around it: burnish.torch.wrap(module.<part>, example_inputs)"
    else:
        parts = ", ".join(name for name, _ in module.named_children()) or "it has none of its own"
        remedy = (
            f"Give a part of it that can be exported: burnish.torch.wrap(module.<part>, example_inputs); its parts are: {parts}"
        )
    return f"{type(module).__name__} cannot be exported{where}{inside}: {_reason(error)}. {remedy}. {PARTIAL}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return iter(reversed(chain))


def _place(frames: list[tuple[FrameType, int]], module: torch.nn.Module) -> tuple[str | None, str]:
    """Return the last user line of the trace and the innermost submodule around it.

    For a library's module it is that library's line.
    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    inside = [names[id(owner)] for frame, _ in frames if id(owner := frame.f_locals.get("self")) in names]
    lines = [(frame.f_code.co_filename, number) for frame, number in frames]
    own = next((line for line in reversed(lines) if is_users(line[0])), None)
    line = own or next((line for line in reversed(lines) if _is_other_librarys(line[0])), None)
    if not inside or line is None:
        return None, ""
    return _line(*line), inside[-1]


def _is_other_librarys(filename: str) -> bool:
    """True if a file belongs to a library of modules, not to PyTorch or the tracing and exporting packages."""
    path = Path(filename)
    places = [index for index, part in enumerate(path.parts) if part in LIBRARIES]
    return bool(places) and path.exists() and path.parts[places[-1] + 1] not in _TRACERS


def _line(filename: str, number: int) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}" + (f" ({text})" if text else "")


def place_of(node: fx.Node) -> str:
    """Describe a node of a trace: its operator, source line and part of the module."""
    line, part = _noted_place(node)
    inside = f", in the part '{part}'" if part else ""
    return f"{node.target} ('{node.name}')" + (f" at {line}" if line else "") + inside


def _noted_place(node: fx.Node) -> tuple[str | None, str]:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    part = next((path for path, _ in reversed(list(stack.values())) if path), "")
    lines = [(filename, int(number)) for filename, number in _FRAME.findall(node.meta.get("stack_trace") or "")]
    for belongs in (is_users, _is_other_librarys):
        for filename, number in reversed(lines):
            if belongs(filename):
                return _line(filename, number), part
    return None, part


def _kind(module: torch.nn.Module, part: str) -> str:
    try:
        return type(module.get_submodule(part)).__name__
    except AttributeError:
        return "its parts"


def _reason(error: BaseException) -> str:
    causes = [*_causes(error)]
    first = next((cause for cause in causes if isinstance(cause, _PLAIN)), causes[0])
    text = next((line.strip() for line in str(first).splitlines() if line.strip()), "")
    text = text.rstrip(".")
    return text if isinstance(first, _PLAIN) else f"{type(first).__name__}: {text}"
