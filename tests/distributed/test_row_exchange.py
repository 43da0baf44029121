"""Workers exchange the rows of gradients, and come to what one process with the whole batch comes to."""

from __future__ import annotations

import numpy as np
import pytest

import burnish
from burnish import optim
from burnish.errors import ConfigurationError, InputError
from burnish.graph import Builder, replace_node
from burnish.operators.collectives import ALL_REDUCE_ROWS
from burnish.training.checkpoint import place_of, read_checkpoint
from oracles.embedding_tables import ROWS, table_batches, tables_program
from oracles.several_workers import in_threads, largest_difference, part_of, train_alone, train_in_threads, train_part

SAMPLES = 6
PARTS = {2: [[3, 3], [6, 0], [0, 6], [1, 5]], 3: [[2, 2, 2], [6, 0, 0], [0, 1, 5], [0, 6, 0]]}
OPTIMIZERS = {
    "adagrad": optim.adagrad(lr=0.25, initial_accumulator_value=0.1),
    "rowwise adagrad": optim.rowwise_adagrad(lr=0.25, weight_decay=0.1),
    "lazy adam": optim.adam(lr=0.01),
    "adafactor": optim.adafactor(lr=0.0625),
    "clipped": optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(lr=0.25, momentum=0.9)),
    "decayed": optim.chain(optim.clip_by_norm(0.05), optim.add_decayed_weights(0.1), optim.sgd(lr=0.25)),
}


def assert_like_one_process(outcomes, expected):
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < 1e-10
        for name, array in outcome[1][-1].items():
            assert array.tobytes() == outcomes[0][1][-1][name].tobytes(), f"{name} is not the same bits on all workers"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_workers_are_one_process(name):
    program, batches = tables_program(OPTIMIZERS[name]), table_batches()
    assert_like_one_process(train_in_threads(program, batches, PARTS[3]), train_alone(program, batches))
    start, final = program.initial_state(), train_alone(program, batches)[1][-1]
    # Lazy or exact: nobody reads the last row, and its bits stay.
    assert final["param/word_table"][ROWS - 1].tobytes() == start["param/word_table"][ROWS - 1].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"shard_optimizer": True, "bucket_size": 1},
        pytest.param({"deterministic": True, "share": False}, marks=pytest.mark.slow),
    ],
    ids=["the optimizer in shares", "in order"],
)
def test_with_the_other_options_of_the_exchange(options):
    program, batches = tables_program(OPTIMIZERS["clipped"]), table_batches()
    assert_like_one_process(train_in_threads(program, batches, PARTS[2], **options), train_alone(program, batches))


def test_one_worker_is_one_process():
    program, batches = tables_program(OPTIMIZERS["clipped"]), table_batches()
    outcomes = train_in_threads(program, batches, [[6]] * len(batches), shard_tables="auto")
    assert_like_one_process(outcomes, train_alone(program, batches))


@pytest.mark.slow
def test_rows_that_are_held_stay_and_a_row_that_one_worker_alone_reads_moves_on_all():
    held = {"word_table": [1], "kind_table": [0, 1]}
    program, batches = tables_program(OPTIMIZERS["adagrad"], hold_rows=held), table_batches()
    outcomes = train_in_threads(program, batches, PARTS[3])
    assert_like_one_process(outcomes, train_alone(program, batches))
    start, state = program.initial_state(), outcomes[0][1][-1]
    assert state["param/word_table"][1].tobytes() == start["param/word_table"][1].tobytes()
    assert state["param/kind_table"].tobytes() == start["param/kind_table"].tobytes()
    assert (state["param/word_table"][ROWS - 2] != start["param/word_table"][ROWS - 2]).any()


@pytest.mark.slow
def test_a_scaled_loss_skips_on_all_workers():
    program = tables_program(optim.sgd(lr=0.1), dtype="float32", precision="float16")
    batches = table_batches()
    expected = train_alone(program, batches)
    outcomes = train_in_threads(program, batches, PARTS[2])
    assert [report["skipped"] for report in outcomes[0][0]] == [report["skipped"] for report in expected[0]]
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < 5e-3


@pytest.mark.slow
def test_processes_and_float32(pool, tmp_path):
    program = tables_program(optim.adagrad(lr=0.25), dtype="float32")
    batches = table_batches()
    outcomes = pool.run(3, train_part, str(program.save(tmp_path / "program")), batches, PARTS[3], {})
    expected = train_alone(program, batches)
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < 1e-5
        for name, array in outcome[1][-1].items():
            assert array.tobytes() == outcomes[0][1][-1][name].tobytes(), name


@pytest.mark.slow
def test_a_large_table_does_not_travel(monkeypatch):
    """What workers give each other is of the rows of the batch, whatever the table holds."""
    from burnish.models import dlrm

    sent = []

    def counted(communicator):
        gather = communicator.all_gather

        def noting(buffer, *, group=0):
            sent.append(buffer.nbytes)
            return gather(buffer, group=group)

        with burnish.Session(
            program, engine="torch", threads=1, parallel=burnish.DataParallel(communicator=communicator)
        ) as session:
            communicator.all_gather = noting
            session.step(part_of(batch, communicator.rank, [4, 4]))

    from burnish.data import synthetic_clicks

    rows = [20_000, 3]
    program = burnish.compile(
        dlrm(rows, bottom=(8,), top=(8,)), loss="bce_with_logits", optimizer=optim.adagrad(lr=0.1), sparse="auto"
    )
    batch = synthetic_clicks(8, rows).batch(np.arange(8))
    in_threads(2, counted)
    assert max(sent) < 2 * 4 * (8 + 16 * 4) + 256


def test_an_index_that_a_table_does_not_have_stops_its_worker_before_the_step():
    program, (batch,) = tables_program(optim.sgd()), table_batches(1)
    batch["words"][5, 2] = ROWS
    with pytest.raises(InputError, match=r"The input 'words' holds 9 at \[2, 2\], out of range: valid are -9\.\.8"):
        train_in_threads(program, [batch], [[3, 3]])


@pytest.mark.slow
def test_a_program_of_an_earlier_version_is_to_be_compiled_again():
    program, batches = tables_program(optim.sgd()), table_batches(1)
    graph = program.semantic["grad"].graph
    for node in [node for node in graph if ALL_REDUCE_ROWS.is_of(node)]:
        replace_node(node, tuple(Builder(graph, before=node).tensor(value) for value in node.inputs))
    with pytest.raises(ConfigurationError, match="compiled by an earlier version, which did not say what workers exchange"):
        train_in_threads(program, batches, PARTS[2][:1])


@pytest.mark.slow
def test_a_worker_saves_the_rows_of_all_by_what_changed(tmp_path):
    program, batches = tables_program(OPTIMIZERS["adagrad"]), table_batches(2)

    def saved(communicator):
        path = tmp_path / f"{communicator.rank}/last.safetensors"
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            session.save_checkpoint(path, journal=True)
            for batch in batches:
                session.step(part_of(batch, communicator.rank, [1, 5]))
                session.save_checkpoint(path, journal=True)
            assert place_of(path).end.size > 0
            return session.state(), read_checkpoint(path).state

    for state, checkpoint in in_threads(2, saved):
        assert {name: array.tobytes() for name, array in state.items()} == {
            name: array.tobytes() for name, array in checkpoint.items()
        }
