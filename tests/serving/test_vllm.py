"""A real vLLM on the CPU serves exported drafters: it decodes the same tokens and accepts what our own chains accept.

`make serving` installs vLLM into an environment of its own, runs this and writes the table of
notebooks/results/serving.md from what it found; anywhere else it is skipped. With SELFSPEC_QWEN_CODER set,
Qwen2.5-Coder is served too.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import Chain
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import selfspec
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.formats.eagle3 import IDS
from selfspec.checkpoints.load_target import load_tokenizer
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.data.corpus import PythonSource
from selfspec.data.questions import Asking, read_questions
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.integrations.export import export
from selfspec.utils.files import code_hash, write_text

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("SELFSPEC_VLLM", ROOT / ".venv-vllm")) / "bin/python"
RESULTS = ROOT / "runs/serving/results.json"
# The drafters of each target, with the lengths of chains that are tried; trees are drafted by the first one.
CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny-target": {"tiny-eagle3": (1, 2, 3, 4, 5), "tiny-medusa": (4,)},  # as many as there are heads
    "smollm2": {"smollm2-eagle3": (1, 3, 5)},
}
GROUPS, NEW = ("edit", "reason", "write"), 64
EACH = dict.fromkeys(CASES, 6)  # prompts of each group
PAIRS = [(target, dtype) for target in CASES for dtype in ("float32", "bfloat16")]
if "SELFSPEC_QWEN_CODER" in os.environ:
    CASES["qwen-coder"], EACH["qwen-coder"] = {"qwen-coder-eagle3": (1, 3, 5)}, 2
    PAIRS.append(("qwen-coder", "float32"))
THREADS = 1  # of every engine
CLOSE = 0.03  # how far acceptance per position may differ

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.is_file(), reason=f"no vLLM at {VLLM}: make serving installs it"),
    pytest.mark.timeout(3600),
]


def prompts(target: str = "tiny-target") -> dict[str, list[list[int]]]:
    """Held-out instructions of three kinds as this target's token ids."""
    tokenizer = load_tokenizer(target)
    asking = Asking(questions="instructions", groups=list(GROUPS), prompts=EACH[target] * len(GROUPS))
    found: dict[str, list[list[int]]] = {group: [] for group in GROUPS}
    for question in read_questions(asking, tokenizer, PythonSource().evaluation):
        found[question.group].append(question.opening(0, [], tokenizer))
    return found


