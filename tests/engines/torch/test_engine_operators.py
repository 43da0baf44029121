"""Operators of the engine's own: declared once, referred to as objects, translated, and what they say of memory."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import burnish.engines.torch
from burnish.engines.onnxruntime.exchanges import EXCHANGE
from burnish.engines.torch.bindings.precision import CAST_APART
from burnish.engines.torch.translate.rules import find_rule
from burnish.engines.torch.translate.splitting import COTANGENTS
from burnish.graph import BURNISH_DOMAIN, Builder
from burnish.kernels.convolution import DEPTHWISE_CONV, DEPTHWISE_CONV_GRAD
from burnish.kernels.elementwise import FUSED_ELEMENTWISE_GROUPS
from burnish.kernels.engine_operator import EngineOperator, engine_operators, may_share_memory
from burnish.kernels.indexing import FUSED_GATHER_GRAD
from burnish.kernels.recurrent import FUSED_GRU_STEPS, FUSED_GRU_STEPS_GRAD
from burnish.operators.activation import RELU_GRAD
from burnish.operators.normalization.batch import BATCH_NORM_TRAINING
from burnish.operators.semantic import declared_operators

FOLDER = Path(burnish.engines.torch.__file__).parent


def strings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


SEARCHED = frozenset({FOLDER.parents[1] / "kernels" / "linear" / "fusion.py"})
"""Files whose searches give way to what autodiff emits; they spell names until then."""


@pytest.mark.slow
def test_no_file_but_that_of_its_family_spells_the_name_of_an_operator() -> None:
    names = engine_operators().keys()
    spelled: dict[str, list[Path]] = {name: [] for name in names}
    for path in set(FOLDER.parents[1].rglob("*.py")) - SEARCHED:
        for name in names & set(strings(path)):
            spelled[name].append(path)
    assert {name: files for name, files in spelled.items() if len(files) != 1} == {}
    rooms = (FOLDER / "bindings", FOLDER.parents[1] / "kernels")
    elsewhere = {name for name, files in spelled.items() if not any(files[0].is_relative_to(room) for room in rooms)}
    # One stands between two passes of a graph, the other calls Python from ONNX Runtime: no engine computes anything by them.
    assert elsewhere == {COTANGENTS.name, EXCHANGE.name}


def test_every_operator_is_translated() -> None:
    without = {name for name in engine_operators() if find_rule(ir.node(name, [], domain=BURNISH_DOMAIN), 1) is None}
    channels_last = {name for name in engine_operators() if name.startswith("ChannelsLast")}
    gru = {FUSED_GRU_STEPS.name, FUSED_GRU_STEPS_GRAD.name}
    # This engine updates the state in place (state_updates) and makes exchanges in Python; PyTorch knows where channels are
    # last, adds rows and has a GRU.
    assert without == {FUSED_ELEMENTWISE_GROUPS.name, FUSED_GATHER_GRAD.name, EXCHANGE.name, *channels_last, *gru}


def test_no_operator_has_the_name_of_a_semantic_one() -> None:
    assert engine_operators().keys() & declared_operators().keys() == set()


def test_a_node_is_emitted_and_known_again() -> None:
    builder = Builder(ir.Graph([], [], nodes=[], opset_imports={"": 20}))
    x, w = (builder.constant(np.zeros(shape, np.float32)) for shape in ((1, 16, 4, 4), (16, 1, 3, 3)))
    y = DEPTHWISE_CONV(x, w, None, like=x, stride=1, pads=[1, 1, 1, 1])
    assert tuple(y.shape or ()) == (1, 16, 4, 4)
    assert DEPTHWISE_CONV.is_of(y.value.producer())
    assert not DEPTHWISE_CONV_GRAD.is_of(y.value.producer())
    assert len(DEPTHWISE_CONV_GRAD.emit(y, x, w, stride=1, pads=[1, 1, 1, 1], input=1, weight=0)) == 2


def test_what_may_lie_in_the_memory_of_an_operand() -> None:
    def shares(name: str, domain: str = BURNISH_DOMAIN) -> bool:
        return may_share_memory(ir.node(name, [], domain=domain))

    assert [shares(operator.name) for operator in (DEPTHWISE_CONV, CAST_APART)] == [False, True]
    assert [shares(operator.name) for operator in (RELU_GRAD, BATCH_NORM_TRAINING)] == [False, True]
    assert [shares(name, "") for name in ("Conv", "Identity", "Reshape")] == [False, True, True]
    assert shares("Unknown")
    assert shares("Conv", "another")


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match="the operator DepthwiseConv of engines is declared twice"):
        EngineOperator("DepthwiseConv", ("x", "w", "b"), ("y",))
