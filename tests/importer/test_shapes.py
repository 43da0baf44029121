"""Dtypes and shapes of a loaded model: the batch by name, everything else as the standard infers it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import BurnishError, InputError, ModelError, UnsupportedOperatorError
from burnish.importer import load
from burnish.program import Role
from oracles.combinations import diagonal
from oracles.onnxruntime_outputs import onnxruntime_outputs


def build(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str | None] | None],
    outputs: dict[str, list[int | str | None] | None],
    initializers: dict[str, np.ndarray] | None = None,
    value_info: dict[str, list[int | str | None]] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
        value_info=[helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (value_info or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def shapes(model: ir.Model) -> dict[str, ir.Shape | None]:
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    return {value.name or "": value.shape for value in values}


def test_a_named_batch_reaches_every_value() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    weights = {"w": np.ones((5, 3, 3, 3), np.float32)}
    found = shapes(load(build(nodes, {"x": ["N", 3, 8, 8]}, {"y": None}, weights)))
    assert found == {
        "x": ir.Shape(["N", 3, 8, 8]),
        "c": ir.Shape(["N", 5, 8, 8]),
        "p": ir.Shape(["N", 5, 1, 1]),
        "y": ir.Shape(["N", 5]),
    }


def test_unnamed_dimensions_get_names_of_their_own() -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    model = load(build(nodes, {"a": [None, 3], "b": [3, None]}, {"y": None}))
    assert shapes(model) == {"a": ir.Shape(["batch", 3]), "b": ir.Shape([3, "b_dim_1"]), "y": ir.Shape(["batch", "b_dim_1"])}


def test_names_that_are_taken_are_not_given_again() -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    model = load(build(nodes, {"a": [None, 3], "b": [3, "batch"]}, {"y": None}))
    assert shapes(model)["y"] == ir.Shape(["a_dim_0", "batch"])


@pytest.mark.parametrize("unknown", [-1, "?", "", " ", "None", "none", "unk__12", "unknown", "*", "NaN"])
def test_what_stands_for_no_extent_is_an_unknown_one_of_its_own(unknown: int | str) -> None:
    """Height and width have the same name that is none, and so has the batch of another input."""
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["other"], ["z"])]
    model = build(nodes, {"x": [unknown, 3, unknown, unknown], "other": [unknown, 2]}, {"y": None, "z": None}, {})
    found = shapes(load(model))
    assert found["y"] == ir.Shape(["batch", 3, "x_dim_2", "x_dim_3"])
    assert found["z"] == ir.Shape(["other_dim_0", 2])


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ([0, 3], ["batch", 3]),
        ([0, 3, 0, 0], ["batch", 3, "x_dim_2", "x_dim_3"]),
        (["N", 3, 0, 0], ["N", 3, "x_dim_2", "x_dim_3"]),
        ([1, 8, 0, 64], [1, 8, 0, 64]),
        ([0], [0]),
    ],
)
def test_an_extent_of_zero_is_unknown_where_no_data_would_fit(declared: list[int | str], expected: list[int | str]) -> None:
    """A single one, as of a cache that is empty at first, is meant."""
    model = build([helper.make_node("Relu", ["x"], ["y"])], {"x": declared}, {"y": None}, {})
    assert shapes(load(model))["y"] == ir.Shape(expected)


def test_no_extent_is_below_minus_one() -> None:
    model = build([helper.make_node("Relu", ["x"], ["y"])], {"x": [-2, 3]}, {"y": None}, {})
    with pytest.raises(ModelError, match=r"'x' is declared with the shape \[-2,3\], and no extent can be below zero"):
        load(model)


def test_images_of_any_height_and_width_train_where_neither_has_a_name() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["maps"], kernel_shape=[3, 3]),
        helper.make_node("GlobalAveragePool", ["maps"], ["means"]),
        helper.make_node("Flatten", ["means"], ["y"]),
    ]
    model = build(nodes, {"x": [-1, 3, "?", "?"]}, {"y": None}, {"kernel": np.ones((4, 3, 3, 3), np.float32) / 9})
    session = burnish.Session(burnish.compile(model), "onnxruntime")
    for height, width in ((48, 192), (7, 5)):
        x = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
        assert np.isfinite(session.step({"x": x, "labels": np.array([0, 3])})["loss"])


def test_a_fixed_batch_is_kept() -> None:
    found = shapes(load(build([helper.make_node("Relu", ["x"], ["y"])], {"x": [4, 3]}, {"y": None})))
    assert found["y"] == ir.Shape([4, 3])


def test_declared_shapes_from_another_batch_size_are_not_relied_on() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Neg", ["z"], ["y"])]
    found = shapes(load(build(nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]}, value_info={"z": [2, 3]})))
    assert found["z"] == ir.Shape(["batch", 3])


def test_an_output_keeps_the_names_it_declares_where_inference_has_none() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64), helper.make_node("Reshape", ["d", "i"], ["y"])]
    found = shapes(load(build(nodes, {"x": [2], "d": ["n", 3]}, {"y": ["rows", 3]})))
    assert found["y"] == ir.Shape(["rows", 3])


def test_every_value_has_a_dtype() -> None:
    nodes = [
        helper.make_node("TopK", ["x", "k"], ["values", "indices"]),
        helper.make_node("Cast", ["indices"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["y"], to=TensorProto.FLOAT),
    ]
    model = load(build(nodes, {"x": ["n", 5]}, {"y": None}, {"k": np.array([2])}))
    dtypes = {output.name: output.dtype for node in model.graph for output in node.outputs}
    assert dtypes == {
        "values": ir.DataType.FLOAT,
        "indices": ir.DataType.INT64,
        "half": ir.DataType.FLOAT16,
        "y": ir.DataType.FLOAT,
    }


@pytest.mark.parametrize("opset", [18, 21])
def test_shapes_go_through_group_normalization(opset: int) -> None:
    """The standard's inference stops there: it has none for the operator, which must not end the import."""
    nodes = [
        helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["normalized"], num_groups=2),
        helper.make_node("Sigmoid", ["normalized"], ["gate"]),
        helper.make_node("Mul", ["normalized", "gate"], ["y"]),
    ]
    size = 4 if opset >= 21 else 2
    weights = {"scale": np.ones(size, np.float32), "bias": np.zeros(size, np.float32)}
    model = build(nodes, {"x": ["N", 4, 6]}, {"y": None}, weights)
    model.opset_import[0].version = opset
    assert shapes(load(model))["y"] == ir.Shape(["N", 4, 6])


