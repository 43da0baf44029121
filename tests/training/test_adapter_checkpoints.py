"""Checkpoints of adapters: how large they are, what they go with, and what refuses them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import burnish
from burnish import surgery
from burnish.errors import CheckpointError
from burnish.models import residual_network
from burnish.training import read_checkpoint
from oracles.adapted_models import batch, layered_model
from oracles.small_networks import perceptron

SLOTS = 2


def program(seed: int = 0, optimizer: str = "adamw:lr=0.05", patterns: object = "*", **options: object) -> burnish.Program:
    model = surgery.lora(layered_model(seed, quantized=False), patterns, rank=2, seed=3, **options)
    return burnish.compile(model, optimizer=optimizer)


def stepped(session: burnish.Session, steps: int = 2) -> burnish.Session:
    for _ in range(steps):
        session.step(batch())
    return session


def size_of(state, prefixes) -> int:
    return sum(array.nbytes for name, array in state.items() if name.startswith(prefixes))


@pytest.mark.slow
def test_slots_and_checkpoints_grow_with_the_adapters_alone(tmp_path):
    """A base of sixteen times the weights adds no byte; twice the rank doubles A and B."""
    sizes = {}
    for width in (32, 128):
        for rank in (2, 4):
            layers = surgery.lora(wide(width), "narrow", rank=rank)
            session = burnish.Session(burnish.compile(layers, optimizer="adamw"))
            path = tmp_path / f"{width}-{rank}.safetensors"
            session.save_checkpoint(path)
            state = session.state()
            trained = sum(state[f"param/{name}"].nbytes for name in session.program.options["trainable"])
            assert size_of(state, "opt/") == SLOTS * trained
            held = sum(array.nbytes for array in load_file(path).values())
            assert held == (1 + SLOTS) * trained + state["step"].nbytes + state["rng/key"].nbytes
            sizes[width, rank] = held, size_of(state, "param/"), trained
    for rank in (2, 4):
        assert sizes[32, rank][0] == sizes[128, rank][0]
        assert sizes[128, rank][1] > 10 * sizes[32, rank][1]
    assert sizes[32, 4][2] == 2 * sizes[32, 2][2]


def wide(width: int):
    from oracles.small_networks import CLASSES, Network

    network = Network("wide", [8])
    y = network.builder.op("MatMul", network.input, network.drawn("first.weight", 8, width, fan_in=8))
    y = network.builder.op("MatMul", y, network.drawn("second.weight", width, width, fan_in=width))
    y = network.builder.op("MatMul", y, network.drawn("third.weight", width, 8, fan_in=width))
    return network.model(network.builder.op("MatMul", y, network.drawn("narrow.weight", 8, CLASSES, fan_in=8)))


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(tmp_path):
    compiled = program(dropout=0.3)
    session = stepped(burnish.Session(compiled))
    session.save_checkpoint(tmp_path / "last.safetensors", extra={"epoch": 3})
    stepped(session)
    again = burnish.Session(compiled)
    assert again.restore(tmp_path / "last.safetensors") == {"epoch": 3}
    stepped(again)
    expected, state = session.state(), again.state()
    assert all(np.array_equal(expected[name], state[name]) for name in expected)
    assert not any(
        name.startswith("param/") and "lora" not in name for name in read_checkpoint(tmp_path / "last.safetensors").state
    )
    session.close()
    session.save_checkpoint(tmp_path / "closed.safetensors")
    assert read_checkpoint(tmp_path / "closed.safetensors").base == read_checkpoint(tmp_path / "last.safetensors").base


@pytest.mark.slow
def test_adapters_of_another_base_are_refused_or_taken_over_on_request(tmp_path):
    path = tmp_path / "last.safetensors"
    session = stepped(burnish.Session(program()))
    session.save_checkpoint(path)
    other = burnish.Session(program(seed=7))
    before = other.state()
    with pytest.raises(CheckpointError) as caught:
        other.restore(path)
    assert f"The checkpoint '{path}' holds adapters of another model: the weights beside them had the SHA-256" in str(
        caught.value
    )
    assert "or take the adapters over to this one all the same: session.restore(path, strict=False)" in str(caught.value)
    assert all(np.array_equal(before[name], array) for name, array in other.state().items())
    other.restore(path, strict=False)
    state, expected = other.state(), session.state()
    assert np.array_equal(state["param/dense.lora_A.weight"], expected["param/dense.lora_A.weight"])
    assert np.array_equal(state["param/dense.weight"], before["param/dense.weight"])
    with pytest.raises(
        CheckpointError, match="holds adapters alone, and the program has none: compile the model that it was made"
    ):
        burnish.Session(burnish.compile(layered_model(quantized=False))).restore(path)
    with pytest.raises(CheckpointError, match="is of another model: it has no parameter that this program has"):
        burnish.Session(burnish.compile(perceptron())).restore(path, strict=False)


def test_a_base_that_was_loaded_since_is_not_the_one_of_the_checkpoint(tmp_path):
    path = tmp_path / "last.safetensors"
    session = stepped(burnish.Session(program()))
    session.save_checkpoint(path)
    state = session.state()
    session.load_state({**state, "param/dense.weight": state["param/dense.weight"] + 1})
    with pytest.raises(CheckpointError, match="holds adapters of another model"):
        session.restore(path)
    session.load_state(state)
    session.restore(path)


@pytest.mark.slow
def test_statistics_of_frozen_layers_belong_to_the_base(tmp_path):
    model = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))
    compiled = burnish.compile(surgery.lora(model, rank=1), optimizer="sgd")
    session = burnish.Session(compiled)
    statistics = {name: array for name, array in session.state().items() if name.startswith("stat/")}
    session.step({"x": np.random.default_rng(0).normal(size=(4, 1, 4, 4)).astype(np.float32), "labels": np.arange(4) % 3})
    assert all(np.array_equal(statistics[name], session.state()[name]) for name in statistics)
    session.save_checkpoint(tmp_path / "last.safetensors")
    assert statistics
    assert not any(name.startswith("stat/") for name in read_checkpoint(tmp_path / "last.safetensors").state)
    moving = burnish.Session(burnish.compile(surgery.lora(model, rank=1), optimizer="sgd", norm="train"))
    moving.save_checkpoint(tmp_path / "moving.safetensors")
    assert statistics.keys() <= read_checkpoint(tmp_path / "moving.safetensors").state.keys()


@pytest.mark.slow
def test_a_saved_program_and_one_file_keep_what_trains(tmp_path):
    compiled = program(patterns=["dense", "words"], also_trained="head.*")
    stepped(burnish.Session(compiled)).save_checkpoint(tmp_path / "last.safetensors")
    assert {"param/head.weight", "param/head.bias"} <= read_checkpoint(tmp_path / "last.safetensors").state.keys()
    loaded = burnish.Program.load(compiled.save(tmp_path / "program"))
    burnish.Session(loaded).restore(tmp_path / "last.safetensors")
    one = burnish.Program.load(compiled.save(tmp_path / "program.onnx"))
    stepped(burnish.Session(one)).save_checkpoint(tmp_path / "one.safetensors")
    assert json.loads(json.dumps(one.options["trainable"])) == list(compiled.options["trainable"])
    assert (
        read_checkpoint(tmp_path / "one.safetensors").state.keys() == read_checkpoint(tmp_path / "last.safetensors").state.keys()
    )
