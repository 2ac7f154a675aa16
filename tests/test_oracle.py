"""The oracle itself: its rounding against numpy and the C library, its results against mpmath at 200 bits.

ERR is the error of a term, 2^-22.95, which exhaustive_term.cpp establishes for every fp32 logit that a sum can keep.
"""
import ctypes
import ctypes.util
import itertools
import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest

import oracle as o

mpmath.mp.prec = 200
ERR = 2.0 ** -22.95
CAP = 2.0 ** -22.18 + 3 * 2.0 ** -24                            # of a capped logit: of tanh (exhaustive_map.cpp), of its argument and the last rounding
INF, NAN = math.inf, math.nan
f32 = o.f32



# ---------------------------------------------------------------------------------------------------------------------
# Rounding


def test_bits_round_trip():
    rng = random.Random(1)
    for fmt, width in (("fp64", 64), ("fp32", 32), ("fp16", 16), ("bf16", 16)):
        patterns = range(1 << 16) if width == 16 else [rng.getrandbits(width) for _ in range(3000)]
        for p in patterns:
            x = o.from_bits(p, fmt)
            assert o.bits(x, fmt) == (p if x == x else o.CANONICAL_NAN[fmt])
    assert o.from_bits32(0x3F800000) == 1.0 and o.from_bits32(1) == 2.0 ** -149
    assert o.from_bits(0x7E00, "fp16") != o.from_bits(0x7E00, "fp16")


def test_rounding_is_numpys():
    rng = random.Random(2)
    for _ in range(5000):
        x = np.frombuffer(struct_double(rng), np.float64)[0]
        with np.errstate(all="ignore"):
            assert o.bits(o.rn(float(x), "fp32"), "fp32") == canonical(np.float32(x), "fp32")
            assert o.bits(o.rn(float(x), "fp16"), "fp16") == canonical(np.float16(x), "fp16")
    # Halfway cases, where ties go to even: around every kind of fp16 and bf16 value, subnormals and the overflow edge
    for fmt, kind in (("fp16", np.float16), ("bf16", None)):
        for p in range(0, 0x7F80 if fmt == "bf16" else 0x7C00, 37):
            a, b = o.from_bits(p, fmt), o.from_bits(p + 1, fmt)
            if b == INF:
                continue
            middle = (a + b) / 2                                # exact in fp64
            even = a if p % 2 == 0 else b
            assert o.rn(middle, fmt) == even
            assert o.rn(math.nextafter(middle, INF), fmt) == b and o.rn(math.nextafter(middle, -INF), fmt) == a
            if kind is not None:
                assert float(kind(middle)) == even
    top16 = 65504.0
    assert o.rn(65519.99, "fp16") == top16 and o.rn(65520.0, "fp16") == INF
    assert o.rn(-3.4028235677973366e38, "fp32") == -INF         # halfway past the largest fp32
    assert o.bits(o.rn(-1e-60, "fp32"), "fp32") == 0x80000000


def struct_double(rng):
    return np.uint64(rng.choice([rng.getrandbits(64), (rng.randint(850, 1180) << 52) | rng.getrandbits(52)])).tobytes()


def canonical(value, fmt):
    if np.isnan(value):
        return o.CANONICAL_NAN[fmt]
    return int(value.view(np.uint16 if fmt == "fp16" else np.uint32))


def libm():
    name = ctypes.util.find_library("m")
    if not name:
        pytest.skip("no C library of mathematics to compare with")
    lib = ctypes.CDLL(name)
    for function, kind in ((lib.fma, ctypes.c_double), (lib.fmaf, ctypes.c_float)):
        function.restype, function.argtypes = kind, [kind] * 3
    return lib


def test_fma_is_libms():
    """Random, cancelling, subnormal, overflowing and special operands: the C library's fma, bit for bit."""
    lib = libm()
    rng = random.Random(3)
    special = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 2.0 ** -149, -(2.0 ** -126), 3.4028234663852886e38, 2.0 ** -1074]

    def draw(fmt):
        kind = rng.random()
        if kind < 0.15:
            return o.rn(rng.choice(special), fmt)
        if kind < 0.5:
            return o.rn(math.ldexp(rng.uniform(-2, 2), rng.randint(-30, 30)), fmt)
        return o.from_bits(rng.getrandbits(o.FORMATS[fmt][3]), fmt)

    for fmt, theirs, ours in (("fp64", lib.fma, o.fma64), ("fp32", lib.fmaf, o.fma32)):
        for i in range(8000):
            a, b, c = draw(fmt), draw(fmt), draw(fmt)
            if i % 3 == 0:
                c = o.rn(-a * b, fmt)                           # nearly cancels: what an unfused multiply gets wrong
            assert o.bits(ours(a, b, c), fmt) == o.bits(theirs(a, b, c), fmt), (fmt, a, b, c)


