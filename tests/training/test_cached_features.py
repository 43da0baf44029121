"""Features of a frozen backbone, computed once: the same training, the same file, and what is refused."""

from __future__ import annotations

import functools
import json
import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from typer.testing import CliRunner

import burnish
from burnish import optim
from burnish.cli.application import app
from burnish.data import ArrayDataset
from burnish.distributed import ArrayCommunicator
from burnish.errors import CheckpointError, ConfigurationError, DataError, EngineError, InputError, ObjectiveWarning
from burnish.files.folder import MANIFEST
from burnish.models import residual_network
from burnish.program import Program, Role
from burnish.training import feature_dataset
from burnish.training.feature_dataset import FeatureDataset
from burnish.training.features import Features
from burnish.training.trainer import Trainer
from oracles.combinations import diagonal
from oracles.several_workers import in_threads, part_of
from oracles.small_networks import Network

HEAD = ("stem*", "stage1*", "stage2*")
STAGE = ("stem*", "stage1*")
SAMPLES = 40


def model() -> ir.Model:
    return residual_network(input_shape=(1, 8, 8), classes=10, width=4, blocks=(1, 1))


def optimizer(frozen: tuple[str, ...]) -> optim.Optimizer:
    return optim.groups(optim.sgd(lr=0.1, momentum=0.9), dict.fromkeys(frozen, "frozen"))


@functools.cache
def program(frozen: tuple[str, ...], cached: bool) -> Program:
    return burnish.compile(model(), optimizer=optimizer(frozen), cached_features="auto" if cached else None)


@functools.cache
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((SAMPLES, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, SAMPLES)}


def part(begin: int, end: int) -> dict[str, np.ndarray]:
    return {name: array[begin:end] for name, array in data().items()}


@pytest.mark.slow
@diagonal(("engine", ["onnxruntime", pytest.param("torch", marks=pytest.mark.slow), "reference"]), ("frozen", [HEAD, STAGE]))
def test_training_is_the_same(engine, frozen):
    """To the bit on the reference; elsewhere up to the last digit, as other kernels meet where the model was one."""
    whole, cached = program(frozen, False), program(frozen, True)
    with burnish.Session(whole, engine, threads=1) as one, burnish.Session(cached, engine, threads=1) as other:
        for step in range(3):
            batch = part(8 * step, 8 * step + 8)
            given = other.features.batch(batch)
            assert set(given) == {*other.features.names, "labels"}
            losses = one.step(batch)["loss"], other.step(given)["loss"]
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        wanted, state = one.state(), other.state()
        assert set(state) < set(wanted)
        for name, array in state.items():
            if engine == "reference":
                np.testing.assert_array_equal(array, wanted[name], err_msg=name)
            else:
                np.testing.assert_allclose(array, wanted[name], rtol=1e-6, atol=3e-7, err_msg=name)
        outputs = one.predict(part(0, 8)), other.predict(part(0, 8))
        for name in outputs[0]:
            np.testing.assert_allclose(outputs[1][name], outputs[0][name], rtol=1e-5, atol=1e-5)


def test_the_step_holds_nothing_of_the_backbone():
    cached = program(HEAD, True)
    assert [node.op_type for node in cached.step.graph if node.op_type == "Conv"] == []
    assert [node.op_type for node in cached.evaluate.graph if node.op_type == "Conv"] == []
    assert sum(node.op_type == "Conv" for node in cached.features.graph) == 6
    (feature,) = cached.options["cached_features"]
    assert [entry.name for entry in cached.signature["step"].inputs_of(Role.DATA)] == [feature]
    assert [entry.name for entry in cached.signature["predict"].inputs_of(Role.DATA)] == ["x"]
    assert [entry.name for entry in cached.signature["features"].outputs] == [feature]
    assert not cached.signature["features"].inputs_of(Role.PARAMETER, Role.STATISTIC)
    assert {entry.name for entry in cached.signature.state if entry.role is Role.PARAMETER} == {
        "param/classifier.weight",
        "param/classifier.bias",
    }
    # Only the layers after the cut are the program's.
    assert all(name.startswith("stage2") for name in program(STAGE, True).options["norm_layers"])


