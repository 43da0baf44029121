"""Architectures as exporters write them, and what PyTorch computes with them, to compare programs with."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import burnish
from architectures.attention import Style
from architectures.catalogue import ARCHITECTURES, SCHEDULED, Architecture, Tensors

BATCH = 4
STEPS = 5
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """What PyTorch computes, in float64 unless the module was of another type.

    Attributes:
        losses: of the steps.
        gradients: of the first step, by parameter.
        state: parameters and buffers after the last step.
    """

    losses: np.ndarray
    gradients: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]


def build(name: str, style: Style = "eager") -> nn.Module:
    torch.manual_seed(1)
    return ARCHITECTURES[name].module(style)


def batches(name: str, count: int = STEPS) -> list[tuple[Tensors, Tensors]]:
    """Batches, the second of another size than the others."""
    torch.manual_seed(3)
    return [ARCHITECTURES[name].batch(BATCH - (index == 1)) for index in range(count)]


def feeds_of(batch: tuple[Tensors, Tensors]) -> Feeds:
    inputs, labels = batch
    return {name: tensor.numpy() for name, tensor in (inputs | labels).items()}


def export(
    name: str,
    module: nn.Module,
    path: Path,
    exporter: str,
    opset: int = 18,
    external_data: bool = False,
    defaults: bool = False,
) -> Path:
    """Write the module in training mode, with an open batch; with ``defaults`` as exporters do unless they are told otherwise.

    The module keeps its running statistics, and a file of TorchScript's exporter has those of before the trace.
    """
    architecture = ARCHITECTURES[name]
    statistics = {key: value.clone() for key, value in module.state_dict().items() if "running" in key}
    inputs = architecture.inputs(BATCH)
    positional = 1 if len(inputs) > 2 and architecture.loss is None else len(inputs)  # of forward(x, *labels)
    write(
        copy.deepcopy(module) if defaults else copy.deepcopy(module).train(),
        inputs,
        architecture.outputs,
        path,
        exporter,
        opset,
        positional=positional,
        external_data=external_data,
        defaults=defaults,
    )
    if exporter == "torchscript" and not defaults:
        restore_statistics(path, statistics)
    return path


def write(
    module: nn.Module,
    inputs: Tensors,
    outputs: Sequence[str],
    path: Path,
    exporter: str,
    opset: int,
    *,
    positional: int,
    external_data: bool = False,
    defaults: bool = False,
) -> None:
    """Write a module, in the mode that it is in, with an open batch.

    Args:
        module: takes ``positional`` inputs by their names and the others as ``*arguments``; what it holds may change.
        inputs: a batch, by name.
        outputs: what it returns.
        path: of the file.
        exporter: ``torchscript`` or ``dynamo``.
        opset: of the file.
        positional: how many inputs have a name.
        external_data: whether weights go into a file beside it.
        defaults: whether the exporter's optimizer runs, and batch normalization is written as in evaluation.
    """
    settings = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": opset}
    arguments = tuple(inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            if exporter == "dynamo":
                batch = {0: torch.export.Dim("batch")}
                shapes: tuple = (batch,) * positional
                if positional < len(inputs):
                    shapes = (*shapes, (batch,) * (len(inputs) - positional))
                if not defaults:
                    settings["optimize"] = False
                torch.onnx.export(
                    module,
                    arguments,
                    path,
                    dynamic_shapes=shapes,
                    external_data=external_data,
                    dynamo=True,
                    verbose=False,
                    **settings,
                )
            else:
                if not defaults:
                    mode = torch.onnx.TrainingMode.TRAINING if module.training else torch.onnx.TrainingMode.EVAL
                    settings |= {"training": mode, "do_constant_folding": False}
                torch.onnx.export(
                    module, arguments, path, dynamic_axes={name: {0: "batch"} for name in inputs}, dynamo=False, **settings
                )
        finally:
            logging.disable(logging.NOTSET)


def restore_statistics(path: Path, statistics: Mapping[str, torch.Tensor]) -> None:
    """Write the running statistics of before the trace, which ran the module in training mode."""
    model = onnx.load(path)
    for initializer in model.graph.initializer:
        if initializer.name in statistics:
            initializer.CopyFrom(onnx.numpy_helper.from_array(statistics[initializer.name].numpy(), initializer.name))
    onnx.save(model, path)


def in_pytorch(name: str, module: nn.Module, given: Sequence[tuple[Tensors, Tensors]]) -> Trained:
    """Train a copy of the module on the batches, in its own type."""
    architecture = ARCHITECTURES[name]
    module = copy.deepcopy(module).train()
    dtype = next(module.parameters()).dtype
    optimizer = architecture.torch_optimizer(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, SCHEDULED["every"], SCHEDULED["gamma"])
    losses, gradients = [], {}
    for batch in given:
        inputs, labels = ({key: as_dtype(tensor, dtype) for key, tensor in part.items()} for part in batch)
        optimizer.zero_grad()
        loss = architecture.loss_of(module, inputs, labels)
        loss.backward()
        if not gradients:
            gradients = {key: value.grad.detach().clone().double().numpy() for key, value in module.named_parameters()}
        optimizer.step()
        if architecture.scheduled:
            schedule.step()
        losses.append(loss.item())
    state = {key: value.detach().double().numpy() for key, value in module.state_dict().items()}
    return Trained(np.array(losses), gradients, state)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def optimizer_of(architecture: Architecture) -> burnish.optim.Optimizer:
    """Burnish's optimizer of an architecture."""
    settings = dict(architecture.optimizer)
    name = settings.pop("name")
    if architecture.scheduled:
        settings["lr"] = burnish.optim.schedules.step(settings["lr"], SCHEDULED["every"], SCHEDULED["gamma"])
    return getattr(burnish.optim, name)(**settings)


def compiled(name: str, path: Path, module: nn.Module, **options: object) -> burnish.Program:
    """Compile an exported file as its architecture is trained: the module's parameters train, its buffers do not.

    ``options`` are those of ``burnish.compile``; ``trainable=None`` leaves it to the file to say what is a parameter.
    """
    architecture = ARCHITECTURES[name]
    target = {"output": "loss"} if architecture.loss is None else {"loss": architecture.loss}
    parameters = {key: value.detach().numpy() for key, value in module.named_parameters()}
    settings = {**target, "optimizer": optimizer_of(architecture), "metrics": ()}
    settings["trainable"] = lambda key, array: _parameter_of(key, array, parameters) is not None
    return burnish.compile(path, **settings | options)


def parameters_by_name(program: burnish.Program, module: nn.Module) -> dict[str, tuple[str, bool]]:
    """For each parameter of the module, what the program calls it, and whether the program has the transposed matrix."""
    parameters = {key: value.detach().numpy() for key, value in module.named_parameters()}
    names = {}
    for key, array in program.initial_state().items():
        if key.startswith("param/") and (which := _parameter_of(key.removeprefix("param/"), array, parameters)) is not None:
            names[which[0]] = key.removeprefix("param/"), which[1]
    return names


def _parameter_of(key: str, array: np.ndarray, parameters: Mapping[str, np.ndarray]) -> tuple[str, bool] | None:
    """The parameter that an initializer is, and whether transposed; None for what is none.

    An exporter may write a weight under a name of its own, transposed; then its values tell which it is.
    """
    if key in parameters:
        return key, False
    for name, value in parameters.items():
        if np.array_equal(value, array):
            return name, False
        if value.ndim == 2 and np.array_equal(value.T, array):
            return name, True
    return None
