"""Matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal


def matmul_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(name: str, a: tuple[int, ...], b: tuple[int, ...], **options) -> Sample:
        return Sample([normal(rng, *a), normal(rng, *b)], name=name, **options)

    yield sample("matrices", (2, 3), (3, 4), most_nodes=2)
    yield sample("linear_layer", (2, 5, 3), (3, 4))
    yield sample("linear_layer_4d", (2, 2, 5, 3), (3, 4))
    yield sample("batched", (2, 3, 4), (2, 4, 5), batched=(0, 1), most_nodes=4)
    yield sample("heads", (2, 3, 2, 4), (2, 3, 4, 2), batched=(0, 1))
    yield sample("broadcast_left", (1, 3, 4), (2, 4, 5), batched=(1,))
    yield sample("broadcast_right", (2, 3, 4), (1, 4, 5))
    yield sample("broadcast_both", (2, 1, 3, 4), (3, 4, 2))
    yield sample("matrix_with_batched", (3, 4), (2, 4, 5), batched=(1,))
    yield sample("vectors", (4,), (4,), batched=())
    yield sample("vector_matrix", (4,), (4, 3), batched=())
    yield sample("matrix_vector", (2, 4), (4,))
    yield sample("vector_batched", (4,), (2, 4, 3), batched=(1,))
    yield sample("batched_vector", (2, 3, 4), (4,))
    yield sample("deep_vector", (2, 2, 3, 4), (4,))
    yield sample("weight_as_initializer", (2, 5, 3), (3, 4), constants=(1,))


def gemm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for left in (0, 1):
        for right in (0, 1):
            a = normal(rng, 3, 2) if left else normal(rng, 2, 3)
            b = normal(rng, 4, 3) if right else normal(rng, 3, 4)
            attributes = {"transA": left, "transB": right}
            batched = () if left else (0,)
            yield Sample([a, b], attributes, name=f"trans_{left}{right}", batched=batched, most_nodes=2)
            scaled = attributes | {"alpha": 0.7, "beta": -1.3}
            yield Sample([a, b, normal(rng, 4)], scaled, name=f"trans_{left}{right}_scaled", batched=batched)
    yield Sample([normal(rng, 2, 3), normal(rng, 4, 3)], {"transB": 2}, name="trans_b_of_another_number")
    yield Sample([normal(rng, 3, 2), normal(rng, 3, 4)], {"transA": -3}, name="trans_a_of_another_number", batched=())
    for name, shape in {"scalar": (), "one": (1,), "row": (4,), "row_2d": (1, 4), "column": (2, 1), "full": (2, 4)}.items():
        yield Sample([normal(rng, 2, 3), normal(rng, 3, 4), normal(rng, *shape)], {"beta": 0.5}, name=f"bias_{name}")


def torch_gemm(a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0):
    product = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return product if c is None else product + beta * c


def einsum_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(equation: str, *shapes: tuple[int, ...], batched=(0,), name: str | None = None) -> Sample:
        arrays = [normal(rng, *shape) for shape in shapes]
        return Sample(
            arrays,
            {"equation": equation},
            name=name or equation.replace("->", "_to_").replace(",", "_"),
            torch=partial(torch.einsum, equation),
            torch_attributes={},
            batched=batched,
        )

    yield sample("ij,jk->ik", (2, 3), (3, 4))
    yield sample("bhid,bhjd->bhij", (2, 2, 3, 4), (2, 2, 5, 4), batched=(0, 1))
    yield sample("ij->ji", (2, 3))
    yield sample("ij->i", (2, 3))
    yield sample("ij->", (2, 3), name="to_scalar")
    yield sample("ij,k->i", (2, 3), (4,), name="indices_of_one_operand")
    yield sample("i,j->ij", (2,), (3,))
    yield sample("ij,jk,kl->il", (2, 3), (3, 4), (4, 2))
    yield sample("ij, jk", (2, 3), (3, 4), name="implicit_output")
    yield sample("...ij,...jk->...ik", (2, 1, 2, 3), (2, 4, 3, 2), name="ellipsis")
    yield sample("i...j,j->...i", (2, 3, 2, 4), (4,), name="ellipsis_within")
    yield sample("...j,...j", (2, 3), (2, 3), name="implicit_output_of_ellipsis")
    yield sample("ii->i", (3, 3), name="diagonal")
    yield sample("ii", (3, 3), name="trace")
    yield sample("...ii->...i", (2, 3, 3), name="diagonal_of_each")
    yield sample("iji,ik->jk", (2, 3, 2), (2, 4), name="diagonal_of_a_product")


def det_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for size in (1, 2, 3, 5):
        yield Sample([normal(rng, 2, size, size)], name=f"rows_{size}")
    yield Sample([normal(rng, 3, 3)], name="matrix", batched=())
    yield Sample([normal(rng, 2, 2, 3, 3)], name="two_batch_axes")


def singular_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Matrices of rank 2 and 1: the first have cofactors, which PyTorch's gradient takes for zero."""
    row = [1.0, 2.0, -3.0]
    yield Sample([np.array([[[2.0, -1.0, 3.0], [0.0, 0.0, 0.0], [1.0, 4.0, -2.0]], [row, row, row]])], name="singular")


SPECS = [
    OperatorSpec(
        "MatMul",
        matmul_samples,
        torch=torch.matmul,
        dtypes=("float16", "float32", "float64"),
        error_inputs=[
            ErrorInput(
                Sample([np.ones((2, 3, 4)), np.ones((2, 4, 3))], name="unknown_rank"),
                r"MatMul .*number of dimensions of its operand 'input1' is unknown.*Declare the shapes",
                shapes="unranked",
            )
        ],
    ),
    OperatorSpec("Gemm", gemm_samples, torch=torch_gemm),
    OperatorSpec(
        "Einsum",
        einsum_samples,
        error_inputs=[
            ErrorInput(
                Sample([np.ones((2, 3))], {"equation": "...i->..."}, name="ellipsis_of_unknown_rank"),
                r"Einsum .*number of dimensions of its operand 'input0' is unknown.*Einsum with an ellipsis.*Declare the shapes",
                shapes="unranked",
            )
        ],
    ),
    OperatorSpec("Det", det_samples, torch=torch.linalg.det, tolerance=2e-5),
    OperatorSpec("Det", singular_samples),
]