def test_a_declared_dtype_stays_where_the_standard_infers_none() -> None:
    nodes = [
        helper.make_node("Compress", ["x", "keep"], ["kept"], axis=0),
        helper.make_node("Relu", ["kept"], ["y"]),
    ]
    model = build(nodes, {"x": [4, 3]}, {"y": None}, {"keep": np.array([True, False, True])}, {"kept": [2, 3]})
    assert {output.dtype for node in load(model).graph for output in node.outputs} == {ir.DataType.FLOAT}


def flatten_by_shape(axis: int) -> list[onnx.NodeProto]:
    """Reshape to (extent of one axis, -1), the way exporters write it."""
    return [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Constant", [], ["index"], value_int=axis),
        helper.make_node("Gather", ["shape", "index"], ["extent"], axis=0),
        helper.make_node("Constant", [], ["zero"], value_ints=[0]),
        helper.make_node("Unsqueeze", ["extent", "zero"], ["first"]),
        helper.make_node("Constant", [], ["rest"], value_ints=[-1]),
        helper.make_node("Concat", ["first", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]


@pytest.mark.parametrize(("batch", "axis", "target"), [("n", 0, [0, 12]), ("n", 1, [3, -1]), (2, 0, [2, 12])])
def test_shape_arithmetic_becomes_a_constant(batch: int | str, axis: int, target: list[int]) -> None:
    proto = build(flatten_by_shape(axis), {"x": [batch, 3, 4]}, {"y": None})
    model = load(proto)
    assert [node.op_type for node in model.graph] == ["Constant", "Reshape"]
    assert ir.convenience.get_const_tensor(model.graph[1].inputs[1]).numpy().tolist() == target  # type: ignore[union-attr]
    x = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    np.testing.assert_array_equal(onnxruntime_outputs(model, x)["y"], onnxruntime_outputs(proto, x)["y"])


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        (["n", 64, 1, 1], [-1, 64], ["n", 64]),
        (["n", 4, 6], [0, -1], ["n", 24]),
        ([3, "n", 2], [-1, 0, 2], [3, "n", 2]),
        (["n", "m", 2], [0, -1], ["n", None]),
        (["n", 6], [-1, 3], [None, 3]),
    ],
)
def test_what_remains_in_a_reshape_is_named_where_it_is_a_dimension(
    shape: list[int | str | None], target: list[int], expected: list[int | str | None]
) -> None:
    nodes = [helper.make_node("Reshape", ["x", "target"], ["r"]), helper.make_node("Relu", ["r"], ["y"])]
    found = shapes(load(build(nodes, {"x": shape}, {"y": None}, {"target": np.array(target)})))["r"]
    assert found is not None
    for dim, wanted in zip(found.dims, expected, strict=True):
        assert dim == wanted if wanted is not None else not isinstance(dim, int)


