"""Random normalization layers against PyTorch and float64, and the proof that these tests can fail.

The second half mutates the rules, one line at a time, and demands that the comparison of the first half notices.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish import modes
from burnish.engines.onnxruntime import OnnxRuntimeRunner
from burnish.norms import training
from burnish.operators.normalization import batch, standardize
from oracles.mutant_functions import mutant_of
from oracles.normalization_layers import Configuration, check, check_that_evaluation_leaves_the_state
from oracles.operator_records import change_record

TRAINED = [("scale", "bias"), ("scale",), ("bias",), ()]
EXTENTS = st.integers(2, 5)


@st.composite
def configurations(draw: st.DrawFn, kinds: tuple[str, ...] = ("batch", "layer", "rms", "group", "instance")) -> Configuration:
    kind = draw(st.sampled_from(kinds))
    rank = draw(st.integers(3 if kind in ("instance", "group") else 2, 5))
    groups = draw(st.integers(1, 3)) if kind == "group" else 1
    shape = [draw(EXTENTS) for _ in range(rank)]
    shape[1] = shape[1] * groups
    return Configuration(
        kind=kind,  # type: ignore[arg-type]
        shape=tuple(shape),
        axis=draw(st.integers(1, rank - 1)) if kind in ("layer", "rms") else 1,
        groups=groups,
        trained=draw(st.sampled_from(TRAINED)),
        policy=draw(st.sampled_from(["train", "train", "frozen"])),
        rule=draw(st.sampled_from(["pytorch", "onnx"])),
        epsilon=draw(st.sampled_from([1e-12, 1e-5, 1e-3, 1.0])),
        mean=draw(st.sampled_from([0.0, -3.0, 100.0])),
        spread=draw(st.sampled_from([1.0, 0.1, 30.0])),
        dtype=draw(st.sampled_from(["float32", "float32", "float64"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(configurations())
@pytest.mark.slow
def test_drawn_layers_agree_with_pytorch_and_float64(configuration: Configuration) -> None:
    check(configuration)


@pytest.mark.campaign
@settings(max_examples=150, deadline=None, derandomize=True)
@given(configurations())
def test_more_drawn_layers(configuration: Configuration) -> None:
    check(configuration)


CASES = [
    Configuration("batch", (3, 2, 4)),
    Configuration("batch", (6, 3), rule="onnx"),
    Configuration("batch", (4, 3, 2, 2), policy="frozen"),
    Configuration("layer", (3, 4), mean=-3.0),
    Configuration("rms", (3, 4)),
]


def check_all() -> None:
    """What the mutants must not get through."""
    for case in CASES:
        check(case)
    check_that_evaluation_leaves_the_state(CASES[0])


@pytest.mark.slow
def test_the_cases_that_mutants_are_tried_on_pass() -> None:
    check_all()


LOWERINGS = {
    "scale and bias gradients swapped": (batch.lower_batch_norm_grad, ", dscale, dbias", ", dbias, dscale"),
    "input gradient not centered": (batch.lower_batch_norm_grad, "gain * dbias / count", "dbias * 0"),
    "projection on x left out": (batch.lower_batch_norm_grad, "slope = ", "slope = 0 * "),
    "scale gradient not centered": (batch.lower_batch_norm_grad, "- shift * dbias", "+ op.required(3) * dbias"),
    "inverse std left out of the scale gradient": (batch.lower_batch_norm_grad, ") * inverse_std\n", ")\n"),
    "layer normalization's gradient not centered": (standardize.lower_standardize_gradient, 'op.attribute("centered")', "False"),
    "layer normalization's projection left out": (standardize.lower_standardize_gradient, "(q - y * along)", "q"),
}
OPERATORS = {batch.lower_batch_norm_grad: "BatchNormGrad", standardize.lower_standardize_gradient: "StandardizeGrad"}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", LOWERINGS)
def test_a_mutated_gradient_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, original, replacement = LOWERINGS[mutation]
    change_record(monkeypatch, OPERATORS[rule], "burnish", lowering=mutant_of(rule, original, replacement))
    with pytest.raises(AssertionError):
        check_all()


UNBIASED = "elements_per_channel(x) / (elements_per_channel(x) - 1)"
FUNCTIONS: dict[str, tuple[Any, str, str, str]] = {
    "saved variance unbiased": (
        batch,
        "_by_standard_operator",
        "inverse_std_of(variance, epsilon)",
        f"inverse_std_of(variance * {UNBIASED}, epsilon)",
    ),
    "variance unbiased": (
        batch,
        "_by_corrected_two_pass",
        "channel_mean(centered * centered)",
        f"channel_mean(centered * centered) * {UNBIASED}",
    ),
    "variance not centered": (
        batch,
        "_by_corrected_two_pass",
        "channel_mean(centered * centered) - shift * shift",
        "channel_mean(x * x)",
    ),
    "rules of the running variance swapped": (
        training.RunningStatistics,
        "update",
        "is RunningVariance.PYTORCH",
        "is RunningVariance.ONNX",
    ),
    "momentum the wrong way round": (
        training.RunningStatistics,
        "_blend",
        "before * float(momentum) + batch * (1.0 - float(momentum))",
        "batch * float(momentum) + before * (1.0 - float(momentum))",
    ),
    "statistics of frozen layers updated": (
        modes,
        "_bind_layer",
        "isinstance(policy, BatchStatistics)",
        "(policy := Train())",
    ),
    "evaluation by statistics of the batch": (
        modes,
        "use_running_statistics",
        "_bind_frozen(node)",
        "_bind_batch_statistics(graph, node, Train(), RunningStatistics(RunningVariance.ONNX, {node: Train()}))",
    ),
    "statistics updated in evaluation": (
        OnnxRuntimeRunner,
        "evaluate",
        'return self._graph("evaluate", instead)',
        'self.step({**inputs, "lr": np.ones((), np.float32)}); return self._graph("evaluate", instead)',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", FUNCTIONS)
def test_a_mutated_statistic_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, original, replacement = FUNCTIONS[mutation]
    function = getattr(owner, name)
    # The function stays the one that lists of passes hold.
    monkeypatch.setattr(function, "__code__", mutant_of(function, original, replacement).__code__)
    with pytest.raises(AssertionError):
        check_all()
