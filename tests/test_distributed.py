"""Real processes over gloo: the bytes of one device at every world size, and never a plausible number when the ranks do not agree.

Eight processes are started once and run all cases, in subgroups of 1, 2, 3, 4 and 8; each test looks at what they sent back.
"""
import importlib.util
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracle
import processes
from cases import DTYPES, INF, NAN
from conftest import ROOT, load_kernel

WORLDS = [1, 2, 3, 4, 8]
N, V = 24, 211                                                  # a prime: no world size cuts it evenly
REDUCTIONS = ["mean", "sum", "none"]


def example():
    spec = importlib.util.spec_from_file_location("tensor_parallel_lm", ROOT / "examples" / "tensor_parallel_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Inputs, and ways to cut them


def batch(kind, dtype):
    """Logits [N, V], targets [N] and an upstream gradient [N]; "special" has rows of every kind that is NaN or infinite."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(N, V, generator=generator) * 4
    targets = torch.randint(V, (N,), generator=generator)
    targets[[3, 17]] = -100
    targets[4], targets[5] = 0, V - 1
    if kind == "special":
        logits[0, V - 1] = NAN                                  # only the last rank has it
        logits[1, 0] = INF
        logits[2] = -INF
        logits[3] = NAN                                         # ignored
        logits[6, targets[6]] = -INF
        logits[7, ::2] = -INF
        logits[8] = torch.linspace(2.0 ** 21, 2.0 ** 21 + 60, V)
        logits[9, targets[9]] = 90.0
        logits[10] = -0.0
        logits[11] = -3e4
    return logits.to(DTYPES[dtype]), targets, torch.linspace(-1, 2, N)


def chunks(total, world):
    """As torch.chunk and DTensor cut: the last ranks may have less, or nothing."""
    width = -(-total // world)
    return [(min(r * width, total), min((r + 1) * width, total)) for r in range(world)]


def cuts_of(total, world):
    """Named lists of (first, last) columns by rank."""
    inner = [0, 1, 1, total // 3, total // 2, total // 2 + 1, total - 1][: world - 1]
    bounds = [0, *inner, total]
    uneven = list(zip(bounds, bounds[1:]))
    return {"even": chunks(total, world), "uneven": uneven, "shuffled": uneven[::-2] + uneven[-2::-2]}


KINDS = [("plain", dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS] + [("special", dtype, "none") for dtype in DTYPES]


def run_one(dce, kind, dtype, reduction, cut, index, **kw):
    logits, targets, upstream = batch(kind, dtype)
    leaf = logits[:, cut[0] : cut[1]].clone().requires_grad_()
    if index % 2:                                               # a slice of something wider, and int32
        leaf = torch.cat([logits[:, cut[0] : cut[1]], torch.full((N, 3), 99.0, dtype=logits.dtype)], 1).requires_grad_()
        targets = targets.int()
    size = V if index % 3 else None
    out = dce.vocab_parallel_cross_entropy(leaf[:, : cut[1] - cut[0]], targets, reduction, vocab_start=cut[0], vocab_size=size, **kw)
    out.backward(upstream if reduction == "none" else torch.tensor(0.7))
    return out.detach(), leaf.grad[:, : cut[1] - cut[0]]


def reference(dce, kind, dtype, reduction):
    logits, targets, upstream = batch(kind, dtype)
    leaf = logits.requires_grad_()
    out = dce.cross_entropy(leaf, targets, reduction)
    out.backward(upstream if reduction == "none" else torch.tensor(0.7))
    return dce.digest(out), dce.digest(leaf.grad)


# ---------------------------------------------------------------------------------------------------------------------
# What the processes run. Each returns {name: what this rank saw}.


def every_cut(dce, rank, groups):
    seen = {}
    for world in WORLDS:
        if rank >= world:
            continue
        for name, cuts in cuts_of(V, world).items():
            for index, kind in enumerate(KINDS):
                out, grad = run_one(dce, *kind, cuts[rank], index, group=groups[world], validate=index % 3 == 0)
                seen[world, name, kind] = dce.digest(out), cuts[rank][0], grad.view(torch.uint8).numpy() if grad.numel() else np.zeros((N, 0), np.uint8)
    return seen


def training(dce, rank, groups):
    lm, seen = example(), {}
    for world in WORLDS:
        if rank < world:
            for name in ("even", "shuffled") if world in (3, 8) else ("even",):
                seen[world, name] = lm.train(dce, cuts_of(lm.VOCABULARY, world)[name][rank], groups[world], layers=1)
    return seen


SMALL_N, SMALL_V = 6, 30
SMALL = torch.randn(SMALL_N, SMALL_V, generator=torch.Generator().manual_seed(3)) * 3
SMALL_TARGETS = torch.tensor([0, 29, 12, -100, 10, 19])


def wrong_arguments(rank, case):
    """(logits_shard, targets, keywords) of one of three ranks."""
    start, width, targets, kw = 10 * rank, 10, SMALL_TARGETS.clone(), {}
    if case == "overlap":
        start = [0, 9, 20][rank]
    elif case == "gap":
        start = [0, 11, 20][rank]
    elif case == "doubled":
        start = [0, 0, 10][rank]
    elif case == "missing":
        width = [10, 0, 10][rank]
    elif case == "late start":
        start = 10 * rank + 1
    elif case == "unequal":
        width, start = [10, 13, 7][rank], None
    elif case == "target":
        targets[4] += rank == 2
    elif case == "ignored on one rank":
        targets[2] = -100 if rank == 1 else targets[2]
    elif case == "ignored on all but one":
        targets[3] = 5 if rank == 0 else -100
    elif case == "swapped rows" and rank == 0:
        targets[[0, 1]] = targets[[1, 0]]
    elif case == "ignore_index":
        kw["ignore_index"] = -1 if rank == 1 else -100
    elif case == "target out of range":
        targets[1] = SMALL_V
    elif case == "negative target":
        targets[1] = -5
    elif case in ("vocab_size", "smaller vocab_size"):
        kw["vocab_size"] = 31 if case == "vocab_size" else 29
    elif case == "whole logits":
        return SMALL, targets, {"vocab_size": SMALL_V}
    first = [0, 10, 23][rank] if case == "unequal" else 10 * rank
    return SMALL[:, first : first + width], targets, {"vocab_start": start, **kw}


WRONG = {
    # case: (rows that are NaN, None for all; what the error says)
    "overlap": (None, r"logits_shard: rank 0 and rank 1 both hold columns 9 to 10"),
    "gap": (None, r"logits_shard: no rank holds columns 10 to 11, between rank 0 and rank 1"),
    "doubled": (None, r"logits_shard: rank 0 and rank 1 both hold columns 0 to 10"),
    "missing": (None, r"logits_shard: no rank holds columns 10 to 20, between rank 0 and rank 2"),
    "late start": (None, r"logits_shard: no rank holds columns 0 to 1, before rank 0"),
    "unequal": (None, r"logits_shard: no rank holds columns 10 to 13, between rank 0 and rank 1"),
    "vocab_size": (None, r"vocab_size: expected 30, the columns of all ranks, got 31"),
    "smaller vocab_size": (None, r"vocab_size: expected 30, the columns of all ranks, got 29"),
    "whole logits": (None, r"vocab_size: expected 90, the columns of all ranks, got 30"),
    "target": ([4], r"targets: row 4: the ranks have different targets: rank 0 has 10, rank 1 has 10, rank 2 has 11"),
    "ignored on one rank": ([2], r"targets: row 2: .*different.*: rank 0 has 12, rank 1 has -100, rank 2 has 12"),
    "ignored on all but one": ([3], r"targets: row 3: .*different.*: rank 0 has 5, rank 1 has -100, rank 2 has -100"),
    "swapped rows": ([0, 1], r"targets: row 0: .*different.*: rank 0 has 29, rank 1 has 0, rank 2 has 0"),
    "ignore_index": (None, r"ignore_index: rank 1 has -1, rank 0 has -100"),
    "target out of range": ([1], r"targets: row 1 has 30, expected 0 <= target < 30 or ignore_index = -100 \(found by rank 0, 1, 2\)"),
    "negative target": ([1], r"targets: row 1 has -5, expected 0 <= target < 30 or ignore_index = -100"),
}


def wrong(dce, rank, groups):
    if rank >= 3:
        return {}
    seen, group = {}, groups[3]
    for case in WRONG:
        for reduction in ("none", "mean"):
            x, targets, kw = wrong_arguments(rank, case)
            leaf = x.clone().requires_grad_()
            out = dce.vocab_parallel_cross_entropy(leaf, targets, reduction, group=group, validate=False, **kw)
            out.sum().backward()
            seen[case, reduction] = out.detach(), leaf.grad
        seen[case, "error"] = error_of(lambda: dce.vocab_parallel_cross_entropy(x, targets, group=group, validate=True, **kw))
    return seen


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


OPTIONS = {
    "z_loss": dict(z_loss=1e-3),
    "weight": dict(weight=torch.linspace(-0.25, 2, V)),
    "valid": dict(valid_vocab=100),
    "num_items": dict(num_items=17),
    "all": dict(z_loss=0.02, weight=torch.linspace(-0.25, 2, V), valid_vocab=100, num_items=torch.tensor(17)),
    "lse alone": {},
    "smoothing": dict(label_smoothing=0.1),
    "softcap": dict(softcap=4.0, logit_scale=1.5),
    "smoothing and all": dict(label_smoothing=0.25, softcap=20.0, z_loss=0.02, weight=torch.linspace(-0.25, 2, V), valid_vocab=100),
}
OPTION_CASES = [(name, dtype, reduction) for name in OPTIONS for dtype in DTYPES for reduction in REDUCTIONS if reduction == "mean" or "num_items" not in OPTIONS[name]]
G_LSE = torch.linspace(-1, 1, N)


def option_inputs(name, dtype, kind="special"):
    logits, targets, upstream = batch(kind, dtype)
    if "valid_vocab" in OPTIONS[name]:
        targets = targets.clamp(max=99)
    return logits, targets, upstream, {**OPTIONS[name], "return_z_loss": True, "return_lse": True, "return_stats": True}


def backward_of_both(out, lse, upstream, g_lse):
    torch.autograd.backward([out, lse], [upstream if out.dim() else torch.tensor(0.7), g_lse])


def with_options(dce, rank, groups):
    """{(world, cut, case): digests of loss, z-loss and lse, first column, gradient}."""
    seen = {}
    for world in WORLDS:
        if rank >= world:
            continue
        for name, cuts in cuts_of(V, world).items():
            lo, hi = cuts[rank]
            for index, (option, dtype, reduction) in enumerate(OPTION_CASES):
                logits, targets, upstream, kw = option_inputs(option, dtype, "special" if reduction == "none" else "plain")
                leaf = logits[:, lo:hi].clone().requires_grad_()
                out, z, lse, stats = dce.vocab_parallel_cross_entropy(leaf, targets, reduction, group=groups[world], vocab_start=lo, validate=index % 3 == 0, **kw)
                backward_of_both(out, lse, upstream, G_LSE)
                grad = leaf.grad.view(torch.uint8).numpy() if leaf.grad.numel() else np.zeros((N, 0), np.uint8)
                seen[world, name, (option, dtype, reduction)] = tuple(map(dce.digest, (out, z, lse, *stats))), lo, grad
    return seen


def options_of_tokens(dce, rank, groups):
    """Over ranks of tokens, and of tokens and columns; and as DTensors."""
    seen = {}
    for dp, tp in ((2, 1), (3, 1), (2, 2), (2, 4)):
        mesh = DeviceMesh("cpu", torch.arange(dp * tp).view(dp, tp), mesh_dim_names=("dp", "tp"))
        if rank >= dp * tp:
            continue
        (a, b), (lo, hi) = spread(N, dp)[mesh.get_local_rank("dp")], cuts_of(V, tp)["uneven"][mesh.get_local_rank("tp")]
        for option, reduction in itertools.product(OPTIONS, ("mean", "sum")):
            if reduction == "sum" and "num_items" in OPTIONS[option]:
                continue
            logits, targets, _, kw = option_inputs(option, "bf16", "plain")
            leaf = logits[a:b, lo:hi].clone().requires_grad_()
            if tp == 1:
                out, z, lse, stats = dce.data_parallel_cross_entropy(leaf, targets[a:b], reduction, group=mesh.get_group("dp"), **kw)
            else:
                out, z, lse, stats = dce.vocab_parallel_cross_entropy(leaf, targets[a:b], reduction, group=mesh["tp"], vocab_start=lo, dp_group=mesh["dp"], **kw)
            backward_of_both(out, lse, None, G_LSE[a:b])
            seen[dp, tp, option, reduction] = out.detach(), z, lse.detach(), stats, (a, b), (lo, hi), leaf.grad.float()
    for layout in ("dp x tp", "tokens", "replicated", "vocabulary of 3"):
        shape, placements = LAYOUTS[layout]
        mesh = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))
        if rank >= mesh.size():
            continue
        logits, targets, _, kw = option_inputs("smoothing and all" if layout == "tokens" else "all", "fp32", "plain")
        for_targets = [p if p in (Shard(0), Shard(1)) else Replicate() for p in placements]
        x = distribute_tensor(logits.view(4, 6, V), mesh, placements).requires_grad_()
        t = distribute_tensor(targets.view(4, 6), mesh, for_targets)
        for reduction in ("mean", "none"):
            if reduction == "none":
                kw = {k: v for k, v in kw.items() if k != "num_items"}
            out, z, lse, stats = dce.cross_entropy(x, t, reduction, validate=False, **kw)
            (grad,) = torch.autograd.grad([out, lse], x, [torch.ones_like(out), distribute_tensor(G_LSE.view(4, 6), mesh, for_targets)])
            seen[layout, reduction] = out.full_tensor().detach(), z.full_tensor(), lse.full_tensor().detach(), *(s.full_tensor() for s in stats), grad.full_tensor()
        with dce.dtensor.loss_parallel():
            moved = [Shard({0: 0, 1: 2, 2: 1}[p.dim]) if isinstance(p, Shard) else p for p in placements]
            y = distribute_tensor(logits.view(4, 6, V).movedim(2, 1).contiguous(), mesh, moved)
            seen[layout, "context"] = torch.nn.functional.cross_entropy(y, t, OPTIONS["weight"]["weight"], label_smoothing=0.1).full_tensor()
    return seen


def options_go_wrong(dce, rank, groups):
    """One of three ranks has another option: (losses without a look, error with one)."""
    if rank >= 3:
        return {}
    x, weight, odd = SMALL[:, 10 * rank : 10 * rank + 10], torch.linspace(0.5, 2, SMALL_V), rank == 1
    other = weight.clone()
    other[12] += odd                                            # the class of row 2 alone
    cases = {
        "z_loss": dict(z_loss=0.1 if odd else 0.2),
        "z_loss on one rank": dict(z_loss=0.1) if odd else {},
        "valid_vocab": dict(valid_vocab=29 if odd else 30),
        "weight": dict(weight=other),
        "weight on one rank": dict(weight=weight) if odd else {},
        "short weight": dict(weight=weight[:29]),
        "long weight": dict(weight=torch.linspace(0.5, 2, SMALL_V + 1), label_smoothing=0.1),
        "weight of vocab_size": dict(weight=weight[:29], vocab_size=SMALL_V),
        "valid_vocab beyond": dict(valid_vocab=31),
        "num_items": dict(num_items=5 + odd),
        "wrong": dict(valid_vocab=0 if odd else 30),
    }
    seen = {}
    for case, kw in cases.items():
        call = lambda reduction, validate: dce.vocab_parallel_cross_entropy(x, SMALL_TARGETS, reduction, group=groups[3], vocab_start=10 * rank, validate=validate, **kw)
        losses = call("none", False) if case not in ("num_items", "wrong", "weight of vocab_size") else None
        seen[case] = losses, error_of(lambda: call("mean", True))
    return seen


def differing(rank, odd, case):
    """(targets, reduction, keywords) of a rank where `odd` has one input that the others do not."""
    targets, mine, kw = SMALL_TARGETS.clone(), rank == odd, {}
    if case == "target":
        targets[2] += mine
    elif case == "ignored here":
        targets[2] = -100 if mine else targets[2]
    elif case == "ignored elsewhere":
        targets[2] = targets[2] if mine else -100
    elif case == "out of range":
        targets[2] = SMALL_V if mine else targets[2]
    elif case == "weight":
        kw["weight"] = torch.ones(SMALL_V)
        kw["weight"][SMALL_TARGETS[2]] += mine
    elif case == "weight of no target":
        kw = dict(label_smoothing=0.1, weight=torch.ones(SMALL_V))
        kw["weight"][1] += mine
    elif case == "weight exchanged":                           # so that their sum is the same
        kw = dict(label_smoothing=0.1, weight=torch.linspace(0.5, 2, SMALL_V))
        kw["weight"][[3, 4]] = kw["weight"][[4, 3] if mine else [3, 4]]
    elif case == "weight of one class more":
        kw["weight"] = torch.ones(SMALL_V + mine)
    elif case.endswith(" on one rank"):
        kw[case.split()[0]] = ONE_OR_OTHER[case.split()[0]][0] if mine else None
    elif case != "reduction":
        kw[case] = ONE_OR_OTHER[case][mine]
    return targets, "sum" if case == "reduction" and mine else "mean", kw


ONE_OR_OTHER = {
    "ignore_index": (-100, -1), "z_loss": (0.1, 0.2), "valid_vocab": (30, 31), "label_smoothing": (0.1, 0.2), "logit_scale": (1.5, 1.0), "softcap": (20.0, None),
    "vocab_size": (30, 31), "num_items": (torch.tensor(5), 6),
}
DIFFERENT = [
    "target", "ignored here", "ignored elsewhere", "out of range", "weight", "reduction", "weight of no target", "weight exchanged", "weight of one class more",
    "vocab_size on one rank", "num_items on one rank", *ONE_OR_OTHER,
]
OF_A_MEAN = "reduction", "num_items", "num_items on one rank"


def one_rank_differs(dce, rank, groups):
    """{(ranks, the odd one, case): (losses, which rows of the gradient are all NaN, the mean, error)}."""
    seen = {}
    for world in (2, 3, 4, 8):
        if rank >= world:
            continue
        lo, hi = chunks(SMALL_V, world)[rank]
        for odd, case in itertools.product(sorted({0, 1, world - 1}), DIFFERENT):
            targets, reduction, kw = differing(rank, odd, case)
            leaf = SMALL[:, lo:hi].clone().requires_grad_()
            call = lambda reduction, validate: dce.vocab_parallel_cross_entropy(leaf, targets, reduction, group=groups[world], vocab_start=lo, validate=validate, **kw)
            losses = None if case in OF_A_MEAN else call("none", False)
            mean = call(reduction, False)
            (mean if losses is None else losses).sum().backward()
            seen[world, odd, case] = losses, leaf.grad, mean, error_of(lambda: call(reduction, True))
    return seen


class Collectives(TorchDispatchMode):
    """All that is sent: (operation, bytes)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.sent.append((func.overloadpacket.__name__, sum(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **kwargs or {})

    def __enter__(self):
        self.sent = []
        return super().__enter__()


PAYLOADS = {
    # bytes a token: keywords
    76: dict(z_loss=1e-3, weight=torch.ones(SMALL_V), valid_vocab=29, vocab_size=SMALL_V, logit_scale=1.5, softcap=20.0, return_lse=True),
    108: dict(label_smoothing=0.1),
    96: dict(return_stats=True),
    128: dict(label_smoothing=0.1, return_stats=True, weight=torch.ones(SMALL_V)),
}


def payload(dce, rank, groups):
    """{(ranks, bytes a token that are allowed, reduction): what was sent, forward and backward}; 0: with no option."""
    seen = {}
    for world in WORLDS:
        if rank >= world:
            continue
        lo, hi = chunks(SMALL_V, world)[rank]
        for (allowed, kw), reduction in itertools.product([(0, {}), *PAYLOADS.items()], REDUCTIONS):
            leaf, kw = SMALL[:, lo:hi].clone().requires_grad_(), {**kw, "num_items": torch.tensor(5)} if kw and reduction == "mean" else kw
            with Collectives() as collectives:
                out = dce.vocab_parallel_cross_entropy(leaf, SMALL_TARGETS.clamp(max=28), reduction, group=groups[world], vocab_start=lo, validate=False, **kw)
                (out[0] if isinstance(out, tuple) else out).sum().backward()
            seen[world, allowed, reduction] = collectives.sent
    return seen


def wrong_only_with_validate(dce, rank, groups):
    """What would hang, or fail in the backend, if nobody looked first."""
    alone = [dist.new_group([r]) for r in range(8)][rank]
    outside = error_of(lambda: dce.vocab_parallel_cross_entropy(SMALL, SMALL_TARGETS, group=groups[3]))
    if rank >= 3:
        return {"outside": outside}
    x, t, parallel, group = SMALL[:, 10 * rank : 10 * rank + 10], SMALL_TARGETS, dce.vocab_parallel_cross_entropy, groups[3]
    calls = {
        "rows": lambda: parallel(x[: 6 - rank], t[: 6 - rank], group=group),
        "dtype": lambda: parallel(x.bfloat16() if rank == 2 else x, t, group=group),
        "reduction": lambda: parallel(x, t, "sum" if rank == 1 else "mean", group=group),
        "float64": lambda: parallel(x.double() if rank == 1 else x, t, group=group),
        "shape": lambda: parallel(x, t[:5] if rank == 2 else t, group=group),
        "not a tensor": lambda: parallel(None if rank == 0 else x, t, group=group),
        "vocab_start": lambda: parallel(x, t, group=group, vocab_start=-1 if rank == 1 else 10 * rank),
        "vocab_size": lambda: parallel(x, t, group=group, vocab_size=30 if rank else 31),
        "no vocab_size": lambda: parallel(x, t, group=group, vocab_size=None if rank else 30),
        "wrong vocab_size": lambda: parallel(x, t, group=group, vocab_size=0 if rank == 2 else 30),
        "no weights": lambda: parallel(x, t, group=group, weight=torch.ones(30)[: 0 if rank == 1 else 30]),
        "few weights": lambda: parallel(x, t, group=group, weight=torch.ones(20), valid_vocab=25),
        "dp_group": lambda: parallel(x, t, "none", group=group, dp_group=alone),
        "no columns": lambda: parallel(x[:, :0], t, group=group),
        "group": lambda: parallel(x, t, group=3),
        "good": lambda: parallel(x, t, group=group),
    }
    return {name: error_of(call) for name, call in calls.items()}


def lying_maximum(dce, rank, groups):
    """The all-reduce of the maxima goes wrong on its way: one rank keeps its own ("stale"); a NaN is lost ("NaN lost"), as a float maximum may do."""
    if rank >= 3:
        return {}
    seen, Ranks = {}, dce._ranks.Ranks
    x = SMALL[:, 10 * rank : 10 * rank + 10].clone()
    honest = Ranks.all_reduce
    for case in ("stale", "NaN lost"):
        shard = x.clone()
        if case == "NaN lost" and rank == 2:
            shard[4, 3] = NAN

        def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
            own = tensor.clone()
            if op != dist.ReduceOp.MAX:
                return honest(self, tensor, op)
            if case == "NaN lost":
                tensor[tensor == 0x7FC00000] = 0
            honest(self, tensor, op)
            return own if case == "stale" and rank == 1 else tensor

        Ranks.all_reduce = all_reduce
        try:
            leaf = shard.clone().requires_grad_()
            out = dce.vocab_parallel_cross_entropy(leaf, SMALL_TARGETS, "none", group=groups[3], validate=False)
            out.sum().backward()
            seen[case] = out.detach(), leaf.grad
            seen[case, "error"] = error_of(lambda: dce.vocab_parallel_cross_entropy(shard, SMALL_TARGETS, group=groups[3], validate=True))
        finally:
            Ranks.all_reduce = honest
    return seen


def a_word_that_was_changed(dce, rank, groups):
    """Ranks that agree, and a sum of words that says that they do not."""
    if rank >= 3:
        return None
    Ranks = dce._ranks.Ranks
    honest = Ranks.all_reduce

    def all_reduce(self, tensor, op=None):
        honest(self, tensor, op)
        if op is None:
            tensor[8 * SMALL_N + 2] += 2 ** 40
        return tensor

    Ranks.all_reduce = all_reduce
    try:
        call = lambda validate: dce.vocab_parallel_cross_entropy(SMALL[:, 10 * rank : 10 * rank + 10], SMALL_TARGETS, "none", group=groups[3], validate=validate)
        return call(False), error_of(lambda: call(True))
    finally:
        Ranks.all_reduce = honest


def a_row_that_hashes_miss(dce, rank, groups):
    """Two targets with one hash, on two ranks, in columns of the first: (losses without a look, error with one)."""
    if rank >= 2:
        return None
    columns, t = torch.linspace(-1, 1, 40000)[None], torch.tensor([(2041, 33378)[rank]])
    call = lambda validate: dce.vocab_parallel_cross_entropy(columns.split([35000, 5000], 1)[rank], t, "none", group=groups[2], vocab_start=35000 * rank, validate=validate)
    return call(False), error_of(lambda: call(True))


def spread(total, parts):
    """Uneven (first, last) token ranges, one of them empty where there are three or more."""
    bounds = [0, *[5, 5, 16, 17, 20, 21, 23][: parts - 1], total]
    return list(zip(bounds, bounds[1:]))


def token_ranks(dce, rank, groups):
    """Data parallel alone, and dp x tp: {(dp, tp, reduction): (loss, tokens, columns, gradient)}."""
    seen = {}
    for dp, tp in ((1, 1), (2, 1), (3, 1), (8, 1), (1, 4), (2, 2), (4, 2), (2, 4)):
        mesh = DeviceMesh("cpu", torch.arange(dp * tp).view(dp, tp), mesh_dim_names=("dp", "tp"))
        if rank >= dp * tp:
            continue
        (a, b), (lo, hi) = spread(N, dp)[mesh.get_local_rank("dp")], cuts_of(V, tp)["uneven"][mesh.get_local_rank("tp")]
        for kind in KINDS[:9]:
            logits, targets, _ = batch(*kind[:2])
            if kind[2] == "none":
                continue
            leaf = logits[a:b, lo:hi].clone().requires_grad_()
            if tp == 1 and kind[1] == "bf16":
                out = dce.data_parallel_cross_entropy(leaf, targets[a:b], kind[2], group=mesh.get_group("dp"))
            else:
                out = dce.vocab_parallel_cross_entropy(leaf, targets[a:b], kind[2], group=mesh["tp"], vocab_start=lo, dp_group=mesh["dp"])
            out.backward(torch.tensor(0.7))
            losses = dce.cross_entropy(logits[a:b], targets[a:b], "none")
            elsewhere = losses.clone().requires_grad_()
            again = dce.reduce_losses(elsewhere, targets[a:b], kind[2], group=mesh.get_group("dp"))
            again.backward()
            seen[dp, tp, kind] = out.detach(), again.detach(), elsewhere.grad, (a, b), (lo, hi), leaf.grad.float()
    return seen


def token_ranks_go_wrong(dce, rank, groups):
    """One bad target, or one bad argument, in one of two replicas of two ranks each."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    if rank >= 4:
        return {}
    replica, column = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    x, t = SMALL[3 * replica : 3 * replica + 3, 15 * column : 15 * column + 15], SMALL_TARGETS[3 * replica : 3 * replica + 3].clone()
    t[2] = 30 if replica == 1 else t[2]
    kw = {"group": mesh["tp"], "dp_group": mesh["dp"]}
    whole = SMALL[3 * replica : 3 * replica + 3]
    return {
        "target": (dce.vocab_parallel_cross_entropy(x, t, validate=False, **kw), error_of(lambda: dce.vocab_parallel_cross_entropy(x, t, **kw))),
        "argument": error_of(lambda: dce.vocab_parallel_cross_entropy(x.double() if rank == 3 else x, t, **kw)),
        "data parallel": (dce.data_parallel_cross_entropy(whole, t, group=mesh["dp"], validate=False),
                          error_of(lambda: dce.data_parallel_cross_entropy(whole, t, group=mesh["dp"]))),
        "reduction": error_of(lambda: dce.data_parallel_cross_entropy(whole, t, "none", group=mesh["dp"])),
        # replicas that ask for other things would wait for messages of another length
        "other weights": error_of(lambda: dce.data_parallel_cross_entropy(whole[:2], t[:2], group=mesh["dp"], weight=torch.ones(30) if replica else None)),
        "other returns": error_of(lambda: dce.vocab_parallel_cross_entropy(x[:2], t[:2], return_z_loss=replica == 1, **kw)),
        "other reductions": error_of(lambda: dce.data_parallel_cross_entropy(whole[:2], t[:2], ("mean", "sum")[replica], group=mesh["dp"])),
    }


def replicas_that_differ(dce, rank, groups):
    """Two replicas of two ranks each, whose arguments are right by themselves: {case: error}; "miswired" is of four replicas."""
    ranks = torch.arange(8).view(4, 2)
    wide = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    left, right = ([dist.new_group(r) for r in pairs] for pairs in ([[0, 2], [4, 6]], [[1, 5], [3, 7]]))
    x, t = SMALL[:, 15 * (rank % 2) : 15 * (rank % 2) + 15], SMALL_TARGETS.clamp(max=9)
    parallel, tokens, losses = dce.vocab_parallel_cross_entropy, dce.data_parallel_cross_entropy, dce.reduce_losses
    mine = next(g for g in (left if rank % 2 == 0 else right) if rank in dist.get_process_group_ranks(g))
    seen = {"miswired": error_of(lambda: parallel(x, t, group=wide["tp"], dp_group=mine))}
    mesh = DeviceMesh("cpu", ranks[:2], mesh_dim_names=("dp", "tp"))
    if rank >= 4:
        return seen
    second, kw = rank >= 2, {"group": mesh["tp"], "dp_group": mesh["dp"]}
    dp = mesh.get_group("dp")

    def forward_mode():
        with torch.autograd.forward_ad.dual_level():
            parallel(torch.autograd.forward_ad.make_dual(x, x) if rank == 3 else x, t, **kw)

    class Strange(torch.Tensor):
        @property
        def layout(self):
            raise KeyError("layout")

    narrow = x[:, : 15 - second]
    calls = {
        "reduction": lambda: parallel(x, t, "sum" if second else "mean", **kw),
        "ignore_index": lambda: parallel(x, t, ignore_index=-1 if second else -100, **kw),
        "V": lambda: parallel(narrow, t, **kw),
        "forward mode": forward_mode,
        "strange": lambda: parallel(x.as_subclass(Strange) if rank == 3 else x, t, **kw),
        "tokens: reduction": lambda: tokens(x, t, "sum" if second else "mean", group=dp),
        "tokens: ignore_index": lambda: tokens(x, t.clamp(min=0), ignore_index=-1 if second else -100, group=dp),
        "tokens: V": lambda: tokens(narrow, t, group=dp),
        "tokens: strange": lambda: tokens(x.as_subclass(Strange) if second else x, t, group=dp),
        "losses: reduction": lambda: losses(x[:, 0], t, "sum" if second else "mean", group=dp),
        "losses: ignore_index": lambda: losses(x[:, 0], t, ignore_index=-1 if second else -100, group=dp),
        "losses: targets": lambda: losses(x[:, 0], t[second:], group=dp),
        "another call": lambda: tokens(x, t, group=dp) if second else losses(x[:, 0], t, group=dp),
        "good": lambda: (parallel(x, t, **kw), tokens(x, t, group=dp), losses(x[:, 0], t, group=dp)),
    }
    seen.update((name, error_of(call)) for name, call in calls.items())
    for name, dp_group in {"world": groups[4], "tp": mesh.get_group("tp"), "mesh": mesh, "in the other order": None}.items():
        by = {"group": mesh["tp"], "dp_group": dp_group} if dp_group else {"group": mesh, "dp_group": dp}
        seen[name] = [error_of(lambda: parallel(x, t, validate=validate, **by)) for validate in (True, False)]
    return seen


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(SMALL[:, :8].t().contiguous())

    def forward(self, h):
        return h @ self.weight


def under_ddp(dce, rank, groups):
    """The weight's gradient under DistributedDataParallel, with the loss multiplied by the number of ranks, as documented."""
    if rank >= 2:
        return None
    h, t = SMALL.view(12, 15)[:, :8], torch.tensor([0, 1, 2, 3, 4, 5, -100, -100, -100, 2, 1, 0])
    model = torch.nn.parallel.DistributedDataParallel(Scores(), process_group=groups[2])
    own = slice(0, 5) if rank == 0 else slice(5, 12)
    loss = dce.data_parallel_cross_entropy(model(h[own]), t[own], group=groups[2])
    (loss * 2).backward()
    whole = Scores()
    dce.cross_entropy(whole(h), t).backward()
    return model.module.weight.grad, whole.weight.grad


LAYOUTS = {
    # name: (mesh shape, placements of logits [4, 6, V] with classes last)
    "vocabulary": ((8,), [Shard(2)]),
    "vocabulary of 3": ((3,), [Shard(2)]),
    "tokens": ((4,), [Shard(0)]),
    "sequence": ((4,), [Shard(1)]),
    "replicated": ((2,), [Replicate()]),
    "dp x tp": ((2, 4), [Shard(0), Shard(2)]),
    "tp x dp": ((4, 2), [Shard(2), Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(2)]),
    "vocabulary twice": ((2, 4), [Shard(2), Shard(2)]),
    "dp x sp x tp": ((2, 2, 2), [Shard(0), Shard(1), Shard(2)]),
    "one": ((1,), [Shard(2)]),
}


def dtensors(dce, rank, groups):
    seen = {}
    logits, targets, upstream = batch("plain", "fp32")
    logits, targets, upstream = logits.view(4, 6, V), targets.view(4, 6), upstream.view(4, 6)
    for name, (shape, placements) in LAYOUTS.items():
        ranks = torch.Size(shape).numel()
        mesh = DeviceMesh("cpu", torch.arange(ranks).view(shape))
        if rank >= ranks:
            continue
        for_targets = [p if p in (Shard(0), Shard(1)) else Replicate() for p in placements]
        placed = targets if all(p == Replicate() for p in for_targets) else distribute_tensor(targets, mesh, for_targets)
        for reduction in REDUCTIONS:
            x = distribute_tensor(logits, mesh, placements).requires_grad_()
            g = distribute_tensor(upstream, mesh, for_targets)
            with ExplicitRedistributionContext():               # a redistribution of a DTensor is an error here
                out = dce.cross_entropy(x, placed, reduction, validate=False)
                out.backward(g if reduction == "none" else None)
            seen[name, reduction] = out.full_tensor().detach(), x.grad.full_tensor(), list(x.grad.placements) == list(placements), type(out).__name__
        # as users of torch's loss_parallel write it: classes at 1
        moved = [Shard({0: 0, 1: 2, 2: 1}[p.dim]) if isinstance(p, Shard) else p for p in placements]
        x = distribute_tensor(logits.movedim(2, 1).contiguous(), mesh, moved).requires_grad_()
        with dce.dtensor.loss_parallel():
            out = torch.nn.functional.cross_entropy(x, placed)
            plain = torch.nn.functional.cross_entropy(logits[0], targets[0])
        out.backward()
        with dce.dtensor.loss_parallel():
            by_module = torch.nn.CrossEntropyLoss()(x, placed)
        seen[name, "context"] = out.full_tensor().detach(), x.grad.full_tensor().movedim(1, 2), by_module.full_tensor().detach(), plain
    return seen


def dtensor_errors(dce, rank, groups):
    mesh, x = DeviceMesh("cpu", torch.arange(2)), SMALL[:, :20].contiguous()
    if rank >= 2:
        return {}
    F, t = torch.nn.functional, SMALL_TARGETS.clamp(max=19)
    by_class, by_token = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Shard(0)])
    uneven = DTensor.from_local(x[:, 3:] if rank else x[:, :3], mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride())

    def functional(**kw):
        with dce.dtensor.loss_parallel():
            return F.cross_entropy(by_class, t, **kw)

    return {
        "partial": error_of(lambda: dce.cross_entropy(DTensor.from_local(x, mesh, [Partial()], run_check=False), t)),
        "plain targets": error_of(lambda: dce.cross_entropy(by_token, t)),
        "placements": error_of(lambda: dce.cross_entropy(by_token, distribute_tensor(t, mesh, [Replicate()]))),
        "shape": error_of(lambda: dce.cross_entropy(by_class, t[:3])),
        "not as DTensor cuts": error_of(lambda: dce.cross_entropy(uneven, t)),
        "not a DTensor": error_of(lambda: dce.dtensor.cross_entropy(x, t)),
        "class_dim": error_of(lambda: dce.dtensor.cross_entropy(by_class, t, class_dim=2)),
        "weight": error_of(lambda: functional(weight=distribute_tensor(torch.ones(20), mesh, [Shard(0)]))),
        "label_smoothing": error_of(lambda: functional(label_smoothing=1.5)),
        "good": error_of(lambda: functional(label_smoothing=0.0, weight=None)),
    }


def dtensors_that_differ(dce, rank, groups):
    """Ranks that give the same tokens other targets, or that alone have an argument wrong; DTensors where none are taken."""
    seen, x, t = {}, SMALL[:, :20].contiguous(), SMALL_TARGETS.clamp(max=19)
    for name, (shape, placements) in LAYOUTS.items():
        ranks = torch.Size(shape).numel()
        mesh = DeviceMesh("cpu", torch.arange(ranks).view(shape))
        if rank >= ranks or any(p in (Shard(0), Shard(1)) for p in placements):
            continue
        logits = distribute_tensor(x, mesh, [Shard(1) if p == Shard(2) else p for p in placements])
        for other in range(ranks):
            seen[name, ranks, other, "targets"] = error_of(lambda: dce.cross_entropy(logits, t + (torch.arange(6) == 4) * (rank == other)))
            seen[name, ranks, other, "shape"] = error_of(lambda: dce.cross_entropy(logits, t[rank == other :]))
            seen[name, ranks, other, "ignore_index"] = error_of(lambda: dce.cross_entropy(logits, t.clamp(min=0), ignore_index=-1 - (rank == other)))
    mesh = DeviceMesh("cpu", torch.arange(2))
    if rank < 2:
        d, td = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(t, mesh, [Replicate()])
        maximum, digits = x.amax(1), dce.denom_digits(x, x.amax(1))
        seen["refused"] = {
            "logits_shard": error_of(lambda: dce.vocab_parallel_cross_entropy(d, t, group=mesh)),
            "logits": [error_of(call) for call in (
                lambda: dce.forward(d, t),
                lambda: dce.rowmax(d),
                lambda: dce.denom_digits(d, maximum),
                lambda: dce.finalize(digits, d, t, maximum),
                lambda: dce.data_parallel_cross_entropy(d, t, group=mesh),
            )],
            "targets": [error_of(call) for call in (
                lambda: dce.cross_entropy(x, td),
                lambda: dce.forward(x, td),
                lambda: dce.vocab_parallel_cross_entropy(d.to_local(), td, group=mesh),
                lambda: dce.loss_digits(maximum, td),
                lambda: dce.reduce_losses(maximum, td, group=mesh),
            )],
            "loss": error_of(lambda: dce.reduce_losses(d.sum(1), t, group=mesh)),
        }
    return seen


def shard_orders(dce, rank, groups):
    """Every order in which three mesh dimensions may shard the classes, or the tokens: {order: how logits and targets of it fare}. Empty where torch has one order only."""
    from torch.distributed.tensor import _dtensor_spec as module

    if not hasattr(module, "ShardOrderEntry"):
        return {}
    seen, mesh, x = {}, DeviceMesh("cpu", torch.arange(8).view(2, 2, 2)), torch.randn(16, 24, generator=torch.Generator().manual_seed(9))
    t = torch.arange(16)

    def place(tensor, dim, order):
        """The parts of tensor, as DTensor cuts it by mesh dimensions in this order."""
        index = sum(c << (2 - order.index(i)) for i, c in enumerate(mesh.get_coordinate()))
        entry = module.ShardOrderEntry(tensor_dim=dim, mesh_dims=order)
        meta = module.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        spec = module.DTensorSpec(mesh, (Shard(dim),) * 3, meta, shard_order=(entry,), use_strided_shard_as_shard_order=False)
        return DTensor(tensor.chunk(8, dim)[index].contiguous(), spec, requires_grad=False)

    by_token = distribute_tensor(x, mesh, [Shard(0)] * 3)
    for order in itertools.permutations(range(3)):
        calls = {
            "classes": lambda: dce.cross_entropy(place(x, 1, order), t, validate=False),
            "tokens": lambda: dce.cross_entropy(place(x, 0, order), place(t, 0, order), validate=False),
            "targets": lambda: dce.cross_entropy(by_token, place(t, 0, order), validate=False),
        }
        for name, call in calls.items():
            error = error_of(call)
            seen[order, name] = error or torch.equal(call().full_tensor(), dce.cross_entropy(x, t))
    return seen


def drop_ins(dce, rank, groups):
    seen = {}
    if rank >= 3:
        return seen
    logits, targets, upstream = batch("plain", "bf16")
    lo, hi = 70 * rank, 70 * rank + 70                          # equal shards: 210 of the columns
    targets = torch.where(targets >= 210, 7, targets)
    x, t, g = (y.view(6, 4, *y.shape[1:]) for y in (logits[:, :210], targets, upstream))    # [s, b, v]
    for layout in ("contiguous", "transposed", "strided"):
        if layout == "contiguous":
            leaf = x[..., lo:hi].clone().requires_grad_()
            shard = leaf
        elif layout == "transposed":                            # made as [b, s, v]
            leaf = x[..., lo:hi].transpose(0, 1).contiguous().requires_grad_()
            shard = leaf.transpose(0, 1)
        else:                                                   # made as [v, s, b]
            leaf = x[..., lo:hi].permute(2, 0, 1).contiguous().requires_grad_()
            shard = leaf.permute(1, 2, 0)
        losses = dce.megatron.vocab_parallel_cross_entropy(shard, t, tp_group=groups[3])
        (grad,) = torch.autograd.grad(losses, shard, g)
        seen["megatron", layout] = losses.detach(), grad
        losses = dce.transformer_engine.parallel_cross_entropy(shard, t, 0.0, False, groups[3])
        (grad,) = torch.autograd.grad(losses, shard, g.t().contiguous().t())
        seen["te", layout] = losses.detach(), grad
        loss = dce.transformer_engine.parallel_cross_entropy(shard, t.flatten(), reduce_loss=True, dist_process_group=groups[3])
        (grad,) = torch.autograd.grad(loss, shard)
        seen["te mean", layout] = loss.detach(), grad
        for name, call in (("megatron", dce.megatron.vocab_parallel_cross_entropy), ("te", lambda x, t, e, g: dce.transformer_engine.parallel_cross_entropy(x, t, e, False, g))):
            losses = call(shard, t, 0.1, groups[3])
            (grad,) = torch.autograd.grad(losses, shard, g)
            seen[name + " smoothed", layout] = losses.detach(), grad
    return seen


def autograd(dce, rank, groups):
    """What torch may do with a loss besides backward once."""
    if rank >= 2:
        return {}
    x = SMALL[:, 15 * rank : 15 * rank + 15].clone().requires_grad_()

    def loss(x, validate=False):
        return dce.vocab_parallel_cross_entropy(x * 1.5, SMALL_TARGETS, group=groups[2], validate=validate)

    out = loss(x, True)
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    once = torch.autograd.grad(out, x, create_graph=True)[0]
    compiled = torch.compile(loss, backend="aot_eager")(x)
    more = dict(weight=torch.linspace(0.5, 2, SMALL_V), num_items=torch.tensor(7), vocab_size=SMALL_V, label_smoothing=0.1)
    with_more = lambda x: dce.vocab_parallel_cross_entropy(x * 1.5, SMALL_TARGETS, group=groups[2], validate=False, **more)
    return {
        "with options": [(y.detach(), torch.autograd.grad(y, x)[0]) for y in (f(x) for f in (with_more, torch.compile(with_more, backend="aot_eager")))],
        "eager": (out.detach(), first), "again": second, "compiled": (compiled.detach(), torch.autograd.grad(compiled, x)[0]),
        "second": error_of(lambda: once.sum().backward()),
        "func.grad": error_of(lambda: torch.func.grad(loss)(x.detach())),
        "func.grad, validated": error_of(lambda: torch.func.grad(lambda z: loss(z, True))(x.detach())),
        "vmap": error_of(lambda: torch.vmap(loss)(x.detach().expand(2, -1, -1))),
        "vmap of tokens": error_of(lambda: torch.vmap(lambda z: dce.data_parallel_cross_entropy(z, SMALL_TARGETS.clamp(max=9), group=groups[2]))(x.detach().expand(2, -1, -1))),
        "vmap of losses": error_of(lambda: torch.vmap(lambda z: dce.reduce_losses(z, SMALL_TARGETS, group=groups[2], validate=False))(x.detach()[:, :2].t())),
        "forward mode": error_of(lambda: torch.func.jvp(loss, (x.detach(),), (x.detach(),))),
        "no gradient": loss(x.detach()).requires_grad,
    }


PARTS = [
    every_cut, with_options, options_of_tokens, options_go_wrong, training, wrong, one_rank_differs, payload, wrong_only_with_validate, lying_maximum,
    a_word_that_was_changed, a_row_that_hashes_miss, token_ranks, token_ranks_go_wrong, replicas_that_differ, under_ddp, dtensors,
    dtensor_errors, dtensors_that_differ, shard_orders, drop_ins, autograd,
]


def worker(rank, world):
    dce = load_kernel()
    groups = {w: dist.new_group(list(range(w))) for w in WORLDS}
    return {part.__name__: part(dce, rank, groups) for part in PARTS}


@pytest.fixture(scope="module")
def seen():
    return processes.run(worker, max(WORLDS), seconds=300)


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_bytes_of_one_device(dce, seen, kind, world):
    expected = reference(dce, *kind)
    for name in cuts_of(V, world):
        ranks = [r["every_cut"][world, name, kind] for r in seen[:world]]
        assert {digest for digest, _, _ in ranks} == {expected[0]}, f"{name}: loss"
        whole = np.concatenate([grad for _, _, grad in sorted(ranks, key=lambda r: (r[1], r[2].shape[1]))], 1)
        assert dce.digest(torch.from_numpy(whole)) == expected[1], f"{name}: gradient"


def one_device(dce, option, dtype, reduction, kind):
    """(loss, z-loss, lse, the statistics, gradient)."""
    logits, targets, upstream, kw = option_inputs(option, dtype, kind)
    if reduction != "mean":
        kw.pop("num_items", None)
    leaf = logits.requires_grad_()
    out, z, lse, stats = dce.cross_entropy(leaf, targets, reduction, **kw)
    backward_of_both(out, lse, upstream, G_LSE)
    return out.detach(), z, lse.detach(), *stats, leaf.grad


@pytest.mark.parametrize("case", OPTION_CASES, ids="-".join)
def test_options_have_the_bytes_of_one_device(dce, seen, case):
    expected = [dce.digest(x) for x in one_device(dce, *case, "special" if case[2] == "none" else "plain")]
    for world in WORLDS:
        for name in cuts_of(V, world):
            ranks = [r["with_options"][world, name, case] for r in seen[:world]]
            assert {digests for digests, _, _ in ranks} == {tuple(expected[:-1])}, (world, name)
            whole = np.concatenate([grad for _, _, grad in sorted(ranks, key=lambda r: (r[1], r[2].shape[1]))], 1)
            assert dce.digest(torch.from_numpy(whole)) == expected[-1], (world, name)


def test_options_over_any_spread_of_tokens(dce, seen):
    keys = {key for r in seen for key in r["options_of_tokens"] if len(key) == 4}
    assert len(keys) == 4 * (9 + 7)
    for dp, tp, option, reduction in keys:
        out, z, lse, *stats, grad = one_device(dce, option, "bf16", reduction, "plain")
        for r in seen[: dp * tp]:
            got, got_z, got_lse, got_stats, (a, b), (lo, hi), got_grad = r["options_of_tokens"][dp, tp, option, reduction]
            assert torch.equal(got, out) and torch.equal(got_z, z) and torch.equal(got_lse, lse[a:b]), (dp, tp, option, reduction)
            assert all(torch.equal(x, y[a:b]) for x, y in zip(got_stats, stats)), (dp, tp, option, reduction)
            assert torch.equal(got_grad, grad[a:b, lo:hi].float()), (dp, tp, option, reduction)


@pytest.mark.parametrize("layout", ["dp x tp", "tokens", "replicated", "vocabulary of 3"])
def test_options_of_dtensors(dce, seen, layout):
    logits, targets, _, kw = option_inputs("smoothing and all" if layout == "tokens" else "all", "fp32", "plain")
    for reduction in ("mean", "none"):
        if reduction == "none":
            kw.pop("num_items", None)
        leaf = logits.view(4, 6, V).clone().requires_grad_()
        out, z, lse, stats = dce.cross_entropy(leaf, targets.view(4, 6), reduction, **kw)
        torch.autograd.backward([out, lse], [torch.ones_like(out), G_LSE.view(4, 6)])
        weighted = dce.cross_entropy(logits, targets, weight=OPTIONS["weight"]["weight"], label_smoothing=0.1)
        for r in seen[: torch.Size(LAYOUTS[layout][0]).numel()]:
            for got, want in zip(r["options_of_tokens"][layout, reduction], (out.detach(), z, lse.detach(), *stats, leaf.grad)):
                assert torch.equal(got, want), reduction
            assert torch.equal(r["options_of_tokens"][layout, "context"], weighted)


@pytest.mark.parametrize("case, rows, kind, message", [
    ("z_loss", [0, 1, 2, 4, 5], "ValueError", r"z_loss: rank 1 has 0.1, rank 0 has 0.2"),
    ("z_loss on one rank", [0, 1, 2, 4, 5], "ValueError", r"z_loss: rank 1 has 0.1, rank 0 has 0.0"),
    ("valid_vocab", [0, 1, 2, 4, 5], "ValueError", r"valid_vocab: rank 1 has 29, rank 0 has 30"),
    ("weight", [2], "ValueError", r"weight: rank 1 has weights with SHA-256 \w+, rank 0 has"),
    ("weight on one rank", [0, 1, 2, 4, 5], "ValueError", r"weight: rank 1 has weights .*, rank 0 has None"),
    ("short weight", [0, 1, 2, 4, 5], "ValueError", r"weight: expected shape \(30,\), got \(29,\)"),
    ("long weight", [0, 1, 2, 4, 5], "ValueError", r"weight: expected shape \(30,\), got \(31,\)"),
    ("weight of vocab_size", None, "ValueError", r"rank 0: weight: expected shape \(30,\), got \(29,\)"),
    ("valid_vocab beyond", [0, 1, 2, 4, 5], "ValueError", r"valid_vocab: expected 1 to 30, got 31"),
    ("num_items", None, "ValueError", r"num_items: rank 1 has 6, rank 0 has 5"),
    ("wrong", None, "ValueError", r"rank 1: valid_vocab: expected 1 to 2147483647, got 0"),
])
def test_ranks_with_other_options(seen, case, rows, kind, message):
    outcomes = [r["options_go_wrong"][case] for r in seen[:3]]
    errors = {error for _, error in outcomes}
    assert len(errors) == 1, errors
    got, text = errors.pop()
    assert got == kind and re.search(message, text), text
    for losses, _ in outcomes:
        if rows is not None:                                    # row 3 is ignored, on all ranks alike only where the rest is
            assert set(losses.isnan().nonzero()[:, 0].tolist()) - {3} == set(rows)


def test_twenty_training_steps_are_the_same_bytes(seen):
    curves = [(world, name, curve) for r in seen for (world, name), curve in r["training"].items()]
    assert {(world, name) for world, name, _ in curves} == {(w, "even") for w in WORLDS} | {(3, "shuffled"), (8, "shuffled")}
    first = curves[0][2]
    assert first.shape == (20,) and first[-1] < first[0] - 0.5 and len(set(first.tolist())) == 20     # it learns: the curve is no constant
    for world, name, curve in curves:
        assert torch.equal(curve.view(torch.int32), first.view(torch.int32)), (world, name)


@pytest.mark.parametrize("case", list(WRONG))
def test_ranks_that_do_not_agree(dce, seen, case):
    rows, message = WRONG[case]
    right = dce.cross_entropy(SMALL, SMALL_TARGETS, "none")
    for rank, r in enumerate(seen[:3]):
        losses, grad = r["wrong"][case, "none"]
        expect_nan = torch.ones(SMALL_N, dtype=torch.bool)
        if rows is None:
            # an ignored row is one on all ranks that agree on it
            expect_nan = (SMALL_TARGETS != -100) if case != "ignore_index" else expect_nan
        else:
            expect_nan[:] = False
            expect_nan[rows] = True
        assert torch.equal(losses.isnan(), expect_nan), f"rank {rank}: {losses}"
        assert torch.equal(losses[~expect_nan], right[~expect_nan])
        if grad.shape[1]:
            assert torch.equal(grad.isnan().all(1), expect_nan) and torch.equal(grad.isnan().any(1), expect_nan), f"rank {rank}"
        assert r["wrong"][case, "mean"][0].isnan()
    errors = {r["wrong"][case, "error"] for r in seen[:3]}
    assert len(errors) == 1, errors
    kind, text = errors.pop()
    assert kind == "ValueError" and re.search(message, text), text


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_one_rank_differs(dce, seen, world, case):
    """NaN on every rank, in loss and gradient, in the row alone that the input is of; with validate one error on all, which names input and ranks."""
    right = dce.cross_entropy(SMALL, SMALL_TARGETS, "none")
    expect_nan = torch.ones(SMALL_N, dtype=torch.bool) if case not in DIFFERENT[:5] else torch.arange(SMALL_N) == 2
    for odd in sorted({0, 1, world - 1}):
        outcomes = [r["one_rank_differs"][world, odd, case] for r in seen[:world]]
        for losses, grad, mean, _ in outcomes:
            assert mean.isnan(), odd
            if losses is not None:
                assert torch.equal(losses.isnan(), expect_nan) and torch.equal(losses[~expect_nan], right[~expect_nan]), odd
            assert torch.equal(grad.isnan().all(1), expect_nan) and torch.equal(grad.isnan().any(1), expect_nan), odd
        errors = {error for *_, error in outcomes}
        assert len(errors) == 1, errors
        kind, text = errors.pop()
        if case in DIFFERENT[:4]:
            held = ", ".join(f"rank {r} has {int(differing(r, odd, case)[0][2])}" for r in range(world))
            assert (kind, text) == ("ValueError", f"targets: row 2: the ranks have different targets: {held}")
        else:
            assert kind == "ValueError" and re.match(rf"{case.split()[0]}: rank {odd or 1} has .*, rank 0 has ", text), text


def test_bytes_a_token(seen):
    """What vocab_parallel_cross_entropy sends: two all-reduces, 128 bytes a token at most; backward sends nothing."""
    assert max(PAYLOADS) == 128
    for world, (allowed, reduction) in itertools.product(WORLDS, itertools.product([0, *PAYLOADS], REDUCTIONS)):
        for r in seen[:world]:
            sent = r["payload"][world, allowed, reduction]
            assert [name for name, _ in sent] == ["allreduce_"] * 2, sent
            assert sum(size for _, size in sent) == (allowed or 76) * SMALL_N, (allowed, sent)


def test_a_word_that_was_changed(dce, seen):
    right = dce.cross_entropy(SMALL, SMALL_TARGETS, "none")
    outcomes = [r["a_word_that_was_changed"] for r in seen[:3]]
    for losses, error in outcomes:
        assert losses.isnan().tolist() == [False, False, True, False, False, False] and torch.equal(losses[[0, 1, 3, 4, 5]], right[[0, 1, 3, 4, 5]])
        assert error == ("ValueError", "targets: row 2: the ranks do not agree on it: on the target, 12 here, its weight, or another argument (found by rank 0, 1, 2)")


def test_a_row_that_hashes_miss(dce, seen):
    """One in 2^32: no hash of 32 bits sees it, but with validate the targets' digests are compared."""
    salt = oracle.rank_salt(-100, "none", 1)
    assert oracle.rank_word(2041, salt, 1) == oracle.rank_word(33378, salt, 1)
    outcomes = [r["a_row_that_hashes_miss"] for r in seen[:2]]
    assert all(torch.equal(losses, outcomes[0][0]) and losses.isfinite().all() for losses, _ in outcomes)
    said = ", ".join(f"rank {r} has targets with SHA-256 {dce.digest(torch.tensor([t]))}" for r, t in ((1, 33378), (0, 2041)))
    assert {error for _, error in outcomes} == {("ValueError", f"targets: {said}")}


def test_what_the_ranks_found(dce):
    """One exception of findings: of the first row that any rank found wrong; other targets before all else; what no rank found, last."""
    Finding, Rows = dce._ranks.Finding, dce._ranks.Rows
    rows = lambda found, held: [Rows(rank, f, (("targets", t),)) for rank, (f, t) in enumerate(zip(found, held))]
    problem = lambda *found: str(dce._ranks.rows_problem(rows(found, range(len(found)))))
    a, b, c = Finding(0, 4, 7, "x: four"), Finding(2, 4, 7, "y"), Finding(3, 4, 8, "z")
    assert dce._ranks.rows_problem(rows([None, None], "xx")) is None
    assert problem(None, None) == "targets: rank 1 has 1, rank 0 has 0"
    assert problem(a, None, b) == "x: four (found by rank 0, 2)"
    assert problem(a, b, c) == "targets: row 4: the ranks have different targets: rank 0 has 7, rank 2 has 7, rank 3 has 8"
    assert problem(a, Finding(1, 2, 3, "w"), c) == "w (found by rank 1)"


@pytest.mark.parametrize("case, kind, message", [
    ("rows", "ValueError", r"targets: rank 1 has 5 rows, rank 0 has 6"),
    ("dtype", "ValueError", r"logits_shard: rank 2 has torch.bfloat16, rank 0 has torch.float32"),
    ("reduction", "ValueError", r"reduction: rank 1 has sum, rank 0 has mean"),
    ("float64", "TypeError", r"rank 1: logits_shard: expected float32 or bfloat16 or float16, got torch.float64"),
    ("shape", "ValueError", r"rank 2: targets: expected shape \(6,\), got \(5,\)"),
    ("not a tensor", "TypeError", r"rank 0: logits_shard: .*NoneType"),
    ("vocab_start", "ValueError", r"rank 1: vocab_start: .*-1"),
    ("vocab_size", "ValueError", r"vocab_size: rank 1 has 30, rank 0 has 31"),
    ("no vocab_size", "ValueError", r"vocab_size: rank 1 has None, rank 0 has 30"),
    ("no weights", "ValueError", r"rank 1: weight: expected shape \[V\] with V >= 1, got \(0,\)"),
    ("few weights", "ValueError", r"rank 0: valid_vocab: expected 1 to 20, got 25"),
    ("wrong vocab_size", "ValueError", r"rank 2: vocab_size: .*got 0"),
    ("dp_group", "ValueError", r"rank 0: dp_group: .*'none'"),
    ("no columns", "ValueError", r"no rank has a column"),
    ("group", "TypeError", r"group: .*int"),
])
def test_errors_before_anything_is_sent(seen, case, kind, message):
    errors = {r["wrong_only_with_validate"][case] for r in seen[:3]}
    assert len(errors) == 1, errors
    got, text = errors.pop()
    assert got == kind and re.search(message, text), text
    assert all(r["wrong_only_with_validate"]["good"] is None for r in seen[:3])


def test_outside_of_the_group(seen):
    for rank, r in list(enumerate(seen))[3:]:
        assert r["wrong_only_with_validate"]["outside"] == ("ValueError", f"group: process {rank} is not in this group")


def test_a_maximum_lost_on_its_way(seen):
    for case in ("stale", "NaN lost"):
        outcomes = [r["lying_maximum"] for r in seen[:3]]
        own, whole = SMALL[:, 10:20].amax(1), SMALL.amax(1)
        expect_nan = own != whole if case == "stale" else torch.arange(SMALL_N) == 4
        expect_nan &= SMALL_TARGETS != -100
        assert 0 < expect_nan.sum() < SMALL_N
        for o in outcomes:
            losses, grad = o[case]
            assert torch.equal(losses.isnan(), expect_nan), (case, losses)
            assert torch.equal(grad.isnan().all(1), expect_nan)
        errors = {o[case, "error"] for o in outcomes}
        assert len(errors) == 1, errors
        kind, text = errors.pop()
        assert kind == "ValueError" and re.search("logits_shard: row . *", text) and "maxim" in text, text


# ---------------------------------------------------------------------------------------------------------------------
# Tokens spread over ranks


def test_any_spread_of_tokens_and_columns(dce, seen):
    worlds = {key for r in seen for key in r["token_ranks"]}
    assert len({(dp, tp) for dp, tp, _ in worlds}) == 8 and len(worlds) == 8 * 6
    for dp, tp, kind in worlds:
        logits, targets, _ = batch(*kind[:2])
        leaf = logits.requires_grad_()
        expected = dce.cross_entropy(leaf, targets, kind[2])
        expected.backward(torch.tensor(0.7))
        count = int((targets != -100).sum()) if kind[2] == "mean" else 1
        for r in seen[: dp * tp]:
            out, again, elsewhere, (a, b), (lo, hi), grad = r["token_ranks"][dp, tp, kind]
            assert torch.equal(out, expected.detach()) and torch.equal(again, expected.detach()), (dp, tp, kind)
            assert torch.equal(grad, leaf.grad[a:b, lo:hi].float()), (dp, tp, kind)
            assert torch.equal(elsewhere, torch.where(targets[a:b] == -100, 0.0, (torch.tensor(1.0).double() / count).float()))


def test_an_error_in_one_replica_is_raised_in_all(seen):
    outcomes = [r["token_ranks_go_wrong"] for r in seen[:4]]
    for name, message in (("target", r"targets: row 2 has 30, expected 0 <= target < 30 .*found by rank 2, 3"), ("data parallel", r"targets: row 2 has 30")):
        assert all(o[name][0].isnan() for o in outcomes)
        # with data parallelism alone ranks 0 and 2 are one group, 1 and 3 another
        assert all(outcomes[i][name][1] == outcomes[i + 2][name][1] for i in (0, 1))
        assert name == "data parallel" or outcomes[0][name][1] == outcomes[1][name][1]
        kind, text = outcomes[0][name][1]
        assert kind == "ValueError" and re.search(message, text), text
    assert len({o["argument"] for o in outcomes}) == 1 and outcomes[0]["argument"][0] == "TypeError" and "rank 3: logits_shard" in outcomes[0]["argument"][1]
    assert all(o["reduction"][0] == "ValueError" and "'none'" in o["reduction"][1] for o in outcomes)
    for name, message in (("other weights", "weight: rank [23] has weights .*, rank [01] has None"), ("other returns", "return_z_loss: rank [23] has True, rank [01] has False"),
                          ("other reductions", "reduction: rank [23] has sum, rank [01] has mean")):
        for o in outcomes:
            assert o[name][0] == "ValueError" and re.search(message, o[name][1]), (name, o[name])


@pytest.mark.parametrize("case, kind, message", [
    ("reduction", "ValueError", "reduction: rank {2} has sum, rank {0} has mean"),
    ("ignore_index", "ValueError", "ignore_index: rank {2} has -1, rank {0} has -100"),
    ("V", "ValueError", "logits_shard: rank {2} has V = 28, rank {0} has V = 30"),
    ("forward mode", "NotImplementedError", "rank 3: logits: forward-mode"),
    ("strange", "RuntimeError", "rank 3: KeyError: 'layout'"),
    ("tokens: reduction", "ValueError", "reduction: rank {2} has sum, rank {0} has mean"),
    ("tokens: ignore_index", "ValueError", "ignore_index: rank {2} has -1, rank {0} has -100"),
    ("tokens: V", "ValueError", "logits: rank {2} has V = 14, rank {0} has V = 15"),
    ("tokens: strange", "RuntimeError", "rank {2}: KeyError: 'layout'"),
    ("losses: reduction", "ValueError", "reduction: rank {2} has sum, rank {0} has mean"),
    ("losses: ignore_index", "ValueError", "ignore_index: rank {2} has -1, rank {0} has -100"),
    ("losses: targets", "ValueError", "rank {2}: targets: expected shape (6,), got (5,)"),
    ("another call", "RuntimeError", "reduce_losses"),
])
def test_replicas_that_do_not_agree(seen, case, kind, message):
    for rank, r in enumerate(seen[:4]):
        first, column = rank % 2, case in ("reduction", "ignore_index", "V")
        outcome = r["replicas_that_differ"]
        assert outcome["good"] is None
        got, text = outcome[case]
        # the same on all ranks that meet: a column of the grid where only replicas meet; a whole vocabulary hears of the first column's
        wanted = message.replace("{0}", str(0 if column else first)).replace("{2}", str(2 if column else first + 2))
        assert got == kind and wanted in text, text


def test_a_dp_group_that_holds_the_same_tokens(seen):
    for rank, r in enumerate(seen[:4]):
        for case in ("world", "tp", "mesh", "in the other order"):
            for validated, error in zip((True, False), r["replicas_that_differ"][case]):
                speaker = rank if not validated else 0 if case == "in the other order" else rank // 2 * 2
                shared = speaker ^ 2 if case == "in the other order" else speaker ^ 1
                assert error[0] == "ValueError" and f"dp_group: expected ranks with other tokens than rank {speaker}, got [{shared}]" in error[1], (case, error)
    for r in seen:
        kind, text = r["replicas_that_differ"]["miswired"]
        assert kind == "ValueError" and re.search(r"dp_group: rank \d has replicas at ranks \[\d, \d\], rank \d has replicas at ranks", text), text


def test_gradients_under_ddp(seen):
    for r in seen[:2]:
        averaged, expected = r["under_ddp"]
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(averaged, expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# DTensor, and the peers' signatures


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_dtensor(dce, seen, name):
    logits, targets, upstream = batch("plain", "fp32")
    logits, targets, upstream = logits.view(4, 6, V), targets.view(4, 6), upstream.view(4, 6)
    for reduction in [*REDUCTIONS, "context"]:
        leaf = logits.clone().requires_grad_()
        expected = dce.cross_entropy(leaf, targets, "mean" if reduction == "context" else reduction)
        expected.backward(upstream if reduction == "none" else None)
        for r in seen[: torch.Size(LAYOUTS[name][0]).numel()]:
            out, grad, *more = r["dtensors"][name, reduction]
            assert torch.equal(out, expected.detach()) and torch.equal(grad, leaf.grad), reduction
            if reduction != "context":
                assert more == [True, "DTensor"]
            else:
                assert torch.equal(more[0], out) and torch.equal(more[1], torch.nn.functional.cross_entropy(logits[0], targets[0]))


@pytest.mark.parametrize("case, kind, message", [
    ("partial", "ValueError", "logits: .*Partial"),
    ("plain targets", "ValueError", r"targets: expected a DTensor with placements \(Shard\(dim=0\),\)"),
    ("placements", "ValueError", r"targets: expected placements \(Shard\(dim=0\),\).*Replicate"),
    ("shape", "ValueError", r"targets: expected shape \(6,\), got \(3,\)"),
    ("not as DTensor cuts", "ValueError", "logits: expected columns"),
    ("not a DTensor", "TypeError", "logits: expected a DTensor"),
    ("class_dim", "ValueError", "class_dim: .*2"),
    ("weight", "ValueError", "weight: .*replicated.*Shard"),
    ("label_smoothing", "ValueError", "label_smoothing: .*0 to 1.*1.5"),
])
def test_dtensor_errors(seen, case, kind, message):
    for r in seen[:2]:
        got, text = r["dtensor_errors"][case]
        assert got == kind and re.search(message, text), text
        assert r["dtensor_errors"]["good"] is None


def test_dtensors_of_ranks_that_differ(seen):
    cases = {key for r in seen for key in r["dtensors_that_differ"] if key != "refused"}
    assert len({name for name, *_ in cases}) == 6
    for name, ranks, other, what in cases:
        errors = {r["dtensors_that_differ"][name, ranks, other, what] for r in seen[:ranks]}
        assert len(errors) == 1, (name, other, errors)
        error = errors.pop()
        if ranks == 1 and what != "shape":
            assert error is None
        else:
            said = {"targets": "hold the same tokens of logits, but different targets", "shape": f"rank {other}: targets: expected shape (6,), got (5,)", "ignore_index": "ignore_index: rank "}
            assert error[0] == "ValueError" and said[what] in error[1], (name, other, error)


@pytest.mark.parametrize("name", ["logits_shard", "logits", "targets", "loss"])
def test_no_dtensor_where_a_plain_tensor_is_expected(seen, name):
    for r in seen[:2]:
        errors = r["dtensors_that_differ"]["refused"][name]
        for error in errors if isinstance(errors, list) else [errors]:
            assert error[0] == "TypeError" and f"{name}: expected a plain tensor, got a DTensor" in error[1], error


def test_an_order_of_shards_other_than_the_default(seen):
    for r in seen:
        for (order, name), outcome in r["shard_orders"].items():
            if order == (0, 1, 2):
                assert outcome is True, (name, outcome)
            else:
                assert outcome[0] == "ValueError" and re.match(rf"{'targets' if name == 'targets' else 'logits'}: .*shard_order", outcome[1]), outcome


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_drop_ins(dce, seen, layout):
    logits, targets, upstream = batch("plain", "bf16")
    targets = torch.where(targets >= 210, 7, targets)
    x, t, g = (y.view(6, 4, *y.shape[1:]) for y in (logits[:, :210].contiguous(), targets, upstream))
    # Megatron spreads the smoothing over the other classes alone
    cases = (("megatron", "none", 0.0), ("te", "none", 0.0), ("te mean", "mean", 0.0), ("megatron smoothed", "none", 0.1 * 210 / 209), ("te smoothed", "none", 0.1))
    for name, reduction, label_smoothing in cases:
        leaf = x.clone().requires_grad_()
        expected = dce.cross_entropy(leaf, t, reduction, label_smoothing=label_smoothing)
        expected.backward(g if reduction == "none" else None)
        for rank, r in enumerate(seen[:3]):
            out, grad = r["drop_ins"][name, layout]
            assert torch.equal(out, expected.detach()) and torch.equal(grad, leaf.grad[..., 70 * rank : 70 * rank + 70]), name
    for called in (
        dce.transformer_engine.parallel_cross_entropy(x, t.reshape(-1, 1), reduce_loss=True),
        dce.transformer_engine.parallel_cross_entropy(x, t, 0.0, True, None, -100, False, 0.0, return_log_sum_exp=False),
        dce.transformer_engine.parallel_cross_entropy(_input=x, target=t.flatten(), reduce_loss=True, z_loss_weight=0),
    ):
        assert torch.equal(called, dce.cross_entropy(x, t))
    loss, lse = dce.transformer_engine.parallel_cross_entropy(x, t, 0.1, z_loss_weight=1e-4, return_log_sum_exp=True)
    expected, expected_lse = dce.cross_entropy(x, t, "none", label_smoothing=0.1, z_loss=1e-4, return_lse=True)
    assert torch.equal(loss, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(TypeError, match="_input: "):
        dce.transformer_engine.parallel_cross_entropy(x, t, _input=x)
    alone = dce.transformer_engine.parallel_cross_entropy(x, t, 0.0, True, None, -100, True)
    assert torch.equal(alone, dce.cross_entropy(x, t))
    for wrong in (1.0, -0.1):
        with pytest.raises((ValueError, RuntimeError), match="label_smoothing: .*0 to 1|process group"):
            dce.megatron.vocab_parallel_cross_entropy(x, t, wrong)


def test_autograd_and_compile(seen):
    for r in seen[:2]:
        r = r["autograd"]
        out, grad = r["eager"]
        assert r["with options"][0][0].isfinite() and all(torch.equal(a, b) for a, b in zip(*r["with options"]))
        assert torch.equal(r["again"], grad) and torch.equal(r["compiled"][0], out) and torch.equal(r["compiled"][1], grad) and not r["no gradient"]
        assert all(r[case][0] == "NotImplementedError" for case in ("second", "forward mode", "func.grad", "func.grad, validated", "vmap", "vmap of tokens", "vmap of losses"))


def test_the_multi_gpu_script_over_gloo(tmp_path):
    """As torchrun would start it, with two processes."""
    command = [sys.executable, ROOT / "benchmarks" / "multi_gpu.py", "--device", "cpu", "--skip-time", "--out", tmp_path / "report.json"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": r, "LOCAL_RANK": r}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in "01"]
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["processes"] == 2 and report["failures"] == [] and "rank 0 and rank 1 both hold" in report["digests"]["overlap"]


# ---------------------------------------------------------------------------------------------------------------------
# A process that dies


def dies(rank, world, when):
    dce = load_kernel()
    x = SMALL[:, 10 * rank : 10 * rank + 10]
    for step in range(3):
        if rank == 1 and step == when:
            os._exit(9)
        out = dce.vocab_parallel_cross_entropy(x, SMALL_TARGETS, validate=False)
    return out.item()


def one_rank_is_wrong(rank, world):
    """Errors that the others cannot be told of by a group that all agree on. The last of them leaves rank 2 waiting for rank 0, which goes away."""
    dce = load_kernel()
    tp, dp = ([dist.new_group(pair) for pair in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    tp, dp, parallel, other = tp[rank // 2], dp[rank % 2], dce.vocab_parallel_cross_entropy, [None] * world
    x, t = SMALL[:, 15 * (rank % 2) : 15 * (rank % 2) + 15], SMALL_TARGETS
    seen = {"dp_group on one": [error_of(lambda: parallel(x, t, group=tp, dp_group=dp if rank == r else None)) for r in range(world)]}
    seen["dp_group on one of two"] = parallel(x, t, group=tp, dp_group=dp if rank % 2 == 0 else None, validate=False).item()
    seen["group"] = error_of(lambda: dce.data_parallel_cross_entropy(x, t, group="x" if rank == 0 else None))
    if rank == 0:
        dist.all_gather_object(other, "something else")
    seen["dp_group"] = error_of(lambda: parallel(x, t, group=tp, dp_group="x" if rank == 0 else dp))
    if rank % 2:
        error_of(lambda: dist.barrier(group=dp))                # neither goes before the other has read what it was told
    return seen


def test_one_rank_is_wrong():
    for rank, outcome in enumerate(processes.run(one_rank_is_wrong, 4)):
        for alone, error in enumerate(outcome["dp_group on one"]):
            expected = ("ValueError", f"dp_group: rank {alone ^ 1} has None, rank {alone} has one") if rank // 2 == alone // 2 else None
            assert error == expected, (rank, alone)
        assert math.isnan(outcome["dp_group on one of two"])  # who shares a vocabulary would else have different means
        group, dp_group = ("TypeError", "expected a ProcessGroup"), ("TypeError", "rank 0: dp_group: expected a ProcessGroup")
        for case, (kind, message) in {
            "group": group if rank == 0 else ("RuntimeError", "sends a str"),
            "dp_group": dp_group if rank != 2 else ("RuntimeError", ""),
        }.items():
            assert outcome[case][0] == kind and message in outcome[case][1], (rank, outcome[case])


def test_a_killed_rank_is_an_error_within_the_timeout():
    begin, limit = time.time(), 10
    group, pipes = processes.start(dies, 3, 1, timeout=limit)
    outcomes = [processes.receive(pipe, 4 * limit) for pipe in pipes]
    took = time.time() - begin
    for process in group:
        process.join(5)
    assert outcomes[1] == (None, "the process is gone")
    for rank in (0, 2):
        result, error = outcomes[rank]
        assert result is None and re.search("Connection closed|Connection reset|timed out|Timed out", error), error
    assert took < 3 * limit, took


# ---------------------------------------------------------------------------------------------------------------------
# The words that ranks send each other, with the ranks played by one process


def exchange(dce, shards, starts, targets, ignore_index=-100, mode=0):
    """(loss, settled targets) of each rank; `targets` is a list, one a rank."""
    ops = dce._ops.ops
    images = torch.stack([ops.order_images(ops.rowmax(x, 0, x.shape[1])) for x in shards]).amax(0)
    world = len(shards)
    parts = [ops.shard_words(x, t, images, ignore_index, mode, world - 1 if r == 0 else -1, s) for r, (x, s, t) in enumerate(zip(shards, starts, targets))]
    words, rows = sum(w for w, _ in parts), len(images)
    results = []
    for t, (_, maximum) in zip(targets, parts):
        settled, logits = ops.settle_targets(words, t, ignore_index)
        results.append((ops.finalize(words[: 8 * rows].view(rows, 8), logits, settled, maximum, ignore_index, -1)[0], settled))
    return results


def test_order_images(dce):
    values = torch.tensor([NAN, -NAN, INF, 3e38, 1.0, 2.0 ** -149, 0.0, -0.0, -2.0 ** -149, -1.0, -3e38, -INF])
    images = dce._ops.ops.order_images(values).tolist()
    assert images[0] == images[1] and images[6] == images[7]
    distinct = [images[0], *images[2:7], *images[8:]]
    assert distinct == sorted(set(distinct), reverse=True)
    assert dce._ops.ops.order_images(values[:0]).shape == (0,)


@pytest.mark.parametrize("world", [2, 3, 5, 9, 64])             # W - 1 a power of two: where a hash times W - 1 could vanish soonest
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_targets_agree_or_the_row_is_nan(world, data):
    dce = load_kernel()
    x = torch.zeros(4, world)
    kinds = data.draw(st.sampled_from(["all", "one", "half", "pairs"]))
    base = data.draw(st.lists(st.integers(0, world - 1), min_size=4, max_size=4))
    targets = [torch.tensor(base) for _ in range(world)]
    row, rank = data.draw(st.integers(0, 3)), data.draw(st.integers(0, world - 1))
    other = data.draw(st.sampled_from([-100, (base[row] + 1) % world, world, -1]))
    movers = {"all": [], "one": [rank], "half": list(range(world // 2)), "pairs": [r for r in range(world) if r // 2 % 2 == 0]}[kinds]
    movers = movers if len(movers) < world else []
    for r in movers:
        targets[r][row] = other
    disagree = bool(movers) and other != base[row]
    for loss, settled in exchange(dce, list(x.split(1, 1)), range(world), targets):
        assert torch.equal(loss.isnan(), torch.arange(4).eq(row) & disagree)
        assert int(settled[row]) == -1 if disagree else torch.equal(settled, torch.tensor(base))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_only_an_exact_cover_is_a_vocabulary(data):
    """Any placement of up to five shards: a loss, and no complaint, if and only if they lie side by side from 0."""
    dce = load_kernel()
    bounds = sorted(data.draw(st.lists(st.integers(0, 12), min_size=0, max_size=4)))
    shards = [(a, b) for a, b in zip([0, *bounds], [*bounds, 12])]
    for _ in range(data.draw(st.integers(0, 3))):
        i = data.draw(st.integers(0, len(shards) - 1))
        lo = max(0, shards[i][0] + data.draw(st.integers(-2, 2)))
        shards[i] = lo, max(lo, shards[i][1] + data.draw(st.integers(-2, 2)))
    shards = data.draw(st.permutations(shards))
    held = sorted(s for s in shards if s[0] < s[1])
    exact = bool(held) and all(a == b for (a, _), b in zip(held, [0, *(b for _, b in held)]))
    total = sum(b - a for a, b in shards)
    x = torch.linspace(-1, 1, 20).expand(2, 20)
    t = torch.tensor([0, max(total - 1, 0)])
    outcomes = exchange(dce, [x[:, a:b] for a, b in shards], [a for a, _ in shards], [t] * len(shards))
    expected = dce.cross_entropy(x[:, :total], t, "none") if exact else None
    for loss, _ in outcomes:
        assert torch.equal(loss, expected) if exact else loss.isnan().all(), shards
    said = dce._ranks.shards_problem([dce._ranks.Shard(r, None, 2, a, b - a) for r, (a, b) in enumerate(shards)])
    assert (said is None) == exact, (shards, said)


def rank_words(dce, t, weight, start=0, ignore_index=-100, mode=1, x=torch.zeros(3, 2), *more):
    """A rank's word of each row. weight: its share of the agreement."""
    ops, rows = dce._ops.ops, len(t)
    images = ops.order_images(ops.rowmax(x[:rows], 0, x.shape[1]))
    return ops.shard_words(x[:rows], t, images, ignore_index, mode, weight, start, *more)[0][8 * rows : 9 * rows]


def test_mode_and_rows_are_part_of_the_agreement(dce):
    t = torch.tensor([5, -100, 2 ** 40])                        # which no rank has
    first, second = rank_words(dce, t, 1), rank_words(dce, t, -1)
    assert (first + second == 0).all() and (first & 0xFFFFFFFF == 0).all()
    for other in (rank_words(dce, t, -1, ignore_index=-1), rank_words(dce, t, -1, mode=2), rank_words(dce, t + 1, -1)):
        assert ((first + other) >> 32 != 0).all()
    assert (first[:2] + rank_words(dce, t[:2], -1) != 0).all()


@pytest.mark.parametrize("world", [1, 2, 3, 8, 2 ** 16 + 1, 2 ** 31])
def test_words_of_ranks_that_agree_add_up(dce, world):
    """To 0, or to 2^32 and the bits of the logit that one of them has, whatever those are."""
    values = torch.tensor([1.5, -1.5, 0.0, -0.0, NAN, -NAN, INF, -INF, 3e38, -3e38])
    t = torch.zeros(10, dtype=torch.int64)
    words = lambda weight, start: rank_words(dce, t, weight, start, -100, 1, values[:, None])
    others = (world - 1) * words(-1, 7)                         # modulo 2^64, as all sums of words
    assert (words(world - 1, 7) + others == 0).all()
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(words(world - 1, 0) + others, 2 ** 32 + bits)
    settled, logits = dce._ops.ops.settle_targets(torch.cat([torch.zeros(80, dtype=torch.int64), 2 ** 32 + bits]), t, -100)
    assert torch.equal(settled, t) and torch.equal(logits.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_words_of_ranks_are_the_oracles(dce, dtype):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
    t = torch.tensor([0, 9, 10, 14, 15, -100, -7, 2 ** 40])     # the rank has columns 10 to 14
    weight = torch.linspace(0.5, 1.5, 15)
    for mode, c, lam, valid, w, epsilon, sigma, kappa, *items in [
        (1, -1, 0.0, 0, None, 0.0, 1.0, None), (2, 7, 0.0, 0, None, 0.0, 1.0, None), (0, 0, 0.1, 0, None, 0.0, 1.0, None), (1, 2 ** 31 - 1, 0.0, 14, None, 0.0, 1.0, None),
        (1, -1, 0.0, 0, weight, 0.0, 1.0, None), (1, 3, 0.0, 0, None, 0.1, 1.0, None), (1, -1, 0.3, 15, weight, 0.2, 0.7, 20.0), (2, 1, 0.0, 0, None, 0.0, 0.5, None), (0, 1, 0.0, 0, None, 0.0, 1.0, 3.0),
        (1, 5, 0.0, 0, None, 0.0, 1.0, None, 7), (1, -1, 0.0, 0, weight, 0.1, 1.0, None, -1), (1, 2, 0.0, 0, weight.flip(0), 0.0, 1.0, None, 2 ** 62),
    ]:
        V = 31 * len(items)                                     # given or not
        for ignore_index in (-100, -7):
            salt = oracle.rank_salt(ignore_index, ("none", "mean", "sum")[mode], 8, lam, valid, w is not None, epsilon, sigma, kappa, V, bool(items))
            expected = []
            for row, target in zip(x.double().tolist(), t.tolist()):
                own = 10 <= target < 15 and target != ignore_index
                of_class = [] if w is None else [oracle.bits32(w[target].item() if 0 <= target < 15 else NAN)]
                of_all = [oracle.hash_of_weights(w.tolist())] if epsilon and w is not None else []
                expected.append(oracle.rank_word(target, salt, c, row[target - 10] if own else None, *of_class, *of_all, *items))
            got = rank_words(
                dce, t, c, 10, ignore_index, mode + 4 * len(items) + 8 * V, x, lam, valid, w, epsilon, sigma, kappa or 0.0, True, torch.tensor(items) if items else None
            )
            assert [word & oracle.MASK64 for word in got.tolist()] == expected, (mode, c, ignore_index)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_a_sum_of_words_says_is_the_oracles(kind, data):
    dce, rows = load_kernel(), 6
    high = st.one_of(st.sampled_from([0, 1, 2, 3, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1]), st.integers(0, 2 ** 32 - 1))
    low = st.one_of(st.sampled_from([0, 1, 0x7FC00000, 2 ** 32 - 1]), st.integers(0, 2 ** 32 - 1))
    sums = [(data.draw(high) << 32) + data.draw(low) for _ in range(rows)]
    targets = data.draw(st.lists(st.sampled_from([-100, -1, -2, 0, 5, 2 ** 31 - 1]), min_size=rows, max_size=rows))
    ignore_index = data.draw(st.sampled_from([-100, -1, 5]))
    words = torch.tensor([0] * 8 * rows + [s - 2 ** 64 * (s >= 2 ** 63) for s in sums])
    settled, logits = dce._ops.ops.settle_targets(words, torch.tensor(targets, dtype=kind), ignore_index)
    expected = [oracle.agreed(s, t, ignore_index) for s, t in zip(sums, targets)]
    assert settled.dtype == kind and settled.tolist() == [t for t, _ in expected]
    assert [oracle.bits32(v) for v in logits.tolist()] == [oracle.bits32(v) for _, v in expected]


def test_two_owners_or_none(dce):
    """Of ranks that agree, the high half counts the owners and what their logits' bits carry; any count but one is NaN, up to 2^31 of them."""
    ops = dce._ops.ops
    owned = [0, *(k * (2 ** 32 + bits) for k in (1, 2, 3, 8, 2 ** 16, 2 ** 31) for bits in (0, 0x3FC00000, 0xBFC00000, 2 ** 32 - 1))]
    highs = [w % 2 ** 64 >> 32 for w in owned]
    assert highs[:9] == [0, 1, 1, 1, 1, 2, 2, 3, 3] and min(highs[5:]) == 2 and highs[-1] == 2 ** 32 - 1
    words = torch.tensor([0] * 8 * len(owned) + [(w + 2 ** 63) % 2 ** 64 - 2 ** 63 for w in owned])
    for t in (torch.zeros(len(owned), dtype=torch.int64), torch.full((len(owned),), -100, dtype=torch.int32)):
        for ignore_index, outside in ((-100, -1), (-1, -2)):
            settled, logits = ops.settle_targets(words, t, ignore_index)
            one = [0 < i < 5 and int(t[0]) != ignore_index for i in range(len(owned))]
            assert settled.tolist() == [int(t[0]) if w == 0 or single else outside for w, single in zip(owned, one)] and settled.dtype == t.dtype
            assert logits[:4].tolist()[1:] == [0.0, 1.5, -1.5] if one[1] else logits[1:4].isnan().all()
            assert logits[~torch.tensor(one)].isnan().all()


def test_how_often_hashes_meet(dce):
    """Of 2^17 targets two have one hash of 32 bits about twice (SPEC 11)."""
    t = torch.arange(2 ** 17)
    words = rank_words(dce, t, -1, 2 ** 20, -100, 1, torch.zeros(len(t), 1))
    assert len(t) - 20 < len(words.unique()) <= len(t)
