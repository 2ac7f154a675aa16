"""What a caller asks of the loss beyond the plain one, as one value that travels through the package. docs/SPEC.md, section 12."""

from typing import NamedTuple, Optional

import torch

from . import _checks as check
from ._ops import ops
from ._registration import COUNT_WORD, MEAN, NONE, SUM_WORDS


class Options(NamedTuple):
    """Checked, as the ops take them."""

    z_loss: float = 0.0
    weight: Optional[torch.Tensor] = None  # float32 [V], contiguous
    num_items: Optional[torch.Tensor] = None  # int64 [1], on the device of the logits
    valid_vocab: int = 0  # 0: all columns
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: none
    return_z_loss: bool = False
    return_lse: bool = False
    return_stats: bool = False

    @property
    def of_loss(self):
        """What ops.cross_entropy_with_options takes after its first four arguments."""
        return (self.z_loss, self.weight, self.num_items, self.valid_vocab, self.label_smoothing, *self.map, self.return_stats)

    @property
    def of_gradient(self):
        """What the ops of the gradient take last."""
        return (self.weight if self.label_smoothing else None, *self.map)

    @property
    def map(self):
        return self.logit_scale, self.softcap

    def valid(self, rows, start=0):
        """The columns of rows that take part, the first of which is column `start` of the vocabulary."""
        end = max(self.valid_vocab - start, 0)
        return rows[:, :end] if self.valid_vocab and end < rows.shape[1] else rows

    def common(self):
        """(name, value) of what must be the same on all ranks. Waits for the device."""
        from .audit import digest

        count = None if self.num_items is None else int(self.num_items)
        weight = None if self.weight is None else f"weights with SHA-256 {digest(self.weight)}"
        named = self._asdict()
        return tuple({**named, "weight": weight, "num_items": count}.items())

    def results(self, loss, z_loss, lse, stats):
        """What the caller gets: the loss alone, or a tuple."""
        more = (z_loss,) * self.return_z_loss + (lse,) * self.return_lse + (stats,) * self.return_stats
        return (loss, *more) if more else loss


def _number(name, value, expected, holds):
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    if not holds(value):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return float(value)


_NUMBERS = (float, int)


def _positive(value):
    """And so far from the ends of float32 that products and quotients of two such are not beyond."""
    return 2.0**-60 <= value <= 2.0**60


def items(name, value, device):
    """A number of items as int64 [1] on `device`."""
    if not isinstance(value, torch.Tensor):
        return torch.full((1,), check.integer(name, value), dtype=torch.int64, device=device)
    check.tensor(name, value, (torch.int64, torch.int32))
    if value.numel() != 1 or value.is_meta != (device.type == "meta"):
        raise ValueError(f"{name}: expected an int or a tensor of one, got shape {tuple(value.shape)} on {value.device}")
    return value.detach().reshape(1).to(device, torch.int64)


def options(
    logits,
    mode,
    z_loss=0.0,
    weight=None,
    num_items=None,
    valid_vocab=None,
    return_z_loss=False,
    return_lse=False,
    columns=None,
    *,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    return_stats=False,
):
    """Options, or None if nothing is asked for. logits: for its device; columns: of the vocabulary, None where only all ranks together know."""
    default = type(z_loss) in _NUMBERS and type(label_smoothing) in _NUMBERS and type(logit_scale) in _NUMBERS and z_loss == 0 and label_smoothing == 0 and logit_scale == 1
    if default and softcap is weight is num_items is valid_vocab is None and return_z_loss is return_lse is return_stats is False:
        return None
    z_loss = _number("z_loss", z_loss, "a number, 0 or more and below 2**128", lambda x: 0 <= x < 2.0**128)
    label_smoothing = _number("label_smoothing", label_smoothing, "0 to 1", lambda x: 0 <= x <= 1)
    logit_scale = _number("logit_scale", logit_scale, "2**-60 to 2**60", _positive)
    softcap = 0.0 if softcap is None else _number("softcap", softcap, "2**-60 to 2**60, or None", _positive)
    if weight is not None:
        check.tensor("weight", weight, (torch.float32,), None if columns is None else (columns,), logits.device)
        if weight.layout != torch.strided:
            raise ValueError(f"weight: expected a dense tensor, got layout {weight.layout}")
        if weight.dim() != 1:
            raise ValueError(f"weight: expected shape [V], got {tuple(weight.shape)}")
        if len(weight) == 0:
            raise ValueError("weight: expected shape [V] with V >= 1, got (0,)")
        weight = weight.detach().contiguous()
    if num_items is not None:
        if mode != MEAN:
            raise ValueError("num_items: expected None, for it is what a mean divides by")
        num_items = items("num_items", num_items, logits.device)
    if valid_vocab is not None:
        most = columns if columns is not None else 2**31 - 1 if weight is None else len(weight)
        if not 1 <= check.integer("valid_vocab", valid_vocab) <= most:
            raise ValueError(f"valid_vocab: expected 1 to {most}, got {valid_vocab}")
    for name, value in (("return_z_loss", return_z_loss), ("return_lse", return_lse), ("return_stats", return_stats)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
    return Options(z_loss, weight, num_items, valid_vocab or 0, label_smoothing, logit_scale, softcap, return_z_loss, return_lse, return_stats)


def with_divisor(words, sums):
    """Words of other values of the rows whose mean divides by what `sums` divides by."""
    return torch.cat([words[:COUNT_WORD], sums[COUNT_WORD : COUNT_WORD + 1], words[COUNT_WORD + 1 : SUM_WORDS], sums[SUM_WORDS:]])


def reduce_z(z_loss, targets, mode, ignore_index, sums):
    """The z-loss [N] by itself, as the loss is reduced. sums: the words of the loss."""
    if mode == NONE:
        return z_loss
    words = ops.loss_digits(z_loss, targets, ignore_index)
    return ops.reduce_digits(with_divisor(words, sums) if mode == MEAN else words, mode == MEAN)


__all__ = ["Options", "items", "options", "reduce_z", "with_divisor"]
