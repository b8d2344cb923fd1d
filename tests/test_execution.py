"""Programs that a model wrote: which answer counts, what a run may not do, and a file of problems."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import HUMAN_EVAL, refused, write_lines
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse, Replace, Sequence, Strip
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from selfspec.data import execution
from selfspec.data.execution import Solves, runs_through
from selfspec.data.questions import Answering, Asking, read_questions
from selfspec.evaluation.arms import Prompt

PROMPT = 'import math\n\n\ndef area(r: float) -> float:\n    """Of a circle."""\n'
TEST = "def check(candidate):\n    assert abs(candidate(2.0) - 12.566) < 0.01\n    assert candidate(0) == 0\n"
PROBLEM = {"task_id": "T/0", "prompt": PROMPT, "entry_point": "area", "test": TEST, "canonical_solution": ""}
BODY = "    return math.pi * r * r"
RIGHT, SQUARES = f"def area(r):\n{BODY}", "def area(r):\n    return math.pi * square(r)"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"Here it is:\n\n```python\n{RIGHT}\n```\nDone.", True),
        (RIGHT, True),
        (f"```python\n{RIGHT}", True),  # cut off behind the code
        (f"```python\n{RIGHT}\n\nassert area(2) == math.", True),  # and within a test behind it
        (f"```python\n{RIGHT}\n\nprint(area(", True),
        (f"<think>\n```python\ndef area(r):\n    return 0\n```\n</think>\n```python\n{RIGHT}\n```", True),
        (f"```python\nprint(area(2))\n```\n\n```py\n{RIGHT}\n```", True),
        ("    return math.pi * r ** 2\n\n\nprint(area(2))\nassert False", True),  # continues the prompt
        ("```python\ndef area(r):\n    return 3 * r\n```", False),
        ("```python\n    return math.pi * r ** 2\n```", True),  # the body alone
        ("\n    return math.pi * r ** 2\n\n\ndef area(r):\n    return 0", True),
        (f"from __future__ import annotations\n\n{RIGHT}", True),
        (f"```python\n{RIGHT}\n\nif __name__ == '__main__':\n    print(area(int(input())))\n```", True),
        ("1. So:\n\n    ```python\n    def area(r):\n        return math.pi * r * r\n    ```", True),
        ("```python\ndef other(r):\n    return 3 * r\n```", False),
        ("I can not do that.", False),
        (f"```python\n{RIGHT}\nimport sys\nsys.exit(0)\n```", False),
        (f"```python\n{RIGHT}\nimport os\nos._exit(0)\n```", False),
        (f"```python\ndef square(r):\n    return r * r\n```\nand\n```python\n{SQUARES}\n```", True),
        (f"Here it is:\n\n{RIGHT}", True),
        (f"from the radius, so:\n\n{RIGHT}\n\nIt squares the radius.", True),
        (f"```python\nPI = 3.14159265\n```\n```python\n{RIGHT.replace('math.pi', 'PI')}\n```", True),
        (f"~~~python\n{RIGHT}\n~~~", True),
        (f"```python\n{RIGHT}```\nDone.", True),
        (f"Here is the code:```python\n{RIGHT}\n```", True),
        (f"```area``` is fixed:\n\n```python\n{RIGHT}\n```", True),
        (f'```python\ndef area(r):\n    """Use ```area(2)```\n    """\n{BODY}', True),
        (f"This does it: ```python\n{RIGHT}\n```", True),
        (f"Use ```math.pi```:\n\n{RIGHT}\n\n" + "It squares the radius.\n" * 12, True),
        (f'```python\ndef area(r):\n    """As in\n    ```\n    area(2)\n    ```\n    """\n{BODY}\n```\nDone.', True),
    ],
)
def test_an_answer_is_right_if_its_function_passes(answer, right):
    assert Solves(PROMPT, "area", TEST)(answer) is right


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = 'a' * (1 << 34)",
        "x = []\nwhile True: x.append('a' * (1 << 24))",
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "import os; os.system('sleep 60')",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.remove('/etc/hostname')",
        "f = open('large', 'wb')\nwhile True: f.write(b'0' * 65536)",
        "raise SystemExit(0)",
        "def f(): f()\nf()",
        "\0",
    ],
)
def test_a_program_that_does_harm_ends_and_counts_as_wrong(program, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS", 1.0)
    start = time.monotonic()
    assert not runs_through(program)
    assert time.monotonic() - start < 10


def test_a_body_that_goes_on_with_the_prompt_may_have_a_fence_behind_it():
    solves = Solves("def two():\n", "two", "def check(candidate):\n    assert candidate() == 2\n")
    for behind in ("", "```\n", "\n```\n\nSo:\n\n```python\nprint(two())\n```\n"):
        assert solves(f"    return 2\n{behind}")
    assert not solves("    return 3\n```\n")


def test_a_program_is_judged_at_its_end_not_at_its_exit():
    begun = time.perf_counter()
    assert runs_through("import atexit, time\natexit.register(time.sleep, 60)")
    assert time.perf_counter() - begun < execution.SECONDS / 2


def test_what_a_program_prints_and_writes_is_gone(tmp_path, capfd):
    assert runs_through("open('here.txt', 'w').write('x')\nfor _ in range(10**5): print('gigabytes')")
    assert capfd.readouterr() == ("", "")
    assert not list(Path.cwd().glob("here.txt"))


def _read(path: Path, tokenizer: PreTrainedTokenizerFast, asking: type[Asking] = Answering, **more: Any) -> list[Any]:
    return read_questions(asking(str(path), chat=False, **more), tokenizer, list)


def test_problems_are_questions_whose_answers_are_run(tmp_path, tokenizer):
    path = tmp_path / "Problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(PROBLEM) + "\n")
    refused(r"questions=.*decode\.allow_code_execution=true", _read, path, tokenizer)
    (question,) = _read(path, tokenizer, allow_code_execution=True)
    assert (question.id, question.group) == ("T/0", "Problems")
    assert tokenizer.decode(question.ids[0]) == PROMPT
    assert [check(RIGHT) for check in question.checks] == [True]
    assert len(_read(path, tokenizer, Asking)) == 1  # nothing is checked there, so nothing runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": None}, "line 1: a problem without test"),
        ({"test": "assert True"}, r"defines no check\(candidate\)"),
        ({"entry_point": "volume"}, "does not define entry_point='volume'"),
    ],
)
def test_a_damaged_problem_is_named(tmp_path, tokenizer, change, message):
    write_lines(path := tmp_path / "a.jsonl", [{**PROBLEM, **change}])
    refused(message, _read, path, tokenizer, allow_code_execution=True)


def test_the_name_needs_its_file(tmp_path, tokenizer, monkeypatch):
    monkeypatch.delenv("SELFSPEC_HUMAN_EVAL", raising=False)
    with pytest.raises(FileNotFoundError, match=r"set SELFSPEC_HUMAN_EVAL to HumanEval\.jsonl\.gz"):
        _read(Path("human_eval"), tokenizer)
    write_lines(path := tmp_path / "a.jsonl", [PROBLEM])
    monkeypatch.setenv("SELFSPEC_HUMAN_EVAL", str(path))
    assert len(_read(Path("human_eval"), tokenizer, allow_code_execution=True)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not HUMAN_EVAL.is_file(), reason="HumanEval's file is not in this checkout's shared data")
def test_every_reference_of_human_eval_passes_and_no_empty_answer_does(tokenizer):
    questions = _read(HUMAN_EVAL, tokenizer, allow_code_execution=True, prompts=164)
    assert len(questions) == 164
    for question in questions:
        (check,) = question.checks
        assert check(question.record["prompt"] + question.record["canonical_solution"]), question.id
        assert check(question.record["canonical_solution"]), question.id
        assert not check("    pass\n"), question.id


def test_a_continuation_keeps_its_first_space():
    """Decoders of SentencePiece drop the space before a text's first word."""
    tokenizer = Tokenizer(WordLevel({"def": 0, "\u2581\u2581\u2581\u2581return": 1, "\u2581x": 2, ":": 3}, "def"))
    tokenizer.decoder = Sequence([Replace("\u2581", " "), Fuse(), Strip(" ", 1, 0)])
    said = list[str]()
    prompt = Prompt([0, 3], check=lambda text: said.append(text) is None)
    assert prompt.right(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [1, 2])
    assert said == ["    return x"]
