"""docs/SPEC.md in Python integers: the second implementation of every bit, sharing no code with csrc/.

Values are carried as Python floats: every binary16, bfloat16, binary32 and binary64 value is one exactly. No float is
ever *computed* with: each operation of the specification turns its operands into integers, works exactly, and rounds
once (`_round`). The only float arithmetic is comparison, negation and `math.ldexp` of results known to be exact.

A row is a sequence of Python floats (its logits, widened). Words are Python ints. Results:

    term(x')                                    (P, n), or None for a logit that has no term
    row_max(row)                                M
    frame(M)                                    Frame: shift c, M', n_M, B
    denom_digits(row, M, lo, hi, v_start)       8 ints
    carry(words)                                8 ints, canonical
    finalize(words, row, t, M, V, ignore)       Final(loss, denom, state=(inv, tgt), status)
    gradient(row, t, M, state, g, ...)          list of floats, already rounded to the logits' dtype
    loss_words(losses, targets, ignore)         12 ints
    reduce(words, "sum" | "mean")               float
    forward(row, t, ignore)                     (Final, M): one row from its logits alone
    map_logit(x, sigma, kappa)                  y, of which the softmax is; slope(y, kappa): its derivative over sigma
    logit_words(row, M, lo, hi, v_start, ...)   4 ints, the sum of logits that label smoothing needs
    options(words, row, t, M, ...)              Optioned(loss, lse, z, state=(inv', tgt', inv, p)), section 12
    gradient_with(row, t, M, state, G, g_lse)   as gradient, with such a state
    weighed(words, targets, weight)             24 ints
    divide(words, by)                           the mean, by "count" or "weights"
    stat_words(row, t, M, lo, hi, v_start)      (2 ints, the least logit above -inf), section 13
    row_stats(stats, least, words, row, t, M)   RowStats(lse, logprob, entropy, max_abs, hit)
    rank_word(t, salt, c, logit, *more)         an int modulo 2^64, section 11; agreed(word, t, ignore): (target, its logit)
    square_words(values)                        21 ints, section 15
    norm(words)                                 float

A scale `sigma` and a cap `kappa` (None: no cap) go to whatever reads logits; 1.0 and None leave every logit what it is.

`bits32(value)` and friends give the bit pattern to compare: every NaN is the canonical one.
"""
import functools
import math
import struct
from collections import namedtuple
from fractions import Fraction

SPEC_VERSION = 1
INF = math.inf
NAN = math.nan
H = float.fromhex

# ---------------------------------------------------------------------------------------------------------------------
# Formats and rounding (section 1)

# name: (precision in bits, exponent of the smallest subnormal, largest exponent of a leading bit, width)
FORMATS = {
    "fp64": (53, -1074, 1023, 64),
    "fp32": (24, -149, 127, 32),
    "fp16": (11, -24, 15, 16),
    "bf16": (8, -133, 127, 16),
}


def _round(num, exp, fmt):
    """`num * 2^exp`, num an integer, rounded to nearest even into the format; zero is +0. Exact or rounded once."""
    precision, low, high, _ = FORMATS[fmt]
    if num == 0:
        return 0.0
    mag = -num if num < 0 else num
    drop = max(mag.bit_length() - precision, low - exp)         # bits to lose: too many digits, or below a subnormal
    if drop > 0:
        half = 1 << (drop - 1)
        rest = mag & ((1 << drop) - 1)
        mag >>= drop
        if rest > half or (rest == half and mag & 1):
            mag += 1
        exp += drop
        if mag == 0:
            return -0.0 if num < 0 else 0.0                     # underflow keeps the sign
    if mag.bit_length() + exp - 1 > high:
        return -INF if num < 0 else INF
    value = math.ldexp(mag, exp)                                # exact: mag fits the format and so fits fp64
    return -value if num < 0 else value


def _round_ratio(num, den, fmt):
    """num / den (den > 0) rounded once: a quotient with a sticky bit below every bit that the rounding can see."""
    if num == 0:
        return 0.0
    sign, num = (-1, -num) if num < 0 else (1, num)
    shift = max(0, FORMATS[fmt][0] + 3 + den.bit_length() - num.bit_length(), 2 - FORMATS[fmt][1])
    quotient, rest = divmod(num << shift, den)
    quotient = quotient << 1 | (rest != 0)
    return _round(sign * quotient, -shift - 1, fmt)


def _dyadic(x):
    """A finite float as (m, e), x = m * 2^e exactly."""
    num, den = x.as_integer_ratio()
    return num, 1 - den.bit_length()


def rn(x, fmt):
    """RN32, RN16, RNbf16 of a value held exactly in a float."""
    if x != x:
        return NAN
    if x in (INF, -INF, 0.0):
        return x                                                # keeps the sign of a zero
    return _round(*_dyadic(x), fmt)


