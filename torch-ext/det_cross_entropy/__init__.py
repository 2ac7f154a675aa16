"""Cross-entropy whose value and gradient are the same bytes however the vocabulary is sharded, on every GPU and on the CPU.

The specification of every bit is docs/SPEC.md of the repository; ``spec_version`` says which.
"""

from . import _registration  # noqa: F401  (fake kernels and autograd formulas of the ops)
from . import audit, distributed, golden, layers
from .audit import SelfTest, digest, self_test
from .distributed import vocab_parallel_cross_entropy
from .functional import (
    carry_digits,
    cross_entropy,
    denom_digits,
    finalize,
    forward,
    grad_logits,
    loss_digits,
    reduce_digits,
    rowmax,
)

spec_version = 1

__all__ = [
    "SelfTest",
    "audit",
    "carry_digits",
    "cross_entropy",
    "denom_digits",
    "digest",
    "distributed",
    "finalize",
    "forward",
    "golden",
    "grad_logits",
    "layers",
    "loss_digits",
    "reduce_digits",
    "rowmax",
    "self_test",
    "spec_version",
    "vocab_parallel_cross_entropy",
]
