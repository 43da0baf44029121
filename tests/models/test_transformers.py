"""The shipped transformers: valid ONNX, the same networks as in PyTorch, trained as PyTorch trains them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import burnish
from burnish import optim
from burnish.errors import ConfigurationError, DenseGradientWarning
from burnish.models import bert, gpt2
from oracles.combinations import spread
from oracles.float64_values import widened

VOCABULARY, WIDTH, HEADS, POSITIONS = 23, 8, 2, 9
SIZES = {"width": WIDTH, "layers": 2, "heads": HEADS, "positions": POSITIONS}
CAUSAL = "cross_entropy:class_axis=-1"
STEPS = 20
Batch = dict[str, np.ndarray]


@cache
def built(name: str) -> onnx.ModelProto:
    model = {
        "gaps": lambda: bert(VOCABULARY, **SIZES, dropout=0.0),
        "classes": lambda: bert(VOCABULARY, 3, **SIZES, dropout=0.0),
        "tied": lambda: gpt2(VOCABULARY, **SIZES, dropout=0.0),
        "untied": lambda: gpt2(VOCABULARY, **SIZES, dropout=0.0, tied=False),
    }[name]()
    return ir.to_proto(model)


class Network:
    """The same in PyTorch, written anew, with the weights of a model."""

    def __init__(self, model: onnx.ModelProto, dtype: torch.dtype):
        self.dtype = dtype
        self.weights = {
            tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor), dtype=dtype, requires_grad=True)
            for tensor in model.graph.initializer
        }

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"].T, self.weights[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        # ONNX keeps epsilon in float32.
        epsilon = float(np.float32(eps))
        return functional.layer_norm(x, (WIDTH,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], epsilon)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights["embeddings.tokens"][ids] + self.weights["embeddings.positions"][: ids.shape[1]]

    def attention(self, name: str, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (
            self.linear(f"{name}.{part}", x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None)
        return self.linear(f"{name}.output", mixed.transpose(1, 2).flatten(2))

    def bert(self, batch: Batch) -> torch.Tensor:
        seen = torch.tensor(batch["attention_mask"], dtype=torch.bool)[:, None, None, :]
        x = self.norm("embeddings.norm", self.embedded(torch.tensor(batch["input_ids"])), 1e-12)
        for layer in ("layers.1", "layers.2"):
            x = self.norm(f"{layer}.attention.norm", x + self.attention(f"{layer}.attention", x, seen), 1e-12)
            inner = functional.gelu(self.linear(f"{layer}.up", x))
            x = self.norm(f"{layer}.norm", x + self.linear(f"{layer}.down", inner), 1e-12)
        if "classifier.weight" in self.weights:
            return self.linear("classifier", torch.tanh(self.linear("pooler", x[:, 0])))
        x = self.norm("head.norm", functional.gelu(self.linear("head.dense", x)), 1e-12)
        return x @ self.weights["embeddings.tokens"].T + self.weights["head.bias"]

    def gpt2(self, batch: Batch) -> torch.Tensor:
        x = self.embedded(torch.tensor(batch["input_ids"]))
        for layer in ("layers.1", "layers.2"):
            x = x + self.attention(f"{layer}.attention", self.norm(f"{layer}.attention.norm", x, 1e-5), None)
            inner = functional.gelu(self.linear(f"{layer}.up", self.norm(f"{layer}.norm", x, 1e-5)), approximate="tanh")
            x = x + self.linear(f"{layer}.down", inner)
        return self.norm("norm", x, 1e-5) @ self.weights.get("head.weight", self.weights["embeddings.tokens"]).T


def batches(count: int) -> Iterator[Batch]:
    """Texts of several lengths, padded to one that differs from batch to batch; each token but a few says which one is next."""
    rng = np.random.default_rng(0)
    for number in range(count):
        tokens = 5 + number % 4
        lengths = rng.integers(2, tokens + 1, 4)
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        ids = (rng.integers(0, 5, (4, 1)) + np.arange(tokens) * 2 + (rng.random((4, tokens)) < 0.1)) % VOCABULARY * mask
        labels = np.where(np.arange(tokens) < lengths[:, None] - 1, np.roll(ids, -1, axis=1), -100)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def inputs_of(program: burnish.Program, batch: Batch) -> Batch:
    return {entry.name: batch[entry.name] for entry in program.signature["step"].inputs if entry.name in batch}


@spread("name", ["gaps", "classes", "tied", "untied"], test=2)
def test_the_networks_are_those_of_pytorch(name: str) -> None:
    model = built(name)
    onnx.checker.check_model(model, full_check=True)
    loss = "cross_entropy" if name == "classes" else CAUSAL
    session = burnish.Session(burnish.compile(model, loss=loss))
    network = Network(model, torch.float64)
    for batch in batches(2):
        wanted = (network.bert if name in ("gaps", "classes") else network.gpt2)(batch).detach().numpy()
        inputs = {entry.name: batch[entry.name] for entry in session.program.signature["predict"].inputs if entry.name in batch}
        np.testing.assert_allclose(session.predict(inputs)["logits"], wanted, rtol=1e-4, atol=2e-6)


def by_hand(weights: dict[str, torch.Tensor]) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """PyTorch's AdamW with no decay on norms and biases, at a rate that rises for 5 steps and then follows a cosine."""
    matrices = [weight for name, weight in weights.items() if weight.ndim == 2]
    vectors = [weight for name, weight in weights.items() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def rate(step: int) -> float:
    return step / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 16))


