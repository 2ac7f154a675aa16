"""The loss over torch.distributed process groups: the same bytes at every world size. What ranks exchange are integers, added or compared exactly."""

import torch
import torch.distributed as dist

from . import _checks as check
from . import _ranks
from ._ops import ops
from ._ranks import Ranks
from ._registration import MEAN, NONE


class _Loss(torch.autograd.Function):
    """`out` with the derivative that the row state gives with respect to `rows`, columns [start, start + V_rank) of the vocabulary."""

    @staticmethod
    def forward(ctx, rows, out, target, maximum, state, sums, ignore_index, start):
        ctx.save_for_backward(rows, target, maximum, state, sums)
        ctx.ignore_index, ctx.start = ignore_index, start
        return out

    @staticmethod
    def backward(ctx, grad_out):
        rows, target, maximum, state, sums = ctx.saved_tensors
        grad = ops.grad_logits(grad_out, rows, target, maximum, state, sums, ctx.ignore_index, 0, rows.shape[1], ctx.start)
        return grad, None, None, None, None, None, None, None


def _reduce(loss, target, mode, tokens, ignore_index):
    """(out, sums): losses [N] reduced exactly over this rank's tokens and those of `tokens`."""
    if mode == NONE:
        return loss, None
    sums = ops.loss_digits(loss, target, ignore_index)
    if tokens is not None:
        tokens.all_reduce(sums)
    return ops.reduce_digits(sums, mode == MEAN), sums


def _finish(rows, loss, target, maximum, state, mode, tokens, ignore_index, start, shape):
    out, sums = _reduce(loss, target, mode, tokens, ignore_index)
    out = _Loss.apply(rows, out, target, maximum, state, sums if mode == MEAN else None, ignore_index, start)
    return out.reshape(shape) if mode == NONE else out


def _token_ranks(dp_group, mode):
    if dp_group is None:
        return None
    if mode == NONE:
        raise ValueError("dp_group: expected None for reduction 'none', which reduces nothing")
    return Ranks("dp_group", dp_group)


def _first_column(vocab_start, rank, columns):
    start = rank * columns if vocab_start is None else check.integer("vocab_start", vocab_start)
    if start < 0 or start + columns >= 2**31:
        raise ValueError(f"vocab_start: expected vocab_start >= 0 and vocab_start + V_rank < 2**31, got {start}")
    return start


def vocab_parallel_cross_entropy(
    logits_shard,
    targets,
    reduction="mean",
    *,
    group=None,
    vocab_start=None,
    dp_group=None,
    ignore_index=-100,
    validate=None,
):
    """Cross-entropy of logits whose vocabulary is cut over the ranks of a group: value and gradient are the bytes of ``cross_entropy`` on one device.

    Every rank of the group calls it, with the same targets, and gets the same loss; backward gives each the gradient of its own columns and communicates nothing.
    Two all-reduces, of 4 bytes a token (int32 maximum) and 80 bytes a token (int64 sum): integers, so the algorithm and the order in which a backend combines them
    do not matter. Without ``validate`` nothing waits for the device, and a CUDA graph can capture all of it. The vocabulary is the total of all ranks' columns.

    Args:
        logits_shard: [..., V_rank], as logits of ``cross_entropy``; V_rank may be 0 and may differ from rank to rank.
        targets: int64 or int32, the leading shape of logits_shard: indices into the whole vocabulary, or ``ignore_index``.
        reduction: "mean" over the tokens not ignored, "sum", or "none".
        group: the ranks that share the vocabulary: a ProcessGroup, a DeviceMesh (all its dimensions), or None for the default group.
        vocab_start: index of the first column of this rank; None: rank * V_rank, for equal shards in the order of ranks. All of any placement are allowed
            that cover the vocabulary once.
        dp_group: ranks that hold other tokens (data, sequence or context parallel), over all of whose tokens mean or sum are taken: 96 bytes more. Gradients
            then are those of that global mean, so those of parameters are to be added over dp_group, not averaged (``data_parallel_cross_entropy``).
        ignore_index: as in ``cross_entropy``.
        validate: the same on every rank. True: arguments that the ranks do not agree on, shards that are no vocabulary and targets out of range raise, on every rank of
            both groups alike, at the cost of a few messages and a wait for the device. False: they give NaN, in loss and gradient; different numbers of tokens
            then are an error of the backend, or a hang. None (default): True on the CPU.

    Returns:
        float32 loss in nats: a scalar, or the shape of targets for "none". Differentiable once.

    Raises:
        TypeError, ValueError: naming the argument, the ranks (as the default group counts them) and the columns.

    Source: docs/SPEC.md, sections 4, 6 to 8 and 11.
    """
    ranks = Ranks("group", group)
    validated = check.validates_ranks(validate, logits_shard)
    try:
        rows = check.rank_rows(logits_shard)
        target = check.target_rows(targets, logits_shard)
        mode = check.reduction(reduction)
        check.integer("ignore_index", ignore_index)
        start = _first_column(vocab_start, ranks.rank, rows.shape[1])
        tokens = _token_ranks(dp_group, mode)
        common = (("reduction", reduction), ("ignore_index", ignore_index), ("logits_shard", rows.dtype))
        shard = _ranks.Shard(dist.get_rank(), None, len(rows), start, rows.shape[1], common)
    except (TypeError, ValueError) as error:
        if not validated:
            raise
        tokens = None if dp_group is None else Ranks("dp_group", dp_group)
        shard = _ranks.Shard(dist.get_rank(), error)
    if validated:
        _ranks.raise_together(_ranks.shards_problem(ranks.gather(shard)), tokens)

    with torch.no_grad():
        images = ranks.all_reduce(ops.order_images(ops.rowmax(rows, 0, rows.shape[1])), dist.ReduceOp.MAX)
        weight = ranks.size - 1 if ranks.rank == 0 else -1
        words, maximum = ops.shard_words(rows, target, images, ignore_index, mode, weight, start)
        ranks.all_reduce(words)
        settled, target_logits = ops.settle_targets(words, target, ignore_index)
        digits = words[: check.WORDS * len(rows)].view(len(rows), check.WORDS)
        loss, _, state, status = ops.finalize(digits, target_logits, settled, maximum, ignore_index, -1)
    if validated:
        findings = ranks.gather(_ranks.find_wrong_row(words, status, target, ignore_index))
        _ranks.raise_together(_ranks.rows_problem(findings), tokens)
    return _finish(rows, loss, settled, maximum, state, mode, tokens, ignore_index, start, targets.shape)


__all__ = ["vocab_parallel_cross_entropy"]
