"""Train a network that burnish computes in a loop of one's own with accelerate, on scikit-learn's digits.

    python examples/train_with_accelerate.py --epochs 4 --mixed-precision bf16

accelerate places the model, accumulates and clips gradients, computes in mixed precision, and saves and restores the state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import burnish.torch
from burnish.data.digits import digits_arrays


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def loader(split: str, batch: int) -> DataLoader:
    images, labels = digits_arrays(split)
    data = TensorDataset(torch.from_numpy(images)[:, None].float(), torch.from_numpy(labels).long())
    return DataLoader(data, batch_size=batch, shuffle=split == "train")


def accuracy(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    right = []
    with torch.no_grad():
        for images, labels in batches:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    model.train()
    return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16"))
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="where the state goes")
    arguments = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=arguments.mixed_precision, gradient_accumulation_steps=2)
    model = burnish.torch.wrap(network(), torch.randn(2, 1, 8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, test = loader("train", arguments.batch), loader("test", 200)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(arguments.epochs):
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}: accuracy {accuracy(accelerator, model, test):.4f}")

    accelerator.save_state(arguments.folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(arguments.folder)
    print(f"restored: accuracy {accuracy(accelerator, model, test):.4f}")

    plain = burnish.torch.unwrap(accelerator.unwrap_model(model))
    print(f"in PyTorch: accuracy {accuracy(accelerator, plain, test):.4f}")


if __name__ == "__main__":
    main()
