"""A checkpoint of another program: what Lightning's DeepSpeed strategy wrote on two processes."""

import shutil
from pathlib import Path

from jobs.docs_blocks import ROOT

written = ROOT / "packages/nnx-core/tests/checkpoint/foreign/fixtures/deepspeed/zero3_world2_lightning"
if not Path("epoch=3.ckpt").exists():
    shutil.copytree(written, "epoch=3.ckpt")
