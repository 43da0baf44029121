"""Weights that no gradient reaches: ``burnish.compile`` warns of them, and names the operator in the way."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import ConfigurationError, UntrainedWeightsWarning

HEADER = '<ir_version: 10, opset_import: ["": 18]>'
WEIGHTS = "float[2, 2] w = {1, 2, 3, 4}, float[2, 2] head = {1, 2, 3, 4}"
ROUNDED = f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{WEIGHTS}> {{
    h = MatMul (x, w)
    [the_node] d = Round (h)
    y = MatMul (d, head)
}}"""


def model_of(text: str) -> onnx.ModelProto:
    """A model in ONNX's text form, in which ``[name]`` before a node names it."""
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    return model


def between(nodes: str, extra: str = "") -> onnx.ModelProto:
    """A model whose first product, ``h``, passes through ``nodes`` and becomes ``d`` before the second."""
    initializers = f"{WEIGHTS}, {extra}" if extra else WEIGHTS
    return model_of(f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{initializers}> {{
    h = MatMul (x, w)
    {nodes}
    y = MatMul (d, head)
}}""")


def untrained(model: onnx.ModelProto, **options: object) -> dict[str, str]:
    """The weights that compilation warns of, with the reasons; nothing else is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = burnish.compile(model, **{"loss": "mse", **options})
    weights: dict[str, str] = {}
    for warning in caught:
        assert isinstance(warning.message, UntrainedWeightsWarning)
        assert warning.filename == __file__
        weights |= warning.message.weights
    updated = {entry.updates for entry in program.signature["step"].outputs}
    assert not any(f"param/{name}" in updated for name in weights)
    return weights


@pytest.mark.parametrize(
    ("nodes", "extra", "stop"),
    [
        ("[n] d = Round (h)", "", "Round 'n' (output 'd')"),
        ("[n] d = Floor (h)", "", "Floor 'n' (output 'd')"),
        ("[n] d = Ceil (h)", "", "Ceil 'n' (output 'd')"),
        ("[n] d = Sign (h)", "", "Sign 'n' (output 'd')"),
        ("[n] i = Cast <to = 7> (h)\n d = Cast <to = 1> (i)", "", "Cast 'n' (output 'i')"),
        ("[n] i = ArgMax <axis = 1> (h)\n f = Cast <to = 1> (i)\n d = Mul (x, f)", "", "ArgMax 'n' (output 'i')"),
        ("[n] b = Greater (h, zero)\n d = Cast <to = 1> (b)", "float zero = {0}", "Greater 'n' (output 'b')"),
        ("[n] b = Less (zero, h)\n d = Where (b, x, x)", "float zero = {0}", "Less 'n' (output 'b')"),
        ("[n] d = RandomNormalLike (h)", "", "RandomNormalLike 'n' (output 'd')"),
        ("[n] b = IsNaN (h)\n d = Where (b, x, x)", "", "IsNaN 'n' (output 'b')"),
        ("m = ReduceMax <keepdims = 0> (w)\n [n] d = Clip (x, m)", "", "Clip 'n' (output 'd')"),
        ("m = Relu (h)\n k = Neg (m)\n [n] d = Round (k)", "", "Round 'n' (output 'd')"),
    ],
)
def test_the_operator_that_stops_the_gradient_is_named(nodes, extra, stop):
    named = nodes.replace("[n]", "")
    model = between(named, extra)
    operator = stop.split(" ")[0]
    next(node for node in model.graph.node if node.op_type == operator and node.output[0] in stop).name = "n"
    assert untrained(model) == {"w": f"{stop} lets no gradient through"}


def rounded() -> onnx.ModelProto:
    model = model_of(ROUNDED.replace("[the_node] ", ""))
    model.graph.node[1].name = "the_node"
    return model


def test_a_model_warns_of_what_stands_before_a_rounding():
    message = (
        r"^1 weight stays as it is: no gradient reaches it\. 'w': Round 'the_node' \(output 'd'\) lets no gradient "
        r"through\. Where that is meant, select only what is to train; .*`burnish inspect` lists them all "
        r"\(trainable=\[\.\.\.\] says what trains, outputs='\.\.\.' what the loss reads\)$"
    )
    with pytest.warns(UntrainedWeightsWarning, match=message):
        program = burnish.compile(rounded(), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    assert program.options["trainable"] == ["head"]


def test_scales_of_a_quantization_are_no_weights():
    scale = "float[2] scale = {0.1, 0.2}, int8[2] zero = {0, 0}"
    nodes = "q = QuantizeLinear <axis = 1> (h, scale, zero)\n d = DequantizeLinear <axis = 1> (q, scale, zero)"
    assert untrained(between(nodes, scale)) == {}
    arranged = "s = Identity (scale)\n" + nodes.replace("(h, scale", "(h, s")
    assert untrained(between(arranged, scale)) == {}
    learned = "s = Exp (scale)\n" + nodes.replace("(h, scale", "(h, s")
    assert list(untrained(between(learned, "float[2] zero_scale = {1, 1}, " + scale))) == ["zero_scale", "scale"]


def test_settings_of_operators_are_no_weights():
    model = model_of(f"""{HEADER} g (float[N, 1, 2, 2] x) => (float[N, 1, 4, 4] y)
<float[1, 1, 1, 1] w = {{1}}, float[2] pair = {{1, 1}}, float[2] doubled = {{2, 2}}> {{
    h = Conv (x, w)
    scales = Concat <axis = 0> (pair, doubled)
    y = Resize (h, , scales)
}}""")
    assert untrained(model) == {}


def test_an_exponent_of_several_numbers_is_named():
    model = between("d = Pow (x, p)", "float[1] p = {2}")
    assert untrained(model) == {
        "w": "nothing that leads to 'y' reads it",
        "p": "Pow 'Pow' (output 'd') takes it as a constant",
    }


def test_a_weight_whose_shape_alone_is_read():
    model = between("s = Shape (like)\n e = Expand (h, s)\n d = Relu (e)", "float[1, 2] like = {1, 2}")
    next(node for node in model.graph.node if node.op_type == "Shape").name = "n"
    assert untrained(model) == {"like": "Shape 'n' (output 's') lets no gradient through"}
    filled = between("s = Shape (like)\n e = ConstantOfShape (s)\n d = Add (h, e)", "float[1, 2] like = {1, 2}")
    assert untrained(filled)["like"].startswith("Shape ")


def test_weights_that_nothing_reads():
    assert untrained(between("d = Relu (h)", "float[2] idle = {1, 2}")) == {"idle": "no operator reads it"}


def test_boxes_that_are_selected():
    model = model_of(f"""{HEADER} g (float[1, 4, 4] x) => (float[K, 2] y)
<float[4, 4] boxes = {{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}}, float[1, 1, 4] scores = {{1, 2, 3, 4}},
 int64 most = {{2}}, float[3, 2] head = {{1, 2, 3, 4, 5, 6}}> {{
    b = MatMul (x, boxes)
    s = NonMaxSuppression (b, scores, most)
    f = Cast <to = 1> (s)
    y = MatMul (f, head)
}}""")
    model.graph.node[1].name = "n"
    stop = "NonMaxSuppression 'n' (output 's') lets no gradient through"
    assert untrained(model) == {"boxes": stop, "scores": stop}


BRANCHES = f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{WEIGHTS}, float[2] threshold = {{1, 2}}, bool no = {{0}}> {{
    d = If (no) <then_branch = a () => (float[N, 2] e) {{ t = Add (x, threshold) e = MatMul (t, w) }},
                 else_branch = b () => (float[N, 2] f) {{ f = Identity (x) }}>
    y = MatMul (d, head)
}}"""


def branches(text: str = BRANCHES) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = "n"
    return model


def test_a_weight_of_a_branch_that_is_never_taken():
    assert untrained(branches()) == {"w": "If 'n' (output 'd') never takes the branch that reads it"}
    assert untrained(branches(), trainable=["head"]) == {}


def test_who_binds_what_decides_chooses_the_branch():
    text = BRANCHES.replace("(float[N, 2] x)", "(float[N, 2] x, bool no)").replace(", bool no = {0}", "")
    assert untrained(branches(text), bind={"no": False}) == {}


def test_integers_that_are_selected_say_what_they_are():
    integers = "int8[2, 2] integers = {1, 2, 3, 4}, float step = {0.1}"
    model = between("i = DequantizeLinear (integers, step)\n d = MatMul (h, i)", integers)
    assert list(untrained(model)) == ["integers"]
    message = r"'integers' selects only what stays as it is \('integers': integers, as the model is quantized"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model, loss="mse", trainable=["integers"])


HEADS = f"""{HEADER} g (float[N, 2] x) => (float[N, 2] a, float[N, 2] b)
<{WEIGHTS}, float[2, 2] other = {{1, 2, 3, 4}}> {{
    h = MatMul (x, w)
    a = MatMul (h, head)
    b = MatMul (h, other)
}}"""


def test_a_head_that_the_loss_does_not_read():
    assert untrained(model_of(HEADS), outputs="a") == {"other": "nothing that leads to 'a' reads it"}
    assert untrained(model_of(HEADS), outputs="a", trainable=["w", "head"]) == {}
    assert untrained(model_of(HEADS), outputs="a", trainable=lambda name, array: name != "other") == {}
    assert list(untrained(model_of(HEADS), outputs="a", trainable="*")) == ["other"]


@pytest.mark.parametrize("trainable", [["head"], "he*", lambda name, array: name == "head"])
def test_a_weight_that_trainable_leaves_out_is_not_listed(trainable):
    assert untrained(rounded(), trainable=trainable) == {}


@pytest.mark.parametrize("trainable", [None, "*", ["[hw]*"], lambda name, array: True])
def test_a_weight_that_trainable_selects_is_listed(trainable):
    assert list(untrained(rounded(), trainable=trainable)) == ["w"]


def test_a_name_that_no_gradient_reaches_is_an_error_by_itself():
    with pytest.raises(ConfigurationError, match=r"'w' selects only what stays as it is \('w': Round 'the_node'"):
        burnish.compile(rounded(), loss="mse", trainable=["w"])


def test_a_weight_that_the_optimizer_freezes_is_not_listed():
    groups = burnish.optim.groups(burnish.optim.sgd(), {"w*": "frozen"})
    model = between("r = Round (h)\n d = MatMul (r, w2)", "float[2, 2] w2 = {1, 0, 0, 1}")
    assert list(untrained(model)) == ["w"]
    assert untrained(model, optimizer=groups) == {}
    assert untrained(model, optimizer=burnish.optim.accumulate(groups, 2)) == {}


BATCH_NORMALIZATION = f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{WEIGHTS}, float[2] scale = {{1, 1}}, float[2] bias = {{0, 0}}, float[2] mean = {{0, 0}}, float[2] variance = {{1, 1}}> {{
    n = BatchNormalization (x, scale, bias, mean, variance)
    r = Round (n)
    h = MatMul (r, w)
    y = MatMul (h, head)
}}"""


def test_the_affine_part_of_frozen_normalization_is_not_listed():
    assert list(untrained(model_of(BATCH_NORMALIZATION))) == ["scale", "bias"]
    assert untrained(model_of(BATCH_NORMALIZATION), norm="frozen:all") == {}


def test_many_weights_are_told_together_by_reason():
    names = [f"w{index}" for index in range(6)]
    weights = ", ".join(f"float[2, 2] {name} = {{1, 2, 3, 4}}" for name in names)
    products = "\n".join(f"h{index + 1} = MatMul (h{index}, {name})" for index, name in enumerate(names))
    model = model_of(f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{weights}, float[2, 2] head = {{1, 2, 3, 4}}, float[2] idle = {{1, 1}}> {{
    h0 = Identity (x)
    {products}
    d = Round (h6)
    y = MatMul (d, head)
}}""")
    message = (
        r"^7 weights stay as they are: no gradient reaches them\. 'w0', 'w1', 'w2' and 3 more: Round '\w+' \(output 'd'\) lets "
        r"no gradient through; 'idle': no operator reads it\."
    )
    with pytest.warns(UntrainedWeightsWarning, match=message) as caught:
        burnish.compile(model, loss="mse")
    assert list(caught[0].message.weights) == [*names, "idle"]


LOOP = f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{WEIGHTS}, float[2, 2] inner = {{1, 2, 3, 4}}, bool yes = {{1}}, int64 trips = {{2}}> {{
    s = Loop (trips, yes, x) <body = step (int64 i, bool c, float[N, 2] before) => (bool c2, float[N, 2] after) {{
        c2 = Identity (c)
        p = MatMul (before, inner)
        after = Round (p)
    }}>
    r = Round (s)
    h = MatMul (r, w)
    y = MatMul (h, head)
}}"""


def test_a_weight_that_a_body_reads():
    model = onnx.parser.parse_model(LOOP)
    assert untrained(model) == {"inner": untrained(model)["inner"]}
    assert untrained(model)["inner"].startswith("Round ")
    assert "(output 'after')" in untrained(model)["inner"]


def test_layers_that_an_exporter_wrote_in_pieces_leave_no_constants_to_warn_of():
    model = model_of(f"""{HEADER} g (float[N, 2] x) => (float[N, 2] y)
<{WEIGHTS}, float[2] gain = {{1, 2}}, float[1] two = {{2}}, float[1] epsilon = {{1e-5}}, int64[1] axes = {{-1}}> {{
    h = MatMul (x, w)
    mean = ReduceMean (h, axes)
    centred = Sub (h, mean)
    square = Pow (centred, two)
    variance = ReduceMean (square, axes)
    shifted = Add (variance, epsilon)
    deviation = Sqrt (shifted)
    normalized = Div (centred, deviation)
    scaled = Mul (normalized, gain)
    y = MatMul (scaled, head)
}}""")
    assert untrained(model) == {}


def test_a_weight_that_counts_is_trained_and_the_numbers_say_so():
    """The weight before the rounding keeps its bits, the one after it moves."""
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    with pytest.warns(UntrainedWeightsWarning):
        session = burnish.Session(burnish.compile(rounded(), loss="mse"), engine="onnxruntime")
    before = session.state()
    session.step({"x": x, "targets": x})
    assert list(before) == list(session.state())
    assert "param/w" not in before
    assert not np.array_equal(session.state()["param/head"], before["param/head"])
