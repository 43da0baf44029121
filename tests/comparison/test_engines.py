"""Engines compared step by step: agreement, and faults of one operator that must be found at its node."""

from __future__ import annotations

import importlib.metadata
import json
import math

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import burnish
from burnish.comparison import compare_engines
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.errors import ConfigurationError, EngineError, InputError, NonFiniteLossError
from burnish.graph import source_of
from burnish.models import residual_network
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.faulty_engine import FaultyEngine, FaultyKernel

MODEL = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))


@pytest.fixture(scope="module")
def program():
    return burnish.compile(MODEL, optimizer="adam")


def only_fault(program, is_faulty, **options):
    """Compare with an engine that computes some nodes wrong; return the fault that is found."""
    comparison = compare_engines(program, ["onnxruntime", FaultyEngine(is_faulty)], steps=2, threads=1, **options)
    assert not comparison.agrees
    (report,) = comparison.reports
    assert report.first_step == 0
    assert report.fault is not None
    assert report.fault.place() in comparison.message()
    return report.fault


def nodes(graph, operator):
    return [node for node in graph.graph if node.op_type == operator]


@pytest.mark.slow
def test_engines_that_agree(program):
    comparison = compare_engines(program, ["onnxruntime", "reference"], steps=3, threads=1, against_float64=True)
    assert comparison.agrees
    assert comparison.message() == "onnxruntime and reference agree over 3 steps"
    (report,) = comparison.reports
    kinds = {tensor.name: tensor.kind for tensor in report.tensors.values()}
    assert kinds["loss"] == "figure"
    assert {name.removeprefix("grad:") for name, kind in kinds.items() if kind == "gradient"} == set(program.options["trainable"])
    assert {name for name, kind in kinds.items() if kind == "state"} == set(program.signature["step"].updates)
    assert [set(losses) for losses in comparison.losses] == [{"onnxruntime", "reference"}] * 3
    for engine in comparison.engines:
        assert 0 < max(comparison.errors[engine].values()) < 1e-4


def test_the_float64_of_a_comparison_is_that_of_a_float64_session(program):
    """The gradients of a program in float32 are as far from float64 as a float64 step on the reference engine says."""
    batch = {"x": np.random.default_rng(1).normal(size=(4, 1, 4, 4)).astype(np.float32), "labels": np.array([0, 2, 1, 1])}
    comparison = compare_engines(program, ["onnxruntime", "reference"], [batch], threads=1, against_float64=True)
    session = burnish.Session(program, "onnxruntime", threads=1)
    loss = session.step(batch)["loss"]
    state = {name: array.astype(np.float64) for name, array in program.initial_state(0).items()}
    x = batch["x"].astype(np.float64)
    exact = ReferenceEngine().run(
        compute_in_float64(program.grad),
        {
            **{name: state[name] for name in state if name in {v.name for v in program.grad.graph.inputs}},
            "rng/key": program.initial_state(0)["rng/key"],
            "x": x,
            "labels": batch["labels"],
        },
    )
    assert exact["loss"].dtype == np.float64
    assert comparison.errors["onnxruntime"]["loss"] == pytest.approx(abs(loss - exact["loss"]) / exact["loss"], rel=1e-3)


def test_a_wrong_forward_operator_is_found_at_its_first_node(program):
    fault = only_fault(program, lambda node: node.op_type == "GlobalAveragePool")
    (expected,) = nodes(program.predict, "GlobalAveragePool")
    assert fault.operator == "GlobalAveragePool"
    assert fault.source == source_of(expected)
    assert fault.place() == fault.source
    assert fault.alone.relative == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert fault.errors["onnxruntime"] < 1e-6
    assert fault.errors["faulty"] == pytest.approx(0.01 / 1.01, rel=1e-3)


def test_of_several_wrong_nodes_the_first_is_named(program):
    fault = only_fault(program, lambda node: node.op_type == "Relu")
    assert fault.source == source_of(nodes(program.predict, "Relu")[0])


def test_one_wrong_node_among_right_ones_of_its_operator_is_named(program):
    third = source_of(nodes(program.predict, "Conv")[2])
    fault = only_fault(program, lambda node: node.op_type == "Conv" and source_of(node) == third)
    assert fault.source == fault.node == third


def test_a_wrong_backward_operator_is_found_inside_the_lowering(program):
    second = f"gradient of {source_of(nodes(program.predict, 'Conv')[1])}"
    fault = only_fault(program, lambda node: node.op_type == "Conv" and source_of(node) == second)
    assert fault.source == second
    assert fault.operator in ("burnish.ConvInputGrad", "burnish.ConvWeightGrad")
    assert fault.within.startswith("Conv ")
    assert fault.place().startswith(f"{fault.within} in the lowering of burnish.Conv")
    assert fault.place().endswith(f" of the {second}")


