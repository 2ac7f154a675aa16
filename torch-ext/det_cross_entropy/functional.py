"""The loss, and the pieces it is made of, which compose over shards of the vocabulary by integer addition."""

from typing import NamedTuple, Optional

import torch

from . import _autograd
from . import _checks as check
from ._ops import ops
from ._options import items, options, reduce_z
from ._registration import COUNT_WORD, LOGIT_WORDS, MEAN, NONE, STAT_WORDS, SUM_WORDS
from .stats import RowStats


def cross_entropy(
    logits,
    targets,
    reduction="mean",
    *,
    ignore_index=-100,
    z_loss=0.0,
    weight=None,
    num_items=None,
    valid_vocab=None,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    return_z_loss=False,
    return_lse=False,
    return_stats=False,
    inplace_backward=False,
    validate=None,
):
    """Cross-entropy of logits against target indices: the same bytes on every device, for every batch and layout.

    Args:
        logits: [..., V], float32, bfloat16 or float16, natural-log units, 1 <= V < 2**31. Never modified, but for ``inplace_backward``. Rows may be strided
            (slices of a padded vocabulary); a layout without adjacent columns is copied.
        targets: int64 or int32, the leading shape of logits; each in [0, V) or ``ignore_index``.
        reduction: "mean" over the rows not ignored, "sum", or "none".
        ignore_index: rows with this target have loss 0 and gradient 0, leave the mean, and are not read.
        z_loss: lambda of the PaLM z-loss: lambda * lse**2 is added to each row's loss. It is not multiplied by ``weight``.
        weight: float32 [V], a factor for the loss of each class, of any sign; the mean divides by the sum of the weights of the rows not ignored, as in torch. So is the z-loss
            then (Liger divides that by the number of rows). NaN if these weights add up to 0 and so do the losses.
        num_items: an int, or an integer tensor of one: what the mean divides by instead (``num_items_in_batch`` of Hugging Face's Trainer). Below 1: NaN.
        valid_vocab: only columns [0, valid_vocab) are the vocabulary: those of the padding are not read, and their gradient is 0.
        label_smoothing: epsilon in [0, 1], as in torch: (1 - epsilon) times the loss, and epsilon times the mean of the losses of all classes (with ``weight`` each times its weight;
            a class of weight 0 takes no part but as a target, where torch makes NaN of a logit of -inf). A logit of -inf makes the loss +inf (NaN for epsilon = 1 if it is the target's), as in torch; for padding use ``valid_vocab``.
        logit_scale: the loss is that of ``logit_scale * logits``; positive, taken as float32.
        softcap: the loss is that of ``softcap * tanh(logit_scale * logits / softcap)``; positive, taken as float32. Logits of -inf stay masked.
        return_z_loss: also return the z-loss that is in the loss, reduced as it is. Not differentiable.
        return_lse: also return log(sum(exp(logits))) of each row (scaled and capped as the loss takes them), float32 in the shape of targets, 0 for an ignored row. Differentiable.
        return_stats: also return ``RowStats``: lse, logprob, entropy, max_abs and hit of each row, in the shape of targets. ``LossStats`` adds them up. Not differentiable.
        inplace_backward: backward writes the gradient over the logits, so that nothing of their size is allocated. They are read twice instead of once. Refused
            for a leaf and for a layout that would be copied; after it, reading the logits gives the gradient, and whatever else saved them for its backward
            raises torch's error of a tensor modified in place. No effect on the bytes, nor under torch.compile, which plans its own memory.
        validate: True raises for a target out of range, waiting for the device; False never does; None (default) does on the CPU, but not under torch.vmap.
            Where it is not raised, such a row's loss and gradient are NaN, and so are mean and sum.

    Returns:
        float32 loss in nats: a scalar, or the shape of targets for "none"; ``(loss, ...)`` with z_loss, lse, stats, in this order, where asked for. A row with a NaN or +inf logit, or nothing but -inf, is NaN;
        a target whose logit is -inf has loss +inf; the mean of no rows is NaN. Differentiable once with respect to logits; the gradient has the dtype of logits. Backward and
        torch.autograd.grad only: torch.func.grad, jvp and their like raise NotImplementedError.

    Raises:
        TypeError, ValueError: naming the argument and what it got.

    DTensor logits go to ``dtensor.cross_entropy``. Source: docs/SPEC.md, sections 6 to 8; the options: section 12; statistics: section 13.
    """
    if check.is_dtensor(logits):
        from . import dtensor

        if inplace_backward:
            raise NotImplementedError("inplace_backward: not for DTensor logits")
        asked = dict(z_loss=z_loss, weight=weight, num_items=num_items, valid_vocab=valid_vocab, return_z_loss=return_z_loss, return_lse=return_lse)
        asked |= dict(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, return_stats=return_stats)
        return dtensor.cross_entropy(logits, targets, reduction, ignore_index=ignore_index, validate=validate, **asked)
    rows = check.logits_rows(logits)
    target = check.target_rows(targets, logits)
    mode = check.reduction(reduction)
    check.countable("logits", rows.shape[0], mode)
    check.integer("ignore_index", ignore_index)
    in_place = check.may_overwrite(inplace_backward, logits, rows)
    validated = check.wants_validation(validate, logits)
    mapped = {"logit_scale": logit_scale, "softcap": softcap}
    asked = options(
        logits, mode, z_loss, weight, num_items, valid_vocab, return_z_loss, return_lse, rows.shape[1], label_smoothing=label_smoothing, return_stats=return_stats, **mapped
    )
    if asked is not None:
        out, lse, status, z, sums, stats = _autograd.loss_with_options(rows, target, mode, ignore_index, asked, in_place)
        if validated:
            check.raise_for_status(status, target, asked.valid_vocab or rows.shape[1], ignore_index)
        z = reduce_z(z, target, mode, ignore_index, sums) if return_z_loss else None
        shape = targets.shape if mode == NONE else ()
        lse = lse.reshape(targets.shape)
        stats = RowStats(lse.detach(), *(s.reshape(targets.shape) for s in stats)) if return_stats else None
        return asked.results(out.reshape(shape), None if z is None else z.reshape(shape), lse, stats)
    out, _, _, status = _autograd.loss(rows, target, mode, ignore_index, in_place)
    if validated:
        check.raise_for_status(status, target, rows.shape[1], ignore_index)
    return out.reshape(targets.shape) if reduction == "none" else out


