"""Versions, and functions that go, come twice, or call each other."""

from __future__ import annotations

from random import Random
from typing import Any

from onnx import ModelProto, helper

from fuzz.mutations.places import some_name
from fuzz.mutations.registry import mutation
from fuzz.values import DOMAINS, NAMES, integer


@mutation(2)
def change_versions(random: Random, model: ModelProto) -> str | None:
    """The file format's, and those of operator sets."""
    chance = random.random()
    if chance < 0.15:
        model.ir_version = random.choice((0, 1, 2, 3, 4, 8, 10, 13, 14, 999, -1, integer(random)))
        return f"ir_version is {model.ir_version}"
    if not model.opset_import or chance < 0.35:
        model.opset_import.add(domain=random.choice(DOMAINS), version=random.choice((0, 1, 5, 18, integer(random))))
        return f"opset import of {model.opset_import[-1].domain!r}, {model.opset_import[-1].version}"
    index = random.randrange(len(model.opset_import))
    entry = model.opset_import[index]
    if chance < 0.45:
        del model.opset_import[index]
        return f"opset import {index} goes"
    entry.version = random.choice((*range(1, 29), integer(random)))
    return f"opset of {entry.domain!r} is {entry.version}"


@mutation(2)
def change_functions(random: Random, model: ModelProto) -> str | None:
    """A function goes, comes twice, has another name, calls itself or another, or has other inputs, outputs or attributes."""
    if not model.functions:
        return None
    index = random.randrange(len(model.functions))
    function = model.functions[index]
    where = f"function {function.name[:40]!r}"
    match random.randrange(9):
        case 0:
            del model.functions[index]
            return f"{where} goes"
        case 1:
            model.functions.add().CopyFrom(function)
            return f"{where} comes twice"
        case 2:
            function.name = random.choice((*NAMES, "Relu", "MatMul", *(other.name for other in model.functions)))
            return f"{where} is called {function.name[:40]!r}"
        case 3:
            function.domain = random.choice(DOMAINS)
            return f"{where} is of domain {function.domain!r}"
        case 4 | 5:
            callee = random.choice(model.functions)
            inputs = [random.choice(function.input) for _ in callee.input] if function.input else []
            call = helper.make_node(
                callee.name, inputs, [f"called_{number}" for number in range(len(callee.output))], domain=callee.domain
            )
            function.node.insert(random.randrange(len(function.node) + 1), call)
            if function.output and call.output and random.random() < 0.5:
                function.output[0] = call.output[0]
            return f"{where} calls {callee.name[:40]!r}"
        case 6:
            return _changed_names(random, model, function.input, f"inputs of {where}")
        case 7:
            return _changed_names(random, model, function.output, f"outputs of {where}")
    if random.random() < 0.5 and function.opset_import:
        function.opset_import[0].version = integer(random)
        return f"{where} imports version {function.opset_import[0].version}"
    return _changed_names(random, model, function.attribute, f"attributes of {where}")


def _changed_names(random: Random, model: ModelProto, names: Any, where: str) -> str:
    if not names or random.random() < 0.4:
        names.append(some_name(random, model))
    elif random.random() < 0.5:
        del names[random.randrange(len(names))]
    else:
        names[random.randrange(len(names))] = some_name(random, model)
    return f"{where}: {[name[:20] for name in names]}"
