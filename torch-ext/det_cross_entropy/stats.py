"""What the logits of each token say, and exact sums of it that merge: over micro-batches, in any order, over any number of ranks, to the same bytes."""

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import _checks as check
from ._ops import ops
from ._ranks import Ranks
from ._registration import COUNT_WORD, MEAN, SUM_WORDS

DIGITS = 9  # of the words of a sum, those that are digits; then the count, and who is infinite (SPEC 8)
HITS, MAXIMUM = 2 * SUM_WORDS, 2 * SUM_WORDS + 1  # behind the words of the losses and those of the entropies
STATS_WORDS = MAXIMUM + 1
LN2 = 0xB17217F7D1CF79ABC9E3B39803F2F6AF  # round(ln 2 * 2^128)


class RowStats(NamedTuple):
    """What ``cross_entropy(..., return_stats=True)`` returns of each row, in the shape of targets. Not differentiable.

    An ignored row is 0 and False throughout; a row whose loss is NaN is NaN and False, but for a target out of range: that leaves all but ``logprob`` and ``hit`` as they are.
    Source: docs/SPEC.md, section 13.
    """

    lse: torch.Tensor  # float32: log(sum(exp(logits))), nats
    logprob: torch.Tensor  # float32: log-probability of the target, nats; at most 0: the plain cross-entropy with its sign changed
    entropy: torch.Tensor  # float32: of the softmax, nats
    max_abs: torch.Tensor  # float32: the greatest absolute value of the logits above -inf, scaled and capped as the loss takes them
    hit: torch.Tensor  # bool: the target has the greatest logit, and is the first that has it


def _carry(words, passes=1):
    """The same sums with digits of 32 bits: after one pass up to a last carry, after as many as there are carries canonically."""
    for _ in range(passes):
        words = words.clone()
        for first in (0, SUM_WORDS):
            low = words[first : first + DIGITS - 1]
            carries = low >> 32
            low &= 0xFFFFFFFF
            words[first + 1 : first + DIGITS] += carries
    return words


def _bytes(value):
    if isinstance(value, torch.Tensor):
        check.tensor("utf8_bytes", value, (torch.int64, torch.int32))
        if value.numel() != 1:
            raise ValueError(f"utf8_bytes: expected an int or a tensor of one, got shape {tuple(value.shape)}")
        value = int(value)
    if check.integer("utf8_bytes", value) < 1:
        raise ValueError(f"utf8_bytes: expected at least 1, got {value}")
    return value


