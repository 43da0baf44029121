"""The architectures that people train, as PyTorch's exporters write them: loss, gradients and five steps beside PyTorch's own.

PyTorch's numbers in float64 are what is right. Where float32 makes more of rounding, as Adam does of gradients near zero, numbers
are as near to them as PyTorch's own in float32.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

import burnish
from architectures.catalogue import ARCHITECTURES
from burnish.errors import ObjectiveWarning
from oracles import whole_models
from oracles.combinations import spread
from oracles.whole_models import BATCH, Trained

ENGINES = ("onnxruntime", "torch")
# What torch.export refuses: a bias of attention that is shared by the samples of an open batch, and trains.
REFUSED = {("dynamo", name, "sdpa") for name in ("t5", "swin", "swin_v2")}
# What PyTorch 2.13 exports as a file that no runtime takes: a convolution of volumes without a bias gets one of two axes.
REFUSED.add(("dynamo", "video_resnet", "eager"))
FORMS = [
    (name, style, exporter, opset)
    for name, architecture in ARCHITECTURES.items()
    for style in (("eager", "sdpa") if architecture.attention else ("eager",))
    for exporter, opsets in (("torchscript", (18, 20)), ("dynamo", (18, 20, 23)))
    for opset in opsets
    if (exporter, name, style) not in REFUSED and (opset != 20 or name in ("bert", "distilbert"))
]


def in_another_style(name: str, style: str, exporter: str) -> bool:
    """Whether a form is left to the campaign: one exporter writes one style of an architecture, and the other the other.

    BERT and GPT-2 come in all.
    """
    if not ARCHITECTURES[name].attention or name in ("bert", "gpt2"):
        return False
    return ((style == "eager") == (exporter == "torchscript")) == (("dynamo", name, "sdpa") in REFUSED)


def in_turn(forms: list[tuple[str, str, str, int]]) -> list[tuple[str, str, str, int]]:
    """Return one form of each architecture, of the next architecture another than of the one before."""
    of_each = {name: [form for form in forms if form[0] == name] for name in ARCHITECTURES}
    return [of_one[place % len(of_one)] for place, of_one in enumerate(of_each.values()) if of_one]


# Between them they have the parts that the others have, for tests that are to be quick.
QUICK = ("bert", "gpt2", "lstm", "swin_v2", "video_resnet", "yolo")
# Gradients that are zero but for rounding: of the bias of keys, which the softmax subtracts again, and of weights that multiply
# the state before the first element.
ZERO_GRADIENTS = {"bert": 2, "distilbert": 2, "lstm": 1, "gru": 1}


@cache
def in_pytorch(name: str, style: str) -> tuple[Trained, Trained]:
    """PyTorch's steps in float64 and in float32."""
    module, given = whole_models.build(name, style), whole_models.batches(name)
    return whole_models.in_pytorch(name, copy.deepcopy(module).double(), given), whole_models.in_pytorch(name, module, given)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over norm of the expected."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def vanishing(gradients: Mapping[str, np.ndarray]) -> set[str]:
    """The names of gradients that are zero but for rounding."""
    whole = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    return {name for name, gradient in gradients.items() if np.linalg.norm(gradient) < 1e-6 * whole}


def wrong_gradients(ours: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], zeros: int) -> dict[str, float]:
    """Those whose error passes 1e-4 of their norm; of those that are zero but for rounding, 1e-6 of the whole gradient."""
    whole = np.sqrt(sum(np.sum(gradient**2) for gradient in expected.values()))
    rounding = vanishing(expected)
    assert len(rounding) == zeros, rounding
    errors = {name: float(np.linalg.norm(ours[name].astype(np.float64) - gradient)) for name, gradient in expected.items()}
    limits = {name: 1e-6 * whole if name in rounding else 1e-4 * np.linalg.norm(expected[name]) for name in expected}
    return {name: errors[name] / limits[name] for name in expected if errors[name] > limits[name]}


def losses_are_pytorchs(name: str, style: str, engine: str, program: burnish.Program) -> dict[str, np.ndarray]:
    """Compare the losses of five steps; returns the state after them."""
    exact, rounded = in_pytorch(name, style)
    with burnish.Session(program, engine=engine) as session:
        losses = np.array([session.step(whole_models.feeds_of(batch))["loss"] for batch in whole_models.batches(name)])
        state = session.state()
    assert losses[0] == pytest.approx(exact.losses[0], rel=1e-5)
    allowed = np.maximum(1e-5 * np.abs(exact.losses), 4 * np.maximum.accumulate(np.abs(rounded.losses - exact.losses)))
    assert (np.abs(losses - exact.losses) <= allowed).all(), (losses, exact.losses, rounded.losses)
    return state


def loss_falls(name: str, engine: str, program: burnish.Program) -> None:
    """Train on one batch, of which a model whose statistics are folded makes less of a loss, though another than PyTorch's."""
    batch = whole_models.feeds_of(whole_models.batches(name, 1)[0])
    with burnish.Session(program, engine=engine) as session:
        losses = [session.step(batch)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0], losses


