"""`old.ckpt`, a sharded directory that Lightning's own ModelParallelStrategy writes here."""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Wrapped(Net):  # noqa: F821
    def configure_model(self):
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


trainer = Trainer(
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    accelerator="cpu",
    devices=2,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Wrapped())
trainer.save_checkpoint("old.ckpt")