def test_add_and_multiply_are_ieee():
    rng = random.Random(4)
    for _ in range(4000):
        a, b = (o.from_bits(rng.getrandbits(32), "fp32") for _ in range(2))
        with np.errstate(all="ignore"):
            for ours, theirs in ((o.add32, np.add), (o.mul32, np.multiply)):
                assert o.bits32(ours(a, b)) == canonical(theirs(np.float32(a), np.float32(b)), "fp32"), (ours, a, b)
        a, b = (o.from_bits(rng.getrandbits(64), "fp64") for _ in range(2))
        assert o.bits64(o.add64(a, b)) == o.bits64(a + b)
        assert o.bits64(o.mul64(a, b)) == o.bits64(a * b)


def test_round_ratio():
    rng = random.Random(5)
    for _ in range(3000):
        num, den = rng.getrandbits(rng.randint(1, 400)) - rng.getrandbits(20), rng.getrandbits(rng.randint(1, 200)) + 1
        if num:
            try:
                expected = num / den                            # CPython's int / int is correctly rounded
            except OverflowError:
                continue
            assert o._round_ratio(num, den, "fp64") == expected
    assert o._round_ratio((1 << 24) + 1, 1, "fp32") == 2.0 ** 24          # a tie goes to even
    assert o._round_ratio(3 * ((1 << 25) + 2) + 1, 3, "fp32") == 2.0 ** 25 + 4     # a third above a tie does not
    assert o._round_ratio(1, 3 << 149, "fp32") == 0.0
    assert o._round_ratio(2, 3 << 149, "fp32") == 2.0 ** -149             # two thirds of the smallest subnormal
    assert o._round_ratio(1 << 128, 1, "fp32") == INF


# ---------------------------------------------------------------------------------------------------------------------
# Terms


def value(P, n):
    return Fraction(P) * Fraction(2) ** (n - 23)


def term_error(x):
    P, n = o.term(x)
    return abs(float(mpmath.mpf(P) * mpmath.mpf(2) ** (n - 23) / mpmath.exp(mpmath.mpf(x)) - 1))


def ordered(x, step):
    """The fp32 `step` places above x (x not 0)."""
    p = o.bits32(x)
    return o.from_bits32(p + step if x > 0 else p - step)


def test_term_of_zero_and_of_none():
    assert o.term(0.0) == o.term(-0.0) == (1 << 23, 0)
    assert o.term(2.0 ** -149) == (1 << 23, 0)
    assert o.term(-INF) is None and o.term(ordered(-2.0 ** 21, -1)) is None and o.term(-2.0 ** 21) is not None


def test_term_error():
    rng = random.Random(6)
    for scale in (1e-3, 1.0, 10.0, 100.0, 1e4, 2.0 ** 20):
        for _ in range(300):
            assert term_error(f32(rng.uniform(-scale, scale))) <= ERR


def test_term_at_every_boundary_of_n():
    """Around (k + 1/2) ln 2, where n steps: small k all, then across the range, both signs. n never falls, the term falls
    by at most one unit of P."""
    ks = list(range(0, 200)) + [int(1.3 ** i) for i in range(20, 53)]
    for k in ks:
        for sign in (1, -1):
            x = f32(sign * (k + 0.5) * math.log(2))
            if abs(x) > 2.0 ** 20 - 1:
                continue
            near = [ordered(x, s) for s in range(-4, 5)]
            assert near == sorted(near)
            terms = [o.term(y) for y in near]
            for y in near:
                assert term_error(y) <= ERR, y
            for (P, n), (Q, m) in zip(terms, terms[1:]):
                assert n <= m and value(P - 1, n) <= value(Q, m), (k, sign)
            assert abs(terms[0][1] - sign * (k + 0.5)) <= 1


def test_n_is_the_nearest_integer():
    rng = random.Random(7)
    for _ in range(2000):
        x = f32(rng.uniform(-200, 200))
        y = mpmath.mpf(x) / mpmath.log(2)
        if abs(y - mpmath.floor(y) - 0.5) > 1e-4:
            assert o.term(x)[1] == int(mpmath.nint(y))


# ---------------------------------------------------------------------------------------------------------------------
# fp64 functions


