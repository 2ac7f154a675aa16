"""The loss as a stateless module, for `kernels` layer mapping."""

import torch
from torch import nn

from .functional import cross_entropy


class CrossEntropyLoss(nn.Module):
    """``cross_entropy`` as a module. It takes no arguments: set ``reduction`` and ``ignore_index`` on the instance or in a subclass.

    ``loss = CrossEntropyLoss(); loss.reduction = "sum"``
    """

    reduction: str = "mean"
    ignore_index: int = -100

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, targets, self.reduction, ignore_index=self.ignore_index)


__all__ = ["CrossEntropyLoss"]
