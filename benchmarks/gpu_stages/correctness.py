"""Beside the CPU engine, step by step: losses, states, dropout masks and checkpoints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines.torch import TorchEngine
from burnish.program import Program
from gpu_stages.differences import check_apart
from gpu_stages.models import BERT_2, RESNET18, Model, program_of, sized
from gpu_stages.setting import Report, Setting, Skipped

ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = ("tests/engines/torch/test_capture.py", "-k", "on_a_gpu")
TEST_SECONDS = 60
STEPS, BATCH, TINY_BATCH = 5, 16, 4
# Of the loss, relative, and of the way of each state entry: convolutions and products add up in other orders.
LOSS_TOLERANCE, WAY_TOLERANCE = 1e-4, 2e-2
BFLOAT16_TOLERANCE = 1.6e-2
COMPILATIONS = {"regions": "burnish", "inductor": "burnish, inductor"}


def run(setting: Setting, report: Report) -> None:
    """All checks, those of the recorded step first."""
    for model in (RESNET18, BERT_2):
        for compilation, title in COMPILATIONS.items():
            if setting.tiny and compilation == "inductor":
                continue
            check = partial(float32_steps, sized(model, setting.tiny), compilation, setting)
            report.case(f"{model.title}, float32, step by step: {title}", check)
        report.case(f"{model.title}, bfloat16", partial(bfloat16_losses, sized(model, setting.tiny), setting))
    report.case("dropout masks, bit by bit", partial(dropout_masks, setting))
    report.case("checkpoints between devices", partial(checkpoints, sized(RESNET18, setting.tiny), setting))
    report.case("batches of several sizes", partial(changing_batches, sized(RESNET18, setting.tiny), setting))
    report.case("tests that need a GPU", partial(tests, setting))


def on_cpu() -> TorchEngine:
    """The engine to compare with: ATen's operators, images as they come."""
    return TorchEngine("cpu", compile="none", channels_last=False)


def float32_steps(model: Model, compilation: Any, setting: Setting) -> dict[str, Any]:
    """Losses and whole states after each step.

    Raises:
        ValueError: they differ by more than rounding explains.
    """
    return beside_cpu(model, TorchEngine(setting.device, compile=compilation), [batch_size(setting)] * STEPS)


def changing_batches(model: Model, setting: Setting) -> dict[str, Any]:
    """Batches of other sizes, one of them a second time: each is recorded once."""
    full = batch_size(setting)
    return beside_cpu(model, TorchEngine(setting.device), [full, full - 1, full, 2])


def batch_size(setting: Setting) -> int:
    return TINY_BATCH if setting.tiny else BATCH


def beside_cpu(model: Model, engine: TorchEngine, sizes: list[int]) -> dict[str, Any]:
    """Train on an engine and on the CPU, with batches of these sizes."""
    program = program_of(model)
    start = program.initial_state(0)
    batches = model.batches(max(sizes))
    loss_difference = distance = 0.0
    with burnish.Session(program, engine=engine) as session, burnish.Session(program, engine=on_cpu()) as reference:
        for step, size in enumerate(sizes, 1):
            feeds = {name: array[:size] for name, array in batches[step % len(batches)].items()}
            loss, expected = session.step(feeds)["loss"], reference.step(feeds)["loss"]
            loss_difference = max(loss_difference, abs(loss - expected) / abs(expected))
            if not loss_difference <= LOSS_TOLERANCE:
                raise ValueError(f"the loss of step {step} is {loss:.7g}, the CPU's {expected:.7g}")
            distance = max(distance, check_apart(session.state(), reference.state(), start, WAY_TOLERANCE, step))
    return {"steps": len(sizes), "largest_loss_difference": loss_difference, "largest_difference_of_the_way": distance}


def bfloat16_losses(model: Model, setting: Setting) -> dict[str, Any]:
    """Losses of the bfloat16 program beside those of float32 on the CPU.

    Raises:
        ValueError: one is further away than eight bits of mantissa allow.
    """
    batches, largest = model.batches(batch_size(setting)), 0.0
    with (
        burnish.Session(program_of(model, "bfloat16"), engine=TorchEngine(setting.device)) as session,
        burnish.Session(program_of(model), engine=on_cpu()) as reference,
    ):
        for step, feeds in enumerate(batches, 1):
            loss, expected = session.step(feeds)["loss"], reference.step(feeds)["loss"]
            largest = max(largest, abs(loss - expected) / abs(expected))
            if not largest <= BFLOAT16_TOLERANCE:
                raise ValueError(f"the loss of step {step} is {loss:.6g}, the CPU's in float32 {expected:.6g}")
    return {"steps": len(batches), "largest_loss_difference": largest}


