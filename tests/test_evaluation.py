import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import compose_config, made, refused, tiny_model

import selfspec
from selfspec.api import Spec
from selfspec.cli.reports import run_report
from selfspec.cli.show import gain
from selfspec.core.generate import speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.parts.mask_layout import layout
from selfspec.drafters.sequential import SequentialHeads
from selfspec.evaluation import measure
from selfspec.evaluation.arms import Arm, Prompt
from selfspec.evaluation.compare import common
from selfspec.evaluation.decode import ARMS, DecodeConfig, defined, host_overhead, run_benchmark, summarize
from selfspec.evaluation.figures import against, drift, over_plain, regime_figures
from selfspec.evaluation.measure import points_of, regime
from selfspec.evaluation.plots import plot_points
from selfspec.evaluation.points import labelled, read_points, rows_of, write_point
from selfspec.evaluation.records import Beside, Record, Regime
from selfspec.evaluation.tables import groups_table, table
from selfspec.output import Generated
from selfspec.training import calibrate as calibrate_file
from selfspec.training.calibrate import calibrate, spread, write_samples
from selfspec.utils.files import ORIGIN, interval, markdown, null_for_nan, shown


def asked(*prompts: list[int]) -> list[Prompt]:
    return [Prompt(ids, seed) for seed, ids in enumerate(prompts)]


def record(seconds: float, tokens: int = 10, prompt: int = 0, plain: tuple[float, int] | None = None) -> Record:
    beside = None if plain is None else Beside(plain[0], plain[0], plain[1])
    where: dict[str, Any] = {"questions": [("", 0)], "plain": beside}
    return Record(prompt, "x", "4", 0.0, seconds, tokens, [[1] * tokens], Stats(), **where)


def test_speedup_is_the_ratio_of_seconds_per_token():
    figures = over_plain([record(1.0, plain=(2.0, 10)), record(2.0, 20, plain=(4.0, 20))])
    assert figures["ratio"] == 2.0
    assert math.isnan(figures["low"])  # of one question
    assert interval(figures) == "2.00x"
    rows = [record(1.0, prompt=i, plain=(1.0 + 2 * (i % 2), 10)) for i in range(16)]
    mixed = over_plain(rows)
    assert mixed["low"] < mixed["ratio"] == 2.0 < mixed["high"]
    turns = over_plain([replace(r, questions=[("q", i)]) for i, r in enumerate(rows)])  # of one question: no interval
    assert math.isnan(turns["low"])
    assert math.isnan(turns["high"])
    assert over_plain([record(2.0, 10, plain=(2.0, 20))])["ratio"] == 0.5
    found = against(rows, [replace(r, seconds=4.0) for r in rows])
    assert found == {"ratio": 4.0, "low": 4.0, "high": 4.0}
    alone = [replace(r, plain=None) for r in rows]  # nothing was compared with plain decoding
    assert against(alone, [replace(r, seconds=4.0) for r in alone]) == found


@pytest.mark.parametrize("questions", [2, 4, 8, 11])
def test_intervals_of_few_questions_hold_the_ratio(questions):
    """In 95 of 100 draws, of questions whose lengths and speedups are log-normal."""
    generator, held = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        tokens, slower = torch.randn(2, questions, generator=generator, dtype=torch.float64).mul(0.3).exp()
        rows = [record(t * s, plain=(t, 1)) for t, s in zip(tokens.tolist(), slower.tolist(), strict=True)]
        found = over_plain([replace(r, prompt=i, tokens=1) for i, r in enumerate(rows)])
        held += found["low"] <= math.exp(-(0.3**2) / 2) <= found["high"]
    assert 0.91 < held / 400 < 0.98


def test_an_interval_that_says_nothing_is_not_shown():
    far = over_plain([record(1.0, prompt=0, plain=(5.0, 10)), record(1.0, prompt=1, plain=(1.0, 10))])
    assert far["high"] > 100 * far["low"]
    assert interval(far) == "3.00x"


def test_the_regime_of_a_text(heads_folder, monkeypatch):
    monkeypatch.setattr(measure, "_AT_ONCE", 16)
    spec = selfspec.load(str(heads_folder), dtype="float32")
    prompt, new = [5, 9, 2], [1, 2] * 20
    logits = spec.target.model(input_ids=torch.tensor([prompt + new])).logits[0, 2:-1].double()
    for sampling in (Sampling(), Sampling(0.7), Sampling(1.0, top_k=3)):
        found = regime(spec, asked(prompt), [new], sampling)
        assert (found.grams, found.distinct) == (37, 2)  # a loop
        scores = logits / (sampling.temperature or 1.0)
        exact = torch.log_softmax(scores, -1)
        assert found.log_prob == pytest.approx(float(exact[range(40), new].sum()), rel=1e-4)
        if sampling.top_k:
            scores = scores.masked_fill(scores < scores.topk(3).values[:, -1:], -torch.inf)
        p = torch.softmax(scores, -1)
        assert found.entropy == pytest.approx(float(torch.special.entr(p).sum()), rel=1e-4)
        assert found.top1 == pytest.approx(float(p.amax(-1).sum()), rel=1e-4)
    assert regime_figures([found, Regime(0, 0, 0, 3, 3)], 40)["distinct_4grams"] == 5 / 40


