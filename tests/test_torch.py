"""Next to torch: its values within a stated error, its semantics exactly, and its machinery (opcheck, compile, threads)."""
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, INF, NAN, assert_same, patterns

REDUCTIONS = ["mean", "sum", "none"]
# What torch promises of its own: fp32 softmax has a few ulp of the largest intermediate, here |logit| < 32, loss < 64.
LOSS_ERROR = 64 * 2.0 ** -23
# Gradients are probabilities, at most 1 in magnitude: some ulp of 1 for torch's fp32, then one rounding to the dtype.
GRAD_ERROR = {"fp32": 4e-7, "bf16": 2.0 ** -8, "fp16": 2.0 ** -11}


def batch(N=37, V=101, dtype="fp32", seed=0, scale=4.0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(N, V, generator=generator) * scale).to(DTYPES[dtype])
    targets = torch.randint(0, V, (N,), generator=generator)
    if ignored:
        targets[::5] = -100
    return logits, targets


def both(dce, logits, targets, reduction, **kw):
    """(out, gradient) of ours in the dtype and of torch on the same values in fp64, which is exact next to either."""
    ours = logits.detach().clone().requires_grad_()
    out = dce.cross_entropy(ours, targets, reduction, **kw)
    out.sum().backward()
    theirs = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(theirs, targets.long(), reduction=reduction, **kw)
    expected.sum().backward()
    return out, ours.grad, expected, theirs.grad


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_values_and_gradients(dce, dtype, reduction, kind):
    logits, targets = batch(dtype=dtype)
    out, grad, expected, expected_grad = both(dce, logits, targets.to(kind), reduction)
    assert out.dtype == torch.float32 and grad.dtype == logits.dtype and out.shape == expected.shape
    # fp64 is the truth here: half an ulp and a term's error, relative (sum and mean are sums of such)
    assert ((out.double() - expected).abs() <= expected.abs() * 2.0 ** -22).all()
    largest = expected_grad.abs().max()
    unit = {"fp32": 2.0 ** -22, "bf16": 2.0 ** -8, "fp16": 2.0 ** -11}[dtype]
    tiny = {"fp32": 2.0 ** -149, "bf16": 2.0 ** -133, "fp16": 2.0 ** -24}[dtype]        # half of it, where it is subnormal
    assert ((grad.double() - expected_grad).abs() <= expected_grad.abs() * (unit + 2.0 ** -21) + tiny).all()
    assert largest > 0
    # and torch's own, in the dtype, to within its error
    leaf = logits.clone().requires_grad_()
    theirs = F.cross_entropy(leaf.float(), targets, reduction=reduction)
    theirs.sum().backward()
    N = 1 if reduction != "sum" else len(logits)
    assert ((out - theirs).abs() <= LOSS_ERROR * N).all()
    assert ((grad.float() - leaf.grad.float()).abs() <= GRAD_ERROR[dtype]).all()


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 100, 101, 1000])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignore_index(dce, ignore_index, reduction):
    logits, targets = batch(ignored=False)
    targets[::3] = ignore_index
    out, grad, expected, expected_grad = both(dce, logits, targets, reduction, ignore_index=ignore_index)
    assert ((out.double() - expected).abs() <= expected.abs() * 2.0 ** -22).all()
    assert torch.equal((grad == 0).all(1), targets == ignore_index)
    assert torch.equal((expected_grad == 0).all(1), targets == ignore_index)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_all_ignored(dce, dtype):
    """torch: the mean is NaN, the sum 0, losses 0; ours too. Gradients are zeros (torch's for the mean as well)."""
    logits, targets = batch(dtype=dtype)
    targets[:] = -100
    for reduction in REDUCTIONS:
        leaf = logits.clone().requires_grad_()
        out = dce.cross_entropy(leaf, targets, reduction)
        expected = F.cross_entropy(logits.float(), targets, reduction=reduction)
        assert torch.equal(torch.isnan(out), torch.isnan(expected))
        if reduction == "mean":
            assert patterns(out) == [0x7FC00000]
        else:
            assert set(patterns(out)) == {0}
        out.sum().backward()
        assert set(patterns(leaf.grad)) == {0}


