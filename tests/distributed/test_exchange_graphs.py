"""What is put into a training graph for several workers, looked at node by node: buckets of gradients, shares of samples."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from burnish.distributed.exchanges import bucket_gradients
from burnish.distributed.samples import place_samples
from burnish.operators.collectives import ALL_REDUCE_FINISH, ALL_REDUCE_START, SAMPLE_SHARE, all_reduce
from oracles.small_graphs import SmallGraph


def gradients(*dtypes: str) -> ir.Graph:
    """A graph that computes a gradient of two elements after the other, each exchanged by itself."""
    small = SmallGraph({f"x{index}": (dtype, [2]) for index, dtype in enumerate(dtypes)})
    small.graph.opset_imports["burnish"] = 1
    for index in range(len(dtypes)):
        (total,) = all_reduce((small.builder.op("Neg", small[f"x{index}"]),), "gradient")
        small.output(f"grad:{index}", total)
    return small.graph


def buckets(graph: ir.Graph) -> list[list[str]]:
    """The operands of each exchange, by the input that they are computed of."""
    starts = [node for node in graph if ALL_REDUCE_START.is_of(node)]
    return [[str(value.producer().inputs[0].name) for value in node.inputs] for node in starts]


@pytest.mark.parametrize(("size", "expected"), [(8, [1, 1, 1, 1]), (9, [2, 2]), (16, [2, 2]), (17, [3, 1]), (32, [4]), (99, [4])])
def test_a_bucket_is_full_from_its_size_on(size: int, expected: list[int]) -> None:
    graph = gradients(*["float32"] * 4)
    bucket_gradients(graph, size)
    assert [len(bucket) for bucket in buckets(graph)] == expected
    assert sum(ALL_REDUCE_FINISH.is_of(node) for node in graph) == len(expected)


def test_a_bucket_is_of_one_dtype() -> None:
    graph = gradients("float32", "float64", "float64", "float32")
    bucket_gradients(graph, 2**20)
    assert buckets(graph) == [["x0"], ["x1", "x2"], ["x3"]]


def test_a_bucket_is_begun_before_the_next_gradient_is_computed() -> None:
    graph = gradients(*["float32"] * 3)
    bucket_gradients(graph, 8)
    order = [node.op_type for node in graph if node.op_type != "Identity"]
    assert order[:5] == ["Neg", "AllReduceStart", "AllReduceFinish", "Neg", "AllReduceStart"], order


@pytest.mark.parametrize("workers", [1, 4])
def test_each_worker_has_an_equal_share_where_nothing_tells_samples(workers: int) -> None:
    small = SmallGraph({"penalty": ("float64", [])})
    small.graph.opset_imports["burnish"] = 1
    small.output("share", SAMPLE_SHARE(small["penalty"]))
    assert place_samples(small.graph, (), workers)
    assert [value.name for value in small.graph.inputs] == ["penalty"]
    assert small.run(penalty=np.float64(6.0)) == {"share": 6.0 / workers}
