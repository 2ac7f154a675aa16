"""The options: every bit against the oracle, every composition against one call, torch's semantics beside torch's own function."""
import itertools
import warnings

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle as o
from cases import DTYPES, FORMAT, INF, NAN, SUB, assert_bits, assert_same, normal, patterns, rows_of, special_rows, tensor_of, window_rows

IGNORE = -100
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
REDUCTIONS = ["mean", "sum", "none"]


def batch(N=13, V=101, dtype="fp32", seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(N, V, generator=generator) * scale).to(DTYPES[dtype])
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = IGNORE
    return logits, targets


# ---------------------------------------------------------------------------------------------------------------------
# Every bit, against the oracle


def expected_of(rows, targets, dtype, reduction, g, g_lse, lam, weight, U, num_items, epsilon=0.0, **mapping):
    """What section 12 says: (out, z, lse, gradient), all but lse as lists of floats. `mapping` is the oracle's sigma and kappa."""
    U = len(rows[0]) if U is None else U
    results, maxima = [], []
    for row, t in zip(rows, targets):
        M = o.row_max(row[:U])
        maxima.append(M)
        sum_of_logits = o.logit_words(row[:U], M, weight=weight, **mapping) if epsilon else None
        results.append(o.options(o.denom_digits(row[:U], M, **mapping), row, t, M, lam, weight, U, epsilon=epsilon, logits=sum_of_logits, **mapping))
    losses, zs = [r.loss for r in results], [r.z for r in results]
    words, z_words = o.loss_words(losses, targets), o.loss_words(zs, targets)
    by = None
    if reduction == "mean":
        by = "count"
        if num_items is not None:
            words[9] = z_words[9] = num_items
        elif weight is not None:
            by = "weights"
            words, z_words = (o.weighed(w, targets, weight) for w in (words, z_words))
    if reduction == "none":
        out, z = losses, zs
    elif reduction == "sum":
        out, z = [o.reduce(words, "sum")], [o.reduce(z_words, "sum")]
    else:
        out, z = [o.divide(words, by)], [o.divide(z_words, by)]
    grad = []
    for i, (row, t, M, r) in enumerate(zip(rows, targets, maxima, results)):
        G = o.upstream(g[i] if reduction == "none" else g[0], words, by)
        grad += o.gradient_with(row, t, M, r.state, G, None if g_lse is None else g_lse[i], dtype, U, weight=weight, epsilon=epsilon, **mapping)
    return out, z, [r.lse for r in results], grad


def compare(dce, logits, targets, reduction, g, g_lse=None, z_loss=0.0, weight=None, valid_vocab=None, num_items=None, label_smoothing=0.0, logit_scale=1.0, softcap=None):
    leaf = logits.detach().clone().requires_grad_()
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float32)
    t = torch.tensor(targets)
    out, z, lse = dce.cross_entropy(
        leaf, t, reduction, z_loss=z_loss, weight=weights, valid_vocab=valid_vocab, num_items=num_items, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap,
        return_z_loss=True, return_lse=True, validate=False,
    )
    upstream = torch.tensor(g if reduction == "none" else g[0])
    outputs, grads = [out], [upstream]
    if g_lse is not None:
        outputs, grads = [out, lse], [upstream, torch.tensor(g_lse)]
    torch.autograd.backward(outputs, grads)
    expected = expected_of(
        rows_of(logits), targets, FORMAT[logits.dtype], reduction, g, g_lse, z_loss, weight, valid_vocab, num_items, label_smoothing, sigma=logit_scale, kappa=softcap
    )
    for got, want, name in zip((out, z, lse, leaf.grad), expected, ("loss", "z_loss", "lse", "gradient")):
        assert_bits(got, want, name)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lse", [False, True])
def test_a_batch_with_everything(dce, dtype, reduction, lse):
    logits, targets = batch(dtype=dtype)
    targets = targets.clamp(max=96).tolist()
    g = o.f32(0.7)
    weight = [o.f32(0.25 + (i * 37 % 11) / 3) for i in range(101)]
    for z_loss, w, valid, items in itertools.product((0.0, 1e-4, 0.37), (None, weight), (None, 97), (None, 29)):
        if items is None or reduction == "mean":
            upstream = [o.f32(g * (i - 4)) for i in range(13)] if reduction == "none" else [g]
            compare(dce, logits, targets, reduction, upstream, [o.f32(0.1 * i - 0.3) for i in range(13)] if lse else None, z_loss, w, valid, items)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_special_rows(dce, dtype):
    """Rows of every kind: shifted, dropped targets, infinities, NaN; one a call, each with and without a gradient for lse."""
    for row, t in [*special_rows().values(), *window_rows().values()]:
        logits = tensor_of([row], dtype)
        weight = [o.f32(1.5 - 0.25 * i) for i in range(len(row))]  # of both signs and 0
        for lam, w, g_lse in ((0.01, None, None), (0.0, weight, [-1.0]), (3.0, weight, [o.f32(0.3)])):
            compare(dce, logits, [t], "none", [o.f32(0.7)], g_lse, lam, w)


