"""Distillation: a student and its teacher in one program, beside the same steps in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

import burnish
from burnish import losses
from burnish.errors import ConfigurationError, InputError
from burnish.graph import Builder, Tensor
from burnish.program import Role

FEATURES, CLASSES, SAMPLES = 5, 4, 7
RATE = 2.0**-4
RNG = np.random.default_rng(11)
X = RNG.standard_normal((SAMPLES, FEATURES))
LABELS = np.array([0, 3, 1, 2, 2, 0, 1])


def network(
    hidden: int, seed: int, name: str = "x", softmax: bool = False, normalized: bool = False, features: int = FEATURES
) -> ir.Model:
    """``x`` through a hidden layer (its value is ``<letter>.hidden``) to ``logits``, in float64."""
    rng = np.random.default_rng(seed)
    x = ir.Value(name=name, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(["batch", features]))
    graph = ir.Graph([x], [], nodes=[], name="network", opset_imports={"": 18})
    builder = Builder(graph)

    def weight(label: str, array: np.ndarray) -> Tensor:
        value = ir.Value(name=label, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(array.shape))
        value.const_value = ir.tensor(array, name=label)
        graph.register_initializer(value)
        return builder.tensor(value)

    y = builder.op("MatMul", builder.tensor(x), weight("first", rng.standard_normal((features, hidden))))
    if normalized:
        statistics = [weight(label, rng.uniform(0.5, 1.5, hidden)) for label in ("scale", "bias", "mean", "variance")]
        y = builder.op("BatchNormalization", y, *statistics, epsilon=1e-5)
        y = builder.op("Dropout", y)
    y = builder.op("Tanh", y)
    y.value.name = "hidden"
    y = builder.op("MatMul", y, weight("second", rng.standard_normal((hidden, CLASSES))))
    if softmax:
        y = builder.op("Softmax", y, axis=-1)
    y.value.name = "logits"
    graph.outputs.append(y.value)
    return ir.Model(graph, ir_version=10)


def file_of(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


def array(model: ir.Model, name: str) -> torch.Tensor:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return torch.tensor(tensor.numpy())


def hidden_of(x: torch.Tensor, model: ir.Model) -> torch.Tensor:
    y = x @ array(model, "first")
    if "scale" in model.graph.initializers:
        scale, bias, mean, variance = (array(model, name) for name in ("scale", "bias", "mean", "variance"))
        y = (y - mean) / torch.sqrt(variance + np.float32(1e-5)) * scale + bias
    return torch.tanh(y)


def distilled(logits: torch.Tensor, theirs: torch.Tensor, temperature: float, alpha: float, labels: torch.Tensor) -> torch.Tensor:
    """Hinton et al. 2015, by PyTorch's losses."""
    soft = F.kl_div(
        F.log_softmax(logits / temperature, 1), F.log_softmax(theirs / temperature, 1), log_target=True, reduction="batchmean"
    )
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(logits, labels)


