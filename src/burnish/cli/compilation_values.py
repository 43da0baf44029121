"""What the texts of compilation options mean: lists, ``NAME=VALUE`` pairs, patterns."""

from __future__ import annotations

from typing import Any

import typer

from burnish.cli.console import split
from burnish.settings import is_natural_text, read_whole
from burnish.untrusted import read_json


def read_recompute(texts: list[str], batch_size: int | None = None) -> str | list[str] | None:
    """Return ``layers`` or a budget as it is, and anything else as patterns; a budget without a batch is for ``batch_size``."""
    if len(texts) != 1:
        return texts or None
    text = texts[0]
    what, _, setting = text.partition(":")
    if what[:1].isdigit():
        return text if setting or batch_size is None else f"{what}:batch={batch_size}"
    return text if what == "layers" else texts


def read_memory(text: str | None, batch_size: int | None = None) -> str | None:
    """Return a limit of memory; one without a batch is for ``batch_size``."""
    return text if text is None or ":" in text or batch_size is None else f"{text}:batch={batch_size}"


def read_batch(text: str | None) -> str | None:
    """Return what ``--batch`` says.

    Raises:
        typer.BadParameter: it is another word than ``open``, such as a number of samples.
    """
    if text not in (None, "open"):
        raise typer.BadParameter(
            f"--batch {text}: the only choice is 'open', for a model that was exported for one sample at a time; how many "
            "samples a batch of training has is --batch-size"
        )
    return text


def read_sample_axis(texts: list[str]) -> int | dict[str, int | None] | None:
    """Return what ``--sample-axis`` says: an axis for all inputs, or that of each; None where it says nothing.

    Raises:
        typer.BadParameter: a text is neither an axis nor a name with one, or names an input twice.
    """
    if len(texts) == 1 and is_natural_text(texts[0]):
        return int(texts[0])
    axes: dict[str, int | None] = {}
    for text in texts:
        name, separator, axis = text.rpartition("=")
        if not separator or not name or not (is_natural_text(axis) or axis.lower() == "none"):
            raise typer.BadParameter(
                f"--sample-axis {text}: write NAME=AXIS, such as 'x=1', 'grid=none' for an input without samples, or one number "
                "for all inputs"
            )
        if name in axes:
            raise typer.BadParameter(f"--sample-axis {text}: '{name}' has an axis already: give it once")
        axes[name] = int(axis) if is_natural_text(axis) else None
    return axes or None


def read_bind(texts: list[str]) -> dict[str, Any]:
    """Return the values that inputs are fixed to: read as JSON where possible, else as text.

    Raises:
        typer.BadParameter: a text is not a name with a value, or names an input twice.
    """
    bound: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise typer.BadParameter(f"--bind {text}: write NAME=VALUE, such as 'sr=16000' or 'state=0'")
        if name in bound:
            raise typer.BadParameter(f"--bind {text}: '{name}' is fixed to a value already: give it once")
        try:
            bound[name] = read_json(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            bound[name] = value
    return bound


def read_extents(texts: list[str]) -> dict[str, int]:
    """Return {name: extent} of ``NAME=N``.

    Raises:
        typer.BadParameter: a text is written otherwise.
    """
    extents = {}
    for text in split(texts):
        name, _, size = text.partition("=")
        if not name or not is_natural_text(size) or int(size) < 1:
            raise typer.BadParameter(f"--extent {text}: give NAME=N, such as sequence=16")
        extents[name] = int(size)
    return extents


def read_held_rows(texts: list[str]) -> dict[str, list[int]]:
    """Return the rows to hold, by the name of their weight.

    Raises:
        typer.BadParameter: a text is not a name with rows.
    """
    held: dict[str, list[int]] = {}
    for text in texts:
        name, separator, rows = text.rpartition("=")
        try:
            numbers = [read_whole(row) for row in rows.split(",")]
        except ValueError:
            numbers = []
        if not separator or not name or not numbers:
            raise typer.BadParameter(f"--hold-rows {text}: write NAME=ROWS, such as 'emb.weight=0' or 'emb.weight=0,1'")
        held.setdefault(name, []).extend(numbers)
    return held


def read_outputs(outputs: str | None) -> str | list[str] | None:
    """Return one name as it is, several as a list."""
    return outputs if outputs is None or "," not in outputs else split([outputs])


def read_metrics(texts: list[str]) -> list[str]:
    """Return metrics as ``burnish.metrics.get`` takes them: a comma stands between metrics, and between the settings of one."""
    names: list[str] = []
    for part in split(texts):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += ("," if ":" in names[-1] else ":") + part
        else:
            names.append(part)
    return names


def read_norms(texts: list[str]) -> str | dict[str, str]:
    """Return a policy name, or {pattern: policy}.

    Raises:
        typer.BadParameter: there are several policies without patterns.
    """
    parts = split(texts)
    if not parts:
        return "auto"
    from burnish.norms import POLICIES

    settings = {setting for name in POLICIES for setting in POLICIES.takes(name)}
    values: list[str] = []
    for part in parts:
        # A comma stands between policies, and between the settings of one.
        if values and ":" in values[-1] and part.partition("=")[0].strip() in settings:
            values[-1] += f",{part}"
        else:
            values.append(part)
    policies = {}
    for value in values:
        pattern, separator, policy = value.partition("=")
        if not separator or value.partition(":")[0] in POLICIES:
            if len(values) == 1:
                return value
            separator = ""
        if not separator or not pattern or not policy:
            raise typer.BadParameter(f"'{value}': with several --norm, each is PATTERN=POLICY, such as 'stem*=frozen'")
        policies[pattern] = policy
    return policies
