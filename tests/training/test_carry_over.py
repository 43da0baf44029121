"""A checkpoint taken over by another engine, optimizer, loss or batch size, with what could not be carried named."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import CarryOverWarning, CheckpointError
from burnish.models import residual_network


def batch(size: int = 6) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(2)
    return {"x": generator.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, size)}


def trained(path, optimizer, **options) -> dict[str, np.ndarray]:
    session = burnish.Session(burnish.compile(residual_network(), optimizer=optimizer, **options), threads=1)
    for _ in range(3):
        session.step(batch())
    session.save_checkpoint(path, extra={"epoch": 2})
    return session.state()


@pytest.mark.slow
def test_another_engine_and_another_batch_size_take_over_everything(tmp_path):
    program = burnish.compile(residual_network(), optimizer="adam")
    session = burnish.Session(program, threads=1)
    session.step(batch(6))
    session.save_checkpoint(tmp_path / "a.safetensors")
    other = burnish.Session(program, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.restore(tmp_path / "a.safetensors")
    expected, found = session.step(batch(4))["loss"], other.step(batch(4))["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_another_optimizer_names_what_starts_anew(tmp_path):
    state = trained(tmp_path / "sgd.safetensors", burnish.optim.sgd(lr=0.1, momentum=0.9))
    session = burnish.Session(burnish.compile(residual_network(), optimizer="adam"), threads=1)
    with pytest.raises(CheckpointError, match="was made with another program"):
        session.restore(tmp_path / "sgd.safetensors")
    with pytest.warns(CarryOverWarning) as caught:
        extra = session.restore(tmp_path / "sgd.safetensors", strict=False)
    message = str(caught[0].message)
    assert extra == {"epoch": 2}
    for slot in ("first_moment", "second_moment"):
        names = [name for name in session.program.initial_state() if name.startswith(f"opt/{slot}/")]
        assert f"'{names[0]}' and {len(names) - 1} more 'opt/{slot}/...'" in message
    assert "start anew: the other state has none" in message
    assert "'step' starts anew: the optimizer's state does" in message
    assert "'opt/momentum/" in message.split("were left out")[0]
    for name, array in session.state().items():
        if name.startswith(("param/", "stat/", "rng/")):
            np.testing.assert_array_equal(array, state[name], err_msg=name)
    assert session.step_count == 0
    session.step(batch())


@pytest.mark.slow
def test_the_same_slots_are_carried_with_the_step(tmp_path):
    state = trained(tmp_path / "adam.safetensors", "adam")
    session = burnish.Session(burnish.compile(residual_network(), optimizer="adamw"), threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.restore(tmp_path / "adam.safetensors", strict=False)
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


@pytest.mark.slow
def test_another_head_is_named_by_its_shape(tmp_path):
    trained(tmp_path / "ten.safetensors", "sgd")
    session = burnish.Session(burnish.compile(residual_network(classes=3), optimizer="sgd"), threads=1)
    before = session.state()
    with pytest.warns(CarryOverWarning, match=r"the other has shape \[10.*here it is \[3") as caught:
        session.restore(tmp_path / "ten.safetensors", strict=False)
    kept = [
        name for name, array in session.state().items() if array.shape and 3 in array.shape and name in str(caught[0].message)
    ]
    assert kept
    for name in kept:
        np.testing.assert_array_equal(session.state()[name], before[name])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trained(tmp_path / "wide.safetensors", "sgd")
    other = onnx.parser.parse_model(
        """
<ir_version: 10, opset_import: ["": 18]>
other (float[batch, 64] x) => (float[batch, 10] y) <float[64, 10] elsewhere = {%s}> { y = MatMul (x, elsewhere) }
""".replace("%s", ", ".join(["0.5"] * 640))
    )
    session = burnish.Session(burnish.compile(other, optimizer="sgd"), threads=1)
    with pytest.raises(CheckpointError, match="is of another model: it has no parameter that this program has"):
        session.restore(tmp_path / "wide.safetensors", strict=False)
