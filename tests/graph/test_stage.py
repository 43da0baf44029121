"""Stages: which passes run, how often, what they leave to restore, and how a wrong one is found."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from burnish.distributed.derivation import DISTRIBUTED
from burnish.engines.onnxruntime.kernels import ONNXRUNTIME_KERNELS
from burnish.engines.torch.fusion import TORCH
from burnish.files.export import EXPORTED
from burnish.graph import Builder, replace_value
from burnish.graph.stage import Fallback, Pass, Repeat, Stage, note, observing, rewrite
from burnish.graph.verification import PassError
from burnish.importer.canonical import CANONICAL, FOLDED, READ, RESTORED, SHAPES
from burnish.modes import INFERENCE, TRAINING
from burnish.rewriting.recognize_gelu import recognize_gelu
from burnish.rewriting.stages import HOISTED, JOINED, LOWERED, RECOGNIZED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN, STANDARD

STAGES = (
    *(READ, SHAPES, RESTORED, FOLDED, CANONICAL, RECOGNIZED, RECOGNIZED_TO_TRAIN, LOWERED, JOINED, STANDARD),
    *(HOISTED, RECOGNIZED_IN_MODE, TRAINING, INFERENCE, DISTRIBUTED, EXPORTED, ONNXRUNTIME_KERNELS, TORCH),
)
COUNTERPARTS = {
    "inline_functions": "InlinePass",
    "name_everything": "NameFixPass",
    "separate_names": "NameFixPass",
    "gather_initializers": "LiftConstantsToInitializersPass",
    "state_defaults": "AddDefaultAttributesPass",
    "infer_shapes": "ShapeInferencePass",
    "merge_casts": "CommonSubexpressionEliminationPass",
    "merge_scalars": "CommonSubexpressionEliminationPass",
    "sort": "TopologicalSortPass",
    "remove_unread_nodes": "RemoveUnusedNodesPass",
}
"""Our passes that onnx_ir has one for, too."""


def chain(text: str = "a = Neg (x) y = Abs (a)") -> ir.Model:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {{ {text} }}')
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def turn_negations(model: ir.Model) -> bool:
    """Replace one Neg by Floor."""
    node = next((node for node in model.graph if node.op_type == "Neg"), None)
    if node is not None:
        node.op_type = "Floor"
    return node is not None


def change_in_silence(model: ir.Model) -> bool:
    turn_negations(model)
    return False


def read_too_early(model: ir.Model) -> bool:
    first, second = model.graph
    model.graph.remove(first)
    model.graph.insert_after(second, first)
    return True


def name_twice(model: ir.Model) -> bool:
    node = next(iter(model.graph))
    copy = Builder(model.graph, before=node).op("Floor", Builder(model.graph).tensor(node.inputs[0]))
    copy.value.name = "y"
    return True


def say_another_shape(model: ir.Model) -> bool:
    node = next(iter(model.graph))
    builder = Builder(model.graph, before=node)
    value = builder.op("Floor", builder.tensor(node.inputs[0])).value
    value.shape = ir.Shape([3])
    replace_value(node.outputs[0], value)
    return True


def test_a_stage_records_what_each_pass_did():
    stage = Stage("TESTED", (rewrite(turn_negations), rewrite(recognize_gelu), rewrite(turn_negations, when=lambda *_: False)))
    records = stage.run(chain(), None)
    assert [(record.name, record.changed) for record in records] == [("turn_negations", True), ("recognize_gelu", False)]
    assert all(record.seconds >= 0 for record in records)


@pytest.mark.parametrize(("at_most", "left"), [(1, 2), (2, 1), (9, 0)])
def test_passes_repeat_until_nothing_changes_and_restore_once_a_round(at_most, left):
    restored = []
    restores = Stage("RESTORED", (note(lambda model: restored.append(model)),))
    model = chain("a = Neg (x) b = Neg (a) y = Neg (b)")
    Stage("TESTED", (Repeat((rewrite(turn_negations),), at_most),), restores).run(model, None)
    assert sum(node.op_type == "Neg" for node in model.graph) == left
    assert len(restored) == 3 - left


def test_rounds_of_a_pass_that_ends_by_itself_do_not_count():
    model = chain("a = Neg (x) b = Neg (a) y = Neg (b)")
    Stage("TESTED", (Repeat((rewrite(turn_negations, counted=False),), 1),)).run(model, None)
    assert all(node.op_type == "Floor" for node in model.graph)


def test_a_local_pass_leaves_nothing_to_restore_and_one_that_reads_shapes_waits_for_them():
    seen = []
    restores = Stage("RESTORED", (note(lambda model: seen.append("restored")),))
    waits = Pass("waits", lambda model, _: bool(seen.append("waits")), settled=True)
    Stage("TESTED", (Repeat((rewrite(turn_negations), waits), 4),), restores).run(chain(), None)
    assert seen == ["restored", "waits"]
    Stage("TESTED", (rewrite(turn_negations, local=True),), restores).run(chain(), None)
    assert seen == ["restored", "waits"]


def test_what_fails_is_repaired_and_tried_again_and_the_error_stands_where_nothing_is_repaired():
    def refuse_negations(model: ir.Model) -> bool:
        if any(node.op_type == "Neg" for node in model.graph):
            raise ValueError("a Neg")
        return False

    model = chain()
    records = Stage("TESTED", (Fallback(rewrite(refuse_negations), ValueError, (rewrite(turn_negations),)),)).run(model, None)
    assert [record.name for record in records] == ["turn_negations", "refuse_negations"]
    with pytest.raises(ValueError, match="a Neg"):
        Stage("TESTED", (Fallback(rewrite(refuse_negations), ValueError, (rewrite(recognize_gelu),)),)).run(chain(), None)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (change_in_silence, "it changed Floor .* and said that it changed nothing"),
        (read_too_early, "Abs .* reads 'a' before it is computed"),
        (name_twice, "two values have the name 'y'"),
        (say_another_shape, r"of Floor .* is \[2\], and said to be \[3\]"),
    ],
)
def test_a_wrong_pass_fails_by_its_name(wrong, problem):
    with pytest.raises(PassError, match=f"^the pass {wrong.__name__} of TESTED left the graph 'g' wrong: .*{problem}"):
        Stage("TESTED", (rewrite(wrong),)).run(chain(), None)


def test_nothing_is_verified_outside_of_tests(monkeypatch):
    monkeypatch.delenv("BURNISH_VERIFY_PASSES")
    assert Stage("TESTED", (rewrite(read_too_early),)).run(chain(), None)[0].changed


def test_a_record_says_why_a_pattern_is_not_there():
    seen = []
    numbers = {"h": 0.5, "one": 3.0, "r": 1.4142135}
    constants = " ".join(f"{name} = Constant <value = float {{{number}}}> ()" for name, number in numbers.items())
    model = chain(f"{constants} d = Div (x, r) e = Erf (d) s = Add (e, one) p = Mul (x, s) y = Mul (p, h)")
    with observing(lambda name, graph, records: seen.append((name, records))):
        RECOGNIZED.run(model, None)
    ((name, records),) = seen
    assert name == "RECOGNIZED"
    (gelu,) = (record for record in records if record.name == "recognize_gelu")
    assert not gelu.changed
    assert "not at 'y': " in gelu.note


def test_a_pass_that_onnx_ir_has_too_says_why_it_is_our_own():
    ours = {item.name: item.reason for stage in STAGES for item in stage.every_pass()}
    for name, counterpart in COUNTERPARTS.items():
        assert hasattr(common, counterpart)
        assert ours[name].startswith(counterpart), name
    assert {name for name, reason in ours.items() if reason} == COUNTERPARTS.keys()


def test_contexts_are_frozen():
    from burnish.rewriting.stages import Lowering

    with pytest.raises(dataclasses.FrozenInstanceError):
        Lowering().in_float32 = np.True_


def test_a_pass_is_skipped_in_a_model_without_its_operators(monkeypatch):
    ran = []

    def count(model: ir.Model) -> bool:
        ran.append(model)
        return False

    stage = Stage("TESTED", (rewrite(count, operators=("Conv",)), rewrite(count, operators=("Neg",))))
    monkeypatch.delenv("BURNISH_VERIFY_PASSES")
    assert len(stage.run(chain(), None)) == len(ran) == 1


def test_a_pass_that_changes_a_model_without_its_operators_is_wrong():
    stage = Stage("TESTED", (rewrite(turn_negations, operators=("Conv",)),))
    with pytest.raises(PassError, match=r"the pass turn_negations of TESTED .* said that it changed nothing"):
        stage.run(chain(), None)
