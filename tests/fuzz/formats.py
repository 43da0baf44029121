"""Files that are no models, and options: what is broken of each kind, how, and what burnish is to make of it.

A file of burnish's own has a digest: a changed one that is read all the same is a defect, unless the digest was made anew for the
change. Other files have none, and what reads them has to read or refuse them within the limits, and alike each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
import struct
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pyarrow
import pyarrow.parquet
from typer.testing import CliRunner

import burnish
from burnish import losses, metrics, optim
from burnish.adapters.lora_files import read_lora_file
from burnish.adapters.peft_format import read_peft
from burnish.cli.application import app
from burnish.cli.repetition import OF_ONE_RUN
from burnish.data import DataSpec, Text, open_dataset
from burnish.data.image.augmentation import read_augmentation
from burnish.errors import ConfigurationError
from burnish.files.digest import BLANK, DIGEST, stamped
from burnish.norms import policies
from burnish.optim import schedules
from burnish.settings import is_number_text, memory_size
from burnish.training import read_checkpoint
from burnish.training.run_folder import RunFolder
from fuzz.byte_mutations import mutate_bytes
from fuzz.mutants import FILES_OF, Mutant
from fuzz.mutations import mutate
from fuzz.text_mutations import mutate_json, mutate_text
from oracles.small_tokenizers import word_tokenizer

CORPUS = Path(__file__).parent / "corpus"
Files = dict[str, bytes]
Structured = Callable[[Random, Files], str]
"""Changes files in place, and says what it did."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        files: of the seed, by name.
        read: reads them from a folder.
        structured: changes the structure of the files; those with a digest get theirs anew.
        is_sealed: whether the files have one.
    """

    files: Files
    read: Callable[[Path], Any]
    structured: Structured
    is_sealed: bool = False


@cache
def formats() -> Mapping[str, Format]:
    """All kinds, by name."""
    program = burnish.compile(_perceptron(2), optimizer=optim.sgd(lr=0.1, momentum=0.9))
    spec, named = DataSpec.by(program), DataSpec.by(burnish.compile(_perceptron(3)))
    x, y = np.arange(8, dtype=np.float64).reshape(4, 2), np.array([0, 1, 1, 0])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program.save(folder / "program")
        program.save(folder / "one.onnx")
        session = burnish.Session(program, engine="reference")
        session.step({"x": x.astype(np.float32), "labels": y})
        session.save_checkpoint(folder / "checkpoint.safetensors", {"course": {"seed": 0}})
        lora = burnish.surgery.lora(_perceptron(2), rank=1)
        adapted = burnish.Session(burnish.compile(lora), engine="reference")
        adapted.save_checkpoint(folder / "adapters.safetensors")
        adapted.export(folder / "peft", adapters="peft")
        tensors = {"lora_unet_a.lora_down.weight": (1, 2), "lora_unet_a.lora_up.weight": (3, 1), "lora_unet_a.alpha": ()}
        (folder / "lora.safetensors").write_bytes(_safetensors({name: np.ones(shape, "f4") for name, shape in tensors.items()}))
        np.savez(folder / "data.npz", x=x, y=y)
        table = pyarrow.table({"a": x[:, 0], "b": [1, 2, 3, 4], "kind": ["r", "b", "r", "b"], "label": y})
        pyarrow.parquet.write_table(table, folder / "table.parquet")
        word_tokenizer(6).save(str(folder / "tokenizer.json"))
        held = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        saved, peft = (
            {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())} for name in ("program", "peft")
        )
    arrays = {f"{name}.npy": _npy(array) for name, array in (("x", x), ("y", y))}
    texts = {
        name: (CORPUS / name).read_bytes() for name in ("table.csv", "decimals.csv", "texts.jsonl", "run.toml", "options.json")
    }
    reading = partial(_read_all, spec)
    return {
        "checkpoint": Format(_only(held, "checkpoint.safetensors"), _checkpoint, _header, True),
        "adapters' checkpoint": Format(_only(held, "adapters.safetensors"), _checkpoint, _header, True),
        "program folder": Format(saved, lambda folder: _of_program(burnish.Program.load(folder)), _manifest, True),
        "program in one file": Format(
            _only(held, "one.onnx"), lambda folder: _of_program(burnish.Program.load(folder / "one.onnx")), _protobuf, True
        ),
        "adapters of PEFT": Format(peft, lambda folder: read_peft(folder).modules, _json_or_header),
        "adapters in one file": Format(
            _only(held, "lora.safetensors"), lambda folder: read_lora_file(folder / "lora.safetensors"), _header
        ),
        "csv": Format(_only(texts, "table.csv"), partial(_read_all, named, "table.csv"), _text),
        "csv with decimal commas": Format(_only(texts, "decimals.csv"), partial(_read_all, spec, "decimals.csv"), _text),
        "npz": Format(_only(held, "data.npz"), partial(reading, "data.npz"), _npz),
        "npy": Format(arrays, partial(reading, "."), _npy_headers),
        "parquet": Format(_only(held, "table.parquet"), partial(_read_all, named, "table.parquet"), _parquet),
        "jsonl": Format({**_only(texts, "texts.jsonl"), **_only(held, "tokenizer.json")}, _texts, _json_lines),
        "tokenizer": Format({**_only(texts, "texts.jsonl"), **_only(held, "tokenizer.json")}, _texts, _json),
        "run.toml": Format(_only(texts, "run.toml"), _toml, _text),
        "options": Format(_only(texts, "options.json"), _options, _option_texts),
    }


def make_of_format(seed: int, number: int, only: str | None = None) -> Mutant:
    """Return the mutant of a case: of the formats in turn, or of one alone."""
    names = [only] if only is not None else list(formats())
    name = names[number % len(names)]
    random = Random(f"{seed}/{name}/{number}")
    files, done, is_sealed = dict(formats()[name].files), [], formats()[name].is_sealed
    if name == "options":
        files = {"options.json": json.dumps([random.choice(json.loads(files["options.json"]))]).encode()}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.6 or name == "options":
            done.append(formats()[name].structured(random, files))
            is_sealed = False
        elif random.random() < 0.05:
            gone = random.choice(list(files))
            files[gone] = b""
            done.append(f"{gone} is empty")
        else:
            target = random.choice(list(files))
            files[target], text = mutate_bytes(random, files[target], _bytes_of_another)
            done.append(f"{target}: {text}")
    is_sealed = is_sealed and files != formats()[name].files
    return Mutant(name, files, SEALED if is_sealed else FILES_OF, done, random)


SEALED = "sealed files"
"""The form of a mutant whose digest does not belong to it."""


def read_mutant(mutant: Mutant, folder: Path) -> Any:
    """Write the files of a mutant and read them."""
    for name, content in mutant.files.items():
        (folder / name).write_bytes(content)
    return formats()[mutant.seed].read(folder)


def _perceptron(features: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        perceptron (float[batch,{features}] x) => (float[batch,2] y)
        <float[{features},3] w = {{{", ".join(["0.5", "-0.25", "1"] * features)}}}, float[3,2] v = {{1, 0, 0, 1, 0.5, 0.5}}> {{
          h = MatMul (x, w)
          r = Relu (h)
          y = MatMul (r, v)
        }}"""
    )


