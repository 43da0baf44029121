"""Try the standard's inference in a separate process with limits, for a model that may need more memory than there is."""

from __future__ import annotations

import json
import subprocess
import sys

import onnx

from burnish.errors import ModelError
from burnish.importer.axis_counts import MOST_AXES
from burnish.untrusted import allowed_memory, allowed_seconds, if_trusted

TRIAL = """
import json, sys
settings = json.loads(sys.stdin.buffer.readline())
sys.path[:] = settings["path"]
import onnx.shape_inference
content = sys.stdin.buffer.read()
taken = lambda: 0
try:
    import resource
    taken = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + settings["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, OSError, ValueError):
    pass
most, name = 0, ""
try:
    model = onnx.shape_inference.infer_shapes(content, data_prop=settings["data_prop"])
except MemoryError:
    sys.exit(1)
except Exception:  # the library reports a failed allocation like a model with a fault
    sys.exit(1 if taken() > settings["memory"] // 4 else 0)
graphs = [model.graph]
while graphs:
    graph = graphs.pop()
    for value in (*graph.value_info, *graph.output):
        axes = len(value.type.tensor_type.shape.dim)
        if axes > most:
            most, name = axes, value.name
    for node in graph.node:
        for attribute in node.attribute:
            graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
print(json.dumps([most, name]))
"""


def try_inference(proto: onnx.ModelProto, data_prop: bool) -> None:
    """Infer the shapes of a model in another process, within the memory and time that reading the model may take.

    Other faults of the model are left to the caller, who infers its shapes next.

    Raises:
        ModelError: the process took more, or a value has more axes than arrays can have.
    """
    content = proto.SerializeToString()
    memory, seconds = allowed_memory(len(content)), allowed_seconds(len(content))
    settings = {"path": [str(place) for place in sys.path], "memory": memory, "data_prop": data_prop}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", TRIAL],
            input=json.dumps(settings).encode() + b"\n" + content,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return_code, answer = 1, b""
    except OSError:  # an embedded interpreter has no executable; there, only time is limited
        return
    else:
        return_code, answer = done.returncode, done.stdout
    if return_code:
        raise ModelError(
            f"inferring the shapes of the model takes more than the {memory:,} bytes of memory or the {seconds:,.0f} s that a "
            f"file of {len(content):,} bytes may take: export the model again, or {if_trusted(-(-2 * memory >> 30))}"
        )
    most, name = json.loads(answer or '[0, ""]')
    if most > MOST_AXES:
        raise ModelError(f"'{name}' would have {most:,} axes, and arrays have {MOST_AXES} at most: export the model again")
