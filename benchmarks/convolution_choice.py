"""What the PyTorch engine's choice between ways to convolve comes to: each way's time, the best, and the one that is chosen.

    python benchmarks/convolution_choice.py                          a table for one and for two threads
    python benchmarks/convolution_choice.py --threads 1 --only wide,signal

For every shape the forward convolution and both its gradients are run in every way. The choice is measured afresh, into a file of
the benchmark's own. A way that takes more than ten times as long as another in its first run is not run again. Times are those
that the calling thread ran for: on an idle machine they are those of the clock, and beside other work they vary less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from burnish.engines.torch.bindings.convolution import algorithms as convolutions
from burnish.engines.torch.bindings.convolution.algorithms import WAYS, Way, Windows, laid_out, places
from burnish.engines.torch.runtime import kernel_choice

TITLES = {
    "channels_last": "last",
    "channels_first": "first",
    "channels_last_exchanged": "last, exchanged",
    "channels_first_exchanged": "first, exchanged",
    "products": "products",
}
"""Of the ways in tables."""

RUNS, SECONDS, HOPELESS = 7, 0.6, 10


@dataclass(frozen=True)
class Shape:
    """A convolution: x, weight, strides, padding, dilations, groups."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilations: tuple[int, ...] = ()
    groups: int = 1

    @property
    def window(self) -> tuple[list[int], list[int], list[int], int]:
        return list(self.strides), list(self.padding), list(self.dilations or [1] * len(self.strides)), self.groups


SHAPES = {
    "wide 3x39": Shape((2, 8, 172, 264), (8, 8, 3, 39), (1, 1), (1, 19)),
    "wide 1x31": Shape((4, 32, 32, 256), (32, 32, 1, 31), (1, 1), (0, 15)),
    "tall 39x3": Shape((2, 8, 264, 172), (8, 8, 39, 3), (1, 1), (19, 1)),
    "11x11, stride 4": Shape((8, 3, 224, 224), (64, 3, 11, 11), (4, 4), (2, 2)),
    "signal, 80, stride 4": Shape((16, 1, 16000), (64, 1, 80), (4,), (38,)),
    "signal, 9": Shape((16, 64, 1000), (64, 64, 9), (1,), (4,)),
    "signal, 64": Shape((8, 16, 4000), (16, 16, 64), (1,), (32,)),
    "signal, 3, dilation 8": Shape((8, 64, 2000), (64, 64, 3), (1,), (8,), (8,)),
    "signal, depthwise 31": Shape((8, 256, 500), (256, 1, 31), (1,), (15,), (1,), 256),
    "depthwise 7x7": Shape((8, 96, 56, 56), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), 96),
    "depthwise 3x3, dilation 2": Shape((8, 96, 56, 56), (96, 1, 3, 3), (1, 1), (2, 2), (2, 2), 96),
    "3x3, dilation 2": Shape((4, 64, 64, 64), (64, 64, 3, 3), (1, 1), (2, 2), (2, 2)),
    "3x3, dilation 6": Shape((2, 256, 32, 32), (64, 256, 3, 3), (1, 1), (6, 6), (6, 6)),
    "3x3, 8 groups": Shape((8, 128, 28, 28), (128, 16, 3, 3), (1, 1), (1, 1), (1, 1), 8),
    "3x3, 32 groups, stride 2": Shape((8, 256, 28, 28), (256, 8, 3, 3), (2, 2), (1, 1), (1, 1), 32),
    # Of transposed convolutions the gradient of the input is the forward pass, and the other way round.
    "transposed 4x4, stride 2": Shape((4, 64, 64, 64), (128, 64, 4, 4), (2, 2), (1, 1)),
    "transposed 2x2, stride 2": Shape((4, 64, 128, 128), (128, 64, 2, 2), (2, 2), (0, 0)),
    "transposed signal, 16, stride 8": Shape((4, 256, 512), (512, 256, 16), (8,), (4,)),
    "volume 3x3x3": Shape((2, 16, 16, 56, 56), (32, 16, 3, 3, 3), (1, 1, 1), (1, 1, 1)),
    "volume 3x7x7, stride 2": Shape((2, 3, 16, 112, 112), (64, 3, 3, 7, 7), (1, 2, 2), (1, 3, 3)),
}


