"""Compiles and runs exhaustive_term.cpp: every fp32 logit through the term of csrc/arith.h (about a minute on 2 cores)."""
import os
import re
import shutil
import subprocess

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "exhaustive_term.cpp")

# The largest relative error allowed, as a power of two: ERR_TERM of docs/SPEC.md.
BOUND = "-22.95"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("exhaustive") / "exhaustive_term"
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-pthread"]
    if os.uname().machine in ("x86_64", "AMD64"):
        flags.append("-mfma")               # without it std::fma is a library call, and minutes become an hour
    subprocess.run([compiler, *flags, SOURCE, "-o", str(out)], check=True)
    return str(out)


def test_every_float(program):
    run = subprocess.run([program, BOUND, "2"], capture_output=True, text=True)
    print("\n" + run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.search(r"tried +(\d+)", run.stdout)[1]) == 2474639362         # both ends included


def test_the_program_can_fail(program):
    """A bound below the true error is refused: the exit status means something. Every 997th float is enough for that."""
    run = subprocess.run([program, "-23.2", "2", "997"], capture_output=True, text=True)
    assert run.returncode == 1 and "relative error is within the bound" in run.stdout
