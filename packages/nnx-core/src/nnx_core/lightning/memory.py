"""Copies in memory for Trainer: when they are made, and what a restarted run resumes from.

`nnx_checkpoint.memory` makes and finds the copies. Here a callback makes one after every so many optimizer
steps, as `ModelCheckpoint` saves, with the state of all other callbacks. At the beginning of a fit the newest
of the copies and the user's checkpoint replaces the latter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

from nnx_base.ranks import control_group, rank_and_size, together
from nnx_checkpoint import open_checkpoint
from nnx_checkpoint.memory.copies import Copies, name_of_run
from nnx_checkpoint.memory.copying import STEP
from nnx_checkpoint.reading.naming import Saved
from nnx_checkpoint.writing.request import SaveRequest
from nnx_core.errors import NnxError, OptionError
from nnx_core.lightning.compat import choose_checkpoint, dump_checkpoint, make_callback

__all__ = ["attach", "close_finished"]

log = logging.getLogger("nnx.memory")
_finished: list[Copies] = []


def attach(
    trainer: Any, root: str, every: int, directory: str, request: Callable[[dict[str, Any], str], SaveRequest]
) -> None:
    """Copy a Trainer's state to memory during this fit, and resume it from the newest copy. Collective.

    Args:
        trainer: The Trainer, whose process group exists and which has restored nothing yet.
        root: The root of Lightning's tree, such as ``"lightning.pytorch"``.
        every: The interval of copies in optimizer steps.
        directory: The memory-backed directory of the host.
        request: Function of Lightning's dict and a path that returns this rank's part of a checkpoint.

    Raises:
        OptionError: The run has no name that a restart keeps.
        CheckpointError: The directory cannot be used, or another run of this name is running.
    """
    run = name_of_run()
    if run is None:
        raise OptionError(
            f"memory_checkpoint={every} needs a name of the run that a restart keeps, and the launcher gives "
            "none.",
            remedy="Start with `nnx run`, give torchrun --standalone or --rdzv-id=NAME, or set NNX_RUN_ID.",
        )
    trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, MemoryCopies)]
    made = make_callback(MemoryCopies, root, Copies(directory, run), every, request)
    trainer.callbacks.append(made)  # the last one: the others' state of the step is in the copy
    choose_checkpoint(trainer, made.choose)


def close_finished() -> None:
    """Free the memory of finished fits now (at the latest the exit of the process does)."""
    while _finished:
        _finished.pop().close()


class MemoryCopies:
    """Mixin of a callback that copies the state to memory; made by `attach`.

    Args:
        copies: The copies of this fit.
        every: The interval in optimizer steps.
        request: See `attach`.
    """

    def __init__(
        self, copies: Copies, every: int, request: Callable[[dict[str, Any], str], SaveRequest]
    ) -> None:
        self.copies, self.every, self._request = copies, every, request
        self._step = 0

    def choose(self, given: Any) -> Any:
        """Return the path to resume from: the newest copy, or the given checkpoint if that is newer."""
        found, refused = self.copies.find()
        on_disk = _step_of(given) if given is not None and (found or refused) else None
        is_newer = found is not None and on_disk is not None and on_disk > found.step
        for sentence in refused:
            _say(sentence)
        if found is not None and not is_newer:
            self.copies.keep(found)
            _say(f"Resuming after step {found.step} from the copies in memory of {', '.join(found.hosts)}")
            return str(self.copies.memory.path)
        self.copies.keep(None)
        why = f"the copies in memory are of step {found.step}" if found else "no usable copies in memory"
        step = "" if on_disk is None else f"after step {on_disk} "
        if given is not None:
            _say(f"Resuming {step}from disk ({why}): {given}")
        elif refused:
            _say(f"Starting from the beginning ({why}, and no ckpt_path is given)")
        return given

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count steps from the resumed one."""
        self._step = trainer.global_step
        if rank_and_size(control_group())[0] == 0:
            hosts = ", ".join(self.copies.hosts.names)
            log.info("memory: a copy every %d steps in %s of %s", self.every, self.copies.memory.path, hosts)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Wait for the last step's copy, and begin one if it is due. Collective."""
        step, before = trainer.global_step, self._step
        if step == before:
            return  # gradients accumulate
        self._step = step
        self.copies.wait()
        if step // self.every != before // self.every:
            self.copies.copy(lambda path: self._request(dump_checkpoint(trainer), path))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last copy, and log the stalls."""
        self.copies.wait()
        stalls = self.copies.stalls
        if stalls and rank_and_size(control_group())[0] == 0:
            log.info(
                "memory: %d copies; training waited %.1f ms for each, %.1f ms at most",
                *(len(stalls), 1e3 * fmean(stalls), 1e3 * max(stalls)),
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the copies to the processes that take this one's place."""
        self.copies.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the copies go with the process."""
        self.copies.finish()
        _finished.append(self.copies)


def request_of(saved: Saved, path: str, *, step: int, strategy: str, opaque: Any) -> SaveRequest:
    """Return the request of a copy: what is not in Lightning's dict goes into its provenance."""
    return SaveRequest(
        path,
        tensors=saved.tensors,
        objects=saved.objects,
        aliases=saved.aliases,
        rank_objects=saved.rank_objects,
        provenance={"strategy": strategy, STEP: step},
        opaque=opaque,
    )


def _step_of(path: Any) -> int | None:
    """Return the global step of a checkpoint; None if some rank cannot open it. Collective."""
    with suppress(NnxError), together(control_group(), doing=f"opening {str(path)!r}"):
        return int(open_checkpoint(path).tree(None, lambda name: None)["trainer"]["global_step"])
    return None


def _say(text: str) -> None:
    if rank_and_size(control_group())[0] == 0:
        log.warning("memory: %s", text)
