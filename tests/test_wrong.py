"""What must not work: arguments that cannot be meant, targets out of range, shards that do not add up.

An error names the argument and what it got. Where no error can be raised without waiting for a device (here: with
validate=False), the result is NaN: never a plausible number.
"""
import copy
import re

import pytest
import torch

import oracle as o
from cases import DTYPES, INF, NAN, assert_bits, assert_same, normal, patterns, tensor_of

N, V = 4, 10
NAN32 = 0x7FC00000


def logits_of(dtype="fp32", seed=1):
    return tensor_of([normal(V, 10 * seed + i) for i in range(N)], dtype)


LOGITS = logits_of()
TARGETS = torch.tensor([0, 3, 9, 5])
MAXIMA = LOGITS.amax(1)
DIGITS = torch.zeros(N, 8, dtype=torch.int64)                   # only for arguments that are refused before they are read
SUMS = torch.zeros(12, dtype=torch.int64)
G = torch.ones(N)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments. Each case: the call, and what the message must contain: the argument's name, and what it got.

BAD = [
    # logits
    (lambda d: d.cross_entropy(LOGITS.double(), TARGETS), ["logits", "float64"]),
    (lambda d: d.cross_entropy(LOGITS.long(), TARGETS), ["logits", "int64"]),
    (lambda d: d.cross_entropy(LOGITS.to(torch.complex64), TARGETS), ["logits", "complex64"]),
    (lambda d: d.cross_entropy(LOGITS.tolist(), TARGETS), ["logits", "list"]),
    (lambda d: d.cross_entropy(None, TARGETS), ["logits", "NoneType"]),
    (lambda d: d.cross_entropy(torch.tensor(1.0), TARGETS), ["logits", r"\(\)"]),
    (lambda d: d.cross_entropy(LOGITS[:, :0], TARGETS), ["logits", r"\(4, 0\)"]),
    (lambda d: d.forward(LOGITS.double(), TARGETS), ["logits", "float64"]),
    (lambda d: d.rowmax(LOGITS.double()), ["logits", "float64"]),
    (lambda d: d.rowmax("x"), ["logits", "str"]),
    (lambda d: d.denom_digits(LOGITS.double(), MAXIMA), ["logits", "float64"]),
    (lambda d: d.finalize(DIGITS, LOGITS.double(), TARGETS, MAXIMA), ["logits", "float64"]),
    (lambda d: d.grad_logits(G, LOGITS.double(), TARGETS, DIGITS, MAXIMA), ["logits", "float64"]),
    # targets
    (lambda d: d.cross_entropy(LOGITS, TARGETS.float()), ["targets", "float32"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS.to(torch.int16)), ["targets", "int16"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS.bool()), ["targets", "bool"]),
    (lambda d: d.cross_entropy(LOGITS, [0, 3, 9, 5]), ["targets", "list"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS[:3]), ["targets", r"\(3,\)"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS[:, None]), ["targets", r"\(4, 1\)"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS.view(2, 2)), ["targets", r"\(2, 2\)"]),
    (lambda d: d.cross_entropy(LOGITS, torch.softmax(LOGITS, 1)), ["targets", "float32"]),
    (lambda d: d.forward(LOGITS, TARGETS[:3]), ["targets", r"\(3,\)"]),
    (lambda d: d.finalize(DIGITS, LOGITS, TARGETS.float(), MAXIMA), ["targets", "float32"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS[:2], DIGITS, MAXIMA), ["targets", r"\(2,\)"]),
    (lambda d: d.loss_digits(G, TARGETS[:2]), ["targets", r"\(2,\)"]),
    (lambda d: d.loss_digits(G, TARGETS.float()), ["targets", "float32"]),
    # reduction, ignore_index, validate
    (lambda d: d.cross_entropy(LOGITS, TARGETS, "avg"), ["reduction", "'avg'"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, None), ["reduction", "None"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, 1), ["reduction", "1"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, ["mean"]), ["reduction", "mean"]),
    (lambda d: d.reduce_digits(SUMS, "none"), ["reduction", "'none'"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, ignore_index=None), ["ignore_index", "NoneType"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, ignore_index=1.5), ["ignore_index", "float"]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, ignore_index=2 ** 70), ["ignore_index", str(2 ** 70)]),
    (lambda d: d.cross_entropy(LOGITS, TARGETS, validate="yes"), ["validate", "'yes'"]),
    (lambda d: d.finalize(DIGITS, LOGITS, TARGETS, MAXIMA, validate=1), ["validate", "1"]),
    # maxima
    (lambda d: d.denom_digits(LOGITS, MAXIMA.double()), ["global_rowmax", "float64"]),
    (lambda d: d.denom_digits(LOGITS.bfloat16(), MAXIMA.bfloat16()), ["global_rowmax", "bfloat16"]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA[:1]), ["global_rowmax", r"\(1,\)"]),
    (lambda d: d.denom_digits(LOGITS, 3.0), ["global_rowmax", "float"]),
    (lambda d: d.finalize(DIGITS, LOGITS, TARGETS, MAXIMA[:, None]), ["global_rowmax", r"\(4, 1\)"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS, DIGITS, MAXIMA[0]), ["global_rowmax", r"\(\)"]),
    # ranges
    (lambda d: d.rowmax(LOGITS, -1, 3), ["v_lo", "-1"]),
    (lambda d: d.rowmax(LOGITS, 3, 11), ["v_hi", "11"]),
    (lambda d: d.rowmax(LOGITS, 5, 4), ["v_lo", "5", "4"]),
    (lambda d: d.rowmax(LOGITS, 11), ["v_lo", "11"]),
    (lambda d: d.rowmax(LOGITS, 0.0, 4), ["v_lo", "float"]),
    (lambda d: d.rowmax(LOGITS, True, 4), ["v_lo", "bool"]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA, 0, -1), ["v_hi", "-1"]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA, v_start=-1), ["v_start", "-1"]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA, v_start=2 ** 31), ["v_start", str(2 ** 31)]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA, v_start=2.0), ["v_start", "float"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS, DIGITS, MAXIMA, 2, 12, validate=False), ["v_hi", "12"]),
    # digits, sums, losses, upstream
    (lambda d: d.carry_digits(DIGITS.int()), ["den_digits", "int32"]),
    (lambda d: d.carry_digits(DIGITS[:, :7]), ["den_digits", r"\(4, 7\)"]),
    (lambda d: d.carry_digits(torch.tensor(3)), ["den_digits", r"\(\)"]),
    (lambda d: d.carry_digits([1, 2]), ["den_digits", "list"]),
    (lambda d: d.finalize(DIGITS.float(), LOGITS, TARGETS, MAXIMA), ["den_digits", "float32"]),
    (lambda d: d.finalize(DIGITS[:3], LOGITS, TARGETS, MAXIMA), ["den_digits", r"\(3, 8\)"]),
    (lambda d: d.finalize(DIGITS[:, :6], LOGITS, TARGETS, MAXIMA), ["den_digits", r"\(4, 6\)"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS, DIGITS[0], MAXIMA), ["den_digits", r"\(8,\)"]),
    (lambda d: d.grad_logits(G.double(), LOGITS, TARGETS, DIGITS, MAXIMA, validate=False), ["grad_loss", "float64"]),
    (lambda d: d.grad_logits(G[:3], LOGITS, TARGETS, DIGITS, MAXIMA, validate=False), ["grad_loss", r"\(3,\)"]),
    (lambda d: d.grad_logits(1.0, LOGITS, TARGETS, DIGITS, MAXIMA, validate=False), ["grad_loss", "float"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS, DIGITS, MAXIMA, sums=SUMS[:9], validate=False), ["sums", r"\(9,\)"]),
    (lambda d: d.loss_digits(G.double(), TARGETS), ["loss", "float64"]),
    (lambda d: d.loss_digits(1.0, TARGETS), ["loss", "float"]),
    (lambda d: d.reduce_digits(SUMS[:11]), ["sums", r"\(11,\)"]),
    (lambda d: d.reduce_digits(SUMS.float()), ["sums", "float32"]),
    (lambda d: d.reduce_digits(0), ["sums", "int"]),
    # devices: "meta" stands for another one, which every machine has
    (lambda d: d.cross_entropy(LOGITS, TARGETS.to("meta")), ["targets", "meta"]),
    (lambda d: d.denom_digits(LOGITS, MAXIMA.to("meta")), ["global_rowmax", "meta"]),
    (lambda d: d.finalize(DIGITS.to("meta"), LOGITS, TARGETS, MAXIMA), ["den_digits", "meta"]),
    (lambda d: d.grad_logits(G.to("meta"), LOGITS, TARGETS, DIGITS, MAXIMA, validate=False), ["grad_loss", "meta"]),
    (lambda d: d.loss_digits(G, TARGETS.to("meta")), ["targets", "meta"]),
    (lambda d: d.grad_logits(G, LOGITS, TARGETS, DIGITS, MAXIMA, sums=SUMS.to("meta"), validate=False), ["sums", "meta"]),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_argument(dce, case):
    call, words = BAD[case]
    with pytest.raises((TypeError, ValueError)) as error:
        call(dce)
    for word in words:
        assert re.search(word, str(error.value)), f"{word!r} is not in {str(error.value)!r}"