def _finite(*values):
    return all(v - v == 0.0 for v in values)


def _negative(x):
    return math.copysign(1.0, x) < 0


def _fma(a, b, c, fmt):
    if not _finite(a, b, c):
        # IEEE 754: NaN in, 0 * inf, or inf - inf: NaN; otherwise the infinity
        if a != a or b != b or c != c:
            return NAN
        if not _finite(a, b):
            if a == 0 or b == 0:
                return NAN
            product = -INF if _negative(a) != _negative(b) else INF
            return product if _finite(c) or c == product else NAN
        return c
    ma, ea = _dyadic(a)
    mb, eb = _dyadic(b)
    mc, ec = _dyadic(c)
    mp, ep = ma * mb, ea + eb
    e = ep if ep < ec else ec
    total = (mp << (ep - e)) + (mc << (ec - e))
    if total == 0:
        if mp == 0 and mc == 0 and (_negative(a) != _negative(b)) and _negative(c):
            return -0.0                                         # (-0) + (-0); every other exact zero is +0
        return 0.0
    return _round(total, e, fmt)


def fma32(a, b, c):
    return _fma(a, b, c, "fp32")


def fma64(a, b, c):
    return _fma(a, b, c, "fp64")


def _add(a, b, fmt):
    return _fma(a, 1.0, b, fmt)                                 # a * 1 is a, its zero's sign included


def add32(a, b):
    return _add(a, b, "fp32")


def add64(a, b):
    return _add(a, b, "fp64")


def _mul(a, b, fmt):
    if a != a or b != b:
        return NAN
    negative = _negative(a) != _negative(b)
    if a == 0 or b == 0:
        return (NAN if not _finite(a, b) else -0.0 if negative else 0.0)
    if not _finite(a, b):
        return -INF if negative else INF
    ma, ea = _dyadic(a)
    mb, eb = _dyadic(b)
    return _round(ma * mb, ea + eb, fmt)


def mul32(a, b):
    return _mul(a, b, "fp32")


def mul64(a, b):
    return _mul(a, b, "fp64")


def quotient64(a, b):
    """RN64(a / b) of finite floats, b > 0."""
    ratio = Fraction(a) / Fraction(b)
    return _round_ratio(ratio.numerator, ratio.denominator, "fp64")


def nearest(x, k):
    """x * 2^k of a finite float rounded to an integer, ties to even."""
    return round(Fraction(x) * 2 ** k)


def scale64(a, k):
    """a * 2^k, which the specification promises to be exact: checked."""
    if not _finite(a) or a == 0:
        return a
    m, e = _dyadic(a)
    out = _round(m, e + k, "fp64")
    assert _finite(out) and Fraction(out) == Fraction(a) * Fraction(2) ** k, ("inexact scaling", a, k)
    return out


# Bits ----------------------------------------------------------------------------------------------------------------

CANONICAL_NAN = {"fp64": 0x7FF8000000000000, "fp32": 0x7FC00000, "bf16": 0x7FC0, "fp16": 0x7E00}


def bits(x, fmt):
    """The bit pattern of a float that the format holds exactly; NaN is canonical."""
    if x != x:
        return CANONICAL_NAN[fmt]
    precision, low, high, width = FORMATS[fmt]
    sign = (1 << (width - 1)) if _negative(x) else 0
    if x == 0:
        return sign
    if x in (INF, -INF):
        return sign | ((1 << width - 1) - (1 << (precision - 1)))
    m, e = _dyadic(abs(x))
    shift = e - low
    if shift < 0:
        assert m % (1 << -shift) == 0, ("not a value of the format", x, fmt)
        m >>= -shift
    else:
        m <<= shift                                             # now in units of the smallest subnormal
    lead = m.bit_length() - precision
    if lead <= 0:
        return sign | m                                         # subnormals, and the first normal binade as well
    assert m % (1 << lead) == 0 and m.bit_length() - 1 + low <= high, ("not a value of the format", x, fmt)
    return sign | (lead << (precision - 1)) + (m >> lead)


def from_bits(pattern, fmt):
    precision, low, _, width = FORMATS[fmt]
    sign = -1.0 if pattern >> (width - 1) else 1.0
    pattern &= (1 << (width - 1)) - 1
    field, frac = pattern >> (precision - 1), pattern & ((1 << (precision - 1)) - 1)
    if field == (1 << (width - precision)) - 1:
        return NAN if frac else sign * INF
    if field == 0:
        return sign * math.ldexp(frac, low)
    return sign * math.ldexp(frac | 1 << (precision - 1), low + field - 1)


def bits32(x):
    return bits(x, "fp32")


def bits64(x):
    return bits(x, "fp64")


def from_bits32(pattern):
    return from_bits(pattern, "fp32")