@pytest.mark.slow
def test_a_program_is_saved_with_its_features(tmp_path):
    cached = program(STAGE, True)
    cached.save(tmp_path / "program")
    manifest = json.loads((tmp_path / "program" / MANIFEST).read_text())
    assert (manifest["version"], "features.onnx" in manifest["files"]) == (3, True)
    assert "features" in manifest["identity"]["graphs"]
    loaded = Program.load(tmp_path / "program")
    with burnish.Session(loaded, threads=1) as session, burnish.Session(cached, threads=1) as other:
        for name, array in session.features(part(0, 4)).items():
            np.testing.assert_array_equal(array, other.features(part(0, 4))[name])
    assert loaded.with_optimizer(optim.adam()).features is not None
    with pytest.raises(CheckpointError, match="One ONNX file cannot hold a program with cached features: save it in a folder"):
        cached.save(tmp_path / "program.onnx")


@pytest.mark.slow
def test_a_trainer_computes_them_once_and_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    computed = []
    call = Features.__call__

    def counted(self: Features, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        computed.append(len(batch["labels"]))
        return call(self, batch)

    monkeypatch.setattr(Features, "__call__", counted)
    settings = {"batch_size": 16, "threads": 1, "progress": False}
    whole = Trainer(program(STAGE, True), data(), part(0, 8), epochs=3, run_directory=tmp_path / "whole", **settings)
    whole.run()
    assert sum(computed) == SAMPLES + 8
    Trainer(program(STAGE, True), data(), part(0, 8), epochs=1, run_directory=tmp_path / "part", **settings).run()
    resumed = Trainer(
        program(STAGE, True), data(), part(0, 8), epochs=3, run_directory=tmp_path / "part", resume=True, **settings
    )
    assert resumed.run().metrics == whole.run().metrics
    for name, array in whole.session.state().items():
        np.testing.assert_array_equal(resumed.session.state()[name], array, err_msg=name)
    tuned = ir.load(resumed.session.export(tmp_path / "tuned.onnx", fold_norm=False)).graph.initializers
    source = model().graph.initializers
    frozen = [name for name in source if name.startswith(("stem", "stage1"))]
    assert len(frozen) == 15
    for name in frozen:
        np.testing.assert_array_equal(tuned[name].const_value.numpy(), source[name].const_value.numpy(), err_msg=name)
    assert not np.array_equal(tuned["classifier.weight"].const_value.numpy(), source["classifier.weight"].const_value.numpy())


def test_many_features_lie_in_a_file(tmp_path, monkeypatch):
    with burnish.Session(program(STAGE, True), threads=1) as session:
        in_memory = FeatureDataset(ArrayDataset(data()), "train")
        assert "MB in memory" in in_memory.fill(session.features, 16, tmp_path)
        monkeypatch.setattr(feature_dataset, "IN_MEMORY", 1000)
        mapped = FeatureDataset(ArrayDataset(data()), "train")
        assert f"in '{tmp_path / 'train.features'}'" in mapped.fill(session.features, 16, tmp_path)
        rows = np.array([3, 39, 0])
        for name, array in in_memory.batch(rows).items():
            np.testing.assert_array_equal(mapped.batch(rows)[name], array)
        del mapped
        assert not (tmp_path / "train.features").exists()
        monkeypatch.setattr(feature_dataset, "SPARED", 1 << 60)
        with pytest.raises(ConfigurationError, match=r"those of 40 samples take .* GB, and the disk of .* make room"):
            FeatureDataset(ArrayDataset(data()), "train").fill(session.features, 16, tmp_path)
    with pytest.raises(DataError, match="have not been computed: call fill"):
        FeatureDataset(ArrayDataset(data()), "train").batch(rows)


def residual_with_mask(dropout: bool = False) -> ir.Model:
    """A backbone whose first features are read twice after the cut, and an input that the rest reads by itself."""
    network = Network("two", [6])
    builder = network.builder
    mask = ir.val("mask", ir.DataType.FLOAT, ["batch", 5])
    network.graph.inputs.append(mask)
    hidden = builder.op("Tanh", network.dense("first", network.input, 6, 5))
    if dropout:
        hidden = builder.op("Dropout", hidden, builder.constant(np.float32(0.5)), builder.constant(np.bool_(True)))
    second = builder.op("Add", hidden, builder.op("Tanh", network.dense("second", hidden, 5, 5)))
    masked = builder.op("Mul", second, builder.tensor(mask))
    return network.model(network.dense("head", masked, 5, 3))


def test_an_input_that_the_rest_reads_stays_an_input():
    cached = burnish.compile(residual_with_mask(), trainable=["second*", "head*"], cached_features="auto")
    (feature,) = cached.options["cached_features"]
    assert {entry.name for entry in cached.signature["step"].inputs_of(Role.DATA)} == {feature, "mask"}
    assert [entry.name for entry in cached.signature.samples] == ["x", "mask"]
    whole = burnish.compile(residual_with_mask(), trainable=["second*", "head*"])
    rng = np.random.default_rng(1)
    batch = {"x": rng.standard_normal((6, 6)).astype(np.float32), "mask": np.ones((6, 5), np.float32), "labels": np.arange(6) % 3}
    with burnish.Session(cached, "reference") as session, burnish.Session(whole, "reference") as other:
        assert session.step(session.features.batch(batch)) == other.step(batch)
        with pytest.raises(InputError, match=f"lacks the input '{feature}'"):
            session.step(batch)
    named = burnish.compile(residual_with_mask(), trainable=["head*"], cached_features=[feature])
    assert "param/second.weight" in {entry.name for entry in named.signature.state}


@pytest.mark.slow
def test_what_cannot_be_computed_once_is_refused():
    cases = [
        ({"trainable": ["first*"]}, "nothing that a sample alone decides stands before what trains: freeze"),
        ({"trainable": ["head*"], "cached_features": "nowhere"}, "no value 'nowhere', nor has it a node of this name"),
        ({"trainable": ["head*"], "cached_features": []}, "give the name of a value or node at least"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            burnish.compile(residual_with_mask(), **{"cached_features": "auto", **options})
    (feature,) = burnish.compile(residual_with_mask(), trainable=["head*"], cached_features="auto").options["cached_features"]
    with pytest.raises(
        ConfigurationError, match=r"would not stay as it is: '(first|second).weight' trains, and stands before it"
    ):
        burnish.compile(residual_with_mask(), cached_features=feature)
    with pytest.raises(ConfigurationError, match=r"Dropout.* draws at random, and stands before it"):
        burnish.compile(residual_with_mask(dropout=True), trainable=["head*"], cached_features=feature)
    (feature,) = program(HEAD, True).options["cached_features"]
    with pytest.raises(ConfigurationError, match=r"the batch normalization '.*' takes statistics of the batch \('train'\)"):
        burnish.compile(model(), trainable=["classifier*"], norm="train", cached_features=feature)
    teacher = burnish.losses.distill(model())
    with pytest.raises(ConfigurationError, match="the teacher of the loss reads the inputs of the model, which the steps would"):
        burnish.compile(model(), trainable=["classifier*"], loss=teacher, cached_features="auto")
    with burnish.Session(program(STAGE, False)) as session, pytest.raises(ConfigurationError, match="no features that are comp"):
        session.features(part(0, 4))


def test_other_data_in_each_epoch_are_refused(tmp_path):
    settings = {"run_directory": tmp_path, "progress": False}
    with pytest.raises(ConfigurationError, match=r"augment changes the samples in each epoch.*compile without cached_features"):
        Trainer(program(STAGE, True), data(), augment=lambda batch, generator: batch, **settings)

    class Drawn(ArrayDataset):
        def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
            return np.arange(len(self))

        def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
            return self.batch(indices)

    with pytest.raises(DataError, match="the data are other ones in each epoch, and features are computed once"):
        Trainer(program(STAGE, True), Drawn(data()), **settings)


@pytest.mark.slow
def test_the_command_takes_them(tmp_path):
    ir.save(model(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=data()["x"], y=data()["labels"])
    options = ["--data", tmp_path / "data.npz", "--epochs", 2, "--output", tmp_path / "run", "--trainable", "classifier*"]
    done = CliRunner().invoke(
        app,
        [
            str(each)
            for each in ("train", tmp_path / "net.onnx", *options, "--cached-features", "auto", "--eval-data", options[1])
        ],
    )
    assert done.exit_code == 0, done.output
    assert "features: computed once for 40 samples" in done.output
    evaluated = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), str(tmp_path / "data.npz")])
    assert evaluated.exit_code == 0, evaluated.output
    assert "accuracy" in evaluated.output


@pytest.mark.slow
def test_adapters_before_the_cut_are_frozen_with_their_layers():
    """They are asked for by name, as all adapters are, and are no more there."""
    adapted = burnish.surgery.lora(model(), rank=2, also_trained="classifier*")
    held = optim.groups(optim.sgd(lr=0.1), {"*lora*": "frozen"})
    compiled = burnish.compile(adapted, optimizer=held, cached_features="auto")
    step = compiled.signature["step"]
    assert [name for name in step.updates if name.startswith("param/")] == ["param/classifier.weight", "param/classifier.bias"]


def undecided(end: str) -> onnx.ModelProto:
    """A backbone and a head whose output the graph does not tell to be probabilities or none."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 8] x) => (float[N, 4] logits) <float two = {{2.0}}, int64[1] last = {{1}}> {{
            h = MatMul (x, backbone) t = Tanh (h) raw = MatMul (t, head) {end}
        }}""")
    rng = np.random.default_rng(0)
    for name, shape in (("backbone", (8, 6)), ("head", (6, 4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array((rng.normal(size=shape) * 0.4).astype(np.float32), name))
    return model


ENDS = {
    "softplus": "logits = Softplus (raw)",
    "squares in parts": "p = Pow (raw, two) s = ReduceSum (p, last) logits = Div (p, s)",
}


@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
@pytest.mark.parametrize("end", ENDS)
def test_what_only_the_numbers_tell_is_looked_at_where_features_are_computed(engine, end):
    """The steps see nothing of the model's inputs; on no engine does that stop them."""
    cached = burnish.compile(undecided(ENDS[end]), trainable=["head"], cached_features="auto")
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32), "labels": np.arange(8) % 4}
    with burnish.Session(cached, engine, threads=1) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ObjectiveWarning)
        session.features(batch)
        given = session.features.batch(batch)
        losses = [session.step(given)["loss"] for _ in range(2)]
    whole = burnish.compile(undecided(ENDS[end]), trainable=["head"])
    with burnish.Session(whole, engine, threads=1) as session, warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always", ObjectiveWarning)
        assert losses == pytest.approx([session.step(batch)["loss"] for _ in range(2)], rel=1e-5)
    assert [str(warning.message) for warning in told] == [str(warning.message) for warning in expected]
    assert len(told) == (end == "squares in parts")
    assert all(warning.filename == __file__ for warning in told)


