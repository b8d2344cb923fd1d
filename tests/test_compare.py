"""The comparison of everything: complete, resumable, and its tables land where they belong."""

import json
import math
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config, made, refused, save_tiny, tiny_model, write_lines

from selfspec.api import Spec
from selfspec.budget import cost
from selfspec.checkpoints.footprint import held_bytes
from selfspec.cli.compare_runs import run_compare
from selfspec.cli.origin import check_origin
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.data.corpus import PythonSource
from selfspec.data.questions import SETS
from selfspec.data.tasks import TASKS
from selfspec.evaluation import peers
from selfspec.evaluation.arms import Prompt
from selfspec.evaluation.compare import best_sizes, regimes, summarize_comparison, write_summary
from selfspec.evaluation.figures import against, over_plain
from selfspec.evaluation.peers import made_with
from selfspec.evaluation.records import RECORDS, Beside, Record, Regime, ours, read_records
from selfspec.evaluation.tables import groups_table, price_table, regime_table, table, verdict
from selfspec.utils.files import ORIGIN


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(cost, "_ROUNDS", 1)


@pytest.fixture
def overrides(tiny_folder, heads_folder, tmp_path, tokenizer) -> list[str]:
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    stdlib = PythonSource()._root()
    for name in ("heapq.py", "argparse.py", "queue.py"):
        (library / name).write_text((stdlib / name).read_text())
    (library / "test" / "test_heapq.py").write_text((stdlib / "heapq.py").read_text())
    draft = save_tiny(tmp_path / "draft", tokenizer, num_hidden_layers=1)
    results = tmp_path / "RESULTS.md"
    results.write_text("before\n<!-- compare -->\nold\n<!-- end -->\nbehind\n")
    return [
        f"target={tiny_folder}",
        f"data.root={library}",
        f"compare.drafters=[prompt_lookup,{heads_folder},prompt_lookup+{heads_folder}]",
        "compare.nodes=[4,auto]",
        "compare.temperatures=[0,1]",
        "compare.methods=[hf_generate,hf_prompt_lookup,hf_early_exit,hf_assisted]",  # the static cache compiles: slow
        "compare.prompts=1",
        "compare.prompt_tokens=24",
        "compare.max_new_tokens=8",
        "compare.exit_layer=1",
        f"compare.draft_model={draft}",
        f"compare.results={results}",
        "dtype=float32",
        "wandb.mode=disabled",
    ]


def test_other_arms_are_what_they_were(tmp_path):
    """An engine of another version, or a draft model of other weights, is not measured under the name of the first."""
    target, begun = Target(tiny_model()), tmp_path / RECORDS
    check_origin(tmp_path, begun, target, {}, [], {"llamacpp_file": "version 1"})
    begun.touch()
    check_origin(tmp_path, begun, target, {}, ["llamacpp_file"], {"openvino_int4": "mine", "hf_assisted": "12ab"})
    check_origin(tmp_path, begun, target, {}, ["llamacpp_file"], {"openvino_int4": "yours"})  # nothing was measured
    with pytest.raises(ValueError, match=r"was measured with another llamacpp_file \(version 1, now version 2\)"):
        check_origin(tmp_path, begun, target, {}, ["llamacpp_file"], {"llamacpp_file": "version 2"})
    with pytest.raises(ValueError, match="was measured with another hf_assisted"):
        check_origin(tmp_path, begun, target, {}, ["hf_assisted"], {"hf_assisted": "34cd"})


