"""SparseAdam: Adam for embedding tables with few rows read per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT
from burnish.optim.arithmetic import double, epsilon, sqrt, stepped
from burnish.optim.base import Rate, RatedOptimizer, check_betas
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative


@dataclass(frozen=True)
class SparseAdam(RatedOptimizer):
    """Adam in the form of ``torch.optim.SparseAdam``, for ``burnish.compile(sparse=...)``.

    With parameter p, gradient g, moments m and v, and t = step + 1, in the rows with a gradient::

        m = m + (1 - beta1) * (g - m)
        v = v + (1 - beta2) * (g² - v)
        p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    If a program keeps a table's gradient as rows, the other rows and their moments do not change (PyTorch calls this lazy). t
    counts all steps, even steps that do not read a row. A parameter with a dense gradient is updated as a whole. Unlike ``Adam``,
    eps is added to an uncorrected root. State: ``first_moment/<initializer>`` and ``second_moment/<initializer>``, in the
    parameter's dtype and shape (PyTorch's ``exp_avg``, ``exp_avg_sq``).

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "sparse_adam"
    row_form = "lazy"
    slots = (FIRST_MOMENT, SECOND_MOMENT)
    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, eps=self.eps)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        beta1, beta2 = self.betas
        t = double(step) + 1.0
        root = sqrt(1.0 - beta2**t)
        rate = double(rate) * root / (1.0 - beta1**t)
        first, second = slots[FIRST_MOMENT], slots[SECOND_MOMENT]
        first = first + (gradient - first) * (1.0 - beta1)
        second = second + (gradient * gradient - second) * (1.0 - beta2)
        direction = first / (sqrt(second) + epsilon(self.eps, parameter))
        return stepped(parameter, direction, rate), {FIRST_MOMENT: first, SECOND_MOMENT: second}


sparse_adam = SparseAdam