def losses_of_pytorch(model: onnx.ModelProto, dtype: torch.dtype) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    network = Network(model, dtype)
    optimizer, schedule = by_hand(network.weights)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(network.gpt2(batch).transpose(1, 2), torch.tensor(batch["labels"]))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return np.array(losses), {name: weight.detach().numpy() for name, weight in network.weights.items()}


def losses_of_burnish(model: onnx.ModelProto, engine: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    schedule = optim.schedules.warmup(optim.schedules.cosine(0.01, 16), 5, start=0.0)
    optimizer = optim.groups(optim.adamw(lr=schedule, weight_decay=0.1), decay="weights")
    session = burnish.Session(burnish.compile(model, loss=CAUSAL, optimizer=optimizer), engine=engine)
    losses = [session.step(inputs_of(session.program, batch))["loss"] for batch in batches(STEPS)]
    state = session.state()
    return np.array(losses), {name: state[f"param/{name}"] for name in (tensor.name for tensor in model.graph.initializer)}


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.slow
def test_twenty_steps_of_a_causal_model_are_those_of_pytorch(name: str) -> None:
    """In float64 to 1e-10; in float32 as near to float64 as PyTorch's own float32."""
    model = built(name)
    wanted, weights = losses_of_pytorch(model, torch.float64)
    assert wanted[-1] < wanted[0] - 0.1
    losses, trained = losses_of_burnish(widened(model), "torch")
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    for key, weight in weights.items():
        np.testing.assert_allclose(trained[key], weight, rtol=1e-8, atol=1e-10, err_msg=key)
    in_float32, _ = losses_of_pytorch(model, torch.float32)
    limit = 2 * np.abs(in_float32 - wanted).max() + np.finfo(np.float32).eps * wanted[0]
    for engine in ("onnxruntime", "torch"):
        assert np.abs(losses_of_burnish(model, engine)[0] - wanted).max() <= limit, engine


def test_a_tied_table_is_dense_with_a_warning_that_names_what_reads_it_too() -> None:
    adagrad = optim.adagrad(lr=0.1)
    with pytest.warns(DenseGradientWarning, match="'embeddings.tokens': Transpose .* reads it too"):
        program = burnish.compile(built("tied"), loss=CAUSAL, optimizer=adagrad, sparse="auto")
    gradients = {entry.name for entry in program.signature["grad"].outputs}
    assert "grad:embeddings.tokens" in gradients
    assert "rows:embeddings.tokens" not in gradients


def test_an_untied_table_trains_by_rows_as_the_dense_one_of_pytorch() -> None:
    model = built("untied")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DenseGradientWarning)
        program = burnish.compile(widened(model), loss=CAUSAL, optimizer=optim.adagrad(lr=2.0**-5), sparse="auto")
    gradients = {entry.name for entry in program.signature["grad"].outputs}
    assert {"rows:embeddings.tokens", "rows:embeddings.positions", "grad:head.weight"} <= gradients
    session = burnish.Session(program, engine="torch")
    network = Network(model, torch.float64)
    adagrad = torch.optim.Adagrad(network.weights.values(), lr=2.0**-5)
    for batch in batches(STEPS):
        adagrad.zero_grad()
        wanted = functional.cross_entropy(network.gpt2(batch).transpose(1, 2), torch.tensor(batch["labels"]))
        wanted.backward()
        adagrad.step()
        assert session.step(inputs_of(program, batch))["loss"] == pytest.approx(wanted.item(), rel=1e-10)
    table = network.weights["embeddings.tokens"].detach().numpy()
    np.testing.assert_allclose(session.state()["param/embeddings.tokens"], table, rtol=1e-8, atol=1e-10)


@spread("engine", ["onnxruntime", "torch"], test=1)
def test_padding_changes_neither_loss_nor_gradient(engine: str) -> None:
    batch = next(iter(batches(1)))
    added = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    longer = {name: np.pad(array, ((0, 0), (0, 3)), constant_values=added[name]) for name, array in batch.items()}
    for name in ("gaps", "tied"):
        program = burnish.compile(built(name), loss=CAUSAL)
        state = program.initial_state()
        feeds = {entry.name: state[entry.name] for entry in program.signature["grad"].inputs if entry.name in state}
        runner = burnish.engines.get(engine)
        short, padded = (runner.run(program.grad, feeds | inputs_of(program, each)) for each in (batch, longer))
        for key, array in short.items():
            if key.startswith(("loss", "grad:")):
                np.testing.assert_allclose(padded[key], array, rtol=1e-4, atol=1e-6, err_msg=f"{name} {key}")


def test_weights_of_the_encoder_go_on_in_a_classifier() -> None:
    shared = {tensor.name for tensor in built("gaps").graph.initializer} & {
        tensor.name for tensor in built("classes").graph.initializer
    }
    assert {name for name in shared if not name.startswith(("embeddings", "layers"))} == set()
    assert len(shared) == 4 + 2 * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bert(0), "vocabulary=0: give a whole number of 1 or more"),
        (lambda: bert(5, classes=0), "classes=0"),
        (lambda: bert(5, width=6, heads=4), "width=6 is no multiple of heads=4"),
        (lambda: gpt2(5, layers=1.5), "layers=1.5"),
        (lambda: gpt2(5, dropout=1.0), "dropout=1.0: give the share that is dropped"),
    ],
)
def test_sizes_that_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
