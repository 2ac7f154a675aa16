"""Statistics of a row (SPEC 13): every bit against the oracle, every composition against one call, what they are beside float64."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle as o
from cases import DTYPES, INF, NAN, SUB, assert_bits, assert_same, rows_of, special_rows, tensor_of, window_rows
from test_options import IGNORE, PROPERTY, REDUCTIONS, batch
from test_smoothing import CAP, ERR, MAPPINGS, masked_rows, weight_of

FIELDS = ("lse", "logprob", "entropy", "max_abs", "hit")


def oracle_map(kw):
    return dict(sigma=kw.get("logit_scale", 1.0), kappa=kw.get("softcap"))


def expected_of(rows, targets, U=None, **mapping):
    out = []
    for row, t in zip(rows, targets):
        row = row[:U]
        M = o.row_max(row)
        stats, least = o.stat_words(row, t, M, **mapping)
        out.append(o.row_stats(stats, least, o.denom_digits(row, M, **mapping), row, t, M, **mapping))
    return out


def assert_stats(got, expected, shape=None):
    assert got._fields == FIELDS and type(got).__name__ == "RowStats"
    assert got.hit.dtype == torch.bool and all(x.dtype == torch.float32 and not x.requires_grad for x in got[:4])
    assert all(x.shape == (shape or (len(expected),)) for x in got)
    for name, values, want in zip(FIELDS, got, zip(*expected)):
        if name == "hit":
            assert values.reshape(-1).tolist() == list(want)
        else:
            assert_bits(values, list(want), name)


def stats_of(dce, logits, targets, **kw):
    return dce.cross_entropy(logits, targets, "none", return_stats=True, validate=False, **kw)[1]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("mapping", list(MAPPINGS))
def test_special_rows(dce, dtype, mapping):
    """Ties, masks, shifted rows, infinities, NaN, one column, targets ignored and out of range; one a call."""
    kw = MAPPINGS[mapping]
    for row, t in [*special_rows().values(), *list(window_rows().values())[::5], *masked_rows(dtype)]:
        logits = tensor_of([row], dtype)
        for target in {t, len(row), IGNORE}:
            assert_stats(stats_of(dce, logits, torch.tensor([target]), **kw), expected_of(rows_of(logits), [target], **oracle_map(kw)))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_beside_every_option(dce, dtype, reduction):
    """The same statistics with any reduction and option but a map and valid columns, in the shape of targets, last of what is returned; loss and gradient as without."""
    logits, targets = batch(N=12, V=41, dtype=dtype)
    targets = targets.clamp(max=36)
    x, t = logits.view(3, 4, 41), targets.view(3, 4)
    weight = torch.tensor(weight_of(41))
    for kw in ({}, dict(label_smoothing=0.1, weight=weight, z_loss=0.01), dict(valid_vocab=37), dict(logit_scale=0.5, softcap=8.0, label_smoothing=0.1)):
        expected = expected_of(rows_of(logits), targets.tolist(), kw.get("valid_vocab"), **oracle_map(kw))
        a, b = (x.clone().requires_grad_() for _ in range(2))
        out, z, lse, stats = dce.cross_entropy(a, t, reduction, return_z_loss=True, return_lse=True, return_stats=True, **kw)
        assert_stats(stats, expected, (3, 4))
        assert_same(stats.lse, lse.detach())
        plain = dce.cross_entropy(b, t, reduction, **kw)
        assert_same(out, plain)
        for result in (out, plain):
            result.sum().backward()
        assert_same(a.grad, b.grad)
    loss, stats = dce.cross_entropy(x, t, "none", return_stats=True)
    assert_same(stats.logprob, torch.where(loss == 0, 0.0, -loss))
    assert_same(stats.logprob, dce.logprobs(x, t))
    assert stats_of(dce, x[:0], t[:0]).hit.shape == (0, 4)


@PROPERTY
@given(st.data())
def test_shards(dce, data):
    """Each shard's words are the oracle's, empty ones too, however the shard is named; the sum and the least give the bytes of one call."""
    V = data.draw(st.integers(1, 30))
    any_logit = st.one_of(st.floats(-30, 30, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, SUB, 3.0, 3.0, INF, -INF, 2e6]))
    rows = data.draw(st.lists(st.lists(any_logit, min_size=V, max_size=V), min_size=1, max_size=3))
    kw = MAPPINGS[data.draw(st.sampled_from(list(MAPPINGS)))]
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    targets = [data.draw(st.sampled_from([IGNORE, -1, V, *range(V)])) for _ in rows]
    given_maxima = data.draw(st.booleans())
    logits, t = tensor_of(rows, dtype), torch.tensor(targets)
    rows = rows_of(logits)
    maxima = [data.draw(any_logit) for _ in rows] if given_maxima else [o.row_max(row) for row in rows]
    M = torch.tensor(maxima, dtype=torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, V), max_size=4)))
    parts, leasts, digits = [], [], []
    for lo, hi in zip([0, *cuts], [*cuts, V]):
        words, least = dce.stat_digits(logits, t, M, lo, hi, **kw)
        assert words.dtype == torch.int64 and words.shape == (len(rows), 3) and least.dtype == torch.float32 and least.shape == (len(rows),)
        for row, target, m, got, low in zip(rows, targets, maxima, words.tolist(), least.tolist()):
            expected, expected_least = o.stat_words(row, target, m, lo, hi, **oracle_map(kw))
            assert got == expected
            assert low == expected_least                        # of either zero
        if lo < hi:                                             # the shard as a tensor of its own
            other, other_least = dce.stat_digits(logits[:, lo:hi], t, M, v_start=lo, **kw)
            assert_same(other, words)
            assert_same(other_least, least)
        parts.append(words)
        leasts.append(least)
        digits.append(dce.denom_digits(logits, M, lo, hi, **kw))
    if not given_maxima:
        stats = dce.finalize_stats(sum(parts), torch.stack(leasts).amin(0), sum(digits), logits, t, M, validate=False, **kw)
        assert_stats(stats, expected_of(rows, targets, **oracle_map(kw)))
        for a, b in zip(stats, stats_of(dce, logits, t, **kw)):
            assert_same(a, b)


def test_shards_that_do_not_add_up_are_nan(dce):
    logits, targets = batch(N=4, V=30)
    targets = targets.clamp(min=0)
    M = dce.rowmax(logits)
    (stats, least), digits = dce.stat_digits(logits, targets, M), dce.denom_digits(logits, M, 0, 20)
    wrong = dce.finalize_stats(stats, least, digits, logits, targets, M, validate=False)
    assert all(x.isnan().all() for x in wrong[:4]) and not wrong.hit.any()
    with pytest.raises(ValueError, match="den_digits: row 0 sums 20 columns of 30"):
        dce.finalize_stats(stats, least, digits, logits, targets, M, validate=True)


def test_valid_columns(dce):
    logits, targets = batch(N=8, V=64)
    targets = targets.clamp(max=49)
    short = stats_of(dce, logits[:, :50], targets)
    logits[:, 50:] = NAN
    M = dce.rowmax(logits, 0, 50)
    stats, least = dce.stat_digits(logits, targets, M, 0, 50)
    whole = dce.finalize_stats(stats, least, dce.denom_digits(logits, M, 0, 50), logits, targets, M, valid_vocab=50)
    for a, b, c in zip(short, whole, stats_of(dce, logits, targets, valid_vocab=50)):
        assert_same(a, b)
        assert_same(a, c)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rows_do_not_depend_on_their_batch(dce, dtype):
    logits, targets = batch(dtype=dtype)
    whole = stats_of(dce, logits, targets, softcap=8.0)
    for part in (torch.tensor([3]), torch.tensor([12, 0, 7, 1])):
        for a, b in zip(stats_of(dce, logits[part], targets[part], softcap=8.0), whole):
            assert_same(a, b[part])


@pytest.mark.parametrize("kw", [dict(), dict(logit_scale=0.25), dict(softcap=30.0)], ids=str)
def test_what_they_are(dce, kw):
    """Beside float64. Entropy: ERR and half an ulp of the denominator's logarithm, twice ERR and two roundings of the spread about the maximum, 2^-44 a column; what CAP of a
    logit, or a scale's rounding, changes in it: at most the change times (1 + the range of what is not negligible, log V + 20)."""
    logits, targets = batch(N=16, V=200, scale=6.0)
    logits[1, targets[1]] = 60.0
    logits[2, 5] = logits[2].max()                              # a tie: the first is the greatest
    targets[2] = 5
    sigma, kappa = kw.get("logit_scale", 1.0), kw.get("softcap")
    stats = stats_of(dce, logits, targets, **kw)
    y = sigma * logits.double() if kappa is None else kappa * torch.tanh(sigma * logits.double() / kappa)
    counted = targets != IGNORE
    p = torch.softmax(y, 1)
    entropy = -(p * torch.log_softmax(y, 1)).sum(1)
    unit = CAP if kappa else 0.0 if sigma == 1 else 2.0 ** -24
    logit = unit * y.abs().amax(1)
    bound = ERR + 2.0 ** -24 + entropy * (2 * ERR + 2.0 ** -23 + 2.0 ** -24) + 200 * 2.0 ** -44 + logit * (1 + torch.tensor(200.0).log() + 20)
    assert ((stats.entropy - entropy).abs() <= bound)[counted].all()
    assert ((stats.max_abs - y.abs().amax(1)).abs() <= logit)[counted].all()
    assert torch.equal(stats.hit[counted], (logits.argmax(1) == targets)[counted])
    lse = torch.logsumexp(y, 1)
    assert ((stats.lse - lse).abs() <= logit + ERR + lse.abs() * 2.0 ** -24)[counted].all()
    for values in stats:
        assert not values[~counted].any()