@PROPERTY
@given(st.data())
def test_any_row_and_weight(dce, data):
    V = data.draw(st.integers(1, 20))
    any_logit = st.one_of(st.floats(-30, 30, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, SUB, INF, -INF]))
    row = data.draw(st.lists(any_logit, min_size=V, max_size=V))
    U = data.draw(st.integers(1, V))
    t = data.draw(st.sampled_from([IGNORE, *range(V), V]))
    weight = data.draw(st.one_of(st.none(), st.lists(st.one_of(st.floats(width=32), st.floats(0, 2, width=32)), min_size=V, max_size=V)))
    lam = data.draw(st.one_of(st.just(0.0), st.floats(0, 10), st.floats(0, 1e38)))
    g = [data.draw(st.floats(-4, 4, width=32))]
    g_lse = data.draw(st.one_of(st.none(), st.lists(st.floats(width=32), min_size=1, max_size=1)))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    compare(dce, tensor_of([row], dtype), [t], reduction, g, g_lse, lam, weight, U)


any_float = st.one_of(st.floats(width=32), st.floats(-3, 20, width=32), st.sampled_from([0.0, -0.0, SUB, -SUB, 1.0, -1.0]))


@PROPERTY
@given(st.lists(st.tuples(any_float, st.sampled_from([0, 1, 2, 3, IGNORE])), max_size=20), st.lists(any_float, min_size=3, max_size=3), st.data())
def test_weighted_means_are_exact_quotients(dce, pairs, weight, data):
    """Any losses over any weights, of both signs, subnormal, infinite, NaN; target 3 has no weight."""
    losses, targets = [p[0] for p in pairs], [p[1] for p in pairs]
    loss, t, w = torch.tensor(losses, dtype=torch.float32), torch.tensor(targets, dtype=torch.int64), torch.tensor(weight)
    words = dce.loss_digits(loss, t, weight=w)
    expected = o.weighed(o.loss_words(losses, targets), targets, weight)
    assert words.tolist() == expected
    assert_bits(dce.reduce_digits(words, "mean"), o.divide(expected, "weights"))
    assert_bits(dce.reduce_digits(words, "sum"), o.reduce(expected, "sum"))
    cut = data.draw(st.integers(0, len(pairs)))
    assert (dce.loss_digits(loss[:cut], t[:cut], weight=w) + dce.loss_digits(loss[cut:], t[cut:], weight=w)).tolist() == expected


@PROPERTY
@given(st.lists(st.integers(-2 ** 62, 2 ** 62), min_size=18, max_size=18), st.data())
def test_quotients_of_any_words(dce, words, data):
    """As sums of many batches are: numerator and divisor of any size, so that quotients overflow, underflow, and are subnormal."""
    for half in (0, 9):
        top = data.draw(st.integers(0, 9))
        for i in range(9):
            if i >= top:
                words[half + i] = 0
            elif data.draw(st.booleans()):
                words[half + i] = data.draw(st.integers(-3, 3))
    words = words[:9] + [5, 0, 0] + words[9:] + [0, 0, 0]
    assert_bits(dce.reduce_digits(torch.tensor(words), "mean"), o.divide(words, "weights"))


def test_quotients_at_the_edges(dce):
    """Halfway between two floats and a unit off it, around the smallest subnormal and the largest float."""
    def words(numerator, divisor):
        digits = lambda n: [(n >> 32 * i) & 0xFFFFFFFF for i in range(8)] + [n >> 256]
        return [*digits(numerator), 1, 0, 0, *digits(divisor), 0, 0, 0]

    one = 1 << 149
    for numerator, divisor in itertools.product(
        [0, 1, -1, one, -one, (1 << 24) + 1, ((1 << 24) + 1) * one, ((1 << 25) + 1) * one - 1, 3 * one, one << 100, (one << 127) * 2 - (one << 102), (one << 128) - (one << 103) - 1],
        [1, -1, 2, 3, one, -one, one + 1, 3 * one, one << 100, -(one << 126), (one << 149) - 1],
    ):
        w = words(numerator, divisor)
        assert_bits(dce.reduce_digits(torch.tensor(w), "mean"), o.divide(w, "weights"), f"{numerator} / {divisor}")


@PROPERTY
@given(st.lists(st.tuples(st.floats(0, 30, width=32), st.sampled_from([1, IGNORE])), min_size=1, max_size=30), st.integers(-2, 2 ** 62), st.data())
def test_finalize_mean(dce, pairs, count, data):
    """Equal bytes for any cut of the tokens into micro-batches."""
    loss, t = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=3)))
    parts = [dce.loss_digits(loss[a:b], t[a:b]) for a, b in zip([0, *cuts], [*cuts, len(pairs)])]
    words = o.loss_words(loss.tolist(), t.tolist())
    words[9] = count
    for given_count in (count, torch.tensor(count), torch.tensor([count])):
        assert_bits(dce.finalize_mean(sum(parts), given_count), o.reduce(words, "mean"))


