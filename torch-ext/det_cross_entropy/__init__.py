"""Cross-entropy whose value and gradient are the same bytes however the vocabulary is sharded, on every GPU and on the CPU.

The specification of every bit is docs/SPEC.md of the repository; ``spec_version`` says which.
"""

from . import _registration  # noqa: F401  (fake kernels and autograd formulas of the ops)
from . import audit, curve, distributed, golden, layers, megatron, stats, transformer_engine
from .audit import SelfTest, digest, self_test
from .curve import LossCurve
from .distributed import data_parallel_cross_entropy, reduce_losses, vocab_parallel_cross_entropy
from .functional import (
    carry_digits,
    cross_entropy,
    denom_digits,
    finalize,
    finalize_mean,
    finalize_stats,
    forward,
    grad_logits,
    grad_norm,
    logit_digits,
    logprobs,
    loss_digits,
    reduce_digits,
    rowmax,
    square_digits,
    stat_digits,
)
from .stats import LossStats, RowStats

spec_version = 1


def __getattr__(name):
    if name == "dtensor":  # on demand: it imports torch.distributed.tensor
        import importlib

        return importlib.import_module(f"{__name__}.dtensor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LossCurve",
    "LossStats",
    "RowStats",
    "SelfTest",
    "audit",
    "carry_digits",
    "cross_entropy",
    "curve",
    "data_parallel_cross_entropy",
    "denom_digits",
    "digest",
    "distributed",
    "dtensor",
    "finalize",
    "finalize_mean",
    "finalize_stats",
    "forward",
    "golden",
    "grad_logits",
    "grad_norm",
    "layers",
    "logit_digits",
    "logprobs",
    "loss_digits",
    "megatron",
    "reduce_digits",
    "reduce_losses",
    "rowmax",
    "self_test",
    "spec_version",
    "square_digits",
    "stat_digits",
    "stats",
    "transformer_engine",
    "vocab_parallel_cross_entropy",
]
