"""lm-evaluation-harness over selfspec: a local generative task, plain and speculative."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs selfspec[lm-eval]")

TASK = """
task: continued
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n\\n", "\\u2603"]
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
"""


def harness(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfspec.integrations.lm_harness", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=home)


@pytest.mark.slow  # importing the harness takes 8 s, three times
@pytest.mark.timeout(240)
def test_two_runs_give_the_same_texts(heads_folder, tmp_path):
    rows = [{"question": text, "answer": "x"} for text in ("import os\n", "def f(a):\n", "class A:\n")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    for nodes in (1, 8):
        told = f"drafter={heads_folder},dtype=float32,nodes={nodes}"
        done = harness(
            *("run", "--model", "selfspec", "--model_args", told, "--tasks", "continued", "--log_samples"),
            *("--include_path", str(tmp_path), "--output_path", f"nodes{nodes}", "--batch_size", "2"),
            home=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    done = harness("compare", "nodes1", "nodes8", home=tmp_path)
    assert "3 of 3 texts equal" in done.stdout, done.stderr
    passes = [line.split(" | ")[3] for line in done.stdout.splitlines() if line.startswith("| nodes")]
    assert int(passes[0]) > int(passes[1])
    samples = next((tmp_path / "nodes8").rglob("samples_*.jsonl"))
    samples.write_text(samples.read_text().replace('"doc_id": 0', '"doc_id": 7'))
    wrong = harness(
        "run", "--model", "selfspec", "--model_args", "drafter=none/here", "--tasks", "continued", home=tmp_path
    )
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    for arguments, message in (
        (("nodes1",), "usage: "),
        (("nodes1", "none"), "none holds no results with samples"),
        (("nodes1", "nodes8"), "answer different questions: 0 "),
    ):
        bad = harness("compare", *arguments, home=tmp_path)
        assert bad.returncode == 2
        assert message in bad.stderr
