"""The loss of DTensors: logits sharded over the vocabulary, over tokens, or both, as torch.distributed.tensor.parallel.loss_parallel takes them."""

import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from . import _checks as check
from . import functional
from .distributed import data_parallel_cross_entropy, vocab_parallel_cross_entropy


def _span(size, mesh, placements, dim):
    """(first, last) of this rank's part of a dimension: chunks of ceil(size / ranks), of a chunk again where two mesh dimensions shard it."""
    first, last = 0, size
    for i, placement in enumerate(placements):
        if placement == Shard(dim):
            width = -(-(last - first) // mesh.size(i))
            first = min(first + width * mesh.get_local_rank(i), last)
            last = min(first + width, last)
    return first, last


def cross_entropy(
    logits,
    targets,
    reduction="mean",
    *,
    ignore_index=-100,
    class_dim=-1,
    z_loss=0.0,
    weight=None,
    num_items=None,
    valid_vocab=None,
    return_z_loss=False,
    return_lse=False,
    validate=None,
):
    """``cross_entropy`` of a DTensor, without a redistribution: the same bytes for every mesh and placement.

    Args:
        logits: DTensor [..., V]; each mesh dimension shards a dimension of it (``Shard``) or replicates it. Shards may be uneven, as DTensor's are. ``Partial`` is refused.
        targets: int64 or int32 indices with the shape of logits without the classes: a DTensor placed as logits is on the token dimensions and replicated where logits
            is sharded over classes; or, if that is replicated throughout, a plain tensor that is the same on every rank.
        reduction: as in ``cross_entropy``. Mean and sum are exact over all tokens of the mesh.
        class_dim: the dimension of the vocabulary; ``torch.nn.functional.cross_entropy`` has it at 1.
        z_loss, weight, num_items, valid_vocab, return_z_loss, return_lse: as in ``cross_entropy``; weight is a plain tensor or a replicated DTensor.
        ignore_index, validate: as in ``vocab_parallel_cross_entropy``.

    Returns:
        float32 DTensor: a replicated scalar, or for "none" placed as targets, as lse is; with what was asked for beside it, as ``cross_entropy``. The gradient is placed as logits, and is that of the global loss.

    Raises:
        TypeError, ValueError: naming the argument and what it got.

    Source: docs/SPEC.md, section 11.
    """
    if not isinstance(logits, DTensor):
        raise TypeError(f"logits: expected a DTensor, got {type(logits).__name__}")
    mesh, placements = logits.device_mesh, tuple(logits.placements)
    if mesh.get_coordinate() is None:
        raise ValueError("logits: this process is not in its device mesh")
    if not -logits.dim() <= class_dim < logits.dim():
        raise ValueError(f"class_dim: expected a dimension of logits {tuple(logits.shape)}, got {class_dim}")
    classes = class_dim % logits.dim()
    if not all(type(p) in (Shard, Replicate) for p in placements):
        raise ValueError(f"logits: expected Shard and Replicate, got placements {placements}")
    by_class = [i for i, p in enumerate(placements) if p == Shard(classes)]
    by_token = [i for i, p in enumerate(placements) if type(p) is Shard and i not in by_class]
    expected = tuple(Shard(p.dim - (p.dim > classes)) if i in by_token else Replicate() for i, p in enumerate(placements))

    shape = logits.shape[:classes] + logits.shape[classes + 1 :]
    check.tensor("targets", targets, check.TARGET_DTYPES, shape)
    if isinstance(targets, DTensor):
        if targets.device_mesh != mesh or tuple(targets.placements) != expected:
            raise ValueError(f"targets: expected placements {expected} on the mesh of logits, got {tuple(targets.placements)}")
        targets = targets.to_local()
    elif by_token:
        raise ValueError(f"targets: expected a DTensor with placements {expected}, as logits is sharded over tokens, got a plain tensor")

    local = logits.to_local(grad_placements=placements).movedim(classes, -1)
    first, last = _span(logits.shape[classes], mesh, placements, classes)
    if local.shape[-1] != last - first:
        raise ValueError(f"logits: expected columns {first} to {last} of {logits.shape[classes]} on this rank, as DTensor shards them, got {local.shape[-1]}")
    if isinstance(weight, DTensor):
        if not all(p == Replicate() for p in weight.placements):
            raise ValueError(f"weight: expected a plain tensor or a replicated DTensor, got placements {tuple(weight.placements)}")
        weight = weight.to_local()
    options = {"ignore_index": ignore_index, "validate": validate, "z_loss": z_loss, "weight": weight, "num_items": num_items, "valid_vocab": valid_vocab}
    options.update(return_z_loss=return_z_loss, return_lse=return_lse)
    tokens = [mesh.get_group(i) for i in by_token] if reduction != "none" else []
    if by_class:
        groups = [mesh.get_group(i) for i in by_class]
        out = vocab_parallel_cross_entropy(local, targets, reduction, group=groups, vocab_start=first, dp_group=tokens or None, **options)
    elif tokens:
        out = data_parallel_cross_entropy(local, targets, reduction, group=tokens, **options)
    else:
        out = functional.cross_entropy(local, targets, reduction, **options)

    def placed(result, a_token):
        if not a_token:
            return DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
        stride = [shape[i + 1 :].numel() for i in range(len(shape))]
        return DTensor.from_local(result, mesh, expected, run_check=False, shape=shape, stride=tuple(stride))

    each = reduction == "none"
    if not isinstance(out, tuple):
        return placed(out, each)
    return tuple(placed(result, each or (return_lse and i == len(out) - 1)) for i, result in enumerate(out))


def _functional(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    """With the signature of torch.nn.functional.cross_entropy."""
    for name, value, off in (("size_average", size_average, None), ("reduce", reduce, None), ("label_smoothing", label_smoothing, 0.0)):
        if value is not off and value != off:
            raise NotImplementedError(f"{name}: not implemented for DTensors")
    return cross_entropy(input, target, reduction, ignore_index=ignore_index, weight=weight, class_dim=min(1, input.dim() - 1))


class loss_parallel(TorchFunctionMode):
    """Within ``with loss_parallel():``, ``torch.nn.functional.cross_entropy`` and ``nn.CrossEntropyLoss`` of DTensor logits are ``cross_entropy`` of this module.

    As torch's context of the same name is used; backward may be outside. Label smoothing raises ``NotImplementedError``. Other tensors are left to torch.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return _functional(*args, **kwargs)
        return func(*args, **kwargs)


__all__ = ["cross_entropy", "loss_parallel"]