def test_a_wrong_kernel_of_a_semantic_operator_is_named_itself(program):
    comparison = compare_engines(program, ["onnxruntime", FaultyKernel("ConvWeightGrad")], steps=1, threads=1)
    fault = comparison.reports[0].fault
    # The reverse pass comes to the last layer first.
    assert fault.source == f"gradient of {source_of(nodes(program.predict, 'Conv')[-1])}"
    assert (fault.operator, fault.within) == ("burnish.ConvWeightGrad", None)
    assert 1e-3 < fault.alone.relative < 0.01 / 1.01 * 1.001  # less where the terms of its sums cancel
    assert fault.errors["onnxruntime"] < 1e-6
    assert fault.errors["kernel"] == pytest.approx(fault.alone.relative, rel=1e-2)


def test_a_wrong_operator_with_a_body_is_found():
    """The alignments of the CTC loss are summed by a Scan."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        network (float[N, T, 3] x) => (float[N, T, 4] logits) <float[3, 4] w> { logits = MatMul (x, w) }"""
    )
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    program = burnish.compile(model, loss="ctc")
    batch = {
        "x": np.random.default_rng(1).normal(size=(2, 5, 3)).astype(np.float32),
        "labels": np.array([[1, 2], [3, 3]]),
        "input_lengths": np.array([5, 4]),
        "target_lengths": np.array([2, 2]),
    }
    assert compare_engines(program, ["onnxruntime", "reference"], [batch], threads=1).agrees
    comparison = compare_engines(program, ["onnxruntime", FaultyEngine(lambda node: node.op_type == "Scan")], [batch], threads=1)
    fault = comparison.reports[0].fault
    assert fault.operator == "burnish.AlignmentLikelihood"
    assert fault.within.startswith("Scan ")
    assert fault.alone is not None
    assert fault.errors["onnxruntime"] < 1e-5


def test_a_wrong_operator_of_the_loss_is_found(program):
    fault = only_fault(program, lambda node: node.op_type == "ScatterElements")
    assert fault.source == "gradient of the loss"
    assert fault.operator == "burnish.SoftmaxCrossEntropyGrad"
    assert fault.within.startswith("ScatterElements")


def test_a_wrong_state_update_is_found(program):
    # That of the bias correction is a float64; wrong by the same factor, it would make up for the others.
    faulty = FaultyEngine(
        lambda node: (node.op_type, source_of(node)) == ("Sqrt", "the optimizer") and node.outputs[0].dtype == ir.DataType.FLOAT
    )
    comparison = compare_engines(program, ["onnxruntime", faulty], steps=2, threads=1)
    (report,) = comparison.reports
    assert report.fault.operator == "Sqrt"
    assert all(name.startswith("param/") for name in report.fault.updates)
    assert "of the update of 'param/" in comparison.message()
    assert {report.tensors[name].kind for name in report.differing} == {"state"}
    assert all(tensor.agrees for tensor in report.tensors.values() if tensor.kind != "state")


def test_a_wrong_running_statistic_is_found(program):
    layer = next(source for node in program.step.graph if (source := source_of(node) or "").startswith("BatchNormalization"))
    named = [node.outputs[0].name for node in program.step.graph if source_of(node) == layer and node.op_type == "Add"]
    (updated,) = [name for name in named if name.endswith("running_mean")]
    fault = only_fault(program, lambda node: any(value.name == updated for value in node.outputs))
    assert fault.source == layer
    assert fault.output == updated


@pytest.mark.slow
def test_a_fault_that_shows_only_between_joined_nodes_is_narrowed_down(program):
    first = source_of(nodes(program.predict, "Relu")[0])
    fault = only_fault(
        program, lambda node: node.op_type == "Relu" and source_of(node) == first and not node.outputs[0].is_graph_output()
    )
    assert fault.joined
    # The value of the Relu is right where it is asked for; the first that is wrong beside it is the next layer's.
    assert fault.source == source_of(nodes(program.predict, "Conv")[1])


@pytest.mark.slow
def test_rounding_that_grows_is_no_fault():
    """A bias before a batch normalization has a gradient of zero: all digits of it are rounding."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        network (float[N, 6] x) => (float[N, 3] logits)
        <float[6, 5] w, float[5] b, float[5] scale, float[5] shift, float[5] mean, float[5] variance, float[5, 3] v>
        {
            h = Gemm (x, w, b)
            n = BatchNormalization (h, scale, shift, mean, variance)
            logits = MatMul (n, v)
        }"""
    )
    generator = np.random.default_rng(0)
    for name, shape in {"w": (6, 5), "b": (5,), "scale": (5,), "shift": (5,), "mean": (5,), "v": (5, 3)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(5, np.float32), "variance"))
    program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.1))
    comparison = compare_engines(program, ["onnxruntime", "reference"], steps=4, threads=1)
    assert comparison.agrees
    gradient = comparison.reports[0].tensors["grad:b"]
    assert gradient.worst.relative > gradient.tolerance
    assert gradient.by_rounding
    assert gradient.agrees
    assert comparison.reports[0].grown is not None
    broken = compare_engines(program, ["onnxruntime", FaultyEngine(lambda node: node.op_type == "MatMul")], steps=1, threads=1)
    assert broken.reports[0].fault.operator == "MatMul"


