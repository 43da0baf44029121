"""``burnish passes``: the stages as lists, and what each pass did to a model."""

import onnx_ir as ir
import pytest

from burnish.engines import registry
from burnish.models import residual_network
from oracles.small_networks import perceptron


def test_stages_are_listed_in_the_order_in_which_a_model_meets_them(run):
    lines = run("passes", "--engine", "torch").stdout.splitlines()
    stages = [line for line in lines if not line.startswith(" ")]
    assert stages == [
        "READ",
        "SHAPES",
        "CANONICAL",
        "FOLDED",
        "RECOGNIZED",
        "RECOGNIZED_TO_TRAIN",
        "HOISTED",
        "TRAINING",
        "INFERENCE",
        "RECOGNIZED_IN_MODE",
        "DISTRIBUTED",
        "LOWERED",
        "JOINED",
        "EXPORTED",
        "TORCH",
    ]
    assert "  infer_shapes, and again after make_fit where it fails" in lines
    assert "    upgrade_opset" in lines


def test_what_each_pass_did_to_a_model(run, tmp_path):
    ir.save(perceptron(), tmp_path / "model.onnx")
    text = run("passes", str(tmp_path / "model.onnx"), "--stage", "lowered").stdout
    assert "LOWERED of 'predict'" in text
    assert "LOWERED of 'grad'" in text
    assert "lower_semantic_operators" in text
    assert "infer_shapes" not in text


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--stage", "there is no stage 'x';\n  choose among READ,"),
        ("--engine", "there are no stages of 'x'; choose among onnxruntime,"),
    ],
)
def test_a_name_that_there_is_not_is_refused(run, option, problem):
    result = run("passes", option, "x", code=1)
    assert problem in result.output


def test_an_engine_that_is_not_installed_is_named_with_its_command(run, monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "torch", "package_that_is_not_there:Engine")
    result = run("passes", "--engine", "torch", code=1)
    assert "The engine 'torch' cannot be loaded" in result.output
    assert "pip install package_that_is_not_there" in result.output


@pytest.mark.parametrize(("engine", "stage"), [("torch", "TORCH"), ("onnxruntime", "ONNXRUNTIME")])
def test_the_passes_of_an_engine_are_shown_for_a_model(run, tmp_path, engine, stage):
    ir.save(perceptron(), tmp_path / "model.onnx")
    text = run("passes", str(tmp_path / "model.onnx"), "--engine", engine, "--stage", stage).stdout
    assert f"{stage} of 'step'" in text
    assert "fuse_elementwise" in text


def test_each_note_has_a_line_of_its_own(run, tmp_path):
    ir.save(residual_network((1, 8, 8), 4, 4), tmp_path / "model.onnx")
    text = run("passes", str(tmp_path / "model.onnx"), "--engine", "torch", "--stage", "TORCH").stdout
    notes = [line for line in text.splitlines() if "not at '" in line]
    assert len(notes) > 1
    assert all(line.count("not at '") == 1 for line in notes)
