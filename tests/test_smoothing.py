"""Label smoothing, a scale and a cap: every bit against the oracle, every composition against one call, and torch's own functions in float64 beside them."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import oracle as o
from cases import DTYPES, INF, NAN, SUB, assert_bits, assert_same, normal, patterns, rows_of, special_rows, tensor_of, window_rows
from test_options import IGNORE, PROPERTY, REDUCTIONS, batch, compare

f32 = o.f32
# SPEC 12 and 9: of a term, and of a capped logit (exhaustive_map.cpp), both relative.
ERR, CAP = 2.0 ** -22.95, 2.0 ** -22.18 + 3 * 2.0 ** -24
MAPPINGS = {"plain": {}, "scale": dict(logit_scale=f32(0.35)), "cap": dict(softcap=30.0), "both": dict(logit_scale=f32(1.7), softcap=5.0)}
LOWEST = {"fp32": torch.finfo(torch.float32).min, "bf16": torch.finfo(torch.bfloat16).min, "fp16": torch.finfo(torch.float16).min}


def weight_of(V):
    """Of both signs and zeros, as a list."""
    return [f32(1.5 - 0.25 * (i * 5 % 9)) for i in range(V)]


# ---------------------------------------------------------------------------------------------------------------------
# Every bit, against the oracle


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("mapping", list(MAPPINGS))
def test_a_batch_with_everything(dce, dtype, reduction, mapping):
    N, V = 5, 41
    logits, targets = batch(N, V, dtype)
    targets = targets.clamp(max=36).tolist()
    g = [f32(0.7 * (i - 2)) for i in range(N)] if reduction == "none" else [f32(0.7)]
    g_lse = [f32(0.1 * i - 0.3) for i in range(N)]
    items = 29 if reduction == "mean" else None
    for label_smoothing, more in itertools.product((0.0, 0.1, 1.0), ({}, dict(weight=weight_of(V)), dict(z_loss=0.37, weight=weight_of(V), valid_vocab=37, num_items=items, g_lse=g_lse))):
        compare(dce, logits, targets, reduction, g, label_smoothing=label_smoothing, **more, **MAPPINGS[mapping])


def masked_rows(dtype):
    """-inf and finfo.min masks, ties of the maximum, rows that a scale overflows or that are all one value."""
    low = LOWEST[dtype]
    return [
        ([1.0, -INF, 2.0, -INF, 0.5], 0), ([1.0, -INF, 2.0, -INF, 0.5], 1), ([1.0, low, 2.0, low, 0.5], 2), ([1.0, low, 2.0, low, 0.5], 3), ([low] * 4, 1),
        ([2.0, 2.0, -1.0, 2.0], 1), ([-0.0, 0.0, -3.0], 1), ([0.3], 0), ([-INF], 0), ([low], 0), ([-low, 1.0], 1), ([-low, -low], 0), ([1.0, 2.0], IGNORE), ([1.0, 2.0], 2),
        ([1.0, 2.0], -1), ([2.0 ** 15, 2.0 ** 15 - 16, 1.0, -2.0 ** 15], 1),
    ]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kw", [
    dict(label_smoothing=0.1), dict(label_smoothing=1.0, weight=True), dict(softcap=30.0), dict(logit_scale=f32(0.35)), dict(logit_scale=3.0, label_smoothing=0.3),
    dict(softcap=f32(4e6), label_smoothing=0.1, weight=True, z_loss=0.01),                     # wide enough that capped rows are shifted
    dict(softcap=f32(0.01), logit_scale=f32(1e-3), label_smoothing=0.1),
], ids=lambda kw: ", ".join(kw))
def test_special_rows(dce, dtype, kw):
    """Rows of every kind: shifted, dropped targets, infinities, NaN, masks; one a call."""
    for i, (row, t) in enumerate([*special_rows().values(), *list(window_rows().values())[::3], *masked_rows(dtype)]):
        given_kw = {**kw, "weight": weight_of(len(row))} if "weight" in kw else kw
        compare(dce, tensor_of([row], dtype), [t], "none", [f32(0.7)], [f32(-0.3)] if i % 2 else None, **given_kw)


@PROPERTY
@given(st.data())
def test_any_row_and_option(dce, data):
    V = data.draw(st.integers(1, 20))
    any_logit = st.one_of(st.floats(-30, 30, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, SUB, INF, -INF]))
    row = data.draw(st.lists(any_logit, min_size=V, max_size=V))
    U = data.draw(st.integers(1, V))
    t = data.draw(st.sampled_from([IGNORE, *range(V), V]))
    weight = data.draw(st.one_of(st.none(), st.lists(st.one_of(st.floats(width=32), st.floats(0, 2, width=32), st.just(0.0)), min_size=V, max_size=V)))
    epsilon = data.draw(st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(1e-12, 1)))
    # 2 sigma / kappa and 1 / kappa stay in the range of fp32: SPEC 12 says nothing of those that do not
    sigma = data.draw(st.one_of(st.just(1.0), st.floats(2.0 ** -20, 2.0 ** 20, width=32)))
    kappa = data.draw(st.one_of(st.none(), st.floats(2.0 ** -20, 2.0 ** 30, width=32)))
    lam = data.draw(st.one_of(st.just(0.0), st.floats(1e-12, 10)))
    g = [data.draw(st.floats(-4, 4, width=32))]
    g_lse = data.draw(st.one_of(st.none(), st.lists(st.floats(width=32), min_size=1, max_size=1)))
    dtype, reduction = data.draw(st.sampled_from(list(DTYPES))), data.draw(st.sampled_from(REDUCTIONS))
    compare(dce, tensor_of([row], dtype), [t], reduction, g, g_lse, lam, weight, U, label_smoothing=epsilon, logit_scale=sigma, softcap=kappa)


# ---------------------------------------------------------------------------------------------------------------------
# Words of shards


@PROPERTY
@given(st.data())
def test_words_of_shards(dce, data):
    """Each shard's words are the oracle's, empty ones too, however the shard is named; their sum gives the bytes of the whole."""
    V = data.draw(st.integers(1, 30))
    any_logit = st.one_of(st.floats(-30, 30, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, INF, -INF, 2e6]))
    rows = data.draw(st.lists(st.lists(any_logit, min_size=V, max_size=V), min_size=1, max_size=3))
    given_maxima = data.draw(st.booleans())                    # of the rows, or any: then columns are faulty
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    mapping = MAPPINGS[data.draw(st.sampled_from(list(MAPPINGS)))]
    oracles = dict(sigma=mapping.get("logit_scale", 1.0), kappa=mapping.get("softcap"))
    weight = data.draw(st.one_of(st.none(), st.just(weight_of(V))))
    w = None if weight is None else torch.tensor(weight)
    logits = tensor_of(rows, dtype)
    rows = rows_of(logits)
    maxima = [data.draw(any_logit) for _ in rows] if given_maxima else [o.row_max(row) for row in rows]
    M = torch.tensor(maxima, dtype=torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, V), max_size=4)))
    for lo, hi in zip([0, *cuts], [*cuts, V]):
        expected = [o.logit_words(row, m, lo, hi, 0, weight, **oracles) for row, m in zip(rows, maxima)]
        words = dce.logit_digits(logits, M, lo, hi, weight=w, **mapping)
        assert words.dtype == torch.int64 and words.tolist() == expected
        if lo < hi:                                             # the shard as a tensor of its own
            assert dce.logit_digits(logits[:, lo:hi], M, v_start=lo, weight=w, **mapping).tolist() == expected
        assert dce.denom_digits(logits, M, lo, hi, **mapping).tolist() == [o.denom_digits(row, m, lo, hi, **oracles) for row, m in zip(rows, maxima)]


@pytest.mark.parametrize("mapping", list(MAPPINGS))
def test_shards_of_special_rows(dce, mapping):
    """finalize and grad_logits from shards, uneven and empty, give the bytes of one call."""
    kw = MAPPINGS[mapping]
    for dtype in DTYPES:
        for row, t in [*special_rows().values(), *masked_rows(dtype)]:
            logits, targets, V = tensor_of([row], dtype), torch.tensor([t]), len(row)
            for weight in (None, torch.tensor(weight_of(V))):
                leaf = logits.clone().requires_grad_()
                expected = dce.cross_entropy(leaf, targets, "none", label_smoothing=0.1, weight=weight, validate=False, **kw)
                expected.backward(torch.tensor([0.7]))
                cuts = [0, V // 5, V // 5, V - V // 3, V]
                shards = list(zip(cuts, cuts[1:]))
                M = torch.stack([dce.rowmax(logits, a, b) for a, b in shards]).amax(0)
                digits = sum(dce.denom_digits(logits, M, a, b, **kw) for a, b in shards)
                words = sum(dce.logit_digits(logits, M, a, b, weight=weight, **kw) for a, b in reversed(shards))
                loss = dce.finalize(digits, logits, targets, M, label_smoothing=0.1, logit_digits=words, weight=weight, validate=False, **kw)[0]
                assert_same(loss, expected.detach())
                parts = [dce.grad_logits(torch.tensor([0.7]), logits, targets, digits, M, a, b, label_smoothing=0.1, weight=weight, validate=False, **kw) for a, b in shards]
                assert_same(torch.cat(parts, 1), leaf.grad)


def test_many_shards_add_up(dce):
    """Carry-save: a shard a column, every one of them with a mark."""
    V = 1000
    logits = tensor_of([normal(V, 3)], "fp32")
    logits[0, 1:] = -INF
    M, t = dce.rowmax(logits), torch.tensor([0])
    words = sum(dce.logit_digits(logits, M, v, v + 1) for v in range(V))
    digits = sum(dce.denom_digits(logits, M, v, v + 1) for v in range(V))
    assert dce.finalize(digits, logits, t, M, label_smoothing=0.1, logit_digits=words)[0].item() == INF
    logits[0, 1:] = torch.tensor(normal(V - 1, 4)).float() - 1000.0
    M = dce.rowmax(logits)
    words = sum(dce.logit_digits(logits, M, v, v + 1) for v in range(V))
    digits = sum(dce.denom_digits(logits, M, v, v + 1) for v in range(V))
    assert_same(dce.finalize(digits, logits, t, M, label_smoothing=0.1, logit_digits=words)[0], dce.cross_entropy(logits, t, "none", label_smoothing=0.1))


# ---------------------------------------------------------------------------------------------------------------------
# What asks for nothing changes nothing; what is masked stays so


def test_options_that_ask_for_nothing_are_the_plain_loss(dce):
    for dtype, reduction in itertools.product(DTYPES, REDUCTIONS):
        logits, targets = batch(dtype=dtype)
        plain, leaf = (logits.clone().requires_grad_() for _ in range(2))
        expected = dce.cross_entropy(plain, targets, reduction)
        out = dce.cross_entropy(leaf, targets, reduction, label_smoothing=0.0, logit_scale=1.0, softcap=None)
        expected.sum().backward()
        out.sum().backward()
        assert_same(out, expected)
        assert_same(leaf.grad, plain.grad)
        for kw in (dict(label_smoothing=0), dict(logit_scale=1), dict(softcap=30)):             # ints are numbers
            assert dce.cross_entropy(logits, targets, reduction, **kw).dtype == torch.float32


def test_scale_and_cap_are_fp32(dce):
    """A Python float is rounded to fp32 before anything is computed from it; a scale alone is a multiplication in fp32."""
    logits, targets = batch(V=23)
    for kw, rounded in ((dict(logit_scale=0.3), dict(logit_scale=f32(0.3))), (dict(softcap=0.7), dict(softcap=f32(0.7))), (dict(logit_scale=0.1, softcap=3.3), dict(logit_scale=f32(0.1), softcap=f32(3.3)))):
        a, b = (logits.clone().requires_grad_() for _ in range(2))
        for leaf, options in ((a, kw), (b, rounded)):
            dce.cross_entropy(leaf, targets, **options).backward()
        assert_same(a.grad, b.grad)
        assert_same(dce.cross_entropy(a, targets, **kw), dce.cross_entropy(b, targets, **rounded))
    assert_same(dce.cross_entropy(logits, targets, "none", logit_scale=0.3), dce.cross_entropy(logits * torch.tensor(0.3), targets, "none"))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_masked_columns_stay_masked(dce, dtype):
    """-inf under a cap: no probability and no gradient, as if the columns were not there. (kappa * tanh(-inf) would be -kappa.)"""
    logits, targets = batch(N=13, V=64, dtype=dtype)
    logits[:, 40:] = -INF
    targets = targets.clamp(max=39)
    for kw in (dict(softcap=5.0), dict(softcap=5.0, logit_scale=0.5), dict(logit_scale=0.5)):
        a, b = logits.clone().requires_grad_(), logits[:, :40].clone().requires_grad_()
        out, short = (dce.cross_entropy(x, targets, "none", **kw) for x in (a, b))
        out.sum().backward()
        short.sum().backward()
        assert_same(out, short)
        assert_same(a.grad[:, :40].contiguous(), b.grad)
        assert set(patterns(a.grad[:, 40:].contiguous())) == {0}
        assert dce.cross_entropy(logits[:1], torch.tensor([50]), "none", **kw).item() == INF


def test_rows_do_not_depend_on_their_batch(dce):
    logits, targets = batch(dtype="bf16")
    kw = dict(label_smoothing=0.1, weight=torch.tensor(weight_of(101)), logit_scale=0.5, softcap=8.0)
    leaf = logits.clone().requires_grad_()
    whole = dce.cross_entropy(leaf, targets, "none", **kw)
    whole.sum().backward()
    for part in (torch.tensor([3]), torch.tensor([12, 0, 7, 1])):
        some = logits[part].clone().requires_grad_()
        out = dce.cross_entropy(some, targets[part], "none", **kw)
        out.sum().backward()
        assert_same(out, whole[part])
        assert_same(some.grad, leaf.grad[part])


# ---------------------------------------------------------------------------------------------------------------------
# Beside torch: one grid


GRID = list(itertools.product(REDUCTIONS, ("none ignored", "some ignored", "all ignored"), (0.0, 0.1, 1.0), (False, True), ("fp32", "bf16")))


def torch_of(y, targets, reduction, weight=None, label_smoothing=0.0):
    return F.cross_entropy(y, targets, None if weight is None else weight.double(), reduction=reduction, ignore_index=IGNORE, label_smoothing=label_smoothing)


@pytest.mark.parametrize("reduction, ignored, label_smoothing, weighted, dtype", GRID)
def test_equals_torch(dce, reduction, ignored, label_smoothing, weighted, dtype):
    """Loss: SPEC 9's errors stay below 2^-22 of a sum of positive numbers, but for a log-sum-exp's own ERR.
    Gradient: each of the numbers that a column is the difference of to 2^-21 (two terms' errors and three roundings), then one rounding to the dtype."""
    N, V = 16, 23
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(N, V, generator=generator) * 3).to(DTYPES[dtype])
    targets = torch.randint(0, V, (N,), generator=generator)
    if ignored != "none ignored":
        targets[:: 4 if ignored == "some ignored" else 1] = IGNORE
    weight = torch.rand(V, generator=generator) + 0.2 if weighted else None
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    out = dce.cross_entropy(ours, targets, reduction, weight=weight, label_smoothing=label_smoothing)
    expected = torch_of(theirs, targets, reduction, weight, label_smoothing)
    out.sum().backward()
    expected.sum().backward()
    assert out.shape == expected.shape and torch.equal(out.isnan(), expected.isnan())
    counted = targets != IGNORE
    largest = 1.2 if weighted else 1.0
    count = counted.sum() if reduction == "sum" else 1
    assert (expected.isnan() | ((out - expected).abs() <= expected.abs() * 2.0 ** -22 + largest * count * ERR)).all()
    assert set(patterns(ours.grad[~counted])) <= {0}
    w = torch.ones(V).double() if weight is None else weight.double()
    at_target = w[targets.clamp(min=0)]
    G = 1 / (at_target[counted].sum() if weighted else counted.sum()) if reduction == "mean" else 1.0
    softmax = torch.softmax(logits.double(), 1)
    parts = softmax * ((1 - label_smoothing) * at_target + label_smoothing * w.mean())[:, None] + label_smoothing * w / V
    parts.scatter_add_(1, targets.clamp(min=0)[:, None], (1 - label_smoothing) * at_target[:, None])
    wanted, rounding = theirs.grad[counted], {"fp32": 0.0, "bf16": 2.0 ** -8}[dtype]
    bound = (parts[counted] * G * 2.0 ** -21) * (1 + rounding) + rounding * wanted.abs() + 2.0 ** -133
    assert ((ours.grad[counted].double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kw", [dict(softcap=30.0), dict(softcap=4.0, logit_scale=0.5), dict(logit_scale=0.25), dict(softcap=20.0, label_smoothing=0.1, z_loss=0.01)], ids=str)
def test_map_equals_torch(dce, reduction, kw):
    """Beside kappa * tanh(sigma x / kappa) and its autograd in float64. A logit is CAP of its size off, loss and lse as much; its slope 2^-21."""
    logits, targets = batch(N=16, V=33, scale=8.0)
    counted = targets != IGNORE
    sigma, kappa = kw.get("logit_scale", 1.0), kw.get("softcap")
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    out, lse = dce.cross_entropy(ours, targets, reduction, return_lse=True, **kw)
    y = sigma * theirs if kappa is None else kappa * torch.tanh(sigma * theirs / kappa)
    true_lse = torch.logsumexp(y, 1) * counted
    z = kw.get("z_loss", 0.0) * true_lse ** 2
    expected = torch_of(y, targets, reduction, None, kw.get("label_smoothing", 0.0)) + (z if reduction == "none" else z.sum() if reduction == "sum" else z.sum() / counted.sum())
    (out.sum() + (lse * 0.3).sum()).backward()
    (expected.sum() + (true_lse * 0.3).sum()).backward()
    logit = CAP * y.abs().max().item()                          # how far one logit of the softmax is off
    count = counted.sum().item() if reduction == "sum" else 1
    stretch = 1 + 2 * kw.get("z_loss", 0.0) * true_lse.abs().max().item()
    assert ((out - expected).abs() <= count * stretch * (2 * logit + ERR) + expected.abs() * 2.0 ** -23).all()
    assert ((lse - true_lse).abs() <= logit + ERR + true_lse.abs() * 2.0 ** -24).all()
    size = sigma * (stretch + 1.3)
    assert ((ours.grad - theirs.grad).abs() <= size * (2 * logit + 2 * ERR + 2.0 ** -21 + 2.0 ** -22)).all()
    assert set(patterns(ours.grad[~counted])) == {0}


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


X, T = torch.randn(4, 7), torch.tensor([0, 1, 2, 3])
WRONG_MAPS = [
    (dict(logit_scale=0.0), ValueError, r"logit_scale: .*\b0"),
    (dict(logit_scale=-1.0), ValueError, "logit_scale: .*-1"),
    (dict(logit_scale=INF), ValueError, "logit_scale: .*inf"),
    (dict(logit_scale=NAN), ValueError, "logit_scale: .*nan"),
    (dict(logit_scale=1e39), ValueError, r"logit_scale: .*1e\+39"),                            # infinite as an fp32
    (dict(logit_scale=1e-46), ValueError, "logit_scale: .*1e-46"),                             # 0 as one
    (dict(logit_scale=True), TypeError, "logit_scale: .*bool"),
    (dict(logit_scale="1"), TypeError, "logit_scale: .*str"),
    (dict(logit_scale=None), TypeError, "logit_scale: .*NoneType"),
    (dict(logit_scale=torch.tensor(1.0)), TypeError, "logit_scale: .*Tensor"),
    (dict(softcap=0.0), ValueError, r"softcap: .*\b0"),
    (dict(softcap=-30.0), ValueError, "softcap: .*-30"),
    (dict(softcap=INF), ValueError, "softcap: .*inf"),
    (dict(softcap=NAN), ValueError, "softcap: .*nan"),
    (dict(softcap=1e39), ValueError, r"softcap: .*1e\+39"),
    (dict(softcap=False), TypeError, "softcap: .*bool"),
    (dict(softcap="30"), TypeError, "softcap: .*str"),
]
WRONG_SMOOTHING = [
    (dict(label_smoothing=-0.1), ValueError, "label_smoothing: .*-0.1"),
    (dict(label_smoothing=1.5), ValueError, "label_smoothing: .*1.5"),
    (dict(label_smoothing=NAN), ValueError, "label_smoothing: .*nan"),
    (dict(label_smoothing=INF), ValueError, "label_smoothing: .*inf"),
    (dict(label_smoothing=True), TypeError, "label_smoothing: .*bool"),
    (dict(label_smoothing="0.1"), TypeError, "label_smoothing: .*str"),
    (dict(label_smoothing=None), TypeError, "label_smoothing: .*NoneType"),
    (dict(label_smoothing=torch.tensor(0.1)), TypeError, "label_smoothing: .*Tensor"),
]


@pytest.mark.parametrize("kw, error, message", WRONG_MAPS + WRONG_SMOOTHING)
def test_wrong_options(dce, kw, error, message):
    M = torch.zeros(4)
    digits, words = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    calls = [
        lambda: dce.cross_entropy(X, T, **kw),
        lambda: dce.finalize(digits, X, T, M, logit_digits=words, **kw),
        lambda: dce.grad_logits(torch.tensor(1.0), X, T, digits, M, **kw),
    ]
    if "label_smoothing" not in kw:
        calls += [lambda: dce.denom_digits(X, M, **kw), lambda: dce.logit_digits(X, M, **kw), lambda: dce.stat_digits(X, T, M, **kw)]
        calls += [lambda: dce.finalize_stats(torch.zeros(4, 2, dtype=torch.int64), M, digits, X, T, M, **kw)]
    for call in calls:
        with pytest.raises(error, match="^" + message):
            call()


def test_wrong_logit_digits(dce):
    M = dce.rowmax(X)
    digits, words = dce.denom_digits(X, M), dce.logit_digits(X, M)
    finalize = lambda **kw: dce.finalize(digits, X, T, M, **kw)
    with pytest.raises((TypeError, ValueError), match="^logit_digits: .*None"):
        finalize(label_smoothing=0.1)
    for bad, error, got in (
        (words[:, :3], ValueError, r"\(4, 3\)"), (words[:3], ValueError, r"\(3, 5\)"), (words[0], ValueError, r"\(5,\)"), (words.float(), TypeError, "float32"),
        (words.int(), TypeError, "int32"), (words.tolist(), TypeError, "list"),
    ):
        with pytest.raises(error, match="^logit_digits: .*" + got):
            finalize(label_smoothing=0.1, logit_digits=bad)
    for bad, error, got in ((torch.ones(4).tolist(), TypeError, "list"), (torch.ones(3), ValueError, r"\(3,\)"), (torch.ones(4).double(), TypeError, "float64")):
        with pytest.raises(error, match="^global_rowmax: .*" + got):
            dce.logit_digits(X, bad)
    with pytest.raises(ValueError, match=r"^v_hi: .*8|^v_lo.*8"):
        dce.logit_digits(X, M, 0, 8)
    with pytest.raises(TypeError, match="^weight: .*list"):
        dce.logit_digits(X, M, weight=[1.0] * 7)
    with pytest.raises(TypeError, match="^weight: .*float64"):
        dce.logit_digits(X, M, weight=torch.ones(7).double())


@pytest.mark.parametrize("kw", [dict(), dict(label_smoothing=0.1, softcap=30.0)])
def test_targets_out_of_range(dce, kw):
    for bad in (7, -1):
        t = torch.tensor([0, 1, 2, bad])
        with pytest.raises(ValueError, match=f"targets: row 3 has {bad}"):
            dce.cross_entropy(X, t, **kw)
        leaf = X.clone().requires_grad_()
        out = dce.cross_entropy(leaf, t, "none", validate=False, **kw)
        out.sum().backward()
        assert out.isnan().tolist() == [False] * 3 + [True] and leaf.grad.isnan().all(1).tolist() == [False] * 3 + [True]


@pytest.mark.parametrize("weighted", [False, True])
def test_any_number_of_masked_columns(dce, weighted):
    """More than a word could count one by one."""
    V = 200_000
    logits = torch.full((3, V), -float("inf"))
    logits[0, :7] = 1.0
    logits[1, ::2] = 1.0
    logits[2] = 1.0
    kw = dict(weight=torch.rand(V)) if weighted else {}
    losses = dce.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), "none", label_smoothing=0.1, **kw)
    assert losses[:2].tolist() == [float("inf")] * 2 and losses[2].isfinite()
    M = dce.rowmax(logits)
    cuts = list(zip([0, 3, 3, 150_000], [3, 3, 150_000, V]))
    shards = [dce.logit_digits(logits, M, lo, hi, **kw) for lo, hi in cuts]
    digits = sum(dce.denom_digits(logits, M, lo, hi) for lo, hi in cuts)
    composed, _ = dce.finalize(digits, logits, torch.zeros(3, dtype=torch.int64), M, label_smoothing=0.1, logit_digits=sum(shards), **kw)
    assert dce.digest(composed) == dce.digest(losses)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e9, 5e5])
