"""MixUp and CutMix in the graph: beside the mixing on the host with the same draws, and what the draws are."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from scipy import stats

import burnish
from burnish import engines, losses
from burnish.data import DataSpec, ImageAugmentation
from burnish.data.image.augmentation import mixing
from burnish.errors import ConfigurationError
from burnish.graph import Builder
from burnish.random import Places, initial_key, symmetric_beta

CLASSES, HEIGHT, WIDTH = 3, 5, 7


def classifier(kind: int = TensorProto.DOUBLE, shape: tuple[int, ...] = (1, HEIGHT, WIDTH)) -> onnx.ModelProto:
    """A hidden layer over flattened images."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    shapes = {"first": (int(np.prod(shape)), 6), "bias": (6,), "second": (6, CLASSES)}
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "first"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", kind, ["N", *shape])],
        [helper.make_tensor_value_info("logits", kind, ["N", CLASSES])],
        [numpy_helper.from_array(rng.normal(size=size).astype(dtype), name) for name, size in shapes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def drawn(loss: losses.Mixed, seeds: range) -> list[dict[str, np.ndarray]]:
    """What the steps with the keys of these seeds draw."""
    key = ir.Value(name="key", type=ir.TensorType(ir.DataType.UINT32), shape=ir.Shape([2]))
    graph = ir.Graph([key], [], nodes=[], opset_imports={"": 18}, name="draws")
    builder = Builder(graph)
    for name, tensor in loss.draws(builder, builder.tensor(key))._asdict().items():
        if tensor is not None:
            tensor.value.name = name
            graph.outputs.append(tensor.value)
    run = engines.get("reference").load(ir.Model(graph, ir_version=10))
    return [run({"key": initial_key(seed)}) for seed in seeds]


def on_the_host(draws: dict[str, np.ndarray]) -> SimpleNamespace:
    """A generator that gives the draws of a step in the order in which the host asks for them."""
    fractions = iter(draws["centre"])
    return SimpleNamespace(
        random=lambda: 0.0 if draws["cuts"] else 1.0,
        beta=lambda *alphas: float(draws["share"]),
        integers=lambda extent: int(next(fractions) * np.float32(extent)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixup", "cutmix", "both"])
def test_gradients_are_those_of_mixing_on_the_host(kind):
    alphas = {name: alpha for name, alpha in (("mixup", 0.4), ("cutmix", 1.0)) if kind in (name, "both")}
    loss = losses.mixed("cross_entropy", **alphas)
    in_graph = burnish.compile(classifier(), loss=loss, optimizer="sgd")
    on_host = burnish.compile(classifier(), loss="cross_entropy:probabilities=true", optimizer="sgd")
    engine, rng = engines.get("reference"), np.random.default_rng(1)
    run, expected = engine.load(in_graph.grad), engine.load(on_host.grad)
    images, labels = rng.normal(size=(4, 1, HEIGHT, WIDTH)), np.array([2, 0, 1, 1])
    state = {name: array for name, array in in_graph.initial_state().items() if name.startswith("param/")}
    both = set()
    for seed, draws in enumerate(drawn(loss, range(4 if kind == "both" else 2))):
        draws.setdefault("cuts", np.asarray(kind == "cutmix"))
        both.add(bool(draws["cuts"]))
        batch = {"x": images, "targets": np.eye(CLASSES)[labels]}
        augment = mixing(ImageAugmentation(**alphas), DataSpec.by(on_host))
        hosted = augment(batch, on_the_host(draws))
        ours = run({**state, "x": images, "labels": labels, "rng/key": initial_key(seed)})
        theirs = expected({**state, **hosted, "rng/key": initial_key(seed)})
        assert abs(hosted["x"] - images).max() > 0 or draws["cuts"]
        for name in ("loss", *(f"grad:{weight}" for weight in ("first", "bias", "second"))):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-13)
    assert both == ({True, False} if kind == "both" else {kind == "cutmix"})


@pytest.mark.slow
def test_values_are_mixed_as_their_samples():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4, 1, HEIGHT, WIDTH)), rng.normal(size=(4, CLASSES))
    loss = losses.mixed("mse", mixup=1.0)
    programs = [burnish.compile(classifier(), loss=one, optimizer="sgd") for one in (loss, "mse")]
    run, expected = (engines.get("reference").load(program.grad) for program in programs)
    share = np.float64(drawn(loss, range(1))[0]["share"])
    state = {**programs[0].initial_state(), "rng/key": initial_key(0)}
    state = {name: state[name] for name in ("param/first", "param/bias", "param/second", "rng/key")}
    ours = run({**state, "x": x, "targets": y})
    mixture = {name: share * one + (1 - share) * np.roll(one, 1, axis=0) for name, one in (("x", x), ("targets", y))}
    theirs = expected({**state, **mixture})
    np.testing.assert_allclose(ours["grad:first"], theirs["grad:first"], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 3.0])