def test_an_input_that_is_not_there_is_named_by_the_engine():
    runner = burnish.Session(program(HEAD, True), "torch", threads=1)._runner
    with pytest.raises(EngineError, match="The graph 'predict' reads 'x', which the batch does not have"):
        runner.predict({})


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def test_a_worker_without_samples_takes_part_with_features_of_none(engine):
    cached, sizes = program(HEAD, True), [[8, 0], [0, 8], [5, 3]]
    batches = [part(8 * step, 8 * step + 8) for step in range(len(sizes))]
    with burnish.Session(cached, engine, threads=1) as session:
        expected = [session.step(session.features.batch(batch))["loss"] for batch in batches], session.state()
        with pytest.raises(InputError, match="'x' is empty along axis 0"):
            session.features(part_of(batches[0], 1, sizes[0]))

    def work(inside):
        def gathered(array):
            return inside.all_gather(torch.from_numpy(array.copy())).numpy()

        arrays = ArrayCommunicator(inside.rank, inside.size, lambda array: gathered(array).sum(0, dtype=array.dtype), gathered)
        parallel = burnish.DataParallel(communicator=inside if engine == "torch" else arrays)
        with burnish.Session(cached, engine, threads=1, parallel=parallel) as session:
            given = [session.features.batch(part_of(*row)) for row in zip(batches, [inside.rank] * 3, sizes, strict=True)]
            shapes = {given[0][name].shape[1:] == given[2][name].shape[1:] for name in cached.options["cached_features"]}
            assert shapes == {True}
            return [session.step(batch)["loss"] for batch in given], session.state()

    for losses, state in in_threads(2, work):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, array in expected[1].items():
            np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