def two_steps(session: burnish.Session, batch: dict[str, np.ndarray], student: ir.Model, loss_of: Any, *more: str) -> None:
    weights = {name: torch.tensor(session.state()[f"param/{name}"]).requires_grad_() for name in ("first", "second", *more)}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    for _ in range(2):
        hidden = torch.tanh(torch.from_numpy(X) @ weights["first"])
        loss = loss_of(hidden @ weights["second"], hidden, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(session.step(batch)["loss"], loss.item(), rtol=1e-10)
    for name, weight in weights.items():
        np.testing.assert_allclose(session.state()[f"param/{name}"], weight.detach(), rtol=1e-10, atol=1e-12, err_msg=name)


def compiled(student: ir.Model, loss: losses.Loss, **options: Any) -> burnish.Program:
    return burnish.compile(student, loss=loss, optimizer=burnish.optim.sgd(lr=RATE, momentum=0), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("softmax", "alpha"), [(False, 0.7), (True, 0.7), (False, 1.0)])
def test_two_steps_beside_a_teacher_are_those_of_torch(softmax: bool, alpha: float, tmp_path: Path) -> None:
    """A teacher with batch normalization and dropout, under other names than the student's, that may end in a Softmax."""
    teacher = network(9, 1, name="other", softmax=softmax, normalized=True)
    student = network(3, 2)
    loss = losses.distill(file_of(teacher, tmp_path / "teacher.onnx"), temperature=3.0, alpha=alpha)
    session = burnish.Session(compiled(student, loss), threads=1)
    batch = {"x": X, "labels": LABELS} if alpha < 1 else {"x": X}
    theirs = hidden_of(torch.from_numpy(X), teacher) @ array(teacher, "second")
    labels = torch.from_numpy(LABELS)
    two_steps(session, batch, student, lambda logits, hidden, _: distilled(logits, theirs, 3.0, alpha, labels))
    assert {name for name in session.state() if name.startswith("param/")} == {"param/first", "param/second"}


@pytest.mark.slow
@pytest.mark.parametrize(("projection", "width"), [("auto", 9), ("auto", 3), ("always", 3)])
def test_hints_on_layers_are_those_of_torch(projection: Any, width: int, tmp_path: Path) -> None:
    teacher, student = network(width, 1, normalized=True), network(3, 2)
    path = file_of(teacher, tmp_path / "teacher.onnx")
    loss = losses.distill(path, temperature=2.0, alpha=0.3, layers={"hidden": "hidden"}, hint_weight=0.5, projection=projection)
    program = compiled(student, loss)
    session = burnish.Session(program, threads=1)
    aim = hidden_of(torch.from_numpy(X), teacher)
    labels = torch.from_numpy(LABELS)
    is_projected = projection == "always" or width != 3

    def loss_of(logits: torch.Tensor, hidden: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        value = hidden @ weights["hidden:projection"] if is_projected else hidden
        return distilled(logits, aim @ array(teacher, "second"), 2.0, 0.3, labels) + 0.5 * F.mse_loss(value, aim)

    two_steps(session, {"x": X, "labels": LABELS}, student, loss_of, *["hidden:projection"] * is_projected)
    figures = session.evaluate({"x": X, "labels": LABELS})
    assert list(figures) == ["loss", "loss:soft", "loss:hard", "loss:hint:hidden", "accuracy"]
    parts = [{"x": X[part], "labels": LABELS[part]} for part in (slice(0, 2), slice(2, None))]
    np.testing.assert_allclose(session.evaluate_data(parts)["loss"], figures["loss"], rtol=1e-12)
    exported = ir.load(session.export(tmp_path / "tuned.onnx"))
    assert set(exported.graph.initializers) == {"first", "second"}
    kept = burnish.Program.load(program.save(tmp_path / "program"))
    np.testing.assert_allclose(
        burnish.Session(kept, state=session.state()).evaluate({"x": X, "labels": LABELS})["loss"], figures["loss"]
    )


def test_pictures_are_projected_by_a_convolution() -> None:
    def convolution(channels: int, seed: int) -> ir.Model:
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 2, 6, 6]))
        graph = ir.Graph([x], [], nodes=[], name="pictures", opset_imports={"": 18})
        builder = Builder(graph)
        drawn = np.random.default_rng(seed).standard_normal((channels, 2, 3, 3)).astype(np.float32)
        kernel = ir.Value(name="kernel", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(drawn.shape))
        kernel.const_value = ir.tensor(drawn, name="kernel")
        graph.register_initializer(kernel)
        y = builder.op("Conv", builder.tensor(x), builder.tensor(kernel), kernel_shape=[3, 3])
        y.value.name = "map"
        mean = builder.op("GlobalAveragePool", y)
        logits = builder.op(
            "Slice", builder.op("Flatten", mean), builder.integers([0]), builder.integers([2]), builder.integers([1])
        )
        logits.value.name = "logits"
        graph.outputs.append(logits.value)
        return ir.Model(graph, ir_version=10)

    teacher, student = convolution(5, 0), convolution(3, 1)
    loss = losses.distill(ir.to_proto(teacher), layers=[("map", "map")], alpha=0.5)
    session = burnish.Session(burnish.compile(student, loss=loss), threads=1)
    x = RNG.standard_normal((4, 2, 6, 6)).astype(np.float32)
    batch = {"x": x, "labels": np.array([0, 1, 1, 0])}
    state = {name: torch.tensor(value) for name, value in session.state().items() if value.ndim}
    ours = F.conv2d(torch.from_numpy(x), state["param/kernel"])
    projected = F.conv2d(ours, state["param/map:projection"])
    aim = F.conv2d(torch.from_numpy(x), array(teacher, "kernel"))
    figures = session.evaluate(batch)
    np.testing.assert_allclose(figures["loss:hint:map"], F.mse_loss(projected, aim), rtol=1e-5)
    assert losses.get(json.loads(json.dumps(session.program.options["loss"]))).teacher == loss.teacher
    first = session.step(batch)["loss"]
    for _ in range(20):
        last = session.step(batch)["loss"]
    assert last < first


