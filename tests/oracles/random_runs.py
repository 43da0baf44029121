"""Random ways to train one small model of tokens, drawn by Hypothesis, with the same in PyTorch: loss, optimizer, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from hypothesis import strategies as st
from onnx import numpy_helper
from torch.nn import functional

from burnish import losses, optim

WORDS, WIDTH, STEPS = 7, 4, 3
"""Tokens there are, extent of each, tokens in a sample."""
IGNORED, PADDING = -1, 2
VECTORS = ("bias", "scale", "shift")
Arrays = dict[str, np.ndarray]

TIES = ("none", "head", "layers", "both")
"""What is one weight: nothing, the table and the head, transposed; two layers; or both of these."""

Settings = dict[str, Any]
OPTIMIZERS: list[tuple[str, Callable[..., torch.optim.Optimizer], Settings]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "nesterov": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.125}),
    ("adam", torch.optim.Adam, {"lr": 0.03125}),
    ("adamw", torch.optim.AdamW, {"lr": 0.03125, "amsgrad": True}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.0625}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.015625, "momentum": 0.5, "centered": True}),
    ("adadelta", torch.optim.Adadelta, {"lr": 0.5}),
    ("adamax", torch.optim.Adamax, {"lr": 0.03125}),
    ("nadam", torch.optim.NAdam, {"lr": 0.03125}),
    ("radam", torch.optim.RAdam, {"lr": 0.03125}),
    ("asgd", torch.optim.ASGD, {"lr": 0.0625, "lambd": 0.0, "alpha": 0.75, "t0": 1e6}),
]


@dataclass(frozen=True)
class RandomRun:
    """A drawn run.

    Attributes:
        tie: of ``TIES``.
        weighted: whether classes have weights.
        smoothing: of labels.
        with_ignored: whether some tokens have no label.
        optimizer: a place of ``OPTIMIZERS``.
        weight_decay: of the optimizer.
        decays_weights: whether it is kept off biases and normalization.
        slower: the parameter that trains at a quarter of the rate.
        frozen: the parameter that does not train.
        holds_padding: whether a row of the table stays, where nothing else reads the table.
        largest_norm: of all gradients together.
        average: the decay of an average of the parameters.
        sizes: samples of each batch; batches of an update in a row.
        seed: of the weights and of the data.
    """

    tie: str
    weighted: bool
    smoothing: float
    with_ignored: bool
    optimizer: int
    weight_decay: float
    decays_weights: bool
    slower: str | None
    frozen: str | None
    holds_padding: bool
    largest_norm: float | None
    average: float | None
    sizes: tuple[tuple[int, ...], ...]
    seed: int

    @property
    def every(self) -> int:
        """Batches of an update."""
        return len(self.sizes[0])

    @property
    def is_held(self) -> bool:
        return self.holds_padding and self.tie in ("none", "layers") and self.frozen != "table"

    def weights(self) -> Arrays:
        """What the model starts with, float64."""
        rng = np.random.default_rng(self.seed)
        shapes = {"table": (WORDS, WIDTH), "first": (WIDTH, WIDTH), "bias": (WIDTH,), "scale": (WIDTH,), "shift": (WIDTH,)}
        if self.tie in ("none", "head"):
            shapes["second"] = (WIDTH, WIDTH)
        if self.tie in ("none", "layers"):
            shapes["head"] = (WIDTH, WORDS)
        return {name: rng.normal(size=shape) + (name == "scale") for name, shape in shapes.items()}

    def model(self, dtype: str) -> onnx.ModelProto:
        """The model, whose batch is open; ``dtype`` is float32 or float64."""
        kind = {"float32": "float", "float64": "double"}[dtype]
        second = "first" if self.tie in ("layers", "both") else "second"
        tied = self.tie in ("head", "both")
        head = "t = Transpose (table) logits = MatMul (n, t)" if tied else "logits = MatMul (n, head)"
        model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
            g (int64[N, {STEPS}] x) => ({kind}[N, {STEPS}, {WORDS}] logits) {{
                e = Gather (table, x)
                a = MatMul (e, first)
                b = Add (a, bias)
                h = Tanh (b)
                c = MatMul (h, {second})
                n = LayerNormalization <axis = -1> (c, scale, shift)
                {head}
            }}""")
        weights = self.weights().items()
        model.graph.initializer.extend(numpy_helper.from_array(array.astype(dtype), name) for name, array in weights)
        return model

    def loss(self) -> losses.Loss:
        return losses.cross_entropy(
            class_axis=-1,
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
            weight=tuple(self._class_weights()) if self.weighted else None,
        )

    def hold_rows(self) -> dict[str, list[int]] | None:
        return {"table": [PADDING]} if self.is_held else None

    def _class_weights(self) -> list[float]:
        return [0.5 + 0.25 * word for word in range(WORDS)]

    def updater(self) -> optim.Optimizer:
        """The optimizer, with all that goes around it."""
        name, _, settings = OPTIMIZERS[self.optimizer]
        base = optim.OPTIMIZERS[name](**settings, weight_decay=self.weight_decay)
        patterns: dict[str, Any] = {} if self.slower in (None, self.frozen) else {str(self.slower): {"lr_scale": 0.25}}
        if self.frozen is not None:
            patterns[self.frozen] = "frozen"
        updater = optim.groups(base, patterns, decay="weights" if self.decays_weights else "all")
        if self.largest_norm is not None:
            updater = optim.chain(optim.clip_by_global_norm(self.largest_norm), updater)
        if self.average is not None:
            updater = optim.ema(updater, decay=self.average, bias_correction=False)
        return optim.accumulate(updater, every=self.every) if self.every > 1 else updater

    def updates(self) -> Iterator[list[Arrays]]:
        """The batches of each update."""
        rng = np.random.default_rng(self.seed + 1)
        for sizes in self.sizes:
            batches = []
            for size in sizes:
                batch = {name: rng.integers(0, WORDS, (size, STEPS)) for name in ("x", "labels")}
                if self.with_ignored:
                    batch["labels"] = np.where(rng.random((size, STEPS)) < 0.4, IGNORED, batch["labels"])
                    batch["labels"][0, 0] = 1
                batches.append(batch)
            yield batches