def _bytes_of_another(random: Random) -> bytes:
    return random.choice(list(random.choice(list(formats().values())).files.values()))


def _only(files: Files, name: str) -> Files:
    return {name: files[name]}


def _of_program(program: burnish.Program) -> Any:
    return dict(program.initial_state()), program.signature


def _checkpoint(folder: Path) -> Any:
    (file,) = folder.iterdir()
    checkpoint = read_checkpoint(file)
    RunFolder(folder, {})  # what a run finds beside it
    return dict(checkpoint.state), checkpoint.extra


def _read_all(spec: DataSpec, name: str, folder: Path) -> Any:
    dataset = open_dataset(folder / name, spec)
    return dataset.batch(np.arange(min(len(dataset), 1000)))


def _texts(folder: Path) -> Any:
    text = Text(tokenizer=folder / "tokenizer.json", length=8, buckets=(8,))
    dataset = open_dataset(folder / "texts.jsonl", _text_spec(), text=text)
    return dataset.batch(np.arange(min(len(dataset), 1000)))


@cache
def _text_spec() -> DataSpec:
    from burnish.models import bert

    return DataSpec.by(burnish.compile(bert(16, 2, width=4, layers=1, heads=1, positions=8)))


def _toml(folder: Path) -> Any:
    """Train as the file says, on a model and data that are there; the run's own file has to say the same."""
    with contextlib.chdir(folder):
        Path("model.onnx").write_bytes(_perceptron(2).SerializeToString())
        np.savez("data.npz", x=np.arange(8, dtype=np.float32).reshape(4, 2), y=np.array([0, 1, 1, 0]))
        arguments = ["train", "--config", "run.toml", "--engine", "reference", "--output", "run", "--overwrite"]
        result = CliRunner().invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code in (1, 2):
            if Path("run/tuned.onnx").exists() or "rror" not in result.output:
                raise AssertionError(f"trained, or failed without an error: {result.output[-500:]}")
            raise ConfigurationError(result.output[-500:])
        given, done = (tomllib.loads(Path(name).read_text("utf-8"))["train"] for name in ("run.toml", "run/run.toml"))
    for key, value in given.items():
        if key not in OF_ONE_RUN and _as_texts(done.get(key)) != _as_texts(value):
            raise AssertionError(f"{key} = {value!r}, and the run has {done.get(key)!r}")
    return done


