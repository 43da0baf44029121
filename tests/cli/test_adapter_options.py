"""``--lora`` of the commands, and what ``burnish export`` makes of the run."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import burnish
from burnish.adapters.graph import read_adapters
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


@pytest.mark.slow
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
        (("--adapter", "lroa"), "lora: variant='lroa' (did you mean 'lora'?): choose among 'lora', 'dora', 'ia3'"),
        (("--adapter", "lora", "--lora", "rank=2"), "--adapter and --lora both say which adapters there are: give one of them"),
        (("--rank", "2"), "--rank is that of an --adapter: give --adapter lora too"),
        (("--adapter", "ia3", "--rank", "2"), "--rank: an ia3 scales what a layer gives, and has none: leave it out"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(folder, options, message):
    done = run("compile", folder / "model.onnx", "-o", folder / "program", *options)
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.slow
def test_adapters_are_written_beside_the_tuned_model_and_taken_up_again(folder):
    options = ("--data", folder / "data.npz", "--epochs", 1, "--lr", 0.1, "--threads", 1)
    forms = ("--save-adapters", "apart", "--save-adapters", "peft")
    done = run(
        *("finetune", folder / "model.onnx", *options, "--adapter", "dora", "--rank", 2, "--alpha", 4),
        *("--adapter-layers", "dense", *forms, "--output", folder / "run"),
    )
    assert done.exit_code == 0, done.output
    assert "adapters: dora beside 1 layers" in done.output
    ids = np.load(folder / "data.npz")["ids"]
    merged = onnxruntime.InferenceSession(folder / "run" / "tuned.onnx").run(None, {"ids": ids})[0]
    apart = onnxruntime.InferenceSession(folder / "run" / "apart.onnx")
    adapter, with_adapter = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(folder / "run" / "apart.onnx_adapter"))
    with_adapter.add_active_adapter(adapter)
    np.testing.assert_allclose(apart.run(None, {"ids": ids}, with_adapter)[0], merged, atol=1e-5)
    # From the folder of PEFT a run goes on where the other ended: with no rate, nothing moves.
    still = (*options[:4], "--lr", 1e-30, "--threads", 1, "--save-adapters", "kept")
    again = run(
        *("finetune", folder / "model.onnx", *still, "--adapter-from", folder / "run" / "peft", "--output", folder / "again")
    )
    assert again.exit_code == 0, again.output
    assert f"adapters: dora of {folder / 'run' / 'peft'} beside 1 layers" in " ".join(again.output.split())
    assert f"head: 'head.weight' is that of {folder / 'run' / 'peft'}, for" in " ".join(again.output.split())
    assert "rates: the new head" not in again.output
    taken_up = onnxruntime.InferenceSession(folder / "again" / "tuned.onnx").run(None, {"ids": ids})[0]
    np.testing.assert_allclose(taken_up, merged, atol=1e-5)
    assert read_adapters({entry.key: entry.value for entry in onnx.load(folder / "again" / "kept.onnx").metadata_props})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save-adapters", "peft"), "--save-adapters: the run trains no adapters: give --adapter lora, or leave it out"),
        (
            ("--adapter", "lora", "--save-adapters", "pfet"),
            "--save-adapters pfet (did you mean 'peft'?): give kept, apart, inputs",
        ),
        (("--adapter-from", "nowhere"), "nowhere"),
    ],
)
def test_forms_that_cannot_be_written_are_refused(folder, options, message):
    done = run("finetune", folder / "model.onnx", "--data", folder / "data.npz", "--lr", 0.1, *options)
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_model_without_adapters_has_no_form_of_them(folder):
    done = run("train", folder / "model.onnx", "--data", folder / "data.npz", "--epochs", 1, "--output", folder / "run")
    assert done.exit_code == 0, done.output
    refused = run("export", folder / "run", "-o", folder / "x.onnx", "--adapters", "apart")
    assert "adapters='apart': the model has no adapters: put some beside its layers" in " ".join(refused.output.split())
