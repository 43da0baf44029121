"""What workers draw for their samples is what one process draws for the batch, wherever samples stand; or it is refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import pytest

import burnish
from burnish.errors import ConfigurationError
from burnish.random.places import NOT_NOTED, NUMBERED
from oracles.several_workers import Outcome, in_threads, largest_difference, part_of, train, train_alone, train_in_threads
from oracles.thread_communicator import ThreadCommunicator

UNEVEN = [[2, 2, 1], [0, 4, 1], [3, 0, 2]]
FEATURES = 6
WEIGHT = ", ".join(str(index % 5 + 1) for index in range(3 * FEATURES))

DRAWS = {
    "reshaped to the extents of the batch and what remains": """
        first = Shape <start = 0, end = 1> (x)
        target = Concat <axis = 0> (first, minus)
        f = Reshape (x, target)
        e = Dropout (f, half, true)""",
    "merged with time": """
        target = Constant <value_ints = [-1, 2]> ()
        f = Reshape (x, target)
        d = Dropout (f, half, true)
        whole = Shape (x)
        g = Reshape (d, whole)
        e = Flatten (g)""",
    "behind time": """
        a = Transpose <perm = [1, 0, 2]> (x)
        d = Dropout (a, half, true)
        g = Transpose <perm = [1, 0, 2]> (d)
        e = Flatten (g)""",
    "merged behind time": """
        a = Transpose <perm = [1, 0, 2]> (x)
        target = Constant <value_ints = [-1, 2]> ()
        f = Reshape (a, target)
        d = Dropout (f, half, true)
        whole = Shape (a)
        h = Reshape (d, whole)
        g = Transpose <perm = [1, 0, 2]> (h)
        e = Flatten (g)""",
    "last, among the columns": """
        a = Transpose <perm = [1, 2, 0]> (x)
        d = Dropout (a, half, true)
        g = Transpose <perm = [2, 0, 1]> (d)
        e = Flatten (g)""",
    "in a vector": """
        f = Reshape (x, minus)
        d = Dropout (f, half, true)
        whole = Shape (x)
        h = Reshape (d, whole)
        e = Flatten (h)""",
    "through a loop, whose rank is not inferred": """
        count = Constant <value_int = 2> ()
        h = Loop (count, true, x) <body = b (int64 i, bool go, double[batch, t, 2] u) => (bool on, double[batch, t, 2] v) {
            on = Identity (go)
            v = Add (u, u)
        }>
        d = Dropout (h, half, true)
        e = Flatten (d)""",
    "normal": """
        f = Flatten (x)
        r = RandomNormalLike (f)
        e = Add (f, r)""",
    "uniform": """
        f = Flatten (x)
        r = RandomUniformLike (f)
        e = Add (f, r)""",
    "Bernoulli": """
        f = Flatten (x)
        p = Sigmoid (f)
        r = Bernoulli (p)
        e = Mul (f, r)""",
    "multinomial": """
        f = Flatten (x)
        r = Multinomial <sample_size = 6> (f)
        q = Cast <to = 11> (r)
        e = Mul (f, q)""",
    "the same for every sample": """
        f = Flatten (x)
        r = RandomNormal <shape = [1, 6], dtype = 11> ()
        e = Add (f, r)""",
}

REFUSED = {
    "one batch behind another": (
        """
        f = Flatten (x)
        y = Concat <axis = 0> (f, f)
        d = Dropout (y, half, true)
        p, q = Split <axis = 0, num_outputs = 2> (d)
        e = Add (p, q)""",
        "Concat 'Concat' .* mixes samples",
    ),
    "in reverse": (
        """
        f = Flatten (x)
        end = Constant <value_ints = [-9223372036854775807]> ()
        zero = Constant <value_ints = [0]> ()
        y = Slice (f, minus, end, zero, minus)
        e = Dropout (y, half, true)""",
        "Slice 'Slice' .* mixes samples",
    ),
    "in another order": (
        """
        f = Flatten (x)
        one = Constant <value_ints = [1]> ()
        sums = ReduceSum <keepdims = 0> (f, one)
        count = Shape <start = 0, end = 1> (x)
        largest, order = TopK (sums, count)
        y = Gather <axis = 0> (f, order)
        e = Dropout (y, half, true)""",
        "Gather 'Gather' .* mixes samples",
    ),
    "in another order, and multiplied by ones for each": (
        """
        f = Flatten (x)
        one = Constant <value_ints = [1]> ()
        sums = ReduceSum <keepdims = 0> (f, one)
        count = Shape <start = 0, end = 1> (x)
        largest, order = TopK (sums, count)
        y = Gather <axis = 0> (f, order)
        whole = Shape (f)
        ones = ConstantOfShape <value = double[1] {1}> (whole)
        z = Mul (y, ones)
        e = Dropout (z, half, true)""",
        "Gather 'Gather' .* mixes samples",
    ),
    "along two axes": (
        """
        f = Flatten (x)
        g = Transpose (f)
        y = MatMul (f, g)
        d = Dropout (y, half, true)
        e = MatMul (d, f)""",
        "samples stand along more than one of its axes",
    ),
    "by an unknown shape": (
        """
        f = Flatten (x)
        present = Greater (f, half)
        where = NonZero (present)
        places = Transpose (where)
        picked = GatherND (f, places)
        d = Dropout (picked, half, true)
        total = ReduceSum <keepdims = 1> (d)
        e = Add (f, total)""",
        "GatherND 'GatherND' .* mixes samples",
    ),
    "in a branch": (
        """
        total = ReduceSum <keepdims = 0> (x)
        positive = Greater (total, half)
        f = Flatten (x)
        e = If (positive) <then_branch = t () => (double[batch, c] a) { a = Dropout (f, half, true) },
            else_branch = o () => (double[batch, c] b) { b = Identity (f) }>""",
        "Dropout 'Dropout' .* draws random numbers in a branch or a loop, where workers cannot tell which",
    ),
}


def compiled(body: str, inputs: str = "double[batch, t, 2] x") -> burnish.Program:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
g ({inputs}) => (double[rows, 3] logits)
<double[{FEATURES}, 3] w = {{{WEIGHT}}}, int64[1] minus = {{-1}}, double half = {{0.5}}, bool true = {{1}}> {{{body}
        logits = MatMul (e, w)
}}""")
    return burnish.compile(model, optimizer="sgd:lr=0.1")