@pytest.mark.slow
def test_logits_that_were_computed_before_are_those_of_the_teacher(tmp_path: Path) -> None:
    teacher, student = network(9, 1), network(3, 2)
    theirs = (hidden_of(torch.from_numpy(X), teacher) @ array(teacher, "second")).numpy()
    program = compiled(student, losses.distill(temperature=3.0, alpha=0.7))
    assert "weighs_alike" not in program.options
    assert [entry.name for entry in program.signature["step"].inputs_of(Role.LABEL)] == ["labels", "teacher_logits"]
    with_teacher = burnish.Session(compiled(student, losses.distill(teacher, temperature=3.0, alpha=0.7)), threads=1)
    session = burnish.Session(program, threads=1)
    for _ in range(2):
        given = session.step({"x": X, "labels": LABELS, "teacher_logits": theirs})
        computed = with_teacher.step({"x": X, "labels": LABELS})
        np.testing.assert_allclose(given["loss"], computed["loss"], rtol=1e-12)
    with pytest.raises(InputError, match="teacher_logits"):
        session.step({"x": X, "labels": LABELS})
    np.savez(tmp_path / "data.npz", x=X, labels=LABELS, teacher_logits=theirs)
    data = str(tmp_path / "data.npz")
    result = burnish.Trainer(program, data, data, epochs=1, batch_size=4, run_directory=tmp_path / "run").run()
    assert result.best is not None
    assert result.best["metric"] == "accuracy"  # and not a term of the loss


def test_ignored_labels_take_no_part_in_what_is_soft() -> None:
    student = network(3, 2)
    labels = LABELS.copy()
    labels[[1, 4]] = -100
    theirs = RNG.standard_normal((SAMPLES, CLASSES))
    session = burnish.Session(compiled(student, losses.distill(alpha=0.5, temperature=2.0)), threads=1)
    counted = labels >= 0
    all_of_them = session.evaluate({"x": X, "labels": labels, "teacher_logits": theirs})
    rest = session.evaluate({"x": X[counted], "labels": labels[counted], "teacher_logits": theirs[counted]})
    np.testing.assert_allclose(all_of_them["loss"], rest["loss"], rtol=1e-12)


@pytest.mark.slow
def test_an_exported_student_is_evaluated_by_the_loss_of_its_labels(tmp_path: Path) -> None:
    teacher = file_of(network(9, 1), tmp_path / "teacher.onnx")
    loss = losses.distill(teacher, layers={"hidden": "hidden"})
    session = burnish.Session(compiled(network(3, 2), loss), threads=1)
    session.step({"x": X, "labels": LABELS})
    teacher.unlink()
    metadata = ir.load(session.export(tmp_path / "tuned.onnx")).metadata_props
    objective = json.loads(metadata["burnish.objective"])
    assert (objective["loss"]["name"], objective["outputs"]) == ("cross_entropy", ["logits"])


def refused(teacher: ir.Model, **options: Any) -> None:
    compiled(network(3, 2), losses.distill(teacher, **options))


