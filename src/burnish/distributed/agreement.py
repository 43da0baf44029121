"""That workers train the same thing: compared before the first step, so that none waits for what another never sends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.compiler.executable import Executable
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.errors import ConfigurationError
from burnish.version import __version__

REMEDIES = {
    "version of burnish": "install the same version everywhere",
    "program": "compile the same model with the same options, or load the same saved program, on every worker",
    "exchanges": "give every worker the same burnish.DataParallel options, and start as many workers as it counts",
    "state": "give every worker the same state or seed, and the same checkpoint",
}
"""What is compared, and what to do where it differs."""


def check_agreement(
    communicator: Communicator, executable: Executable, state: Mapping[str, np.ndarray], options: str = ""
) -> None:
    """Compare what every worker is about to train; called by all workers at the same time.

    Args:
        communicator: to the others.
        executable: with its collectives.
        state: where it starts.
        options: what else is to be the same of how they exchange.

    Raises:
        ConfigurationError: workers differ, with what differs, the two ranks and both hashes.
    """
    digests = fingerprints(executable, communicator.size, state, options)
    own = np.frombuffer(b"".join(bytes.fromhex(digest) for digest in digests.values()), np.uint8).copy()
    rows = array_of(communicator.all_gather(buffer_of(communicator, own)))
    width = rows.shape[1] // len(digests)
    for index, what in enumerate(digests):
        found = [bytes(row[index * width : (index + 1) * width]).hex() for row in rows]
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
        if other is not None:
            raise ConfigurationError(
                f"The workers do not train the same thing: the {what} of rank 0 has the hash {found[0][:16]} and that of rank "
                f"{other} {found[other][:16]}. {REMEDIES[what][0].upper()}{REMEDIES[what][1:]}"
            )


def fingerprints(executable: Executable, workers: int, state: Mapping[str, np.ndarray], options: str = "") -> dict[str, str]:
    """Return the SHA-256 of what workers must have in common, as hexadecimal text, by what it is."""
    grad = (executable.semantic.get("grad") or executable.finished["grad"]).graph
    signature = json.dumps([executable.signature.to_dict(), executable.options], sort_keys=True, default=str)
    texts = {
        "version of burnish": [__version__.encode()],
        "program": [signature.encode()],
        "exchanges": [f"{workers};{options}".encode(), *_structure(grad)],
        "state": [
            part for name, array in sorted(state.items()) for part in (name.encode(), np.ascontiguousarray(array).tobytes())
        ],
    }
    digests = {}
    for what, parts in texts.items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        digests[what] = digest.hexdigest()
    return digests


def _structure(graph: ir.Graph) -> Iterator[bytes]:
    """A graph without the names of its values: what is computed, of what, in which order."""
    numbers: dict[ir.Value, int] = {value: index for index, value in enumerate(graph.inputs)}
    for node in graph.all_nodes():
        operands = [None if value is None else numbers.get(value, -1) for value in node.inputs]
        attributes = sorted((name, attribute) for name, attribute in node.attributes.items())
        yield f"{node.domain}:{node.op_type}{operands}".encode()
        for name, attribute in attributes:
            if attribute.type == ir.AttributeType.TENSOR:
                yield name.encode() + attribute.as_tensor().tobytes()
            elif attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                yield f"{name}={attribute.value}".encode()
        for value in node.outputs:
            numbers[value] = len(numbers)
            yield f"{value.dtype}{value.shape}".encode()