def batches_of(shape: tuple[int, ...] = (3, 2), steps: int = len(UNEVEN), samples: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(samples, *shape)), "labels": rng.integers(0, 3, samples)} for _ in range(steps)]


def assert_as_one_process(program: burnish.Program, batches: list[Mapping[str, np.ndarray]], sizes=UNEVEN, **options) -> None:
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, sizes, **options):
        assert largest_difference(outcome, alone) < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("body", DRAWS.values(), ids=DRAWS)
def test_samples_are_found_where_they_stand(body):
    assert_as_one_process(compiled(body), batches_of())


@pytest.mark.slow
@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED)
def test_samples_that_cannot_be_found_are_refused(body, reason):
    program = compiled(body)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        train_in_threads(program, batches_of(), UNEVEN)
    assert "train with one worker" in str(caught.value)
    train_in_threads(program, batches_of(), [[5]] * 3)


def test_the_layer_that_draws_is_named():
    with pytest.raises(
        ConfigurationError, match=r"Dropout 'Dropout' \(output 'd'\) draws random numbers, and workers cannot tell"
    ):
        train_in_threads(compiled(REFUSED["along two axes"][0]), batches_of(), UNEVEN)


@pytest.mark.slow
def test_two_inputs_whose_batches_are_called_differently():
    """A mask of each, of parts with as many rows of both; unnamed dimensions get such names."""
    program = compiled(
        """
        f = Flatten (x)
        a = Dropout (f, half, true)
        b = Dropout (y, half, true)
        e = Add (a, b)""",
        "double[batch, t, 2] x, double[rows, 6] y",
    )
    rng = np.random.default_rng(1)
    assert_as_one_process(program, [{**batch, "y": rng.normal(size=(5, 6))} for batch in batches_of()])


def stepped_apart(
    program: burnish.Program, parts: list[dict[str, np.ndarray]], whole: dict[str, np.ndarray], tolerance: float = 1e-14
) -> None:
    """A step of workers that have these parts is that of one process with the whole batch."""

    def worker(communicator: ThreadCommunicator) -> Outcome:
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            return train(session, [parts[communicator.rank]])

    alone = train_alone(program, [whole])
    for outcome in in_threads(len(parts), worker):
        assert largest_difference(outcome, alone) < tolerance


@pytest.mark.slow
def test_each_input_has_as_many_samples_as_a_worker_gives_it():
    """Of a batch of graphs and of their nodes, for example, of which each worker has other numbers."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (double[batch, 4] x, double[nodes, 6] y) => (double[batch, 3] logits, double penalty)
<double[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, double[6, 1] v = {1, 2, 3, 4, 5, 6}, double half = {0.5}, bool true = {1}>
{
    a = Dropout (x, half, true)
    logits = MatMul (a, w)
    b = Dropout (y, half, true)
    c = MatMul (b, v)
    penalty = ReduceSum <keepdims = 0> (c)
}""")
    loss = burnish.losses.weighted_sum(
        [(1.0, "cross_entropy", "logits"), (0.5, burnish.losses.output("penalty", reduction="sum"))]
    )
    program = burnish.compile(model, loss=loss, optimizer="sgd:lr=0.1")
    rng = np.random.default_rng(2)
    whole = {"x": rng.normal(size=(5, 4)), "y": rng.normal(size=(9, 6)), "labels:logits": rng.integers(0, 3, 5)}
    rows, nodes = ([0, 2, 4, 5], [0, 5, 5, 9])
    parts = [
        {name: array[slice(*(nodes if name == "y" else rows)[rank : rank + 2])] for name, array in whole.items()}
        for rank in range(3)
    ]
    stepped_apart(program, parts, whole)