def dropout_program(rows: int = 64, columns: int = 96) -> Program:
    """A loss whose gradient is the mask: loss = sum(Dropout(w) * x), and SGD of rate 1 takes mask * x / (1 - p) off w.

    With p = 1/2 and x of powers of two everything is exact, so that masks are compared by the bits of w.
    """
    graph = helper.make_graph(
        [
            helper.make_node("Dropout", ["w", "ratio", "training"], ["dropped"]),
            helper.make_node("Mul", ["dropped", "x"], ["weighted"]),
            helper.make_node("ReduceSum", ["weighted"], ["loss"], keepdims=0),
        ],
        "dropout",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, columns])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [
            numpy_helper.from_array(np.zeros((rows, columns), np.float32), "w"),
            numpy_helper.from_array(np.float32(0.5), "ratio"),
            numpy_helper.from_array(np.bool_(True), "training"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return burnish.compile(model, output="loss", optimizer=burnish.optim.sgd(lr=1.0), trainable=["w"], metrics=())


def dropout_masks(setting: Setting) -> dict[str, Any]:
    """The masks of a few steps, each drawn anew, the same bits as on the CPU.

    Raises:
        ValueError: they are not, or are no masks.
    """
    program = dropout_program()
    feeds = {"x": 2.0 ** np.random.default_rng(0).integers(-3, 4, (64, 96)).astype(np.float32)}
    states: list[list[np.ndarray]] = []
    for engine in (TorchEngine(setting.device), on_cpu()):
        with burnish.Session(program, engine=engine) as session:
            states.append([])
            for _ in range(3):
                session.step(feeds)
                states[-1].append(session.state()["param/w"])
    for step, (array, expected) in enumerate(zip(*states, strict=True), 1):
        if not np.array_equal(array, expected):
            raise ValueError(f"{np.mean(array != expected):.1%} of the elements differ after step {step}")
    masks = [np.diff(np.stack([np.zeros_like(states[0][0]), *states[0]]), axis=0)[index] != 0 for index in range(3)]
    shares = [float(mask.mean()) for mask in masks]
    if not all(0.45 < share < 0.55 for share in shares) or np.array_equal(masks[0], masks[1]):
        raise ValueError(f"these are no masks drawn anew with probability 1/2: they keep {shares}")
    return {"steps": 3, "elements": masks[0].size, "shares_kept": shares}


def checkpoints(model: Model, setting: Setting) -> dict[str, Any]:
    """A run goes on where it stopped, from the device to the CPU and back; files hold the same bits.

    Raises:
        ValueError: a restored state has other bits, or losses part.
    """
    program, batches = program_of(model), model.batches(batch_size(setting))
    losses = []
    with (
        tempfile.TemporaryDirectory() as folder,
        burnish.Session(program, engine=TorchEngine(setting.device)) as session,
        burnish.Session(program, engine=on_cpu()) as reference,
    ):
        for step, (source, target) in enumerate([(session, reference), (reference, session), (session, reference)], 1):
            source.step(batches[0])
            path = Path(folder) / f"{step}.safetensors"
            source.save_checkpoint(path)
            target.restore(path)
            state, expected = target.state(), source.state()
            if differing := [name for name in expected if state[name].tobytes() != expected[name].tobytes()]:
                raise ValueError(f"the checkpoint of step {step} is restored with other bits: {differing}")
            pair = [each.evaluate(batches[1])["loss"] for each in (source, target)]
            losses.append(pair[0])
            if not abs(pair[1] - pair[0]) <= LOSS_TOLERANCE * abs(pair[0]):
                raise ValueError(f"after the checkpoint of step {step} the losses are {pair}")
    return {"moves": len(losses), "evaluated_losses": losses}


def tests(setting: Setting) -> dict[str, Any]:
    """Run the tests that need a GPU by pytest.

    Raises:
        Skipped: there is no GPU, or no pytest.
        ValueError: tests fail.
    """
    setting.require_gpu()
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)}: not installed; the cases above run the same steps in this process")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not campaign", "-p", "no:cacheprovider", *GPU_TESTS]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS, cwd=ROOT)
    lines = finished.stdout.strip().splitlines()
    if finished.returncode:
        raise ValueError("tests fail: " + " | ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
    return {"tests": lines[-1]}
