"""`zero3` of DeepSpeed's with the module `of_deepspeed`, and `sharded.ckpt` of Lightning's FSDP."""

from jobs.docs_blocks import ROOT

for page in ("docs_migration_deepspeed.py", "docs_migration_lightning-fsdp.py"):
    plain = model  # noqa: F821
    exec((ROOT / "tests/docs_preludes" / page).read_text(), globals())
    if page == "docs_migration_deepspeed.py":
        of_deepspeed = model  # noqa: F821
    model = plain
trainer.save_checkpoint("sharded.ckpt")  # noqa: F821
