"""The errors of checkpoints and of collective work, and the base of every error of nnx.

A message has the failed operation, the value seen, the expected value, and the remedy. The
remedy is kept apart so that the command line can print it on a line of its own.
"""

from __future__ import annotations

import errno


class NnxError(Exception):
    """Base of all errors raised by nnx.

    Args:
        message: A sentence with the failed operation, the value seen and the expected value.
        remedy: An imperative sentence that tells the user what to do about it.

    Example:
        >>> str(NnxError("cannot read 'x.ckpt': no such directory.", remedy="Check the path."))
        "cannot read 'x.ckpt': no such directory. Check the path."
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def add(self, sentence: str) -> None:
        """Say something more, before the remedy."""
        self.message = f"{self.message} {sentence}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with positional arguments only, and lose the remedy
        # when an error travels from one rank to the others.
        return (_rebuild, (type(self), self.message, self.remedy))


def _rebuild(cls: type[NnxError], message: str, remedy: str) -> NnxError:
    return cls(message, remedy=remedy)


class PluginError(NnxError):
    """A plugin could not be loaded, or declared something invalid."""


class UnsupportedError(NnxError, RuntimeError):
    """The combination asked for (device, precision, model) is not supported by this backend."""


class DisagreementError(NnxError, RuntimeError):
    """The ranks differ in what they must have in common; the message names the first thing and the rank."""


class RankLostError(NnxError, RuntimeError):
    """A rank gives no sign of life: its process has ended or hangs, or its machine cannot be reached."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        usual = (
            "Its process has ended or hangs, or its machine cannot be reached: its own output has the cause. "
            "Start again from the last checkpoint."
        )
        super().__init__(message, remedy=remedy or usual)


class CheckpointError(NnxError):
    """A checkpoint could not be written, read or verified; nothing committed before is lost."""


class ReaderNotInstalledError(CheckpointError):
    """The package that reads an engine's own checkpoints is not installed; the checkpoint may be sound."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was to be read; Lightning's own strategies raise the other base."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.errno, self.strerror = errno.ENOENT, message
