"""The loss curve as an instrument: every logged number with its bits, chained by SHA-256, and what names the first bit in which two runs differ.

    python curve.py RUN_A RUN_B [--plot PNG]     exit 0: the same bits; 1: they differ; 2: a file is missing or damaged, or no plot

A file is JSON lines. A record is ``{"step": 7, "loss": [1.5, "f32:3fc00000"], "lr": [0.1, "f64:3fb999999999999a"], "sha256": "..."}``: the loss, then the other
numbers by name, each as a number to read ("nan", "inf" and "-inf" are strings, since JSON has none) and as its bits. ``sha256`` is that of the 32 bytes of the record
before it (``START`` for the first), then the line without ``sha256``: so the last one, the run's digest, names every bit of the history. What else is known of a run
stands in lines of ``{"format": ..., "meta": {...}, "sha256": ...}``. They are sealed in the same way but are no link of the chain: the same history has the same
digest on 2 ranks and on 8. The chain finds damage; against forgery, keep the digest elsewhere.

torch is imported only where a run is logged: comparing needs nothing but Python, plotting matplotlib.
"""

import argparse
import fcntl
import hashlib
import json
import math
import struct
import sys
import warnings
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

FORMAT = "det-cross-entropy loss curve 1"
START = hashlib.sha256(FORMAT.encode()).digest()
CODES = {"f32": ">f", "f64": ">d", "i64": ">q"}  # of the struct module


class BadCurve(ValueError):
    """A file that is not a loss curve, or no longer the one that was written. Says which line."""


class Value(NamedTuple):
    """A logged number: its ``kind``, "f32", "f64" or "i64", and its ``bits`` as an unsigned integer (two's complement for "i64")."""

    kind: str
    bits: int

    @property
    def number(self) -> Union[int, float]:
        """The number with these bits. Python may change the payload of a NaN."""
        code = CODES[self.kind]
        return struct.unpack(code, self.bits.to_bytes(struct.calcsize(code), "big"))[0]

    @property
    def hex(self) -> str:
        return f"{self.kind}:{self.bits:0{2 * struct.calcsize(CODES[self.kind])}x}"

    @classmethod
    def from_number(cls, kind, number) -> "Value":
        return cls(kind, int.from_bytes(struct.pack(CODES[kind], number), "big"))

    @classmethod
    def from_hex(cls, text) -> "Value":
        kind, bits = text.split(":")
        return cls(kind, int(bits, 16))

    def __str__(self) -> str:
        return f"{self.number!r} ({self.hex})"


def ulps(a: Value, b: Value) -> Optional[int]:
    """How many steps apart two numbers of one kind are: 0 for -0 and +0, the difference for integers. None for a NaN, or for two kinds."""
    if a.kind != b.kind or math.isnan(a.number) or math.isnan(b.number):
        return None
    if a.kind == "i64":
        return abs(a.number - b.number)
    sign = 1 << (31 if a.kind == "f32" else 63)
    place = lambda value: value.bits if value.bits < sign else sign - value.bits  # magnitudes are in the order of their bits
    return abs(place(a) - place(b))


def _seal(chain, fields):
    """SHA-256 of the record before and of these fields, and their line in the file."""
    text = json.dumps(fields, allow_nan=False)
    digest = hashlib.sha256(chain + text.encode()).digest()
    return digest, f'{text[:-1]}, "sha256": "{digest.hex()}"}}\n'.encode()


def _record(step, values):
    readable = lambda number: number if math.isfinite(number) else repr(number)
    return {"step": step, **{name: [readable(value.number), value.hex] for name, value in values.items()}}


class _Line(NamedTuple):
    step: Optional[int]  # of a meta line, the one before it
    values: Optional[Dict[str, Value]]
    meta: Optional[dict]
    chain: bytes  # after this line
    end: int  # its offset in the file


def _lines(file, path):
    """Yields each line once it is verified, and raises BadCurve at the first that is not what was written."""
    step, chain, end = None, START, 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            warnings.warn(f"{path}, line {number}: dropped, it was not written to its end (a killed run?)")
            return
        values, meta, in_order = None, None, True
        try:
            fields = json.loads(line)
            del fields["sha256"]
            if "step" in fields:
                last, step = step, fields.pop("step")
                values = {name: Value.from_hex(bits) for name, (_, bits) in fields.items()}
                in_order = "loss" in values and (last is None or step > last)
                chain, again = _seal(chain, _record(step, values))
            else:
                meta = fields["meta"]
                _, again = _seal(chain, {"format": FORMAT, "meta": meta})
        except Exception as error:  # whatever a damaged line does to a parser
            raise BadCurve(f"{path}, line {number}: not a line of a loss curve") from error
        # A line must be what its own bits are written as: that covers bits, readable numbers, spelling and chain at once.
        if again != line or not in_order:
            raise BadCurve(f"{path}, line {number}: it, or the record before it, is not what was written there")
        end += len(line)
        yield _Line(step, values, meta, chain, end)


