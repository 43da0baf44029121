"""Mixed precision: what each operator is computed in, how often a value is cast, and what the graph then gives."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from ml_dtypes import bfloat16

import burnish
from burnish.errors import ConfigurationError
from burnish.graph import bodies
from burnish.graph.names import separate_names
from burnish.models import residual_network
from burnish.modes import bind_inference
from burnish.operators.registry import Precision
from burnish.rewriting.mixed_precision import mix_precision
from oracles import layers_in_bodies
from oracles.operator_records import operators_of
from oracles.rewritten import rewritten

COMPUTED, FOLLOWING, WIDENED = (operators_of(precision) for precision in Precision)
HALF, BRAIN, SINGLE = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT
LAYERS = {"branches": ("wide", "narrow", "head"), "scanned": ("input", "hidden", "first", "head")}
"""Of ``layers_in_bodies``, those in bodies first."""
UNIT = {HALF: 2.0**-11, BRAIN: 2.0**-8}


def parsed(nodes: str, inputs: str, output: str = "float[b, n] y", opset: int = 18) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({inputs}) => ({output}) {{ {nodes} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def mixed(model: ir.Model, dtype: ir.DataType = HALF, keep: tuple[str, ...] = ()) -> ir.Model:
    """Graph inputs whose names begin with w are weights."""
    weights = [value for value in model.graph.inputs if (value.name or "").startswith("w")]
    return rewritten(mix_precision, model, dtype, weights, keep)


def computed_in(model: ir.Model) -> dict[str, list[str]]:
    """Operator -> the dtypes that its nodes read first, in order; casts and constants left out."""
    found: dict[str, list[str]] = {}
    for node in model.graph:
        if node.op_type not in ("Cast", "Constant"):
            found.setdefault(node.op_type, []).append(node.inputs[0].dtype.name)
    return found


def casts(model: ir.Model) -> Counter[tuple[str, int]]:
    return Counter((node.inputs[0].name or "", node.attributes["to"].as_int()) for node in model.graph if node.op_type == "Cast")


def checked(model: ir.Model) -> None:
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


LINEAR = "float[b, 4] x, float[4, 4] w1, float[4, 4] w2, float[4] w3"


def test_the_table_names_operators_of_the_standard_once_each():
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert names >= COMPUTED | FOLLOWING | WIDENED
    assert len(COMPUTED | FOLLOWING | WIDENED) == len(COMPUTED) + len(FOLLOWING) + len(WIDENED)


def test_products_are_narrow_what_behind_them_follows_and_sums_are_wide():
    model = mixed(
        parsed("a = MatMul(x, w1) b = Add(a, w3) c = Relu(b) s = Softmax(c) d = MatMul(s, w2) y = ReduceMean(d)", LINEAR)
    )
    checked(model)
    assert computed_in(model) == {
        "MatMul": ["FLOAT16", "FLOAT16"],
        "Add": ["FLOAT16"],
        "Relu": ["FLOAT16"],
        "Softmax": ["FLOAT"],
        "ReduceMean": ["FLOAT"],
    }


def test_inputs_and_outputs_keep_names_and_dtypes():
    model = mixed(parsed("y = MatMul(x, w1)", LINEAR))
    checked(model)
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("y", SINGLE)]
    assert {value.dtype for value in model.graph.inputs} == {SINGLE}


def test_a_weight_of_two_layers_is_cast_once_and_behind_what_is_computed_from_it_alone():
    model = mixed(parsed("t = Transpose(w1) a = MatMul(x, t) b = MatMul(a, t) c = MatMul(b, w2) y = MatMul(c, w2)", LINEAR))
    checked(model)
    assert computed_in(model)["Transpose"] == ["FLOAT"]
    half = int(HALF)
    assert casts(model) == {("x", half): 1, ("t", half): 1, ("w2", half): 1, ("y:float16", int(SINGLE)): 1}


def test_what_two_float32_operators_read_is_widened_once():
    model = mixed(parsed("a = MatMul(x, w1) b = Exp(a) c = Softmax(a) y = Sub(b, c)", LINEAR))
    checked(model)
    assert casts(model)["a", int(SINGLE)] == 1
    assert computed_in(model)["Sub"] == ["FLOAT"]


def test_a_normalization_layer_is_wide_inside_and_what_follows_narrow():
    layer = "a = MatMul(x, w1) b = LayerNormalization(a, w3) c = Relu(b) d = Sigmoid(b) e = Add(c, d) y = MatMul(e, w2)"
    model = mixed(parsed(layer, LINEAR))
    checked(model)
    read = computed_in(model)
    assert (read["LayerNormalization"], read["Sigmoid"]) == (["FLOAT"], ["FLOAT"])
    assert (read["Relu"], read["Add"]) == (["FLOAT16"], ["FLOAT16"])
    assert casts(model)["b", int(HALF)] == 1


def test_a_float32_activation_keeps_what_it_meets_in_float32():
    model = mixed(parsed("a = MatMul(x, w1) m = Exp(x) y = Add(a, m)", LINEAR))
    checked(model)
    assert computed_in(model)["Add"] == ["FLOAT"]


def test_what_no_product_came_before_stays_in_float32():
    model = mixed(parsed("r = Relu(x) a = MatMul(r, w1) y = Relu(a)", LINEAR))
    assert computed_in(model)["Relu"] == ["FLOAT", "FLOAT16"]


@pytest.mark.parametrize(
    ("number", "dtype", "expected"),
    [
        ("-1e9", HALF, "FLOAT"),
        ("-1e9", BRAIN, "BFLOAT16"),
        ("1e-9", HALF, "FLOAT"),
        ("0.5", HALF, "FLOAT16"),
        ("-60000.0", HALF, "FLOAT16"),
    ],
)
def test_a_constant_that_sixteen_bits_cannot_hold_keeps_its_operator_in_float32(number, dtype, expected):
    model = mixed(parsed(f"a = MatMul(x, w1) k = Constant<value = float {{{number}}}>() y = Add(a, k)", LINEAR), dtype)
    checked(model)
    assert computed_in(model)["Add"] == [expected]


def test_operands_that_configure_an_operator_keep_their_dtype():
    nodes = "a = MatMul(x, w1) r = Constant<value = float {0.25}>() d, m = Dropout(a, r) y = MatMul(d, w2)"
    model = mixed(parsed(nodes, LINEAR))
    checked(model)
    (dropout,) = [node for node in model.graph if node.op_type == "Dropout"]
    assert [value.dtype for value in (*dropout.inputs, *dropout.outputs)] == [HALF, SINGLE, HALF, ir.DataType.BOOL]


def test_indices_keep_their_dtype():
    nodes = "a = Conv<kernel_shape = [1, 1]>(x, w1) y, i = MaxPool<kernel_shape = [2, 2]>(a)"
    model = mixed(parsed(nodes, "float[b, 1, 4, 4] x, float[1, 1, 1, 1] w1", "float[b, 1, 3, 3] y, int64[b, 1, 3, 3] i"))
    checked(model)
    assert [value.dtype for value in model.graph.outputs] == [SINGLE, ir.DataType.INT64]


def test_a_branch_reads_float32():
    body = "g1 () => (float[b, 4] {0}) {{ {0} = Exp(a) }}"
    nodes = (
        f"a = MatMul(x, w1) y = If (c) <then_branch = {body.format('p')}, else_branch = "
        "g2 () => (float[b, 4] q) { q = Neg(a) }>"
    )
    model = mixed(parsed(nodes, LINEAR + ", bool c"))
    checked(model)
    assert {value.dtype for node in model.graph.all_nodes() if node.op_type in ("Exp", "Neg") for value in node.inputs} == {
        SINGLE
    }


def with_bodies(kind: str) -> tuple[ir.Model, list[ir.Value]]:
    """A model with layers in bodies, and its weights, which are inputs as in a program."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(layers_in_bodies.model(kind)))
    weights = [model.graph.initializers.pop(f"{name}_weight") for name in LAYERS[kind]]
    for weight in weights:
        weight.const_value = None
    model.graph.inputs.extend(weights)
    return model, weights


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("kind", LAYERS)
def test_bodies_compute_in_sixteen_bits_and_give_float32(kind, dtype):
    model, weights = with_bodies(kind)
    mix_precision(model, dtype, weights)
    separate_names(model.graph)
    checked(model)
    products = [node for node in model.graph.all_nodes() if node.op_type == "MatMul"]
    assert {value.dtype for node in products for value in node.inputs} == {dtype}
    (owner,) = [node for node in model.graph if bodies(node)]
    for body in bodies(owner):
        assert {value.dtype for value in (*body.inputs, *body.outputs)} == {SINGLE}
    # What a loop adds up over its iterations is the gradient of what its body reads from outside.
    inside = [node for weight in weights[: len(layers_in_bodies.INSIDE[kind])] for node in weight.consumers()]
    assert {node.op_type for node in inside} == {"Cast"}
    assert all(node.graph is not model.graph for node in inside)