def test_the_good_calls_beside_the_bad_ones_work(dce):
    """Or else the cases above might all fail for one reason that has nothing to do with their argument."""
    M = dce.rowmax(LOGITS, 0, V)
    digits = dce.denom_digits(LOGITS, M, 0, V, v_start=0)
    dce.finalize(digits, LOGITS, TARGETS, M, validate=True)
    dce.grad_logits(G, LOGITS, TARGETS, digits, M, 2, 10)
    sums = dce.loss_digits(G, TARGETS)
    dce.grad_logits(torch.tensor(1.0), LOGITS, TARGETS, digits, M, sums=sums)
    dce.reduce_digits(sums, "sum")
    for reduction in ("mean", "sum", "none"):
        dce.cross_entropy(LOGITS, TARGETS, reduction, ignore_index=3, validate=True)


def test_sparse_and_quantized_logits_are_refused(dce):
    with pytest.raises((TypeError, ValueError), match="logits"):
        dce.cross_entropy(LOGITS.to_sparse(), TARGETS)


# ---------------------------------------------------------------------------------------------------------------------
# Targets out of range


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [V, V + 1, -1, -99, -101, 2 ** 31 - 1, -2 ** 31, 2 ** 32, 2 ** 32 + 3, -2 ** 63])
def test_target_out_of_range(dce, dtype, kind, bad):
    if kind == torch.int32 and not -2 ** 31 <= bad < 2 ** 31:
        pytest.skip("not an int32")
    logits = logits_of(dtype)
    targets = TARGETS.clone().to(kind)
    targets[2] = bad
    for call in (lambda v: dce.cross_entropy(logits, targets, validate=v),
                 lambda v: dce.cross_entropy(logits, targets, "none", validate=v)):
        for validate in (None, True):
            with pytest.raises(ValueError, match=rf"targets.*\b2\b.*{bad}\b"):
                call(validate)
    leaf = logits.clone().requires_grad_()
    losses = dce.cross_entropy(leaf, targets, "none", validate=False)
    good = dce.cross_entropy(logits, TARGETS, "none")
    assert patterns(losses)[2] == NAN32
    assert_same(losses[[0, 1, 3]], good[[0, 1, 3]])             # the others do not notice
    losses.backward(G)
    assert all(g != g for g in leaf.grad[2].tolist()) and not leaf.grad[[0, 1, 3]].isnan().any()
    for reduction in ("mean", "sum"):
        leaf = logits.clone().requires_grad_()
        out = dce.cross_entropy(leaf, targets, reduction, validate=False)
        assert patterns(out) == [NAN32]
        out.backward()
        assert leaf.grad[2].isnan().all() and not leaf.grad[[0, 1, 3]].isnan().any()
    M = dce.rowmax(logits)
    digits = dce.denom_digits(logits, M)
    loss, denom = dce.finalize(digits, logits, targets, M, validate=False)
    assert patterns(loss)[2] == NAN32
    assert_same(denom, dce.forward(logits, TARGETS)[2])         # it does not depend on the target
    with pytest.raises(ValueError, match=rf"targets.*\b2\b.*{bad}\b"):
        dce.finalize(digits, logits, targets, M)
    assert dce.grad_logits(G, logits, targets, digits, M, validate=False)[2].isnan().all()


