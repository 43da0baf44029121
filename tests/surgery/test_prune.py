"""Weights that are pruned: zero, and zero after any step, whatever the optimizer keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import burnish
from burnish import surgery
from burnish.errors import ConfigurationError, UnprunedLayersWarning
from oracles import layers_in_bodies

MODEL = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 4, 3, 3] x) => (float[N, 5] y) <float[8, 4, 3, 3] filter, float[8] offset, float[5, 8] weight, float[5] bias> {
    h = Conv (x, filter, offset)
    r = Relu (h)
    f = Flatten (r)
    y = Gemm <transB = 1> (f, weight, bias)
}"""
SHAPES = {"filter": (8, 4, 3, 3), "offset": (8,), "weight": (5, 8), "bias": (5,)}
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(16, 4, 3, 3)).astype(np.float32)
BATCH = {"x": X, "targets": GENERATOR.normal(size=(16, 5)).astype(np.float32)}


def model() -> onnx.ModelProto:
    proto, generator = onnx.parser.parse_model(MODEL), np.random.default_rng(1)
    for name, shape in SHAPES.items():
        array = generator.normal(size=shape) * (2 if name == "weight" else 1)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def session(source: Any, optimizer: burnish.optim.Optimizer | None = None, engine: str = "onnxruntime") -> burnish.Session:
    optimizer = optimizer or burnish.optim.sgd(lr=0.02, momentum=0.9)
    return burnish.Session(burnish.compile(source, loss="mse", optimizer=optimizer), engine=engine)


def exported(trained: burnish.Session, path: Path) -> dict[str, np.ndarray]:
    """The initializers of an export, which computes what the session does."""
    trained.export(path)
    proto = onnx.load(path)
    assert "Mul" not in {node.op_type for node in proto.graph.node}
    (y,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    np.testing.assert_allclose(y, trained.predict({"x": X})["y"], rtol=1e-5, atol=1e-5)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_masked_weights_and_what_the_optimizer_keeps_for_them_stay_zero(engine: str, tmp_path: Path) -> None:
    original = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model().graph.initializer}
    optimizer = burnish.optim.adamw(lr=0.01, weight_decay=0.1)
    trained = session(surgery.prune(model(), 0.75), optimizer, engine)
    for _ in range(5):
        trained.step(BATCH)
    state = trained.state()
    final = exported(trained, tmp_path / "pruned.onnx")
    assert sorted(final) == sorted(SHAPES)
    for name in ("filter", "weight"):
        smallest = np.abs(original[name]) < np.quantile(np.abs(original[name]), 0.75)
        assert smallest.mean() == 0.75
        entries = [key for key in state if key.endswith(f"/{name}")]
        assert len(entries) == 3  # the weight and two moments
        for array in (*(state[key] for key in entries), final[name]):
            assert not array[smallest].any()
        assert final[name][~smallest].all()


def test_the_smallest_of_all_weights_go_where_the_part_is_of_all() -> None:
    pruned = surgery.prune(model(), 0.5, scope="global")
    arrays = {name: pruned.graph.initializers[name].const_value.numpy() for name in ("filter", "weight")}
    original = [onnx.numpy_helper.to_array(tensor) for tensor in model().graph.initializer if tensor.name in arrays]
    together = np.concatenate([np.abs(array).ravel() for array in original])
    kept = np.concatenate([array.ravel() for array in arrays.values()]) != 0
    assert kept.mean() == 0.5
    assert together[kept].min() > together[~kept].max()
    assert arrays["weight"].astype(bool).mean() != 0.5


def test_two_of_four_that_follow_one_another_are_kept_along_the_inputs(tmp_path: Path) -> None:
    trained = session(surgery.prune(model(), "2:4"))
    trained.step(BATCH)
    final = exported(trained, tmp_path / "pruned.onnx")
    np.testing.assert_array_equal(np.count_nonzero(final["filter"], axis=1), 2)
    np.testing.assert_array_equal(np.count_nonzero(final["weight"].reshape(5, 2, 4), axis=2), 2)


