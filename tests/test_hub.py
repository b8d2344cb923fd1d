"""Drafters on the hub, against a local stand-in of its HTTP interface; each in a process of its own, since
huggingface_hub reads its environment once."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import refused
from hub import Hub
from huggingface_hub import ModelCard

import selfspec
from selfspec.integrations.export import export

PROMPT = [[5, 9, 2, 7]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.server.shutdown()


def run(*arguments: str, at: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": at, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    told = {**os.environ, **own, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    told.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in env else None
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=told, check=False)


LOADED = """
import sys, selfspec
spec = selfspec.load(sys.argv[1], revision=sys.argv[2] or None)
print(spec.generate([[5, 9, 2, 7]], 12).token_ids[0])
"""


def result(folder: Path, drafter: Path, **changes: Any) -> Path:
    """What eval/decode.py leaves behind, as far as a card reads it."""
    point = {
        "config": {
            "drafter": str(drafter),
            "tree": {"nodes": 8},
            "decode": {"temperature": 0.7, "prompts": 4, "questions": "instructions"},
        },
        "speculative": {"acceptance_length": 2.344},
        "speedup": {"autoregressive": {"ratio": 1.42, "low": 1.3, "high": 1.5}},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(point))
    return folder


def test_a_drafter_goes_up_and_comes_down(hub, heads_folder, tmp_path):
    results = result(tmp_path / "decode", heads_folder)
    command = ["-m", "selfspec", "push", str(heads_folder), "user/heads", "--results", str(results)]
    done = run(*command, at=hub.url, home=tmp_path / "up")
    assert done.returncode == 0, done.stderr
    assert "/user/heads/commit/" in done.stdout
    files = hub.files["user/heads", "main"]
    assert {"drafter.json", "drafter.safetensors", "README.md"} <= files.keys()
    assert files["drafter.json"] == (heads_folder / "drafter.json").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert [r.metric_value for r in card.data.eval_results] == [2.344, 1.42]
    assert "| 0.7 | 8 | 2.34 | 1.42x [1.30, 1.50] | 4 |" in re.sub(" +", " ", card.text)
    assert card.data.base_model is None, "the hub takes no path"
    target = json.loads(files["drafter.json"])["target"]["name"]
    assert f"drafter for {Path(target).name}" in card.text
    assert target not in card.text  # a path of this machine

    wanted = str(selfspec.load(str(heads_folder)).generate(PROMPT, 12).token_ids[0])
    down = run("-c", LOADED, "user/heads", "", at=hub.url, home=tmp_path / "down")
    assert down.stdout.strip() == wanted, down.stderr


@pytest.mark.slow
def test_a_branch_is_asked_for_by_revision(hub, heads_folder, tmp_path):
    program = f"import selfspec; print(selfspec.load({str(heads_folder)!r}).push_to_hub('user/b', revision='v2'))"
    up = run("-c", program, at=hub.url, home=tmp_path / "up")
    assert up.returncode == 0, up.stderr
    assert "drafter.json" in hub.files["user/b", "v2"]
    assert "drafter.json" not in hub.files["user/b", "main"]
    found = run("-c", LOADED, "user/b", "v2", at=hub.url, home=tmp_path / "down")
    assert found.returncode == 0, found.stderr
    missing = run("-c", LOADED, "user/b", "v3", at=hub.url, home=tmp_path / "down")
    assert "'user/b' at revision 'v3' is no folder here, and the hub gives none" in missing.stderr
    hub.server.shutdown()
    offline = run("-c", LOADED, "user/b", "v2", at=hub.url, home=tmp_path / "down", HF_HUB_OFFLINE="1")
    assert offline.stdout == found.stdout, offline.stderr  # from the cache


@pytest.mark.slow
def test_an_exported_folder_on_the_hub_is_its_own_target(hub, heads_folder, tmp_path):
    export(f"{heads_folder}+prompt_lookup", "transformers", tmp_path / "out")
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    hub.files["user/whole", "main"] = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in paths}
    wanted = str(selfspec.load(str(heads_folder)).generate(PROMPT, 12).token_ids[0])
    down = run("-c", LOADED + "print(spec.drafter.sources)", "user/whole", "", at=hub.url, home=tmp_path / "down")
    assert down.stdout.split("\n")[:2] == [wanted, "('prompt_lookup', 'user/whole')"], down.stderr


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["", "1"])
def test_a_name_that_does_not_exist(offline, hub, tmp_path):
    env = {"HF_HUB_OFFLINE": offline} if offline else {}
    done = run("-m", "selfspec", "complete", "x", "--drafter", "user/none", at=hub.url, home=tmp_path, **env)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "'user/none' is no folder here, and the hub gives none" in done.stderr


def test_a_dry_run_writes_what_would_be_uploaded(heads_folder, tmp_path):
    spec = selfspec.load(str(heads_folder))
    results = result(tmp_path / "decode", heads_folder, speedup={})
    out = tmp_path / "out"
    assert spec.push_to_hub("user/heads", results, dry_run=out) == str(out)
    assert (out / "drafter.json").read_bytes() == (heads_folder / "drafter.json").read_bytes()
    text = (out / "README.md").read_text()
    assert "model-index" in text
    assert f'selfspec.load("user/heads", target="path/to/{Path(spec.target.name).name}")' in text  # a folder of here
    assert re.search(r"\| 0.7 +\| 8 +\| 2.3", text)
    assert spec.autoregressive(PROMPT, 8).token_ids == selfspec.load(str(out)).generate(PROMPT, 8).token_ids
    refused("exists; give a new folder", spec.push_to_hub, "user/heads", dry_run=out)


def test_what_can_not_be_uploaded(heads_folder, tiny_folder, tmp_path):
    spec = selfspec.load(str(heads_folder))
    refused("can be no repository's name", spec.push_to_hub, "a/b/c", dry_run=tmp_path / "a")
    refused("repo='mine' names no owner", spec.push_to_hub, "mine", dry_run=tmp_path / "a")
    with pytest.raises(ValueError, match="was measured with drafter='elsewhere'"):
        spec.push_to_hub("a/b", result(tmp_path / "other", Path("elsewhere")), dry_run=tmp_path / "a")
    results = result(tmp_path / "older", heads_folder)
    (results / "origin.json").write_text(json.dumps({f"files {heads_folder}": "0"}))
    with pytest.raises(ValueError, match="was measured with another state of"):
        spec.push_to_hub("a/b", results, dry_run=tmp_path / "a")
    refused(r"no summary.json", spec.push_to_hub, "a/b", heads_folder, dry_run=tmp_path / "a", error=FileNotFoundError)
    with pytest.raises(ValueError, match="holds no figures"):
        spec.push_to_hub("a/b", result(tmp_path / "half", heads_folder, speedup=3), dry_run=tmp_path / "a")
    refused("is not on the hub; leave revision out", selfspec.load, str(heads_folder), revision="v2")
    damaged = tmp_path / "damaged"
    shutil.copytree(heads_folder, damaged)
    (damaged / ".env").write_text("SECRET=1")
    spec = selfspec.load(str(damaged))
    spec.push_to_hub("a/b", dry_run=tmp_path / "clean")
    assert not (tmp_path / "clean/.env").exists()
    refused("lies in the drafter's folder", spec.push_to_hub, "a/b", dry_run=damaged / "inside")
    (damaged / "drafter.safetensors").write_bytes(b"")
    refused("truncated or was altered", spec.push_to_hub, "a/b", dry_run=tmp_path / "a")
    with pytest.raises(ValueError, match="no checkpoint of its own"):
        selfspec.load("prompt_lookup", target=tiny_folder).push_to_hub("a/b", dry_run=tmp_path / "a")
    assert not (tmp_path / "a").exists()
