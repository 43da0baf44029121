"""Models that train as they will compute with integers, and what an export makes of them."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import burnish
from burnish import surgery
from burnish.errors import ConfigurationError, InputError, LayersInBodiesWarning
from burnish.models import residual_network
from burnish.quantization.quantize import remaining_line
from oracles import layers_in_bodies
from oracles.combinations import diagonal, named

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 1, 8, 8)).astype(np.float32)
BATCH = {"x": X, "labels": RNG.integers(0, 3, 32)}


@cache
def model() -> ir.Model:
    """A small residual network whose normalization has statistics of data, factors of both signs and one that is zero."""
    network = residual_network(classes=3, width=4, blocks=(1, 1))
    generator = np.random.default_rng(1)
    for name, value in network.graph.initializers.items():
        array = value.const_value.numpy()
        if name.endswith((".scale", ".bias", ".running_mean")):
            array = array + generator.normal(0, 0.3, array.shape)
        if name == "stem.normalization.scale":
            array[0], array[1] = -0.8, 0.0
        value.const_value = ir.Tensor(array.astype(np.float32), name=name)
    return network


def trained(steps: int = 2, engine: str = "onnxruntime", **options: Any) -> burnish.Session:
    """A session of the quantized network after some steps."""
    quantized = surgery.quantize(model(), **({"calibration": [{"x": X}]} | options))
    session = burnish.Session(burnish.compile(quantized, optimizer=burnish.optim.sgd(lr=0.01)), engine=engine)
    for _ in range(steps):
        session.step(BATCH)
    return session


def optimized(path: Path, folder: Path, **config: str) -> tuple[onnxruntime.InferenceSession, Counter[str]]:
    """The file in ONNX Runtime, and the operators that it makes of it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 3
    for key, value in config.items():
        options.add_session_config_entry(f"session.{key}", value)
    session = onnxruntime.InferenceSession(path, options)
    return session, Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def initializers(path: Path) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="learned"),
        pytest.param({"scales": "observed", "freeze_observers_after": 1, "activations": "int8"}, id="observed"),
        pytest.param({"scales": "fixed", "weights": "int8"}, id="fixed"),
    ],
)
def test_an_export_computes_with_integers_what_evaluation_simulates(options: dict[str, Any], tmp_path: Path) -> None:
    """Every output, within one step of its scale; and nothing is left that computes with floating-point numbers."""
    session = trained(**options)
    path = session.export(tmp_path / "quantized.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    runtime, operators = optimized(path, tmp_path, qdqisint8allowed="1")
    assert operators["QLinearConv"] == 6
    assert operators["QGemm"] == 1
    assert operators["QLinearAdd"] == 2
    assert not {"Conv", "FusedConv", "Gemm", "Add", "Relu", "BatchNormalization"} & operators.keys()
    tensors = initializers(path)
    step = float(onnx.numpy_helper.to_array(tensors["logits_scale"]))
    expected = session.predict({"x": X})["logits"]
    computed = runtime.run(None, {"x": X})[0]
    assert np.abs(computed - expected).max() <= 1.01 * step
    assert np.mean(np.abs(computed - expected) > 0.5 * step) < 0.02  # the few whose sum lies between two integers
    weights = onnx.numpy_helper.to_array(tensors["stem.convolution.weight_quantized"])
    assert weights.dtype == np.int8
    assert np.abs(weights).max() == 63
    assert tensors["stem.convolution.bias_quantized"].data_type == onnx.TensorProto.INT32


@pytest.mark.slow
def test_engines_train_alike_and_a_program_that_was_saved_goes_on(tmp_path: Path) -> None:
    sessions = {engine: trained(3, engine) for engine in ("onnxruntime", "torch")}
    state = sessions["onnxruntime"].state()
    for name, array in sessions["torch"].state().items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, state[name], rtol=2e-2, atol=2e-3, err_msg=name)
    program = sessions["onnxruntime"].program
    program.save(tmp_path / "program")
    loaded = burnish.Session(burnish.Program.load(tmp_path / "program"), state=state)
    loaded.export(tmp_path / "loaded.onnx")
    sessions["onnxruntime"].export(tmp_path / "own.onnx")
    assert (tmp_path / "loaded.onnx").read_bytes() == (tmp_path / "own.onnx").read_bytes()