@pytest.mark.slow
def test_a_killed_comparison_goes_on_with_what_is_missing(overrides, tmp_path):
    rows = run_compare(compose_config("compare", *overrides), tmp_path / "run")
    arms = {(row["arm"], row["nodes"]) for row in rows}
    assert len(rows) == len(arms) * 2 == (3 * 2 + 4 + 1) * 2  # two temperatures
    path = tmp_path / "run" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    runs = read_records(path)
    turns = {(run.group, *run.questions) for run in runs}
    assert {group for group, *_ in turns} == {*TASKS, "continuation"}
    assert len(lines) == len(rows) * len(turns)
    assert all(run.tokens == 8 for run in runs)
    assert all((run.right == [None]) == (run.group == "continuation") for run in runs)
    for run in runs:
        if run.arm == "plain":
            assert 0 < run.regime.entropy < 8 * 6
        elif ours(run.arm):
            assert run.same == [True]  # float32: the tokens of plain decoding
            assert 0 < run.decode < run.seconds
        assert 1 <= run.stats.passes <= 9
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("before\n<!-- compare -->\n| T ")
    table = [line.split("|") for line in text.splitlines()[2 : 4 + len(rows)]]
    assert {len(cells) for cells in table} == {13}
    assert [cells[1].strip() for cells in table[2:]] == ["0"] * 11 + ["1"] * 11
    assert text.endswith("<!-- end -->\nbehind\n")
    assert "old" not in text
    assert (tmp_path / "run" / "table.md").read_text().strip() in text
    assert len(list((tmp_path / "run").glob("compare_*.png"))) == 8
    saved = json.loads((tmp_path / "run" / "compare.json").read_text())
    assert saved["prices"]["prompt_lookup"]["parameters"] == 0
    assert saved["prices"]["hf_assisted"]["parameters"] > 0
    assert {"hf_assisted", "drafter prompt_lookup"} <= json.loads((tmp_path / "run" / ORIGIN).read_text()).keys()

    wrong = [line.replace('"right": [false]', '"right": [true]') for line in lines]  # by a checker of before
    path.write_text("".join(wrong[:25]) + lines[25][:40])  # killed while it wrote
    again = run_compare(compose_config("compare", *overrides), tmp_path / "run")
    after = path.read_text().splitlines(keepends=True)
    assert after[:25] == lines[:25] != wrong[:25]
    assert len(after) == len(lines)
    keys = [(*r.point, r.arm, r.nodes) for r in read_records(path)]
    assert len(set(keys)) == len(keys)
    assert {(row["T"], row["arm"], row["nodes"]) for row in again} == {(r["T"], r["arm"], r["nodes"]) for r in rows}

    fewer = ("compare.temperatures=[0.0]", "compare.methods=[hf_assisted]", "compare.nodes=[6]")
    more = run_compare(compose_config("compare", *overrides, *fewer), tmp_path / "run")
    assert len(more) == len(rows) + 3  # what was measured before is kept
    limits = [[(row["T"], row["arm"]) for row in of if "limit" in row and row["nodes"] != "6"] for of in (rows, more)]
    assert limits[0] == limits[1] != []
    assert json.loads((tmp_path / "run" / "compare.json").read_text())["prices"].keys() == saved["prices"].keys()
    one = compose_config("compare", *overrides, "compare.groups=[convert]", "compare.seed=0")
    assert {r["arm"] for r in run_compare(one, tmp_path / "run")} == {r["arm"] for r in rows}  # the same texts alone
    altered = path.read_text().replace('"texts": [', '"texts": [1')
    (tmp_path / "run" / "kept").write_text(path.read_text())
    path.write_text(altered)
    refused("holds records of another text for", run_compare, compose_config("compare", *overrides), tmp_path / "run")
    path.write_text((tmp_path / "run" / "kept").read_text())
    with pytest.raises(ValueError, match="another configuration"):
        run_compare(compose_config("compare", *overrides, "compare.max_new_tokens=9"), tmp_path / "run")
    path.write_text(lines[0] + "{}\n" + lines[1])
    refused("line 2 is no record", run_compare, compose_config("compare", *overrides), tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compare.drafters=[]", "compare.drafters is empty"),
        ("compare.questions=[edits]", r"holds no group of compare.questions=\['edits'\]; give compare.groups=null"),
        ("compare.questions=[source,source]", "two sets hold the question 'continuation-0' of the group"),
        ("compare.results=nowhere.md", "is no file; give one that has lines <!-- compare -->"),
    ],
)
def test_bad_input(override, message, overrides, tmp_path):
    refused(message, run_compare, compose_config("compare", *overrides, override), tmp_path / "run")
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_a_group_that_neither_a_set_nor_a_file_has_is_named(overrides, tmp_path):
    write_lines(path := tmp_path / "mine.jsonl", [{"prompt": "word", "category": "own"}])
    asked = f"compare.questions=[{path},edits]", "compare.groups=[own,renam]", "compare.prompts=1"
    refused(
        r"groups holds \['renam'\]; known are .*own", run_compare, compose_config("compare", *overrides, *asked), path
    )


