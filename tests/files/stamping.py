"""Files of burnish's own that were changed on purpose, with the digest that belongs to them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx

from burnish.files.digest import BLANK, DIGEST, stamped
from burnish.files.state_file import write_state_file


def write_manifest(path: Path, manifest: dict) -> None:
    """Write what a manifest was changed to."""
    path.write_bytes(stamped(json.dumps({**manifest, DIGEST: BLANK}).encode()))


def model_bytes(model: onnx.ModelProto) -> bytes:
    """Return the file of a program that was changed; one without the entry as it is."""
    entry = next((entry for entry in model.metadata_props if entry.key == DIGEST), None)
    if entry is None:
        return model.SerializeToString(deterministic=True)
    entry.value = BLANK
    return stamped(model.SerializeToString(deterministic=True))


def write_arrays(path: Path, state: dict, metadata: dict) -> None:
    """Write arrays with the header of another file."""
    write_state_file(path, state, {key: text for key, text in metadata.items() if key != DIGEST})
