"""The exact sum of squares against Python integers: words, cuts and orders, the rounding of the root, layouts, wrong arguments; and the arithmetic of the GPU, compiled for the CPU."""
import math
import os
import random
import re
import shutil
import struct
import subprocess

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle as o
from cases import DTYPES, INF, INTEGERS, NAN, assert_bits, assert_same
from conftest import load_kernel

HERE = os.path.dirname(os.path.abspath(__file__))


def from_patterns(patterns, dtype="fp32"):
    dtype = DTYPES[dtype]
    width = torch.empty(0, dtype=dtype).element_size() * 8
    signed = [p % 2**width - (2**width if p % 2**width >> width - 1 else 0) for p in patterns]
    return torch.tensor(signed, dtype=INTEGERS[dtype]).view(dtype)


def words_of(tensor):
    return o.square_words(tensor.detach().double().reshape(-1).tolist())


def check(dce, tensor, what=""):
    """Words and norm of a tensor are those of the oracle."""
    digits, words = dce.square_digits(tensor), words_of(tensor)
    assert digits.dtype == torch.int64 and digits.shape == (21,) and digits.is_contiguous()
    assert digits.tolist() == words, what
    norm = dce.grad_norm(digits)
    assert norm.dtype == torch.float64 and norm.shape == ()
    assert_bits(norm, o.norm(words), what)
    return digits


# ---------------------------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_exponent(dce, dtype):
    """Of both signs, the least and the greatest significand; all alone and all at once."""
    top = {"fp32": 24, "bf16": 8, "fp16": 11}[dtype] - 1
    width = 32 if dtype == "fp32" else 16
    values = [sign << width - 1 | exponent << top | fraction for exponent in range(2 ** (width - 1 - top)) for fraction in (0, 1, (1 << top) - 1) for sign in (0, 1)]
    for value in values:
        check(dce, from_patterns([value], dtype), hex(value))
    finite = [v for v in values if v % 2 ** (width - 1) < (2 ** (width - 1 - top) - 1) << top]
    check(dce, from_patterns(finite, dtype))
    check(dce, from_patterns(values, dtype))


@pytest.mark.parametrize("dtype", list(DTYPES))
@settings(max_examples=150, deadline=None)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), max_size=80))
def test_any_bits(dtype, patterns):
    check(load_kernel(), from_patterns(patterns, dtype))


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_like_gradients(dce, dtype, scale):
    check(dce, (torch.randn(5003, generator=torch.Generator().manual_seed(1)) * scale).to(DTYPES[dtype]))


def test_greatest_and_many(dce):
    """2^17 elements of the greatest fp32: more than a bin takes, and the highest word that they reach."""
    big = torch.full((2**17 + 3,), torch.finfo(torch.float32).max)
    digits = dce.square_digits(big)
    total = ((2**24 - 1) ** 2 << 506) * len(big)
    assert digits.tolist() == [total >> 32 * i & 0xFFFFFFFF for i in range(18)] + [total >> 576, 0, 0]
    assert_bits(dce.grad_norm(digits), o.norm(digits.tolist()))


