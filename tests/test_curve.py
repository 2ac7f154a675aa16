"""The logged loss curve: every bit of every number is kept, chained and compared; no damage goes unseen; resuming leaves no trace."""
import hashlib
import json
import math
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
WIDTH = {"f32": 32, "f64": 64, "i64": 64}
KINDS = {"loss": "f32", "grad_norm": "f32", "lr": "f64", "tokens": "i64"}


def signed(bits, width):
    return bits - (bits >> width - 1 << width)


def tensor_of(kind, bits):
    if kind == "f32":
        return torch.tensor(signed(bits, 32), dtype=torch.int32).view(torch.float32)
    integer = torch.tensor(signed(bits, 64))
    return integer.view(torch.float64) if kind == "f64" else integer


def bits_of(kind):
    special = {"f32": [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001], "f64": [0, 1 << 63, 0x7FF0000000000000, 0x7FF8000000000001], "i64": [0, 1 << 63]}
    return st.sampled_from(special[kind]) | st.integers(0, 2 ** WIDTH[kind] - 1)


runs = st.lists(st.fixed_dictionaries({name: bits_of(kind) for name, kind in KINDS.items()}), min_size=1, max_size=6)


def log(curve, steps, start=0):
    for step, values in enumerate(steps, start):
        curve.log(10 * step, **{name: tensor_of(KINDS[name], bits) for name, bits in values.items()})


def write(dce, path, steps, **options):
    with dce.LossCurve(path, **options) as curve:
        log(curve, steps)
    return curve.digest


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def in_a_folder(test):
    """tmp_path would be one folder for all examples of hypothesis."""

    def run(dce, data):
        with tempfile.TemporaryDirectory() as name:
            test(dce, data, Path(name))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return few(given(data=st.data())(run))


def plain(count, offset=0.0):
    """Steps of finite losses, for tests that are not about bits."""
    return [{"loss": struct.unpack(">I", struct.pack(">f", 1.5 + step + offset))[0]} for step in range(count)]


# ---------------------------------------------------------------------------------------------------------------------
# Bits


@in_a_folder
def test_a_flipped_bit_is_found_and_named(dce, data, folder):
    steps = data.draw(runs)
    at, name = data.draw(st.integers(0, len(steps) - 1)), data.draw(st.sampled_from(list(KINDS)))
    flipped = [dict(values) for values in steps]
    flipped[at][name] ^= 1 << data.draw(st.integers(0, WIDTH[KINDS[name]] - 1))
    one, same, other = write(dce, folder / "a", steps), write(dce, folder / "same", steps), write(dce, folder / "b", flipped)
    assert one == same != other

    equal = dce.curve.compare(folder / "a", folder / "same")
    assert equal.equal and not equal.first and equal.common == len(steps)
    seen = dce.curve.compare(folder / "a", folder / "b")
    values = [dce.curve.Value(KINDS[name], run[at][name]) for run in (steps, flipped)]
    assert not seen.equal and seen.differing == [10 * at] and seen.first == [(name, *values)]
    assert f"first at step {10 * at}:\n  {name}: " in str(seen) and values[0].hex in str(seen) and values[1].hex in str(seen)


@in_a_folder
def test_what_is_read_is_what_was_logged(dce, data, folder):
    steps = data.draw(runs)
    digest = write(dce, folder / "run", steps, every=data.draw(st.integers(1, 8)))
    run = dce.curve.read(folder / "run")
    assert run.digest == digest == write(dce, None, steps)
    assert run.steps == {10 * step: {name: (KINDS[name], bits) for name, bits in values.items()} for step, values in enumerate(steps)}
    for line in (folder / "run").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity


def test_readable_numbers(dce, folder):
    with dce.LossCurve(folder / "run") as curve:
        curve.log(0, torch.tensor(-0.0), b=math.nan, c=-math.inf, a=7, d=True, e=0.1)
    assert json.loads((folder / "run").read_text().splitlines()[1]) == {
        "step": 0, "loss": [-0.0, "f32:80000000"], "a": [7, "i64:0000000000000007"], "b": ["nan", "f64:7ff8000000000000"], "c": ["-inf", "f64:fff0000000000000"],
        "d": [1, "i64:0000000000000001"], "e": [0.1, "f64:3fb999999999999a"], "sha256": curve.digest,
    }  # fmt: skip


