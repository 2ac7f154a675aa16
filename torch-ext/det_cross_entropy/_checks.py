"""Arguments that cannot be meant, refused by name before a kernel sees them."""

import torch
from torch.autograd import forward_ad

from ._registration import MEAN, NONE, SQUARE_WORDS, SUM, SUM_WORDS, WORDS

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TARGET_DTYPES = (torch.int64, torch.int32)
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}

# Bits of the status that the ops report for each row (csrc/row.h, RowStatus).
IGNORED, BAD_TARGET, DEGENERATE, BAD_COLUMNS, BAD_COVER, ABOVE_MAXIMUM, BAD_DIGITS = (1 << i for i in range(7))
MAX_ELEMENTS = 2**40  # of a sum of squares, exclusive (SPEC 15)
MAX_ROWS = 2**30  # of a mean or sum, exclusive: more could carry out of a word (SPEC 8)
WRONG = BAD_TARGET | BAD_COLUMNS | BAD_COVER | ABOVE_MAXIMUM | BAD_DIGITS


def _names(dtypes):
    return " or ".join(str(d).replace("torch.", "") for d in dtypes)


def tensor(name, value, dtypes, shape=None, device=None, dtensor=False):
    """`value` is a tensor of one of `dtypes`, of `shape` and on `device` where given."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if is_dtensor(value) and not dtensor:
        raise TypeError(f"{name}: expected a plain tensor, got a DTensor; cross_entropy takes DTensor logits, and .to_local() is this rank's part")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected {_names(dtypes)}, got {value.dtype}")
    if shape is not None and value.shape != shape and tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected on {device} like the rest, got {value.device}")
    return value


def integer(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected a 64-bit integer, got {value}")
    return value


def _plain(name, value):
    """A dense tensor of a dtype and on a device that the kernels know."""
    tensor(name, value, LOGITS_DTYPES)
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {value.layout}")
    if value.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: expected on cpu or cuda, got {value.device}")


def _rows(logits, name="logits"):
    """logits [..., V] as rows [N, V] with adjacent columns; a view wherever the layout has one."""
    _plain(name, logits)
    if logits.dim() == 0:
        raise ValueError(f"{name}: expected [..., V], got shape {tuple(logits.shape)}")
    if logits.shape[-1] >= 2**31:
        raise ValueError(f"{name}: expected V < 2**31, got V = {logits.shape[-1]}")
    rows = logits.flatten(0, -2) if logits.dim() > 2 else logits.unsqueeze(0) if logits.dim() == 1 else logits
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows


def is_dtensor(logits):
    return type(logits) is not torch.Tensor and hasattr(logits, "device_mesh")


def no_tangent(logits):
    """Forward-mode derivatives are not implemented, and must not come out as 0; nor are those of torch.func, which torch refuses without our name."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None:
        raise NotImplementedError("logits: forward-mode differentiation (jvp, jacfwd) is not implemented; use reverse mode")
    wrapped = logits
    while torch._C._functorch.is_functorch_wrapped_tensor(wrapped):
        if torch._C._functorch.is_gradtrackingtensor(wrapped):
            raise NotImplementedError("logits: torch.func.grad, vjp and jacrev are not implemented; use backward or torch.autograd.grad")
        wrapped = torch._C._functorch.get_unwrapped(wrapped)


def no_transform(name, tensor):
    """What runs over ranks is not for torch.func: a batch of losses would be a batch of messages."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name}: torch.vmap and other transforms of torch.func are not implemented over ranks")


def shard_rows(logits):
    """Rows of a piece that composes, outside autograd. V may be 0: a rank without columns."""
    return _rows(logits).detach()


def logits_rows(logits):
    """Rows of a whole vocabulary: V >= 1."""
    rows = _rows(logits)
    no_tangent(logits)
    if rows.shape[1] == 0:
        raise ValueError(f"logits: expected [..., V] with V >= 1, got shape {tuple(logits.shape)}")
    return rows


def rank_rows(logits_shard):
    """Rows of one rank's columns, inside autograd. V may be 0."""
    rows = _rows(logits_shard, "logits_shard")
    no_tangent(logits_shard)
    no_transform("logits_shard", logits_shard)
    return rows


def target_rows(targets, logits):
    """targets with the leading shape of logits, as contiguous [N]."""
    tensor("targets", targets, TARGET_DTYPES, logits.shape[:-1], logits.device)
    return targets if targets.dim() == 1 and targets.is_contiguous() else targets.reshape(-1).contiguous()


def row_values(name, value, logits, dtype=torch.float32, trailing=()):
    """One value, or `trailing` values, a row of logits: shaped like the leading shape of logits or [N]; as contiguous rows."""
    tensor(name, value, (dtype,), device=logits.device)
    leading, rows = tuple(logits.shape[:-1]), logits.shape[:-1].numel()
    if tuple(value.shape) not in ((*leading, *trailing), (rows, *trailing)):
        raise ValueError(f"{name}: expected shape {(rows, *trailing)}, got {tuple(value.shape)}")
    return value.reshape(rows, *trailing).contiguous()


def digits(den_digits, logits):
    """int64 [N, 8] from denom_digits, or a sum of such."""
    return row_values("den_digits", den_digits, logits, torch.int64, (WORDS,))


