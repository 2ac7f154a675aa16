"""Real processes over gloo: the bytes of one device at every world size, and never a plausible number when the ranks do not agree.

Eight processes are started once and run all cases, in subgroups of 1, 2, 3, 4 and 8; each test looks at what they sent back.
"""
import importlib.util
import os
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

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
    out = dce.vocab_parallel_cross_entropy(leaf[:, : cut[1] - cut[0]], targets, reduction, vocab_start=cut[0], **kw)
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
    "target": ([4], r"targets: row 4: the ranks have different targets: rank 0 has 10, rank 1 has 10, rank 2 has 11"),
    "ignored on one rank": ([2], r"targets: row 2: .*different.*: rank 0 has 12, rank 1 has -100, rank 2 has 12"),
    "ignored on all but one": ([3], r"targets: row 3: .*different.*: rank 0 has 5, rank 1 has -100, rank 2 has -100"),
    "swapped rows": ([0, 1], r"targets: row 0: .*different.*: rank 0 has 29, rank 1 has 0, rank 2 has 0"),
    "ignore_index": (None, r"ignore_index: rank 1 has -1, rank 0 has -100"),
    "target out of range": ([1], r"targets: row 1: expected 0 <= target < 30 or ignore_index = -100, got 30"),
    "negative target": ([1], r"targets: row 1: expected 0 <= target < 30 or ignore_index = -100, got -5"),
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


def wrong_only_with_validate(dce, rank, groups):
    """What would hang, or fail in the backend, if nobody looked first."""
    if rank >= 3:
        return {}
    x, t, parallel, group = SMALL[:, 10 * rank : 10 * rank + 10], SMALL_TARGETS, dce.vocab_parallel_cross_entropy, groups[3]
    calls = {
        "rows": lambda: parallel(x[: 6 - rank], t[: 6 - rank], group=group),
        "dtype": lambda: parallel(x.bfloat16() if rank == 2 else x, t, group=group),
        "reduction": lambda: parallel(x, t, "sum" if rank == 1 else "mean", group=group),
        "float64": lambda: parallel(x.double() if rank == 1 else x, t, group=group),
        "shape": lambda: parallel(x, t[:5] if rank == 2 else t, group=group),
        "not a tensor": lambda: parallel(None if rank == 0 else x, t, group=group),
        "vocab_start": lambda: parallel(x, t, group=group, vocab_start=-1 if rank == 1 else 10 * rank),
        "dp_group": lambda: parallel(x, t, "none", group=group, dp_group=groups[3]),
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


PARTS = [every_cut, training, wrong, wrong_only_with_validate, lying_maximum]


def worker(rank, world):
    dce = load_kernel()
    groups = {w: dist.new_group(list(range(w))) for w in WORLDS}
    return {part.__name__: part(dce, rank, groups) for part in PARTS}


@pytest.fixture(scope="module")
def seen():
    return processes.run(worker, max(WORLDS))


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


@pytest.mark.parametrize("case, kind, message", [
    ("rows", "ValueError", r"targets: rank 1 has 5 rows, rank 0 has 6"),
    ("dtype", "ValueError", r"logits_shard: rank 2 has torch.bfloat16, rank 0 has torch.float32"),
    ("reduction", "ValueError", r"reduction: rank 1 has sum, rank 0 has mean"),
    ("float64", "TypeError", r"rank 1: logits_shard: expected float32 or bfloat16 or float16, got torch.float64"),
    ("shape", "ValueError", r"rank 2: targets: expected shape \(6,\), got \(5,\)"),
    ("not a tensor", "TypeError", r"rank 0: logits_shard: .*NoneType"),
    ("vocab_start", "ValueError", r"rank 1: vocab_start: .*-1"),
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
# A process that dies


def dies(rank, world, when):
    dce = load_kernel()
    x = SMALL[:, 10 * rank : 10 * rank + 10]
    for step in range(3):
        if rank == 1 and step == when:
            os._exit(9)
        out = dce.vocab_parallel_cross_entropy(x, SMALL_TARGETS, validate=False)
    return out.item()


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


def test_mode_and_rows_are_part_of_the_agreement(dce):
    ops = dce._ops.ops
    x, t = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    images = ops.order_images(ops.rowmax(x, 0, 2))
    agreement = lambda ignore, mode, weight, rows=3: ops.shard_words(x[:rows], t[:rows], images[:rows], ignore, mode, weight, 0)[0][9 * rows:]
    assert (agreement(-100, 1, 1) + agreement(-100, 1, -1) == 0).all()
    for other in (agreement(-1, 1, -1), agreement(-100, 2, -1)):
        assert (agreement(-100, 1, 1) + other != 0).all()
    assert (agreement(-100, 1, 1)[:2] + agreement(-100, 1, -1, 2) != 0).all()


def test_two_owners_or_none(dce):
    """The high half of the owner's word counts them; any count but one is NaN, whatever the low half has become."""
    ops = dce._ops.ops
    t = torch.tensor([0, 0, 0, 0])
    words = torch.zeros(40, dtype=torch.int64)
    bits = torch.tensor(1.5).view(torch.int32).item()
    words[32:36] = torch.tensor([2 ** 32 + bits, 0, 2 * (2 ** 32 + bits), 2 ** 32])
    settled, logits = ops.settle_targets(words, t, -100)
    assert torch.equal(settled, t)
    assert logits[0] == 1.5 and logits[1:3].isnan().all() and logits[3] == 0
    words[36:] = torch.tensor([1, -1, 0, 0])
    for ignore_index, outside in ((-100, -1), (-1, -2)):
        settled, logits = ops.settle_targets(words, t.int(), ignore_index)
        assert settled.tolist() == [outside, outside, 0, 0] and settled.dtype == torch.int32 and logits[:3].isnan().all()