def _held(name, value):
    """(kind, bits) of what was logged. The bits of a tensor are a copy on its device, int64, so that nothing waits for it and what is done to it later is not seen."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name}: expected a number or a tensor of shape [], got shape {list(value.shape)}")
        value = value.detach()
        if value.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return "f32", value.float().view(torch.int32).to(torch.int64)
        if value.dtype == torch.float64:
            return "f64", value.view(torch.int64).clone()
        if value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
            return "i64", value.to(torch.int64, copy=True)
        raise TypeError(f"{name}: expected float32, float64 or integers up to int64, got {value.dtype}")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected an integer of 64 bits, got {value}")
        return Value.from_number("i64", value)
    if isinstance(value, float):
        return Value.from_number("f64", value)
    raise TypeError(f"{name}: expected a number or a tensor of shape [], got {type(value).__name__}")


def _held_loss(loss):
    """As ``_held``, always float32: what ``loss.item()`` gives is the float32 it came from."""
    if isinstance(loss, float):
        try:
            value = Value.from_number("f32", loss)
        except OverflowError:
            value = None
        if value is None or not (value.number == loss or math.isnan(loss)):
            raise ValueError(f"loss: expected a float32 number, got {loss!r}")
        return value
    kind, bits = _held("loss", loss)
    if kind != "f32":
        raise TypeError(f"loss: expected a float32 tensor or number, got {getattr(loss, 'dtype', type(loss).__name__)}")
    return kind, bits


def _by_name(loss, stats):
    """(loss, stats) with the fields of LossStats, told by their method (this file stands alone), in the place of each."""
    taken = {}
    if hasattr(loss, "tensors"):
        taken = loss.tensors()
        loss = taken.pop("loss")
    for name, value in stats.items():
        fields = {f"{name}.{field}": number for field, number in value.tensors().items()} if hasattr(value, "tensors") else {name: value}
        for field, number in fields.items():
            if field in taken or field == "sha256":
                raise ValueError(f"stats: the name {field} is taken")
            taken[field] = number
    return loss, taken


class LossCurve:
    """Writes the numbers of each step of a run to a file, and keeps the digest of them all. Close it, or use it as a context manager.

    Args:
        path: the file. One that exists is verified and goes on. None writes nothing and keeps the digest alone: for the ranks other than the one that writes.
        meta: a dict that JSON can hold, of what else is known of the run (ranks, commit, seed). No part of the digest. A resumed run adds its own where it differs.
        every: write once in so many steps, at least 1. Until then tensors stay on their device: logging waits for it only when it writes. A killed run loses what it held.
        after: the ``digest`` saved with the checkpoint that this run resumes. Later steps are cut off the file; where ``path`` is None, the chain goes on from it.

    Raises:
        BadCurve: the file is damaged. A last line that was not written to its end is dropped with a warning.
        ValueError: ``after`` is no digest, or not that of a step in the file; ``every`` < 1; NaN or infinity in ``meta``.
        TypeError: ``meta`` is no dict, or holds what JSON can't.
        RuntimeError: another LossCurve has the file open.
        OSError: it can't be opened.
    """

    def __init__(self, path, *, meta=None, every=1, after=None):
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        if not isinstance(meta, (dict, type(None))):
            raise TypeError(f"meta: expected a dict, got {type(meta).__name__}")
        meta = json.loads(json.dumps(meta or {}, allow_nan=False))  # as it reads back: tuples are lists, keys are strings
        if after is not None and not (isinstance(after, str) and len(after) == 64 and set(after) <= set("0123456789abcdef")):
            raise ValueError(f"after: expected 64 hex digits, got {after!r}")
        self._path, self._every, self._pending, self._closed = path, every, [], False
        self._file, self._step, self._chain = None, None, bytes.fromhex(after) if after else START
        if path is not None:
            self._file = open(path, "a+b")
            try:
                self._resume(meta, after)
            except BaseException:
                self._file.close()
                raise

    def _resume(self, meta, after):
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{self._path}: already open for writing; one rank writes, the others have path=None") from None
        except OSError:
            pass  # a file system without locks
        end, chain, known = 0, START, {}
        self._file.seek(0)
        for line in _lines(self._file, self._path):
            end, chain, self._step = line.end, line.chain, line.step
            known.update(line.meta or {})
            if chain.hex() == after:
                break  # what follows is cut off unread
        if after not in (None, chain.hex()):
            raise ValueError(f"after: {self._path} has no step with the digest {after}")
        self._file.truncate(end)
        self._chain = chain
        if not end or {**known, **meta} != known:
            self._write(_seal(chain, {"format": FORMAT, "meta": meta})[1])

    def log(self, step, loss, **stats):
        """Adds the numbers of one step.

        Args:
            step: int, greater than the last one.
            loss: float32 tensor of shape [], or a float that is a float32 number, such as ``loss.item()``. Recorded as float32; bfloat16 and float16 are widened.
                Or LossStats: their loss, and by their names entropy, hits, max_abs and tokens.
            stats: by name, tensors of shape [] (float32, float64, integers; bfloat16 and float16 are widened to float32), int, or float (recorded as float64). LossStats
                named ``valid`` are recorded as ``valid.loss``, ``valid.entropy`` and so on.

        Raises:
            TypeError, ValueError: naming the argument and what it got. The step is then not recorded.
        """
        if self._closed:
            raise ValueError(f"{self._path}: the curve is closed")
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"step: expected an int, got {type(step).__name__}")
        if self._step is not None and step <= self._step:
            raise ValueError(f"step: {step} does not come after {self._step}, the last of {self._path}; to go back to a checkpoint, open with after=<its digest>")
        loss, stats = _by_name(loss, stats)
        self._pending.append((step, {"loss": _held_loss(loss), **{name: _held(name, stats[name]) for name in sorted(stats)}}))
        self._step = step
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self):
        """Writes the steps held so far, waiting once for each device that has some of their numbers."""
        pending, self._pending = self._pending, []
        waiting = {}
        for _, values in pending:
            for name, (_, bits) in values.items():
                if not isinstance(bits, int):
                    waiting.setdefault(bits.device, []).append((values, name))
        for places in waiting.values():
            import torch

            for (values, name), bits in zip(places, torch.stack([values[name][1] for values, name in places]).tolist()):
                kind = values[name][0]
                values[name] = Value(kind, bits % (1 << 8 * struct.calcsize(CODES[kind])))
        lines = []
        for step, values in pending:
            self._chain, line = _seal(self._chain, _record(step, {name: Value(*value) for name, value in values.items()}))
            lines.append(line)
        self._write(b"".join(lines))

    def _write(self, lines):
        if self._file:
            self._file.write(lines)
            self._file.flush()

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of every step logged so far and of the bits of every number. Flushes: so a checkpoint that holds it has its steps in the file."""
        self.flush()
        return self._chain.hex()

    def close(self):
        """Flushes and closes the file. ``digest`` can still be read."""
        if not self._closed:
            self._closed = True
            try:
                self.flush()
            finally:
                if self._file:
                    self._file.close()
                    self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class Run(NamedTuple):
    """A verified file. ``meta`` has what a resumed run changed under names such as "ranks after step 400"; ``steps`` the numbers of each step by name."""

    meta: dict
    steps: Dict[int, Dict[str, Value]]
    digest: str


