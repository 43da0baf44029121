"""Contender: PyTorch eager on the same model, NCHW, as an imported ONNX model gets it. Started by ``portable.py``."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import torch_models
from contenders import serve


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    started = time.perf_counter()
    module = getattr(torch_models, job["architecture"])()
    module.load_state_dict(torch.load(job["weights"], weights_only=True))
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=job["lr"], momentum=job["momentum"])
    with np.load(job["data"]) as data:
        x, labels = torch.from_numpy(data["x"]), torch.from_numpy(data["labels"])

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    serve(step, {"load_seconds": time.perf_counter() - started})


if __name__ == "__main__":
    main()
