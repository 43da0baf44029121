"""Settings of every kind of object: NumPy's numbers are taken for Python's, and a class is no object of itself."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import burnish
from burnish import losses, metrics, optim, validation
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import BurnishError, ConfigurationError
from burnish.models import residual_network
from burnish.norms.policies import POLICIES, Train
from burnish.optim import schedules
from burnish.optim.chain import TRANSFORMS
from burnish.settings import plain
from burnish.training.progress import Silent
from burnish.validation import is_number, is_whole
from oracles.combinations import spread

NEEDED: dict[str, Any] = {
    "boundaries": (2, 4),
    "every": 2,
    "factor": 0.5,
    "gamma": 0.5,
    "highest": 0.25,
    "k": 3,
    "lr": 0.125,
    "max_norm": 1.0,
    "optimizer": optim.sgd(),
    "output": "y",
    "period": 5,
    "rates": (0.5, 0.25, 0.125),
    "rising": 3,
    "schedule": schedules.cosine(0.125, 10),
    "size": 4,
    "steps": 10,
    "value": 1.0,
    "weight_decay": 0.25,
}
"""Values of settings without a default."""

UNSET: dict[str, Any] = {
    "weight": (0.5, 0.25),
    "group": 2,
    "momentum": 0.5,
    "pos_weight": 0.5,
    "loss_scale": 8.0,
    "synchronize_every": 2,
}
"""Values of settings whose default is None."""

WRAPPERS = {name: getattr(optim, name) for name in ("accumulate", "ema", "swa", "diloco", "layerwise_decay", "proximal")}
Said = Callable[[Any], Any]
KINDS: dict[str, tuple[dict[str, Callable[..., Any]], Said]] = {
    "optimizer": (optim.OPTIMIZERS, lambda made: made.options()),
    "wrapper": (WRAPPERS, lambda made: made.options()),
    "transform": (TRANSFORMS, lambda made: made.options()),
    "schedule": (schedules.SCHEDULES, lambda made: made.options()),
    "loss": (losses.LOSSES, lambda made: made.options()),
    "metric": (metrics.METRICS, lambda made: made.name),
    "policy": (POLICIES, str),
    "precision": ({"mixed": burnish.MixedPrecision}, lambda made: made.options()),
    "parallel": ({"data_parallel": burnish.DataParallel}, repr),
}


def of_numpy(value: Any) -> Iterator[Any]:
    """The same setting, of NumPy's types; none where it is no number."""
    if isinstance(value, bool):
        yield np.bool(value)
    elif isinstance(value, int):
        yield from (np.int64(value), np.int32(value))
    elif isinstance(value, float):
        yield np.float64(value)
        if float(np.float32(value)) == value:
            yield np.float32(value)
    elif isinstance(value, tuple) and value and all(isinstance(part, int | float) for part in value):
        yield tuple(np.float64(part) if isinstance(part, float) else np.int64(part) for part in value)
        yield [np.float64(part) if isinstance(part, float) else np.int64(part) for part in value]


def settings() -> Iterator[Any]:
    for kind, (makers, _) in KINDS.items():
        for name, make in makers.items():
            for parameter in inspect.signature(make).parameters.values():
                value = NEEDED.get(parameter.name) if parameter.default is parameter.empty else parameter.default
                if value is None and (kind, parameter.name) != ("parallel", "group"):
                    value = UNSET.get(parameter.name)
                if any(True for _ in of_numpy(value)):
                    yield pytest.param(kind, name, parameter.name, value, id=f"{kind}-{name}-{parameter.name}")


@spread(("kind", "name", "setting", "value"), list(settings()), test=146)
def test_numbers_of_numpy(kind: str, name: str, setting: str, value: Any) -> None:
    makers, said = KINDS[kind]
    make = makers[name]
    needed = {p.name: NEEDED[p.name] for p in inspect.signature(make).parameters.values() if p.default is p.empty}
    expected = make(**{**needed, setting: value})
    for given in of_numpy(value):
        made = make(**{**needed, setting: given})
        assert said(made) == said(expected)
        assert json.dumps(said(made)) == json.dumps(said(expected))
        assert repr(made) == repr(expected)


def test_enough_settings_are_looked_at() -> None:
    assert len(list(settings())) > 150


