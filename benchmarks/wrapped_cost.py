"""What wrapping a small module costs: its forward and backward pass beside its two graphs', eager's and PyTorch's own floor.

    python benchmarks/wrapped_cost.py                   processor time on one thread, of the best of many rounds
    python benchmarks/wrapped_cost.py --json result.json

All are of one two-layer perceptron and one batch, rounds interleaved. "An empty node" is one in C++, as a wrapped module has it,
of as many inputs and with passes that compute nothing: what of a step is PyTorch's, which goes back through it and gives each of
four parameters its gradient. "An empty function" is a ``torch.autograd.Function`` of as many; "one sum" is a single operator of
PyTorch's and one parameter.
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
from burnish.engines.torch import native as kernels
from burnish.engines.torch.runtime.autograd_node import NAME, graph_calls
from burnish.torch.wrapped import HELD

WIDTHS = (8, 16, 4)
BATCH = 32
CALLS = 5  # in a row, between two looks at the clock


def contenders() -> dict[str, Callable[[], None]]:
    """What is timed, by its title: each computes the gradients of the parameters once."""
    inputs, hidden, outputs = WIDTHS
    module = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    x, cotangent = torch.randn(BATCH, inputs), torch.randn(BATCH, outputs)
    wrapped = burnish.torch.wrap(module, x, verify=False)
    parameters = list(module.parameters())

    def backward(y: torch.Tensor) -> None:
        y.backward(cotangent)
        for parameter in parameters:
            parameter.grad = None

    has_node = kernels.available(NAME)
    backward(wrapped(x))
    forward_pass, backward_pass = _passes(wrapped)
    nothing = torch.randn(BATCH, outputs), [torch.zeros_like(parameter) for parameter in parameters]
    empty = _empty_function(*nothing)
    empty_node = _empty_node(*nothing) if has_node else None
    number, one = nn.Parameter(torch.ones(())), torch.ones(())

    def graphs() -> None:
        with torch.no_grad():
            _, *saved = forward_pass(x, *parameters)
            backward_pass([*saved, cotangent])

    def sum_of_two() -> None:
        (number + one).backward(one)
        number.grad = None

    return {
        "wrapped": lambda: backward(wrapped(x)),
        "its two graphs": graphs,
        "eager": lambda: backward(module(x)),
        **({"an empty node": lambda: backward(empty_node(x, *parameters)[0])} if empty_node else {}),
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


def _empty_node(result: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
    node = graph_calls()
    assert node is not None
    inputs = range(1 + len(gradients))
    return node(
        forward=lambda *inputs: (result.detach(), *inputs),
        backward=lambda *_: tuple(gradients),
        again=None,
        failed=lambda *_: None,
        inputs=len(inputs),
        results=1,
        differentiated=(0,),
        reached=inputs[1:],
        images=(),
        written=(),
        kept=(),
        channels_last=False,
        serve=0,
    )


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
    empty = "an empty node" if "an empty node" in least else "an empty function"
    above = least["wrapped"] - least["its two graphs"]
    return "\n".join(lines) + f"\n\nAbove its graphs: {above:.0f} us, {above - least[empty]:.0f} of them above {empty}."


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
