"""``EmbeddingBag`` as both exporters of PyTorch write it: losses and gradients are PyTorch's, and stay by rows where they can."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

import burnish
from burnish import optim
from oracles.combinations import spread

ROWS, WIDTH = 11, 3
BAGS = torch.tensor([[1, 2, 2], [4, 4, 0], [9, 10, 1]])
INDICES = torch.tensor([1, 2, 2, 4, 0, 9, 9])
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0, -0.5, 1.5], dtype=torch.float64)
FORMS: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...]]] = {
    "two axes": ({}, (BAGS,)),
    "offsets": ({}, (INDICES, torch.tensor([0, 3, 5]))),
    "last offset": ({"include_last_offset": True}, (INDICES, torch.tensor([0, 3, 5, 7]))),
    "padding": ({"padding_idx": 2}, (BAGS,)),
    "weights": ({}, (INDICES, torch.tensor([0, 3, 5]), WEIGHTS)),
}


class Bags(torch.nn.Module):
    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode=mode, **options)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, *given: torch.Tensor) -> Any:
        return self.head(self.bag(*given))


def exported(module: torch.nn.Module, given: tuple[torch.Tensor, ...], dynamo: bool) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
    torch.onnx.export(module, given, file, input_names=[f"given_{place}" for place in range(len(given))], **options)
    return file.getvalue()


def difference(mode: str, form: str, dynamo: bool, by_rows: bool) -> float:
    """How far the loss, and the table after a step of SGD, are from PyTorch's."""
    settings, given = FORMS[form]
    module = Bags(mode, **settings).double()
    program = burnish.compile(exported(module, given, dynamo), optimizer=optim.sgd(lr=1.0), sparse="auto", metrics=[])
    assert any(entry.name == "rows:bag.weight" for entry in program.signature["grad"].outputs) == by_rows
    session = burnish.Session(program, engine="reference")
    labels = np.arange(3) % 2
    figures = session.step({f"given_{place}": tensor.numpy() for place, tensor in enumerate(given)} | {"labels": labels})
    loss = torch.nn.functional.cross_entropy(module(*given), torch.from_numpy(labels))
    loss.backward()
    assert module.bag.weight.grad is not None
    expected = (module.bag.weight - module.bag.weight.grad).detach().numpy()
    return float(max(abs(figures["loss"] - loss.item()), np.abs(session.state()["param/bag.weight"] - expected).max()))


@spread(
    ("mode", "form"),
    [(mode, form) for mode in ("sum", "mean", "max") for form in ("two axes", "offsets", "last offset")] + [("sum", "weights")],
    test=4,
)
def test_exports_of_torchscript(mode: str, form: str) -> None:
    """That of a maximum reads the table in a loop over the bags, where a gradient is not kept by rows."""
    assert difference(mode, form, dynamo=False, by_rows=mode != "max") < 1e-10


def test_torchscript_refuses_padding() -> None:
    with pytest.raises(RuntimeError, match="embedding_bag with padding_idx"):
        exported(Bags("sum", padding_idx=2), (BAGS,), dynamo=False)


DYNAMO = [
    ("sum", "offsets"),
    ("max", "padding"),
    *(
        pytest.param(mode, form, marks=pytest.mark.slow)
        for mode, form in (
            ("sum", "weights"),
            ("mean", "two axes"),
            ("mean", "last offset"),
            ("max", "offsets"),
            ("sum", "padding"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "form"), DYNAMO)
def test_exports_of_dynamo(mode: str, form: str) -> None:
    """The exporter casts rows to float32 and back, also of a table in float64: the digits are those of float32."""
    assert difference(mode, form, dynamo=True, by_rows=True) < 1e-6