def test_lse_is_as_near_as_stated(dce):
    """SPEC 12's bound, against 200 bits: rows far from 0, rows whose lse is near 0, and shifted ones."""
    mpmath.mp.prec = 200
    eps, worst = 2.0 ** -22.95, 0
    rows = [normal(50, seed, scale) for seed in range(20) for scale in (1e-3, 1.0, 30.0)] + [[-12.0 - i * 1e-4] * 1 + [-0.5 * i] * 3 for i in range(1, 20)]
    rows += [[2e6 + 7 * i, 2e6 - 3.0, 2e6 + 7 * i - 0.25] for i in range(10)] + [[-1.0986, -1.0987, -1.0985], [-30.0, -1e-7]]
    for row in rows:
        logits = tensor_of([row], "fp32")
        _, lse = dce.cross_entropy(logits, torch.tensor([0]), return_lse=True)
        exact = mpmath.log(mpmath.fsum(mpmath.exp(x) for x in rows_of(logits)[0]))
        ulp = abs(torch.nextafter(lse, lse * 2) - lse).item()
        error = abs(mpmath.mpf(lse.item()) - exact)
        assert error <= eps + 2.0 ** -48 * max(1, abs(exact)) + ulp / 2
        worst = max(worst, error / (eps + ulp / 2))
    assert worst > 0.3                                          # the bound is not loose


# ---------------------------------------------------------------------------------------------------------------------
# Composition


CASES = {
    "z_loss": dict(z_loss=1e-3),
    "weight": dict(weight=True),
    "valid": dict(valid_vocab=89),
    "smoothing": dict(label_smoothing=0.1),
    "mapped": dict(logit_scale=0.5, softcap=30.0),
    "all": dict(z_loss=0.02, weight=True, valid_vocab=89, num_items=77),
    "all and mapped": dict(z_loss=0.02, weight=True, valid_vocab=89, num_items=77, label_smoothing=0.1, logit_scale=1.5, softcap=8.0),
    "nothing but lse": dict(return_lse=True),
}


def keywords(case, V=101):
    kw = dict(CASES[case])
    if kw.pop("weight", False):
        kw["weight"] = torch.rand(V, generator=torch.Generator().manual_seed(8)) * 3 - 0.5
    return kw


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shards(dce, dtype, case, reduction):
    """finalize and grad_logits of shards, one of them wholly beyond the valid vocabulary, give the bytes of one call."""
    logits, targets = batch(dtype=dtype)
    targets = targets.clamp(max=88)
    kw = keywords(case)
    if reduction == "none":
        kw.pop("num_items", None)
    kw.pop("return_lse", None)
    leaf = logits.clone().requires_grad_()
    out, z, lse = dce.cross_entropy(leaf, targets, reduction, return_z_loss=True, return_lse=True, **kw)
    g_lse = torch.linspace(-1, 1, 13)
    g = torch.tensor(0.7) if reduction == "mean" else torch.linspace(-1, 2, 13)
    torch.autograd.backward([out, lse], [g, g_lse])

    valid = kw.get("valid_vocab", 101)
    shards = [(0, 1), (1, 50), (50, 50), (50, 95), (95, 101)]
    clipped = [(min(a, valid), min(b, valid)) for a, b in shards]
    maximum = torch.stack([dce.rowmax(logits, a, b) for a, b in clipped]).amax(0)
    mapping = {k: v for k, v in kw.items() if k in ("logit_scale", "softcap")}
    digits = sum(dce.denom_digits(logits, maximum, a, b, **mapping) for a, b in reversed(clipped))
    rows, weight = {k: v for k, v in kw.items() if k != "num_items"}, kw.get("weight")
    smoothing = {"logit_digits": sum(dce.logit_digits(logits, maximum, a, b, weight=weight, **mapping) for a, b in clipped)} if "label_smoothing" in kw else {}
    losses, _, zs, lse2 = dce.finalize(digits, logits, targets, maximum, return_z_loss=True, return_lse=True, **rows, **smoothing)
    assert_same(lse2, lse.detach())
    more = {}
    if reduction == "mean":
        more = {"num_items": kw["num_items"]} if "num_items" in kw else {"sums": dce.loss_digits(losses, targets, weight=weight)}
        mean = dce.finalize_mean(dce.loss_digits(losses, targets), kw["num_items"]) if "num_items" in kw else dce.reduce_digits(more["sums"])
        assert_same(mean, out.detach())
    else:
        assert_same(losses, out.detach())
        assert_same(zs, z)
    grad = torch.cat([dce.grad_logits(g, logits, targets, digits, maximum, a, b, grad_lse=g_lse, **rows, **more) for a, b in shards], 1)
    assert_same(grad, leaf.grad)
    if valid < 101:
        assert set(patterns(leaf.grad[:, valid:])) == {0}


@pytest.mark.parametrize("case", list(CASES))
def test_rows_do_not_depend_on_their_batch(dce, case):
    logits, targets = batch(N=13, dtype="bf16")
    targets, kw = targets.clamp(max=88), keywords(case)
    kw.pop("num_items", None)
    kw["return_lse"] = True
    whole, lse = dce.cross_entropy(logits, targets, "none", **kw)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    for part in (order, order[:1], order[3:7]):
        some, some_lse = dce.cross_entropy(logits[part], targets[part], "none", **kw)
        assert_same(some, whole[part])
        assert_same(some_lse, lse[part])