def test_shares_are_of_a_beta_distribution(alpha):
    key = ir.Value(name="key", type=ir.TensorType(ir.DataType.UINT32), shape=ir.Shape([2]))
    graph = ir.Graph([key], [], nodes=[], opset_imports={"": 18}, name="beta")
    builder = Builder(graph)
    share = symmetric_beta(builder, builder.tensor(key), 5, builder.scalar(alpha, ir.DataType.FLOAT))
    share.value.name = "share"
    graph.outputs.append(share.value)
    run = engines.get("onnxruntime").load(ir.Model(graph, ir_version=10))
    shares = np.array([run({"key": initial_key(seed)})["share"] for seed in range(400)], np.float64)
    assert np.isfinite(shares).all()
    # The distance that a right sample exceeds once in a thousand.
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).statistic < 1.95 / np.sqrt(len(shares))


@pytest.mark.slow
def test_nothing_is_mixed_outside_training():
    model = classifier(TensorProto.FLOAT)
    mixed = burnish.compile(model, loss="mixed:loss=cross_entropy,cutmix=1", optimizer="sgd:lr=0.1")
    plain = burnish.compile(model, loss="cross_entropy", optimizer="sgd:lr=0.1")
    assert [ir.to_proto(mixed.predict), ir.to_proto(mixed.evaluate)] == [ir.to_proto(plain.predict), ir.to_proto(plain.evaluate)]
    assert "accuracy" in mixed.options["metrics"]
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(6, 1, HEIGHT, WIDTH)).astype(np.float32), "labels": rng.integers(0, CLASSES, 6)}
    with burnish.Session(mixed) as session:
        shares = {session.step(batch, lr=0.0)["loss"] for _ in range(3)}
        assert len(shares) == 3  # each step draws anew
    assert burnish.losses.get(mixed.options["loss"]) == losses.mixed("cross_entropy", cutmix=1.0)


@pytest.mark.slow
def test_all_workers_draw_the_same():
    """The share and the box hang on no samples: each worker draws what one process would."""
    program = burnish.compile(classifier(TensorProto.FLOAT), loss="mixed:loss=cross_entropy,mixup=0.2,cutmix=1", optimizer="sgd")
    noted = [places for node in program.semantic["grad"].graph if (places := Places.read(node)) is not None]
    assert noted
    assert all(places.samples is None and not places.problem for places in noted)


@pytest.mark.slow
def test_a_tuned_file_says_the_loss_that_it_is_measured_by(tmp_path):
    program = burnish.compile(classifier(TensorProto.FLOAT), loss="mixed:loss=cross_entropy,mixup=0.2", optimizer="sgd")
    with burnish.Session(program) as session:
        session.export(tmp_path / "tuned.onnx")
    entries = {entry.key: entry.value for entry in onnx.load(tmp_path / "tuned.onnx").metadata_props}
    assert json.loads(entries["burnish.objective"])["loss"]["name"] == "cross_entropy"


