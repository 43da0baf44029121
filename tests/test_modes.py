"""A source graph bound to training, to inference, or as it was exported: what becomes of batch normalization."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish.errors import ModelError
from burnish.graph.annotations import LAYER, POLICY
from burnish.importer import load
from burnish.modes import batch_normalizations, bind_inference, bind_training, numbered_draws
from burnish.norms import RunningVariance, resolve_policies
from burnish.random import KEY_DTYPE, KEY_SHAPE
from oracles.normalization_policies import MOMENTUM, network


def bound(norm, model=None):
    """Bind a network to training; return its graph, the statistics that are updated and how often the step was asked for."""
    model = load(network(4)) if model is None else model
    graph = model.graph
    key = ir.Value(name="key", type=ir.TensorType(KEY_DTYPE), shape=ir.Shape(KEY_SHAPE))
    step = ir.Value(name="step", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    asked = []
    updated = bind_training(
        graph,
        resolve_policies(norm, batch_normalizations(graph)),
        RunningVariance.ONNX,
        key,
        lambda: asked.append(step) or step,
        numbered_draws(graph, ["x"]),
    )
    return graph, {value.name for value in updated}, len(asked)


def operators(graph):
    return Counter(node.op_type for node in graph)


STATISTICS = {f"{layer}.running_{name}" for layer in ("bn1", "bn2") for name in ("mean", "var")}


@pytest.mark.parametrize(
    ("norm", "operator"),
    [
        ("train", "BatchNormTraining"),
        ("sync", "BatchNormTraining"),
        ("ghost:2", "BatchNormTraining"),
        ("renorm", "BatchRenormTraining"),
        ("frozen", "BatchNormalization"),
        ("frozen:all", "BatchNormalization"),
    ],
)
def test_the_operator_that_a_policy_puts_into_the_training_graph(norm, operator):
    graph, updated, _ = bound(norm)
    assert operators(graph)[operator] == 2
    assert sum(operators(graph)[name] for name in ("BatchNormTraining", "BatchRenormTraining", "BatchNormalization")) == 2
    assert updated == (set() if norm.startswith("frozen") else STATISTICS)


@pytest.mark.parametrize(
    ("norm", "times"),
    [
        ("train", 0),
        ("ghost:2", 0),
        ("frozen", 0),
        ("renorm:start=0,r_max_step=0,d_max_step=0", 0),
        ("renorm", 2),
        ("train:momentum=cumulative", 1),
    ],
)
def test_the_step_is_read_only_where_a_policy_counts_steps_and_once_for_all_layers(norm, times):
    assert bound(norm)[2] == times
    program = burnish.compile(network(4), loss="mse", norm=norm)
    assert any(entry.name == "step" for entry in program.signature["grad"].inputs) is (times > 0)
    assert [entry.name for entry in program.signature["step"].inputs].count("step") == 1
    assert [entry.name for entry in program.signature["apply"].inputs].count("step") == 1


def test_synchronized_layers_are_found_by_the_metadata_of_their_nodes():
    graph, _, _ = bound({"bn1": "sync", "bn2": "train"})
    found = {LAYER.get(node): POLICY.get(node) for node in graph if node.metadata_props}
    assert found == {"bn1": "sync", "bn2": "train"}


def test_the_metadata_stand_in_copies_of_the_graph():
    graph, _, _ = bound("sync")
    copied = ir.Model(graph, ir_version=8).clone().graph
    assert [POLICY.get(node) for node in copied if node.op_type == "BatchNormTraining"] == ["sync"] * 2


@pytest.mark.parametrize("training_mode", [0, 1])
def test_the_mode_that_the_exporter_wrote_does_not_matter(training_mode):
    model = network(4)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(onnx.helper.make_attribute("training_mode", training_mode))
            if training_mode:
                node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_variance"])
    assert operators(bound("train", load(model))[0])["BatchNormTraining"] == 2
    inference = load(model).graph
    bind_inference(inference)
    nodes = batch_normalizations(inference)
    assert len(nodes) == 2
    assert all(len(node.outputs) == 1 and "training_mode" not in node.attributes for node in nodes)


def test_an_operand_of_another_size_names_the_node():
    model = load(network(4))
    model.graph.initializers["bn2.bias"].shape = ir.Shape([4])
    message = (
        r"BatchNormalization '/bn2' \(output 'y'\): its bias 'bn2\.bias' of shape \[4\] must have shape \[3\]: "
        r"its input 'second' has 3 channels\. Export the model again"
    )
    with pytest.raises(ModelError, match=message):
        bound("train", model)


def test_an_operand_that_is_no_vector_names_the_node():
    model = load(network(4))
    model.graph.initializers["bn1.weight"].shape = ir.Shape([3, 1])
    with pytest.raises(ModelError, match=r"'/bn1' .*: its scale 'bn1\.weight' of shape \[3, 1\] must have shape \[3\]"):
        bound("train", model)


def test_statistics_of_a_model_in_training_mode_are_its_outputs_by_the_rule_of_the_standard():
    model = network(2)
    last = model.graph.node[-1]
    last.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    last.output.extend(["mean", "variance"])
    for name in ("second", "mean", "variance"):
        shape = ["batch", 3] if name == "second" else [3]
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    weights = {initializer.name: onnx.numpy_helper.to_array(initializer) for initializer in model.graph.initializer}
    serialized = ir.to_proto(burnish.grad(model, wrt=["x"], of="y")).SerializeToString()
    runtime = onnxruntime.InferenceSession(serialized, providers=["CPUExecutionProvider"])
    x, cotangent = (np.random.default_rng(seed).normal(size=(5, 3)).astype(np.float32) for seed in (0, 1))
    values = runtime.run(["second", "mean", "variance"], {"x": x, "cotangent:y": cotangent})
    for name, batch, actual in zip(("mean", "var"), (values[0].mean(0), values[0].var(0)), values[1:], strict=True):
        expected = MOMENTUM["bn2"] * weights[f"bn2.running_{name}"] + (1 - MOMENTUM["bn2"]) * batch
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
