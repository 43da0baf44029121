"""What goes around the optimizer, from the command line: groups, transforms, accumulation, averages."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import optim
from burnish.cli.optimizer_options import OptimizerOptions, rate_of
from burnish.optim import schedules
from burnish.optim.accumulate import steps_to_an_update
from burnish.program import Program
from oracles.combinations import spread

TRAIN = ("train", "model.onnx", "--data", "data.npz", "--threads", "1", "--batch-size", "5")


def weights(path) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in ir.load(path).graph.initializers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        (["--transform", "clip_by_global_norm:max_norm=1"], optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(momentum=0.9))),
        (
            ["--transform", "centralize", "--transform", "clip_by_value:value=0.5"],
            optim.chain(optim.centralize(), optim.clip_by_value(0.5), optim.sgd(momentum=0.9)),
        ),
        (
            ["--optimizer", "adamw", "--weight-decay", "0.1", "--decay-on", "weights"],
            optim.groups(optim.adamw(weight_decay=0.1), decay="weights"),
        ),
        (
            ["--optimizer", "adamw", "--group", "stem*=lr_scale=0.1,betas=[0.8,0.9]", "--group", "classifier*=sgd:lr=0.5"],
            optim.groups(optim.adamw(), {"stem*": {"lr_scale": 0.1, "betas": (0.8, 0.9)}, "classifier*": optim.sgd(lr=0.5)}),
        ),
        (
            ["--group", "classifier*=lr=0.2", "--freeze", "stem*"],
            optim.groups(optim.sgd(momentum=0.9), {"classifier*": {"lr": 0.2}, "stem*": "frozen"}),
        ),
        (["--layer-decay", "0.5"], optim.layerwise_decay(optim.sgd(momentum=0.9), 0.5)),
        (["--accumulate", "4"], optim.accumulate(optim.sgd(momentum=0.9), 4)),
        (["--average", "ema:decay=0.5"], optim.ema(optim.sgd(momentum=0.9), 0.5)),
        (
            ["--accumulate", "2", "--average", "swa:start=2", "--transform", "clip_by_norm:max_norm=2", "--freeze", "stem*"],
            optim.accumulate(
                optim.swa(
                    optim.chain(optim.clip_by_norm(2.0), optim.groups(optim.sgd(momentum=0.9), {"stem*": "frozen"})), start=2
                ),
                2,
            ),
        ),
    ],
)
def test_options_are_those_of_the_interface(run, folder, options, optimizer):
    run("compile", "model.onnx", "-o", "program", *options)
    expected = burnish.compile("model.onnx", optimizer=optimizer)
    loaded = Program.load("program")
    assert loaded.options["optimizer"] == json.loads(json.dumps(expected.options["optimizer"]))
    assert loaded.signature == expected.signature


@pytest.mark.slow
def test_an_average_that_still_holds_the_first_weights_is_named(run):
    def said(*arguments):
        return " ".join(run(*arguments).stdout.split())

    young = said(*TRAIN, "--average", "ema:decay=0.99,bias_correction=false", "--no-fold", "-o", "young")
    assert re.search(r"\d\d% of the average is still the weights before training: take more steps, .*--no-average", young)
    assert "of the average" in said("export", "young", "-o", "young.onnx")
    assert "of the average" not in said("export", "young", "-o", "last.onnx", "--no-average")
    assert "of the average" not in said(*TRAIN, "--average", "ema:decay=0.99", "--no-fold", "-o", "corrected")


@pytest.mark.slow
def test_an_average_is_evaluated_and_exported(run, folder):
    run(*TRAIN, "--average", "ema:decay=0.5", "--eval-data", "data.npz", "--no-fold", "-o", "run")
    session = burnish.Session(Program.load("run/program"), threads=1)
    session.restore("run/checkpoints/latest.safetensors")
    session.export("average.onnx", fold_norm=False, parameters="average")
    session.export("last.onnx", fold_norm=False)
    run("export", "run", "-o", "exported.onnx", "--no-fold")
    run("export", "run", "-o", "exported_last.onnx", "--no-fold", "--no-average")
    for ours, theirs in (("run/tuned", "average"), ("exported", "average"), ("exported_last", "last")):
        found, expected = weights(f"{ours}.onnx"), weights(f"{theirs}.onnx")
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{ours} {name}")
    assert any((weights("average.onnx")[name] != array).any() for name, array in weights("last.onnx").items())
    data = np.load("data.npz")
    evaluated = session.evaluate({"x": data["x"][:, None], "labels": data["y"]}, parameters="average")
    rows = (folder / "run/metrics.csv").read_text().splitlines()
    last = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
    assert float(last["eval_loss"]) == pytest.approx(evaluated["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_without_an_average_has_none_to_export(run, folder):
    run(*TRAIN, "-o", "run")
    assert "keeps no average" in run("export", "run", "-o", "exported.onnx", "--average", code=1).output


@pytest.mark.slow
def test_schedules_count_updates_and_hold_for_groups_with_a_rate_of_their_own(run, folder):
    options = ["--accumulate", "2", "--schedule", "cosine", "--warmup", "1", "--lr", "0.1", "--group", "classifier*=lr=0.2"]
    run(*TRAIN, *options, "--epochs", "2", "-o", "run")  # 8 batches, 4 updates
    found = Program.load("run/program").options["optimizer"]

    def rate(peak: float) -> schedules.Schedule:
        return schedules.warmup(schedules.cosine(peak, steps=3), 1)

    expected = optim.accumulate(
        optim.groups(optim.sgd(lr=rate(0.1), momentum=0.9), {"classifier*": {"lr": rate(0.2)}}), 2
    ).options()
    assert found == json.loads(json.dumps(expected))
    assert steps_to_an_update(found) == 2
    assert rate_of(found) == rate(0.1).options()
    run(*TRAIN, *options, "--epochs", "3", "-o", "run", "--resume")
    assert Program.load("run/program").options["optimizer"]["optimizer"]["optimizer"]["lr"]["schedule"]["steps"] == 5


@spread(
    ("options", "message"),
    [
        (["--group", "stem*"], "--group stem*: give PATTERN=SETTINGS, such as"),
        (["--group", "a=lr=1", "--group", "a=frozen"], "--group gives 'a' twice"),
        (["--group", "stem*=rate=1"], "groups: 'stem*' sets 'rate', which sgd does not have; it has lr"),
        (["--group", "stem*=sgdd:lr=1"], "there is no optimizer 'sgdd' (did you mean 'sgd'?)"),
        (["--freeze", "steam*"], "groups: the pattern 'steam*' matches no parameter that trains; did you mean"),
        (["--decay-on", "biases"], "--decay-on biases: give all, or weights"),
        (["--transform", "clip"], "there is no gradient transform 'clip'; choose among"),
        (["--transform", "clip_by_norm"], "gradient transform 'clip_by_norm' needs the option 'max_norm'"),
        (["--average", "emma"], "there is no average 'emma' (did you mean 'ema'?); choose among ema, swa"),
        (["--average", "ema:rate=1"], "average 'ema' has no option 'rate'"),
        (["--layer-decay", "-1"], "layerwise_decay: factor must be a finite number that is not negative"),
    ],
    test=6,
)
def test_what_is_refused(run, options, message):
    result = run("compile", "model.onnx", "-o", "program", *options, code=2 if message.startswith("--") else 1)
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text


def test_a_schedule_of_fixed_rates_and_a_group_with_a_rate_of_its_own(run):
    result = run(
        "compile",
        "model.onnx",
        "-o",
        "program",
        "--schedule",
        "piecewise:boundaries=[2],rates=[0.1,0.01]",
        "--group",
        "stem*=lr=1",
        code=2,
    )
    assert "--group 'stem*': give the group an lr_scale" in " ".join(result.output.replace("│", " ").split())


def test_nothing_around_it_is_the_optimizer_itself():
    assert OptimizerOptions().built() == optim.sgd(momentum=0.9)