@pytest.mark.slow
def test_pixels_of_eight_bits_are_rounded():
    loss, builder = losses.mixed(mixup=1.0), Builder(ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="pixels"))
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(["N", 2]))
    key = ir.Value(name="key", type=ir.TensorType(ir.DataType.UINT32), shape=ir.Shape([2]))
    builder.graph.inputs.extend([x, key])
    mixture, share = loss.mixed_inputs(builder.tensor(x), loss.draws(builder, builder.tensor(key)))
    for name, tensor in (("mixture", mixture), ("share", share)):
        tensor.value.name = name
        builder.graph.outputs.append(tensor.value)
    given = np.array([[0, 255], [100, 3]], np.uint8)
    found = engines.get("onnxruntime").load(ir.Model(builder.graph, ir_version=10))({"x": given, "key": initial_key(3)})
    exact = found["share"] * given + (1 - found["share"]) * np.roll(given, 1, axis=0)
    np.testing.assert_array_equal(found["mixture"], np.rint(exact).astype(np.uint8))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: losses.mixed(), "mixed: give mixup=0.2 or cutmix=1, or both: with neither nothing is mixed"),
        (lambda: losses.mixed(mixup=-1), "mixed: mixup must be alpha, a finite number of at least 0, not -1"),
        (lambda: losses.mixed(mixup=1, layout="CHW"), "mixed: layout must be 'NCHW' or 'NHWC', not 'CHW'"),
        (lambda: losses.mixed("triplet", mixup=1), "mixed: samples are mixed under a loss of one output and its labels"),
    ],
)
def test_a_loss_that_cannot_mix_is_refused(loss, message):
    with pytest.raises(ConfigurationError, match=message):
        loss()


@pytest.mark.parametrize(
    ("shape", "loss", "options", "message"),
    [
        (
            (4,),
            "mixed:loss=cross_entropy,cutmix=1",
            {},
            "CutMix cuts boxes out of images, and the input 'x' is none of four axes",
        ),
        ((2, 6, 6), "mixed:loss=cross_entropy,cutmix=1", {}, "has one, three or four channels: say layout='NCHW' or 'NHWC'"),
        (
            (4,),
            "mixed:loss=cross_entropy,mixup=1",
            {"cached_features": "hidden", "trainable": ["second"]},
            "features of a frozen backbone are computed once for each sample: compile without cached_features",
        ),
    ],
)
def test_a_model_whose_samples_cannot_be_mixed_is_refused(shape, loss, options, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(classifier(TensorProto.FLOAT, shape), loss=loss, optimizer="sgd", **options)


@pytest.mark.parametrize(
    "loss",
    [
        losses.resized(losses.mixed(mixup=1)),
        losses.WeightedSum((losses.Summand(1.0, losses.mixed(mixup=1)),)),
        losses.distill(loss=losses.mixed(mixup=1)),
    ],
    ids=lambda loss: loss.name,
)
def test_mixing_inside_of_another_loss_is_refused(loss):
    """It would be left out: what mixes the samples is the loss as a whole."""
    with pytest.raises(ConfigurationError, match=f"mixed: {loss.name} holds it, and samples are mixed under the loss as a whole"):
        burnish.compile(classifier(TensorProto.FLOAT), loss=loss, optimizer="sgd")


@pytest.mark.parametrize(
    ("loss", "what"), [("hinge", "signs"), ("hinge_embedding", "signs"), (losses.kl_divergence(log_target=True), "logarithms")]
)
def test_what_lies_between_signs_or_logarithms_is_no_mixture(loss, what):
    with pytest.raises(ConfigurationError, match=f"mixed: .* compares with {what}, and what is between two of them is another"):
        burnish.compile(classifier(TensorProto.FLOAT), loss=losses.mixed(loss, mixup=1), optimizer="sgd", metrics=())