def test_layers_without_whole_groups_stay_whole_and_are_named(tmp_path: Path) -> None:
    """As the first convolution of most networks."""
    with pytest.warns(UnprunedLayersWarning, match="1 of 2 layers keep all .* whole number of groups of 8: 'Conv'. Name") as said:
        pruned = surgery.prune(model(), "2:8")
    assert said[0].filename == __file__
    final = exported(session(pruned), tmp_path / "pruned.onnx")
    assert np.count_nonzero(final["filter"]) == final["filter"].size
    np.testing.assert_array_equal(np.count_nonzero(final["weight"], axis=1), 2)
    with pytest.raises(ConfigurationError, match="4 inputs, which are no whole number of groups of 8"):
        surgery.prune(model(), "2:8", ["*"])


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_the_part_grows_by_a_cubic_and_what_is_masked_stays_so(scope: str, tmp_path: Path) -> None:
    trained = session(surgery.prune(model(), 0.8, scope=scope, begin=1, end=7, every=2))
    names, before = ("filter", "weight"), None
    for step in range(9):
        weights = {name: trained.state()[f"param/{name}"] for name in names}
        old = {name: trained.state()[f"stat/{name}_mask"] for name in names}
        trained.step(BATCH)
        masks = {name: trained.state()[f"stat/{name}_mask"] for name in names}
        done = min(max(step - (step - 1) % 2, 1), 7) if step else 0
        expected = 0.8 * (1 - (1 - (done - 1) / 6) ** 3) if step else 0.0
        if scope == "global":
            assert 1 - np.concatenate([mask.ravel() for mask in masks.values()]).mean() == pytest.approx(expected, abs=2 / 328)
        else:
            for mask in masks.values():
                assert 1 - mask.mean() == pytest.approx(expected, abs=1 / mask.size)
        if before is not None:
            assert all((masks[name] <= before[name]).all() for name in names)
        for name in names if scope == "tensor" else ():
            sizes = np.abs(weights[name] * old[name])
            assert sizes[masks[name] == 1].min() >= sizes[masks[name] == 0].max(initial=0)
        before = masks
    final = exported(trained, tmp_path / "pruned.onnx")
    for name in names:
        assert not final[name][before[name] == 0].any()


