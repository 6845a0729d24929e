"""Define the base of all errors of nnx, and the errors of checkpoints and of collective work.

A message names the failed operation, the value seen and the expected value. The remedy is a separate
attribute, so that the command line can print it on its own line.
"""

from __future__ import annotations

import errno


class NnxError(Exception):
    """Base of all errors raised by nnx.

    Args:
        message: A sentence with the failed operation, the value seen and the expected value.
        remedy: An imperative sentence with the fix.

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
        """Append a sentence to the message, before the remedy."""
        self.message = f"{self.message} {sentence}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # The default `__reduce__` passes positional arguments only, and would drop the remedy
        # when an error is sent to other ranks.
        return (_rebuild, (type(self), self.message, self.remedy))


def _rebuild(cls: type[NnxError], message: str, remedy: str) -> NnxError:
    return cls(message, remedy=remedy)


class PluginError(NnxError):
    """A plugin could not be loaded, or declared something invalid."""


class UnsupportedError(NnxError, RuntimeError):
    """The backend does not support the requested combination of device, precision and model."""


class DisagreementError(NnxError, RuntimeError):
    """Ranks differ in a value that must be equal; the message names the first such value and the rank."""


class RankLostError(NnxError, RuntimeError):
    """A rank does not respond: its process has ended or hangs, or its machine is unreachable."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        usual = (
            "Its process has ended or hangs, or its machine cannot be reached: its own output has the cause. "
            "Start again from the last checkpoint."
        )
        super().__init__(message, remedy=remedy or usual)


class CheckpointError(NnxError):
    """A checkpoint could not be written, read or verified; nothing committed before is lost."""


class ReaderNotInstalledError(CheckpointError):
    """The package that reads an engine's own checkpoints is not installed; the checkpoint may be intact."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint exists at the path. It is a `FileNotFoundError`, which Lightning's strategies raise."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.errno, self.strerror = errno.ENOENT, message
