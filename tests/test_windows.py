"""Windows into words, against Python integers: the step between the sum of a warp and the digits of a row on the GPU, compiled for the CPU."""
import os
import random
import shutil
import subprocess

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
MOST = 2**69 - 1


@pytest.fixture(scope="module")
def words_of(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    out = str(tmp_path_factory.mktemp("windows") / "window_words")
    subprocess.run([compiler, "-O2", "-std=c++17", os.path.join(HERE, "window_words.cpp"), "-o", out], check=True)

    def run(cases):
        text = "".join(f"{near >> 64} {near % 2**64} {far >> 64} {far % 2**64} {low}\n" for near, far, low in cases)
        return [[int(w) for w in line.split()] for line in subprocess.run([out], input=text, capture_output=True, text=True, check=True).stdout.splitlines()]

    return run


def test_every_sum_fits_and_none_loses_a_bit(words_of):
    """At every shift, sums at and around each power of two, where carries from far into near pass a word or the top of 128 bits."""
    rng = random.Random(5)
    edges = [0, 1, MOST] + [2**k + d for k in range(31, 69) for d in (-1, 0, 1)]
    cases = [(near, far, low) for low in range(129) for near in rng.sample(edges, 40) for far in [0, *rng.sample(edges, 3)] if near and (far == 0 or low <= 96)]
    # far carries into the bit of near that decides
    cases += [(2**k - rng.randrange(1, 2**20), 2**52 + rng.randrange(2**60), low) for k in range(60, 70) for low in range(97) for _ in range(5)]
    cases += [(rng.randrange(1, MOST + 1), rng.randrange(MOST + 1), rng.randrange(97)) for _ in range(20000)]
    wrong = []
    for (near, far, low), words in zip(cases, words_of(cases)):
        wanted = ((near << 32) + far if far else near) << low
        if sum(w << 32 * i for i, w in enumerate(words)) != wanted:
            wrong.append((near, far, low))
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first {wrong[0]}"