def test_a_bad_target_is_named_in_a_row_that_is_nan_anyway(dce):
    for x in (NAN, INF, -INF):
        logits = LOGITS.clone()
        logits[1] = x
        targets = TARGETS.clone()
        targets[1] = 77
        with pytest.raises(ValueError, match=r"targets.*\b1\b.*77"):
            dce.cross_entropy(logits, targets)
        assert patterns(dce.cross_entropy(logits, targets, validate=False)) == [NAN32]


def test_a_nan_row_is_not_an_error(dce):
    """NaN and infinite logits are the model's affair: NaN loss, as torch gives it, validated or not."""
    for x in (NAN, INF):
        logits = LOGITS.clone()
        logits[1, 4] = x
        assert patterns(dce.cross_entropy(logits, TARGETS, "none", validate=True))[1] == NAN32
    logits[1] = -INF
    assert patterns(dce.cross_entropy(logits, TARGETS, "none", validate=True))[1] == NAN32


def test_ignore_index_that_is_no_column_is_no_error(dce):
    targets = torch.tensor([0, 77, 9, 77])
    dce.cross_entropy(LOGITS, targets, ignore_index=77, validate=True)
    with pytest.raises(ValueError, match="77"):
        dce.cross_entropy(LOGITS, targets, ignore_index=78, validate=True)