def test_recip_is_within_an_ulp():
    rng = random.Random(8)
    ds = [1.0, math.nextafter(2.0, 0), math.nextafter(1.0, 2), 1.5] + [rng.uniform(1, 2) for _ in range(500)]
    for d in ds:
        y = o.recip(d)
        assert abs(Fraction(y) - 1 / Fraction(d)) <= Fraction(1, 1 << 53)            # an ulp below 1
        assert o.mul64(d, y) <= 1.0


def test_div_is_within_an_ulp():
    rng = random.Random(9)
    for _ in range(500):
        a, b = math.ldexp(rng.uniform(1, 2), rng.randint(-150, 150)), math.ldexp(rng.uniform(1, 2), rng.randint(-40, 40))
        exact = Fraction(a) / Fraction(b)
        assert abs(Fraction(o.div(a, b)) / exact - 1) <= Fraction(1, 1 << 52)
    for n in (1, 2, 3, 7, 4095, 4096, 1 << 29, (1 << 30) - 1):     # counts of rows
        assert abs(Fraction(o.div(1.0, float(n))) * n - 1) <= Fraction(1, 1 << 52)
    assert o.bits64(o.div(0.0, 3.0)) == 0


def test_exp_r():
    # 2^-51.5: the last fma rounds by half an ulp, 2^-53 at most of 1 and 2^-54 of the binade's end, the ones before it
    # by r times as much, and the series is cut at 0.4^14/14! = 2^-54.8.
    rng = random.Random(10)
    for r in [0.0, 0.38, -0.38, 1e-300] + [rng.uniform(-0.38, 0.38) for _ in range(1000)]:
        assert abs(mpmath.mpf(o.exp_r(r)) / mpmath.exp(mpmath.mpf(r)) - 1) <= 2.0 ** -51.5
    assert o.exp_r(0.0) == 1.0


def test_log_1p_f():
    # 2^-51: the last fma rounds by half an ulp, s carries one ulp of `div` and half an ulp of 2 + f, w and p hardly count.
    rng = random.Random(11)
    fs = [0.0, -0.29289321881345254, 0.41421356237309515, 1e-30, -1e-30, 2.0 ** -160]
    for f in fs + [rng.uniform(-0.2928, 0.4142) for _ in range(1000)]:
        exact = mpmath.log1p(mpmath.mpf(f))
        assert abs(mpmath.mpf(o.log_1p_f(f)) - exact) <= abs(exact) * 2.0 ** -51
    assert o.bits64(o.log_1p_f(0.0)) == 0


def test_log1p():
    rng = random.Random(12)
    for _ in range(1000):
        h = math.ldexp(rng.uniform(1, 2), rng.randint(-150, 190))
        exact = mpmath.log1p(mpmath.mpf(h))
        assert abs(mpmath.mpf(o.log1p(h)) / exact - 1) <= 2.0 ** -50, h
    # Both sides of sqrt 2, where k steps from 0 to 1
    for h in (math.nextafter(0.41421356237309515, 0), 0.41421356237309515, math.nextafter(0.41421356237309515, 1)):
        assert abs(mpmath.mpf(o.log1p(h)) / mpmath.log1p(mpmath.mpf(h)) - 1) <= 2.0 ** -50


def test_split():
    for d in (1.0, o.SPLIT_HI, math.nextafter(o.SPLIT_HI, 0), o.SPLIT_LO, math.nextafter(1, 0), 3.0, 2.0 ** 100 * 1.41):
        m, k = o.split(d)
        assert o.SPLIT_LO <= m < o.SPLIT_HI and Fraction(m) * Fraction(2) ** k == Fraction(d)


# ---------------------------------------------------------------------------------------------------------------------
# Rows against mpmath

SUBNORMAL = 2.0 ** -149