def test_ignored_rows_are_not_read(dce):
    logits, targets = batch()
    for x in (-INF, INF, NAN):
        other = logits.clone()
        other[targets == -100] = x
        for reduction in REDUCTIONS:
            a, b = logits.clone().requires_grad_(), other.clone().requires_grad_()
            out_a, out_b = dce.cross_entropy(a, targets, reduction), dce.cross_entropy(b, targets, reduction)
            out_a.sum().backward()
            out_b.sum().backward()
            assert_same(out_a, out_b)
            assert_same(a.grad, b.grad)


def test_rows_that_torch_makes_nan_are_nan(dce):
    logits, targets = batch(N=6, ignored=False)
    logits[0] = -INF
    logits[1, 5] = NAN
    logits[2, 5] = INF
    logits[3, targets[3]] = -INF                                # this one is +inf for both
    logits[4, (targets[4] + 1) % 101] = -INF                    # and this one finite
    out = dce.cross_entropy(logits, targets, "none")
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().tolist() == [True] * 3 + [False] * 3
    assert out[3] == expected[3] == INF
    assert dce.cross_entropy(logits[3:], targets[3:]) == INF
    assert dce.cross_entropy(logits, targets).isnan()


def test_where_torch_loses_everything(dce):
    """fp32 softmax gives 0 for a confident token, and 1e8 loses nothing only because the maximum is subtracted first."""
    logits = torch.zeros(1, 10)
    logits[0, 0] = 20.0
    ours = dce.cross_entropy(logits, torch.tensor([0]))
    assert F.cross_entropy(logits, torch.tensor([0])) == 0
    exact = F.cross_entropy(logits.double(), torch.tensor([0])).item()
    assert abs(ours.item() / 1.855038e-08 - 1) < 1e-6 and abs(exact / 1.855038e-08 - 1) < 1e-6
    assert dce.cross_entropy(torch.tensor([[1e8, 1e8]]), torch.tensor([0])).item() == pytest.approx(0.6931471805599453, abs=2.0 ** -25)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts of the input: gradients have the shape of what was given


def test_gradient_of_strided_inputs(dce):
    """A slice of a padded vocabulary, a transposed matrix, an expanded row: the gradient arrives where the values came from."""
    logits, targets = batch(N=6, V=40)
    leaf = logits.clone().requires_grad_()
    dce.cross_entropy(leaf, targets).backward()

    padded = torch.full((6, 64), 7.0)
    padded[:, 3:43] = logits
    padded.requires_grad_()
    out = dce.cross_entropy(padded[:, 3:43], targets)
    out.backward()
    assert_same(padded.grad[:, 3:43].contiguous(), leaf.grad)
    assert padded.grad[:, :3].abs().sum() == 0 and padded.grad[:, 43:].abs().sum() == 0

    columns = logits.t().contiguous().requires_grad_()
    dce.cross_entropy(columns.t(), targets).backward()
    assert_same(columns.grad.t().contiguous(), leaf.grad)

    row = logits[1].clone().requires_grad_()
    out = dce.cross_entropy(row.expand(6, 40), targets, "sum")
    out.backward()
    assert row.grad.shape == (40,)

    deep = logits.view(2, 3, 40).clone().requires_grad_()
    dce.cross_entropy(deep, targets.view(2, 3)).backward()
    assert_same(deep.grad.view(6, 40), leaf.grad)


def test_expanded_and_strided_upstream(dce):
    """`.sum()` sends an expanded gradient of stride 0, indexing a strided one."""
    logits, targets = batch(N=6)
    grads = []
    for upstream in (torch.ones(6), torch.ones(1).expand(6), torch.ones(12)[::2], torch.ones(6, 2)[:, 0]):
        leaf = logits.clone().requires_grad_()
        dce.cross_entropy(leaf, targets, "none").backward(upstream)
        grads.append(leaf.grad)
    for g in grads[1:]:
        assert_same(g, grads[0])


# ---------------------------------------------------------------------------------------------------------------------
# torch's own checks of an op


def ops_of(dce):
    return dce._ops.ops