def test_the_chain_is_the_documented_one(dce, folder):
    write(dce, folder / "run", plain(3), meta={"ranks": 2})
    chain = hashlib.sha256(b"det-cross-entropy loss curve 1").digest()
    for line in (folder / "run").read_text().splitlines():
        text, seal = line.split(', "sha256": ')
        digest = hashlib.sha256(chain + text.encode() + b"}").digest()
        assert seal == f'"{digest.hex()}"}}'
        chain = digest if '"step"' in text else chain
    assert dce.curve.read(folder / "run").digest == chain.hex()


def test_item_and_half_precision_are_the_same_loss(dce):
    digests = set()
    for loss in (torch.tensor(1.1, dtype=torch.bfloat16), torch.tensor(1.1).bfloat16().float(), torch.tensor(1.1).bfloat16().item()):
        with dce.LossCurve(None) as curve:
            curve.log(0, loss)
        digests.add(curve.digest)
    assert len(digests) == 1


def test_the_order_of_stats_does_not_matter(dce):
    with dce.LossCurve(None) as one, dce.LossCurve(None) as other:
        one.log(0, 1.0, lr=0.5, tokens=3)
        other.log(0, 1.0, tokens=3, lr=0.5)
    assert one.digest == other.digest


def test_ulps(dce):
    Value = dce.curve.Value
    for kind, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        for start in (0.0, 1.0, -1.0, 1e-40 if kind == "f32" else 1e-310, 3e38):
            x = torch.tensor(start, dtype=dtype)
            for count in range(1, 4):
                x = torch.nextafter(x, torch.tensor(-math.inf, dtype=dtype))
                pair = Value.from_number(kind, start), Value.from_number(kind, x.item())
                assert dce.curve.ulps(*pair) == dce.curve.ulps(*pair[::-1]) == count
        largest, infinity = Value.from_number(kind, torch.finfo(dtype).max), Value.from_number(kind, math.inf)
        assert dce.curve.ulps(largest, infinity) == 1
        zeros = Value.from_number(kind, 0.0), Value.from_number(kind, -0.0)
        assert zeros[0] != zeros[1] and dce.curve.ulps(*zeros) == 0
        assert dce.curve.ulps(zeros[0], Value.from_number(kind, math.nan)) is None
    assert dce.curve.ulps(Value.from_number("i64", -(2**63)), Value.from_number("i64", 2**63 - 1)) == 2**64 - 1
    assert dce.curve.ulps(Value.from_number("f32", 1.0), Value.from_number("f64", 1.0)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Damage


@in_a_folder
def test_no_changed_byte_goes_unseen(dce, data, folder):
    steps, path = data.draw(runs), folder / "run"
    write(dce, path, steps, meta={"ranks": 2})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    if content.endswith(b"\n"):
        with pytest.raises(dce.curve.BadCurve, match="run, line"):
            dce.curve.read(path)
    else:
        with pytest.warns(UserWarning, match="not written to its end"):
            assert len(dce.curve.read(path).steps) == len(steps) - 1


@in_a_folder
def test_no_record_can_be_left_out_moved_or_doubled(dce, data, folder):
    steps, path = plain(5), folder / "run"
    digest = write(dce, path, steps)
    lines = path.read_bytes().splitlines(keepends=True)
    i, j = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    changed = {"left out": lines[:i] + lines[i + 1 :], "doubled": lines[: i + 1] + lines[i:]}
    if i != j:
        changed["swapped"] = list(lines)
        changed["swapped"][i], changed["swapped"][j] = lines[j], lines[i]
    for content in changed.values():
        path.write_bytes(b"".join(content))
        with pytest.raises(dce.curve.BadCurve):
            dce.curve.read(path)
    path.write_bytes(b"".join(lines[:-1]))  # what only the digest tells
    assert dce.curve.read(path).digest != digest


@pytest.mark.parametrize("records", [[(2, "loss"), (1, "loss")], [(1, "loss"), (1, "loss")], [(1, "loss"), (2, "lr")]], ids=["back", "again", "no loss"])
def test_a_sound_chain_does_not_excuse_wrong_records(dce, folder, records):
    chain, lines = dce.curve.START, b""
    for step, name in records:
        chain, line = dce.curve._seal(chain, {"step": step, name: [1.0, "f32:3f800000"]})
        lines += line
    (folder / "run").write_bytes(lines)
    with pytest.raises(dce.curve.BadCurve, match="line 2"):
        dce.curve.read(folder / "run")


@in_a_folder
def test_a_torn_line_is_dropped(dce, data, folder):
    """A run killed at any byte goes on from the steps that are whole, to the digest of one that was not killed."""
    steps, path = data.draw(runs), folder / "run"
    digest = write(dce, path, steps, meta={"ranks": 2})
    content = path.read_bytes()
    cut = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(cut)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curve = dce.LossCurve(path, meta={"ranks": 2})
    assert bool(caught) == (not cut.endswith(b"\n") and cut != b"")
    whole = max(cut.count(b"\n") - 1, 0)
    with curve:
        log(curve, steps[whole:], whole)
    assert curve.digest == digest and path.read_bytes() == content


# ---------------------------------------------------------------------------------------------------------------------
# Resuming


@in_a_folder
def test_resuming_from_a_checkpoint_leaves_no_trace(dce, data, folder):
    steps, path = data.draw(runs), folder / "run"
    digest = write(dce, folder / "whole", steps)
    checkpoint, killed = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(steps))])))
    curve = dce.LossCurve(path, every=data.draw(st.integers(1, 4)))
    log(curve, steps[:checkpoint])
    saved = curve.digest
    log(curve, steps[checkpoint:killed], checkpoint)
    curve.close()
    if data.draw(st.booleans()):
        with open(path, "ab") as file:
            file.write(b"whatever lies after the checkpoint is not read\n")
    with dce.LossCurve(path, after=saved) as resumed, dce.LossCurve(None, after=saved) as other_rank:
        for each in (resumed, other_rank):
            log(each, steps[checkpoint:], checkpoint)
    assert resumed.digest == other_rank.digest == digest
    assert path.read_bytes() == (folder / "whole").read_bytes()