def test_all_arms_and_their_figures(heads_folder, tmp_path):
    spec = selfspec.load(str(heads_folder))
    spec.target.model.generation_config.repetition_penalty = 1.5  # of many instruct models; no arm applies it
    prompts = asked([5, 9, 2], [8, 1, 30, 4], [60, 59, 3], [7, 7, 7, 7, 7])
    for temperature, batch in [(0.0, 1), (0.8, 2)]:
        config = DecodeConfig(max_new_tokens=9, temperature=temperature, batch_size=batch, repeats=1)
        records = run_benchmark(spec, prompts, config, 6)
        config_ = {"drafter": "x", "tree": {"nodes": 6}, "decode": {"temperature": temperature}}
        point = {"config": config_, **summarize(records)}
        assert set(point["arms"]) == set(ARMS)
        assert point["identical"]["autoregressive"] == {"rows": 4, "of": 4}
        if temperature == 0:
            assert point["identical"]["hf_generate"] == {"rows": 4, "of": 4}
        assert point["arms"]["speculative"]["tokens"] == point["arms"]["autoregressive"]["tokens"] == 36
        spec_figures = point["speculative"]
        assert spec_figures["acceptance_length"] == 36 / spec_figures["passes"]
        assert sum(spec_figures["share_of_step"].values()) == pytest.approx(1)
        steps = sum(r.stats.calls for r in records if r.arm == "autoregressive")
        plain = sum(r.plain.decode for r in records if r.arm == "speculative" and r.plain) / steps
        if batch == 1:
            assert spec_figures["cost"] == pytest.approx(spec_figures["milliseconds_per_pass"] / 1000 / plain)
        else:  # a batch takes as many passes as its slowest row
            assert "cost" not in spec_figures
        full, conditional = spec_figures["full_acceptance"], spec_figures["conditional_acceptance"]
        product = 1.0
        for f, c in zip(full, conditional, strict=True):
            product *= c
            assert f == pytest.approx(product)
        labelled([point])
        assert point["label"] == "x"
        head, _, cells = table(rows_of([point])).splitlines()
        assert [name.strip() for name in head.split("|")[1:-1]] == [
            *("point", "nodes", "τ", "full acceptance by depth", "tok/s plain", "tok/s", "over plain"),
            *("over hf_generate", *["pass cost"][: batch == 1], "draft / target / other, ms", "identical"),
            *("entropy, nats", "mean top-1", "distinct 4-grams", "drift"),
        ]
        assert "| - " not in cells
        folder = tmp_path / str(batch)
        folder.mkdir()
        write_point(folder, point, records)
        assert all(path.stat().st_size > 5000 for path in plot_points(rows_of([point]), folder).values())
    assert drift([record(1.0), record(1.0), record(2.0), record(4.0)]) == pytest.approx(3.0)
    points, broken = read_points(tmp_path)
    assert not broken
    assert [p["label"] for p in points] == ["temperature=0", "temperature=0.8"]
    assert len(table(rows_of(points)).splitlines()) == 4


