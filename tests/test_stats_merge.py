"""LossStats: exact sums against Python's fractions; the same bytes for every cut of the tokens, every order, every number of ranks."""
import decimal
import math
from fractions import Fraction
from functools import reduce

import mpmath
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import oracle as o
import processes
from cases import INF, NAN, assert_bits, assert_same
from conftest import load_kernel

N, V = 40, 97
LARGEST = torch.finfo(torch.float32).max


def row_stats(dce, logits, targets, ignore_index=-100):
    """RowStats by way of torch in float64: their bits are not the kernel's, which is nothing to LossStats."""
    logits = logits.double()
    counted = targets != ignore_index
    readable = targets.clamp(0, logits.shape[-1] - 1).long()
    lse, logp = logits.logsumexp(-1), logits.log_softmax(-1)
    logprob = logp.gather(-1, readable.unsqueeze(-1)).squeeze(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    max_abs = torch.where(logits == -INF, 0.0, logits.abs()).amax(-1)
    bad = logprob.isnan()
    clean = lambda x: torch.where(counted, torch.where(bad, NAN, x), 0.0).float()
    return dce.RowStats(clean(lse), clean(logprob), clean(entropy), clean(max_abs), (logits.argmax(-1) == targets) & counted & ~bad)


def batch(kind="plain"):
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(N, V, generator=generator) * 3
    targets = torch.where(torch.rand(N, generator=generator) < 0.3, logits.argmax(1), torch.randint(V, (N,), generator=generator))
    targets[::7] = -100
    logits[0] = NAN  # ignored: not seen
    if kind == "infinite":
        logits[3, targets[3]] = -INF
    if kind == "nan":
        logits[4, 5] = NAN
    return logits, targets


def slices(stats, targets, index):
    """The RowStats and targets of some of the rows."""
    return type(stats)(*(field[index] for field in stats)), targets[index]


positive = st.sampled_from([0.0, 2.0**-149, LARGEST, 1.0, 2.25]) | st.floats(0, LARGEST, width=32)
flags = {"hit": st.booleans(), "ignored": st.booleans()}
finite_rows = st.fixed_dictionaries({"loss": positive, "entropy": positive, "max_abs": positive, **flags})
rows = st.fixed_dictionaries({"loss": positive | st.sampled_from([INF, NAN]), "entropy": positive | st.just(NAN), "max_abs": positive | st.just(NAN), **flags})


def of_rows(dce, some):
    column = lambda name: torch.tensor([row[name] for row in some], dtype=torch.float32)
    stats = dce.RowStats(torch.zeros(len(some)), -column("loss"), column("entropy"), column("max_abs"), torch.tensor([row["hit"] for row in some], dtype=torch.bool))
    return stats, torch.tensor([-100 if row["ignored"] else 1 for row in some], dtype=torch.int64)


def mean32(numbers):
    """RN32 of the exact mean, of floats that may be infinite or NaN, but not below 0."""
    if not numbers or any(map(math.isnan, numbers)):
        return NAN
    if INF in numbers:
        return INF
    mean = sum(map(Fraction, numbers)) / len(numbers)
    return o._round_ratio(mean.numerator, mean.denominator, "fp32") if mean else 0.0


def same_float(a, b):
    return type(a) is type(b) and (a == b or math.isnan(a) and math.isnan(b))


def expected(some, size):
    """as_dict, by fractions."""
    some = [row for row in some if not row["ignored"]]
    losses = [row["loss"] for row in some]
    loss, hits = mean32(losses), sum(row["hit"] for row in some)
    greatest = [row["max_abs"] for row in some]
    perplexity = bits = loss  # where that is infinite or NaN
    if math.isfinite(loss):
        total = sum(map(Fraction, losses))
        with mpmath.workprec(600):
            perplexity = float(mpmath.exp(loss)) if loss < 800 else INF
            bits = float(mpmath.mpf(total.numerator) / total.denominator / size / mpmath.log(2))
    return {
        "loss": loss, "perplexity": perplexity, "accuracy": hits / len(some) if some else NAN, "entropy": mean32([row["entropy"] for row in some]),
        "max_abs": NAN if any(map(math.isnan, greatest)) else max(greatest, default=0.0), "tokens": len(some), "hits": hits, "bits_per_byte": bits,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Values


@settings(max_examples=200, deadline=None)
@given(some=st.lists(rows, max_size=8) | st.lists(finite_rows, max_size=8), size=st.integers(1, 10**12))
def test_every_result_is_that_of_fractions(some, size):
    dce = load_kernel()
    got, want = dce.LossStats.of(*of_rows(dce, some)).as_dict(size), expected(some, size)
    assert got.keys() == want.keys()
    for name, number in want.items():
        assert same_float(got[name], number), (name, got[name], number)


def test_properties_are_the_same_numbers_and_canonical(dce):
    for some in ([], [dict(loss=NAN, entropy=NAN, max_abs=NAN, hit=False, ignored=False)], [dict(loss=0.1, entropy=0.2, max_abs=3.0, hit=True, ignored=False)] * 3):
        stats = dce.LossStats.of(*of_rows(dce, some))
        numbers = stats.as_dict()
        for name in ("loss", "entropy", "max_abs", "accuracy"):
            assert_bits(getattr(stats, name), numbers[name], name)
        assert stats.accuracy.dtype == torch.float64 and stats.tokens.dtype == stats.hits.dtype == torch.int64
        assert (stats.tokens.item(), stats.hits.item()) == (numbers["tokens"], numbers["hits"])
        assert same_float(stats.perplexity(), numbers["perplexity"])
    nothing = dce.LossStats()
    assert nothing == dce.LossStats.of(*of_rows(dce, []))
    undefined = dict.fromkeys(("loss", "accuracy", "entropy", "perplexity", "bits_per_byte"), NAN)
    assert repr(sorted(nothing.as_dict(7).items())) == repr(sorted({**undefined, "max_abs": 0.0, "tokens": 0, "hits": 0}.items()))


@pytest.mark.parametrize("kind", ["plain", "infinite"])
def test_the_mean_is_that_of_cross_entropy(dce, kind):
    logits, targets = batch(kind)
    stats = row_stats(dce, logits, targets)._replace(logprob=dce.logprobs(logits, targets))
    parts = [dce.LossStats.of(*slices(stats, targets, slice(i, i + 7))) for i in range(0, N, 7)]
    assert_same(sum(parts).loss, dce.cross_entropy(logits, targets))


def test_the_constant(dce):
    with mpmath.workprec(200):
        assert dce.stats.LN2 == int(mpmath.nint(mpmath.ldexp(mpmath.log(2), 128)))


def test_a_language_model_by_hand(dce):
    """Two tokens of probability 1/2 and 1/8, of three bytes: 4 bits."""
    stats = dce.RowStats(*(torch.tensor(x) for x in ([0.0, 0.0], [math.log(0.5), math.log(0.125)], [0.0, 0.0], [1.0, 2.0], [True, False])))
    numbers = dce.LossStats.of(stats, torch.tensor([3, 4])).as_dict(3)
    assert numbers["perplexity"] == pytest.approx(4, rel=1e-7) and numbers["bits_per_byte"] == pytest.approx(4 / 3, rel=1e-7)
    assert (numbers["accuracy"], numbers["max_abs"], numbers["tokens"], numbers["hits"]) == (0.5, 2.0, 2, 1)


@settings(max_examples=200, deadline=None)
@given(loss=st.floats(0, 720, width=32))
def test_perplexity_is_the_nearest_double_whatever_the_context_of_decimal(loss):
    dce = load_kernel()
    with decimal.localcontext() as context, mpmath.workprec(300):
        context.prec, context.rounding = 3, decimal.ROUND_UP
        context.traps[decimal.Inexact] = context.traps[decimal.FloatOperation] = True
        got = dce.LossStats.of(*of_rows(dce, [dict(loss=loss, entropy=0.0, max_abs=0.0, hit=False, ignored=False)])).perplexity()
        assert got == float(mpmath.exp(mpmath.mpf(loss)))


# ---------------------------------------------------------------------------------------------------------------------
# Merging


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_cut_any_order_any_tree(data):
    dce = load_kernel()
    some = data.draw(st.lists(rows, min_size=1, max_size=10))
    whole = dce.LossStats.of(*of_rows(dce, some))
    some = data.draw(st.permutations(some))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(some)), max_size=6)))
    parts = [dce.LossStats.of(*of_rows(dce, some[a:b])) for a, b in zip([0, *cuts], [*cuts, len(some)])]
    while len(parts) > 1:
        b, a = parts.pop(data.draw(st.integers(0, len(parts) - 1))), parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        merged = a + b
        parts.append(dce.LossStats.from_words(merged.to_words()) if data.draw(st.booleans()) else merged)
    assert_same(parts[0].to_words(), whole.to_words())
    assert parts[0] == whole
    assert repr(parts[0]) == repr(whole)


