"""Three classes that a page registers: a backend and two Lightning strategies."""

from dataclasses import dataclass

from lightning.pytorch.strategies import DDPStrategy

from nnx_tiny.backend import TinyBackend


@dataclass(frozen=True, kw_only=True)
class MyOptions:
    bucket_megabytes: float = 25


class MyBackend(TinyBackend):
    Options = MyOptions


class TheirStrategy(DDPStrategy):
    pass
