"""Tables with more or fewer rows, and checkpoints of another vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.errors import CheckpointError, ConfigurationError, InputError
from burnish.models import dlrm, residual_network
from burnish.surgery import resize_table


def clicks_program(source: object) -> burnish.Program:
    return burnish.compile(source, loss="bce_with_logits", optimizer="adagrad", metrics=[], sparse="auto")


@pytest.fixture(scope="module")
def model():
    return dlrm([40, 60], numbers=2, width=4, bottom=(3,), top=(3,))


def table_of(model, name="table_2"):
    return model.graph.initializers[name].const_value.numpy()


def test_rows_are_kept_and_new_ones_are_like_them(model):
    before = table_of(model)
    grown = resize_table(model, "table_2", 1000)
    assert table_of(grown).shape == (1000, 4)
    assert table_of(grown)[:60].tobytes() == before.tobytes() == table_of(model).tobytes()
    new = table_of(grown)[60:]
    np.testing.assert_allclose(new.mean(axis=0), before.mean(axis=0), atol=0.1 * before.std())
    np.testing.assert_allclose(new.std(axis=0), before.std(axis=0), rtol=0.1)
    assert table_of(resize_table(model, "table_2", 1000)).tobytes() == table_of(grown).tobytes()
    assert table_of(resize_table(model, "table_2", 1000, seed=1))[60:].tobytes() != new.tobytes()
    assert table_of(resize_table(grown, "table_2", 60)).tobytes() == before.tobytes()


@pytest.mark.slow
def test_a_model_trains_on_rows_that_it_did_not_have(model):
    batch = synthetic_clicks(8, [40, 60], numbers=2).batch(np.arange(8))
    batch["category_2"][3] = 64
    session = burnish.Session(clicks_program(model))
    with pytest.raises(InputError, match=r"The input 'category_2' holds 64 at \[3\], out of range: valid are -60\.\.59"):
        session.step(batch)
    with burnish.Session(clicks_program(resize_table(model, "table_2", 65))) as session:
        before = session.state()["param/table_2"]
        session.step(batch)
        assert (session.state()["param/table_2"][64] != before[64]).any()


@pytest.mark.slow
def test_a_checkpoint_of_another_vocabulary_says_what_to_do(model, tmp_path):
    path = tmp_path / "last.safetensors"
    with burnish.Session(clicks_program(model)) as session:
        session.save_checkpoint(path)
        exported = session.export(tmp_path / "model.onnx")
    with burnish.Session(clicks_program(dlrm([40, 65], numbers=2, width=4, bottom=(3,), top=(3,)))) as other:
        message = (
            r"is of a model with another vocabulary: 'table_2' has 60 rows there and 65 here\. Compile the model that it was "
            r"made with; or .* burnish\.surgery\.resize_table\(model, 'table_2', 65\)"
        )
        with pytest.raises(CheckpointError, match=message):
            other.restore(path)
    with burnish.Session(clicks_program(resize_table(exported, "table_2", 65))) as grown:
        kept = grown.state()["param/table_2"][:60]
        assert kept.tobytes() == session.state()["param/table_2"].tobytes()


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        ("table_3", 5, r"has no initializer 'table_3'.*Give the name of a table"),
        ("table_1", 0, r"rows=0: give a whole number of 1 or more"),
        ("top_1.weight", 5, r"is not read by Gather on axis 0 alone: .* reads it too"),
    ],
)
def test_what_cannot_be_is_named(model, table, rows, message):
    with pytest.raises(ConfigurationError, match=message):
        resize_table(model, table, rows)


def test_a_model_without_tables_has_none_to_resize():
    with pytest.raises(ConfigurationError, match="has no initializer 'embedding'"):
        resize_table(residual_network(), "embedding", 5)
