"""The loss as eager autograd sees it. A compiler sees the pure op ``cross_entropy``, whose derivative ``_registration`` gives."""

import torch

from ._ops import ops
from ._registration import MEAN, NONE, gradient_with_options

FUSED, SEPARATE, IN_PLACE = range(3)  # where the gradient is made: with the loss; from the logits, in backward; there, over the logits


def _over_logits(logits, grad_out, targets, rowmax, state, sums, ignore_index, grad_lse=None, valid_vocab=0, of_gradient=(None, 1.0, 0.0)):
    """The gradient, in the memory of the logits."""
    if torch.is_grad_enabled():
        raise NotImplementedError("inplace_backward: the gradient cannot be differentiated (create_graph=True)")
    grad = logits.detach()
    ops.grad_over_logits(grad[:, :valid_vocab] if valid_vocab else grad, grad_out, targets, rowmax, state, sums, ignore_index, grad_lse, *of_gradient)
    if valid_vocab:
        grad[:, valid_vocab:] = 0
    # whoever else saved the logits for backward, a second backward of this loss included, now gets autograd's error and not the gradient
    torch.autograd.graph.increment_version(logits)
    return grad


class Loss(torch.autograd.Function):
    """The loss of logits [N, V] and targets [N]; rowmax, denom and status of the rows are put into the list ``rows``, which is quicker than as outputs."""

    @staticmethod
    def forward(ctx, logits, targets, reduction, ignore_index, how, rows):
        ctx.grad_of_one = None
        if how == FUSED:
            # Value and gradient from one read of the logits. backward looks, on the device, whether its upstream gradient is the 1 assumed here, and else writes
            # the gradient again. An attribute and not a saved tensor, so that the first backward can give it away.
            out, rowmax, denom, state, sums, status, ctx.grad_of_one = ops.cross_entropy_grad(logits, targets, reduction, ignore_index)
        else:
            out, rowmax, denom, state, sums, status = ops.cross_entropy(logits, targets, reduction, ignore_index)
        ctx.save_for_backward(logits, targets)
        ctx.state = rowmax, state, sums if reduction == MEAN else None, ignore_index
        ctx.in_place = how == IN_PLACE
        rows += rowmax, denom, status
        return out

    @staticmethod
    def backward(ctx, grad_out):
        logits, targets = ctx.saved_tensors
        rowmax, state, sums, ignore_index = ctx.state
        grad, ctx.grad_of_one = ctx.grad_of_one, None
        if ctx.in_place:
            grad = _over_logits(logits, grad_out, targets, rowmax, state, sums, ignore_index)
        elif grad is None or torch.is_grad_enabled():
            grad = ops.grad_logits(grad_out, logits, targets, rowmax, state, sums, ignore_index, 0, logits.shape[1], 0)
        else:
            ops.rescale_grad(grad, grad_out, logits, targets, rowmax, state, sums, ignore_index)
        return grad, None, None, None, None, None


class LossWithOptions(torch.autograd.Function):
    """(loss, lse); status and z_loss of the rows, the words of the batch and the statistics are put into the list ``rows``."""

    @staticmethod
    def forward(ctx, logits, targets, reduction, ignore_index, how, rows, options):
        op = ops.cross_entropy_grad_with_options if how == FUSED else ops.cross_entropy_with_options
        out, rowmax, _, state, sums, status, lse, z_loss, logprob, entropy, max_abs, hit, *grad = op(logits, targets, reduction, ignore_index, *options.of_loss)
        ctx.grad_of_one = grad[0] if grad else None  # as in Loss, and for no upstream gradient of lse
        ctx.save_for_backward(logits, targets)
        ctx.state = rowmax, state, sums if reduction == MEAN else None, ignore_index
        ctx.options, ctx.in_place = options, how == IN_PLACE
        ctx.set_materialize_grads(False)
        rows += status, z_loss, sums, (logprob, entropy, max_abs, hit)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        logits, targets = ctx.saved_tensors
        rowmax, state, sums, ignore_index = ctx.state
        valid, valid_vocab = ctx.options.valid, ctx.options.valid_vocab
        grad, ctx.grad_of_one = ctx.grad_of_one, None
        if ctx.in_place:
            if grad_out is None:
                grad_out, sums = grad_lse.new_zeros(()), None
            grad = _over_logits(logits, grad_out, targets, rowmax, state, sums, ignore_index, grad_lse, valid_vocab, ctx.options.of_gradient)
        elif grad is None or grad_lse is not None or torch.is_grad_enabled():
            grad = gradient_with_options(grad_out, grad_lse, logits, targets, rowmax, state, sums, ignore_index, valid_vocab, of_gradient=ctx.options.of_gradient)
        else:
            ops.rescale_grad(valid(grad), grad_out, valid(logits), targets, rowmax, state, sums, ignore_index, *ctx.options.of_gradient)
        return grad, None, None, None, None, None, None


def _by_op(logits):
    """Whether the pure op is called as it is: for a compiler, which may keep or share a buffer as it likes and must see no writing in place; under transforms; and where no
    gradient is wanted, for it is quicker than a Function."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not (logits.requires_grad and torch.is_grad_enabled())


def _how(reduction, in_place):
    return IN_PLACE if in_place else FUSED if reduction != NONE else SEPARATE


def loss_with_options(logits, targets, reduction, ignore_index, options, in_place=False):
    """``(out, lse, status, z_loss, sums, stats)``; out and lse are differentiable. As ``loss``."""
    if _by_op(logits):
        out, _, _, _, sums, status, lse, z_loss, *stats = ops.cross_entropy_with_options(logits, targets, reduction, ignore_index, *options.of_loss)
        return out, lse, status, z_loss, sums, stats
    rows = []
    out, lse = LossWithOptions.apply(logits, targets, reduction, ignore_index, _how(reduction, in_place), rows, options)
    return (out, lse, *rows)


def loss(logits, targets, reduction, ignore_index, in_place=False):
    """``(out, rowmax, denom, status)``, differentiable in eager mode and under torch.compile."""
    if _by_op(logits):
        out, rowmax, denom, _, _, status = ops.cross_entropy(logits, targets, reduction, ignore_index)
        return out, rowmax, denom, status
    rows = []
    return (Loss.apply(logits, targets, reduction, ignore_index, _how(reduction, in_place), rows), *rows)
