"""A compiled program with another optimizer: the same gradients, another update, and the state carried over by name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.files.identity import graph_hashes
from burnish.files.model_file import model_bytes
from burnish.models import residual_network
from burnish.program import Program, Role
from burnish.program.state import averages
from oracles.combinations import spread

FROZEN = optim.groups(optim.sgd(lr=0.125, momentum=0.5), {"stage1*": "frozen", "stem*": "frozen"})
BATCH = {
    "x": np.random.default_rng(0).standard_normal((8, 1, 8, 8)).astype(np.float32),
    "labels": np.arange(8, dtype=np.int64) % 10,
}
OPTIMIZERS = [
    optim.chain(optim.clip_by_global_norm(0.5), optim.centralize(), optim.adamw()),
    optim.groups(optim.adamw(), {"*weight": {"lr": 0.125}, "stem*": {"lr_scale": 0.5}}, decay="weights"),
    optim.layerwise_decay(optim.sgd(momentum=0.9), 0.5),
    optim.accumulate(optim.adam(), every=2),
    optim.ema(optim.sgd(), bias_correction=True),
    optim.swa(optim.nadam(), start=2),
    optim.accumulate(optim.ema(optim.chain(optim.add_decayed_weights(0.01, on="weights"), FROZEN)), every=3),
]


def every_optimizer(*, test: int | None = None) -> pytest.MarkDecorator:
    return spread("optimizer", OPTIMIZERS, test=test, ids=lambda optimizer: optimizer.name)


@pytest.fixture(scope="module")
def program() -> Program:
    return burnish.compile(residual_network(width=4, blocks=(1, 1), input_shape=(1, 8, 8)), optimizer="sgd", norm="train")


def one_block() -> ir.Model:
    """Enough layers for every option of the optimizers."""
    return residual_network(width=4, blocks=(1,), input_shape=(1, 8, 8))


@pytest.fixture(scope="module")
def small() -> Program:
    return burnish.compile(one_block(), optimizer="sgd", norm="train")


def names_of(program: Program, graph: str, *roles: Role) -> set[str]:
    return {entry.name for entry in program.signature[graph].outputs_of(*roles)}


def run(program: Program, graph: str, state: dict[str, np.ndarray], extra: dict[str, np.ndarray], optimized: bool = True) -> dict:
    """Run one graph on stock ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model_bytes(program.graphs[graph]), options, providers=["CPUExecutionProvider"])
    signature = program.signature[graph]
    rates = {entry.name: np.asarray(entry.default, np.float32) for entry in signature.inputs_of(Role.HYPERPARAMETER)}
    known = {**state, **extra, **rates}
    names = [entry.name for entry in signature.outputs]
    return dict(zip(names, session.run(names, {entry.name: known[entry.name] for entry in signature.inputs}), strict=True))


@pytest.mark.slow
@every_optimizer()
def test_the_program_is_the_one_that_compiling_with_it_gives(small: Program, optimizer: optim.Optimizer) -> None:
    compiled = burnish.compile(one_block(), optimizer=optimizer, norm="train")
    derived = small.with_optimizer(optimizer)
    assert graph_hashes(derived) == graph_hashes(compiled)
    assert derived.signature == compiled.signature
    assert derived.options == compiled.options
    assert derived.grad is small.grad
    for model in derived.graphs.values():
        onnx.checker.check_model(onnx.load_from_string(model_bytes(model)), full_check=True)