def run(arm: str, seconds: float, plain: float = 2.0, prompt: object = 0, turn: int = 0, **changes: Any) -> Record:
    """A record of ten tokens in five passes of six nodes."""
    given: dict[str, Any] = {"temperature": 0.0, "group": "a", "nodes": "8", "tokens": 10, "token_ids": []}
    stats = Stats(5, 5, 30, 10, seconds_draft=0.1, seconds_target=0.3, seconds_other=0.1)
    given |= {"questions": [(f"q{prompt}", turn)], "stats": stats, "plain": Beside(plain, 1.0, 10)}
    return Record(0, arm, seconds=seconds, **{**given, **changes})


def of_before(record):
    """A line of `runs.jsonl`, as comparisons of version 0.4 wrote them."""
    (question, turn), stats = record.questions[0], record.stats
    line = {key: getattr(record, key) for key in ("temperature", "group", "arm", "nodes", "seconds", "tokens")}
    line |= {"question": question, "turn": turn, "text": 1, "plain": record.plain.seconds, "plain_tokens": 10}
    line |= {"passes": stats.passes, "decode": 0.5, "plain_decode": record.plain.decode, "same": True}
    line |= {"draft": stats.seconds_draft, "target": stats.seconds_target, "other": stats.seconds_other}
    return json.dumps(line | {"forecast": None, "nodes_run": stats.nodes, "right": True, "regime": None}) + "\n"


