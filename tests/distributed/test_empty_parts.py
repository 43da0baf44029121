"""A worker whose part of a batch is empty changes nothing: every policy comes to what those with samples come to."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import native as kernels
from burnish.errors import ObjectiveWarning
from oracles.combinations import diagonal, named
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import Outcome, largest_difference, train_alone, train_in_threads

SAMPLES = 12
THREE = [[8, 0, 4], [0, 12, 0], [4, 4, 4]]
RENORM = "renorm:start=0,r_max_step=0,d_max_step=0,r_max=1.2,d_max=0.1"
MODELS = {"residual": residual, "depthwise": inverted_residual}
ALONE = [("ghost:4", THREE), (RENORM, THREE), ("frozen", THREE), ("sync:2", [[5, 7, 0, 0], [0, 0, 12, 0], [0, 0, 3, 9]])]
"""Policies whose outcome is that of one process with the whole batch."""
APART = [("local", [[8, 0, 4], [0, 8, 4], [8, 4, 0]]), ("sync:2", [[8, 0, 0, 4], [8, 0, 4, 0], [0, 8, 2, 2]])]
"""Those whose outcome is that of two workers which go by their own parts, of 8 and of 4 samples."""


@pytest.fixture(autouse=True)
def _without_warnings():
    """PyTorch warns of what it computes of nothing: such a step is as good as any."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def compiled(model: ir.Model, norm: str) -> burnish.Program:
    return burnish.compile(model, norm=norm, optimizer="sgd:lr=0.05,momentum=0.9", running_variance="pytorch")


def assert_like(outcomes: list[Outcome], expected: Outcome, double: bool) -> None:
    assert np.isfinite([value for report in expected[0] for value in report.values()]).all()
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < (1e-11 if double else 2e-6)


@pytest.mark.slow
@diagonal(
    (("norm", "sizes"), named(ALONE, [norm.partition(":")[0] for norm, _ in ALONE])),
    ("model", MODELS),
    ("double", named([True, False], ["float64", "float32"])),
)
def test_policies_of_the_whole_batch(model, norm, sizes, double):
    program = compiled(MODELS[model](double), norm)
    batches = image_batches(len(sizes), SAMPLES, np.float64 if double else np.float32)
    assert_like(train_in_threads(program, batches, sizes), train_alone(program, batches), double)


def test_group_normalization_of_nothing():
    """Its groups are cut by a Reshape that infers an extent, which the elements of an empty part do not tell."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[N, 4, 3, 3] x) => (float[N, 4] logits) <float[4] scale = {1, 2, 3, 4}, float[4] bias = {1, 0, -1, 2}> {
    normalized = GroupNormalization <num_groups = 2> (x, scale, bias)
    squared = Mul (normalized, normalized)
    pooled = GlobalAveragePool (squared)
    logits = Flatten (pooled)
}""")
    program = burnish.compile(model, optimizer="sgd:lr=0.05,momentum=0.9")
    x, labels = rng.normal(size=(3, SAMPLES, 4, 3, 3)).astype(np.float32), rng.integers(0, 4, (3, SAMPLES))
    batches = [{"x": x[index], "labels": labels[index]} for index in range(3)]
    assert_like(train_in_threads(program, batches, THREE), train_alone(program, batches), double=False)


NOTHING_TO = {
    "reshape": "s = Constant <value_ints = [0, -1]> () \n y = Reshape (h, s)",
    "reshape by what remains": "s = Constant <value_ints = [-1, 4]> () \n y = Reshape (h, s)",
    "find the largest of": """
        zero = Constant <value_ints = [0]> ()
        largest = ReduceMax <keepdims = 1> (h, zero)
        none = Sub (largest, largest)
        y = Add (h, none)
        """,
    "pick from": """
        best = ArgMax <axis = 0, keepdims = 1> (h)
        zeros = Sub (best, best)
        picked = GatherElements <axis = 0> (h, zeros)
        none = Sub (picked, picked)
        y = Add (h, none)
        """,
    "sort": """
        one = Constant <value_ints = [1]> ()
        column = Gather <axis = 1> (h, one)
        values, places = TopK <axis = 0> (column, one)
        none = Sub (values, values)
        y = Add (h, none)
        """,
    "take the mean of": """
        zero = Constant <value_ints = [0]> ()
        mean = ReduceMean <keepdims = 1> (h, zero)
        none = Sub (mean, mean)
        y = Add (h, none)
        """,
    "divide by their number": """
        rows = Shape <start = 0, end = 1> (h)
        many = Constant <value_ints = [12]> ()
        share = Div (many, rows)
        more = Cast <to = 11> (share)
        none = Sub (more, more)
        y = Add (h, none)
        """,
    "pool": """
        s = Constant <value_ints = [-1, 1, 2, 2]> ()
        image = Reshape (h, s)
        pooled = MaxPool <kernel_shape = [2, 2], pads = [1, 1, 1, 1], strides = [2, 2]> (image)
        y = Flatten (pooled)
        """,
    "count down from": """
        low = ReduceMin <keepdims = 0> (ids)
        below = Sub (ids, low)
        more = Gather (table, below)
        none = Sub (more, more)
        y = Add (h, none)
        """,
}
"""What operators do that have no result for nothing, or none of that shape; nothing of other samples stays in the result."""


