"""Processes that compute one loss together: their collectives, and errors that all of them raise or none."""

from typing import NamedTuple, Optional

import torch
import torch.distributed as dist

from . import _checks as check

RECORD = "det_cross_entropy"  # what every object begins with that ranks send each other here


class Ranks:
    """The processes of a group, of all dimensions of a DeviceMesh, or of several groups that span such a grid, slowest first."""

    def __init__(self, name, group):
        if not dist.is_available():
            raise RuntimeError(f"{name}: this torch has no torch.distributed")
        self.name, self.mesh = name, None
        outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to a process that it leaves out
        if group is None or isinstance(group, dist.ProcessGroup):
            self.groups = [group]
        elif isinstance(group, (list, tuple)) and all(isinstance(g, dist.ProcessGroup) for g in group):
            self.groups = list(group)
        elif hasattr(group, "get_all_groups"):  # a DeviceMesh
            self.groups, self.mesh = group.get_all_groups(), group
        elif isinstance(group, type(outside)) and group == outside:
            raise ValueError(f"{name}: process {dist.get_rank()} is not in this group")
        else:
            raise TypeError(f"{name}: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        self.size, self.rank = 1, 0
        for g in self.groups:
            if dist.get_rank(g) < 0:
                raise ValueError(f"{name}: process {dist.get_rank()} is not in this group")
            self.size, self.rank = self.size * dist.get_world_size(g), self.rank * dist.get_world_size(g) + dist.get_rank(g)

    def processes(self):
        """Those that this process meets here, itself too, as the default group counts them: known without a message."""
        if self.mesh is not None:
            return set(self.mesh.mesh.flatten().tolist())
        return set().union(*(dist.get_process_group_ranks(g) for g in self.groups))

    def all_reduce(self, tensor, op=None):
        """In place; None: the sum. Of integers, so that the order in which a backend combines does not matter, nor in which groups do."""
        for g in self.groups:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op is None else op, group=g)
        return tensor

    def gather(self, call, value):
        """`value` of every rank, in order of rank: a picklable object. Waits for the device. `call`: what all of them must be doing, lest a rank that left early with an
        error of its own answers with the next thing that it sends."""
        records = [(RECORD, call, dist.get_rank(), value)]
        for g in reversed(self.groups):
            lists = [None] * dist.get_world_size(g)
            dist.all_gather_object(lists, records, group=g)
            records = [r for part in lists for r in (part if isinstance(part, list) else [part])]
        for r in records:
            if not (isinstance(r, tuple) and len(r) == 4 and r[0] == RECORD):
                raise RuntimeError(f"{self.name}: a rank is not in {call}, but sends a {type(r).__name__}; did it raise an error of its own?")
            if r[1] != call:
                raise RuntimeError(f"{self.name}: rank {r[2]} is in {r[1]}, rank {dist.get_rank()} in {call}")
        return [value for _, _, _, value in records]


def told(error):
    """`error` as other ranks are to hear of it: with this rank's number, and of a type that survives pickling."""
    kinds = (TypeError, ValueError, NotImplementedError, RuntimeError)
    if type(error) in kinds:
        return type(error)(f"rank {dist.get_rank()}: {error}")
    return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")


class Shard(NamedTuple):
    """What a rank says of itself before anything of a size that depends on it is sent."""

    process: int  # rank in the default group, which messages name
    error: Optional[Exception]  # why its arguments cannot be meant, as told()
    rows: int = 0
    start: int = 0
    columns: int = 0
    common: tuple = ()  # (name, value) of each argument that must be the same on all ranks
    stop: int = 0  # one past the rank's last column, those beyond the valid vocabulary included; 0: it has none
    valid: Optional[int] = None  # valid_vocab
    classes: Optional[int] = None  # that have a weight
    vocab_size: Optional[int] = None  # V, if it was given
    spread: bool = False  # whether it was given a dp_group, be it a wrong one


def _different(records):
    """The first argument that is not the same on all ranks: an exception, or None."""
    first = records[0]
    for r in records[1:]:
        for (name, value), (_, expected) in zip(r.common, first.common):
            if value != expected:
                return ValueError(f"{name}: rank {r.process} has {value}, rank {first.process} has {expected}")
    return None


def shards_problem(shards):
    """Why these shards are not one vocabulary: an exception, or None. The same for every rank that was given the same list."""
    for s in shards:
        if s.error is not None:
            return s.error
    first = shards[0]
    for s in shards[1:]:
        if s.rows != first.rows:
            return ValueError(f"targets: rank {s.process} has {s.rows} rows, rank {first.process} has {first.rows}")
    different = _different(shards)
    if different is not None:
        return different
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
    if first.vocab_size not in (None, max(s.stop for s in shards)):
        return ValueError(f"vocab_size: expected {max(s.stop for s in shards)}, the columns of all ranks, got {first.vocab_size} (does a rank pass more than its own columns?)")
    return None


