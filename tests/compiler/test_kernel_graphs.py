"""Graphs for engines with kernels of their own: semantic operators where there is a kernel, the same results everywhere."""

from __future__ import annotations

import numpy as np
import pytest

import burnish
from burnish.compiler import lowered_graphs
from burnish.compiler.draft import shape_of
from burnish.engines.communicator import COLLECTIVES
from burnish.engines.torch.translate.rules import translated_operators
from burnish.files.identity import graph_hashes
from burnish.files.model_file import model_bytes
from burnish.graph import BURNISH_DOMAIN
from burnish.graph.annotations import RECOMPUTES
from burnish.models import residual_network
from oracles.combinations import diagonal
from oracles.kernel_graphs import kernel_graphs, without_semantic_graphs

GRAPHS = {"step", "grad", "evaluate", "predict"}


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))


def semantic(model) -> set[str]:
    return {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN}


@pytest.mark.slow
def test_kernels_stay_and_all_else_is_lowered(program):
    assert all(not semantic(model) for model in program.graphs.values())
    graphs = kernel_graphs(program, {"ConvWeightGrad", "ReluGrad"})
    assert graphs.keys() == GRAPHS
    assert semantic(graphs["step"]) == semantic(graphs["grad"]) == {"ConvWeightGrad", "ReluGrad"}
    assert not semantic(graphs["predict"])
    for name, model in kernel_graphs(program, ()).items():
        assert not semantic(model)
        assert [value.name for value in model.graph.inputs] == [value.name for value in program.graphs[name].graph.inputs]
        assert [value.name for value in model.graph.outputs] == [value.name for value in program.graphs[name].graph.outputs]


@pytest.mark.slow
def test_a_saved_program_keeps_them_and_another_optimizer_takes_them_over(program, tmp_path):
    loaded = burnish.Program.load(program.save(tmp_path / "program")).with_optimizer("adam")
    graphs = kernel_graphs(loaded, {"ConvWeightGrad"})
    assert semantic(graphs["step"]) == {"ConvWeightGrad"}
    assert any("second_moment" in (value.name or "") for value in graphs["step"].graph.outputs)


def test_an_engine_with_kernels_does_not_have_the_standard_graphs_made(monkeypatch):
    made = []
    lower = lowered_graphs.lower_to_target
    monkeypatch.setattr(
        lowered_graphs, "lower_to_target", lambda model, target: made.append((model.graph.name, target)) or lower(model, target)
    )
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="adam")
    burnish.Session(program, engine="torch").step({"x": np.zeros((2, 1, 8, 8), np.float32), "labels": np.zeros(2, np.int64)})
    assert "grad" not in [name for name, target in made if not target.kernels]
    assert program.step is program.step
    assert [name for name, target in made if not target.kernels].count("grad") == 1
    assert program.grad is program.grad
    assert [name for name, target in made if not target.kernels].count("grad") == 1


@pytest.mark.slow
@diagonal(
    (
        "optimizer",
        [
            "sgd",
            "adafactor",
            burnish.optim.adam(lr=burnish.optim.schedules.cosine(0.1, steps=10)),
            burnish.optim.groups(burnish.optim.sgd(lr=0.1, momentum=0.9), {"stem*": "frozen"}),
        ],
    ),
    ("options", [{}, {"precision": "bfloat16"}, {"precision": "float16"}, {"recompute": "layers"}]),
)
def test_graphs_that_are_made_later_have_the_signature_that_was_told(optimizer, options):
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=optimizer, **options)
    for name, model in program.graphs.items():
        for values, entries in (
            (model.graph.inputs, program.signature[name].inputs),
            (model.graph.outputs, program.signature[name].outputs),
        ):
            assert [value.name for value in values] == [entry.name for entry in entries]
            assert [(value.dtype, shape_of(value)) for value in values] == [(entry.dtype, entry.extents) for entry in entries]
    assert program.with_optimizer(optimizer).signature == program.signature


@pytest.mark.slow
def test_without_them_the_standard_graphs_serve(program):
    alone = without_semantic_graphs(program)
    graphs = kernel_graphs(alone, {"ConvWeightGrad"})
    assert graphs.keys() == GRAPHS
    assert model_bytes(graphs["step"]) == model_bytes(program.step)
    assert graphs["step"] is not program.step


@pytest.mark.slow
def test_activations_are_computed_again_behind_the_kernels():
    recomputed = burnish.compile(residual_network(width=4, blocks=(3, 3)), recompute="layers")
    assert model_bytes(kernel_graphs(recomputed, ())["step"]) == model_bytes(recomputed.step)
    nodes = kernel_graphs(recomputed, {"BatchNormTraining", "BatchNormGrad"})["step"].graph
    again = [node for node in nodes if RECOMPUTES.get(node)]
    layers = [node for node in again if node.op_type == "BatchNormTraining"]
    assert layers
    # A gradient reads all that it reads of its layer from one run of it.
    for node in nodes:
        if node.op_type == "BatchNormGrad":
            assert len({value.producer() for value in node.inputs[3:]}) == 1
    assert not any(RECOMPUTES.get(node) for node in recomputed.semantic["grad"].graph)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "layers"])
def test_an_engine_that_rewrites_graphs_leaves_the_program_as_it_is(recompute):
    program = burnish.compile(residual_network(width=4, blocks=(1, 1)), recompute=recompute)
    before = graph_hashes(program)
    session = burnish.Session(program, engine="torch")
    batch = {"x": np.zeros((2, 1, 8, 8), np.float32), "labels": np.zeros(2, np.int64)}
    session.step(batch)
    session.evaluate(batch)
    assert graph_hashes(program) == before


@pytest.mark.slow
def test_kernels_and_lowered_operators_give_the_same_gradients(program):
    kernels = translated_operators(BURNISH_DOMAIN) - COLLECTIVES
    generator = np.random.default_rng(0)
    data = {"x": generator.normal(size=(5, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, 5)}
    state = program.initial_state(0)
    feeds = data | {entry.name: state[entry.name] for entry in program.signature["grad"].inputs if entry.is_state}
    expected = burnish.engines.get("onnxruntime").run(program.grad, feeds)
    found = burnish.engines.get("torch").run(kernel_graphs(program, kernels)["grad"], feeds)
    for name, array in expected.items():
        norm = np.linalg.norm(array.astype(np.float64))
        assert np.linalg.norm(found[name].astype(np.float64) - array) <= 1e-5 * norm + 1e-7, name
