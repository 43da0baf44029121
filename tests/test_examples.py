"""Every example runs as a user would run it, and does what it says."""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish
from burnish.data.digits import digits_arrays
from burnish.models import residual_network

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder: Path, script: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """Run an example in a folder and return what it printed."""
    command = [sys.executable, *launcher, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def digits_model(tmp_path_factory) -> tuple[Path, str]:
    """The model that training from scratch writes, and what it printed."""
    folder = tmp_path_factory.mktemp("digits")
    printed = run(folder, "train_from_scratch.py", "--epochs", "2", "--output", "digits.onnx")
    return folder / "digits.onnx", printed


@pytest.mark.slow
def test_training_from_scratch_learns_and_writes_a_valid_model(digits_model):
    path, printed = digits_model
    onnx.checker.check_model(onnx.load(path), full_check=True)
    accuracies = [float(number) for number in re.findall(r"test accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.8


@pytest.mark.slow
def test_fine_tuning_raises_accuracy_on_the_new_data(digits_model, tmp_path):
    path, _ = digits_model
    printed = run(tmp_path, "fine_tune_onnx.py", str(path), "--epochs", "10")
    before, after = (float(number) for number in re.findall(r"^(?:before|after): ([\d.]+)", printed, re.MULTILINE))
    assert after > before + 0.2
    tuned, original = (
        {value.name: onnx.numpy_helper.to_array(value) for value in onnx.load(model).graph.initializer}
        for model in (tmp_path / "tuned.onnx", path)
    )
    assert tuned.keys() == original.keys()
    np.testing.assert_array_equal(tuned["stem.convolution.weight"], original["stem.convolution.weight"])


@pytest.mark.slow
def test_an_adapter_serves_other_digits_beside_the_same_model(digits_model, tmp_path):
    path, _ = digits_model
    printed = run(tmp_path, "train_adapters.py", str(path), "--epochs", "6")
    light, dark, adapted = (float(number) for number in re.findall(r"the adapter: ([\d.]+)", printed))
    assert light > 0.8
    assert adapted > dark + 0.2
    sizes = {name: int(size.replace(",", "")) for name, size in re.findall(r"^(\S+): ([\d,]+) bytes", printed, re.MULTILINE)}
    assert sizes.keys() == {"digits.onnx", "digits.onnx_adapter", "last.safetensors"}
    assert sizes["digits.onnx_adapter"] < sizes["digits.onnx"] / 2


@pytest.mark.slow
def test_a_recommendation_model_is_as_good_as_that_of_pytorch(tmp_path):
    pytest.importorskip("torch", reason="the example trains PyTorch's model where PyTorch is there")
    printed = run(tmp_path, "train_dlrm.py", "--samples", "20000")
    ours, theirs = (float(number) for number in re.findall(r"^AUC of \w+: ([\d.]+)", printed, re.MULTILINE))
    assert ours > 0.75
    assert abs(ours - theirs) <= 0.002


@pytest.mark.slow
def test_a_small_transformer_tells_packages_by_their_docstrings(tmp_path):
    pytest.importorskip("tokenizers", reason="the example trains a tokenizer")
    printed = run(tmp_path, "train_docstrings.py", "--layers", "1", "--epochs", "12")
    transformer, words = (float(number) for number in re.findall(r"^accuracy of [\w ]+: ([\d.]+)", printed, re.MULTILINE))
    assert transformer >= 0.85
    assert words >= 0.8


@pytest.mark.slow
def test_workers_that_hold_tables_in_parts_recommend_as_one_process(tmp_path):
    pytest.importorskip("torch", reason="workers train on the PyTorch engine")
    options = ("--samples", "4000", "--epochs", "1")
    alone, together = (
        float(re.findall(r"^AUC of burnish: ([\d.]+)", run(tmp_path, "train_dlrm.py", *options, *more), re.MULTILINE)[0])
        for more in (("--engine", "torch"), ("--workers", "2", "--shard-tables"))
    )
    assert together == pytest.approx(alone, abs=2e-4)  # float32, printed with four digits


@pytest.mark.slow
def test_workers_train_images_with_one_each(tmp_path):
    """One image alone is too few for statistics; those of the whole batch teach what one process learns."""
    pytest.importorskip("torch", reason="workers train on the PyTorch engine")
    script, launcher = "train_images_with_workers.py", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(tmp_path, script) + run(tmp_path, script, launcher=launcher)
    accuracies = {name: float(number) for name, number in re.findall(r"^(.*): test accuracy ([\d.]+)", printed, re.MULTILINE)}
    assert accuracies.keys() == {"sync, one process", "sync, 2 workers", "local, 2 workers"}
    assert min(accuracies["sync, one process"], accuracies["sync, 2 workers"]) > 0.65
    assert accuracies["local, 2 workers"] < accuracies["sync, 2 workers"] - 0.05


@pytest.mark.slow
def test_gradients_agree_with_differences(tmp_path):
    printed = run(tmp_path, "gradients_of_any_graph.py")
    assert "cotangent:y" in printed
    assert "grad:x, grad:w" in printed


@pytest.mark.slow
def test_a_program_trains_with_onnxruntime_and_numpy_alone(tmp_path):
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    program.save(tmp_path / "program")
    generator = np.random.default_rng(0)
    y = generator.integers(0, 10, 64)
    x = generator.normal(size=(64, 1, 8, 8)) + y.reshape(-1, 1, 1, 1)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    script = EXAMPLES / "run_step_with_bare_onnxruntime.py"
    code = (
        "import runpy, sys\n"
        "sys.argv = ['example', 'program', 'data.npz', '--epochs', '8']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "print('imported:', sorted({'burnish', 'onnx', 'onnx_ir', 'safetensors', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "imported: []" in result.stdout
    losses = [float(number) for number in re.findall(r"mean loss ([\d.]+) over 2 steps", result.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_bare_steps_equal_those_of_a_session(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from run_step_with_bare_onnxruntime import BareProgram

    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="adam")
    program.save(tmp_path / "program")
    bare = BareProgram(tmp_path / "program", seed=7)
    session = burnish.Session(program, seed=7)
    generator = np.random.default_rng(0)
    for _ in range(3):
        batch = {"x": generator.normal(size=(8, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, 8)}
        assert float(bare.step(batch)["loss"]) == pytest.approx(session.step(batch)["loss"], rel=1e-6)
    assert bare.state.keys() == session.state().keys()
    for name, array in session.state().items():
        np.testing.assert_allclose(bare.state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def write_idx(folder: Path) -> None:
    """Write scikit-learn's digits, enlarged to 28x28, as the four files of MNIST."""
    enlarge = np.array([[max(0.0, 1 - abs((row + 0.5) / 3.5 - 0.5 - pixel)) for pixel in range(8)] for row in range(28)])
    enlarge /= enlarge.sum(1, keepdims=True)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = digits_arrays(split)
        pixels = np.rint(255 * (enlarge @ images @ enlarge.T)).astype(np.uint8)
        head = struct.pack(">HBB3I", 0, 8, 3, *pixels.shape)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes()))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">HBBI", 0, 8, 1, len(labels)) + labels.astype(np.uint8).tobytes()
        )


@pytest.mark.slow
def test_the_mnist_network_of_pytorch_reads_digits(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    write_idx(tmp_path)
    printed = run(tmp_path, "train_pytorch_module.py", "--data", ".", "--epochs", "10", "--batch", "32", "--weights", "w.pt")
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 11
    assert accuracies[-2] == pytest.approx(accuracies[-1], abs=0.003)
    assert accuracies[-1] >= 0.98
    assert (tmp_path / "w.pt").exists()


@pytest.mark.slow
def test_lightning_trains_and_resumes_with_a_wrapped_network(tmp_path):
    pytest.importorskip("lightning")
    printed = run(tmp_path, "train_with_lightning.py", "--epochs", "4", "--folder", "runs")
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 3
    assert accuracies[1] > max(accuracies[0], 0.85)
    assert accuracies[2] == pytest.approx(accuracies[1], abs=0.003)
    assert "after 4 epochs" in printed


@pytest.mark.slow
def test_accelerate_trains_a_wrapped_network_in_bfloat16(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("onnxscript")
    printed = run(tmp_path, "train_with_accelerate.py", "--epochs", "4", "--folder", "runs", "--mixed-precision", "bf16")
    *epochs, restored, plain = (float(number) for number in re.findall(r"accuracy ([\d.]+)", printed))
    assert len(epochs) == 4
    assert epochs[-1] > 0.8
    assert restored == epochs[-1]
    assert plain == pytest.approx(restored, abs=0.02)


@pytest.mark.slow
def test_transformers_trains_a_wrapped_bert_and_writes_what_it_reads_again(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run(tmp_path, "train_with_transformers.py", "--epochs", "3", "--folder", "runs")
    trained, read = (float(number) for number in re.findall(r"accuracy ([\d.]+)", printed))
    assert trained > 0.8
    assert read == pytest.approx(trained, abs=0.003)
    assert "in PyTorch: BertForSequenceClassification" in printed
    assert sorted(path.name for path in (tmp_path / "runs").iterdir())[-1] == "model"


def test_every_example_is_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    sources = {path: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    runs = [path for path in sources if not any(f"from {path.stem} import" in source for source in sources.values())]
    assert len(runs) > 10
    assert [path.name for path in runs if path.name not in text] == []