@pytest.mark.slow
def test_a_quantized_model_that_was_saved_trains_as_before(tmp_path: Path) -> None:
    quantized = surgery.quantize(model(), calibration=[{"x": X}])
    onnx.save(ir.to_proto(quantized), tmp_path / "model.onnx")
    optimizer = burnish.optim.sgd(lr=0.01)
    losses = [
        burnish.Session(burnish.compile(source, optimizer=optimizer)).step(BATCH)["loss"]
        for source in (quantized, tmp_path / "model.onnx")
    ]
    assert losses[0] == losses[1]
    with pytest.raises(ConfigurationError, match=r"quantize: the model holds .*QuantizeLinear.*: it is quantized already"):
        surgery.quantize(tmp_path / "model.onnx", activations=None)


LINEAR = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 32] x) => (float[N, 4] y) <float[32, 4] w, float[4] b> {
    product = MatMul (x, w)
    sum = Add (product, b)
    y = Relu (sum)
}"""


def with_weights(text: str, scale: float = 1.0, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """The model of a text, with the initializers that it declares drawn at random."""
    proto, generator = onnx.parser.parse_model(text), np.random.default_rng(2)
    for name, shape in shapes.items():
        array = (scale * generator.normal(size=shape)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def linear() -> onnx.ModelProto:
    return with_weights(LINEAR, w=(32, 4), b=(4,))


DATA = np.random.default_rng(3).normal(size=(16, 32)).astype(np.float32)


def test_gradients_of_learned_scales_are_those_of_learned_step_sizes() -> None:
    """As PyTorch computes them; with four bits, so that weights beyond the integers are there too."""
    quantized = surgery.quantize(
        linear(),
        weights="int4 per channel",
        symmetric=True,
        activations="int8",
        calibration=[{"x": DATA / 2}],
        quantize_outputs=False,
    )
    program = burnish.compile(quantized, loss="mse", optimizer=burnish.optim.sgd(lr=1.0))
    session = burnish.Session(program)
    targets = np.random.default_rng(4).normal(size=(16, 4)).astype(np.float32)
    before = session.state()
    session.step({"x": DATA, "targets": targets})
    after = session.state()
    w, w_scale, x_scale, b = (
        torch.tensor(before[f"param/{name}"], requires_grad=True) for name in ("w", "w_scale", "x_scale", "b")
    )
    zeros = torch.zeros(4)
    x = torch._fake_quantize_learnable_per_tensor_affine(
        torch.tensor(DATA), x_scale, torch.zeros(1), -128, 127, 1 / np.sqrt(32 * 127)
    )
    weight = torch._fake_quantize_learnable_per_channel_affine(w, w_scale, zeros, 1, -7, 7, 1 / np.sqrt(32 * 7))
    loss = torch.nn.functional.mse_loss(torch.relu(x @ weight + b), torch.tensor(targets))
    loss.backward()
    assert (torch.abs(w / w_scale) > 7.5).any()
    for name, parameter in {"w": w, "w_scale": w_scale, "x_scale": x_scale, "b": b}.items():
        moved = before[f"param/{name}"] - after[f"param/{name}"]
        np.testing.assert_allclose(moved, parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_observed_ranges_follow_the_data_until_they_freeze() -> None:
    quantized = surgery.quantize(linear(), scales="observed", momentum=0.75, freeze_observers_after=2, calibration=[{"x": DATA}])
    program = burnish.compile(quantized, loss="mse", optimizer=burnish.optim.sgd(lr=0.5))
    session = burnish.Session(program)
    assert sorted(program.options["trainable"]) == ["b", "w"]
    expected = session.state()["stat/x_range"]
    np.testing.assert_array_equal(expected, [DATA.min(), DATA.max()])
    for step, factor in enumerate((2.0, 3.0, 50.0)):
        weights = session.state()["param/w"]
        session.step({"x": factor * DATA, "targets": np.zeros((16, 4), np.float32)})
        state = session.state()
        if step < 2:
            expected = 0.75 * expected + 0.25 * factor * np.asarray([DATA.min(), DATA.max()])
            np.testing.assert_allclose(state["stat/w_range"], np.abs(weights).max(axis=0), rtol=1e-6)
        np.testing.assert_allclose(state["stat/x_range"], expected, rtol=1e-5)


@pytest.mark.slow
def test_observed_ranges_stay_after_epochs() -> None:
    """As after the steps that the epochs have."""
    when = {"scales": "observed", "momentum": 0.5, "calibration": [{"x": DATA}]}
    by_epochs = surgery.quantize(linear(), freeze_observers_after="2 epochs", **when)
    with pytest.raises(ConfigurationError, match=r"stays after 2 epochs, and how many steps an epoch has is not known: compile"):
        burnish.compile(by_epochs, loss="mse", optimizer="sgd")
    program = burnish.compile(by_epochs, loss="mse", optimizer="sgd:lr=0.1", steps_per_epoch=3)
    assert program.options["steps_per_epoch"] == 3
    by_steps = burnish.compile(surgery.quantize(linear(), freeze_observers_after=6, **when), loss="mse", optimizer="sgd:lr=0.1")
    ranges = []
    for one in (program, by_steps):
        session = burnish.Session(one)
        for step in range(8):
            session.step({"x": (1 + step) * DATA, "targets": np.zeros((16, 4), np.float32)})
        ranges.append({name: array for name, array in session.state().items() if name.startswith("stat/")})
    for name, array in ranges[0].items():
        np.testing.assert_array_equal(array, ranges[1][name])


@pytest.mark.slow
def test_observed_ranges_stay_when_they_have_settled() -> None:
    """A window has 1 / (1 - 0.75) steps; the range stays once neither end has moved by 10 % of its width within one."""
    options = {"momentum": 0.75, "freeze_observers_after": "settled:0.1", "calibration": [{"x": DATA}]}
    program = burnish.compile(surgery.quantize(linear(), scales="observed", **options), loss="mse", optimizer="sgd:lr=0.01")
    session, batch = burnish.Session(program), {"targets": np.zeros((16, 4), np.float32)}
    limits = np.asarray([DATA.min(), DATA.max()], np.float64)
    expected, reference, count, stayed = limits.copy(), limits.copy(), 0, None
    for step in range(40):
        factor = 5.0 if stayed is None or step < stayed + 2 else 50.0  # what comes later is not seen any more
        session.step({"x": factor * DATA, **batch})
        if stayed is None:
            expected, count = 0.75 * expected + 0.25 * factor * limits, count + 1
            if count == 4:
                stayed = step if np.abs(expected - reference).max() <= 0.1 * (expected[1] - expected[0]) else None
                reference, count = expected.copy(), 0
        np.testing.assert_allclose(session.state()["stat/x_range"][:2], expected, rtol=1e-5)
    assert stayed is not None
    assert 4 <= stayed < 30
    assert session.state()["stat/x_range"][4] == -1
    weights = session.state()["param/w"]
    session.step({"x": DATA, **batch})
    np.testing.assert_allclose(session.state()["stat/w_range"], np.abs(weights).max(axis=0), rtol=1e-6)  # weights are followed on


@pytest.mark.slow
def test_four_bits_in_blocks_become_one_operator_of_onnx_runtime(tmp_path: Path) -> None:
    """Weights alone, in files that are an eighth of float32's, with the outputs of evaluation."""
    quantized = surgery.quantize(linear(), weights="int4 blocks of 16", activations=None)
    session = burnish.Session(burnish.compile(quantized, loss="mse", optimizer=burnish.optim.sgd(lr=0.05)))
    first = session.evaluate({"x": DATA, "targets": np.ones((16, 4), np.float32)})["loss"]
    for _ in range(20):
        session.step({"x": DATA, "targets": np.ones((16, 4), np.float32)})
    assert session.evaluate({"x": DATA, "targets": np.ones((16, 4), np.float32)})["loss"] < 0.5 * first
    path = session.export(tmp_path / "quantized.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    tensors = initializers(path)
    assert tensors["w_quantized"].data_type == onnx.TensorProto.INT4
    assert list(tensors["w_scale"].dims) == [2, 4]
    runtime, operators = optimized(path, tmp_path, qdq_matmulnbits_accuracy_level="1")  # 4 would round activations too
    assert "MatMulNBits" in operators
    np.testing.assert_allclose(runtime.run(None, {"x": DATA})[0], session.predict({"x": DATA})["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_first_and_last_layers_may_have_more_bits_and_others_stay(tmp_path: Path) -> None:
    session = trained(
        1, weights="int4 per channel", first_and_last="int8", skip=["stage1.block1.second.convolution"], scales="fixed"
    )
    path = session.export(tmp_path / "quantized.onnx")
    tensors = initializers(path)
    kinds = {name: onnx.TensorProto.DataType.Name(tensor.data_type) for name, tensor in tensors.items()}
    assert kinds["stem.convolution.weight_quantized"] == kinds["classifier.weight_quantized"] == "INT8"
    assert kinds["stage1.block1.first.convolution.weight_quantized"] == "INT4"
    assert kinds["stage1.block1.second.convolution.weight"] == "FLOAT"
    runtime, operators = optimized(path, tmp_path)
    # Those with weights of 4 bits too; not the layer that is left out, nor the one whose result that reads as it is.
    assert operators["QLinearConv"] == 4
    step = float(onnx.numpy_helper.to_array(tensors["logits_scale"]))
    assert np.abs(runtime.run(None, {"x": X})[0] - session.predict({"x": X})["logits"]).max() <= 1.01 * step


@pytest.mark.slow
def test_an_export_may_leave_batch_normalization_apart(tmp_path: Path) -> None:
    """Biases are then not rounded, as the integers are those of both."""
    session = trained(1, scales="fixed", quantize_outputs=False)
    path = session.export(tmp_path / "apart.onnx", fold_norm=False)
    assert "BatchNormalization" in {node.op_type for node in onnx.load(path).graph.node}
    computed = onnxruntime.InferenceSession(path).run(None, {"x": X})[0]
    expected = session.predict({"x": X})["logits"]
    assert np.abs(computed - expected).max() < 0.05 * np.abs(expected).max()


NORMALIZED = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 2, 5, 5] x) => (float[N, 3] y)
<float[3, 2, 3, 3] w, float[3] b, float[3] gain, float[3] shift, float[3] mean, float[3] variance = {1, 2, 0.5}> {
    h = Conv (x, w, b)
    n = BatchNormalization (h, gain, shift, mean, variance)
    q = GlobalAveragePool (n)
    y = Flatten (q)
}"""


@pytest.mark.slow
def test_a_bias_before_batch_normalization_goes_into_one_with_its_shift(tmp_path: Path) -> None:
    """As of a file into whose layers normalization was folded, and put after them again."""
    proto = with_weights(NORMALIZED, w=(3, 2, 3, 3), b=(3,), gain=(3,), shift=(3,), mean=(3,))
    x = np.random.default_rng(6).normal(size=(8, 2, 5, 5)).astype(np.float32)
    quantized = surgery.quantize(proto, calibration=[{"x": x}])
    session = burnish.Session(burnish.compile(quantized, loss="mse", optimizer="sgd"))
    path = session.export(tmp_path / "quantized.onnx")
    runtime, operators = optimized(path, tmp_path)
    assert operators["QLinearConv"] == 1
    assert "BatchNormalization" not in operators
    tensors = initializers(path)
    assert tensors["b_quantized"].data_type == onnx.TensorProto.INT32
    assert "b" not in tensors
    step = float(onnx.numpy_helper.to_array(tensors["y_scale"]))
    assert np.abs(runtime.run(None, {"x": x})[0] - session.predict({"x": x})["y"]).max() <= 1.01 * step


CLIPPED = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 2, 5, 5] x) => (float[N, 3] y)
<float[3, 2, 3, 3] w, float[3] b, float low = {0}, float high = {6}> {
    h = Conv (x, w, b)
    c = Clip (h, low, high)
    p = MaxPool <kernel_shape = [2, 2]> (c)
    q = GlobalAveragePool (p)
    y = Flatten (q)
}"""


@pytest.mark.slow
def test_a_clip_becomes_part_of_the_integer_operator_though_scales_are_learned(tmp_path: Path) -> None:
    """And pooling that moves numbers has their scale."""
    proto = with_weights(CLIPPED, 3.0, w=(3, 2, 3, 3), b=(3,))
    generator = np.random.default_rng(5)
    x = generator.normal(size=(8, 2, 5, 5)).astype(np.float32)
    quantized = surgery.quantize(proto, calibration=[{"x": x}])
    session = burnish.Session(burnish.compile(quantized, loss="mse", optimizer=burnish.optim.sgd(lr=0.01)))
    for _ in range(3):
        session.step({"x": x, "targets": np.full((8, 3), 9, np.float32)})
    path = session.export(tmp_path / "quantized.onnx")
    runtime, operators = optimized(path, tmp_path)
    assert operators["QLinearConv"] == 1
    assert "Clip" not in operators
    tensors = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in initializers(path).items()}
    assert tensors["p_scale"] == tensors["c_scale"] <= 6 / 255
    step = float(tensors["y_scale"])
    assert np.abs(runtime.run(None, {"x": x})[0] - session.predict({"x": x})["y"]).max() <= 1.01 * step


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 6.0)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_clip_below_zero_keeps_its_range(low: float, high: float, symmetric: bool) -> None:
    """Learned scales reach as far as it lets through, and no further."""
    proto = with_weights(
        CLIPPED.replace("low = {0}", f"low = {{{low}}}").replace("{6}", f"{{{high}}}"), 3.0, w=(3, 2, 3, 3), b=(3,)
    )
    x = np.random.default_rng(5).normal(size=(8, 2, 5, 5)).astype(np.float32)
    plain, quantized = (
        burnish.Session(burnish.compile(source, loss="mse", optimizer="sgd")).predict({"x": x})["y"]
        for source in (proto, surgery.quantize(proto, calibration=[{"x": x}], symmetric=symmetric))
    )
    assert np.abs(quantized - plain).max() < 0.06 * (high - low)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int7"}, r"quantize: weights='int7' is no format: give 'int8', 'int8 per channel'"),
        ({"weights": "int4 blocks of 24"}, r"a block has 16 weights or another power of two"),
        ({"activations": "int4"}, r"quantize: activations='int4' is no format: give 'uint8', 'int8' or None"),
        ({"calibration": None}, r"quantize: the ranges of activations are measured on data: give batches with calibration="),
        ({"method": "mean"}, r"quantize: method='mean': give 'minmax', 'percentile' or 'entropy'"),
        ({"percentile": 99}, r"percentile=99 changes nothing with method='minmax': give method='percentile'"),
        ({"momentum": 0.5}, r"momentum=0.5 changes nothing with scales='learned': give scales='observed'"),
        ({"activations": None, "method": "entropy"}, r"method='entropy' is for activations, and activations=None leaves"),
        ({"activations": None, "symmetric": True}, r"symmetric=True is for activations, and activations=None leaves"),
        ({"activations": None}, r"quantize: calibration is for activations, and activations=None: leave it out"),
        ({"activations": None, "quantize_outputs": False}, r"quantize_outputs=False is for activations, and activations=None"),
        ({"method": "percentile", "percentile": 10}, r"quantize: percentile=10: give a number above 50"),
        ({"scales": "free"}, r"quantize: scales='free': give 'learned', 'observed' or 'fixed'"),
        ({"scales": "observed", "momentum": 1.0}, r"quantize: momentum=1.0: give a number from 0 to below 1"),
        ({"freeze_observers_after": 3}, r"freeze_observers_after=3: only observed ranges freeze: give it together with scales"),
        ({"freeze_observers_after": "2 epoch s"}, r"give a whole number of steps, '2 epochs', or 'settled', with the part"),
        ({"freeze_observers_after": "settled:2"}, r"freeze_observers_after='settled:2': give a whole number of steps"),
        ({"batch_norm": "keep"}, r"quantize: batch_norm='keep': give 'train' or 'fold'"),
        ({"weights": "int8", "batch_norm": "train"}, r"batch normalization stands after .*Conv.*: fold it first"),
        ({"first_and_last": "int4"}, r"quantize: first_and_last='int4': give 'int8' or 'float32'"),
        ({"skip": ["nothing"]}, r"skip: 'nothing' matches no Conv, Gemm or MatMul layer"),
        ({"skip": ["*"]}, r"leave no layer to quantize"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        surgery.quantize(model(), **({"calibration": [{"x": X}]} | options))


def test_models_and_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"There is no batch to calibrate on"):
        surgery.quantize(model(), calibration=[])
    with pytest.raises(InputError, match=r"The activation '.*' is not finite on the calibration data"):
        surgery.quantize(model(), calibration=[{"x": np.full((1, 1, 8, 8), np.inf, np.float32)}])
    with pytest.raises(ConfigurationError, match=r"has 32 inputs, which are no whole number of blocks of 64"):
        surgery.quantize(linear(), weights="int4 blocks of 64", activations=None)
    plain = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {y = Relu (x)}')
    with pytest.raises(ConfigurationError, match=r"no Conv, ConvTranspose, Gemm or MatMul whose weight is a float32"):
        surgery.quantize(plain, activations=None)


