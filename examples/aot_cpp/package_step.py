"""Package the training step of a small residual network, and its initial state, for main.cpp.

python package_step.py
cmake -B build -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" && cmake --build build
build/train step.pt2 state.safetensors 20
"""

from pathlib import Path

import safetensors.numpy

import burnish
from burnish.models import residual_network

if __name__ == "__main__":
    # The model reads images of 1x8x8; the batch stays open.
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    program.package("step.pt2")
    safetensors.numpy.save_file(program.initial_state(seed=0), "state.safetensors")
    print(f"step.pt2: {Path('step.pt2').stat().st_size:,} bytes")
