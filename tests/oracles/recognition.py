"""Models that hold a layer in pieces, written by hand or exported by PyTorch, and what a recognition pass must keep of them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import numpy_helper

import burnish
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

torch.set_num_threads(1)

Pass = Callable[[ir.Model], ir.Model]
Arrays = dict[str, np.ndarray]

NUMBERS: Arrays = {
    "half": np.float32(0.5),
    "minus_half": np.float32(-0.5),
    "one": np.float32(1.0),
    "two": np.float32(2.0),
    "three": np.float32(3.0),
    "epsilon": np.float32(1e-3),
    "last": np.array([-1], np.int64),
    "last_two": np.array([-2, -1], np.int64),
}


def written(
    body: str, x: np.ndarray, weights: Mapping[str, np.ndarray], outputs: str = "y", opset: int = 18, dtype: str = "float"
) -> onnx.ModelProto:
    """A model of nodes in ONNX's text form, over an input x with a symbolic batch; it may read ``NUMBERS`` by name."""
    shape = ", ".join(["n", *map(str, x.shape[1:])])
    results = ", ".join(f"{dtype} {name}" for name in outputs.split(", "))
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({dtype}[{shape}] x) => ({results}) {{ {body} }}'
    )
    read = {name for node in proto.graph.node for name in node.input}
    for name, array in {**NUMBERS, **weights}.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return proto


def exported(module: torch.nn.Module, x: np.ndarray, opset: int, folding: bool = False) -> bytes:
    """What PyTorch's TorchScript exporter writes for a module, with a symbolic batch."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            torch.from_numpy(x),
            file,
            opset_version=opset,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n"}},
            do_constant_folding=folding,
        )
    return file.getvalue()


def exported_by_dynamo(module: torch.nn.Module, x: np.ndarray, opset: int) -> onnx.ModelProto:
    """What PyTorch's newer exporter writes for a module, with a symbolic batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            (torch.from_numpy(x),),
            opset_version=opset,
            dynamo=True,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def random_weights(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter random numbers; PyTorch's own ones and zeros hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.5)
    return module


def operators(model: ir.Model) -> list[str]:
    """The operators of a model in their order, without constants."""
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


def assert_recognized(
    source: onnx.ModelProto | bytes, recognize: Pass, x: np.ndarray, expected: list[str], tolerance: float = 2e-6
) -> ir.Model:
    """Assert that a pass leaves these operators, a valid model, and the outputs on ONNX Runtime; returns the model.

    ``tolerance`` is relative to the largest number of an output.
    """
    model = load(source)
    before = onnxruntime_outputs(model, {"x": x})
    recognize(model)
    assert operators(model) == expected
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    after = onnxruntime_outputs(model, {"x": x})
    assert list(after) == list(before)
    for name, array in before.items():
        assert after[name].shape == array.shape
        assert after[name].dtype == array.dtype
        difference = np.abs(after[name].astype(np.float64) - array.astype(np.float64)).max()
        assert difference <= tolerance * np.abs(array).max(), (name, difference)
    return model


def assert_untouched(source: onnx.ModelProto | bytes, recognize: Pass) -> None:
    """Assert that a pass leaves a model exactly as it is."""
    model = load(source)
    before = ir.to_proto(model)
    recognize(model)
    assert ir.to_proto(model) == before


def assert_gradients(source: onnx.ModelProto | bytes, module: torch.nn.Module, x: np.ndarray, names: Mapping[str, str]) -> None:
    """Assert that the gradients of a random combination of the outputs, on ONNX Runtime, are those of PyTorch in float64.

    Args:
        source: the exported module.
        module: the module.
        x: its input.
        names: for each initializer that is differentiated by, the name of the module's parameter.
    """
    exact = copy.deepcopy(module).double()
    data = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    y = exact(data)
    cotangent = np.random.default_rng(5).normal(size=tuple(y.shape)).astype(np.float32)
    y.backward(torch.from_numpy(cotangent.astype(np.float64)))
    parameters = dict(exact.named_parameters())
    expected = {"x": data.grad, **{name: parameters[parameter].grad for name, parameter in names.items()}}
    model = burnish.grad(source, list(expected), "y")
    actual = onnxruntime_outputs(model, {"x": x, "cotangent:y": cotangent})
    for name, gradient in expected.items():
        assert gradient is not None
        reference = gradient.numpy().reshape(actual[f"grad:{name}"].shape)
        error = np.linalg.norm(actual[f"grad:{name}"] - reference) / np.linalg.norm(reference)
        assert error <= 3e-6, (name, error)
