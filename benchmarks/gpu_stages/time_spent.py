"""Where the time of a step goes: the kernels that take longest, and what FLOP and bytes alone would take on this card.

FLOP and bytes are those of the step's ATen operators, each of which reads its operands and writes its results: a step whose
operators are fused moves fewer bytes. The limits are measured: a product of large matrices, and a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from burnish.engines.torch.runtime.devices import tensor_float
from gpu_stages.setting import Report, Setting
from gpu_stages.speed import CASES, Case
from gpu_stages.trainers import BURNISH, BURNISH_INDUCTOR, COMPILED, Contender, enter, let_go

KERNELS, STEPS = 12, 3
PROFILED = CASES[:3]
CONTENDERS = (BURNISH, BURNISH_INDUCTOR, COMPILED)
REPEATS = 10


def run(setting: Setting, report: Report) -> None:
    """Measure the card's limits, then profile the models."""
    limits = report.case("limits of the device", partial(limits_of, setting)) or {}
    for case in PROFILED:
        work = report.case(case.row_of("work of a step"), partial(work_of, case, setting, dict(limits)))
        for contender in (BURNISH,) if setting.tiny else CONTENDERS:
            report.case(case.row_of(contender.title), partial(kernels_of, case, contender, setting, dict(work or {})))
            torch.compiler.reset()
            let_go(setting.device)


def limits_of(setting: Setting) -> dict[str, float]:
    """FLOP per second of products in each precision, and bytes per second of a copy, which reads and writes."""
    size = 128 if setting.tiny else 8192
    figures = {}
    for precision, dtype in {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16}.items():
        a, b = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
        with tensor_float(precision == "TF32"):
            figures[f"flop_per_second_{precision}"] = 2 * size**3 / _seconds(partial(torch.mm, a, b), setting)
    source = torch.empty((1 << 16) if setting.tiny else (1 << 30), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    figures["bytes_per_second"] = 2 * source.numel() / _seconds(partial(target.copy_, source), setting)
    return figures


def _seconds(call: Callable[[], Any], setting: Setting) -> float:
    for _ in range(3):
        call()
    _wait(setting)
    began = time.perf_counter()
    for _ in range(REPEATS):
        call()
    _wait(setting)
    return (time.perf_counter() - began) / REPEATS


def _wait(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()


class Traffic(TorchDispatchMode):
    """Counts operators, and the bytes of their operands and results where they are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in operands}
        if made and not all(each.untyped_storage().data_ptr() in storages for each in made):
            self.operators += 1
            self.bytes += sum(each.numel() * each.element_size() for each in (*operands, *made))
        return results


def work_of(case: Case, setting: Setting, limits: dict[str, float]) -> dict[str, Any]:
    """FLOP and bytes of a step that burnish's operators do one by one, and the least time that either takes on this card."""
    contender = Contender("", options={"capture": False, "compile": "none"})
    model, batch = case.measured_in(setting)
    measured = enter(contender, model, batch, case.precision, setting)
    try:
        with FlopCounterMode(display=False) as flop, Traffic() as traffic:
            float(measured.trainer.step())
    finally:
        measured.trainer.close()
    figures: dict[str, Any] = {
        "step_flop": flop.get_total_flops(),
        "operators_bytes": traffic.bytes,
        "operators": traffic.operators,
    }
    if limits:
        flop_seconds = figures["step_flop"] / limits[f"flop_per_second_{case.precision}"]
        figures["least_by_flop_milliseconds"] = 1e3 * flop_seconds
        figures["unfused_by_bytes_milliseconds"] = 1e3 * traffic.bytes / limits["bytes_per_second"]
    return figures


def kernels_of(case: Case, contender: Contender, setting: Setting, work: dict[str, Any]) -> dict[str, Any]:
    """Time of a step under the profiler, the share in which the device computes, and its kernels by time."""
    model, batch = case.measured_in(setting)
    measured = enter(contender, model, batch, case.precision, setting)
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if setting.on_gpu else [ProfilerActivity.CPU]
    try:
        with profile(activities=activities) as recorded:
            began = time.perf_counter()
            for _ in range(STEPS):
                loss = measured.trainer.step()
            float(loss)
            step_seconds = (time.perf_counter() - began) / STEPS
    finally:
        measured.trainer.close()
    events = [event for event in recorded.key_averages() if _own_time(event, setting) > 0]
    events.sort(key=lambda event: -_own_time(event, setting))
    busy = sum(_own_time(event, setting) for event in events) / STEPS
    figures = {
        "step_milliseconds": 1e3 * step_seconds,
        "busy_milliseconds": 1e3 * busy,
        "kernels_per_step": sum(event.count for event in events) / STEPS,
        "kernels": [
            {
                "name": event.key[:80],
                "count": event.count / STEPS,
                "per_step_milliseconds": 1e3 * _own_time(event, setting) / STEPS,
                "share": round(_own_time(event, setting) / STEPS / busy, 3),
            }
            for event in events[:KERNELS]
        ],
    }
    if "least_by_flop_milliseconds" in work:
        figures["flop_bound_share"] = work["least_by_flop_milliseconds"] / figures["step_milliseconds"]
    return figures


def _own_time(event: Any, setting: Setting) -> float:
    """Seconds in which the device ran this kernel; on the CPU, in this operator alone."""
    if not setting.on_gpu:
        return event.self_cpu_time_total * 1e-6
    is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
    return event.self_device_time_total * 1e-6 if is_kernel else 0.0