def test_options_that_ask_for_nothing_are_the_plain_loss(dce):
    """The bytes of the plain loss and gradient, whatever is returned beside it; a gradient of zeros for lse changes none either."""
    for dtype in DTYPES:
        logits, targets = batch(dtype=dtype)
        for reduction in REDUCTIONS:
            plain = logits.clone().requires_grad_()
            expected = dce.cross_entropy(plain, targets, reduction)
            expected.sum().backward()
            for kw in (dict(return_lse=True), dict(return_z_loss=True), dict(weight=torch.ones(101)), dict(valid_vocab=101), dict(z_loss=0.0), dict(z_loss=1e-320, weight=torch.ones(101))):
                leaf = logits.clone().requires_grad_()
                out = dce.cross_entropy(leaf, targets, reduction, **kw)
                out = out[0] if isinstance(out, tuple) else out
                out.sum().backward()
                assert_same(out, expected)
                assert_same(leaf.grad, plain.grad)
        if reduction == "none":
            leaf = logits.clone().requires_grad_()
            out, lse = dce.cross_entropy(leaf, targets, return_lse=True)
            torch.autograd.backward([out, lse], [torch.tensor(1.0), torch.zeros(13)])
            plain = logits.clone().requires_grad_()
            dce.cross_entropy(plain, targets).backward()
            assert_same(leaf.grad, plain.grad)


def test_what_comes_back(dce):
    logits, targets = batch(N=12)
    x, t = logits.view(3, 4, 101).requires_grad_(), targets.view(3, 4)
    for reduction, shape in (("mean", ()), ("sum", ()), ("none", (3, 4))):
        call = lambda **kw: dce.cross_entropy(x, t, reduction, z_loss=0.5, **kw)
        assert call().shape == shape
        loss, z = call(return_z_loss=True)
        loss2, lse = call(return_lse=True)
        everything = call(return_z_loss=True, return_lse=True)
        assert loss.shape == z.shape == shape and lse.shape == (3, 4)
        for a, b in zip(everything, (loss, z, lse)):
            assert_same(a, b)
        assert_same(loss, loss2)
        assert loss.requires_grad and lse.requires_grad and not z.requires_grad
        # the z-loss is what the plain loss lacks
        assert torch.allclose(dce.cross_entropy(x, t, reduction) + z, loss, rtol=1e-6)
    (grad,) = torch.autograd.grad(lse.sum(), x)
    assert_bits_close(grad, torch.where(t[..., None] == IGNORE, 0.0, torch.softmax(x.double(), -1)))
    assert dce.cross_entropy(x[:0], t[:0], "none", return_lse=True)[1].shape == (0, 4)


def assert_bits_close(a, b):
    assert ((a.double() - b).abs() <= b.abs() * 2.0 ** -21 + 2.0 ** -126).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", list(CASES))
def test_inplace_backward(dce, reduction, case):
    logits, targets = batch(dtype="bf16")
    targets, kw = targets.clamp(max=88), keywords(case)
    if reduction != "mean":
        kw.pop("num_items", None)
    kw["return_lse"] = True
    grads = []
    for in_place in (False, True):
        leaf = (logits * 1).requires_grad_()
        x = leaf * 1
        x.register_hook(lambda grad: grads.append((grad.data_ptr() == x.data_ptr(), grad.clone())))
        out, lse = dce.cross_entropy(x, targets, reduction, inplace_backward=in_place, **kw)
        (out.sum() * 0.7 + (lse * torch.linspace(-1, 1, 13)).sum()).backward()
    assert not grads[0][0] and grads[1][0]
    assert_same(grads[0][1], grads[1][1])


def test_every_backward_of_a_kept_graph_has_its_own_upstream(dce):
    logits, targets = batch()
    kw = keywords("all")
    x = logits.requires_grad_()
    loss, lse = dce.cross_entropy(x, targets.clamp(max=88), return_lse=True, **kw)
    for g, h in ((3.0, None), (1.0, None), (1.0, 0.5), (None, 2.0), (1.0, None)):
        def gradient(x, loss, lse):
            pairs = [(a, torch.full_like(a, b)) for a, b in ((loss, g), (lse, h)) if b is not None]
            return torch.autograd.grad([a for a, _ in pairs], x, [b for _, b in pairs], retain_graph=True)[0]

        fresh = x.detach().requires_grad_()
        assert_same(gradient(x, loss, lse), gradient(fresh, *dce.cross_entropy(fresh, targets.clamp(max=88), return_lse=True, **kw)))