def samples(dce, dtype):
    logits, targets = batch(N=5, V=23, dtype=dtype)
    M = dce.rowmax(logits)
    digits = dce.denom_digits(logits, M)
    _, maxima, _, state, sums, _ = ops_of(dce).cross_entropy(logits, targets, 1, -100)
    losses = ops_of(dce).cross_entropy(logits, targets, 0, -100)[0]
    at_target = logits.float().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    one_owner = torch.zeros(45, dtype=torch.int64)
    one_owner[40:] = 2 ** 32
    x = torch.linspace(-50, 50, 77)
    wide = torch.zeros(5, 31, dtype=logits.dtype)
    wide[:, 2:25] = logits
    return [
        ("rowmax", (logits, 0, 23)), ("rowmax", (wide[:, 2:25], 3, 3)), ("rowmax", (logits, 2, 11)),
        ("denom_digits", (logits, M, 0, 23, 0)), ("denom_digits", (logits, M, 4, 17, 1000)),
        ("finalize", (digits, at_target, targets, M, -100, 23)), ("finalize", (digits, at_target, targets.int(), M, -100, -1)),
        ("order_images", (M,)), ("shard_words", (wide[:, 2:25], targets, ops_of(dce).order_images(M), -100, 1, -1, 7)),
        ("settle_targets", (one_owner, targets.int().clamp(min=0), -100)),
        ("cross_entropy", (logits, targets, 0, -100)), ("cross_entropy", (logits, targets, 1, -100)),
        ("cross_entropy", (logits, targets.int(), 2, -100)), ("cross_entropy", (wide[:, 2:25], targets, 1, -100)),
        ("cross_entropy", (logits.clone().requires_grad_(), targets, 0, -100)),
        ("cross_entropy", (logits.clone().requires_grad_(), targets, 1, -100)),
        ("cross_entropy", (logits.clone().requires_grad_(), targets, 2, -100)),
        ("cross_entropy", (logits[:0], targets[:0], 1, -100)),
        ("grad_logits", grad_arguments(dce, torch.ones(5), logits, targets, maxima, state, None, 0, 23)),
        ("grad_logits", grad_arguments(dce, torch.ones(()), logits, targets, maxima, state, sums, 3, 11)),
        ("loss_digits", (losses, targets, -100)), ("reduce_digits", (sums, True)), ("reduce_digits", (sums, False)),
        ("term", (x,)),
    ]


def grad_arguments(dce, g, logits, targets, maxima, state, sums, lo, hi):
    """With v_start at the end where the op has one."""
    schema = ops_of(dce).grad_logits.default._schema
    return (g, logits, targets, maxima, state, sums, -100, lo, hi) + ((0,) if len(schema.arguments) == 10 else ())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_opcheck(dce, dtype):
    seen = set()
    for name, args in samples(dce, dtype):
        # opcheck compares its runs with a tolerance, in which NaN is unequal to NaN: none of the samples has one but the
        # mean of no rows, whose values are not what is looked at.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        if args and isinstance(args[0], torch.Tensor) and args[0].shape[0:1] == (0,):
            tests = tests[:3]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(getattr(ops_of(dce), name).default, args, test_utils=tests)
        seen.add(name)
    assert seen == {"rowmax", "denom_digits", "finalize", "order_images", "shard_words", "settle_targets", "cross_entropy", "grad_logits", "loss_digits", "reduce_digits", "term"}


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def compiled_like_eager(dce, backend, dtype, reduction, dynamic=None, sizes=((8, 33),)):
    def step(x, t):
        return dce.cross_entropy(x * 1.5, t, reduction)         # something for the compiler to fuse around the op

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for N, V in sizes:
        logits, targets = batch(N, V, dtype)
        a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        eager, out = step(a, targets), fast(b, targets)
        g = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.7)
        eager.backward(g)
        out.backward(g)
        assert_same(out, eager)
        assert_same(b.grad, a.grad)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compile(dce, dtype, reduction):
    compiled_like_eager(dce, "aot_eager", dtype, reduction)


def test_compile_with_dynamic_shapes(dce):
    compiled_like_eager(dce, "aot_eager", "fp32", "mean", dynamic=True, sizes=((8, 33), (5, 40), (17, 64)))


def test_compile_with_inductor(dce):
    compiled_like_eager(dce, "inductor", "fp32", "mean")


