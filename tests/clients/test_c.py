"""The C client beside Python's session, on one ONNX Runtime library: the same bits, the same files, the same errors."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import c_library
import numpy as np
import onnx
import onnxruntime
import programs
import pytest
from onnx import TensorProto
from programs import Batch

import burnish
from burnish.errors import CheckpointError
from oracles.same_state import assert_same_state
from oracles.small_networks import perceptron
from oracles.standard_operators import STANDARD

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> c_library.Client:
    return c_library.Client(c_library.build(tmp_path_factory.mktemp("c"), "libburnish.so"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """Where a program is saved."""
    root = tmp_path_factory.mktemp("programs")

    def saved(name: str) -> Path:
        if not (root / name).exists():
            programs.program(name)[0].save(root / name)
        return root / name

    return saved


@pytest.fixture
def session(client, folder) -> Iterator[c_library.Session]:
    """A session of the program with dropout, a schedule and an average."""
    opened = client.open(folder("dropout"))
    yield opened
    opened.close()


def python_session(name: str) -> burnish.Session:
    return burnish.Session(programs.program(name)[0], engine=STANDARD, threads=1)


QUICK = ("dropout", "mobile")
SLOW = tuple(pytest.param(name, marks=pytest.mark.slow) for name in programs.PROGRAMS if name not in QUICK)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
@pytest.mark.quick_cases(1)
def test_steps_and_checkpoints_are_pythons_bit_for_bit(client, folder, tmp_path, name: str) -> None:
    batch = programs.program(name)[1]
    steps = 100 if name == "dropout" else 5
    theirs, ours = python_session(name), client.open(folder(name))
    assert_same_state(ours.state(), theirs.state())
    for _ in range(steps):
        assert {key: value.item() for key, value in ours.step(batch).items()} == theirs.step(batch)
    assert_same_state(ours.state(), theirs.state())
    assert ours.step_count == steps
    ours.save(tmp_path / "c.safetensors", '{"batch": 3}')
    theirs.save_checkpoint(tmp_path / "python.safetensors", extra={"batch": 3})
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    resumed, other = client.open(folder(name), seed=5), python_session(name)
    assert json.loads(resumed.restore(tmp_path / "python.safetensors")) == {"batch": 3}
    assert other.restore(tmp_path / "c.safetensors") == {"batch": 3}
    expected = ours.step(batch)
    assert resumed.step(batch) == expected
    assert other.step(batch) == {key: value.item() for key, value in expected.items()}
    assert_same_state(resumed.state(), other.state())
    for opened in (ours, resumed):
        opened.close()


@pytest.mark.parametrize("name", ["mobile", *SLOW])
def test_an_export_is_pythons(client, folder, tmp_path, name: str) -> None:
    batch = programs.program(name)[1]
    theirs, ours = python_session(name), client.open(folder(name))
    for _ in range(2):
        theirs.step(batch)
        ours.step(batch)
    theirs.export(tmp_path / "python.onnx", fold_norm=False)
    ours.export(tmp_path / "c.onnx")
    inputs = {entry.name: batch[entry.name] for entry in theirs.program.signature["predict"].inputs if entry.name in batch}
    models = [onnxruntime.InferenceSession(tmp_path / file) for file in ("python.onnx", "c.onnx")]
    python, c = (model.run(None, inputs) for model in models)
    for one, other in zip(python, c, strict=True):
        assert one.tobytes() == other.tobytes()
    weights = [
        {item.name for item in burnish.load(tmp_path / file).graph.initializers.values()} for file in ("python.onnx", "c.onnx")
    ]
    assert {entry.removeprefix("param/") for entry in ours.state() if entry.startswith("param/")} <= weights[1] == weights[0]
    predicted = ours.predict(batch)
    for key, value in theirs.predict(batch).items():
        assert predicted[key].tobytes() == value.tobytes()
    ours.close()


@pytest.mark.slow
def test_a_large_export_keeps_its_weights_beside_it(folder, tmp_path) -> None:
    flags = ("-DBURNISH_ONE_FILE_LIMIT=100",)
    opened = c_library.Client(c_library.build(tmp_path, "libsmall.so", flags=flags)).open(folder("mobile"))
    batch = programs.program("mobile")[1]
    opened.export(tmp_path / "first.onnx")
    opened.step(batch)
    opened.export(tmp_path / "tuned.onnx")
    (data,) = tmp_path.glob("tuned.onnx-*.data")
    opened.step(batch)
    opened.export(tmp_path / "tuned.onnx")
    (later,) = tmp_path.glob("tuned.onnx-*.data")
    assert data != later
    outputs = onnxruntime.InferenceSession(tmp_path / "tuned.onnx").run(None, {"x": batch["x"]})
    np.testing.assert_allclose(outputs[0], opened.predict(batch)["logits"], rtol=1e-4, atol=1e-5)
    opened.close()


def test_evaluation_and_the_average_are_pythons(client, folder, tmp_path, session) -> None:
    batch = programs.program("dropout")[1]
    theirs = python_session("dropout")
    for _ in range(3):
        theirs.step(batch)
        session.step(batch)
    for flags, parameters in ((0, None), (c_library.AVERAGE, "average")):
        outputs = session.evaluate(batch, flags)
        totals = {**theirs.evaluate(batch, parameters), **theirs.evaluate_totals(batch, parameters)}
        assert outputs == totals
    assert session.evaluate(batch)["loss"] != session.evaluate(batch, c_library.AVERAGE)["loss"]
    session.export(tmp_path / "average.onnx", c_library.AVERAGE)
    theirs.export(tmp_path / "python.onnx", parameters="average")
    exported = [burnish.load(tmp_path / file).graph.initializers for file in ("average.onnx", "python.onnx")]
    for name, value in exported[1].items():
        assert exported[0][name].const_value.numpy().tobytes() == value.const_value.numpy().tobytes()
    plain = client.open(folder("mobile"))
    with pytest.raises(c_library.ClientError, match=r"ConfigurationError: BURNISH_AVERAGE: the .* keeps no average"):
        plain.evaluate(programs.program("mobile")[1], c_library.AVERAGE)
    plain.close()


def test_a_state_that_is_written_is_read_back_and_trained_from(client, folder) -> None:
    session, other = client.open(folder("mobile")), client.open(folder("mobile"))
    batch = programs.program("mobile")[1]
    session.step(batch)
    for name, array in session.state().items():
        other.write_state(name, array)
    assert other.step(batch) == session.step(batch)
    session.set("lr", 0.0)
    before = session.state_entry("param/head.weight")
    batch = {**batch, "x": batch["x"] + 1}
    session.step(batch)
    theirs = python_session("mobile")
    theirs.load_state(other.state())
    theirs.step(batch, lr=0.0)
    assert session.state_entry("param/head.weight").tobytes() == theirs.state()["param/head.weight"].tobytes()
    assert before.shape == theirs.state()["param/head.weight"].shape
    for opened in (session, other):
        opened.close()


X = np.zeros((4, 8), np.float32)


WRONG_BATCHES: list[tuple[Callable[[Batch], Batch], str]] = [
    (lambda b: {"x": b["x"]}, "InputError: The batch lacks the input 'labels': add it"),
    (lambda b: {**b, "other": X}, "InputError: The batch has an unexpected input 'other': leave it out"),
    (lambda b: {**b, "x": b["x"].astype(np.float64)}, "InputError: The input 'x' has dtype float64, expected float32: convert"),
    (lambda b: {**b, "x": b["x"][0]}, "InputError: The input 'x' has 1 dimensions, and the program takes 2: expected shape"),
    (lambda b: {**b, "x": b["x"][:, 1:]}, "InputError: The input 'x' has extent [0-9]+ along axis 1, and the program takes"),
    (lambda b: {name: array[:0] for name, array in b.items()}, "InputError: The input 'x' is empty along axis 0 .*: leave empty"),
    (lambda b: {**b, "labels": b["labels"][1:]}, "InputError: .* disagree about 'batch': .* Give both for the same samples"),
    (
        lambda b: {**b, "labels": b["labels"] + 90},
        "InputError: .* 'labels' holds 9[0-9] .* valid are 0..4. Number the classes",
    ),
    (lambda b: {**b, "x": b["x"] * np.float32(np.nan)}, "NonFiniteLossError: The loss at step 0 is -?nan. The state is kept"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_BATCHES)
def test_a_wrong_batch_is_a_named_error_and_changes_nothing(session, change, message: str) -> None:
    before = session.state()
    with pytest.raises(c_library.ClientError, match=message):
        session.step(change(programs.program("dropout")[1]))
    assert_same_state(session.state(), before)


def test_a_label_between_two_signs_is_refused(client, tmp_path) -> None:
    """With 0 for no, hinge would have no gradient, and nothing would be learned of such samples."""
    burnish.compile(perceptron(outputs=1), loss="hinge", optimizer="sgd").save(tmp_path / "signs")
    session = client.open(tmp_path / "signs")
    batch = {"x": np.ones((4, 12), np.float32), "targets": np.array([[1], [-1], [1], [-1]], np.float32)}
    session.step(batch)
    message = r"InputError: .* 'targets' holds 0 at element 1, .* valid are -1 and 1. Write -1 for no, .* and 1 for yes"
    with pytest.raises(c_library.ClientError, match=message):
        session.step({**batch, "targets": np.maximum(batch["targets"], 0)})
    session.close()


def test_wrong_names_and_values_are_named_errors(client, folder, session, tmp_path) -> None:
    plain = client.open(folder("mobile"))
    batch = programs.program("mobile")[1]
    plain.write_state("param/head.bias", np.full(5, np.inf, np.float32))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: session.set("lr", 0.1), "ConfigurationError: This program computes 'lr' from the step, by the schedule"),
        (lambda: plain.set("rate", 0.1), "ConfigurationError: There is no hyperparameter 'rate'"),
        (lambda: plain.set("lr", float("nan")), "ConfigurationError: The hyperparameter 'lr' is nan: give one finite number"),
        (lambda: plain.state_entry("param/none"), "ConfigurationError: There is no state entry 'param/none'"),
        (lambda: plain.write_state("step", X), "ConfigurationError: The state entry 'step' has another type or shape"),
        (lambda: plain.save(tmp_path / "a.safetensors", "[1"), "ConfigurationError: extra of the checkpoint is no JSON object"),
        (
            lambda: plain.save(tmp_path / "a.safetensors"),
            "CheckpointError: No checkpoint was written .* holds NaN or",
        ),
        (lambda: plain.step(batch), "NonFiniteLossError: The loss at step 0 is"),
        (lambda: session.save(tmp_path / "none" / "a.safetensors"), "CheckpointError: .* could not be written: No such file"),
        (lambda: client.open(tmp_path / "none"), "CheckpointError: .* is no folder: give the folder that program.save"),
        (lambda: client.open(folder("mobile"), threads=-1), "ConfigurationError: threads is -1 .* give threads of 0 or more"),
    ]
    for attempt, message in cases:
        with pytest.raises(c_library.ClientError, match=message):
            attempt()
    assert not list(tmp_path.iterdir())
    plain.close()


def test_a_schedule_has_an_end(session) -> None:
    session.write_state("step", np.array(programs.STEPS))
    with pytest.raises(
        c_library.ClientError,
        match=f"ConfigurationError: .* schedule .* ends after {programs.STEPS} steps",
    ):
        session.step(programs.program("dropout")[1])


def test_a_wrong_checkpoint_is_a_named_error_and_changes_nothing(client, folder, session, tmp_path) -> None:
    batch = programs.program("dropout")[1]
    session.save(tmp_path / "good.safetensors")
    session.step(batch)
    before = session.state()
    content = (tmp_path / "good.safetensors").read_bytes()
    other = client.open(folder("mobile"))
    other.save(tmp_path / "other.safetensors")
    other.close()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    cases = {
        "short": (content[:-8], "its data|ends too early|another type, shape or size"),
        "stub": (content[:5], "no whole safetensors file"),
        "flipped": (bytes(flipped), "its arrays are not those that were written"),
        "huge": (b"\xff" * 8 + content[8:], "no whole safetensors file"),
        "other": ((tmp_path / "other.safetensors").read_bytes(), "was made with another program"),
        "foreign": (content.replace(b"burnish checkpoint", b"another checkpoint"), "not a burnish checkpoint"),
        "newer": (content.replace(b'"version":"1"', b'"version":"2"'), "of checkpoint format 2, and this client reads format 1"),
    }
    for name, (changed, message) in cases.items():
        (tmp_path / f"{name}.safetensors").write_bytes(changed)
        with pytest.raises(c_library.ClientError, match=f"CheckpointError: .*({message})"):
            session.restore(tmp_path / f"{name}.safetensors")
        assert_same_state(session.state(), before)
    with pytest.raises(c_library.ClientError, match=r"CheckpointError: .*none\.safetensors' cannot be opened"):
        session.restore(tmp_path / "none.safetensors")


def npy_arguments(tmp_path: Path, name: str, samples: int = 3) -> list[str]:
    """``--data`` for some batches of a program's data."""
    arguments = ["--batch", str(len(programs.program(name)[1]["labels"]))]
    for key, array in programs.program(name)[1].items():
        path = tmp_path / f"{key}.npy"
        rolled = [np.roll(array, shift, axis=0) for shift in range(samples)]
        np.save(path, np.concatenate(rolled))
        arguments += ["--data", f"{key}={path}"]
    return arguments


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Path:
    return c_library.build(tmp_path_factory.mktemp("main"), "train", c_library.SOURCES / "main.c")


