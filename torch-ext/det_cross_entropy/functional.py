"""The loss, and the pieces it is made of, which compose over shards of the vocabulary by integer addition."""

import torch

from . import _autograd
from . import _checks as check
from ._ops import ops
from ._registration import MEAN


def cross_entropy(logits, targets, reduction="mean", *, ignore_index=-100, inplace_backward=False, validate=None):
    """Cross-entropy of logits against target indices: the same bytes on every device, for every batch and layout.

    Args:
        logits: [..., V], float32, bfloat16 or float16, natural-log units, 1 <= V < 2**31. Never modified, but for ``inplace_backward``. Rows may be strided
            (slices of a padded vocabulary); a layout without adjacent columns is copied.
        targets: int64 or int32, the leading shape of logits; each in [0, V) or ``ignore_index``.
        reduction: "mean" over the rows not ignored, "sum", or "none".
        ignore_index: rows with this target have loss 0 and gradient 0, leave the mean, and are not read.
        inplace_backward: backward writes the gradient over the logits, so that nothing of their size is allocated. They are read twice instead of once. Refused
            for a leaf and for a layout that would be copied; after it, reading the logits gives the gradient, and whatever else saved them for its backward
            raises torch's error of a tensor modified in place. No effect on the bytes, nor under torch.compile, which plans its own memory.
        validate: True raises for a target out of range, waiting for the device; False never does; None (default) does on the CPU, but not under torch.vmap.
            Where it is not raised, such a row's loss and gradient are NaN, and so are mean and sum.

    Returns:
        float32 loss in nats: a scalar, or the shape of targets for "none". A row with a NaN or +inf logit, or nothing but -inf, is NaN;
        a target whose logit is -inf has loss +inf; the mean of no rows is NaN. Differentiable once with respect to logits; the gradient has the dtype of logits. Backward and
        torch.autograd.grad only: torch.func.grad, jvp and their like raise NotImplementedError.

    Raises:
        TypeError, ValueError: naming the argument and what it got.

    DTensor logits go to ``dtensor.cross_entropy``. Source: docs/SPEC.md, sections 6 to 8.
    """
    if check.is_dtensor(logits):
        from . import dtensor

        if inplace_backward:
            raise NotImplementedError("inplace_backward: not for DTensor logits")
        return dtensor.cross_entropy(logits, targets, reduction, ignore_index=ignore_index, validate=validate)
    rows = check.logits_rows(logits)
    target = check.target_rows(targets, logits)
    mode = check.reduction(reduction)
    check.countable("logits", rows.shape[0], mode)
    check.integer("ignore_index", ignore_index)
    in_place = check.may_overwrite(inplace_backward, logits, rows)
    validated = check.wants_validation(validate, logits)
    out, _, _, status = _autograd.loss(rows, target, mode, ignore_index, in_place)
    if validated:
        check.raise_for_status(status, target, rows.shape[1], ignore_index)
    return out.reshape(targets.shape) if reduction == "none" else out


def forward(logits, targets, *, ignore_index=-100, validate=None):
    """Per-row results of ``cross_entropy``: ``(loss, rowmax, denom)``, each float32 [N], N the product of the leading shape.

    ``denom`` is the softmax denominator relative to the maximum, ``sum(exp(logits - rowmax))``. An ignored row is not read: loss 0, rowmax -inf,
    denom 0. Arguments and errors as ``cross_entropy``; ``loss`` is differentiable. Source: docs/SPEC.md, section 6.
    """
    rows = check.logits_rows(logits)
    target = check.target_rows(targets, logits)
    check.integer("ignore_index", ignore_index)
    validated = check.wants_validation(validate, logits)
    loss, maximum, denom, status = _autograd.loss(rows, target, check.REDUCTIONS["none"], ignore_index)
    if validated:
        check.raise_for_status(status, target, rows.shape[1], ignore_index)
    return loss, maximum, denom


