"""Loop and Scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_loop import Loop as EvaluatorLoop

from burnish.engines.reference.operators.operator import listed


class Loop(EvaluatorLoop):
    """Without a first condition, of any number of states, with stacked outputs of any rank, and of no iteration."""

    op_domain = ""

    def _run(self, count: Any, condition: Any, *states: Any, context: Any = None, bindings: Any = None, **bodies: Any) -> Any:  # type: ignore[override]
        carried = list(states)
        rows = _Rows(self.body, 1 + len(states))  # type: ignore[attr-defined]
        going = True if condition is None else bool(np.all(condition))
        limit = None if count is None else int(np.asarray(count).item())
        iteration = 0
        while going and (limit is None or iteration < limit):
            values = [np.array(iteration, np.int64), np.array(True), *carried]
            following, *results = _run_body(self, values, context, bindings)
            going, iteration = bool(np.all(following)), iteration + 1
            carried = results[: len(states)]
            rows.add(results[len(states) :])
        return (*carried, *rows.stacked())


class Scan(OpRun):
    """Along any axis, in either direction, and of no slice."""

    op_domain = ""

    def need_context(self) -> bool:
        """A body reads values of the graphs around it."""
        return True

    def _run(self, *operands: Any, context: Any = None, bindings: Any = None, **attributes: Any) -> Any:
        sliced = attributes["num_scan_inputs"]
        states = len(operands) - sliced
        rows = _Rows(self.body, states)  # type: ignore[attr-defined]
        axes, directions = (listed(attributes.get(f"scan_input_{what}"), 0, sliced) for what in ("axes", "directions"))
        frames = [
            np.moveaxis(operand, axis, 0)[:: -1 if backwards else 1]
            for operand, axis, backwards in zip(operands[states:], axes, directions, strict=True)
        ]
        carried = list(operands[:states])
        for iteration in range(len(frames[0])):
            results = _run_body(self, [*carried, *(frame[iteration] for frame in frames)], context, bindings)
            carried = list(results[:states])
            rows.add(results[states:])
        axes, directions = (listed(attributes.get(f"scan_output_{what}"), 0, len(rows.slices)) for what in ("axes", "directions"))
        stacked = zip(rows.stacked(), axes, directions, strict=True)
        return (*carried, *(np.moveaxis(row[:: -1 if backwards else 1], 0, axis) for row, axis, backwards in stacked))


class _Rows:
    """What a body returns beside its states, of every iteration."""

    def __init__(self, body: Any, first: int):
        self.declared = list(body.proto_.output)[first:]
        self.slices: list[list[np.ndarray]] = [[] for _ in self.declared]

    def add(self, results: Sequence[np.ndarray]) -> None:
        for row, result in zip(self.slices, results, strict=True):
            row.append(result)

    def stacked(self) -> list[np.ndarray]:
        pairs = zip(self.slices, self.declared, strict=True)
        return [np.stack(row) if row else _nothing(declared) for row, declared in pairs]


def _nothing(declared: onnx.ValueInfoProto) -> np.ndarray:
    """What is stacked of no iteration; an extent that is not declared counts as 0."""
    kind = declared.type.tensor_type
    extents = [dimension.dim_value for dimension in kind.shape.dim]
    return np.zeros([0, *extents], onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type or onnx.TensorProto.FLOAT))


def _run_body(op: Any, values: Sequence[Any], context: Mapping[str, Any] | None, bindings: Any) -> list[Any]:
    """Run a body on its inputs, which hide values around it of the same names."""
    inputs = {**(context or {}), **dict(zip(op.body.input_names, values, strict=True))}
    return list(op._run_body(inputs, bindings=bindings))
