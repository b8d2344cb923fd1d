"""The page in a real Chromium, where there is one: its numbers, its controls, hostile texts, widths and schemes."""

import csv
import io
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import compose_config, refused
from predicted import MOST, Curve, assumed, predict

from selfspec.cli.evaluation_runs import run_decode
from selfspec.cli.reports import run_page
from selfspec.drafters.parts.static_tree import static_tree
from selfspec.page.build import LARGEST_PAGE, PageConfig, _last, acceptance_tables, page_data, write_page
from selfspec.trace import VERSION, Trace, read_traces

PAGE = Path(__file__).parents[1] / "selfspec" / "page"
HOSTILE = [
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "\u202egnp.exe\u202c",
    "\x00\x07\x1b[31m",
    "مرحبا",
    "🧵👩‍🚀",
    "\\xf0\\x9f",
    "a\tb\r\nc",
    '"]};window.hit=1;//',
]


def trace_of(pieces: list[str], drafter: str = "medusa", **told: Any) -> Trace:
    """A trace whose passes keep two tokens each, one drafted and a bonus."""
    header = {"trace": VERSION, "target": "some/folder/tiny", "dtype": "float32", "device": "cpu", "engine": "eager"}
    header |= {"drafter": drafter, "sources": drafter.split("+"), "nodes": 3, "temperature": 1.0, "seed": 0}
    header |= {"top_k": None, "top_p": None, "min_p": None, "lossy": None}
    header |= {"prompts": [[1, 2]], "prompt_texts": [pieces[0]], "seconds_prefill": 0.01, "group": "edit", **told}
    passes = []
    for i in range(0, len(pieces) - 1, 2):
        own = pieces[i : i + 2]
        line = {"pass": i // 2, "row": 0, "position": 1 + i, "tokens": [9, 10 + i, 99], "parents": [-1, 0, 0]}
        line |= {"texts": ["root", own[0], pieces[-1]], "scores": [1.0, 0.6, 0.2], "masks": 0, "path": [0, 1]}
        line |= {"sources": [[], [i // 2 % len(header["sources"])], [0]], "emitted": [10 + i, 11 + i], "pieces": own}
        line["choices"] = [[[10 + i, own[0], 0.7, 1.2], [99, pieces[-1], 0.1, -0.3]], [[11 + i, own[1], 0.4, 0.1]]]
        passes.append(line | {"seconds": {"draft": 0.001, "target": 0.01, "other": 0.001}})
    return Trace(header, passes)


def plain_of(pieces: list[str]) -> Trace:
    fast = trace_of(pieces)
    shared = {"seconds": {"draft": 0.0, "target": 0.009, "other": 0.0}, "row": 0}
    one = [shared | {"pieces": [piece]} for line in fast.passes for piece in line["pieces"]]
    root = {"tokens": [9], "texts": ["x"], "parents": [-1], "path": [0], "emitted": [1], "choices": [], "scores": None}
    whole = [line | root | {"sources": [[]], "masks": 0, "position": i} for i, line in enumerate(one)]
    return Trace(fast.header | {"drafter": "plain", "sources": []}, whole)


def comparison_of(arms: list[str]) -> dict[str, Any]:
    rows = []
    for T in (0.0, 1.0):
        for i, arm in enumerate(arms):
            for nodes in ("8", "auto"):
                ratio = 1 + 0.1 * i - 0.2 * T + 0.01 * len(nodes)
                speedup = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
                part = {"tau": 2 + i, "tau_interval": [1.9 + i, 2.1 + i], "speedup": speedup}
                ms = {"draft": 1.0 + i, "target": 5.0, "other": 0.5}
                rows.append({"T": T, "arm": arm, "nodes": nodes, "prompts": 2, "tokens_per_second": 100.0, **part})
                rows[-1] |= {
                    "limit": ratio + 0.3,
                    "draft_steps": 0.25 * (i + 1),
                    "milliseconds_per_pass": ms,
                    "groups": {"edit": part},
                }
    config = {"name": "c<b>", "engine": "eager", "target": "runs/tiny"}
    return {"rows": rows, "machine": "a <processor>", "command": "python eval/compare.py name=c", "config": config}


def limits_of() -> dict[str, Any]:
    passes = [{"nodes": n, "eager": 0.005 + 0.0001 * n, "compiled": 0.001 + 0.0002 * n} for n in (1, 2, 4, 8, 16)]
    machine = {"bytes": 24e6, "products": 24e6, "bandwidth": 30e9, "peak": 200e9}
    told = {"target": "runs/tiny", "machine": "a <processor>", "command": "selfspec limits", "config": {"name": "l"}}
    return {**told, **machine, "passes": passes, "forecasts": []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Run folders of all three kinds, whose texts are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("t", "l", "c"):
        (folder / name).mkdir()
    pairs = [plain_of(HOSTILE * 4), trace_of(HOSTILE * 4, "medusa+prompt_lookup"), trace_of(HOSTILE * 2)]
    (folder / "t" / "traces.jsonl").write_text("".join(trace.lines() for trace in pairs))
    (folder / "l" / "limits.json").write_text(json.dumps(limits_of()))
    arms = ["medusa", "runs/<i>own", "medusa+prompt_lookup", "prompt_lookup"]
    (folder / "c" / "compare.json").write_text(json.dumps(comparison_of(arms)))
    return folder


@pytest.fixture(scope="module")
def page(runs) -> Path:
    write_page(page_data(PageConfig([str(runs)])), runs / "page.html")
    return runs / "page.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as player:
        browser = player.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, path: Path, width: int = 1200, scheme: str = "light") -> Iterator[Any]:
    """The page, with everything that it complains of or asks the network for in `said`."""
    tab = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on(
        "request",
        lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None,
    )
    tab.goto(path.as_uri())
    tab.said = said
    yield tab
    assert said == []
    tab.context.close()


@pytest.fixture
def tab(chromium, page) -> Iterator[Any]:
    with opened(chromium, page) as tab:
        yield tab


# -- without a browser


def test_from_decode_to_a_page(heads_folder, source_root, tmp_path):
    measured = "decode.prompts=2 decode.prompt_tokens=8 decode.max_new_tokens=8 dtype=float32 tree.nodes=6 logger=none"
    own = [f"drafter={heads_folder}", f"data.root={source_root}", "decode.traces=1", *measured.split()]
    run_decode(compose_config("eval", *own), tmp_path / "point")
    plain, fast, *_ = read_traces(tmp_path / "point" / "traces.jsonl")
    assert plain.header["drafter"] == "plain"
    assert [t.text for t in plain.tokens()] == [t.text for t in fast.tokens()]
    out = tmp_path / "own.html"
    run_page(compose_config("page", f"page.runs=[{tmp_path}]", f"page.out={out}", f"page.data={tmp_path / 'd.json'}"))
    data = json.loads((tmp_path / "d.json").read_text())
    assert data["traces"][0]["header"]["group"] == plain.header["group"]
    assert data["traces"][0]["plain"]["pieces"] == [t.text for t in plain.tokens()]
    assert str(tmp_path) not in out.read_text()


def test_a_folder_with_a_part_gets_a_page_that_names_the_others(runs):
    data = page_data(PageConfig([str(runs / "c")]))
    assert set(data["missing"]) == {"traces", "curves"}
    assert data["missing"]["traces"].startswith("selfspec decode -m ")
    assert page_data(PageConfig([str(runs)]))["missing"] == {}


def test_targets_and_drafters_of_runs_are_named_by_their_runs():
    assert _last("runs/a/target/") == "a/target"
    assert _last("runs/b/drafter+runs/c+prompt_lookup") == "b/drafter+c+prompt_lookup"
    assert _last("/") == "/"


def test_what_another_page_shows_stands_behind_what_the_folders_hold(runs, tmp_path):
    own, saved, path = page_data(PageConfig([str(runs)])), page_data(PageConfig()), tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    for order in ([str(runs), str(path)], [str(path), str(runs)]):
        both = page_data(PageConfig(order))
        for part in ("comparisons", "curves", "traces", "acceptance"):
            assert both[part] == own[part] + saved[part]
    for content in (
        "{",
        "[]",
        '{"version": 9}',
        json.dumps({**saved, "traces": {}}),
        json.dumps({**saved, "curves": [3]}),
    ):
        path.write_text(content)
        refused("is not the data of a page", page_data, PageConfig([str(path)]))


def test_what_comes_with_selfspec_makes_a_page(tmp_path):
    data = page_data(PageConfig())
    assert 0 < write_page(data, tmp_path / "page.html") <= LARGEST_PAGE
    assert data["missing"] == {}
    headers = [trace["header"] for trace in data["traces"]]
    assert all("/" not in header["target"] + header["drafter"] for header in headers)
    arms = {row["arm"] for comparison in data["comparisons"] for row in comparison["rows"]}
    assert {table["drafter"] for table in data["acceptance"]} <= arms
    origins = {(curve["target"], curve["machine"], curve["engine"]) for curve in data["curves"]}
    assert all((c["target"], c["machine"], c["engine"]) in origins for c in data["comparisons"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("traces.jsonl", '{"trace": 99}\n', "a trace of version 99"),
        ("compare.json", "{", "compare.json is no whole measurement"),
        ("compare.json", '{"rows": 3, "config": {}}', "compare.json is no whole measurement"),
        ("limits.json", "[]", "limits.json is no whole measurement"),
        ("other.json", "{}", "in which no run left compare.json, limits.json or traces.jsonl"),
    ],
)
def test_damaged_runs_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    refused(re.escape(message), page_data, PageConfig([str(tmp_path)]))
    refused("there is no such folder", page_data, PageConfig([str(tmp_path / "none")]), error=FileNotFoundError)
    for name in ("out", "data"):
        refused(f"page.{name}=.* is a folder; give the name of a file", PageConfig, **{name: str(tmp_path)})


@pytest.mark.parametrize("settings", [{"runs": []}, {"shown": 0}, {"out": ""}, {"out": "/none/here/page.html"}])
def test_settings_are_checked(settings):
    refused(f"page.{next(iter(settings))}", PageConfig, **settings)


def test_a_page_that_would_be_too_large_is_refused(tmp_path):
    data = page_data(PageConfig()) | {"made_by": "x" * LARGEST_PAGE}
    refused("fewer traces", write_page, data, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_acceptance_is_counted_where_walks_came():
    trace = trace_of([f"{i}" for i in range(40)])
    (whole,) = [table for table in acceptance_tables([trace]) if table["group"] == "all"]
    assert whole["table"] == [[1.0] + [0.0] * 7]  # the first child of the root, always; deeper there are no children
    assert whole["tau"] == 2
    assert acceptance_tables([trace_of(["a", "b", "c"])]) == []  # too few passes to tell
    for line in trace.passes:
        line["masks"] = 6  # beside three nodes
    assert acceptance_tables([trace])[0]["masks"] == 2
    for line in trace.passes:
        line |= {"tokens": [9], "parents": [-1], "path": [0], "emitted": [10], "masks": 0}
    assert acceptance_tables([trace]) == []  # nothing was drafted, so there is nothing to tell


def test_colours_can_be_told_apart_and_read():
    """WCAG contrast of text (4.5) and of marks (3) on both grounds, in both schemes."""
    style = (PAGE / "page.css").read_text()
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(schemes) == 2
    for scheme in schemes:
        for ground in ("ground", "panel"):
            for name, least in {
                "ink": 7,
                "soft": 4.5,
                "accent": 4.5,
                "kept": 4.5,
                "s0": 3,
                "s1": 3,
                "s2": 3,
                "s3": 3,
            }.items():
                a, b = sorted((light(scheme[name]), light(scheme[ground])), reverse=True)
                assert (a + 0.05) / (b + 0.05) >= least, (name, ground)


def test_the_script_is_whole():
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no Node.js, which would read the script")
    for path in PAGE.glob("*.js"):
        subprocess.run([node, "--check", path], check=True)


# -- in Chromium


def test_the_pages_numbers_are_ours(tab):
    """200 random settings: tables, curves (noisy ones too), drafts, nodes, batches, mask rows."""
    made, asked, wanted = Random(0), [], []
    for _ in range(200):
        if made.random() < 0.5:
            first, rest = [made.random() for _ in range(made.randrange(1, 8))], made.random()
            table: list[list[float]] | None = None
            acceptance = assumed(first, rest)
        else:
            first, rest = [], 0.0
            acceptance = table = [
                [made.random() * 0.9**d / (r + 1) for r in range(made.randrange(1, 9))]
                for d in range(made.randrange(1, 7))
            ]
        sizes = sorted({1, *(made.randrange(2, 130) for _ in range(made.randrange(0, 9)))})
        seconds = [0.005 * (1 + 0.03 * n) * (0.7 + 0.6 * made.random()) for n in sizes]
        machine = {"size": 10 ** made.uniform(6, 10), "products": 10 ** made.uniform(6, 10)}
        machine |= {"bandwidth": 10 ** made.uniform(9, 12), "peak": 10 ** made.uniform(10, 14)}
        draft, nodes, rows = (
            made.choice([0.0, 3 * made.random()]),
            made.randrange(1, MOST + 1),
            made.choice([1, 1, 3, 64]),
        )
        masks, curve = made.choice([0.0, made.random()]), Curve(sizes, seconds, **machine)
        asked.append([table, first, rest, asdict(curve), draft, nodes, rows, masks])
        lengths = list(itertools.accumulate(static_tree(acceptance, MOST)[2]))
        wanted.append(predict(lengths, curve, draft, nodes, rows, masks))
    found = tab.evaluate(
        "asked => asked.map(([table, first, rest, ...more]) => predict(table ?? assumed(first, rest), ...more))", asked
    )
    for ours, theirs in zip(wanted, found, strict=True):
        assert {key: theirs[key] for key in ours} == pytest.approx(ours, rel=1e-9, abs=1e-12)
    assert len({ours["best"] for ours in wanted}) > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_every_width_and_scheme(chromium, page, width, scheme):
    with opened(chromium, page, width, scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert dark == (scheme == "dark")
        assert tab.locator("#predict-chart svg").count() == tab.locator("#compare-chart svg").count() == 1


def test_hostile_texts_are_text(tab):
    tab.click("#last")
    for stage in range(6):
        tab.locator("#stages button").nth(stage).click()
    text = tab.text_content("#fast")
    assert "</script><script>window.hit=1</script>" in text
    assert "<img src=x onerror=window.hit=1>" in text
    assert "\\u202egnp.exe\\u202c" in text
    assert "\\u0000\\u0007\\u001b[31m" in text
    assert all(piece in text for piece in ("مرحبا", "🧵", "\\xf0\\x9f"))
    assert tab.evaluate("window.hit") is None
    assert tab.locator("img, main i, main b, main script").count() == 0
    assert tab.evaluate("document.querySelectorAll('script').length") == 2


def test_steps_show_what_a_pass_did(tab):
    tab.select_option("#trace", "1")
    tab.click("#first")
    assert "Pass 1" in tab.text_content("#told")
    shown = []
    for _ in range(6):
        shown.append((tab.text_content("#told"), tab.inner_html("#stage")))
        tab.click("#forward")
    assert len(set(shown)) == 6
    assert tab.input_value("#pass") == "2"
    assert "2 tokens are written" in tab.text_content("#told")
    assert tab.locator("#fast .piece").count() == 2
    tab.click("#back")
    assert tab.input_value("#pass") == "1"
    assert tab.locator("#stage tbody tr").count() == 2
    assert "bonus token" in tab.text_content("#stage")
    tab.fill("#pass", "3")
    tab.press("#pass", "Enter")
    assert tab.input_value("#pass") == "3"
    tab.click("#last")
    assert tab.locator("#fast .piece").count() == int(tab.text_content("#fast-count").split(" of ")[1].split()[0])


def test_the_race_runs_on_the_measured_clock(tab):
    tab.select_option("#trace", "0")
    assert tab.locator("#trace option").count() == 2
    tab.evaluate("at('time').value = 0.0225; at('time').dispatchEvent(new Event('input'))")
    assert tab.locator("#fast .piece").count() == 2  # 10 ms of prompt, 12 of a pass
    assert tab.locator("#plain .piece").count() == 1  # 10 and 9
    tab.hover("#fast .piece >> nth=0")
    assert "drafted by medusa at depth 1, path probability 60%; the model gave it 70%; pass 1" in tab.text_content(
        "#token"
    )
    tab.hover("#fast .piece >> nth=1")
    assert "bonus token" in tab.text_content("#token")
    before = float(tab.input_value("#time"))
    tab.select_option("#speed", "1")
    tab.click("#play")
    assert tab.get_attribute("#play", "aria-pressed") == "true"
    tab.wait_for_selector("#play[aria-pressed=false]")  # at the end
    assert float(tab.input_value("#time")) > before
    assert tab.text_content("#plain-count") == "36 of 36 tokens"


def test_every_control_of_the_prediction_moves_it(tab):
    def seen() -> str:
        return str(tab.text_content("#figures")) + str(tab.text_content("#answer"))

    def move(selector: str, value: object) -> None:
        tab.evaluate(
            "([s, v]) => { const e = document.querySelector(s); e.value = v; e.dispatchEvent(new Event('input')) }",
            [selector, value],
        )

    tab.select_option("#table", label="medusa+prompt_lookup, T=1, all texts")
    tab.select_option("#curve", "1")  # compiled: the comparison is eager
    assert "Not measured for this drafter" in tab.text_content("#draft-note")
    tab.select_option("#curve", "0")
    tab.select_option("#table", label="medusa, T=1, all texts")
    assert "Measured for this drafter on this machine, with 8 nodes" in tab.text_content("#draft-note")
    assert tab.input_value("#draft-number") == "0.25"
    firsts = "[...document.querySelectorAll('#depths input')].map((e) => Number(e.value))"
    measured = tab.evaluate(firsts)
    tab.select_option("#table", "typed")  # goes on from what was measured
    before = seen()
    tab.select_option("#curve", "typed")
    assert seen() != before
    assert tab.evaluate(firsts) == [*measured, *[0] * (6 - len(measured))]
    assert "extrapolated" not in tab.text_content("#answer")
    move("#rows", 60)  # with 8 nodes each more than the 64 rows that were typed in
    assert "480 rows is wider than any that was measured (64)" in tab.text_content("#answer")
    moves = {
        "#depths input": 0.11,
        "#nodes": 3,
        "#rows": 7,
        "#rest": 0.9,
        "#draft": 1.1,
        "#draft-number": 0.05,
        "#costs input": 4,
    }
    for selector, value in moves.items():
        before = seen()
        move(selector, value)
        assert seen() != before, selector
    move("#draft-number", "")
    assert "costs 0 plain steps or more" in tab.text_content("#answer")
    move("#know-tau", 2.5)
    move("#know-draft", 0.5)
    move("#know-cost", 1.2)
    assert tab.text_content("#know") == (
        "1.47x: it pays. It pays while a pass costs below 2.00 steps, "
        "or with this pass, while a draft costs below 1.30."
    )
    move("#know-tau", 0.5)
    assert "τ is at least 1" in tab.text_content("#know")


def test_every_control_of_the_comparison_moves_it(tab):
    def rows() -> list[list[str]]:
        return [row.split("\t") for row in tab.locator("#rows-table tbody tr").all_inner_texts()]

    assert [float(row[3]) for row in rows()] == [1.31, 1.21, 1.11, 1.01]
    assert rows()[1][:2] == ["medusa+prompt_lookup", "8"]
    for select, value in {
        "temperature": "1",
        "size": "every size",
        "group": "edit",
        "measure": "tau",
        "sort": "name",
    }.items():
        before = tab.inner_text("#rows-table")
        tab.select_option(f"#{select}", value)
        assert tab.inner_text("#rows-table") != before, select
    assert len(rows()) == 8
    tab.locator("summary").click()
    tab.uncheck("#arms input >> nth=0")
    assert len(rows()) == 6
    tab.click("#rows-table th button >> nth=3")
    ordered = [float(row[3]) for row in rows()]
    assert ordered == sorted(ordered, reverse=True)
    assert tab.get_attribute("#rows-table th >> nth=3", "aria-sort") == "descending"
    tab.click("#rows-table th button >> nth=3")
    assert [float(row[3]) for row in rows()] == ordered[::-1]
    with tab.expect_download() as download:
        tab.click("#csv")
    read = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    assert [row[3] for row in read[1:]] == [row[0] for row in rows()]
    assert [f"{float(row[6]):.2f}" for row in read[1:]] == [row[3] for row in rows()]
    tab.select_option("#measure", "time")
    assert "costs are of all texts together" in tab.text_content("#compare-chart")
    assert tab.is_disabled("#csv")
    assert not tab.is_visible("#rows-table")
    tab.select_option("#group", "all texts")
    assert tab.locator("#compare-chart rect").count() >= 18
    assert tab.text_content("#command") == "python eval/compare.py name=c"
    assert "a <processor>" in tab.text_content("#machine")


def test_a_stall_of_the_machine_is_told(tab):
    """Plain decoding beside itself is 1.0, or what stands beside it means nothing."""
    assert "Doubtful" not in tab.text_content("#compare-told")
    for ratio, doubtful in ((1.04, False), (2.59, True), (0.8, True)):
        plain = {"arm": "plain", "T": 0, "nodes": "-", "prompts": 2, "tau": 1, "groups": {}}
        plain["speedup"] = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
        tab.evaluate("row => { DATA.comparisons[0].rows.unshift(row); showCompare(); }", plain)
        assert (
            f"Doubtful: two runs of plain decoding of the same texts differ by a factor of {ratio:.2f}"
            in tab.text_content("#compare-told")
        ) == doubtful
        tab.evaluate("DATA.comparisons[0].rows.shift()")


def test_the_keyboard_reaches_everything(tab):
    wanted = tab.evaluate(
        "[...document.querySelectorAll('main button, main select, main input:not([disabled]), main summary')]"
        ".filter(e => e.checkVisibility()).map(e => e.id || e.outerHTML)"
    )
    seen = []
    for _ in range(len(wanted) + 40):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.outerHTML"))
    assert set(wanted) <= set(seen)
    tab.focus("#forward")
    before = tab.text_content("#told")
    tab.keyboard.press("ArrowRight")
    assert tab.text_content("#told") != before
    tab.keyboard.press("ArrowLeft")
    assert tab.text_content("#told") == before


def test_a_screen_reader_is_told_what_is_there(tab):
    """Every control has a name, every picture a description, every table its heads."""
    for stage in range(6):
        tab.locator("#stages button").nth(stage).click()
        nameless = tab.evaluate(
            "[...document.querySelectorAll('button, select, input, svg[role], [role=region]')].filter(e => !("
            "e.getAttribute('aria-label') || e.labels?.length || (e.tagName === 'BUTTON' && e.textContent.trim())))"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []
        assert tab.locator("table:not(:has(th[scope=col]))").count() == 0
    assert (
        tab.get_attribute("#predict-chart svg", "aria-label") or tab.locator("#predict-chart svg[aria-label]").count()
    )
    assert tab.evaluate("document.documentElement.lang") == "en"
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_missing_parts_are_named_with_their_command(chromium, runs, tmp_path):
    write_page(page_data(PageConfig([str(runs / "l")])), tmp_path / "page.html")
    with opened(chromium, tmp_path / "page.html") as tab:
        for section, command in (("explain", "selfspec decode"), ("compare", "selfspec compare")):
            assert command in tab.text_content(f"#{section} .missing")
            assert not tab.is_visible(f"#{section} .body")
        assert tab.is_visible("#predict-chart svg >> nth=0")


def test_the_page_opens_at_once(chromium, tmp_path):
    write_page(page_data(PageConfig()), tmp_path / "page.html")
    with opened(chromium, tmp_path / "page.html") as tab:
        took = tab.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
        assert took < 10_000, f"{took} ms"  # what it takes is measured elsewhere; here, that nothing hangs
