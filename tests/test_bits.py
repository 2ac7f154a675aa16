"""The kernel module against the oracle, bit for bit: every function, dtype, layout and cut.

No tolerance anywhere. A bit that differs is a bug of one of the two, or of docs/SPEC.md.
"""
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle as o
from cases import (DTYPES, INF, LENGTHS, NAN, SUB, assert_bits, assert_same, normal, patterns, rows_of, special_rows,
                   tensor_of, window_rows)

IGNORE = -100
FMTS = list(DTYPES)
# The session's fixture is not a part of an example's state, and compiling nothing it needs no reset.
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def whole(dce, logits, targets, g=None, reduction="none", ignore_index=IGNORE, dtype="fp32"):
    """Everything that has to do with whole rows, through every entry to it, against the oracle."""
    rows, ts = rows_of(logits), targets.reshape(-1).tolist()
    expected, finals, maxima, words = o.batch(rows, ts, reduction, ignore_index)
    losses = [f.loss for f in finals]
    flat = logits.reshape(-1, logits.shape[-1])
    flat_t = targets.reshape(-1)

    loss, rowmax, denom = dce.forward(logits, targets, ignore_index=ignore_index)
    assert_bits(loss, losses, "forward loss")
    assert_bits(rowmax, maxima, "forward maximum")
    assert_bits(denom, [f.denom for f in finals], "forward denominator")

    rowmax = dce.rowmax(flat)
    true_maxima = [o.row_max(row) for row in rows]
    assert_bits(rowmax, true_maxima, "rowmax")
    digits = dce.denom_digits(flat, rowmax)
    assert digits.dtype == torch.int64
    assert digits.tolist() == [o.denom_digits(row, m) for row, m in zip(rows, true_maxima)]
    loss, denom = dce.finalize(digits, flat, flat_t, rowmax, ignore_index=ignore_index, validate=False)
    assert_bits(loss, losses, "finalize loss")
    assert_bits(denom, [f.denom for f in finals], "finalize denominator")

    leaf = logits.detach().requires_grad_()                     # shares the layout of `logits`
    out = dce.cross_entropy(leaf, targets, reduction, ignore_index=ignore_index, validate=False)
    assert_bits(out, expected, f"cross_entropy {reduction}")
    if g is None:
        g = [1.0] * len(rows) if reduction == "none" else 1.0
    g = [o.f32(x) for x in g] if reduction == "none" else o.f32(g)
    out.backward(torch.tensor(g, dtype=torch.float32).reshape(out.shape))
    count = words[9] if reduction == "mean" else None
    want = []
    for i, (row, t, m, final) in enumerate(zip(rows, ts, true_maxima, finals)):
        want += o.gradient(row, t, m, final.state, g[i] if reduction == "none" else g, count, dtype,
                           ignore_index=ignore_index)
    assert leaf.grad.dtype == logits.dtype and leaf.grad.shape == logits.shape
    assert_bits(leaf.grad, want, f"gradient {reduction}")


def batches(named):
    """Rows of equal length together: one call a length. Names are kept for the message."""
    by_length = {}
    for name, (row, t) in named.items():
        by_length.setdefault(len(row), []).append((name, row, t))
    return by_length.values()


# ---------------------------------------------------------------------------------------------------------------------
# Terms


def test_term(dce):
    """The op behind it all, on samples; exhaustive_term.cpp takes every float."""
    rng = random.Random(20)
    xs = [0.0, -0.0, SUB, -SUB, 2.0 ** 20, -2.0 ** 20] + [o.f32(rng.uniform(-s, s)) for s in (1, 30, 1000, 2.0 ** 20)
                                                         for _ in range(300)]
    for k in list(range(-40, 41)) + [100000, -100000, 1500000, -1500000]:                # both sides of each step of n
        x = o.f32((k + 0.5) * math.log(2))
        xs += [x] + [o.from_bits32(o.bits32(x) + s) for s in (-2, -1, 1, 2)]
    P, n = dce._ops.ops.term(torch.tensor(xs))
    assert P.dtype == n.dtype == torch.int32
    assert list(zip(P.tolist(), n.tolist())) == [o.term(x) for x in xs]


