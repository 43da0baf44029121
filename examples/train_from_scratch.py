"""Train a small residual network from random weights on scikit-learn's images of digits, and export it.

    python examples/train_from_scratch.py --epochs 8 --output digits.onnx

Needs scikit-learn (the extra [demo]); PyTorch is not needed.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import burnish
from burnish.models import residual_network


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1797 images, float32 [samples, 1, 8, 8] from 0 to 1, and their classes, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", default="digits.onnx")
    arguments = parser.parse_args()

    images, labels = digits()
    training, test = slice(0, 1500), slice(1500, None)
    program = burnish.compile(
        residual_network(input_shape=(1, 8, 8), classes=10),
        loss="cross_entropy",
        optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9, weight_decay=1e-4),
    )
    # The initial weights come from the seed; those that the model holds are not used.
    session = burnish.Session(program, state=program.initial_state(seed=0, reinitialize="kaiming"))
    generator = np.random.default_rng(0)
    steps = arguments.epochs * (1500 // arguments.batch_size)
    step = 0
    for epoch in range(1, arguments.epochs + 1):
        order = generator.permutation(1500)
        for start in range(0, 1500 - arguments.batch_size + 1, arguments.batch_size):
            chosen = order[start : start + arguments.batch_size]
            lr = 0.05 * (1 + np.cos(np.pi * step / steps))
            metrics = session.step({"x": images[training][chosen], "labels": labels[training][chosen]}, lr=lr)
            step += 1
        result = session.evaluate({"x": images[test], "labels": labels[test]})
        print(f"epoch {epoch}: training loss {metrics['loss']:.4f}, test accuracy {result['accuracy']:.4f}")
    # Normalization stays a layer of its own, so that the file can be trained on; by default it is folded into the convolutions.
    session.export(arguments.output, fold_norm=False)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
