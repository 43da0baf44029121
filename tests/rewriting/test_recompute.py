"""Recomputation keeps every bit of a step, holds less memory, and never repeats what must run once."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish.analysis.memory_plan import planned_peak
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.errors import ConfigurationError
from burnish.graph.annotations import NEVER_REPEATED, RECOMPUTES
from burnish.models import residual_network
from burnish.rewriting.recompute import recompute_activations, run_in_order, wait_by_selection
from burnish.rewriting.recompute_request import Recompute, get
from oracles.combinations import diagonal, named
from oracles.rewritten import rewritten
from oracles.standard_operators import STANDARD

WIDTH, DEPTH, BATCH = 24, 12, 64


def perceptron(activation: str = "Tanh", dropout: bool = False, batch: str = "batch") -> onnx.ModelProto:
    """Layers of a matrix product, a bias, an activation; with dropout behind each if asked for."""
    random = np.random.default_rng(1)
    lines, names, value = [], [], "x"
    for layer in range(DEPTH):
        columns = 10 if layer == DEPTH - 1 else WIDTH
        weight = random.normal(0, WIDTH**-0.5, (WIDTH, columns)).astype(np.float32)
        names += [(f"layer{layer}.weight", weight), (f"layer{layer}.bias", random.normal(0, 0.1, columns).astype(np.float32))]
        lines += [f"p{layer} = MatMul({value}, w{layer})", f"z{layer} = Add(p{layer}, b{layer})"]
        value = f"z{layer}"
        if layer < DEPTH - 1:
            lines.append(f"a{layer} = {activation}(z{layer})")
            value = f"a{layer}"
            if dropout:
                lines.append(f"d{layer} = Dropout(a{layer}, ratio)")
                value = f"d{layer}"
    body = "\n".join(lines).replace(f"z{DEPTH - 1} =", "logits =")
    header = '<ir_version: 8, opset_import: ["": 20]>'
    model = onnx.parser.parse_model(
        f"{header} deep (float[{batch}, {WIDTH}] x) => (float[{batch}, 10] logits) <float ratio = {{0.3}}> {{ {body} }}"
    )
    for node in model.graph.node:
        node.name = f"/{node.output[0]}/{node.op_type}"
        for index, operand in enumerate(node.input):
            if operand[0] in "wb" and operand[1:].isdigit():
                node.input[index] = f"layer{operand[1:]}.{'weight' if operand[0] == 'w' else 'bias'}"
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in names)
    return model


def batch_of(program: burnish.Program, size: int = BATCH, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    (x,) = (entry for entry in program.signature["grad"].inputs if entry.name == "x")
    shape = (size, *x.extents[1:])
    return {"x": random.normal(size=shape).astype(np.float32), "labels": random.integers(0, 10, size)}


def run_graph(program: burnish.Program, engine, graph: str = "grad", size: int = BATCH) -> dict[str, np.ndarray]:
    values = {**program.initial_state(0), **batch_of(program, size), "lr": np.float32(0.1)}
    model = program.graphs[graph]
    return engine.run(model, {value.name: values[value.name] for value in model.graph.inputs})


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []
    assert any(np.any(array) for name, array in left.items() if name.startswith("grad:"))


def copies(program: burnish.Program, graph: str = "grad") -> list[ir.Node]:
    """The nodes that run a second time."""
    nodes = (node for node in program.graphs[graph].graph if RECOMPUTES.get(node))
    return [node for node in nodes if node.op_type != "Reshape"]


def count(program: burnish.Program, operator: str) -> int:
    return sum(node.op_type == operator for node in program.grad.graph)


MODELS = {
    "perceptron": lambda: perceptron(),
    "gelu": lambda: perceptron("Gelu"),
    "dropout": lambda: perceptron(dropout=True),
    "convolutions": lambda: residual_network(input_shape=(3, 8, 8), width=4, blocks=(3, 3)),
}


@cache
def compiled(model: str, recompute: str | tuple[str, ...] | None = None) -> burnish.Program:
    return burnish.compile(MODELS[model](), recompute=recompute)


@pytest.mark.slow
@diagonal(("model", MODELS), ("requested", named(["layers", f"layers:batch={BATCH}", "budget", ("*",)], str)))
def test_gradients_and_statistics_keep_their_bits(model, requested):
    plain = compiled(model)
    if requested == "budget":
        requested = f"{int(0.8 * plain.planned_peak(BATCH).bytes)}:batch={BATCH}"
    again = compiled(model, requested)
    assert copies(again)
    for optimization in ("none", "all"):
        engine = OnnxRuntimeEngine(optimization, kernels=False)
        assert_same_bits(run_graph(plain, engine), run_graph(again, engine))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dropout", "convolutions"])
def test_a_session_ends_in_the_same_state(model):
    sessions = [burnish.Session(compiled(model, requested), engine=STANDARD) for requested in (None, "layers")]
    batches = [batch_of(sessions[0].program, seed=seed) for seed in range(3)]
    figures = [[session.step(batch) for batch in batches] for session in sessions]
    assert figures[0] == figures[1]
    left, right = (session.state() for session in sessions)
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


@pytest.mark.slow
def test_the_reference_engine_gives_the_same_gradients():
    plain, again = (burnish.compile(perceptron(), recompute=requested, target="reference") for requested in (None, "layers"))
    assert_same_bits(run_graph(plain, ReferenceEngine(), size=3), run_graph(again, ReferenceEngine(), size=3))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_layers_halve_the_planned_memory_of_activations(model):
    plain, again = compiled(model), compiled(model, "layers")
    for batch in (BATCH, 4096):
        before, after = plain.planned_peak(batch, "grad"), again.planned_peak(batch, "grad")
        assert after.without_recompute == before.bytes == before.without_recompute
        # The words that dropout draws its masks from are laid out by extents known only at run time.
        assert model == "dropout" or after.unknown == before.unknown == 0
    assert after.bytes - after.inputs < 0.6 * (before.bytes - before.inputs)


def test_layers_keep_the_boundaries_of_blocks():
    """What a copy reads from the forward pass are few checkpoints, each as narrow as the network gets."""
    program = compiled("perceptron", "layers")
    checkpoints = {RECOMPUTES.get(node) for node in program.grad.graph if node.op_type == "Reshape" and RECOMPUTES.get(node)}
    assert 1 <= len(checkpoints) <= DEPTH // 2


@pytest.mark.slow
def test_a_random_draw_is_not_repeated():
    plain, again = compiled("dropout"), compiled("dropout", ("*",))
    for operator in ("BitwiseXor", "BitShift", "GreaterOrEqual", "Mod"):
        assert count(again, operator) == count(plain, operator)
    masks = {node.inputs[0].name for node in copies(again) if node.op_type == "Cast"}
    assert masks, "what is made of a mask is made again from the mask"
    values = {value.name: value for node in again.grad.graph for value in node.outputs}
    kept = [node.inputs[0] for node in again.grad.graph if node.outputs[0].name in masks]
    assert {values[value.name].dtype for value in kept} == {ir.DataType.BOOL}


@pytest.mark.slow
def test_an_update_of_running_statistics_is_not_repeated():
    plain, again = compiled("convolutions"), compiled("convolutions", ("*",))
    assert count(again, "BatchNormalization") > count(plain, "BatchNormalization")
    reached = {output for node in copies(again) for output in node.outputs}
    for node in again.grad.graph:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    assert [value.name for value in reached if value.name.startswith("next:stat/")] == []


GRAPH = """
<ir_version: 10, opset_import: ["": 18]>
small (float[batch, 64] x, float[64, 64] w) => (float loss, float[64, 64] gradient) {
    a = MatMul(x, w)
    b = Tanh(a)
    c = Mul(b, b)
    d = MatMul(c, w)
    e = Tanh(d)
    loss = ReduceSum <keepdims = 0> (e)
    one = Constant <value = float {1.0}> ()
    ee = Mul(e, e)
    de = Sub(one, ee)
    wt = Transpose <perm = [1, 0]> (w)
    dc = MatMul(de, wt)
    db = Mul(dc, b)
    bb = Mul(b, b)
    slope = Sub(one, bb)
    da = Mul(db, slope)
    xt = Transpose <perm = [1, 0]> (x)
    gradient = MatMul(xt, da)
}"""


def small_graph() -> ir.Model:
    model = burnish.load(onnx.parser.parse_model(GRAPH))
    for node in model.graph:
        node.metadata_props["burnish.origin"] = f"node-{node.outputs[0].name}"
    return model


def repeated(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if RECOMPUTES.get(node)]


def test_a_pattern_names_what_is_computed_again():
    model = rewritten(recompute_activations, small_graph(), Recompute(patterns=("node-b",)), loss="loss", data=["x"], keys=[])
    assert repeated(model) == ["Reshape", "Tanh"]
    order = [node.outputs[0].name for node in model.graph]
    (copy,) = (node for node in model.graph if node.op_type == "Tanh" and node.metadata_props)
    assert order.index("dc") < order.index(copy.outputs[0].name) < order.index("db")
    assert not any("burnish.origin" in node.metadata_props for node in model.graph)


def test_what_is_marked_runs_once():
    """The hook for collectives between replicas."""
    model = small_graph()
    NEVER_REPEATED.set(next(node for node in model.graph if node.outputs[0].name == "b"), True)
    with pytest.raises(ConfigurationError, match="pattern 'node-b' matches only what is never computed twice"):
        recompute_activations(model, Recompute(patterns=("node-b",)), loss="loss", data=["x"], keys=[])
    recompute_activations(model, Recompute(patterns=("*",)), loss="loss", data=["x"], keys=[])
    assert ("b",) not in {RECOMPUTES.get(node) for node in model.graph if node.op_type == "Tanh"}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["default", "priority"])
@pytest.mark.parametrize("batch", ["batch", "64"])
def test_a_runtime_neither_merges_copies_nor_runs_them_early(batch, order, tmp_path):
    """With every rewrite of the graph on, known extents, and either order of execution."""
    program = burnish.compile(perceptron("Sin", batch=batch), recompute="layers")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    model = ir.to_proto(program.grad).SerializeToString()
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    assert sum(node.op_type == "Sin" for node in optimized.node) == count(program, "Sin") > DEPTH
    # Whatever the order, a copy cannot run before a gradient that went through the derivative of a later layer.
    produced = {value: node for node in optimized.node for value in node.output}
    sines = [node for node in optimized.node if node.op_type == "Sin"]
    forward = {node.output[0] for node in sines if not _depends_on(produced, node, "Greater")}
    assert len(forward) == DEPTH - 1
    for node in sines:
        if node.output[0] not in forward:
            assert _depends_on(produced, node, "Cos", through="Greater")


def _depends_on(produced: dict[str, onnx.NodeProto], node: onnx.NodeProto, *operators: str, through: str | None = None) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        for name in current.input:
            source = produced.get(name)
            if source is None or source.output[0] in seen:
                continue
            seen.add(source.output[0])
            if source.op_type == through:
                return _depends_on(produced, source, *operators)
            if through is None and source.op_type in operators:
                return True
            pending.append(source)
    return False


@pytest.mark.parametrize("model", ["gelu", "convolutions"])
def test_in_the_order_of_the_graph_copies_wait_for_nothing(model):
    again = compiled(model, "layers")
    in_order = rewritten(run_in_order, again.grad.clone())
    assert (
        sum(node.op_type == "Greater" for node in in_order.graph) == count(compiled(model), "Greater") < count(again, "Greater")
    )
    copied = [node for node in in_order.graph if RECOMPUTES.get(node)]
    assert [node.op_type for node in copied] == [node.op_type for node in copies(again)]
    peaks = [planned_peak(graph, BATCH) for graph in (in_order, again.grad)]
    assert peaks[0].bytes <= peaks[1].bytes
    values = {**again.initial_state(0), **batch_of(again, 3)}
    feeds = {value.name: values[value.name] for value in in_order.graph.inputs}
    assert_same_bits(ReferenceEngine().run(in_order, feeds), ReferenceEngine().run(again.grad, feeds))


@pytest.mark.parametrize("model", ["gelu", "convolutions"])
def test_copies_may_wait_without_a_shape_that_values_decide(model):
    again = compiled(model, "layers")
    selecting = rewritten(wait_by_selection, again.grad.clone())
    assert [copy.op_type for copy in copies(again)] == [node.op_type for node in selecting.graph if RECOMPUTES.get(node)]
    waiting = sum(bool(RECOMPUTES.get(node)) for node in again.grad.graph if node.op_type == "Reshape")
    chosen = [node for node in selecting.graph if node.op_type == "Where" and node.inputs[1] is node.inputs[2]]
    assert len(chosen) == waiting > 0
    values = {**again.initial_state(0), **batch_of(again, 3)}
    feeds = {value.name: values[value.name] for value in selecting.graph.inputs}
    assert_same_bits(ReferenceEngine().run(selecting, feeds), ReferenceEngine().run(again.grad, feeds))


@pytest.mark.slow
def test_a_budget_is_met_with_as_little_work_as_it_takes():
    batch = 2 * BATCH  # Activations decide the peak then, and not the update, which reads all small gradients at once.
    plain = compiled("perceptron").planned_peak(batch)
    work = []
    for share in (1.0, 0.9, 0.75):
        budget = int(share * plain.bytes)
        program = burnish.compile(perceptron(), recompute=f"{budget}:batch={batch}")
        assert program.planned_peak(batch).bytes <= budget
        work.append(len(copies(program)))
    assert work == sorted(work)
    assert work[0] == 0 < work[-1]


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_names_the_least():
    with pytest.raises(ConfigurationError) as caught:
        burnish.compile(perceptron(), recompute=f"1KB:batch={BATCH}")
    found = str(caught.value)
    assert found.startswith(f"recompute: the step graph does not fit 1,000 bytes at batch {BATCH}; the least that recomputation")
    least = int(found.split("reaches is ")[1].split(" bytes")[0].replace(",", ""))
    program = burnish.compile(perceptron(), recompute=f"{least + 2000}:batch={BATCH}")
    assert program.planned_peak(BATCH).bytes <= least + 2000


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(ConfigurationError, match=r"pattern 'layer99\*' matches no node or value of the forward pass; give names"):
        burnish.compile(perceptron(), recompute=["layer99*"])


@pytest.mark.parametrize("pattern", ["/a3/Tanh", "a3", "layer3.*"])
def test_patterns_read_names_of_nodes_outputs_and_weights(pattern):
    assert copies(burnish.compile(perceptron("Gelu" if pattern == "layer3.*" else "Tanh"), recompute=[pattern]))


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("blocks", "recompute='blocks' is no choice: give 'layers', a budget such as '1.5GB'"),
        (0, "recompute=0 is no choice"),
        (True, "recompute=True is no choice"),
        ([], r"recompute=\[\] is no choice"),
        ("layers:size=3", "recompute 'layers' has no option 'size'; it takes batch"),
    ],
)
def test_what_is_no_choice_is_refused(requested, message):
    with pytest.raises(ConfigurationError, match=message):
        get(requested)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("layers", Recompute()),
        ("layers:batch=8", Recompute(batch=8)),
        ("1.5GB", Recompute(budget=1_500_000_000)),
        ("2 MiB:batch=16", Recompute(budget=2 * 2**20, batch=16)),
        (1000, Recompute(budget=1000)),
        (["a*", "b"], Recompute(patterns=("a*", "b"))),
    ],
)
def test_options_are_read_and_written(requested, expected):
    assert get(requested) == expected
    assert get(expected.options()) == expected


def test_a_saved_program_knows_its_plan(tmp_path):
    program = compiled("perceptron", "layers")
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    assert loaded.options["recompute"] == "layers"
    assert loaded.planned_peak(BATCH) == program.planned_peak(BATCH)


def test_a_planned_peak_counts_what_lives_together():
    """x and w are inputs; a, then b over a's memory, c beside b; then d beside c, and so on."""
    tensor, matrix = BATCH * 64 * 4, 64 * 64 * 4
    model = burnish.load(onnx.parser.parse_model(GRAPH))
    peak = planned_peak(model, BATCH)
    assert peak.inputs == tensor + matrix
    # At the end of da: db is overwritten by it while slope lives; before, at dc: b, de, wt and dc.
    assert peak.bytes == peak.inputs + 3 * tensor + matrix + 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph": "forward"}, "graph: unknown 'forward'; choose among 'init'"),
        ({"batch": 0}, "batch=0: give a whole number of at least one"),
    ],
)
def test_a_plan_of_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        compiled("perceptron").planned_peak(**arguments)
