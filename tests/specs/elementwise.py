"""Arithmetic with broadcasting, powers, exponentials, trigonometry, selection and casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
import torch

from specs.operator_spec import OperatorSpec, Sample, away_from, distinct, normal, uniform

ALL_DTYPES = ("float16", "float32", "float64")
ALL_SHAPES = ("static", "batch", "symbolic", "unranked")


def unary(make: Callable[[np.random.Generator], np.ndarray], most_nodes: int) -> Callable[[np.random.Generator], list[Sample]]:
    return lambda rng: [Sample([make(rng)], most_nodes=most_nodes)]


def in_range(low: float, high: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: uniform(rng, low, high, 2, 3, 4)


def broadcasts(
    left: Callable[..., np.ndarray], right: Callable[..., np.ndarray], most_nodes: int
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Every way in which two operands broadcast; values of each side come from a generator that takes a shape."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        def sample(name: str, first: tuple[int, ...], second: tuple[int, ...], **options) -> Sample:
            return Sample([left(rng, *first), right(rng, *second)], name=name, **options)

        yield sample("same_shape", (2, 3), (2, 3), batched=(0, 1), most_nodes=most_nodes)
        yield sample("missing_axis", (2, 3), (3,))
        yield sample("missing_axis_left", (3,), (2, 3), batched=(1,))
        yield sample("one_against_many", (2, 3, 4), (2, 1, 4), batched=(0, 1))
        yield sample("channel", (2, 3, 2, 2), (3, 1, 1))
        yield sample("both_sides", (2, 1, 3), (4, 1))
        yield sample("scalar", (2, 3), ())
        yield sample("extent_one", (2, 3), (1,))
        yield sample("all_ones", (2, 3), (1, 1))
        yield sample("batch_of_one", (1, 3), (1, 3), batched=(0, 1))
        yield sample("scalars", (), ())
        yield sample("constant_operand", (2, 3), (3,), wrt=(0,), constants=(1,))
        yield Sample([uniform(rng, 1, 2, 2, 3)], name="twice_the_same", build=lambda builder, inputs: _twice(builder, inputs))

    return samples


def _twice(builder, inputs):
    x = inputs[0]
    return builder.op("Add", x, builder.op("Mul", x, x))


def binary(op_type: str, torch_function, most_nodes: int, left=normal, right=normal) -> OperatorSpec:
    def of_itself(builder, inputs):
        return builder.op(op_type, inputs[0], inputs[0])

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in broadcasts(left, right, most_nodes)(rng):
            if sample.name != "twice_the_same":
                yield sample
            else:
                yield Sample(sample.inputs, name=sample.name, build=of_itself, torch=lambda x: torch_function(x, x))

    return OperatorSpec(op_type, samples, torch=torch_function, shapes=ALL_SHAPES, dtypes=ALL_DTYPES)


def signed_away_from_zero(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return uniform(rng, 0.5, 2, *shape) * rng.choice([-1.0, 1.0], shape)


def variadic_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 2, 3)], name="one")
    yield Sample([normal(rng, 2, 3), normal(rng, 2, 3)], name="two", batched=(0, 1))
    yield Sample([normal(rng, 2, 3), normal(rng, 3), normal(rng, 2, 1)], name="three_broadcast", batched=(0, 2))


def torch_sum(*tensors):
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def extremum_samples(rng: np.random.Generator) -> Iterator[Sample]:
    values = distinct(rng, 30)
    yield Sample([values[:6].reshape(2, 3)], name="one")
    yield Sample([values[:6].reshape(2, 3), values[6:12].reshape(2, 3)], name="two", batched=(0, 1))
    yield Sample([values[:6].reshape(2, 3), values[6:9]], name="broadcast")
    yield Sample([values[:6].reshape(2, 3), values[6:9], values[9:11].reshape(2, 1)], name="three", batched=(0, 2), torch=None)
    yield Sample([values[:6].reshape(2, 3), np.zeros(())], name="constant_bound", wrt=(0,), constants=(1,))
    tied = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]])
    yield Sample([tied, np.where(tied > 0, tied, -3.0)], name="tie", smooth=False, batched=(0, 1))


def torch_extremum(function: Callable) -> Callable:
    def extremum(*tensors):
        result = tensors[0]
        for tensor in tensors[1:]:
            result = function(result, tensor)
        return result

    return extremum


def pow_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def base(*shape: int) -> np.ndarray:
        return uniform(rng, 0.4, 2, *shape)

    yield Sample([base(2, 3), normal(rng, 2, 3)], name="both", batched=(0, 1))
    yield Sample([base(2, 3), normal(rng, 3)], name="broadcast_exponent")
    yield Sample([base(3), normal(rng, 2, 1)], name="broadcast_base", batched=(1,))
    yield Sample([base(2, 3), np.array(1.7)], name="scalar_exponent")
    yield Sample([base(2, 3), normal(rng, 3)], name="only_exponent", wrt=(1,))
    exponents = {
        "square": (2.0, 2),
        "one": (1.0, 0),
        "half": (0.5, 2),
        "cube": (3.0, 3),
        "minus_one": (-1.0, 3),
        "zero": (0.0, 0),
    }
    for name, (exponent, nodes) in exponents.items():
        values = base(2, 3) if name == "half" else signed_away_from_zero(rng, 2, 3)
        yield Sample([values, np.array(exponent)], name=f"constant_{name}", wrt=(0,), constants=(1,), most_nodes=nodes)
    yield Sample([np.array([0.0, -1.5, 2.0]), np.array(2.0)], name="square_at_zero", wrt=(0,), constants=(1,))
    yield Sample([signed_away_from_zero(rng, 2, 3), np.array([2.0, 3.0, 0.0])], name="negative_base", wrt=(0,))
    yield Sample(
        [signed_away_from_zero(rng, 2, 3), np.array([2, 3, -1])],
        name="integer_exponent",
        constants=(),
        torch=lambda x, p: torch.pow(x, p.double()),
    )
    yield Sample([np.array([0.0, 0.0, 2.0]), np.array([2.0, 1.0, 3.0])], name="zero_base", wrt=(0,))
    yield Sample([np.array([0.0, 0.0, 0.0]), np.array([2.0, 0.0, 1.0])], name="zero_base_both", smooth=False)
    yield Sample([signed_away_from_zero(rng, 2, 3), np.array([[2.0]])], name="square_one_by_one", wrt=(0,), constants=(1,))


def where_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.random((2, 3)) < 0.5, normal(rng, 2, 3), normal(rng, 2, 3)], name="same_shape", batched=(1, 2))
    yield Sample([rng.random((2, 3)) < 0.5, normal(rng, 3), np.array(0.7)], name="broadcast_branches", constants=())
    yield Sample([rng.random(3) < 0.5, normal(rng, 2, 3), normal(rng, 2, 1)], name="broadcast_condition", batched=(1, 2))


def mod_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([np.array([5.3, -5.3, 7.1]), np.array([2.0, 2.1, -3.0])], {"fmod": 1}, name="fmod", torch_attributes={})
    yield Sample([np.array([[5.3, -5.3]]), np.array([[2.0], [1.9]])], {"fmod": 1}, name="broadcast", torch_attributes={})


def cast_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (ir.DataType.DOUBLE, ir.DataType.FLOAT):
        yield Sample([normal(rng, 2, 3)], {"to": int(dtype)}, name=f"to_{dtype.name.lower()}", smooth=dtype == ir.DataType.DOUBLE)
    yield Sample(
        [away_from(rng, range(-8, 9), 2, 3)],
        name="to_integer_stops",
        build=lambda builder, inputs: builder.op(
            "Mul", inputs[0], builder.cast(builder.cast(inputs[0], ir.DataType.INT64), inputs[0].dtype)
        ),
        torch=lambda x: x * x.detach().trunc(),
    )


def torch_cast(x, to=None):
    return x.float().double() if to == ir.DataType.FLOAT else x


def zero_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([away_from(rng, np.arange(-10, 10.5, 0.5), 2, 3)], most_nodes=0)


def range_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([np.array(0.5), np.array(3.2), np.array(0.7)], constants=(), batched=(), name="up")
    yield Sample([np.array(1.0), np.array(-2.2), np.array(-0.5)], constants=(1,), wrt=(0, 2), batched=(), name="down")
    yield Sample([np.array(1.0), np.array(0.2), np.array(0.5)], constants=(), wrt=(0, 2), batched=(), name="nothing")


def torch_range(start: torch.Tensor, limit: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    count = torch.ceil((limit - start) / delta).clamp(min=0).item()
    return start + delta * torch.arange(int(count)) + 0 * limit


SPECS = [
    binary("Add", torch.add, 0),
    binary("Sub", torch.sub, 1),
    binary("Mul", torch.mul, 2),
    binary("Div", torch.div, 3, right=signed_away_from_zero),
    OperatorSpec("Mod", mod_samples, torch=torch.fmod),
    OperatorSpec("Sum", variadic_samples, torch=torch_sum, shapes=ALL_SHAPES, dtypes=ALL_DTYPES),
    OperatorSpec("Mean", variadic_samples, torch=lambda *tensors: torch_sum(*tensors) / len(tensors), shapes=ALL_SHAPES),
    OperatorSpec("Max", extremum_samples, torch=torch_extremum(torch.maximum), shapes=ALL_SHAPES),
    OperatorSpec("Min", extremum_samples, torch=torch_extremum(torch.minimum), shapes=ALL_SHAPES),
    OperatorSpec("Identity", unary(in_range(-2, 2), 0), torch=lambda x: x.clone()),
    OperatorSpec("Neg", unary(in_range(-2, 2), 1), torch=torch.neg, dtypes=ALL_DTYPES),
    OperatorSpec("Abs", unary(lambda rng: away_from(rng, [0], 2, 3), 2), torch=torch.abs, dtypes=ALL_DTYPES),
    OperatorSpec("Exp", unary(in_range(-2, 2), 1), torch=torch.exp, dtypes=ALL_DTYPES),
    OperatorSpec("Log", unary(in_range(0.2, 3), 1), torch=torch.log, dtypes=ALL_DTYPES),
    OperatorSpec("Sqrt", unary(in_range(0.2, 3), 2), torch=torch.sqrt, dtypes=ALL_DTYPES),
    OperatorSpec("Reciprocal", unary(in_range(0.3, 2), 3), torch=torch.reciprocal, dtypes=ALL_DTYPES),
    OperatorSpec("Erf", unary(in_range(-2, 2), 5), torch=torch.erf),
    OperatorSpec("Pow", pow_samples, torch=torch.pow, shapes=ALL_SHAPES),
    OperatorSpec("Sin", unary(in_range(-3, 3), 2), torch=torch.sin),
    OperatorSpec("Cos", unary(in_range(-3, 3), 3), torch=torch.cos),
    OperatorSpec("Tan", unary(in_range(-1.2, 1.2), 3), torch=torch.tan),
    OperatorSpec("Asin", unary(in_range(-0.9, 0.9), 4), torch=torch.asin),
    OperatorSpec("Acos", unary(in_range(-0.9, 0.9), 5), torch=torch.acos),
    OperatorSpec("Atan", unary(in_range(-3, 3), 3), torch=torch.atan),
    OperatorSpec("Sinh", unary(in_range(-2, 2), 2), torch=torch.sinh),
    OperatorSpec("Cosh", unary(in_range(-2, 2), 2), torch=torch.cosh),
    OperatorSpec("Tanh", unary(in_range(-3, 3), 3), torch=torch.tanh, dtypes=ALL_DTYPES, shapes=ALL_SHAPES),
    OperatorSpec("Asinh", unary(in_range(-3, 3), 4), torch=torch.asinh),
    OperatorSpec("Acosh", unary(in_range(1.2, 4), 4), torch=torch.acosh),
    OperatorSpec("Atanh", unary(in_range(-0.9, 0.9), 3), torch=torch.atanh),
    *(
        OperatorSpec(name, zero_samples, torch=function)
        for name, function in [("Floor", torch.floor), ("Ceil", torch.ceil), ("Round", torch.round), ("Sign", torch.sign)]
    ),
    OperatorSpec("Where", where_samples, torch=torch.where, shapes=ALL_SHAPES, dtypes=ALL_DTYPES),
    OperatorSpec("Range", range_samples, torch=torch_range),
    OperatorSpec("Cast", cast_samples, torch=torch_cast),
    OperatorSpec(
        "CastLike",
        lambda rng: [Sample([normal(rng, 2, 3), np.zeros(())], wrt=(0,))],
        torch=lambda x, like: x.clone(),
        error_inputs=[],
    ),
]
