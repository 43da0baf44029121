"""The state that training starts from."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import burnish
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.errors import ConfigurationError
from burnish.graph import Builder
from burnish.program import Entry, GraphSignature, Program, Role, Signature, initialization
from oracles.small_networks import perceptron
from oracles.tiny_program import tiny_program

F32 = ir.DataType.FLOAT


def program_of(shapes, build):
    """A program whose predict graph is ``build(builder, {name: tensor})``; its other graphs only carry the parameters."""
    entries = [
        Entry(name, Role.STATISTIC if name.startswith("stat/") else Role.PARAMETER, F32, shape) for name, shape in shapes.items()
    ]

    def graph(inputs, body):
        values = [ir.Value(name=entry.name, type=ir.TensorType(entry.dtype), shape=ir.Shape(entry.shape)) for entry in inputs]
        made = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="graph")
        builder = Builder(made)
        body(builder, {entry.name: builder.tensor(value) for entry, value in zip(inputs, values, strict=True)})
        return ir.Model(made, ir_version=10)

    def empty(_builder, _tensors):
        return None

    seed = Entry("seed", Role.SEED, ir.DataType.INT64, ())
    models = {name: graph(entries, empty) for name in ("step", "grad", "apply", "evaluate")}
    signatures = {name: GraphSignature(tuple(entries), ()) for name in (*models, "predict")}
    rng = np.random.default_rng(0)
    models |= {"init": graph([seed], empty), "predict": graph(entries, build)}
    signature = Signature({**signatures, "init": GraphSignature((seed,), ())})
    weights = {name: rng.normal(size=shape).astype(np.float32) + 10 for name, shape in shapes.items()}
    return Program(LoweredGraphs.read(models, signature, {}), weights)


def test_the_weights_are_kept_and_the_rest_is_computed():
    program = tiny_program()
    state = program.initial_state(seed=42)
    assert list(state) == [entry.name for entry in program.signature.state]
    for name, array in program.weights.items():
        np.testing.assert_array_equal(state[name], array)
        assert not np.shares_memory(state[name], array)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(state[f"opt/momentum/{name}"], np.zeros_like(program.weights[f"param/{name}"]))
    np.testing.assert_array_equal(state["rng/key"], [42, 0])
    assert state["step"] == 0
    assert state["step"].shape == ()
    assert state["step"].dtype == np.int64


def test_a_seed_beyond_64_bits_is_refused():
    with pytest.raises(ConfigurationError, match=r"seed must be an integer from -2\*\*63 to 2\*\*63 - 1, not"):
        tiny_program().initial_state(seed=1 << 64)


def test_an_unknown_scheme_lists_what_there_is():
    with pytest.raises(ConfigurationError, match=r"reinitialize='he' is not a scheme: choose one of kaiming, kaiming_normal"):
        tiny_program().initial_state(reinitialize="he")


def layers(b, v):
    x = b.tensor(next(iter(v.values())).value)
    data = b.op("ConstantOfShape", b.integers([2, 64, 8, 8]), shape=[2, 64, 8, 8], dtype=F32)
    b.op("Conv", data, v["param/conv.w"], v["param/conv.b"], group=2)
    b.op("Conv", data, v["param/depthwise"], group=64)
    b.op("ConvTranspose", data, v["param/up"])
    rows = b.op("ConstantOfShape", b.integers([2, 300]), shape=[2, 300], dtype=F32)
    b.op("Gemm", rows, v["param/gemm"], v["param/gemm.b"])
    b.op("Gemm", rows, v["param/linear"], transB=1)
    b.op("MatMul", rows, b.op("Transpose", b.op("Identity", v["param/transposed"]), perm=[1, 0])) + v["param/offset"]
    b.op("MatMul", v["param/left"], b.op("Transpose", rows, perm=[1, 0]))
    b.op("BatchNormalization", data, v["param/bn.scale"], v["param/bn.bias"], v["stat/bn.mean"], v["stat/bn.var"])
    b.op("LayerNormalization", data, v["param/ln.scale"], v["param/ln.bias"])
    b.op("PRelu", data, v["param/slope"])
    b.op("Gather", v["param/embedding"], b.integers([0, 1]))
    v["param/gamma"] * data
    assert x is not None


SHAPES = {
    "param/conv.w": (80, 32, 3, 5),
    "param/conv.b": (80,),
    "param/depthwise": (64, 1, 7, 7),
    "param/up": (64, 40, 2, 2),
    "param/gemm": (300, 200),
    "param/gemm.b": (200,),
    "param/linear": (200, 300),
    "param/transposed": (100, 300),
    "param/offset": (100,),
    "param/left": (150, 300),
    "param/bn.scale": (64,),
    "param/bn.bias": (64,),
    "stat/bn.mean": (64,),
    "stat/bn.var": (64,),
    "param/ln.scale": (8,),
    "param/ln.bias": (8,),
    "param/slope": (64, 1, 1),
    "param/embedding": (500, 64),
    "param/gamma": (64, 1, 1),
    "param/unused": (3,),
}
FANS = {
    "param/conv.w": (32 * 15, 40 * 15),
    "param/depthwise": (49, 49),
    "param/up": (64 * 4, 40 * 4),
    "param/gemm": (300, 200),
    "param/linear": (300, 200),
    "param/transposed": (300, 100),
    "param/left": (300, 150),
}
CONSTANTS = {
    "param/conv.b": 0,
    "param/gemm.b": 0,
    "param/offset": 0,
    "param/bn.scale": 1,
    "param/bn.bias": 0,
    "stat/bn.mean": 0,
    "stat/bn.var": 1,
    "param/ln.scale": 1,
    "param/ln.bias": 0,
    "param/slope": 0.25,
    "param/gamma": 1,
}


@pytest.fixture(scope="module")
def deep():
    return program_of(SHAPES, layers)


@pytest.mark.parametrize(
    ("scheme", "variance", "bounded"),
    [
        ("kaiming", lambda i, o: 2 / i, False),
        ("kaiming_normal", lambda i, o: 2 / i, False),
        ("kaiming_uniform", lambda i, o: 2 / i, True),
        ("xavier", lambda i, o: 2 / (i + o), True),
        ("xavier_uniform", lambda i, o: 2 / (i + o), True),
        ("xavier_normal", lambda i, o: 2 / (i + o), False),
    ],
)
def test_weights_are_drawn_with_the_variance_of_the_scheme(deep, scheme, variance, bounded):
    state = deep.initial_state(seed=1, reinitialize=scheme)
    for name, fans in FANS.items():
        values = state[name].astype(np.float64)
        deviation = np.sqrt(variance(*fans))
        samples = values.size
        assert values.shape == SHAPES[name]
        assert state[name].dtype == np.float32
        assert abs(values.mean()) < 5 * deviation / np.sqrt(samples), name
        assert values.std() == pytest.approx(deviation, rel=5 / np.sqrt(samples)), name
        assert (np.abs(values).max() <= np.sqrt(3) * deviation * (1 + 1e-6)) == bounded, name
    for name, constant in CONSTANTS.items():
        np.testing.assert_array_equal(state[name], np.full(SHAPES[name], constant, np.float32), err_msg=name)
    assert state["param/embedding"].std() == pytest.approx(0.02, rel=0.02)
    np.testing.assert_array_equal(state["param/unused"], deep.weights["param/unused"])


def test_each_name_is_drawn_from_a_stream_of_its_own(deep):
    first, again, other = (deep.initial_state(seed=seed, reinitialize="kaiming") for seed in (1, 1, 2))
    for name in FANS:
        assert first[name].tobytes() == again[name].tobytes()
        assert first[name].tobytes() != other[name].tobytes()
    assert not np.allclose(first["param/gemm"].ravel()[:100], first["param/linear"].ravel()[:100])
    names = ["param/linear", "param/gemm"]
    fewer = program_of({name: SHAPES[name] for name in names}, lambda b, v: _two_layers(b, v))
    for name in names:
        assert fewer.initial_state(seed=1, reinitialize="kaiming")[name].tobytes() == first[name].tobytes()


def _two_layers(b, v):
    rows = b.op("ConstantOfShape", b.integers([2, 300]), shape=[2, 300], dtype=F32)
    b.op("Gemm", rows, v["param/gemm"])
    b.op("Gemm", rows, v["param/linear"], transB=1)


def test_the_draw_is_fixed_across_versions():
    """Checkpoints aside, a seed names a start: a change of the stream must be meant."""
    program = program_of({"param/w": (2, 3)}, lambda b, v: b.op("MatMul", v["param/w"], b.constant(np.ones((3, 2), np.float32))))
    generator = np.random.default_rng([7, int.from_bytes(hashlib.sha256(b"param/w").digest()[:8], "little")])
    expected = generator.standard_normal((2, 3), dtype=np.float32) * np.float32(np.sqrt(2 / 3))
    np.testing.assert_allclose(program.initial_state(7, "kaiming")["param/w"], expected, rtol=1e-6)


def test_a_parameter_whose_use_tells_nothing_is_named():
    program = program_of({"param/points": (2, 3)}, lambda b, v: b.op("Sin", v["param/points"]))
    message = r"cannot tell how to draw 'param/points' of shape \[2, 3\] from its use in Sin .*Session\(state=\.\.\.\)"
    with pytest.raises(ConfigurationError, match=message):
        program.initial_state(reinitialize="xavier")


def test_the_whole_program_can_be_drawn_again():
    program = tiny_program()
    state = program.initial_state(seed=3, reinitialize="xavier")
    assert not np.array_equal(state["param/weight"], program.weights["param/weight"])
    np.testing.assert_array_equal(state["param/bias"], np.zeros(3))
    np.testing.assert_array_equal(state["param/scale"], np.ones(4))


def test_arrays_of_a_state_are_apart_from_each_other_and_from_the_program():
    program = burnish.compile(perceptron(), optimizer="adam")
    states = [program.initial_state() for _ in range(2)]
    arrays = [array for state in states for array in state.values() if array.size] + list(program.weights.values())
    for index, array in enumerate(arrays):
        assert index >= len(arrays) - len(program.weights) or array.flags.writeable
        assert not any(np.may_share_memory(array, other) and np.shares_memory(array, other) for other in arrays[:index])


@pytest.mark.parametrize("value", [None, 0.0, -0.0, 1.5, np.int64(0), np.int64(7)])
def test_fills_of_the_init_graph_are_the_standards(value):
    attributes = {} if value is None else {"value": onnx.numpy_helper.from_array(np.asarray([value]))}
    node = onnx.helper.make_node("ConstantOfShape", ["shape"], ["y"], **attributes)
    shape = onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [2])
    y = onnx.helper.make_value_info("y", onnx.TypeProto())
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "fill", [shape], [y]))
    feeds = {"shape": np.array([3, 4])}
    (found,) = ReferenceEvaluator(model, new_ops=[initialization.ConstantOfShape]).run(None, feeds)
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    assert found.shape == expected.shape == (3, 4)


def test_a_weight_that_is_arranged_first_is_drawn_for_the_shape_that_it_is_applied_in():
    """A convolution of a matrix, a part of a joined projection, and a matrix in blocks."""

    def layers(b, v):
        image = b.op("ConstantOfShape", b.integers([1, 200, 2, 2]), shape=[1, 200, 2, 2], dtype=F32)
        b.op("Conv", image, b.op("Reshape", v["param/point"], b.integers([100, 200, 1, 1])))
        rows = b.op("ConstantOfShape", b.integers([2, 50]), shape=[2, 50], dtype=F32)
        first, second = b.op("Split", b.op("Transpose", v["param/joined"]), axis=1, num_outputs=2, outputs=2)
        b.op("MatMul", rows, first)
        b.op("MatMul", rows, second)
        b.op("MatMul", rows, b.op("Reshape", b.op("Identity", v["param/blocks"]), b.integers([50, 600])))

    shapes = {"param/point": (100, 200), "param/joined": (600, 50), "param/blocks": (5, 10, 600)}
    state = program_of(shapes, layers).initial_state(3, "kaiming")
    for name, fan_in in (("param/point", 200), ("param/joined", 50), ("param/blocks", 50)):
        assert state[name].std() == pytest.approx(np.sqrt(2 / fan_in), rel=0.03)
