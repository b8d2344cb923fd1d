"""The first example of README runs; the drafter of its end is in test_own.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
