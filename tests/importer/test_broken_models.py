"""Models that pass the standard's checks and are none: each refused by a ModelError that names the node or value."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import burnish
from burnish.errors import ConfigurationError, ModelError
from burnish.importer import load

HEAD = '<ir_version: 9, opset_import: ["" : 18, "local" : 1]>'


def model(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    proto = parser.parse_model(f"{HEAD}\n{text}")
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in initializers.items())
    return proto


WEIGHT = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "g (float[n,3] x, float[n,1] i) => (float[?,?] y) { y = GatherElements (x, i) }",
            r"GatherElements 'GatherElements' \(output 'y'\) takes 'i' of type tensor\(float\) as its input 'indices', which can "
            r"be tensor\(int32\), tensor\(int64\)",
            id="an operand of a dtype that the operator does not take",
        ),
        pytest.param(
            "g (float[n,3] x, double[n,3] z) => (float[n,3] y) { y = Add (x, z) }",
            r"Add 'Add' \(output 'y'\) takes 'z' of type tensor\(double\) as its input 'B', beside 'x' of type tensor\(float\)",
            id="operands of two dtypes",
        ),
        pytest.param(
            "g (float[n,3,4] x, float[3] s) => (float[n,3,4] y) { y = PRelu (x, s) }",
            r"PRelu 'PRelu' \(output 'y'\) has the slope 's' of shape \[3\], which does not broadcast to the shape \[n,3,4\] "
            r"of its input 'x'\. .* give it the shape \[C, 1, \.\.\.\]",
            id="a slope that does not broadcast",
        ),
        pytest.param(
            'g (float[n,3] x) => (float[?,?] y) { y = local.f (x) }\n<domain: "local", opset_import: ["" : 18]> '
            "f (a, b) => (c) { c = MatMul (a, b) }",
            r"MatMul .*\(output 'y'\) leaves out its input 'B', which its operator needs",
            id="an operand left out",
        ),
        pytest.param(
            "g (float[n,3] x) => (float[n,3] y) { y = LeakyRelu <alpha: float = @slope> (x) }",
            r"LeakyRelu '?.*\(output 'y'\) takes its attribute 'alpha' from the attribute 'slope' of a function",
            id="an attribute that refers to a function's",
        ),
        pytest.param(
            'g (float[n,3] x) => (float[n,3] y) { y = local.f <slope: float = @other> (x) }\n<domain: "local", opset_import: '
            '["" : 18]> f <slope> (a) => (b) { b = LeakyRelu <alpha: float = @slope> (a) }',
            r"local\.f .*\(output 'y'\) takes its attribute 'slope' from the attribute 'other' of a function",
            id="a call whose attribute refers to a function's",
        ),
        pytest.param(
            "g (float[n,4] x) => (float[n,2] a, float[n,2] b, float[n,2] c) { a, b, c = Split <axis = 1, num_outputs = 2> (x) }",
            r"Split '?.*\(output 'a'\) cuts 2 pieces and has 3 outputs",
            id="more outputs than pieces",
        ),
        pytest.param(
            "g (float[n,4] x) => (float[n,2] a, float[n,2] b) { a, b = Split <axis = 1, num_outputs = 2147483647> (x) }",
            r"Split '?.*\(output 'a'\) cuts 2147483647 pieces and has 2 outputs",
            id="more pieces than memory holds",
        ),
        pytest.param(
            "g (float[n,4] x) => (float[n,2] a, float[n,2] b) <int64[3] sizes = {1,1,2}> { a, b = Split <axis = 1> (x, sizes) }",
            r"Split '?.*\(output 'a'\) cuts 3 pieces and has 2 outputs",
            id="more sizes than outputs",
        ),
        pytest.param(
            "g (float[n,4] x) => (float[n,4] y) { z = Relu (x) y = Cast <to = 0> (z) }",
            r"'y', output of Cast 'Cast' \(output 'y'\), would have elements of no type",
            id="a cast to no dtype",
        ),
        pytest.param(
            "g (float[-7,3] x) => (float[?,3] y) { y = Relu (x) }",
            r"'x' is declared with the shape \[-7,3\], and no extent can be below zero",
            id="a negative extent",
        ),
        pytest.param(
            "g (float[n,1,4,4] x) => (float[?,?,?,?] y) { y = MaxPool <kernel_shape = [9,9]> (x) }",
            r"'y', output of MaxPool .*would have the shape \[n,1,-4,-4\], and no extent can be below zero",
            id="a kernel larger than what it goes over",
        ),
        pytest.param(
            "g (float[n,1] x) => (float[?,?] y) <int64[3] s = {1099511627776, 1, 1099511627776}> { y = Expand (x, s) }",
            r"'y', output of Expand .*, would have the shape .*, more elements than an int64 counts",
            id="more elements than can be counted",
        ),
        pytest.param(
            "g (float[n,3] x) => (float[n,3] y) <int64[2] k = {0,1}> { a = Abs (k) y = CumSum (x, a) }",
            r"CumSum .*\(output 'y'\) takes 'a' of shape \[2\] as its input 'axis', which is a single number",
            id="two numbers where one is read",
        ),
        pytest.param(
            "g (float[n,3] x) => (float[n,3] y, float[n,3] y) { y = Relu (x) }",
            r"the graph lists its output 'y' more than once",
            id="an output listed twice",
        ),
        pytest.param(
            'g (float[n,3] x) => (float[n,3] y) { y, z = local.f (x) }\n<domain: "local", opset_import: ["" : 18]> '
            "f (a) => (b) { b = Relu (a) }",
            r"local\.f .*\(output 'y'\) takes 2 outputs of a function that has 1",
            id="more outputs than the function has",
        ),
        pytest.param(
            "g (float[n,3] x) => (float[n,3] y) { c = Constant <value_float = 1.0, value_ints = [1]> () y = Add (x, c) }",
            r"Constant \(output 'c'\) has the attributes 'value_float', 'value_ints', and a constant has one value",
            id="a constant of two values",
        ),
    ],
)
def test_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model(text))


def test_a_function_that_reads_a_value_of_nobody() -> None:
    text = 'g (float[n,3] x) => (float[n,3] y) { y = local.f (x) }\n<domain: "local", opset_import: ["" : 18]> '
    broken = model(text + "f (a) => (b) { b = Add (a, elsewhere) }")
    broken.ir_version = 4  # before functions: the standard's checks do not look into them
    with pytest.raises(ModelError, match=r"Add .*in the function 'local\.f' reads 'elsewhere', which is neither an input of"):
        load(broken)


def test_a_constant_with_two_outputs() -> None:
    broken = ir.from_proto(model("g (float[n,3] x) => (float[n,3] y) { c = Constant <value_float = 1.0> () y = Add (x, c) }"))
    broken.graph[0].resize_outputs(2)
    broken.graph[0].outputs[1].name = ""
    with pytest.raises(ModelError, match=r"Constant .*\(output 'c'\) has 2 outputs, and its operator 1 at most"):
        load(broken)


def test_a_body_that_is_an_attribute_of_a_function() -> None:
    broken = ir.from_proto(model("g (float[n,3] x, bool c) => (float[n,3] y) { y = Relu (x) }"))
    attribute = ir.Attr("then_branch", ir.AttributeType.GRAPH, None, ref_attr_name="body")
    broken.graph.append(ir.Node("", "If", [broken.graph.inputs[1]], [attribute], outputs=[ir.Value(name="z")]))
    with pytest.raises(ModelError, match=r"the onnx_ir\.Model: the model cannot be copied \(Expected a Graph"):
        load(broken)


def test_a_call_without_an_output() -> None:
    text = 'g (float[n,3] x) => (float[n,3] y) { z = local.f (x) y = Relu (x) }\n<domain: "local", opset_import: ["" : 18]> '
    called = model(text + "f (a) => (b) { b = Relu (a) }")
    del called.graph.node[0].output[:]
    assert [node.op_type for node in load(called).graph] == ["Relu", "Relu"]


def test_functions_without_names_that_call_each_other() -> None:
    broken = model("g (float[n,3] x) => (float[n,3] y) { y = Relu (x) }")
    broken.functions.add().node.add()
    broken.ir_version = 4
    with pytest.raises(ModelError, match=r"call each other in a circle: '' -> ''"):
        load(broken)


def test_what_inference_says_of_no_node_is_said_of_the_first_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    infer = onnx.shape_inference.infer_shapes

    def fail(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        if any(node.op_type == "Tanh" for node in proto.graph.node):
            raise MemoryError("std::bad_alloc")
        return infer(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    nodes = "a = Relu (x) b = Neg (a) c = Tanh (b) d = Abs (c) y = Exp (d)"
    with pytest.raises(ModelError, match=r"do not fit together: Tanh 'Tanh' \(output 'c'\): std::bad_alloc"):
        load(model(f"g (float[n,3] x) => (float[n,3] y) {{ {nodes} }}"))


def test_a_call_may_leave_out_the_last_outputs_of_its_function() -> None:
    text = 'g (float[n,3] x) => (float[n,3] y) { y = local.f (x) }\n<domain: "local", opset_import: ["" : 18]> '
    loaded = load(model(text + "f (a) => (b, c) { b = Relu (a) c = Neg (a) }"))
    assert "Relu" in [node.op_type for node in loaded.graph]


def test_an_extent_of_minus_one_is_unknown() -> None:
    loaded = load(model("g (float[-1,3] x) => (float[-1,3] y) { y = Relu (x) }"))
    assert loaded.graph.inputs[0].shape == ir.Shape(["batch", 3])
    assert loaded.graph.outputs[0].shape == ir.Shape(["batch", 3])


def test_a_product_of_dims_of_any_size_is_named() -> None:
    proto = model("g (float[n,3] x) => (float[?,?] y) { y = MatMul (x, w) }", w=WEIGHT)
    proto.graph.initializer[0].dims[:] = [2**62] * 300
    with pytest.raises(ModelError, match=r"tensor 'w' declares dims of 300 dimensions, .*: more elements than any memory holds"):
        load(proto)


@pytest.mark.parametrize("external", [False, True])
def test_strings_are_no_raw_data(external: bool) -> None:
    proto = model("g (float[n,3] x) => (float[?,?] y) { y = MatMul (x, w) }", w=WEIGHT)
    proto.graph.initializer[0].data_type = TensorProto.STRING
    if external:
        proto.graph.initializer[0].data_location = TensorProto.EXTERNAL
    with pytest.raises(ModelError, match=r"tensor 'w' holds text as raw or external data"):
        load(proto)


def test_a_range_to_the_sky_is_not_counted_out() -> None:
    """The standard's inference propagates the elements of a vector one by one."""
    text = "g (float[n,3] x) => (float[n,3] y, int64[?] z) <int64 a = {0}, int64 b = {1000000000000}, int64 c = {1}>"
    loaded = load(model(text + "{ y = Relu (x) r = Range (a, b, c) z = Neg (r) }"))
    assert loaded.graph.outputs[1].shape == ir.Shape([10**12])


