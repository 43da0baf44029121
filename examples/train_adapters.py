"""Adapt an ONNX file to other data by LoRA, and give the adapter to ONNX Runtime, apart from the model.

    python examples/train_from_scratch.py --output digits.onnx
    python examples/train_adapters.py digits.onnx --output adapted

The model knows light digits on a dark ground. Here they come dark on light, 300 of them with labels. The weights stay as they
are; one file serves both kinds of digits, with the adapter and without it. Needs scikit-learn (the extra [demo]).
"""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from sklearn.datasets import load_digits

import burnish
from burnish import surgery


def accuracy(session: onnxruntime.InferenceSession, images: np.ndarray, labels: np.ndarray, options=None) -> float:
    """Return the share of images that a model classifies rightly."""
    (logits,) = session.run(None, {session.get_inputs()[0].name: images}, options)
    return float((logits.argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX classifier of [batch, 1, 8, 8] images, such as train_from_scratch.py writes")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", default="adapted", help="a folder")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    light = (images[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    dark, labels = 1 - light, labels[order]

    model = surgery.lora(arguments.model, rank=arguments.rank, alpha=2 * arguments.rank)
    program = burnish.compile(model, optimizer=burnish.optim.adam(lr=1e-2))
    name = program.signature["step"].inputs[0].name
    session = burnish.Session(program)
    generator = np.random.default_rng(0)
    for _ in range(arguments.epochs):
        for chosen in np.split(generator.permutation(300), 6):
            session.step({name: dark[chosen], "labels": labels[chosen]})

    path = session.export(Path(arguments.output) / "digits.onnx", adapters="apart")
    session.save_checkpoint(Path(arguments.output) / "last.safetensors")
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(path.with_suffix(".onnx_adapter")))
    options.add_active_adapter(adapter)
    rest, known = slice(300, None), labels[300:]
    print(f"without the adapter: {accuracy(runtime, light[rest], known):.4f} of light digits")
    print(f"without the adapter: {accuracy(runtime, dark[rest], known):.4f} of dark digits")
    print(f"with the adapter: {accuracy(runtime, dark[rest], known, options):.4f} of dark digits")
    for file in sorted(Path(arguments.output).iterdir()):
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
