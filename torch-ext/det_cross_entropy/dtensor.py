"""The loss of DTensors: logits sharded over the vocabulary, over tokens, or both, as torch.distributed.tensor.parallel.loss_parallel takes them."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from . import _checks as check
from . import _ranks, functional
from .audit import digest
from .distributed import data_parallel_cross_entropy, vocab_parallel_cross_entropy
from .stats import RowStats


def _span(size, mesh, placements, dim):
    """(first, last) of this rank's part of a dimension: chunks of ceil(size / ranks), of a chunk again where two mesh dimensions shard it."""
    first, last = 0, size
    for i, placement in enumerate(placements):
        if placement == Shard(dim):
            width = -(-(last - first) // mesh.size(i))
            first = min(first + width * mesh.get_local_rank(i), last)
            last = min(first + width, last)
    return first, last


def _check_order(name, tensor):
    """Two mesh dimensions that shard one dimension of a tensor do so in their order; torch 2.13 also knows others, with the same placements."""
    order = getattr(tensor._spec, "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise ValueError(f"{name}: expected mesh dimensions that shard in their order, got shard_order {order}")


class _Plan:
    """What the placements of logits and targets mean, on this rank."""

    def __init__(self, logits, targets, reduction, ignore_index, class_dim):
        check.reduction(reduction)
        check.integer("ignore_index", ignore_index)
        mesh, placements = logits.device_mesh, tuple(logits.placements)
        if not -logits.dim() <= class_dim < logits.dim():
            raise ValueError(f"class_dim: expected a dimension of logits {tuple(logits.shape)}, got {class_dim}")
        classes = class_dim % logits.dim()
        if not all(type(p) in (Shard, Replicate) for p in placements):
            raise ValueError(f"logits: expected Shard and Replicate, got placements {placements}")
        _check_order("logits", logits)
        self.by_class = [i for i, p in enumerate(placements) if p == Shard(classes)]
        self.by_token = [i for i, p in enumerate(placements) if type(p) is Shard and i not in self.by_class]
        self.placements = tuple(Shard(p.dim - (p.dim > classes)) if i in self.by_token else Replicate() for i, p in enumerate(placements))

        self.shape, self.classes = logits.shape[:classes] + logits.shape[classes + 1 :], logits.shape[classes]
        check.tensor("targets", targets, check.TARGET_DTYPES, self.shape, dtensor=True)
        if isinstance(targets, DTensor):
            got = tuple(targets.placements)
            if targets.device_mesh != mesh or got != self.placements or not all(type(p) in (Shard, Replicate) for p in got):
                raise ValueError(f"targets: expected placements {self.placements} on the mesh of logits, got {got}")
            _check_order("targets", targets)
            targets = targets.to_local()
        elif self.by_token:
            raise ValueError(f"targets: expected a DTensor with placements {self.placements}, as logits is sharded over tokens, got a plain tensor")
        self.targets = targets

        self.logits = logits.to_local(grad_placements=placements).movedim(classes, -1)
        self.first, last = _span(self.classes, mesh, placements, classes)
        if self.logits.shape[-1] != last - self.first:
            raise ValueError(
                f"logits: expected columns {self.first} to {last} of {self.classes} on this rank, as DTensor shards them, got {self.logits.shape[-1]}"
            )


def _problem(said):
    """Why the ranks of a mesh cannot go on: an exception, or None. said: (Replica, coordinates of its tokens, digest of its targets) of each."""
    problem = _ranks.replicas_problem([replica for replica, _, _ in said])
    first = {}
    for replica, tokens, held in said:
        process, expected = first.setdefault(tokens, (replica.process, held))
        if problem is None and held != expected:
            return ValueError(f"targets: rank {process} and rank {replica.process} hold the same tokens of logits, but different targets")
    return problem


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
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    return_z_loss=False,
    return_lse=False,
    return_stats=False,
    validate=None,
):
    """``cross_entropy`` of a DTensor, without a redistribution: the same bytes for every mesh and placement.

    Args:
        logits: DTensor [..., V]; each mesh dimension shards a dimension of it (``Shard``) or replicates it. Shards may be uneven, as DTensor's are. ``Partial`` is refused,
            and so are two mesh dimensions that shard one dimension in another order than their own (``shard_order``).
        targets: int64 or int32 indices with the shape of logits without the classes: a DTensor placed as logits is on the token dimensions and replicated where logits
            is sharded over classes; or, if that is replicated throughout, a plain tensor that is the same on every rank. Where ranks hold the same tokens, ``validate`` compares
            their targets; without it, other targets are seen (as NaN) only between ranks that share the vocabulary.
        reduction: as in ``cross_entropy``. Mean and sum are exact over all tokens of the mesh.
        class_dim: the dimension of the vocabulary; ``torch.nn.functional.cross_entropy`` has it at 1.
        z_loss, weight, num_items, valid_vocab, label_smoothing, logit_scale, softcap, return_z_loss, return_lse, return_stats: as in ``cross_entropy``; weight is a plain tensor or a replicated DTensor.
        ignore_index, validate: as in ``vocab_parallel_cross_entropy``.

    Returns:
        float32 DTensor: a replicated scalar, or for "none" placed as targets, as lse and the statistics are; with what was asked for beside it, as ``cross_entropy``. The gradient is placed as logits, and is that of the global loss.

    Raises:
        TypeError, ValueError: naming the argument and what it got.

    Source: docs/SPEC.md, section 11.
    """
    if not isinstance(logits, DTensor):
        raise TypeError(f"logits: expected a DTensor, got {type(logits).__name__}")
    mesh = logits.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError("logits: this process is not in its device mesh")
    validated = check.validates_ranks(validate, logits)
    plan = problem = None
    try:
        plan = _Plan(logits, targets, reduction, ignore_index, class_dim)
    except Exception as error:  # of any kind: the others would wait
        if not validated:
            raise
        problem = _ranks.told(error)
    if validated:
        common = (("reduction", reduction), ("ignore_index", ignore_index), ("class_dim", class_dim), ("logits", f"shape {tuple(logits.shape)}")) if plan else ()
        replica = _ranks.Replica(torch.distributed.get_rank(), problem, common)
        tokens = tuple(mesh.get_local_rank(i) for i in plan.by_token) if plan else ()
        ranks = _ranks.Ranks("logits", mesh)
        said = ranks.gather("dtensor.cross_entropy", (replica, tokens, digest(plan.targets.long()) if plan else ""))
        _ranks.raise_together("dtensor.cross_entropy", _problem(said), None)

    if isinstance(weight, DTensor):
        if not all(p == Replicate() for p in weight.placements):
            raise ValueError(f"weight: expected a plain tensor or a replicated DTensor, got placements {tuple(weight.placements)}")
        weight = weight.to_local()
    options = {"ignore_index": ignore_index, "validate": validate, "z_loss": z_loss, "weight": weight, "num_items": num_items, "valid_vocab": valid_vocab}
    options.update(label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap)
    options.update(return_z_loss=return_z_loss, return_lse=return_lse, return_stats=return_stats)
    tokens = [mesh.get_group(i) for i in plan.by_token] if reduction != "none" else []
    if plan.by_class:
        groups = [mesh.get_group(i) for i in plan.by_class]
        out = vocab_parallel_cross_entropy(
            plan.logits, plan.targets, reduction, group=groups, vocab_start=plan.first, vocab_size=plan.classes, dp_group=tokens or None, **options
        )
    elif tokens:
        out = data_parallel_cross_entropy(plan.logits, plan.targets, reduction, group=tokens, **options)
    else:
        out = functional.cross_entropy(plan.logits, plan.targets, reduction, **options)

    def placed(result, a_token):
        if not a_token:
            return DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
        stride = [plan.shape[i + 1 :].numel() for i in range(len(plan.shape))]
        return DTensor.from_local(result, mesh, plan.placements, run_check=False, shape=plan.shape, stride=tuple(stride))

    each = reduction == "none"
    if not isinstance(out, tuple):
        return placed(out, each)
    a_token = [each] * (1 + return_z_loss) + [True] * (return_lse + return_stats)
    return tuple(RowStats(*(placed(s, True) for s in result)) if isinstance(result, RowStats) else placed(result, t) for result, t in zip(out, a_token))


def _functional(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    """With the signature of torch.nn.functional.cross_entropy."""
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise NotImplementedError(f"{name}: not implemented for DTensors")
    options = dict(ignore_index=ignore_index, weight=weight, label_smoothing=label_smoothing)
    return cross_entropy(input, target, reduction, class_dim=min(1, input.dim() - 1), **options)


class loss_parallel(TorchFunctionMode):
    """Within ``with loss_parallel():``, ``torch.nn.functional.cross_entropy`` and ``nn.CrossEntropyLoss`` of DTensor logits are ``cross_entropy`` of this module.

    As torch's context of the same name is used; backward may be outside. Other tensors are left to torch.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return _functional(*args, **kwargs)
        return func(*args, **kwargs)


__all__ = ["cross_entropy", "loss_parallel"]