@pytest.mark.parametrize("ratio", [np.inf, np.nan, -0.5, 1.5])
def test_a_dropout_ratio_is_one_share(ratio: float) -> None:
    proto = model("g (float[n,3] x) => (float[n,2] y) { d = Dropout (x, r) y = MatMul (d, w) }", w=WEIGHT, r=np.float32(ratio))
    with pytest.raises(
        ModelError, match=r"Dropout 'Dropout' \(output 'd'\): a dropout ratio is one number between 0 and 1, not "
    ):
        burnish.compile(proto, loss="mse")


def test_axes_that_are_no_list_are_named() -> None:
    text = "g (float[n,3] x) => (float[?,?] y) <int64 axis = {1}> { h = MatMul (x, w) y = ReduceLogSum (h, axis) }"
    with pytest.raises(ModelError, match=r"'axis', which ReduceLogSum .* reads, has the shape \[\], without a dimension 0"):
        burnish.compile(model(text, w=WEIGHT), loss="mse")


def test_a_graph_without_outputs_has_nothing_to_train_for() -> None:
    proto = model("g (float[n,3] x) => (float[n,2] y) { y = MatMul (x, w) }", w=WEIGHT)
    del proto.graph.output[:]
    with pytest.raises(ConfigurationError, match="has nothing to read: the graph of the model declares no outputs"):
        burnish.compile(proto, loss="mse")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "targets", "lr", "rng/key", "loss", "next:step", "opt/momentum/w"])