@pytest.mark.parametrize(
    ("keep", "narrow"),
    [(["hidden"], {"first", "input", "head"}), (["last"], {"first", "head"}), (["input", "hidden"], {"first", "head"})],
)
def test_layers_in_bodies_are_kept_by_name(keep, narrow):
    model, weights = with_bodies("scanned")
    next(node for node in model.graph if bodies(node)).name = "last"
    mix_precision(model, HALF, weights, keep)
    products = [node for node in model.graph.all_nodes() if node.op_type == "MatMul"]
    assert {node.name for node in products if node.inputs[0].dtype == HALF} == narrow


def test_gradients_of_weights_in_a_loop_are_close_to_those_of_float32():
    batch = layers_in_bodies.batch("scanned")
    gradients = {}
    for precision in ("float32", "bfloat16"):
        program = burnish.compile(layers_in_bodies.model("scanned"), optimizer="sgd:lr=1", precision=precision)
        with burnish.Session(program, engine="reference") as session:
            before = session.state()
            session.step(batch)
            gradients[precision] = {name: before[name] - array for name, array in session.state().items() if "param/" in name}
    for name, exact in gradients["float32"].items():
        distance = np.linalg.norm(gradients["bfloat16"][name] - exact) / np.linalg.norm(exact)
        assert 1e-5 < distance < 8 * UNIT[BRAIN], name


