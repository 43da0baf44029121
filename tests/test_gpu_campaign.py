"""The campaign for a GPU runs end to end without one, keeps what it measured when it is cut off, and goes on beside a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import gpu
from gpu_stages import campaign, correctness, normalization, speed, time_spent, trainers
from gpu_stages.campaign import STAGES, Campaign, Stage, failures, read
from gpu_stages.differences import apart, check_apart
from gpu_stages.setting import FAILED, NO_TIME, OK, SKIPPED, Report, Setting, Skipped
from gpu_stages.table import table
from shared_clock import SharedClock

SCRIPT = Path(gpu.__file__)
TINY = Setting("cpu", tiny=True)
# Cases that there is no counterpart of on a CPU.
NEED_A_GPU = {
    "correctness": ["tests that need a GPU"],
    "speed": [case.row_of(trainers.AUTOTUNED.title) for case in speed.CASES[:3]],
    "launches": ["perceptron, float32, batch 64: torch.compile, reduce-overhead"],
    "synchronized": ["NCCL, one rank: every exchange"],
}
FAKES = {
    "well": "def run(setting, report):\n    report.case('one', lambda: {'n': 1})\n    report.case('two', lambda: {'n': 2})\n",
    "raising": "def run(setting, report):\n    report.case('one', lambda: {'n': 1})\n    raise OSError('the cable is out')\n",
    "ending": "import os\ndef run(setting, report):\n    report.case('one', lambda: {'n': 1})\n    os._exit(7)\n",
    "hanging": "import time\ndef run(setting, report):\n    report.case('one', lambda: {'n': 1})\n"
    "    report.clock.advance(51)\n    time.sleep(600)\n",
    "partly": "def run(setting, report):\n    report.case('bad', lambda: 1 / 0)\n    report.case('good', lambda: {'n': 1})\n",
    "slow": "def run(setting, report):\n    report.case('one', lambda: report.clock.advance(3) or {'n': 1})\n"
    "    report.case('two', lambda: {'n': 2})\n",
    "finding": "def run(setting, report):\n    report.found({})\n    report.clock.advance(7)\n",
}


@pytest.fixture
def run_fakes(tmp_path, monkeypatch):
    """Runs stages that are made up, by name, on a clock that only they advance; returns the campaign's document."""
    monkeypatch.syspath_prepend(str(tmp_path))
    clock = SharedClock(tmp_path / "clock")
    for name, source in FAKES.items():
        (tmp_path / f"fake_stage_{name}.py").write_text(source)

    def run(*names: str, budget: float = 60.0, resume: bool = False) -> dict:
        stages = [Stage(name, f"fake_stage_{name}", name.title(), 1.0) for name in names]
        document = Campaign(TINY, budget, tmp_path / "out.json", resume, clock).run(stages)
        assert read(tmp_path / "out.json") == document
        assert not (tmp_path / "out.json.part").exists()
        return document

    return run


def verdicts(document: dict, stage: str) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in document["stages"][stage]["rows"]}


def test_a_stage_that_fails_is_written_down_and_the_rest_runs(run_fakes):
    document = run_fakes("raising", "ending", "partly", "well")
    stages = document["stages"]
    assert [stage["status"] for stage in stages.values()] == ["failed", "failed", "failed", "done"]
    assert stages["raising"]["error"] == "OSError: the cable is out"
    assert stages["ending"]["error"] == "its process ended with exit code 7"
    assert verdicts(document, "raising") == verdicts(document, "ending") == {"one": OK}
    assert verdicts(document, "partly") == {"bad": FAILED, "good": OK}
    assert verdicts(document, "well") == {"one": OK, "two": OK}
    assert failures(document) == [
        "raising: OSError: the cable is out",
        "ending: its process ended with exit code 7",
        "partly: bad: ZeroDivisionError: division by zero",
    ]
    text = table(document)
    assert "The stage failed: OSError: the cable is out" in text
    assert "| bad | failed | ZeroDivisionError: division by zero |" in text
    assert document["found"]["versions"]["torch"] == torch.__version__


def test_a_stage_that_hangs_is_ended_and_keeps_its_rows(run_fakes):
    document = run_fakes("hanging", "well", budget=60.0)
    assert "was stopped 20 s after its 30 s were over" in document["stages"]["hanging"]["error"]
    assert verdicts(document, "hanging") == {"one": OK}
    assert document["stages"]["well"]["status"] == "done"