@pytest.mark.slow
def test_positions_are_no_samples():
    """The first axis of an input may be one that others have behind their samples: all workers have the same."""
    program = compiled(
        """
        one = Constant <value_ints = [1]> ()
        column = Unsqueeze (positions, one)
        d = Dropout (column, half, true)
        h = Add (x, d)
        e = Flatten (h)""",
        "double[t] positions, double[batch, t, 2] x",
    )
    (whole,) = batches_of(steps=1)
    positions = {"positions": np.arange(1.0, 4.0)}
    parts = [{**part_of(whole, rank, [3, 0, 2]), **positions} for rank in range(3)]
    stepped_apart(program, parts, {**whole, **positions})


@pytest.mark.slow
def test_a_batch_that_the_model_fixes():
    """Workers with the batch that a model is made for draw what the same model, made for all of their samples, draws."""
    body = """
        target = Constant <value_ints = [-1, 2]> ()
        f = Reshape (x, target)
        d = Dropout (f, half, true)
        whole = Shape (x)
        g = Reshape (d, whole)
        e = Flatten (g)"""
    program, joined = (compiled(body, f"double[{samples}, 3, 2] x") for samples in (2, 4))
    batches = batches_of(samples=4)
    alone = train_alone(joined, batches)
    for outcome in train_in_threads(program, batches, [[2, 2]] * 3):
        assert largest_difference(outcome, alone) < 1e-14


@pytest.mark.slow
def test_a_program_that_was_saved(tmp_path):
    program = compiled(DRAWS["merged behind time"])
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    assert_as_one_process(loaded, batches_of())


def test_a_program_of_an_earlier_version():
    """It named the axes of what is drawn, and not which of them are rows, nor where samples stand among them."""
    program = compiled(DRAWS["normal"])
    for node in program.semantic["grad"].graph:
        if NUMBERED.is_on(node):
            NUMBERED.remove(node)
            node.metadata_props["burnish.random.places"] = "batch"
    with pytest.raises(ConfigurationError, match="compiled by an earlier version, which did not note where samples stand"):
        train_in_threads(program, batches_of(), UNEVEN)


@pytest.mark.slow
def test_a_draw_for_which_nothing_was_noted():
    program = compiled(DRAWS["normal"])
    for node in program.semantic["grad"].graph:
        if NUMBERED.is_on(node):
            NOT_NOTED.rows.write(node)
    with pytest.raises(ConfigurationError, match="what it is drawn for was not noted"):
        train_in_threads(program, batches_of(), UNEVEN)


@pytest.mark.slow
def test_dropout_of_attention_over_heads_in_float32():
    """The PyTorch engine has a kernel for the products of heads, which stand among the exchanges."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 5, 8] x) => (float[N, 4] logits)
            <int64[4] heads = {0, 5, 2, 4}, int64[3] whole = {0, 5, 8}, int64[1] places = {1}, float ratio = {0.3}> {
            q = MatMul (x, query) qh = Reshape (q, heads) qt = Transpose <perm = [0, 2, 1, 3]> (qh)
            k = MatMul (x, key) kh = Reshape (k, heads) kt = Transpose <perm = [0, 2, 3, 1]> (kh)
            v = MatMul (x, value) vh = Reshape (v, heads) vt = Transpose <perm = [0, 2, 1, 3]> (vh)
            s = MatMul (qt, kt) p = Softmax <axis = -1> (s) d = Dropout (p, ratio) m = MatMul (d, vt)
            mt = Transpose <perm = [0, 2, 1, 3]> (m) y = Reshape (mt, whole) r = ReduceMean <keepdims = 0> (y, places)
            logits = MatMul (r, head)
        }""")
    rng = np.random.default_rng(0)
    for name in ("query", "key", "value", "head"):
        array = rng.normal(size=(8, 4 if name == "head" else 8)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    program = burnish.compile(model, optimizer="sgd:lr=0.1")
    batches = [{"x": rng.normal(size=(8, 5, 8)).astype(np.float32), "labels": np.arange(8) % 4} for _ in range(3)]
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, [[5, 3], [1, 7], [8, 0]]):
        assert largest_difference(outcome, alone) < 1e-5


@pytest.mark.slow
def test_dropout_of_a_quantized_model():
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 8] x) => (float[N, 4] logits) <float ratio = {0.3}> {
            h = MatMul (x, first) r = Tanh (h) d = Dropout (r, ratio) logits = MatMul (d, head)
        }""")
    rng = np.random.default_rng(0)
    for name in ("first", "head"):
        array = rng.normal(size=(8, 4 if name == "head" else 8)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    batches = [{"x": rng.normal(size=(8, 8)).astype(np.float32), "labels": np.arange(8) % 4} for _ in range(3)]
    program = burnish.compile(burnish.surgery.quantize(model, calibration=[{"x": batches[0]["x"]}]), optimizer="sgd:lr=0.01")
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, [[5, 3], [1, 7], [8, 0]]):
        assert largest_difference(outcome, alone) < 1e-5
