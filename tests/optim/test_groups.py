"""Parameter groups against PyTorch's, and what is wrong with them by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.optim import ParameterInfo, ParameterKind
from burnish.optim.base import RatedOptimizer
from oracles.optimizers import (
    LR,
    SHAPES,
    UpdateGraph,
    assert_same_history,
    parabola,
    random_problem,
    run_random_problem,
)

KINDS = {"weight": ParameterKind.WEIGHT, "bias": ParameterKind.BIAS, "scale": ParameterKind.NORMALIZATION}
DEPTHS = {"weight": 1, "bias": 2, "scale": 4}
INFOS = {name: ParameterInfo(name, SHAPES[name], ir.DataType.DOUBLE, KINDS[name], DEPTHS[name]) for name in SHAPES}
TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
}

# What is asked of us, and the settings by parameter that PyTorch is given.
CASES: list[tuple[str, dict[str, Any], Callable[[optim.Optimizer], optim.Optimizer], dict[str, dict[str, Any]]]] = [
    (
        "sgd",
        {"momentum": 0.9, "weight_decay": 0.05},
        lambda optimizer: optim.groups(optimizer, {"b*": {"weight_decay": 0.0}, "scale": {"lr": LR / 2, "momentum": 0.5}}),
        {"bias": {"weight_decay": 0.0}, "scale": {"lr": LR / 2, "momentum": 0.5}},
    ),
    (
        "adamw",
        {"weight_decay": 0.1},
        lambda optimizer: optim.groups(optimizer, decay="weights"),
        {"bias": {"weight_decay": 0.0}, "scale": {"weight_decay": 0.0}},
    ),
    (
        "adamw",
        {"weight_decay": 0.1},
        lambda optimizer: optim.groups(optimizer, {"scale": {"weight_decay": 0.2}}, decay="weights"),
        {"bias": {"weight_decay": 0.0}, "scale": {"weight_decay": 0.2}},
    ),
    (
        "adam",
        {"weight_decay": 0.1},
        lambda optimizer: optim.groups(optimizer, {"*": {"lr_scale": 0.25}, "weight": {"betas": (0.5, 0.75)}}),
        {"bias": {"lr": LR / 4}, "scale": {"lr": LR / 4}, "weight": {"betas": (0.5, 0.75)}},
    ),
    (
        "nadam",
        {},
        lambda optimizer: optim.groups(optimizer, {"bias": {"betas": (0.5, 0.75)}, "scale": {"lr_scale": 0.5}}),
        {"bias": {"betas": (0.5, 0.75)}, "scale": {"lr": LR / 2}},
    ),
    (
        "sgd",
        {"momentum": 0.9},
        lambda optimizer: optim.layerwise_decay(optimizer, 0.5),
        {"weight": {"lr": LR / 8}, "bias": {"lr": LR / 4}},
    ),
    (
        "adamw",
        {},
        lambda optimizer: optim.layerwise_decay(
            optim.groups(optimizer, {"bias": {"lr_scale": 0.5}}, decay="weights"), 0.5, layers=["weight", "bias"]
        ),
        {"weight": {"lr": LR / 2}, "bias": {"lr": LR / 2, "weight_decay": 0.0}, "scale": {"weight_decay": 0.0}},
    ),
]
every_case = pytest.mark.parametrize(("name", "options", "group", "differing"), CASES, ids=range(len(CASES)))


@contextlib.contextmanager
def torch_double() -> Iterator[None]:
    """NAdam keeps its product of momenta in PyTorch's default dtype, whatever that of the parameters is."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Undecayed(RatedOptimizer):
    """An optimizer without weight decay."""

    name = "undecayed"


@every_case
def test_groups_match_torch_in_float64(
    name: str,
    options: dict[str, Any],
    group: Callable[[optim.Optimizer], optim.Optimizer],
    differing: Mapping[str, dict[str, Any]],
) -> None:
    initial, gradients = random_problem("float64")
    theirs = {key: torch.from_numpy(array.copy()).requires_grad_() for key, array in initial.items()}
    expected = []
    with torch_double():
        reference = TORCH[name](
            [{"params": [parameter], **differing.get(key, {})} for key, parameter in theirs.items()], **{"lr": LR, **options}
        )
        for step_gradients in gradients:
            for key, parameter in theirs.items():
                parameter.grad = torch.from_numpy(step_gradients[key].copy())
            reference.step()
            expected.append({f"param/{key}": parameter.detach().numpy().copy() for key, parameter in theirs.items()})
    optimizer = optim.bind(group(getattr(optim, name)(lr=LR, **options)), INFOS)
    assert_same_history(run_random_problem(optimizer, "float64"), expected, rtol=1e-10, atol=1e-12)


