"""What commands say of a program: what trains, what memory a step needs, what an exported model is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from burnish.cli.console import counted

if TYPE_CHECKING:
    from burnish.program import Program

LAYERS_SHOWN = 3
"""How many layers a line names."""
WORTH_A_HINT = 0.1
"""From this share of time spent waiting for data on, a line says what shortens it."""
FIRST_SHARE = 0.1
"""From this share of the average on, a line says how much of it is still the weights before training."""


def what_trains(program: Program, has_norm_option: bool = True) -> str:
    """Return how much of a program trains, in words; ``has_norm_option``: whether the command has ``--norm``."""
    from burnish.program import Role

    signature = program.signature["step"]
    parameters = signature.inputs_of(Role.PARAMETER)
    trained = [entry for entry in parameters if entry.name in signature.updates]
    count = sum(program.weights[entry.name].size for entry in trained)
    rest = len(parameters) - len(trained)
    words = f"{counted(count, 'parameter')} in {counted(len(trained), 'tensor')} train"
    if rest:
        words += f", {counted(rest, 'tensor')} {'stays as it is' if rest == 1 else 'stay as they are'}"
    if frozen := program.options.get("auto_frozen_layers", []):
        shown = ", ".join(frozen[:LAYERS_SHOWN]) + (
            f" and {len(frozen) - LAYERS_SHOWN} more" if len(frozen) > LAYERS_SHOWN else ""
        )
        words += f"; batch normalization of which nothing trains keeps its statistics: {shown}"
        words += " (--norm train lets them move)" if has_norm_option else ""
    for name, why in program.options.get("preparing", {}).items():
        words += f"; frozen: {name} ({why}); train it with --trainable {name}"
    return words


def planned_line(program: Program, batch: int | None = None) -> str:
    """Return how much memory a step is planned to need, and how much it would need without recomputation."""
    batch = batch or planned_batch(program)
    peak = program.planned_peak(batch)
    saved = f", {_size(peak.without_recompute)} without recomputation" if program.options.get("recompute") else ""
    memory = program.options.get("memory", {})
    measured = f"; measured: {_size(memory['measured'])} of {_size(memory['limit'])}" if "measured" in memory else ""
    return f"planned peak of a step at batch {batch}: {_size(peak.bytes)}{saved}{measured}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def planned_batch(program: Program) -> int:
    """Return the batch size that memory was planned for, else 1."""
    from burnish.rewriting import recompute_request

    if memory := program.options.get("memory"):
        return int(memory["batch"])
    requested = recompute_request.get(program.options.get("recompute"))
    return requested.batch or 1 if requested else 1


def export_line(path: Path, what: str, steps: int, program: Program, fold: bool, parameters: str | None) -> str:
    """Return what is said of an exported model, and a warning where its batch normalization is gone or its average is young."""
    from burnish import optim
    from burnish.program import Role

    line = f"{path}: {what} after {counted(steps, 'step')}"
    if fold and program.signature["predict"].inputs_of(Role.STATISTIC):
        line += "; batch normalization is folded: to train it further, export with --no-fold"
    first = optim.share_of_first(optim.get(program.options["optimizer"]), steps) if parameters is not None else 0.0
    if first > FIRST_SHARE:
        line += (
            f"; {first:.0%} of the average is still the weights before training: take more steps, a smaller decay, or "
            "bias_correction=true, or export with --no-average"
        )
    return line


def waiting_line(share: float) -> str:
    """Return a line on the share of the steps' time in which a run waited for data."""
    line = f"waiting for data: {100 * share:.1f} % of the time of the steps"
    return line + ("; --data-workers reads ahead in processes of its own" if share > WORTH_A_HINT else "")
