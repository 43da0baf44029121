"""Memory of a session: the allocator that keeps its pages, and what is never there twice."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import burnish
from burnish.engines.base import HandedOver
from burnish.engines.torch import TorchEngine, kernels
from burnish.engines.torch.translation import translate
from oracles.small_networks import perceptron, transformer

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")

# In a process of its own: the allocator holds for the whole process.
CONTENTS = """
import random, torch
from burnish.engines.torch import memory
assert memory.keep_pages()
random.seed(3)
held = {}
for turn in range(3000):
    slot = random.randrange(40)
    if slot in held:
        tensor, value = held.pop(slot)
        assert (tensor == value).all(), slot
    held[slot] = torch.full((random.randrange(1, 900_000),), float(turn)), float(turn)
for tensor, value in held.values():
    assert (tensor == value).all()
kept = torch.ones(1 << 20)
kept.resize_(1 << 21)
assert kept[: 1 << 20].sum() == 1 << 20
torch.nn.functional.conv2d(torch.randn(2, 64, 32, 32), torch.randn(64, 64, 3, 3))
"""

GROWTH = """
import resource, torch
from burnish.engines.torch import memory
assert memory.keep_pages()
def step(size):
    whole = [torch.ones(size, 1 << 20) for _ in range(4)]
    return sum(float(tensor[0, 0]) for tensor in whole)
for size in (8, 3, 5):
    step(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for turn in range(60):
    step((8, 3, 5, 7)[turn % 4])
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
"""


EXHAUSTED = """
import torch
from burnish.engines.torch import memory
assert memory.keep_pages()
for size in (1 << 38, 1 << 56):
    try:
        torch.empty(size)
    except RuntimeError as error:
        assert "out of memory: a tensor of" in str(error) or "allocate memory" in str(error) or "overflow" in str(error), error
    else:
        raise AssertionError(size)
assert torch.ones(1 << 20).sum() == 1 << 20
"""


@needs_kernels
@pytest.mark.parametrize("script", [CONTENTS, GROWTH, EXHAUSTED], ids=["contents", "growth", "exhausted"])
def test_tensors_of_the_keeping_allocator(script):
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_state_that_is_handed_over_is_taken_entry_by_entry():
    program = burnish.compile(perceptron(), optimizer="adam")
    state = program.initial_state()
    given = HandedOver(state)
    runner = TorchEngine().open(program, given)
    assert not given
    kept = dict(state)
    other = TorchEngine().open(program, kept)
    assert kept.keys() == state.keys()
    for found in (runner.state(), other.state()):
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array)
            assert not np.shares_memory(found[name], array)


def test_a_session_leaves_the_state_that_it_is_given():
    program = burnish.compile(perceptron(), optimizer="adam")
    state = HandedOver(program.initial_state())
    with burnish.Session(program, engine="torch", state=dict(state)) as session:
        for name, array in session.state().items():
            np.testing.assert_array_equal(state[name], array)


def test_the_gradient_of_an_embedding_is_added_up_where_it_lies():
    program = burnish.compile(transformer(), optimizer="adam")
    model = program.kernel_graphs({"GatherGrad"}, ("grad",))["grad"]
    calls = [node.target for node in translate(model, torch.device("cpu")).graph.nodes]
    assert "index_add_" in calls
    assert torch.index_add not in calls
