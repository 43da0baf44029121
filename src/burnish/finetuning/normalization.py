"""Batch normalization after layers into which an exporter folded it, so that they train like the original module."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from burnish import engines
from burnish.data import Dataset, Loader
from burnish.errors import BurnishError, ConfigurationError, UnsupportedOperatorError
from burnish.finetuning.options import AUTO, INSERT, KEEP
from burnish.graph.annotations import marked_sample_axis
from burnish.graph.constants import initial_array, set_initializer
from burnish.importer import folded_layers
from burnish.norms.policies import layer_name
from burnish.program.layout import Axes, to_model
from burnish.sample_axes import moved_inputs
from burnish.surgery import insert
from burnish.surgery.folded import perhaps_folded
from burnish.surgery.insert import OPERATORS

OPEN_EXTENT = 2
"""Size tried for an open extent, such as the number of tokens."""


def takes_one_sample(model: ir.Model) -> bool:
    """True if all inputs with samples hold one sample, along the marked axis or the first."""
    axes = [(value.shape, marked_sample_axis(value)) for value in model.graph.inputs]
    held = [shape is not None and len(shape) > 1 and shape[axis] == 1 for shape, axis in axes if axis is not None]
    return bool(held) and all(held)


def settle_outputs(model: ir.Model) -> None:
    """Give outputs a first extent of 1 if it is open and one sample gives 1; in place.

    PyTorch's older exporter writes shapes with ``Where`` and ``Expand``, and shape inference loses the sample axis there. Such an
    output would get another axis when the batch is opened.

    Args:
        model: a canonical model that takes one sample.
    """
    open_ones = [value for value in model.graph.outputs if value.shape is not None and value.shape and _is_open(value.shape[0])]
    if not open_ones:
        return
    feeds = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        extents = [extent if isinstance(extent, int) else OPEN_EXTENT for extent in value.shape]
        feeds[str(value.name)] = np.zeros(extents, value.dtype.numpy())
    with suppress(BurnishError):  # outputs stay as they are if the model does not run on zeros
        outputs = engines.get("auto").load(model)(feeds)
        for value in open_ones:
            assert value.shape is not None
            if outputs[str(value.name)].shape[:1] == (1,):
                value.shape = ir.Shape([1, *value.shape.dims[1:]])


def _is_open(extent: int | ir.SymbolicDim) -> bool:
    return not isinstance(extent, int)


WAYS = (AUTO, INSERT, KEEP)
CALIBRATED, AT_ONCE = 128, 32
"""Most samples used for the statistics; most samples per batch."""
LEAST_BATCH = 8
"""Batch size below which batch statistics are worse than none."""


def with_normalization(
    model: ir.Model,
    dataset: Dataset,
    trained: Collection[str],
    way: str,
    batch_size: int | None,
    seed: int,
    notes: list[str],
    is_random: bool = False,
) -> tuple[ir.Model, tuple[str, ...]]:
    """Insert batch normalization after trained layers into which it was folded, and note the reason.

    A network without normalization trains only at lower rates, and often to a worse result. The new layers start from the
    statistics of the data and change no output (``burnish.surgery.insert``); weights get the length that a module starts with.
    The exported file has the layers folded again.

    Args:
        model: a canonical model; not changed.
        dataset: training data; up to 128 samples are read.
        trained: names of the weights that train.
        way: ``auto``: after layers that the file marks as folded; ``insert``: after every trained convolution that has none;
            ``keep``: nowhere.
        batch_size: batch size of the steps; None if still to be chosen, which then is 8 or more.
        seed: seed for the choice of samples.
        notes: list that gets a line.
        is_random: True if the weights were not trained: with ``insert``, the new layers then start with scale 1 and bias 0 like a
            module. The outputs of such a network are not worth keeping, and may be nearly the same for all samples.

    Returns:
        The model, and the biases before the new layers: normalization removes them again, so they need no training.

    Raises:
        ConfigurationError: ``way`` is unknown.
    """
    if way not in WAYS:
        raise ConfigurationError(f"folded_norm={way!r}: give {', '.join(map(repr, WAYS[:-1]))} or {WAYS[-1]!r}")
    said = folded_layers(model)
    folded = [name for name in said if name in trained]
    layers = _layers(model, trained, None if way == INSERT else {*folded})
    kept = (
        f"normalization: the exporter folded that of {len(folded)} layer{'s' * (len(folded) != 1)} into their weights; it stays "
        "there, and these train as they are"
    )
    if way == KEEP or not layers:
        if folded:
            notes.append(kept)
        elif way != KEEP and (count := perhaps_folded(model)) and _layers(model, trained, None):
            notes.append(
                f"normalization: none in the file, whose {count} convolutions look as if it had been folded into them; if it "
                "was, folded_norm='insert' (--folded-norm insert) puts it back for training"
            )
        return model, ()
    least = min(len(dataset), len(dataset) if batch_size is None else batch_size)
    if way == AUTO and least < LEAST_BATCH:
        notes.append(f"{kept}, as a batch of {least} is too small to normalize by")
        return model, ()
    names = [node.name or layer_name(node) for node in layers]
    is_fresh = is_random and way == INSERT
    kept_as = "with scale 1 and bias 0, as the weights are random" if is_fresh else "so that no output changes"
    notes.append(
        f"normalization: put after {len(layers)} layers{' into which the exporter folded it' if way == AUTO else ''}, with the "
        f"statistics of {min(len(dataset), CALIBRATED)} samples, {kept_as}; it is folded again in the tuned file "
        "(folded_norm='keep', --folded-norm keep: leave it out)"
    )
    biases = tuple(name for node in layers if (name := _initializer(node, 2)) is not None and name in trained)
    inserted = _inserted(model, names, dataset, seed)
    if is_fresh:
        _begin_afresh(inserted, {node.outputs[0].name for node in layers})
    return inserted, biases


def _begin_afresh(model: ir.Model, normalized: Collection[str | None]) -> None:
    """Give the batch normalization of these values scale 1 and bias 0, in place."""
    for node in model.graph:
        if node.op_type == "BatchNormalization" and node.inputs[0] is not None and node.inputs[0].name in normalized:
            for value, number in zip(node.inputs[1:3], (1.0, 0.0), strict=True):
                assert value is not None
                set_initializer(value, np.full_like(initial_array(value), number))


def _inserted(model: ir.Model, names: Sequence[str], dataset: Dataset, seed: int) -> ir.Model:
    """Insert the layers with statistics of the data; a file for one sample is measured on many at once if possible."""
    axes = moved_inputs(model.graph)
    if takes_one_sample(model):
        with suppress(UnsupportedOperatorError):
            return insert(model, names, _batches(dataset, min(AT_ONCE, len(dataset)), seed, axes), rescale=True, batch="open")
    first = model.graph.inputs[0]
    fixed = first.shape[marked_sample_axis(first) or 0] if first.shape is not None and len(first.shape) else None
    size = fixed if isinstance(fixed, int) else min(AT_ONCE, len(dataset))
    return insert(model, names, _batches(dataset, size, seed, axes), rescale=True)


def _layers(model: ir.Model, trained: Collection[str], weights: Collection[str] | None) -> list[ir.Node]:
    """The trained layers that batch normalization can follow: those with these weights, or all convolutions."""
    operators = OPERATORS if weights is not None else ("Conv", "ConvTranspose")
    return [
        node
        for node in model.graph
        if node.domain == ""
        and node.op_type in operators
        and (name := _initializer(node, 1)) in trained
        and (weights is None or name in weights)
        and not any(reader.op_type == "BatchNormalization" for reader in node.outputs[0].consumers())
    ]


def _initializer(node: ir.Node, index: int) -> str | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return value.name if value is not None and value.is_initializer() else None


def _batches(dataset: Dataset, size: int, seed: int, axes: Axes) -> Iterator[Mapping[str, np.ndarray]]:
    """Full batches of samples of all classes, in the axes of the model."""
    loader = Loader(dataset, size, seed=seed)
    whole = (batch for number, batch in enumerate(loader.epoch(0)) if loader.samples_in(number) == size)
    yield from (to_model(batch, axes) for batch in itertools.islice(whole, max(1, CALIBRATED // size)))