@pytest.mark.slow
def test_a_quantized_model_is_pruned_and_keeps_its_zeros_as_integers(tmp_path: Path) -> None:
    quantized = surgery.quantize(model(), calibration=[{"x": X}])
    trained = session(surgery.prune(quantized, 0.5))
    for _ in range(2):
        trained.step(BATCH)
    trained.export(tmp_path / "both.onnx")
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "both.onnx").graph.initializer}
    assert tensors["filter_quantized"].dtype == np.int8
    assert 0.5 <= np.mean(tensors["filter_quantized"] == 0) < 0.6
    (y,) = onnxruntime.InferenceSession(tmp_path / "both.onnx").run(None, {"x": X})
    assert np.abs(y - trained.predict({"x": X})["y"]).max() <= 1.01 * tensors["y_scale"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"prune: sparsity=1.0: give a number above 0 and below 1, or a pattern such as '2:4'"),
        ({"sparsity": "4:2"}, r"prune: sparsity='4:2': give a number"),
        ({"sparsity": "2:3"}, r"prune: .*Conv.* has 4 inputs, which are no whole number of groups of 3: leave the layer out"),
        ({"sparsity": 0.5, "every": 3}, r"prune: every=3 is for masks that change: leave it out, or say with end="),
        ({"sparsity": "2:4", "end": 5}, r"prune: '2:4' masks every group from the start: leave begin, end and scope out"),
        ({"scope": "layer"}, r"prune: scope='layer': give 'tensor' or 'global'"),
        ({"begin": 5, "end": 3}, r"prune: begin=5, end=3, every=1: give whole numbers of steps, end after begin or both 0"),
        ({"begin": 3, "end": 3}, r"prune: begin=3, end=3, every=1: give whole numbers of steps, end after begin or both 0"),
        ({"layers": ["nothing"]}, r"layers: 'nothing' matches no Conv, Gemm or MatMul layer"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        surgery.prune(model(), **({"sparsity": 0.5} | options))


def test_a_model_is_pruned_once_and_after_it_was_quantized() -> None:
    pruned = surgery.prune(model(), 0.5)
    with pytest.raises(ConfigurationError, match=r"prune: .*Mul.* masks weights already: give the model before it was pruned"):
        surgery.prune(pruned, 0.5)
    with pytest.raises(
        ConfigurationError, match=r"quantize: .*Mul.* masks weights: quantize the model first, and prune the result"
    ):
        surgery.quantize(pruned, activations=None)
    plain = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {y = Relu (x)}')
    with pytest.raises(ConfigurationError, match=r"prune: the model has no Conv, ConvTranspose, Gemm or MatMul"):
        surgery.prune(plain, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["branches", "scanned"])
@pytest.mark.parametrize("begin", [0, 1])
def test_layers_in_bodies_are_pruned_too(kind: str, begin: int, tmp_path: Path) -> None:
    pruned = surgery.prune(layers_in_bodies.model(kind), 0.5, begin=begin, end=3 * begin)
    trained = burnish.Session(burnish.compile(pruned, optimizer="adam:lr=0.01"), engine="onnxruntime")
    batch = layers_in_bodies.batch(kind)
    for _ in range(5):
        trained.step(batch)
    trained.export(tmp_path / "pruned.onnx")
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "pruned.onnx").graph.initializer}
    for name in (*layers_in_bodies.INSIDE[kind], *layers_in_bodies.OUTSIDE[kind]):
        assert np.mean(arrays[name] == 0) == 0.5, name
    feeds = {name: array for name, array in batch.items() if name != "labels"}
    (y,) = onnxruntime.InferenceSession(tmp_path / "pruned.onnx").run(None, feeds)
    np.testing.assert_allclose(y, trained.predict(feeds)["logits"], rtol=1e-5, atol=1e-5)
    by_name = surgery.prune(layers_in_bodies.model(kind), 0.5, [layers_in_bodies.INSIDE[kind][0].removesuffix("_weight")])
    assert [name for name in by_name.graph.initializers if name.endswith("_mask")] == [f"{layers_in_bodies.INSIDE[kind][0]}_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_file_of_another_dtype_is_pruned(dtype: type, tmp_path: Path) -> None:
    def of(dtype: type) -> onnx.ModelProto:
        name = {np.float16: "float16", np.float32: "float", np.float64: "double"}[dtype]
        proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
            g ({name}[N, 36] x) => ({name}[N, 5] y) {{ h = MatMul (x, first) t = Tanh (h) y = MatMul (t, second) }}""")
        generator = np.random.default_rng(1)
        for initializer, shape in {"first": (36, 8), "second": (8, 5)}.items():
            array = (generator.normal(size=shape) * 0.2).astype(np.float16)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), initializer))
        return proto

    batch = {"x": X.reshape(16, -1).astype(dtype), "targets": BATCH["targets"].astype(dtype)}
    trained, expected = session(surgery.prune(of(dtype), 0.75)), session(surgery.prune(of(np.float32), 0.75), engine="reference")
    for _ in range(3):
        trained.step(batch)
        expected.step(BATCH | {"x": batch["x"]})
    for name, array in expected.state().items():
        np.testing.assert_allclose(trained.state()[name], array, atol=2e-3 if dtype is np.float16 else 1e-6, err_msg=name)
    trained.export(tmp_path / "pruned.onnx")
    for tensor in onnx.load(tmp_path / "pruned.onnx").graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        assert array.dtype == dtype
        assert np.mean(array == 0) == pytest.approx(0.75), tensor.name