def rows():
    rng = random.Random(13)

    def normal(n, s, mean=0.0):
        return [f32(rng.gauss(mean, s)) for _ in range(n)]

    return {
        "normal": (normal(1000, 1), 3), "wide": (normal(1000, 10), 500), "target last": (normal(257, 4), 256),
        "confident 20": ([20.0] + [0.0] * 99, 0), "confident 60": ([60.0] + [0.0] * 999, 0),
        "confident 87": ([87.0] + [0.0] * 9, 0), "confident, other": ([20.0] + [0.0] * 99, 7),
        "beyond the window": ([90.0] + [0.0] * 9, 1),           # n_M - n = 130: kept, the block reaches down to n = 0
        "target dropped": ([200.0] + [0.0] * 9, 1), "target far away": ([1e6, -1e6, 1e6], 1),
        "two equal at 1e8": ([1e8, 1e8], 0), "1e8 and neighbours": ([1e8, 1e8 + 8, 1e8 - 8, 1e8 - 80], 2),
        "huge": ([f32(3e38), f32(3e38), f32(-3e38)], 0), "all very negative": ([f32(-3e38)] * 3, 1),
        "huge, target at the other end": ([f32(1.5e38), f32(-1.5e38)], 1),
        "-inf columns": ([-INF, 1.0, -INF, 2.0], 1), "one finite logit": ([-INF] * 5 + [7.5] + [-INF], 5),
        "target -inf": ([1.0, -INF], 1),
        "subnormals": ([SUBNORMAL, -SUBNORMAL, 2.0 ** -127, 0.0], 1), "zeros": ([0.0, -0.0, 0.0], 1),
        "one column": ([f32(0.3)], 0), "around 2^20": ([2.0 ** 20 - 0.0625, 2.0 ** 20 - 1, 2.0 ** 20 - 3.0625], 1),
        "2^20": ([2.0 ** 20, 2.0 ** 20 - 1, 2.0 ** 20 - 3.0625], 1),
        "-2^20": ([-2.0 ** 20, -2.0 ** 20 - 1.125, -2.0 ** 20 - 2], 1),
        "above -2^20": ([-2.0 ** 20 + 0.0625, -2.0 ** 20 - 1.125, -2.0 ** 20 - 2], 1),
        "equal": ([f32(1.7)] * 100, 99),
    }


def truth(row, t):
    x = [mpmath.mpf(v) for v in row]
    M = max(x)
    weights = [mpmath.exp(v - M) for v in x]
    S = mpmath.fsum(weights)
    if row[t] == -INF:
        return INF, S, [w / S for w in weights[:t]] + [mpmath.mpf(-1)] + [w / S for w in weights[t + 1:]]
    rest = mpmath.fsum(mpmath.exp(v - x[t]) for i, v in enumerate(x) if i != t)
    loss = mpmath.log1p(rest)
    gradient = [w / S for w in weights]
    gradient[t] = -rest / (1 + rest)
    return loss, S, gradient


def ulp32(x):
    x = abs(x)
    if x < 2.0 ** -126:
        return 2.0 ** -149
    return 2.0 ** (math.frexp(float(x))[1] - 24)


@pytest.mark.parametrize("name", rows())
def test_row_against_200_bits(name):
    row, t = rows()[name]
    final, M = o.forward(row, t)
    loss, denom, gradient = truth(row, t)
    V = len(row)
    lost = V * 2.0 ** -127.9                                    # what dropped terms may amount to, relative to the largest
    assert final.status == "ok" and M == max(row)

    # A relative error of ERR in S - T is one of at most ERR * h / (1 + h) in log1p(h), and half an ulp for the rounding.
    if loss > mpmath.mpf(3.4028235677973366e38):
        assert final.loss == INF
    else:
        h = mpmath.expm1(loss)
        bound = ERR * h / (1 + h) + ulp32(loss) * 0.5001 + lost
        assert abs(mpmath.mpf(final.loss) - loss) <= bound
    # The same for the sum; its largest term is in it with an error of its own.
    assert abs(mpmath.mpf(final.denom) / denom - 1) <= ERR + 2.0 ** -24 + lost

    got = o.gradient(row, t, M, final.state, 1.0)
    for v in range(V):
        # two terms' errors (its own and the sum's), RN32 of the scale and of the product; below 2^-125 a zero
        bound = abs(gradient[v]) * (2 * ERR + 2.0 ** -23) + 2.0 ** -124 * (1 if v != t else 0) + 2.0 ** -149 + lost
        assert abs(mpmath.mpf(got[v]) - gradient[v]) <= bound, v


def test_confident_tokens_keep_their_digits():
    """Relative, not absolute: fp32 softmax gives 0 for these losses. An ulp, because the loss is that close to one term."""
    for x in (10.0, 17.0, 20.0, 30.0, 50.0, 80.0, 87.0):
        row = [x] + [0.0] * 9
        final, M = o.forward(row, 0)
        loss, _, gradient = truth(row, 0)
        assert 0 < final.loss and abs(final.loss / loss - 1) <= ERR + 2.0 ** -24
        got = o.gradient(row, 0, M, final.state, 1.0)[0]
        assert got < 0 and abs(got / gradient[0] - 1) <= 2 * ERR + 2.0 ** -24