def test_valid_columns_are_all_that_is_read(dce):
    """Padding of NaN, infinities and giants changes nothing and gets +0, also where it is most of the row, in every dtype and layout."""
    for dtype in DTYPES:
        logits, targets = batch(V=64, dtype=dtype)
        targets[1] = 63
        wide = torch.full((13, 160), 7.0).to(DTYPES[dtype])
        for padding in (0.0, NAN, INF, -INF, 3e38):
            wide[:, 64:] = padding
            for reduction in REDUCTIONS:
                for view in (lambda z: z, lambda z: z[:, :128], lambda z: z[:, :65]):
                    a, b = (x.clone().requires_grad_() for x in (logits, view(wide).copy_(torch.cat([logits, view(wide)[:, 64:]], 1))))
                    out_a, out_b = dce.cross_entropy(a, targets, reduction), dce.cross_entropy(b, targets, reduction, valid_vocab=64)
                    out_a.sum().backward()
                    out_b.sum().backward()
                    assert_same(out_a, out_b)
                    assert_same(a.grad, b.grad[:, :64].contiguous())
                    assert set(patterns(b.grad[:, 64:].contiguous())) == {0}
    bad = targets.clone()
    bad[2] = 64
    with pytest.raises(ValueError, match="targets: row 2 has 64, expected 0 <= target < 64"):
        dce.cross_entropy(wide, bad, valid_vocab=64)
    assert dce.cross_entropy(wide, bad, "none", valid_vocab=64, validate=False).isnan()[2]


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_logprobs(dce, dtype):
    logits, tokens = batch(dtype=dtype)
    logits[1], logits[1, tokens[1]] = -INF, 0.5                 # certain: the log-probability is 0
    logits[2, tokens[2]] = -INF
    logits[3, 4] = NAN
    leaf = logits.clone().requires_grad_()
    lp = dce.logprobs(leaf, tokens)
    g = torch.linspace(-1, 2, 13)
    lp.backward(g)
    losses = dce.cross_entropy(logits, tokens, "none")
    assert_bits(lp, [0.0 if x == 0 else -x for x in losses.tolist()])
    assert patterns(lp)[0] == patterns(lp)[1] == 0 and lp[2] == -INF and patterns(lp)[3] == 0x7FC00000
    other = logits.clone().requires_grad_()
    dce.cross_entropy(other, tokens, "none").backward(torch.where(losses > 0, -g, -0.0))
    assert_same(leaf.grad, other.grad)
    assert leaf.grad[[*range(3), *range(4, 13)]].isfinite().all() and leaf.grad[3].isnan().all()
    finite = losses.isfinite()
    alone = torch.cat([dce.logprobs(logits[i : i + 1], tokens[i : i + 1]) for i in range(13)])
    assert (torch.exp(lp - alone)[finite] == 1).all()
    assert torch.allclose(lp[finite & (tokens != IGNORE)], torch.log_softmax(logits.float(), 1).gather(1, tokens.clamp(min=0)[:, None])[:, 0][finite & (tokens != IGNORE)], atol=1e-5)
    assert dce.logprobs(logits.view(13, 1, 101), tokens.view(13, 1)).shape == (13, 1)
    assert_same(dce.logprobs(logits, tokens.int(), valid_vocab=101), lp.detach())


# ---------------------------------------------------------------------------------------------------------------------
# Beside torch: one grid through both


GRID = list(itertools.product(REDUCTIONS, (IGNORE, 2, -1), (None, "positive", "mixed", "zeros"), ("fp32", "bf16"), (torch.int64, torch.int32)))


def weights_of(kind, V=23):
    if kind is None:
        return None
    weight = torch.rand(V, generator=torch.Generator().manual_seed(4)) + 0.2
    if kind == "mixed":
        weight[::3] = 0
        weight[1::3] *= -0.1
    return torch.zeros(V) if kind == "zeros" else weight


@pytest.mark.parametrize("reduction, ignore_index, kind, dtype, targets_dtype", GRID)
def test_equals_torch(dce, reduction, ignore_index, kind, dtype, targets_dtype):
    generator = torch.Generator().manual_seed(2)
    for case in ("some ignored", "all ignored", "none ignored", "infinite logits"):
        logits = (torch.randn(16, 23, generator=generator) * 3).to(DTYPES[dtype])
        targets = torch.randint(3, 23, (16,), generator=generator)
        if case == "infinite logits":
            logits[:, :2] = -INF
        if case in ("some ignored", "infinite logits"):
            targets[::4] = ignore_index
        if case == "all ignored":
            targets[:] = ignore_index
        weight = weights_of(kind)
        ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
        out = dce.cross_entropy(ours, targets.to(targets_dtype), reduction, ignore_index=ignore_index, weight=weight)
        expected = F.cross_entropy(theirs, targets, None if weight is None else weight.double(), ignore_index=ignore_index, reduction=reduction)
        out.sum().backward()
        expected.sum().backward()
        assert torch.equal(out.isnan(), expected.isnan()) and out.shape == expected.shape, case
        # relative to the sum of magnitudes: weights of both signs cancel
        counted = targets != ignore_index
        magnitude = expected.detach().abs()
        if reduction != "none" and kind == "mixed":
            each = F.cross_entropy(theirs.detach(), targets, weight.double(), ignore_index=ignore_index, reduction="none").abs().sum()
            magnitude = each / weight.double()[targets[counted]].sum().abs() if reduction == "mean" else each
        assert (expected.isnan() | ((out - expected).abs() <= magnitude * 2.0 ** -22)).all(), case
        assert set(patterns(ours.grad[~counted])) <= {0}
        wanted, unit = theirs.grad[counted], {"fp32": 2.0 ** -21, "bf16": 2.0 ** -8}[dtype]
        assert torch.equal(ours.grad[counted].isnan(), wanted.isnan()), case
        assert (wanted.isnan() | ((ours.grad[counted].double() - wanted).abs() <= unit * wanted.abs() + 2.0 ** -133)).all(), case


