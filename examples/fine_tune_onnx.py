"""Adapt an ONNX file to data that looks different from what it was trained on, by training a part of it.

    python examples/train_from_scratch.py --output digits.onnx
    python examples/fine_tune_onnx.py digits.onnx --output tuned.onnx

The model knows light digits on a dark ground. Here they come dark on light, 300 of them with labels. Only scale and bias of the
normalization layers and the last layer are trained; the convolutions stay as they are. Needs scikit-learn (the extra [demo]).
"""

import argparse

import numpy as np
import onnxruntime
from sklearn.datasets import load_digits

import burnish


def accuracy(path: str, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images that a model file classifies rightly, asked of onnxruntime alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    return float((logits.argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX classifier of [batch, 1, 8, 8] images, such as train_from_scratch.py writes")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", default="tuned.onnx")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    images = (1 - images[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = labels[order]
    print(f"before: {accuracy(arguments.model, images[300:], labels[300:]):.4f} of the dark digits are recognized")

    program = burnish.compile(
        arguments.model,
        optimizer=burnish.optim.adam(lr=2e-2),
        trainable=["*normalization*", "classifier.*"],
    )
    name = program.signature["step"].inputs[0].name
    session = burnish.Session(program)
    generator = np.random.default_rng(0)
    for _ in range(arguments.epochs):
        for chosen in np.split(generator.permutation(300), 6):
            metrics = session.step({name: images[chosen], "labels": labels[chosen]})
    print(f"last training loss {metrics['loss']:.4f}")
    session.export(arguments.output, fold_norm=False)
    print(f"after: {accuracy(arguments.output, images[300:], labels[300:]):.4f}, with {arguments.output}")


if __name__ == "__main__":
    main()
