"""Gradients at ties, at bounds and where lengths are zero: those of PyTorch, for modules and for files that it exported."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from torch.nn import functional

import burnish
from burnish.errors import ObjectiveWarning

Case = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]
TIED = torch.tensor([[1.0, 3, 3, 2], [5, 5, 5, 5], [0, -1, 0, -1]])
ZEROS = torch.tensor([[0.0, 0, 0, 0], [3, 4, 0, 0], [1, 0, -2, 0]])
BOUNDS = torch.tensor([[-1.0, 0, 1, 6], [0, 6, -1, 2], [0.5, 1, 0, -3]])
FACTORS = torch.tensor([1.0, 2, 3, 4])
THREES = torch.full((3, 4), 3.0)

CASES: dict[str, Case] = {
    "max(dim)": (lambda x: x.max(1).values, TIED),
    "max(dim) of rows": (lambda x: x.max(0, keepdim=True).values, TIED.T.contiguous()),
    "min(dim)": (lambda x: x.min(-1).values, TIED),
    "max()": (lambda x: x.max(), TIED),
    "amax": (lambda x: x.amax(1), TIED),
    "amin of two axes": (lambda x: x.amin((0, 1)), TIED),
    "maximum": (lambda x: torch.maximum(x, THREES), TIED),
    "minimum": (lambda x: torch.minimum(x, x.flip(1)), TIED),
    "clamp": (lambda x: x.clamp(0, 1), BOUNDS),
    "clamp(min=)": (lambda x: x.clamp(min=0), BOUNDS),
    "clamp(max=)": (lambda x: x.clamp(max=1), BOUNDS),
    "clamp_min": (lambda x: x.clamp_min(0.0), BOUNDS),
    "clamp of tensors": (lambda x: torch.clamp(x, torch.zeros(4), torch.ones(4)), BOUNDS),
    "clamp_": (lambda x: (x * 1).clamp_(0, 1), BOUNDS),
    "relu": (functional.relu, BOUNDS),
    "relu6": (functional.relu6, BOUNDS),
    "hardtanh": (functional.hardtanh, BOUNDS),
    "hardsigmoid": (functional.hardsigmoid, torch.tensor([-3.0, 3, 0, 1])),
    "hardswish": (functional.hardswish, torch.tensor([-3.0, 3, 0, 1])),
    "leaky_relu": (functional.leaky_relu, BOUNDS),
    "std": (lambda x: x.std(1), TIED),
    "std without correction": (lambda x: x.std(1, unbiased=False), TIED),
    "var": (lambda x: x.var(1), TIED),
    "norm": (lambda x: x.norm(dim=1), ZEROS),
    "norm of all": (lambda x: x.norm(), torch.zeros(3, 4)),
    "norm, p=0.5": (lambda x: x.norm(p=0.5, dim=1), ZEROS),
    "norm, p=1": (lambda x: x.norm(p=1, dim=1), ZEROS),
    "norm, p=1.5": (lambda x: x.norm(p=1.5, dim=1), ZEROS),
    "norm, p=3": (lambda x: x.norm(p=3, dim=1), ZEROS),
    "norm, p=4": (lambda x: x.norm(p=4, dim=1), ZEROS),
    "norm, p=inf": (lambda x: x.norm(p=float("inf"), dim=1), ZEROS),
    "norm, p=-inf": (lambda x: x.norm(p=-float("inf"), dim=1), ZEROS),
    "normalize": (lambda x: functional.normalize(x, dim=1) * FACTORS, ZEROS),
    "normalize below eps": (lambda x: functional.normalize(x, dim=1, eps=1.0) * FACTORS, ZEROS * 0.1),
    "cosine_similarity": (lambda x: functional.cosine_similarity(x, FACTORS.expand(3, 4), dim=1), ZEROS),
    "cosine_similarity below eps": (lambda x: functional.cosine_similarity(x, FACTORS.expand(3, 4), dim=1, eps=9.0), ZEROS),
    "pairwise_distance": (lambda x: functional.pairwise_distance(x, torch.zeros(3, 4), eps=0.0), ZEROS),
    "atan2": (lambda x: torch.atan2(x, x.flip(1)), ZEROS),
    "atan2 on an axis": (lambda x: torch.atan2(x, torch.zeros(3, 4)), ZEROS),
    "pow": (lambda x: x**2 + x**3 + x.abs() ** 1.5, ZEROS),
    "pow of exponents": (lambda x: torch.pow(x, torch.tensor([0.0, 1, 2, 3])), ZEROS),
    "pow by the exponent": (lambda x: torch.pow(torch.zeros(3, 4), x), ZEROS.abs()),
    "cdist": (lambda x: torch.cdist(x, x), ZEROS),
    "cdist by products": (lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"), ZEROS),
    "root of two squares": (lambda x: (x[:, 0] ** 2 + x[:, 1] ** 2 + 1e-12).sqrt(), ZEROS),
    "abs": (lambda x: x.abs(), ZEROS),
    "sinc": (torch.sinc, ZEROS),
    "xlogy": (lambda x: torch.xlogy(x, x + 1), ZEROS.abs()),
    "topk": (lambda x: x.topk(2, 1).values.sum(1), TIED[:1]),
    "huber_loss": (lambda x: functional.huber_loss(x, torch.zeros(3, 4), reduction="none"), BOUNDS),
    "l1_loss": (lambda x: functional.l1_loss(x, torch.zeros(3, 4), reduction="none"), ZEROS),
    "triplet_margin_loss": (
        lambda x: functional.triplet_margin_loss(x, x, torch.zeros(3, 4), reduction="none"),
        ZEROS,
    ),
}
EXPORTED = {
    "newer": [name for name in CASES if name != "cdist"],
    "older": [name for name in CASES if name not in {"sinc", "xlogy", "huber_loss", "l1_loss", "triplet_margin_loss"}],
}
"""What each of PyTorch's exporters has a form of."""
TAKEN_FOR_ANOTHER = {
    "amax": "max(dim)",
    "hardtanh": "a clamp, outside a module of its own",
    "cosine_similarity below eps": "the product of lengths, which its file bounds in place of each",
}
"""In the older exporter's files, which do not note the call."""


