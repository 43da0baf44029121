"""Products of batches of matrices: the kernel against float64 in every layout, and which ones a graph gives it."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.translate.translation import run, translate
from burnish.kernels.linear import fuse_batched_products
from oracles.combinations import diagonal

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
HEADS = """graph (float[batch, 40, 3, 20] x, float[batch, 40, 3, 20] z) => (float[batch, 40, 60] y) {
    half = Constant <value = float[1] {0.5}> ()
    shape = Constant <value = int64[3] {0, 40, 60}> ()
    left = Transpose <perm = [0, 2, 1, 3]> (x)
    right = Transpose <perm = [0, 2, 3, 1]> (z)
    scores = MatMul (left, right)
    mixed = MatMul (scores, left)
    scaled = Mul (mixed, half)
    back = Transpose <perm = [0, 2, 1, 3]> (scaled)
    y = Reshape (back, shape)
}"""

needs_kernel = pytest.mark.skipif(not kernels.available("products"), reason="the engine's kernels cannot be built here")


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def orders(model: ir.Model) -> list[list[int]]:
    fuse_batched_products(model.graph)
    model.opset_imports.setdefault("burnish", 1)
    fused = [node for node in model.graph if node.op_type == "FusedBatchedProduct"]
    return [list(node.attributes["perm"].as_ints()) for node in fused]


@needs_kernel
@diagonal(
    (
        "extents",
        [
            (2, 3, 17, 33, 50),
            (1, 2, 128, 64, 128),
            (2, 2, 128, 128, 64),
            (1, 1, 1, 1, 1),
            (2, 2, 9, 800, 5),
            (2, 1, 3, 0, 5),
            (1, 2, 71, 1601, 450),
        ],
    ),
    ("threads", [1, 2, 3]),
    ("dtype", [torch.float32, torch.bfloat16]),
    test=4,
)
def test_a_batch_keeps_its_digits_in_every_layout(dtype, threads, extents):
    outer, inner, rows, depth, columns = extents
    generator = torch.Generator().manual_seed(depth)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    layouts = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)]
    try:
        for layout, order in itertools.product(layouts, [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 0, 3, 2)]):
            left, right = (
                torch.randn([sizes[axis] for axis in layout], generator=generator)
                .to(dtype)
                .permute([layout.index(axis) for axis in range(4)])
                for sizes in ((outer, inner, rows, depth), (outer, inner, depth, columns))
            )
            found = torch.ops.burnish.batched_product(left, right, order)
            assert found.dtype == dtype
            assert found.permute(order).is_contiguous()
            rtol = 2**-8 if dtype == torch.bfloat16 else 0
            torch.testing.assert_close(
                found.double(), left.double() @ right.double(), rtol=rtol, atol=4e-6 * max(depth, 1) ** 0.5
            )
            assert torch.equal(found, torch.ops.burnish.batched_product(left, right, order))
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_what_is_not_finite_stays_in_its_matrix_and_row():
    left, right = torch.ones(2, 2, 20, 30), torch.ones(2, 2, 30, 40)
    left[0, 1, 3, 7], left[1, 0, 5, 2] = torch.nan, torch.inf
    found = torch.ops.burnish.batched_product(left, right, [0, 2, 1, 3])
    assert found[0, 1, 3].isnan().all()
    assert (found[1, 0, 5] == torch.inf).all()
    found[0, 1, 3] = found[1, 0, 5] = 30.0
    assert (found == 30.0).all()


@needs_kernel
@pytest.mark.parametrize(
    ("left", "right", "order", "message"),
    [
        (torch.ones(2, 2, 3, 4), torch.ones(2, 1, 4, 5), [0, 1, 2, 3], "batches of matrices"),
        (torch.ones(2, 3, 4), torch.ones(2, 4, 5), [0, 1, 2], "batches of matrices"),
        (torch.ones(2, 2, 3, 4), torch.ones(2, 2, 4, 5), [2, 3, 0, 1], "an order of axes"),
        (torch.ones(2, 2, 3, 4), torch.ones(2, 2, 4, 5), [0, 0, 2, 3], "an order of axes"),
    ],
)
def test_what_does_not_fit_is_refused(left, right, order, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.burnish.batched_product(left, right, order)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_heads_are_read_and_written_as_they_lie(batch):
    model = parsed(HEADS)
    assert orders(model) == [[0, 1, 2, 3], [0, 2, 1, 3]]
    generator = np.random.default_rng(batch)
    x, z = (generator.normal(size=(batch, 40, 3, 20)).astype(np.float32) for _ in range(2))
    module = translate(model, torch.device("cpu"))
    (y,) = run(module, model, {"x": torch.from_numpy(x), "z": torch.from_numpy(z)}).values()
    left, right = x.astype(np.float64).transpose(0, 2, 1, 3), z.astype(np.float64).transpose(0, 2, 3, 1)
    exact = (left @ right @ left / 2).transpose(0, 2, 1, 3).reshape(batch, 40, 60)
    np.testing.assert_allclose(y.numpy(), exact, rtol=1e-5, atol=2e-4)


def test_a_result_that_is_read_twice_or_returned_lies_in_order():
    twice = """graph (float[2, 3, 4, 5] a, float[2, 3, 5, 6] b) => (float[2, 4, 3, 6] y, float[2, 3, 4, 6] z) {
        p = MatMul (a, b)
        y = Transpose <perm = [0, 2, 1, 3]> (p)
        z = Relu (p)
    }"""
    assert orders(parsed(twice)) == [[0, 1, 2, 3]]
    returned = twice.replace("z = Relu (p)", "").replace("float[2, 3, 4, 6] z", "float[2, 3, 4, 6] p")
    assert orders(parsed(returned)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "body",
    [
        "graph (float[2, 3, 4] a, float[2, 4, 5] b) => (float[2, 3, 5] y) { y = MatMul (a, b) }",
        "graph (float[2, 3, 4, 5] a, float[5, 6] b) => (float[2, 3, 4, 6] y) { y = MatMul (a, b) }",
        "graph (float[2, 3, 4, 5] a, float[2, 1, 5, 6] b) => (float[2, 3, 4, 6] y) { y = MatMul (a, b) }",
        "graph (double[2, 3, 4, 5] a, double[2, 3, 5, 6] b) => (double[2, 3, 4, 6] y) { y = MatMul (a, b) }",
    ],
)
def test_other_products_stay(body):
    assert orders(parsed(body)) == []