def test_loss_is_within_an_ulp_where_it_is_2_or_more():
    rng = random.Random(14)
    worst = 0.0
    for _ in range(60):
        row = [f32(rng.gauss(0, rng.choice([1, 3, 10]))) for _ in range(200)]
        t = rng.randrange(200)
        loss = truth(row, t)[0]
        if loss >= 2:
            worst = max(worst, float(abs(o.forward(row, t)[0].loss - loss)) / ulp32(loss))
    assert 0 < worst <= 1.0


def test_degenerate_and_wrong_rows():
    for row in ([NAN, 1.0], [1.0, NAN], [INF, 1.0], [INF, INF], [-INF, -INF], [NAN, INF]):
        final, M = o.forward(row, 0)
        assert final.status == "degenerate" and final.loss != final.loss and final.denom != final.denom
        assert all(g != g for g in o.gradient(row, 0, M, final.state, 1.0))
    row = [1.0, 2.0, 3.0]
    words = o.denom_digits(row, 3.0)
    assert o.finalize(words, row, 3, 3.0).status == "target" and o.finalize(words, row, 3, 3.0).denom > 1
    assert o.finalize(words, row, -1, 3.0).status == "target"
    assert o.finalize(words, row, -100, 3.0).status == "ignored"
    assert o.finalize(o.denom_digits(row, 2.0), row, 0, 2.0).status == "check"          # a logit above the maximum
    assert o.finalize(words, row, 0, 3.5).status == "check"
    assert o.finalize([0] * 6 + words[6:], row, 0, 3.0).status == "impossible"
    assert o.finalize(words, [1.0, 2.0, 3.5], 2, 3.0).status == "impossible"


def test_digits_add_up_for_every_cut():
    rng = random.Random(15)
    row = [f32(rng.gauss(0, 20)) for _ in range(64)] + [-INF, 0.0, -0.0, SUBNORMAL]
    M = o.row_max(row)
    whole = o.denom_digits(row, M)
    assert o.carry(whole) == whole and whole[6] == len(row)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(row) + 1), k=5))
        shards = [o.denom_digits(row, M, a, b) for a, b in zip([0] + cuts, cuts + [len(row)])]
        assert o.carry([sum(w) for w in zip(*shards)]) == whole


def test_exact_reductions():
    rng = random.Random(16)
    losses = [o.from_bits32(rng.getrandbits(32)) for _ in range(300)]
    finite = [x for x in losses if x - x == 0]
    words = o.loss_words(finite, [0] * len(finite))
    exact = sum(map(Fraction, finite))
    assert sum(w * Fraction(2) ** (32 * j - 149) for j, w in enumerate(words[:9])) == exact
    assert o.reduce(words, "sum") == o.rn(float(exact), "fp32") or abs(exact) > 2 ** 128     # float(Fraction) is RN64
    assert o.reduce(o.loss_words([1.0, 2.0, 4.0], [0, -100, 1]), "mean") == 2.5
    assert o.reduce(o.loss_words([], []), "sum") == 0.0 and math.isnan(o.reduce(o.loss_words([], []), "mean"))
    assert math.isnan(o.reduce(o.loss_words([INF, -INF], [0, 0]), "sum"))
    assert o.reduce(o.loss_words([INF, 1.0], [0, 0]), "mean") == INF
    assert o.reduce(o.loss_words([-INF, 1.0], [0, 0]), "mean") == -INF
    assert math.isnan(o.reduce(o.loss_words([NAN, 1.0], [0, 0]), "mean"))
    assert o.reduce(o.loss_words([NAN, 1.0], [-100, 0]), "mean") == 1.0
    assert o.bits32(o.reduce(o.loss_words([-SUBNORMAL, 0.0, 0.0, 0.0], [0] * 4), "mean")) == 0    # underflows to +0


# ---------------------------------------------------------------------------------------------------------------------
# Options and statistics


MAPS = [(1.0, None), (f32(0.35), None), (3.0, None), (1.0, 30.0), (f32(0.7), 50.0), (2.0, 1.0), (f32(1e-3), f32(1e-2)), (1.0, f32(1e4))]


def capped(x, sigma, kappa):
    """The real map of an fp32, to 200 bits."""
    y = mpmath.mpf(sigma) * mpmath.mpf(x)
    return y if kappa is None else kappa * mpmath.tanh(y / kappa)


