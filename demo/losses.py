"""Two ways to compute one cross-entropy loss from a vocabulary that is cut into shards.

A cut is its bounds: (0, 1024, 4096) are the shards [0, 1024) and [1024, 4096). Both ways return the mean loss, which carries the
gradient, and the per-token losses, which are only looked at.
"""

import torch


def deterministic(dce, logits, targets, bounds):
    """The kernel. An uncut vocabulary goes through the ordinary call; shards go through the sharded one."""
    if len(bounds) == 2:
        mean = dce.cross_entropy(logits, targets)
        return mean, dce.forward(logits.detach(), targets)[0]
    return Sharded.apply(logits, targets, dce, bounds)


class Sharded(torch.autograd.Function):
    """Each shard looks at its own columns only. A maximum and then integers are what is combined, and both combine exactly."""

    @staticmethod
    def forward(ctx, logits, targets, dce, bounds):
        shards = list(zip(bounds, bounds[1:]))
        rowmax = torch.stack([dce.rowmax(logits, lo, hi) for lo, hi in shards]).amax(0)
        digits = sum(dce.denom_digits(logits, rowmax, lo, hi) for lo, hi in shards)
        losses, _ = dce.finalize(digits, logits, targets, rowmax)
        sums = dce.loss_digits(losses, targets)
        ctx.save_for_backward(logits, targets, digits, rowmax, sums)
        ctx.dce, ctx.shards = dce, shards
        ctx.mark_non_differentiable(losses)
        return dce.reduce_digits(sums, "mean"), losses

    @staticmethod
    def backward(ctx, grad_mean, _):
        logits, targets, digits, rowmax, sums = ctx.saved_tensors
        grads = [ctx.dce.grad_logits(grad_mean, logits, targets, digits, rowmax, lo, hi, sums=sums) for lo, hi in ctx.shards]
        return torch.cat(grads, 1), None, None, None


def float32(dce, logits, targets, bounds):
    """What is usually done: each shard's maximum and sum of exponentials in float32, rescaled, and added in the order of the shards."""
    return Float32.apply(logits, targets, bounds)


class Float32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, bounds):
        shards = [logits[:, lo:hi] for lo, hi in zip(bounds, bounds[1:]) if lo < hi]
        maxima = [shard.amax(1) for shard in shards]
        rowmax = torch.stack(maxima).amax(0)
        total = torch.zeros_like(rowmax)
        for shard, top in zip(shards, maxima):
            total += (shard - top[:, None]).exp().sum(1) * (top - rowmax).exp()
        log_sum = total.log() + rowmax
        losses = log_sum - logits.gather(1, targets[:, None])[:, 0]
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.mark_non_differentiable(losses)
        return losses.mean(), losses

    @staticmethod
    def backward(ctx, grad_mean, _):
        logits, targets, log_sum = ctx.saved_tensors
        grad = (logits - log_sum[:, None]).exp()
        grad[torch.arange(len(targets), device=grad.device), targets] -= 1
        return grad * (grad_mean / len(targets)), None, None
