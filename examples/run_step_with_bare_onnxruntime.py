"""Train a saved program with nothing but onnxruntime and numpy: what a training loop in any other language does, too.

    burnish compile model.onnx --output program
    python examples/run_step_with_bare_onnxruntime.py program data.npz

The data set is an .npz file with the arrays x (samples) and y (class indices). See docs/program-format.md.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime

SAFETENSORS_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U32": "<u4", "U64": "<u8"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file: the length of a JSON header, the header, and the bytes of the arrays."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, entry in json.loads(content[8:end]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            array = np.frombuffer(content[end + start : end + stop], SAFETENSORS_DTYPES[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"])
    return arrays


def names(entries: list[dict], role: str) -> list[str]:
    """Return the names of the inputs or outputs that have a role."""
    return [entry["name"] for entry in entries if entry["role"] == role]


class BareProgram:
    """The init and the step graph of a saved program, and the state as a dict of arrays."""

    def __init__(self, folder: Path, seed: int = 0):
        self.signature = json.loads((folder / "program.json").read_text(encoding="utf-8"))["signature"]
        self.state = read_safetensors(folder / "state.safetensors")
        self.run(
            self.open(folder, "init"),
            "init",
            {name: np.array(seed, np.int64) for name in names(self.signature["init"]["inputs"], "seed")},
        )
        self.step_session = self.open(folder, "step")
        inputs = self.signature["step"]["inputs"]
        self.hyperparameters = {entry["name"]: np.array(entry["default"], np.float32) for entry in inputs if "default" in entry}

    @staticmethod
    def open(folder: Path, graph: str) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(folder / f"{graph}.onnx", providers=["CPUExecutionProvider"])

    def run(self, session: onnxruntime.InferenceSession, graph: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a graph on the state and on what is fed; the state moves on, and what is not state is returned."""
        signature = self.signature[graph]
        inputs = {entry["name"]: feeds.get(entry["name"], self.state.get(entry["name"])) for entry in signature["inputs"]}
        values = session.run([entry["name"] for entry in signature["outputs"]], inputs)
        results = {}
        for entry, value in zip(signature["outputs"], values, strict=True):
            if "updates" in entry:
                self.state[entry["updates"]] = value
            else:
                results[entry["name"]] = value
        return results

    def step(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.run(self.step_session, "step", {**batch, **self.hyperparameters})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="a folder that burnish compile wrote")
    parser.add_argument("data", type=Path, help="an .npz file with x and y")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()

    program = BareProgram(arguments.program)
    (data,) = names(program.signature["step"]["inputs"], "data")
    (label,) = names(program.signature["step"]["inputs"], "label")
    samples = np.load(arguments.data)
    x, y = samples["x"].astype(np.float32), samples["y"].astype(np.int64)
    generator = np.random.default_rng(0)
    for epoch in range(1, arguments.epochs + 1):
        losses = []
        order = generator.permutation(len(x))
        for start in range(0, len(x) - arguments.batch_size + 1, arguments.batch_size):
            chosen = order[start : start + arguments.batch_size]
            losses.append(program.step({data: x[chosen], label: y[chosen]})["loss"])
        print(f"epoch {epoch}: mean loss {np.mean(losses):.4f} over {len(losses)} steps")


if __name__ == "__main__":
    main()
