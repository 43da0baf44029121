"""``burnish finetune`` beside the same transfer by hand in PyTorch: accuracy, seconds, and frozen tensors bit for bit.

    python benchmarks/finetune.py [MODEL ...] [--what all head] [--seeds 3] [--threads 2] [--no-fused]
    make bench-finetune   # with torchvision, timm, transformers, Keras and scikit-learn, in environments of their own

Each model (``finetune_models.py``, and ``finetune_packages.py`` those of packages) is pretrained here on the digits 0 to 4, or on
five topics of made-up sentences, and exported as its exporters do. ``burnish finetune FILE --data DATA`` then learns the digits 5
to 9, or other topics, with no further option (``all``), or with ``--freeze-until head`` (``head``).
``finetune_by_hand.py`` does the same with the module, from the same new head, in the same order, with the rate, batch size and
schedule that burnish chose, which it need not search. Seconds are those of whole commands, imports and all; accuracy is that on
samples that neither saw, of the tuned file on stock ONNX Runtime. "fused" is the accuracy by hand with batch normalization fused
into the convolutions, as the file has it. Figures are means over the seeds.
"""

from __future__ import annotations

import argparse
import compileall
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

import burnish
from burnish.data import ArrayDataset, Loader
from burnish.data.text.tokens import order_by_length
from burnish.finetuning.planning import warmup_steps
from finetune_by_hand import Samples, batch_of
from finetune_models import CLASSES, MODELS, PIXELS, VOCABULARY, Model
from finetune_packages import PACKAGED, missing

TRAINED, WORDS = 60, 12
"""Samples of each class to learn from; words that tell a topic."""
PRETRAINING = 5
"""Epochs."""
WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Where it is set, burnish is compiled to bytecode at each start, and PyTorch, which was when it was installed, is not."""


def write_images(folder: Path) -> None:
    """Digits as pictures: those to learn, and others to evaluate on."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for digit in range(5, 10):
        images = digits.images[digits.target == digit]
        for number, image in enumerate(images):
            place = folder / ("train" if number < TRAINED else "held") / f"digit-{digit}"
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(np.uint8(image * 255 / 16)).resize((PIXELS, PIXELS), Image.Resampling.BILINEAR)
            picture.convert("RGB").save(place / f"{number:04}.png")


def write_table(folder: Path) -> None:
    """Digits as 64 columns, 0 to 1."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows: dict[str, list[list[object]]] = {"train": [], "held": []}
    for digit in range(5, 10):
        for number, row in enumerate(digits.data[digits.target == digit]):
            rows["train" if number < TRAINED else "held"].append([*(row / 16).round(4), f"digit-{digit}"])
    for name, lines in rows.items():
        _write_csv(folder / f"{name}.csv", [*(f"pixel{number}" for number in range(64)), "label"], lines)


def write_texts(folder: Path) -> None:
    """Sentences of five topics, of which each has words of its own among many that all have; and the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(1)
    for name, each in (("train", TRAINED), ("held", 120)):
        lines = [
            [" ".join(f"word{word}" for word in sentence(rng, 5 + topic)), f"topic-{topic}"]
            for topic in range(5)
            for _ in range(each)
        ]
        _write_csv(folder / f"{name}.csv", ["text", "label"], lines)