def test_what_there_was_no_time_for_is_named_and_measured_by_the_next_run(run_fakes):
    document = run_fakes("slow", budget=2.0)
    assert verdicts(document, "slow") == {"one": OK, "two": NO_TIME}
    assert document["stages"]["slow"]["status"] == "out of time"
    first = document["stages"]["slow"]["rows"][0]
    document = run_fakes("slow", budget=60.0, resume=True)
    assert document["stages"]["slow"]["status"] == "done"
    assert document["stages"]["slow"]["rows"][0] == first
    assert verdicts(document, "slow") == {"one": OK, "two": OK}


def test_a_second_command_gives_its_time_to_what_is_open(run_fakes, monkeypatch):
    monkeypatch.setattr(campaign, "FINDINGS", Stage("found", "fake_stage_finding", "What was found", 60.0))
    run_fakes("well", budget=60.0)
    stages = run_fakes("well", "partly", budget=60.0, resume=True)["stages"]
    assert [stages[name]["budget_seconds"] for name in ("well", "partly")] == [53.0, 53.0]  # 7 s went to what was found


def test_two_commands_fit_the_time_that_a_gpu_is_lent_for():
    """Fifteen minutes, of which starting the machine takes some two, and ten a command."""
    assert gpu.BUDGET + campaign.GRACE < 600
    assert gpu.BUDGET + 200 + 2 * campaign.GRACE < 15 * 60 - 120


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named_and_nothing_runs(tmp_path, capsys, monkeypatch):
    for name in ("PYTHONPATH", "BURNISH_KERNELS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # this process keeps its own
    assert gpu.main(["--output", str(tmp_path / "gpu.json"), "--stages", "speed,memory"]) == 1
    printed = capsys.readouterr()
    assert "failed: speed: PyTorch finds no CUDA GPU here: --device cpu --tiny runs the stages without one" in printed.err
    assert "a CUDA GPU, or a PyTorch that is built for CUDA" in printed.out
    assert read(tmp_path / "gpu.json")["stages"]["memory"]["rows"] == []


def test_another_setting_is_not_resumed(run_fakes, tmp_path):
    run_fakes("well")
    with pytest.raises(ValueError, match="was written with other --device or --tiny"):
        Campaign(Setting("cuda", tiny=False), 1.0, tmp_path / "out.json", resume=True)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="is no file of this campaign"):
        read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--stages", "speed,spede"], "there is no stage spede; there are correctness, speed"), (["--budget", "0"], "above 0")],
)
def test_options_that_are_wrong_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        gpu.arguments_of(options)
    assert message in capsys.readouterr().err


def test_stages_run_in_their_order():
    assert [stage.name for stage in gpu.arguments_of(["--stages", "memory,correctness"]).chosen] == ["correctness", "memory"]
    assert gpu.arguments_of([]).chosen == list(STAGES)


def test_differences_are_a_share_of_the_way():
    start = {"w": np.zeros(4, np.float32), "step": np.array(0)}
    expected = {"w": np.ones(4, np.float32), "step": np.array(1)}
    assert apart({"w": np.float32([1, 1, 1, 1.1]), "step": np.array(1)}, expected, start) == pytest.approx(0.05, rel=1e-3)
    with pytest.raises(ValueError, match="step is 2, and 1 is expected"):
        apart(expected | {"step": np.array(2)}, expected, start)
    with pytest.raises(ValueError, match="w has dtype float64, and float32 is expected"):
        apart(expected | {"w": np.ones(4)}, expected, start)
    with pytest.raises(ValueError, match=r"after step 3 the states are apart by 5\.0e-02 of their way; 0\.01 is allowed"):
        check_apart(expected | {"w": np.float32([1, 1, 1, 1.1])}, expected, start, 0.01, 3)


def test_losses_that_disagree_count_no_time():
    trainers.check_losses([1.0, 2.001], [1.0, 2.0], "float32")
    with pytest.raises(ValueError, match=r"no time counts: the loss of step 2 is 2\.01, PyTorch's 2"):
        trainers.check_losses([1.0, 2.01], [1.0, 2.0], "float32")
    with pytest.raises(ValueError, match="no time counts: the loss of step 1 is nan"):
        trainers.check_losses([float("nan")], [1.0], "bfloat16")


def test_an_error_above_rounding_is_found(monkeypatch):
    layer = next(each for each in normalization.LAYERS if each.name == "LayerNormalization")
    monkeypatch.setattr(normalization, "ALLOWED", 0.01)
    with pytest.raises(ValueError, match="burnish's relative error is"):
        normalization.errors_of(layer, 16, 0.0, TINY)