def logprobs(logits, tokens, *, ignore_index=-100, valid_vocab=None, logit_scale=1.0, softcap=None, validate=None):
    """The log-probability of each token: float32 in the shape of tokens, differentiable once.

    It is the loss of "none" with its sign changed: at most 0, never -0, 0 for an ignored token, -inf where the token's logit is -inf (the gradient of that row is finite). The same logits give
    the same bits in every batch and on every device, so ``exp(lp - lp_old)`` of a policy that has not changed is exactly 1.
    Arguments and errors as ``cross_entropy``. Source: docs/SPEC.md, section 12.
    """
    mapped = dict(logit_scale=logit_scale, softcap=softcap)
    loss = cross_entropy(logits, tokens, "none", ignore_index=ignore_index, valid_vocab=valid_vocab, validate=validate, **mapped)
    # 0 and NaN as they are: the sign of neither is to change
    return torch.where(loss > 0, -loss, loss.detach())


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


def denom_digits(logits, global_rowmax, v_lo=0, v_hi=None, *, v_start=0, logit_scale=1.0, softcap=None):
    """The exact softmax sum of columns [v_lo, v_hi), as integers that add up over shards.

    Args:
        logits: [..., V] or a shard of it, as in ``cross_entropy``.
        global_rowmax: float32 [N], the maximum over the whole vocabulary. The check words know a row by this maximum and by its columns: rows, or batches, with
            equal maxima are not told apart.
        v_lo, v_hi: columns of ``logits``; v_hi None is all the rest. v_lo == v_hi is an empty shard.
        v_start: the vocabulary index of the first column of ``logits``, where that tensor is itself a shard.
        logit_scale, softcap: as in ``cross_entropy``; the maximum stays that of the logits themselves.

    Returns:
        int64 [N, 8]: six digits and two check words, zeros for an empty shard. Shards' words add: ``sum(shards)``, any order, up to 2**23 shards.

    Source: docs/SPEC.md, section 4.
    """
    rows = check.shard_rows(logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    return ops.denom_digits(rows, maximum, v_lo, v_hi, check.start(v_start, v_hi), *_map(logits, logit_scale, softcap))


LOGITS, STATS = 1, 2  # kinds of tags


def _tagged(words, maximum, lo, hi, kind, mapped):
    """words with the tag of columns [lo, hi) behind them: the tags of shards add up to that of the vocabulary if they cover it once and had the same maximum and map."""
    return torch.cat([words, ops.shard_tags(maximum, lo, hi, kind, *mapped)[:, None]], 1)


def _untagged(name, words, maximum, columns, kind, mapped, validated):
    """(words without the tag, which rows do not cover the vocabulary)."""
    wrong = words[:, -1] != ops.shard_tags(maximum, 0, columns, kind, *mapped)
    if validated and wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}: row {row}: the shards do not cover columns 0 to {columns} once each (v_start?), or were computed for another global_rowmax, logit_scale or softcap"
        )
    return words[:, :-1].contiguous(), wrong


