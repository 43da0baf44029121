"""The steps of an epoch, where a program does not take a last batch of any size, and whether they make whole updates."""

from __future__ import annotations

from collections.abc import Iterable

from burnish.errors import ConfigurationError
from burnish.optim.accumulate import steps_to_an_update
from burnish.program import Entry, Program
from burnish.program.layout import sample_extent
from burnish.training.inputs import broken_rule


def batches_per_epoch(program: Program, samples: int, batch_size: int, workers: int = 1) -> int:
    """Return how many steps an epoch over so many samples has. A last batch of a size that the program does not take is left out.

    Raises:
        ConfigurationError: as ``samples_left_out``.
    """
    rest = samples_left_out(program, samples, batch_size, workers)
    return (samples - rest) // batch_size if rest else -(-samples // batch_size)


def samples_left_out(program: Program, samples: int, batch_size: int, workers: int = 1) -> int:
    """Return how many samples at the end of an epoch make no batch that the program takes.

    Args:
        program: what trains, or is evaluated.
        samples: of the data.
        batch_size: samples in a batch of all workers.
        workers: how many share a batch.

    Raises:
        ConfigurationError: the program takes no batch of ``batch_size``, or of as many samples as there are.
    """
    signature = program.signature["step"]
    rule = broken_rule(signature, batch_size)
    if rule is not None and samples >= batch_size:
        raise ConfigurationError(f"batch_size={batch_size}: {rule.reason}; give another batch_size, or {rule.remedy}")
    _check_fixed(program, samples, batch_size, workers)
    rest = samples % batch_size
    takes_any = broken_rule(signature, rest) is None and fixed_batch(program) is None
    return rest if samples > batch_size and rest and not takes_any else 0


def fixed_batch(program: Program) -> int | None:
    """The number of samples that the model takes at once; None where any will do."""
    if program.options.get("batch"):
        return None
    return fixed_samples(program.signature.samples)


def fixed_samples(entries: Iterable[Entry]) -> int | None:
    """The number of samples that inputs hold at once; None where any will do."""
    return fixed_extent(sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None)


def fixed_extent(samples: Iterable[object]) -> int | None:
    """The number that the extents of the samples of all inputs are; None where they differ, or are open."""
    different = set(samples)
    extent = different.pop() if len(different) == 1 else None
    return extent if isinstance(extent, int) else None


def accumulation_notes(program: Program, steps: int) -> list[str]:
    """Return a note on the last steps of a run, where they are too few for an update that accumulates.

    Args:
        program: what trains.
        steps: of the run.

    Raises:
        ConfigurationError: so are all of its steps, and nothing would train.
    """
    every = steps_to_an_update(program.options.get("optimizer"))
    if steps < every:
        raise ConfigurationError(
            f"accumulate: an update takes {every} steps, and the run has {steps}, so that nothing would train: accumulate fewer, "
            "or give smaller batches or more epochs"
        )
    rest = steps % every
    return (
        [f"The last {rest} of the {steps:,} steps wait for an update that the run does not reach: it takes {every}"]
        if rest
        else []
    )


def _check_fixed(program: Program, samples: int, batch_size: int, workers: int) -> None:
    """Raise ConfigurationError where no batch is of the size that a model fixes."""
    fixed = fixed_batch(program)
    if fixed is None or min(samples, batch_size) == fixed * workers:
        return
    opened = (
        "compile it with batch='open' (--batch open), which lets it take batches of any size"
        if fixed == 1
        else "export it with an open batch (dynamic axes)"
    )
    size, at_once = fixed * workers, f"the model takes {fixed} sample{'' if fixed == 1 else 's'} at once"
    if samples < size:
        raise ConfigurationError(f"samples: the data have {samples}, and {at_once}: give more, or {opened}")
    raise ConfigurationError(f"batch_size={batch_size}: {at_once}: give {size} (--batch-size {size}), or {opened}")