@pytest.mark.parametrize("sigma, kappa", MAPS)
def test_map_and_slope(sigma, kappa):
    """CAP and 2^-21, which exhaustive_map.cpp establishes for many more."""
    rng = random.Random(17)
    xs = [f32(s * rng.gauss(0, 1) * (kappa or 30.0) / sigma) for s in (1e-6, 1e-3, 0.1, 0.5, 1, 4, 20) for _ in range(100)]
    worst = worst_slope = 0.0
    for x in xs + [2.0 ** 100, 2.0 ** -90]:
        y, exact = o.map_logit(x, sigma, kappa), capped(x, sigma, kappa)
        worst = max(worst, float(abs(y - exact) / abs(exact)))
        assert kappa is None or abs(y) <= kappa
        assert o.bits32(o.map_logit(-x, sigma, kappa)) == o.bits32(-y)
        down = o.slope(y, kappa)
        true = 1 if kappa is None else 1 - (exact / kappa) ** 2
        worst_slope = max(worst_slope, float(abs(down - true)))
        assert 0 <= down <= 1
    assert worst <= (2.0 ** -24 if kappa is None else CAP) and worst_slope <= (0 if kappa is None else 2.0 ** -21), (worst, worst_slope)
    for x in (INF, -INF, NAN, 0.0, -0.0):
        assert o.bits32(o.map_logit(x, sigma, kappa)) == o.bits32(x)
    assert o.slope(-INF, kappa) == (0.0 if kappa else 1.0) and o.slope(0.0, kappa) == 1.0


def whole_options(row, t, **kw):
    """options() of a whole row with the words it takes, and its maximum."""
    U, named = kw.get("U") or len(row), {k: kw[k] for k in ("sigma", "kappa") if k in kw}
    M = o.row_max(row[:U])
    logits = o.logit_words(row, M, 0, U, weight=kw.get("weight"), **named)
    return o.options(o.denom_digits(row, M, 0, U, **named), row, t, M, logits=logits, **kw), M


OPTION_ROWS = {
    "normal": ([f32(random.Random(18).gauss(0, 3)) for _ in range(40)], 7),
    "wide": ([f32(random.Random(19).gauss(0, 40)) for _ in range(33)], 5),
    "confident": ([f32(25.0)] + [f32(0.1 * i) for i in range(20)], 0),
    "shifted": ([2e6 - 0.125 * (i % 7) for i in range(20)], 3),
    "target dropped": ([300.0] + [0.0] * 10, 4),
}


@pytest.mark.parametrize("name", OPTION_ROWS)
@pytest.mark.parametrize("U", [None, 11])
def test_options_against_torch(name, U):
    """Loss and gradient of every combination, from torch's own function in fp64 and its autograd.

    Both sides of a difference have errors: ERR of a term in each probability, half an ulp of the loss, 2^-21 of a slope, and
    CAP of a capped logit, to which the loss is as sensitive as to a logit. fp64's own 2^-52 shows where logits are large.
    """
    torch = pytest.importorskip("torch")
    row, t = OPTION_ROWS[name]
    generator = torch.Generator().manual_seed(5)
    weight = [w if i % 4 else 0.0 for i, w in enumerate((torch.rand(len(row), generator=generator) * 2).tolist())]
    big = max(map(abs, row))
    for epsilon, w, (sigma, kappa), lam in itertools.product((0.0, 0.1, 1.0), (None, weight), ((1.0, None), (0.5, None), (1.0, 30.0), (f32(1.7), 8.0)), (0.0, 0.01)):
        out, M = whole_options(row, t, lam=lam, weight=w, U=U, epsilon=epsilon, sigma=sigma, kappa=kappa)
        x = torch.tensor([row], dtype=torch.float64, requires_grad=True)
        y = sigma * x if kappa is None else kappa * torch.tanh(sigma * x / kappa)
        valid = y[:, :U]
        lse = torch.logsumexp(valid, 1)
        given = None if w is None else torch.tensor(w[:U], dtype=torch.float64)
        each = torch.nn.functional.cross_entropy(valid, torch.tensor([t]), given, reduction="none", label_smoothing=epsilon)
        (0.7 * (each + lam * lse ** 2) + 0.3 * lse).sum().backward()
        loss = (each + lam * lse ** 2).item()
        # how far one logit of the softmax may be off: a cap's error or a scale's rounding; and fp64's loss of two large numbers
        unit = CAP if kappa else 0.0 if sigma == 1 else 2.0 ** -24
        logit = unit * min(big * sigma, kappa or INF) + 2.0 ** -50 * big
        lse_size = abs(lse.item())
        factor = max(w or [1.0])
        # with weights and smoothing each product is rounded
        products = 0.0 if w is None else epsilon * 2.0 ** -23 * (given * (valid[0] - valid[0].max()).abs()).mean().item()
        assert abs(out.loss - loss) <= factor * (2 * logit + ERR) + products + ulp32(loss) / 2 + 2 * lam * (lse_size + 1) * (logit + ERR), (epsilon, sigma, kappa, lam)
        assert abs(out.lse - lse.item()) <= logit + ERR + ulp32(lse_size) / 2
        got = o.gradient_with(row, t, M, out.state, f32(0.7), f32(0.3), "fp32", U, weight=w, epsilon=epsilon, sigma=sigma, kappa=kappa)
        # each part of a column: its probability times scale and z-loss, and what smoothing takes from it
        parts = sigma * (0.7 * factor + 0.3 + 1.4 * lam * lse_size)
        slope_error = 2.0 ** -21 if kappa else 0.0
        for v, (a, b) in enumerate(zip(got, x.grad[0].tolist())):
            assert abs(a - b) <= parts * (2 * logit + 2 * ERR + 2.0 ** -23 + slope_error) + abs(b) * 2.0 ** -23 + 2.0 ** -60, (v, a, b, epsilon, sigma, kappa, lam)
        assert got[len(row) if U is None else U:] == [0.0] * (0 if U is None else len(row) - U)