def test_errors_where_torch_errors(dce):
    logits, targets = torch.randn(4, 7), torch.tensor([0, 1, 2, 3])
    calls = {
        "shape": dict(weight=torch.ones(6)),
        "more dimensions": dict(weight=torch.ones(1, 7)),
        "dtype": dict(weight=torch.ones(7, dtype=torch.float64)),
        "integers": dict(weight=torch.ones(7, dtype=torch.int64)),
        "device": dict(weight=torch.ones(7, device="meta")),
        "reduction": dict(reduction="average"),
    }
    for name, kw in calls.items():
        with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)):
            F.cross_entropy(logits, targets, **kw)
        with pytest.raises((ValueError, TypeError), match="^" + next(iter(kw))):
            dce.cross_entropy(logits, targets, **kw)
    for bad in (torch.tensor([0, 1, 2, 7]), torch.tensor([0, 1, 2, -1])):
        with pytest.raises((IndexError, RuntimeError)):
            F.cross_entropy(logits, bad)
        with pytest.raises(ValueError, match="targets: row 3"):
            dce.cross_entropy(logits, bad, weight=torch.ones(7))
    F.cross_entropy(logits, targets, -torch.ones(7))            # negative weights are torch's too
    dce.cross_entropy(logits, targets, weight=-torch.ones(7))


X, T = torch.randn(4, 7), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("kw, error, message", [
    (dict(z_loss="1"), TypeError, "z_loss: expected a float, got str"),
    (dict(z_loss=True), TypeError, "z_loss: .*bool"),
    (dict(z_loss=-1e-4), ValueError, "z_loss: .*-0.0001"),
    (dict(z_loss=NAN), ValueError, "z_loss: .*nan"),
    (dict(z_loss=INF), ValueError, "z_loss: .*inf"),
    (dict(z_loss=torch.tensor(0.1)), TypeError, "z_loss: .*Tensor"),
    (dict(weight=[1.0] * 7), TypeError, "weight: .*list"),
    (dict(weight=torch.ones(8)), ValueError, r"weight: expected shape \(7,\), got \(8,\)"),
    (dict(weight=torch.ones(7).bfloat16()), TypeError, "weight: .*bfloat16"),
    (dict(num_items=2.0), TypeError, "num_items: .*float"),
    (dict(num_items=torch.ones(2, dtype=torch.int64)), ValueError, r"num_items: .*\(2,\)"),
    (dict(num_items=torch.tensor(2.0)), TypeError, "num_items: .*float32"),
    (dict(num_items=2, reduction="sum"), ValueError, "num_items: expected None"),
    (dict(num_items=2, reduction="none"), ValueError, "num_items: expected None"),
    (dict(valid_vocab=0), ValueError, "valid_vocab: expected 1 to 7, got 0"),
    (dict(valid_vocab=8), ValueError, "valid_vocab: expected 1 to 7, got 8"),
    (dict(valid_vocab=3.0), TypeError, "valid_vocab: .*float"),
    (dict(return_lse=1), TypeError, "return_lse: .*1"),
    (dict(return_z_loss="yes"), TypeError, "return_z_loss: .*'yes'"),
])
def test_wrong_options(dce, kw, error, message):
    with pytest.raises(error, match=message):
        dce.cross_entropy(X, T, **kw)
    if "num_items" not in kw and "reduction" not in kw:
        M = dce.rowmax(X)
        with pytest.raises(error, match=message):
            dce.finalize(dce.denom_digits(X, M), X, T, M, **kw)


