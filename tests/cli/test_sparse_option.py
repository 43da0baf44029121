"""Embedding tables that a run updates by rows, by the command line."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.models import dlrm
from burnish.program import Program

LOSS = ("--loss", "bce_with_logits", "--optimizer", "adagrad")


@pytest.fixture
def clicks(folder):
    ir.save(dlrm([6, 50], numbers=2, width=4, bottom=(3,), top=(3,)), folder / "clicks.onnx")
    return "clicks.onnx"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "option", "tables"),
    [
        (("auto",), "auto", {"table_1", "table_2"}),
        (("table_2",), ["table_2"], {"table_2"}),
        (("*_1", "table_2"), ["*_1", "table_2"], None),
    ],
    ids=["auto", "name", "patterns"],
)
def test_compile_keeps_the_gradients_of_tables_as_rows(run, folder, clicks, given, option, tables):
    run("compile", clicks, "-o", "program", *LOSS, *(part for table in given for part in ("--sparse", table)))
    program = Program.load(folder / "program")
    assert program.options["sparse"] == option
    rows = {entry.name.removeprefix("rows:") for entry in program.signature["grad"].outputs if entry.role == "rows"}
    assert rows == (tables or {"table_1", "table_2"})


def test_a_table_that_the_model_does_not_have_is_named(run, folder, clicks):
    printed = run("compile", clicks, "-o", "program", *LOSS, "--sparse", "table_9", code=1).stderr
    assert "error: sparse: the pattern 'table_9' matches no parameter that trains; did you mean 'table_" in printed


@pytest.mark.slow
def test_a_run_keeps_its_tables_in_files_and_saves_what_changed(run, folder):
    from burnish.training import checkpoint

    nodes = [
        onnx.helper.make_node("Gather", ["embedding", "x"], ["rows"]),
        onnx.helper.make_node("MatMul", ["rows", "head"], ["y"]),
    ]
    head = onnx.numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(4, 2), "head")
    table = onnx.numpy_helper.from_array(np.full((64, 4), 0.5, np.float32), "embedding")
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["N"])]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 2])]
    graph = onnx.helper.make_graph(nodes, "tokens", inputs, outputs, [table, head])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "tokens.onnx")
    generator = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=generator.integers(0, 9, 24), y=generator.integers(0, 2, 24))
    options = ("--data", "data.npz", "--sparse", "auto", "--optimizer", "adagrad", "--batch-size", "4", "--checkpoint-every", "2")
    files = ("--reinitialize", "xavier", "--journal", "--tables", "tables")
    run("train", "tokens.onnx", "-o", "first", *options, *files)
    run("train", "tokens.onnx", "-o", "first", *options, *files, "--epochs", "2", "--resume")
    run("train", "tokens.onnx", "-o", "whole", *options, "--epochs", "2", "--reinitialize", "xavier")
    assert (folder / "first/tuned.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()
    latest = folder / "first/checkpoints/latest.safetensors"
    assert checkpoint.place_of(latest) is not None
    state = checkpoint.read_checkpoint(latest).state
    tables = {path.name: np.fromfile(path, np.float32) for path in (folder / "tables").glob("*.bin")}
    assert {content.tobytes() for content in tables.values()} == {
        state[name].tobytes() for name in ("param/embedding", "opt/sum_of_squares/embedding")
    }


@pytest.mark.slow
def test_workers_that_hold_tables_in_parts_come_to_the_end_of_one_process(run, folder, clicks):
    rng = np.random.default_rng(0)
    arrays = {
        "numbers": rng.standard_normal((45, 2)).astype(np.float32),
        "targets": rng.integers(0, 2, (45, 1)).astype(np.float32),
    }
    np.savez("clicks.npz", **arrays, category_1=rng.integers(0, 6, 45), category_2=rng.integers(0, 50, 45))
    course = "--data clicks.npz --eval-data clicks.npz --engine torch --threads 1 --batch-size 8 --epochs 2 --sparse auto".split()
    run("train", clicks, *LOSS, *course, "-o", "alone")
    command = [sys.executable, "-m", "burnish", "train", clicks, *LOSS, *course, "-o", "together"]
    done = subprocess.run([*command, "--workers", "2", "--shard-tables", "auto"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    models = [onnx.load(folder / name / "tuned.onnx").graph.initializer for name in ("alone", "together")]
    for ours, theirs in zip(*models, strict=True):
        expected, array = onnx.numpy_helper.to_array(ours), onnx.numpy_helper.to_array(theirs)
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5, err_msg=ours.name)


def test_tables_in_parts_are_for_several_workers(run, clicks):
    printed = run("train", clicks, "--data", "clicks.npz", "--sparse", "auto", "--shard-tables", "auto", code=2).stderr
    assert "--shard-tables says how workers exchange, and one alone trains here" in " ".join(printed.replace("│", " ").split())
