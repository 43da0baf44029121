"""Who trains a model: burnish, and PyTorch as a careful user would run it."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.runtime.devices import tensor_float
from gpu_stages.models import Model, program_of
from gpu_stages.setting import Setting

CHECKED_STEPS = 3
# Of the loss, relative; as benchmarks/compare.py has them. TF32 keeps 10 bits and bfloat16 8.
TOLERANCES = {"float32": 1e-3, "TF32": 4e-3, "bfloat16": 1.6e-2}
REST_STEPS = 3


class Trainer(Protocol):
    """Trains one model, a step a call."""

    def step(self) -> Any:
        """Train on the next batch; returns the loss, as a tensor that may still be computed or a number."""
        ...

    def close(self) -> None: ...


class BurnishTrainer:
    """A session on the PyTorch engine; batches come from the host's memory in every step.

    Args:
        precision: ``float32``, ``TF32`` or ``bfloat16``.
        options: of ``TorchEngine``.
    """

    def __init__(self, model: Model, batch: int, precision: str, setting: Setting, options: Mapping[str, Any]):
        self._batches = itertools.cycle(model.batches(batch))
        program = program_of(model, "bfloat16" if precision == "bfloat16" else "float32")
        engine = TorchEngine(setting.device, tf32=precision != "float32", **options)
        self._session = burnish.Session(program, engine=engine, device=setting.device)

    def step(self) -> float:
        return self._session.step(next(self._batches))["loss"]

    def close(self) -> None:
        self._session.close()


class PyTorchTrainer:
    """PyTorch's own step: channels last for images, a fused optimizer, flash attention where PyTorch takes it.

    Batches lie in pinned memory and are sent to the GPU in every step; the loss is not waited for.

    Args:
        precision: ``float32``, ``TF32`` or ``bfloat16`` (autocast).
        compilation: arguments of ``torch.compile``, whose graph takes in the loss; None runs eagerly.
    """

    def __init__(self, model: Model, batch: int, precision: str, setting: Setting, compilation: Mapping[str, Any] | None = None):
        self._device, self._precision = torch.device(setting.device), precision
        layout = torch.channels_last if model.images else torch.contiguous_format
        feeds = [{name: torch.from_numpy(array) for name, array in each.items()} for each in model.batches(batch)]
        if model.images:
            feeds = [each | {"x": each["x"].contiguous(memory_format=layout)} for each in feeds]
        if setting.on_gpu:
            feeds = [{name: tensor.pin_memory() for name, tensor in each.items()} for each in feeds]
        self._batches = itertools.cycle(feeds)
        module = model.module().to(self._device)
        self._module = module.to(memory_format=layout) if model.images else module
        self._optimizer = model.torch_optimizer(self._module)

        def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return model.loss(self._module, x, labels)

        self._loss: Callable[..., torch.Tensor] = loss if compilation is None else torch.compile(loss, **compilation)

    def step(self) -> torch.Tensor:
        feeds = {name: tensor.to(self._device, non_blocking=True) for name, tensor in next(self._batches).items()}
        self._optimizer.zero_grad(set_to_none=True)
        with tensor_float(self._precision != "float32"), _algorithms_measured():
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
                loss = self._loss(feeds["x"], feeds["labels"])
            loss.backward()
            self._optimizer.step()
        return loss.detach()

    def close(self) -> None:
        del self._module, self._optimizer, self._loss


def _algorithms_measured() -> Any:
    """Within it cuDNN measures which algorithm is the fastest, as careful users have it."""
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=True, deterministic=False, allow_tf32=torch.backends.cudnn.allow_tf32
    )


@dataclass(frozen=True)
class Contender:
    """A way to train a model.

    Attributes:
        title: in the table.
        options: of ``TorchEngine``; None for PyTorch's own step.
        compilation: arguments of ``torch.compile``.
        gpu: whether it is for a GPU alone.
    """

    title: str
    options: Mapping[str, Any] | None = None
    compilation: Mapping[str, Any] | None = None
    gpu: bool = False

    @property
    def compiles(self) -> bool:
        """Whether a compiler takes the model first."""
        return self.compilation is not None or (self.options or {}).get("compile") == "inductor"

    def open(self, model: Model, batch: int, precision: str, setting: Setting) -> Trainer:
        """Make the trainer.

        Raises:
            Skipped: it is for a GPU, and the campaign runs on none.
        """
        if self.gpu:
            setting.require_gpu()
        if self.options is not None:
            return BurnishTrainer(model, batch, precision, setting, self.options)
        compilation = self.compilation
        if compilation is not None and setting.tiny:
            compilation = {"backend": "aot_eager"}  # all of torch.compile but the building of what it generates
        return PyTorchTrainer(model, batch, precision, setting, compilation)


EAGER = Contender("PyTorch eager")
COMPILED = Contender("torch.compile", compilation={"dynamic": False})
AUTOTUNED = Contender("torch.compile, max-autotune", compilation={"dynamic": False, "mode": "max-autotune"}, gpu=True)
GRAPHED = Contender("torch.compile, reduce-overhead", compilation={"dynamic": False, "mode": "reduce-overhead"}, gpu=True)
BURNISH = Contender("burnish", options={})
BURNISH_INDUCTOR = Contender("burnish, inductor", options={"compile": "inductor"})
BURNISH_LAUNCHED = Contender("burnish, no CUDA graph", options={"capture": False})


@dataclass
class Measured:
    """A contender that takes part: its trainer, its first losses and its turns."""

    title: str
    trainer: Trainer
    figures: dict[str, Any]
    turns: list[float] = field(default_factory=list)
    seconds_of_step: float = 0.0


def enter(contender: Contender, model: Model, batch: int, precision: str, setting: Setting) -> Measured:
    """Open a contender and take the first steps; on a GPU, note the most memory that it took beside what was there."""
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        beside = torch.cuda.memory_allocated()
    began = time.perf_counter()
    trainer = contender.open(model, batch, precision, setting)
    losses = [float(trainer.step())]
    first = time.perf_counter() - began
    losses += [float(trainer.step()) for _ in range(CHECKED_STEPS - 1)]
    measured = Measured(contender.title, trainer, {"first_step_seconds": first, "losses": losses})
    if setting.on_gpu:
        # Others are alive beside it: what it took at the most is what was added to them.
        torch.cuda.synchronize()
        measured.figures["peak_bytes"] = torch.cuda.max_memory_allocated() - beside
    began = time.perf_counter()
    for _ in range(REST_STEPS):  # CUDA graphs and choices of algorithms are made by then
        loss = trainer.step()
    float(loss)
    measured.seconds_of_step = (time.perf_counter() - began) / REST_STEPS
    return measured


def check_losses(losses: Sequence[float], expected: Sequence[float], precision: str) -> None:
    """Hold the first losses to those of another contender.

    Raises:
        ValueError: one is further away than rounding in this precision takes it.
    """
    for number, (loss, other) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(loss - other) <= TOLERANCES[precision] * abs(other):
            raise ValueError(f"no time counts: the loss of step {number} is {loss:.6g}, PyTorch's {other:.6g}")


def take_turn(measured: Measured, seconds: float) -> None:
    """Train for about so long, and note the time of a step; the last loss is waited for."""
    steps = max(1, round(seconds / max(measured.seconds_of_step, 1e-6)))
    began = time.perf_counter()
    for _ in range(steps):
        loss = measured.trainer.step()
    float(loss)
    measured.seconds_of_step = (time.perf_counter() - began) / steps
    measured.turns.append(measured.seconds_of_step)


def timed(measured: Measured, batch: int) -> dict[str, Any]:
    """The figures of a contender whose turns are over."""
    median = statistics.median(measured.turns)
    return {
        "step_milliseconds": 1e3 * median,
        "best_milliseconds": 1e3 * min(measured.turns),
        "samples_per_second": batch / median,
        **measured.figures,
        "turns": measured.turns,
    }


def let_go(device: str) -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(setting: Setting) -> int:
    """The most memory since ``reset_peak``: what PyTorch holds of the GPU, or resident on the CPU."""
    if setting.on_gpu:
        return torch.cuda.max_memory_reserved()
    from contenders import peak_bytes as resident

    return resident()


def reset_peak(setting: Setting) -> None:
    """Forget peaks so far."""
    let_go(setting.device)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        return
    # Where Linux does not allow it the peak is that of the process so far.
    with suppress(OSError), open("/proc/self/clear_refs", "w") as references:
        references.write("5")
