"""Errors and warnings of burnish. Each message names the node or option, the problem, and the remedy."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Mapping

UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that can control a terminal or editor: control and format characters, lone surrogates, line ends."""


def escaped(text: str) -> str:
    """Return a text with control characters escaped: ``\\x1b``, ``\\n``, ``\\u202e``.

    Names in a file can contain colour codes, line ends that forge a log line, or marks that reverse the text.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii") if unicodedata.category(character) in UNSHOWN else character
        for character in text
    )


class _EscapedRecords(logging.Filter):
    """Escapes control characters in messages of the ``burnish`` log."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escaped(record.getMessage()), ()
        return True


logging.getLogger("burnish").addFilter(_EscapedRecords())


class _Escaped:
    """An exception whose text is one line without control characters, whatever names it contains."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class BurnishError(_Escaped, Exception):
    """Base class of all errors that the user can act on."""


class ModelError(BurnishError):
    """A model that cannot be read or is not valid ONNX: corrupt file, failed check, unsafe external data."""


class UnsupportedOperatorError(BurnishError):
    """An operator that burnish cannot train, lower or run in its context."""


class GradientError(UnsupportedOperatorError):
    """An operator without a gradient rule between a trained parameter and the loss.

    Attributes:
        problem: the message without the advice that the caller appended.
    """

    def __init__(self, problem: str, options: str = ""):
        super().__init__(f"{problem} ({options})" if options else problem)
        self.problem = problem


class ConfigurationError(BurnishError):
    """An option that does not fit the model: an unknown initializer, output, loss or optimizer."""


class InputError(BurnishError):
    """A batch that does not fit the program: a missing input, a wrong shape or dtype, a label out of range."""


class NonFiniteLossError(BurnishError):
    """The loss became NaN or infinite."""


class CheckpointError(BurnishError):
    """A checkpoint or saved program that is truncated, from another program, or does not fit."""


class CallbackError(BurnishError):
    """A callback raised an exception. The message names the callback and the event."""


class DataError(BurnishError):
    """A data set that cannot be read."""


class EngineError(BurnishError):
    """A missing engine, or a model that an engine cannot run."""


class WorkerError(BurnishError):
    """A worker of a data-parallel run is gone, late, unreachable, or differs from the others.

    Attributes:
        comes_again: True if restarting the run would fail in the same way.
    """

    def __init__(self, message: str, comes_again: bool = False):
        super().__init__(message)
        self.comes_again = comes_again


class CarryOverWarning(_Escaped, UserWarning):
    """A state was loaded only in part. The message names the missing entries.

    Attributes:
        fresh: state entries that keep their initial values -> reason.
        dropped: entries of the loaded state that this program does not use.
    """

    def __init__(self, message: str, fresh: Mapping[str, str] | None = None, dropped: Iterable[str] = ()):
        super().__init__(message)
        self.fresh = dict(fresh or {})
        self.dropped = tuple(dropped)


class UntrainedWeightsWarning(_Escaped, UserWarning):
    """Weights of a model are not trained, though nobody froze them: no gradient reaches them.

    Attributes:
        problem: the message without the advice that the caller appended.
        weights: initializer name -> reason, a clause that names the blocking operator.
    """

    def __init__(self, problem: str, options: str = "", weights: Mapping[str, str] | None = None):
        super().__init__(f"{problem} ({options})" if options else problem)
        self.problem = problem
        self.weights = dict(weights or {})


class ObjectiveWarning(_Escaped, UserWarning):
    """The training objective is probably not the intended one.

    Examples: the loss applies an activation to probabilities; the exporter merged or duplicated weights, folded batch
    normalization into them or left scalars that count as constants; the model mixes samples of a batch.
    """


class NothingLearnedWarning(_Escaped, UserWarning):
    """Fine-tuning ended no better than a constant answer. The message suggests remedies.

    Attributes:
        loss: the final loss; the evaluation loss if only that one failed to improve.
        chance: the loss of always predicting the class frequencies, or the best constant.
    """

    def __init__(self, message: str, loss: float | None = None, chance: float | None = None):
        super().__init__(message)
        self.loss, self.chance = loss, chance


class DenseGradientWarning(_Escaped, UserWarning):
    """An embedding table gets a dense gradient instead of one for the rows in the batch. The message gives the reason."""


class DataWarning(_Escaped, UserWarning):
    """Samples were skipped or read in an unexpected way. The message says which."""


class KernelWarning(_Escaped, UserWarning):
    """An engine falls back to its stock operators because the kernels are not usable.

    There is no compiler, a library cannot be loaded, or another user could have written it. The message gives the reason.
    """


class UnprunedLayersWarning(_Escaped, UserWarning):
    """Layers that do not fit the pruning pattern, and were not named by the user, stay unpruned. The message lists them."""


class LayersInBodiesWarning(_Escaped, UserWarning):
    """Layers in branches or loop bodies stay unchanged although layers of the main graph change. The message lists them."""


class FixedBatchWarning(_Escaped, UserWarning):
    """A PyTorch module accepts only one batch size, fixed by its ``forward``. The message gives it."""


class HooksWarning(_Escaped, UserWarning):
    """Hooks are ignored: of submodules in a wrapped module, or gradient hooks in a compiled one."""


class AttributesWarning(_Escaped, UserWarning):
    """A PyTorch ``forward`` stores computed values in attributes, which a graph cannot do. The message lists the attributes."""


def comes_again(error: BaseException) -> bool:
    """True if an error would recur after a restart, because a model, an option or the data is wrong on some worker.

    Other errors may be temporary: an engine ran out of memory, a disk was full, or a loss was affected by rounding.
    """
    if isinstance(error, WorkerError):
        return error.comes_again
    return isinstance(error, ModelError | UnsupportedOperatorError | ConfigurationError | InputError | DataError)
