"""A plugin of pytest's, and a module for scripts, that has engines find the libraries of emulated processors."""

from __future__ import annotations

from burnish.kernels import compiling
from emulation.processors import BUILT

compiling.BUILT = BUILT
