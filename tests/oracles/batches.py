"""A model that was made for one sample beside the same one with its batch open: several distinct samples against each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from burnish import engines

Arrays = Mapping[str, np.ndarray]


def batch_axis(value: ir.Value) -> int | None:
    """The axis along which a value of an opened model has its samples; None for one that no sample reaches."""
    assert value.shape is not None
    extents = [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]
    return extents.index("batch") if "batch" in extents else None


def together(opened: ir.Model, samples: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """The samples of one batch, as the inputs of an opened model take them."""
    batch = {}
    for value in opened.graph.inputs:
        parts = [sample[value.name or ""] for sample in samples]
        batch[value.name or ""] = stacked(value, parts)
    return batch


def stacked(opened: ir.Value, results: Sequence[np.ndarray]) -> np.ndarray:
    """What an input or output of an opened model has to be, from what it is for each sample alone."""
    assert opened.shape is not None
    axis = batch_axis(opened)
    if axis is None:
        return results[0]
    return np.concatenate(results, axis) if results[0].ndim == len(opened.shape) else np.stack(results, axis)


def assert_as_alone(
    single: ir.Model, opened: ir.Model, samples: Sequence[Arrays], alone: Sequence[Arrays] | None = None, rtol: float = 1e-12
) -> None:
    """Assert that every output for a batch is what it is for each of its samples alone, on the reference engine."""
    engine = engines.get("reference")
    if alone is None:
        run = engine.load(single)
        alone = [run(sample) for sample in samples]
    whole = engine.run(opened, together(opened, samples))
    for one, all_of_them in zip(single.graph.outputs, opened.graph.outputs, strict=True):
        name = one.name or ""
        assert all_of_them.name == name
        expected = stacked(all_of_them, [results[name] for results in alone])
        result = whole[name]
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape, (name, result.shape, expected.shape)
        if result.dtype.kind != "f":
            np.testing.assert_array_equal(result, expected)
            continue
        largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=0.0)
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol * largest)