def rowmax(logits, v_lo=0, v_hi=None):
    """Maximum of each row over columns [v_lo, v_hi) of logits [..., V]: float32 [N]; -inf over no columns.

    A NaN anywhere gives NaN and a zero maximum is +0, so that shards combine by ``torch.stack(maxima).amax(0)`` in any order.
    Source: docs/SPEC.md, section 2.
    """
    rows = check.shard_rows(logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    return ops.rowmax(rows, v_lo, v_hi)


def denom_digits(logits, global_rowmax, v_lo=0, v_hi=None, *, v_start=0):
    """The exact softmax sum of columns [v_lo, v_hi), as integers that add up over shards.

    Args:
        logits: [..., V] or a shard of it, as in ``cross_entropy``.
        global_rowmax: float32 [N], the maximum over the whole vocabulary. The check words know a row by this maximum and by its columns: rows, or batches, with
            equal maxima are not told apart.
        v_lo, v_hi: columns of ``logits``; v_hi None is all the rest. v_lo == v_hi is an empty shard.
        v_start: the vocabulary index of the first column of ``logits``, where that tensor is itself a shard.

    Returns:
        int64 [N, 8]: six digits and two check words, zeros for an empty shard. Shards' words add: ``sum(shards)``, any order, up to 2**23 shards.

    Source: docs/SPEC.md, section 4.
    """
    rows = check.shard_rows(logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    return ops.denom_digits(rows, maximum, v_lo, v_hi, check.start(v_start, v_hi))


def carry_digits(den_digits):
    """The canonical form of summed digits, int64 [N, 8]: the same for every way of cutting a row (docs/SPEC.md, section 4)."""
    check.tensor("den_digits", den_digits, (torch.int64,))
    if den_digits.dim() < 1 or den_digits.shape[-1] != check.WORDS:
        raise ValueError(f"den_digits: expected shape [..., {check.WORDS}], got {tuple(den_digits.shape)}")
    words = list(den_digits.unbind(-1))
    for i in range(5):
        words[i + 1] = words[i + 1] + (words[i] >> 32)
        words[i] = words[i] & 0xFFFFFFFF
    return torch.stack(words, -1)


def _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate):
    rows = check.logits_rows(logits).detach()
    target = check.target_rows(targets, logits)
    words = check.digits(den_digits, logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    check.integer("ignore_index", ignore_index)
    validated = check.wants_validation(validate, logits)
    readable = target.clamp(0, rows.shape[1] - 1).long()
    target_logits = rows.gather(1, readable.unsqueeze(1)).squeeze(1).float()
    loss, denom, state, status = ops.finalize(words, target_logits, target, maximum, ignore_index, rows.shape[1])
    if validated:
        check.raise_for_status(status, target, rows.shape[1], ignore_index, words)
    return rows, target, maximum, loss, denom, state


def finalize(den_digits, logits, targets, global_rowmax, *, ignore_index=-100, validate=None):
    """Loss and denominator of each row from the digits summed over all shards: ``(loss, denom)``, float32 [N].

    Equal bytes to ``forward``. ``logits`` [..., V] is the whole vocabulary, of which one logit a row is read. Shards that do not add up (missing, doubled, another
    maximum, a logit above it) and targets out of range give NaN, and with ``validate`` (as in ``cross_entropy``) a ValueError naming the row.
    Source: docs/SPEC.md, section 6.
    """
    _, _, _, loss, denom, _ = _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate)
    return loss, denom


def grad_logits(
    grad_loss, logits, targets, den_digits, global_rowmax, v_lo=0, v_hi=None, *, ignore_index=-100, sums=None, validate=None
):
    """Gradient of the loss with respect to columns [v_lo, v_hi): [N, v_hi - v_lo] in the dtype of logits, the slice of the full gradient.

    Args:
        grad_loss: float32, the upstream gradient: [N] for per-row losses, a scalar for their sum, or for their mean (then give ``sums``).
        den_digits, global_rowmax: the row state, summed over all shards.
        sums: int64 [12] from ``loss_digits``, for a mean: the gradient is divided by its count before it is rounded.

    Source: docs/SPEC.md, section 7.
    """
    rows, target, maximum, _, _, state = _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate)
    check.tensor("grad_loss", grad_loss, (torch.float32,), device=logits.device)
    if grad_loss.dim() != 0:
        grad_loss = check.row_values("grad_loss", grad_loss, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    sums = None if sums is None else check.sum_words(sums, logits.device)
    return ops.grad_logits(grad_loss, rows, target, maximum, state, sums, ignore_index, v_lo, v_hi, 0)


def loss_digits(loss, targets, *, ignore_index=-100):
    """The exact sum and count of per-row losses as int64 [12]; words of parts of a batch add up to those of the batch.

    ``loss`` float32 [...], ``targets`` int64 or int32 of the same shape. Source: docs/SPEC.md, section 8.
    """
    check.tensor("loss", loss, (torch.float32,))
    check.tensor("targets", targets, check.TARGET_DTYPES, loss.shape, loss.device)
    check.countable("loss", loss.numel(), MEAN)
    check.integer("ignore_index", ignore_index)
    return ops.loss_digits(loss.reshape(-1).contiguous(), targets.reshape(-1).contiguous(), ignore_index)


def reduce_digits(sums, reduction="mean"):
    """"mean" or "sum" of the losses behind ``loss_digits``, float32 scalar, rounded once. Source: docs/SPEC.md, section 8."""
    return ops.reduce_digits(check.sum_words(sums), check.reduction(reduction, ("mean", "sum")) == MEAN)


__all__ = [
    "carry_digits",
    "cross_entropy",
    "denom_digits",
    "finalize",
    "forward",
    "grad_logits",
    "loss_digits",
    "reduce_digits",
    "rowmax",
]