def _map(logits, logit_scale, softcap):
    asked = options(logits, NONE, logit_scale=logit_scale, softcap=softcap)
    return (1.0, 0.0) if asked is None else asked.map


def logit_digits(logits, global_rowmax, v_lo=0, v_hi=None, *, v_start=0, weight=None, logit_scale=1.0, softcap=None):
    """The exact sum of the logits of columns [v_lo, v_hi) for label smoothing: int64 [N, 5], four digits and a tag, which add up over shards, up to 2**15.

    ``weight``, float32 [V], multiplies each logit by its class's weight; that all shards were given the same cannot be seen. The rest as in ``denom_digits``. Source: docs/SPEC.md, section 12.
    """
    rows = check.shard_rows(logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    v_start = check.start(v_start, v_hi)
    if weight is not None:
        weight = options(logits, NONE, weight=weight).weight
        if len(weight) < v_start + v_hi:
            raise ValueError(f"weight: expected at least {v_start + v_hi} classes, got {len(weight)}")
    mapped = _map(logits, logit_scale, softcap)
    return _tagged(ops.logit_digits(rows, maximum, v_lo, v_hi, v_start, weight, *mapped), maximum, v_start + v_lo, v_start + v_hi, LOGITS, mapped)


def stat_digits(logits, targets, global_rowmax, v_lo=0, v_hi=None, *, v_start=0, ignore_index=-100, logit_scale=1.0, softcap=None):
    """What columns [v_lo, v_hi) say of a row's statistics: ``(digits, least)``.

    ``digits``, int64 [N, 3], two digits and a tag, add up over shards, up to 2**15; ``least``, float32 [N], the least logit above -inf (+inf if there is none), combines by ``minimum``.
    ``targets`` are those of the whole vocabulary. The rest as in ``denom_digits``. Source: docs/SPEC.md, section 13.
    """
    rows = check.shard_rows(logits)
    target = check.target_rows(targets, logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    check.integer("ignore_index", ignore_index)
    v_start, mapped = check.start(v_start, v_hi), _map(logits, logit_scale, softcap)
    words = ops.stat_digits(rows, target, maximum, ignore_index, v_lo, v_hi, v_start, *mapped)
    return _tagged(words, maximum, v_start + v_lo, v_start + v_hi, STATS, mapped), ops.rowleast(rows, v_lo, v_hi)


def finalize_stats(stat_digits, least, den_digits, logits, targets, global_rowmax, *, ignore_index=-100, valid_vocab=None, logit_scale=1.0, softcap=None, validate=None):
    """``RowStats`` of each row, [N], from the words summed over all shards; equal bytes to those of ``cross_entropy``. Source: docs/SPEC.md, section 13.

    Shards that do not add up give NaN, and with ``validate`` (as in ``cross_entropy``) a ValueError; ``least`` is taken as it is. ``logits`` [..., V] is the whole vocabulary, of which one
    logit a row is read.
    """
    size = _size(logits)
    asked = options(logits, NONE, valid_vocab=valid_vocab, columns=size, logit_scale=logit_scale, softcap=softcap)
    state = _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate, asked)
    words = check.row_values("stat_digits", stat_digits, logits, torch.int64, (STAT_WORDS + 1,))
    least = check.row_values("least", least, logits)
    columns = state.rows.shape[1] if asked is None else asked.valid_vocab or state.rows.shape[1]
    mapped = _map(logits, logit_scale, softcap)
    words, wrong = _untagged("stat_digits", words, state.maximum, columns, STATS, mapped, check.wants_validation(validate, logits))
    stats = RowStats(*ops.finalize_stats(state.words, words, least, state.target_logits, state.target, state.maximum, ignore_index, columns, *mapped))
    wrong &= state.target != ignore_index
    unseen = {name: torch.where(wrong, float("nan"), getattr(stats, name)) for name in ("entropy", "max_abs")}
    return stats._replace(**unseen, hit=stats.hit & ~wrong)


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


def _size(logits):
    """V, or None of what is no logits, which a later check says."""
    return logits.shape[-1] if isinstance(logits, torch.Tensor) and logits.dim() else None


class _RowState(NamedTuple):
    rows: torch.Tensor
    target: torch.Tensor
    maximum: torch.Tensor
    words: torch.Tensor
    target_logits: torch.Tensor
    loss: torch.Tensor
    denom: torch.Tensor
    state: torch.Tensor
    lse: Optional[torch.Tensor]  # with options
    z_loss: Optional[torch.Tensor]


def _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate, asked, smoothing=None):
    """Of rows whose digits are summed. smoothing: logit_digits; without them the losses are not those of label smoothing, which the state does not depend on."""
    rows = check.logits_rows(logits).detach()
    target = check.target_rows(targets, logits)
    words = check.digits(den_digits, logits)
    maximum = check.row_values("global_rowmax", global_rowmax, logits)
    check.integer("ignore_index", ignore_index)
    validated = check.wants_validation(validate, logits)
    of_targets = ops.target_logits(rows, target, ignore_index)
    columns = rows.shape[1]
    if asked is None:
        loss, denom, state, status = ops.finalize(words, of_targets, target, maximum, ignore_index, columns)
        lse = z_loss = None
    else:
        columns = asked.valid_vocab or columns
        if asked.label_smoothing and smoothing is None:
            smoothing = words.new_zeros((len(words), LOGIT_WORDS))
        loss, denom, state, status, lse, z_loss = ops.finalize_with_options(
            words, of_targets, target, maximum, ignore_index, columns, asked.z_loss, asked.weight, asked.label_smoothing, smoothing, *asked.map
        )
    if validated:
        check.raise_for_status(status, target, columns, ignore_index, words)
    return _RowState(rows, target, maximum, words, of_targets, loss, denom, state, lse, z_loss)


