"""DeepSpeed's directory `zero3` with its module `deepspeed_model`, and Lightning's FSDP's `sharded.ckpt`."""

from jobs.docs_blocks import ROOT

for page in ("docs_migration_deepspeed.py", "docs_migration_lightning-fsdp.py"):
    plain = model  # noqa: F821
    exec((ROOT / "tests/docs_preludes" / page).read_text(), globals())
    if page == "docs_migration_deepspeed.py":
        deepspeed_model = model  # noqa: F821
    model = plain
trainer.save_checkpoint("sharded.ckpt")  # noqa: F821
