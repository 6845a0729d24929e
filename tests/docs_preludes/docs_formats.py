"""A checkpoint of Lightning's DeepSpeed strategy, written on two processes."""

from jobs.docs_blocks import ROOT, lay_out

lay_out(
    ROOT / "packages/nnx-deepspeed/tests/fixtures/deepspeed/zero3_world2_lightning",
    "epoch=3.ckpt",
)