def finalize(
    den_digits,
    logits,
    targets,
    global_rowmax,
    *,
    ignore_index=-100,
    z_loss=0.0,
    weight=None,
    valid_vocab=None,
    label_smoothing=0.0,
    logit_digits=None,
    logit_scale=1.0,
    softcap=None,
    return_z_loss=False,
    return_lse=False,
    validate=None,
):
    """Loss and denominator of each row from the digits summed over all shards: ``(loss, denom)``, float32 [N].

    Equal bytes to ``forward``. ``logits`` [..., V] is the whole vocabulary, of which one logit a row is read. Shards that do not add up (missing, doubled, another
    maximum, a logit above it) and targets out of range give NaN, and with ``validate`` (as in ``cross_entropy``) a ValueError naming the row.
    The options are those of ``cross_entropy``; what they return besides, float32 [N], comes after ``denom``. With ``valid_vocab`` the digits (and the maximum) are those of columns [0, valid_vocab).
    ``label_smoothing`` needs ``logit_digits``, int64 [N, 5], summed over all shards.
    Source: docs/SPEC.md, sections 6 and 12.
    """
    size = _size(logits)
    more = dict(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap)
    asked = options(logits, NONE, z_loss, weight, None, valid_vocab, return_z_loss, return_lse, size, **more)
    if logit_digits is not None:
        logit_digits = check.row_values("logit_digits", logit_digits, logits, torch.int64, (LOGIT_WORDS + 1,))
    if (logit_digits is not None) != bool(label_smoothing):
        expected, got = ("int64 [N, 5]", "None") if label_smoothing else ("None", "a tensor")
        raise ValueError(f"logit_digits: expected {expected} with label_smoothing = {label_smoothing}, got {got}")
    wrong = None
    if logit_digits is not None:
        columns, maximum = asked.valid_vocab or size, check.row_values("global_rowmax", global_rowmax, logits)
        logit_digits, wrong = _untagged("logit_digits", logit_digits, maximum, columns, LOGITS, asked.map, check.wants_validation(validate, logits))
    row = _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate, asked, logit_digits)
    if wrong is not None:
        row = row._replace(loss=torch.where(wrong & (row.target != ignore_index), float("nan"), row.loss))
    return (row.loss, row.denom) + (row.z_loss,) * return_z_loss + (row.lse,) * return_lse


