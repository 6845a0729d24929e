"""The ranks of the page's example have a process group."""

from lightning.fabric import Fabric

Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
