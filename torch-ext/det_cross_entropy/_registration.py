"""What torch needs to know of the ops beyond their kernels: shapes for tracing, and the derivative of the loss."""

import torch

from ._ops import add_op_namespace_prefix, ops

NONE, MEAN, SUM = 0, 1, 2  # reductions of ops.cross_entropy
WORDS = 8  # int64 words a row (SPEC 4)
RANK_WORDS = 1  # more of them between ranks (SPEC 11)
LOGIT_WORDS = 4  # more of them with label smoothing (SPEC 12)
STAT_WORDS = 2  # and with statistics (SPEC 13)
SUM_WORDS = 12  # int64 words a batch (SPEC 8)
COUNT_WORD = 9  # of these, the one that counts rows
SQUARE_WORDS = 21  # int64 words of a sum of squares (SPEC 15)


@torch.library.register_fake(add_op_namespace_prefix("rowmax"))
def _(logits, v_lo, v_hi):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("denom_digits"))
def _(logits, rowmax, v_lo, v_hi, v_start, logit_scale=1.0, softcap=0.0):
    return logits.new_empty((logits.shape[0], WORDS), dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("logit_digits"))
def _(logits, rowmax, v_lo, v_hi, v_start, weight, logit_scale, softcap):
    return logits.new_empty((logits.shape[0], LOGIT_WORDS), dtype=torch.int64)


def _row(like, dtype=torch.float32):
    return like.new_empty(like.shape[0], dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("stat_digits"))
def _(logits, targets, rowmax, ignore_index, v_lo, v_hi, v_start, logit_scale, softcap):
    return logits.new_empty((logits.shape[0], STAT_WORDS), dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("rowleast"))
def _(logits, v_lo, v_hi):
    return _row(logits)


@torch.library.register_fake(add_op_namespace_prefix("shard_tags"))
def _(rowmax, lo, hi, kind, logit_scale, softcap):
    return _row(rowmax, torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("target_logits"))
def _(logits, targets, ignore_index):
    return _row(logits)


@torch.library.register_fake(add_op_namespace_prefix("finalize_stats"))
def _(digits, stat_digits, least, target_logits, targets, rowmax, ignore_index, columns, logit_scale, softcap):
    return (*(_row(digits) for _ in range(4)), _row(digits, torch.bool))


def _row_outputs(logits, width=2):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.float32),  # denom
        logits.new_empty((rows, width), dtype=torch.float64),  # state
        logits.new_empty(rows, dtype=torch.int32),  # status
    )


@torch.library.register_fake(add_op_namespace_prefix("finalize"))
def _(digits, target_logits, targets, rowmax, ignore_index, columns):
    denom, state, status = _row_outputs(digits)
    return digits.new_empty(digits.shape[0], dtype=torch.float32), denom, state, status


@torch.library.register_fake(add_op_namespace_prefix("finalize_with_options"))
def _(digits, target_logits, targets, rowmax, ignore_index, columns, z_loss, weight, label_smoothing, logit_digits, logit_scale, softcap):
    denom, state, status = _row_outputs(digits, 5 if label_smoothing else 4)
    return _row(digits), denom, state, status, _row(digits), _row(digits)


@torch.library.register_fake(add_op_namespace_prefix("order_images"))
def _(x):
    return torch.empty_like(x, dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("shard_words"))
def _(
    logits, targets, images, ignore_index, mode, weight, v_start,
    z_loss=0.0, valid_vocab=0, class_weights=None, label_smoothing=0.0, logit_scale=1.0, softcap=0.0, stats=False, num_items=None,
):
    words = WORDS + RANK_WORDS + LOGIT_WORDS * bool(label_smoothing) + STAT_WORDS * stats
    return logits.new_empty(words * logits.shape[0], dtype=torch.int64), _row(logits)


@torch.library.register_fake(add_op_namespace_prefix("settle_targets"))
def _(words, targets, ignore_index):
    return torch.empty_like(targets), torch.empty_like(targets, dtype=torch.float32)


def _fake_cross_entropy(logits, targets, reduction, ignore_index):
    denom, state, status = _row_outputs(logits)
    rowmax = logits.new_empty(logits.shape[0], dtype=torch.float32)
    out = logits.new_empty(logits.shape[0] if reduction == NONE else (), dtype=torch.float32)
    sums = logits.new_empty(0 if reduction == NONE else SUM_WORDS, dtype=torch.int64)
    return out, rowmax, denom, state, sums, status


torch.library.register_fake(add_op_namespace_prefix("cross_entropy"), _fake_cross_entropy)


@torch.library.register_fake(add_op_namespace_prefix("cross_entropy_grad"))
def _(logits, targets, reduction, ignore_index):
    return (*_fake_cross_entropy(logits, targets, reduction, ignore_index), logits.new_empty(logits.shape))


def _fake_with_options(logits, targets, reduction, ignore_index, z_loss, weight, num_items, valid_vocab, label_smoothing, logit_scale, softcap, stats):
    out, rowmax, _, _, sums, _ = _fake_cross_entropy(logits, targets, reduction, ignore_index)
    if reduction == MEAN and weight is not None and num_items is None:
        sums = logits.new_empty(2 * SUM_WORDS, dtype=torch.int64)
    denom, state, status = _row_outputs(logits, 5 if label_smoothing else 4)
    of_stats = [_row(logits) if stats else logits.new_empty(0, dtype=torch.float32) for _ in range(3)]
    hit = _row(logits, torch.bool) if stats else logits.new_empty(0, dtype=torch.bool)
    return (out, rowmax, denom, state, sums, status, _row(logits), _row(logits), *of_stats, hit)


