"""Texts from the command line: a model fills gaps, a classifier goes on from it, and says what it reads."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnx_ir as ir
import pytest

from burnish.models import bert, gpt2
from oracles.combinations import spread
from oracles.small_tokenizers import word_tokenizer

pytest.importorskip("tokenizers")

SIZES = {"width": 8, "layers": 1, "heads": 2, "positions": 16}
TRAIN = ("--threads", "1", "--batch-size", "8", "--optimizer", "adamw", "--lr", "0.02", "--buckets", "4,8,16")


@pytest.fixture
def texts(folder):
    """Texts of the words w0 to w9, which are of the kind low, and w10 to w19, which are of the kind high."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 48), ("test", 40)):
        kinds = np.arange(count) % 2
        rows = [(" ".join(f"w{10 * kind + word}" for word in rng.integers(0, 10, rng.integers(1, 9))), kind) for kind in kinds]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "kind"), *((text, ("low", "high")[kind]) for text, kind in rows)])
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text, _ in rows))
    tokenizer = word_tokenizer()
    tokenizer.save(str(folder / "words.json"))
    vocabulary = tokenizer.get_vocab_size()
    ir.save(bert(vocabulary, **SIZES), folder / "gaps.onnx")
    ir.save(bert(vocabulary, 2, **SIZES), folder / "classes.onnx")
    ir.save(gpt2(vocabulary, **SIZES), folder / "next.onnx")


@pytest.mark.slow
def test_a_classifier_goes_on_from_a_model_that_fills_gaps(run, texts, folder):
    words = ("--tokenizer", "words.json")
    result = run("train", "gaps.onnx", "--data", "train.txt", "--task", "masked", *words, *TRAIN, "-o", "gaps")
    assert "texts: 15 % masked; 16 tokens at most, padded to 4, 8, 16" in result.output
    assert "perplexity" in result.output
    record = json.loads((folder / "gaps" / "run.json").read_text())
    assert (record["text"]["task"], record["text"]["buckets"]) == ("masked", [4, 8, 16])
    more = ("--start-from", "gaps", "--epochs", "16", "-o", "classes")
    result = run("train", "classes.onnx", "--data", "train.csv", "--eval-data", "test.csv", *words, *TRAIN, *more)
    assert "train.csv: 48 samples of 2 classes" in result.output
    assert "texts: labels" in result.output
    run("evaluate", "classes", "test.csv", "-o", "figures.csv")
    with (folder / "figures.csv").open() as file:
        figures = {row["figure"]: float(row["value"]) for row in csv.DictReader(file)}
    assert figures["accuracy"] >= 0.9
    run("predict", "classes/tuned.onnx", "test.txt", "-o", "answers.csv")
    with (folder / "answers.csv").open() as file:
        answers = [row["class"] for row in csv.DictReader(file)]
    with (folder / "test.csv").open() as file:
        kinds = [row["kind"] for row in csv.DictReader(file)]
    assert np.mean([answer == kind for answer, kind in zip(answers, kinds, strict=True)]) == pytest.approx(figures["accuracy"])


@pytest.mark.slow
def test_a_causal_model_reports_perplexity_over_tokens_and_its_run_goes_on(run, texts):
    options = ("--data", "train.txt", "--eval-data", "test.txt", "--task", "causal", "--joined", "--tokenizer", "words.json")
    result = run("train", "next.onnx", *options, *TRAIN, "--max-tokens", "8", "-o", "next")
    assert "the next token; joined and cut into pieces of 8" in result.output
    assert "perplexity" in result.output
    run("train", "next.onnx", *options, *TRAIN, "--max-tokens", "8", "-o", "next", "--epochs", "2", "--resume")
    result = run("train", "next.onnx", *options, *TRAIN, "--max-tokens", "4", "-o", "next", "--epochs", "3", "--resume", code=1)
    assert "was started with" in result.output


@spread(("command", "code", "message"), [
        (("train", "gaps.onnx", "--data", "train.txt"), 1, "texts become tokens by a tokenizer: name one"),
        (("train", "gaps.onnx", "--data", "train.txt", "--tokenizer", "none.json", "--task", "masked"), 1, "cannot be read"),
        (("train", "gaps.onnx", "--data", "train.csv", "--tokenizer", "words.json", "--loss", "cross_entropy:class_axis=-1"), 1,
         "the loss compares each token with a label, and what is learned is not known: say which task it is"),
        (("train", "classes.onnx", "--data", "train.csv", "--tokenizer", "words.json", "--buckets", "4,x"), 2,
         "--buckets 4,x: give whole numbers with commas between"),
        (("train", "classes.onnx", "--data", "data.npz", "--tokenizer", "words.json"), 1, "these data hold none: leave it out"),
        (("train", "model.onnx", "--data", "train.csv", "--tokenizer", "words.json"), 1, "take a model that reads tokens"),
    ], test=2)  # fmt: skip
def test_options_that_do_not_fit(run, texts, command, code, message):
    assert message in " ".join(run(*command, code=code).output.replace("│", " ").split())
