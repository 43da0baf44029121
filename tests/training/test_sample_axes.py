"""Data have their samples along axis 0, whatever axis the model has them along: training equals a loop of PyTorch, and
`evaluate` and `predict` give each sample what it gets by itself."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.data import ArrayDataset, Batches, DataSpec, Loader, open_dataset
from burnish.data.loader import part_of
from burnish.errors import ConfigurationError, DataError, ObjectiveWarning
from burnish.training.trained_model import open_model
from oracles.combinations import diagonal

STEPS, FEATURES, HIDDEN, CLASSES = 6, 5, 8, 3
SAMPLES, BATCH, EPOCHS, RATE = 23, 5, 2, 0.3
TOLERANCE = 1e-5


class Recurrent(torch.nn.Module):
    """A class for each step, of ``[time, batch, features]``."""

    def __init__(self, layer: type[torch.nn.RNNBase]):
        super().__init__()
        self.layer, self.head = layer(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class LastStep(Recurrent):
    """A class for each sequence."""

    def forward(self, x):
        return super().forward(x)[-1]


class WithState(torch.nn.Module):
    """A class for each sequence, of ``[time, batch, features]`` and states ``[2, batch, hidden]``."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.GRU(FEATURES, HIDDEN, num_layers=2), torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, state):
        return self.head(self.layer(x, state)[0][-1])


class Transformer(torch.nn.Module):
    """A class for each step, of ``[time, batch, features]``, with positions that all samples share."""

    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(FEATURES, HIDDEN)
        self.layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, places):
        return self.head(self.layer(self.into(x) + places))