def first_loss_is_pytorchs(name: str, style: str, engine: str, program: burnish.Program) -> None:
    """Compare the loss before other weights train than PyTorch's."""
    with burnish.Session(program, engine=engine) as session:
        loss = session.step(whole_models.feeds_of(whole_models.batches(name, 1)[0]))["loss"]
    assert loss == pytest.approx(in_pytorch(name, style)[0].losses[0], rel=1e-5)


def first_step_of_the_rest(name: str, style: str, engine: str, program: burnish.Program) -> None:
    """Compare the first loss, and the gradients of those parameters that the program has."""
    exact, _ = in_pytorch(name, style)
    names = whole_models.parameters_by_name(program, whole_models.build(name, style))
    assert 0 < len(names) < len(exact.gradients)
    feeds = program.initial_state() | whole_models.feeds_of(whole_models.batches(name)[0])
    outputs = burnish.engines.get(engine).run(
        program.grad, {entry.name: feeds[entry.name] for entry in program.signature["grad"].inputs}
    )
    assert outputs["loss"] == pytest.approx(exact.losses[0], rel=1e-5)
    ours = {key: outputs[f"grad:{other}"].T if turned else outputs[f"grad:{other}"] for key, (other, turned) in names.items()}
    assert wrong_gradients(ours, {key: exact.gradients[key] for key in names}, ZERO_GRADIENTS.get(name, 0)) == {}


def trains_as_in_pytorch(name: str, style: str, engine: str, program: burnish.Program) -> None:
    """Compare the loss and every gradient of the first step, then losses, parameters and running statistics of five steps."""
    exact, rounded = in_pytorch(name, style)
    names = whole_models.parameters_by_name(program, whole_models.build(name, style))
    assert set(names) == set(exact.gradients)
    feeds = program.initial_state() | whole_models.feeds_of(whole_models.batches(name)[0])
    outputs = burnish.engines.get(engine).run(
        program.grad, {entry.name: feeds[entry.name] for entry in program.signature["grad"].inputs}
    )
    ours = {key: outputs[f"grad:{other}"].T if turned else outputs[f"grad:{other}"] for key, (other, turned) in names.items()}
    assert wrong_gradients(ours, exact.gradients, ZERO_GRADIENTS.get(name, 0)) == {}

    state = losses_are_pytorchs(name, style, engine, program)
    moved = {key: state[f"param/{other}"].T if turned else state[f"param/{other}"] for key, (other, turned) in names.items()}
    moved |= {key: state[f"stat/{key}"] for key in exact.state if "running" in key}
    errors = {
        key: (distance(array, exact.state[key]), distance(rounded.state[key], exact.state[key])) for key, array in moved.items()
    }
    # Adam steps by the rounding of a gradient that is nothing else, and kernels for other processors round in other places.
    factors = dict.fromkeys(vanishing(exact.gradients), 16)
    assert {key: error for key, error in errors.items() if error[0] > max(1e-5, factors.get(key, 4) * error[1])} == {}


# What the exporters make of modules where they are asked for no more: they compute what depends on no input, which then trains in
# the place of the parameters, and fold batch normalization, which they write as in evaluation.
COMPUTED = {
    "dynamo": ("bert", "distilbert", "gpt2", "t5", "swin", "swin_v2"),
    "torchscript": ("swin", "swin_v2"),
}
FOLDED = ("deeplab", "lraspp", "unet", "video_resnet", "yolo", "ssd")
# What only the newer exporter's notes tell: buffers from parameters, and that a head is the table of the embedding.
BUFFERS, TIED = ("llama", "swin_v2"), ("gpt2", "t5")
# Recurrent layers, whose weights come in another order, several in one.
REARRANGED = ("lstm", "gru", "frames_lstm")
DEFAULT_FORMS = [
    (name, style, exporter, opset)
    for name, style, exporter, opset in FORMS
    if (exporter, opset) in (("torchscript", 18), ("dynamo", 23)) or name in ("bert", "gpt2", "unet")
]
QUICK_FORM = ("vit", "sdpa", "dynamo", 23)
REGULAR_FORMS = in_turn(
    [form for form in DEFAULT_FORMS if not in_another_style(*form[:3]) and (form[0] == "bert" or form[2:] != ("dynamo", 18))]
)


