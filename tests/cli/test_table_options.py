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


@pytest.mark.slow
def test_raw_columns_go_from_a_new_model_to_predictions_of_the_file(folder, run):
    rows = [
        f"{18 + age},{age * 1e5 if age % 5 else ''},{'Ulm' if age % 3 else ''},{'yes' if age > 20 else 'no'}" for age in range(40)
    ]
    (folder / "people.csv").write_text("\n".join(["age,income,city,bought", *rows]) + "\n")
    (folder / "new.csv").write_text("city,age,income\nUlm,50,4e6\n,20,\n")
    run("new", "mlp", "--classes", "2", "--input", "3", "--output", "new.onnx")
    options = ("--data", "people.csv", "--label", "bought", "--threads", "1", "--lr", "0.05")
    done = run("finetune", "new.onnx", *options, "--epochs", "2", "--output", "run")
    assert "columns are standardized with mean and standard deviation of the training data: 'age', 'income'" in done.output
    assert (
        'takes raw columns, one input for each, [batch, 1]: session.run(None, {"age": np.array([[1.5]], np.float32)'
        in done.output
    )
    predicted = [run("predict", model, "new.csv").output.splitlines()[-2:] for model in ("run", "run/tuned.onnx")]
    assert predicted[0] == predicted[1]
    figures = [
        run("evaluate", model, "people.csv", "--label", "bought").output.splitlines()[-2:] for model in ("run", "run/tuned.onnx")
    ]
    assert figures[0] == figures[1]
    assert "run/report.html" in run("report", "run").output
    again = run("finetune", "new.onnx", *options, "--epochs", "3", "--output", "run", "--resume")
    assert "epoch 3/3" in again.output
    further = run("finetune", "run/tuned.onnx", *options, "--epochs", "1", "--output", "further", "--columns", "standardize")
    assert "columns: the model itself does to raw columns what was done in its training" in further.output
    assert len(run("predict", "further/tuned.onnx", "new.csv").output.splitlines()[-2:]) == 2


@pytest.mark.slow
def test_values_and_labels_have_the_names_of_their_columns(folder, run):
    rows = [
        f"{number},{number % 7},{3e5 + 1e4 * number},{900 + number % 7},{number % 2},{int(number > 20)}" for number in range(40)
    ]
    (folder / "all.csv").write_text("\n".join(["area,rooms,price,rent,garden,cellar", *rows]) + "\n")
    run("new", "mlp", "--classes", "2", "--input", "2", "--output", "new.onnx")
    for labels, figure, columns in (("price,rent", "r2", "price"), ("garden,cellar", "f1:macro", "labels")):
        kept = ["area", "rooms", *labels.split(",")]
        header, *lines = [line.split(",") for line in (folder / "all.csv").read_text().splitlines()]
        chosen = [",".join(line[header.index(name)] for name in kept) for line in (header, *lines)]
        (folder / "data.csv").write_text("\n".join(chosen) + "\n")
        options = ("--data", "data.csv", "--label", labels, "--epochs", "1", "--lr", "0.01", "--threads", "1")
        run("finetune", "new.onnx", *options, "--output", figure[:2])
        shown = run("predict", f"{figure[:2]}/tuned.onnx", "data.csv", "--format", "csv").output
        assert f"row,{columns}" in shown
        assert figure in run("evaluate", f"{figure[:2]}/tuned.onnx", "data.csv").output
        assert "report.html" in run("report", figure[:2]).output
