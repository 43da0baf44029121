"""Programs of mixed precision: gradients as PyTorch's autocast gives them, float32 state, and what engines make of them."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import burnish
from burnish.data import DataSpec, open_dataset, shift_images
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import ConfigurationError, EngineError
from burnish.graph import FLOATING, SIXTEEN_BIT
from burnish.models import residual_network
from burnish.optim import sgd
from burnish.program import Role

GENERATOR = np.random.default_rng(0)
BATCH = {"x": GENERATOR.normal(size=(16, 1, 8, 8)).astype(np.float32), "labels": GENERATOR.integers(0, 10, 16)}
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
AUTOCAST = pytest.mark.parametrize("precision", TORCH)


def network(precision: str | burnish.MixedPrecision, **options) -> burnish.Program:
    return burnish.compile(residual_network(width=4, blocks=(1, 1), seed=1), precision=precision, **options)


def run(program: burnish.Program, graph: str, engine: str = "reference") -> dict[str, np.ndarray]:
    values = {**program.initial_state(0), **BATCH, "lr": np.float32(0.1)}
    fed = {entry.name: np.asarray(values[entry.name]) for entry in program.signature[graph].inputs}
    return burnish.engines.get(engine).run(program.graphs[graph], fed)


def torch_gradients(dtype: torch.dtype, autocast: torch.dtype | None, scale: float) -> dict[str, np.ndarray]:
    """Gradients of the network's parameters, by PyTorch; with ``autocast``, its own mixed precision."""
    program = network("float32")
    weights = {
        name.removeprefix("param/"): torch.from_numpy(array).to(dtype).requires_grad_()
        for name, array in program.weights.items()
        if name.startswith("param/")
    }

    def layer(name: str, x: torch.Tensor, stride: int, kernel: int) -> torch.Tensor:
        y = functional.conv2d(x, weights[f"{name}.convolution.weight"], stride=stride, padding=kernel // 2)
        scale, bias = weights[f"{name}.normalization.scale"], weights[f"{name}.normalization.bias"]
        return functional.batch_norm(y, None, None, scale, bias, training=True)

    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = functional.relu(layer("stem", torch.from_numpy(BATCH["x"]).to(dtype), 1, 3))
        for block, stride in (("stage1.block1", 1), ("stage2.block1", 2)):
            inner = functional.relu(layer(f"{block}.first", y, stride, 3))
            shortcut = y if stride == 1 else layer(f"{block}.shortcut", y, stride, 1)
            y = functional.relu(layer(f"{block}.second", inner, 1, 3) + shortcut)
        features = functional.adaptive_avg_pool2d(y, 1).flatten(1)
        logits = functional.linear(features, weights["classifier.weight"], weights["classifier.bias"])
        loss = functional.cross_entropy(logits.to(dtype), torch.from_numpy(BATCH["labels"]))
    (loss * scale).backward()
    return {name: weight.grad.double().numpy() / scale for name, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", TORCH)
def test_gradients_are_as_near_to_float64_as_those_of_autocast(precision):
    """On the engine that rounds at every cast. What rounding does to a gradient is the network's conditioning: both meet it."""
    scale = 65536.0 if precision == "float16" else 1.0
    exact = torch_gradients(torch.float64, None, 1.0)
    peer = torch_gradients(torch.float32, TORCH[precision], scale)
    program = network(precision)
    assert program.initial_state(0).get("opt/loss_scale", 1.0) == scale
    found = run(program, "grad")
    assert len(exact) == 20
    for name, gradient in exact.items():
        ours = found[f"grad:{name}"]
        assert ours.dtype == np.float32
        peers_error = np.linalg.norm(peer[name] - gradient)
        assert peers_error > 0
        assert np.linalg.norm(ours - gradient) < 1.5 * peers_error, name
        assert np.linalg.norm(ours - gradient) < 0.12 * np.linalg.norm(gradient), name


class Transformer(torch.nn.Module):
    """A block of attention and a block of dense layers on embeddings, with dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.first, self.second = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.qkv, self.mixed = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.first(x)).view(tokens.shape[0], 12, 3, 4, 8).permute(2, 0, 3, 1, 4)
        read = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        x = x + self.dropout(self.mixed(read.transpose(1, 2).reshape(tokens.shape[0], 12, 32)))
        x = x + self.dropout(self.down(functional.gelu(self.up(self.second(x)))))
        return self.head(x.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_a_transformer_has_the_gradients_of_float32_to_the_digits_of_its_products(precision, unit, tmp_path):
    """With the same dropout masks. The network is well conditioned: a gradient's error is some units of its dtype."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (8, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Transformer(),
            (tokens,),
            tmp_path / "model.onnx",
            input_names=["tokens"],
            output_names=["logits"],
            dynamic_axes={"tokens": {0: "batch"}},
            opset_version=18,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            dynamo=False,
        )
    plain, mixed = (burnish.compile(tmp_path / "model.onnx", precision=name) for name in ("float32", precision))
    products = [node for node in mixed.grad.graph if node.op_type in ("MatMul", "Gemm")]
    softmaxes = [node for node in mixed.grad.graph if node.op_type in ("Softmax", "LogSoftmax")]
    narrow = ir.DataType.FLOAT16 if precision == "float16" else ir.DataType.BFLOAT16
    assert len(products) > 12
    assert {node.inputs[0].dtype for node in products} == {narrow}
    assert {node.inputs[0].dtype for node in softmaxes} == {ir.DataType.FLOAT}
    found = []
    for program in (plain, mixed):
        values = {**program.initial_state(0), "tokens": tokens.numpy(), "labels": np.arange(8) % 5}
        fed = {entry.name: values[entry.name] for entry in program.signature["grad"].inputs}
        found.append(burnish.engines.get("reference").run(program.grad, fed))
    exact, rounded = found
    gradients = [name for name in exact if name.startswith("grad:")]
    assert len(gradients) == 15
    for name in gradients:
        assert np.linalg.norm(rounded[name] - exact[name]) < 3 * unit * np.linalg.norm(exact[name]), name


@pytest.mark.slow
@AUTOCAST
def test_the_state_the_gradients_and_the_figures_are_float32(precision):
    program = network(precision, optimizer="adam")
    entries = [entry for graph in program.signature.graphs.values() for entry in (*graph.inputs, *graph.outputs)]
    assert {entry.dtype for entry in entries if entry.dtype in FLOATING} == {ir.DataType.FLOAT}
    for graph in ("step", "grad", "evaluate"):
        dtypes = {value.dtype for node in program.graphs[graph].graph for value in node.outputs}
        assert len(dtypes & SIXTEEN_BIT) == 1


@pytest.mark.slow
@AUTOCAST
def test_the_graphs_cast_no_value_twice_and_add_up_none_of_sixteen_bits(precision):
    program = network(precision)
    for graph in ("grad", "evaluate"):
        nodes = list(program.graphs[graph].graph)
        twice = Counter((node.inputs[0], node.attributes["to"].as_int()) for node in nodes if node.op_type == "Cast")
        assert max(twice.values()) == 1
        sums = [node for node in nodes if node.op_type.startswith("Reduce")]
        assert sums
        assert not {node.inputs[0].dtype for node in sums} & SIXTEEN_BIT


@pytest.mark.slow
def test_prediction_and_apply_are_those_of_float32():
    plain, mixed = network("float32"), network("bfloat16")
    assert {node.op_type for node in mixed.predict.graph} == {node.op_type for node in plain.predict.graph}
    np.testing.assert_array_equal(run(plain, "predict")["logits"], run(mixed, "predict")["logits"])
    assert [node.op_type for node in mixed.apply.graph] == [node.op_type for node in plain.apply.graph]


@pytest.mark.slow
def test_evaluation_computes_in_the_precision_of_training():
    plain, mixed = run(network("float32"), "evaluate"), run(network("bfloat16"), "evaluate")
    assert plain["loss"] != mixed["loss"]
    assert mixed["loss"] == pytest.approx(plain["loss"], rel=2.0**-8)


@pytest.mark.slow
def test_a_saved_program_trains_on(tmp_path):
    program = network(burnish.MixedPrecision("float16", loss_scale=512.0, keep=("classifier",)))
    program.save(tmp_path / "program")
    loaded = burnish.Program.load(tmp_path / "program")
    assert loaded.options["precision"] == program.options["precision"]
    states = []
    for each in (program, loaded):
        session = burnish.Session(each, threads=1)
        assert session.step(BATCH)["loss_scale"] == 512.0
        states.append(session.state())
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array, err_msg=name)


