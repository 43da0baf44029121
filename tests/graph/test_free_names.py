"""Free names: the wanted one, or the next number behind it, without trying all numbers each time."""

import sys

import onnx

from burnish.graph import Names
from burnish.importer import load
from scaling_models import branches


def test_gives_the_wanted_name_or_the_next_free_number():
    names = Names(["a", "a_1", None, ""])
    assert [names.take(name) for name in ("a", "a", "b", "a_1", "b")] == ["a_2", "a_3", "b", "a_1_1", "b_1"]
    assert "a_3" in names
    assert "" not in names


def test_a_released_name_is_free():
    names = Names(["a"])
    names.release("a")
    names.release(None)
    assert names.take("a") == "a"


def test_knows_the_names_in_bodies():
    model = load(branches(2))
    names = Names.of(model.graph)
    assert all(name in names for name in ("x", "zero", "then0", "else1", "y"))


def lines_run(count: int) -> int:
    run = 0

    def trace(frame, event, argument):
        nonlocal run
        run += event == "line"
        return trace

    names = Names()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(count):
            names.take("node")
    finally:
        sys.settrace(before)
    return run


def test_takes_as_long_for_the_last_of_many_as_for_the_first():
    assert lines_run(400) <= 2.3 * lines_run(200)


def test_unnamed_nodes_get_names_of_their_own():
    proto = branches(30)
    for node in proto.graph.node:
        node.ClearField("name")
    model = load(onnx.ModelProto.FromString(proto.SerializeToString()))
    given = [node.name for node in model.graph]
    assert len(set(given)) == len(given)
