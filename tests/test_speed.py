"""A guard against a slow decode loop: ratios of arms that take turns, so the machine's speed does not count."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from selfspec.engine.kernels.native import has_compiler

BENCH = Path(__file__).parents[1] / "notebooks" / "experiments" / "bench.py"
# Least medians, below what was recorded on any processor (notebooks/results/bench.json)
LEAST = {
    "eager over transformers, plain": 0.9,
    "compiled over eager, plain": 1.5,
    "tiny-medusa of 8 nodes over plain, writing": 1.0,
    "prompt_lookup of 8 nodes over plain, copying": 1.5,
}


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="passes are compiled by a C++ compiler")
def test_no_arm_became_slow_beside_another() -> None:
    spec = importlib.util.spec_from_file_location("bench", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    found = {name: middle for name, (_, middle, _) in bench.ratios(rounds=5).items()}
    assert found.keys() == LEAST.keys()
    assert not {name: (ratio, LEAST[name]) for name, ratio in found.items() if ratio < LEAST[name]}