def test_smoothing_of_infinities():
    """As torch: a masked column makes the mean of all classes' losses infinite, and leaves the gradient finite; one of weight 0 does not count."""
    row, w = [1.0, -INF, f32(0.3), 2.0], [1.0, 0.0, 0.5, 2.0]
    out, M = whole_options(row, 0, epsilon=0.1)
    assert out.loss == INF and all(map(math.isfinite, o.gradient_with(row, 0, M, out.state, 1.0, epsilon=0.1)))
    out, M = whole_options(row, 0, epsilon=0.1, weight=w)
    lse = math.log(math.exp(1) + math.exp(0.3) + math.exp(2))
    assert abs(out.loss - (0.9 * (lse - 1) + 0.1 * ((lse - 1) + 0.5 * (lse - 0.3) + 2 * (lse - 2)) / 4)) < 2.0 ** -21
    assert math.isnan(whole_options(row, 0, epsilon=0.1, weight=[1.0, 0.0, NAN, 1.0])[0].loss)
    assert math.isnan(whole_options(row, 1, epsilon=1.0)[0].loss)          # 0 * inf
    masked, M = whole_options(row, 0, kappa=20.0)
    assert math.isfinite(masked.loss) and o.gradient_with(row, 0, M, masked.state, 1.0, kappa=20.0)[1] == 0.0


def test_a_mapped_row_is_the_row_of_its_mapped_logits():
    """Where the map kept the order: loss and lse are those of the mapped row, and the gradient is that row's times sigma and slope."""
    rng = random.Random(20)
    for sigma, kappa in MAPS:
        row = [f32(rng.gauss(0, 0.5) * (kappa or 30.0)) for _ in range(20)] + [-INF]
        mapped = [o.map_logit(x, sigma, kappa) for x in row]
        (out, M), (plain, My) = whole_options(row, 3, sigma=sigma, kappa=kappa), whole_options(mapped, 3)
        assert My == o.map_logit(M, sigma, kappa)
        assert (out.loss, out.lse) == (plain.loss, plain.lse)
        a = o.gradient_with(row, 3, M, out.state, 1.0, sigma=sigma, kappa=kappa)
        b = o.gradient_with(mapped, 3, My, plain.state, 1.0)
        for x, y, m in zip(a, b, mapped):
            assert abs(x - y * sigma * o.slope(m, kappa)) <= abs(y * sigma) * 2.0 ** -22


def entropy_of(row, sigma=1.0, kappa=None):
    """In 200 bits, of the mapped logits as the oracle has them."""
    y = [mpmath.mpf(v) for v in (o.map_logit(x, sigma, kappa) for x in row) if v > -INF]
    top = max(y)
    terms = [mpmath.exp(v - top) for v in y]
    S = mpmath.fsum(terms)
    return mpmath.log(S) + mpmath.fsum(e * (top - v) for e, v in zip(terms, y)) / S


def whole_stats(row, t, sigma=1.0, kappa=None):
    M = o.row_max(row)
    stats, least = o.stat_words(row, t, M, sigma=sigma, kappa=kappa)
    return o.row_stats(stats, least, o.denom_digits(row, M, sigma=sigma, kappa=kappa), row, t, M, sigma=sigma, kappa=kappa)


