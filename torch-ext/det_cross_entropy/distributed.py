"""The loss over torch.distributed process groups: the same bytes at every world size. What ranks exchange are integers, added or compared exactly."""

import torch
import torch.distributed as dist

from . import _checks as check
from . import _ranks
from ._options import Options, options, with_divisor
from ._ops import ops
from ._ranks import Ranks
from ._registration import COUNT_WORD, LOGIT_WORDS, MEAN, NONE, RANK_WORDS, STAT_WORDS, gradient_with_options
from .audit import digest
from .stats import RowStats


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


class _LossWithOptions(torch.autograd.Function):
    """(out, lse), both with their derivatives."""

    @staticmethod
    def forward(ctx, rows, out, lse, target, maximum, state, sums, ignore_index, start, options):
        ctx.save_for_backward(rows, target, maximum, state, sums)
        ctx.rest = ignore_index, start, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return (None,) * 10
        rows, target, maximum, state, sums = ctx.saved_tensors
        ignore_index, start, options = ctx.rest
        grad = gradient_with_options(grad_out, grad_lse, rows, target, maximum, state, sums, ignore_index, options.valid_vocab, start, options.of_gradient)
        return (grad,) + (None,) * 9


def _reduce(loss, target, mode, tokens, ignore_index):
    """(out, sums): losses [N] reduced exactly over this rank's tokens and those of `tokens`."""
    if mode == NONE:
        return loss, None
    sums = ops.loss_digits(loss, target, ignore_index)
    if tokens is not None:
        tokens.all_reduce(sums)
    return ops.reduce_digits(sums, mode == MEAN), sums


def _reduce_with_options(loss, z_loss, target, mode, tokens, ignore_index, asked):
    """(out, z_loss, sums), by one all-reduce. The z-loss is reduced if it is to be returned."""
    if mode == NONE:
        return loss, z_loss, None
    by_weight = mode == MEAN and asked.num_items is None
    sums = ops.loss_digits(loss, target, ignore_index, asked.weight if by_weight else None)
    own = len(sums)
    if asked.return_z_loss:
        sums = torch.cat([sums, ops.loss_digits(z_loss, target, ignore_index)])
    if tokens is not None:
        tokens.all_reduce(sums)
    sums, z_words = sums[:own], sums[own:]
    if asked.num_items is not None:
        sums[COUNT_WORD : COUNT_WORD + 1] = asked.num_items
    if asked.return_z_loss:
        z_loss = ops.reduce_digits(with_divisor(z_words, sums) if mode == MEAN else z_words, mode == MEAN)
    return ops.reduce_digits(sums, mode == MEAN), z_loss, sums


def _finish(rows, loss, target, maximum, state, mode, tokens, ignore_index, start, shape):
    out, sums = _reduce(loss, target, mode, tokens, ignore_index)
    out = _Loss.apply(rows, out, target, maximum, state, sums if mode == MEAN else None, ignore_index, start)
    return out.reshape(shape) if mode == NONE else out


def _finish_with_options(rows, loss, lse, z_loss, stats, target, maximum, state, mode, tokens, ignore_index, start, shape, asked):
    with torch.no_grad():
        out, z_loss, sums = _reduce_with_options(loss, z_loss, target, mode, tokens, ignore_index, asked)
    sums = sums if mode == MEAN else None
    out, lse = _LossWithOptions.apply(rows, out, lse, target, maximum, state, sums, ignore_index, start, asked)
    if mode == NONE:
        out, z_loss = out.reshape(shape), z_loss.reshape(shape)
    return asked.results(out, z_loss, lse.reshape(shape), RowStats(*(s.reshape(shape) for s in stats)) if asked.return_stats else None)


def _token_ranks(dp_group, ranks):
    """The ranks of dp_group, which must hold other tokens than those of `ranks`: else each token would count once for every rank that shares its vocabulary."""
    if dp_group is None:
        return None
    tokens = Ranks("dp_group", dp_group)
    shared = (tokens.processes() & ranks.processes()) - {dist.get_rank()}
    if shared:
        raise ValueError(f"dp_group: expected ranks with other tokens than rank {dist.get_rank()}, got {sorted(shared)}, who share its vocabulary (group)")
    return tokens


