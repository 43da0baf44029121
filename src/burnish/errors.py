"""Every error burnish raises on purpose, and every warning: the node or name, what is wrong, and what to do about it."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Mapping

UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that steer a terminal or an editor: control and format characters, lone surrogates, line ends."""


def escaped(text: str) -> str:
    """Return a text with the characters that steer a terminal written out: ``\\x1b``, ``\\n``, ``\\u202e``.

    Names in a file can hold any: colour codes, line ends that forge a line, marks that turn what follows around.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii") if unicodedata.category(character) in UNSHOWN else character
        for character in text
    )


class _EscapedRecords(logging.Filter):
    """Writes out what steers a terminal in messages of the log ``burnish``."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escaped(record.getMessage()), ()
        return True


logging.getLogger("burnish").addFilter(_EscapedRecords())


class _Escaped:
    """An exception whose text is one line without anything that steers a terminal, whatever names stand in it."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class BurnishError(_Escaped, Exception):
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


class CallbackError(BurnishError):
    """A callback of a trainer that raised an exception: the message names the callback and the event."""


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


class CarryOverWarning(_Escaped, UserWarning):
    """A state was taken over in part: the message names what was not.

    Attributes:
        fresh: state entries that start anew -> why.
        dropped: state entries of the other program that this one has no place for.
    """

    def __init__(self, message: str, fresh: Mapping[str, str] | None = None, dropped: Iterable[str] = ()):
        super().__init__(message)
        self.fresh = dict(fresh or {})
        self.dropped = tuple(dropped)


class UntrainedWeightsWarning(_Escaped, UserWarning):
    """Weights of a model stay as they are though nobody asked for that: no gradient reaches them.

    Attributes:
        problem: the message without the options that the caller added to it.
        weights: initializer name -> why, as a clause that names the operator in the way.
    """

    def __init__(self, problem: str, options: str = "", weights: Mapping[str, str] | None = None):
        super().__init__(f"{problem} ({options})" if options else problem)
        self.problem = problem
        self.weights = dict(weights or {})


class ObjectiveWarning(_Escaped, UserWarning):
    """What is trained is probably not what was meant.

    The loss applies an activation to probabilities; or what exported the model made weights one, or two of one, folded batch
    normalization into them, or left scalars that count as constants; or samples of a batch are mixed.
    """


class NothingLearnedWarning(_Escaped, UserWarning):
    """A run of fine-tuning ended no better than a model that gives the same answer for each sample; the message says what to try.

    Attributes:
        loss: where the run ended; of the evaluation data if nothing was learned that holds for these alone.
        chance: the loss of always giving the share of each class, or the best value.
    """

    def __init__(self, message: str, loss: float | None = None, chance: float | None = None):
        super().__init__(message)
        self.loss, self.chance = loss, chance


class DenseGradientWarning(_Escaped, UserWarning):
    """A table whose gradient was to be that of the rows that a batch reads has one of all rows; the message says why."""


class DataWarning(_Escaped, UserWarning):
    """Samples are read otherwise than one would expect, or some are left out; the message says which."""


class KernelWarning(_Escaped, UserWarning):
    """Kernels cannot be used, and an engine's usual operators run instead: there is no compiler, a library cannot be loaded, or
    another user could have written it. The message says why."""


class UnprunedLayersWarning(_Escaped, UserWarning):
    """Layers that were not named are not pruned, as the pattern does not fit them; the message says which."""


class LayersInBodiesWarning(_Escaped, UserWarning):
    """Layers in branches or loop bodies stay as they are where those of the graph around them change; the message says which."""


class FixedBatchWarning(_Escaped, UserWarning):
    """A PyTorch module takes batches of one size alone, which its ``forward`` fixes; the message says which."""


class HooksWarning(_Escaped, UserWarning):
    """A module that is wrapped has submodules with hooks, which are not called; or one that is compiled has hooks on "
    "gradients."""


class AttributesWarning(_Escaped, UserWarning):
    """``forward`` of a PyTorch module sets attributes to what it computes, which a graph does not; the message says which."""


def comes_again(error: BaseException) -> bool:
    """Whether what raised an error would raise it again at a new start: a wrong model, option or data, here or on another worker.

    An engine may have run out of memory, a disk may have been full, and a loss depends on rounding: these may not come again.
    """
    if isinstance(error, WorkerError):
        return error.comes_again
    return isinstance(error, ModelError | UnsupportedOperatorError | ConfigurationError | InputError | DataError)
