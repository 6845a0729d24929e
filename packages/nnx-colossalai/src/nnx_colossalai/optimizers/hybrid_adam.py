"""The optimizers of ``colossalai.nn.optimizer`` by their names and arguments, on torch's own Adam.

They step where the masters lie: in host memory with torch's fused CPU kernel, on the device with its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nnx_core.errors import OptionError

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class HybridAdam(torch.optim.Adam):
    """Adam wherever each parameter lies: AdamW's numbers with ``adamw_mode``, else Adam's, bit for bit.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: Only True.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient with `adamw_mode`, else an L2 penalty.
        adamw_mode: True if it is AdamW.
        nvme_offload_fraction: Only 0.
        nvme_offload_dir: Only None.

    Raises:
        OptionError: An argument asks for what is not offered.
    """

    def __init__(  # noqa: PLR0917 # the historical order
        self,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        name = type(self).__name__
        _check_bias_correction(name, bias_correction)
        if nvme_offload_fraction or nvme_offload_dir is not None:
            raise OptionError(
                f"{name}(nvme_offload_fraction={nvme_offload_fraction!r}, nvme_offload_dir="
                f"{nvme_offload_dir!r}): moments lie on the device or in host memory, not on disk.",
                remedy="Leave both out; placement_policy and offload_fraction of the strategy offload.",
            )
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
        )


class CPUAdam(HybridAdam):
    """`HybridAdam` under the name for masters that are all in host memory; where they are, the plan says."""


class FusedAdam(torch.optim.Adam):
    """Adam or AdamW with the order of arguments of the historical FusedAdam.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: Only True.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        adamw_mode: True if it is AdamW.
        weight_decay: Decoupled from the gradient with `adamw_mode`, else an L2 penalty.
        amsgrad: Use the largest second moment so far.
        set_grad_none: True if ``zero_grad()`` lets gradients go; otherwise it fills them with zeros.
    """

    def __init__(  # noqa: PLR0917 # the historical order
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check_bias_correction(type(self).__name__, bias_correction)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, for copies and pickles, with what it does not know of."""
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's, with the default that was chosen at construction."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


def _check_bias_correction(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        raise OptionError(
            f"{name}(bias_correction=False): torch's Adam always corrects the bias of its moments.",
            remedy="Leave it out; a warm-up of the learning rate damps the first steps.",
        )