@pytest.mark.parametrize(
    ("name", "style", "exporter", "opset"),
    [
        pytest.param(
            *form, marks=[] if form == QUICK_FORM else pytest.mark.slow if form in REGULAR_FORMS[1::2] else pytest.mark.campaign
        )
        for form in DEFAULT_FORMS
    ],
)
def test_the_default_form_trains_as_in_pytorch_or_says_what_does_not(
    name: str, style: str, exporter: str, opset: int, tmp_path: Path
) -> None:
    module = whole_models.build(name, style)
    written = module.eval() if exporter == "torchscript" else module
    path = whole_models.export(name, written, tmp_path / "model.onnx", exporter, opset, defaults=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ObjectiveWarning)
        program = whole_models.compiled(name, path, module, trainable=None)
    said = " ".join(str(each.message) for each in caught if isinstance(each.message, ObjectiveWarning))
    assert ("batch normalization was folded into" in said) == (name in FOLDED)
    is_computed = "computed weights from parameters" if exporter == "dynamo" else "does not say what they were"
    assert (is_computed in said) == (name in COMPUTED[exporter])
    is_older = exporter == "torchscript"
    assert ("trains apart from it" in said) == (is_older and name in TIED)
    engine = "torch" if opset == 23 else "onnxruntime"
    if name in FOLDED:
        loss_falls(name, engine, program)
    elif is_older and name in BUFFERS + TIED:
        first_loss_is_pytorchs(name, style, engine, program)
    elif name in COMPUTED[exporter]:
        first_step_of_the_rest(name, style, engine, program)
    elif name in REARRANGED:
        losses_are_pytorchs(name, style, engine, program)
    else:
        trains_as_in_pytorch(name, style, engine, program)


@lru_cache(maxsize=1)
def of_exporter(name: str, style: str, exporter: str, opset: int) -> burnish.Program:
    """The program of a form; the tests of its engines follow each other.

    PyTorch's newer exporter notes which tensors are parameters, and what trains is left to that.
    """
    module = whole_models.build(name, style)
    with tempfile.TemporaryDirectory() as folder:
        path = whole_models.export(name, module, Path(folder, "model.onnx"), exporter, opset)
        return whole_models.compiled(name, path, module, **({"trainable": None} if exporter == "dynamo" else {}))


@spread("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ARCHITECTURES], test=1)
def test_an_architecture_trains_as_in_pytorch(name: str) -> None:
    style, engine = ("sdpa", "torch") if len(name) % 2 else ("eager", "onnxruntime")
    program = of_exporter(name, style if ARCHITECTURES[name].attention else "eager", "torchscript", 18)
    trains_as_in_pytorch(name, style if ARCHITECTURES[name].attention else "eager", engine, program)


# Each form on one engine: its neighbours, which differ in the opset, the exporter or the style, on the other. The newer exporter
# writes opset 18 by converting what it writes for later ones, and the older one's is trained by the test above.
REGULAR = in_turn([form for form in FORMS if form[2] == "dynamo" and form[3] != 18 and not in_another_style(*form[:3])])


@pytest.mark.parametrize(
    ("name", "style", "exporter", "opset", "engine"),
    [
        pytest.param(
            *form,
            ENGINES[index % 2],
            marks=pytest.mark.slow if form in REGULAR[::2] else pytest.mark.campaign,
        )
        for index, form in enumerate(FORMS)
    ],
)
def test_every_form_of_an_architecture_trains_as_in_pytorch(
    name: str, style: str, exporter: str, opset: int, engine: str
) -> None:
    trains_as_in_pytorch(name, style, engine, of_exporter(name, style, exporter, opset))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_weights_in_a_file_beside_the_model(name: str, tmp_path) -> None:
    module = whole_models.build(name, "sdpa")
    path = whole_models.export(name, module, tmp_path / "model.onnx", "dynamo", 20, external_data=True)
    assert (tmp_path / "model.onnx.data").stat().st_size > 4 * 640 * 32
    trains_as_in_pytorch(name, "sdpa", "onnxruntime", whole_models.compiled(name, path, module))


@pytest.mark.slow
def test_the_head_of_gpt2_is_its_embedding(tmp_path) -> None:
    program = of_exporter("gpt2", "eager", "torchscript", 18)
    with burnish.Session(program, engine="onnxruntime") as session:
        session.step(whole_models.feeds_of(whole_models.batches("gpt2")[0]))
        session.export(tmp_path / "tuned.onnx")
    trained = {key for key in program.initial_state() if key.startswith("param/")}
    assert "param/tokens.weight" in trained
    assert "param/head.weight" not in trained


@spread("engine", ENGINES, test=1)
def test_the_mnist_network_trains_with_its_dropouts(engine: str, tmp_path) -> None:
    """Masks are drawn in another way than PyTorch's: the loss falls on the images it trains on."""
    architecture = ARCHITECTURES["mnist"]
    torch.manual_seed(0)
    module = architecture.build(dropout=1.0).train()
    path = whole_models.export("mnist", module, tmp_path / "model.onnx", "torchscript")
    program = whole_models.compiled("mnist", path, module, optimizer=burnish.optim.adadelta(1.0))
    batch = whole_models.feeds_of(architecture.batch(BATCH))
    with burnish.Session(program, engine=engine, seed=0) as session:
        before = session.evaluate(batch)["loss"]
        losses = [session.step(batch)["loss"] for _ in range(15)]
        after = session.evaluate(batch)["loss"]
    assert len(set(losses)) == len(losses)
    assert after < 0.5 * before