def _as_texts(value: Any) -> list[str]:
    """An option as the command line may give it: one value or several, numbers as the numbers that they are."""
    values = value if isinstance(value, list) else [value]
    return [str(float(one)) if isinstance(one, int | float) or is_number_text(str(one)) else str(one).strip() for one in values]


def _options(folder: Path) -> Any:
    made: list[Any] = []
    for kind, text in json.loads((folder / "options.json").read_bytes().decode("utf-8", "surrogateescape")):
        made.append(READERS[kind](text))
    return made


def _command(arguments: list[str]) -> Any:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        raise AssertionError(f"exit code {result.exit_code}")
    return result.exit_code


def _arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


READERS: Mapping[str, Callable[[str], Any]] = {
    "optimizer": optim.get,
    "loss": losses.get,
    "metric": metrics.get,
    "schedule": schedules.get,
    "norm": policies.get,
    "augment": read_augmentation,
    "memory": memory_size,
    "command": lambda text: _command([argument for argument in _arguments(text) if argument != "demo"]),
}


def _safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    header, content = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(content), len(content) + array.nbytes]}
        content += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _sealed_again(content: bytes) -> bytes:
    """A file with the digest that belongs to it; as it is where it has no such entry any more."""
    place = content.find(DIGEST.encode())
    found = content.find(b"sha256:", place) if place >= 0 else -1
    if found < 0:
        return content
    return stamped(content[:found] + BLANK.encode() + content[found + len(BLANK) :]) if len(content) >= found + 71 else content


def _json(random: Random, files: Files) -> str:
    name = next(name for name in files if name.endswith(".json"))
    files[name], done = mutate_json(random, files[name])
    return f"{name}: {done}"


def _json_lines(random: Random, files: Files) -> str:
    lines = files["texts.jsonl"].split(b"\n")
    place = random.randrange(len(lines))
    lines[place], done = mutate_json(random, lines[place])
    files["texts.jsonl"] = b"\n".join(lines)
    return f"line {place + 1}: {done}"


def _manifest(random: Random, files: Files) -> str:
    if random.random() < 0.3 and (graphs := [name for name in files if name.endswith(".onnx")]):
        name = random.choice(graphs)
        files[name], done = _mutated_model(random, files[name])
        _list_anew(files, name)
        return f"{name}: {done}"
    files["program.json"], done = mutate_json(random, files["program.json"])
    files["program.json"] = _sealed_again(files["program.json"])
    return f"program.json: {done}"