@pytest.mark.parametrize("name", rows())
def test_statistics(name):
    row, t = rows()[name]
    for sigma, kappa in ((1.0, None), (0.5, None), (1.0, 30.0)):
        stats = whole_stats(row, t, sigma, kappa)
        exact = entropy_of(row, sigma, kappa)
        # log D: ERR of the sum and half an ulp of the fp32 denominator. The spread: two terms' errors and two roundings, and
        # half of 2^-43 a column. Then the result's own rounding.
        bound = (ERR + 2.0 ** -24) + float(exact) * (2 * ERR + 2.0 ** -23) + len(row) * 2.0 ** -44 + ulp32(exact) / 2
        assert abs(stats.entropy - exact) <= bound, (float(exact), stats.entropy)
        loss = whole_options(row, t, sigma=sigma, kappa=kappa)[0]
        assert o.bits32(stats.lse) == o.bits32(loss.lse) and stats.logprob == -loss.loss and o.bits32(stats.logprob) != 1 << 31
        finite = [abs(o.map_logit(x, sigma, kappa)) for x in row if x > -INF]
        assert abs(stats.max_abs - max(finite)) <= (max(finite) * 4 * 2.0 ** -23 if kappa else 0)    # the map may fall by 3 ulp
        assert stats.hit == (row.index(max(row)) == t)


def test_statistics_of_no_row():
    for row in ([NAN, 1.0], [INF, 1.0], [-INF, -INF]):
        assert all(x != x for x in whole_stats(row, 0)[:4]) and not whole_stats(row, 0).hit
    assert whole_stats([1.0, 2.0], -100) == (0.0, 0.0, 0.0, 0.0, False)
    for t in (2, -1):
        stats = whole_stats([1.0, 2.0], t)
        assert stats.logprob != stats.logprob and not stats.hit and stats.entropy > 0 and stats.max_abs == 2.0 and stats.lse > 2
    assert whole_stats([5.0], 0) == (5.0, 0.0, 0.0, 5.0, True)
    ties = [1.0, 3.0, 3.0, -7.0, 3.0]
    assert [whole_stats(ties, t).hit for t in range(5)] == [False, True, False, False, False] and whole_stats(ties, 1).max_abs == 7.0


def test_words_of_options_and_statistics_add_up_for_every_cut():
    rng = random.Random(21)
    row = [f32(rng.gauss(0, 20)) for _ in range(64)] + [-INF, 0.0, -0.0, SUBNORMAL, f32(-3e38), f32(-1e30)]
    row[40] = row[50] = M = o.row_max(row)
    V, weight = len(row), [f32(rng.gauss(0, 1)) for _ in range(len(row))]
    for sigma, kappa, w, t in ((1.0, None, None, 50), (f32(0.3), None, weight, 40), (1.0, 30.0, None, 3), (2.0, 5.0, weight, 60)):
        # a cut shard is read by itself too, as columns v_start + [0, hi - lo)
        sum_of = lambda lo, hi: o.logit_words(row[lo:hi], M, 0, None, lo, w, sigma, kappa)
        stat_of = lambda lo, hi: o.stat_words(row, t, M, lo, hi, 0, -100, sigma, kappa)
        assert stat_of(7, 30) == o.stat_words(row[7:30], t, M, 0, None, 7, -100, sigma, kappa)
        whole, (stats, least) = o.carry(sum_of(0, V), 3, 48), stat_of(0, V)
        for _ in range(10):
            cuts = sorted(rng.choices(range(V + 1), k=5))
            shards = list(zip([0] + cuts, cuts + [V]))
            total = o.carry([sum(words) for words in zip(*(sum_of(*s) for s in shards))], 3, 48)
            # a mark a shard: only whether there is one is the same
            assert total[:3] == whole[:3] and o.mark(total[3], 47)[1] == o.mark(whole[3], 47)[1]
            assert (o.mark(total[3], 47)[0] > 0) == (o.mark(whole[3], 47)[0] > 0) == True
            parts = [stat_of(*s) for s in shards]
            added = o.carry([sum(p[0][i] for p in parts) for i in (0, 1)], 1, 40)
            assert added[0] == stats[0] and o.mark(added[1], 40)[1] == o.mark(stats[1], 40)[1] and min(p[1] for p in parts) == least
            assert (o.mark(added[1], 40)[0] > 0) == (o.mark(stats[1], 40)[0] > 0) == (t > 40)