def test_figures_are_the_definitions():
    ours = [run("x", 1.0), run("x", 0.5, plain=1.0, prompt=1)]
    theirs = [run("hf_generate", 2.0, nodes="-"), run("hf_generate", 1.0, plain=1.0, prompt=1, nodes="-")]
    costs = [0.1, *(0.05 * n for n in range(1, 65))]
    rows = summarize_comparison([*ours, *theirs], {0.0: costs})
    _, row = rows
    assert [(r["arm"], r["nodes"], r["speedup"]) for r in best_sizes([*ours, *theirs])] == [
        ("hf_generate", "-", {"ratio": 1.0, "low": 1.0, "high": 1.0}),
        ("x", "8", row["speedup"]),
    ]
    assert row["tau"] == 2.0
    assert row["tokens_per_second"] == 20 / 1.5
    assert row["speedup"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert row["decode"] == 2.0
    assert row["draft_steps"] == pytest.approx(0.02 / 0.1)
    assert row["mean_nodes"] == 6.0
    assert row["limit"] == pytest.approx(2.0 / (0.3 / 0.1 + 0.2))
    found = against(ours, theirs)
    assert found["ratio"] == 2.0
    assert against(ours, []) is None
    assert "wins 2.00x" in verdict(best_sizes([*ours, *theirs]))
    faster = [run("hf_generate", 0.5, nodes="-"), run("hf_generate", 0.25, plain=1.0, prompt=1, nodes="-")]
    assert "loses 0.50x" in verdict(best_sizes([*ours, *faster]))


def test_texts_that_were_never_compared_are_not_called_different(tmp_path):
    runs = [run("x", 1.0, prompt=i, texts=[1]) for i in range(3)]
    lines = [{**json.loads(of_before(each)), "same": None, "plain_decode": None} for each in runs]
    write_lines(tmp_path / "runs.jsonl", lines)
    (row,) = summarize_comparison(read_records(tmp_path / "runs.jsonl"), {})
    assert "same" not in row
    assert math.isnan(row["draft_steps"])


def test_what_nobody_knows_of_a_training_is_not_none():
    price = {"parameters": 5, "disk": 1, "memory": 1}
    prices = [price, {**price, "parameters": 0}, {**price, "training": {"seconds": 60, "tokens": 1e6}}]
    lines = price_table({f"d{i}": each for i, each in enumerate(prices)}).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["not known", "none", "1 min, 1.0M tokens"]


def test_a_comparison_of_before_has_its_figures(tmp_path):
    runs = [run("x", 1.0, prompt=i, right=[True], same=[True], texts=[1]) for i in range(3)]
    (tmp_path / "runs.jsonl").write_text("".join(map(of_before, runs)))
    costs = {0.0: [0.1, *(0.05 * n for n in range(1, 65))]}
    before = summarize_comparison(read_records(tmp_path / "runs.jsonl"), costs)
    now = summarize_comparison(runs, costs)
    assert table(before) == table(now)
    assert groups_table(before) == groups_table(now)
    assert before[0]["same"] == before[0]["right"] == 3


def test_the_best_size_is_chosen_on_other_prompts():
    numbers = {zlib.crc32(f"q{i}".encode()) % 2: i for i in range(9)}  # a question of each half
    even = [run("x", seconds, prompt=numbers[0], nodes=nodes) for nodes, seconds in (("8", 1.0), ("16", 0.5))]
    odd = [run("x", seconds, prompt=numbers[1], nodes=nodes) for nodes, seconds in (("8", 0.5), ("16", 1.0))]
    (row,) = best_sizes([*even, *odd])  # each half at what was best on the other: here, what is worse on it
    assert row["nodes"] == "8, 16"
    assert row["speedup"]["ratio"] == 2.0
    (alone,) = best_sizes(even)
    assert (alone["nodes"], alone["speedup"]["ratio"]) == ("16", 4.0)


def test_a_summary_has_a_column_for_each_set_and_temperature(tmp_path):
    groups = [group for known in SETS.values() for group in known]
    assert len(set(groups)) == len(groups), "a run is found by its group"
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- summary -->\n<!-- end -->\n")
    runs = []
    for group, seconds in (("HumanEval", 1.0), ("rename", 0.5), ("fix", 0.5)):
        where = {"group": group, "prompt": group}
        slow = {"nodes": "-", "stats": Stats(10, 10, 10, 10), **where}
        runs += [run("plain", 2.0, right=[True], **slow), run("x", seconds, right=[True], same=[True], **where)]
        runs.append(run("hf_generate", 4.0, **slow))
    write_summary(runs, "t", "machine", readme)
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in readme.read_text().splitlines() if "|" in line
    ]
    assert lines[0] == [
        "",
        "HumanEval, T=0",
        "edits, T=0",
        "over hf_generate",
        "right, plain / drafted",
        "identical texts",
    ]
    assert lines[2] == [
        *("x", "2.00x, τ 2.00", "**4.00x** [4.00, 4.00], τ 2.00"),
        *("4.0x / 8.0x", "1 / 1 of 1, 2 / 2 of 2", "3 of 3"),
    ]
    assert lines[3][1:3] == ["0.50x, τ 1.00", "0.50x [0.50, 0.50], τ 1.00"]
    write_summary([r for r in runs if r.group != "HumanEval"], "t", "machine", readme)
    assert "| T=0 " in readme.read_text()


def test_turns_of_a_question_are_one_draw():
    """Two questions of two turns each have the interval of two questions, not of four."""
    turns = [run("x", 1.0 + i, prompt=i, turn=t) for i in (0, 1) for t in (0, 1)]
    once = [run("x", 2 * (1.0 + i), plain=4.0, prompt=i) for i in (0, 1)]
    assert over_plain(turns) == over_plain(once)


def test_the_regime_is_that_of_plain_text():
    own = Regime(log_prob=-1.0, entropy=5.0, top1=8.0, grams=10, distinct=5)
    short = replace(own, grams=0, distinct=0)  # an answer of three tokens has none
    runs = [run("plain", 1.0, regime=own, right=[True]), run("plain", 1.0, regime=short, prompt=1, right=[False])]
    runs.append(run("x", 1.0))
    (row,) = regimes(runs)
    assert (row["entropy"], row["top1"], row["distinct_4grams"], row["right"], row["of"]) == (0.5, 0.8, 0.5, 1, 2)
    assert "| 0 | a     | 20     | 0.50 " in regime_table([row])