def _everywhere(reduction, ignore_index, asked):
    """(name, value) of the arguments that are the same on all ranks."""
    return (("reduction", reduction), ("ignore_index", ignore_index), *(asked or Options()).common())


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
    vocab_size=None,
    dp_group=None,
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
    validate=None,
):
    """Cross-entropy of logits whose vocabulary is cut over the ranks of a group: value and gradient are the bytes of ``cross_entropy`` on one device.

    Every rank of the group calls it, with the same targets, and gets the same loss; backward gives each the gradient of its own columns and communicates nothing.
    Two all-reduces, of 4 bytes a token (int32 maximum) and 72 bytes a token (int64 sum): integers, so the algorithm and the order in which a backend combines them
    do not matter. Without ``validate`` nothing waits for the device, and a CUDA graph can capture all of it. The vocabulary is the total of all ranks' columns: give
    ``vocab_size``, or ``weight``, to have it checked.

    Args:
        logits_shard: [..., V_rank], as logits of ``cross_entropy``; V_rank may be 0 and may differ from rank to rank.
        targets: int64 or int32, the leading shape of logits_shard: indices into the whole vocabulary, or ``ignore_index``.
        reduction: "mean" over the tokens not ignored, "sum", or "none".
        group: the ranks that share the vocabulary: a ProcessGroup, a DeviceMesh (all its dimensions), or None for the default group.
        vocab_start: index of the first column of this rank; None: rank * V_rank, for equal shards in the order of ranks. All of any placement are allowed
            that cover the vocabulary once. Which columns a tensor holds cannot be seen in it: two ranks of equal width that hold each other's give another loss, without an error.
        vocab_size: V, if known: another total of columns gives NaN (but with ``valid_vocab``, beyond which they are not counted), or with ``validate`` a
            ValueError. Otherwise ranks that each pass the whole logits, say, get the loss of the vocabulary repeated, log(ranks) too high.
        dp_group: ranks that hold other tokens (data, sequence or context parallel), over all of whose tokens mean or sum are taken: 96 bytes more. Gradients
            then are those of that global mean, so those of parameters are to be added over dp_group, not averaged (``data_parallel_cross_entropy``).
            None of them may be in ``group``, but this rank itself.
        ignore_index: as in ``cross_entropy``.
        z_loss, weight, num_items, valid_vocab, label_smoothing, logit_scale, softcap, return_z_loss, return_lse, return_stats: as in ``cross_entropy``, the same on every rank.
            ``weight`` is that of the whole vocabulary, whose size it gives as ``vocab_size`` does, and ``valid_vocab`` counts its columns: a shard may lie beyond, and then what lies
            beyond is not counted. They cost no message of their own, but 32 bytes a token for label_smoothing, 20 for return_stats, and 96 in all over dp_group for weights and as many
            for return_z_loss.
        validate: the same on every rank. True: arguments that the ranks do not agree on, shards that are no vocabulary and targets out of range raise, on every rank of
            both groups alike, at the cost of a few messages and a wait for the device. Where a rank's ``group`` or ``dp_group`` itself is wrong, those who wait for it there get the
            backend's error or timeout. False: they give NaN, in loss and gradient, on every rank of ``group``; other weights in the rows whose target's differs, with label smoothing
            in all. But different numbers of tokens, and label smoothing or statistics on some ranks only, are an error of the backend, or a hang; an argument that is wrong by itself
            raises on its own rank only; replicas (``dp_group``) that differ get a mean or sum of no meaning; and a row that ranks do not agree on is missed with a chance of about
            2**-32. None (default): True on the CPU.

    Returns:
        float32 loss in nats: a scalar, or the shape of targets for "none"; with what was asked for beside it, as ``cross_entropy``. Differentiable once.

    Raises:
        TypeError, ValueError: naming the argument, the ranks (as the default group counts them) and the columns.

    Source: docs/SPEC.md, sections 4, 6 to 8 and 11 to 13.
    """
    call = "vocab_parallel_cross_entropy"
    ranks = Ranks("group", group)
    validated = check.validates_ranks(validate, logits_shard)
    tokens = None
    try:
        tokens = _token_ranks(dp_group, ranks)  # first, so that they hear of whatever else is wrong
        rows = check.rank_rows(logits_shard)
        target = check.target_rows(targets, logits_shard)
        mode = check.reduction(reduction)
        check.countable("logits_shard", len(rows), mode)
        check.integer("ignore_index", ignore_index)
        start = _first_column(vocab_start, ranks.rank, rows.shape[1])
        if vocab_size is not None and not 1 <= check.integer("vocab_size", vocab_size) < 2**31:
            raise ValueError(f"vocab_size: expected 1 <= vocab_size < 2**31, got {vocab_size}")
        more = dict(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, return_stats=return_stats)
        asked = options(logits_shard, mode, z_loss, weight, num_items, valid_vocab, return_z_loss, return_lse, vocab_size, **more)
        own, classes = rows if asked is None else asked.valid(rows, start), None if weight is None else len(weight)
        if dp_group is not None and mode == NONE:
            raise ValueError("dp_group: expected None for reduction 'none', which reduces nothing")
        if validated:
            common = _everywhere(reduction, ignore_index, asked)
            same = (*common, ("vocab_size", vocab_size), ("logits_shard", rows.dtype))
            stop = start + rows.shape[1] if rows.shape[1] else 0
            shard = _ranks.Shard(dist.get_rank(), None, len(rows), start, own.shape[1], same, stop, valid_vocab, classes, vocab_size, dp_group is not None)
    except Exception as error:  # of any kind: the others would wait
        if not validated:
            raise
        common, shard = (), _ranks.Shard(dist.get_rank(), _ranks.told(error), spread=dp_group is not None)
    if validated:
        _ranks.agree_on_shards(call, ranks, tokens, shard, common)

    with torch.no_grad():
        share = ranks.size - 1 if ranks.rank == 0 else -1
        N, columns = len(rows), vocab_size or classes or 0  # 0: what the ranks have in all
        of_row = ops.order_images(ops.rowmax(own, 0, own.shape[1]))
        if asked is not None and asked.return_stats:
            of_row = torch.cat([of_row, ops.order_images(-ops.rowleast(own, 0, own.shape[1]))])
        images = ranks.all_reduce(of_row, dist.ReduceOp.MAX)
        salt = () if asked is None else (asked.z_loss, asked.valid_vocab, asked.weight, asked.label_smoothing, *asked.map, asked.return_stats, asked.num_items)
        # of the mean, the vocabulary and how many ranks hold other tokens, the same on all of these ranks: SPEC 11
        form = mode + 4 * (num_items is not None) + 8 * columns + 2**34 * (0 if tokens is None else tokens.size)
        words, maximum = ops.shard_words(own, target, images[:N], ignore_index, form, share, start, *salt)
        ranks.all_reduce(words)
        settled, target_logits = ops.settle_targets(words, target, ignore_index)
        digits = words[: check.WORDS * N].view(N, check.WORDS)
        if asked is None:
            loss, _, state, status = ops.finalize(digits, target_logits, settled, maximum, ignore_index, columns or -1)
        else:
            columns, beside = asked.valid_vocab or columns or -1, words[(check.WORDS + RANK_WORDS) * N :]
            smoothing = beside[: LOGIT_WORDS * N].view(N, LOGIT_WORDS) if asked.label_smoothing else None
            weight = asked.weight if not asked.valid_vocab or asked.weight is None else asked.weight[: asked.valid_vocab]
            arguments = asked.z_loss, weight, asked.label_smoothing, smoothing, *asked.map
            loss, _, state, status, lse, z = ops.finalize_with_options(digits, target_logits, settled, maximum, ignore_index, columns, *arguments)
            stats = ()
            if asked.return_stats:
                least = -torch.where(images[N:] < 0, images[N:] ^ 0x7FFFFFFF, images[N:]).view(torch.float32)  # order images back
                stat_words = beside[-STAT_WORDS * N :].view(N, STAT_WORDS) if N else beside.new_empty((0, STAT_WORDS))
                stats = ops.finalize_stats(digits, stat_words, least, target_logits, settled, maximum, ignore_index, columns, *asked.map)
    if validated:
        finding, held = _ranks.find_wrong_row(digits, status, target, ignore_index), f"targets with SHA-256 {digest(target.long())}"
        said = ranks.gather(f"the rows of {call}", _ranks.Rows(dist.get_rank(), finding, (("targets", held),)))
        _ranks.raise_together(f"the rows of {call}", _ranks.rows_problem(said), tokens)
    if asked is not None:
        return _finish_with_options(rows, loss, lse, z, stats, settled, maximum, state, mode, tokens, ignore_index, start, targets.shape, asked)
    return _finish(rows, loss, settled, maximum, state, mode, tokens, ignore_index, start, targets.shape)


