"""The shipped recommendation model: valid ONNX, the same network as in PyTorch, and trained by rows as PyTorch trains it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import burnish
from burnish.data import synthetic_clicks
from burnish.errors import ConfigurationError, InputError
from burnish.models import dlrm
from oracles.combinations import spread

ROWS, NUMBERS, WIDTH = (5, 40, 300), 4, 6


def small(seed: int = 0) -> ir.Model:
    return dlrm(ROWS, NUMBERS, WIDTH, bottom=(8,), top=(10, 7), seed=seed)


class Network(nn.Module):
    """The same in PyTorch, with the weights of a model."""

    def __init__(self, model: ir.Model):
        super().__init__()
        values = {name: torch.tensor(value.const_value.numpy()) for name, value in model.graph.initializers.items()}
        self.tables = nn.ModuleList(
            nn.Embedding(count, WIDTH, sparse=True, _weight=values[f"table_{place}"]) for place, count in enumerate(ROWS, 1)
        )
        self.bottom, self.top = (
            nn.ModuleList(self.dense(values, f"{part}_{place}") for place in range(1, count + 1))
            for part, count in (("bottom", 2), ("top", 3))
        )

    @staticmethod
    def dense(values: dict[str, torch.Tensor], name: str) -> nn.Linear:
        layer = nn.Linear(*reversed(values[f"{name}.weight"].shape))
        layer.load_state_dict({"weight": values[f"{name}.weight"], "bias": values[f"{name}.bias"]})
        return layer

    def forward(self, batch: dict[str, np.ndarray]) -> torch.Tensor:
        x = torch.tensor(batch["numbers"])
        for layer in self.bottom:
            x = torch.relu(layer(x))
        looked_up = [table(torch.tensor(batch[f"category_{place}"])) for place, table in enumerate(self.tables, 1)]
        vectors = torch.stack([x, *looked_up], 1)
        row, column = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, offset=-1)
        y = torch.cat([x, (vectors @ vectors.transpose(1, 2))[:, row, column]], 1)
        for layer in self.top[:-1]:
            y = torch.relu(layer(y))
        return self.top[-1](y)


def program(model: ir.Model, **options: object) -> burnish.Program:
    return burnish.compile(
        model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(lr=2.0**-5), metrics=["auc"], sparse="auto", **options
    )


def test_it_is_valid_and_seeded() -> None:
    onnx.checker.check_model(ir.to_proto(small()), full_check=True)
    one, same, other = (small(seed).graph.initializers["table_2"].const_value.numpy() for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_every_table_is_updated_by_rows() -> None:
    by_rows = {entry.updates for entry in program(small()).signature["step"].outputs if entry.by_rows}
    expected = {f"{kind}/table_{place}" for kind in ("param", "opt/sum_of_squares") for place in (1, 2, 3)}
    assert by_rows == expected


@spread("engine", ["onnxruntime", "torch"], test=1)
def test_it_trains_as_pytorch_trains_it(engine: str) -> None:
    model, data = small(), synthetic_clicks(20 * 16, ROWS, NUMBERS)
    network = Network(model)
    optimizer = torch.optim.Adagrad(network.parameters(), lr=2.0**-5)
    with burnish.Session(program(model), engine=engine) as session:
        for start in range(0, len(data), 16):
            batch = data.batch(np.arange(start, start + 16))
            loss = nn.functional.binary_cross_entropy_with_logits(network(batch), torch.tensor(batch["targets"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert session.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        state = session.state()
    for place, table in enumerate(network.tables, 1):
        np.testing.assert_allclose(state[f"param/table_{place}"], table.weight.detach().numpy(), rtol=1e-3, atol=1e-4)


def test_a_row_that_a_table_does_not_have_is_named() -> None:
    batch = synthetic_clicks(4, ROWS, NUMBERS).batch(np.arange(4))
    batch["category_2"][1] = 40
    with burnish.Session(program(small())) as session, pytest.raises(InputError, match=r"'category_2'.* 40"):
        session.step(batch)


@pytest.mark.parametrize("sizes", [{"rows": []}, {"rows": [0]}, {"rows": [3], "width": 0}, {"rows": [3], "top": (1.5,)}], ids=str)
def test_sizes_that_do_not_fit(sizes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"dlrm: rows=.*every number has to be whole and 1 or more"):
        dlrm(**sizes)
