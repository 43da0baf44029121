"""Put together a page that trains in the browser: a program with a pretrained backbone, images of digits, and the client.

    make setup && (cd clients/js && npm ci --ignore-scripts && npm run build)
    python examples/browser/prepare.py
    python -m http.server --directory runs/browser

The network learns the digits 0 to 4 here. What the page trains are its last stage and its last layer, which are to tell all ten
apart. What stands before them is frozen, and the page computes it once for each image.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir

import burnish
from burnish.data.digits import digits_arrays
from burnish.models import residual_network

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "js" / "dist" / "page"
PAGE = ("index.html", "style.css", "app.js", "digits.js", "chart.js")
KNOWN, BATCH = 5, 32
TRAINED = ("stage3.*", "classifier.*")


def pretrained(epochs: int) -> ir.Model:
    """A residual network for ten digits that has seen those from 0 to 4."""
    model = residual_network(width=16)
    images, labels = digits_arrays("train")
    images, labels = images[labels < KNOWN, None], labels[labels < KNOWN]
    program = burnish.compile(model, optimizer=burnish.optim.adamw(lr=3e-3))
    generator = np.random.default_rng(0)
    with burnish.Session(program, engine="onnxruntime") as session:
        for _ in range(epochs):
            order = generator.permutation(len(labels))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                session.step({"x": images[chosen], "labels": labels[chosen]})
        state = session.state()
    for name, initializer in model.graph.initializers.items():
        if (array := state.get(f"param/{name}", state.get(f"stat/{name}"))) is not None:
            initializer.const_value = ir.tensor(array, name=name)
    return model


def write_digits(folder: Path) -> None:
    """Write the images as bytes from 0 to 16, then the labels; ``digits.json`` says how many there are of each split."""
    sizes = {}
    with (folder / "digits.bin").open("wb") as file:
        for split in ("train", "test"):
            images, labels = digits_arrays(split)
            sizes[split] = len(labels)
            file.write(np.round(images * 16).astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes())
    (folder / "digits.json").write_text(json.dumps(sizes), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/browser"), help="the folder of the page")
    parser.add_argument("--epochs", type=int, default=10, help="of the digits 0 to 4")
    arguments = parser.parse_args()
    if not (CLIENT / "burnish-runtime.js").is_file():
        raise SystemExit("The JavaScript client is not built: cd clients/js && npm ci --ignore-scripts && npm run build")
    arguments.output.mkdir(parents=True, exist_ok=True)
    model = pretrained(arguments.epochs)
    optimizer = burnish.optim.adamw(lr=2e-3)
    program = burnish.compile(
        model, trainable=TRAINED, cached_features="auto", optimizer=optimizer, metrics=("accuracy",), target="web"
    )
    program.save(arguments.output / "program")
    write_digits(arguments.output)
    for name in PAGE:
        shutil.copy(HERE / name, arguments.output / name)
    shutil.copytree(CLIENT, arguments.output / "burnish", dirs_exist_ok=True)
    print(f"{arguments.output}: open it with python -m http.server --directory {arguments.output}")


if __name__ == "__main__":
    main()