# ---------------------------------------------------------------------------------------------------------------------
# Shards that do not add up. Row 1 is made wrong; the others must stay right.

CUTS = [(0, 3), (3, 6), (6, 10)]                                # two equal widths, so that a swap keeps the count


def shards(dce, logits, M, cuts=CUTS):
    return [dce.denom_digits(logits, M, lo, hi) for lo, hi in cuts]


def expect_refused(dce, words, logits, M, targets=TARGETS, row=1, denom_too=True):
    good, _ = dce.finalize(dce.denom_digits(logits, dce.rowmax(logits)), logits, targets, dce.rowmax(logits))
    loss, denom = dce.finalize(words, logits, targets, M, validate=False)
    assert patterns(loss)[row] == NAN32 and (not denom_too or patterns(denom)[row] == NAN32)
    others = [i for i in range(N) if i != row]
    assert_same(loss[others], good[others])
    for validate in (None, True):
        with pytest.raises(ValueError, match=rf"row {row}\b"):
            dce.finalize(words, logits, targets, M, validate=validate)
    grad = dce.grad_logits(G, logits, targets, words, M, validate=False)
    assert grad[row].isnan().all() and not grad[others].isnan().any()


def only_row_1(wrong, right):
    out = right.clone()
    out[1] = wrong[1]
    return out


@pytest.fixture(params=list(DTYPES))
def sharded(request, dce):
    logits = logits_of(request.param)
    M = dce.rowmax(logits)
    a, b, c = shards(dce, logits, M)
    return logits, M, a, b, c


def test_right_shards_are_accepted(dce, sharded):
    logits, M, a, b, c = sharded
    loss, denom = dce.finalize(c + a + b, logits, TARGETS, M, validate=True)
    assert_same(loss, dce.forward(logits, TARGETS)[0])
    assert_same(denom, dce.forward(logits, TARGETS)[2])


def test_missing_shard(dce, sharded):
    logits, M, a, b, c = sharded
    for wrong in (a + b, b + c, a + c, a, torch.zeros_like(a)):
        expect_refused(dce, only_row_1(wrong, a + b + c), logits, M)


def test_doubled_shard(dce, sharded):
    logits, M, a, b, c = sharded
    for wrong in (a + b + c + c, a + a + b + c, 2 * (a + b + c), 3 * b):
        expect_refused(dce, only_row_1(wrong, a + b + c), logits, M)