torch.library.register_fake(add_op_namespace_prefix("cross_entropy_with_options"), _fake_with_options)


@torch.library.register_fake(add_op_namespace_prefix("cross_entropy_grad_with_options"))
def _(logits, *more):
    return (*_fake_with_options(logits, *more), logits.new_empty(logits.shape))


@torch.library.register_fake(add_op_namespace_prefix("rescale_grad"))
def _(grad, grad_out, logits, targets, rowmax, state, sums, ignore_index, weight=None, logit_scale=1.0, softcap=0.0):
    return None


@torch.library.register_fake(add_op_namespace_prefix("grad_over_logits"))
def _(logits, grad_out, targets, rowmax, state, sums, ignore_index, grad_lse=None, weight=None, logit_scale=1.0, softcap=0.0):
    return None


@torch.library.register_fake(add_op_namespace_prefix("grad_logits"))
def _(grad_out, logits, targets, rowmax, state, sums, ignore_index, v_lo, v_hi, v_start):
    return logits.new_empty((logits.shape[0], v_hi - v_lo))


@torch.library.register_fake(add_op_namespace_prefix("grad_logits_with_options"))
def _(grad_out, logits, targets, rowmax, state, sums, ignore_index, v_lo, v_hi, v_start, grad_lse, valid_vocab, weight=None, logit_scale=1.0, softcap=0.0):
    return logits.new_empty((logits.shape[0], v_hi - v_lo))


@torch.library.register_fake(add_op_namespace_prefix("loss_digits"))
def _(loss, targets, ignore_index, weight=None):
    return loss.new_empty(SUM_WORDS if weight is None else 2 * SUM_WORDS, dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("reduce_digits"))
def _(sums, mean):
    return sums.new_empty((), dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("square_digits"))
def _(x):
    return x.new_empty(SQUARE_WORDS, dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("grad_norm"))
def _(digits):
    return digits.new_empty((), dtype=torch.float64)


@torch.library.register_fake(add_op_namespace_prefix("term"))
def _(x):
    return torch.empty_like(x, dtype=torch.int32), torch.empty_like(x, dtype=torch.int32)


def _save_for_backward(ctx, inputs, output):
    logits, targets, reduction, ctx.ignore_index = inputs
    _, rowmax, _, state, sums, _ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, rowmax, state, sums)
    ctx.mean = reduction == MEAN


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return None, None, None, None
    logits, targets, rowmax, state, sums = ctx.saved_tensors
    sums = sums if ctx.mean else None
    grad = ops.grad_logits(grad_out, logits, targets, rowmax, state, sums, ctx.ignore_index, 0, logits.shape[1], 0)
    return grad, None, None, None


torch.library.register_autograd(add_op_namespace_prefix("cross_entropy"), _backward, setup_context=_save_for_backward)


def _save_with_options(ctx, inputs, output):
    logits, targets, reduction, ctx.ignore_index, _, weight, _, ctx.valid_vocab, label_smoothing, *map_and_stats = inputs
    _, rowmax, _, state, sums, _, _, *more = output
    ctx.mark_non_differentiable(*output[1:6], *more)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, rowmax, state, sums, weight if label_smoothing else None)
    ctx.mean, ctx.map = reduction == MEAN, map_and_stats[:2]


def gradient_with_options(grad_out, grad_lse, logits, targets, rowmax, state, sums, ignore_index, valid_vocab, start=0, of_gradient=(None, 1.0, 0.0)):
    """That of the logits [N, V], the first of which is column `start`, for upstream gradients of the loss and of lse, either of which may be None. sums: of a mean, else None."""
    if grad_out is None:
        grad_out, sums = grad_lse.new_zeros(()), None
    return ops.grad_logits_with_options(grad_out, logits, targets, rowmax, state, sums, ignore_index, 0, logits.shape[1], start, grad_lse, valid_vocab, *of_gradient)


def _backward_with_options(ctx, grad_out, *grads):
    grad_lse = grads[5]
    if grad_out is None and grad_lse is None:
        return (None,) * 12
    logits, targets, rowmax, state, sums, weight = ctx.saved_tensors
    sums = sums if ctx.mean else None
    grad = gradient_with_options(grad_out, grad_lse, logits, targets, rowmax, state, sums, ctx.ignore_index, ctx.valid_vocab, of_gradient=(weight, *ctx.map))
    return (grad,) + (None,) * 11


torch.library.register_autograd(add_op_namespace_prefix("cross_entropy_with_options"), _backward_with_options, setup_context=_save_with_options)


def _no_second_derivative(ctx, *_):
    raise NotImplementedError("det_cross_entropy: the second derivative of the loss is not implemented")


torch.library.register_autograd(add_op_namespace_prefix("grad_logits"), _no_second_derivative)
torch.library.register_autograd(add_op_namespace_prefix("grad_logits_with_options"), _no_second_derivative)