# ---------------------------------------------------------------------------------------------------------------------
# Row maximum and frame (section 2)

LIMIT = 2.0 ** 20


def canonical_max(m):
    """A given maximum as section 2 writes it: one NaN, no -0."""
    return NAN if m != m else 0.0 if m == 0 else m


def row_max(row):
    best = -INF
    for x in row:
        if x != x:
            return NAN
        if x > best:
            best = x
    return canonical_max(best)


def combine_max(maxima):
    return row_max(maxima)


Frame = namedtuple("Frame", "M c Mp n_M P_M B degenerate sigma kappa")     # M of the logits themselves, the rest of the mapped ones


def frame(M, sigma=1.0, kappa=None):
    M = canonical_max(M)
    My = canonical_max(map_logit(M, sigma, kappa))
    if not _finite(M, My):
        return Frame(M, NAN, NAN, None, None, None, True, sigma, kappa)
    c = 0.0 if abs(My) < LIMIT else My
    Mp = 0.0 if c != 0 else My
    P_M, n_M = term(Mp)
    return Frame(M, c, Mp, n_M, P_M, n_M // 32, False, sigma, kappa)


def shifted(x, fr):
    """x' of a logit."""
    y = map_logit(x, fr.sigma, fr.kappa)
    return y if fr.c == 0 else add32(y, -fr.c)


# ---------------------------------------------------------------------------------------------------------------------
# Mapped logits (section 12)

TANH_END = 32.0
RECIP_F = [rn(quotient64(n, 99.0), "fp32") for n in (32.0, -144.0, 210.0)]


def map_logit(x, sigma=1.0, kappa=None):
    if kappa is None:
        return mul32(sigma, x)
    return x if not _finite(x) else math.copysign(_capped(abs(x), sigma, kappa), x)


@functools.lru_cache(1 << 16)
def _capped(x, sigma, kappa):
    k = rn(quotient64(2 * sigma, kappa), "fp32")                # doubling is exact
    assert _finite(k), ("no meaning is given to", sigma, kappa)
    s = -min(abs(mul32(k, x)), TANH_END)
    n, r, q = reduced(s)
    v = mul32(q, r)
    power = math.ldexp(1.0, int(n))
    e = fma32(power, v, add32(power, -1.0))
    d = add32(e, 2.0)
    h = fma32(fma32(RECIP_F[0], d, RECIP_F[1]), d, RECIP_F[2])
    for _ in range(2):
        j = fma32(-d, h, 1.0)
        h = fma32(h, j, h)
    t = mul32(e, h)
    return mul32(-fma32(fma32(-t, d, e), h, t), kappa)


def slope(y, kappa=None):
    """d map / dx over sigma."""
    if kappa is None:
        return 1.0
    if y == -INF:
        return 0.0
    u = mul32(y, rn(quotient64(1.0, kappa), "fp32"))
    d = fma32(-u, u, 1.0)
    return d if d > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Term (section 3)

LOG2E_F = H("0x1.715476p+0")
MAGIC_F = H("0x1.8p+23")
LN2_HI_F = H("0x1.62e430p-1")
LN2_LO_F = H("-0x1.05c610p-29")
POLY_F = [H("0x1.6a234ep-10"), H("0x1.123a6cp-7"), H("0x1.5558f4p-5"), H("0x1.55549p-3"), H("0x1.fffffcp-2"), 1.0]

_terms = {}


def term(x):
    """(P, n) of a shifted logit, None where it has none. A logit above 2^20 or NaN never gets here."""
    if x < -2.0 ** 21:
        return None
    found = _terms.get(x)                                       # +0 and -0 share an entry: their terms are equal
    if found is None:
        assert x <= LIMIT + 1, ("no term is defined for", x)    # a mapped logit may be a few ulps above the maximum's
        if len(_terms) > 1 << 20:
            _terms.clear()
        found = _terms[x] = _term(x)
    return found


def reduced(x):
    """n, r and the last q of an exponential."""
    z = fma32(x, LOG2E_F, MAGIC_F)
    n = add32(z, -MAGIC_F)
    r = fma32(-n, LN2_HI_F, x)
    r = fma32(-n, LN2_LO_F, r)
    q = POLY_F[0]
    for c in POLY_F[1:]:
        q = fma32(q, r, c)
    return n, r, q


def _term(x):
    n, r, q = reduced(x)
    t = fma32(q, r, 1.5)
    assert 1 < t < 2, (x, t)
    P = bits32(t) - 0x3F400000
    assert (1 << 22) < P < (1 << 24), (x, P)
    return P, int(n)


# ---------------------------------------------------------------------------------------------------------------------
# Digits (section 4)

MASK64 = (1 << 64) - 1


def mix64(k):
    k ^= k >> 30
    k = k * 0xBF58476D1CE4E5B9 & MASK64
    k ^= k >> 27
    k = k * 0x94D049BB133111EB & MASK64
    k ^= k >> 31
    return k


def tag(M, v, h=0):
    return mix64(((bits32(canonical_max(M)) << 32) + v + h) & MASK64) >> 24


def salt_of(sigma=1.0, kappa=None, kind=None):
    """h of section 12; kind: 1 for sums of logits, 2 for statistics."""
    h = 0 if (sigma, kappa) == (1.0, None) else mix64((bits32(sigma) << 32) + (0 if kappa is None else bits32(kappa)))
    return h if kind is None else mix64((h + kind) & MASK64)


def tag_of(M, lo, hi, h=0):
    return tag(M, hi, h) - tag(M, lo, h)


def contribution(x, fr):
    """What one logit adds to S: P << (n - 32 (B - 4)), 0 where the term is dropped."""
    pn = term(shifted(x, fr))
    if pn is None or pn[1] < 32 * (fr.B - 4):
        return 0
    return pn[0] << (pn[1] - 32 * (fr.B - 4))


def relative(x, fr):
    """a of section 7: the term in units of 2^n_M."""
    pn = term(shifted(x, fr))
    return math.ldexp(pn[0], pn[1] - fr.n_M - 23) if pn is not None and pn[1] - fr.n_M >= -125 else 0.0     # exact


def split_digits(S):
    return [S >> 32 * i & 0xFFFFFFFF for i in range(5)] + [S >> 160]


def faulty(x, fr):
    """NaN or above the maximum; in a degenerate row only where the maximum is negative."""
    return not x <= fr.M and (not fr.degenerate or fr.M < 0)


def denom_digits(row, M, lo=0, hi=None, v_start=0, sigma=1.0, kappa=None):
    """The eight words of columns [lo, hi) of `row`, which are the columns v_start + [lo, hi) of the whole row."""
    hi = len(row) if hi is None else hi
    fr = frame(M, sigma, kappa)
    if lo == hi:
        return [0] * 8
    S = faults = 0
    for x in row[lo:hi]:
        if faulty(x, fr):
            faults += 1
        elif not fr.degenerate:
            S += contribution(x, fr)
    return split_digits(S) + [hi - lo + (faults << 32), tag_of(M, v_start + lo, v_start + hi, salt_of(sigma, kappa))]


def carry(words, last=5, radix=32):
    words = list(words)
    for i in range(last):
        words[i + 1] += words[i] >> radix                       # Python's shift is the floor
        words[i] &= (1 << radix) - 1
    return words


def mark(word, bit):
    """(how many marks of 2^bit a word carries beside a number below 2^(bit - 1) in magnitude, that number)."""
    marks = word + (1 << bit - 1) >> bit
    return marks, word - (marks << bit)


# ---------------------------------------------------------------------------------------------------------------------
# fp64 functions (section 5)

LN2_HI = H("0x1.62e42feep-1")
LN2_LO = H("0x1.a39ef35793c76p-33")
RECIP_A, RECIP_B = H("-0x1.e1e1e1e1e1e1ep-2"), H("0x1.6969696969697p+0")
SPLIT_LO, SPLIT_HI = H("0x1.6a09e667f3bcdp-1"), H("0x1.6a09e667f3bcdp+0")
EXP_POLY = [_round_ratio(1, math.factorial(k), "fp64") for k in range(13, -1, -1)]
LOG_POLY = [_round_ratio(2, k, "fp64") for k in range(21, 2, -2)]


def recip(d):
    assert 1 <= d < 2
    y = fma64(RECIP_A, d, RECIP_B)
    for _ in range(4):
        e = fma64(-d, y, 1.0)
        y = fma64(y, e, y)
    return y


def div(a, b):
    m, e = math.frexp(b)                                        # exact; b > 0
    d, k = 2 * m, e - 1
    y = recip(d)
    q = mul64(a, y)
    w = fma64(-q, d, a)
    q = fma64(w, y, q)
    return scale64(q, -k)


def exp_r(r):
    assert abs(r) < 0.4
    y = EXP_POLY[0]
    for c in EXP_POLY[1:]:
        y = fma64(y, r, c)
    return y


def exp_reduced(x, n):
    """e^(x - n ln 2) for the n of x's term."""
    r = fma64(float(-n), LN2_HI, x)
    return exp_r(fma64(float(-n), LN2_LO, r))


def log_1p_f(f):
    assert -0.3 <= f <= 0.42
    s = div(f, add64(2.0, f))
    w = mul64(s, s)
    p = LOG_POLY[0]
    for c in LOG_POLY[1:]:
        p = fma64(p, w, c)
    p = mul64(p, w)
    return fma64(s, p, 2 * s)                                   # doubling is exact


def split(d, k=0):
    """d * 2^k as (m, k')."""
    m, e = math.frexp(d)                                        # m in [0.5, 1)
    if m < SPLIT_LO:
        m, e = 2 * m, e - 1
    assert SPLIT_LO <= m < SPLIT_HI
    return m, e + k


def log1p(h):
    w = add64(1.0, h)
    m, k = split(w)
    f = h if k == 0 else add64(m, -1.0)
    return fma64(float(k), LN2_HI, fma64(float(k), LN2_LO, log_1p_f(f)))


def significand(S, u):
    """S * 2^u as (s, k): s = RN64 of the significand, in [1, 2); (0, 0) for nothing."""
    if S == 0:
        return 0.0, 0
    s = _round(S, 1 - S.bit_length(), "fp64")                   # in [1, 2]
    k = S.bit_length() - 1 + u
    return (1.0, k + 1) if s == 2.0 else (s, k)


# ---------------------------------------------------------------------------------------------------------------------
# Finalize (section 6)

Final = namedtuple("Final", "loss denom state status")

# A row before options and before anything is rounded to fp32: l, L and p of section 12, x'_t, whether the target's term is kept, and L for c = 0 besides. L, denom and inv hold where the target alone is wrong.
Settled = namedtuple("Settled", "status l L denom inv tgt p xp kept unshifted", defaults=(NAN,) * 9)


def settle(words, row, t, M, V, ignore_index=-100, sigma=1.0, kappa=None):
    """`row` is the whole row, or a function of the target's column that gives its logit."""
    if t == ignore_index:
        return Settled("ignored", *(0.0,) * 7)
    if words[6] != V or words[7] != tag_of(M, 0, V, salt_of(sigma, kappa)):
        return Settled("check")
    fr = frame(M, sigma, kappa)
    if fr.degenerate:
        return Settled("degenerate")
    words = carry(words)
    S = sum(w << 32 * i for i, w in enumerate(words[:6]))
    inside = 0 <= t < V
    if words[5] < 0 or words[5] >= 1 << 54 or S < fr.P_M << fr.n_M - 32 * (fr.B - 4):
        return Settled("impossible")
    T = 0
    if inside:
        x_t = row(t) if callable(row) else row[t]
        if x_t != x_t or x_t > fr.M:
            return Settled("impossible")
        T = contribution(x_t, fr)
        if S < T:
            return Settled("impossible")
    u = 32 * (fr.B - 4) - 23
    s, ks = significand(S, u)
    ys = recip(s)
    denom = scale64(div(s, exp_reduced(fr.Mp, fr.n_M)), ks - fr.n_M)
    m, k = split(s, ks)
    lower = fma64(float(k), LN2_LO, log_1p_f(add64(m, -1.0)))
    L, unshifted = (add64(lower, fma64(float(k), LN2_HI, c)) for c in (fr.c, 0.0))
    inv = scale64(ys, fr.n_M - ks)
    if not inside:
        return Settled("target", L=L, denom=denom, inv=inv)
    d, kd = significand(S - T, u)
    xp = shifted(x_t, fr)
    if T:
        P_t, n_t = term(xp)
        l = log1p(scale64(div(d, exp_reduced(xp, n_t)), kd - n_t))
        p = scale64(mul64(float(P_t), ys), n_t - 23 - ks)
    else:
        l = add64(lower, fma64(float(k), LN2_HI, -add64(map_logit(x_t, sigma, kappa), -fr.c)))
        p = 0.0
    return Settled("ok", l, L, denom, inv, scale64(-mul64(d, ys), kd - ks), p, xp, T > 0, unshifted)


def loss_of_maximum(words, M, V, sigma=1.0, kappa=None):
    """l_M: of a target whose logit is the maximum."""
    return settle(words, lambda _: M, 0, M, V, -1, sigma, kappa).l


def finalize(words, row, t, M, V=None, ignore_index=-100, sigma=1.0, kappa=None):
    r = settle(words, row, t, M, len(row) if V is None else V, ignore_index, sigma, kappa)
    return Final(rn(r.l, "fp32"), rn(r.denom, "fp32"), (NAN, NAN) if r.status == "target" else (r.inv, r.tgt), r.status)


def forward(row, t, ignore_index=-100):
    """A row from its logits alone: what `forward` gives for it, with the maximum it reports."""
    if t == ignore_index:
        return finalize(None, row, t, NAN, len(row), ignore_index), -INF
    M = row_max(row)
    return finalize(denom_digits(row, M), row, t, M, len(row), ignore_index), M


# ---------------------------------------------------------------------------------------------------------------------
# Gradient (section 7)


def gradient(row, t, M, state, g, count=None, dtype="fp32", lo=0, hi=None, ignore_index=-100):
    """Columns [lo, hi) of the row's gradient, as floats of the dtype. `count` is given for "mean" alone."""
    hi = len(row) if hi is None else hi
    if t == ignore_index:
        return [0.0] * (hi - lo)
    G = div(g, float(count)) if count is not None and _finite(g) else g
    inv, tgt = state
    f = rn(mul64(G, inv), "fp32")
    ft = rn(mul64(G, tgt), "fp32")
    if not _finite(f):
        return [NAN] * (hi - lo)
    fr = frame(M)
    out = []
    for v in range(lo, hi):
        if v == t:
            out.append(rn(ft, dtype))
            continue
        out.append(rn(mul32(relative(row[v], fr), f), dtype))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Exact reductions (section 8)


def loss_words(losses, targets, ignore_index=-100):
    words = [0] * 12
    for loss, t in zip(losses, targets):
        if t == ignore_index:
            continue
        words[9] += 1
        if not _finite(loss):
            words[10] += loss != -INF
            words[11] += loss != INF
            continue
        pattern = bits32(loss)
        sign = -1 if pattern >> 31 else 1
        field, mant = pattern >> 23 & 0xFF, pattern & 0x7FFFFF
        if field:
            mant, field = mant | 1 << 23, field - 1             # field is now `pos`
        j, shift = divmod(field, 32)
        y = mant << shift
        words[j] += sign * (y & 0xFFFFFFFF)
        words[j + 1] += sign * (y >> 32)
    return words


def reduce(words, reduction="mean"):
    if words[10] > 0 and words[11] > 0:
        return NAN
    if words[10] > 0:
        return INF
    if words[11] > 0:
        return -INF
    L = sum(w << 32 * j for j, w in enumerate(words[:9]))
    if reduction == "mean":
        if words[9] < 1:
            return NAN
        out = _round_ratio(L, words[9] << 149, "fp32")
    else:
        out = _round(L, -149, "fp32")
    return out if out != 0 else 0.0


def batch(rows, targets, reduction, ignore_index=-100):
    """The whole of cross_entropy: (result or list of losses, [Final], [M], words)."""
    finals, maxima = [], []
    for row, t in zip(rows, targets):
        final, M = forward(row, t, ignore_index)
        finals.append(final)
        maxima.append(M)
    losses = [f.loss for f in finals]
    words = loss_words(losses, targets, ignore_index)
    return (losses if reduction == "none" else reduce(words, reduction)), finals, maxima, words


# ---------------------------------------------------------------------------------------------------------------------
# Between ranks (section 11)


def rank_salt(ignore_index, reduction, rows, lam=0.0, valid=0, weighted=False, epsilon=0.0, sigma=1.0, kappa=None, V=0, by_items=False, replicas=0):
    parts = [ignore_index, ("none", "mean", "sum").index(reduction) + 4 * by_items + 8 * V + 2**34 * replicas, rows]
    if lam or valid or weighted:
        parts += [bits64(lam), valid]
    if epsilon or (sigma, kappa) != (1.0, None):
        parts += [bits64(epsilon), bits32(f32(sigma)), 0 if kappa is None else bits32(f32(kappa))]
    return functools.reduce(lambda salt, part: mix64((salt + part) & MASK64), parts, 0)


def hash_of_weights(weight):
    return sum(mix64((v + 1 << 32) + bits32(w)) for v, w in enumerate(weight)) & MASK64


def rank_word(t, salt, c, logit=None, *more):
    """Of a rank with share c of the agreement. logit: the target's, if the rank has it; more: what else is hashed, as integers."""
    h = functools.reduce(lambda h, part: mix64((h + part) & MASK64), (t, *more), salt)
    return ((h >> 32) * c * 2**32 + (0 if logit is None else 2**32 + bits32(logit))) & MASK64


def agreed(word, t, ignore_index=-100):
    high, low = divmod(word, 2**32)
    if word == 0:
        return t, NAN
    if high == 1 and t != ignore_index:
        return t, from_bits32(low)
    return (-2 if ignore_index == -1 else -1), NAN


# ---------------------------------------------------------------------------------------------------------------------
# Options (section 12)

Optioned = namedtuple("Optioned", "loss lse z state")


def logit_words(row, M, lo=0, hi=None, v_start=0, weight=None, sigma=1.0, kappa=None):
    """The four words of the sum of logits, and the tag; `weight` is that of all columns of the whole row."""
    hi = len(row) if hi is None else hi
    fr = frame(M, sigma, kappa)
    Z, infinite = 0, False
    for v in range(lo, hi):
        if fr.degenerate or faulty(row[v], fr):
            continue
        p = shifted(row[v], fr)
        if weight is not None:
            w = weight[v_start + v]
            p = mul32(w, add32(p, -fr.Mp)) if w != 0 else 0.0
        if _finite(p):
            Z += nearest(p, 31)
        else:
            infinite = True
    own_tag = tag_of(M, v_start + lo, v_start + hi, salt_of(sigma, kappa, 1))
    return [Z >> 48 * i & (1 << 48) - 1 for i in range(3)] + [(Z >> 144) + (infinite << 47), own_tag]


def exact_sum(values):
    """RN64 of the exact sum; NaN if one of them is not finite."""
    if not _finite(*values):
        return NAN
    total = sum(map(Fraction, values))
    return _round_ratio(total.numerator, total.denominator, "fp64")


def options(words, row, t, M, lam=0.0, weight=None, U=None, ignore_index=-100, epsilon=0.0, logits=None, sigma=1.0, kappa=None):
    """`row` is the whole row, padding included; `words`, and with smoothing (`epsilon`) `logits`, are those of its columns [0, U); `weight` a list, one a class."""
    U = len(row) if U is None else U
    r = settle(words, row, t, M, U, ignore_index, sigma, kappa)
    if r.status == "ignored":
        return Optioned(0.0, 0.0, 0.0, (0.0,) * 4)
    z = mul64(mul64(lam, r.L), r.L)
    lse, rounded_z = rn(r.L, "fp32"), rn(z, "fp32")
    if r.status != "ok":                                        # L is NaN but where the target alone is wrong
        return Optioned(NAN, lse, rounded_z, (NAN,) * 4)
    w = 1.0 if weight is None else weight[t] if t < len(weight) else NAN
    e = r.l if weight is None else mul64(w, r.l)
    o, q = w, mul64(w, r.tgt)
    if epsilon:
        V, rest = float(U), add64(1.0, -epsilon)
        W = V if weight is None else exact_sum(weight[:U])
        *low, top = carry(logits[:4], 3, 48)
        infinite, top = mark(top, 47)
        B = scale64(_round(sum(word << 48 * i for i, word in enumerate([*low, top])), 0, "fp64"), -31)
        if not _finite(W):
            mean = NAN
        elif infinite > 0:
            mean = INF
        else:
            if weight is not None:
                total = fma64(W, loss_of_maximum(words, M, U, sigma, kappa), -B)
            else:
                total = fma64(W, r.l, fma64(W, r.xp, -B)) if r.kept else fma64(W, r.unshifted, -B)
            mean = div(total, V)
        e = fma64(epsilon, mean, mul64(rest, e))
        O = 1.0 if weight is None else div(W, V)
        o = fma64(rest, w, mul64(epsilon, O))
        q = fma64(epsilon, fma64(O, r.p, -div(w, V)), mul64(rest, q))
    loss, inv2, tgt2 = e, mul64(r.inv, o), q
    if lam != 0:
        two = scale64(lam, 1)
        loss, inv2, tgt2 = add64(e, z), mul64(r.inv, fma64(two, r.L, o)), fma64(mul64(two, r.L), r.p, q)
    at_target = mul64(sigma, slope(map_logit(row[t], sigma, kappa), kappa))
    state = mul64(inv2, sigma), mul64(tgt2, at_target), mul64(r.inv, sigma), mul64(r.p, at_target)
    return Optioned(rn(loss, "fp32"), lse, rounded_z, state)


def upstream(g, words=None, by=None):
    """G of section 7: by is None, "count" or "weights"."""
    if by is None or not _finite(g):
        return g
    if by == "count":
        return div(g, float(words[9])) if words[9] > 0 else NAN
    W = sum(w << 32 * j for j, w in enumerate(words[12:21]))
    if words[22] > 0 or words[23] > 0 or W == 0:
        return NAN
    W = _round(W, -149, "fp64")
    return div(-g, -W) if W < 0 else div(g, W)


def gradient_with(row, t, M, state, G, g_lse=None, dtype="fp32", U=None, ignore_index=-100, weight=None, epsilon=0.0, sigma=1.0, kappa=None):
    """The whole row's gradient; the state has four numbers. `weight` counts with smoothing alone: the target's is in the state."""
    U = len(row) if U is None else U
    if t == ignore_index:
        return [0.0] * len(row)
    inv2, tgt2, inv, p = state
    f, ft = mul64(G, inv2), mul64(G, tgt2)
    if g_lse is not None:
        f, ft = fma64(g_lse, inv, f), fma64(g_lse, p, ft)
    f, ft = rn(f, "fp32"), rn(ft, "fp32")
    k = rn(mul64(G, mul64(-div(epsilon, float(U)), sigma)), "fp32") if epsilon else 0.0
    if not _finite(f, k):
        return [NAN] * U + [0.0] * (len(row) - U)
    fr = frame(M, sigma, kappa)
    out = []
    for v in range(U):
        a, down = relative(row[v], fr), slope(map_logit(row[v], sigma, kappa), kappa)
        if kappa is not None:
            a = mul32(a, down)
        if not epsilon:
            column = mul32(a, f)
        else:
            k_v = k if weight is None else mul32(k, weight[v])
            column = fma32(a, f, k_v if kappa is None else mul32(k_v, down))
        out.append(rn(ft if v == t else column, dtype))
    return out + [0.0] * (len(row) - U)


def weighed(words, targets, weight, ignore_index=-100):
    """The twelve words of a batch, and the twelve of its targets' weights."""
    own = loss_words([weight[t] if 0 <= t < len(weight) else NAN for t in targets], targets, ignore_index)
    return words + own[:9] + [0] + own[10:]


def divide(words, by):
    if by == "count":
        return reduce(words, "mean")
    plus, minus = words[10] > 0, words[11] > 0
    if plus and minus or words[22] > 0 or words[23] > 0:
        return NAN
    L, W = (sum(w << 32 * j for j, w in enumerate(words[i : i + 9])) for i in (0, 12))
    if plus or minus or (W == 0 and L != 0):
        negative = (minus if plus or minus else L < 0) != (W < 0)
        return -INF if negative else INF
    if W == 0:
        return NAN
    out = _round_ratio(-L if W < 0 else L, abs(W), "fp32")
    return out if out != 0 else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Statistics of a row (section 13)

RowStats = namedtuple("RowStats", "lse logprob entropy max_abs hit")


def stat_words(row, t, M, lo=0, hi=None, v_start=0, ignore_index=-100, sigma=1.0, kappa=None):
    """A shard's ([word 0, word 1, tag], least)."""
    hi = len(row) if hi is None else hi
    least = min((x for x in row[lo:hi] if x > -INF), default=INF)           # NaN is not above
    own_tag = tag_of(M, v_start + lo, v_start + hi, salt_of(sigma, kappa, 2))
    if t == ignore_index:
        return [0, 0, own_tag], least
    fr = frame(M, sigma, kappa)
    if fr.degenerate:
        return [0, 0, own_tag], least
    E, before = 0, False
    for v in range(lo, hi):
        if faulty(row[v], fr):
            continue
        xp = shifted(row[v], fr)
        if term(xp) is not None:
            E += nearest(mul32(relative(row[v], fr), add32(fr.Mp, -xp)), 43)
        before = before or (v_start + v < t and row[v] == fr.M)
    return [E & (1 << 40) - 1, (E >> 40) + (before << 40), own_tag], least


def row_stats(stats, least, words, row, t, M, V=None, ignore_index=-100, sigma=1.0, kappa=None):
    """From the summed words of section 13, the least of the shards' least and the summed words of section 4."""
    r = settle(words, row, t, M, len(row) if V is None else V, ignore_index, sigma, kappa)
    if r.status == "ignored":
        return RowStats(0.0, 0.0, 0.0, 0.0, False)
    if r.status not in ("ok", "target"):
        return RowStats(NAN, NAN, NAN, NAN, False)
    low, top = carry(stats[:2], 1, 40)
    before, top = mark(top, 40)
    fr = frame(M, sigma, kappa)
    of_maximum = loss_of_maximum(words, M, len(row) if V is None else V, sigma, kappa)
    spread = mul64(scale64(_round(low + (top << 40), 0, "fp64"), -43), r.inv)
    logprob = rn(-r.l, "fp32")
    return RowStats(
        rn(r.L, "fp32"), logprob if logprob != 0 else 0.0, rn(add64(of_maximum, spread), "fp32"),
        max(abs(map_logit(x, sigma, kappa)) for x in (fr.M, least)), r.status == "ok" and row[t] == fr.M and before == 0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Exact sum of squares (section 15)


def square_words(values):
    finite = [_dyadic(x) for x in values if _finite(x)]
    Q = sum(m * m << 2 * (e + 149) if e >= -149 else m * m >> 2 * (-149 - e) for m, e in finite)
    return [Q >> 32 * i & 0xFFFFFFFF for i in range(18)] + [Q >> 576, sum(abs(x) == INF for x in values), sum(x != x for x in values)]


def norm(words):
    if words[20] > 0:
        return NAN
    if words[19] > 0:
        return INF
    Q = sum(w << 32 * i for i, w in enumerate(words[:19]))
    if Q < 0:
        return NAN
    root = math.isqrt(Q << 400)                                 # 200 bits more than the root of Q has, and one that stands for all the rest
    return _round(root << 1 | (root * root != Q << 400), -149 - 201, "fp64")


def f32(x):
    """The float that the fp32 nearest to x is (for writing test rows)."""
    return struct.unpack("<f", struct.pack("<f", x))[0]
