"""Tables with columns of text and missing values, from training to prediction on the command line."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from oracles.small_networks import CLASSES, Network


@pytest.mark.slow
def test_categories_go_from_training_to_prediction(folder, run):
    network = Network("tables", [4])
    ir.save(network.model(network.dense("head", network.input, 4, CLASSES)), folder / "net.onnx")
    rows = ["0.1,Ulm,0", "0.2,Bonn,1", "NA,Kiel,2", "0.4,Kiel,2"] * 4
    (folder / "rows.csv").write_text("\n".join(["age,city,label", *rows]) + "\n")
    (folder / "new.csv").write_text("city,age\nUlm,0.1\nJena,0.3\n")
    done = run("train", "net.onnx", "--data", "rows.csv", "--output", "run", code=1)
    assert "rows.csv, line 4: column 'age' holds 'NA', which stands for no value" in done.output
    done = run("train", "net.onnx", "--data", "rows.csv", "--output", "run", "--missing", "drop")
    assert "4 of 16 rows have missing values ('age' 4) and are left out; categories have a place each: 'city' (3)" in done.output
    done = run("predict", "run", "new.csv")
    assert "new.csv: 1 of 2 rows of column 'city' hold categories that training did not have ('Jena')" in done.output
    # What is judged is read as what was trained on.
    assert "column 'age' holds 'NA'" in run("evaluate", "run", "rows.csv", code=1).output
    done = run("evaluate", "run", "rows.csv", "--missing", "drop")
    assert "12 samples" in done.output
    assert "run/report.html" in run("report", "run").output
    assert "12 samples" in (folder / "run" / "report.html").read_text()
    done = run("predict", "run", "rows.csv", code=1)
    assert "or remove the row: a row that is left out would have no prediction" in done.output
    assert "--missing" not in done.output
    assert "columns: categories have a place each: 'city' (3)" in run("inspect", "run/tuned.onnx").output