def test_one_shard_in_the_place_of_another(dce, sharded):
    """The count of columns is right: only the tag can tell."""
    logits, M, a, b, c = sharded
    for wrong in (b + b + c, a + a + c):
        assert wrong[1, 6] == V
        expect_refused(dce, only_row_1(wrong, a + b + c), logits, M)


def test_overlapping_shards_with_the_right_count(dce):
    M = dce.rowmax(LOGITS)
    right = dce.denom_digits(LOGITS, M)
    wrong = sum(shards(dce, LOGITS, M, [(0, 4), (3, 6), (7, 10)]))
    assert wrong[1, 6] == V
    expect_refused(dce, only_row_1(wrong, right), LOGITS, M)


def test_wrong_v_start(dce):
    """Shards as tensors of their own, with the places of two of them exchanged, and all moved along by one."""
    M = dce.rowmax(LOGITS)
    right = dce.denom_digits(LOGITS, M)

    def total(starts):
        return sum(dce.denom_digits(LOGITS[:, lo:hi], M, v_start=s) for (lo, hi), s in zip(CUTS, starts))

    assert torch.equal(dce.carry_digits(total((0, 3, 6))), right)
    for starts in ((0, 0, 0), (1, 4, 7), (0, 4, 6), (6, 3, 0)):
        expect_refused(dce, only_row_1(total(starts), right), LOGITS, M)
    # Equal widths exchanged cover the same columns: every sum is right, and a right sum is accepted.
    assert torch.equal(dce.carry_digits(total((3, 0, 6))), right)


@pytest.mark.parametrize("move", [-50.0, -1.0, -2.0 ** -20, 2.0 ** -20, 0.01, 1.0, 50.0, 300.0, 1e7, INF, -INF, NAN])
def test_one_shard_with_another_maximum(dce, move):
    """Lower, higher, in the same block and in another, degenerate: stale in one shard, in each of the three."""
    M = dce.rowmax(LOGITS)
    parts = shards(dce, LOGITS, M)
    stale = M + move
    for i, (lo, hi) in enumerate(CUTS):
        mixed = list(parts)
        mixed[i] = dce.denom_digits(LOGITS, stale, lo, hi)
        expect_refused(dce, only_row_1(sum(mixed), sum(parts)), LOGITS, M)


def test_each_shard_with_its_own_maximum(dce):
    """What forgetting the all-reduce gives."""
    M = dce.rowmax(LOGITS)
    own = sum(dce.denom_digits(LOGITS, dce.rowmax(LOGITS, lo, hi), lo, hi) for lo, hi in CUTS)
    expect_refused(dce, only_row_1(own, dce.denom_digits(LOGITS, M)), LOGITS, M)


@pytest.mark.parametrize("move", [-50.0, -1.0, -2.0 ** -20, 2.0 ** -20, 0.01, 1.0, 50.0, 1e7, -1e7])
def test_finalize_with_another_maximum(dce, move):
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    wrong = M.clone()
    wrong[1] += move
    expect_refused(dce, digits, LOGITS, wrong)


@pytest.mark.parametrize("move", [-50.0, -1.0, -2.0 ** -20, 20.0, 50.0, 99.0, 300.0, 1e7])
def test_the_same_wrong_maximum_everywhere(dce, move):
    """Too low is found by the logit above it; too high by more than the row's sum can explain is found by the sum.

    A maximum that is too high by less than ln V of 10 columns could be the maximum of another row with the same digits:
    it is not tried, and loses nothing, as all that counts is kept.
    """
    M = dce.rowmax(LOGITS)
    M[1] += move
    expect_refused(dce, dce.denom_digits(LOGITS, M), LOGITS, M)


def test_maxima_and_digits_of_another_row(dce):
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    swapped = digits.clone()
    swapped[1] = digits[2]
    expect_refused(dce, swapped, LOGITS, M)
    wrong = M.clone()
    wrong[1] = M[2]
    expect_refused(dce, digits, LOGITS, wrong)