@pytest.mark.parametrize("value, word", [(INF, 19), (-INF, 19), (NAN, 20), (-NAN, 20)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_not_finite(dce, dtype, value, word):
    x = torch.arange(70.0).to(DTYPES[dtype])
    x[5:8] = value
    digits = check(dce, x)
    assert digits[word] == 3 and digits[19:].sum() == 3
    x[9] = INF
    check(dce, x)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_cuts_and_orders_add_to_the_same(dce, dtype):
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(3001, generator=generator) * torch.exp(20 * torch.randn(3001, generator=generator)).clamp(1e-40, 1e37)).to(DTYPES[dtype])
    whole = dce.square_digits(x)
    for cuts in ([0, 3001], [0, 0, 1, 7, 1500, 2999, 3001], list(range(0, 3002, 1))):
        parts = [dce.square_digits(x[lo:hi]) for lo, hi in zip(cuts, cuts[1:])]
        random.Random(3).shuffle(parts)
        assert_same(dce.grad_norm(torch.stack(parts).sum(0)), dce.grad_norm(whole))
        words = torch.stack(parts).sum(0).tolist()
        assert sum(w << 32 * i for i, w in enumerate(words[:19])) == sum(w << 32 * i for i, w in enumerate(whole.tolist()[:19])) and words[19:] == whole[19:].tolist()
    for _ in range(3):
        assert_same(dce.square_digits(x[torch.randperm(3001, generator=generator)]), whole)
    assert_same(dce.square_digits(-x), whole)


def test_threads(dce):
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(4))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(dce.square_digits(x))
    finally:
        torch.set_num_threads(before)
    for digits in results[1:]:
        assert_same(digits, results[0])
    values = x.double().square()  # 48 bits: exact; the sum is rounded
    assert float(dce.grad_norm(results[0])) == pytest.approx(float(values.sum().sqrt()), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The root


def sum_words(Q):
    return torch.tensor([Q >> 32 * i & 0xFFFFFFFF for i in range(18)] + [Q >> 576, 0, 0])


def test_root_is_rounded_once(dce):
    """Around squares of what fp64 holds and of what lies halfway, where one unit of the sum decides; at every length."""
    rng = random.Random(5)
    for _ in range(3000):
        root = rng.randrange(2**53, 2**54) | rng.randrange(2)
        shift = rng.choice([0, rng.randrange(260)])
        Q = (root * root << 2 * shift) + rng.choice([-1, 0, 1, rng.randrange(-(2**20), 2**20)])
        assert_bits(dce.grad_norm(sum_words(Q)), o.norm(sum_words(Q).tolist()), hex(Q))
    for length in range(1, 638):
        for Q in (1 << length - 1, (1 << length) - 1, rng.getrandbits(length)):
            assert_bits(dce.grad_norm(sum_words(Q)), o.norm(sum_words(Q).tolist()), hex(Q))


def test_root_against_mpmath(dce):
    rng = random.Random(6)
    for _ in range(300):
        Q = rng.getrandbits(rng.randrange(1, 595))
        with mpmath.workprec(1000):
            root = mpmath.sqrt(mpmath.mpf(Q)) * mpmath.mpf(2) ** -149
        with mpmath.workprec(53):
            assert float(dce.grad_norm(sum_words(Q))) == float(+root)


def test_root_whatever_the_words(dce):
    """Carry-save, borrowed, negative and wrapped: as the oracle says, and never a trap."""
    rng = random.Random(7)
    for _ in range(500):
        words = [rng.randrange(-(2**62), 2**62) for _ in range(18)] + [rng.randrange(-2, 2**62), 0, 0]
        assert_bits(dce.grad_norm(torch.tensor(words)), o.norm(words))
    whole, part = torch.tensor([3.0, 4.0, 1e-20]), torch.tensor([4.0])
    rest = dce.square_digits(whole) - dce.square_digits(part)  # words subtract, too
    assert_same(dce.grad_norm(rest), dce.grad_norm(dce.square_digits(torch.tensor([3.0, 1e-20]))))
    assert dce.grad_norm(-dce.square_digits(part)).isnan()


def test_three_four_five(dce):
    assert dce.grad_norm(dce.square_digits(torch.tensor([3.0])) + dce.square_digits(torch.tensor([[4.0]], dtype=torch.bfloat16))).item() == 5.0


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.bfloat16), torch.zeros(5), torch.full((4,), -0.0)])
def test_nothing(dce, empty):
    digits = dce.square_digits(empty)
    assert digits.tolist() == [0] * 21
    assert_bits(dce.grad_norm(digits), 0.0)


def test_flush_denormal_and_grad_mode(dce):
    x = torch.tensor([1e-45, 3e-42, -1e-39], requires_grad=True)
    expected = dce.square_digits(x)
    assert not expected.requires_grad and expected.tolist() == words_of(x)
    if torch.set_flush_denormal(True):
        try:
            assert_same(dce.square_digits(x), expected)
            assert_bits(dce.grad_norm(expected), o.norm(expected.tolist()))
        finally:
            torch.set_flush_denormal(False)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts, torch's machinery


def test_layouts(dce):
    x = torch.randn(7, 6, 5, 4, generator=torch.Generator().manual_seed(8))
    for dtype in DTYPES.values():
        for view in (x, x.permute(2, 0, 3, 1), x[:, 1:, ::2], x[..., 1], x[1], x[1, 2, 3, 1], x[:1].expand(3, 6, 5, 4), x.to(memory_format=torch.channels_last), x.reshape(-1)[3:].as_strided((5, 4), (3, 2))):
            view = view.to(dtype) if dtype != torch.float32 else view
            assert dce.square_digits(view).tolist() == words_of(view)
    flat = torch.randn(100)
    for lead in range(9):  # whatever the alignment
        assert dce.square_digits(flat[lead:]).tolist() == words_of(flat[lead:])


def test_permuted_is_not_copied(dce):
    x = torch.randn(4, 3, 5).permute(2, 0, 1)
    check = __import__("importlib").import_module(dce.__name__ + "._checks")
    assert check.elements(x).data_ptr() == x.data_ptr()


def test_opcheck_and_compile(dce):
    x = torch.randn(3, 50)
    ops = dce._registration.ops
    torch.library.opcheck(ops.square_digits, (x.reshape(-1),))
    torch.library.opcheck(ops.grad_norm, (dce.square_digits(x),))

    def norm(x, y):
        return dce.grad_norm(dce.square_digits(x) + dce.square_digits(y))

    for dynamic in (None, True):
        fast = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for a, b in ((x, x.t()), (x[:, :31].bfloat16(), x)):
            assert_same(fast(a, b), norm(a, b))