def test_plus_sum_and_in_place(dce):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    whole = dce.LossStats.of(stats, targets)
    parts = [dce.LossStats.of(*slices(stats, targets, slice(i, i + 9))) for i in range(0, N, 9)]
    before = [part.to_words() for part in parts]
    total = dce.LossStats(device="cpu")
    first = total
    for part in parts:
        total += part
    assert total == sum(parts) == sum(parts, dce.LossStats()) == reduce(lambda a, b: b + a, parts) == whole
    assert first == dce.LossStats() != whole and all(part == dce.LossStats.from_words(words) for part, words in zip(parts, before))
    with pytest.raises(TypeError):
        {total}


def test_shapes_of_targets(dce):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    shaped = dce.RowStats(*(field.view(4, 10).t() for field in stats))
    assert dce.LossStats.of(shaped, targets.view(4, 10).t().int()) == dce.LossStats.of(stats, targets)


def test_what_is_ignored_is_said_by_the_targets_alone(dce):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    other = torch.where(targets == -100, V + 5, targets)
    garbage = dce.RowStats(*(torch.where(targets == -100, torch.tensor(NAN if x.is_floating_point() else True).to(x.dtype), x) for x in stats))
    assert dce.LossStats.of(garbage, other, ignore_index=V + 5) == dce.LossStats.of(stats, targets)


