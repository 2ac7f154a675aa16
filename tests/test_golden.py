"""Spec 1 is frozen: every quantity of every golden case has the digest in golden.json, on each path that the processor has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oracle
from cases import assert_bits

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "golden.json").read_text())


def test_digests_are_the_golden_ones(dce):
    assert dce.spec_version == GOLDEN["spec_version"]
    assert dce.audit.case_digests("cpu") == GOLDEN["digests"]


def test_the_package_carries_the_same_digests(dce):
    from_package = dce.self_test("cpu")
    assert from_package.equal and from_package.compared == sum(map(len, GOLDEN["digests"].values()))


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512"])  # one that the processor lacks falls to the next it has
def test_every_instruction_set(path):
    code = "import conftest, sys; r = conftest.load_kernel().self_test('cpu'); print(r); sys.exit(not r.equal)"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, env={**os.environ, "DCE_CPU": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu(dce):
    assert dce.self_test("cuda").equal


def test_a_wrong_digest_is_named(dce, monkeypatch):
    wrong = {"normal-fp32": {**dce.audit.DIGESTS["normal-fp32"], "loss": "0" * 64}}
    monkeypatch.setattr(dce.audit, "DIGESTS", wrong)
    result = dce.self_test("cpu")
    assert not result.equal and result.different == ["normal-fp32/loss"] and "normal-fp32/loss" in str(result)


def test_the_oracle_agrees(dce):
    """The golden losses, sums and digests of the cases that exercise every rule, from Python integers alone."""
    for name in ("special-fp32", "special-bf16", "special-fp16", "narrow-fp32", "one-column-fp32"):
        logits, targets, _ = dce.golden.inputs(name)
        results = dce.golden.run(name)
        rows = logits.float().tolist()
        for row, values in enumerate(rows):
            maximum = oracle.row_max(values)
            words = oracle.denom_digits(values, maximum, 0, len(values))
            assert list(oracle.carry(words)) == results["digits"][row].tolist() or targets[row] == -100
            loss = oracle.finalize(words, values, int(targets[row]), maximum).loss
            assert_bits(results["loss"][row], loss, f"{name}, row {row}")
        squares = oracle.square_words([x for row in rows for x in row])
        assert squares == results["squares"].tolist()
        assert_bits(results["norm"], oracle.norm(squares), name)


@pytest.mark.parametrize("name", ["mapped-special-fp32", "mapped-special-fp16"])
def test_the_oracle_agrees_on_smoothing_maps_and_statistics(dce, name):
    logits, targets, upstream = dce.golden.inputs(name)
    results, rows = dce.golden.run(name), logits.float().tolist()
    columns = len(rows[0])
    weight = ((dce.golden._uniform(102, columns) & 0xFFFF) - 8192).float() / 32768.0
    for key, options in dce.golden.CASES[name].options(weight, columns - columns // 9).items():
        U = options.get("valid_vocab", columns)
        weights = options["weight"].tolist() if "weight" in options else None
        mapping = {"sigma": oracle.f32(options.get("logit_scale", 1.0)), "kappa": options.get("softcap")}
        epsilon = options.get("label_smoothing", 0.0)
        for row, values in enumerate(rows):
            what, t, M = f"{name}, {key}, row {row}", int(targets[row]), oracle.row_max(values[:U])
            words, sum_of_logits = oracle.denom_digits(values, M, 0, U, **mapping), oracle.logit_words(values, M, 0, U, weight=weights, **mapping)
            out = oracle.options(words, values, t, M, options.get("z_loss", 0.0), weights, U, epsilon=epsilon, logits=sum_of_logits, **mapping)
            assert_bits(results[f"{key}_none"][row], out.loss, what)
            assert_bits(results[f"{key}_sharded_loss"][row], out.loss, what)
            g, g_lse = float(upstream[row]), float(upstream.flip(0)[row])
            grad = oracle.gradient_with(values, t, M, out.state, g, g_lse, name[-4:], U, weight=weights, epsilon=epsilon, **mapping)
            assert_bits(results[f"{key}_grad_none"][row], grad, what)
            stats, least = oracle.stat_words(values, t, M, 0, U, **mapping)
            expected = oracle.row_stats(stats, least, words, values[:U], t, M, **mapping)
            for field in ("logprob", "entropy", "max_abs"):
                assert_bits(results[f"{key}_{field}"][row], getattr(expected, field), what)
            assert bool(results[f"{key}_hit"][row]) == expected.hit, what
