"""Every bit of every file of burnish's own, flipped once: none is read as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import burnish
from burnish import surgery
from burnish.errors import BurnishError
from burnish.files.state_file import read_state_file
from burnish.training import read_checkpoint


def network() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }""")


def adapted() -> burnish.Program:
    return burnish.compile(surgery.lora(network(), rank=1), loss="mse", optimizer="adam")


def write(form: str, folder: Path) -> Path:
    program = burnish.compile(network(), loss="mse", optimizer="sgd") if not form.startswith("adapter") else adapted()
    if form == "folder":
        return program.save(folder / "program")
    if form == "one file":
        return program.save(folder / "program.onnx")
    session = burnish.Session(program, engine="reference")
    path = folder / "state.safetensors"
    if form == "adapters for others":
        session.export(folder / "model.onnx", adapters="inputs")
        return folder / "model.safetensors"
    session.save_checkpoint(path)
    return path


READERS = {
    "folder": burnish.Program.load,
    "one file": burnish.Program.load,
    "checkpoint": read_checkpoint,
    "adapter checkpoint": read_checkpoint,
    "adapters for others": lambda path: read_state_file(path, "file of adapters"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("form", READERS)
def test_every_bit(form, tmp_path):
    path = write(form, tmp_path)
    READERS[form](path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        content = file.read_bytes()
        for place in range(len(content)):
            for bit in range(8):
                file.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
                with pytest.raises(BurnishError):
                    READERS[form](path)
        file.write_bytes(content)
    READERS[form](path)
