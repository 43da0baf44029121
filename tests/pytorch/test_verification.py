"""A module is compared with its graph when it is exported: what differs, freezes or is lost is an error by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import burnish
import burnish.torch
from burnish.errors import AttributesWarning, FixedBatchWarning, UnsupportedOperatorError
from burnish.importer.pytorch import conversion, translation
from burnish.torch.bound import bind_export

onnxscript = pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")


class Function(nn.Module):
    """A layer and a function of what it computes."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.function = [function]

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.function[0](self.layer(x), *others)


@pytest.fixture
def wrong_mish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter takes mish for a Softplus."""

    def softplus(x: onnxscript.onnx_types.TensorType) -> onnxscript.onnx_types.TensorType:
        return translation.op.Softplus(x)

    monkeypatch.setitem(conversion.TRANSLATIONS, torch.ops.aten.mish.default, softplus)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrap", "load", "compile"])
def test_a_wrong_translation_is_an_error_that_names_the_node(wrong_mish: None, way: str) -> None:
    module, x = Function(lambda h: functional.mish(h) * 2), torch.randn(3, 4)
    make: dict[str, Callable[..., object]] = {
        "wrap": lambda **options: burnish.torch.wrap(module, x, **options),
        "load": lambda **options: burnish.load(module, example_inputs=x, **options),
        "compile": lambda **options: burnish.compile(module, example_inputs=x, loss="mse", **options),
    }
    message = (
        r"the graph of Function computes something else.*in training.*'output' differs.*first at aten.mish.default \('mish'\)"
    )
    with pytest.raises(UnsupportedOperatorError, match=message):
        make[way]()
    assert make[way](verify=False) is not None


@pytest.mark.slow
def test_a_part_that_differs_stays_in_pytorch(wrong_mish: None) -> None:
    torch._dynamo.reset()
    module, x = Function(lambda h: functional.mish(h) * 2), torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(module, backend="burnish")(x), module(x))
    torch._dynamo.reset()
    unchecked = torch.compile(module, backend="burnish", options={"verify": False})(x)
    assert not torch.allclose(unchecked, module(x))


@pytest.mark.slow
def test_a_comparison_leaves_the_module_as_it_is() -> None:
    class Moving(Function):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.norm, self.seen = nn.BatchNorm1d(6), []
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            self.seen.append(tuple(x.shape))
            return functional.dropout(self.norm(self.layer(x)), 0.5, self.training)

    module, x = Moving(), torch.randn(3, 4)
    before, draws = copy.deepcopy(module.state_dict()), (random.getstate(), torch.get_rng_state())
    burnish.torch.wrap(module, x)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert module.seen == []
    assert random.getstate() == draws[0]
    assert torch.equal(torch.get_rng_state(), draws[1])
    assert all(parameter.grad is None for parameter in module.parameters())


IGNORED = {
    "label smoothing": lambda h, y: functional.cross_entropy(h, y, label_smoothing=0.3),
    "an ignored class and weights": lambda h, y: functional.cross_entropy(
        h, y, torch.arange(1.0, 7.0), ignore_index=2, label_smoothing=0.1
    ),
    "divisor": lambda h, y: functional.avg_pool2d(h.reshape(-1, 1, 2, 3), 2, divisor_override=3),
    "divisor and ceiling": lambda h, y: functional.avg_pool2d(
        h.reshape(-1, 1, 2, 3), 2, 2, 1, ceil_mode=True, divisor_override=3
    ),
    "means": lambda h, y: h.new_zeros(6, 6).scatter_reduce(0, y[:, None].expand(-1, 6), h, "mean", include_self=False),
    "means with what was there": lambda h, y: h.new_ones(6, 6).scatter_reduce(0, y[:, None].expand(-1, 6), h, "mean"),
    "scale": lambda h, y: functional.interpolate(h[:, None], scale_factor=0.7, mode="linear"),
    "padding of a computed table": lambda h, y: functional.embedding(y, torch.tanh(h), padding_idx=1),
    "probabilities as targets": lambda h, y: functional.cross_entropy(h, torch.softmax(h.detach().flip(1), 1)),
    "one part": lambda h, y: h.chunk(1, 0)[0] * h.split(len(h))[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", IGNORED)
def test_arguments_that_translations_do_not_read_count(what: str) -> None:
    torch.manual_seed(0)
    module = Function(IGNORED[what])
    wrapped = burnish.torch.wrap(copy.deepcopy(module), (torch.randn(4, 4), torch.tensor([0, 1, 2, 1])))
    args, found = (torch.randn(5, 4), torch.tensor([0, 1, 1, 3, 2])), []
    for each in (wrapped, module):
        y = each(*args)
        (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
        found.append([y.detach(), *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: nn.Embedding(5, 4, max_norm=0.5),
            r"forward writes to the table of an embedding, as max_norm does",
        ),
        (lambda: nn.Embedding(5, 4, scale_grad_by_freq=True), r"aten.embedding.default has scale_grad_by_freq=True"),
        (lambda: nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), r"the gradient of '0.weight' differs"),
    ],
)
def test_options_of_embeddings_that_graphs_have_not_are_refused_and_computed_in_part(build, reason: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, rows = nn.Sequential(build(), nn.Tanh()), torch.tensor([[0, 1, 1], [2, 1, 3]])
    with pytest.raises(UnsupportedOperatorError, match=reason):
        burnish.torch.wrap(module, rows)
    partial = burnish.torch.wrap(copy.deepcopy(module), rows, partial=True)
    torch.testing.assert_close(partial(rows), module(rows))


class Counting(Function):
    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.layer(x) * self.step


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Counting(), r"forward changes its attribute 'step' at each call"),
        (Function(lambda h: h if random.random() < 0.01 else -h), r"forward draws random numbers in Python or NumPy"),
        (Function(lambda h: h * float(np.random.rand())), r"forward draws random numbers in Python or NumPy"),  # noqa: NPY002
    ],
    ids=["count", "random", "numpy"],
)
def test_what_python_counts_and_draws_is_refused_by_its_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=reason):
        burnish.torch.wrap(module, torch.randn(3, 4))


@pytest.mark.slow
def test_draws_that_nothing_depends_on_are_left_alone() -> None:
    module = Function(lambda h: h if random.random() < 0.0 else -h)
    x = torch.randn(3, 4)
    torch.testing.assert_close(burnish.torch.wrap(module, x)(x), module(x))


def test_attributes_that_forward_computes_are_warned_of() -> None:
    class Auxiliary(Function):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.loss = self.layer(x).square().mean()
            return self.layer(x)

    with pytest.warns(AttributesWarning, match=r"forward of Auxiliary sets attributes to what it computes: 'loss'"):
        burnish.torch.wrap(Auxiliary(torch.tanh), torch.randn(3, 4))


def test_the_graph_that_was_compared_is_the_one_that_runs(monkeypatch):
    bound = []
    for name in ("module_graphs", "verification"):
        monkeypatch.setattr(f"burnish.torch.{name}.bind_export", lambda *given: bound.append(given[2]) or bind_export(*given))
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x = torch.randn(5, 3)
    result = burnish.torch.wrap(module, (x,))(x)
    assert torch.allclose(result, module(x), atol=1e-6)
    assert bound == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_mish")
def test_a_module_that_takes_one_sample_alone_is_compared():
    module = Function(lambda x: functional.mish(x).reshape(1, 6))
    with pytest.warns(FixedBatchWarning), pytest.raises(UnsupportedOperatorError, match="computes something else"):
        burnish.torch.wrap(module, (torch.randn(1, 4),))
