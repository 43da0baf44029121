"""What wrapping a small module costs: its forward and backward pass beside its two graphs', eager's and PyTorch's own floor.

    python benchmarks/wrapped_cost.py                   processor time on one thread, of the best of many rounds
    python benchmarks/wrapped_cost.py --json result.json

All are of one two-layer perceptron and one batch, rounds interleaved. "An empty function" is a ``torch.autograd.Function`` of as
many inputs that computes nothing; "one sum" a single operator of PyTorch's: what of a backward pass is the engine of autograd
and ``Tensor.backward``, whoever computes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import burnish.torch
from burnish.torch.wrapped import HELD

WIDTHS = (8, 16, 4)
BATCH = 32
CALLS = 5  # in a row, between two looks at the clock


def contenders() -> dict[str, Callable[[], None]]:
    """What is timed, by its title: each computes the gradients of the parameters once."""
    inputs, hidden, outputs = WIDTHS
    module = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    x, cotangent = torch.randn(BATCH, inputs), torch.randn(BATCH, outputs)
    wrapped = burnish.torch.wrap(module, x)
    parameters = list(module.parameters())

    def backward(y: torch.Tensor) -> None:
        y.backward(cotangent)
        for parameter in parameters:
            parameter.grad = None

    backward(wrapped(x))
    forward_pass, backward_pass = _passes(wrapped)
    empty = _empty_function(torch.randn(BATCH, outputs), [torch.zeros_like(parameter) for parameter in parameters])
    number, one = nn.Parameter(torch.ones(())), torch.ones(())

    def graphs() -> None:
        with torch.no_grad():
            _, *saved = forward_pass(x, *parameters)
            backward_pass(*saved, cotangent)

    def sum_of_two() -> None:
        (number + one).backward(one)
        number.grad = None

    return {
        "wrapped": lambda: backward(wrapped(x)),
        "its two graphs": graphs,
        "eager": lambda: backward(module(x)),
        "an empty function": lambda: backward(empty.apply(x, *parameters)),
        "one sum": sum_of_two,
    }


def _passes(wrapped: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The graphs of a wrapped module that was called in training: forward and backward."""
    (prepared,) = getattr(wrapped, HELD)._prepared.values()
    (passes,) = prepared.graph._graph._passes.values()
    return passes.forward.forward, passes.backward.forward


def _empty_function(result: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return result

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            assert len(ctx.saved_tensors) == 1 + len(gradients)
            return (None, *gradients)

    return Empty


def measured(rounds: int) -> dict[str, float]:
    """The least processor time of a call, in microseconds, by title."""
    torch.set_num_threads(1)
    calls = contenders()
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for title, call in calls.items():
            call()
            started = time.thread_time()
            for _ in range(CALLS):
                call()
            least[title] = min(least[title], (time.thread_time() - started) / CALLS * 1e6)
    return least


def text(least: dict[str, float]) -> str:
    lines = ["| forward and backward | us |", "| --- | --- |"]
    lines += [f"| {title} | {microseconds:.0f} |" for title, microseconds in least.items()]
    above, floor = least["wrapped"] - least["its two graphs"], least["an empty function"]
    return "\n".join(lines) + f"\n\nAbove its graphs: {above:.0f} us, {above - floor:.0f} of them above an empty function."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    least = measured(arguments.rounds)
    print(text(least))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(least, indent=1) + "\n")


if __name__ == "__main__":
    main()
