"""Rows that the tests share, and the comparison of tensors with what the oracle says, bit by bit."""
import math
import random

import torch

import oracle as o

INF, NAN = math.inf, math.nan
SUB = 2.0 ** -149                                               # the smallest fp32
LN2 = math.log(2)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
FORMAT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def tensor_of(rows, dtype):
    """Rows of floats as a tensor: rounded to nearest by way of fp64 (an overflow becomes an infinity, which is a case too)."""
    return torch.tensor(rows, dtype=torch.float64).to(DTYPES.get(dtype, dtype))


def rows_of(tensor):
    """The rows of a tensor as the oracle takes them."""
    return tensor.detach().double().cpu().reshape(-1, tensor.shape[-1]).tolist()


def patterns(tensor):
    """The bits of every element, as non-negative ints."""
    tensor = tensor.detach().cpu().contiguous()
    width = tensor.element_size() * 8
    return [p & ((1 << width) - 1) for p in tensor.view(INTEGERS[tensor.dtype]).reshape(-1).tolist()]


def assert_bits(got, expected, what=""):
    """A floating-point tensor has exactly these values: bit patterns, so -0, +0 and every NaN count."""
    fmt = FORMAT[got.dtype]
    expected = [expected] if isinstance(expected, float) else list(expected)
    got = patterns(got)
    want = [o.bits(x, fmt) for x in expected]
    assert len(got) == len(want), f"{what}: {len(got)} values, expected {len(want)}"
    wrong = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
    if wrong:
        i = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(got)} wrong, first at {i}: got {got[i]:#x} ({o.from_bits(got[i], fmt)!r}), "
            f"expected {want[i]:#x} ({expected[i]!r})")


def assert_same(a, b, what=""):
    """Two tensors are the same bytes."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
    a, b = (x.detach().cpu().contiguous() for x in (a, b))
    if a.dtype in INTEGERS:
        a, b = a.view(INTEGERS[a.dtype]), b.view(INTEGERS[b.dtype])
    assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} differ"


def at(n):
    """A logit in the middle of exponent n: its term has that n, in every dtype that still tells neighbours apart there."""
    return n * LN2


def window_rows():
    """The largest exponent at and around the edges of its block (n_M mod 32 = 0, 1, 15, 31), small and large, both signs;
    the others every distance below it at which an implementation may change window, digit or mind: one 32-bit word, two,
    three; 125, where the gradient becomes zero; 127 to 129, where dropping may begin, and 159 to 161, where it must."""
    gaps = [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 124, 125, 126, 127, 128, 129, 130, 157, 158, 159, 160, 161, 200, 3000]
    rows = {}
    for top in (0, 1, 15, 31, 32, 33, 63, 64, 100, 127, 128, 160, 1023, 1024, 32 * 9000, 32 * 9000 + 31, 1512000,
                -1, -2, -31, -32, -33, -64, -128, -160, -161, -1024, -1025, -32 * 9000 - 1, -1512000):
        row = [at(top - gap) for gap in gaps]
        rows[f"n_M {top}"] = (row, 0)
        rows[f"n_M {top}, low target"] = (row[::-1], 12)
        rows[f"n_M {top}, lower target"] = (row, 17)
    return rows


def special_rows():
    rng = random.Random(99)
    rows = {
        "one column": ([0.3], 0), "two columns": ([0.3, -7.1], 1), "one column of -inf": ([-INF], 0),
        "one column of nan": ([NAN], 0), "one column of inf": ([INF], 0), "one column at 3e38": ([3e38], 0),
        "zeros of both signs": ([-0.0, 0.0, -0.0], 0), "negative zeros": ([-0.0, -0.0], 1),
        "all equal": ([1.7] * 37, 36), "all equal and large": ([3e38] * 9, 4), "all equal and low": ([-3e38] * 9, 4),
        "all -inf": ([-INF] * 9, 3), "one finite logit": ([-INF] * 11 + [2.5] + [-INF] * 4, 11),
        "one finite logit, other target": ([-INF] * 11 + [2.5] + [-INF] * 4, 10),
        "inf": ([1.0, INF, 2.0], 0), "inf twice": ([INF, 1.0, INF], 0), "inf and nan": ([INF, NAN, 0.0], 2),
        "inf and -inf": ([INF, -INF], 1),
        "confident": ([20.0] + [0.0] * 40, 0), "very confident": ([90.0] + [0.0] * 40, 0),
        "confident and wrong": ([90.0] + [0.0] * 40, 5), "beyond words": ([500.0] + [0.0] * 40, 0),
        "target dropped": ([500.0] + [0.0] * 40, 5), "target -inf": ([1.0, 2.0, -INF, 0.5], 2),
        "subnormals": ([SUB, -SUB, 3 * SUB, 2.0 ** -127, -2.0 ** -126, 2.0 ** -24, -2.0 ** -25], 1),
        "spread over everything": ([3e38, -3e38, 1e30, -1e30, 1e10, 5.0, -5.0, 0.0], 5),
        "spread, target on top": ([3e38, -3e38, 1e30, -1e30, 1e10, 5.0, -5.0, 0.0], 0),
        "two at 1e8": ([1e8, 1e8], 0), "around 1e8": ([1e8, 1e8 - 8, 1e8 - 64, 1e8 - 104, 1e8 - 120], 2),
        "around -1e8": ([-1e8, -1e8 - 8, -1e8 - 64, -1e8 - 104, -1e8 - 120], 2),
        "60000, the top of fp16": ([6e4, 59968.0, 59936.0, -6e4], 1),
    }
    # The maximum just below, at and just above the limit where a row is shifted, both signs. Others are near enough to be
    # kept; one is below -2^21, where a logit has no term.
    limit = 2.0 ** 20
    for step, name in ((-1, "below"), (0, "at"), (1, "above")):
        for sign in (1, -1):
            top = sign * (limit + step * 0.0625 * (2 if step > 0 else 1))
            rows[f"{name} {'-' if sign < 0 else ''}2^20"] = \
                ([top, top - 0.5, top - 3.0, top - 60.0, top - 87.5, top - 110, -2.0 ** 21, -2.0 ** 21 - 0.25, -2.5 * limit], 2)
    rows["bf16 steps at 2^20"] = ([limit * (1 - 2.0 ** -8), limit * (1 - 2.0 ** -7), limit * 0.5], 0)
    # One NaN in each position of a row as long as two vectors and a bit, whatever the width of a vector.
    for i in range(19):
        row = [rng.gauss(0, 3) for _ in range(19)]
        row[i] = NAN
        rows[f"nan at {i}"] = (row, (i + 5) % 19)
    # ... and of +inf, at the ends and in the middle
    for i in (0, 9, 18):
        row = [rng.gauss(0, 3) for _ in range(19)]
        row[i] = INF
        rows[f"inf at {i}"] = (row, i)
    return rows


def normal(V, seed, scale=4.0):
    rng = random.Random(seed)
    return [rng.gauss(0, scale) for _ in range(V)]


# Around the lengths of vectors (4, 8, 16, 32 elements), of a block of threads' share and of unrolled loops, each with one
# more and one less; 1023 and 1025 around a chunk; 4099 for several chunks and an odd row stride.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1024,
           1025, 4099]
