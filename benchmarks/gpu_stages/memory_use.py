"""Peak memory of a training step beside PyTorch's, each contender alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu_stages.setting import Report, Setting
from gpu_stages.speed import CASES, Case
from gpu_stages.trainers import BURNISH, BURNISH_INDUCTOR, COMPILED, EAGER, Contender, enter, let_go, peak_bytes, reset_peak

CONTENDERS = (EAGER, BURNISH, COMPILED, BURNISH_INDUCTOR)
# One of each model in bfloat16, and one in float32.
MEASURED = (*CASES[:3], CASES[4])
TINY_CONTENDERS = (EAGER, BURNISH)


def run(setting: Setting, report: Report) -> None:
    """Measure each contender after what was before is let go."""
    for case in MEASURED:
        for contender in TINY_CONTENDERS if setting.tiny else CONTENDERS:
            report.case(case.row_of(contender.title), partial(peak_of, case, contender, setting))
            torch.compiler.reset()
            let_go(setting.device)


def peak_of(case: Case, contender: Contender, setting: Setting) -> dict[str, Any]:
    """Bytes at the peak of the first steps, with what recording a CUDA graph and compilers take, and of a later one."""
    model, batch = case.measured_in(setting)
    reset_peak(setting)
    measured = enter(contender, model, batch, case.precision, setting)
    try:
        figures = {"peak_bytes": peak_bytes(setting)}
        if setting.on_gpu:
            figures["held_bytes"] = torch.cuda.memory_allocated()
            let_go(setting.device)
            torch.cuda.reset_peak_memory_stats()
            float(measured.trainer.step())
            figures["later_peak_bytes"] = torch.cuda.max_memory_allocated()
            figures["later_reserved_bytes"] = torch.cuda.max_memory_reserved()
        return figures
    finally:
        measured.trainer.close()
