"""``batch="open"`` over random graphs: where one operator leaves the samples, the next has to find them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish import engines
from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import Builder, Tensor, static_shape
from burnish.importer import load
from oracles.batches import assert_as_alone
from oracles.combinations import spread

GRAPHS, SAMPLES, LARGEST = 60, 3, 2000


class Unfit(Exception):
    """An operator that a value cannot have."""


class Composition:
    """A graph of operators drawn by a seed, each over one of the last values, whose inputs hold a single sample."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.graph = ir.Graph([], [], nodes=[], name="composition", opset_imports={"": 18})
        self.builder = Builder(self.graph)
        self.values: list[Tensor] = []
        for number in range(self.rng.integers(1, 3)):
            shape = self.rng.integers(1, 5, self.rng.integers(1, 5)).tolist()
            shape[self.rng.integers(len(shape))] = 1
            value = ir.Value(name=f"x{number}", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(shape))
            self.graph.inputs.append(value)
            self.values.append(self.builder.tensor(value))
        for _ in range(self.rng.integers(2, 12)):
            self._extend()

    def model(self) -> ir.Model:
        """The graph with its last two values as outputs."""
        computed = [tensor.value for tensor in self.values if tensor.value.producer() is not None]
        for number, value in enumerate(computed[-2:]):
            value.name = f"y{number}"
            self.graph.outputs.append(value)
        return ir.Model(self.graph, ir_version=10)

    def samples(self) -> list[dict[str, np.ndarray]]:
        inputs = [(value.name or "", static_shape(value)) for value in self.graph.inputs]
        return [{name: self.rng.standard_normal(shape) for name, shape in inputs} for _ in range(SAMPLES)]

    def _extend(self) -> None:
        x = self.values[self.rng.integers(max(0, len(self.values) - 3), len(self.values))]
        operator: Callable[..., Tensor] = self._chosen(OPERATORS)
        try:
            y = operator(self, x, shape_of(x))
        except (Unfit, ModelError, ValueError):
            return
        shape = static_shape(y.value)
        if shape is not None and np.prod(shape) <= LARGEST:
            self.values.append(y)

    def _chosen(self, choices):
        return choices[self.rng.integers(len(choices))]

    def _constant(self, *shape: int) -> Tensor:
        return self.builder.constant(self.rng.standard_normal(shape))

    def _axis(self, shape: tuple[int, ...]) -> int:
        if not shape:
            raise Unfit
        return int(self.rng.integers(len(shape)))

    def activated(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.builder.op("Tanh", x)

    def combined(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        other = self._chosen(self.values)
        np.broadcast_shapes(shape, shape_of(other))
        operands = (x, other) if self.rng.random() < 0.5 else (other, x)
        return self.builder.op(self._chosen(["Add", "Mul", "Max", "Sub"]), *operands)

    def weighted(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        weight = [extent if self.rng.random() < 0.6 else int(self.rng.integers(1, 4)) if extent == 1 else 1 for extent in shape]
        return self.builder.op("Add", x, self._constant(*weight[self.rng.integers(len(shape) + 1) :]))

    def transposed(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._axis(shape)
        return self.builder.op("Transpose", x, perm=self.rng.permutation(len(shape)).tolist())

    def merged(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        at = self._axis(shape[1:])
        return self._reshaped(x, [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]])

    def regrouped(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        factors = [factor for extent in shape for factor in {4: [2, 2], 6: [2, 3]}.get(extent, [extent])]
        self.rng.shuffle(factors)
        extents = [int(np.prod(part)) for part in np.split(factors, np.sort(self.rng.integers(0, len(factors) + 1, 2)))]
        return self._reshaped(x, extents)

    def _reshaped(self, x: Tensor, extents: list[int]) -> Tensor:
        if extents and self.rng.random() < 0.4:
            extents[self.rng.integers(len(extents))] = -1
        return self.builder.op("Reshape", x, self.builder.integers(extents))

    def flattened(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.builder.op("Flatten", x, axis=self._axis((*shape, 1)) if shape else 0)

    def squeezed(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ones = [axis for axis, extent in enumerate(shape) if extent == 1]
        taken = self.rng.permutation(ones)[: self.rng.integers(1, len(ones) + 1)]
        return self.builder.op("Squeeze", x, self.builder.integers(taken.tolist()))

    def unsqueezed(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.builder.op("Unsqueeze", x, self.builder.integers([self._axis((*shape, 1))]))

    def reduced(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        axes = self.rng.permutation(len(shape))[: 1 + self._axis(shape)].tolist()
        keepdims = int(self.rng.integers(2))
        return self.builder.op(self._chosen(["ReduceMean", "ReduceL2"]), x, self.builder.integers(axes), keepdims=keepdims)

    def normalized(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.builder.op("Softmax", x, axis=self._axis(shape) - len(shape))

    def multiplied(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._axis(shape)
        if self.rng.random() < 0.5:
            return self.builder.op("MatMul", self._constant(2, shape[-2] if len(shape) > 1 else shape[-1]), x)
        return self.builder.op(
            "MatMul", x, self._constant(shape[-1], 3) if self.rng.random() < 0.7 else self._constant(shape[-1])
        )

    def with_itself(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._axis(shape[1:])
        rank = len(shape)
        return self.builder.op("MatMul", x, self.builder.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2]))

    def joined(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        axis = self._axis(shape)
        alike = (*shape[:axis], *shape[axis + 1 :])
        ranked = [other for other in self.values if len(shape_of(other)) == len(shape)]
        beside = [other for other in ranked if (*shape_of(other)[:axis], *shape_of(other)[axis + 1 :]) == alike]
        constant = self._constant(*(2 if at == axis else extent for at, extent in enumerate(shape)))
        return self.builder.op("Concat", x, constant, self._chosen(beside), axis=axis)

    def sliced(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        axis = self._axis(shape)
        numbers = (int(self.rng.integers(shape[axis])), 2**40, axis - len(shape))
        return self.builder.op("Slice", x, *(self.builder.integers([number]) for number in numbers))

    def gathered(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        axis = self._axis(shape)
        indices = self.rng.integers(0, shape[axis], self._chosen([(), (1,), (2,), (1, 2)]))
        return self.builder.op("Gather", x, self.builder.constant(np.asarray(indices, np.int64)), axis=axis)

    def expanded(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        extents = [int(self.rng.integers(1, 4)) if extent == 1 else extent for extent in shape]
        return self.builder.op("Expand", x, self.builder.integers([2, *extents] if self.rng.random() < 0.4 else extents))

    def repeated(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._axis(shape)
        return self.builder.op("Tile", x, self.builder.integers(self.rng.integers(1, 3, len(shape)).tolist()))

    def convolved(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._axis(shape[2:])
        return self.builder.op("Conv", x, self._constant(2, shape[1], *[1] * (len(shape) - 2)))

    def dense(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2:
            raise Unfit
        bias = self._constant(3) if self.rng.random() < 0.5 else self._constant(shape[0], 3)
        return self.builder.op("Gemm", x, self._constant(shape[1], 3), bias, alpha=0.5, beta=2.0)


C = Composition
OPERATORS = (
    C.activated, C.combined, C.combined, C.weighted, C.transposed, C.transposed, C.merged, C.merged, C.regrouped, C.regrouped,
    C.flattened, C.squeezed, C.squeezed, C.unsqueezed, C.unsqueezed, C.reduced, C.normalized, C.multiplied, C.with_itself,
    C.joined, C.sliced, C.gathered, C.expanded, C.repeated, C.convolved, C.dense,
)  # fmt: skip


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    shape = static_shape(tensor.value)
    if shape is None:
        raise Unfit
    return shape


@spread("block", range(5), test=1)
def test_samples_go_through_a_graph_together_as_alone(block):
    equal = 0
    for seed in range(block * GRAPHS, (block + 1) * GRAPHS):
        composition = Composition(seed)
        model = composition.model()
        if not model.graph.outputs:
            continue
        samples = composition.samples()
        try:
            single = load(model)
            run = engines.get("reference").load(single)
            alone = [run(sample) for sample in samples]
            opened = load(model, batch="open")
        except (ModelError, UnsupportedOperatorError):
            continue
        assert_as_alone(single, opened, samples, alone, rtol=1e-10)
        equal += 1
    assert equal > GRAPHS // 3