def test_room_for_many_batches(dce):
    """2^30 parts of the greatest and of ordinary losses: nothing carries out of a word."""
    rows = [dict(loss=loss, entropy=loss, max_abs=loss, hit=True, ignored=False) for loss in 6 * (LARGEST,) + (0.1, 2.0**-149)]
    total = dce.LossStats.of(*of_rows(dce, rows))
    words = total.to_words()
    for _ in range(30):
        total = total + total
    sums = lambda words: [sum(word << 32 * i for i, word in enumerate(words[first : first + 9].tolist())) for first in (0, 12)]
    assert sums(total.to_words()) == [s << 30 for s in sums(words)]
    assert (total.tokens.item(), total.hits.item()) == (8 << 30, 8 << 30)
    one, many = dce.LossStats.from_words(words).as_dict(1), total.as_dict(1 << 30)
    assert {**one, "tokens": 0, "hits": 0} == {**many, "tokens": 0, "hits": 0}


def test_a_carry_through_all_digits(dce):
    """Losses that add up to 2^256 - 1 units, and one unit more."""
    row = lambda units: dict(loss=math.ldexp(units, -149), entropy=math.ldexp(units, -149), max_abs=0.0, hit=False, ignored=False)
    parts = [row(mantissa << 32 * word) for word in range(8) for mantissa in (0xFFFFFF00, 0xFF)]
    full, unit = dce.LossStats.of(*of_rows(dce, parts)), dce.LossStats.of(*of_rows(dce, [row(1)]))
    assert full.to_words().tolist() == 2 * [*8 * [2**32 - 1], 0, 16, 0, 0] + [0, 0]
    assert (full + unit).to_words().tolist() == 2 * [*8 * [0], 1, 17, 0, 0] + [0, 0]


def test_saved_words(dce, tmp_path):
    logits, targets = batch("nan")
    stats = dce.LossStats.of(row_stats(dce, logits, targets), targets)
    torch.save({"stats": stats.to_words()}, tmp_path / "checkpoint")
    words = torch.load(tmp_path / "checkpoint", weights_only=True)["stats"]
    again = dce.LossStats.from_words(words)
    words.zero_()
    assert again == stats and again.loss.isnan() and again.max_abs.isnan() and again.tokens == stats.tokens


def test_nothing_waits_for_the_device(dce):
    """A meta tensor has no data: whatever waits for it raises."""
    value = lambda dtype=torch.float32: torch.zeros(4, 5, dtype=dtype, device="meta")
    rows = dce.RowStats(*(value() for _ in range(4)), value(torch.bool))
    total = dce.LossStats(device="meta")
    total += dce.LossStats.of(rows, value(torch.int64))
    dce.LossStats.from_words(total.to_words())
    assert total.tensors().keys() == {"loss", "entropy", "max_abs", "tokens", "hits"} and total.accuracy.device.type == "meta"
    curve = dce.LossCurve(None, every=10)
    curve.log(0, total, valid=total)
    with pytest.raises((NotImplementedError, RuntimeError)):
        total.perplexity()


