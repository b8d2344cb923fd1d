"""The first example of README runs; the drafter of its end is in test_own.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_example_runs(compiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    slow = ("engine=", 'nodes="auto"')  # which compile, and measure what passes cost
    lines = [line for line in BLOCKS[0].splitlines() if compiled or not any(word in line for word in slow)]
    assert len(BLOCKS[0].splitlines()) - len(lines) == (0 if compiled else 2)
    exec(compile("\n".join(lines), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
