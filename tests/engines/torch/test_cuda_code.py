"""What Inductor writes of a step for a GPU, read without one (``oracles.cuda_code``): kernels, layouts, dtypes."""

from __future__ import annotations

import math
import re

import pytest

import burnish
from burnish import optim
from burnish.models import residual_network
from burnish.program import Role
from oracles.cuda_code import cuda_code
from oracles.small_networks import transformer

pytest.importorskip("triton", reason="needs the package triton, which writes code for GPUs")
BATCH = 32
LAYERS = 3  # convolutions, each with its batch normalization
WAITS = (".item()", ".cpu()", "_local_scalar_dense", "synchronize")


@pytest.fixture(scope="module")
def residual():
    program = burnish.compile(
        residual_network((3, 8, 8), width=16, blocks=(1,)), optimizer=optim.sgd(lr=0.1, momentum=0.9), precision="bfloat16"
    )
    return program, cuda_code(program, BATCH)


@pytest.fixture(scope="module")
def attention():
    program = burnish.compile(transformer(), optimizer=optim.adamw(lr=0.01), precision="bfloat16")
    return program, cuda_code(program, BATCH)


@pytest.fixture(scope="module")
def attention_in_float32():
    program = burnish.compile(transformer(), optimizer=optim.adamw(lr=0.01))
    return program, cuda_code(program, BATCH)


@pytest.mark.parametrize(("name", "kernel"), [("attention", "flash"), ("attention_in_float32", "efficient")])
def test_attention_is_a_kernel_each_way_and_keeps_no_probabilities(name, kernel, request):
    program, code = request.getfixturevalue(name)
    calls = {call: count for call, count in code.library_calls.items() if "attention" in call}
    forward = f"_scaled_dot_product_{kernel}_attention"
    assert calls == {forward: 1, f"{forward}_backward": 1}
    assert "bmm" not in code.library_calls
    tokens = program.signature["step"].inputs_of(Role.DATA)[0].extents[1]
    assert not [shape for shape, _, _ in code.buffers if shape[-2:] == (tokens, tokens)]


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_a_step_waits_for_nothing(name, request):
    _, code = request.getfixturevalue(name)
    assert not [word for word in WAITS if word in code.body]


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_the_state_is_written_where_it_lies(name, request):
    """What is returned is what the step reports alone, and each entry is an operand of what writes it."""
    program, code = request.getfixturevalue(name)
    signature = program.signature["step"]
    (returned,) = re.findall(r"^ +return \((.*)\)$", code.body, re.MULTILINE)
    reported = [entry for entry in signature.outputs if entry.updates is None]
    assert len([value for value in returned.split(",") if value.strip()]) == len(reported)
    operands = set().union(*(launch.operands for launch in code.launches))
    assert {code.arguments[entry.name] for entry in program.signature.state} <= operands


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_the_update_of_a_parameter_is_one_kernel(name, request):
    """Whatever reads a slot of the optimizer's updates what belongs to it; most kernels of small parameters do more."""
    program, code = request.getfixturevalue(name)
    slots = [entry.name for entry in program.signature.state if entry.name.startswith("opt/")]
    assert slots
    for slot in slots:
        readers = [launch.kernel for launch in code.launches if code.arguments[slot] in launch.operands]
        assert len(readers) == 1, (slot, readers)


def test_images_keep_their_channels_last_and_their_sixteen_bits(residual):
    _, code = residual
    images = [
        (shape, strides, dtype)
        for shape, strides, dtype in code.buffers
        if len(shape) == 4 and shape[0] == BATCH and shape[1] == 16
    ]
    assert len(images) >= LAYERS
    for shape, strides, dtype in images:
        assert strides == (math.prod(shape[1:]), 1, 16 * shape[3], 16), (shape, strides)
        assert dtype == "bfloat16", shape


def test_convolutions_and_their_gradients_are_called_once_each(residual):
    _, code = residual
    assert code.library_calls["convolution"] == LAYERS
    assert code.library_calls["convolution_backward"] == 2 * LAYERS - 1  # images need no gradient


def test_batch_normalization_reads_a_convolution_no_more_than_three_times(residual):
    """For the statistics, for what is computed of them, and where a part of it is read for the mean to begin with."""
    _, code = residual
    names = [line.split(" = ")[0].strip() for line in code.body.splitlines() if " = extern_kernels.convolution(" in line]
    assert len(names) == LAYERS
    backward = next(
        index
        for index, launch in enumerate(code.launches)
        if launch.kernel.startswith("triton_per_fused_") and "softmax" in launch.kernel
    )
    for name in names:
        assert 2 <= sum(name in launch.operands for launch in code.launches[:backward]) <= 3, name
