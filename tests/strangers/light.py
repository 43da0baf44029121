"""The nine models in the onnx package's ``light`` folder at batch 8: every gradient, and five steps on both engines.

``python tests/strangers/light.py [NAME ...]`` prints one line per model, and exits with status 1 if one is not as in PyTorch. The
largest take minutes: ``make test-all`` compares all that is compared here of the small ones alone.
"""

from __future__ import annotations

import argparse
import sys
import time

from oracles.light_models import NAMES, LightModel, errors, loss_errors

GRADIENT_TOLERANCE = 1e-8
"""In float64, relative to the norm of each gradient."""
LEAST = 1e-4
"""What float32 is allowed at least; else it is four times what PyTorch's own float32 is off by, in its worst tensor."""


def differences(model: LightModel) -> dict[str, tuple[float, float]]:
    """By how much each figure is off, and how much it may be."""
    exact, rounded = model.exact, model.rounded
    moves = model.moved(exact.state)
    own = {
        "gradients": max(errors(rounded.gradients, exact.gradients).values()),
        "steps": max(errors(model.moved(rounded.state), moves).values()),
    }
    allowed = {figure: max(LEAST, 4 * off) for figure, off in own.items()} | {"losses": 1.0}
    found = {"float64": (max(errors(model.gradients_in_float64(), exact.gradients).values()), GRADIENT_TOLERANCE)}
    for engine in ("onnxruntime", "torch"):
        losses, state = model.steps_on(engine)
        off = {
            "losses": loss_errors(losses, exact.losses),
            "gradients": max(errors(model.gradients_on(engine), exact.gradients).values()),
            "steps": max(errors(model.moved(state), moves).values()),
        }
        found |= {f"{engine} {figure}": (value, allowed[figure]) for figure, value in off.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    failed = 0
    for name in parser.parse_args().names or NAMES:
        start = time.perf_counter()
        found = differences(LightModel(name))
        is_right = all(off <= allowed for off, allowed in found.values())
        failed += not is_right
        figures = ", ".join(f"{figure} {off:.0e} of {allowed:.0e}" for figure, (off, allowed) in found.items())
        print(f"{name:14} {'right' if is_right else 'WRONG'}  {figures}  ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{failed} are not as in PyTorch")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