def test_a_logit_above_the_maximum(dce):
    """One column only, by one ulp, where the sum hardly changes; and the target's, changed after the digits were taken."""
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    changed = LOGITS.clone()
    v = int(changed[1].argmax())
    changed[1, v] = torch.nextafter(M[1], torch.tensor(INF))
    words = dce.denom_digits(changed, M)
    assert words[1, 6] >> 32 == 1                               # one fault, in one row
    loss, _ = dce.finalize(words, changed, TARGETS, M, validate=False)
    assert patterns(loss)[1] == NAN32
    with pytest.raises(ValueError, match=r"row 1\b"):
        dce.finalize(words, changed, TARGETS, M)
    changed = LOGITS.clone()
    changed[1, 3] = M[1] + 1                                    # 3 is the target of row 1
    loss, denom = dce.finalize(digits, changed, TARGETS, M, validate=False)
    assert patterns(loss)[1] == patterns(denom)[1] == NAN32
    with pytest.raises(ValueError, match=r"row 1\b"):
        dce.finalize(digits, changed, TARGETS, M)
    changed[1, 3] = NAN
    assert patterns(dce.finalize(digits, changed, TARGETS, M, validate=False)[0])[1] == NAN32


def test_a_nan_that_the_maximum_does_not_know(dce):
    """NCCL's maximum drops a NaN. The digits do not."""
    M = dce.rowmax(LOGITS)
    changed = LOGITS.clone()
    changed[1, 7] = NAN
    words = dce.denom_digits(changed, M)
    loss, denom = dce.finalize(words, changed, TARGETS, M, validate=False)
    assert patterns(loss)[1] == patterns(denom)[1] == NAN32
    with pytest.raises(ValueError, match=r"row 1\b"):
        dce.finalize(words, changed, TARGETS, M)


@pytest.mark.parametrize("words", [
    [0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 1 << 54], [1 << 40, 0, 0, 0, -5, 0],
    [0, 0, 0, 0, 0, (1 << 63) - 1], [-(1 << 63), 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1 << 62, (1 << 63) - 1],                       # the carry into word 5 does not fit 64 bits
])
def test_impossible_digits(dce, words):
    """With the right check words: nothing but the digits themselves to go by. The last but one is less than the target's."""
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    digits[1, :6] = torch.tensor(words)
    expect_refused(dce, digits, LOGITS, M)


def test_every_wrong_word_is_noticed(dce):
    """A bit flipped in a check word, any of the 128, never passes."""
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    for word in (6, 7):
        for bit in range(64):
            wrong = digits.clone()
            wrong[1, word] ^= (1 << bit) if bit < 63 else -(1 << 63)
            loss, denom = dce.finalize(wrong, LOGITS, TARGETS, M, validate=False)
            assert patterns(loss)[1] == patterns(denom)[1] == NAN32, (word, bit)


def test_wrong_shards_of_an_ignored_row_do_not_matter(dce):
    """An ignored row is not read, and neither are its digits."""
    M = dce.rowmax(LOGITS)
    digits = dce.denom_digits(LOGITS, M)
    digits[1] = 12345
    M[1] = NAN
    targets = TARGETS.clone()
    targets[1] = -100
    loss, denom = dce.finalize(digits, LOGITS, targets, M, validate=True)
    assert patterns(loss)[1] == patterns(denom)[1] == 0
    assert patterns(dce.grad_logits(G, LOGITS, targets, digits, M)[1]) == [0] * V


# ---------------------------------------------------------------------------------------------------------------------
# Autograd


def test_second_derivative_is_refused(dce):
    x = LOGITS.clone().requires_grad_()
    (g,) = torch.autograd.grad(dce.cross_entropy(x, TARGETS), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="second derivative"):
        g.square().sum().backward()


def test_logits_are_never_modified(dce):
    for dtype in DTYPES:
        logits = logits_of(dtype)
        before = logits.clone()
        leaf = logits.requires_grad_()
        version = leaf._version
        out = dce.cross_entropy(leaf, TARGETS)
        out.backward()
        M = dce.rowmax(logits.detach())
        digits = dce.denom_digits(logits.detach(), M)
        kept = digits.clone(), M.clone(), TARGETS.clone()
        dce.finalize(digits, logits.detach(), TARGETS, M)
        dce.carry_digits(digits)
        dce.grad_logits(G, logits.detach(), TARGETS, digits, M)
        assert_same(logits, before)
        assert leaf._version == version
        for a, b in zip((digits, M, TARGETS), kept):
            assert_same(a, b)