class Replica(NamedTuple):
    """What a rank says to those that hold other tokens."""

    process: int  # rank in the default group
    problem: Optional[Exception] = None  # why it, or a rank that it shares the vocabulary with, cannot go on
    common: tuple = ()  # as of Shard
    rows: int = 0  # that it adds to a mean or sum
    vocabulary: int = 0  # the first of those that it shares the vocabulary with


def replicas_problem(replicas):
    """Why these cannot be one batch: an exception, or None."""
    for r in replicas:
        if r.problem is not None:
            return r.problem
    rows = sum(r.rows for r in replicas)
    if rows >= check.MAX_ROWS:
        return ValueError(f"logits: expected fewer than 2**30 rows over all ranks for a mean or sum, got {rows}")
    return _different(replicas)


def raise_together(call, problem, tokens, **replica):
    """Raises `problem`, the same on all ranks that share a vocabulary; or why the ranks of `tokens`, who would wait for this one, cannot go on."""
    if tokens is not None:
        problem = replicas_problem(tokens.gather(call, Replica(dist.get_rank(), problem, **replica)))
    if problem is not None:
        raise problem


def agree_on_shards(call, ranks, tokens, shard, common):
    """Raises on all ranks of both groups alike unless `ranks` hold one vocabulary, and the replicas of it in `tokens` agree on `common` and are the same for each of `ranks`."""
    shards = ranks.gather(call, shard)
    problem = shards_problem(shards)
    spread = [s.spread for s in shards]
    if any(spread) and not all(spread):
        given, missing = shards[spread.index(True)].process, shards[spread.index(False)].process
        problem = problem or ValueError(f"dp_group: rank {missing} has None, rank {given} has one")
        tokens = None  # who would take part in a message over it is not known
    if tokens is None:
        return raise_together(call, problem, None)
    common = (*common, ("logits_shard", f"V = {sum(s.columns for s in shards)}"))
    replicas = tokens.gather(call, Replica(dist.get_rank(), problem, common, shard.rows, min(s.process for s in shards)))
    found = replicas_problem(replicas)
    if any(r.problem is not None for r in replicas):
        raise found  # which the others of `ranks` hear in the same way
    # A dp_group that is wired otherwise for some of `ranks` would give them another mean.
    seen = ("dp_group", f"replicas at ranks {sorted(r.vocabulary for r in replicas)}")
    return raise_together(call, found, ranks, common=(seen,))


class Finding(NamedTuple):
    """The first row that a rank cannot stand for."""

    process: int  # rank in the default group
    row: int
    target: int  # this rank's
    message: str  # for ranks whose targets are the same


def find_wrong_row(digits, status, target, ignore_index):
    """A Finding, or None, from summed digits and the row status, in which a row that the ranks do not agree on has a bad target. Waits for the device."""
    wrong = (status & check.WRONG).nonzero()
    if wrong.numel() == 0:
        return None
    row = int(wrong[0])
    flags, faults, columns, own = int(status[row]), int(digits[row, 6]) >> 32, int(digits[row, 6]) & 0xFFFFFFFF, int(target[row])
    if flags & check.ABOVE_MAXIMUM:
        message = f"logits_shard: row {row}: {faults} logits above the maximum that their rank was given, or NaN; the maximum is stale"
    elif flags & (check.BAD_COVER | check.BAD_COLUMNS):
        message = f"logits_shard: row {row}: the ranks' {columns} columns do not cover the vocabulary once each, or were summed for different maxima"
    elif flags & check.BAD_DIGITS:
        message = f"logits_shard: row {row}: no logits have these digits with this maximum and target"
    elif own == ignore_index or 0 <= own < columns:
        message = f"targets: row {row}: the ranks do not agree on it: on the target, {own} here, its weight, or another argument"
    else:
        message = f"targets: row {row} has {own}, expected 0 <= target < {columns} or ignore_index = {ignore_index}"
    return Finding(dist.get_rank(), row, own, message)


class Rows(NamedTuple):
    """What a rank says of its rows in the end."""

    process: int  # rank in the default group
    finding: Optional[Finding]
    common: tuple = ()  # as of Shard


def rows_problem(said):
    """One exception for what the ranks found, or None. What no rank found, for two hashes were the same, is in what must be common."""
    found = [r.finding for r in said if r.finding is not None]
    if not found:
        return _different(said)
    row = min(f.row for f in found)
    found = [f for f in found if f.row == row]
    if any(f.target != found[0].target for f in found):
        held = ", ".join(f"rank {f.process} has {f.target}" for f in found)
        return ValueError(f"targets: row {row}: the ranks have different targets: {held}")
    return ValueError(f"{found[0].message} (found by rank {', '.join(str(f.process) for f in found)})")


__all__ = [
    "Finding",
    "Ranks",
    "Replica",
    "Rows",
    "Shard",
    "agree_on_shards",
    "find_wrong_row",
    "raise_together",
    "replicas_problem",
    "rows_problem",
    "shards_problem",
    "told",
]