@pytest.mark.parametrize("weighted", [False, True])
def test_any_number_of_wide_logits(dce, mask, weighted):
    """Logits beyond 2^12, more than a word has room for without a carry: whole, in shards and by the oracle."""
    V = 140_000
    logits = torch.full((1, V), mask)
    logits[0, ::50_000] = 1.0
    kw = dict(weight=torch.linspace(0.5, 1.5, V)) if weighted else {}
    target = torch.tensor([50_000])
    M = dce.rowmax(logits)
    words = dce.logit_digits(logits, M, **kw)
    assert words[0].tolist() == o.logit_words(logits[0].tolist(), M.item(), weight=kw["weight"].tolist() if weighted else None)
    for cuts in ([0, 4_000, V], [0, *range(1000, V, 1000), V]):
        shards = [dce.logit_digits(logits, M, lo, hi, **kw) for lo, hi in zip(cuts, cuts[1:])]
        composed = dce.finalize(dce.denom_digits(logits, M), logits, target, M, label_smoothing=0.1, logit_digits=sum(shards), **kw)[0]
        assert dce.digest(composed) == dce.digest(dce.cross_entropy(logits, target, "none", label_smoothing=0.1, **kw))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5, 1000003.0])
@pytest.mark.parametrize("weight", [0.7, 1 / 3])
def test_weights_with_smoothing_at_any_offset(dce, offset, weight):
    """Equal logits: the mean loss of all classes is weight * ln V, whatever the logits' common offset."""
    for V in (1, 3, 10):
        for epsilon in (0.1, 1.0):
            x, w = torch.full((1, V), offset), torch.full((V,), weight)
            loss = dce.cross_entropy(x, torch.tensor([0]), "sum", weight=w, label_smoothing=epsilon).item()
            assert abs(loss - w[0].item() * math.log(V)) <= 3 * ERR, (V, epsilon)