def test_masks_that_differ_are_found(monkeypatch):
    assert correctness.dropout_masks(TINY)["elements"] == 64 * 96
    program = correctness.dropout_program()
    other = program.initial_state(1)
    sessions = iter([None, other])
    make = correctness.burnish.Session
    monkeypatch.setattr(
        correctness.burnish, "Session", lambda program, engine: make(program, engine=engine, state=next(sessions))
    )
    with pytest.raises(ValueError, match=r"5\d\.\d% of the elements differ after step 1|4\d\.\d% of the elements differ"):
        correctness.dropout_masks(TINY)


def test_traffic_counts_operands_and_results_but_no_views():
    a, b = torch.ones(8, 4), torch.ones(4, 2)
    with time_spent.Traffic() as traffic:
        _ = (a @ b).reshape(-1).t()
    assert (traffic.operators, traffic.bytes) == (1, 4 * (32 + 8 + 16))


def test_cases_are_told_once():
    told: list[dict] = []
    report = Report(told.append, {"known": {"name": "known", "verdict": OK, "n": 5}}, 60.0, clock=lambda: 0.0)

    def refuse() -> dict:
        raise Skipped("needs a GPU")

    assert report.case("known", lambda: 1 / 0)["n"] == 5
    assert report.case("skipped", refuse) is None
    assert report.case("new", lambda: {"n": 6}) == {"n": 6}
    assert report.case("long", lambda: 1 / 0, needs_seconds=61) is None
    verdicts_told = [(row["row"]["name"], row["row"]["verdict"]) for row in told]
    assert verdicts_told == [("skipped", SKIPPED), ("new", OK), ("long", NO_TIME)]
    assert told[0]["row"]["reason"] == "needs a GPU"
    assert report.measured("new")["n"] == 6
    assert report.known("new") is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole campaign in tiny sizes: its file and what it printed."""
    output = tmp_path_factory.mktemp("campaign") / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--budget", "3600", "--output", str(output)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    assert process.returncode == 0, process.stderr[-3000:]
    return output, process.stdout


@pytest.mark.slow
def test_every_stage_runs_without_a_gpu(finished):
    document = read(finished[0])
    assert list(document["stages"]) == [stage.name for stage in STAGES]
    assert failures(document) == []
    for name, stage in document["stages"].items():
        assert stage["status"] == "done", name
        assert OK in verdicts(document, name).values(), name
        needing = [row["name"] for row in stage["rows"] if row.get("reason") == "needs a GPU"]
        assert set(NEED_A_GPU.get(name, ())) <= set(needing), name
        if name != "speed":
            assert needing == NEED_A_GPU.get(name, []), name
    assert document["found"]["missing"] is not None


@pytest.mark.slow
def test_the_table_is_complete(finished):
    output, printed = finished
    document = read(output)
    for stage in STAGES:
        assert f"## {stage.title} (`{stage.name}`): done" in printed
    for stage in document["stages"].values():
        for row in stage["rows"]:
            assert f"| {row['name']} | {row['verdict']} |" in printed
    again = subprocess.run([sys.executable, str(SCRIPT), "--table", str(output)], capture_output=True, text=True, check=True)
    assert again.stdout == printed


@pytest.mark.slow
def test_contenders_of_a_tiny_campaign_train_alike(finished):
    rows = {row["name"]: row for row in read(finished[0])["stages"]["speed"]["rows"]}
    for case in speed.CASES[:3]:
        losses = {each.title: rows[case.row_of(each.title)]["losses"] for each in (trainers.EAGER, trainers.BURNISH)}
        np.testing.assert_allclose(losses["burnish"], losses["PyTorch eager"], rtol=1.6e-2)
        assert len(set(losses["burnish"])) == 3
        assert rows[case.row_of("burnish")]["step_milliseconds"] > 0
        assert "PyTorch eager" in rows[case.row_of("burnish")]["beside"]


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_what_it_had_and_is_resumed(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--stages", "normalization", "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows: list[dict] = []
    until = time.monotonic() + 300
    while not rows and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
        if output.exists():
            rows = json.loads(output.read_text())["stages"]["normalization"]["rows"]
    process.kill()
    process.wait()
    kept = read(output)["stages"]["normalization"]["rows"]
    assert kept[: len(rows)] == rows
    assert rows
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=300)
    resumed = read(output)["stages"]["normalization"]
    assert resumed["status"] == "done"
    assert resumed["rows"][: len(kept)] == kept
    assert len(resumed["rows"]) == 2 * len(normalization.MEASURED)