def data_parallel_cross_entropy(
    logits,
    targets,
    reduction="mean",
    *,
    group=None,
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
    validate=None,
):
    """``cross_entropy`` of the tokens of all ranks of a group, each of which holds its own with the whole vocabulary: exact, so the same bytes for every way of spreading tokens.

    One all-reduce of 96 bytes. The loss is the global mean or sum on every rank, and each rank's gradient is that of this global loss with respect to its own logits. What
    they give for a shared parameter therefore adds up over ranks: sum parameter gradients, do not average them. Under ``DistributedDataParallel``, which averages,
    call ``(loss * world_size).backward()`` or register a communication hook that sums; under ``fully_shard``, ``set_gradient_divide_factor(1.0)``.

    Args:
        logits: [N_rank, ..., V], as in ``cross_entropy``; N_rank may differ from rank to rank and be 0.
        targets: int64 or int32, the leading shape of logits.
        reduction: "mean" over all tokens of the group that are not ignored, or "sum".
        group: a ProcessGroup, a DeviceMesh (all its dimensions), or None for the default group.
        z_loss, weight, num_items, valid_vocab, label_smoothing, logit_scale, softcap, return_z_loss, return_lse, return_stats: as in ``cross_entropy``. The sum of weights is that of all tokens of the group, ``num_items`` a number
            for the whole group, and lse and the statistics those of this rank's tokens.
        ignore_index, validate: as in ``vocab_parallel_cross_entropy``.

    Returns:
        float32 scalar, with what was asked for beside it, as ``cross_entropy``. Differentiable once.

    Raises:
        TypeError, ValueError: naming the argument and what it got; with ``validate``, on every rank.

    Source: docs/SPEC.md, sections 7, 8 and 12.
    """
    ranks = Ranks("group", group)
    validated = check.validates_ranks(validate, logits)
    problem, common, count = None, (), 0
    try:
        check.no_transform("logits", logits)
        rows = check.logits_rows(logits)
        check.countable("logits", len(rows), MEAN)
        target = check.target_rows(targets, logits)
        mode = check.reduction(reduction, ("mean", "sum"))
        check.integer("ignore_index", ignore_index)
        more = dict(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, return_stats=return_stats)
        asked = options(logits, mode, z_loss, weight, num_items, valid_vocab, return_z_loss, return_lse, rows.shape[1], **more)
        with torch.no_grad():
            if asked is None:
                loss, maximum, _, state, _, status = ops.cross_entropy(rows, target, NONE, ignore_index)
            else:
                per_row = asked._replace(num_items=None).of_loss
                loss, maximum, _, state, _, status, lse, z, *stats = ops.cross_entropy_with_options(rows, target, NONE, ignore_index, *per_row)
                stats = (lse, *stats)
        if validated:
            check.raise_for_status(status, target, asked and asked.valid_vocab or rows.shape[1], ignore_index)
            common = (*_everywhere(reduction, ignore_index, asked), ("logits", f"V = {rows.shape[1]}"))
        count = len(rows)
    except Exception as error:  # of any kind: the others would wait
        if not validated:
            raise
        problem = _ranks.told(error)
    if validated:
        _ranks.raise_together("data_parallel_cross_entropy", problem, ranks, common=common, rows=count)
    if asked is not None:
        return _finish_with_options(rows, loss, lse, z, stats, target, maximum, state, mode, ranks, ignore_index, 0, targets.shape, asked)
    return _finish(rows, loss, target, maximum, state, mode, ranks, ignore_index, 0, ())


