"""An ONNX file as a layer of a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.dtypes import tensor_of
from burnish.errors import ConfigurationError, InputError
from burnish.graph import FLOATING
from burnish.importer import Bind, InitializerKind, Source, classify_initializers, load, refuse_gradients
from burnish.modes import batch_normalizations
from burnish.norms import Auto, Frozen, NormPolicy, Renorm, Train, default_running_variance, frozen_by_mode, resolve_policies
from burnish.rewriting.stages import RECOGNIZED
from burnish.torch.autocast import autocast_off, autocast_precision, cast_input, precision_of
from burnish.torch.bound import Binding, BoundGraph, forget_values
from burnish.torch.conversion import place_for
from burnish.torch.differentiable import laid_out


class Layer(torch.nn.Module):
    """An ONNX model as a ``torch.nn.Module``: a trainable part of a PyTorch model, run by burnish's PyTorch engine.

    Weights become parameters; running statistics, and tensors that the exporter marked as buffers, become buffers. A dotted
    initializer name is a path through submodules, so ``state_dict`` has the names of the file; if that is impossible, dots become
    underscores. ``train()`` and ``eval()`` control normalization and dropout; dropout draws from PyTorch's generator. Gradients
    flow to inputs and parameters, and can be differentiated again.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        norm: the policy of batch normalization layers in training, or {pattern: policy}, as in ``burnish.compile``; ``auto`` is
            ``train``.
        batch: ``open`` to let a model of one sample take several (``burnish.load``).
        bind: {input: value}: inputs with a fixed value (``burnish.load``).
        engine: the engine that runs it; by default ``TorchEngine()``.

    Raises:
        ModelError: the source is not a valid ONNX model.
        ConfigurationError: an option does not fit the model.
    """

    def __init__(
        self,
        source: Source,
        *,
        norm: str | NormPolicy | Mapping[str, str | NormPolicy] = "auto",
        batch: str | None = None,
        bind: Bind = None,
        engine: TorchEngine | None = None,
    ):
        super().__init__()
        model = load(source, batch=batch, bind=bind)
        RECOGNIZED.run(model, None)
        refuse_gradients(model, "burnish.torch.Layer")
        self._model = model
        self._engine = engine or TorchEngine(capture=False)
        self._policies = _policies(model, norm)
        self._inputs = [value.name or "" for value in model.graph.inputs]
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._graphs: dict[tuple[bool, str | None], BoundGraph] = {}
        for name, kind in classify_initializers(model).items():
            if kind is not InitializerKind.CONSTANT:
                self._register(name, model.graph.initializers[name], kind is InitializerKind.WEIGHT)
        forget_values(model.graph, self._owners)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Run the model.

        Args:
            args: inputs of the model, in the order of the file.
            kwargs: inputs by name.

        Returns:
            The output of the model, or a tuple if there are several. Images have channels last in memory.

        Raises:
            ConfigurationError: inputs are missing, too many, or have another dtype.
            InputError: an input has another extent along an axis that is not open.
        """
        inputs = self._arguments(args, kwargs)
        device = inputs[0].device.type if inputs else "cpu"
        precision = autocast_precision(device)
        graph = self._graph(self.training, precision)
        data = [cast_input(tensor, dtype) for tensor, dtype in zip(inputs, graph.dtypes, strict=False)] if precision else inputs
        if not graph.fits(data):
            raise InputError(
                f"{graph.misfits(data)[0]}: give it that extent, or make the layer of a file in which the axis is "
                f"open (batch='open' opens that of the "
                "samples)"
            )
        state = [getattr(*self._owners[name]) for name in graph.state]
        with autocast_off(device, precision):
            results = graph(data, state)
        return results[0] if len(results) == 1 else results

    def _arguments(self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(self._inputs, args, strict=False)) | dict(kwargs)
        if len(given) != len(args) + len(kwargs) or given.keys() != set(self._inputs):
            wanted = ", ".join(f"'{name}'" for name in self._inputs)
            raise ConfigurationError(
                f"the layer takes the inputs {wanted}, and was given {len(args)} by position"
                + (f" and {', '.join(map(repr, kwargs))} by name" if kwargs else "")
                + ": give each of them once"
            )
        return [given[name] for name in self._inputs]

    def _graph(self, training: bool, precision: str | None) -> BoundGraph:
        key = (training, precision)
        if key not in self._graphs:
            policies = self._policies if training else None
            variance = default_running_variance(self._model)
            binding = Binding(tuple(self._owners), policies, variance, precision_of(precision))
            self._graphs[key] = BoundGraph(self._model, binding, self._engine, self._model.graph.name or "layer")
        return self._graphs[key]

    def _register(self, name: str, value: ir.Value, is_weight: bool) -> None:
        assert value.const_value is not None
        dtype = value.const_value.dtype
        tensor = tensor_of(value.const_value.numpy(), dtype)
        if self._engine.channels_last and tensor.dim() == 4:
            tensor = laid_out(tensor)
        owner, own_name = place_for(self, name)
        if is_weight:
            owner.register_parameter(own_name, torch.nn.Parameter(tensor, requires_grad=dtype in FLOATING))
        else:
            owner.register_buffer(own_name, tensor)
        self._owners[name] = owner, own_name


def _policies(model: ir.Model, norm: str | NormPolicy | Mapping[str, str | NormPolicy]) -> dict[str, NormPolicy]:
    nodes = batch_normalizations(model.graph)
    resolved = resolve_policies(norm, nodes)
    held_by_mode = frozen_by_mode(nodes)

    def settled(node: ir.Node, policy: NormPolicy) -> NormPolicy:
        return policy if not isinstance(policy, Auto) else Frozen() if node in held_by_mode else Train()

    policies = {node.name or "": settled(node, policy) for node, policy in resolved.items()}
    for layer, policy in policies.items():
        if isinstance(policy, Renorm) or getattr(policy, "momentum", None) == "cumulative":
            raise ConfigurationError(
                f"norm: '{policy}' of '{layer}' counts the steps of a session, and a layer has none: choose another policy, or "
                "train the model with burnish.Session"
            )
    return policies