@pytest.mark.slow
def test_onnxruntime_names_the_operator_that_it_has_no_bfloat16_kernel_of():
    program = network("bfloat16")
    message = (
        r"cannot load the step graph at Conv '.+': on the CPU it has no bfloat16 kernel of Conv\. "
        r"Compile with precision='float16' or 'float32', or use engine='torch', or 'reference'"
    )
    with pytest.raises(EngineError, match=message):
        burnish.Session(program, "onnxruntime").step(BATCH)


@pytest.mark.slow
def test_a_bfloat16_program_trains_on_the_reference_engine():
    session, plain = (
        burnish.Session(network(precision, optimizer=sgd(0.1, momentum=0.9)), engine)
        for precision, engine in (("bfloat16", "reference"), ("float32", "onnxruntime"))
    )
    losses, exact = ([each.step(BATCH)["loss"] for _ in range(6)] for each in (session, plain))
    assert exact[-1] < 0.9 * exact[0]
    np.testing.assert_allclose(losses, exact, rtol=4 * 2.0**-8)
    assert {array.dtype for name, array in session.state().items() if name.startswith(("param/", "stat/"))} == {
        np.dtype(np.float32)
    }


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frozen", "ghost:8", "renorm"])
def test_every_policy_of_batch_normalization_trains_in_float16(norm):
    plain, mixed = (run(network(precision, norm=norm), "step", "onnxruntime") for precision in ("float32", "float16"))
    assert mixed["skipped"] == 0
    assert mixed["loss"] == pytest.approx(plain["loss"], rel=2e-3)
    for name in ("next:param/stem.convolution.weight", "next:param/classifier.weight"):
        np.testing.assert_allclose(mixed[name], plain[name], atol=2e-3 * np.abs(plain[name]).max())