class PyTorchRun:
    """The same run in PyTorch, in float64: one step for the batches of an update, put together."""

    def __init__(self, run: RandomRun):
        self.run = run
        self.parameters = {name: torch.tensor(array, requires_grad=name != run.frozen) for name, array in run.weights().items()}
        _, made, settings = OPTIMIZERS[run.optimizer]
        groups = []
        for name, parameter in self.parameters.items():
            decays = not (run.decays_weights and name in VECTORS)
            rate = settings["lr"] * (0.25 if name == run.slower else 1.0)
            if parameter.requires_grad:
                groups.append({"params": [parameter], "lr": rate, "weight_decay": run.weight_decay if decays else 0.0})
        self.optimizer = made(groups, **settings)
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def loss_of(self, batch: Arrays, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        run = self.run
        tied = run.tie in ("head", "both")
        x, labels = torch.tensor(batch["x"]), torch.tensor(batch["labels"])
        embedded = functional.embedding(x, weights["table"], padding_idx=PADDING if run.is_held else None)
        hidden = torch.tanh(embedded @ weights["first"] + weights["bias"])
        hidden = hidden @ weights["first" if run.tie in ("layers", "both") else "second"]
        normal = functional.layer_norm(hidden, (WIDTH,), weights["scale"], weights["shift"])
        logits = normal @ (weights["table"].T if tied else weights["head"])
        class_weights = torch.tensor(run._class_weights(), dtype=torch.float64) if run.weighted else None
        settings = {"weight": class_weights, "label_smoothing": run.smoothing, "ignore_index": IGNORED}
        return functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), **settings)

    def update(self, batches: list[Arrays]) -> float:
        """Train on the batches as one; return the loss of the last of them alone, before the update."""
        last = float(self.loss_of(batches[-1], self.parameters).detach())
        whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        self.optimizer.zero_grad()
        self.loss_of(whole, self.parameters).backward()
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        if self.run.largest_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack([parameter.grad.norm() for parameter in trained]))
            for parameter in trained:
                parameter.grad *= min(1.0, self.run.largest_norm / (float(norm) + 1e-6))  # as clip_grad_norm_
        before = self.parameters["table"].detach()[PADDING].clone()
        self.optimizer.step()
        with torch.no_grad():
            if self.run.is_held:
                self.parameters["table"][PADDING] = before  # which PyTorch decays, and burnish holds
            if self.run.average is not None:
                for name, parameter in self.parameters.items():
                    self.average[name].lerp_(parameter.detach(), 1 - self.run.average)
        return last


@st.composite
def random_runs(draw: st.DrawFn) -> RandomRun:
    tie, every = draw(st.sampled_from(TIES)), draw(st.sampled_from((1, 2, 3)))
    sizes = draw(st.lists(st.tuples(*[st.integers(1, 5)] * every), min_size=3, max_size=4))
    names = ["table", "first", "bias", "scale"]
    frozen, optimizer = draw(st.sampled_from((None, None, *names))), draw(st.integers(0, len(OPTIMIZERS) - 1))
    averages = (None,) if OPTIMIZERS[optimizer][0] == "asgd" else (None, 0.75)  # which keeps an average itself
    return RandomRun(
        tie=tie,
        weighted=draw(st.booleans()),
        smoothing=draw(st.sampled_from((0.0, 0.125))),
        with_ignored=draw(st.booleans()),
        optimizer=optimizer,
        weight_decay=draw(st.sampled_from((0.0, 0.0625))),
        decays_weights=draw(st.booleans()),
        slower=draw(st.sampled_from((None, *names))),
        frozen=frozen,
        holds_padding=draw(st.booleans()),
        largest_norm=draw(st.sampled_from((None, 0.125, 4.0))),
        average=draw(st.sampled_from(averages)),
        sizes=tuple(sizes),
        seed=draw(st.integers(0, 2**16)),
    )