def of_nothing(body: str) -> burnish.Program:
    rows = ", ".join(str(number % 7 - 3) for number in range(40))
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
g (int64[batch] ids) => (double[batch, 3] logits)
<double[10, 4] table = {{{rows}}}, double[4, 3] w = {{1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6}}, double half = {{0.5}},
bool true = {{1}}> {{
    e = Gather (table, ids)
    h = Dropout (e, half, true)
    {body}
    logits = MatMul (y, w)
}}""")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)  # some work along the samples
        return burnish.compile(model, optimizer="sgd:lr=0.05,momentum=0.9")


def tokens(steps: int, samples: int = SAMPLES) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"ids": rng.integers(3, 10, samples), "labels": rng.integers(0, 3, samples)} for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("body", NOTHING_TO.values(), ids=NOTHING_TO)
def test_operators_that_have_no_result_for_nothing(body):
    program, batches = of_nothing(body), tokens(3)
    assert_like(train_in_threads(program, batches, THREE), train_alone(program, batches), double=True)


OPTIONS = {
    "deterministic": ({"deterministic": True}, 1e-11),
    "each exchange apart": ({"share": False, "bucket_size": 1}, 1e-11),
    "sharded": ({"shard_optimizer": True}, 1e-11),
    "in 16 bits": ({"compression": "bfloat16"}, 2e-2),
    "in 16 bits, sharded": ({"compression": "float16", "shard_optimizer": True}, 2e-3),
}


@pytest.mark.slow
@diagonal(
    ("wrap", [lambda optimizer: optimizer, lambda optimizer: burnish.optim.accumulate(optimizer, 2)]),
    (("options", "tolerance"), named(OPTIONS.values(), OPTIONS)),
)
def test_every_kind_of_exchange(options, tolerance, wrap):
    """Workers come to the same bits, and to what those with samples come to."""
    program = of_nothing(NOTHING_TO["reshape"]).with_optimizer(wrap(burnish.optim.sgd(lr=0.05, momentum=0.9)))
    batches, sizes = tokens(4), [*THREE, [0, 0, 12]]
    alone, (first, *others) = train_alone(program, batches), train_in_threads(program, batches, sizes, **options)
    assert largest_difference(first, alone) < tolerance
    for other in others:
        assert largest_difference(other, first) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": "layers"}, {"precision": "float16"}, {"precision": "bfloat16"}])
def test_how_it_is_computed_changes_nothing(options):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (float[batch, 2, 2] x) => (float[batch, 4] logits) <float[4, 4] v = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 3, 2, 1, 0},
float[4, 4] w = {1, 0, 3, -4, 5, -6, 1, 2, 0, 4, -5, 6, 3, 2, 1, 0}> {
    s = Constant <value_ints = [0, -1]> ()
    y = Reshape (x, s)
    h = MatMul (y, v)
    z = Tanh (h)
    logits = MatMul (z, w)
}""")
    program = burnish.compile(model, optimizer="sgd:lr=0.01", **options)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(3, SAMPLES, 2, 2)).astype(np.float32), rng.integers(0, 4, (3, SAMPLES))
    batches = [{"x": x[index], "labels": labels[index]} for index in range(3)]
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, THREE):
        assert largest_difference(outcome, alone) < (2e-6 if "recompute" in options else 2e-2)