def test_three_engines_are_compared_with_the_first(program):
    faulty = FaultyEngine(lambda node: node.op_type == "LogSoftmax")
    comparison = compare_engines(program, ["reference", OnnxRuntimeEngine("none"), faulty], steps=1, threads=1)
    assert [report.engine for report in comparison.reports] == ["onnxruntime", "faulty"]
    assert [report.agrees for report in comparison.reports] == [True, False]
    assert comparison.reports[1].fault.operator == "burnish.SoftmaxCrossEntropy"
    assert "faulty differs from reference in step 0" in comparison.message()


def test_one_engine_with_two_settings_has_two_names(program):
    comparison = compare_engines(program, ["onnxruntime", OnnxRuntimeEngine("none")], steps=1, threads=1)
    assert comparison.engines == ["onnxruntime", "onnxruntime (2)"]
    assert comparison.agrees


def test_engines_that_keep_their_own_state_drift_apart():
    program = burnish.compile(MODEL, optimizer=burnish.optim.sgd(lr=0.5))
    slightly = FaultyEngine(lambda node: node.op_type == "Gemm" and source_of(node).startswith("gradient"), factor=1.001)
    together = compare_engines(program, ["onnxruntime", slightly], steps=4, threads=1, rtol=1e-2)
    apart = compare_engines(program, ["onnxruntime", slightly], steps=4, threads=1, rtol=1e-2, own_state=True)
    assert together.agrees

    def drift(comparison):
        return abs(comparison.losses[-1]["faulty"] / comparison.losses[-1]["onnxruntime"] - 1)

    assert drift(apart) > drift(together)


def test_a_loss_that_is_not_finite_on_one_engine_is_followed(program):
    comparison = compare_engines(
        program, ["onnxruntime", FaultyEngine(lambda node: node.op_type == "GlobalAveragePool", math.nan)], steps=2, threads=1
    )
    (report,) = comparison.reports
    assert math.isnan(comparison.losses[0]["faulty"])
    assert report.fault.operator == "GlobalAveragePool"
    text = json.dumps(comparison.to_dict(), allow_nan=False)
    assert json.loads(text)["losses"][0]["faulty"] == "nan"
    with pytest.raises(NonFiniteLossError):
        compare_engines(program, [FaultyEngine(lambda node: node.op_type == "Gemm", math.nan), "onnxruntime"], steps=1)


@pytest.mark.slow
def test_a_third_party_engine_is_compared_by_its_name(program, monkeypatch):
    point = importlib.metadata.EntryPoint("wrong", f"{__name__}:WrongSoftmax", "burnish.engines")
    real = importlib.metadata.entry_points

    def entry_points(**selection):
        points = importlib.metadata.EntryPoints([point])
        return points.select(**selection) if selection.get("group") == "burnish.engines" else real(**selection)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    comparison = compare_engines(program, ["onnxruntime", "wrong"], steps=1, threads=1)
    fault = comparison.reports[0].fault
    assert fault.operator == "burnish.SoftmaxCrossEntropy"
    assert fault.within.startswith("LogSoftmax")


class WrongSoftmax(FaultyEngine):
    def __init__(self):
        super().__init__(lambda node: node.op_type == "LogSoftmax")


def test_the_report_is_json(program):
    values = compare_engines(program, ["onnxruntime", FaultyEngine(lambda n: n.op_type == "Relu")], steps=1, threads=1).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["agrees"] is False
    assert values["reports"][0]["fault"]["place"] in values["message"]
    assert values["reports"][0]["tensors"]["loss"]["dtype"] == "float32"


def test_what_cannot_be_compared_is_refused(program):
    with pytest.raises(ConfigurationError, match=r"engines: give two or more to compare"):
        compare_engines(program, ["onnxruntime"])
    with pytest.raises(ConfigurationError, match=r"steps=0: give one step or more"):
        compare_engines(program, ["onnxruntime", "reference"], steps=0)
    with pytest.raises(ConfigurationError, match=r"rtol=-1\.0: give a finite number that is not negative"):
        compare_engines(program, ["onnxruntime", "reference"], rtol=-1.0)
    with pytest.raises(ConfigurationError, match=r"there is no batch to compare the engines on"):
        compare_engines(program, ["onnxruntime", "reference"], [])
    with pytest.raises(EngineError, match=r"There is no engine 'nowhere'"):
        compare_engines(program, ["onnxruntime", "nowhere"])
    with pytest.raises(InputError, match=r"'x'"):
        compare_engines(program, ["onnxruntime", "reference"], [{"labels": np.zeros(4, np.int64)}])
