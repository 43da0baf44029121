"""The folders of runs: numbered, named, claimed by one run each, and all that going on with a run needs."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from burnish.cli.run_folders import claimed, newest, numbered
from burnish.cli.train_options import Results
from burnish.errors import ConfigurationError

TRAIN = ("train", "model.onnx", "--data", "data.npz", "--threads", "1", "--batch-size", "8")


def refused(result) -> str:
    """What an error says, as one line."""
    return " ".join(result.stderr.split())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    base, together, taken = tmp_path / "runs" / "model", threading.Barrier(8), []

    def start() -> None:
        together.wait()
        with claimed(base, Results()) as folder:
            (folder / "run.toml").touch()
            taken.append(folder.name)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == ["model", *(f"model-{number}" for number in range(2, 9))]
    assert newest(base).name == "model-8"


def test_numbers_go_on_after_the_highest_and_other_names_count_nothing(tmp_path):
    base = tmp_path / "model"
    for name in ("model-7", "model-07", "model-1", "model-x", "model-7-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "model-9").touch()
    assert [path.name for path in numbered(base)] == ["model-7", "model-9"]
    with claimed(base, Results()) as folder:
        assert folder == tmp_path / "model-10"
    assert not folder.exists(), "nothing was written to it"
    with claimed(base, Results(overwrite=True)) as folder:
        assert folder == base


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with (
        pytest.raises(ConfigurationError, match=r"runs' .*choose another place \(--output\)"),
        claimed(tmp_path / "runs" / "model", Results()),
    ):
        pass


def test_a_run_needs_its_folder_alone_to_go_on(run, folder, monkeypatch):
    run(*TRAIN, "--lr", "0.05", "--epochs", "2", "--seed", "3", "--eval-data", "data.npz", "-o", "whole")
    run(*TRAIN, "--lr", "0.05", "--epochs", "1", "--seed", "3", "--eval-data", "data.npz", "--export", "mine.onnx")
    assert "runs/model-2: the folder of this run, as 'runs/model' is another's" in run(*TRAIN, "--lr", "0.5").stdout
    assert names(folder / "runs") == ["model", "model-2"]
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    text = run("train", "--resume", "../runs/model", "--epochs", "2").stdout
    assert "epoch 2/2" in text
    assert "mine.onnx: the tuned model" in text
    assert (folder / "mine.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()
    assert not names(folder / "elsewhere")
    # Without a folder it is the newest of the model's.
    monkeypatch.chdir(folder)
    assert "'runs/model-2': already finished" in run("train", "model.onnx", "--resume").stdout
    shutil.move("data.npz", "moved.npz")
    text = refused(run("train", "--resume", "runs/model", "--epochs", "3", code=1))
    assert "The run in 'runs/model' was started with --data '" in text
    assert "which is not there any more: put it back, or say where it is: burnish train --resume runs/model --data PATH" in text
    text = run("train", "--resume", "runs/model", "--epochs", "3", "--data", "moved.npz", "--eval-data", "moved.npz").stdout
    assert "epoch 3/3" in text
    shutil.move("model.onnx", "other.onnx")
    text = refused(run("train", "--resume", "runs/model", "--epochs", "4", code=1))
    assert "say where it is: burnish train MODEL --resume --output runs/model" in text
    assert "epoch 4/4" in run("train", "other.onnx", "--resume", "--output", "runs/model", "--epochs", "4").stdout


@pytest.mark.slow
def test_fine_tuning_and_several_seeds_go_on_by_their_folder(run, folder):
    options = ("--data", "data.npz", "--threads", "1", "--lr", "0.01")
    run("finetune", "model.onnx", *options, "--epochs", "2", "--unfreeze", "1", "--report", "report.html")
    chosen = json.loads((folder / "runs/model-finetuned/finetune.json").read_text())
    (folder / "report.html").unlink()
    shutil.move("model.onnx", "away.onnx")  # the run has the model with its new head
    assert "epoch 2/2" in run("finetune", "--resume", "runs/model-finetuned", "--epochs", "3").stdout
    assert json.loads((folder / "runs/model-finetuned/finetune.json").read_text()) == chosen
    assert (folder / "report.html").is_file()
    shutil.move("away.onnx", "model.onnx")
    message = refused(run("finetune", "--resume", "runs/model-finetuned", "--lr", "0.1", "--head", "keep", code=1))
    assert "--head keep (the run was started with auto); --lr 0.1 (the run was started with 0.01)" in message
    assert message.endswith("begin another")
    message = refused(run("train", "--resume", "runs/model-finetuned", code=1))
    assert "it has [finetune]: go on with the run by burnish finetune --resume" in message
    run(*TRAIN, "--seeds", "2", "--name", "seeds")
    run(*TRAIN, "--name", "seeds")
    assert names(folder / "runs") == ["model-finetuned", "seeds", "seeds-2"]
    assert run("train", "--resume", "runs/seeds").stdout.count("already finished") == 2
    assert "'runs/seeds-2': already finished" in run("train", "--resume", "--name", "seeds").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--resume",), 1, "--resume: name the run that is to go on: burnish train --resume runs/model"),
        (
            ("--resume", "runs/modell"),
            1,
            "--resume: 'runs/modell' is not there (did you mean 'runs/model'?): give the folder of a run, such as runs/model",
        ),
        (("--resume", "runs"), 1, "--resume: 'runs' holds no run that can go on"),
        (("model.onnx", "--data", "data.npz", "--name", "a/b"), 2, "--name a/b: give the name of one folder in runs/"),
        (("model.onnx", "--data", "data.npz", "--name", ".."), 2, "--name ..: give the name of one folder in runs/"),
        (("model.onnx", "--data", "data.npz", "--name", "a", "-o", "b"), 2, "--name a names a folder in runs/, and --output b"),
        (("--resume", "runs/model", "--overwrite"), 2, "--resume goes on with a run and --overwrite drops it"),
    ],
)
def test_a_run_that_is_not_told_is_asked_for(run, folder, arguments, code, message):
    (folder / "runs/model").mkdir(parents=True)
    (folder / "runs/model/run.toml").write_text('[train]\nmodel = "model.onnx"\ndata = "data.npz"\n')
    said = refused(run("train", *arguments, code=code))
    assert message in said