@pytest.mark.parametrize("target", [[-1, 12], [0, 0, 5]])
def test_zeros_that_are_meant_literally_keep_their_meaning(target: list[int]) -> None:
    shape = ["n", 3, 4] if 0 not in target else ["n", 0, 5]
    nodes = [helper.make_node("Reshape", ["x", "target"], ["r"], allowzero=1), helper.make_node("Relu", ["r"], ["y"])]
    proto = build(nodes, {"x": shape}, {"y": None}, {"target": np.array(target)})
    model = load(proto)
    x = {"x": np.ones([2, *shape[1:]], np.float32)}  # type: ignore[list-item]
    np.testing.assert_array_equal(onnxruntime_outputs(model, x)["y"], onnxruntime_outputs(proto, x)["y"])
    if 0 not in target:
        assert shapes(model)["r"] == ir.Shape(["n", 12])


def test_shape_arithmetic_on_the_batch_stays() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=0, end=1),
        helper.make_node("Add", ["s", "s"], ["twice"]),
        helper.make_node("Constant", [], ["rest"], value_ints=[-1]),
        helper.make_node("Concat", ["twice", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    proto = build(nodes, {"x": ["n", 3, 4]}, {"y": None})
    model = load(proto)
    assert "Shape" in [node.op_type for node in model.graph]
    x = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    np.testing.assert_array_equal(onnxruntime_outputs(model, x)["y"], onnxruntime_outputs(proto, x)["y"])


def test_a_target_that_exchanges_named_dimensions_keeps_its_meaning() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Constant", [], ["order"], value_ints=[1, 0]),
        helper.make_node("Gather", ["s", "order"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    proto = build(nodes, {"x": ["n", "m"]}, {"y": None})
    x = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    found = onnxruntime_outputs(load(proto), x)["y"]
    assert found.shape == (3, 2)
    np.testing.assert_array_equal(found, onnxruntime_outputs(proto, x)["y"])


def test_constants_of_small_constants_are_folded() -> None:
    nodes = [
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("Cast", ["half"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["bound"], to=TensorProto.FLOAT),
        helper.make_node("Clip", ["x", "", "bound"], ["y"]),
    ]
    model = load(build(nodes, {"x": ["n", 3]}, {"y": None}))
    assert [node.op_type for node in model.graph] == ["Constant", "Clip"]
    assert ir.convenience.get_const_tensor(model.graph[1].inputs[2]).numpy() == np.float32(0.5)  # type: ignore[union-attr]


def test_floating_point_initializers_are_never_folded() -> None:
    nodes = [helper.make_node("Mul", ["scale", "factor"], ["both"]), helper.make_node("Mul", ["x", "both"], ["y"])]
    initializers = {"scale": np.ones(3, np.float32), "factor": np.ones(3, np.float32)}
    model = load(build(nodes, {"x": ["n", 3]}, {"y": None}, initializers))
    assert [node.op_type for node in model.graph] == ["Mul", "Mul"]


def test_a_large_result_stays_computed() -> None:
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[2**20, 2**20]),
        helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
        helper.make_node("Add", ["x", "huge"], ["y"]),
    ]
    model = load(build(nodes, {"x": ["n", 1]}, {"y": None}))
    assert [node.op_type for node in model.graph] == ["Constant", "ConstantOfShape", "Add"]


def test_shape_arithmetic_that_is_an_output_stays() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Cast", ["s"], ["y"], to=TensorProto.FLOAT)]
    proto = build(nodes, {"x": [2, 3]}, {"y": None})
    assert onnxruntime_outputs(load(proto), {"x": np.zeros((2, 3), np.float32)})["y"].tolist() == [2, 3]


def test_batch_of_a_flattened_image_is_known() -> None:
    found = shapes(load(build(flatten_by_shape(0), {"x": ["n", 3, 4]}, {"y": None})))
    assert found["y"] == ir.Shape(["n", 12])


def test_names_that_inference_made_up_do_not_outlive_it() -> None:
    """An upgrade puts a node between, whose unknown extents get the names that the output's had before."""
    model = build(
        [
            helper.make_node("ReduceSum", ["x"], ["t"], keepdims=0),
            helper.make_node("Mul", ["t", "n"], ["zero"]),
            helper.make_node("Add", ["s", "zero"], ["scales"]),
            helper.make_node("Resize", ["x", "scales"], ["y"], mode="nearest"),
        ],
        {"x": [1, 2, 5, 6]},
        {"y": None},
        {"s": np.array([1, 1, 0.6, 0.5], np.float32), "n": np.float32(0)},
    )
    model.opset_import[0].version = 10
    first, second = (node.outputs[0].shape for node in load(model).graph if node.op_type == "Resize")
    assert first is not None
    assert second is not None
    assert not {str(dim) for dim in first.dims} & {str(dim) for dim in second.dims}


@pytest.mark.parametrize("opset", [10, 18, 21, 22])
def test_windows_that_would_start_behind_the_data_are_not_counted(opset: int) -> None:
    """What follows fits the size that runtimes give, and not the larger one that inference gave before opset 22."""
    model = build(
        [
            helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[3, 2], strides=[4, 2], pads=[1, 0, 1, 0], ceil_mode=1),
            helper.make_node("AveragePool", ["p"], ["a"], kernel_shape=[1, 1], strides=[2, 1], ceil_mode=1),
            helper.make_node("Flatten", ["a"], ["f"]),
            helper.make_node("MatMul", ["f", "w"], ["y"]),
        ],
        {"x": ["n", 2, 6, 5]},
        {"y": ["n", 4]},
        {"w": np.ones((6, 4), np.float32)},
    )
    model.opset_import[0].version = opset
    found = load(model)
    assert shapes(found)["p"] == ir.Shape(["n", 2, 2, 3])
    assert shapes(found)["f"] == ir.Shape(["n", 6])
    x = {"x": np.random.default_rng(0).normal(size=(2, 2, 6, 5)).astype(np.float32)}
    model.opset_import[0].version = 22  # before, ONNX Runtime does not load it: its inference finds that the weight does not fit
    np.testing.assert_array_equal(onnxruntime_outputs(found, x)["y"], onnxruntime_outputs(model, x)["y"])


def test_places_of_maxima_of_cropped_data_are_a_named_error() -> None:
    pool = helper.make_node("MaxPool", ["x"], ["y", "i"], name="pool", kernel_shape=[1, 2], strides=[4, 2], ceil_mode=1)
    model = build([pool, helper.make_node("Cast", ["i"], ["z"], to=1)], {"x": [1, 1, 4, 5]}, {"y": None, "z": None})
    with pytest.raises(UnsupportedOperatorError, match=r"MaxPool 'pool' .*rounds its output size up .*with ceil_mode=0"):
        load(model)


@pytest.mark.parametrize("opset", [9, 13, 18])
def test_mean_variance_normalization_has_the_axes_of_the_standard(opset: int) -> None:
    model = build([helper.make_node("MeanVarianceNormalization", ["x"], ["y"])], {"x": ["n", 3, 4, 5]}, {"y": None})
    model.opset_import[0].version = opset
    (node,) = load(model).graph
    assert tuple(node.attributes["axes"].as_ints()) == (0, 2, 3)


LAYERS = {
    "BatchNormalization": (15, "scale bias mean var"),
    "InstanceNormalization": (18, "scale bias"),
    "GroupNormalization": (21, "scale bias"),
    "LayerNormalization": (17, "scale bias"),
    "RMSNormalization": (23, "scale"),
}


def with_open_axes(operator: str, before: str = "h = Relu (x)") -> onnx.ModelProto:
    """A layer of four channels or features, of an input that leaves all its axes open."""
    opset, names = LAYERS[operator]
    attributes = "<num_groups = 2>" if operator.startswith("Group") else ""
    weights = ", ".join(f"float[4] {name} = {{1, 2, 3, 4}}" for name in names.split())
    axes = "N, L, D" if operator.startswith(("Layer", "RMS")) else "N, D, L"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[{axes}] x) => (float[{axes}] y)
<{weights}> {{ {before} y = {operator} {attributes} (h, {names.replace(" ", ", ")}) }}""")
    model.graph.node[-1].name = "norm"
    return model


@diagonal(("operator", LAYERS), ("engine", ["onnxruntime", "torch", "reference"]), test=5)
def test_an_open_axis_has_the_length_of_a_normalization_layer_s_parameters(operator: str, engine: str) -> None:
    axis = 2 if operator.startswith(("Layer", "RMS")) else 1
    program = burnish.compile(with_open_axes(operator), loss="mse", optimizer="sgd:lr=0.1")
    layer = rf"{operator} 'norm'.* takes 4 there: its 'scale'"
    message = rf"The input 'x' has extent \d+ along axis {axis}, and the program takes 4: .*{layer}"
    with burnish.Session(program, engine=engine, threads=1) as session:
        for width in (1, 6, 64):
            shape = (5, 3, width) if axis == 2 else (5, width, 3)
            x = np.ones(shape, np.float32)
            with pytest.raises(InputError, match=message):
                session.predict({"x": x})
            with pytest.raises(InputError, match=message):
                session.step({"x": x, "targets": x})
        x = np.random.default_rng(0).normal(size=(5, 3, 4) if axis == 2 else (5, 4, 3)).astype(np.float32)
        assert session.predict({"x": x})["y"].shape == x.shape
        session.step({"x": x, "targets": x})


def test_a_program_that_is_saved_keeps_which_layer_fixes_an_axis(tmp_path) -> None:
    burnish.compile(with_open_axes("LayerNormalization"), loss="mse").save(tmp_path / "program")
    (entry,) = burnish.Program.load(tmp_path / "program").signature["predict"].inputs_of(Role.DATA)
    assert entry.shape == ("N", "L", 4)
    ((axis, reason),) = entry.fixed_by
    assert axis == 2
    assert "LayerNormalization 'norm'" in reason


TAKING_FOUR = {
    "PRelu": ("float[N, D, L] x", "float[4, 1] w = {1, 2, 3, 4}", "z = Sub (zero, x) y = PRelu (z, w)", 1),
    "Conv": ("float[N, D, L] x", "float[2, 2, 1] w = {1, 2, 3, 4}", "y = Conv <group = 2> (x, w)", 1),
    "ConvTranspose": ("float[N, D, L] x", "float[4, 1, 1] w = {1, 2, 3, 4}", "y = ConvTranspose (x, w)", 1),
    "Gemm": ("float[N, D] x", "float[1, 4] w = {1, 2, 3, 4}", "y = Gemm <transB = 1> (x, w)", 1),
    "MatMul": ("float[N, L, D] x", "float[4, 1] w = {1, 2, 3, 4}", "y = MatMul (x, w)", 2),
    "Einsum": ("float[N, D] x", "float[4] w = {1, 2, 3, 4}", 'y = Einsum <equation = "nd,d->n"> (x, w)', 1),
    "RNN": (
        "float[L, N, D] x",
        "float[1, 1, 4] w = {1, 2, 3, 4}, float[1, 1, 1] r = {1}",
        "y = RNN <hidden_size = 1> (x, w, r)",
        2,
    ),
    "LayerNormalization": (
        "float[N, D] x",
        "int64 n = {2}, bool go = {1}, float[4] w = {1, 2, 3, 4}",
        """y = Loop (n, go, x) <body = b (int64 i, bool c, float[N, D] h) => (bool on, float[N, D] k)
            { on = Identity (c) k = LayerNormalization (h, w) }>""",
        1,
    ),
}
"""Layers of four channels or features: what the model reads, its weights, its nodes, and along which axis of the input."""


@diagonal(("operator", TAKING_FOUR), ("engine", ["onnxruntime", "torch", "reference"]), test=8)
def test_an_open_axis_has_the_length_that_the_weight_of_a_layer_has(operator: str, engine: str) -> None:
    taken, weights, nodes, axis = TAKING_FOUR[operator]
    zero = "float[1] zero = {0}, " if "zero" in nodes else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g ({taken}) => (float[] y) <{zero}{weights}> {{ {nodes} }}'
    )
    shape = [5, 4, 3][: taken.count(",") + 1]
    shape[1], shape[axis] = shape[axis], 4
    with burnish.Session(burnish.compile(model, loss="mse"), engine=engine, threads=1) as session:
        assert np.isfinite(session.predict({"x": np.ones(shape, np.float32)})["y"]).all()
        for width in (1, 6):
            shape[axis] = width
            message = (
                rf"'x' has extent {width} along axis {axis}, and the program takes 4: .*{operator} .* takes 4 there: its 'w'"
            )
            with pytest.raises(InputError, match=message):
                session.predict({"x": np.ones(shape, np.float32)})


@pytest.mark.parametrize("other", [4, 3])
def test_an_open_axis_is_that_of_branches_where_each_takes_it_alike(other: int) -> None:
    """A model may take images of one channel, and of three, and tell them apart by a flag."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g (float[N, D] x, bool flag) => (float[N] y)
        { y = If (flag) <then_branch = one () => (float[N] a) { a = MatMul (x, v) },
                         else_branch = two () => (float[N] b) { b = MatMul (x, w) }> }""")
    weights = {"v": np.ones(4, np.float32), "w": np.ones(other, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    value = next(iter(load(model).graph.inputs))
    assert value.shape == ir.Shape(["N", 4 if other == 4 else "D"])


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_a_single_scale_leaves_the_axis_open(operator: str) -> None:
    model = with_open_axes(operator)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), tensor.name))
    value = next(iter(load(model).graph.inputs))
    assert value.shape is not None
    assert not any(isinstance(extent, int) for extent in value.shape.dims)


@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_channels_that_are_computed_are_never_read_past_the_statistics(engine: str) -> None:
    """How many there are, the file leaves to the data: an engine refuses what the layer has no statistics for."""
    model = with_open_axes("BatchNormalization", "k = Constant <value_ints = [0, -1, 1]> () h = Reshape (x, k)")
    with burnish.Session(burnish.compile(model, loss="mse"), engine=engine, threads=1) as session:
        with pytest.raises(BurnishError):
            session.predict({"x": np.ones((2, 8, 8), np.float32)})
        assert session.predict({"x": np.ones((2, 2, 2), np.float32)})["y"].shape == (2, 4, 1)
