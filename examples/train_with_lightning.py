"""Train a network that burnish computes with Lightning, on scikit-learn's digits, and resume from a checkpoint.

    python examples/train_with_lightning.py --epochs 4 --folder runs

Lightning keeps the loop, the optimizer, the clipping of gradients, mixed precision and the checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import burnish.torch
from burnish.data.digits import digits_arrays


class Digits(lightning.LightningModule):
    """A convolutional network with batch normalization and dropout, for images [batch, 1, 8, 8] of ten classes."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
        )  # fmt: skip
        self.network = burnish.torch.wrap(network, torch.randn(2, 1, 8, 8))
        self.rate = rate

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.rate)


def loader(split: str, batch: int) -> DataLoader:
    images, labels = digits_arrays(split)
    data = TensorDataset(torch.from_numpy(images)[:, None].float(), torch.from_numpy(labels).long())
    return DataLoader(data, batch_size=batch, shuffle=split == "train")


def trainer(epochs: int, folder: Path, precision: str) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, precision=precision, gradient_clip_val=1.0, accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(folder, filename="digits")], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="32-true", help="Lightning's: bf16-mixed computes products in bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="where the checkpoint goes")
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    train, test = loader("train", arguments.batch), loader("test", 200)

    first = trainer(arguments.epochs // 2, arguments.folder, arguments.precision)
    first.fit(Digits(), train, test)
    print(f"after {first.current_epoch} epochs: accuracy {first.callback_metrics['accuracy']:.4f}")

    # Another process would go on from the file in the same way.
    rest = trainer(arguments.epochs, arguments.folder, arguments.precision)
    model = Digits()
    rest.fit(model, train, test, ckpt_path=first.checkpoint_callback.best_model_path)
    print(f"after {rest.current_epoch} epochs: accuracy {rest.callback_metrics['accuracy']:.4f}")

    plain = burnish.torch.unwrap(model.network).eval()
    images, labels = test.dataset.tensors
    with torch.no_grad():
        right = plain(images).argmax(1) == labels
    print(f"in PyTorch: accuracy {right.float().mean():.4f}")


if __name__ == "__main__":
    main()
