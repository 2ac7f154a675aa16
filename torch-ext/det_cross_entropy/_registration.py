"""What torch needs to know of the ops beyond their kernels: shapes for tracing, and the derivative of the loss."""

import torch

from ._ops import add_op_namespace_prefix, ops

NONE, MEAN, SUM = 0, 1, 2  # reductions of ops.cross_entropy
WORDS = 8  # int64 words a row (SPEC 4)
RANK_WORDS = 2  # more of them between ranks (SPEC 11)
SUM_WORDS = 12  # int64 words a batch (SPEC 8)
COUNT_WORD = 9  # of these, the one that counts rows


@torch.library.register_fake(add_op_namespace_prefix("rowmax"))
def _(logits, v_lo, v_hi):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("denom_digits"))
def _(logits, rowmax, v_lo, v_hi, v_start):
    return logits.new_empty((logits.shape[0], WORDS), dtype=torch.int64)


def _row_outputs(logits):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.float32),  # denom
        logits.new_empty((rows, 2), dtype=torch.float64),  # state
        logits.new_empty(rows, dtype=torch.int32),  # status
    )


@torch.library.register_fake(add_op_namespace_prefix("finalize"))
def _(digits, target_logits, targets, rowmax, ignore_index, columns):
    denom, state, status = _row_outputs(digits)
    return digits.new_empty(digits.shape[0], dtype=torch.float32), denom, state, status


@torch.library.register_fake(add_op_namespace_prefix("order_images"))
def _(x):
    return torch.empty_like(x, dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("shard_words"))
def _(logits, targets, images, ignore_index, mode, weight, v_start):
    rows = logits.shape[0]
    return logits.new_empty((WORDS + RANK_WORDS) * rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


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


@torch.library.register_fake(add_op_namespace_prefix("rescale_grad"))
def _(grad, grad_out, logits, targets, rowmax, state, sums, ignore_index):
    return None


@torch.library.register_fake(add_op_namespace_prefix("grad_over_logits"))
def _(logits, grad_out, targets, rowmax, state, sums, ignore_index):
    return None


@torch.library.register_fake(add_op_namespace_prefix("grad_logits"))
def _(grad_out, logits, targets, rowmax, state, sums, ignore_index, v_lo, v_hi, v_start):
    return logits.new_empty((logits.shape[0], v_hi - v_lo))


@torch.library.register_fake(add_op_namespace_prefix("loss_digits"))
def _(loss, targets, ignore_index):
    return loss.new_empty(SUM_WORDS, dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("reduce_digits"))
def _(sums, mean):
    return sums.new_empty((), dtype=torch.float32)


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


def _no_second_derivative(ctx, *_):
    raise NotImplementedError("det_cross_entropy: the second derivative of the loss is not implemented")


torch.library.register_autograd(add_op_namespace_prefix("grad_logits"), _no_second_derivative)
