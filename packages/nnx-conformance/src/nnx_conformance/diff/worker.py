"""Run a user's script in one process of ``nnx diff``: ``python -m nnx_conformance.diff.worker``."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from nnx_conformance.diff.job import Done, Job, active_job
from nnx_conformance.diff.recorder import write_error
from nnx_core.errors import OptionError


def run_job(job: Job) -> None:
    """Run the script of a job until its steps are recorded.

    Raises:
        OptionError: There is no such script, or it ends without a recorded step.
    """
    from lightning.pytorch import seed_everything

    from nnx_conformance.diff.loop import finish_all, patched_fabric
    from nnx_conformance.diff.trainer import patched_trainer

    script = Path(job.script)
    if not script.is_file():
        raise OptionError(f"there is no script {job.script!r}.", remedy="Check the path.")
    seed_everything(job.seed, verbose=False)
    with ExitStack() as stack:
        stack.enter_context(patched_trainer(job))
        stack.enter_context(patched_fabric(job))
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *job.words]))
        stack.enter_context(mock.patch.object(sys, "path", [str(script.parent), *sys.path]))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Done:
            return
        if finish_all(job):
            return
    raise OptionError(
        f"{job.script!r} ended without `Trainer.fit`, `Fabric.setup` or `nnx.record`.",
        remedy="Give a script that trains, with its arguments.",
    )


def main() -> int:
    """Run the active job; return an exit code."""
    job = active_job()
    assert job is not None
    try:
        run_job(job)
    except BaseException as error:
        write_error(Path(job.directory), int(os.environ.get("RANK", "0")), error)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