def flags() -> list[Any]:
    parts = [value.values for value in settings() if isinstance(value.values[-1], bool)]
    return [pytest.param(kind, name, flag, id=f"{kind}-{name}-{flag}") for kind, name, flag, _ in parts]


@pytest.mark.parametrize(("kind", "name", "flag"), flags())
@pytest.mark.parametrize("given", ["no", "False", 0, 1.0])
def test_a_truth_value_is_one(kind: str, name: str, flag: str, given: object) -> None:
    """Text such as 'no' would count as true."""
    make = KINDS[kind][0][name]
    needed = {p.name: NEEDED[p.name] for p in inspect.signature(make).parameters.values() if p.default is p.empty}
    with pytest.raises(ConfigurationError, match=rf"{flag} must be True or False, not {re.escape(repr(given))}"):
        make(**{**needed, flag: given})


def test_numbers_of_numpy_inside_groups() -> None:
    given = optim.groups(optim.sgd(), {"a": {"lr_scale": np.float32(0.5), "momentum": np.float64(0.25)}})
    assert given == optim.groups(optim.sgd(), {"a": {"lr_scale": 0.5, "momentum": 0.25}})
    assert json.loads(json.dumps(given.options()))["patterns"] == [["a", {"lr_scale": 0.5, "momentum": 0.25}]]


def test_a_program_with_numbers_of_numpy_is_saved_and_trains(tmp_path, program) -> None:
    optimizer = optim.accumulate(
        optim.ema(optim.sgd(lr=np.float32(0.125), momentum=np.float16(0.5)), np.float32(0.5)), np.int64(2)
    )
    compiled = program.with_optimizer(optimizer)
    compiled.save(tmp_path / "program")
    assert optim.get(burnish.Program.load(tmp_path / "program").options["optimizer"]) == optimizer
    trainer = burnish.Trainer(
        compiled,
        DATA,
        epochs=np.int64(1),
        batch_size=np.int32(4),
        lr=np.float32(0.5),
        seed=np.int64(3),
        keep_checkpoints=np.int64(1),
        threads=np.int64(1),
        schedule=lambda step, steps: np.float32(0.5),
        run_directory=tmp_path / "run",
        progress=False,
    )
    trainer.run()
    assert trainer.session.step_count == 2


@pytest.mark.parametrize(
    "value", [True, np.True_, "1", None, float("nan"), np.float32("inf"), 1j, np.complex64(1), [1], np.array([1, 2])]
)
def test_what_is_no_number(value: object) -> None:
    assert not is_number(value)
    assert not is_whole(value)


def test_what_is_one() -> None:
    assert all(map(is_number, (1, 0.5, np.float16(0.5), np.int8(1), np.uint64(2**63))))
    assert all(map(is_whole, (1, -1, np.int8(1), np.uint64(2**63))))
    assert not any(map(is_whole, (1.0, np.float32(1))))


def test_there_is_one_judge_of_numbers() -> None:
    assert validation.is_number is is_number


def test_what_holds_no_number_of_numpy_stays_the_same_object() -> None:
    for value in ((1, (2.0, "a")), [1, None], {"a": [1]}, "text", np.arange(3)):
        assert plain(value) is value
    assert plain({"a": (np.int64(1), [np.float32(0.5)])}) == {"a": (1, [0.5])}


@pytest.fixture(scope="module")
def model():
    return residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))


@pytest.fixture(scope="module")
def program(model) -> burnish.Program:
    return burnish.compile(model)


