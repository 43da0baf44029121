"""Operators that read elements by index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from specs.operator_spec import OperatorSpec, Sample, distinct, normal

EVERY_SHAPE = ("static", "batch", "symbolic", "unranked")


def integers(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def gather_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 3, 5, 4)
    for axis in (0, 1, 2, -1, -2):
        yield Sample([x, integers([[2, 0], [1, 2]])], {"axis": axis}, name=f"axis{axis}", most_nodes=1)
    yield Sample([x, integers([-1, 0, -3])], name="negative_indices")
    yield Sample([x, integers([1, 1, 1, 0, 1, -2])], {"axis": 0}, name="repeated")
    yield Sample([x, integers(-2)], {"axis": 1}, name="scalar")
    yield Sample([x, integers([3])], {"axis": -2}, name="single")
    yield Sample([x, integers(2)], name="scalar_from_the_batch")
    yield Sample([x, integers([4, -5, 4])], {"axis": 1}, name="indices_at_run_time", constants=())
    yield Sample([x, integers([[[0]], [[2]]])], {"axis": 2}, name="rank_three_indices")
    yield Sample([normal(rng, 6), integers([5, 0, 5])], name="vector")
    yield Sample([normal(rng, 6), integers([5, -6, 5]).astype(np.int32)], name="int32", constants=())
    yield Sample([normal(rng, 4, 3), integers([[0, 3, 3], [3, -4, 1]])], name="embedding", constants=(), batched=(1,))


def torch_gather(x: torch.Tensor, indices: torch.Tensor, *, axis: int = 0) -> torch.Tensor:
    axis %= x.ndim
    taken = x.index_select(axis, indices.reshape(-1).long() % x.shape[axis])
    return taken.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def gather_elements_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 3, 4)
    yield Sample([x, integers([[0, 2, 0, 1], [0, 0, -1, 1]])], name="rows")
    yield Sample([x, integers([[3, -1, 0, 0, 3], [1, 1, 1, 1, 1], [0, 1, 2, 3, -4]])], {"axis": 1}, name="columns")
    yield Sample([x, integers([[3], [1], [2]])], {"axis": -1}, name="indices_at_run_time", constants=(), batched=(0, 1))


def torch_gather_elements(x: torch.Tensor, indices: torch.Tensor, *, axis: int = 0) -> torch.Tensor:
    return torch.gather(x, axis, indices % x.shape[axis])


def gather_nd_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4)
    yield Sample([x, integers([[0, 1], [1, -1], [0, 1]])], name="rows")
    yield Sample([x, integers([[[0, 1, 2]], [[1, 2, 3]]])], name="elements")
    yield Sample([x, integers([[1], [-3]])], {"batch_dims": 1}, name="batched", batched=(0, 1))


def gather_nd_at_run_time(rng: np.random.Generator) -> Iterator[Sample]:
    x, indices = normal(rng, 2, 3, 4), integers([[[0], [0]], [[2], [1]]])
    yield Sample([x, indices], {"batch_dims": 1}, name="indices_at_run_time", constants=(), batched=(0, 1))


def torch_gather_nd(x: torch.Tensor, indices: torch.Tensor, *, batch_dims: int = 0) -> torch.Tensor:
    if batch_dims:
        return torch.stack([torch_gather_nd(a, b, batch_dims=batch_dims - 1) for a, b in zip(x, indices, strict=True)])
    rows = [x[tuple(index.tolist())] for index in indices.reshape(-1, indices.shape[-1])]
    return torch.stack(rows).reshape(indices.shape[:-1] + rows[0].shape)


def top_k_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = distinct(rng, 3, 5)
    k = integers([2])
    yield Sample([x, k], outputs=2, name="largest")
    yield Sample([x, k], {"axis": 0, "largest": 0}, outputs=2, name="smallest")
    yield Sample([x, k], outputs=2, name="k_at_run_time", constants=())


def torch_top_k(
    x: torch.Tensor, k: torch.Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[torch.Tensor, ...]:
    values, indices = torch.topk(x, int(k), dim=axis, largest=bool(largest), sorted=bool(sorted))
    return values, indices


def one_hot_samples(rng: np.random.Generator) -> Iterator[Sample]:
    indices = integers([[0, 2, -1], [1, 7, 0]])
    yield Sample([indices, integers(4), normal(rng, 2)], name="last_axis", constants=(0, 1), batched=())
    yield Sample([indices, integers(4), normal(rng, 2)], {"axis": 1}, name="middle_axis", constants=(), batched=(0,))


def torch_one_hot(indices: torch.Tensor, depth: torch.Tensor, values: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
    size = int(depth)
    places = torch.where(indices < 0, indices + size, indices)
    hot = (places.unsqueeze(-1) == torch.arange(size)).to(values.dtype).movedim(-1, axis)
    return values[0] + (values[1] - values[0]) * hot


def compress_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 3, 4)
    yield Sample([x, np.array([True, False, True])], {"axis": 0}, name="rows")
    yield Sample([x, np.array([False, True, True, False, True])], name="flat")
    yield Sample([x, np.array([False, True, True, False])], {"axis": -1}, name="columns", constants=(), batched=(0,))


def torch_compress(x: torch.Tensor, condition: torch.Tensor, *, axis: int | None = None) -> torch.Tensor:
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, torch.nonzero(condition).reshape(-1))


def unique_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = distinct(rng, 3, 4)
    yield Sample([x], name="distinct")
    yield Sample([x], {"sorted": 0}, name="unsorted", outputs=4)
    yield Sample([x], {"axis": 0}, name="rows")
    yield Sample([x], {"axis": -1, "sorted": 0}, name="columns", outputs=3)


def repeated_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = np.array([[2.0, 1.0, 1.0], [3.0, 1.0, 3.0]])
    yield Sample([x], name="repeated", smooth=False, torch_attributes={})
    yield Sample([x[[0, 1, 0]]], {"axis": 0}, name="repeated_rows", smooth=False)


def torch_unique(x: torch.Tensor, *, axis: int | None = None) -> torch.Tensor:
    """Sorted; of equal ones the first."""
    rows = x.reshape(-1, 1) if axis is None else x.movedim(axis, 0).flatten(1)
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    first = [row for row in order if not any(torch.equal(rows[row], rows[earlier]) for earlier in range(row))]
    return x.reshape(-1)[first] if axis is None else x.index_select(axis, torch.tensor(first))


SPECS = [
    OperatorSpec("Gather", gather_samples, torch=torch_gather, shapes=EVERY_SHAPE),
    OperatorSpec("GatherElements", gather_elements_samples, torch=torch_gather_elements, shapes=EVERY_SHAPE),
    OperatorSpec("GatherND", gather_nd_samples, torch=torch_gather_nd, shapes=EVERY_SHAPE),
    OperatorSpec("GatherND", gather_nd_at_run_time, torch=torch_gather_nd, shapes=("static", "batch", "unranked")),
    OperatorSpec("TopK", top_k_samples, torch=torch_top_k, shapes=EVERY_SHAPE),
    OperatorSpec(
        "TopK",
        lambda rng: [Sample([distinct(rng, 3, 5), integers([2])], {"axis": 1, "sorted": 0}, outputs=2, name="unsorted")],
    ),
    OperatorSpec("OneHot", one_hot_samples, torch=torch_one_hot, shapes=EVERY_SHAPE),
    OperatorSpec("Compress", compress_samples, torch=torch_compress, shapes=EVERY_SHAPE),
    OperatorSpec("Unique", unique_samples),
    OperatorSpec("Unique", repeated_samples, torch=torch_unique),
]
