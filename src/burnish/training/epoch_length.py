"""How many steps an epoch has, where a program does not take a last batch of any size."""

from __future__ import annotations

from burnish.errors import ConfigurationError
from burnish.program import Program
from burnish.training.inputs import broken_rule


def batches_per_epoch(program: Program, samples: int, batch_size: int) -> int:
    """Return how many steps an epoch over so many samples has. A last batch of a size that the program does not take is left out.

    Raises:
        ConfigurationError: the program takes no batch of ``batch_size``.
    """
    rest = samples_left_out(program, samples, batch_size)
    return (samples - rest) // batch_size if rest else -(-samples // batch_size)


def samples_left_out(program: Program, samples: int, batch_size: int) -> int:
    """Return how many samples at the end of an epoch make no batch that the program takes.

    Raises:
        ConfigurationError: the program takes no batch of ``batch_size``.
    """
    signature = program.signature["step"]
    rule = broken_rule(signature, batch_size)
    if rule is not None and samples >= batch_size:
        raise ConfigurationError(f"batch_size={batch_size}: {rule.reason}; give another batch_size, or {rule.remedy}")
    rest = samples % batch_size
    return rest if samples > batch_size and rest and broken_rule(signature, rest) is not None else 0