def test_a_benchmark_that_was_killed_goes_on(heads_folder, tmp_path, monkeypatch):
    spec, path = selfspec.load(str(heads_folder)), tmp_path / "records.jsonl"
    prompts, config = asked(*([5 + i, 9, 2] for i in range(4))), DecodeConfig(max_new_tokens=6, repeats=1)
    whole = run_benchmark(spec, prompts, config, 4)
    timed, left = measure.timed, [2 * 4 + 3]  # two prompts of four calls each, and an arm of the third

    def killed(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return timed(*given)

    monkeypatch.setattr(measure, "timed", killed)
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(spec, prompts, config, 4, path)
    first = path.read_text()
    assert len(first.splitlines()) == 2 * 3
    path.write_text(first + first.splitlines()[0][:40])  # torn
    left[0] = 2 * 4
    again = run_benchmark(spec, prompts, config, 4, path)
    assert path.read_text().startswith(first)
    assert [r.seconds for r in again[:6]] == [json.loads(line)["seconds"] for line in first.splitlines()]
    for one, other in zip(whole, again, strict=True):
        assert (one.prompt, one.arm, one.token_ids, one.questions) == (
            other.prompt,
            other.arm,
            other.token_ids,
            other.questions,
        )
    assert summarize(again)["speculative"].keys() == summarize(whole)["speculative"].keys()
    assert run_benchmark(spec, prompts, config, 4, path) == again  # nothing is left: `timed` would end it
    refused("holds records of another text", run_benchmark, spec, prompts[::-1], config, 4, path)
    path.write_text(first + first)
    refused("holds speculative of 0 twice", run_benchmark, spec, prompts, config, 4, path)
    path.write_bytes(first.encode() + b"\xb8\n")
    refused("line 7 is no record", run_benchmark, spec, prompts, config, 4, path)
    earlier = {key: value for key, value in json.loads(first.splitlines()[0]).items() if key != "plain"}
    path.write_text(json.dumps(earlier) + "\n")
    refused("an earlier version wrote it; delete the folder", run_benchmark, spec, prompts, config, 4, path)


def test_a_subset_of_arms(heads_folder):
    spec = selfspec.load(str(heads_folder))
    config = DecodeConfig(max_new_tokens=4, repeats=1, arms=["autoregressive"])
    point = {"label": "a", "config": {"tree": {"nodes": 4}}, **summarize(run_benchmark(spec, asked([1, 2]), config, 4))}
    assert "speculative" not in point
    assert "| a " in table(rows_of([point]))


def test_broken_runs_of_a_sweep_are_named_and_left_out(heads_folder, tmp_path):
    spec = selfspec.load(str(heads_folder))
    records = run_benchmark(spec, asked([5, 9, 2]), DecodeConfig(max_new_tokens=4, repeats=1), 4)
    for name in ("0", "1", "2", "10"):
        (tmp_path / name).mkdir()
        config = {"drafter": f"runs/{name}", "tree": {"nodes": 4}, "decode": {"temperature": 0.0}}
        write_point(tmp_path / name, {"config": config, **summarize(records)}, records)
    whole = (tmp_path / "1" / "summary.json").read_text()
    (tmp_path / "1" / "summary.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "2" / "summary.json").write_text('{"label": "2"}')
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / ".lock").write_text("")  # killed before its end
    (tmp_path / "0" / "wandb" / "run" / "files").mkdir(parents=True)
    (tmp_path / "0" / "wandb" / "run" / "files" / "config.yaml").write_text("name: x")
    points, broken = read_points(tmp_path)
    assert [p["label"] for p in points] == ["0", "10"]
    assert [path.name for path, _ in broken] == ["1", "2", "3"]
    assert [why.split(" ")[2] for _, why in broken] == ["not", "no", "missing:"]
    report = compose_config("report", f"sweep={tmp_path}")
    run_report(report)
    tables = (tmp_path / "table.md").read_text().split("\n\n")
    assert [len(text.splitlines()) for text in tables] == [2 + 2] * 3  # points, by group, and what the text is like
    refused("no such folder", run_report, compose_config("report", f"sweep={tmp_path}/nothing"))
    (tmp_path / "empty").mkdir()
    refused("no finished run", run_report, compose_config("report", f"sweep={tmp_path}/empty"))


def test_parts_of_two_runs_are_their_mean():
    """As the seconds of the whole are, which stand beside the mean of two runs of plain decoding."""
    target = Target(tiny_model())
    spec, point = Spec(target, made("prompt_lookup", target)), measure.Point(0, asked([5, 9, 2]), Sampling())
    runs = [Generated([[1]], [], [[False]], Stats(1, 1, tokens=1, seconds_target=s)) for s in (3.0, 1.0)]
    taken = [((run, run.stats.seconds), None) for run in runs]
    found = measure._record(spec, point, Arm("speculative", "4"), taken, None)
    assert found.stats.seconds_target == found.seconds == 2.0


def test_auto_is_told_beside_what_was_measured(heads_folder):
    spec = selfspec.load(str(heads_folder))
    records = run_benchmark(spec, asked([5, 9, 2], [7, 7]), DecodeConfig(max_new_tokens=20, repeats=1), "auto")
    figures = summarize(records)["speculative"]
    assert figures["forecast"]["passes"] == figures["passes"]
    assert figures["forecast"]["speedup"] == figures["forecast"]["tokens"] / figures["forecast"]["steps"] > 0
    assert figures["decode"] == pytest.approx(figures["acceptance_length"] / figures["cost"])
    point = {"label": "a", "config": {"tree": {"nodes": "auto"}}, **summarize(records)}
    shown = table(rows_of([point]))
    assert f"{figures['forecast']['speedup']:.2f} / {figures['decode']:.2f}" in shown
    assert f"| auto ({figures['forecast']['nodes'] / figures['passes']:.1f}) |" in shown


@pytest.mark.parametrize("name", ["medusa", "sequential"])
def test_host_overhead_is_what_no_module_takes(name):
    """Passes are counted once, though the decoder of a part runs alone while the prompt is read."""
    target = Target(tiny_model(dtype=torch.float32))
    drafter = made({"medusa": Medusa, "sequential": SequentialHeads}[name], target).eval()
    config = DecodeConfig(max_new_tokens=12)
    prompts = asked([5, 9, 2, 7] * 8, [8, 1, 30, 4])
    assert 0 < host_overhead(Spec(target, drafter), prompts, config, 6) < 0.9
    assert not any(m._forward_hooks for m in target.model.modules())


def test_a_group_may_have_the_name_of_a_column():
    part = {"speedup": {"ratio": 1.5, "low": 1.0, "high": 2.0}, "tau": 2.0, "right": 1, "of": 3}
    row = {"label": "a", "nodes": "auto, 8", "mean_nodes": 12.0, "groups": {"all": part, "nodes": part}}
    head, _, cells = groups_table([row | {"speedup": {"ratio": 1.2, "low": 1.1, "high": 1.3}}]).splitlines()
    assert [name.strip() for name in head.split("|")[1:-1]] == ["point", "nodes", "all", "all", "nodes"]
    told = ["a", "auto, 8", "1.20x [1.10, 1.30]", *["1.50x [1.00, 2.00], τ 2.00, 1/3 right"] * 2]
    assert [cell.strip() for cell in cells.split("|")[1:-1]] == told


def test_two_runs_are_set_beside_each_other(tmp_path, capsys):
    def point(label: str, low: float, high: float) -> dict[str, object]:
        ratio = {"ratio": (low + high) / 2, "low": low, "high": high}
        config = {"drafter": label, "tree": {"nodes": 4}}
        return {"config": config, "arms": {}, "identical": {}, "speedup": {"autoregressive": ratio}}

    for run, points in (
        (
            "a",
            [point("x", 1.0, 1.2), point("p/y", 1.0, 1.1), point("only", 1.0, 1.1), point("one", math.nan, math.nan)],
        ),
        ("b", [point("x", 1.1, 1.3), point("q/y", 1.2, 1.4), point("one", math.nan, math.nan)]),
    ):
        for i, own in enumerate(points):
            (tmp_path / run / str(i)).mkdir(parents=True)
            write_point(tmp_path / run / str(i), own, [])
            (tmp_path / run / str(i) / ORIGIN).write_text(json.dumps({"device": f"GPU {run}", "target": "same"}))
    run_report(compose_config("report", f"sweep={tmp_path}/a", f"against={tmp_path}/b"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[4].strip() for line in lines[2:4]] == ["same", "DIFFERS"]
    assert "1 of 2 speedups have overlapping intervals (50%)" in lines[-7]
    assert lines[-5] == "1 of one question, which gives no interval: one"
    assert lines[-3] == f"1 only in {tmp_path}/a: only"
    assert lines[-1] == "the runs differ in drafter: p/y / q/y; device: GPU a / GPU b"
    (tmp_path / "linked").mkdir()
    for link, to in (("linked/0", "a/0"), ("a/again", "a/1")):
        (tmp_path / link).symlink_to(tmp_path / to)
    assert [len(read_points(tmp_path / run)[0]) for run in ("linked", "a")] == [1, 4]
    own = f"sweep={tmp_path}/a/3", f"against={tmp_path}/b/2"
    refused("both measured one question, which gives no interval", run_report, compose_config("report", *own))


def test_a_mean_over_nothing_is_never_a_zero():
    assert repr(Stats()).startswith("0 tokens in 0 passes: n/a per pass, not timed, n/a% drafted")
    assert math.isnan(Stats().acceptance_length)
    figures = regime_figures([Regime(-1.0, 0.5, 0.9, 0, 0)], 2)  # two tokens have no 4-grams
    assert math.isnan(figures["distinct_4grams"])
    assert figures["entropy"] == 0.25
    assert math.isnan(drift([record(1.0)]))  # one text has no first half
    assert all(math.isnan(v) for name in ("spec_bench", "modelopt") for v in defined(name, [], []).values())
    assert markdown(["a"], [[f"{float('nan'):.2f}x [{float('nan'):.2f}, 1.00]"], ["banana"]]).count("n/a") == 2
    assert "banana" in markdown(["a"], [["banana"]])
    assert shown(float("nan")) == "n/a"
    assert null_for_nan({"a": [1.0, float("nan")]}) == {"a": [1.0, None]}


def test_a_drafter_keeps_its_calibration_where_nothing_is_measured(llama):
    drafter = made("medusa", llama, heads=3, rank=4)
    before = copy.deepcopy(drafter.calibration)
    samples = write_samples(llama, [[5, 9, 2]], 1, 0.0, [0], quiet=True)  # shorter than what is drafted
    figures = calibrate(llama, drafter, "greedy", samples)
    assert figures["positions"] == 0
    assert all(math.isnan(value) for value in (*figures["tau"].values(), *figures["top1"]))
    assert drafter.calibration == before


def test_texts_of_calibration_are_written_once(llama, monkeypatch):
    given: Any = llama, [[5, 9, 2], [7, 7, 1]], 12
    first = write_samples(*given, 1.0, [3, 4], quiet=True)
    monkeypatch.setattr(calibrate_file, "autoregressive", None)
    for one, again in zip(first, write_samples(*given, 1.0, [3, 4], quiet=True), strict=True):
        assert torch.equal(one.tokens, again.tokens)
        assert torch.equal(one.hidden, again.hidden)
    with pytest.raises(TypeError):  # written anew
        write_samples(*given, 1.0, [3, 5], quiet=True)
    changed = Target(copy.deepcopy(llama.model))
    changed.model.get_output_embeddings().weight.data[3] += 1
    with pytest.raises(TypeError):
        write_samples(changed, *given[1:], 1.0, [3, 4], quiet=True)


@pytest.mark.parametrize("kind", ["mask", "prompt_lookup"])
def test_what_calibration_promises_is_what_decoding_does(kind, llama, monkeypatch):
    """Mask slots take rows that nodes do not have, and text ends at EOS."""
    asked = list[frozenset[int]]()

    def decode(target: Target, prompts: Any, options: Options, *more: Any) -> Any:
        asked.append(options.eos)
        return speculative(target, prompts, options, *more)

    monkeypatch.setattr(calibrate_file, "speculative", decode)
    samples = write_samples(llama, [[5, 9, 2], [7, 7, 1]], 24, 0.0, [0, 1], quiet=True)
    drafter: Any = made("mask", llama, masks=3, rank=2) if kind == "mask" else made("prompt_lookup", llama)
    tau = calibrate(llama, drafter.eval(), "greedy", samples)["tau"]
    if kind == "mask":
        acceptance = tuple(map(tuple, drafter.calibration["greedy"].acceptance))
        assert tau == {str(n): 1 + layout(acceptance, n).drafted for n in (8, 16, 32)}
    else:
        assert asked == [llama.end_tokens] * 3


def test_samples_that_are_decoded_again_are_spread_over_all():
    assert spread(3) == [0, 1, 2]
    assert spread(64) == list(range(2, 64, 4))


def test_batches_are_whole_and_of_all_groups():
    prompts = [Prompt([i], i, group=group, question=f"{group}{i}") for group in "abc" for i in range(3)]
    whole = points_of(prompts, [Sampling()], 4)
    asked_so = [[prompt.question for prompt in point.batch] for point in whole]
    assert asked_so == [["a0", "b0", "c0", "a1"], ["b1", "c1", "a2", "b2"]]
    assert {point.group for point in whole} == {"all"}
    assert [len(point.batch) for point in points_of(prompts, [Sampling()], 32)] == [9]
    assert [point.group for point in points_of(prompts, [Sampling()])] == ["a", "b", "c"] * 3


def test_arms_are_compared_on_common_prompts_alone(capsys):
    every = [replace(record(1.0, plain=(1.0, 10)), arm=arm, questions=[(q, 0)]) for arm in "xy" for q in "12"]
    assert common(every) == every
    assert not capsys.readouterr().out
    assert [(r.arm, r.questions[0][0]) for r in common(every[:3])] == [("x", "1"), ("y", "1")]
    assert "T=0: 1 of 2 prompts are left out, which are not answered by y 4" in capsys.readouterr().out


def test_a_demo_claims_no_speedup_that_drafting_can_not_bring():
    plain = Stats(passes=8, calls=8, nodes=8, tokens=8, seconds_target=4.0)
    fast = Stats(passes=4, calls=4, nodes=32, tokens=8, seconds_target=2.5)
    assert gain(plain, fast) == "2.00 per pass, 1.60x as fast"
    slow = replace(plain, seconds_target=40.0)
    assert gain(slow, fast) == "2.00 per pass, times not compared: other programs ran beside"
    assert gain(plain, plain) == "nothing was drafted"
