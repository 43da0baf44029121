"""``batch="open"``: which inputs hold samples, what is said of the rest, and what is refused, by message."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish import engines
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from oracles.batches import assert_as_alone


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]>\n{text}')


def shapes(text: str) -> dict[str, list]:
    graph = burnish.load(parsed(text), batch="open").graph
    return {
        value.name: [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]
        for value in (*graph.inputs, *graph.outputs)
    }


def samples_of(text: str, *inputs: tuple[str, tuple[int, ...]]) -> None:
    """Assert that a model does with three samples what it does with each."""
    rng = np.random.default_rng(2)
    samples = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in inputs} for _ in range(3)]
    single, opened = burnish.load(parsed(text)), burnish.load(parsed(text), batch="open")
    assert_as_alone(single, opened, samples, rtol=1e-6)


def test_samples_stand_along_the_first_axis_of_extent_1():
    found = shapes(
        "m (float[1, 4] x, float[5, 1, 4] columns, float[4] same) => (float y) { z = Add(x, columns) y = Add(z, same) }"
    )
    assert found == {"x": ["batch", 4], "columns": [5, "batch", 4], "same": [4], "y": [5, "batch", 4]}


def test_the_state_of_a_recurrent_layer_holds_samples_where_the_layer_reads_them():
    """As a layer of one direction that is given its state: both of its first axes are of extent 1."""
    text = """m (float[1, 3, 2] x, float[1, 1, 2] h) => (float y, float last)
    <float[1, 6, 2] w = {1, -1, 2, 1, 0, 1, 1, -2, 1, 0, 1, 1}, float[1, 6, 2] r = {0, 1, 1, 0, 1, -1, 1, 1, -1, 0, 1, 2}> {
        t = Transpose <perm = [1, 0, 2]> (x)
        states, last = GRU <hidden_size = 2> (t, w, r, , , h)
        y = Transpose <perm = [2, 1, 0, 3]> (states)
    }"""
    assert shapes(text) == {"x": ["batch", 3, 2], "h": [1, "batch", 2], "y": ["batch", 1, 3, 2], "last": [1, "batch", 2]}
    samples_of(text, ("x", (1, 3, 2)), ("h", (1, 1, 2)))


def test_a_name_that_is_taken_is_not_given_again():
    model = parsed("m (float[1, batch] x) => (float y) { y = Relu(x) }")
    graph = burnish.load(model, batch="open").graph
    assert str(graph.outputs[0].shape) == "[batch_1,batch]"


def test_an_output_without_an_axis_for_samples_gets_one_first():
    text = "m (float[1, 4] x) => (float y) <int64 zero = {0}> { y = Gather <axis = 0> (x, zero) }"
    assert shapes(text)["y"] == ["batch", 4]
    samples_of(text, ("x", (1, 4)))


def test_outputs_keep_their_names_and_other_readers_of_them_their_samples():
    text = """m (float[2, 1, 3] x) => (float y, float z)
    <int64[1] one = {1}> { y = Squeeze(x, one) w = Transpose <perm = [1, 0]> (y) z = MatMul(y, w) }"""
    assert shapes(text) == {"x": [2, "batch", 3], "y": ["batch", 2, 3], "z": ["batch", 2, 2]}
    samples_of(text, ("x", (2, 1, 3)))


def test_an_output_that_no_sample_reaches_stays():
    found = shapes("m (float[1, 2] x) => (float y, float c) <float[1, 2] w = {1, 2}> { y = Add(x, w) c = Neg(w) }")
    assert found["y"] == ["batch", 2]
    assert found["c"] == [1, 2]


def test_what_reads_a_shape_reads_that_of_one_sample():
    """The batch stays the only open axis: a length that is open already is still read where it stands."""
    text = """m (float[1, length, 4] x) => (float y) <int64[1] eight = {8}, int64[1] zero = {0}, int64[1] two = {2}> {
      extents = Shape(x)
      leading = Slice(extents, zero, two)
      target = Concat <axis = 0> (leading, eight)
      twice = Concat <axis = 2> (x, x)
      flat = Reshape(twice, target)
      y = Relu(flat)
    }"""
    assert shapes(text)["y"] == ["batch", "length", 8]
    samples_of(text, ("x", (1, 3, 4)))


def test_a_token_that_is_expanded_for_one_sample_is_repeated_for_each():
    samples_of(
        """m (float[1, 2, 3] x) => (float y) <float[1, 1, 3] token = {1, 2, 3}, int64[3] extents = {1, 1, 3}> {
      one = Expand(token, extents) y = Concat <axis = 1> (one, x) }""",
        ("x", (1, 2, 3)),
    )


def test_lengths_of_zero_are_no_copies():
    samples_of(
        """m (float[1, 2, 3] x) => (float y) <int64[1] zero = {0}, int64[1] one = {1}, int64[3] extents = {1, 0, 6}> {
      none = Slice(x, zero, zero, one) y = Reshape <allowzero = 1> (none, extents) }""",
        ("x", (1, 2, 3)),
    )


def test_any_number_of_samples_runs_without_another_compilation():
    model = burnish.load(
        parsed("m (float[1, 2, 3] x) => (float y) <int64[2] extents = {1, 6}> { y = Reshape(x, extents) }"), batch="open"
    )
    run = engines.get("onnxruntime").load(model)
    for count in (1, 2, 7):
        assert run({"x": np.zeros((count, 2, 3), np.float32)})["y"].shape == (count, 6)


@pytest.mark.slow
def test_shapes_that_hang_on_each_other_in_a_long_chain():
    """As blocks of a Swin transformer write them: a number of windows comes of an extent of what the block before computes."""
    blocks = "".join(
        f"""
      extents{block} = Shape(x{block}) length{block} = Gather(extents{block}, last) halves{block} = Div(length{block}, two)
      whole{block} = Cast <to = 7> (halves{block}) rows{block} = Unsqueeze(whole{block}, first)
      target{block} = Concat <axis = 0> (rows{block}, pair) parts{block} = Reshape(x{block}, target{block})
      turned{block} = Transpose <perm = [1, 0]> (parts{block}) x{block + 1} = Reshape(turned{block}, back)"""
        for block in range(9)
    )
    text = f"""m (float[1, 8] x0) => (float y)
    <int64 last = {{1}}, int64 two = {{2}}, int64[1] first = {{0}}, int64[1] pair = {{2}}, int64[2] back = {{1, -1}}>
    {{ {blocks} y = Relu(x9) }}"""
    assert shapes(text) == {"x0": ["batch", 8], "y": ["batch", 8]}
    samples_of(text, ("x0", (1, 8)))


@pytest.mark.parametrize("images", [1, 2])
def test_indices_of_a_pool_count_in_each_sample(images):
    text = f"m (float[{images}, 2, 4, 4] x) => (float y, int64 i) {{ y, i = MaxPool <kernel_shape = [2, 2]> (x) }}"
    if images == 2:
        text = text.replace("[2, 2, 4, 4]", "[1, 2, 2, 4, 4]").replace("{", "<int64[1] zero = {0}> { images = Squeeze(x, zero)")
        text = text.replace("(x) }", "(images) }")
    samples_of(text, ("x", (1, 2, 4, 4) if images == 1 else (1, 2, 2, 4, 4)))


def test_what_was_pooled_is_put_back_in_each_sample():
    samples_of(
        """m (float[1, 2, 4, 4] x) => (float z) { y, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
        z = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (y, i) }""",
        ("x", (1, 2, 4, 4)),
    )


LOSS = "export the model without it, and name the loss to burnish"
EXPORT = "Export the model again with an open batch"
REFUSED = {
    "a mean over the batch": (
        "m (float[1, 3] x) => (float y) { y = ReduceMean <keepdims = 0> (x) }",
        rf"^batch='open': ReduceMean '.+' \(output 'y'\) reduces over axis 0, in the place of which .* {LOSS}",
    ),
    "a loss": (
        "m (float[1, 3] x, int64[1] t) => (float y) { y = SoftmaxCrossEntropyLoss(x, t) }",
        rf"SoftmaxCrossEntropyLoss .* takes the mean over all samples.*{LOSS}",
    ),
    "softmax over the batch": (
        "m (float[1, 3] x) => (float y) { y = Softmax <axis = 0> (x) }",
        rf"Softmax .* works along axis 0 of 'x', in the place of which the samples of a batch stand\. {EXPORT}",
    ),
    "weights of a sample": (
        "m (float[1, 3, 4, 4] x, float[1, 3, 2, 2] w) => (float y) { y = Conv(x, w) }",
        rf"Conv .* reads 'w' as operand 1, which would have to be the same for all samples\. {EXPORT}",
    ),
    "statistics of the batch": (
        """m (float[1, 3, 4, 4] x, float[3] s) => (float y, float m, float v)
        { y, m, v = BatchNormalization <training_mode = 1> (x, s, s, s, s) }""",
        rf"BatchNormalization .* has the result 'm', which is read and would hold more than one sample's\. {EXPORT}",
    ),
    "as many results as the values say": (
        "m (float[1, 3] x) => (int64 y) { y = NonZero(x) }",
        rf"NonZero .* does something with samples that is not known here\. {EXPORT}",
    ),
    "a body that reads samples": (
        """m (float[1, 3] x, bool c) => (float y) {
          y = If(c) <then_branch = t () => (float a) { a = Neg(x) }, else_branch = e () => (float b) { b = Exp(x) }> }""",
        rf"If .* reads samples inside its body, which runs once\. {EXPORT}",
    ),
    "an operator of another domain": (
        "m (float[1, 3] x) => (float[1, 3] y) { y = com.example.Mix(x) }",
        rf"com.example.Mix .* does something with samples that is not known here\. {EXPORT}",
    ),
    "an axis that there is not": (
        "m (float[1, 3] x) => (float[?, ?] y) { y = LpNormalization <axis = 9> (x) }",
        rf"LpNormalization .* has the axis 9, which a tensor of 2 dimensions lacks\. {EXPORT}",
    ),
    "numbers drawn once": (
        "m (float[1, 3] x) => (float y) { d = RandomUniform <shape = [1, 1]> () y = Mul(x, d) }",
        rf"RandomUniform .* draws numbers \[1, 1\] without reading a sample: whether for each or once for all .*\. {EXPORT}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_several_samples_is_refused_by_name(name):
    text, message = REFUSED[name]
    model = parsed(text)
    if "com.example" in text:
        model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    burnish.load(model)
    with pytest.raises(UnsupportedOperatorError, match=message):
        burnish.load(model, batch="open")


def test_a_batch_that_is_open_already_needs_no_opening():
    model = parsed("m (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }")
    with pytest.raises(ConfigurationError, match=r"the batch of this model is open already: its inputs are 'x' \[n, 3\]\. Leave"):
        burnish.load(model, batch="open")


def test_a_model_without_an_axis_of_extent_1_has_no_batch_to_open():
    model = parsed("m (float[8, 3] x) => (float[8, 3] y) { y = Relu(x) }")
    with pytest.raises(ConfigurationError, match=r"has an axis of extent 1.* 'x' \[8, 3\].*at batch 1, or of one vector$"):
        burnish.load(model, batch="open")


def test_another_word_than_open_is_refused():
    model = parsed("m (float[1, 3] x) => (float[1, 3] y) { y = Relu(x) }")
    with pytest.raises(ConfigurationError, match=r"^batch must be None or 'open', not 8$"):
        burnish.load(model, batch=8)


VECTORS = "<float[4, 3] w = {1, 2, 0, -1, 1, 3, 0, 2, -2, 1, 1, 1}, float[3] b = {1, 0, -1}, int64[2] shape = {1, -1}>"


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("(float[4] x) => (float[3] y) W { z = MatMul(x, w) a = Add(z, b) y = Tanh(a) }", [("x", (4,))], {"y": ["batch", 3]}),
        ("(float[4] x) => (float y) W { z = MatMul(x, w) y = ReduceSum <keepdims = 0> (z) }", [("x", (4,))], {"y": ["batch"]}),
        ("(float[4] x) => (float[1, 3] y) W { z = MatMul(x, w) y = Reshape(z, shape) }", [("x", (4,))], {"y": ["batch", 1, 3]}),
        (
            "(float[4] x, float[1] t, float[3] c) => (float[3] y) W { z = MatMul(x, w) a = Mul(z, t) y = Add(a, c) }",
            [("x", (4,)), ("t", (1,)), ("c", (3,))],
            {"y": ["batch", 3]},
        ),
        (
            "(float[4] x, float[3] c) => (float[1] y) W { z = MatMul(x, w) d = MatMul(z, c) y = Reshape(d, one) }",
            [("x", (4,)), ("c", (3,))],
            {"y": ["batch", 1]},
        ),
        ("(float[4] x) => (float[7] y) W { z = MatMul(x, w) y = Concat <axis = 0> (x, z) }", [("x", (4,))], {"y": ["batch", 7]}),
        ("(float[4] x) => (float[4] y) W { y = Softmax <axis = 0> (x) }", [("x", (4,))], {"y": ["batch", 4]}),
        (
            "(float[4] x) => (float[3] y) W { z = Gemm(r, w, b) r = Reshape(x, shape) y = Squeeze(z) }",
            [("x", (4,))],
            {"y": ["batch", 3]},
        ),
    ],
    ids=["layer", "number", "row", "several vectors", "products of vectors", "joined", "softmax", "through a row"],
)
def test_vectors_get_an_axis_for_samples_in_front(text, inputs, outputs):
    """A model of one vector, such as one that was traced on one: nothing of it has an axis in which samples could stand."""
    text = "m " + text.replace("W", VECTORS.replace(">", ", int64[1] one = {1}>"))
    found = shapes(text)
    assert {name: found[name] for name in outputs} == outputs
    assert all(found[name] == ["batch", *shape] for name, shape in inputs)
    samples_of(text, *inputs)


def test_a_number_beside_vectors_is_the_same_for_all_samples():
    found = shapes("m (float[4] x, float t) => (float[4] y) { y = Mul(x, t) }")
    assert found == {"x": ["batch", 4], "t": [], "y": ["batch", 4]}
