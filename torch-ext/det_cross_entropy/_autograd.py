"""The loss as eager autograd sees it. A compiler sees the pure op ``cross_entropy``, whose derivative ``_registration`` gives."""

import torch

from ._ops import ops
from ._registration import MEAN, NONE

FUSED, SEPARATE, IN_PLACE = range(3)  # where the gradient is made: with the loss; from the logits, in backward; there, over the logits


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
            if torch.is_grad_enabled():
                raise NotImplementedError("inplace_backward: the gradient cannot be differentiated (create_graph=True)")
            grad = logits.detach()
            ops.grad_over_logits(grad, grad_out, targets, rowmax, state, sums, ignore_index)
            # whoever else saved the logits for backward, a second backward of this loss included, now gets autograd's error and not the gradient
            torch.autograd.graph.increment_version(logits)
        elif grad is None or torch.is_grad_enabled():
            grad = ops.grad_logits(grad_out, logits, targets, rowmax, state, sums, ignore_index, 0, logits.shape[1], 0)
        else:
            ops.rescale_grad(grad, grad_out, logits, targets, rowmax, state, sums, ignore_index)
        return grad, None, None, None, None, None


def loss(logits, targets, reduction, ignore_index, in_place=False):
    """``(out, rowmax, denom, status)``, differentiable in eager mode and under torch.compile."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        # A compiler may keep or share a buffer as it likes: the pure pair of ops, and no writing in place.
        out, rowmax, denom, _, _, status = ops.cross_entropy(logits, targets, reduction, ignore_index)
        return out, rowmax, denom, status
    wanted = logits.requires_grad and torch.is_grad_enabled()
    how = IN_PLACE if in_place else FUSED if wanted and reduction != NONE else SEPARATE
    rows = []
    return (Loss.apply(logits, targets, reduction, ignore_index, how, rows), *rows)
