"""A training step around a gradient graph that another tool made: its optimizer in standard operators, run without copies.

For tools that differentiate an ONNX graph and leave the rest to their user. Needs numpy, onnx and onnxruntime of any kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

LOSS, LABELS, STEP = "loss", "labels", "step"


def untied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give each parameter its own initializer back.

    PyTorch's exporter merges parameters of equal initial value into one initializer and one Identity for each of the others.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in initializers:
            copy = model.graph.initializer.add()
            copy.CopyFrom(initializers[node.input[0]])
            copy.name = node.output[0]
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def parameters_of(model: onnx.ModelProto) -> list[str]:
    """The initializers that train: those of floats, less running statistics and constants that the exporter named itself."""
    return [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and "running_" not in tensor.name and not tensor.name.startswith("onnx::")
    ] + [tensor.name for tensor in model.graph.initializer if tensor.name.startswith("onnx::MatMul")]


def fix_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Give the batch dimension a number, for tools that need static shapes."""
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    del model.graph.value_info[:]
    return model


def add_loss(model: onnx.ModelProto) -> None:
    """Put the mean cross-entropy over the classes behind the model's output, as its only output ``loss``, labels as numbers.

    The second output of the operator, log probabilities, is there because onnxruntime-training's gradient reads it.
    """
    logits, extents = model.graph.output[0].name, extents_of(model)
    outputs = [LOSS, "log_probabilities"]
    model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", [logits, LABELS], outputs, reduction="mean"))
    model.graph.input.append(helper.make_tensor_value_info(LABELS, TensorProto.INT64, ["batch", *extents[2:]]))
    _only_output_is_loss(model)


def add_plain_loss(model: onnx.ModelProto, batch: int | str, classes: int) -> None:
    """The same in plain operators, labels as probabilities (``one_hot``): for tools without a rule for the operator."""
    logits, extents = model.graph.output[0].name, extents_of(model)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "class axis"))
    model.graph.node.extend(
        [
            helper.make_node("Softmax", [logits], ["probabilities"], axis=1),
            helper.make_node("Log", ["probabilities"], ["logarithms"]),
            helper.make_node("Mul", ["logarithms", LABELS], ["chosen"]),
            helper.make_node("ReduceSum", ["chosen", "class axis"], ["of sample"], keepdims=0),
            helper.make_node("ReduceMean", ["of sample"], ["mean"], axes=list(range(len(extents) - 1)), keepdims=0),
            helper.make_node("Neg", ["mean"], [LOSS]),
        ]
    )
    model.graph.input.append(helper.make_tensor_value_info(LABELS, TensorProto.FLOAT, [batch, classes, *extents[2:]]))
    _only_output_is_loss(model)


def one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    """Class numbers [batch, ...] as float32 probabilities [batch, classes, ...]."""
    return np.moveaxis(np.eye(classes, dtype=np.float32)[labels], -1, 1)


def extents_of(model: onnx.ModelProto) -> list[int]:
    """The dimensions of the model's output, [batch, classes, ...]; 0 for one that has no number."""
    return [dimension.dim_value for dimension in model.graph.output[0].type.tensor_type.shape.dim]


def classes_of(model: onnx.ModelProto) -> int:
    """The number of classes in the model's output."""
    return extents_of(model)[1]


def _only_output_is_loss(model: onnx.ModelProto) -> None:
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))


def initializers_to_inputs(model: onnx.ModelProto, names: list[str]) -> dict[str, np.ndarray]:
    """Turn initializers into inputs; returns their values."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in names}
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in values]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    declared = {value.name for value in model.graph.input}
    for name, value in values.items():
        if name not in declared:
            model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
    return values


class TrainingStep:
    """A gradient graph with an optimizer behind it, and its state; a call trains on a batch.

    Args:
        model: a graph with the inputs ``x``, ``labels`` and one for each parameter, and the output ``loss``; changed.
        gradients: for each parameter the name of its gradient, a value of the graph of the parameter's shape.
        values: the parameters' initial values.
        optimizer: as in ``workloads.Workload``.
        threads: of an operator.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        gradients: dict[str, str],
        values: dict[str, np.ndarray],
        optimizer: dict[str, Any],
        threads: int,
    ):
        self._graph = model.graph
        self._updated: dict[str, str] = {}
        self._state: dict[str, np.ndarray] = dict(values)
        del self._graph.output[:]
        self._graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, None))
        for name, gradient in gradients.items():
            {"sgd": self._momentum, "adamw": self._adamw}[optimizer["name"]](name, gradient, optimizer)
        if optimizer["name"] == "adamw":
            self._slot(STEP, np.zeros((), np.float32))
            self._update(STEP, self._op("Add", STEP, self._number(1)))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._held = [
            {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in self._state.items()}
            for _ in range(2)
        ]

    def __call__(self, x: np.ndarray, labels: np.ndarray) -> float:
        old, new = self._held
        binding = self._session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_cpu_input(LABELS, labels)
        for name, result in self._updated.items():
            binding.bind_ortvalue_input(name, old[name])
            binding.bind_ortvalue_output(result, new[name])
        binding.bind_output(LOSS)
        self._session.run_with_iobinding(binding)
        self._held.reverse()
        return float(binding.get_outputs()[-1].numpy())

    def _op(self, operator: str, *inputs: str) -> str:
        output = f"update{len(self._graph.node)}"
        self._graph.node.append(helper.make_node(operator, list(inputs), [output]))
        return output

    def _number(self, value: float) -> str:
        name = f"number {value}"
        if all(tensor.name != name for tensor in self._graph.initializer):
            self._graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def _slot(self, name: str, value: np.ndarray) -> str:
        self._state[name] = value
        self._graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
        return name

    def _update(self, name: str, result: str) -> None:
        self._updated[name] = result
        self._graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, None))

    def _momentum(self, name: str, gradient: str, optimizer: dict[str, Any]) -> None:
        slot = self._slot(f"momentum {name}", np.zeros_like(self._state[name]))
        velocity = self._op("Add", self._op("Mul", slot, self._number(optimizer["momentum"])), gradient)
        self._update(slot, velocity)
        self._update(name, self._op("Sub", name, self._op("Mul", velocity, self._number(optimizer["lr"]))))

    def _adamw(self, name: str, gradient: str, optimizer: dict[str, Any]) -> None:
        """torch.optim.AdamW's mathematics, with the step of this update from the input ``step``, updates so far."""
        moments = []
        for power, beta in enumerate(optimizer["betas"], 1):
            slot = self._slot(f"moment{power} {name}", np.zeros_like(self._state[name]))
            term = self._op("Mul", gradient, gradient) if power == 2 else gradient
            kept = self._op("Mul", slot, self._number(beta))
            moment = self._op("Add", kept, self._op("Mul", term, self._number(1 - beta)))
            self._update(slot, moment)
            share = self._op("Pow", self._number(beta), self._op("Add", STEP, self._number(1)))
            moments.append(self._op("Div", moment, self._op("Sub", self._number(1), share)))
        first, second = moments
        scale = self._op("Add", self._op("Sqrt", second), self._number(optimizer["eps"]))
        change = self._op("Mul", self._op("Div", first, scale), self._number(optimizer["lr"]))
        kept = self._op("Mul", name, self._number(1 - optimizer["lr"] * optimizer["weight_decay"]))
        self._update(name, self._op("Sub", kept, change))