def test_upstream_is_never_modified(dce):
    x = LOGITS.clone().requires_grad_()
    g = torch.tensor([1.0, 2.0, 3.0, 4.0])
    dce.cross_entropy(x, TARGETS, "none").backward(g)
    assert g.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_no_graph_without_requires_grad(dce):
    for reduction in ("mean", "sum", "none"):
        out = dce.cross_entropy(LOGITS, TARGETS, reduction)
        assert not out.requires_grad and out.grad_fn is None
    x = LOGITS.clone().requires_grad_()
    with torch.no_grad():
        assert dce.cross_entropy(x, TARGETS).grad_fn is None
    with torch.inference_mode():
        assert dce.cross_entropy(x, TARGETS).grad_fn is None
    assert dce.cross_entropy(x, TARGETS).requires_grad


def test_the_pieces_are_not_differentiable(dce):
    """rowmax and finalize have no derivative (grad_logits is it): their results must not pretend to have one, or a
    backward pass through them would lose the gradient with a warning."""
    x = LOGITS.clone().requires_grad_()
    M = dce.rowmax(x)
    assert not M.requires_grad
    loss, denom = dce.finalize(dce.denom_digits(x, M), x, TARGETS, M)
    assert not loss.requires_grad and not denom.requires_grad


def test_gradient_through_a_non_leaf(dce):
    """The gradient reaches what the logits were made of, and equals the chain rule of the gradient at the logits."""
    w = torch.ones(V, requires_grad=True)
    x = LOGITS * w
    x.retain_grad()
    dce.cross_entropy(x, TARGETS).backward()
    assert w.grad is not None
    assert_same(w.grad, (LOGITS * x.grad).sum(0))
    half = (LOGITS.clone().requires_grad_()).bfloat16()
    half.retain_grad()
    dce.cross_entropy(half, TARGETS).backward()
    assert half.grad.dtype == torch.bfloat16


def test_gradient_accumulates_and_backward_twice(dce):
    x = LOGITS.clone().requires_grad_()
    out = dce.cross_entropy(x, TARGETS)
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert_same(x.grad, once + once)
    with pytest.raises(RuntimeError):
        out.backward()


def test_changing_logits_before_backward_is_an_error(dce):
    x = LOGITS.clone().requires_grad_()
    y = x * 1
    out = dce.cross_entropy(y, TARGETS)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_module(dce):
    """The layer: class attributes, the functional result, and nothing that pickling or copying would lose."""
    layer = dce.layers.CrossEntropyLoss()
    assert list(layer.parameters()) == [] and layer.reduction == "mean" and layer.ignore_index == -100
    assert_same(layer(LOGITS, TARGETS), dce.cross_entropy(LOGITS, TARGETS))
    layer.reduction, layer.ignore_index = "none", 3
    assert_same(copy.deepcopy(layer)(LOGITS, TARGETS), dce.cross_entropy(LOGITS, TARGETS, "none", ignore_index=3))
    with pytest.raises(ValueError, match="reduction"):
        layer.reduction = "no such thing"
        layer(LOGITS, TARGETS)


def test_the_values_are_the_oracles(dce):
    """So that this file's 'right' is right."""
    loss = dce.cross_entropy(LOGITS, TARGETS, "none")
    assert_bits(loss, [o.forward(row, t)[0].loss for row, t in zip(LOGITS.double().tolist(), TARGETS.tolist())])


# ---------------------------------------------------------------------------------------------------------------------
# Found by review: what a derivative or a count must not silently become


def test_forward_mode_is_refused(dce):
    x, t = torch.randn(3, 7), torch.tensor([0, 1, 2])
    for derivative in (lambda: torch.func.jvp(lambda z: dce.cross_entropy(z, t), (x,), (x,)), lambda: torch.func.jacfwd(lambda z: dce.cross_entropy(z, t))(x)):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            derivative()


