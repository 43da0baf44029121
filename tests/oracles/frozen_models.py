"""Sixty programs of every kind, from fixed seeds; ``test_frozen_graphs`` compares their lowered graphs with those on record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

import burnish
from burnish import losses, optim
from burnish.graph import Tensor
from oracles import adapted_models, layers_in_bodies
from oracles.classical_files import logistic_regression
from oracles.decoder_files import decoder
from oracles.embedding_tables import tables_model
from oracles.normalization_policies import network as policies_network
from oracles.normalized_networks import inverted_residual
from oracles.small_networks import CLASSES, Network, mobile, perceptron, transformer

DRAWN = 25
"""Networks of the catalogue that a seed draws."""

Compiled = Callable[[], burnish.Program]
_ELEMENTWISE = ("Relu", "Tanh", "Sigmoid", "Elu", "Softplus", "HardSwish", "LeakyRelu", "Erf", "Mish", "Celu", "Softsign", "Gelu")


def drawn_network(seed: int) -> ir.Model:
    """A classifier of images of 3 x 10 x 10: layers that the seed draws, with shortcuts and cuts between them."""
    generator = np.random.default_rng(seed)
    network = Network(f"drawn_{seed}", [3, 10, 10])
    network.graph.opset_imports[""] = 22
    builder, x, channels = network.builder, network.input, 3

    def pick(*choices: Any) -> Any:
        return choices[int(generator.integers(len(choices)))]

    def convolution(name: str, x: Tensor, channels: int, outputs: int) -> Tensor:
        kernel, group = pick(1, 3, 3, 5), channels if channels == outputs and pick(True, False) else 1
        weight = network.drawn(f"{name}.weight", outputs, channels // group, kernel, kernel, fan_in=kernel**2 * channels // group)
        bias = (network.drawn(f"{name}.bias", outputs, fan_in=4),) if pick(True, False) else ()
        return builder.op("Conv", x, weight, *bias, pads=[kernel // 2] * 4, strides=[1, 1], group=group)

    def normalized(name: str, x: Tensor, channels: int) -> Tensor:
        kind = pick("batch", "batch", "instance", "group", "layer", "local")
        scale, bias = (network.drawn(f"{name}.{part}", channels, fan_in=2) for part in ("factor", "offset"))
        if kind == "batch":
            return network.normalized(name, x, channels)
        if kind == "instance":
            return builder.op("InstanceNormalization", x, scale, bias)
        if kind == "group":
            return builder.op("GroupNormalization", x, scale, bias, num_groups=channels // 4)
        if kind == "layer":
            moved = builder.op("Transpose", x, perm=[0, 2, 3, 1])
            return builder.op("Transpose", builder.op("LayerNormalization", moved, scale, bias, axis=-1), perm=[0, 3, 1, 2])
        return builder.op("LRN", x, size=3)

    def pooled(x: Tensor) -> Tensor:
        kind = pick("MaxPool", "AveragePool", "LpPool")
        return builder.op(kind, x, kernel_shape=[2, 2], strides=[1, 1], auto_pad="SAME_UPPER")

    def squeezed(name: str, x: Tensor, channels: int) -> Tensor:
        gate = builder.op("ReduceMean", x, builder.integers([2, 3]), keepdims=1)
        gate = builder.op("Conv", gate, network.drawn(f"{name}.gate", channels, channels, 1, 1, fan_in=channels))
        return x * builder.op("Sigmoid", gate)

    def cut_and_joined(x: Tensor, channels: int) -> Tensor:
        half = channels // 2
        first = builder.op("Slice", x, builder.integers([0]), builder.integers([half]), builder.integers([1]))
        second = builder.op("Slice", x, builder.integers([half]), builder.integers([channels]), builder.integers([1]))
        return builder.op("Concat", second, builder.op(pick(*_ELEMENTWISE), first), axis=1)

    def flipped(x: Tensor) -> Tensor:
        padded = builder.op("Pad", x, builder.integers([0, 0, 1, 1, 0, 0, 1, 1]), mode=pick("reflect", "edge", "constant"))
        return builder.op("AveragePool", padded, kernel_shape=[3, 3])

    for layer in range(int(generator.integers(4, 8))):
        name, before = f"layer{layer}", x
        outputs = 8 if layer == 0 else pick(8, 8, 12)
        if layer == 0 or outputs != channels:
            x, channels = convolution(name, x, channels, outputs), outputs
            continue
        kind = pick("conv", "conv", "norm", "norm", "act", "act", "pool", "squeeze", "cut", "pad", "dropout")
        if kind == "conv":
            x = convolution(name, x, channels, channels)
        elif kind == "norm":
            x = normalized(name, x, channels)
        elif kind == "act":
            x = builder.op(pick(*_ELEMENTWISE), x)
        elif kind == "pool":
            x = pooled(x)
        elif kind == "squeeze":
            x = squeezed(name, x, channels)
        elif kind == "cut":
            x = cut_and_joined(x, channels)
        elif kind == "pad":
            x = flipped(x)
        else:
            x = builder.op("Dropout", x, builder.constant(np.float32(0.25)))
        if pick(True, False):
            x = x + before
    features = builder.op("Flatten", builder.op("GlobalAveragePool", x))
    return network.model(network.dense("head", features, channels, CLASSES))


def recurrent(kind: str, direction: str = "forward") -> ir.Model:
    """An LSTM, a GRU or an RNN over a sequence [batch, 7, 5], with time first inside."""
    gates, width, steps, features = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 6, 7, 5
    directions = 2 if direction == "bidirectional" else 1
    network = Network(kind.lower(), [steps, features])
    builder = network.builder
    weights = (
        network.drawn("input", directions, gates * width, features, fan_in=features),
        network.drawn("hidden", directions, gates * width, width, fan_in=width),
        network.drawn("bias", directions, 2 * gates * width, fan_in=width),
    )
    x = builder.op("Transpose", network.input, perm=[1, 0, 2])
    outputs = builder.op(kind, x, *weights, hidden_size=width, direction=direction, outputs=3 if kind == "LSTM" else 2)
    last = builder.op("Transpose", outputs[1], perm=[1, 0, 2])
    flat = builder.op("Reshape", last, builder.integers([-1, directions * width]))
    return network.model(network.dense("head", flat, directions * width, CLASSES))


def catalogue() -> dict[str, Compiled]:
    """Name -> what compiles it; the same sixty in every run."""
    compile_ = burnish.compile
    images = partial(burnish.models.residual_network, (1, 8, 8), 4, 4)
    found: dict[str, Compiled] = {f"drawn_{seed}": partial(_drawn, seed) for seed in range(DRAWN)}
    for name, options in _OPTIONS.items():
        found[name] = lambda options=options: compile_(perceptron(dropout=True), **options)
    for name, options in _ON_IMAGES.items():
        found[f"residual_{name}"] = lambda options=options: compile_(images(), **options)
    for norm in ("train", "local", "frozen"):
        found[f"mobile_{norm}"] = lambda norm=norm: compile_(mobile(), norm=norm, optimizer=optim.adam(lr=1e-3))
    for kind, direction in (("LSTM", "bidirectional"), ("GRU", "forward"), ("RNN", "reverse")):
        found[kind.lower()] = lambda kind=kind, direction=direction: compile_(recurrent(kind, direction), optimizer="adam")
    return found | {
        "transformer": lambda: compile_(transformer(), optimizer=optim.adamw(lr=1e-3)),
        "bert": lambda: compile_(burnish.models.bert(40, 3, 16, 1, 2, 32, 16), optimizer=optim.lamb(lr=1e-3)),
        "gpt2": lambda: compile_(burnish.models.gpt2(40, 16, 1, 2, 32, 16), optimizer=optim.lion(lr=1e-4)),
        "dlrm": lambda: compile_(
            burnish.models.dlrm((50, 30), 4, 8, (8,), (8,)), loss="bce_with_logits", optimizer=optim.adagrad(lr=1e-2)
        ),
        "tables": lambda: compile_(tables_model("float32"), optimizer="adam", sparse=["word_table"]),
        "branches": lambda: compile_(layers_in_bodies.model("branches"), bind={"mode": 1}),
        "scanned": lambda: compile_(layers_in_bodies.model("scanned")),
        "adapted": lambda: compile_(adapted_models.layered_model(quantized=False)),
        "decoder": lambda: compile_(decoder(quantized=False), bind={"past_sequence_length": 0}, outputs="logits"),
        "inverted_residual": lambda: compile_(inverted_residual(double=True, dropout=True)),
        "volumes": lambda: compile_(policies_network(3)),
        "classical": lambda: compile_(logistic_regression([0, 1, 2])),
    }


def _drawn(seed: int) -> burnish.Program:
    optimizers = (optim.sgd(lr=0.1, momentum=0.9), optim.adam(lr=1e-3), optim.rmsprop(lr=1e-3), optim.nadam(lr=1e-3))
    return burnish.compile(drawn_network(seed), optimizer=optimizers[seed % len(optimizers)])


_OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"loss": losses.cross_entropy(label_smoothing=0.1), "metrics": ("accuracy",)},
    "mean_squared_error": {"loss": "mse", "metrics": ("mae",)},
    "clipping": {"optimizer": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(lr=1e-3))},
    "accumulation": {"optimizer": optim.accumulate(optim.adam(lr=1e-3), 3)},
    "averaging": {"optimizer": optim.ema(optim.sgd(lr=0.1), 0.9)},
    "schedule": {"optimizer": optim.sgd(lr=optim.schedules.warmup(optim.schedules.cosine(0.1, 100), 10))},
    "muon": {"optimizer": optim.muon(lr=0.02)},
    "groups": {"optimizer": optim.groups(optim.adam(lr=1e-3), {"head.*": {"lr_scale": 10.0}})},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "partly_trained": {"trainable": ["head.*"]},
}
_ON_IMAGES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "ghost": {"norm": "ghost:2"},
    "renorm": {"norm": "renorm"},
    "synchronized": {"norm": "sync"},
    "recomputed": {"recompute": "layers"},
    "webgpu": {"target": "webgpu"},
}
