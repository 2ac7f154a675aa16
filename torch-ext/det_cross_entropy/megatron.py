"""Megatron-LM's vocabulary-parallel loss by its own signature, so that a training script changes one import."""

import sys

import torch

from ._ranks import Ranks
from .distributed import vocab_parallel_cross_entropy as _vocab_parallel_cross_entropy


def _default_group():
    """Megatron's tensor-parallel group where Megatron has been imported, else the default group."""
    state = sys.modules.get("megatron.core.parallel_state")
    return None if state is None else state.get_tensor_model_parallel_group()


def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
    """As ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``: per-token losses of equal shards in the order of ranks.

    Args:
        vocab_parallel_logits: [s, b, V / ranks], float32, bfloat16 or float16; not written to.
        target: [s, b], int64 or int32; -100 is ignored: loss 0. Others out of range give NaN (Megatron: a number).
        label_smoothing: as Megatron has it, spread over the V - 1 other classes, which is ``label_smoothing * V / (V - 1)`` of ``cross_entropy`` and may be at most 1. V is that of
            the whole vocabulary (Megatron's mean is over a rank's own columns, so that its loss depends on the number of ranks).
        tp_group: the tensor-parallel ranks; None: Megatron's own, if Megatron is in use, else the default group.

    Returns:
        float32 losses [s, b], the same on every rank.

    Raises:
        TypeError, ValueError: as the ``vocab_parallel_cross_entropy`` of this package.
    """
    group = _default_group() if tp_group is None else tp_group
    # what is wrong with it, or with the logits, all ranks hear of below
    if isinstance(label_smoothing, (int, float)) and label_smoothing != 0 and isinstance(vocab_parallel_logits, torch.Tensor) and vocab_parallel_logits.dim():
        size = Ranks("tp_group", group).size * vocab_parallel_logits.shape[-1]
        label_smoothing = label_smoothing * size / max(size - 1, 1)
    return _vocab_parallel_cross_entropy(vocab_parallel_logits, target, "none", group=group, label_smoothing=label_smoothing)


__all__ = ["vocab_parallel_cross_entropy"]