@pytest.mark.slow
def test_a_worker_that_begins_without_samples_gets_some_of_another():
    """No number can be made up that any model takes: rows of the table are counted from the end here, and 0 is none of them."""
    program = of_nothing("""
        twelve = Constant <value_int = 12> ()
        from_end = Sub (ids, twelve)
        more = Gather (table, from_end)
        y = Add (h, more)
        """)
    batches, sizes = tokens(3), [[0, 0, 12], [0, 12, 0], [12, 0, 0]]
    assert_like(train_in_threads(program, batches, sizes), train_alone(program, batches), double=True)


@pytest.mark.slow
def test_no_worker_begins_with_samples():
    program, sizes = of_nothing(NOTHING_TO["reshape"]), [[0, 0], [0, 6], [6, 0]]
    outcomes = train_in_threads(program, [tokens(1, sum(split))[0] for split in sizes], sizes)
    for reports, states in outcomes:
        assert reports[0]["loss"] == 0
        assert np.isfinite([value for report in reports[1:] for value in report.values()]).all()
        assert largest_difference((reports[1:], states), (outcomes[0][0][1:], outcomes[0][1])) == 0


@pytest.mark.slow
def test_what_stands_for_samples_does_not_show():
    """Of one whose logarithm, loss and gradients are not finite nothing is left."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (double[batch, 4] x) => (double[batch, 3] logits) <double[4, 3] w = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6}> {
    y = Log (x)
    logits = MatMul (y, w)
}""")
    program = burnish.compile(model, optimizer="sgd:lr=0.05,momentum=0.9")
    rng = np.random.default_rng(0)
    batches = [{"x": rng.uniform(1, 2, (count, 4)), "labels": rng.integers(0, 3, count)} for count in (0, 6, 6)]
    outcomes = train_in_threads(program, batches, [[0, 0], [0, 6], [3, 3]])
    for reports, states in outcomes:
        assert np.isfinite([value for report in reports[1:] for value in report.values()]).all()
        assert reports[0]["loss"] == 0
        assert states[0]["param/w"].tobytes() == program.initial_state()["param/w"].tobytes()
        assert np.isfinite(states[-1]["param/w"]).all()


@pytest.mark.slow
@diagonal(
    (("norm", "sizes"), named(APART, ["local", "sync"])),
    ("model", MODELS),
    ("double", named([True, False], ["float64", "float32"])),
)
def test_policies_of_parts(model, norm, sizes, double):
    program, apart = (compiled(MODELS[model](double), policy) for policy in (norm, "local"))
    batches = image_batches(len(sizes), SAMPLES, np.float64 if double else np.float32)
    expected = train_in_threads(apart, batches, [[8, 4]] * len(sizes))[0]
    assert_like(train_in_threads(program, batches, sizes), expected, double)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.slow
def test_groups_of_samples_in_a_step_in_which_no_worker_has_any(double):
    """Weights move on by momentum alone, and running statistics stay, bit for bit."""
    program, dtype = compiled(residual(double), "ghost:4"), np.float64 if double else np.float32
    batches = [image_batches(1, 8, dtype)[0], image_batches(1, 0, dtype)[0]]
    for _, (before, after) in train_in_threads(program, batches, [[4, 4], [0, 0]]):
        for name, array in after.items():
            assert np.isfinite(array).all(), name
            if name.startswith("stat/"):
                assert array.tobytes() == before[name].tobytes(), name


@pytest.mark.skipif(not kernels.expected(), reason="needs a C++ compiler for the fused kernels")
@pytest.mark.parametrize("suffix", ["", "_bfloat16"])
@pytest.mark.parametrize("extents", [(4, 0, 3, 3), (0, 5, 3, 3), (4, 0), (0, 5)], ids=str)
def test_kernels_of_no_elements(extents, suffix):
    """Groups of samples are laid out as channels: without samples there is none."""
    assert kernels.available(f"batch_norm{suffix}", f"batch_norm_gradient{suffix}")
    x = torch.zeros(extents, dtype=torch.bfloat16 if suffix else torch.float32)
    vector = torch.zeros(extents[1])
    training, gradient = (
        getattr(torch.ops.burnish, name + suffix).default for name in ("batch_norm_training", "batch_norm_gradient")
    )
    y, _, inverse_std, _, saved = training(x, vector, vector, None, 1e-5, 1, float("inf"))
    dx, dscale, dbias, before = gradient(y, x, vector, inverse_std, saved, y, y, None, 1, float("inf"), True)
    assert [tuple(tensor.shape) for tensor in (y, dx, before)] == [extents] * 3
    assert [gradients.tolist() for gradients in (dscale, dbias)] == [[0.0] * extents[1]] * 2