class _Reduced(torch.autograd.Function):
    """`out`, the mean or sum of losses, with its derivative: the upstream gradient, divided by the count if `sums` is given."""

    @staticmethod
    def forward(ctx, loss, out, target, sums, ignore_index):
        ctx.save_for_backward(target, sums)
        ctx.ignore_index = ignore_index
        return out

    @staticmethod
    def backward(ctx, grad_out):
        target, sums = ctx.saved_tensors
        each = grad_out if sums is None else (grad_out.double() / sums[COUNT_WORD]).float()
        return torch.where(target == ctx.ignore_index, torch.zeros_like(each), each), None, None, None, None


def reduce_losses(loss, targets, reduction="mean", *, group=None, ignore_index=-100, validate=None):
    """The exact mean or sum, over the tokens of all ranks of a group, of losses computed elsewhere.

    ``loss`` float32 [...], ``targets`` int64 or int32 of the same shape, which say what is ignored. Returns a float32 scalar, the same on every rank, rounded once;
    differentiable with respect to ``loss``: its gradient, the upstream one over the count, is rounded to float32 here, which ``data_parallel_cross_entropy`` does not do.
    Gradients of shared parameters are to be added over the group (``data_parallel_cross_entropy``). ``validate``, the same on every rank: True raises on all of them for
    an argument that one rank has wrong or that they do not agree on; False lets ranks with another reduction or ``ignore_index`` compute something else; None (default):
    True on the CPU. Source: docs/SPEC.md, section 8.
    """
    ranks = Ranks("group", group)
    validated = check.validates_ranks(validate, loss)
    problem, common, count = None, (), 0
    try:
        check.tensor("loss", loss, (torch.float32,))
        check.no_transform("loss", loss)
        check.countable("loss", loss.numel(), MEAN)
        check.tensor("targets", targets, check.TARGET_DTYPES, loss.shape, loss.device)
        mode = check.reduction(reduction, ("mean", "sum"))
        check.integer("ignore_index", ignore_index)
        common, count = (("reduction", reduction), ("ignore_index", ignore_index)), loss.numel()
    except Exception as error:  # of any kind: the others would wait
        if not validated:
            raise
        problem = _ranks.told(error)
    if validated:
        _ranks.raise_together("reduce_losses", problem, ranks, common=common, rows=count)
    flat, target = loss.reshape(-1).contiguous(), targets.reshape(-1).contiguous()
    with torch.no_grad():
        out, sums = _reduce(flat, target, mode, ranks, ignore_index)
    return _Reduced.apply(flat, out, target, sums if mode == MEAN else None, ignore_index)


__all__ = ["data_parallel_cross_entropy", "reduce_losses", "vocab_parallel_cross_entropy"]