HALF = """<ir_version: 8, opset_import: ["": 18]>
g (float16[N, 32] x) => (float16[N, 4] y) <float16[32, 4] w, float16[4] b> {
    product = MatMul (x, w)
    y = Add (product, b)
}"""


@pytest.mark.slow
def test_a_file_in_float16_computes_with_integers_and_float32(tmp_path: Path) -> None:
    """As one in float32 with the same numbers, but for its inputs, which stay float16."""
    half = onnx.parser.parse_model(HALF)
    for tensor in linear().graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        half.graph.initializer.append(onnx.numpy_helper.from_array(array, tensor.name))
    x = DATA.astype(np.float16)
    session = burnish.Session(
        burnish.compile(surgery.quantize(half, calibration=[{"x": x}]), loss="mse", optimizer="sgd:lr=0.01")
    )
    plain = x.astype(np.float32) @ session.state()["param/w"] + session.state()["param/b"]
    assert np.abs(session.predict({"x": x})["y"] - plain).max() < 0.05 * np.abs(plain).max()
    session.step({"x": x, "targets": np.zeros((16, 4), np.float32)})
    path = session.export(tmp_path / "quantized.onnx")
    tensors = initializers(path)
    assert tensors["w_quantized"].data_type == onnx.TensorProto.INT8
    (computed,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    expected = session.predict({"x": x})["y"]
    assert np.abs(computed - expected).max() <= 1.01 * float(onnx.numpy_helper.to_array(tensors["y_scale"]))


RECURRENT = """<ir_version: 8, opset_import: ["": 18]>
g (float[T, N, 4] x) => (float[N, 2] y) <float[1, 9, 4] w, float[1, 9, 3] r, float[3, 2] v> {
    sequence, last = GRU <hidden_size: int = 3> (x, w, r)
    rows = Squeeze (last)
    y = MatMul (rows, v)
}"""


def test_weights_that_stay_in_floating_point_numbers_are_said() -> None:
    recurrent = with_weights(RECURRENT, w=(1, 9, 4), r=(1, 9, 3), v=(3, 2))
    quantized = surgery.quantize(recurrent, activations=None)
    assert remaining_line(quantized) == "91% of the weights stay in floating-point numbers: 2 initializers of GRU"
    assert remaining_line(surgery.quantize(linear(), weights="int4 blocks of 16", activations=None)) is None


def dropping(tail: str) -> onnx.ModelProto:
    """A convolution, ReLU and Dropout before a dense layer, in some order."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N, 2, 2, 2] x) => (float[N, 3] y)
            <float[4, 2, 1, 1] filter, float[3, 16] weight, float ratio = {{0.5}}, bool on = {{1}}> {{
            h = Conv (x, filter)
            {tail}
            y = Gemm <transB = 1> (f, weight)
        }}""")
    generator = np.random.default_rng(2)
    for name, shape in (("filter", (4, 2, 1, 1)), ("weight", (3, 16))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    return proto


@pytest.mark.slow
@diagonal(
    ("scales", ["learned", "observed", "fixed"]),
    (
        "tail",
        named(
            [
                "r = Relu (h) d = Dropout (r, ratio, on) f = Flatten (d)",
                "d = Dropout (h, ratio, on) r = Relu (d) f = Flatten (r)",
                "r = Relu (h) m = Flatten (r) d = Dropout (m) f = Identity (d)",
                "d = Dropout (h, ratio, on) r = Relu (d) r2 = Sigmoid (d) s = Add (r, r2) f = Flatten (s)",
            ],
            ["before a Flatten", "before a ReLU", "before an Identity", "read twice"],
        ),
    ),
)
def test_a_model_with_dropout_trains_for_the_integers_that_it_is_exported_with(tail: str, scales: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=(16, 2, 2, 2)).astype(np.float32)
    batch = {"x": x, "labels": np.arange(16) % 3}
    quantized = surgery.quantize(dropping(tail), calibration=[{"x": x}], scales=scales)
    session = burnish.Session(burnish.compile(quantized, optimizer="sgd:lr=0.01"), engine="onnxruntime")
    losses = [session.step(batch)["loss"] for _ in range(3)]
    assert np.isfinite(losses).all()
    expected = session.predict({"x": x})["y"]
    session.export(tmp_path / "integers.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "integers.onnx").run(None, {"x": x})
    step = np.ptp(expected) / 255
    np.testing.assert_allclose(found, expected, atol=1.01 * step + 1e-6)
    assert "Dropout" not in {node.op_type for node in onnx.load(tmp_path / "integers.onnx").graph.node}


def test_what_dropout_multiplies_is_not_cut_off_at_the_range_of_inference() -> None:
    """No pair of nodes stands between a Dropout and the layer that reads what it kept."""
    x = np.random.default_rng(3).normal(size=(16, 2, 2, 2)).astype(np.float32)
    quantized = surgery.quantize(dropping("r = Relu (h) d = Dropout (r, ratio, on) f = Flatten (d)"), calibration=[{"x": x}])
    layer = next(node for node in quantized.graph if node.op_type == "Gemm")
    dropout = layer.inputs[0].producer()
    assert dropout.op_type == "Dropout"
    assert dropout.inputs[0].producer().op_type == "DequantizeLinear"


@pytest.mark.slow
@diagonal(("scales", ["learned", "observed", "fixed"]), ("kind", ["branches", "scanned"]))
def test_weights_of_layers_in_bodies_become_integers(kind: str, scales: Any, tmp_path: Path) -> None:
    quantized = surgery.quantize(layers_in_bodies.model(kind), activations=None, scales=scales)
    session = burnish.Session(burnish.compile(quantized, optimizer="adam:lr=0.01"), engine="onnxruntime")
    batch = layers_in_bodies.batch(kind)
    losses = [session.step(batch)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    session.export(tmp_path / "integers.onnx")
    held = {
        name for name, tensor in initializers(tmp_path / "integers.onnx").items() if tensor.data_type == onnx.TensorProto.INT8
    }
    weights = (*layers_in_bodies.INSIDE[kind], *layers_in_bodies.OUTSIDE[kind])
    assert {f"{name}_quantized" for name in weights} <= held
    assert remaining_line(quantized) is None
    feeds = {name: array for name, array in batch.items() if name != "labels"}
    options = onnxruntime.SessionOptions()  # what it optimizes further rounds activations
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    (y,) = onnxruntime.InferenceSession(tmp_path / "integers.onnx", options).run(None, feeds)
    np.testing.assert_allclose(y, session.predict(feeds)["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_layers_in_bodies_are_named_where_activations_are_quantized() -> None:
    model, batch = layers_in_bodies.model("branches"), layers_in_bodies.batch("branches")
    with pytest.warns(LayersInBodiesWarning, match="quantize: 2 layers in branches .*activations=None alone.*skip") as said:
        quantized = surgery.quantize(model, calibration=[batch])
    assert "'wide', 'narrow'" in str(said[0].message)
    assert said[0].filename == __file__
    burnish.Session(burnish.compile(quantized)).step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LayersInBodiesWarning)
        surgery.quantize(model, calibration=[batch], skip=["wide", "narrow"])
        surgery.quantize(model, activations=None)


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["learned", "observed", "fixed"])
def test_the_reference_engine_trains_what_onnxruntime_trains(scales: Any) -> None:
    model = dropping("r = Relu (h) f = Flatten (r)")
    model.opset_import[0].version = 18  # the evaluator of the standard has DequantizeLinear from 19 on
    x = np.random.default_rng(3).normal(size=(16, 2, 2, 2)).astype(np.float32)
    quantized = surgery.quantize(model, calibration=[{"x": x}], scales=scales)
    program = burnish.compile(quantized, optimizer="sgd:lr=0.01")
    batch, found = {"x": x, "labels": np.arange(16) % 3}, {}
    for engine in ("reference", "onnxruntime"):
        session = burnish.Session(program, engine=engine, threads=1)
        found[engine] = [session.step(batch)["loss"] for _ in range(3)], session.predict({"x": x})["y"]
    assert found["reference"][0] == pytest.approx(found["onnxruntime"][0], rel=1e-3)
    step = np.ptp(found["onnxruntime"][1]) / 255
    np.testing.assert_allclose(found["reference"][1], found["onnxruntime"][1], atol=1.01 * step + 1e-6)