def grad_logits(
    grad_loss,
    logits,
    targets,
    den_digits,
    global_rowmax,
    v_lo=0,
    v_hi=None,
    *,
    ignore_index=-100,
    sums=None,
    z_loss=0.0,
    weight=None,
    num_items=None,
    valid_vocab=None,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    grad_lse=None,
    validate=None,
):
    """Gradient of the loss with respect to columns [v_lo, v_hi): [N, v_hi - v_lo] in the dtype of logits, the slice of the full gradient.

    Args:
        grad_loss: float32, the upstream gradient: [N] for per-row losses, a scalar for their sum, or for their mean (then give ``sums``).
        den_digits, global_rowmax: the row state, summed over all shards.
        sums: int64 [12] or [24] from ``loss_digits``, for a mean: the gradient is divided by its count, or its sum of weights, before it is rounded.
        num_items: for a mean that divides by that, in place of ``sums``.
        grad_lse: float32 [N], the upstream gradient of ``lse``.
        z_loss, weight, valid_vocab, label_smoothing, logit_scale, softcap: as in ``cross_entropy``, of the loss.

    Source: docs/SPEC.md, sections 7 and 12.
    """
    size = _size(logits)
    more = dict(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap)
    asked = options(logits, MEAN, z_loss, weight, num_items, valid_vocab, False, grad_lse is not None, size, **more)
    row = _row_state(den_digits, logits, targets, global_rowmax, ignore_index, validate, asked)
    rows, target, maximum, state = row.rows, row.target, row.maximum, row.state
    check.tensor("grad_loss", grad_loss, (torch.float32,), device=logits.device)
    if grad_loss.dim() != 0:
        grad_loss = check.row_values("grad_loss", grad_loss, logits)
    v_lo, v_hi = check.columns(v_lo, v_hi, rows.shape[1])
    sums = None if sums is None else check.sum_words(sums, logits.device)
    if asked is None:
        return ops.grad_logits(grad_loss, rows, target, maximum, state, sums, ignore_index, v_lo, v_hi, 0)
    if asked.num_items is not None:
        if sums is not None:
            raise ValueError("num_items: expected None beside sums")
        sums = torch.zeros(SUM_WORDS, dtype=torch.int64, device=logits.device)
        sums[COUNT_WORD:COUNT_WORD + 1] = asked.num_items
    grad_lse = None if grad_lse is None else check.row_values("grad_lse", grad_lse, logits)
    return ops.grad_logits_with_options(grad_loss, rows, target, maximum, state, sums, ignore_index, v_lo, v_hi, 0, grad_lse, asked.valid_vocab, *asked.of_gradient)


