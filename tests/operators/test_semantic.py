"""Semantic operators: declared once, referred to as objects, and what the objects say of nodes."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.graph import BURNISH_DOMAIN, Builder
from burnish.graph.annotations import NEVER_REPEATED
from burnish.operators.activation import RELU_GRAD
from burnish.operators.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_FINISH, ALL_REDUCE_START, EXCHANGES, OWN_GRADIENTS
from burnish.operators.normalization.batch import BATCH_NORM_TRAINING
from burnish.operators.registry import elementwise, find_lowering, register
from burnish.operators.semantic import SemanticOperator, declared_operators, like, semantic_operator

PACKAGE = Path(burnish.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture
def builder() -> Builder:
    return Builder(ir.Graph([], [], nodes=[], opset_imports={"": 20}))


def zeros(builder: Builder, *shape: int, dtype: type = np.float32):
    return builder.constant(np.zeros(shape, dtype))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_no_file_but_that_of_its_family_spells_the_name_of_a_semantic_operator() -> None:
    names = declared_operators().keys()
    spelled: dict[str, set[Path]] = {name: set() for name in names}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                spelled[node.value].add(path.relative_to(PACKAGE))
    assert {name: files for name, files in spelled.items() if len(files) != 1} == {}
    assert {next(iter(files)).parts[0] for files in spelled.values()} == {"operators"}


def imports_of_operators(folder: str) -> Iterator[tuple[Path, str, str]]:
    """Each name that a file of a folder imports from ``burnish.operators``, with the module that it comes from."""
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("burnish.operators"):
                yield from ((path, node.module or "", alias.name) for alias in node.names)


@pytest.mark.slow
def test_an_engine_knows_semantic_operators_and_facts_and_nothing_else_of_operators() -> None:
    imported = list(imports_of_operators("engines"))
    assert imported
    for path, module, name in imported:
        known = getattr(importlib.import_module(module), name)
        is_operator = isinstance(known, SemanticOperator) or known is EXCHANGES or known is elementwise
        assert is_operator or module == "burnish.operators.semantic", f"{path.relative_to(PACKAGE)} imports {name} from {module}"


def test_every_semantic_operator_is_lowered_or_is_of_several_workers() -> None:
    without = {
        operator
        for operator in declared_operators().values()
        if find_lowering(ir.node(operator.name, [], domain=BURNISH_DOMAIN)) is None
    }
    assert without == EXCHANGES - {ALL_REDUCE}


def test_a_node_has_the_types_of_its_declaration(builder: Builder) -> None:
    x, scale = zeros(builder, 2, 3, 4, 5, dtype=np.float64), zeros(builder, 3)
    outputs = BATCH_NORM_TRAINING.emit(x, scale, scale, epsilon=1e-5)
    assert [tuple(output.shape or ()) for output in outputs] == [(2, 3, 4, 5), (3,), (3,), (3,), (2, 3, 4, 5), (3,)]
    assert [output.dtype for output in outputs] == [x.dtype, scale.dtype, scale.dtype, scale.dtype, x.dtype, scale.dtype]
    node = outputs[0].value.producer()
    assert BATCH_NORM_TRAINING.is_of(node)
    assert semantic_operator(node) is BATCH_NORM_TRAINING
    assert not RELU_GRAD.is_of(node)
    assert not RELU_GRAD.is_of(ir.node("ReluGrad", [], domain="another"))


def test_exchanges_have_what_stands_beside_their_operands(builder: Builder) -> None:
    a, b, count = zeros(builder, 2, 3), zeros(builder, 4), zeros(builder, 1, dtype=np.int64)
    assert [tuple(y.shape or ()) for y in ALL_GATHER.emit(a, purpose="samples", workers=3)] == [(3, 2, 3)]
    assert [tuple(y.shape or ()) for y in ALL_GATHER.emit(a, purpose="samples", workers=6, group=2)] == [(2, 2, 3)]
    buffer = ALL_REDUCE_START(a, b, count, purpose="gradient", counted=1)
    assert tuple(buffer.shape or ()) == (10,)
    sums = ALL_REDUCE_FINISH.emit(buffer, a, b)
    assert [tuple(y.shape or ()) for y in sums] == [(2, 3), (4,)]
    for tensor in (buffer, sums[0]):
        assert NEVER_REPEATED.is_on(tensor.value.producer())


def test_what_outputs_share_memory_with() -> None:
    assert [BATCH_NORM_TRAINING.shared_input(position) for position in range(6)] == [None, None, None, None, 0, None]
    assert [ALL_REDUCE_FINISH.shared_input(position) for position in range(3)] == [0, 0, 0]
    assert [OWN_GRADIENTS.shared_input(position) for position in range(3)] == [0, 1, 2]
    assert ALL_REDUCE.shared_input(0) is None


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match="ReluGrad is declared twice"):
        register(SemanticOperator("ReluGrad", ("dy",), ("dx",), like("dy")))
