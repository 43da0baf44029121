"""What the texts of options of the compiler mean, on the command line and in files: lists, ``NAME=VALUE`` pairs, patterns."""

from __future__ import annotations

from typing import Any

from burnish.errors import ConfigurationError
from burnish.settings import is_natural_text, read_whole, split
from burnish.untrusted import read_json


def read_tables(texts: list[str]) -> str | list[str]:
    """Return ``auto`` alone as it is, and anything else as patterns."""
    return "auto" if texts == ["auto"] else texts


def read_recompute(texts: list[str]) -> str | list[str] | None:
    """Return ``layers`` or a budget as it is, and anything else as patterns."""
    if len(texts) != 1:
        return texts or None
    what = texts[0].partition(":")[0]
    return texts[0] if what[:1].isdigit() or what == "layers" else texts


def read_batch(text: str) -> str:
    """Return what ``--batch`` says.

    Raises:
        ConfigurationError: it is another word than ``open``, such as a number of samples.
    """
    if text != "open":
        raise ConfigurationError(
            f"--batch {text}: the only choice is 'open', for a model that was exported for one sample at a time; how many "
            "samples a batch of training has is --batch-size"
        )
    return text


def read_sample_axis(texts: list[str]) -> int | dict[str, int | None] | None:
    """Return what ``--sample-axis`` says: an axis for all inputs, or that of each; None where it says nothing.

    Raises:
        ConfigurationError: a text is neither an axis nor a name with one, or names an input twice.
    """
    if len(texts) == 1 and is_natural_text(texts[0]):
        return int(texts[0])
    axes: dict[str, int | None] = {}
    for text in texts:
        name, separator, axis = text.rpartition("=")
        if not separator or not name or not (is_natural_text(axis) or axis.lower() == "none"):
            raise ConfigurationError(
                f"--sample-axis {text}: write NAME=AXIS, such as 'x=1', 'grid=none' for an input without samples, or one number "
                "for all inputs"
            )
        if name in axes:
            raise ConfigurationError(f"--sample-axis {text}: '{name}' has an axis already: give it once")
        axes[name] = int(axis) if is_natural_text(axis) else None
    return axes or None


def read_bind(texts: list[str]) -> dict[str, Any]:
    """Return the values that inputs are fixed to: read as JSON where possible, else as text.

    Raises:
        ConfigurationError: a text is not a name with a value, or names an input twice.
    """
    bound: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise ConfigurationError(f"--bind {text}: write NAME=VALUE, such as 'sr=16000' or 'state=0'")
        if name in bound:
            raise ConfigurationError(f"--bind {text}: '{name}' is fixed to a value already: give it once")
        try:
            bound[name] = read_json(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            bound[name] = value
    return bound


def read_held_rows(texts: list[str]) -> dict[str, list[int]]:
    """Return the rows to hold, by the name of their weight.

    Raises:
        ConfigurationError: a text is not a name with rows.
    """
    held: dict[str, list[int]] = {}
    for text in texts:
        name, separator, rows = text.rpartition("=")
        try:
            numbers = [read_whole(row) for row in rows.split(",")]
        except ValueError:
            numbers = []
        if not separator or not name or not numbers:
            raise ConfigurationError(f"--hold-rows {text}: write NAME=ROWS, such as 'emb.weight=0' or 'emb.weight=0,1'")
        held.setdefault(name, []).extend(numbers)
    return held


def read_outputs(outputs: str) -> str | list[str]:
    """Return one name as it is, several as a list."""
    return split([outputs]) if "," in outputs else outputs


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
        ConfigurationError: there are several policies without patterns.
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
            raise ConfigurationError(f"'{value}': with several --norm, each is PATTERN=POLICY, such as 'stem*=frozen'")
        policies[pattern] = policy
    return policies