@pytest.mark.parametrize("validate", [None, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_transforms_of_torch_func_are_refused_by_name(dce, reduction, validate):
    F, x, t = torch.func, torch.randn(3, 7), torch.tensor([0, 1, 2])
    for entry in (lambda z: dce.cross_entropy(z, t, reduction, validate=validate), lambda z: dce.forward(z, t, validate=validate)[0]):
        scalar = lambda z: entry(z).sum()
        for transform in (F.grad(scalar), F.jacrev(entry), F.hessian(scalar), F.vjp):
            with pytest.raises(NotImplementedError, match="logits: torch.func.grad"):
                transform(x) if transform is not F.vjp else F.vjp(entry, x)
        for transform in (F.vmap(F.grad(scalar)), F.grad(lambda z: F.vmap(scalar)(z).sum())):
            with pytest.raises(NotImplementedError, match="logits: torch.func.grad"):
                transform(x.expand(2, 3, 7))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vmap_is_a_loop(dce, reduction):
    x, t = torch.randn(4, 3, 7).requires_grad_(), torch.randint(7, (4, 3))
    t[1, 2] = 9                                                 # NaN, for the data of a batch cannot be looked at
    loss = torch.vmap(lambda z, u: dce.cross_entropy(z, u, reduction))(x, t)
    loop = torch.stack([dce.cross_entropy(z, u, reduction, validate=False) for z, u in zip(x, t)])
    assert torch.equal(loss.isnan(), loop.isnan()) and torch.equal(loss.nan_to_num(), loop.nan_to_num()) and loss[1].isnan().any()
    got, expected = (torch.autograd.grad(l.sum(), x)[0] for l in (loss, loop))
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and torch.equal(got.isnan(), expected.isnan())
    with pytest.raises(NotImplementedError, match="validate: .*vmap"):
        torch.vmap(lambda z, u: dce.cross_entropy(z, u, validate=True))(x, t)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_too_many_rows_for_a_mean_or_sum(dce, reduction):
    x, t = torch.empty(2**30, 1, device="meta"), torch.empty(2**30, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"logits: expected fewer than 2\*\*30 rows for a mean or sum, got 1073741824"):
        dce.cross_entropy(x, t, reduction)
    with pytest.raises(ValueError, match=r"loss: expected fewer than 2\*\*30"):
        dce.loss_digits(x[:, 0], t)
    replicas = [dce._ranks.Replica(rank, None, (), rows) for rank, rows in enumerate((2**29, 2**29 - 1, 1))]
    assert dce._ranks.replicas_problem(replicas[:2]) is None
    assert "over all ranks" in str(dce._ranks.replicas_problem(replicas))
    assert dce.cross_entropy(x, t, "none").shape == t.shape and dce.cross_entropy(x[1:], t[1:], reduction).shape == ()


@pytest.mark.parametrize("device", ["xpu", "mps", "meta"])
def test_self_test_of_a_device_without_kernels(dce, device):
    with pytest.raises(ValueError, match=f"device: expected cpu or cuda, got '{device}'"):
        dce.self_test(device)


@pytest.mark.parametrize("count", [0, -5])
def test_a_count_below_one_is_no_mean(dce, count):
    x, t = torch.randn(3, 7), torch.tensor([0, 1, 2])
    m = dce.rowmax(x)
    d = dce.denom_digits(x, m)
    sums = dce.loss_digits(dce.finalize(d, x, t, m)[0], t)
    sums[9] = count
    assert dce.reduce_digits(sums).isnan()
    assert dce.grad_logits(torch.tensor(1.0), x, t, d, m, sums=sums).isnan().all()


def test_ignored_rows_are_not_read_when_rows_are_cut(dce):
    """Few long rows: each is cut over threads, and an ignored one still reports the maximum of nothing."""
    x = torch.randn(2, 200_001)
    loss, rowmax, denom = dce.forward(x, torch.tensor([-100, 5]))
    assert loss[0] == 0 and rowmax[0] == -INF and denom[0] == 0 and rowmax[1] == x[1].max()