@dataclass(frozen=True)
class Operation:
    """A forward convolution or a gradient: in a given way, and as the engine calls it."""

    name: str
    in_way: Callable[[Way], torch.Tensor]
    as_engine: Callable[[], torch.Tensor]
    ways: list[str]


def operations_of(shape: Shape) -> list[Operation]:
    """The three operations of a shape; operands have their channels last."""
    generator = torch.Generator().manual_seed(0)
    window = shape.window
    x, weight = (torch.randn(extents, generator=generator) for extents in (shape.x, shape.weight))
    if x.dim() == 3:
        windows = Windows(*((neutral, *values) for neutral, values in zip((1, 0, 1), window[:3], strict=True)), window[3])
        images, kernels = laid_out(x.unsqueeze(2)), weight.unsqueeze(2)
    else:
        windows = Windows(*map(tuple, window[:3]), window[3])
        images, kernels = laid_out(x), laid_out(weight)
    counts = places(images.shape, kernels.shape[2:], windows)
    flows = laid_out(torch.randn([len(images), len(kernels), *counts], generator=generator))
    x, dy = (tensor.squeeze(2) if x.dim() == 3 else tensor for tensor in (images, flows))
    calls = {
        "forward": (
            lambda way: way.forward(images, kernels, None, windows),
            lambda: convolutions.convolve(x, weight, None, *window, True),
        ),
        "input": (
            lambda way: way.input_gradient(flows, kernels, images, windows),
            lambda: convolutions.input_gradient(dy, weight, x, *window, True),
        ),
        "weight": (
            lambda way: way.weight_gradient(flows, images, kernels, windows),
            lambda: convolutions.weight_gradient(dy, x, weight, *window, True),
        ),
    }
    return [
        Operation(name, *call, convolutions.possible_ways(name, images.dim(), windows.groups)) for name, call in calls.items()
    ]


def times(operation: Operation) -> dict[str, float]:
    """Milliseconds of each way, the least of several runs, which are interleaved."""
    found = {name: seconds(lambda name=name: operation.in_way(WAYS[name])) for name in operation.ways}
    spent = 0.0
    for _ in range(RUNS):
        for name in operation.ways:
            if found[name] <= HOPELESS * min(found.values()) and spent < SECONDS:
                passed = seconds(lambda name=name: operation.in_way(WAYS[name]))
                found[name], spent = min(found[name], passed), spent + passed
    return {name: 1000 * value for name, value in found.items()}


def seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def choice(operation: Operation, file: Path) -> tuple[str, float]:
    """The way that the engine takes, and the seconds of the call that measured it."""
    passed = seconds(operation.as_engine)
    (choices,) = json.loads(file.read_text())["choices"].values()
    return list(choices.values())[-1], passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="shapes whose names contain one of these, with commas between")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    torch.set_grad_enabled(False)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "choices.json"
        os.environ[kernel_choice.VARIABLE] = str(file)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            print(f"\n{threads} thread{'s' if threads > 1 else ''}, ms\n")
            print(f"| convolution | of | {' | '.join(TITLES.values())} | best | chosen | chosen / best | found in |")
            print("|---|---|" + "---|" * (len(TITLES) + 4))
            for name in [name for name in SHAPES if any(part in name for part in parts)]:
                for operation in operations_of(SHAPES[name]):
                    way, passed = choice(operation, file)
                    found = times(operation)
                    best = min(found, key=found.__getitem__)
                    ratios.append(found[way] / found[best])
                    cells = [f"{found[title]:.3g}" if title in found else "" for title in TITLES]
                    cells += [TITLES[best], TITLES[way], f"{ratios[-1]:.2f}", f"{passed:.2f} s"]
                    print(f"| {name} | {operation.name} | {' | '.join(cells)} |", flush=True)
    over = sum(ratio > 2 for ratio in ratios)
    print(f"\nchosen / best: at most {max(ratios):.2f}, over 2 in {over} of {len(ratios)}")


if __name__ == "__main__":
    main()
