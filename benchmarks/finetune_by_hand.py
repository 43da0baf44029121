"""The transfer that ``burnish finetune`` makes, written by hand in PyTorch: what ``finetune.py`` runs beside it.

It is what a person with the module writes: a data set that decodes images, a new head with ten times the rate of the rest, SGD
with momentum, a rate that rises and falls as a cosine. Head, order of the samples, batch size and rate are those that burnish
chose, so that both train the same; nothing is searched here. With ``fused`` in what was chosen, batch normalization is fused into
the convolutions first, as in an exported file: what a person with the file alone would train.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from finetune_models import MODELS, Model
from finetune_packages import PACKAGED

HEAD_SCALE, MOMENTUM = 10.0, 0.9
RUNNING = 0.1
"""The least momentum of running statistics. torchvision's MobileNetV3 has 0.01, made for hundreds of thousands of steps:
after the hundred of a transfer most of what it evaluates with would be of the old data. Who fine-tunes it raises that."""


class Samples(torch.utils.data.Dataset):
    """A folder of images, or a table of numbers or texts, with the class of each sample."""

    def __init__(self, model: Model, path: Path, classes: list[str]):
        self.model, self.classes = model, classes
        if path.is_dir():
            self.items = [(file, name) for name in sorted(classes) for file in sorted((path / name).iterdir())]
        else:
            with path.open(newline="", encoding="utf-8") as file:
                self.items = [(row[:-1], row[-1]) for row in list(csv.reader(file))[1:]]
        if model.kind == "text":
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(path.parent / "tokenizer.json"))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        item, name = self.items[index]
        label = self.classes.index(name)
        if self.model.kind == "table":
            return torch.tensor([float(each) for each in item]), label
        if self.model.kind == "text":
            return torch.tensor(self.tokenizer.encode(item[0]).ids), label
        from PIL import Image

        with Image.open(item) as image:
            pixels = torch.from_numpy(np.asarray(image.convert("RGB"), np.float32) / 255)
        return pixels.permute(2, 0, 1) if self.model.channels_first else pixels, label


def batch_of(samples: list[tuple[torch.Tensor, int]], is_text: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Put samples together; texts are padded to the longest of them, with a mask."""
    labels = torch.tensor([label for _, label in samples])
    inputs = [each for each, _ in samples]
    if not is_text:
        return (torch.stack(inputs),), labels
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in inputs], batch_first=True)
    return (nn.utils.rnn.pad_sequence(inputs, batch_first=True), mask), labels


def with_head(model: Model, folder: Path, start: Path, head: dict[str, str]) -> nn.Module:
    """The pretrained module with the new head that burnish drew, so that both start alike."""
    module = model.build()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in np.load(folder / "pretrained.npz").items()})
    drawn = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(start).graph.initializer}
    weight, bias = (torch.from_numpy(drawn[head[name]].copy()) for name in ("weight", "bias"))
    layer = model.head(module)
    layer.weight = nn.Parameter(
        weight if len(weight) == len(bias) and weight.shape[1:] == layer.weight.shape[1:] else weight.T.contiguous()
    )
    layer.bias = nn.Parameter(bias)
    return module


def fused(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The module with each batch normalization in the convolution before it, as exporters write it; changed in place."""
    module.eval()
    names = {each: name for name, each in module.named_modules()}
    makers: dict[int, nn.Module] = {}
    values, pairs, hooks = [], [], []

    def note(layer: nn.Module, read: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            makers[id(output)] = layer
            values.append(output)  # or another tensor could come to its address
        elif id(read[0]) in makers:
            pairs.append((makers[id(read[0])], layer))

    for layer in names:
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d):
            hooks.append(layer.register_forward_hook(note))
    with torch.no_grad():
        module(*inputs)
    for hook in hooks:
        hook.remove()
    for convolution, normalization in pairs:
        # timm's layers have their activation in them.
        rest = [each for each in (getattr(normalization, "drop", None), getattr(normalization, "act", None)) if each is not None]
        both = {convolution: nn.utils.fusion.fuse_conv_bn_eval(convolution, normalization), normalization: nn.Sequential(*rest)}
        for old, new in both.items():
            parent, _, name = names[old].rpartition(".")
            setattr(module.get_submodule(parent), name, new)
    return module


def quicken_statistics(module: nn.Module) -> None:
    """Let running statistics of batch normalization follow the data within a short run."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.momentum is not None:
            layer.momentum = max(layer.momentum, RUNNING)


def train(module: nn.Module, model: Model, samples: Samples, order: np.ndarray, chosen: dict, what: str) -> None:
    """Train all layers, or the head alone on the others in evaluation mode."""
    head = [*model.head(module).parameters()]
    others = [each for each in module.parameters() if all(each is not one for one in head)]
    groups = [{"params": head, "scale": 1.0 if what == "head" else HEAD_SCALE}]
    if what == "head":
        for each in others:
            each.requires_grad_(False)
    else:
        groups.append({"params": others, "scale": 1.0})
    optimizer = torch.optim.SGD(groups, lr=chosen["lr"], momentum=MOMENTUM)
    size = chosen["batch_size"]
    steps = len(order) * -(-len(samples) // size)
    rise, step = chosen["warmup"], 0
    quicken_statistics(module)
    module.train(what != "head")
    for epoch in order:
        for begin in range(0, len(samples), size):
            inputs, labels = batch_of([samples[int(index)] for index in epoch[begin : begin + size]], model.kind == "text")
            factor = (step + 1) / (rise + 1) if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))
            for group in optimizer.param_groups:
                group["lr"] = chosen["lr"] * factor * group["scale"]
            loss = nn.functional.cross_entropy(model.logits(module, *inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


def accuracy(module: nn.Module, model: Model, samples: Samples) -> float:
    """The part of the samples that are classified rightly."""
    module.eval()
    right = 0
    with torch.no_grad():
        for begin in range(0, len(samples), 64):
            inputs, labels = batch_of(
                [samples[index] for index in range(begin, min(begin + 64, len(samples)))], model.kind == "text"
            )
            right += int((model.logits(module, *inputs).argmax(1) == labels).sum())
    return right / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the pretrained weights and chosen.json")
    folder = parser.parse_args().folder
    chosen = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))
    torch.set_num_threads(chosen["threads"])
    model = {**MODELS, **PACKAGED}[chosen["model"]]
    data, classes = Path(chosen["data"]), chosen["classes"]
    module = with_head(model, folder, Path(chosen["start"]), chosen["head"])
    samples = Samples(model, data, classes)
    if chosen["fused"]:
        module = fused(module, batch_of([samples[0]], model.kind == "text")[0])
    train(module, model, samples, np.asarray(chosen["order"]), chosen, chosen["what"])
    print(accuracy(module, model, Samples(model, Path(chosen["eval_data"]), classes)))


if __name__ == "__main__":
    main()