@pytest.mark.parametrize("pattern", ["head", "head.weight", "he*", "the_node"])
def test_layers_that_are_kept(pattern):
    model = parsed("a = MatMul(x, w1) b = MatMul(a, w2) y = Relu(b)", LINEAR)
    weight = model.graph.inputs[2]
    weight.name = "param/head.weight"
    next(node for node in model.graph if node.inputs[1] is weight).name = "the_node"
    mix_precision(model, HALF, [model.graph.inputs[1], weight], [pattern])
    checked(model)
    assert computed_in(model) == {"MatMul": ["FLOAT16", "FLOAT"], "Relu": ["FLOAT"]}


def test_a_pattern_that_matches_nothing_is_named_with_what_is_close():
    with pytest.raises(ConfigurationError, match=r"keep: 'w9' matches no layer of the model; did you mean 'w\d'"):
        mixed(parsed("y = MatMul(x, w1)", LINEAR), keep=("w9",))


@pytest.mark.parametrize(
    ("model", "keep"),
    [
        (parsed("y = Relu(x)", LINEAR), ()),
        (parsed("y = MatMul(x, w1)", LINEAR), ("w1",)),
        (parsed("y = MatMul(x, w1)", "double[b, 4] x, double[4, 4] w1", "double[b, 4] y"), ()),
    ],
)
def test_nothing_to_compute_in_sixteen_bits_is_an_error(model, keep):
    with pytest.raises(ConfigurationError, match=r"nothing in the model would be computed in float16: .*precision='float32'"):
        mixed(model, keep=keep)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_a_residual_network_gives_its_outputs_to_the_digits_of_the_dtype(dtype):
    """In inference, on the engine that rounds at every cast; no value is cast twice to the same dtype."""
    x = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32)
    outputs = []
    for is_mixed in (False, True):
        model = burnish.load(residual_network(width=4, blocks=(1, 1)))
        if is_mixed:
            mix_precision(model, dtype, list(model.graph.initializers.values()))
            checked(model)
            assert max(casts(model).values()) == 1
            products = [node for node in model.graph if node.op_type in COMPUTED]
            assert {node.inputs[0].dtype for node in products} == {dtype}
            wide = [node for node in model.graph if node.op_type in WIDENED]
            assert {value.dtype for value in chain(*(node.inputs for node in wide))} == {SINGLE}
        bind_inference(model.graph)
        outputs.append(burnish.engines.get("reference").run(model, {"x": x})["logits"])
    exact, rounded = outputs
    difference = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 0.01 * UNIT[dtype] < difference < 4 * UNIT[dtype]


def test_bfloat16_raises_the_opset_to_the_first_that_convolves_it():
    model = burnish.load(residual_network(width=2, blocks=(1,)))
    mix_precision(model, BRAIN, list(model.graph.initializers.values()))
    assert model.opset_imports[""] == 22


def test_bfloat16_constants_are_rounded_once():
    model = mixed(parsed("a = MatMul(x, w1) k = Constant<value = float {0.3}>() y = Mul(a, k)", LINEAR), BRAIN)
    (product,) = [node for node in model.graph if node.op_type == "Mul"]
    assert product.inputs[1].producer().attributes["value"].as_tensor().numpy() == bfloat16(0.3)