def test_compile_the_pieces(dce):
    """The sharded composition in one graph, all of it."""
    def composed(x, t):
        M = torch.stack([dce.rowmax(x, 0, 10), dce.rowmax(x, 10)]).amax(0)
        words = dce.denom_digits(x, M, 0, 10) + dce.denom_digits(x, M, 10)
        loss, denom = dce.finalize(dce.carry_digits(words), x, t, M, validate=False)
        return loss, denom, dce.reduce_digits(dce.loss_digits(loss, t), "mean")

    torch._dynamo.reset()
    logits, targets = batch(8, 33)
    for a, b in zip(composed(logits, targets), torch.compile(composed, fullgraph=True, backend="aot_eager")(logits, targets)):
        assert_same(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# The state of the process must not matter


def everything(dce):
    results = []
    for dtype in DTYPES:
        for N, V, scale in ((1, 1, 1.0), (3, 70001, 5.0), (300, 97, 50.0), (2000, 3, 1.0)):    # few long rows, many short ones
            logits, targets = batch(N, V, dtype, scale=scale)
            targets[0] = 0
            leaf = logits.requires_grad_()
            out = dce.cross_entropy(leaf, targets)
            out.backward()
            M = dce.rowmax(leaf.detach())
            results += [out, leaf.grad, M, dce.denom_digits(leaf.detach(), M), *dce.forward(leaf.detach(), targets)]
    return results


def test_thread_counts(dce):
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8):                            # more than there are cores, too
            torch.set_num_threads(threads)
            results.append(everything(dce))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert_same(a, b)


def test_flush_denormal_changes_nothing(dce):
    """The processor's flush-to-zero mode, which a program may have set for its own reasons: on, the same bytes. The logits
    are subnormal, and so are terms, losses and gradients."""
    sub = torch.tensor([[1, 3, -2147483646, 8388607, 8388608]], dtype=torch.int32).view(torch.float32)
    rows = torch.cat([sub, torch.tensor([[88.0, 0, -1, 2, 0.5], [200.0, 112, 113, 110, 109.5], [90.0, 1, 0, 2, 0.5]])])
    targets = torch.tensor([1, 0, 2, 0])
    g = torch.tensor([1.0, 1e-3, 1.0, 2.0 ** -20])

    def run():
        out = []
        for dtype in DTYPES.values():
            logits = rows.to(dtype) if dtype != torch.float32 else rows.clone()
            leaf = logits.requires_grad_()
            loss = dce.cross_entropy(leaf, targets, "none")
            loss.backward(g)
            mean = dce.cross_entropy(leaf.detach()[1:2], targets[1:2])
            M = dce.rowmax(leaf.detach())
            out += [loss, leaf.grad, mean, M, dce.denom_digits(leaf.detach(), M)]
        return out

    normal = run()
    loss = normal[0]
    assert 0 < loss[1] < 2.0 ** -120 and 0 < loss[3] < 2.0 ** -120
    subnormal = (normal[1].abs() < 2.0 ** -126) & (normal[1] != 0)
    assert subnormal.any(), "no subnormal gradient: this test would not see a flush"
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        assert (torch.tensor([1e-40]) * 1.0).item() == 0.0, "the mode is not on"
        flushed = run()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(normal, flushed):
        assert patterns_or_list(a) == patterns_or_list(b)


def patterns_or_list(x):
    return patterns(x) if x.is_floating_point() else x.tolist()


def test_flush_denormal_in_other_threads(dce):
    """The mode is a thread's own: worker threads start with what their creator had. A fresh process sets it before the first
    parallel region, so that every worker has it, and prints the same digest as one without."""
    script = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from conftest import load_kernel