@every_case
def test_groups_go_through_their_options(
    name: str, options: dict[str, Any], group: Callable[[optim.Optimizer], optim.Optimizer], differing: Any
) -> None:
    optimizer = group(getattr(optim, name)(lr=LR, **options))
    assert isinstance(optimizer, optim.Optimizer)
    again = optim.get(json.loads(json.dumps(optimizer.options())))
    assert again.options() == optimizer.options()
    last = run_random_problem(optim.bind(optimizer, INFOS), "float32")[-1]
    for key, array in run_random_problem(optim.bind(again, INFOS), "float32")[-1].items():
        np.testing.assert_array_equal(array, last[key])


def test_a_group_with_a_rate_of_its_own_has_an_input_of_its_own() -> None:
    grouped = optim.groups(optim.sgd(lr=0.5), {"b*": {"lr": 0.25}, "scale": {"lr_scale": 0.5}})
    assert grouped.hyperparameters() == {"lr": 0.5, "lr:b*": 0.25}
    assert optim.bind(grouped, INFOS).hyperparameters() == {"lr": 0.5, "lr:b*": 0.25}
    graphs = UpdateGraph(grouped, SHAPES, "float64")
    zeros = {f"param/{name}": np.zeros(shape) for name, shape in SHAPES.items()}
    ones = {f"grad:{name}": np.ones(shape) for name, shape in SHAPES.items()}
    result = graphs.apply.run(**zeros, **ones, step=np.int64(0), **{"lr": np.float32(1), "lr:b*": np.float32(2)})
    assert {name: array.flat[0] for name, array in result.items()} == {
        "next:param/weight": -1.0,
        "next:param/bias": -2.0,
        "next:param/scale": -0.5,
    }


def test_a_rate_that_no_parameter_uses_is_no_input() -> None:
    grouped = optim.groups(optim.sgd(lr=0.5), {"*": {"lr": 0.25}, "weight": {"lr": 0.125}})
    assert optim.bind(grouped, INFOS).hyperparameters() == {"lr:*": 0.25, "lr:weight": 0.125}


def test_schedules_of_groups_run_side_by_side() -> None:
    grouped = optim.groups(
        optim.sgd(lr=optim.schedules.exponential(0.5, 0.5)), {"bias": {"lr": optim.schedules.exponential(1.0, 0.25)}}
    )
    assert optim.get(json.loads(json.dumps(grouped.options()))).options() == grouped.options()
    assert grouped.hyperparameters() == {}
    graphs = UpdateGraph(grouped, SHAPES, "float64")
    zeros = {f"param/{name}": np.zeros(shape) for name, shape in SHAPES.items()}
    ones = {f"grad:{name}": np.ones(shape) for name, shape in SHAPES.items()}
    result = graphs.apply.run(**zeros, **ones, step=np.int64(2))
    np.testing.assert_allclose(result["next:param/weight"], -0.125)
    np.testing.assert_allclose(result["next:param/bias"], -0.0625)


def test_the_state_of_groups_that_is_of_no_parameter_is_kept_apart() -> None:
    plateau = optim.schedules.plateau(0.5, patience=1)
    grouped = optim.groups(optim.nadam(lr=LR), {"bias": {"betas": (0.5, 0.75)}, "scale": {"lr": plateau}})
    graphs = UpdateGraph(grouped, SHAPES, "float64")
    slots = set(graphs.next_state)
    shared = {key for key in slots if "/" not in key}
    assert {"momentum_product", "momentum_product:bias", "momentum_product:scale"} <= shared
    own = set(plateau.init(graphs.initial.builder))
    assert own
    assert {f"{slot}:scale" for slot in own} <= shared
    assert not own & shared


def test_another_optimizer_may_be_a_group() -> None:
    grouped = optim.groups(optim.sgd(lr=LR, momentum=0.9), {"bias": optim.adam(lr=LR), "scale": "frozen"})
    assert optim.get(json.loads(json.dumps(grouped.options()))) == grouped
    last = run_random_problem(grouped, "float64")[-1]
    plain = run_random_problem(optim.sgd(lr=LR, momentum=0.9), "float64")[-1]
    adam = run_random_problem(optim.adam(lr=LR), "float64")[-1]
    initial, _ = random_problem("float64")
    np.testing.assert_array_equal(last["param/weight"], plain["param/weight"])
    np.testing.assert_array_equal(last["param/bias"], adam["param/bias"])
    np.testing.assert_array_equal(last["param/scale"], initial["scale"])
    slots = {key for key in last if key.startswith("opt/")}
    assert slots == {"opt/momentum/weight", "opt/first_moment/bias", "opt/second_moment/bias"}
    assert optim.frozen_parameters(optim.bind(optim.chain(optim.clip_by_norm(1.0), grouped), INFOS)) == {"scale"}