def read(path) -> Run:
    """The run in a file. Raises BadCurve if it is damaged, OSError if it can't be read; warns of a last line not written to its end, and leaves it out."""
    meta, current, steps, chain = {}, {}, {}, START
    with open(path, "rb") as file:
        for line in _lines(file, path):
            chain = line.chain
            if line.values is not None:
                steps[line.step] = line.values
                continue
            for key, value in line.meta.items():
                if key not in current or current[key] != value:
                    meta[key if line.step is None else f"{key} after step {line.step}"] = value
            current.update(line.meta)
    return Run(meta, steps, chain.hex())


class Difference(NamedTuple):
    """A quantity in which two runs differ, and its value in each: None in a run that has not logged it at this step. ``ulps`` as the function of that name."""

    name: str
    a: Optional[Value]
    b: Optional[Value]

    @property
    def ulps(self) -> Optional[int]:
        return ulps(self.a, self.b) if self.a and self.b else None

    def __str__(self) -> str:
        apart = "" if self.ulps is None else f"{self.ulps} apart" if self.a.kind == "i64" else f"{self.ulps} ulp apart"
        return f"{self.name}: {self.a or 'absent'} | {self.b or 'absent'}" + (f", {apart}" if apart else "")


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` saw. Prints as a report."""

    common: int  # how many steps both runs have
    differing: List[int]  # those of them with another bit in some quantity
    first: List[Difference]  # every quantity that differs at the first of these, the loss before the others
    only_a: List[int]  # steps that only one run has
    only_b: List[int]
    meta: Dict[str, Tuple[object, object]]  # by name what differs, None where absent; no matter for `equal`

    @property
    def equal(self) -> bool:
        """The same steps, with the same quantities, in the same bits."""
        return not (self.differing or self.only_a or self.only_b)

    def __str__(self) -> str:
        lines = [f"equal in every bit of {self.common} steps" if self.equal else f"{len(self.differing)} of {self.common} steps in both runs differ"]
        if self.differing:
            lines += [f"first at step {self.differing[0]}:", *(f"  {difference}" for difference in self.first)]
        for run, steps in (("A", self.only_a), ("B", self.only_b)):
            if steps:
                lines.append(f"only in {run}: {len(steps)} steps, from {steps[0]} to {steps[-1]}")
        lines += [f"meta {name}: {json.dumps(a)} | {json.dumps(b)}" for name, (a, b) in self.meta.items()]
        return "\n".join(lines)


def _compare(a, b):
    names = lambda step: sorted(a.steps[step].keys() | b.steps[step].keys(), key=lambda name: (name != "loss", name))
    differing = [step for step in a.steps if step in b.steps and a.steps[step] != b.steps[step]]
    first = []
    if differing:
        here, there = a.steps[differing[0]], b.steps[differing[0]]
        first = [Difference(name, here.get(name), there.get(name)) for name in names(differing[0]) if here.get(name) != there.get(name)]
    only_a, only_b = [s for s in a.steps if s not in b.steps], [s for s in b.steps if s not in a.steps]
    meta = {key: (a.meta.get(key), b.meta.get(key)) for key in {**a.meta, **b.meta} if a.meta.get(key) != b.meta.get(key)}
    return Comparison(len(a.steps) - len(only_a), differing, first, only_a, only_b, meta)


def compare(a, b) -> Comparison:
    """Compares the runs in two files bit by bit: NaNs by their payload, -0 is not +0, a float32 is not the same number as float64. Raises as ``read``."""
    return _compare(read(a), read(b))


def plot(a, b, path):
    """Draws the losses of the runs in two files, below them the absolute difference, and where they first differ, to an image at `path`.

    Raises as ``read``; ImportError without matplotlib; ValueError for a kind of image that matplotlib does not know.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    runs = read(a), read(b)
    comparison = _compare(*runs)
    losses = [{step: values["loss"].number for step, values in run.steps.items()} for run in runs]
    apart = {step: abs(losses[0][step] - losses[1][step]) for step in losses[0] if step in losses[1]}
    apart = {step: distance for step, distance in apart.items() if 0 < distance < math.inf}  # a log axis has no zero

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for loss, name, style in zip(losses, (a, b), ({"color": "#0b7a5b", "linewidth": 2.5}, {"color": "#c8382d", "linewidth": 1, "linestyle": "--"})):
        above.plot(list(loss), list(loss.values()), label=str(name), **style)
    above.set_ylabel("loss")
    below.set(yscale="log", xlabel="step", ylabel="|difference of loss|")
    below.plot(list(apart), list(apart.values()), ".", color="#1f2933", markersize=4)
    if not apart:
        below.set_yticks([])
        below.text(0.5, 0.5, "no difference" if comparison.equal else "no step with a finite difference", ha="center", va="center", transform=below.transAxes)
    if comparison.differing:
        label = f"first differs: step {comparison.differing[0]}, {', '.join(difference.name for difference in comparison.first)}"
        for axes in (above, below):
            axes.axvline(comparison.differing[0], color="#7b8794", linestyle=":", label=label if axes is above else None)
    above.legend()
    figure.savefig(path, dpi=150)


def main(arguments=None) -> int:
    """The command at the head of this file; returns its exit code."""
    parser = argparse.ArgumentParser(description="Compare the loss curves of two runs bit by bit.", epilog="exit code: 0 equal, 1 different, 2 a file is missing or damaged, or the plot can't be drawn")
    parser.add_argument("run_a", metavar="RUN_A")
    parser.add_argument("run_b", metavar="RUN_B")
    parser.add_argument("--plot", metavar="PNG", help="draw both losses and their difference")
    args = parser.parse_args(arguments)
    try:
        comparison = compare(args.run_a, args.run_b)
        print(comparison)
        if args.plot:
            plot(args.run_a, args.run_b, args.plot)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if comparison.equal else 1


__all__ = ["BadCurve", "Comparison", "Difference", "LossCurve", "Run", "Value", "compare", "plot", "read", "ulps"]

if __name__ == "__main__":
    sys.exit(main())
