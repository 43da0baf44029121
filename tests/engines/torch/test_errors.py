"""What the torch engine refuses, and what it says."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.translate import rules
from burnish.engines.torch.translate.rules import Call
from burnish.errors import EngineError
from oracles.open_program import open_program
from oracles.tiny_program import tiny_program


def model_of(nodes, inputs, outputs, opset: int = 18) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in inputs],
        [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in outputs],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10))


def test_an_operator_without_a_translation_is_named() -> None:
    inputs = ["a", "scale", "zero", "b", "scale", "zero", "scale", "zero"]
    node = helper.make_node("QLinearMatMul", inputs, ["y"], name="narrow")
    integers = [(name, TensorProto.UINT8, [2, 2]) for name in "ab"]
    declared = [*integers, ("scale", TensorProto.FLOAT, []), ("zero", TensorProto.UINT8, [])]
    model = model_of([node], declared, [("y", TensorProto.UINT8, [2, 2])])
    arrays = {"a": np.zeros((2, 2), np.uint8), "b": np.zeros((2, 2), np.uint8), "scale": np.float32(1), "zero": np.uint8(0)}
    with pytest.raises(EngineError, match=r"QLinearMatMul 'narrow'.*has no translation to PyTorch.*use engine='onnxruntime'"):
        TorchEngine().run(model, arrays)


@pytest.mark.parametrize("late", [False, True])
def test_a_translation_that_returns_too_few_results(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(op: Call) -> tuple[object, ...]:
        if late:
            op.known_integers(1, [])  # known only when the graph runs
        return (op.tensor(),)

    monkeypatch.setitem(rules._RULES, ("", "Split"), [(1, rule)])
    node = helper.make_node("Split", ["x", "sizes"], ["a", "b"], name="halves")
    inputs = [("x", TensorProto.FLOAT, [4]), ("sizes", TensorProto.INT64, [2])]
    model = model_of([node], inputs, [("a", TensorProto.FLOAT, [2]), ("b", TensorProto.FLOAT, [2])])
    message = (
        r"the translation of Split 'halves' \(output 'a'\) returned 1 of 2 results, and none for its output 1, 'b', which is read"
    )
    with pytest.raises(EngineError, match=message):
        TorchEngine().run(model, {"x": np.zeros(4, np.float32), "sizes": np.array([2, 2])})


def test_whatever_a_translation_raises_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules._RULES, ("", "Relu"), [(1, lambda op: torch.remainder(torch.arange(3), 0))])
    node = helper.make_node("Relu", ["x"], ["y"], name="out")
    model = model_of([node], [("x", TensorProto.FLOAT, ["n"])], [("y", TensorProto.FLOAT, ["n"])])
    message = r"Relu 'out'.*could not be translated to PyTorch \(RuntimeError: ZeroDivisionError\): .*engine='onnxruntime'"
    with pytest.raises(EngineError, match=message):
        TorchEngine().load(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_named() -> None:
    program = tiny_program()
    message = r"cannot use the device 'cuda': .*Leave device out for the CPU"
    with pytest.raises(EngineError, match=message):
        open_program(TorchEngine(), program, program.initial_state(0), device="cuda")
    with pytest.raises(EngineError, match=message):
        open_program(TorchEngine("cuda"), program, program.initial_state(0))


# All that PyTorch has a name for, but for those that this machine may have, and others.
ABSENT = (
    "ipu hip ve fpga maia xla lazy vulkan meta hpu privateuseone privateuseone:0 mkldnn opengl opencl ideep "
    "abacus cuda:99 cuda: cuda:x CPU cpu:-1 cpu:3"
).split()


@pytest.mark.filterwarnings("ignore:.*no longer used as device type")
@pytest.mark.parametrize("name", [*ABSENT, "", " cpu", 0, 3, True, b"cpu", ["cpu"], 1.5])
def test_a_device_that_does_not_exist_is_named(name: object) -> None:
    program = tiny_program()
    message = rf"^The torch engine cannot use the device {re.escape(repr(name))}: .+\. (Leave device out|Give one)"
    with pytest.raises(EngineError, match=message):
        burnish.Session(program, engine="torch", device=name)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=message):
        open_program(TorchEngine(name), program, program.initial_state(0))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=message):
        TorchEngine(name).load(program.predict)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mps", "xpu", "mtia"])
def test_a_device_of_another_maker_is_named(name: str) -> None:
    if getattr(torch, name).is_available():
        pytest.skip(f"there is an {name} device here")
    with pytest.raises(EngineError, match=rf"cannot use the device '{name}': .*Leave device out for the CPU"):
        open_program(TorchEngine(name), tiny_program(), tiny_program().initial_state(0))


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_names_of_the_cpu_are_one_device(name: str) -> None:
    program = tiny_program()
    runner = open_program(TorchEngine(), program, program.initial_state(0), device=name)
    assert {tensor.device for tensor in runner._state.values()} == {torch.device("cpu")}
    assert runner._device == torch.device("cpu")


@pytest.mark.parametrize("threads", [0, True, 1.5, 1025])
def test_threads_that_are_no_number_of_threads(threads: object) -> None:
    program = tiny_program()
    with pytest.raises(EngineError, match=r"threads=.*: give a whole number from 1 to 1024, or leave"):
        open_program(TorchEngine(), program, program.initial_state(0), threads=threads)  # type: ignore[arg-type]


def test_elements_that_pytorch_lacks_are_named() -> None:
    node = helper.make_node("Identity", ["text"], ["same"], name="copy")
    model = model_of([node], [("text", TensorProto.STRING, ["n"])], [("same", TensorProto.STRING, ["n"])])
    with pytest.raises(EngineError, match=r"The input 'text' holds elements of type STRING.*use engine='onnxruntime'"):
        TorchEngine().run(model, {"text": np.array(["a"], object)})


def test_a_dtype_without_a_kernel_on_the_device_is_named() -> None:
    node = helper.make_node("ReduceMax", ["x"], ["y"], name="largest", keepdims=0)
    model = model_of([node], [("x", TensorProto.UINT64, ["n"])], [("y", TensorProto.UINT64, [])])
    with pytest.raises(EngineError, match=r"not implemented for 'UInt64'.*no kernel for these elements: use a float32 model"):
        TorchEngine().run(model, {"x": np.zeros(2, np.uint64)})


def test_running_out_of_memory_says_what_to_do() -> None:
    node = helper.make_node("Expand", ["x", "shape"], ["wide"])
    added = helper.make_node("Add", ["wide", "wide"], ["y"])
    model = model_of(
        [node, added],
        [("x", TensorProto.FLOAT, [1, 1]), ("shape", TensorProto.INT64, [2])],
        [("y", TensorProto.FLOAT, ["a", "b"])],
    )
    with pytest.raises(
        EngineError,
        match=r"failed in the model graph at Add \(output 'y'\): .*No state has changed\. Memory ran out: use a smaller batch",
    ):
        TorchEngine().run(model, {"x": np.zeros((1, 1), np.float32), "shape": np.array([2**30, 2**26])})


def test_a_failing_operator_leaves_a_remedy() -> None:
    node = helper.make_node("MatMul", ["x", "x"], ["y"], name="squared")
    model = model_of([node], [("x", TensorProto.FLOAT, ["a", "b"])], [("y", TensorProto.FLOAT, None)])
    with pytest.raises(EngineError, match=r"failed in the model graph at MatMul 'squared' \(output 'y'\): .*Check the shapes"):
        TorchEngine().run(model, {"x": np.zeros((2, 3), np.float32)})


def test_an_index_out_of_range_names_the_node_that_looks_it_up():
    nodes = [
        helper.make_node("Add", ["tokens", "tokens"], ["doubled"], name="double"),
        helper.make_node("Gather", ["table", "doubled"], ["y"], name="look_up"),
        helper.make_node("Neg", ["y"], ["z"], name="behind"),
    ]
    model = model_of(
        nodes,
        [("table", TensorProto.FLOAT, [4, 2]), ("tokens", TensorProto.INT64, ["n"])],
        [("z", TensorProto.FLOAT, ["n", 2])],
    )
    place = r"failed in the model graph at Gather 'look_up' \(output 'y'\), which looks up rows of 'table'"
    message = rf"{place}: there are 4 rows, and none of index 10\. .*correct the values in the batch"
    with pytest.raises(EngineError, match=message):
        TorchEngine().run(model, {"table": np.zeros((4, 2), np.float32), "tokens": np.array([1, 5])})


def test_a_failure_within_a_body_names_the_node_of_the_body():
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "iteration"], ["row"], name="look_up"),
            helper.make_node("Identity", ["going"], ["goes_on"], name="on"),
        ],
        "body",
        [
            helper.make_tensor_value_info("iteration", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [2]),
        ],
    )
    loop = helper.make_node("Loop", ["count", ""], ["rows"], name="each", body=body)
    model = model_of(
        [loop],
        [("table", TensorProto.FLOAT, [4, 2]), ("count", TensorProto.INT64, [])],
        [("rows", TensorProto.FLOAT, ["n", 2])],
    )
    with pytest.raises(EngineError, match=r"failed in the model graph at Gather 'look_up' \(output 'row'\)"):
        TorchEngine().run(model, {"table": np.zeros((4, 2), np.float32), "count": np.int64(7)})