def _list_anew(files: Files, name: str) -> None:
    """Let the manifest of a program say what a file of it is now."""
    try:
        manifest = json.loads(files["program.json"])
        manifest["files"][name] = {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        files["program.json"] = _sealed_again(json.dumps(manifest).encode())
    except (ValueError, KeyError, TypeError):
        pass  # broken already


def _mutated_model(random: Random, content: bytes) -> tuple[bytes, str]:
    try:
        model = onnx.ModelProto.FromString(content)
        done = mutate(random, model)
        return model.SerializeToString(), done
    except Exception:  # the protobuf library's errors share no class
        return mutate_bytes(random, content, _bytes_of_another)


def _protobuf(random: Random, files: Files) -> str:
    (name,) = files
    content, done = _mutated_model(random, files[name])
    files[name] = _sealed_again(content)
    return done


def _header(random: Random, files: Files) -> str:
    name = next(name for name in files if name.endswith(".safetensors"))
    content = files[name]
    length = int.from_bytes(content[:8], "little")
    header, done = mutate_json(random, content[8 : 8 + length])
    files[name] = _sealed_again(struct.pack("<Q", len(header)) + header + content[8 + length :])
    return f"header: {done}"


def _json_or_header(random: Random, files: Files) -> str:
    return (_json if random.random() < 0.5 else _header)(random, files)


def _text(random: Random, files: Files) -> str:
    (name,) = files
    files[name], done = mutate_text(random, files[name])
    return done


def _npz(random: Random, files: Files) -> str:
    arrays = {"x": np.arange(8.0).reshape(4, 2), "y": np.array([0, 1, 1, 0])}
    name = random.choice(list(arrays))
    content, done = _changed_npy(random, _npy(arrays[name]))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, array in arrays.items():
            archive.writestr(f"{each}.npy", content if each == name else _npy(array))
        if random.random() < 0.2:
            archive.writestr(random.choice(("../z.npy", "x.npy", "é.npy", "x", "y.txt")), _npy(arrays["x"]))
    files["data.npz"] = file.getvalue()
    return f"{name}: {done}"


def _npy_headers(random: Random, files: Files) -> str:
    name = random.choice(list(files))
    files[name], done = _changed_npy(random, files[name])
    return f"{name}: {done}"


def _changed_npy(random: Random, content: bytes) -> tuple[bytes, str]:
    """An array with another header, or with another dtype, order or values."""
    if random.random() < 0.5:
        odd: tuple[Any, ...] = (
            np.array(["a", "b", "c", "d"]),
            np.full((4, 2), 1e39),
            np.full((4, 2), np.nan),
            np.arange(8, dtype=">f8").reshape(4, 2),
            np.asfortranarray(np.arange(8.0).reshape(4, 2)),
            np.zeros((0, 2)),
            np.array(3.0),
            np.zeros(4, "M8[s]"),
            np.zeros((4, 2), complex),
            np.zeros(4, [("a", "f4"), ("b", "i8")]),
            np.array([2**64 - 1] * 4, np.uint64),
            np.zeros((4, 2), bool),
            np.zeros((4, 2), np.float16),
        )
        array = random.choice(odd)
        return _npy(array), f"dtype {array.dtype}, shape {array.shape}"
    length = int.from_bytes(content[8:10], "little")
    header, done = mutate_text(random, content[10 : 10 + length])
    return content[:8] + min(len(header), 65535).to_bytes(2, "little") + header + content[10 + length :], f"header: {done}"


def _parquet(random: Random, files: Files) -> str:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: pyarrow.array([1.5, None, 2.0, 1e39]),
        lambda: pyarrow.array([[1, 2], [3], [], None]),
        lambda: pyarrow.array([2**64 - 1, 0, 1, 2], pyarrow.uint64()),
        lambda: pyarrow.array(["a", "é", "", "\x00"]),
        lambda: pyarrow.array(["a", "b", "a", "b"]).dictionary_encode(),
        lambda: pyarrow.array([b"\xff", b"", None, b"a"]),
        lambda: pyarrow.array([1, 2, 3, 4], pyarrow.timestamp("ns")),
        lambda: pyarrow.array([1, 2, 3, 4]).cast(pyarrow.decimal128(30, 2)),
        lambda: pyarrow.nulls(4),
        lambda: pyarrow.array([{"a": 1}, {"a": 2}, None, {}]),
        lambda: pyarrow.array([True, False, None, True]),
        lambda: pyarrow.array(np.array([1, 2, 3, 4], np.float16)),
    )
    numbers = {name: pyarrow.array([1, 2, 3, 4]) for name in ("a", "b", "kind")}
    names = random.sample(("a", "b", "kind", "label", "", "é"), random.choice((1, 1, 2, 3)))
    columns = {**numbers, "label": pyarrow.array([0, 1, 1, 0]), **{name: random.choice(kinds)() for name in names}}
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns), file, compression=random.choice(("none", "snappy", "gzip", "zstd")), row_group_size=2
    )
    files["table.parquet"] = file.getvalue()
    return ", ".join(f"{name}: {columns[name].type}" for name in names)


def _option_texts(random: Random, files: Files) -> str:
    options = json.loads(files["options.json"].decode("utf-8", "replace"))
    kind, text = options[0]
    changed, done = mutate_text(random, text.encode("utf-8", "surrogateescape"))
    files["options.json"] = json.dumps([[kind, changed.decode("utf-8", "surrogateescape")]]).encode()
    return done