X, T = torch.randn(4, 7), torch.tensor([0, 1, 2, 3])


def test_wrong_arguments(dce):
    M = dce.rowmax(X)
    digits, (words, least) = dce.denom_digits(X, M), dce.stat_digits(X, T, M)
    for bad in (1, "yes", None):
        with pytest.raises(TypeError, match=f"^return_stats: .*{bad}"):
            dce.cross_entropy(X, T, return_stats=bad)
    for bad, error, got in ((words[:, :1], ValueError, r"\(4, 1\)"), (words[:3], ValueError, r"\(3, 3\)"), (words.float(), TypeError, "float32"), (None, TypeError, "NoneType")):
        with pytest.raises(error, match="^stat_digits: .*" + got):
            dce.finalize_stats(bad, least, digits, X, T, M)
    for bad, error, got in ((least[:3], ValueError, r"\(3,\)"), (least.double(), TypeError, "float64"), (None, TypeError, "NoneType")):
        with pytest.raises(error, match="^least: .*" + got):
            dce.finalize_stats(words, bad, digits, X, T, M)
    with pytest.raises(ValueError, match=r"^den_digits: .*\(4, 7\)"):
        dce.finalize_stats(words, least, digits[:, :7], X, T, M)
    with pytest.raises(ValueError, match="^valid_vocab: expected 1 to 7, got 8"):
        dce.finalize_stats(words, least, digits, X, T, M, valid_vocab=8)
    with pytest.raises(ValueError, match=r"^targets: .*\(3,\)"):
        dce.stat_digits(X, T[:3], M)
    with pytest.raises(ValueError, match=r"^global_rowmax: .*\(3,\)"):
        dce.stat_digits(X, T, M[:3])
    with pytest.raises(ValueError, match="^targets: row 3 has 7"):
        dce.cross_entropy(X, torch.tensor([0, 1, 2, 7]), return_stats=True)


def test_statistics_of_shards_that_do_not_add_up(dce):
    M, digits = dce.rowmax(X), dce.denom_digits(X, dce.rowmax(X))
    good, least = dce.stat_digits(X, T, M)
    for wrong in (dce.stat_digits(X, T, M, 0, 3)[0], good + good, dce.stat_digits(X, T, M + 1)[0], dce.stat_digits(X, T, M, softcap=6.0)[0]):
        stats = dce.finalize_stats(wrong, least, digits, X, T, M, validate=False)
        counted = T != IGNORE
        assert stats.entropy.isnan()[counted].all() and stats.max_abs.isnan()[counted].all() and not stats.hit.any()
        with pytest.raises(ValueError, match="^stat_digits: row 0: the shards do not cover"):
            dce.finalize_stats(wrong, least, digits, X, T, M, validate=True)