def test_without_a_checkpoint_an_existing_file_goes_on(dce, folder):
    digest = write(dce, folder / "whole", plain(4))
    write(dce, folder / "run", plain(2))
    with dce.LossCurve(folder / "run") as curve:
        for step in (0, 10):
            with pytest.raises(ValueError, match=f"step: {step} does not come after 10, the last of .*run"):
                curve.log(step, 1.0)
        log(curve, plain(4)[2:], 2)
    assert curve.digest == digest


def test_after_must_be_in_the_file(dce, folder):
    write(dce, folder / "run", plain(2))
    content = (folder / "run").read_bytes()
    with pytest.raises(ValueError, match="after: .*run has no step with the digest 0000"):
        dce.LossCurve(folder / "run", after="0" * 64)
    with pytest.raises(ValueError, match="after: expected 64 hex digits, got 500"):
        dce.LossCurve(folder / "run", after=500)
    assert (folder / "run").read_bytes() == content


def test_a_damaged_file_is_not_gone_on_with(dce, folder):
    write(dce, folder / "run", plain(2))
    content = (folder / "run").read_bytes().replace(b"1.5", b"2.5")
    (folder / "run").write_bytes(content)
    with pytest.raises(dce.curve.BadCurve, match="line 2"):
        dce.LossCurve(folder / "run")
    assert (folder / "run").read_bytes() == content


def test_meta(dce, folder):
    same = write(dce, folder / "a", plain(4), meta={"ranks": 2, "cut": (1, 2)})
    write(dce, folder / "b", plain(2), meta={"ranks": 2, "cut": [1, 2], "host": "n7"})
    with dce.LossCurve(folder / "b", meta={"ranks": 8, "cut": [1, 2]}) as curve:
        log(curve, plain(4)[2:], 2)
    assert curve.digest == same  # meta is no part of the history
    seen = dce.curve.compare(folder / "a", folder / "b")
    assert seen.equal and seen.meta == {"host": (None, "n7"), "ranks after step 10": (None, 8)}
    size = (folder / "b").stat().st_size
    dce.LossCurve(folder / "b", meta={"ranks": 8}).close()  # nothing new
    dce.LossCurve(folder / "b").close()
    assert (folder / "b").stat().st_size == size


