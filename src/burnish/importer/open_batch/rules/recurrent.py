"""Recurrent layers, whose batch has an axis of its own."""

from __future__ import annotations

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import Batch, Refused


def _at(axis: int) -> Batch:
    return Batch(axis, is_extra=False)


@opens("GRU", "LSTM", "RNN")
def recurrent(call: Call) -> list[Result | None]:
    """States and lengths that are the same for all samples are repeated for each, as the standard does not broadcast them."""
    call.same_for_all(0, 4, 5, 6)
    opening, batch_first = call.opening, bool(call.attribute("layout", 0))
    of_states = _at(0 if batch_first else 1)
    of_operands = {0: _at(0 if batch_first else 1), 4: _at(0), 5: of_states, 6: of_states}
    values = []
    for index, operand in enumerate(call.operands):
        batch = of_operands.get(index)
        if operand is None or batch is None:
            values.append(None if operand is None else operand.value)
            continue
        if operand.shape[batch.axis] != 1:
            raise Refused(f"gets {operand.shape[batch.axis]} sequences of one sample")
        values.append(opening.spread(operand, batch))
    of_results = (_at(0 if batch_first else 2), of_states, of_states)
    return list(zip(call.again(*values), of_results, strict=False))