def test_a_constant_may_have_a_name_that_the_program_uses(name: str) -> None:
    """It trains as under any other name, on every engine, and is read again."""
    losses = {}
    for constant in ("ordinary", name):
        nodes = [helper.make_node("Mul", ["x", constant], ["scaled"]), helper.make_node("MatMul", ["scaled", "w"], ["y"])]
        info = [helper.make_tensor_value_info(*value) for value in (("x", 1, ["n", 3]), ("y", 1, ["n", 2]))]
        values = [numpy_helper.from_array(np.float32(3.0), constant), numpy_helper.from_array(WEIGHT, "w")]
        graph = helper.make_graph(nodes, "g", info[:1], info[1:], values)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        program = burnish.compile(proto, loss="mse", optimizer="sgd:momentum=0.9")
        again = burnish.Program.load(program.to_onnx())
        batch = {"x": np.ones((4, 3), np.float32), "targets": np.zeros((4, 2), np.float32)}
        for engine in ("onnxruntime", "reference"):
            for one in (program, again):
                session = burnish.Session(one, engine=engine, threads=1)
                losses.setdefault(constant, []).append([session.step(batch)["loss"] for _ in range(3)])
    assert losses["ordinary"] == losses[name]


@pytest.mark.parametrize("kind", ["a node's output", "an initializer"])
def test_a_value_with_the_name_of_a_state_entry_is_refused(kind: str) -> None:
    """It would be taken for the parameter, and the gradient be that of another value."""
    if kind == "an initializer":
        proto = model("g (float[n,3] x) => (float[n,2] y) { s = Mul (x, c) y = MatMul (s, w) }", w=WEIGHT, c=np.float32(2))
        proto.graph.initializer[1].name = proto.graph.node[0].input[1] = "param/w"
    else:
        proto = model("g (float[n,3] x) => (float[n,2] y) { h = Relu (x) y = MatMul (h, w) }", w=WEIGHT)
        proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = "param/w"
    with pytest.raises(ConfigurationError, match="the model has a value 'param/w', a name the program needs for its state"):
        burnish.compile(proto, loss="mse")