# ---------------------------------------------------------------------------------------------------------------------
# Logging


def test_held_steps_are_written_together(dce, folder):
    path = folder / "run"
    count = lambda: len(path.read_bytes().splitlines()) - 1
    with dce.LossCurve(path, every=3) as curve:
        seen = []
        for step in range(7):
            curve.log(step, torch.tensor(1.0))
            seen.append(count())
        assert seen == [0, 0, 3, 3, 3, 6, 6]
        assert len(curve.digest) == 64 and count() == 7
        curve.log(7, torch.tensor(1.0))
    assert count() == 8


def test_logging_reads_no_tensor_before_it_writes(dce):
    """A meta tensor has no data: whatever waits for it raises."""
    curve = dce.LossCurve(None, every=10)
    scalars = {str(dtype)[6:]: torch.zeros((), dtype=dtype, device="meta") for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)}
    curve.log(0, torch.zeros((), device="meta"), **scalars)
    with pytest.raises((NotImplementedError, RuntimeError)):
        curve.flush()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_what_is_done_to_a_tensor_later_is_not_seen(dce, folder, dtype):
    loss, stat = torch.tensor(1.0, requires_grad=True), torch.tensor(5, dtype=dtype)
    with dce.LossCurve(folder / "run", every=2) as curve:
        curve.log(0, loss, stat=stat)
        with torch.no_grad():
            loss.zero_()
        stat.zero_()
    assert {name: value.number for name, value in dce.curve.read(folder / "run").steps[0].items()} == {"loss": 1.0, "stat": 5}


@pytest.mark.parametrize(
    "step, loss, stats, error, message",
    [
        (1.0, 1.0, {}, TypeError, "step: expected an int, got float"),
        (True, 1.0, {}, TypeError, "step: expected an int, got bool"),
        (1, 0.1, {}, ValueError, "loss: expected a float32 number, got 0.1"),
        (1, 1e300, {}, ValueError, "loss: expected a float32 number, got 1e"),
        (1, 1, {}, TypeError, "loss: expected a float32 tensor or number, got int"),
        (1, torch.tensor(1.0).double(), {}, TypeError, "loss: expected a float32 tensor or number, got torch.float64"),
        (1, torch.ones(2), {}, ValueError, r"loss: expected .* shape \[\], got shape \[2\]"),
        (1, 1.0, {"x": torch.ones(1)}, ValueError, r"x: expected .* shape \[\], got shape \[1\]"),
        (1, 1.0, {"x": "1"}, TypeError, "x: expected a number or .*, got str"),
        (1, 1.0, {"x": torch.tensor(1j)}, TypeError, "x: expected .*, got torch.complex64"),
        (1, 1.0, {"x": 2**63}, ValueError, "x: expected an integer of 64 bits, got 9223372036854775808"),
        (1, 1.0, {"sha256": 1}, ValueError, "sha256"),
    ],
)
def test_wrong_numbers_are_not_recorded(dce, step, loss, stats, error, message):
    with dce.LossCurve(None) as curve:
        before = curve.digest
        with pytest.raises(error, match=message):
            curve.log(step, loss, **stats)
        assert curve.digest == before
        curve.log(1, 1.0)


