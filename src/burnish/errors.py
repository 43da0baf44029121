"""Every error burnish raises on purpose. Each message names the node or name, what is wrong, and what to do about it."""

from __future__ import annotations


class BurnishError(Exception):
    """Base of all errors that are the user's to act on."""


class ModelError(BurnishError):
    """A model that cannot be read or is not valid ONNX: corrupt file, failed check, unsafe external data."""


class UnsupportedOperatorError(BurnishError):
    """An operator that burnish cannot train, lower or run where it stands."""


class GradientError(UnsupportedOperatorError):
    """An operator on the path from a trained parameter to the loss that has no gradient rule.

    Attributes:
        problem: the message without the options that the caller added to it.
    """

    def __init__(self, problem: str, options: str = ""):
        super().__init__(f"{problem} ({options})" if options else problem)
        self.problem = problem


class ConfigurationError(BurnishError):
    """An option of the user's that does not fit the model: an unknown initializer, output, loss or optimizer."""


class InputError(BurnishError):
    """A batch that does not fit the program: a missing input, a wrong shape or dtype, a label out of range."""


class NonFiniteLossError(BurnishError):
    """The loss became NaN or infinite."""


class CheckpointError(BurnishError):
    """A checkpoint or saved program that is truncated, foreign, or does not fit."""


class DataError(BurnishError):
    """A data set that cannot be read as one."""


class EngineError(BurnishError):
    """An engine that is missing, or cannot run what it was given."""


class WorkerError(BurnishError):
    """A worker of a data-parallel run that is gone, late, cannot be reached, or differs from the others.

    Attributes:
        comes_again: whether a new start of the run would end so too.
    """

    def __init__(self, message: str, comes_again: bool = False):
        super().__init__(message)
        self.comes_again = comes_again


def comes_again(error: BaseException) -> bool:
    """Whether what raised an error would raise it again at a new start: a wrong model, option or data, here or on another worker.

    An engine may have run out of memory, a disk may have been full, and a loss depends on rounding: these may not come again.
    """
    if isinstance(error, WorkerError):
        return error.comes_again
    return isinstance(error, ModelError | UnsupportedOperatorError | ConfigurationError | InputError | DataError)
