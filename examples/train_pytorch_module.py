"""Train a PyTorch module with burnish: the network of PyTorch's MNIST example, on MNIST's own files or on scikit-learn's digits.

    python examples/train_pytorch_module.py --data folder_of_mnist --epochs 14
    python examples/train_pytorch_module.py --weights trained.pt

Without ``--data``, scikit-learn's digits of 8x8 pixels are enlarged to 28x28. The trained weights are PyTorch's again at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import burnish
import burnish.torch
from burnish.data import read_idx

MEAN, DEVIATION = 0.1307, 0.3081


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        x = functional.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def images_and_labels(folder: Path | None, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [samples, 1, 28, 28] and labels of ``train`` or ``test``."""
    if folder is None:
        from burnish.data.digits import digits_arrays

        small, labels = digits_arrays(split)
        pixels = functional.interpolate(torch.from_numpy(small)[:, None], (28, 28), mode="bilinear").numpy()
    else:
        prefix = "train" if split == "train" else "t10k"
        images, classes = (next(folder.glob(f"{prefix}-{kind}-idx*")) for kind in ("images", "labels"))
        pixels, labels = read_idx(images)[:, None] / np.float32(255), read_idx(classes).astype(np.int64)
    return ((pixels - MEAN) / DEVIATION).astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's four IDX files, compressed or not")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--weights", type=Path, help="where to write the state dict")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x, labels = images_and_labels(arguments.data, "train")
    test = dict(zip(("x", "labels"), images_and_labels(arguments.data, "test"), strict=True))

    module = Network()
    steps = -(-len(x) // arguments.batch)
    program = burnish.compile(
        module,
        example_inputs=(torch.from_numpy(x[:2]),),
        loss="nll",
        optimizer=burnish.optim.adadelta(lr=burnish.optim.schedules.step(1.0, every=steps, gamma=0.7)),
    )
    shuffled = np.random.default_rng(0)
    with burnish.Session(program, engine=arguments.engine) as session:
        for epoch in range(arguments.epochs):
            order = shuffled.permutation(len(x))
            for start in range(0, len(x), arguments.batch):
                batch = order[start : start + arguments.batch]
                session.step({"x": x[batch], "labels": labels[batch]})
            figures = session.evaluate(test)
            print(f"epoch {epoch + 1}: loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.4f}")
        burnish.torch.load_into(module, session)

    with torch.no_grad():
        right = module.eval()(torch.from_numpy(test["x"])).argmax(1).numpy() == test["labels"]
    print(f"in PyTorch: accuracy {right.mean():.4f}")
    if arguments.weights is not None:
        torch.save(module.state_dict(), arguments.weights)


if __name__ == "__main__":
    main()
