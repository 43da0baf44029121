"""``compile(hold_rows=...)``: rows of a weight that training leaves as they are, bit for bit, and that count for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import ConfigurationError
from burnish.files.model_file import model_bytes
from burnish.program import Program
from oracles.combinations import diagonal, named, spread
from oracles.several_workers import in_threads, part_of, train_in_threads

ROWS, WIDTH, CLASSES, SAMPLES, LENGTH = 7, 3, 4, 6, 5
PADDING, UNREAD = 0, 5
"""A row that every batch looks up, and one that none does: it holds what is no number."""
HELD = {"table": [PADDING, UNREAD]}
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    table[PADDING] = [-0.0, 1e-40, 2.5]
    table[UNREAD] = np.array([0x7FC12345, 0xFF800000, 0x80000000], np.uint32).view(np.float32)  # NaN, minus infinity, -0.0
    return {
        "table": table,
        "head": rng.standard_normal((WIDTH, CLASSES)).astype(np.float32),
        "bias": rng.standard_normal(CLASSES).astype(np.float32),
    }


def classifier(joined: bool = True, held: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """The mean of embeddings, classified. Not ``joined``, the rows that are held are an input of the graph, put in again."""
    values = dict(held or weights())
    nodes = []
    inputs = [helper.make_tensor_value_info("x", INT64, ["batch", LENGTH])]
    table = "table"
    if not joined:
        free = [row for row in range(ROWS) if row not in HELD["table"]]
        values["order"] = np.argsort([*free, *HELD["table"]])
        values["fixed"], values["table"] = values["table"][HELD["table"]], values["table"][free]
        nodes = [
            helper.make_node("Concat", ["table", "fixed"], ["unordered"], axis=0),
            helper.make_node("Gather", ["unordered", "order"], ["whole"], axis=0),
        ]
        table = "whole"
    nodes += [
        helper.make_node("Gather", [table, "x"], ["embedded"], axis=0),
        helper.make_node("ReduceMean", ["embedded", "axis"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "head"], ["scores"]),
        helper.make_node("Add", ["scores", "bias"], ["logits"]),
    ]
    values["axis"] = np.array([1])
    initializers = [numpy_helper.from_array(array, name) for name, array in values.items()]
    output = helper.make_tensor_value_info("logits", FLOAT, ["batch", CLASSES])
    graph = helper.make_graph(nodes, "classifier", inputs, [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batches(count: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    indices = rng.choice([row for row in range(ROWS) if row != UNREAD], (count, SAMPLES, LENGTH))
    indices[:, :, 0] = PADDING
    return [{"x": x, "labels": rng.integers(0, CLASSES, SAMPLES)} for x in indices]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_held(state: dict[str, np.ndarray], source: np.ndarray | None = None) -> None:
    """The rows have their bits, in the parameter and in an average of it; others that batches read do not."""
    table = weights()["table"] if source is None else source
    for name in {"param/table", "opt/average/table"} & state.keys():
        assert bits(state[name][HELD["table"]]) == bits(table[HELD["table"]]), name
    moved = [row for row in range(ROWS) if row not in HELD["table"]]
    assert (state["param/table"][moved] != table[moved]).any(1).all()


def compiled(optimizer: str | optim.Optimizer = "sgd", **options: object) -> Program:
    return burnish.compile(classifier(), optimizer=optimizer, **{"hold_rows": HELD, **options})


def trained(program: Program, count: int = 4, engine: str = "onnxruntime", **options: object) -> dict[str, np.ndarray]:
    with burnish.Session(program, engine=engine, threads=1, **options) as session:
        for batch in batches(count):
            session.step(batch)
        return session.state()


DECAYED = {
    name: make(**({"weight_decay": 0.1} if "weight_decay" in make().options() else {})) for name, make in optim.OPTIMIZERS.items()
}
WRAPPED = {
    "momentum": optim.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "clipped together": optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(lr=0.5, momentum=0.9)),
    "clipped apart": optim.chain(optim.clip_by_norm(0.01), optim.adam(lr=0.1)),
    "decayed, then clipped": optim.chain(optim.add_decayed_weights(1.0), optim.clip_by_global_norm(0.1), optim.sgd(lr=0.5)),
    "groups": optim.groups(optim.sgd(lr=0.5, momentum=0.5), {"table": optim.lamb(lr=0.1), "bias": {"lr_scale": 0.5}}),
    "accumulated": optim.accumulate(optim.adamw(lr=0.1), 2),
    "exponential average": optim.ema(optim.adamw(lr=0.1), 0.5, bias_correction=True),
    "equal average": optim.swa(optim.sgd(lr=0.5, weight_decay=0.1), start=2),
    "accumulated average": optim.accumulate(optim.ema(optim.lamb(lr=0.1), 0.5), 2),
    "average of an accumulation": optim.ema(optim.accumulate(optim.sgd(lr=0.5, weight_decay=0.1), 2), 0.5),
    "clipped accumulation": optim.chain(optim.clip_by_global_norm(0.01), optim.accumulate(optim.sgd(lr=0.5), 2)),
    "schedule": optim.adam(lr=optim.schedules.cosine(0.1, 10)),
}
EVERY = DECAYED | WRAPPED
every_optimizer = spread("optimizer", EVERY.values(), test=6, ids=EVERY)


@every_optimizer
def test_the_rows_keep_their_bits_under_every_optimizer(optimizer):
    assert_held(trained(compiled(optimizer)))


@diagonal(("name", ["adamw", "accumulated average", "decayed, then clipped"]), ("engine", ["torch", "reference"]))
def test_the_rows_keep_their_bits_on_every_engine(engine, name):
    assert_held(trained(compiled(EVERY[name]), engine=engine))


# Adafactor and Muon scale by the number of rows there are.
COMPARED = [name for name in EVERY if name not in ("adafactor", "muon")]


@spread("name", COMPARED, test=6)
def test_the_rest_trains_as_if_the_rows_were_constants(name):
    """Neither decay nor a norm of gradients, weights or updates sees the rows."""
    finite = weights()
    finite["table"][UNREAD] = 3.0
    apart = burnish.compile(classifier(joined=False, held=finite), optimizer=EVERY[name], trainable=["table", "head", "bias"])
    together = burnish.compile(classifier(held=finite), optimizer=EVERY[name], hold_rows=HELD)
    expected, state = trained(apart, 6), trained(together, 6)
    free = [row for row in range(ROWS) if row not in HELD["table"]]
    for entry in ("param/table", "param/head", "param/bias", "opt/average/table", "opt/average/head"):
        if entry in state:
            ours = state[entry][free] if entry.endswith("table") else state[entry]
            np.testing.assert_allclose(ours, expected[entry], rtol=2e-5, atol=2e-6, err_msg=entry)


def test_without_it_the_rows_train():
    state = trained(burnish.compile(classifier(), optimizer="sgd"))
    assert bits(state["param/table"][PADDING]) != bits(weights()["table"][PADDING])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.sgd(lr=0.5, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
        (optim.adam(lr=0.125), lambda p: torch.optim.Adam(p, lr=0.125)),
    ],
    ids=["sgd", "adam"],
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_is_what_padding_idx_is_in_pytorch(ours, theirs, clip):
    values = weights()
    values["table"][UNREAD] = 0.5
    embedding = torch.nn.Embedding(ROWS, WIDTH, padding_idx=PADDING)
    head = torch.nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(values["table"]))
        head.weight.copy_(torch.from_numpy(values["head"].T))
        head.bias.copy_(torch.from_numpy(values["bias"]))
    parameters = [embedding.weight, *head.parameters()]
    optimizer = theirs(parameters)
    for batch in batches(5):
        optimizer.zero_grad()
        logits = head(embedding(torch.from_numpy(batch["x"])).mean(1))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["labels"])).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    chained = ours if clip is None else optim.chain(optim.clip_by_global_norm(clip), ours)
    program = burnish.compile(classifier(held=values), optimizer=chained, hold_rows={"table": [PADDING]})
    state = trained(program, 5)
    np.testing.assert_allclose(state["param/table"], embedding.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state["param/head"], head.weight.detach().numpy().T, rtol=1e-5, atol=1e-6)


def run(program: Program, graph: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    run_once = OnnxRuntimeEngine().load(program.graphs[graph])
    return run_once({entry.name: values[entry.name] for entry in program.signature[graph].inputs})


def test_the_gradient_is_zero_in_these_rows():
    program = compiled()
    found = run(program, "grad", {**program.initial_state(), **batches(1)[0]})
    assert bits(found["grad:table"][HELD["table"]]) == bytes(2 * WIDTH * 4)
    assert found["grad:table"].any()


@pytest.mark.parametrize("optimizer", [optim.adamw(), optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(weight_decay=0.1))])
def test_apply_holds_the_rows_whatever_gradient_it_is_given(optimizer):
    program = compiled(optimizer)
    state = program.initial_state()
    rates = {"lr": np.asarray(0.1, np.float32)}
    gradients = {name: np.ones_like(state[f"param/{name}"]) for name in ("table", "head", "bias")}
    clean = run(program, "apply", {**state, **rates, **{f"grad:{name}": array for name, array in gradients.items()}})
    gradients["table"][HELD["table"]] = [[np.nan] * WIDTH, [1e30] * WIDTH]
    soiled = run(program, "apply", {**state, **rates, **{f"grad:{name}": array for name, array in gradients.items()}})
    for name, array in clean.items():
        assert bits(soiled[name]) == bits(array), name
    assert_held({"param/table": clean["next:param/table"]})


def test_the_source_says_what_is_computed_for_it():
    sources = {node.metadata_props.get("burnish.source") for node in compiled().apply.graph if node.op_type == "ScatterND"}
    assert sources == {"the optimizer"}


@diagonal(("name", ["adamw", "accumulated average"]), ("precision", ["float16", "bfloat16"]))
def test_mixed_precision(precision, name):
    state = trained(compiled(EVERY[name], precision=precision), 6, engine="torch")
    assert_held(state)


def test_an_overflow_in_a_row_that_is_held_skips_no_step():
    program = compiled(optim.sgd(lr=0.1), precision="float16")
    state = program.initial_state()
    gradients = {f"grad:{name}": np.ones_like(state[f"param/{name}"]) for name in ("table", "head", "bias")}
    gradients["grad:table"][PADDING] = np.inf
    applied = run(program, "apply", {**state, **gradients, "lr": np.asarray(0.1, np.float32)})
    assert applied["next:opt/skipped_steps"] == 0
    assert_held({"param/table": applied["next:param/table"]})


SIZES = [[2, 4], [6, 0], [3, 3], [1, 5]]


@diagonal(
    ("name", ["adamw", "decayed, then clipped", "accumulated", "accumulated average"]),
    ("options", named([{}, {"shard_optimizer": True}, {"compression": "float16"}], str)),
    test=2,
)
def test_several_workers(name, options):
    program = compiled(EVERY[name])
    for _, states in train_in_threads(program, batches(4), SIZES, **options):
        assert_held(states[-1])


@spread("name", ["decayed, then clipped", "accumulated", "accumulated average"], test=2)
def test_several_workers_come_to_what_one_comes_to(name):
    program = compiled(EVERY[name])
    alone = trained(program, 4, engine="torch")
    for _, states in train_in_threads(program, batches(4), SIZES, shard_optimizer=True):
        for entry, array in alone.items():
            np.testing.assert_allclose(states[-1][entry], array, rtol=1e-5, atol=1e-6, err_msg=entry)


class Counting:
    """A communicator that counts what it exchanges."""

    def __init__(self, communicator):
        self._communicator = communicator
        self.count = 0

    def __getattr__(self, name: str) -> object:
        found = getattr(self._communicator, name)
        self.count += name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
        return found


@spread("name", ["accumulated", "accumulated average"], test=1)
def test_sharing_workers_exchange_no_more_for_it(name):
    """Where gradients only accumulate, nobody is given what stays as it is."""

    def counted(program: Program) -> list[int]:
        def work(communicator):
            counting, found = Counting(communicator), []
            parallel = burnish.DataParallel(communicator=counting, shard_optimizer=True)
            with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
                for batch, sizes in zip(batches(4), SIZES, strict=True):
                    counting.count = 0
                    session.step(part_of(batch, communicator.rank, sizes))
                    found.append(counting.count)
            return found

        return in_threads(2, work)[0]

    found = counted(compiled(EVERY[name]))
    assert found == counted(burnish.compile(classifier(), optimizer=EVERY[name]))
    assert found[0] < found[1]


@pytest.mark.parametrize(
    "optimizer",
    [optim.sgd(lr=0.5, momentum=0.9, weight_decay=0.1), optim.ema(optim.adamw(lr=0.1), 0.5), optim.diloco(optim.adamw(lr=0.1))],
    ids=lambda optimizer: optimizer.name,
)
@pytest.mark.filterwarnings("ignore:invalid value")  # infinity minus infinity, in the row that holds it
def test_workers_that_step_alone(optimizer):
    program = compiled(optimizer)
    start = program.initial_state()
    for name in start:
        if name.startswith("opt/outer_momentum/"):
            start[name] = np.ones_like(start[name])

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, synchronize_every=2)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel, state=start) as session:
            for batch, sizes in zip(batches(4), SIZES, strict=True):
                session.step(part_of(batch, communicator.rank, sizes))
            return session.state()

    for state in in_threads(2, work):
        assert_held(state)


def test_another_optimizer_holds_them_too():
    program = compiled("sgd").with_optimizer(optim.ema(optim.adamw(lr=0.1), 0.5))
    assert program.options["hold_rows"] == HELD
    assert_held(trained(program))


def test_a_state_of_a_program_that_does_not_hold_them():
    """Moments of the rows are taken over with the rest, and move nothing."""
    free = burnish.compile(classifier(), optimizer=optim.ema(optim.adamw(lr=0.1)))
    program = compiled(optim.ema(optim.adamw(lr=0.1)))
    state = program.carry_state(trained(free)).state
    held = trained(program, state=state)
    for name in ("param/table", "opt/average/table"):
        assert bits(held[name][HELD["table"]]) == bits(state[name][HELD["table"]])


@pytest.mark.parametrize("target", ["program", "program.onnx"])
def test_a_saved_program_holds_them(target, tmp_path: Path):
    program = compiled(optim.ema(optim.adamw(lr=0.1)))
    program.save(tmp_path / target)
    loaded = Program.load(tmp_path / target)
    assert loaded.options["hold_rows"] == HELD
    assert_held(trained(loaded))
    assert_held(trained(loaded.with_optimizer("adagrad")))
    assert_held(trained(loaded, engine="torch"))


def test_a_model_that_is_exported_has_the_rows(tmp_path: Path):
    with burnish.Session(compiled(optim.ema(optim.adamw(lr=0.1)))) as session:
        for batch in batches(3):
            session.step(batch)
        for parameters in (None, "average"):
            session.export(tmp_path / "tuned.onnx", parameters=parameters)
            proto = onnx.load(tmp_path / "tuned.onnx")
            table = next(numpy_helper.to_array(tensor) for tensor in proto.graph.initializer if tensor.name == "table")
            assert bits(table[HELD["table"]]) == bits(weights()["table"][HELD["table"]])


def test_training_from_scratch_keeps_the_rows_of_the_file():
    program = compiled(optim.ema(optim.adamw(lr=0.1)))
    state = program.initial_state(seed=3, reinitialize="kaiming")
    assert_held(state)
    assert_held(trained(program, state=state))


def test_the_program_records_rows_in_order_and_once():
    program = compiled(hold_rows={"table": np.array([5, 0, 5]), "bias": 1, "head": ()})
    assert program.options["hold_rows"] == {"table": [0, 5], "bias": [1]}
    state = trained(program)
    assert state["param/bias"][1] == weights()["bias"][1]
    assert (np.delete(state["param/bias"], 1) != np.delete(weights()["bias"], 1)).all()
    assert "hold_rows" not in burnish.compile(classifier()).options


def test_rows_of_a_frozen_parameter():
    groups = optim.groups(optim.sgd(lr=0.5), {"table": "frozen"})
    state = trained(compiled(groups))
    assert bits(state["param/table"]) == bits(weights()["table"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"tabel": [0]}, r"hold_rows: 'tabel' is no weight of the model; did you mean 'table'"),
        ({"axis": [0]}, r"hold_rows: 'axis' does not train: it is not floating-point; leave it out"),
        ({"bias": [0]}, r"hold_rows: 'bias' does not train, as trainable .* says: it stays as a whole; leave it out"),
        ({"table": [7]}, r"hold_rows: 'table' has no row 7: it has shape \[7, 3\], with the rows 0 to 6"),
        ({"table": [0, -1]}, r"hold_rows: 'table' has no row -1: "),
        ({"table": [0.0]}, r"hold_rows: the rows of 'table' must be integers, such as \[0\], not \[0\.0\]"),
        ({"table": [True]}, r"the rows of 'table' must be integers, .* not \[True\]"),
        ({"table": "0"}, r"the rows of 'table' must be integers, .* not '0'"),
        ({"table": None}, r"the rows of 'table' must be integers, .* not None"),
        ({"table": [[0]]}, r"the rows of 'table' must be integers, .* not \[\[0\]\]"),
        (["table"], r"hold_rows must be \{initializer: rows\}, such as .*, not \['table'\]"),
        ({0: [1]}, r"hold_rows must be \{initializer: rows\}"),
    ],
)
def test_what_cannot_be_held(rows, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(classifier(), trainable=["table", "head"], hold_rows=rows)


def test_a_weight_that_no_gradient_reaches_cannot_be_held():
    model = classifier()
    model.graph.node[1].input[0] = "rounded"
    model.graph.node.insert(1, helper.make_node("Round", ["embedded"], ["rounded"], name="the_round"))
    message = r"hold_rows: 'table' does not train: Round 'the_round' \(output 'rounded'\) lets no gradient through; leave it out"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model, hold_rows=HELD)


def test_a_second_step_compiles_nothing(monkeypatch):
    with burnish.Session(compiled(), engine="onnxruntime", threads=1) as session:
        session.step(batches(1)[0])
        monkeypatch.setattr("onnxruntime.InferenceSession", None)
        assert np.isfinite(session.step(batches(1)[0])["loss"])
        assert session.state()["step"] == 2


def test_every_graph_is_valid():
    for name, model in compiled(EVERY["accumulated average"]).graphs.items():
        onnx.checker.check_model(model_bytes(model), full_check=True)
        assert not re.search("burnish", " ".join(node.domain for node in model.graph)), name
