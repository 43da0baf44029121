"""The option ``memory``: compile a program whose steps fit a limit, and measure one to be sure.

A plan counts the state, the batch and all computed values. It leaves out the workspace of kernels, which doubles the figure for
some convolutional networks. So burnish runs a step, and plans again if it took too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from burnish.analysis.memory_plan import value_bytes
from burnish.errors import ConfigurationError
from burnish.program import Program, Role
from burnish.program.signature import outputs_in_place
from burnish.rewriting import recompute_request
from burnish.rewriting.recompute_request import BudgetError, Recompute

ATTEMPTS = 5
"""Give up after this many plans."""
CLOSER = 0.97
"""Safety factor on the next budget, which is scaled by the measured peak."""
SHOWN = 3
"""The number of activations that an error lists."""


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that a step may take, for its state, its batch and all values in between.

    Attributes:
        bytes: the limit.
        batch: samples of a step.
    """

    bytes: int
    batch: int


def read_limit(memory: str | int) -> MemoryLimit:
    """Read the option: a number of bytes or ``64MB``, for one sample, or for more, ``64MB:batch=16``.

    Raises:
        ConfigurationError: it is none of these.
    """
    try:
        read = recompute_request.get(memory)
    except ConfigurationError:
        read = None
    if read is None or read.budget is None:
        raise ConfigurationError(
            f"memory={memory!r} is no limit: give a number of bytes, or a text such as '64MB' or '64MB:batch=16'"
        )
    return MemoryLimit(read.budget, read.batch or 1)


def program_within(limit: MemoryLimit, compiled: Callable[[Recompute | None], Program]) -> Program:
    """Return a program whose steps fit the limit, with as little recomputation as the search finds.

    Args:
        limit: the memory that a step may take.
        compiled: makes the program with this recomputation; None for none.

    Raises:
        ConfigurationError: no program fits; the message lists the largest parts and what would help. Or an input has an open
            extent besides the batch, so that nothing can be planned.
    """
    program = compiled(None)
    _check_extents(program)
    peak, request = program.planned_peak(limit.batch).bytes, None
    measured: int | None = None
    for _ in range(ATTEMPTS):
        if peak <= limit.bytes:
            measured = program.measured_peak(limit.batch)
            if measured is None or measured <= limit.bytes:
                program.options["memory"] = _noted(limit, measured)
                return program
            budget = int(peak * limit.bytes / measured * CLOSER)
        else:
            budget = limit.bytes
        request = Recompute(budget=budget, batch=limit.batch)
        try:
            program = compiled(request)
        except BudgetError:
            break
        peak = program.planned_peak(limit.batch).bytes
    raise _out_of_reach(limit, compiled, measured)


def _noted(limit: MemoryLimit, measured: int | None) -> dict[str, int]:
    noted = {"limit": limit.bytes, "batch": limit.batch}
    return noted if measured is None else {**noted, "measured": measured}


def _check_extents(program: Program) -> None:
    for entry in program.signature["step"].inputs_of(Role.DATA, Role.LABEL):
        for axis, extent in enumerate(entry.extents):
            if axis and not isinstance(extent, int) and entry.role is Role.DATA:
                raise ConfigurationError(
                    f"memory: the input '{entry.name}' has the open extent {extent!r} along axis {axis}, so that nothing can be "
                    "planned: export the model with a number there"
                )


def _out_of_reach(
    limit: MemoryLimit, compiled: Callable[[Recompute | None], Program], measured: int | None
) -> ConfigurationError:
    program = compiled(Recompute())
    peak = program.planned_peak(limit.batch)
    inputs = program.signature["step"].inputs
    in_place = outputs_in_place(program.apply, program.signature["apply"])
    updated = {entry for entry, output in program.signature["step"].updates.items() if output not in in_place}
    parameters = sum(entry.bytes for entry in inputs if entry.role is Role.PARAMETER)
    optimizer = sum(entry.bytes for entry in inputs if entry.role is Role.OPTIMIZER)
    following = sum(entry.bytes for entry in inputs if entry.name in updated)
    measured_text = "" if measured is None else f"; the last plan that fitted took {_size(measured)} when it was run"
    return ConfigurationError(
        f"memory: a step does not fit {_size(limit.bytes)} at batch {limit.batch}: planned are {_size(peak.without_recompute)}, "
        f"and {_size(peak.bytes)} where layers are computed again{measured_text}. Parameters take {_size(parameters)}, what the "
        f"optimizer keeps {_size(optimizer)}, the next values of both {_size(following)}; the largest activations are "
        f"{', '.join(_largest(program, limit.batch))}. {' '.join(_remedies(program, limit, measured, peak.bytes, optimizer))}"
    )


def _remedies(program: Program, limit: MemoryLimit, measured: int | None, peak: int, optimizer: int) -> Iterator[str]:
    # Assume that a smaller batch exceeds its plan by the same factor.
    factor = max(1.0, measured / peak) if measured is not None else 1.0
    batch = limit.batch
    while batch > 1:
        batch //= 2
        if program.planned_peak(batch).bytes * factor <= limit.bytes:
            several = math.ceil(limit.batch / batch)
            yield (
                f"A batch of {batch} is planned to fit with recompute='layers': gradients of {several} such batches can be added "
                "up (burnish.optim.accumulate)."
            )
            break
    else:
        yield f"No smaller batch fits: give a limit of {_size(math.ceil(program.planned_peak(1).bytes * factor))} or more."
    frozen = "Freezing layers (trainable) takes away their gradients, their optimizer's state and their next values"
    yield frozen + (", and SGD keeps less than this optimizer." if optimizer else ".")


def _largest(program: Program, batch: int) -> list[str]:
    sizes = value_bytes(program.step, batch)
    state = {output.name for output in program.step.graph.outputs}
    computed = [
        (size, value.name) for value, size in sizes.items() if size and not value.is_graph_input() and value.name not in state
    ]
    computed.sort(key=lambda item: (-item[0], item[1] or ""))
    return [f"'{name}' ({_size(size)})" for size, name in computed[:SHOWN]]


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"