def sum_words(sums, device=None, name="sums"):
    """int64 [12] from loss_digits, or [24] where it was given weights."""
    tensor(name, sums, (torch.int64,), device=device)
    if sums.dim() != 1 or len(sums) not in (SUM_WORDS, 2 * SUM_WORDS):
        raise ValueError(f"{name}: expected shape {(SUM_WORDS,)} or {(2 * SUM_WORDS,)}, got {tuple(sums.shape)}")
    return sums.contiguous()


def elements(value):
    """All elements of a tensor as contiguous [n], outside autograd, in any order: a view wherever they lie side by side."""
    _plain("tensor", value)
    if value.numel() >= MAX_ELEMENTS:
        raise ValueError(f"tensor: expected fewer than 2**40 elements, got {value.numel()}")
    value = value.detach()
    if not torch.compiler.is_compiling():  # which has no order of symbolic strides, and copies
        value = value.permute(sorted(range(value.dim()), key=value.stride, reverse=True))
    return value.reshape(-1).contiguous()


def square_words(digits):
    """int64 [21] from square_digits, or a sum of such."""
    return tensor("digits", digits, (torch.int64,), (SQUARE_WORDS,)).contiguous()


def columns(v_lo, v_hi, size):
    """[v_lo, v_hi) within a tensor of `size` columns; v_hi None is all the rest."""
    v_lo = integer("v_lo", v_lo)
    v_hi = size if v_hi is None else integer("v_hi", v_hi)
    if not 0 <= v_lo <= v_hi <= size:
        raise ValueError(f"v_lo, v_hi: expected 0 <= v_lo <= v_hi <= {size}, got v_lo = {v_lo}, v_hi = {v_hi}")
    return v_lo, v_hi


def start(v_start, v_hi):
    integer("v_start", v_start)
    if v_start < 0 or v_start + v_hi >= 2**31:
        raise ValueError(f"v_start: expected v_start >= 0 and v_start + v_hi < 2**31, got {v_start}")
    return v_start


def reduction(name, allowed=("mean", "sum", "none")):
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(f"reduction: expected {' or '.join(map(repr, allowed))}, got {name!r}")
    return REDUCTIONS[name]


def countable(name, rows, mode):
    """Fewer rows than a mean or sum has room for; the total over ranks is for _ranks."""
    if mode != NONE and rows >= MAX_ROWS:
        raise ValueError(f"{name}: expected fewer than 2**30 rows for a mean or sum, got {rows}")


def may_overwrite(inplace_backward, logits, rows):
    """Whether backward is to write over the logits, which it then safely can. rows: of the logits, for the kernels."""
    if not isinstance(inplace_backward, bool):
        raise TypeError(f"inplace_backward: expected True or False, got {inplace_backward!r}")
    if not inplace_backward or torch.compiler.is_compiling() or not logits.requires_grad or not torch.is_grad_enabled():
        return False
    if logits.is_leaf or (logits._is_view() and logits._base.is_leaf and logits._base.requires_grad):
        raise ValueError("inplace_backward: logits is a leaf or a view of one, which would lose its value to its own gradient; expected the output of a layer")
    if rows.data_ptr() != logits.data_ptr():
        raise ValueError(f"inplace_backward: expected logits with adjacent columns and rows at one distance, got strides {tuple(logits.stride())}")
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(f"inplace_backward: expected logits whose rows do not overlap, got strides {tuple(logits.stride())}")
    return True


def wants_validation(validate, logits):
    """None: where looking costs no synchronisation, that is on the CPU and not while torch.compile traces or torch.vmap batches."""
    batched = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if validate is None:
        return logits.device.type == "cpu" and not torch.compiler.is_compiling() and not batched
    if not isinstance(validate, bool):
        raise TypeError(f"validate: expected True, False or None, got {validate!r}")
    if validate and batched:
        raise NotImplementedError("validate: True is not implemented under torch.vmap and other transforms of torch.func, which hide the data")
    return validate


def validates_ranks(validate, logits_shard):
    """As wants_validation, of a value that may still be wrong itself. Under a transform of torch.func no message can be sent, so False."""
    if validate is None and not isinstance(logits_shard, torch.Tensor):
        return True
    return wants_validation(validate, logits_shard)


def raise_for_status(status, targets, size, ignore_index, words=None):
    """ValueError for the first row whose target or shards are wrong. Waits for the device."""
    wrong = (status & WRONG).nonzero()
    if wrong.numel() == 0:
        return
    row = int(wrong[0])
    flags = int(status[row])
    more = f" ({wrong.numel()} rows in all)" if wrong.numel() > 1 else ""
    if flags & ABOVE_MAXIMUM:
        count = int(words[row, 6]) >> 32
        raise ValueError(f"den_digits: row {row} met {count} logits above the given global_rowmax, or NaN; the maximum is stale{more}")
    if flags & BAD_COLUMNS:
        count = int(words[row, 6])
        what = "a shard is missing" if count < size else "a shard is there twice, or logits is not the whole vocabulary"
        raise ValueError(f"den_digits: row {row} sums {count} columns of {size}; {what}{more}")
    if flags & BAD_COVER:
        raise ValueError(
            f"den_digits: row {row}: the shards do not cover columns 0 to {size} once each (v_start?), or were computed for another global_rowmax{more}"
        )
    if flags & BAD_DIGITS:
        raise ValueError(f"den_digits: row {row}: no logits have these digits with this global_rowmax and target{more}")
    raise ValueError(
        f"targets: row {row} has {int(targets[row])}, expected 0 <= target < {size} or ignore_index = {ignore_index}{more}"
    )