def with_metadata(key: str, text: str) -> None:
    teacher, student = network(9, 1), network(3, 2)
    teacher.metadata_props[key], student.metadata_props[key] = text, "{}"
    compiled(student, losses.distill(teacher))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: refused(network(9, 1, features=6)),
            r"the teacher reads 'x' as DOUBLE of shape \[batch,6\].*the model's input 'x' is DOUBLE of shape \[batch,5\]",
        ),
        (lambda: with_metadata("burnish.pixels", "{1}"), "the teacher was made for other pixels than the model"),
        (lambda: with_metadata("burnish.classes", "{1}"), "the teacher was made for other classes than the model"),
        (lambda: refused(network(9, 1), layers={"hidden": "hiden"}), "the teacher: .*no output 'hiden'.*'hidden'"),
        (lambda: refused(network(9, 1), layers={"hiden": "hidden"}), "the model has no output 'hiden'"),
        (lambda: refused(network(9, 1), layers={"hidden": "hidden"}, projection="never"), "they must be the same"),
        (lambda: refused(network(9, 1), layers={"hidden": "hidden"}, projection="some"), "projection must be 'auto', 'never'"),
        (lambda: refused(network(9, 1), teacher_output="scores"), "the teacher: .*no output 'scores'"),
        (lambda: losses.distill(layers={"a": "b"}), "layers is of a teacher, and there is none"),
        (lambda: losses.distill("t.onnx", layers=[("a",)]), "layers are {value of the student: value of the teacher}"),
        (lambda: losses.distill(loss="mse"), "the loss mean_squared_error reads no logits of classes"),
        (lambda: losses.distill(alpha=1.5), "alpha must be between 0 and 1, not 1.5"),
        (lambda: losses.distill(alpha=0), "distill: alpha=0 learns nothing of the teacher: give one above 0, or layers"),
        (lambda: losses.distill(hint_weight=3), "distill: hint_weight=3 is for layers: give some, or leave it out"),
        (lambda: losses.distill(temperature=0), "temperature must be a finite number above 0, not 0"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_teacher_of_several_inputs_is_read_by_their_names() -> None:
    teacher = network(9, 1)
    extra = ir.Value(name="mask", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(["batch", FEATURES]))
    teacher.graph.inputs.append(extra)
    with pytest.raises(ConfigurationError, match=r"the teacher reads 'mask', and the inputs of the model are 'x'"):
        compiled(network(3, 2), losses.distill(teacher))


def one_sample(seed: int, classes: int = CLASSES) -> ir.Model:
    """A file of one picture at a time, with a Reshape that says so."""
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[1, 2, 4, 4] x) => (float[1, {classes}] logits) <int64[2] flat = {{1, 12}}> {{
            c = Conv (x, kernel) r = Relu (c) v = Reshape (r, flat) logits = MatMul (v, head)
        }}""")
    for name, shape in (("kernel", (3, 2, 3, 3)), ("head", (12, classes))):
        model.graph.initializer.append(onnx.numpy_helper.from_array((rng.normal(size=shape) * 0.3).astype(np.float32), name))
    return ir.from_proto(model)


@pytest.mark.slow
def test_a_teacher_of_one_sample_is_opened_with_its_student(tmp_path: Path) -> None:
    path = file_of(one_sample(1), tmp_path / "teacher.onnx")
    batch = {"x": RNG.standard_normal((SAMPLES, 2, 4, 4)).astype(np.float32), "labels": LABELS}
    steps = {}
    for name, teacher in {"file": path, "opened": burnish.load(path, batch="open")}.items():
        program = burnish.compile(one_sample(0), loss=losses.distill(teacher), batch="open")
        session = burnish.Session(program, threads=1)
        steps[name] = [session.step(batch)["loss"] for _ in range(3)]
    assert steps["file"] == pytest.approx(steps["opened"], rel=1e-6)
    # Of a student whose batch is open in its file too.
    student = burnish.load(one_sample(0), batch="open")
    session = burnish.Session(burnish.compile(student, loss=losses.distill(path)), threads=1)
    assert session.step(batch)["loss"] == pytest.approx(steps["opened"][0], rel=1e-6)
    # A student of one sample keeps a teacher of one.
    alone = burnish.Session(burnish.compile(one_sample(0), loss=losses.distill(path)), threads=1)
    one = {"x": batch["x"][:1], "labels": LABELS[:1]}
    assert alone.step(one)["loss"] == pytest.approx(burnish.Session(program, threads=1).step(one)["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_student_of_a_teacher_that_cannot_be_opened_trains_on_single_samples(tmp_path: Path) -> None:
    model = ir.to_proto(one_sample(1))
    model.graph.node[2].CopyFrom(onnx.helper.make_node("Compress", ["r", "which"], ["picked"]))
    model.graph.node.insert(3, onnx.helper.make_node("Reshape", ["picked", "flat"], ["v"]))
    which = np.tile([True, True], 18)
    model.graph.initializer.append(onnx.numpy_helper.from_array(which, "which"))
    program = burnish.compile(one_sample(0), loss=losses.distill(model), batch="open")
    program.save(tmp_path / "program")
    batch = {"x": RNG.standard_normal((SAMPLES, 2, 4, 4)).astype(np.float32), "labels": LABELS}
    one = {name: array[:1] for name, array in batch.items()}
    refusal = r"teacher of the loss 'distill' takes 1 at a time, and cannot be opened for more: .*Compress.*teacher_logits"
    alone = burnish.Session(burnish.compile(one_sample(0), loss=losses.distill(model)), threads=1)
    for session in (burnish.Session(program, threads=1), burnish.Session(burnish.Program.load(tmp_path / "program"), threads=1)):
        for call in (session.step, session.evaluate):
            with pytest.raises(InputError, match=refusal):
                call(batch)
        assert session.evaluate(one)["loss"] == pytest.approx(alone.evaluate(one)["loss"], rel=1e-6)
        assert session.predict({"x": batch["x"]})["logits"].shape == (SAMPLES, CLASSES)
    assert session.step(one)["loss"] == pytest.approx(alone.step(one)["loss"], rel=1e-6)
    with pytest.raises(ConfigurationError, match=rf"batch_size=2: the {refusal}"):
        burnish.Trainer(program, batch, batch_size=2, run_directory=tmp_path / "run")