def test_shards_of_a_sum_of_logits_that_do_not_add_up(dce):
    """Missing, doubled, of another maximum, of another map: NaN, and with validate an error that names the argument."""
    M, digits = dce.rowmax(X), dce.denom_digits(X, dce.rowmax(X), softcap=5.0)
    good = dce.logit_digits(X, M, softcap=5.0)
    finalize = lambda words, **kw: dce.finalize(digits, X, T, M, label_smoothing=0.1, softcap=5.0, logit_digits=words, **kw)[0]
    assert not finalize(good).isnan().any()
    for wrong in (dce.logit_digits(X, M, 0, 3, softcap=5.0), good + good, dce.logit_digits(X, M + 1, softcap=5.0), dce.logit_digits(X, M), dce.logit_digits(X, M, softcap=6.0)):
        assert finalize(wrong, validate=False).isnan()[T != IGNORE].all()
        with pytest.raises(ValueError, match="^logit_digits: row 0: the shards do not cover"):
            finalize(wrong, validate=True)


def test_shards_of_another_map_do_not_add_up(dce):
    M = dce.rowmax(X)
    half = X.shape[1] // 2
    mixed = dce.denom_digits(X, M, 0, half, softcap=5.0) + dce.denom_digits(X, M, half)
    for digits, kw in ((mixed, {}), (mixed, dict(softcap=5.0)), (dce.denom_digits(X, M), dict(softcap=30.0)), (dce.denom_digits(X, M, logit_scale=0.5), {})):
        assert dce.finalize(digits, X, T, M, validate=False, **kw)[0].isnan()[T != IGNORE].all()
        with pytest.raises(ValueError, match="^den_digits: row 0"):
            dce.finalize(digits, X, T, M, validate=True, **kw)


def test_gradients_that_overflow_are_one_nan(dce):
    """An infinite constant of the smoothing times a weight or slope of 0 is a NaN of the processor's own; the row is the specification's throughout."""
    x = torch.zeros(1, 3, requires_grad=True)
    loss = dce.cross_entropy(x, torch.tensor([0]), "sum", weight=torch.tensor([1.0, -1.0, 0.0]), label_smoothing=1.0, logit_scale=8.0)
    loss.backward(torch.tensor(3e38))
    assert x.grad.view(torch.int32).tolist() == [[0x7FC00000] * 3]


@pytest.mark.parametrize("items", [0, -3])
def test_gradient_of_a_mean_over_nothing(dce, items):
    x = torch.randn(4, 50, requires_grad=True)
    dce.cross_entropy(x, torch.zeros(4, dtype=torch.int64), num_items=items).backward()
    assert x.grad.view(torch.int32).unique().tolist() == [0x7FC00000]
