"""Select the parameters that keep only the gradients of the rows that a batch reads (``compile(sparse=...)``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.graph.names import Aliases, select_named
from burnish.operators.row_gradients import is_read_by_row, parts_of
from burnish.optim import Optimizer
from burnish.optim.parameters import check_matches
from burnish.optim.row_updates import row_form_of

AUTO = "auto"
Parts = list[tuple[Tensor, Tensor]]
"""Indices and cotangents of lookups."""
SparseOption = Literal[False] | str | Sequence[str] | None
"""None: no parameter. ``auto``: each parameter that gets the same weights if only these rows are updated. Else patterns of
parameters.
"""


@dataclass(frozen=True)
class SparseRequest:
    """The parameters that ``compile(sparse=...)`` selects.

    Attributes:
        patterns: patterns of their names; empty for none, None for all whose results stay exact.
        aliases: other names of parameters.
    """

    patterns: tuple[str, ...] | None = ()
    aliases: Aliases = field(default_factory=dict, compare=False)

    @staticmethod
    def of(option: SparseOption, trainable: Collection[str], aliases: Aliases) -> SparseRequest:
        """Read the option.

        Raises:
            ConfigurationError: it has the wrong type, or a pattern matches no parameter that trains.
        """
        if option is None or option is False:
            return SparseRequest()
        if option == AUTO:
            return SparseRequest(None)
        patterns = [option] if isinstance(option, str) else list(option) if isinstance(option, Iterable) else None
        if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError(
                f"sparse must be None, 'auto', or names or patterns of embedding tables, such as ['*embedding*'], not {option!r}"
            )
        for pattern in patterns:
            check_matches("sparse", pattern, [each for name in trainable for each in (name, *aliases.get(name, ()))])
        return SparseRequest(tuple(patterns), aliases)

    @property
    def option(self) -> str | list[str]:
        """The form of the option that a program stores."""
        return AUTO if self.patterns is None else list(self.patterns)

    def names(self, name: str) -> bool:
        """True if a pattern names a parameter."""
        return any(select_named(pattern, (name,), self.aliases) for pattern in self.patterns or ())

    def parts(self, name: str, gradient: Tensor, table: ir.Value, optimizer: Optimizer) -> Parts | str | None:
        """Return the form in which the gradient of a parameter is kept.

        Args:
            name: initializer name of the parameter.
            gradient: the gradient as emitted.
            table: the parameter in the graph.
            optimizer: the optimizer, bound or not.

        Returns:
            Indices and cotangents of each lookup; None for a parameter that is not selected; else the reason, for a warning, why
            its gradient is dense.
        """
        if not (self.names(name) if self.patterns is not None else is_read_by_row(gradient, table)):
            return None
        parts = parts_of(gradient, table)
        if isinstance(parts, str):
            return f"{parts} reads it too" if is_read_by_row(gradient, table) else f"{parts} reads it, which is no lookup of rows"
        form, decides = row_form_of(optimizer, name)
        if form is None:
            return f"{decides} needs the gradient of every row"
        if form == "lazy" and self.patterns is None:
            return (
                f"{decides} moves every row in every step; sparse=['{name}'] updates the rows of a batch alone, and the others "
                "miss that"
            )
        return parts


def check_optimizer(names: Iterable[str], optimizer: Optimizer, option: str | Sequence[str] | None = None) -> None:
    """Raise ConfigurationError if an optimizer cannot update from gradients of rows only.

    Args:
        names: parameters with gradients of rows.
        optimizer: the optimizer that updates them.
        option: the option that the program was compiled with, if known: with ``auto`` the weights must match a dense update.
    """
    for name in names:
        form, decides = row_form_of(optimizer, name)
        if form is None:
            raise ConfigurationError(
                f"sparse: the gradient of '{name}' is of the rows that a batch reads, and {decides} needs that of every row: "
                "compile without sparse, or with another optimizer"
            )
        if form == "lazy" and option == AUTO:
            raise ConfigurationError(
                f"sparse: the gradient of '{name}' is of the rows that a batch reads, and {decides} moves every row in every step"
                f": compile with sparse=['{name}'] to let the others miss that, or without sparse"
            )


def warning_of(dense: Mapping[str, str]) -> str:
    """Return the warning about selected parameters that have dense gradients, with the reason for each."""
    reasons = "; ".join(f"'{name}': {why}" for name, why in dense.items())
    return f"sparse: a step fills and reads every row of {len(dense)} of the parameters. {reasons}"
