"""Values that code is known to trip over."""

from __future__ import annotations

import math
from random import Random

from onnx import TensorProto

INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    -2,
    7,
    64,
    255,
    1 << 16,
    1 << 20,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-38, 1e38, math.inf, -math.inf, math.nan)
NAMES = (
    "",
    " ",
    "x",
    "y",
    "labels",
    "targets",
    "loss",
    "step",
    "lr",
    "rng/key",
    "param/weight",
    "grad:weight",
    "next:weight",
    "cotangent:logits",
    "batch",
    "a/b\\c",
    "it's",
    'say "hi"',
    "{braces}",
    "[bold]",
    "line\nbreak",
    "nul\0",
    "Größe",
    "🦊",
    "%s%n",
    "../up",
    "n" * 5000,
)
DOMAINS = (
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "ai.onnx.preview.training",
    "com.microsoft",
    "burnish",
    "local",
    "pkg.onnxscript.torch_lib",
)
ELEMENT_TYPES = (*TensorProto.DataType.values(), 99, -1)


def integer(random: Random) -> int:
    return random.choice(INTEGERS) if random.random() < 0.8 else random.randint(-5, 12)


def float32(random: Random) -> float:
    return random.choice(FLOATS) if random.random() < 0.8 else random.uniform(-10, 10)