@pytest.mark.slow
def test_arms_of_other_questions_are_refused(overrides, tmp_path):
    """Three calls in one folder, of which the last has nothing in common with the first."""
    plain = ["compare.methods=[]", "compare.draft_model=null", "compare.temperatures=[0]", "compare.nodes=[2]"]
    for groups, drafter, fine in (("[edit]", "prompt_lookup", True), ("[convert]", "lookahead", False)):
        more = f"compare.groups={groups}", f"compare.drafters=[{drafter}]"
        config = compose_config("compare", *overrides, *plain, *more)
        if fine:
            run_compare(config, tmp_path / "run")
            continue
        refused("holds arms on other questions at T=0", run_compare, config, tmp_path / "run")


def test_transformers_static_cache_is_compiled_once(overrides, tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    def traced(function: Any, **settings: Any) -> Any:
        return compiling(function, **{**settings, "backend": "eager", "mode": None})

    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    counters.clear()
    few = "compare.drafters=[prompt_lookup] compare.nodes=[4] compare.draft_model=null"
    run_compare(compose_config("compare", *overrides, *few.split(), "compare.methods=[hf_static]"), tmp_path / "run")
    assert counters["stats"]["unique_graphs"] == 1


def test_memory_is_what_is_held_beside_the_target():
    target = Target(tiny_model(dtype=torch.float32))
    assert held_bytes(made("prompt_lookup", target), target.model) == 0
    drafter = made("medusa", target, heads=2, blocks=1, rank=4)
    own = sum(p.numel() for p in drafter.trained().values()) * 4
    assert held_bytes(drafter, target.model) == own
    assert held_bytes(drafter.eval(), target.model) > own  # what is laid out for decoding


ENGINE = """
import json, sys
print("loading ...")
print(json.dumps({"version": "mine 1"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["prompt"] == [1]:
        sys.exit("out of luck")
    tokens = [*range(request["count"] - 1), *request["ends"]]
    print(json.dumps({"tokens": tokens, "passes": 3, "seconds": 0.75, "prompt": 0.25}), flush=True)
"""


def test_other_engines_answer_or_end(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PYTHON", Path(sys.executable))
    peer, broken = peers.Peer(ENGINE), peers.Peer("raise SystemExit(3)")
    assert (peer.version, broken.version) == ("mine 1", "")
    assert peer.answer([5], 3, [7]) == {"tokens": [0, 1, 7], "passes": 3, "seconds": 0.75, "prompt": 0.25}
    for _ in range(2):  # while it answers, and when it has ended
        assert all(each.answer([1], 9) is None and each.failed for each in (peer, broken))
    peer.process.wait()
    peer.failed = False  # it ends unseen
    assert peer.answer([5], 9) is None
    target = Target(tiny_model(dtype=torch.float32))
    spec = Spec(target, made("medusa", target, heads=1, rank=4))
    call = peers.answering(peers.Peer(ENGINE), "mine", spec, 9)
    answer = call([Prompt([5, 6])], Sampling())
    assert (len(answer.token_ids[0]), answer.stats.passes, answer.stats.seconds) == (9, 3, 0.75)
    refused(r"mine ended: out of luck \(exit code 1\); what was measured is kept", call, [Prompt([1])], Sampling())
    for each in (peer, broken):
        each.close()
    refused("'tiny-target'", peers.check_peers, ["llamacpp_file"], "tiny-target")
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    refused("is missing; in the repository", peers.check_peers, ["llamacpp_file"], "smollm2")


def test_engines_are_named_by_their_own_versions(monkeypatch, tmp_path):
    """A new llama.cpp does not make OpenVINO's results those of another version."""
    packages = tmp_path / "lib/python3/site-packages"
    for name in ("llama_cpp_python-0.3.36", "openvino_genai-2026.4", "optimum_intel-2.2", "torch-2.13"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "bin/python")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert made_with(["openvino_int4"], "models/one") == "openvino_genai-2026.4, optimum_intel-2.2: one"
    assert made_with(["llamacpp_file"], f"{tmp_path}/model.gguf") == "llama_cpp_python-0.3.36: model.gguf, 4 bytes"
    assert "optimum" in made_with(["llamacpp_file", "openvino_int4"], f"{tmp_path}/model.gguf")
