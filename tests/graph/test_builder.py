"""The builder: typed nodes, constants beside tensors, and where nodes go."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import ModelError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, garbage_kept, unbroadcast, zeros_like
from oracles.gradient_harness import Evaluator


def builder_with_input(
    dtype: ir.DataType = ir.DataType.FLOAT, shape: ir.Shape | None = None, opset: int = 18
) -> tuple[Builder, Tensor]:
    graph = ir.Graph([], [], nodes=[], name="built", opset_imports={"": opset})
    value = ir.Value(name="x", type=ir.TensorType(dtype), shape=shape or ir.Shape(["batch", 3]))
    graph.inputs.append(value)
    builder = Builder(graph)
    return builder, builder.tensor(value)


def dimensions(tensor: Tensor) -> list:
    assert tensor.shape is not None
    return [dim if isinstance(dim, int) else dim.value for dim in tensor.shape.dims]


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_arithmetic_keeps_dtype_and_shape(dtype: ir.DataType) -> None:
    _, x = builder_with_input(dtype)
    for result in (x + 1, 1 + x, x - 0.5, 2 - x, x * 3, 3 * x, x / 2, 1 / x, x**2, -x, x + x):
        assert result.dtype == dtype
        assert dimensions(result) == ["batch", 3]
    assert all(value.dtype == dtype for node in x.builder.graph for value in node.outputs)


def test_reflected_operands_keep_their_side() -> None:
    builder, x = builder_with_input()
    one, other = (builder.op("Sub", x, 1).value.producer(), (1 - x).value.producer())
    assert one.inputs[0] is x.value
    assert other.inputs[1] is x.value


def test_broadcast_shape_and_comparison_dtype() -> None:
    builder, x = builder_with_input()
    column = builder.constant(np.ones((3,), np.float32))
    assert dimensions(x + column) == ["batch", 3]
    compared = builder.op("Greater", x, 0)
    assert compared.dtype == ir.DataType.BOOL
    assert dimensions(compared) == ["batch", 3]


def test_equal_constants_are_emitted_once_and_different_ones_apart() -> None:
    builder, x = builder_with_input()
    assert builder.scalar(2, x).value is builder.scalar(2.0, x).value
    assert builder.scalar(0.0, x).value is not builder.scalar(-0.0, x).value
    assert builder.integers([1]).value is not builder.integers([[1]]).value
    half, brain = np.zeros((), np.float16), np.zeros((), ml_dtypes.bfloat16)
    assert builder.constant(half).value is not builder.constant(brain).value
    assert builder.integers([]).dtype == ir.DataType.INT64


def test_constant_is_readable_and_an_input_is_not() -> None:
    builder, x = builder_with_input()
    np.testing.assert_array_equal(builder.integers([3, 4]).array, [3, 4])
    assert x.array is None
    assert (x + 1).array is None


def test_an_input_with_a_default_is_no_constant() -> None:
    builder, _ = builder_with_input()
    weight = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]), const_value=ir.tensor([1.0, 2.0]))
    builder.graph.initializers.add(weight)
    np.testing.assert_array_equal(builder.tensor(weight).array, [1, 2])
    builder.graph.inputs.append(weight)
    assert builder.tensor(weight).array is None


def test_inference_by_schema_reads_constant_operands() -> None:
    builder, x = builder_with_input(shape=ir.Shape([2, 3, 4]))
    assert dimensions(builder.op("ReduceSum", x, builder.integers([1]), keepdims=0)) == [2, 4]
    assert dimensions(builder.op("Reshape", x, builder.integers([6, -1]))) == [6, 4]
    assert dimensions(builder.op("Transpose", x, perm=[2, 0, 1])) == [4, 2, 3]
    assert builder.op("Shape", x).dtype == ir.DataType.INT64


def test_what_the_caller_knows_overrides_inference() -> None:
    builder, x = builder_with_input()
    gradient = builder.op("SomethingGrad", x, domain=BURNISH_DOMAIN, like=x)
    assert gradient.dtype == x.dtype
    assert dimensions(gradient) == ["batch", 3]
    indices = builder.op("Something", x, domain=BURNISH_DOMAIN, like=x, dtype=ir.DataType.INT64, shape=[2])
    assert indices.dtype == ir.DataType.INT64
    assert dimensions(indices) == [2]
    assert x.dtype == ir.DataType.FLOAT, "the tensor it is like keeps its own type"


def test_optional_inputs_several_outputs_and_absent_attributes() -> None:
    builder, x = builder_with_input()
    low = builder.op("Clip", x, None, 3).value.producer()
    assert [value is None for value in low.inputs] == [False, True, False]
    first, second = builder.op("TopK", x, builder.integers([2]), outputs=2, axis=-1, largest=None)
    assert (first.dtype, second.dtype) == (ir.DataType.FLOAT, ir.DataType.INT64)
    assert set(first.value.producer().attributes) == {"axis"}


def test_a_number_needs_a_tensor_beside_it() -> None:
    builder, _ = builder_with_input()
    with pytest.raises(TypeError, match=r"Add: a number needs a tensor beside it"):
        builder.op("Add", 1, 2)


def test_emits_in_front_of_a_node() -> None:
    builder, x = builder_with_input()
    last = builder.op("Relu", x).value.producer()
    Builder(builder.graph, before=last).op("Neg", x)
    assert [node.op_type for node in builder.graph] == ["Neg", "Relu"]


def test_cast_to_the_same_dtype_is_nothing() -> None:
    builder, x = builder_with_input()
    assert builder.cast(x, ir.DataType.FLOAT) is x
    assert builder.cast(x, ir.DataType.FLOAT16).dtype == ir.DataType.FLOAT16


def test_known_extents() -> None:
    _, x = builder_with_input()
    assert (x.rank, x.dimension(0), x.dimension(1), x.dimension(-1)) == (2, None, 3, 3)
    unranked = Tensor(x.builder, ir.Value(name="u", type=ir.TensorType(ir.DataType.FLOAT)))
    assert (unranked.rank, unranked.dimension(0)) == (None, None)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE])
@pytest.mark.parametrize(("shape", "first"), [([2, 3], "Constant"), (["n", 3], "Shape")])
def test_zeros_like_are_made_when_the_graph_runs(dtype: ir.DataType, shape: list, first: str) -> None:
    builder, x = builder_with_input(dtype, ir.Shape(shape))
    zeros = zeros_like(x)
    assert [node.op_type for node in builder.graph] == [first, "ConstantOfShape"]
    assert (zeros.dtype, dimensions(zeros)) == (dtype, shape)
    builder.graph.outputs.append(zeros.value)
    data = np.ones((2, 3), dtype.numpy())
    (result,) = Evaluator(ir.Model(builder.graph, ir_version=10))({"x": data}).values()
    np.testing.assert_array_equal(result, np.zeros_like(data), strict=True)


def test_operands_that_do_not_fit_name_the_node_and_what_it_is_a_part_of() -> None:
    builder, x = builder_with_input()
    with (
        builder.attributed("gradient of Gemm 'fc' (output 'y')"),
        pytest.raises(ModelError, match=r"MatMul '.*' .*of the gradient of Gemm 'fc' .*cannot take these operands: "),
    ):
        builder.op("MatMul", x, builder.constant(np.ones((7, 7), np.float32)))


def test_a_dtype_that_is_not_known_names_the_node() -> None:
    builder, x = builder_with_input()
    unknown = builder.op("Mystery", x, domain="custom")
    with pytest.raises(ModelError, match=r"the dtype of '.*', output of custom\.Mystery .*cannot be inferred: declare it"):
        unknown.dtype  # noqa: B018


def test_an_axis_that_a_value_does_not_have_names_it() -> None:
    builder, _ = builder_with_input()
    with pytest.raises(ModelError, match=r"has the shape \[\], without a dimension 0: export the model again"):
        builder.constant(np.asarray(1)).dimension(0)


def test_operands_of_one_name_are_told_apart():
    """A body under construction may name a value as the graph around it does."""
    dtype = ir.TensorType(ir.DataType.FLOAT)
    outer, inner = (ir.Value(name="v", type=dtype, shape=ir.Shape(dims)) for dims in ([6, 2], [3, 6]))
    builder = Builder(ir.Graph([inner], [], nodes=[], opset_imports={"": 18}))
    product = builder.op("MatMul", builder.tensor(inner), builder.tensor(outer))
    assert product.shape == ir.Shape([3, 2])


def test_is_collected_again_behind_the_block():
    with garbage_kept():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_is_collected_again_after_an_error():
    @garbage_kept()
    def fail():
        assert not gc.isenabled()
        raise ValueError("here")

    for _ in range(2):
        with pytest.raises(ValueError, match="here"):
            fail()
        assert gc.isenabled()


def test_stays_uncollected_where_it_was():
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def summed_back(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(axis for axis, extent in enumerate(padded) if extent == 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape)


def build(full: ir.Shape | None, operand: ir.Shape | None, dtype: ir.DataType = ir.DataType.DOUBLE) -> tuple[ir.Model, ir.Value]:
    graph = ir.Graph([], [], nodes=[], name="unbroadcast", opset_imports={"": 18})
    builder = Builder(graph)
    values = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=shape) for name, shape in (("cotangent", full), ("operand", operand))
    ]
    graph.inputs.extend(values)
    result = unbroadcast(*(builder.tensor(value) for value in values)).value
    graph.outputs.append(result if result not in values else builder.op("Identity", builder.tensor(result)).value)
    return ir.Model(graph, ir_version=10), result


@st.composite
def operand_and_full(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = tuple(draw(st.lists(st.integers(1, 3), max_size=4)))
    kept = full[draw(st.integers(0, len(full))) :]
    return tuple(1 if draw(st.booleans()) else extent for extent in kept), full


@settings(max_examples=60, deadline=None)
@given(operand_and_full(), st.sampled_from(["static", "named", "unranked"]))
def test_sums_over_the_repeated_axes(shapes: tuple[tuple[int, ...], tuple[int, ...]], knowledge: str) -> None:
    operand, full = shapes
    known: list[ir.Shape | None] = [ir.Shape(full), ir.Shape(operand)]
    if knowledge == "named":
        known = [
            ir.Shape([f"{name}{axis}" for axis in range(len(shape))]) for name, shape in (("full", full), ("operand", operand))
        ]
    elif knowledge == "unranked":
        known = [None, None]
    model, _ = build(*known)
    cotangent = np.random.default_rng(0).standard_normal(full)
    (result,) = Evaluator(model)({"cotangent": cotangent, "operand": np.zeros(operand)}).values()
    np.testing.assert_allclose(result, summed_back(cotangent, operand), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("full", "operand", "operators"),
    [
        (["n", 3], ["n", 3], []),
        ([2, 3], [2, 3], []),
        (["n", 3], [3], ["ReduceSum"]),
        (["n", 3, 4, 4], [1, 3, 1, 1], ["ReduceSum"]),
        (["n", 3, 4, 4], [3, 1, 1], ["ReduceSum", "Squeeze"]),
        (["n", 3], [], ["ReduceSum"]),
        (["n", 3], [1], ["ReduceSum", "Reshape"]),
        ([None, 3], [4, 3], []),
    ],
)
def test_known_shapes_need_no_work_at_run_time(full: list, operand: list, operators: list[str]) -> None:
    model, result = build(ir.Shape(full), ir.Shape(operand))
    emitted = [node.op_type for node in model.graph if node.op_type not in ("Constant", "Identity")]
    assert emitted == operators
    if operators:
        assert [dim if isinstance(dim, int) else dim.value for dim in result.shape.dims] == operand


LONG = [
    ([262144, 8], [8]),
    ([262144, 8], [1, 8]),
    ([512, 512, 8], [8]),
    ([512, 512, 8], [1, 1, 8]),
    ([16, 4096, 3, 2], [4096, 1, 2]),
    ([32768, "n"], ["n"]),
    ([65536, 4], []),
]


@pytest.mark.parametrize(("full", "operand"), LONG)
def test_long_leading_axes_keep_their_digits(full: list, operand: list) -> None:
    """All terms have one sign, so that the error of a float32 sum shows how many were added one after the other."""
    model, result = build(ir.Shape(full), ir.Shape(operand), ir.DataType.FLOAT)
    extents, target = ([5 if extent == "n" else extent for extent in shape] for shape in (full, operand))
    cotangent = np.random.default_rng(0).random(extents, dtype=np.float32)
    (actual,) = Evaluator(model)({"cotangent": cotangent, "operand": np.zeros(target, np.float32)}).values()
    expected = summed_back(cotangent.astype(np.float64), tuple(target))
    assert actual.shape == expected.shape
    assert np.abs(actual / expected - 1).max() <= 1e-6
    assert [dim if isinstance(dim, int) else dim.value for dim in result.shape.dims] == operand


@pytest.mark.parametrize(
    ("full", "operand", "operators"),
    [
        ([262144, 8], [8], ["Reshape", "ReduceSum", "ReduceSum"]),
        ([512, 512, 8], [1, 1, 8], ["Reshape", "ReduceSum", "ReduceSum"]),
        ([16384, 8], [8], ["ReduceSum"]),  # not longer than what is added up well
        ([16411, 8], [8], ["ReduceSum"]),  # a prime
        ([2 * 16411, 8], [8], ["ReduceSum"]),  # no factor near the root
        (["n", 262144, 8], [8], ["ReduceSum"]),
        ([262144, "n", "m"], ["n", "m"], ["ReduceSum"]),
        ([8, 262144], [8, 1], ["ReduceSum"]),
        ([262144, 0], [0], ["ReduceSum"]),
    ],
)
def test_only_long_leading_axes_are_summed_in_stages(full: list, operand: list, operators: list[str]) -> None:
    model, _ = build(ir.Shape(full), ir.Shape(operand))
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == operators