def test_what_an_optimizer_has_inside_is_left_undecayed_too() -> None:
    inside = {"name": "adamw", "weight_decay": 0.5}
    grouped = optim.groups(optim.muon(lr=LR, others=inside), {"weight": {"others": optim.sgd(momentum=0.5)}}, decay="weights")
    again = optim.get(json.loads(json.dumps(grouped.options())))
    assert again.options() == grouped.options()
    last = run_random_problem(optim.bind(again, INFOS), "float64")[-1]
    plain = run_random_problem(optim.adamw(lr=LR, weight_decay=0.0), "float64")[-1]
    np.testing.assert_allclose(last["param/bias"], plain["param/bias"], rtol=1e-12)
    np.testing.assert_allclose(last["param/scale"], plain["param/scale"], rtol=1e-12)
    weight = run_random_problem(optim.muon(lr=LR), "float64")[-1]
    np.testing.assert_allclose(last["param/weight"], weight["param/weight"], rtol=1e-12)


def test_groups_keep_dtypes_and_find_the_bottom_of_a_parabola() -> None:
    grouped = optim.groups(optim.adam(lr=0.1), {"w": {"lr_scale": 0.5}})
    np.testing.assert_allclose(parabola(grouped, 900), 0, atol=1e-6)
    graphs = UpdateGraph(grouped, {"w": (2,), "v": (3,)}, "float32", dtypes={"v": "float64"})
    assert [tensor.dtype.numpy() for tensor in graphs.next_params.values()] == [np.float32, np.float64]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.groups(optim.chain(optim.sgd()), {}), r"groups: the optimizer must be a plain one, .* put groups inside"),
        (lambda: optim.groups(optim.sgd(), {"*": "cold"}), r"groups: '\*' must be 'frozen', settings such as .*, not 'cold'"),
        (
            lambda: optim.groups(optim.sgd(), {"*": {"betas": (0.9, 0.9)}}),
            r"groups: '\*' sets 'betas', which sgd does not have; it has lr, momentum, .* and every group lr_scale",
        ),
        (lambda: optim.groups(optim.sgd(), {"*": {"lr": -1.0}}), "sgd: lr must be a finite number that is not negative"),
        (lambda: optim.groups(optim.sgd(), {"*": {"lr_scale": -1.0}}), r"groups: '\*': lr_scale must be a finite number"),
        (lambda: optim.groups(optim.sgd(), {"*": {"lr_scale": 1.0, "lr": 1.0}}), r"groups: '\*' has an lr .* one of the two"),
        (lambda: optim.groups(optim.sgd(), ["*"]), r"groups: patterns must be {pattern: settings}, not \['\*'\]"),
        (lambda: optim.groups(optim.sgd(), decay="bias"), "groups: decay must be 'all' or 'weights', not 'bias'"),
        (
            lambda: optim.groups(Undecayed(lr=0.1), decay="weights"),
            "groups: decay='weights' has no meaning for undecayed, which has no weight_decay",
        ),
        (
            lambda: optim.layerwise_decay(optim.sgd(), -0.5),
            "layerwise_decay: factor must be a finite number that is not negative",
        ),
        (lambda: optim.layerwise_decay(optim.sgd(), 0.5, layers="w*"), r"layerwise_decay: layers must be a list .* not 'w\*'"),
        (
            lambda: optim.bind(optim.groups(optim.sgd(), {"wieght": "frozen"}), INFOS),
            "groups: the pattern 'wieght' matches no parameter that trains; did you mean 'weight'.*burnish inspect",
        ),
        (
            lambda: optim.bind(optim.layerwise_decay(optim.sgd(), 0.9, layers=["b*", "head"]), INFOS),
            "layerwise_decay: the pattern 'head' matches no parameter that trains; did you mean",
        ),
        (
            lambda: UpdateGraph(optim.layerwise_decay(optim.sgd(), 0.9), SHAPES, "float32"),
            "layerwise_decay: the order of the layers is not known yet: call burnish.optim.bind",
        ),
        (
            lambda: UpdateGraph(optim.groups(optim.adamw(), decay="weights"), SHAPES, "float32"),
            "groups: what 'weight' is for is not known, and decay on 'weights' goes by that",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