dce = load_kernel()
if sys.argv[1] == "on": torch.set_flush_denormal(True)
torch.set_num_threads(4)
bits = torch.randint(-2**31, 2**31 - 1, (512, 300), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
x = (bits & ~0x7F800000).view(torch.float32)              # every one subnormal
y = torch.cat([x, torch.randn(512, 300, generator=torch.Generator().manual_seed(2)) * 40])
t = torch.arange(1024) % 300
leaf = y.requires_grad_()
loss = dce.cross_entropy(leaf, t, "none")
loss.backward(torch.full((1024,), 2.0 ** -100))
print(dce.digest(loss), dce.digest(leaf.grad))
"""
    here = os.path.dirname(os.path.abspath(__file__))
    outputs = [subprocess.run([sys.executable, "-c", script, mode, here], capture_output=True, text=True, timeout=240)
               for mode in ("off", "on")]
    for out in outputs:
        assert out.returncode == 0, out.stderr
    assert outputs[0].stdout == outputs[1].stdout and len(outputs[0].stdout.split()) == 2


def test_default_dtype_and_autocast_do_not_matter(dce):
    logits, targets = batch()
    expected = dce.cross_entropy(logits, targets)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(dce.cross_entropy(logits, targets), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(dce.cross_entropy(logits, targets), expected)


def test_repeated_calls(dce):
    first = everything(dce)
    for a, b in zip(first, everything(dce)):
        assert_same(a, b)


def test_a_compiler_is_given_no_op_that_writes_in_place(dce):
    """The eager path keeps a gradient and rescales it in place; a compiler may share or cache that buffer, so it must not see that."""
    seen = []

    def backend(module, inputs):
        seen.append(module.code)
        return module

    torch._dynamo.reset()
    x, t = torch.randn(3, 7, requires_grad=True), torch.tensor([0, 1, 2])
    torch.compile(dce.cross_entropy, fullgraph=True, backend=backend)(x, t).backward()
    assert "cross_entropy" in seen[0] and "cross_entropy_grad" not in seen[0]


def test_every_backward_of_a_kept_graph_has_its_own_upstream(dce):
    x, t = torch.randn(5, 33, requires_grad=True), torch.randint(33, (5,))
    loss = dce.cross_entropy(x, t)
    for upstream in (3.0, 1.0, 1.0, 0.5, 1.0):
        (grad,) = torch.autograd.grad(loss, x, torch.tensor(upstream), retain_graph=True)
        fresh = x.detach().requires_grad_()
        dce.cross_entropy(fresh, t).backward(torch.tensor(upstream))
        assert torch.equal(grad, fresh.grad)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_inplace_backward(dce, dtype, reduction):
    """The same bytes, in the memory of the logits: whole, and rows of a padded vocabulary whose padding is left alone."""
    generator = torch.Generator().manual_seed(11)
    padded = torch.randn(37, 1031, generator=generator).to(DTYPES[dtype])
    t = torch.randint(1000, (37,), generator=generator)
    t[::5] = -100
    upstream = torch.randn(() if reduction != "none" else 37, generator=generator)
    for cut in (lambda z: z[:, :1000], lambda z: z[:, 7:1007], lambda z: z[:, :1000].contiguous()):
        leaf = padded.clone().requires_grad_()
        dce.cross_entropy(cut(leaf), t, reduction).backward(upstream)
        wanted = cut(leaf.grad)
        storage = (padded * 1).requires_grad_() * 1
        logits = cut(storage)
        seen = []
        logits.register_hook(lambda grad: seen.append((grad.data_ptr(), grad.clone())))
        loss = dce.cross_entropy(logits, t, reduction, inplace_backward=True)
        loss.backward(upstream)
        assert_same(seen[0][1], wanted)
        assert seen[0][0] == logits.data_ptr()
        if logits.data_ptr() == storage.data_ptr() and not logits.is_contiguous():
            assert_same(storage[:, 1007:].detach(), padded[:, 1007:])


def test_inplace_backward_is_refused_where_it_would_destroy_something(dce):
    t = torch.tensor([1, 2, 0])
    leaf = torch.randn(3, 5, requires_grad=True)
    for mine in (leaf, leaf.view(3, 5), leaf[:, :4], leaf.view(15).view(3, 5)):
        with pytest.raises(ValueError, match="inplace_backward: logits is a leaf"):
            dce.cross_entropy(mine, t, inplace_backward=True)
    with pytest.raises(ValueError, match="inplace_backward: expected logits with adjacent columns"):
        dce.cross_entropy((leaf * 1).t().contiguous().t(), t, inplace_backward=True)
    with pytest.raises(ValueError, match="inplace_backward: expected logits whose rows do not overlap"):
        dce.cross_entropy((leaf[:1] * 1).expand(3, 5), t, inplace_backward=True)
    with pytest.raises(TypeError, match="inplace_backward: expected True or False, got 1"):
        dce.cross_entropy(leaf, t, inplace_backward=1)
    # without a gradient to write there is nothing to refuse, nor to overwrite
    with torch.no_grad():
        before = leaf.clone()
        dce.cross_entropy(leaf, t, inplace_backward=True)
        assert torch.equal(before, leaf)

    modified = "modified by an inplace operation"
    logits = leaf * 1
    loss = dce.cross_entropy(logits, t, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=modified):
        loss.backward()
    logits = leaf * 1
    other = logits.square().sum()  # keeps the logits for its backward
    dce.cross_entropy(logits, t, inplace_backward=True).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=modified):
        other.backward()
    logits = leaf * 1
    with pytest.raises(NotImplementedError, match="inplace_backward"):
        dce.cross_entropy(logits, t, inplace_backward=True).backward(create_graph=True)
