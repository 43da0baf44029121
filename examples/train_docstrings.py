"""Train a small BERT from scratch to tell which of four packages of Python's standard library a docstring comes from.

Every machine with Python has the texts. A tokenizer is trained on those to train on, and the command ``burnish`` trains a
classifier, which is measured on docstrings that neither has seen. A regression over counted words is trained beside. With
``--pretrain-epochs`` a model first learns to fill gaps in the texts to train on, and the classifier goes on from there, which so
few texts do not make better. In a checkout::

    pip install ".[text,demo]"
    python examples/train_docstrings.py
"""

from __future__ import annotations

import argparse
import ast
import csv
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from burnish.models import bert

PACKAGES = ("asyncio", "email", "unittest", "xml")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HELD_OUT = 0.2
Sample = tuple[str, str]


def docstrings(package: str) -> Iterator[str]:
    """The docstrings of a package without its tests, white space as single blanks."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.relative_to(folder).parts[:-1]:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if text:
                    yield text


def samples(seed: int) -> tuple[list[Sample], list[Sample]]:
    """Docstrings with their packages, to train on and to measure on; each text is in one of the two, and of one package."""
    packages: dict[str, set[str]] = {}
    for package in PACKAGES:
        for text in docstrings(package):
            packages.setdefault(text, set()).add(package)
    found = sorted((text, *names) for text, names in packages.items() if len(names) == 1)
    order = np.random.default_rng(seed).permutation(len(found))
    count = round(HELD_OUT * len(found))
    held_out, training = ([found[place] for place in part] for part in (order[:count], order[count:]))
    return training, held_out


def write(path: Path, rows: Sequence[Sample]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def trained_tokenizer(texts: Sequence[str], size: int) -> Tokenizer:
    """Pieces of words (WordPiece), lower case, with [CLS] before a text and [SEP] after it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    first, last = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", last), ("[CLS]", first))
    return tokenizer


def burnish(*arguments: str) -> None:
    """Run a command as a person types it."""
    print(f"\n$ burnish {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "burnish", *arguments], check=True)


def accuracy_of_words(training: Sequence[Sample], held_out: Sequence[Sample]) -> float:
    """Share of right answers of a logistic regression over how often each word stands in a text."""
    model = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000))
    model.fit(*zip(*training, strict=True))
    return float(model.score(*zip(*held_out, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/docstrings"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pretrain-epochs", type=int, default=0, help="of a model that fills gaps; 0: none")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--engine", default="auto")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = samples(arguments.seed)
    print(f"{len(training)} docstrings of {', '.join(PACKAGES)} to train on, {len(held_out)} to measure on")
    write(folder / "train.csv", training)
    write(folder / "test.csv", held_out)
    tokenizer = trained_tokenizer([text for text, _ in training], 4000)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"width": arguments.width, "layers": arguments.layers, "positions": 64, "dropout": 0.3, "seed": arguments.seed}
    ir.save(bert(tokenizer.get_vocab_size(), **sizes), folder / "gaps.onnx")
    ir.save(bert(tokenizer.get_vocab_size(), len(PACKAGES), **sizes), folder / "classifier.onnx")

    common = ["--data", f"{folder}/train.csv", "--tokenizer", f"{folder}/tokenizer.json", "--optimizer", "adamw"]
    common += ["--lr", "0.002", "--weight-decay", "0.01", "--decay-on", "weights", "--schedule", "linear", "--warmup", "20"]
    common += ["--engine", arguments.engine, "--seed", str(arguments.seed), "--overwrite"]
    start = []
    if arguments.pretrain_epochs:
        epochs = ["--epochs", str(arguments.pretrain_epochs), "--output", f"{folder}/pretrained"]
        burnish("train", f"{folder}/gaps.onnx", "--task", "masked", *epochs, *common)
        start = ["--start-from", f"{folder}/pretrained"]
    epochs = ["--epochs", str(arguments.epochs), "--output", f"{folder}/classifier"]
    burnish("train", f"{folder}/classifier.onnx", *start, *epochs, *common)
    burnish("evaluate", f"{folder}/classifier", f"{folder}/test.csv", "--output", f"{folder}/figures.csv")
    with (folder / "figures.csv").open(encoding="utf-8") as file:
        figures = {row["figure"]: float(row["value"]) for row in csv.DictReader(file)}
    print(f"\naccuracy of the transformer: {figures['accuracy']:.4f}")
    print(f"accuracy of counted words: {accuracy_of_words(training, held_out):.4f}")


if __name__ == "__main__":
    main()