DATA = {"x": np.zeros((8, 1, 4, 4), np.float32), "labels": np.zeros(8, np.int64)}
LOSSES = [item for item in vars(losses).values() if isinstance(item, type) and issubclass(item, losses.base.LossBase)]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("optimizer", optim.SGD, r"not the class 'SGD': call it, as in burnish\.optim\.sgd\(\.\.\.\)"),
        ("loss", losses.cross_entropy, r"the class 'CrossEntropy': call it, as in burnish\.losses\.cross_entropy\(\.\.\.\)"),
        *(("loss", loss, rf"not the class '{loss.__name__}': call it") for loss in LOSSES),
        (
            "metrics",
            [metrics.METRICS["f1"]],
            r"a metric is a name or an object of burnish\.metrics, not the class 'F1': call it, as in burnish\.metrics\.f1",
        ),
        (
            "metrics",
            [type(metrics.get("f1"))],
            r"not the class 'F1': call it, as in burnish\.metrics\.f1\(\.\.\.\); choose among",
        ),
        ("metrics", [type(metrics.get("accuracy"))], r"not the class 'Accuracy': call it"),
        ("norm", Train, r"norm must be a policy, such as 'train' or 'frozen', or \{pattern: policy\}, not <class"),
        ("norm", {"*": Train}, r"a norm policy is a name or an object of burnish\.norms, not the class 'Train': call it"),
        ("precision", burnish.MixedPrecision, r"precision: unknown <class .*, or give a burnish\.MixedPrecision\(\.\.\.\)"),
    ],
)
def test_a_class_in_the_place_of_an_object(option: str, value: Any, message: str, model) -> None:
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model, **{option: value})


RATES = [schedules.Cosine, schedules.Constant, schedules.cosine, optim.SGD, optim.sgd, optim.sgd()]


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: getattr(rate, "__name__", str(rate)))
@pytest.mark.parametrize(
    "use",
    [
        lambda rate: optim.adam(lr=rate),
        lambda rate: schedules.warmup(rate, 3),
        schedules.get,
        lambda rate: optim.groups(optim.sgd(), {"a": {"lr": rate}}),
        lambda rate: optim.get({"name": "sgd", "lr": rate}),
    ],
    ids=["lr", "warmup", "get", "group", "options"],
)
def test_what_is_no_schedule(rate: Any, use: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"schedule"):
        use(rate)


@pytest.mark.parametrize("make", [optim.SGD, optim.sgd, schedules.cosine(0.1, 10)])
@pytest.mark.parametrize(
    "wrap", [lambda x: optim.accumulate(x, 2), optim.ema, optim.swa, optim.diloco, optim.proximal, optim.groups, optim.chain]
)
def test_what_is_no_optimizer(make: Any, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer"):
        wrap(make)


NONE = r"^schedule: .* is none: give 'constant' or 'cosine', or a function of \(step from 0, steps of the run\) that returns"
COMPUTED = r"^schedule: '{}' of burnish\.optim\.schedules is computed in the program: compile with it as lr"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedules.cosine, COMPUTED.format("cosine")),
        (schedules.constant, COMPUTED.format("constant")),
        (schedules.Warmup, COMPUTED.format("warmup")),
        (schedules.cosine(0.1, 10), COMPUTED.format("cosine")),
        (optim.SGD, NONE),
        (optim.sgd(), NONE),
        (3, NONE),
        (None, NONE),
        ("cosin", r"there is no learning-rate schedule 'cosin'; choose among constant, cosine"),
        (
            lambda step: 1.0,
            r"schedule: the function <function .* cannot be called with a step and the steps of the run \(too many",
        ),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_a_trainer_refuses_what_is_no_schedule(schedule: Any, message: str, program, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        burnish.Trainer(program, DATA, schedule=schedule, run_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("factor", ["x", None, float("nan"), optim.sgd(), True])
def test_a_schedule_that_returns_no_number(factor: Any, program, tmp_path) -> None:
    trainer = burnish.Trainer(
        program, DATA, batch_size=4, schedule=lambda step, steps: factor, run_directory=tmp_path / "run", progress=False
    )
    with pytest.raises(ConfigurationError, match=r"schedule: the function returned .* for step 0 of 2: let it return the factor"):
        trainer.run()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("parallel", burnish.DataParallel, r"parallel=<class .*: give burnish\.DataParallel\(\)"),
        ("engine", OnnxRuntimeEngine, r"engine=<class .* is not an engine"),
        (
            "progress",
            Silent,
            r"progress must be True, False or an object .*: call it, as in Silent\(\.\.\.\)",
        ),
        ("progress", "bar", r"progress must be True, False or an object with the methods of .*, not 'bar'"),
    ],
)
def test_a_trainer_refuses_a_class(option: str, value: Any, message: str, program, tmp_path) -> None:
    with pytest.raises(BurnishError, match=message):
        burnish.Trainer(program, DATA, run_directory=tmp_path / "run", **{option: value})