def test_the_example_trains_as_python_does(trainer, folder, tmp_path) -> None:
    data = npy_arguments(tmp_path, "mobile")
    command = [
        str(trainer),
        str(folder("mobile")),
        *data,
        "--steps",
        "5",
        "--threads",
        "1",
        "--export",
        str(tmp_path / "tuned.onnx"),
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    theirs = python_session("mobile")
    batch = programs.program("mobile")[1]
    expected = [theirs.step({key: np.roll(array, step % 3, axis=0) for key, array in batch.items()})["loss"] for step in range(5)]
    assert [np.float32(line.split()[-1]) for line in lines] == [np.float32(loss) for loss in expected]
    burnish.load(tmp_path / "tuned.onnx")


def kill_and_resume(trainer: Path, program: Path, data: list[str], kills: int, tmp_path: Path) -> None:
    """Kill a run at random moments; what it ends in is what one that was left alone ends in."""
    checkpoint, alone = tmp_path / "killed.safetensors", tmp_path / "alone.safetensors"
    steps = str(20 + 12 * kills)
    command = [str(trainer), str(program), *data, "--steps", steps, "--every", "1", "--threads", "1", "--checkpoint"]
    began = time.monotonic()
    subprocess.run([*command, str(alone)], check=True, stdout=subprocess.DEVNULL)
    lasted = time.monotonic() - began
    generator, killed = random.Random(4), 0
    for _ in range(kills):
        run = subprocess.Popen([*command, str(checkpoint)], stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(generator.random() * lasted / kills)
        run.send_signal(signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
        run.stdout.close()
    subprocess.run([*command, str(checkpoint)], check=True, stdout=subprocess.DEVNULL)
    assert killed > kills // 2
    assert checkpoint.read_bytes() == alone.read_bytes()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_killed_run_goes_on_bit_for_bit(trainer, folder, tmp_path) -> None:
    kill_and_resume(trainer, folder("mobile"), npy_arguments(tmp_path, "mobile"), 5, tmp_path)


@pytest.mark.campaign
def test_a_run_killed_at_fifty_moments_goes_on_bit_for_bit(trainer, folder, tmp_path) -> None:
    kill_and_resume(trainer, folder("mobile"), npy_arguments(tmp_path, "mobile"), 50, tmp_path)


def hostile_folders(good: Path, root: Path) -> list[Path]:
    """Copies of a program's folder, each broken in another way; hashes of what is read are right where that lets more be read."""
    manifest = (good / "program.json").read_text()
    texts = {
        "empty": "",
        "truncated": manifest[: len(manifest) // 2],
        "deep": "[" * 100_000,
        "deep_object": '{"a":' * 40 + "1" + "}" * 40,
        "many": "[" + "1," * 3_000_000 + "1]",
        "nan": manifest.replace('"version": 1', '"version": NaN'),
        "infinite": manifest.replace('"version": 1', '"version": 1e999'),
        "newer": manifest.replace('"version": 1', '"version": 3'),
        "anonymous": manifest.replace('"identity"', '"nobody"'),
        "null_name": manifest.replace('"name": "x"', '"name": null'),
        "zero_byte": manifest.replace('"name": "x"', '"name": "x\\u0000y"'),
        "lone_surrogate": manifest.replace('"name": "x"', '"name": "\\ud800"'),
        "bad_escape": manifest.replace('"name": "x"', '"name": "\\'),
        "no_rank": manifest.replace('"shape": [', '"shapes": ['),
        "negative": manifest.replace('"shape": [\n', '"shape": [\n -5,\n'),
        "huge_extent": manifest.replace('     5\n', '     9223372036854775807\n'),
        "many_axes": manifest.replace('"shape": [\n', '"shape": [\n' + " 1,\n" * 9),
        "other_dtype": manifest.replace('"dtype": "FLOAT"', '"dtype": "STRING"'),
        "unknown_role": manifest.replace('"role": "label"', '"role": "surprise"'),
        "wrong_updates": manifest.replace('"updates": "step"', '"updates": "rng/key"'),
        "no_files": manifest.replace('"files": {', '"files": [], "rest": {'),
        "huge_file": manifest.replace('"bytes": ', '"bytes": 99999999999999'),
        "other_hash": manifest.replace('"sha256": "', '"sha256": "00'),
    }  # fmt: skip
    folders = []
    for name, text in texts.items():
        assert text != manifest, name
        (root / name).mkdir(parents=True)
        for file in good.iterdir():
            (root / name / file.name).symlink_to(file)
        (root / name / "program.json").unlink()
        (root / name / "program.json").write_text(text)
        folders.append(root / name)
    state = (good / "state.safetensors").read_bytes()
    for name, changed in {
        "state_short": state[:-100],
        "state_stub": state[:4],
        "state_header": b"\xff" * 7 + b"\x7f" + state[8:],
        "state_offsets": state.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        "state_elsewhere": state.replace(b'"data_offsets":[0,', b'"data_offsets":[-1,'),
    }.items():
        assert changed != state, name
        folders.append(with_file(good, root / name, "state.safetensors", changed))
    step = (good / "step.onnx").read_bytes()
    init = (good / "init.onnx").read_bytes()
    folders += [with_file(good, root / "init_short", "init.onnx", init[: len(init) // 2])]
    folders += [with_file(good, root / "init_is_step", "init.onnx", step)]
    predict = (good / "predict.onnx").read_bytes()
    folders += [with_file(good, root / "predict_short", "predict.onnx", predict[:-20])]
    folders += [with_file(good, root / "predict_nested", "predict.onnx", nested_graphs(30))]
    return folders


def nested_graphs(depth: int) -> bytes:
    """A model whose graph has a node with a graph as an attribute, which has a node, and so on."""
    graph = onnx.GraphProto()
    for _ in range(depth):
        outer = onnx.GraphProto()
        attribute = outer.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        attribute.g.CopyFrom(graph)
        graph = outer
    return onnx.ModelProto(graph=graph).SerializeToString()


def with_file(good: Path, folder: Path, name: str, content: bytes) -> Path:
    """A copy with another file in it, whose size and hash the manifest states rightly."""
    folder.mkdir(parents=True)
    for file in good.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    manifest = json.loads((good / "program.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "program.json").unlink()
    (folder / "program.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.slow
def test_hostile_folders_and_files_are_statuses_under_sanitizers(folder, tmp_path, session) -> None:
    flags = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    opener = c_library.build(tmp_path, "open_all", Path(__file__).with_name("open_all.c"), flags=flags)
    good = folder("dropout")
    folders = hostile_folders(good, tmp_path / "hostile")
    session.save(tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    generator = random.Random(2)
    length = int.from_bytes(content[:8], "little")
    for number in range(60):
        changed = bytearray(content[: generator.randrange(len(content))] if number % 3 == 0 else content)
        for _ in range(generator.randrange(1, 4)):
            changed[generator.randrange(min(len(changed), 8 + length))] = generator.randrange(256)
        (tmp_path / f"{number}.safetensors").write_bytes(changed)
    files = [tmp_path / f"{number}.safetensors" for number in range(60)]
    command = [str(opener), str(good), *map(str, folders), str(tmp_path / "good.safetensors"), *map(str, files)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    statuses = run.stdout.splitlines()
    names = ["good", *(path.name for path in folders), "good file", *(path.name for path in files)]
    assert len(statuses) == len(names)
    outcome = dict(zip(names, statuses, strict=True))
    assert outcome.pop("good").strip() == outcome.pop("good file").strip() == "0"
    accepted = {name for name, status in outcome.items() if status.startswith("0")}
    assert {name for name in accepted if not name.endswith(".safetensors")} == set()
    expected = session.state()
    for name in accepted:  # what is left of the header is enough, and the arrays are those that were written
        session.restore(tmp_path / name)
        assert_same_state(session.state(), expected)
    for name, status in outcome.items():
        assert name in accepted or len(status) > 20, name


def test_a_file_outside_of_the_folder_is_not_read(client, folder, tmp_path) -> None:
    """Constants of a graph that name a file outside: ONNX Runtime does not open it, and the client reports it."""
    good = folder("dropout")
    model = onnx.load(good / "predict.onnx")
    (tmp_path / "secret.bin").write_bytes(b"\0" * 4096)
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret.bin")
    model.graph.initializer.append(tensor)
    model.graph.node.append(onnx.helper.make_node("Identity", ["secret"], ["unused"]))
    opened = client.open(with_file(good, tmp_path / "program", "predict.onnx", model.SerializeToString()))
    batch = programs.program("dropout")[1]
    with pytest.raises(c_library.ClientError, match=r"EngineError: .*secret"):
        opened.predict(batch)
    opened.close()


@pytest.mark.slow
def test_the_cpp_wrapper_trains_and_throws(folder, tmp_path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: install one (on Debian the package g++)")
    wrapped = c_library.build(tmp_path, "wrapped", Path(__file__).with_name("wrapped.cpp"))
    run = subprocess.run([str(wrapped), str(folder("residual")), str(tmp_path)], capture_output=True, text=True, check=True)
    theirs = python_session("residual")
    batch = {"x": np.full((6, 1, 8, 8), 0.5, np.float32), "labels": np.arange(6)}
    expected = [theirs.step(batch)["loss"] for _ in range(3)]
    lines = run.stdout.splitlines()
    assert [np.float32(line) for line in lines[:3]] == [np.float32(loss) for loss in expected]
    assert lines[3].startswith("InputError: The batch lacks the input 'labels'")
    theirs.restore(tmp_path / "cpp.safetensors")
    with pytest.raises(CheckpointError):
        theirs.restore(tmp_path / "none.safetensors")


@pytest.mark.slow
def test_the_program_in_the_documentation_runs(folder, tmp_path) -> None:
    page = (c_library.SOURCES.parents[1] / "docs" / "c-client.md").read_text(encoding="utf-8")
    (tmp_path / "first.c").write_text(page.partition("```c\n")[2].partition("```")[0], encoding="utf-8")
    (tmp_path / "program").symlink_to(folder("residual"))
    first = c_library.build(tmp_path, "first", tmp_path / "first.c")
    printed = subprocess.run([str(first)], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    batch = {"x": np.zeros((16, 1, 8, 8), np.float32), "labels": np.zeros(16, np.int64)}
    assert printed == f"loss {python_session('residual').step(batch)['loss']:g}\n"