class Total(torch.nn.Module):
    """The weighted results of all cases, each of an input of its own, as one number."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for name, x in zip(self.names, inputs, strict=True):
            y = CASES[name][0](x)
            weights = np.linspace(0.5, 1.5, int(y.numel()), dtype=np.float32).reshape(tuple(map(int, y.shape)))
            total = total + (y * torch.tensor(weights)).sum()
        return total


def gradients(call: Callable[..., torch.Tensor], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    inputs = [CASES[name][1].clone().requires_grad_() for name in names]
    call(*inputs).backward()
    return {name: x.grad.numpy() for name, x in zip(names, inputs, strict=True) if x.grad is not None}


@functools.cache
def of_modules() -> dict[str, np.ndarray]:
    names = tuple(CASES)
    wrapped = burnish.torch.wrap(Total(names), tuple(CASES[name][1] for name in names), dynamic_shapes={})
    return gradients(wrapped, names)


@functools.cache
def of_files(exporter: str) -> dict[str, np.ndarray]:
    names = tuple(EXPORTED[exporter])
    examples = tuple(CASES[name][1].clone() for name in names)
    called = [f"x{place}" for place in range(len(names))]
    file = io.BytesIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(
            Total(names).eval(), examples, file, dynamo=exporter == "newer", input_names=called, output_names=["total"]
        )
    graph = burnish.grad(file.getvalue(), wrt=called, of="total")
    session = onnxruntime.InferenceSession(burnish.graph.model_proto(graph).SerializeToString())
    feeds = {name: example.numpy() for name, example in zip(called, examples, strict=True)}
    results = session.run([f"grad:{name}" for name in called], feeds)
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_modules_have_the_gradients_of_pytorch(name):
    expected = gradients(Total((name,)), (name,))[name]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(of_modules()[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EXPORTED["newer"])
def test_files_of_pytorch_have_its_gradients(name):
    expected = gradients(Total((name,)), (name,))[name]
    np.testing.assert_allclose(of_files("newer")[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EXPORTED["older"])
def test_files_of_the_older_exporter_have_its_gradients(name):
    found = of_files("older")[name]
    expected = gradients(Total((name,)), (name,))[name]
    if name in TAKEN_FOR_ANOTHER:
        assert np.isfinite(found).all()
        assert not np.allclose(found, expected, rtol=1e-4, atol=1e-6)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def exported(module: torch.nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    file = io.BytesIO()
    torch.onnx.export(module.eval(), (x,), file, dynamo=False, input_names=["x"], output_names=["y"])
    return onnx.load_from_string(file.getvalue())


def gradient_of_file(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    graph = burnish.grad(model, wrt=["x"], of="y")
    session = onnxruntime.InferenceSession(burnish.graph.model_proto(graph).SerializeToString())
    (found,) = session.run(["grad:x"], {"x": x, "cotangent:y": np.ones(x.shape, np.float32)})
    return found


def test_a_hardtanh_with_a_module_of_its_own_in_a_file_of_the_older_exporter():
    module = torch.nn.Sequential(torch.nn.Hardtanh(0, 20), torch.nn.Identity())
    x = np.array([-1, 0, 1, 20, 21], np.float32)
    assert gradient_of_file(exported(module, torch.tensor(x)), x).tolist() == [0, 0, 1, 0, 0]


class Angle(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.atan2(x, x.flip(0))


def test_an_angle_of_a_file_is_that_of_runtimes_and_of_pytorch_at_the_origin():
    x = torch.tensor([[1.0, -2, 0, 3, -1e-30], [2, 3, 0, -1, 1e30]])
    model = exported(Angle(), x)
    lowered = onnxruntime.InferenceSession(burnish.graph.model_proto(burnish.load(model)).SerializeToString())
    (found,) = lowered.run(None, {"x": x.numpy()})
    (of_runtime,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, torch.atan2(x, x.flip(0)), rtol=1e-6)
    np.testing.assert_allclose(np.delete(found, 2, 1), np.delete(of_runtime, 2, 1), rtol=1e-6)


class Prototypes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor([[1.0, 2, 0], [0, -1, 3]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cosine_similarity(x[:, None], self.rows[None], dim=-1)


def test_cosines_with_a_weight_whose_squares_the_older_exporter_stores():
    """The lengths follow the weight when it trains."""
    x, labels = torch.tensor([[1.0, 0, 2], [0, 0, 0], [3, 1, -1]]), torch.tensor([0, 1, 1])
    module = Prototypes()
    with pytest.warns(ObjectiveWarning, match="of which the file does not say what they were"):
        program = burnish.compile(exported(module, x), optimizer="sgd:lr=1.0,momentum=0")
    (name,) = (name for name in program.initial_state() if name.startswith("param/"))
    session = burnish.Session(program)
    before = session.state()[name].copy()
    session.step({"x": x.numpy(), "labels": labels.numpy()})
    functional.cross_entropy(module(x), labels).backward()
    np.testing.assert_allclose((before - session.state()[name]).reshape(2, 3), module.rows.grad, rtol=1e-4, atol=1e-6)


CLIPPED = """<ir_version: 10, opset_import: ["": 18], producer_name: "{producer}">
g (float[n] x) => (float[n] y) <float low = {{0}}, float high = {{{high}}}> {{ y = Clip(x, low, high) }}"""


@pytest.mark.parametrize(
    ("producer", "high", "expected"),
    [("pytorch", 1, [0, 1, 1, 1, 0]), ("pytorch", 6, [0, 0, 1, 1, 1]), ("", 1, [0, 0, 1, 0, 0])],
    ids=["a clamp of PyTorch", "its relu6", "plain ONNX"],
)
def test_a_clip_without_notes(producer, high, expected):
    model = onnx.parser.parse_model(CLIPPED.format(producer=producer, high=high))
    assert gradient_of_file(model, np.array([-1, 0, 0.5, 1, 2], np.float32)).tolist() == expected
