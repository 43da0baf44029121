"""A reading process: gets a data set, and then reads one batch after another until its input ends.

``python -m burnish.data.reading.process``, with frames on its standard input and output. Its input ends with the process that
started it, however that ends; Ctrl-C is left to that process.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from typing import Any

from burnish.data.dataset import Dataset
from burnish.data.reading.frames import Request, receive, send
from burnish.errors import BurnishError

LOOK_SECONDS = 1.0


def main() -> None:
    """Answer requests for batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # What a library prints is not to stand among the frames.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        dataset = pickle.load(source)
    except EOFError:  # nothing was asked for
        return
    while (received := receive(source)) is not None:
        header, _ = received
        try:
            send(sink, *_answer(dataset, Request.of(header)))
        except BrokenPipeError:
            return


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: while it reads, it does not see that its input has."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _answer(dataset: Dataset, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        batch = request.read(dataset)
    except BurnishError as error:
        return {"error": str(error), "kind": type(error).__name__}, {}
    except Exception as error:  # whatever a data set of the user's raises: it is raised where the batch is waited for
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}, {}
    findings = getattr(dataset, "take_findings", None)
    return {"findings": {} if findings is None else findings()}, batch


if __name__ == "__main__":
    main()