class LossStats:
    """Statistics of tokens that merge exactly: the same bytes for any cut of the tokens into micro-batches, in any order, on any number of ranks.

        total = LossStats(device=device)                          # of no tokens
        for logits, targets in batches:
            loss, stats = cross_entropy(logits, targets, return_stats=True)
            total += LossStats.of(stats, targets)
        print(total.all_reduce().as_dict())

    ``+`` and ``sum()`` merge. Inside are integers alone: exact sums of the losses and entropies, counts, and an integer that is ordered as the maximum. So there is no order to
    depend on, and each result is rounded once. Up to 2**39 tokens, of up to 2**30 calls of ``of``.

    Properties are tensors of shape [] on the device of the logits: nothing waits for it. Methods that give Python numbers do. With options of the loss (z-loss, weights,
    smoothing) these remain the statistics of the plain cross-entropy (of the logits as ``logit_scale``, ``softcap`` and ``valid_vocab`` leave them). Of no tokens, means are NaN. Source: docs/SPEC.md, section 14.
    """

    def __init__(self, device=None):
        self._words = torch.zeros(STATS_WORDS, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, stats, targets, *, ignore_index=-100):
        """Those of a batch: RowStats, and the targets that they are of, which say what is ignored."""
        if not isinstance(stats, RowStats):
            raise TypeError(f"stats: expected RowStats, the last result of cross_entropy(..., return_stats=True), got {type(stats).__name__}")
        check.tensor("targets", targets, check.TARGET_DTYPES)
        check.countable("targets", targets.numel(), MEAN)
        check.integer("ignore_index", ignore_index)
        row = lambda name, dtype=torch.float32: (
            check.tensor(f"stats.{name}", getattr(stats, name), (dtype,), targets.shape, targets.device).detach().reshape(-1).contiguous()
        )
        loss, entropy, max_abs, hit = -row("logprob"), row("entropy"), row("max_abs"), row("hit", torch.bool)
        target = targets.reshape(-1).contiguous()
        counted = target != ignore_index
        images = ops.order_images(torch.where(counted, max_abs, 0.0))
        sums = ops.loss_digits(loss, target, ignore_index), ops.loss_digits(entropy, target, ignore_index)
        hits, greatest = (hit & counted).sum(), torch.cat([images, images.new_zeros(1)]).amax()
        # One carry, so that what is added later is bounded by the number of batches and not of tokens.
        return cls._holding(_carry(torch.cat([*sums, torch.stack([hits, greatest.long()])])))

    @classmethod
    def _holding(cls, words):
        self = cls.__new__(cls)
        self._words = words
        return self

    @classmethod
    def from_words(cls, words):
        """What ``to_words`` saved, on the device of ``words``."""
        return cls._holding(check.tensor("words", words, (torch.int64,), (STATS_WORDS,)).clone())

    def to_words(self):
        """All of it as int64 [26], to be saved: the same bytes for every way of merging. Nothing waits for the device."""
        return _carry(self._words, DIGITS - 1)

    # -----------------------------------------------------------------------------------------------------------------
    # Merging

    def __add__(self, other):
        if not isinstance(other, LossStats):
            return NotImplemented
        if other._words.device != self._words.device:
            raise ValueError(f"LossStats: expected both on one device, got {self._words.device} and {other._words.device}")
        a, b = self._words, other._words
        return self._holding(torch.cat([a[:MAXIMUM] + b[:MAXIMUM], torch.maximum(a[MAXIMUM:], b[MAXIMUM:])]))

    def __radd__(self, other):
        return self if type(other) is int and other == 0 else NotImplemented  # what sum() starts from

    def all_reduce(self, group=None):
        """New LossStats, of the tokens of all ranks of a group, each of which calls it: two all-reduces of integers, 200 bytes added and 8 compared. Nothing waits for the device.

        ``group``: ranks with other tokens (not those that share a vocabulary, which have the same statistics): a ProcessGroup, a DeviceMesh (all its dimensions), or None for the default group.
        """
        ranks, words = Ranks("group", group), self._words.clone()
        ranks.all_reduce(words[:MAXIMUM])
        ranks.all_reduce(words[MAXIMUM:], dist.ReduceOp.MAX)
        return self._holding(words)

    def __eq__(self, other):
        """Whether all integers are the same. Waits for the device."""
        return torch.equal(self.to_words(), other.to_words()) if isinstance(other, LossStats) else NotImplemented

    __hash__ = None

    # -----------------------------------------------------------------------------------------------------------------
    # Results: tensors

    @property
    def loss(self):
        """The mean cross-entropy of a token, float32, nats: that of ``cross_entropy`` with no option but ``logit_scale``, ``softcap`` and ``valid_vocab``, of all tokens in one batch."""
        return ops.reduce_digits(self._words[:SUM_WORDS], True)

    @property
    def entropy(self):
        """The mean entropy of the softmax of a token, float32, nats."""
        return ops.reduce_digits(self._words[SUM_WORDS:HITS], True)

    @property
    def max_abs(self):
        """The greatest absolute value of a logit above -inf, float32: NaN if a row is NaN, 0 of no tokens."""
        return self._words[MAXIMUM].int().view(torch.float32)

    @property
    def tokens(self):
        """How many tokens were not ignored, int64."""
        return self._words[COUNT_WORD].clone()

    @property
    def hits(self):
        """Of how many of them the target had the greatest logit, int64."""
        return self._words[HITS].clone()

    @property
    def accuracy(self):
        """hits / tokens, float64."""
        tokens = self._words[COUNT_WORD].double()
        return torch.where(tokens > 0, self._words[HITS].double() / tokens, math.nan)  # 0 / 0 is a NaN of other bits on other devices

    def tensors(self):
        """By name, all of these but ``accuracy``, which they give: what ``LossCurve`` records."""
        return {name: getattr(self, name) for name in ("loss", "entropy", "max_abs", "tokens", "hits")}

    # -----------------------------------------------------------------------------------------------------------------
    # Results: Python numbers

    def _here(self):
        """The same on the CPU: the one wait for the device. All that follows is computed there, by the same integers or correctly rounded."""
        return self._holding(self._words.cpu())

    def perplexity(self):
        """e to the power of ``loss``, a float: the double nearest to that of the float32 ``loss``, which no math library has a say in. Waits for the device."""
        loss = Decimal.from_float(self._here().loss.item())
        return float(Context(prec=50, rounding=ROUND_HALF_EVEN, traps=[]).exp(loss))  # exp of decimal rounds correctly; 50 digits tell where the double rounds

    def bits_per_byte(self, utf8_bytes):
        """The sum of the losses in bits, over the bytes of the text that the tokens encode, a float: the exact sum, divided and rounded once. Waits for the device.

        ``utf8_bytes``: of the text of all tokens counted here, those of other ranks too: an int, or an integer tensor of one.
        """
        size, words = _bytes(utf8_bytes), self._words.tolist()
        if words[COUNT_WORD] < 1:
            return math.nan
        if words[COUNT_WORD + 1] or words[COUNT_WORD + 2]:
            return self._here().loss.item()  # infinite or NaN, as the mean
        return sum(word << 32 * i for i, word in enumerate(words[:DIGITS])) / (size * LN2 << 149 - 128)

    def as_dict(self, utf8_bytes=None):
        """All results by name as Python numbers, to be logged: ``loss``, ``perplexity``, ``accuracy``, ``entropy``, ``max_abs``, ``tokens``, ``hits``; with ``utf8_bytes`` also ``bits_per_byte``.
        Waits for the device, once."""
        here = self._here()
        numbers = {"loss": here.loss.item(), "perplexity": here.perplexity()}
        numbers.update((name, getattr(here, name).item()) for name in ("accuracy", "entropy", "max_abs", "tokens", "hits"))
        if utf8_bytes is not None:
            numbers["bits_per_byte"] = here.bits_per_byte(utf8_bytes)
        return numbers

    def __repr__(self):
        return f"LossStats({', '.join(f'{name}={number!r}' for name, number in self.as_dict().items())})"


__all__ = ["LossStats", "RowStats"]