def judge(
    folder: Path, target: str, dtype: str, asked: dict[str, list[list[int]]], speculative: Any, new_tokens: int = NEW
) -> dict[str, Any]:
    """What vLLM decodes and counts, by group."""
    job, out = folder / "job.json", folder / "out.json"
    task = {"target": resolve(target), "dtype": dtype, "prompts": asked, "new_tokens": new_tokens}
    task["speculative"] = speculative
    job.write_text(json.dumps(task))
    own = {
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [str(VLLM), str(Path(__file__).with_name("judge.py")), str(job), str(out)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-30000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def chains(drafter: str, dtype: str, asked: dict[str, list[list[int]]], length: int) -> dict[str, Any]:
    """The same by our own loop."""
    spec = selfspec.load(drafter, dtype=dtype)
    assert isinstance(spec.drafter, (Eagle3, Medusa))
    options, result = Options(NEW, Sampling(0.0), 0, spec.target.end_tokens), {}
    on = Options(NEW + length + 1, Sampling(0.0), 0, frozenset())  # beyond the end of the answer
    for group, rows in asked.items():
        tokens, drafts, counts = [], 0, []
        for row in rows:
            chain = Chain(spec.drafter, length)
            tokens.append(speculative(spec.target, [row], options, chain, length + 1).token_ids[0])
            drafts += len(chain.drafted)
            counts.append(chain.accepted(row + autoregressive(spec.target, [row], on).token_ids[0]))
        result[group] = {"tokens": tokens, "drafts": drafts, "accepted": [sum(c) for c in zip(*counts, strict=True)]}
    return result


def timed(drafter: str, dtype: str, asked: dict[str, list[list[int]]], nodes: int | None) -> dict[str, Any]:
    """Tokens and seconds of our plain decoding (nodes None), or of trees."""
    result, spec = {}, selfspec.load(drafter, dtype=dtype)
    run = spec.autoregressive if nodes is None else spec.generate
    for rows in asked.values():  # warm
        run([rows[0]], max_new_tokens=NEW, nodes=nodes)
    for group, rows in asked.items():
        start = time.perf_counter()
        tokens = [run([row], max_new_tokens=NEW, nodes=nodes).token_ids[0] for row in rows]
        result[group] = {"tokens": tokens, "seconds": time.perf_counter() - start}
    return result


def of_transformers(target: str, asked: dict[str, list[list[int]]], dtype: str) -> dict[str, list[list[int]]]:
    """What transformers' own greedy decoding says."""
    model = AutoModelForCausalLM.from_pretrained(resolve(target), dtype=getattr(torch, dtype))
    ends = model.generation_config.eos_token_id
    arguments = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    model.generation_config = GenerationConfig()  # no rules of the target's own
    return {
        group: [model.generate(torch.tensor([r]), **arguments)[0, len(r) :].tolist() for r in rows]
        for group, rows in asked.items()
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    folder, names = tmp_path_factory.mktemp("exports"), [name for drafters in CASES.values() for name in drafters]
    for name in names:
        export(name, "vllm", folder / name)
    return {name: folder / name for name in names}


def configured(name: str, folder: Path, length: int) -> dict[str, Any]:
    method = "medusa" if name == "tiny-medusa" else "eagle3"
    return {"method": method, "model": str(folder), "num_speculative_tokens": length}


class Kept:
    """What was measured, by target and dtype, also as `runs/serving/results.json`, written after each part: a run that
    was cut off goes on. Results of other code, drafters or settings are measured anew."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        if any(self.found.get(key) != value for key, value in settings.items()):
            self.found = settings | {"targets": {}}

    def part(self, keys: Sequence[str], measure: Callable[..., Any], *given: Any) -> None:
        at = self.found["targets"]
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        if keys[-1] not in at:
            at[keys[-1]] = measure(*given)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            write_text(RESULTS, json.dumps(self.found))


@pytest.fixture(scope="module")
def served(tmp_path_factory, exports) -> dict[str, Any]:
    """Everything that is measured; see `Kept`."""
    torch.set_num_threads(THREADS)
    folder = tmp_path_factory.mktemp("judge")
    version = subprocess.run(
        [str(VLLM), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    weights = {
        name: hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() for name, path in exports.items()
    }
    settings = {"version": version, "threads": THREADS, "groups": list(GROUPS), "each": EACH, "new_tokens": NEW}
    kept = Kept(settings | {"code": code_hash("core", "engine", "drafters"), "drafters": weights})
    for place in PAIRS:
        target, dtype = place
        asked, first = prompts(target), next(iter(CASES[target]))
        kept.part([*place, "transformers"], of_transformers, target, asked, dtype)
        kept.part([*place, "plain"], judge, folder, target, dtype, asked, None)
        kept.part([*place, "selfspec plain"], timed, first, dtype, asked, None)
        kept.part([*place, f"selfspec {first}"], timed, first, dtype, asked, 8)
        for name, length in ((name, length) for name, lengths in CASES[target].items() for length in lengths):
            chain, spoken = [*place, "chains", f"{name} {length}"], configured(name, exports[name], length)
            kept.part([*chain, "vllm"], judge, folder, target, dtype, asked, spoken)
            kept.part([*chain, "selfspec"], chains, name, dtype, asked, length)
    return kept.found


@pytest.mark.parametrize("target", CASES)
def test_tokens_are_those_of_transformers(target, served):
    """In float32, whoever decodes and whoever drafts."""
    found = served["targets"][target]["float32"]
    for group, wanted in found["transformers"].items():
        assert found["plain"][group]["tokens"] == wanted
        assert found["selfspec plain"][group]["tokens"] == wanted
        for name, value in found["chains"].items():
            assert value["vllm"][group]["tokens"] == wanted, name
            assert value["selfspec"][group]["tokens"] == wanted, name


def rates(counted: dict[str, Any], groups: tuple[str, ...] = GROUPS) -> list[float]:
    """Acceptance per position, pooled over groups."""
    drafts = sum(
        counted[group]["drafts"][0] if isinstance(counted[group]["drafts"], list) else counted[group]["drafts"]
        for group in groups
    )
    return [sum(row) / drafts for row in zip(*(counted[group]["accepted"] for group in groups), strict=True)]


@pytest.mark.parametrize(("target", "dtype"), PAIRS)
def test_acceptance_is_that_of_our_own_chains(target, dtype, served):
    for name, value in served["targets"][target][dtype]["chains"].items():
        ours, theirs = rates(value["selfspec"]), rates(value["vllm"])
        assert ours[0] > 0.3, "a drafter that is not accepted proves nothing"
        assert all(abs(a - b) <= CLOSE for a, b in zip(ours, theirs, strict=True)), (name, ours, theirs)


def test_swapped_layers_are_seen_in_acceptance(served, exports, tmp_path):
    """The check above would notice a file whose features are in the wrong order."""
    source, out = exports["tiny-eagle3"], tmp_path / "swapped"
    out.mkdir()
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    first, *middle, last = tensors["fc.weight"].chunk(len(config[IDS]), 1)
    tensors["fc.weight"] = torch.cat([last, *middle, first], 1)  # vLLM sorts the ids, so the columns tell their order
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    counted = judge(tmp_path, "tiny-target", "float32", prompts(), configured("tiny-eagle3", out, 3))
    ours = rates(served["targets"]["tiny-target"]["float32"]["chains"]["tiny-eagle3 3"]["selfspec"])
    assert any(abs(a - b) > CLOSE for a, b in zip(ours, rates(counted), strict=True))