BAD = [
    (lambda d: d.square_digits([1.0]), ["tensor", "list"]),
    (lambda d: d.square_digits(torch.zeros(3).double()), ["tensor", "float64"]),
    (lambda d: d.square_digits(torch.zeros(3).long()), ["tensor", "int64"]),
    (lambda d: d.square_digits(torch.zeros(3).to_sparse()), ["tensor", "sparse"]),
    (lambda d: d.square_digits(torch.zeros(1).expand(2**40)), ["tensor", r"2\*\*40", str(2**40)]),
    (lambda d: d.grad_norm([0] * 21), ["digits", "list"]),
    (lambda d: d.grad_norm(torch.zeros(21)), ["digits", "float32"]),
    (lambda d: d.grad_norm(torch.zeros(12, dtype=torch.int64)), ["digits", r"\(12,\)", r"\(21,\)"]),
    (lambda d: d.grad_norm(torch.zeros(2, 21, dtype=torch.int64)), ["digits", r"\(2, 21\)"]),
]


@pytest.mark.parametrize("call, words", BAD)
def test_bad_arguments(dce, call, words):
    with pytest.raises((TypeError, ValueError)) as error:
        call(dce)
    assert all(re.search(word, str(error.value)) for word in words), error.value


# ---------------------------------------------------------------------------------------------------------------------
# What the GPU computes with


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    out = str(tmp_path_factory.mktemp("squares") / "square_windows")
    subprocess.run([compiler, "-O2", "-std=c++17", "-ffp-contract=off", os.path.join(HERE, "square_windows.cpp"), "-o", out], check=True)

    def run(tensors, wide=True):
        """For each tensor, chunks of fp32 bit patterns: its words; how many chunks needed no integers."""
        text = "".join("".join(f"{int(wide)} {len(c)} {' '.join(map(str, c))}\n" for c in chunks) + "0 0\n" for chunks in tensors)
        lines = subprocess.run([out], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
        return [(words, quick) for *words, quick in (map(int, line.split()) for line in lines)]

    return run


def float_of(pattern):
    return struct.unpack("f", struct.pack("I", pattern))[0]


def pattern_of(x):
    return struct.unpack("I", struct.pack("f", x))[0]


def compare(windows, tensors, wide=True):
    """All words are the oracle's. How many chunks were quick, of each tensor."""
    results = windows(tensors, wide)
    assert len(results) == len(tensors)
    for chunks, (words, _) in zip(tensors, results):
        assert words == o.square_words([float_of(p) for c in chunks for p in c])
    return [quick for _, quick in results]


@pytest.mark.parametrize("wide", [True, False])
def test_windows_of_any_bits(windows, wide):
    """Chunks of few octaves and of many, at every height, with zeros, subnormals and what is not finite."""
    rng = random.Random(9)
    tensors = []
    for top in range(255):
        for spread in (0, 1, 10, 20, 21, 22, 23, 44, 300):
            chunks = []
            for _ in range(3):
                exponents = [max(0, top - rng.randrange(spread + 1)) for _ in range(12)]
                fractions = [lambda: rng.getrandbits(7) << 16] + [lambda: rng.choice([0, 2**23 - 1, 1, 2**22, rng.getrandbits(23)])] * (wide or rng.random() < 0.2)
                chunks.append([rng.getrandbits(1) << 31 | e << 23 | rng.choice(fractions)() for e in exponents] + [0] * rng.randrange(3))
            if rng.random() < 0.05:
                chunks[1].append(rng.choice([0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001]))
            tensors.append(chunks)
    assert 3 * len(tensors) // 20 < sum(compare(windows, tensors, wide)) < 3 * len(tensors)


@pytest.mark.parametrize("wide", [True, False])
def test_windows_at_their_edges(windows, wide):
    """A window that the first chunk sets; then elements at, below and above each edge, of few bits and of many, alone."""
    tensors = []
    for top in (1, 2, 21, 22, 23, 60, 127, 200, 230, 231, 232, 233, 250, 251, 252, 253, 254):
        anchor = [top << 23 | 0x7FFFFF] * 2
        for step in range(-50, 4):
            for fraction in (0, 0x7FFFFF, 0x400000, 1, 0x7F0000, 0x7FFF00):
                if 0 <= top + step < 255:
                    tensors.append([anchor, [0, 0], [top + step << 23 | fraction] * 3, anchor])
    compare(windows, tensors, wide)


def test_windows_stay_for_gradients(windows):
    """Numbers that look like gradients are added quickly, all but the first chunk and a few."""
    rng = random.Random(10)
    chunks = [[pattern_of(rng.gauss(0, 1e-4)) for _ in range(512)] for _ in range(40)]
    assert compare(windows, [chunks])[0] >= 38
    chunks = [[p & 0xFFFF0000 for p in c] for c in chunks]
    assert compare(windows, [chunks], wide=False)[0] >= 30


def test_windows_hold_as_many_as_they_say(windows):
    """2^17 of the greatest that a window takes, quickly, twice: nothing wraps."""
    for first, more in ((0x3F800000, 0x3FFFFFFF), (0x3FFFFFFF, 0x3FFFFFFF)):
        chunks = [[first] * 2] + [[more] * 2**15] * 9
        ((words, quick),) = windows([chunks])
        assert quick == 9
        square = lambda p: (int(float_of(p) * 2**23)) ** 2 << 2 * (149 - 23)
        total = 2 * square(first) + 9 * 2**15 * square(more)
        assert words == [total >> 32 * i & 0xFFFFFFFF for i in range(18)] + [total >> 576, 0, 0]
