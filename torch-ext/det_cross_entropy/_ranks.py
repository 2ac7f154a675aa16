"""Processes that compute one loss together: their collectives, and errors that all of them raise or none."""

from typing import NamedTuple, Optional

import torch
import torch.distributed as dist

from . import _checks as check


class Ranks:
    """The processes of a group, of all dimensions of a DeviceMesh, or of several groups that span such a grid, slowest first."""

    def __init__(self, name, group):
        if group is None or isinstance(group, dist.ProcessGroup):
            self.groups = [group]
        elif isinstance(group, (list, tuple)):
            self.groups = list(group)
        elif hasattr(group, "get_all_groups"):  # a DeviceMesh
            self.groups = group.get_all_groups()
        else:
            raise TypeError(f"{name}: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        self.size, self.rank = 1, 0
        for g in self.groups:
            if dist.get_rank(g) < 0:
                raise ValueError(f"{name}: process {dist.get_rank()} is not in this group")
            self.size, self.rank = self.size * dist.get_world_size(g), self.rank * dist.get_world_size(g) + dist.get_rank(g)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        """In place. Of integers, so that the order in which a backend combines does not matter, nor in which groups do."""
        for g in self.groups:
            dist.all_reduce(tensor, op, group=g)
        return tensor

    def gather(self, value):
        """`value` of every rank, in order of rank: a picklable object. Waits for the device."""
        values = [value]
        for g in reversed(self.groups):
            lists = [None] * dist.get_world_size(g)
            dist.all_gather_object(lists, values, group=g)
            values = [v for part in lists for v in part]
        return values


class Shard(NamedTuple):
    """What a rank says of itself before anything of a size that depends on it is sent."""

    process: int  # rank in the default group, which messages name
    error: Optional[Exception]  # why its arguments cannot be meant
    rows: int = 0
    start: int = 0
    columns: int = 0
    common: tuple = ()  # (name, value) of each argument that must be the same on all ranks
    stop: int = 0  # one past the rank's last column, those beyond the valid vocabulary included; 0: it has none
    valid: Optional[int] = None  # valid_vocab
    classes: Optional[int] = None  # that have a weight


def common_problem(process, common, first, expected):
    """What two ranks do not have in common, though they must, as an exception; or None."""
    for (name, value), (_, other) in zip(common, expected):
        if value != other:
            return ValueError(f"{name}: rank {process} has {value}, rank {first} has {other}")
    return None


def shards_problem(shards):
    """Why these shards are not one vocabulary: an exception, or None. The same for every rank that was given the same list."""
    for s in shards:
        if s.error is not None:
            return type(s.error)(f"rank {s.process}: {s.error}")
    first = shards[0]
    for s in shards[1:]:
        if s.rows != first.rows:
            return ValueError(f"targets: rank {s.process} has {s.rows} rows, rank {first.process} has {first.rows}")
        problem = common_problem(s.process, s.common, first.process, first.common)
        if problem is not None:
            return problem
    end, before = 0, None
    for s in sorted((s for s in shards if s.columns), key=lambda s: (s.start, s.process)):
        stop = s.start + s.columns
        if s.start > end:
            holders = f"between rank {before.process} and rank {s.process}" if before else f"before rank {s.process}"
            return ValueError(f"logits_shard: no rank holds columns {end} to {s.start}, {holders} (vocab_start?)")
        if s.start < end:
            return ValueError(
                f"logits_shard: rank {before.process} and rank {s.process} both hold columns {s.start} to {min(end, stop)} (vocab_start?)"
            )
        end, before = stop, s
    if end == 0:
        return ValueError("logits_shard: no rank has a column")
    if first.valid is not None and first.valid > end:
        return ValueError(f"valid_vocab: expected 1 to {end}, got {first.valid}")
    if first.classes is not None and first.classes != max(s.stop for s in shards):
        return ValueError(f"weight: expected shape {(max(s.stop for s in shards),)}, got {(first.classes,)}")
    return None


def raise_together(problem, tokens, common=()):
    """Raises `problem`, the same on all ranks that share a vocabulary; or that of other ranks of `tokens`, who would wait for this one, or have other arguments."""
    told = [(dist.get_rank(), problem, common)]
    told = told if tokens is None else tokens.gather(told[0])
    problems = [p for _, p, _ in told] + [common_problem(*rank[::2], *told[0][::2]) for rank in told]
    for p in problems:
        if p is not None:
            raise p


class Finding(NamedTuple):
    """The first row that a rank cannot stand for."""

    process: int  # rank in the default group
    row: int
    target: int  # this rank's
    message: Optional[str]  # None: the ranks have different targets


def find_wrong_row(words, status, target, ignore_index):
    """A Finding, or None, from summed words and the row status. Waits for the device."""
    rows = target.numel()
    digits, agreement = words[: check.WORDS * rows].view(rows, check.WORDS), words[(check.WORDS + 1) * rows :]
    wrong = (status & check.WRONG | agreement.ne(0)).nonzero()
    if wrong.numel() == 0:
        return None
    row = int(wrong[0])
    flags, faults, columns, own = int(status[row]), int(digits[row, 6]) >> 32, int(digits[row, 6]) & 0xFFFFFFFF, int(target[row])
    if int(agreement[row]) != 0:
        message = None
    elif flags & check.ABOVE_MAXIMUM:
        message = f"logits_shard: row {row}: {faults} logits above the maximum that their rank was given, or NaN; the maximum is stale"
    elif flags & (check.BAD_COVER | check.BAD_COLUMNS):
        message = f"logits_shard: row {row}: the ranks' {columns} columns do not cover the vocabulary once each, or were summed for different maxima"
    elif flags & check.BAD_DIGITS:
        message = f"logits_shard: row {row}: no logits have these digits with this maximum and target"
    else:
        message = f"targets: row {row} has {own}, expected 0 <= target < {columns} or ignore_index = {ignore_index}"
    return Finding(dist.get_rank(), row, own, message)


def rows_problem(findings):
    """One exception for what the ranks found, or None."""
    found = [f for f in findings if f is not None]
    if not found:
        return None
    if found[0].message is None:
        held = ", ".join(f"rank {f.process} has {f.target}" for f in found)
        return ValueError(f"targets: row {found[0].row}: the ranks have different targets: {held}")
    return ValueError(f"{found[0].message} (found by rank {', '.join(str(f.process) for f in found)})")


__all__ = ["Finding", "Ranks", "Shard", "find_wrong_row", "raise_together", "rows_problem", "shards_problem"]
