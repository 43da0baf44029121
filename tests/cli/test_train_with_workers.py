"""``burnish train --workers``: one log, the figures of one process, and what is said when a worker is gone."""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.cli import launch
from burnish.cli.train import Exchange, join_workers
from burnish.installing import install_command
from oracles.combinations import spread

COMMAND = (sys.executable, "-m", "burnish")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def arguments(folder: str, *options: str) -> list[str]:
    course = f"--data many.npz --eval-data data.npz --engine torch --threads 1 --batch-size 8 --lr 0.01 -o {folder}"
    return ["train", "model.onnx", *course.split(), *options]


@pytest.fixture
def data(folder: Path) -> Path:
    generator = np.random.default_rng(1)
    np.savez("many.npz", x=generator.normal(size=(101, 4, 4)).astype(np.float32), y=generator.integers(0, 3, 101))
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: text for name, text in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_the_run_goes_on_to_the_same_end(run, data):
    run(*arguments("alone", "--epochs", "4"))
    killed = arguments("together", "--workers", "2", "--checkpoint-every", "5")
    with subprocess.Popen(
        [*COMMAND, *killed, "--epochs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch "):
                break
        os.kill(children_of(process)[-1], signal.SIGKILL)
        remaining, message = process.communicate(timeout=600)
    assert process.returncode == 1, remaining + message
    assert re.search(r"error: Rank [01] \(process \d+\) was ended by SIGKILL, and the others were stopped\.", message)
    assert message.strip().endswith("burnish train --resume together")
    assert message.count("error:") == 1
    reached = int(rows(data / "together")[-1]["epoch"])
    if reached > 3:
        run(*arguments("alone", "--epochs", str(reached + 1), "--overwrite"))
    epochs = str(max(4, reached + 1))
    done = subprocess.run(
        [*COMMAND, *killed, "--epochs", epochs, "--resume"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled in") == 1
    together, alone = rows(data / "together"), rows(data / "alone")
    assert [row["step"] for row in together] == [row["step"] for row in alone]
    for row, expected in zip(together, alone, strict=True):
        for name, text in expected.items():
            assert (row[name] == "") == (text == "")
            # Float32 sums in another order; the network is too small for them to part further.
            assert not text or float(row[name]) == pytest.approx(float(text), rel=2e-2, abs=2e-2), name


@pytest.mark.campaign
def test_options_of_the_exchange(run, data):
    """Each leaves what one process comes to, but for the digits that 16 bits cost, and a run goes on without them."""
    adam = ("--optimizer", "adam", "--epochs", "2")
    run(*arguments("alone", *adam))
    for workers, options in (
        ("3", ["--deterministic", "--shard-optimizer"]),
        ("2", ["--compression", "bfloat16", "--overwrite"]),
    ):
        training = arguments("together", *adam, "--workers", workers, *options)
        done = subprocess.run([*COMMAND, *training], capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        assert (data / "together" / "tuned.onnx").exists()
        for row, expected in zip(rows(data / "together"), rows(data / "alone"), strict=True):
            assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-2), options
    run(*arguments("together", "--optimizer", "adam", "--epochs", "3", "--resume"))
    assert rows(data / "together")[-1]["epoch"] == "3"


@pytest.mark.campaign
def test_workers_that_compute_activations_again(run, data):
    """The same figures as workers that keep all, and a run that one process goes on with."""
    for folder, options in (("kept", ()), ("again", ("--recompute", "layers"))):
        training = arguments(folder, "--epochs", "2", "--workers", "2", *options)
        done = subprocess.run([*COMMAND, *training], capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        assert ("without recomputation" in done.stdout) == (folder == "again")
    assert rows(data / "again") == rows(data / "kept")
    run(*arguments("again", "--epochs", "3", "--recompute", "layers", "--resume"))
    assert rows(data / "again")[-1]["epoch"] == "3"


def children_of(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("the children of a process cannot be found here")
    return [int(child) for child in children.read_text().split()]


@pytest.mark.slow
@spread("name", ["SIGINT", "SIGTERM"], test_all=1)
def test_what_stops_the_launcher_stops_the_workers_and_the_run_goes_on_with_any_number(run, data, name):
    training = arguments("run", "--workers", "2", "--checkpoint-every", "3")
    with subprocess.Popen(
        [*COMMAND, *training, "--epochs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch "):
                break
        workers = children_of(process)
        if name == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.send_signal(signal.SIGTERM)
        _, message = process.communicate(timeout=600)
    assert process.returncode == (130 if name == "SIGINT" else 143), message
    assert len(workers) == 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert message.count("Everything is saved in 'run/checkpoints/latest.safetensors'; resume, and training goes on") == 1
    assert message.strip().endswith("burnish train --resume run")
    assert message.count("--resume") == 1
    if name == "SIGINT":
        reached = int(rows(data / "run")[-1]["epoch"])
        again = arguments("run", "--workers", "3", "--epochs", str(reached + 1), "--resume")
        done = subprocess.run([*COMMAND, *again], capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        assert rows(data / "run")[-1]["epoch"] == str(reached + 1)
        run(*arguments("run", "--epochs", str(reached + 2), "--resume"))
        assert rows(data / "run")[-1]["epoch"] == str(reached + 2)


@pytest.mark.slow
def test_restarts_come_to_an_end(data):
    training = arguments("run", "--workers", "2", "--max-restarts", "1", "--checkpoint-every", "3", "--epochs", "100000")
    with subprocess.Popen(
        [*COMMAND, *training], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        killed = []
        for line in process.stdout:
            if line.startswith("epoch ") and not set(workers := children_of(process)) & set(killed):
                killed += workers
                os.kill(workers[-1], signal.SIGKILL)
            if len(killed) == 4:
                break
        _, message = process.communicate(timeout=600)
    assert process.returncode == 1
    assert len(killed) == 4
    assert message.count("error: Rank ") == message.count("was ended by SIGKILL") == 1


def spoil_the_model(folder):
    (folder / "model.onnx").write_bytes(b"no model")


def spoil_a_label(folder):
    """Of one sample, which one worker alone gets."""
    arrays = dict(np.load(folder / "many.npz"))
    arrays["y"][50] = 7
    np.savez(folder / "many.npz", **arrays)


def leave_a_run(folder):
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "latest.safetensors").touch()


@pytest.mark.slow
@spread(
    ("spoil", "message"),
    [
        (spoil_the_model, r"error: 'model.onnx'"),
        (spoil_a_label, r"error: many.npz: sample 50 has the label 7"),
        (leave_a_run, r"error: 'run' holds a run already: go on with it \(--resume\)"),
    ],
    test_all=1,
)
def test_what_would_come_again_is_not_started_again(data, spoil, message):
    spoil(data)
    training = arguments("run", "--workers", "2", "--max-restarts", "3", "--epochs", "3")
    done = subprocess.run([*COMMAND, *training], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert done.stdout.count("compiled in") <= 1
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1, done.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (burnish.errors.ModelError("a"), launch.COMES_AGAIN),
        (burnish.errors.GradientError("a"), launch.COMES_AGAIN),
        (burnish.errors.DataError("a"), launch.COMES_AGAIN),
        (burnish.errors.WorkerError("rank 1 stopped: a", comes_again=True), launch.COMES_AGAIN),
        (burnish.errors.WorkerError("rank 1 is gone"), 1),
        (burnish.errors.EngineError("memory ran out"), 1),
        (burnish.errors.NonFiniteLossError("a"), 1),
    ],
)
def test_a_worker_says_by_its_status_whether_it_would_end_so_again(monkeypatch, error, status):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(launch.LAUNCHED, raising=False)
    assert launch.exit_status(error) == 1  # started by torchrun
    monkeypatch.setenv(launch.LAUNCHED, "1")
    assert launch.exit_status(error) == status
    monkeypatch.delenv("WORLD_SIZE")
    assert launch.exit_status(error) == 1


@pytest.mark.slow
def test_more_workers_than_samples(data):
    np.savez("few.npz", x=np.ones((1, 4, 4), np.float32), y=[1])
    training = arguments("run", "--workers", "2")
    training[training.index("many.npz")] = "few.npz"
    done = subprocess.run([*COMMAND, *training], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert rows(data / "run")[-1]["step"] == "1"


def test_options_of_the_exchange_reach_the_session(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    options = Exchange(deterministic=True, compression="float16", bucket_size=1000, share=False, statistics="rank0")
    parallel, group = join_workers(None, 60.0, options.settings(is_alone=False))
    assert (parallel.deterministic, parallel.compression, parallel.shard_optimizer) == (True, "float16", False)
    assert (parallel.bucket_size, parallel.share, parallel.synchronize_every) == (1000, False, None)
    assert parallel.statistics == "rank0"
    assert parallel.group is group
    (unchanged, _) = join_workers(None, 60.0, Exchange().settings(is_alone=False))
    assert (unchanged.bucket_size, unchanged.share) == (burnish.DataParallel().bucket_size, True)
    assert unchanged.statistics == "mean"


def test_a_count_that_torchrun_contradicts_is_refused(run, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    result = run(*arguments("run", "--workers", "3"), code=1)
    assert "--workers 3, and a launcher has started 2 on this machine: leave --workers out, or the launcher" in result.stderr


@spread(
    ("options", "message"),
    [
        (("--workers", "0"), "'--workers': Input should be greater than or equal to 1"),
        (("--workers", "2", "--worker-timeout", "0"), "--worker-timeout 0: give a number of seconds above 0"),
        (("--max-restarts", "2"), "--max-restarts starts the workers of --workers again: give --workers 2 or more"),
        (("--deterministic",), "--deterministic says how workers exchange, and one alone trains here: give --workers 2 or more,"),
        (("--compression", "float16", "--workers", "1"), "--compression says how workers exchange, and one alone trains here"),
        (("--bucket-size", "0", "--workers", "2"), "'--bucket-size': Input should be greater than or equal to 1"),
        (("--bucket-size", "1e6", "--workers", "2"), "'--bucket-size': Input should be a valid integer"),
        (
            ("--bucket-size", "1000"),
            "--bucket-size says how workers exchange, and one alone trains here: give --workers 2 or more",
        ),
        (("--no-share",), "--no-share says how workers exchange, and one alone trains here: give --workers 2"),
        (("--shard-optimizer",), "--shard-optimizer says how workers exchange, and one alone trains here: give --workers 2"),
        (("--synchronize-every", "4"), "--synchronize-every says how workers exchange, and one alone trains here: give"),
        (
            ("--synchronize-every", "4", "--workers", "2", "--shard-optimizer"),
            "shard_optimizer=True does not go with synchronize_every, where workers step alone",
        ),
        (
            ("--statistics", "rank0"),
            "--statistics says how workers exchange, and one alone trains here: give --workers 2 or more,",
        ),
        (
            ("--statistics", "rank1", "--workers", "2"),
            "statistics='rank1': give 'mean', the average of the running statistics over the workers, or 'rank0', those of the",
        ),
        (("--compression", "zip", "--workers", "2"), "there is no compression 'zip'; choose among bfloat16, float16"),
    ],
    test=6,
)
def test_options_of_workers_that_are_refused(run, data, options, message):
    result = run(*arguments("run", *options), code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (data / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--norm", "sync:3", "--workers", "4"),
            "norm: 'sync:3' takes statistics over groups of 3 workers, and there are 4: give",
        ),
        (
            ("--norm", "*bn1*=sync:4", "--workers", "2"),
            "norm: 'sync:4' takes statistics over groups of 4 workers, and there are 2",
        ),
        (("--engine", "reference", "--workers", "2"), "The engine 'reference' cannot exchange values with other workers"),
    ],
)
def test_what_every_worker_would_refuse_is_refused_once_before_they_start(run, data, options, message):
    given = arguments("run", *options)
    if "--engine" in options:
        del given[given.index("torch") - 1 : given.index("torch") + 1]
    assert run(*given, code=1).stderr.startswith(f"error: {message}")


def test_without_pytorch_workers_are_refused_with_what_to_install(run, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(*arguments("run", "--workers", "2"), code=1)
    assert f"PyTorch is not installed: {install_command('torch')}, or train with one worker" in result.stderr
    assert not (data / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["999", "9" * 18, "٣", "-1", "x"])
def test_a_line_to_no_launcher_is_named(monkeypatch, text):
    monkeypatch.setenv(launch.LIFE_LINE, text)
    with pytest.raises(burnish.errors.ConfigurationError, match=f"BURNISH_LIFE_LINE is '{text}' in the environment.*: unset it"):
        launch.end_with_launcher()


@pytest.mark.slow
def test_a_launcher_does_not_wait_for_pytorch():
    program = (
        "import sys; from burnish.cli import launch; launch.check_together(2, 'torch', 'sync:2'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_data_that_no_worker_can_read_are_named_once(data):
    options = arguments("run", "--workers", "2")
    options[options.index("many.npz")] = "missing.npz"
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: missing.npz: no such file or folder"), done.stderr
    assert done.stderr.count("missing.npz") == 1


@pytest.mark.campaign
def test_data_that_one_worker_cannot_read_are_named_by_all(data):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    processes = []
    for rank in range(2):
        options = arguments("run")
        options[options.index("many.npz")] = "missing.npz" if rank else "many.npz"
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment(), **place}
            )
        )
    first, second = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert first.startswith("error: Rank 1 stopped: missing.npz: no such file or folder"), first
    assert second.startswith("[rank 1] error: missing.npz: no such file or folder"), second


@pytest.mark.slow
def test_under_torchrun_one_worker_is_alone(run, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert "epoch 1/1" in run(*arguments("run")).output


@pytest.mark.slow
def test_a_restart_goes_on_with_the_run(run, data, monkeypatch):
    run(*arguments("run", "--epochs", "2"))
    before = rows(data / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    result = run(*arguments("run", "--epochs", "3", "--overwrite"))
    assert "epoch 3/3" in result.output
    assert "epoch 1/3" not in result.output
    assert rows(data / "run")[: len(before)] == before


@pytest.mark.slow
def test_workers_that_a_launch_starts_again_know_their_run(run, data, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-shift")
    run(*arguments("run", "--epochs", "2"))
    assert "epoch 3/3" in run(*arguments("run", "--epochs", "3")).output
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "day-shift")
    assert "'run' holds a run already: go on with it (--resume)" in run(*arguments("run"), code=1).stderr


def test_who_speaks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch.other_rank() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.other_rank() == "1"
    monkeypatch.setenv("RANK", "0")
    assert launch.other_rank() is None