def words_of(topic: int) -> np.ndarray:
    """The words of a topic. Those from 5 on have half of those of one of the first five, and half of the next one's."""
    return (topic * WORDS + (WORDS // 2 if topic >= 5 else 0) + np.arange(WORDS)) % (5 * WORDS)


def sentence(rng: np.random.Generator, topic: int) -> np.ndarray:
    """The words of a sentence: four of its topic, the others of all."""
    words = rng.integers(0, VOCABULARY - 2, int(rng.integers(8, 16)))
    words[rng.choice(len(words), 4, replace=False)] = rng.choice(words_of(topic), 4)
    return words


def _write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def known_samples(model: Model) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """What the model was pretrained on: inputs and labels."""
    if model.kind == "text":
        rng = np.random.default_rng(0)
        topics = rng.integers(0, 5, 800)
        tokens = [(torch.from_numpy(sentence(rng, int(topic))) + 2, int(topic)) for topic in topics]
        return batch_of(tokens, is_text=True)
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = digits.target < 5
    labels = torch.from_numpy(digits.target[chosen])
    if model.kind == "table":
        return (torch.from_numpy(np.float32(digits.data[chosen] / 16)),), labels
    images = torch.from_numpy(np.float32(digits.images[chosen] / 16))[:, None]
    images = torch.nn.functional.interpolate(images, (PIXELS, PIXELS), mode="bilinear").expand(-1, 3, -1, -1)
    return ((images if model.channels_first else images.permute(0, 2, 3, 1)).contiguous(),), labels


def pretrained(name: str, folder: Path) -> Path:
    """Pretrain a model, keep its weights, and return its file."""
    model = ALL[name]
    torch.manual_seed(0)
    module = model.build()
    inputs, labels = known_samples(model)
    if hasattr(module, "prepare"):
        module.prepare(*inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    module.train()
    torch.set_num_threads(1)  # such small models gain nothing by more, and lose much where others compute, too
    for _ in range(PRETRAINING * (2 if model.kind == "text" else 1)):
        for batch in torch.randperm(len(labels)).split(32):
            loss = torch.nn.functional.cross_entropy(model.logits(module, *(each[batch] for each in inputs)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    settle_statistics(module, model, inputs)
    np.savez(folder / "pretrained.npz", **{key: value.numpy() for key, value in module.state_dict().items()})
    path = folder / "model.onnx"
    model.export(module, path)
    return path


def settle_statistics(module: nn.Module, model: Model, inputs: tuple[torch.Tensor, ...]) -> None:
    """Give batch normalization the statistics of the data, which those of few steps are far from where they move slowly."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    with torch.no_grad():
        for batch in torch.randperm(len(inputs[0])).split(64) if layers else ():
            model.logits(module, *(each[batch] for each in inputs))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def timed(command: list[str]) -> tuple[float, str]:
    """Run a command; return its seconds and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != WITHOUT_BYTECODE}
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - begin, done.stdout


def accuracy_of(path: Path, model: Model, held: Path, classes: list[str]) -> float:
    """The accuracy of a tuned file on stock ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    output = session.get_outputs()[-1].name
    samples, right = Samples(model, held, classes), 0
    for begin in range(0, len(samples), 64):
        part = [samples[index] for index in range(begin, min(begin + 64, len(samples)))]
        inputs, labels = batch_of(part, model.kind == "text")
        feeds = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
        right += int((session.run([output], feeds)[0].argmax(1) == labels.numpy()).sum())
    return right / len(samples)


def kept_bits(start: Path, tuned: Path, head: dict[str, str]) -> bool:
    """Whether all floating-point tensors but the head are bit for bit what they were, running statistics with them."""
    before, after = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer} for path in (start, tuned)
    )
    frozen = [name for name, array in before.items() if name not in head.values() and array.dtype.kind == "f" and array.ndim]
    return all(name in after and before[name].tobytes() == after[name].tobytes() for name in frozen)


@dataclass(frozen=True)
class Outcome:
    """What one seed came to: accuracies from 0 to 1, seconds, and whether frozen tensors kept their bits; None where none are."""

    burnish: float
    pytorch: float
    fused: float | None
    seconds: float
    pytorch_seconds: float
    bits: bool | None
    said: str


def compare(
    name: str,
    what: str,
    data: dict[str, Path],
    folder: Path,
    file: Path,
    threads: int,
    seeds: Sequence[int] = (0,),
    is_fused_too: bool = True,
) -> list[str]:
    """One line of the table."""
    model = ALL[name]
    outcomes = [tune(name, what, data, folder, file, threads, seed, is_fused_too) for seed in seeds]
    accuracies = [100 * np.mean([getattr(each, part) for each in outcomes]) for part in ("burnish", "pytorch")]
    fused = [each.fused for each in outcomes if each.fused is not None]
    seconds = [f"{np.mean([getattr(each, part) for each in outcomes]):.1f}" for part in ("seconds", "pytorch_seconds")]
    bits = "-" if what == "all" else "yes" if all(each.bits for each in outcomes) else "NO"
    notes = [note for sign, note in NOTES.items() if any(sign in each.said for each in outcomes)]
    form = f"{model.origin}, {model.exporter}, batch {model.batch}"
    within = "yes" if accuracies[0] >= accuracies[1] - 1 else "NO"
    shown = [f"{figure:.1f}" for figure in accuracies] + [f"{100 * np.mean(fused):.1f}" if fused else "-"]
    return [name, form, what, *shown, within, *seconds, bits, ", ".join(notes)]


def tune(
    name: str, what: str, data: dict[str, Path], folder: Path, file: Path, threads: int, seed: int, is_fused_too: bool = True
) -> Outcome:
    """Tune a file with burnish and its module by hand; ``is_fused_too``: the module with fused normalization as well."""
    model, run = ALL[name], folder / f"run-{what}-{seed}"
    place = data[model.kind]
    train, held = (
        place / ("train" if model.kind == "images" else "train.csv"),
        place / ("held" if model.kind == "images" else "held.csv"),
    )
    options = ["--tokenizer", str(place / "tokenizer.json")] if model.kind == "text" else []
    options += ["--freeze-until", "head", "--no-fold"] if what == "head" else []
    options += ["--threads", str(threads), "--seed", str(seed)]
    command = [sys.executable, "-m", "burnish", "finetune", str(file), "--data", str(train), "--output", str(run), *options]
    seconds, said = timed(command)
    choices = json.loads((run / "finetune.json").read_text(encoding="utf-8"))
    metadata = {entry.key: entry.value for entry in onnx.load(run / "tuned.onnx").metadata_props}
    classes = json.loads(metadata["burnish.classes"])
    epochs, samples = choices["stages"][0]["epochs"], choices["samples"]
    size = choices["batch_size"]
    loader = Loader(ArrayDataset({"x": np.zeros(samples)}), size, seed=seed)
    # All sentences have one length after padding, and no batch is moved for it; their order is drawn in another way.
    one_bucket = np.zeros(samples, np.int64)
    orders = [
        order_by_length(one_bucket, size, seed, epoch) if model.kind == "text" else loader.order(epoch) for epoch in range(epochs)
    ]
    chosen = {
        "model": name,
        "what": what,
        "data": str(train),
        "eval_data": str(held),
        "classes": classes,
        "start": str(run / "start.onnx"),
        "head": choices["head"],
        "lr": choices["lr"],
        "batch_size": size,
        "warmup": warmup_steps(epochs * len(loader), choices["schedule"]),
        "order": [order.tolist() for order in orders],
        "threads": threads,
        "fused": False,
    }
    by_hand, accuracy = run_by_hand(folder, chosen)
    fused = None
    if is_fused_too and what == "all" and any(isinstance(layer, nn.BatchNorm2d) for layer in model.build().modules()):
        fused = run_by_hand(folder, {**chosen, "fused": True})[1]
    bits = None if what == "all" else kept_bits(run / "start.onnx", run / "tuned.onnx", choices["head"])
    return Outcome(accuracy_of(run / "tuned.onnx", model, held, classes), accuracy, fused, seconds, by_hand, bits, said)


def run_by_hand(folder: Path, chosen: Mapping[str, Any]) -> tuple[float, float]:
    """Run the script in PyTorch; returns its seconds, and the accuracy that it came to."""
    (folder / "chosen.json").write_text(json.dumps(chosen), encoding="utf-8")
    seconds, printed = timed([sys.executable, str(Path(__file__).with_name("finetune_by_hand.py")), str(folder)])
    return seconds, float(printed.split()[-1])


ALL = {**MODELS, **PACKAGED}
NOTES = {"features: computed once": "features once", "normalization: put after": "normalization put back"}
"""What is pointed out in a line, by what the command says."""
HEADER = [
    "model", "file", "trains", "burnish %", "PyTorch %", "fused %", "within a point", "burnish s", "PyTorch s", "frozen bits", "",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(ALL)}; all by default")
    parser.add_argument("--what", nargs="+", choices=["all", "head"], default=["all", "head"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both; by default as many as there are cores")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--no-fused", action="store_true", help="do not train by hand with fused normalization, too")
    arguments = parser.parse_args()
    assert CLASSES == 5
    print(" | ".join(HEADER), flush=True)
    compileall.compile_dir(str(Path(burnish.__file__).parent), quiet=1)  # as an installation does
    rows = []
    with tempfile.TemporaryDirectory(prefix="burnish-finetune-") as name:
        data = {kind: Path(name, kind) for kind in ("images", "table", "text")}
        for place in data.values():
            place.mkdir()
        write_images(data["images"])
        write_table(data["table"])
        write_texts(data["text"])
        for model in arguments.models or ALL:
            if (package := missing(model)) is not None:
                print(f"{model} | not run: it needs {package}", flush=True)
                continue
            folder = Path(name, model)
            folder.mkdir(parents=True)
            file = pretrained(model, folder)
            for what in arguments.what:
                seeds = range(arguments.seeds)
                rows.append(compare(model, what, data, folder, file, arguments.threads, seeds, not arguments.no_fused))
                print(" | ".join(rows[-1]), flush=True)
    failed = sum("NO" in row for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} as by hand or better; {sum(float(row[7]) for row in rows):.0f} s and "
          f"{sum(float(row[8]) for row in rows):.0f} s in all")  # fmt: skip
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