def loss_digits(loss, targets, *, ignore_index=-100, weight=None):
    """The exact sum and count of per-row losses as int64 [12]; words of parts of a batch add up to those of the batch.

    ``loss`` float32 [...], ``targets`` int64 or int32 of the same shape. ``weight``, float32 [V]: int64 [24], with the exact sum of the targets' weights as well, for a mean that divides by that
    (the losses are taken as they are). Source: docs/SPEC.md, sections 8 and 12.
    """
    check.tensor("loss", loss, (torch.float32,))
    check.tensor("targets", targets, check.TARGET_DTYPES, loss.shape, loss.device)
    check.countable("loss", loss.numel(), MEAN)
    check.integer("ignore_index", ignore_index)
    if weight is not None:
        weight = options(loss, NONE, weight=weight).weight
    return ops.loss_digits(loss.reshape(-1).contiguous(), targets.reshape(-1).contiguous(), ignore_index, weight)


def reduce_digits(sums, reduction="mean"):
    """"mean" or "sum" of the losses behind ``loss_digits``, float32 scalar, rounded once. Source: docs/SPEC.md, section 8."""
    return ops.reduce_digits(check.sum_words(sums), check.reduction(reduction, ("mean", "sum")) == MEAN)


def finalize_mean(digits, count):
    """The sum of the losses behind ``loss_digits`` over ``count``: float32 scalar, rounded once, so the same for every cut of the tokens into micro-batches and ranks.

    ``digits`` int64 [12] or [24], the sum of all parts; ``count`` an int, or an integer tensor of one: ``num_items`` of ``cross_entropy``. Source: docs/SPEC.md, section 12.
    """
    words = check.sum_words(digits, name="digits")[:SUM_WORDS].clone()
    words[COUNT_WORD : COUNT_WORD + 1] = items("count", count, digits.device)
    return ops.reduce_digits(words, True)


def square_digits(tensor):
    """The exact sum of squares of all elements, as integers that add up over tensors, parts of a tensor, and ranks (an all-reduce with SUM).

    Args:
        tensor: any shape, float32, bfloat16 or float16, fewer than 2**40 elements. Read where it lies if its elements are side by side, in whatever order of dimensions; else copied.

    Returns:
        int64 [21]: nineteen digits, a count of infinities, a count of NaNs; zeros for no elements. Words add: any order, up to 2**31 tensors. Not differentiable.

    Raises:
        TypeError, ValueError: naming the argument and what it got.

    Source: docs/SPEC.md, section 15.
    """
    return ops.square_digits(check.elements(tensor))


def grad_norm(digits):
    """The root of a sum of squares, float64 scalar on the device of ``digits``: the correctly rounded 2-norm of all the elements behind them.

        digits = sum(dce.square_digits(p.grad) for p in model.parameters())
        torch.distributed.all_reduce(digits)                  # where ranks hold different parts
        norm = dce.grad_norm(digits)

    ``digits`` int64 [21] from ``square_digits``, or a sum of such. NaN if an element was NaN, else infinite if one was. The same bytes for every sharding, order and device; waits for no device.

    Source: docs/SPEC.md, section 15.
    """
    return ops.grad_norm(check.square_words(digits))


__all__ = [
    "carry_digits",
    "cross_entropy",
    "denom_digits",
    "finalize",
    "finalize_mean",
    "finalize_stats",
    "forward",
    "grad_logits",
    "grad_norm",
    "logit_digits",
    "logprobs",
    "loss_digits",
    "reduce_digits",
    "rowmax",
    "square_digits",
    "stat_digits",
]
