"""``--lora`` of the commands, and what ``burnish export`` makes of the run."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import burnish
from burnish.analysis.adapters import read_adapters
from burnish.cli.application import app
from oracles.adapted_models import LENGTH, WORDS, layered_model


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    onnx.save(layered_model(quantized=False), tmp_path / "model.onnx")
    ids = np.random.default_rng(0).integers(0, WORDS, (48, LENGTH))
    np.savez(tmp_path / "data.npz", ids=ids, labels=ids[:, 0] % 3)
    return tmp_path


@pytest.mark.slow
def test_a_run_of_adapters_is_exported_in_every_form(folder):
    options = ("--lora", "rank=2,alpha=4,dropout=0.1", "--lora-layers", "dense", "--lora-layers", "words")
    run_folder = folder / "run"
    done = run(
        *("finetune", folder / "model.onnx", "--data", folder / "data.npz", *options),
        *("--epochs", 1, "--lr", 0.1, "--output", run_folder),
    )
    assert done.exit_code == 0, done.output
    assert "adapters: lora beside 2 layers; with the head 91 numbers train, and the other 374 stay as they are" in done.output
    resumed = run(
        "finetune", folder / "model.onnx", "--data", folder / "data.npz", "--epochs", 2, "--output", run_folder, "--resume"
    )
    assert resumed.exit_code == 0, resumed.output
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(folder / "model.onnx").graph.initializer}
    kept = burnish.Program.load(run_folder / "program").initial_state()
    assert kept["param/turned.weight"].tobytes() == before["turned.weight"].tobytes()
    expected = {
        "merged": {"merged.onnx"},
        "kept": {"kept.onnx"},
        "apart": {"apart.onnx", "apart.onnx_adapter"},
        "inputs": {"inputs.onnx", "inputs.safetensors"},
        "peft": {"peft.onnx/adapter_model.safetensors", "peft.onnx/adapter_config.json"},
    }
    for form, files in expected.items():
        done = run("export", run_folder, "-o", folder / "out" / f"{form}.onnx", "--adapters", form)
        assert done.exit_code == 0, done.output
        assert all((folder / "out" / name).is_file() for name in files)
    configuration = json.loads((folder / "out" / "peft.onnx" / "adapter_config.json").read_text())
    assert configuration["target_modules"] == ["dense", "words"]
    assert configuration["modules_to_save"] == ["head"]
    refused = run("export", run_folder, "-o", folder / "x.onnx", "--adapters", "peft", "--training")
    assert "--adapters is for the model alone" in refused.output
    refused = run("export", run_folder, "-o", folder / "x.onnx", "--adapters", "apert")
    assert "adapters='apert' (did you mean 'apart'?)" in " ".join(refused.output.split())


def test_compile_puts_adapters_beside_every_matrix_and_convolution(folder):
    done = run("compile", folder / "model.onnx", "-o", folder / "program", "--lora", "variant=ia3", "--optimizer", "adamw")
    assert done.exit_code == 0, done.output
    program = burnish.Program.load(folder / "program")
    layers = [adapter.layer for adapter in read_adapters(program.metadata).adapters]
    assert layers == ["dense", "turned", "filter", "head"]
    assert set(program.options["trainable"]) == {f"{layer}.ia3_l" for layer in layers}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lora", "rnk=2"), "--lora has no setting 'rnk' (did you mean 'rank'?); it has rank, alpha, variant, dropout"),
        (("--lora", "rank"), "--lora 'rank': settings are written name=value, with commas between, not 'rank'"),
        (("--lora-layers", "dense"), "--lora-layers says beside which layers adapters stand: give --lora too"),
        (("--lora", "rank=0"), "lora: rank=0: give a whole number of 1 or more"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(folder, options, message):
    done = run("compile", folder / "model.onnx", "-o", folder / "program", *options)
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_model_without_adapters_has_no_form_of_them(folder):
    done = run("train", folder / "model.onnx", "--data", folder / "data.npz", "--epochs", 1, "--output", folder / "run")
    assert done.exit_code == 0, done.output
    refused = run("export", folder / "run", "-o", folder / "x.onnx", "--adapters", "apart")
    assert "adapters='apart': the model has no adapters: put some beside its layers" in " ".join(refused.output.split())