def test_diagnostics_have_a_role_of_their_own():
    signature = network("float16").signature
    for graph in ("step", "grad"):
        assert [entry.name for entry in signature[graph].outputs_of(Role.DIAGNOSTIC)] == ["loss_scale", "skipped"]
    assert "opt/loss_scale" in [entry.name for entry in signature["grad"].inputs_of(Role.OPTIMIZER)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, r"dtype of mixed precision is one of 'float16', 'bfloat16', not 'float8'"),
        ({"loss_scale": -1.0}, r"loss_scale must be a finite number above 0, not -1\.0"),
        ({"loss_scale": "huge"}, r"loss_scale must be a finite number above 0, not 'huge'"),
        ({"growth_interval": 0}, r"growth_interval must be a whole number of at least 1, or None"),
        ({"growth_factor": 1.0}, r"growth_factor must be a finite number above 1, not 1\.0"),
        ({"backoff_factor": 1.5}, r"backoff_factor must be a finite number above 0 and below 1, not 1\.5"),
        ({"dtype": "bfloat16", "growth_factor": 3.0}, r"growth_factor=3 changes nothing with no loss_scale: leave it out"),
        ({"growth_interval": None, "backoff_factor": 0.1}, r"backoff_factor=0\.1 changes nothing with growth_interval=None"),
        ({"keep": 3}, r"keep must be names or patterns of layers, not 3"),
        ({"colour": "red"}, r"precision has no option .colour.; it takes dtype, loss_scale"),
    ],
)
def test_settings_outside_their_range(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        network(settings)


def test_an_unknown_precision():
    with pytest.raises(ConfigurationError, match=r"precision: unknown 'int8'; choose among 'float32', 'float16', 'bfloat16'"):
        network("int8")


@pytest.mark.slow
def test_digits_in_float16_reach_the_accuracy_of_float32(tmp_path):
    """On onnxruntime, within 0.5 points, the mean over two seeds; each is of 360 images, so that one image is 0.14 points."""
    accuracies = {}
    for precision in ("float32", "float16"):
        found = []
        for seed in (0, 1):
            model = residual_network(width=8, seed=seed)
            program = burnish.compile(model, optimizer=sgd(0.1, momentum=0.9, weight_decay=5e-4), precision=precision)
            wanted = DataSpec.by(program)
            trainer = burnish.Trainer(
                program,
                open_dataset("digits", wanted),
                open_dataset("digits:test", wanted),
                epochs=10,
                seed=seed,
                run_directory=tmp_path / f"{precision}{seed}",
                engine=OnnxRuntimeEngine(spinning=False),
                threads=1,
                schedule="cosine",
                augment=shift_images("x"),
                progress=False,
            )
            found.append(trainer.run().metrics["accuracy"])
            header = (tmp_path / f"{precision}{seed}" / "metrics.csv").read_text().splitlines()[0]
            assert ("skipped" in header) == (precision == "float16")
            assert "eval_skipped" not in header
        accuracies[precision] = np.mean(found)
    assert accuracies["float32"] > 0.97
    assert accuracies["float16"] >= accuracies["float32"] - 0.005
