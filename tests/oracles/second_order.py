"""Whole models whose gradient is differentiated once more: the Hessian of the loss times a vector, and PyTorch's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import burnish
from architectures.attention import Style
from architectures.catalogue import ARCHITECTURES
from oracles import whole_models

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Objective:
    """An architecture in float64 that computes its loss, and what it is fed.

    Attributes:
        module: from the inputs and labels, by their order, to the loss.
        feeds: inputs and labels by name.
        vectors: one for each parameter, by its name in the module.
    """

    module: nn.Module
    feeds: dict[str, torch.Tensor]
    vectors: Arrays

    @staticmethod
    def of(name: str, style: Style = "eager", training: bool = True) -> Objective:
        """Without ``training`` batch normalization takes its running statistics, which are those of some batches."""
        module = _WithLoss(name, whole_models.build(name, style)).double()
        feeds = {}
        for batch in whole_models.batches(name, 3):
            feeds = {
                key: tensor.double() if tensor.is_floating_point() else tensor for part in batch for key, tensor in part.items()
            }
            with torch.no_grad():
                module(*feeds.values())
        rng = np.random.default_rng(0)
        vectors = {key: rng.standard_normal(tuple(value.shape)) for key, value in module.named_parameters()}
        return Objective(module.train(training), feeds, vectors)

    def in_pytorch(self) -> tuple[float, float, Arrays]:
        """The gradient times the vectors, the sum of its terms' sizes, and its gradient by each parameter."""
        parameters = dict(self.module.named_parameters())
        # The kernels of attention that are fused have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            loss = self.module(*self.feeds.values())
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        terms = [gradient * torch.from_numpy(self.vectors[key]) for key, gradient in zip(parameters, gradients, strict=True)]
        product = torch.stack([term.sum() for term in terms]).sum()
        second = torch.autograd.grad(product, list(parameters.values()), materialize_grads=True)
        size = sum(term.abs().sum().item() for term in terms)
        return product.item(), size, {key: value.numpy() for key, value in zip(parameters, second, strict=True)}

    def export(self, exporter: str, opset: int) -> onnx.ModelProto:
        """The module as an exporter writes it, in the mode that it is in, with all its parameters and an open batch."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            whole_models.write(copy.deepcopy(self.module), self.feeds, ["loss"], path, exporter, opset, positional=0)
            return onnx.load(path)

    def in_burnish(self, model: onnx.ModelProto, engine: str) -> tuple[float, Arrays]:
        """The gradient of an export times the vectors, and its gradient by each parameter, all by ``burnish.grad``."""
        parameters = list(self.vectors)
        product = times_vectors(burnish.grad(model, parameters, "loss"), self.vectors)
        second = burnish.engines.get(engine).load(burnish.grad(product, parameters, "product"))
        outputs = second({key: tensor.numpy() for key, tensor in self.feeds.items()})
        return float(outputs["product"]), {key: outputs[f"grad:{key}:of:product"] for key in parameters}


class _WithLoss(nn.Module):
    def __init__(self, name: str, module: nn.Module):
        super().__init__()
        self.module, self.architecture = module, ARCHITECTURES[name]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.architecture.loss is None:
            return self.module(*tensors)
        *inputs, labels = tensors
        return self.architecture.loss_of(self.module, dict(enumerate(inputs)), {"labels": labels})


def times_vectors(gradients: ir.Model, vectors: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model with one output more, ``product``: the sum over all gradients of gradient times vector."""
    model = ir.to_proto(gradients)
    graph = model.graph
    for key, vector in vectors.items():
        graph.initializer.append(numpy_helper.from_array(vector, f"vector:{key}"))
        graph.node.append(helper.make_node("Mul", [f"grad:{key}", f"vector:{key}"], [f"times:{key}"]))
        graph.node.append(helper.make_node("ReduceSum", [f"times:{key}"], [f"sum:{key}"], keepdims=0))
    graph.node.append(helper.make_node("Sum", [f"sum:{key}" for key in vectors], ["product"]))
    graph.output.append(helper.make_tensor_value_info("product", TensorProto.DOUBLE, []))
    return model
