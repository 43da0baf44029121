"""Local steps: workers step separately for some steps, and then average their states (local SGD, DiLoCo).

Sources: Stich, "Local SGD converges fast and communicates little", 2019; Douillard et al., "DiLoCo: distributed low-communication
training of language models", 2023. All workers begin a round with the same state, and train on their own parts of the batches.
With n_r the number of worker r's samples in the round and N their sum, every number x of the state that steps change then
becomes::

    x + sum over r of n_r / N (x_r - x)                  in the communicator's order of addition

Running statistics may be rank 0's instead. Parameters under ``burnish.optim.diloco`` take an outer step, and held rows do not
change. Integers and masks come from the first worker with the most steps. Random keys differ by an offset of the rank. If a
worker had to reopen its graph with fewer runtime optimizations, all do in the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish import optim
from burnish.distributed.runner import SpreadRunner, gathered, summed
from burnish.distributed.samples import sample_axes
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator
from burnish.engines.split_graph import parted
from burnish.errors import ConfigurationError
from burnish.graph.annotations import changing_masks
from burnish.norms import Sync, get
from burnish.optim.accumulate import Accumulate
from burnish.optim.average import AVERAGE
from burnish.optim.base import layers_of
from burnish.optim.diloco import OUTER_MOMENTUM, DiLoCo
from burnish.program import Program, Role
from burnish.random.keys import mix_array
from burnish.rewriting.precision import FULL
from burnish.rewriting.precision import get as precision_of

RANK_WORDS = np.array([0x1F83D9AB, 0x5BE0CD19], np.uint32)
"""Fractional parts of the roots of 13 and 17; no words of seeds and streams begin with them."""


def outer_of(program: Program) -> DiLoCo | None:
    return next((layer for layer in _optimizers(program) if isinstance(layer, DiLoCo)), None)


def check_local_steps(program: Program) -> None:
    layers = program.options.get("norm_layers", {})
    synchronized = next((name for name, policy in layers.items() if isinstance(get(policy), Sync)), None)
    if synchronized is not None:
        raise ConfigurationError(
            f"synchronize_every: the batch normalization '{synchronized}' was compiled with the policy '{layers[synchronized]}', "
            "statistics of all workers in each step, and here each steps alone: compile it with norm='train', 'local' or "
            "'ghost:<size>'"
        )
    if any(isinstance(layer, Accumulate) for layer in _optimizers(program)):
        raise ConfigurationError(
            "synchronize_every: the optimizer accumulates gradients, and workers that step alone may stand at different "
            "micro-batches of an update: leave accumulate out, and raise synchronize_every for fewer exchanges"
        )
    mixed = precision_of(program.options.get("precision", FULL))
    if mixed is not None and mixed.initial_scale is not None:
        raise ConfigurationError(
            "synchronize_every: the loss is scaled, and each worker that steps alone would come to a scale and to skipped steps "
            "of its own: compile with precision='bfloat16', or with loss_scale=None"
        )


class LocalSteps(SpreadRunner):
    """A runner that steps separately and averages with the others after ``every`` steps, and when the state is requested.

    A step on an empty part does nothing and reports NaN. ``runner`` was opened with ``worker_start``.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        communicator: Communicator,
        program: Program,
        every: int,
        state: Mapping[str, np.ndarray],
        statistics: str = "mean",
    ):
        super().__init__(runner, communicator)
        signature = program.signature["step"]
        self._every, self._outer, self._updated = every, outer_of(program), set(signature.updates)
        self._of_rank0 = {entry.updates for entry in signature.outputs_of(Role.STATISTIC) if statistics == "rank0"}
        held: Mapping[str, list[int]] = program.options.get("hold_rows", {})
        self._held = {entry: rows for name, rows in held.items() for entry in (f"param/{name}", AVERAGE.entry(name))}
        self._masks = changing_masks(program.graphs.unlowered("predict").graph)
        self._step_entry = next((entry.name for entry in signature.inputs_of(Role.STEP)), None)
        self._key = next((entry.name for entry in signature.inputs_of(Role.KEY)), None)
        self._counted = next(iter(sample_axes(signature.inputs_of(Role.DATA)).items()))
        self._reported = [(entry.name, entry.dtype.numpy()) for entry in signature.outputs if entry.updates is None]
        self._begin(state)

    @property
    def is_spread(self) -> bool:
        return self._steps > 0

    @property
    def ends_round(self) -> bool:
        return self._steps + 1 == self._every

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        name, axis = self._counted
        samples = inputs[name].shape[axis]
        if samples:
            outputs = self._runner.step(inputs)
        else:
            outputs = {name: np.full((), np.nan, dtype) for name, dtype in self._reported}
            if self._step_entry is not None:
                state = self._runner.state()
                self._runner.load_state({**state, self._step_entry: state[self._step_entry] + 1})
        self._samples += samples
        self._taken += bool(samples)
        self._steps += 1
        if self._steps == self._every:
            self.synchronize()
        return outputs

    def own_state(self) -> Arrays:
        return {**self._runner.state(), **self._common_key()}

    def state(self) -> Arrays:
        self.synchronize()
        return self.own_state()

    def state_entry(self, name: str) -> np.ndarray:
        return self._common_key()[name] if name == self._key else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(worker_start(state, self._key, self._communicator.rank))
        self._begin(state)

    def _begin(self, state: Mapping[str, np.ndarray]) -> None:
        self._start = {name: np.array(array) for name, array in state.items() if name in self._updated}
        self._steps = self._taken = self._samples = 0

    def _common_key(self) -> Arrays:
        key = self._key
        return {} if key is None else {key: self._runner.state_entry(key) - offset_of(self._communicator.rank)}

    def synchronize(self) -> None:
        """End the round, if one has begun, together with all workers."""
        if not self._steps:
            return
        state = self.own_state()
        changing = [name for name in state if name in self._updated]
        names = [name.removeprefix("param/") for name in self._start if name.startswith("param/")]
        slots = {f"param/{name}": OUTER_MOMENTUM.entry(name) for name in (names if self._outer is not None else ())}
        outer = {name: slot for name, slot in slots.items() if slot in self._start}
        whole = [name for name in changing if state[name].dtype.kind in "iub" or name in self._masks]
        mean = [name for name in changing if name not in whole and name not in outer.values()]
        counts = np.array([self._samples, self._taken, self._runner.reopened], np.int64)
        content = np.concatenate([counts, *(state[name].reshape(-1).astype(np.int64) for name in whole)])
        rows = gathered(self._communicator, content)
        self._runner.reopen(int(rows[:, 2].max()))
        samples = rows[:, 0]
        weight = samples[self._communicator.rank] / samples.sum() if samples.any() else 1.0 / len(rows)
        most = rows[int(np.argmax(rows[:, 1])), len(counts) :]
        joined = dict(zip(whole, parted(most, [state[name] for name in whole]), strict=True))
        wide: Any = np.float64 if any(state[name].dtype == np.float64 for name in mean) else np.float32
        moved = [self._moved(name, state[name].astype(wide), wide(weight)) for name in mean]
        flat = np.concatenate([part.reshape(-1) for part in moved]) if moved else np.zeros(1, wide)
        steps = parted(summed(self._communicator, flat), moved)
        for name, step in zip(mean, steps, strict=True):
            if name in self._of_rank0:
                joined[name] = step.astype(state[name].dtype)
                continue
            if name in outer:
                assert self._outer is not None
                slot, momentum = outer[name], wide(self._outer.outer_momentum)
                velocity = momentum * state[slot].astype(wide) - step
                joined[slot] = velocity.astype(state[slot].dtype)
                step = wide(self._outer.outer_lr) * (step - momentum * velocity)
            joined[name] = (self._start[name].astype(wide) + step).astype(state[name].dtype)
            for row in self._held.get(name, ()):
                joined[name][row] = self._start[name][row]
        self.load_state({**state, **joined})

    def _moved(self, name: str, value: np.ndarray, weight: Any) -> np.ndarray:
        if name not in self._of_rank0:
            return (value - self._start[name].astype(value.dtype)) * weight
        return value if self._communicator.rank == 0 else np.zeros_like(value)


def worker_start(state: Mapping[str, np.ndarray], key: str | None, rank: int) -> Mapping[str, np.ndarray]:
    return state if key is None else {**state, key: state[key] + offset_of(rank)}


def offset_of(rank: int) -> np.ndarray:
    """Return the difference of a worker's random key from the common one: uint32 [2], 0 for the first."""
    offset: np.ndarray = mix_array(RANK_WORDS + np.uint32(rank)) - mix_array(RANK_WORDS)
    return offset


def _optimizers(program: Program) -> list[object]:
    return list(layers_of(optim.get(program.options["optimizer"]))) if "optimizer" in program.options else []