def test_more_wrong_arguments(dce):
    M = dce.rowmax(X)
    words, sums = dce.denom_digits(X, M), torch.zeros(12, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_items: expected None beside sums"):
        dce.grad_logits(torch.tensor(1.0), X, T, words, M, sums=sums, num_items=3)
    with pytest.raises(ValueError, match=r"grad_lse: .*\(3,\)"):
        dce.grad_logits(torch.tensor(1.0), X, T, words, M, grad_lse=torch.ones(3))
    with pytest.raises(ValueError, match=r"digits: expected shape \(12,\) or \(24,\), got \(13,\)"):
        dce.finalize_mean(torch.zeros(13, dtype=torch.int64), 1)
    with pytest.raises(TypeError, match="count: .*float"):
        dce.finalize_mean(sums, 1.0)
    with pytest.raises(ValueError, match=r"weight: expected shape \[V\]"):
        dce.loss_digits(torch.ones(4), T, weight=torch.ones(7, 1))
    # digits of all columns where only some are valid do not add up
    with pytest.raises(ValueError, match="den_digits: row 0 sums 7 columns of 5"):
        dce.finalize(words, X, T, M, valid_vocab=5)
    assert dce.finalize(words, X, T, M, valid_vocab=5, validate=False)[0].isnan().all()


def test_num_items(dce):
    """Hugging Face's num_items_in_batch: micro-batches of a mean over all their tokens add up, exactly where it is done with integers."""
    logits, targets = batch(N=40)
    whole = logits.clone().requires_grad_()
    expected = dce.cross_entropy(whole, targets)
    expected.backward()
    count = int((targets != IGNORE).sum())
    for items in (count, torch.tensor(count), torch.tensor([count], dtype=torch.int32)):
        parts = logits.clone().requires_grad_()
        for a, b in ((0, 3), (3, 3), (3, 31), (31, 40)):
            dce.cross_entropy(parts[a:b], targets[a:b], num_items=items).backward()
        assert_same(parts.grad, whole.grad)
    assert_same(dce.cross_entropy(logits, targets, num_items=count), expected)
    assert dce.cross_entropy(logits, targets, num_items=0).isnan()
    assert torch.allclose(dce.cross_entropy(logits, targets, num_items=1), dce.cross_entropy(logits, targets, "sum"))


# ---------------------------------------------------------------------------------------------------------------------
# What torch's machinery brings: autocast, upstream gradients of any stride, tracing, compilation


def test_upstream_gradients_of_any_stride(dce):
    logits, targets = batch(N=6)
    kw = keywords("all")
    kw.pop("num_items")
    grads = []
    for g in (torch.ones(6), torch.ones(1).expand(6), torch.ones(()).expand(6), torch.ones(12)[::2], torch.ones(6, 2)[:, 0]):
        leaf = logits.clone().requires_grad_()
        out, lse = dce.cross_entropy(leaf, targets.clamp(max=88), "none", return_lse=True, **kw)
        torch.autograd.backward([out, lse], [g, g])
        grads.append(leaf.grad)
    for other in grads[1:]:
        assert_same(other, grads[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dce, dtype):
    """The logits are taken as they come, and nothing is cast: a linear layer's are of the autocast dtype, the loss and lse float32."""
    layer, h = torch.nn.Linear(8, 33), torch.randn(5, 8)
    t = torch.arange(5, dtype=torch.int32)
    with torch.autocast("cpu", dtype=dtype):
        logits = layer(h)
        assert logits.dtype == dtype
        out, lse = dce.cross_entropy(logits, t, z_loss=0.1, weight=torch.rand(33), return_lse=True)
        lp = dce.logprobs(logits, t)
    assert out.dtype == lse.dtype == lp.dtype == torch.float32
    outside = dce.logprobs(logits.detach(), t)
    assert_same(lp, outside)
    (out + lse.sum() + lp.sum()).backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all() and layer.weight.grad.abs().sum() > 0


def compiled(dce, case, reduction, dynamic=None, backend="aot_eager"):
    kw = keywords(case)
    kw["return_lse"] = True
    if reduction != "mean":
        kw.pop("num_items", None)

    def step(x, t):
        return dce.cross_entropy(x * 1.5, t, reduction, return_z_loss=True, **kw)

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for N in (6, 9):
        logits, targets = batch(N)
        results = []
        for f in (step, fast):
            x = logits.clone().requires_grad_()
            out, z, lse = f(x, targets.clamp(max=88))
            (out.sum() * 0.7 + (lse * torch.linspace(-1, 2, N)).sum()).backward()
            alone = logits.clone().requires_grad_()
            f(alone, targets.clamp(max=88))[0].sum().backward()  # without a gradient for lse
            results.append((out, z, lse, x.grad, alone.grad))
        for a, b in zip(*results):
            assert_same(a, b)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", list(CASES))
def test_compile(dce, case, reduction):
    compiled(dce, case, reduction)


def test_compile_with_dynamic_shapes_and_inductor(dce):
    compiled(dce, "all", "mean", dynamic=True)
    compiled(dce, "all", "mean", backend="inductor")


def test_compile_logprobs(dce):
    torch._dynamo.reset()
    logits, tokens = batch()
    grads = []
    for f in (dce.logprobs, torch.compile(dce.logprobs, fullgraph=True, backend="aot_eager")):
        x = logits.clone().requires_grad_()
        lp = f(x, tokens)
        lp.backward(torch.linspace(-1, 2, 13))
        grads.append((lp, x.grad))
    for a, b in zip(*grads):
        assert_same(a, b)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_opcheck(dce, dtype):
    ops = dce._ops.ops
    logits, targets = batch(N=5, V=23, dtype=dtype)
    targets[1:] %= 5                                            # valid in every sample: opcheck compares values, and NaN is not equal to itself
    M = dce.rowmax(logits)
    digits = dce.denom_digits(logits, M)
    at_target = logits.float().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    weight, items = torch.rand(23), torch.tensor([7])
    _, maxima, _, state, sums, *_ = ops.cross_entropy_with_options(logits, targets, 1, IGNORE, 0.1, weight, None, 23, 0.0, 1.0, 0.0, False)
    _, _, _, smoothed, _, *_ = ops.cross_entropy_with_options(logits, targets, 1, IGNORE, 0.1, weight, None, 23, 0.1, 0.5, 20.0, True)
    stat_words, logit_words = dce.stat_digits(logits, targets, M)[0][:, :2].contiguous(), dce.logit_digits(logits, M)[:, :4].contiguous()
    losses = dce.cross_entropy(logits, targets, "none")
    images = ops.order_images(M)
    leaf = lambda: logits.clone().requires_grad_()
    g = torch.ones(5)
    samples = [
        ("finalize_with_options", (digits, at_target, targets, M, IGNORE, 23, 0.1, weight, 0.0, None, 1.0, 0.0)),
        ("finalize_with_options", (digits, at_target, targets, M, IGNORE, -1, 0.0, None, 0.1, logit_words, 1.0, 0.0)),
        ("denom_digits", (logits, M, 0, 23, 0, 0.5, 20.0)), ("logit_digits", (logits, M, 0, 23, 0, weight, 0.5, 20.0)), ("stat_digits", (logits, targets, M, IGNORE, 0, 23, 0, 0.5, 20.0)),
        ("rowleast", (logits, 0, 23)), ("shard_tags", (M, 0, 23, 1, 0.5, 20.0)), ("target_logits", (logits, targets, IGNORE)),
        ("finalize_stats", (digits, stat_words, dce.rowmax(-logits), at_target, targets, M, IGNORE, 23, 1.0, 0.0)),
        ("shard_words", (logits, targets, images, IGNORE, 1, -1, 0, 0.1, 20, weight)), ("shard_words", (logits, targets, images, IGNORE, 1, -1, 0, 0.1, 20, weight, 0.1, 0.5, 20.0, True)),
        ("shard_words", (logits, targets, images, IGNORE, 5, -1, 0, 0.0, 0, weight, 0.1, 1.0, 0.0, False, items)),
        *[("cross_entropy_with_options", (leaf(), targets, mode, IGNORE, 0.1, w, n, valid, *more))
          for mode, w, n, valid, *more in ((0, weight, None, 0, 0.0, 1.0, 0.0, False), (1, weight, None, 20, 0.1, 0.5, 20.0, True), (1, None, items, 0, 0.0, 1.0, 20.0, False),
                                           (1, weight, items, 23, 1.0, 1.0, 0.0, False), (2, None, None, 5, 0.0, 1.0, 0.0, True))],
        ("grad_logits_with_options", (g, logits, targets, maxima, smoothed, None, IGNORE, 0, 23, 0, g, 20, weight, 0.5, 20.0)),
        ("grad_logits_with_options", (g, logits, targets, maxima, state, None, IGNORE, 0, 23, 0, g, 20)),
        ("grad_logits_with_options", (torch.ones(()), logits, targets, maxima, state, sums, IGNORE, 3, 11, 0, None, 5)),
        ("grad_logits_with_options", (torch.ones(()), logits, targets, maxima, state, sums[:12], IGNORE, 3, 11, 30, None, 20)),
        ("loss_digits", (losses, targets, IGNORE, weight)), ("reduce_digits", (sums, True)),
    ]
    for name, args in samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(getattr(ops, name).default, args)


def test_other_derivatives_fail_as_those_of_the_plain_loss(dce):
    logits, targets = batch(N=4)
    errors = []
    for kw in ({}, dict(z_loss=0.1, weight=torch.ones(101), return_lse=False)):
        loss = lambda x: dce.cross_entropy(x, targets, **kw)
        leaf = logits.clone().requires_grad_()
        (once,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        calls = (lambda: once.sum().backward(), lambda: torch.func.jvp(loss, (logits,), (logits,)), lambda: torch.func.grad(loss)(logits))
        for call in calls:
            with pytest.raises((NotImplementedError, RuntimeError)) as error:
                call()
            errors.append((error.type, str(error.value).split(":")[0].replace("_with_options", "")))
        assert_same(torch.func.vmap(loss)(torch.stack([logits, 2 * logits])), torch.stack([loss(logits), loss(2 * logits)]))
    assert errors[:3] == errors[3:] and all(kind is NotImplementedError for kind, _ in errors)


def test_thread_counts(dce):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for N, V in ((1, 70001), (300, 97)):                # few long rows, cut into pieces, and many short ones
                logits, targets = batch(N, V, "bf16")
                targets[0] = 3
                leaf = logits.requires_grad_()
                out, lse = dce.cross_entropy(leaf, targets % (V - 40), z_loss=1e-3, weight=torch.linspace(0, 2, V), valid_vocab=V - 40, return_lse=True)
                (out + lse.sum()).backward()
                results.append((out, lse, leaf.grad))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(results[:2], results[2:]):
        for a, b in zip(one, three):
            assert_same(a, b)
