"""Tables of which each worker holds some rows come to what one process with whole tables comes to."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest

import burnish
from burnish import optim
from burnish.data import synthetic_clicks
from burnish.distributed.sharded_tables import TableShards, look_up_rows
from burnish.errors import ConfigurationError, EngineError, InputError, WorkerError
from burnish.models import dlrm
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.combinations import diagonal
from oracles.embedding_tables import FEW, ROWS, table_batches, tables_model, tables_program
from oracles.several_workers import in_threads, largest_difference, part_of, train_alone, train_in_threads, train_part

PARTS = {2: [[3, 3], [6, 0], [0, 6], [1, 5]], 3: [[2, 2, 2], [6, 0, 0], [0, 1, 5], [0, 6, 0]]}
OPTIMIZERS = {
    "sgd": optim.sgd(lr=0.25),
    "adagrad": optim.adagrad(lr=0.25, initial_accumulator_value=0.1),
    "rowwise adagrad": optim.rowwise_adagrad(lr=0.25, weight_decay=0.1),
    "lazy adam": optim.adam(lr=0.01),
    "clipped by the norm of all": optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(lr=0.25, momentum=0.9)),
    "clipped by norms": optim.chain(optim.clip_by_norm(0.05), optim.add_decayed_weights(0.1), optim.sgd(lr=0.25)),
}


@cache
def program(name: str = "adagrad") -> burnish.Program:
    return tables_program(OPTIMIZERS[name])


def opened(communicator, trained, **options):
    parallel = burnish.DataParallel(communicator=communicator, **{"shard_tables": "auto", **options})
    return burnish.Session(trained, engine="torch", threads=1, parallel=parallel)


def assert_like_one_process(outcomes, expected, bound=1e-10):
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < bound
        for name, array in outcome[1][-1].items():
            assert array.tobytes() == outcomes[0][1][-1][name].tobytes(), f"{name} is not the same bits on all workers"


def test_an_optimizer_that_looks_at_all_rows_of_a_batch_is_refused():
    trained = tables_program(optim.adafactor(lr=0.0625))

    def refused(communicator):
        with pytest.raises(ConfigurationError, match=r"looks, to update a row of '\w+_table', at the other rows"):
            opened(communicator, trained)

    in_threads(2, refused)


@pytest.mark.slow
@diagonal(("name", OPTIMIZERS), ("workers", [2, 3]))
def test_workers_that_hold_rows_are_one_process(name, workers):
    outcomes = train_in_threads(program(name), table_batches(), PARTS[workers], shard_tables="auto")
    assert_like_one_process(outcomes, train_alone(program(name), table_batches()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"shard_optimizer": True, "shard_tables": "word*"},
        pytest.param({"shard_optimizer": True, "deterministic": True}, marks=pytest.mark.slow),
        pytest.param({"shard_tables": ["kind_table"], "share": False}, marks=pytest.mark.slow),
    ],
    ids=["one table, and the optimizer in shares", "in order", "the small table"],
)
def test_with_the_other_options_of_the_exchange(options):
    trained = tables_program(OPTIMIZERS["lazy adam"])
    outcomes = train_in_threads(trained, table_batches(), PARTS[3], **{"shard_tables": "auto", **options})
    assert_like_one_process(outcomes, train_alone(trained, table_batches()))


@pytest.mark.slow
def test_rows_that_are_held_still_and_a_scaled_loss():
    held = {"word_table": [1], "kind_table": [0, 1]}
    trained = tables_program(optim.adagrad(lr=0.25), dtype="float32", precision="float16", hold_rows=held)
    batches = table_batches()
    expected = train_alone(trained, batches)
    outcomes = train_in_threads(trained, batches, PARTS[2], shard_tables="auto")
    assert [report["skipped"] for report in outcomes[1][0]] == [report["skipped"] for report in expected[0]]
    assert_like_one_process(outcomes, expected, 5e-3)
    start, state = trained.initial_state(), outcomes[0][1][-1]
    assert state["param/word_table"][1].tobytes() == start["param/word_table"][1].tobytes()
    assert state["param/kind_table"].tobytes() == start["param/kind_table"].tobytes()


def test_a_worker_holds_its_rows_alone():
    """Of three workers the last has none of a table of two rows."""
    whole = program().initial_state()

    def held(communicator):
        with opened(communicator, program()) as session:
            with pytest.raises(ConfigurationError, match=r"journal: .* hold parts of the tables"):
                session.check_journal()
            return session._runner.own_state()

    for rank, state in enumerate(in_threads(3, held)):
        for name in ("param/word_table", "opt/sum_of_squares/word_table", "param/kind_table"):
            assert state[name].tobytes() == whole[name][rank::3].tobytes(), name
        assert state["param/head"].shape == whole["param/head"].shape
        assert len(state["param/kind_table"]) == (rank < FEW)


@pytest.mark.slow
def test_checkpoints_export_and_evaluation(tmp_path):
    """A checkpoint is that of one worker; others go on from it, in any number. All workers take part in what one asks for."""
    batches = table_batches()
    tuned, checkpoint = tmp_path / "tuned.onnx", tmp_path / "begun.safetensors"

    def begun(communicator):
        rank = communicator.rank
        with opened(communicator, program()) as session:
            for batch in batches[:2]:
                session.step(part_of(batch, rank, [2, 0, 4]))
            if rank == 1:
                session.save_checkpoint(checkpoint)
                session.export(tuned)
                evaluated = session.evaluate(batches[2])
                predicted = session.predict({name: array for name, array in batches[3].items() if name != "labels"})
                return evaluated, predicted["logits"], session.state()
            for _ in range(4):
                session.take_part()
            session.state()
        with pytest.raises(EngineError, match="a round of synchronize_every, or shard_tables"):
            session.state()
        return None

    def gone_on(communicator):
        with opened(communicator, program()) as session:
            session.restore(checkpoint)
            restored = session.state()
            for batch in batches[2:]:
                session.step(part_of(batch, communicator.rank, [5, 1]))
            return restored, session.state(), session.evaluate(part_of(batches[0], communicator.rank, [2, 4]))

    evaluated, logits, state = in_threads(3, begun)[1]
    with burnish.Session(program(), engine="torch", threads=1) as session:
        session.restore(checkpoint)
        alone = session.state()
        inputs = {name: array for name, array in batches[3].items() if name != "labels"}
        assert evaluated == pytest.approx(session.evaluate(batches[2]), rel=1e-12)
        np.testing.assert_allclose(logits, session.predict(inputs)["logits"], rtol=1e-12)
        for batch in batches[2:]:
            session.step(batch)
        final = session.state()
    exported = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tuned).graph.initializer}
    for restored, ended, _ in in_threads(2, gone_on):
        for name, array in alone.items():
            assert array.tobytes() == restored[name].tobytes() == state[name].tobytes(), name
            np.testing.assert_allclose(ended[name], final[name], rtol=1e-10, atol=1e-12, err_msg=name)
    for table in ("word_table", "kind_table"):
        assert exported[table].tobytes() == alone[f"param/{table}"].tobytes()


@pytest.mark.slow
def test_processes_train_dlrm_with_tables_in_parts(pool, tmp_path):
    """Rows by connections and by shared memory: a batch that asks for more than an exchange of all to all is taken for."""
    rows = [3, 700, 20_000]
    model = compute_in_float64(dlrm(rows, bottom=(8,), top=(8,)))
    trained = burnish.compile(model, loss="bce_with_logits", optimizer=optim.adagrad(lr=0.05), sparse="auto")
    clicks = synthetic_clicks(3000, rows)
    batches = [clicks.batch(np.arange(first, first + 1000)) for first in (0, 1000, 2000)]
    saved = str(trained.save(tmp_path / "program"))
    sizes = [[500, 500], [1000, 0], [13, 987]]
    outcomes = pool.run(2, train_part, saved, batches, sizes, {"shard_tables": "auto"})
    assert_like_one_process(outcomes, train_alone(trained, batches))


CHAINED = """<ir_version: 10, opset_import: ["": 18]>
chained (int64[N] x) => (double[N, 3] logits) <double[5, 2] first, double[4, 3] second, int64[1] one = {1}> {
  rows = Gather <axis = 0> (first, x)
  best = ArgMax <axis = 1, keepdims = 0> (rows)
  others = Gather <axis = 0> (second, best)
  places = Unsqueeze (x, one)
  again = GatherND (second, places)
  sum = ReduceSum <keepdims = 1> (rows, one)
  product = Mul (others, sum)
  logits = Add (product, again)
}"""


def chained() -> onnx.ModelProto:
    """The rows of one table say which rows of another are looked up."""
    model, rng = onnx.parser.parse_model(CHAINED), np.random.default_rng(0)
    for tensor in list(model.graph.initializer):
        if tensor.name in ("first", "second"):
            model.graph.initializer.remove(tensor)
    for name, shape in (("first", (5, 2)), ("second", (4, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape), name))
    return model


@pytest.mark.slow
def test_lookups_that_wait_for_each_other():
    trained = burnish.compile(chained(), optimizer=optim.adagrad(lr=0.1), sparse="auto")
    rng = np.random.default_rng(3)
    batches = [{"x": rng.integers(0, 4, 6), "labels": rng.integers(0, 3, 6)} for _ in range(3)]
    outcomes = train_in_threads(trained, batches, PARTS[2][:3], shard_tables="auto")
    assert_like_one_process(outcomes, train_alone(trained, batches))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["head"],
            r"'head' cannot be held in parts: its gradient is of every row\. Compile with sparse=\['head'\]",
        ),
        ("wrod_table", "shard_tables: the pattern 'wrod_table' matches no parameter; did you mean 'word_table'"),
        ([], r"shard_tables=\[\]: give 'auto', or names or patterns of embedding tables"),
        (3, "shard_tables=3: give 'auto', or names or patterns of embedding tables"),
    ],
)
def test_tables_that_cannot_be_held_in_parts(option, message):
    with pytest.raises(ConfigurationError, match=message):
        train_in_threads(program(), table_batches(1), PARTS[2][:1], shard_tables=option)


def test_a_program_without_tables_by_rows():
    dense = burnish.compile(tables_model(), optimizer=optim.sgd())
    with pytest.raises(ConfigurationError, match="updates no table by rows, as a table is that workers hold in parts"):
        train_in_threads(dense, table_batches(1), [[6]], shard_tables="auto")
    with pytest.raises(ConfigurationError, match="shard_tables='auto' does not go with synchronize_every, where"):
        burnish.DataParallel(shard_tables="auto", synchronize_every=2)


@pytest.mark.slow
def test_an_index_that_a_table_does_not_have():
    (batch,) = table_batches(1)
    batch["last"][4] = -ROWS - 1
    with pytest.raises(InputError, match=r"The input 'last' holds -10 at \[1\], out of range: valid are -9\.\.8"):
        train_in_threads(program(), [batch], [[3, 3]], shard_tables="auto")
    # One that the graph computes is found by the worker that looks it up.
    model = chained()
    wider = onnx.numpy_helper.from_array(np.random.default_rng(1).standard_normal((5, 9)), "first")
    model.graph.initializer.remove(next(tensor for tensor in model.graph.initializer if tensor.name == "first"))
    model.graph.initializer.append(wider)
    trained = burnish.compile(model, optimizer=optim.sgd(), sparse="auto")
    with pytest.raises(EngineError, match=r"The table 'second' is looked up at [4-8], and has 4 rows: valid are -4\.\.3"):
        train_in_threads(trained, [{"x": np.arange(4), "labels": np.zeros(4, np.int64)}], [[2, 2]], shard_tables="auto")


def test_workers_that_do_different_things():
    def different(communicator):
        with opened(communicator, program()) as session:
            if communicator.rank:
                session.evaluate(table_batches(1)[0])
            else:
                session.state()

    with pytest.raises(WorkerError, match=r"at the same time: rank 0 asks for the state, rank 1 evaluates\. Let all of them"):
        in_threads(2, different)


def test_a_table_that_prediction_reads_otherwise():
    """What training looks up by rows may be read whole where the model predicts."""
    shards = TableShards.of(program().signature, "auto", 2)
    model = program().graphs["predict"].clone()
    gather = next(node for node in model.graph if node.op_type == "Gather")
    gather.op_type = "Transpose"
    with pytest.raises(ConfigurationError, match=r"cannot be held in parts: .* of the graph 'predict' reads it otherwise than"):
        look_up_rows(model, shards)
