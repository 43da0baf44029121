"""Texts that are longer than a model's table of positions: cut off with a count, or refused where that was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.data import DataDescription, DataSpec, Text, as_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import transfer
from burnish.importer import load
from burnish.models import gpt2
from burnish.training.run_data import within_the_model
from oracles.small_networks import Network

tokenizers = pytest.importorskip("tokenizers")
ROWS, WORDS, WIDTH = 20, 12, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A classifier of texts with 20 positions, as exporters write one: their number is open; and texts of 3 to 40 words."""
    place = tmp_path_factory.mktemp("texts")
    network = Network("texts", [])
    builder = network.builder
    network.graph.inputs[0].name = "input_ids"
    network.graph.inputs[0].shape = ir.Shape(["batch", "tokens"])
    network.graph.inputs[0].type = ir.TensorType(ir.DataType.INT64)
    tokens = network.input
    words = builder.op("Gather", network.drawn("words", WORDS, WIDTH, fan_in=1), tokens)
    length = builder.op("Shape", tokens, start=1, end=2)
    places = builder.op("Slice", builder.constant(np.arange(ROWS)), builder.integers([0]), length)
    values = words + builder.op("Gather", network.drawn("places", ROWS, WIDTH, fan_in=1), places)
    pooled = builder.op("ReduceMean", values, builder.integers([1]), keepdims=0)
    ir.save(network.model(network.dense("head", pooled, WIDTH, 4)), place / "texts.onnx")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": 2 + number for number in range(WORDS - 2)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    rows = [f"{' '.join(f'w{(number + word) % 10}' for word in range(length))},{'ab'[number // 4 % 2]}"
            for number, length in enumerate([3, 40, 20, 21] * 4)]  # fmt: skip
    (place / "long.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (place / "short.csv").write_text("\n".join(["text,label", *rows[::4], *rows[2::4]]) + "\n")
    return place


def text(folder: Path, **settings: object) -> Text:
    return Text(tokenizer=folder / "tokenizer.json", **settings)


def test_long_texts_are_cut_off_and_counted(folder, tmp_path):
    prepared, dataset = transfer(folder / "texts.onnx", folder / "long.csv", FinetuneOptions(text=folder / "tokenizer.json"))
    assert any("runs on 20 tokens at most" in note and "8 of 16 texts are longer" in note for note in prepared.notes)
    assert dataset.batch(np.arange(16))["input_ids"].shape == (16, 20)
    assert DataDescription.read(prepared.model.metadata_props).text.length == 20


def test_what_is_evaluated_on_is_cut_off_where_the_texts_to_train_on_are_short(folder, tmp_path):
    program = burnish.compile(folder / "texts.onnx", loss="cross_entropy", optimizer="sgd")
    options = {"text": text(folder, buckets=(8, 16, 512)), "run_directory": tmp_path / "run", "threads": 1, "progress": False}
    trainer = burnish.Trainer(program, folder / "short.csv", folder / "long.csv", **options)
    assert trainer.run().metrics["loss"] > 0
    assert DataDescription.read(trainer.session.metadata).text.buckets == (8, 16, 20)


def test_burnish_train_cuts_off_and_counts(folder, tmp_path):
    def run(*options: str, code: int = 0) -> str:
        data = ("--data", str(folder / "long.csv"), "--tokenizer", str(folder / "tokenizer.json"), "--threads", "1")
        command = ["train", str(folder / "texts.onnx"), *data, "--output", str(tmp_path / "run"), *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == code, result.output
        return " ".join(result.output.replace("│", " ").split())

    assert "the model runs on 20 tokens at most, as far as its table of positions goes: 8 of 16 texts" in run()
    assert "the model runs on" not in run("--epochs", "2", "--resume")
    assert "length=30, and the model runs on 20 tokens at most" in run("--overwrite", "--max-tokens", "30", code=1)


@pytest.mark.parametrize("command", [("predict",), ("evaluate", "--loss", "cross_entropy")], ids=lambda command: command[0])
def test_a_file_is_read_with_as_many_tokens_as_it_takes(folder, command):
    data = (str(folder / "texts.onnx"), str(folder / "long.csv"), "--tokenizer", str(folder / "tokenizer.json"))
    result = CliRunner().invoke(app, [*command, *data])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "the model runs on 20 tokens at most, as far as its table of positions goes: 8 of 16 texts are longer" in said
    refused = CliRunner().invoke(app, [*command, *data, "--max-tokens", "30"])
    assert refused.exit_code == 1
    assert "length=30, and the model runs on 20 tokens at most" in " ".join(refused.output.replace("│", " ").split())


def test_joined_texts_become_pieces_of_the_length(folder):
    program = burnish.compile(gpt2(WORDS, width=8, layers=1, heads=2, positions=20), loss="cross_entropy:class_axis=-1")
    spec = replace(DataSpec.by(program), described=DataDescription())
    texts = [f"w{number} w3 w4" for number in range(10)]
    asked = text(folder, task="causal", joined=True)
    dataset, said = within_the_model(
        program, as_dataset(texts, spec, text=asked), asked, lambda each: as_dataset(texts, spec, text=each)
    )
    assert "they are joined and cut into pieces of 20" in said
    assert dataset.batch(np.arange(1))["input_ids"].shape == (1, 20)


@pytest.mark.slow
def test_a_run_trains_and_evaluates_on_what_is_left(folder, tmp_path):
    tuned = burnish.finetune(
        folder / "texts.onnx", folder / "long.csv", eval_data=folder / "long.csv", text=text(folder),
        output=tmp_path / "tuned.onnx", epochs=1, lr=0.01, threads=1,
    )  # fmt: skip
    assert tuned.result.steps == 2


def test_what_fits_is_left_as_it_is(folder):
    prepared, dataset = transfer(
        folder / "texts.onnx", folder / "short.csv", FinetuneOptions(text={"tokenizer": folder / "tokenizer.json", "length": 20})
    )
    assert not any("runs on" in note for note in prepared.notes)
    assert dataset.cut == 0


def test_lengths_that_were_asked_for_are_refused(folder):
    with pytest.raises(ConfigurationError, match=r"length=64, and the model runs on 20 tokens at most.*give 20 at most"):
        transfer(folder / "texts.onnx", folder / "long.csv", FinetuneOptions(text=text(folder, length=64)))
    with pytest.raises(ConfigurationError, match=r"text has no option 'size'.*; it takes tokenizer, task, length"):
        transfer(
            folder / "texts.onnx", folder / "long.csv", FinetuneOptions(text={"tokenizer": folder / "tokenizer.json", "size": 64})
        )
    two = load(folder / "texts.onnx")
    two.graph.inputs.append(ir.Value(name="attention_mask", shape=two.graph.inputs[0].shape, type=two.graph.inputs[0].type))
    with pytest.raises(DataError, match=r"texts become tokens by a tokenizer: name it \(--tokenizer tokenizer.json\)"):
        transfer(two, folder / "long.csv")
    with pytest.raises(DataError, match="sample 1 has 40 tokens, and 20 at most are read"):
        transfer(folder / "texts.onnx", folder / "long.csv", FinetuneOptions(text=text(folder, too_long="error")))
