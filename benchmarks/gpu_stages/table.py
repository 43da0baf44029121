"""The table of a campaign, in Markdown, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_stages.setting import OK

# Figures that are for the file and not for the table.
LEFT_OUT = {"name", "verdict", "case_seconds", "traceback", "reason", "error", "turns", "kernels"}
UNITS = {"seconds": ("s", 1.0), "milliseconds": ("ms", 1.0), "bytes": ("GB", 1e-9), "flop": ("GFLOP", 1e-9)}


def table(document: Mapping[str, Any]) -> str:
    """What was found, and a table for each stage."""
    lines = [f"# Campaign on `{document['device']}`{', tiny sizes' if document['tiny'] else ''}, {document['date'][:10]}", ""]
    lines += [f"- {name.replace('_', ' ')}: {_text(value)}" for name, value in document["found"].items()]
    for name, stage in document["stages"].items():
        taken = f", {stage['seconds']:.0f} s" if "seconds" in stage else ""
        lines += ["", f"## {stage['title']} (`{name}`): {stage['status']}{taken}", ""]
        if "error" in stage:
            lines += [f"The stage failed: {stage['error']}", ""]
        if stage["rows"]:
            lines += ["| case | verdict | figures |", "|---|---|---|"]
        for row in stage["rows"]:
            lines.append(f"| {row['name']} | {row['verdict']} | {_figures(row)} |")
            lines += [f"| &nbsp; {kernel['name']} | | {_figures(kernel)} |" for kernel in row.get("kernels", ())]
    return "\n".join(lines) + "\n"


def _figures(row: Mapping[str, Any]) -> str:
    if row.get("verdict", OK) != OK:
        return str(row.get("reason") or row.get("error") or "").replace("|", "/")
    shown = {name: value for name, value in row.items() if name not in LEFT_OUT}
    return ", ".join(f"{_label(name)} {_value(name, value)}" for name, value in shown.items())


def _label(name: str) -> str:
    words = name.split("_")
    return " ".join(words[:-1] if words[-1] in UNITS and len(words) > 1 else words)


def _value(name: str, value: Any) -> str:
    unit, factor = UNITS.get(name.rsplit("_", 1)[-1], ("", 1.0))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value * factor:.4g} {unit}".rstrip()
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(entry)}" for name, entry in value.items())
    return str(value).replace("|", "/")
