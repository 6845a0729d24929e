"""Jobs that resume with Lightning alone: no plugin and no strategy of nnx."""

from __future__ import annotations

from nnx_test_helpers.resume_jobs import Seen, Snapshot
from nnx_test_helpers.training import MODELS, Run, make_trainer


def resume_stock(run: Run, step: int) -> Seen:
    """Resume a single file under one of Lightning's own strategies and train on."""
    module = MODELS[run.model](run)
    snapshot = Snapshot(step, None)
    make_trainer(run, callbacks=[snapshot]).fit(module, ckpt_path=run.resume)
    return Seen(*snapshot.seen, module.losses)