def test_wrong_use(dce, folder):
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        dce.LossCurve(None, every=0)
    with pytest.raises(TypeError, match="meta: expected a dict, got list"):
        dce.LossCurve(None, meta=[1])
    with pytest.raises(TypeError, match="not JSON serializable"):
        dce.LossCurve(folder / "run", meta={"dtype": torch.float32})
    assert not (folder / "run").exists()
    with dce.LossCurve(folder / "run") as curve, pytest.raises(RuntimeError, match="run: already open for writing"):
        dce.LossCurve(folder / "run")
    with pytest.raises(ValueError, match="closed"):
        curve.log(0, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def test_steps_and_quantities_that_one_run_has(dce, folder):
    write(dce, folder / "a", plain(5))
    with dce.LossCurve(folder / "b") as curve:
        for step in (-5, 0, 10, 20):
            curve.log(step, 1.5 + max(step, 0) / 10, **({"lr": 0.5} if step == 20 else {}))
    seen = dce.curve.compare(folder / "a", folder / "b")
    assert (seen.common, seen.differing, seen.only_a, seen.only_b) == (3, [20], [30, 40], [-5])
    assert seen.first == [("lr", None, dce.curve.Value.from_number("f64", 0.5))] and not seen.equal
    assert str(seen) == (
        "1 of 3 steps in both runs differ\nfirst at step 20:\n  lr: absent | 0.5 (f64:3fe0000000000000)\n"
        "only in A: 2 steps, from 30 to 40\nonly in B: 1 steps, from -5 to -5"
    )


def test_a_run_that_stopped_early_is_not_equal(dce, folder):
    write(dce, folder / "a", plain(3))
    write(dce, folder / "b", plain(2))
    for pair, only in ((("a", "b"), ([20], [])), (("b", "a"), ([], [20]))):
        seen = dce.curve.compare(*(folder / name for name in pair))
        assert not seen.equal and not seen.differing and (seen.only_a, seen.only_b) == only


def test_every_quantity_of_the_first_differing_step_is_named_loss_first(dce, folder):
    for name, nudge in (("a", 0), ("b", 1)):
        with dce.LossCurve(folder / name) as curve:
            curve.log(0, 1.0, count=3, same=1)
            curve.log(1, 1.0 + nudge * 2.0**-23, count=3 + 4 * nudge, same=1)
            curve.log(2, 1.0 + nudge, count=3, same=1)
    seen = dce.curve.compare(folder / "a", folder / "b")
    assert [(d.name, d.ulps) for d in seen.first] == [("loss", 1), ("count", 4)] and seen.differing == [1, 2]
    assert "1.0 (f32:3f800000) | 1.0000001192092896 (f32:3f800001), 1 ulp apart" in str(seen) and ", 4 apart" in str(seen)


def command(dce, *arguments):
    """Isolated and without site-packages: comparing needs no torch."""
    return subprocess.run([sys.executable, "-I", "-S", dce.curve.__file__, *map(str, arguments)], capture_output=True, text=True)


def test_command(dce, folder):
    a, b, bad = folder / "a", folder / "b", folder / "bad"
    write(dce, a, plain(3))
    write(dce, b, plain(2) + plain(3, 0.5)[2:])
    bad.write_bytes(a.read_bytes().replace(b"1.5", b"1.6"))
    equal, different = command(dce, a, a), command(dce, a, b)
    assert (equal.returncode, equal.stdout) == (0, "equal in every bit of 3 steps\n"), equal.stderr
    assert different.returncode == 1 and "first at step 20:" in different.stdout
    for file, message in ((bad, "bad, line 2: "), (folder / "none", "No such file"), (folder, "directory")):
        result = command(dce, a, file)
        assert result.returncode == 2 and message in result.stderr and not result.stdout
    result = command(dce, a, b, "--plot", folder / "plot.png")
    assert result.returncode == 2 and "pip install matplotlib" in result.stderr


def test_plot(dce, folder, monkeypatch):
    from matplotlib.figure import Figure

    steps = plain(6)
    write(dce, folder / "a", steps)
    other = [dict(values) for values in steps]
    other[2]["loss"] ^= 1
    other[4]["loss"] ^= 2
    other[5]["loss"] = 0x7FC00000  # NaN: differs, but not by a distance that can be drawn
    write(dce, folder / "b", other)
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw)))
    assert dce.curve.main([str(folder / "a"), str(folder / "b"), "--plot", str(folder / "plot.png")]) == 1
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    above, below = figures[0].axes
    assert below.get_yscale() == "log"
    assert [list(line.get_xdata()) for line in above.lines] == [[0, 10, 20, 30, 40, 50]] * 2 + [[20, 20]]
    points, first = below.lines
    assert list(points.get_xdata()) == [20, 40] and list(points.get_ydata()) == [2.0**-22, 2.0**-20] and list(first.get_xdata()) == [20, 20]
    assert "step 20, loss" in above.get_legend().get_texts()[2].get_text()

    dce.curve.plot(folder / "a", folder / "a", folder / "plot.png")
    assert [text.get_text() for text in figures[1].axes[1].texts] == ["no difference"]