def test_compiled(dce):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)

    def step(stats, targets):
        part = dce.LossStats.of(stats, targets)
        total = part + dce.LossStats.of(stats, targets)
        return total.to_words(), total.loss, total.accuracy, total.max_abs

    for got, want in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(stats, targets), step(stats, targets)):
        assert_same(got, want)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def ranks_worker(rank, world):
    dce = load_kernel()
    seen = {}
    for kind in ("plain", "infinite", "nan"):
        logits, targets = batch(kind)
        stats = row_stats(dce, logits, targets)
        for name, bounds in {"even": [N * r // world for r in range(world + 1)], "one has all": [0] * world + [N]}.items():
            own = slice(bounds[rank], bounds[rank + 1])
            mine = dce.LossStats.of(*slices(stats, targets, own)) if name == "even" or rank == world - 1 else dce.LossStats()
            before = mine.to_words()
            mesh = DeviceMesh("cpu", torch.arange(world).view(1, world), mesh_dim_names=("pp", "dp"))
            pair = dist.new_group([0, 1])
            for label, group in {"default": None, "world": dist.group.WORLD, "mesh": mesh, "of a mesh": mesh["dp"]}.items():
                seen[kind, name, label] = mine.all_reduce(group).to_words()
            if rank < 2 and name == "even":
                seen[kind, "pair"] = mine.all_reduce(pair).to_words()
            assert torch.equal(before, mine.to_words())
    try:
        mine.all_reduce("dp")
    except TypeError as error:
        seen["error"] = str(error)
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks(dce, world):
    want = {}
    for kind in ("plain", "infinite", "nan"):
        logits, targets = batch(kind)
        stats = row_stats(dce, logits, targets)
        want[kind] = dce.LossStats.of(stats, targets).to_words()
        want[kind, "pair"] = dce.LossStats.of(*slices(stats, targets, slice(0, N * 2 // world))).to_words()
    for seen in processes.run(ranks_worker, world):
        assert seen.pop("error") == "group: expected a ProcessGroup, a DeviceMesh or None, got str"
        assert len(seen) >= 24
        for case, words in seen.items():
            assert_same(words, want[case] if case[1] == "pair" else want[case[0]], case)


# ---------------------------------------------------------------------------------------------------------------------
# The loss curve


def test_in_the_loss_curve(dce, tmp_path):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    whole = dce.LossStats.of(stats, targets)
    cut = sum(dce.LossStats.of(*slices(stats, targets, slice(i, i + 3))) for i in range(0, N, 3))
    for name, each in (("a", whole), ("b", cut)):
        with dce.LossCurve(tmp_path / name, every=5) as curve:
            curve.log(0, each, lr=0.5)
            curve.log(1, 2.5, valid=each, lr=0.5)
    seen = dce.curve.compare(tmp_path / "a", tmp_path / "b")
    assert seen.equal and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    steps = dce.curve.read(tmp_path / "a").steps
    want = {name: number for name, number in whole.as_dict().items() if name not in ("perplexity", "accuracy")}
    assert {name: value.number for name, value in steps[0].items()} == {**want, "lr": 0.5}
    assert {name: value.number for name, value in steps[1].items()} == {**{f"valid.{name}": number for name, number in want.items()}, "loss": 2.5, "lr": 0.5}
    assert list(steps[0]) == ["loss", "entropy", "hits", "lr", "max_abs", "tokens"]


def test_the_curve_names_what_differs(dce, tmp_path):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    row = int(stats.hit.nonzero()[0])
    hit, high = stats.hit.clone(), stats.max_abs.clone()
    hit[row], high[row] = False, 1e4
    for name, each in (("same", stats), ("hits", stats._replace(hit=hit)), ("max_abs", stats._replace(max_abs=high))):
        with dce.LossCurve(tmp_path / name) as curve:
            total = dce.LossStats.of(each, targets)
            curve.log(0, total, valid=total)
    for name in ("hits", "max_abs"):
        seen = dce.curve.compare(tmp_path / "same", tmp_path / name)
        assert [difference.name for difference in seen.first] == [name, f"valid.{name}"]
    hits = int(stats.hit.sum())
    assert f"hits: {hits} (i64:{hits:016x}) | {hits - 1} (i64:{hits - 1:016x}), 1 apart" in str(dce.curve.compare(tmp_path / "same", tmp_path / "hits"))


def test_names_that_are_taken(dce):
    total = dce.LossStats()
    with dce.LossCurve(None) as curve:
        with pytest.raises(ValueError, match="stats: the name hits is taken"):
            curve.log(0, total, hits=3)
        with pytest.raises(ValueError, match=r"stats: the name valid.loss is taken"):
            curve.log(0, 1.0, **{"valid": total, "valid.loss": 1.0})
        assert curve.digest == dce.curve.START.hex()


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_errors_name_the_argument_and_what_it_got(dce):
    logits, targets = batch()
    stats = row_stats(dce, logits, targets)
    of, total = dce.LossStats.of, dce.LossStats()
    for call, error, message in (
        (lambda: of((torch.tensor(1.0), stats), targets), TypeError, r"stats: expected RowStats, the last result of cross_entropy\(..., return_stats=True\), got tuple"),
        (lambda: of(tuple(stats), targets), TypeError, "stats: expected RowStats, .* got tuple"),
        (lambda: of(stats, targets.tolist()), TypeError, "targets: expected a torch.Tensor, got list"),
        (lambda: of(stats, targets.float()), TypeError, "targets: expected int64 or int32, got torch.float32"),
        (lambda: of(stats, targets[1:]), ValueError, rf"stats.logprob: expected shape \({N - 1},\), got \({N},\)"),
        (lambda: of(stats._replace(entropy=stats.entropy[None]), targets), ValueError, rf"stats.entropy: expected shape \({N},\), got \(1, {N}\)"),
        (lambda: of(stats._replace(max_abs=stats.max_abs.double()), targets), TypeError, "stats.max_abs: expected float32, got torch.float64"),
        (lambda: of(stats._replace(hit=stats.hit.int()), targets), TypeError, "stats.hit: expected bool, got torch.int32"),
        (lambda: of(stats._replace(hit=stats.hit.to("meta")), targets), ValueError, "stats.hit: expected on cpu like the rest, got meta"),
        (lambda: of(stats, targets, ignore_index=None), TypeError, "ignore_index: expected an int, got NoneType"),
        (lambda: total + dce.LossStats(device="meta"), ValueError, "LossStats: expected both on one device, got cpu and meta"),
        (lambda: total + 1, TypeError, "unsupported operand"),
        (lambda: 1 + total, TypeError, "unsupported operand"),
        (lambda: total + stats, TypeError, "unsupported operand|can only concatenate"),
        (lambda: total.bits_per_byte(-1), ValueError, "utf8_bytes: expected at least 1, got -1"),
        (lambda: total.bits_per_byte(0), ValueError, "utf8_bytes: expected at least 1, got 0"),
        (lambda: total.bits_per_byte(1.5), TypeError, "utf8_bytes: expected an int, got float"),
        (lambda: total.bits_per_byte(True), TypeError, "utf8_bytes: expected an int, got bool"),
        (lambda: total.bits_per_byte(torch.ones(2, dtype=torch.int64)), ValueError, r"utf8_bytes: expected an int or a tensor of one, got shape \(2,\)"),
        (lambda: total.as_dict(torch.ones(())), TypeError, "utf8_bytes: expected int64 or int32, got torch.float32"),
        (lambda: dce.LossStats.from_words([0] * 26), TypeError, "words: expected a torch.Tensor, got list"),
        (lambda: dce.LossStats.from_words(torch.zeros(26)), TypeError, "words: expected int64, got torch.float32"),
        (lambda: dce.LossStats.from_words(torch.zeros(12, dtype=torch.int64)), ValueError, r"words: expected shape \(26,\), got \(12,\)"),
        (lambda: total.all_reduce(7), TypeError, "group: expected a ProcessGroup, a DeviceMesh or None, got int"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert (total == 3) is False and total != stats
    assert dce.LossStats.of(stats, targets).bits_per_byte(torch.tensor([9])) == dce.LossStats.of(stats, targets).bits_per_byte(9)