class Case:
    """A module, its file, data with samples first, and how its loop moves them.

    Args:
        module: what trains.
        axes: of samples, by input and for ``labels``; None for an input without samples.
        dynamo: which of PyTorch's exporters writes the file.
        is_fixed: the file takes one sample at a time.
    """

    def __init__(self, module: torch.nn.Module, axes: dict[str, int | None], dynamo: bool = True, is_fixed: bool = False):
        self.module, self.axes, self.dynamo, self.is_fixed = module, axes, dynamo, is_fixed
        rng = np.random.default_rng(3)
        shapes = {"x": (SAMPLES, STEPS, FEATURES), "state": (SAMPLES, 2, HIDDEN), "places": (STEPS, 1, HIDDEN)}
        self.inputs = [name for name in axes if name != "labels"]
        self.data = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in self.inputs}
        per_step = axes["labels"] == 1
        self.data["labels"] = rng.integers(0, CLASSES, (SAMPLES, STEPS) if per_step else SAMPLES)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Samples in the layout of the model, moved here."""
        return {
            name: array if self.axes[name] is None else np.ascontiguousarray(np.moveaxis(array[samples], 0, self.axes[name]))
            for name, array in self.data.items()
        }

    def file(self) -> bytes:
        batch = self.batch(np.arange(1 if self.is_fixed else 3))
        examples = tuple(torch.from_numpy(batch[name]) for name in self.inputs)
        moved = {name: self.axes[name] for name in self.inputs if self.axes[name] is not None}
        written = io.BytesIO()
        module = copy.deepcopy(self.module).train()
        options = {"input_names": self.inputs, "output_names": ["logits"], "dynamo": self.dynamo}
        if self.dynamo and not self.is_fixed:
            size = torch.export.Dim("batch")
            options["dynamic_shapes"] = tuple({self.axes[name]: size} if name in moved else None for name in self.inputs)
        elif not self.is_fixed:
            options["dynamic_axes"] = {name: {axis: "batch"} for name, axis in moved.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.dynamo:
                torch.onnx.export(module, examples, optimize=False, verbose=False, **options).save(written)
            else:
                modes = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
                torch.onnx.export(module, examples, written, **modes, **options)
        return written.getvalue()

    def program(self, **options) -> burnish.Program:
        options = {"loss": "cross_entropy:class_axis=-1", "optimizer": f"sgd:lr={RATE},momentum=0.0"} | options
        with warnings.catch_warnings():
            warnings.simplefilter("error", ObjectiveWarning)
            return burnish.compile(self.file(), batch="open" if self.is_fixed else None, **options)

    def loop(self, batches: Iterator[np.ndarray], momentum: float = 0.0) -> torch.nn.Module:
        """The module after PyTorch has trained it on these samples."""
        module = copy.deepcopy(self.module)
        optimizer = torch.optim.SGD(module.parameters(), RATE, momentum)
        for samples in batches:
            optimizer.zero_grad()
            self.loss(module, samples).backward()
            optimizer.step()
        return module

    def loss(self, module: torch.nn.Module, samples: np.ndarray) -> torch.Tensor:
        batch = {name: torch.from_numpy(array) for name, array in self.batch(samples).items()}
        logits = module(*(batch[name] for name in self.inputs))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, CLASSES), batch["labels"].reshape(-1))

    def predicted(self, module: torch.nn.Module) -> np.ndarray:
        """What the module says of all samples, these first."""
        batch = self.batch(np.arange(SAMPLES))
        with torch.no_grad():
            logits = module(*(torch.from_numpy(batch[name]) for name in self.inputs)).numpy()
        return np.moveaxis(logits, self.axes["labels"], 0)


def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


CASES: dict[str, Callable[[], Case]] = {
    "LSTM": lambda: Case(Recurrent(torch.nn.LSTM), {"x": 1, "labels": 1}),
    "LSTM of the older exporter": lambda: Case(Recurrent(torch.nn.LSTM), {"x": 1, "labels": 1}, dynamo=False),
    "GRU opened": lambda: Case(Recurrent(torch.nn.GRU), {"x": 1, "labels": 1}, dynamo=False, is_fixed=True),
    "transformer": lambda: Case(Transformer(), {"x": 1, "places": None, "labels": 1}),
    "transformer of the older exporter": lambda: Case(Transformer(), {"x": 1, "places": None, "labels": 1}, dynamo=False),
    "a state": lambda: Case(WithState(), {"x": 1, "state": 1, "labels": 0}),
}


def order(seed: int = 4) -> Iterator[np.ndarray]:
    """The samples of each batch of a run, as its seed has them; the last of an epoch is shorter."""
    loader = Loader(ArrayDataset({"x": np.zeros(SAMPLES)}), BATCH, seed=seed)
    for epoch in range(EPOCHS):
        indices = loader.order(epoch)
        yield from (indices[start : start + BATCH] for start in range(0, SAMPLES, BATCH))


def trained(program: burnish.Program, data, folder: Path, **options) -> burnish.Trainer:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "seed": 4, "progress": False, "threads": 1}
    trainer = burnish.Trainer(program, data, run_directory=folder, **settings | options)
    trainer.run()
    return trainer


def predictions(trainer: burnish.Trainer, of: Case) -> np.ndarray:
    session = trainer.session
    batch = of.batch(np.arange(SAMPLES))
    logits = session.predict({name: batch[name] for name in of.inputs})
    (output,) = trainer.program.signature["predict"].outputs
    assert output.sample_axis == of.axes["labels"]
    return np.moveaxis(logits[output.name], output.sample_axis, 0)


@pytest.mark.slow
@diagonal(("name", CASES), ("engine", ["onnxruntime", "torch"]))
def test_a_run_equals_a_loop_of_pytorch(name, engine, tmp_path):
    of = case(name)
    program = of.program()
    found = {entry.name: entry.sample_axis for entry in program.signature["step"].inputs if entry.name in of.axes}
    assert found == of.axes
    trainer = trained(program, of.data, tmp_path, eval_data=of.data, engine=engine)
    module = of.loop(order())
    assert np.abs(predictions(trainer, of) - of.predicted(module)).max() < TOLERANCE
    loss = of.loss(module, np.arange(SAMPLES)).item()
    assert trainer.rows[-1]["eval_loss"] == pytest.approx(loss, abs=TOLERANCE)


@pytest.mark.slow
def test_time_and_samples_do_not_change_places_where_there_are_as_many(tmp_path):
    of = case("LSTM")
    square = {name: array[:STEPS] for name, array in of.data.items()}
    settings = {"batch_size": STEPS, "epochs": 1}
    trainer = trained(of.program(), square, tmp_path, **settings)
    module = of.loop(iter([trainer.loader.order(0)]))
    assert np.abs(predictions(trainer, of) - of.predicted(module)).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "a state"])
def test_arrays_files_and_batches_as_they_come_train_alike(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = case(name)
    program = of.program()
    np.savez("data.npz", **of.data)
    Path("arrays").mkdir()
    for array in of.data:
        np.save(f"arrays/{array}.npy", of.data[array])
    come = [
        {key: of.data[key] if axis is None else of.data[key][samples] for key, axis in of.axes.items()} for samples in order()
    ]
    batches = Batches(iter(come), steps=len(come) // EPOCHS)
    sources = {"mapping": of.data, "npz": "data.npz", "npy": "arrays", "batches": batches}
    if of.axes.get("places", 0) is not None:
        rows = [{key: array[i] for key, array in of.data.items()} for i in range(SAMPLES)]
        groups = list(order())
        sources["PyTorch"] = torch.utils.data.DataLoader(
            rows, batch_sampler=[list(map(int, group)) for group in groups[: len(groups) // EPOCHS]]
        )
    module = of.loop(order())
    for key, source in sources.items():
        if key == "PyTorch":
            once = of.loop(samples for _, samples in zip(range(len(source)), order(), strict=False))
            trainer = trained(program, source, tmp_path / key, epochs=1)
            assert np.abs(predictions(trainer, of) - of.predicted(once)).max() < TOLERANCE
        else:
            trainer = trained(program, source, tmp_path / key)
            assert np.abs(predictions(trainer, of) - of.predicted(module)).max() < TOLERANCE, key


@pytest.mark.slow
def test_accumulated_batches_equal_one_of_all_their_samples(tmp_path):
    of = case("LSTM")
    optimizer = burnish.optim.accumulate(burnish.optim.sgd(lr=RATE, momentum=0.0), every=5)
    trainer = trained(of.program(optimizer=optimizer), of.data, tmp_path)
    batches = list(order())
    module = of.loop(np.concatenate(batches[start : start + 5]) for start in range(0, len(batches), 5))
    assert np.abs(predictions(trainer, of) - of.predicted(module)).max() < TOLERANCE


@pytest.mark.slow
def test_cached_features_are_kept_by_sample(tmp_path):
    of = case("LSTM")
    file = of.file()
    head = [each.name for each in onnx.load_from_string(file).graph.initializer if "head" in each.name]
    results = []
    for cached in (None, "auto"):
        program = of.program(trainable=head, cached_features=cached)
        trainer = trained(program, of.data, tmp_path / str(cached), eval_data=of.data)
        results.append((trainer.rows[-1]["eval_loss"], predictions(trainer, of)))
        if cached:
            (entry,) = program.signature["features"].outputs
            assert entry.sample_axis == 1
    assert results[0][0] == pytest.approx(results[1][0], abs=TOLERANCE)
    assert np.abs(results[0][1] - results[1][1]).max() < TOLERANCE


@pytest.mark.slow
def test_parts_of_workers_are_cut_along_the_axis_of_the_samples():
    of = case("transformer")
    spec = DataSpec.by(of.program())
    dataset = ArrayDataset(of.data, shared=spec.shared(of.data))
    whole = list(Loader(dataset, BATCH, seed=4, spec=spec).epoch(0))
    parts = [list(Loader(dataset, BATCH, seed=4, rank=rank, workers=2, spec=spec).epoch(0)) for rank in (0, 1)]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert np.array_equal(batch["places"], first["places"])
        assert np.array_equal(batch["places"], second["places"])
        for name in ("x", "labels"):
            assert np.array_equal(np.concatenate([first[name], second[name]], axis=1), batch[name])
        assert first["x"].shape[1] == part_of(batch["x"].shape[1], 0, 2).stop
    (empty,) = Loader(dataset, SAMPLES, rank=SAMPLES, workers=SAMPLES + 1, spec=spec).epoch(0)
    assert empty["x"].shape == (STEPS, 0, FEATURES)
    assert empty["places"].shape == (STEPS, 1, HIDDEN)


@pytest.mark.slow
def test_a_file_is_evaluated_and_predicts_sample_by_sample(tmp_path):
    of = case("transformer")
    (tmp_path / "model.onnx").write_bytes(of.file())
    np.savez(tmp_path / "data.npz", **of.data)
    model = open_model(tmp_path / "model.onnx", loss="cross_entropy:class_axis=-1", metrics=("accuracy",))
    dataset = open_dataset(tmp_path / "data.npz", model.to_evaluate)
    expected = of.predicted(of.module)
    inputs = ArrayDataset({name: of.data[name] for name in of.inputs}, shared=("places",))
    assert np.abs(model.predict(inputs, 4)["logits"] - expected).max() < TOLERANCE
    figures = model.evaluate(dataset, 4)
    assert figures["loss"] == pytest.approx(of.loss(of.module, np.arange(SAMPLES)).item(), abs=TOLERANCE)
    assert figures["accuracy"] == pytest.approx((expected.argmax(-1) == of.data["labels"]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LSTM", "a state"])
def test_finetuning_equals_a_loop_of_pytorch(name, tmp_path):
    of, tuned = case(name), tmp_path / "tuned.onnx"
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "lr": RATE, "schedule": "constant", "head": "keep", "threads": 1}
    made = burnish.finetune(of.file(), of.data, eval_data=of.data, output=tuned, **settings)
    if of.data["labels"].ndim > 1:
        assert "task: a class for each place of 'logits': cross_entropy:class_axis=-1" in made.notes
    epochs = list(order(seed=0))
    best = made.result.best["epoch"]
    module = of.loop(iter(epochs[: len(epochs) // EPOCHS * best]), momentum=0.9)
    inputs = ArrayDataset({key: of.data[key] for key in of.inputs})
    predicted = open_model(tuned, to_evaluate=False).predict(inputs, 4)["logits"]
    assert np.abs(predicted - of.predicted(module)).max() < TOLERANCE


@pytest.mark.slow
def test_a_file_of_fixed_extents_reads_the_last_sample_again(tmp_path):
    of = case("GRU opened")
    of.axes = {"x": 1, "labels": 1}
    (tmp_path / "one.onnx").write_bytes(of.file())
    model = open_model(tmp_path / "one.onnx", to_evaluate=False)
    assert model.fixed_batch("predict") == 1
    predicted = model.predict(ArrayDataset({"x": of.data["x"]}), 4)["logits"]
    assert np.abs(predicted - of.predicted(of.module)).max() < TOLERANCE


def test_the_number_of_steps_is_not_taken_for_that_of_samples(tmp_path):
    of = case("GRU opened")
    program = burnish.compile(of.file(), loss="cross_entropy:class_axis=-1")
    with pytest.raises(ConfigurationError, match=r"takes 1 sample at once: give 1 .*batch='open'"):
        trained(program, of.data, tmp_path / "one")


def test_data_that_do_not_fit_are_named_samples_first(tmp_path):
    of = case("LSTM")
    spec = DataSpec.by(of.program())
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, STEPS, FEATURES + 1), np.float32), labels=np.zeros((4, STEPS), np.int64))
    with pytest.raises(DataError, match=rf"'x' wants samples of shape .*{FEATURES}\]?, and those of the data have shape"):
        open_dataset(tmp_path / "wide.npz", spec)
    with pytest.raises(DataError, match="each sample needs one entry in every array, along its axis 0"):
        ArrayDataset({"x": np.zeros((STEPS, 4, FEATURES)), "labels": np.zeros(4)})


def test_data_that_fit_along_another_axis_name_it(tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (int64[7, 1] tokens) => (float[7, 1, 2] y)
        <float[5, 2] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = Gather(table, tokens) }"""
    )
    remedy = r"along axis 1 of this input, say so: sample_axis=\{'tokens': 1\} \(--sample-axis tokens=1\)"
    np.savez(tmp_path / "rows.npz", tokens=np.zeros((4, 7), np.int64), targets=np.zeros((4, 1, 2), np.float32))
    with pytest.raises(DataError, match=rf"wants samples of shape \[1\], and those of the data have shape \[7\]; .*{remedy}"):
        open_dataset(tmp_path / "rows.npz", DataSpec.by(burnish.compile(model, loss="mse")))


def test_mixup_mixes_samples_and_not_steps():
    """With all samples alike, a mixture of samples is the sample; a mixture of steps is another sequence."""
    of = Case(LastStep(torch.nn.LSTM), {"x": 1, "labels": 0})
    program = burnish.compile(of.file(), loss=burnish.losses.mixed("cross_entropy", mixup=0.5), optimizer="sgd:lr=0")
    same = {"x": np.repeat(of.data["x"][:1], 4, 0).transpose(1, 0, 2).copy(), "labels": np.ones(4, np.int64)}
    with burnish.Session(program) as session:
        assert session.step(same)["loss"] == pytest.approx(session.evaluate(same)["loss"], abs=TOLERANCE)
