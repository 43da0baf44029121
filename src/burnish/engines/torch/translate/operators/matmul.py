"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates


@translates("MatMul")
def matmul(op: Call) -> Any:
    return torch.matmul(op.tensor(0), op.tensor(1))


@translates("Gemm")
def general_matmul(op: Call) -> Any:
    left, right = op.tensor(0), op.tensor(1)
    left = left.t() if op.attribute("transA", 0) else left
    right = right.t() if op.attribute("transB", 0) else right
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    if op.has(2) and beta != 0.0 and op.dtype(0).is_floating_point():
        return torch.addmm(op.tensor(2), left, right, beta=beta, alpha=alpha)
    product = torch.mm(left, right)
    product = product if alpha == 1.0 else product * alpha
    return product + op.tensor(2) * beta if op.has(2) and beta != 0.0 else product


@translates("Einsum")
def einsum(op: Call) -> Any:
    return torch.einsum(op.attribute("equation").replace(" ", ""), *op.tensors())


@translates("Det")
def determinant(op: Call) -> Any:
    return torch.linalg.det(op.tensor())