@pytest.mark.slow
@every_optimizer()
def test_step_is_grad_and_then_apply(small: Program, optimizer: optim.Optimizer) -> None:
    derived = small.with_optimizer(optimizer)
    for optimized in (False, True):
        whole = parts = derived.initial_state(1)
        for _ in range(3):
            stepped = run(derived, "step", whole, BATCH, optimized)
            found = run(derived, "grad", parts, BATCH, optimized)
            applied = run(derived, "apply", parts, found, optimized)
            whole = whole | {name: stepped[output] for name, output in derived.signature["step"].updates.items()}
            followed = {name: found[output] for name, output in derived.signature["grad"].updates.items()}
            followed |= {name: applied[output] for name, output in derived.signature["apply"].updates.items()}
            parts = parts | followed
        for name, array in whole.items():
            if optimized:
                np.testing.assert_allclose(parts[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(parts[name], array, err_msg=name)


@every_optimizer(test=4)
def test_it_trains_without_loading_anything_at_the_second_step(
    small: Program, optimizer: optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = OnnxRuntimeEngine.inference_session
    monkeypatch.setattr(
        OnnxRuntimeEngine,
        "inference_session",
        lambda self, model, graph, threads: (loads.append(graph), load(self, model, graph, threads))[1],
    )
    session = burnish.Session(small.with_optimizer(optimizer), engine="onnxruntime", threads=1)
    losses = [session.step(BATCH)["loss"] for _ in range(12)]
    assert loads == ["step"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@every_optimizer()
def test_a_loaded_program_takes_another_optimizer_too(
    small: Program, optimizer: optim.Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("differentiated again")

    small.save(tmp_path / "program")
    derived = small.with_optimizer(optimizer)
    derived.save(tmp_path / "derived")
    monkeypatch.setattr("burnish.autodiff.differentiate", refuse)
    again = Program.load(tmp_path / "program").with_optimizer(optimizer)
    assert graph_hashes(again) == graph_hashes(derived)
    assert again.signature == derived.signature
    reloaded = Program.load(tmp_path / "derived")
    assert graph_hashes(reloaded) == graph_hashes(derived)
    assert reloaded.options["optimizer"] == optimizer.options()
    assert graph_hashes(reloaded.with_optimizer(reloaded.options["optimizer"])) == graph_hashes(derived)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_stays_around_the_other_optimizer(precision: str) -> None:
    model = residual_network(width=4, blocks=(1,), input_shape=(1, 8, 8))
    whole = burnish.compile(model, optimizer=OPTIMIZERS[-1], precision=precision, norm="train")
    derived = burnish.compile(model, precision=precision, norm="train").with_optimizer(OPTIMIZERS[-1])
    assert graph_hashes(derived) == graph_hashes(whole)
    assert ("opt/loss_scale" in derived.initial_state()) == (precision == "float16")


@pytest.mark.slow
def test_a_program_in_one_onnx_file_goes_on_and_takes_another_optimizer(program: Program, tmp_path: Path) -> None:
    wrapped = program.with_optimizer(OPTIMIZERS[-1])
    model = wrapped.to_onnx()
    (tmp_path / "whole.onnx").write_bytes(model.SerializeToString())
    loaded = Program.load(tmp_path / "whole.onnx")
    sessions = [burnish.Session(some, threads=1) for some in (wrapped, loaded)]
    for _ in range(3):
        first, second = (session.step(BATCH) for session in sessions)
        assert second == pytest.approx(first, rel=1e-5)
    average = [session.evaluate(BATCH, parameters="average")["loss"] for session in sessions]
    assert average[1] == pytest.approx(average[0], rel=1e-5)
    other = loaded.with_optimizer("adam")
    burnish.Session(other, state=other.carry_state(sessions[1].state()).state, threads=1).step(BATCH)


@pytest.mark.slow
def test_what_is_frozen_stays_and_its_gradient_is_not_computed(program: Program) -> None:
    derived = program.with_optimizer(FROZEN)
    trained = {name.removeprefix("next:param/") for name in names_of(derived, "step", Role.PARAMETER)}
    all_names = {name.removeprefix("grad:") for name in names_of(program, "grad", Role.GRADIENT)}
    frozen = {name for name in all_names if name.startswith(("stage1", "stem"))}
    assert frozen
    assert trained == all_names - frozen
    assert names_of(derived, "grad", Role.GRADIENT) == {f"grad:{name}" for name in all_names}
    assert {e.name for e in derived.signature["apply"].inputs_of(Role.GRADIENT)} == {f"grad:{name}" for name in trained}
    kernels = [[node.op_type for node in some.step.graph].count("ConvTranspose") for some in (program, derived)]
    assert kernels[1] < kernels[0]
    assert len(list(derived.step.graph)) < len(list(program.with_optimizer(FROZEN.optimizer).step.graph)) - 5 * len(frozen)
    session = burnish.Session(derived)
    before = session.state()
    session.step(BATCH)
    after = session.state()
    for name in all_names:
        assert np.array_equal(after[f"param/{name}"], before[f"param/{name}"]) == (name in frozen), name
    assert not any(name.startswith("opt/") and name.endswith(tuple(frozen)) for name in after)


@pytest.mark.slow
def test_freezing_and_unfreezing_goes_on_from_the_same_state(program: Program) -> None:
    whole = program.with_optimizer(FROZEN.optimizer)
    session = burnish.Session(whole)
    for _ in range(2):
        session.step(BATCH)
    state = session.state()
    partly = whole.with_optimizer(FROZEN)
    carried = partly.carry_state(state)
    assert carried.fresh == {}
    assert set(carried.dropped) == {name for name in state if name.startswith(("opt/momentum/stage1", "opt/momentum/stem"))}
    for name, array in carried.state.items():
        np.testing.assert_array_equal(array, state[name])
        assert array is not state[name]
    session = burnish.Session(partly, state=carried.state)
    session.step(BATCH)
    back = whole.carry_state(session.state())
    assert set(back.fresh) == set(carried.dropped)
    assert set(back.fresh.values()) == {"the other state has none"}
    assert back.dropped == ()
    for name in back.fresh:
        assert not back.state[name].any()
    assert int(back.state["step"]) == 3
    burnish.Session(whole, state=back.state).step(BATCH)


def test_what_cannot_be_carried_is_named(program: Program) -> None:
    state = program.initial_state(3)
    name = next(name for name in state if name.startswith("param/") and state[name].ndim == 4)
    state[name] = state[name][..., :1]
    other = next(name for name in state if name.startswith("param/") and state[name].ndim == 1)
    state[other] = state[other].astype(np.float64)
    carried = program.with_optimizer("adam").carry_state(state)
    assert carried.fresh[name].startswith(f"the other has shape {list(state[name].shape)}, here it is [")
    assert carried.fresh[other] == "the other has dtype float64, here it is float32"
    assert carried.fresh["step"].startswith("the optimizer's state does ('opt/first_moment/")
    assert carried.notes()
    np.testing.assert_array_equal(carried.state["rng/key"], state["rng/key"])


@pytest.mark.slow
def test_updates_go_on_where_they_were_with_accumulation_on_one_side(program: Program) -> None:
    plain, summed = program.with_optimizer("adam"), program.with_optimizer(optim.accumulate(optim.adam(), every=2))
    session = burnish.Session(plain)
    for _ in range(3):
        session.step(BATCH)
    there = summed.carry_state(session.state())
    assert (int(there.state["step"]), int(there.state["opt/update_count"])) == (3, 3)
    session = burnish.Session(summed, state=there.state)
    for _ in range(4):
        session.step(BATCH)
    back = plain.carry_state(session.state())
    assert int(back.state["step"]) == 5
    assert back.fresh == {}


@pytest.mark.slow
def test_what_goes_around_an_optimizer_starts_from_the_parameters_carried_over(program: Program) -> None:
    session = burnish.Session(program)
    for _ in range(3):
        session.step(BATCH)
    wrapped = program.with_optimizer(optim.ema(optim.sgd()))
    carried = wrapped.carry_state(session.state())
    assert int(carried.state["step"]) == 3
    assert all(name.startswith(("opt/average/", "opt/average_count")) for name in carried.fresh)
    for name, other in averages(wrapped.signature, "average").items():
        np.testing.assert_array_equal(carried.state[other], session.state()[name])


@pytest.mark.slow
def test_the_average_is_evaluated_predicted_and_exported(program: Program, tmp_path: Path) -> None:
    for engine in ("onnxruntime", "reference"):
        session = burnish.Session(program.with_optimizer(optim.ema(FROZEN, 0.75)), engine=engine)
        for _ in range(3):
            session.step(BATCH)
        state = session.state()
        instead = averages(session.program.signature, "average")
        assert instead
        assert not any(name.startswith("param/stem") for name in instead)
        replaced = state | {name: state[other] for name, other in instead.items()}
        plain = burnish.Session(session.program, engine=engine, state=replaced)
        assert session.evaluate(BATCH, parameters="average") == plain.evaluate(BATCH)
        assert session.evaluate(BATCH, parameters="average") != session.evaluate(BATCH)
        assert session.evaluate_data([BATCH, BATCH], parameters="average") == plain.evaluate_data([BATCH, BATCH])
        x = {"x": BATCH["x"]}
        np.testing.assert_array_equal(session.predict(x, parameters="average")["logits"], plain.predict(x)["logits"])
        session.export(tmp_path / "average.onnx", parameters="average")
        plain.export(tmp_path / "plain.onnx")
        assert (tmp_path / "average.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
        session.step(BATCH)
        assert not np.array_equal(session.predict(x, parameters="average")["logits"], plain.predict(x)["logits"])


def test_asking_for_an_average_that_is_not_kept(program: Program, tmp_path: Path) -> None:
    session = burnish.Session(program)
    for ask in (
        lambda: session.evaluate(BATCH, parameters="average"),
        lambda: session.predict({"x": BATCH["x"]}, parameters="average"),
        lambda: session.export(tmp_path / "x.onnx", parameters="average"),
    ):
        with pytest.raises(ConfigurationError, match=r"parameters='average': .* keeps no average .* burnish.optim.ema"):
            ask()
    with pytest.raises(ConfigurationError, match="parameters must be None, for those of the state, or 'average', not 'ema'"):
        session.evaluate(BATCH, parameters="ema")


@pytest.mark.slow
def test_accumulated_micro_batches_are_one_large_batch() -> None:
    def rows(start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: array[start:stop] for name, array in BATCH.items()}

    model = residual_network(width=4, blocks=(1,), input_shape=(1, 8, 8))
    large = burnish.compile(model, norm="frozen", optimizer=optim.adamw(lr=0.125))
    small = large.with_optimizer(optim.accumulate(optim.adamw(lr=0.125), every=4))
    one, four = burnish.Session(large), burnish.Session(small)
    for _ in range(5):
        one.step(BATCH)
        for start in range(0, 8, 2):
            four.step(rows(start, start + 2))
    state = four.state()
    for name, array in one.state().items():
        if name.startswith("param/"):
            np.testing.assert_allclose(state[name], array, rtol=2e-4, atol=2e-5, err_msg=name)
    assert int(state["opt/update_count"]) == 5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optim.groups(optim.sgd(), {"*": "frozen"}), "nothing would train: every parameter with a gradient, such as '.*', is in"),
        (optim.groups(optim.sgd(), {"stm*": "frozen"}), r"groups: the pattern 'stm\*' matches no parameter that trains; did you"),
        ("sdg", "there is no optimizer 'sdg'"),
        ({"name": "groups"}, "optimizer 'groups' needs the option 'optimizer': give it"),
    ],
)
def test_an_optimizer_that_does_not_fit(program: Program, optimizer: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        program.with_optimizer(optimizer)


def test_a_program_is_described_in_one_line() -> None:
    program = burnish.compile(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)))
    assert re.fullmatch(r"Program\(init: \d+ nodes, step: not lowered yet, grad: .*, predict: \d+ nodes\)", repr(program))


@pytest.mark.slow
def test_layers_that_only_the_other_optimizer_freezes_are_named() -> None:
    automatic = burnish.compile(residual_network(width=4, blocks=(1, 1), input_shape=(1, 8, 8)))
    message = r"freezes the batch normalization '(stem|stage1)[^']*' and \d more, whose statistics still move.*norm='frozen'"
    with pytest.warns(ObjectiveWarning, match=message):
        automatic.with_optimizer(FROZEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        automatic.with_optimizer("adam")
        burnish.compile(residual_network(width=4, blocks=(1,), input_shape=(1, 8, 8)), norm="train").with_optimizer(FROZEN)
