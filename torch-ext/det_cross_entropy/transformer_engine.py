"""TransformerEngine's loss by its own signature, so that a training script changes one import."""

import torch

from .distributed import vocab_parallel_cross_entropy
from .functional import cross_entropy


def parallel_cross_entropy(
    inp=None,
    target=None,
    label_smoothing=0.0,
    reduce_loss=False,
    dist_process_group=None,
    ignore_idx=-100,
    is_cg_capturable=False,
    z_loss_weight=0.0,
    *,
    _input=None,
    return_log_sum_exp=False,
):
    """As ``transformer_engine.pytorch.cross_entropy.parallel_cross_entropy``.

    Args:
        inp: [b, s, V] or [s, b, V], or V / ranks columns of it in the order of ranks; float32, bfloat16 or float16; not written to.
        target: the leading shape of inp, or that flattened, [b * s] or [b * s, 1]; int64 or int32.
        label_smoothing, z_loss_weight: as label_smoothing and z_loss of ``cross_entropy``.
        reduce_loss: the mean over the tokens that are not ignored (TransformerEngine: over all tokens) instead of per-token losses.
        dist_process_group: the ranks that share the vocabulary; None: this process has all of it.
        ignore_idx: tokens with this target have loss and gradient 0.
        is_cg_capturable: without effect on results; True also keeps arguments unvalidated on the CPU. A CUDA graph can capture both ways.
        _input: the older name of inp.
        return_log_sum_exp: also return the log-sum-exp of each token.

    Returns:
        float32: the leading shape of inp, or a scalar; with return_log_sum_exp ``(loss, log_sum_exp)``, the latter in the leading shape of inp.

    Raises:
        TypeError, ValueError: as ``vocab_parallel_cross_entropy``.
    """
    if _input is not None:
        if inp is not None:
            raise TypeError("_input: expected None, as inp is given; it is the older name of inp")
        inp = _input
    if isinstance(inp, torch.Tensor) and isinstance(target, torch.Tensor) and inp.dim() > 0:
        rows = inp.shape[:-1].numel()
        if target.shape in ((rows,), (rows, 1)):
            target = target.reshape(inp.shape[:-1])
    reduction = "mean" if reduce_loss else "none"
    options = {"ignore_index": ignore_idx, "validate": False if is_cg_capturable else None}
    options.update(label_smoothing=label_smoothing, z_loss=z_loss_weight, return_lse=return_log_sum_exp)
    if dist_process_group is None:
        return cross_entropy(inp, target, reduction, **options)
    return vocab_parallel_cross_entropy(inp, target, reduction, group=dist_process_group, **options)


__all__ = ["parallel_cross_entropy"]
