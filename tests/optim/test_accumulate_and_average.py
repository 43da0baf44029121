"""Accumulation and averages of the parameters, against closed forms and ``torch.optim.swa_utils``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from burnish import optim
from burnish.errors import ConfigurationError
from oracles.optimizers import (
    LR,
    SHAPES,
    STEPS,
    UpdateGraph,
    assert_same_history,
    parabola,
    random_problem,
    run_random_problem,
    run_steps,
)

MAKERS: list[tuple[Callable[[], optim.Optimizer], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (lambda: optim.sgd(lr=LR, momentum=0.9, dampening=0.3), torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (lambda: optim.adamw(lr=LR), torch.optim.AdamW, {}),
]
every_maker = pytest.mark.parametrize(("make", "torch_optimizer", "options"), MAKERS, ids=["sgd", "adamw"])
WRAPPERS: list[Callable[[optim.Optimizer], optim.Optimizer]] = [
    lambda inside: optim.accumulate(inside, every=3),
    lambda inside: optim.ema(inside, 0.9, bias_correction=True),
    lambda inside: optim.swa(inside, start=3, every=2),
    lambda inside: optim.diloco(inside, outer_lr=0.5, outer_momentum=0.8),
    lambda inside: optim.accumulate(optim.ema(optim.chain(optim.clip_by_norm(1.0), inside)), every=2),
]


class Parameters(torch.nn.Module):
    """The parameters of the random problem as a module, which PyTorch averages."""

    def __init__(self) -> None:
        super().__init__()
        initial, _ = random_problem("float64")
        for name, array in initial.items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(array.copy())))

    def set_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        for name, parameter in self.named_parameters():
            parameter.grad = torch.from_numpy(np.array(gradients[name]))


def arrays(module: torch.nn.Module, prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}/{name}": tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}


@every_maker
@pytest.mark.parametrize("every", [1, 3, 4])
def test_accumulation_is_the_update_by_the_mean(make: Any, torch_optimizer: Any, options: dict[str, Any], every: int) -> None:
    module = Parameters()
    reference = torch_optimizer(module.parameters(), lr=LR, **options)
    _, gradients = random_problem("float64")
    expected = []
    for step in range(STEPS):
        if (step + 1) % every == 0:
            taken = gradients[step + 1 - every : step + 1]
            module.set_gradients({name: np.mean([g[name] for g in taken], axis=0) for name in SHAPES})
            reference.step()
        expected.append(arrays(module, "param"))
    history = run_random_problem(optim.accumulate(make(), every=every), "float64")
    assert_same_history(history, expected, rtol=1e-10, atol=1e-12)
    assert history[-1]["opt/update_count"] == STEPS // every
    assert history[-1]["opt/accumulated_count"] == STEPS % every


def test_between_updates_nothing_but_the_mean_changes() -> None:
    history = run_random_problem(optim.accumulate(optim.adamw(lr=LR), every=4), "float32")
    for before, after in itertools.pairwise(history):
        updated = int(after["opt/accumulated_count"]) == 0
        for name, array in after.items():
            if name.startswith(("param/", "opt/first_moment/", "opt/second_moment/", "opt/update_count")):
                assert np.array_equal(array, before[name]) != updated, name
        if not updated:
            assert any(array.any() for name, array in after.items() if name.startswith("opt/accumulated_gradient/"))
    whole = [state for state in history if int(state["opt/accumulated_count"]) == 0]
    assert not any(array.any() for name, array in whole[0].items() if name.startswith("opt/accumulated_gradient/"))


def test_a_schedule_inside_goes_by_updates() -> None:
    accumulated = optim.accumulate(optim.sgd(lr=optim.schedules.exponential(1.0, 0.5)), every=2)
    history = run_steps(accumulated, {"w": np.zeros(1)}, lambda step, _: {"w": np.ones(1)}, 6)
    assert [float(state["param/w"][0]) for state in history] == [0.0, -1.0, -1.0, -1.5, -1.5, -1.75]
    bounded = optim.accumulate(optim.sgd(lr=optim.schedules.one_cycle(1.0, 10)), every=3)
    assert bounded.optimizer.end is not None
    assert bounded.end == 3 * bounded.optimizer.end


@every_maker
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_exponential_average_is_torchs(make: Any, torch_optimizer: Any, options: dict[str, Any], decay: float) -> None:
    module = Parameters()
    reference = torch_optimizer(module.parameters(), lr=LR, **options)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(module)  # the first call copies: the average starts from the first parameters
    _, gradients = random_problem("float64")
    expected = []
    for step_gradients in gradients:
        module.set_gradients(step_gradients)
        reference.step()
        average.update_parameters(module)
        expected.append(arrays(module, "param") | arrays(average.module, "opt/average"))
    history = run_random_problem(optim.ema(make(), decay, bias_correction=False), "float64")
    assert_same_history(history, expected, rtol=1e-10, atol=1e-12)


def test_the_share_of_the_first_value_in_an_average() -> None:
    plain = optim.ema(optim.sgd(), 0.99, bias_correction=False)
    assert optim.share_of_first(plain, 100) == pytest.approx(0.99**100)
    assert optim.share_of_first(optim.accumulate(plain, 4), 103) == pytest.approx(0.99**25)
    assert optim.share_of_first(optim.ema(optim.accumulate(optim.sgd(), 4), 0.99, bias_correction=False), 8) == 0.99**8
    assert optim.share_of_first(optim.ema(optim.sgd()), 1) == 0
    assert optim.share_of_first(optim.ema(optim.sgd()), 0) == 1
    assert optim.share_of_first(optim.swa(optim.sgd()), 1) == 0
    assert optim.share_of_first(optim.sgd(), 1) == 0


def test_bias_correction_leaves_the_first_parameters_out() -> None:
    decay = 0.9
    history = run_random_problem(optim.ema(optim.sgd(lr=LR), decay), "float64")
    for t in (1, 2, 17, STEPS):
        shares = np.array([(1 - decay) * decay ** (t - 1 - i) for i in range(t)])
        for name in SHAPES:
            past = np.array([state[f"param/{name}"] for state in history[:t]])
            expected = np.tensordot(shares, past, axes=1) / (1 - decay**t)
            np.testing.assert_allclose(history[t - 1][f"opt/average/{name}"], expected, rtol=1e-10, atol=1e-12)


@every_maker
@pytest.mark.parametrize(("start", "every"), [(1, 1), (10, 5), (7, 3)])
def test_the_equal_average_is_torchs(make: Any, torch_optimizer: Any, options: dict[str, Any], start: int, every: int) -> None:
    module = Parameters()
    reference = torch_optimizer(module.parameters(), lr=LR, **options)
    average = AveragedModel(module)
    _, gradients = random_problem("float64")
    expected, taken = [], 0
    for update, step_gradients in enumerate(gradients, 1):
        module.set_gradients(step_gradients)
        reference.step()
        if update >= start and (update - start) % every == 0:
            average.update_parameters(module)
            taken += 1
        held = average.module if taken else module
        expected.append(arrays(module, "param") | arrays(held, "opt/average"))
    history = run_random_problem(optim.swa(make(), start=start, every=every), "float64")
    assert_same_history(history, expected, rtol=1e-10, atol=1e-12)
    assert history[-1]["opt/average_count"] == taken


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPPERS, ids=range(len(WRAPPERS)))
def test_wrapped_optimizers_keep_dtypes_and_go_through_their_options(wrap: Callable[[optim.Optimizer], optim.Optimizer]) -> None:
    optimizer = wrap(optim.adam(lr=0.1))
    assert isinstance(optimizer, optim.Optimizer)
    assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer
    assert optimizer.hyperparameters() == {"lr": 0.1}
    np.testing.assert_allclose(parabola(optimizer, 2000), 0, atol=1e-6)
    graphs = UpdateGraph(optimizer, SHAPES, "float32", dtypes={"bias": "float64"})
    graphs.apply.check()
    for name, tensor in graphs.next_params.items():
        assert tensor.dtype.numpy() == np.dtype("float64" if name == "bias" else "float32")
    initial = {name: np.ones(shape, "float64" if name == "bias" else "float32") for name, shape in SHAPES.items()}
    state = graphs.first_state(initial)
    gradients = {f"grad:{name}": array for name, array in initial.items()}
    result = graphs.apply.run(**state, **gradients, lr=np.float32(0.1), step=np.int64(0))
    assert {key.removeprefix("next:"): array.dtype for key, array in result.items()} == {k: a.dtype for k, a in state.items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.accumulate(optim.sgd(), every=0), "accumulate: every must be a whole number of at least 1, not 0"),
        (lambda: optim.accumulate(optim.sgd(), every=2**62), r"accumulate: every must be below 2\^62, not 46"),
        (lambda: optim.accumulate(optim.sgd(), every=2.0), "accumulate: every must be a whole number of at least 1, not 2.0"),
        (lambda: optim.accumulate("sgd", every=2), "accumulate: it goes around an optimizer of burnish.optim, .*, not 'sgd'"),
        (lambda: optim.ema(optim.sgd(), 1.0), "ema: decay must be at least 0 and less than 1, not 1.0"),
        (lambda: optim.swa(optim.sgd(), start=-1), "swa: start must be a whole number of at least 1, not -1"),
        (lambda: optim.swa(optim.sgd(), every=True), "swa: every must be a whole number of at least 1, not True"),
        (
            lambda: optim.ema(optim.chain(optim.swa(optim.sgd()))),
            "ema: the optimizer inside is already wrapped in swa, and both would keep state of the same name: leave one",
        ),
        (
            lambda: optim.accumulate(optim.ema(optim.accumulate(optim.sgd(), 2)), 2),
            "accumulate: the optimizer inside is already wrapped in accumulate",
        ),
        (lambda: optim.diloco(optim.sgd(), outer_lr=-1.0), "diloco: outer_lr"),
        (lambda: optim.diloco(optim.sgd(), outer_momentum=1.0), "diloco: outer_momentum"),
        (lambda: optim.diloco(optim.diloco(optim.sgd())), "diloco: the optimizer inside is already wrapped in diloco"),
        (lambda: optim.get({"name": "ema", "decay": 0.5}), "optimizer 'ema' needs the option 'optimizer': give it"),
        (
            lambda: optim.get({"name": "swa", "optimizer": {"name": "sgd"}, "end": 3}),
            "optimizer 'swa' has no option 'end'; it takes optimizer, start",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