# ---------------------------------------------------------------------------------------------------------------------
# Adversarial rows, each in every dtype


@pytest.mark.parametrize("dtype", FMTS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_special_rows(dce, dtype, reduction):
    for group in batches(special_rows()):
        logits = tensor_of([row for _, row, _ in group], dtype)
        whole(dce, logits, torch.tensor([t for _, _, t in group]), reduction=reduction, dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_window_rows(dce, dtype):
    for group in batches(window_rows()):
        logits = tensor_of([row for _, row, _ in group], dtype)
        whole(dce, logits, torch.tensor([t for _, _, t in group]), dtype=dtype)
        # The same rows longer, the top in the last place and the rest far below: what an implementation that
        # picks its window from the first elements of a chunk gets wrong.
        long = torch.cat([logits.flip(-1)[:, :-1].repeat(1, 12), logits[:, :1]], 1)
        whole(dce, long, torch.tensor([t for _, _, t in group]), dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
@pytest.mark.parametrize("scale", [1.0, 40.0])                  # one window in use, or most of the kept range
def test_lengths(dce, dtype, scale):
    for V in LENGTHS:
        logits = tensor_of([normal(V, V, scale), normal(V, V + 1, scale)], dtype)
        whole(dce, logits, torch.tensor([V - 1, V // 2]), dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_no_rows(dce, dtype):
    logits = torch.empty(0, 5, dtype=DTYPES[dtype])
    targets = torch.empty(0, dtype=torch.int64)
    loss, rowmax, denom = dce.forward(logits, targets)
    assert loss.shape == rowmax.shape == denom.shape == (0,)
    assert_bits(dce.cross_entropy(logits, targets, "sum"), 0.0)
    assert_bits(dce.cross_entropy(logits, targets, "mean"), NAN)
    assert dce.cross_entropy(logits, targets, "none").shape == (0,)
    assert dce.denom_digits(logits, rowmax).shape == (0, 8)
    leaf = logits.clone().requires_grad_()
    dce.cross_entropy(leaf, targets, "sum").backward()
    assert leaf.grad.shape == (0, 5)


def test_a_long_row(dce):
    """131,075 columns of bf16: many chunks, a ragged end, two windows; and the same row in fp32 through fp32's path."""
    logits = tensor_of([normal(131075, 5, 6.0)], "bf16")
    whole(dce, logits, torch.tensor([131074]), dtype="bf16")
    whole(dce, logits.float(), torch.tensor([77]))


@pytest.mark.parametrize("V,dtype,x", [
    (2 ** 20 + 5, "fp32", 0.75),            # more terms than a 20-bit counter holds
    (2 ** 24 + 3, "bf16", 15.4375),         # an all-equal row whose digit 4 overflows 32 bits: n mod 32 = 22
    (2 ** 24 + 3, "fp16", 21.65),           # ... n mod 32 = 31, the highest position in a block
    (2 ** 24 + 3, "bf16", -0.22),           # ... n = 0, the lowest
])
def test_all_equal_rows_of_many_columns(dce, V, dtype, x):
    logits = torch.full((1, V), x, dtype=DTYPES[dtype])
    row = rows_of(logits[:, :1])[0]
    M = row[0]
    words = [w * V for w in o.denom_digits(row, M)[:6]] + [V, o.tag(M, V) - o.tag(M, 0)]
    targets = torch.tensor([V - 1])
    final = o.finalize(words, lambda v: M, V - 1, M, V)
    rowmax = dce.rowmax(logits)
    assert dce.denom_digits(logits, rowmax).tolist() == [o.carry(words)]
    loss, _, denom = dce.forward(logits, targets)
    assert_bits(loss, final.loss)
    assert_bits(denom, final.denom)
    assert_bits(dce.cross_entropy(logits, targets), final.loss)
    grad = dce.grad_logits(torch.ones(1), logits, targets, dce.denom_digits(logits, rowmax), rowmax, V - 2, V)
    f = o.gradient(row, 1, M, final.state, 1.0, dtype=dtype)
    t = o.gradient(row, 0, M, final.state, 1.0, dtype=dtype)
    assert_bits(grad, f + t)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts: values count, not where they lie


@pytest.mark.parametrize("dtype", FMTS)
def test_layouts(dce, dtype):
    N, V = 3, 41
    base = tensor_of([normal(V, 100 + i) for i in range(N)], dtype)
    targets = torch.tensor([0, 40, 17])

    def into(buffer):
        buffer.copy_(base)
        return buffer

    kind = DTYPES[dtype]
    layouts = {
        "contiguous, odd row stride": base.clone(),
        "padded rows": into(torch.full((N, V + 23), 1e4, dtype=kind)[:, :V]),
        "rows padded to an odd stride": into(torch.full((N, V + 2), 1e4, dtype=kind)[:, :V]),
        "unaligned slice": into(torch.full((N, V + 1), 1e4, dtype=kind)[:, 1:]),
        "unaligned slice of padded rows": into(torch.full((N, V + 7), 1e4, dtype=kind)[:, 3:V + 3]),
        "every other row": into(torch.full((2 * N, V), 1e4, dtype=kind)[::2]),
        "transposed": into(torch.full((V, N), 1e4, dtype=kind).t()),
        "every other column": into(torch.full((N, 2 * V), 1e4, dtype=kind)[:, ::2]),
        "storage offset": into(torch.full((N * V + 5,), 1e4, dtype=kind)[5:].view(N, V)),
    }
    for name, logits in layouts.items():
        assert torch.equal(logits, base), name
        whole(dce, logits, targets, reduction="mean", dtype=dtype)
        whole(dce, logits, targets, g=[1.0, -2.5, 1e-3], dtype=dtype)
    expanded = base[1:2].expand(4, V)                           # row stride 0
    whole_loss = dce.forward(expanded, torch.tensor([0, 1, 2, 40]))[0]
    assert_bits(whole_loss, [o.forward(rows_of(base)[1], t)[0].loss for t in (0, 1, 2, 40)])


@pytest.mark.parametrize("dtype", FMTS)
def test_more_dimensions(dce, dtype):
    logits = tensor_of([normal(29, i) for i in range(6)], dtype).view(2, 3, 29)
    targets = torch.tensor([[1, 2, IGNORE], [28, 0, 5]])
    whole(dce, logits, targets, reduction="mean", dtype=dtype)
    out = dce.cross_entropy(logits, targets, "none")
    assert out.shape == (2, 3)                                  # the leading shape, as torch gives it
    flat = dce.cross_entropy(logits.view(6, 29), targets.view(6), "none")
    assert_same(out.reshape(6), flat)
    one = dce.cross_entropy(logits[0, 1], targets[0, 1], "none")
    assert one.shape == ()
    assert_same(one, flat[1])
    loss, rowmax, denom = dce.forward(logits, targets)
    assert loss.shape == rowmax.shape == denom.shape == (6,)


@pytest.mark.parametrize("dtype", FMTS)
def test_int32_targets(dce, dtype):
    logits = tensor_of([normal(29, i) for i in range(3)], dtype)
    whole(dce, logits, torch.tensor([28, IGNORE, 0], dtype=torch.int32), reduction="mean", dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_a_row_alone_and_in_a_batch(dce, dtype):
    rows = [normal(100, i, 10.0) for i in range(60)] + [[NAN] * 100, [INF] * 100, [-INF] * 100]
    logits = tensor_of(rows, dtype)
    targets = torch.arange(63) % 100
    batch = logits.clone().requires_grad_()
    losses = dce.cross_entropy(batch, targets, "none", validate=False)
    losses.backward(torch.linspace(-2, 2, 63))
    for i in range(63):
        alone = logits[i:i + 1].clone().requires_grad_()
        loss = dce.cross_entropy(alone, targets[i:i + 1], "none", validate=False)
        loss.backward(torch.linspace(-2, 2, 63)[i:i + 1])
        assert_same(loss, losses[i:i + 1])
        assert_same(alone.grad, batch.grad[i:i + 1])


# ---------------------------------------------------------------------------------------------------------------------
# Ignored rows


@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 7])      # 3 is a column, 7 just past the last
def test_ignored_rows(dce, ignore_index):
    rows = [normal(7, 1), [NAN] * 7, normal(7, 2), [-INF] * 7, [INF] * 7, normal(7, 3)]
    for dtype in FMTS:
        logits = tensor_of(rows, dtype)
        i = ignore_index
        for targets in ([0, i, 6, i, i, 2], [i] * 6):
            for reduction in ("none", "sum", "mean"):
                g = [NAN, INF, 1.0, NAN, -1.0, -0.0] if reduction == "none" else 2.0
                whole(dce, logits, torch.tensor(targets), g, reduction, i, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Upstream gradients

UPSTREAM = [1.0, -1.0, 0.0, -0.0, 0.1, -7.25, 1e-30, -1e-38, SUB, -SUB, 2.0 ** -126, 1e30, 3e38, -3e38, 3.4028234663852886e38,
            INF, -INF, NAN]


@pytest.mark.parametrize("dtype", FMTS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_upstream_gradients(dce, dtype, reduction):
    rows = [normal(33, 7, 3.0), [90.0] + [0.0] * 32, [0.0] * 32 + [-INF], normal(33, 8, 100.0)]
    targets = [5, 0, 32, IGNORE]
    for g in UPSTREAM:
        g = o.f32(g)
        whole(dce, tensor_of(rows, dtype), torch.tensor(targets), [g] * 4 if reduction == "none" else g, reduction, dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_gradient_of_one_column_and_of_two(dce, dtype):
    """V = 1: the loss is +0 and the only gradient is -(S - T)/S times g, a zero of the sign that g gives it."""
    for row, targets in (([0.3], [0]), ([0.3, 0.3], [0, 1])):
        for t in targets:
            for g in UPSTREAM:
                whole(dce, tensor_of([row], dtype), torch.tensor([t]), [o.f32(g)], dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_gradient_slices(dce, dtype):
    logits = tensor_of([normal(67, i, 9.0) for i in range(4)], dtype)
    targets = torch.tensor([0, 66, IGNORE, 30])
    g = torch.tensor([1.0, -3.5, 2.0, 1e-4])
    rowmax = dce.rowmax(logits)
    digits = dce.denom_digits(logits, rowmax)
    full = dce.grad_logits(g, logits, targets, digits, rowmax)
    want = []
    for row, t, m, x in zip(rows_of(logits), targets.tolist(), rowmax.tolist(), g.tolist()):
        final = o.finalize(o.denom_digits(row, m), row, t, m)
        want += o.gradient(row, t, m, final.state, x, dtype=dtype)
    assert_bits(full, want)
    for lo, hi in ((0, 67), (0, 1), (66, 67), (1, 66), (30, 31), (31, 31), (17, 40), (67, 67)):
        part = dce.grad_logits(g, logits, targets, digits, rowmax, lo, hi)
        assert part.shape == (4, hi - lo)
        assert_same(part, full[:, lo:hi], f"columns {lo} to {hi}")
    shards = [dce.denom_digits(logits, rowmax, a, b) for a, b in ((0, 20), (20, 67))]
    assert_same(dce.grad_logits(g, logits, targets, shards[0] + shards[1], rowmax), full, "carry-save digits")


# ---------------------------------------------------------------------------------------------------------------------
# Properties: cuts, order, permutations

single = st.one_of(
    st.floats(-30, 30, width=32), st.floats(-300, 300, width=32), st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, INF, -INF, SUB, -SUB, 2.0 ** 20, -2.0 ** 20, 2.0 ** 20 - 0.0625, 3e38, -3e38, 88.0, -88.0,
                     float(2 ** 21)]).map(o.f32))
finite_rows = st.lists(st.floats(-150, 150, width=32), min_size=1, max_size=40)
any_rows = st.one_of(finite_rows, st.lists(single, min_size=1, max_size=40),
                     st.lists(st.one_of(single, st.just(NAN)), min_size=1, max_size=12))


def shards_of(dce, logits, cuts, as_tensors):
    """The edges [lo, hi) of the shards, and what makes each shard's maximum and digits: by range, or as a tensor alone."""
    edges = list(zip([0] + cuts, cuts + [logits.shape[1]]))

    def maximum(lo, hi):
        return dce.rowmax(logits[:, lo:hi]) if as_tensors and lo < hi else dce.rowmax(logits, lo, hi)

    def digits(lo, hi, M):
        if as_tensors and lo < hi:                              # test_an_empty_tensor_is_an_empty_shard has the rest
            return dce.denom_digits(logits[:, lo:hi], M, v_start=lo)
        return dce.denom_digits(logits, M, lo, hi)

    return edges, maximum, digits


@PROPERTY
@given(row=any_rows, data=st.data(), dtype=st.sampled_from(FMTS), as_tensors=st.booleans())
def test_any_cut_in_any_order(dce, row, data, dtype, as_tensors):
    """Uneven shards, empty ones and single columns, added in any order: the bytes of the whole."""
    logits = tensor_of([row], dtype)
    V = len(row)
    cuts = sorted(data.draw(st.lists(st.integers(0, V), max_size=6), label="cuts"))
    edges, maximum, digits = shards_of(dce, logits, cuts, as_tensors)
    order = data.draw(st.permutations(edges), label="order")
    target = data.draw(st.integers(0, V - 1), label="target")

    M = torch.stack([maximum(lo, hi) for lo, hi in order]).amax(0)
    values = rows_of(logits)[0]
    assert_bits(M, o.row_max(values), "maximum of maxima")
    parts = [digits(lo, hi, M) for lo, hi in order]
    for (lo, hi), part in zip(order, parts):
        assert part.tolist() == [o.denom_digits(values, o.row_max(values), lo, hi)], (lo, hi)
    total = sum(parts)
    unified = dce.carry_digits(total)
    expected = o.denom_digits(values, o.row_max(values))
    assert unified.tolist() == [expected]                       # canonical: the same for every cut
    final, _ = o.forward(values, target)
    targets = torch.tensor([target])
    for words in (total, unified):
        loss, denom = dce.finalize(words, logits, targets, M, validate=False)
        assert_bits(loss, final.loss, "loss")
        assert_bits(denom, final.denom, "denominator")
    grad = torch.cat([dce.grad_logits(torch.ones(1), logits, targets, total, M, lo, hi) for lo, hi in edges], 1)
    assert_bits(grad, o.gradient(values, target, o.row_max(values), final.state, 1.0, dtype=dtype), "gradient")


@PROPERTY
@given(row=finite_rows, data=st.data(), dtype=st.sampled_from(FMTS))
def test_permuted_vocabulary(dce, row, data, dtype):
    V = len(row)
    order = data.draw(st.permutations(range(V)), label="order")
    target = data.draw(st.integers(0, V - 1), label="target")
    logits = tensor_of([row], dtype)
    moved = logits[:, order]
    results = []
    for x, t in ((logits, target), (moved, order.index(target))):
        leaf = x.clone().requires_grad_()
        out = dce.cross_entropy(leaf, torch.tensor([t]))
        out.backward()
        results.append((out, *dce.forward(x, torch.tensor([t])), leaf.grad))
    for a, b in zip(results[0][:-1], results[1][:-1]):
        assert_same(a, b)
    assert_same(results[0][-1][:, order], results[1][-1])


@PROPERTY
@given(rows=st.integers(1, 9).flatmap(lambda V: st.lists(st.lists(st.one_of(single, st.just(NAN)), min_size=V, max_size=V),
                                                         min_size=1, max_size=6)),
       data=st.data(), dtype=st.sampled_from(FMTS), reduction=st.sampled_from(["none", "sum", "mean"]))
def test_any_batch(dce, rows, data, dtype, reduction):
    V = len(rows[0])
    targets = data.draw(st.lists(st.one_of(st.integers(0, V - 1), st.just(IGNORE)), min_size=len(rows), max_size=len(rows)))
    g = data.draw(st.lists(st.floats(width=32), min_size=len(rows), max_size=len(rows)))
    whole(dce, tensor_of(rows, dtype), torch.tensor(targets), g if reduction == "none" else g[0], reduction, dtype=dtype)


@pytest.mark.parametrize("dtype", FMTS)
def test_an_empty_tensor_is_an_empty_shard(dce, dtype):
    """A rank that owns no columns holds [N, 0]: the maximum of nothing and words that are all zeros."""
    logits = torch.empty(3, 0, dtype=DTYPES[dtype])
    M = torch.tensor([1.0, NAN, -INF])
    assert_bits(dce.rowmax(logits), [-INF] * 3)
    assert dce.denom_digits(logits, M, v_start=17).tolist() == [[0] * 8] * 3


def test_many_one_column_shards(dce):
    """300 shards of one column: digits well past 32 bits before the one carry."""
    row = normal(300, 11, 2.0)
    logits = tensor_of([row], "fp32")
    M = dce.rowmax(logits)
    total = sum(dce.denom_digits(logits, M, v, v + 1) for v in range(300))
    assert total.abs().max() > 1 << 33                          # the point of the test: these are carry-save
    assert dce.carry_digits(total).tolist() == [o.denom_digits(rows_of(logits)[0], M.item())]


# ---------------------------------------------------------------------------------------------------------------------
# Digits


def test_digits_are_the_exact_sum(dce):
    """Not by the oracle's sum: by hand, from the terms alone, as integers."""
    logits = tensor_of([normal(500, 12, 25.0)], "fp32")
    M = dce.rowmax(logits)
    P, n = dce._ops.ops.term(logits)
    n_M = dce._ops.ops.term(M)[1].item()
    low = 32 * (n_M // 32 - 4)
    total = sum(p << (e - low) for p, e in zip(P[0].tolist(), n[0].tolist()) if e >= low)
    words = dce.denom_digits(logits, M)[0].tolist()
    assert sum(w << 32 * i for i, w in enumerate(words[:6])) == total
    assert all(0 <= w < 1 << 32 for w in words[:5])


def test_wrong_maxima_still_give_the_digits_of_the_specification(dce):
    """A maximum that is too low makes faults, one too high another block: exact words, whatever they are worth."""
    row = normal(70, 13, 10.0) + [-INF, NAN]
    for dtype in FMTS:
        logits = tensor_of([row], dtype)
        values = rows_of(logits)[0]
        for M in (0.0, -0.0, -5.0, 5.0, 100.0, 2.0 ** 20, -2.0 ** 20, 3e38, INF, -INF, NAN, SUB, -SUB):
            M = o.f32(M)
            words = dce.denom_digits(logits, torch.tensor([M]), 3, 72, v_start=1000)
            assert words.tolist() == [o.denom_digits(values, M, 3, 72, 1000)], (dtype, M)


def test_v_start(dce):
    """Columns are global: the top of the range that V allows, too."""
    logits = tensor_of([normal(5, 1)], "fp32")
    M = dce.rowmax(logits)
    for start in (0, 1, 12345, 2 ** 31 - 6):
        assert dce.denom_digits(logits, M, v_start=start).tolist() == \
            [o.denom_digits(rows_of(logits)[0], M.item(), v_start=start)]


@PROPERTY
@given(st.lists(st.tuples(*[st.integers(-2 ** 62, 2 ** 62)] * 5, st.integers(-2 ** 61, 2 ** 61),
                          *[st.integers(-2 ** 62, 2 ** 62)] * 2), min_size=1, max_size=5))
def test_carry(dce, words):
    """Any words, negative ones too, as far as int64 can hold the result: Python's floor and remainder."""
    got = dce.carry_digits(torch.tensor(words, dtype=torch.int64))
    assert got.tolist() == [o.carry(w) for w in words]
    assert dce.carry_digits(got).tolist() == got.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Exact reductions

any_loss = st.one_of(st.floats(width=32), st.floats(0, 20, width=32), st.sampled_from([0.0, -0.0, SUB, -SUB]))


@PROPERTY
@given(st.lists(st.tuples(any_loss, st.sampled_from([0, 5, IGNORE])), max_size=40), st.data())
def test_loss_digits_and_reductions(dce, pairs, data):
    losses, targets = [p[0] for p in pairs], [p[1] for p in pairs]
    loss, target = torch.tensor(losses, dtype=torch.float32), torch.tensor(targets, dtype=torch.int64)
    words = dce.loss_digits(loss, target)
    expected = o.loss_words(losses, targets)
    assert words.dtype == torch.int64 and words.tolist() == expected
    for reduction in ("sum", "mean"):
        assert_bits(dce.reduce_digits(words, reduction), o.reduce(expected, reduction), reduction)
    # linear in the rows: any cut, any order
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=4)))
    parts = [dce.loss_digits(loss[a:b], target[a:b]) for a, b in zip([0] + cuts, cuts + [len(pairs)])]
    assert sum(data.draw(st.permutations(parts))).tolist() == expected


def test_mixes_of_nan_and_infinities(dce):
    for mix in ([NAN], [INF], [-INF], [INF, -INF], [NAN, INF], [NAN, -INF], [INF, INF, 1.0], [-INF, 3.0], []):
        losses = mix + [1.0, 2.5]
        words = dce.loss_digits(torch.tensor(losses), torch.zeros(len(losses), dtype=torch.int64))
        expected = o.loss_words(losses, [0] * len(losses))
        assert words.tolist() == expected
        for reduction in ("sum", "mean"):
            assert_bits(dce.reduce_digits(words, reduction), o.reduce(expected, reduction))


def test_reductions_round_once(dce):
    """Sums and quotients halfway between two fp32, a bit off it, out of range, cancelling, and far from int64."""
    big, one = 3.4028234663852886e38, 1.0
    tie = [2.0 ** 24, 1.0]                                      # to even: 2^24
    lists = [tie, tie + [SUB], tie + [-SUB], [2.0 ** 24 + 2, 1.0], [-(2.0 ** 24), -1.0], [-(2.0 ** 24), -1.0, -SUB],
             [big, big], [-big, -big], [big, big, -big], [big, -big, SUB], [big, 2.0 ** 103], [big, 2.0 ** 103, -SUB],
             [SUB, SUB, SUB], [SUB, 0.0, 0.0], [SUB, 0.0], [-SUB, 0.0], [3 * SUB, 0.0], [-0.0], [1.0, -1.0],
             [one, one, 0.0], [1e-45, 1e38, -1e38], [0.1] * 10, [1.0 + 2.0 ** -23, 1.0], [2.0 ** -126, -SUB]]
    for losses in lists:
        losses = [o.f32(x) for x in losses]
        words = dce.loss_digits(torch.tensor(losses), torch.zeros(len(losses), dtype=torch.int32))
        for reduction in ("sum", "mean"):
            assert_bits(dce.reduce_digits(words, reduction), o.reduce(o.loss_words(losses, [0] * len(losses)), reduction), losses)


@PROPERTY
@given(st.lists(st.integers(-2 ** 62, 2 ** 62), min_size=9, max_size=9), st.integers(0, 2 ** 30 - 1), st.data())
def test_reduce_any_words(dce, words, count, data):
    """As sums of many batches are: every digit up to 62 bits, of either sign."""
    for i in data.draw(st.sets(st.integers(0, 8))):
        words[i] = data.draw(st.integers(-3, 3))
    words = words + [count, 0, 0]
    for reduction in ("sum", "mean"):
        assert_bits(dce.reduce_digits(torch.tensor(words), reduction), o.reduce(words, reduction), reduction)


def test_many_rows(dce):
    """More rows than a block of threads or a chunk of a CPU loop takes, in uneven micro-batches: the same mean."""
    N, V = 5000, 3
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(N, V, generator=generator) * 5
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = IGNORE
    losses = dce.cross_entropy(logits, targets, "none")
    expected = o.loss_words(losses.tolist(), targets.tolist())
    assert dce.loss_digits(losses, targets).tolist() == expected
    assert_bits(dce.cross_entropy(logits, targets, "mean"), o.reduce(expected, "mean"))
    assert_bits(dce.cross_entropy(logits, targets, "sum"), o.reduce(expected, "sum"))
    total = sum(dce.loss_digits(dce.cross_entropy(logits[a:b], targets[a:b], "none"), targets[a:b])
                for a, b in ((0, 1), (1, 777), (777, 777), (777, 4096), (4096, 5000)))
    assert_bits(dce.reduce_digits(total, "mean"), o.reduce(expected, "mean"))


def test_every_nan_is_canonical(dce):
    """A NaN with a payload and a sign goes in; the canonical one comes out, everywhere."""
    for dtype, patterns_in in (("fp32", [0x7F800001, 0xFFC12345]), ("bf16", [0x7F81, 0xFFC1]), ("fp16", [0x7C01, 0xFE01])):
        for p in patterns_in:
            width = 32 if dtype == "fp32" else 16
            signed = p - (1 << width) if p >> (width - 1) else p
            logits = torch.tensor([[0, signed, 0]], dtype=torch.int32 if width == 32 else torch.int16).view(DTYPES[dtype])
            leaf = logits.clone().requires_grad_()
            loss, rowmax, denom = dce.forward(logits, torch.tensor([0]))
            assert patterns(loss) == patterns(rowmax) == patterns(denom) == [0x7FC00000]
            assert patterns(dce.rowmax(logits)) == [0x7FC00000]
            out = dce.cross_entropy(leaf, torch.tensor([0]))
            assert patterns(out) == [0x7FC00000]
            out.backward()
            assert patterns(leaf.grad) == [o.CANONICAL_NAN[dtype]] * 3
            # a given maximum is canonical only after it has been made so: the tag is that of the canonical NaN
            given = torch.tensor([signed if width == 32 else 0x7F800001], dtype=torch.int32).view(torch.float32)
            assert dce.denom_digits(logits, given).tolist() == [o.denom_digits([0.0, NAN, 0.0], NAN)]
    loss = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert patterns(dce.reduce_digits(dce.loss_digits(loss, torch.tensor([0, 0])))) == [0x7FC00000]


def test_nan_upstream_with_a_payload(dce):
    logits = tensor_of([normal(9, 1)], "fp32")
    for p in (0x7F800001, -0x3EDCBB):                           # signalling; negative with a payload
        leaf = logits.clone().requires_grad_()
        g = torch.tensor([p], dtype=torch.int32).view(torch.float32)
        dce.cross_entropy(leaf, torch.tensor([3]), "none").backward(g)
        assert patterns(leaf.grad) == [0x7FC00000] * 9
