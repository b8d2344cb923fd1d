"""The page: comparisons, costs of passes and traces of runs in one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec import __version__
from selfspec.trace import Trace, read_traces
from selfspec.utils.checks import at_least, not_empty
from selfspec.utils.files import Figures, null_for_nan, read_json, write_text

VERSION = 1  # of the page's data
LARGEST_PAGE = 3_000_000  # bytes
_FOLDER = Path(__file__).parent
_STYLE, _DATA = "page.css", "embedded.json"
_CHARTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
_SCRIPTS = (*_CHARTS, "model.js", "common.js", "explain.js", "predict.js", "compare.js", "page.js")
_PARTS = ("comparisons", "curves", "traces", "acceptance")
_CALL = ("target", "dtype", "device", "engine", "prompts", "temperature", "top_k", "top_p", "min_p", "seed")
_DEPTHS, _RANKS = 16, 8  # of a table of acceptance
_FEWEST = 8  # visits of a node's children before their share is shown
COMMANDS = {
    "traces": "selfspec decode -m name=traces drafter=runs/mine decode.temperature=0,1 decode.traces=4",
    "curves": "selfspec limits name=limits target=TARGET limits.drafters=[]",
    "comparisons": "selfspec compare name=compare target=TARGET compare.drafters=[runs/mine,prompt_lookup]",
}


@dataclass
class PageConfig:
    """runs: folders with runs of decode (with decode.traces), limits and compare, however deep, and files that an
    earlier page wrote as its data (null: the results that come with selfspec); out: the file to write; shown: traces of
    the folders that can be replayed, at most; data: a file for what the page shows, as JSON."""

    runs: list[str] | None = None
    out: str = "page.html"
    shown: int = 16
    data: str | None = None

    def __post_init__(self) -> None:
        not_empty(self, "page", "runs", give="give run folders, or null for the results that come with selfspec")
        at_least(self, "page", 1, "shown")
        for name in ("out", "data"):
            if (path := getattr(self, name)) is not None and (not path or not Path(path).resolve().parent.is_dir()):
                raise ValueError(f"page.{name}={path}: there is no folder for it; make it")
            if path is not None and Path(path).is_dir():
                raise ValueError(f"page.{name}={path} is a folder; give the name of a file")


def page_data(config: PageConfig) -> Figures:
    """What the page shows. Raises FileNotFoundError for a folder that is missing and ValueError for one with nothing
    to show, or with a damaged file. What other pages show stands behind what the folders hold; comparisons and costs of
    a folder replace theirs of the same name and target."""
    if config.runs is None:
        saved: Figures = json.loads((_FOLDER / _DATA).read_text(encoding="utf-8"))
        return saved
    data: Figures = {"version": VERSION, "made_by": f"selfspec {__version__}", "missing": {}}
    data |= {name: [] for name in _PARTS}
    traces: list[Trace] = []
    others = [_saved(Path(run)) for run in config.runs if Path(run).is_file()]
    for run in config.runs:
        if Path(run).is_file():
            continue
        if not Path(run).is_dir():
            raise FileNotFoundError(f"page.runs holds {run!r}: there is no such folder")
        names = "compare.json", "limits.json", "traces.jsonl"
        paths = [path for name in names for path in sorted(Path(run).rglob(name)) if path.is_file()]
        if not paths:
            raise ValueError(
                f"page.runs holds {run!r}, in which no run left compare.json, limits.json or traces.jsonl; "
                f"{COMMANDS['traces']} makes traces"
            )
        for path in paths:
            if path.name == "traces.jsonl":
                traces += read_traces(path)
                continue
            try:
                figures = read_json(path)
                if path.name == "compare.json":
                    data["comparisons"].append(_comparison(figures))
                else:
                    data["curves"] += _curves(figures)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is no whole measurement ({error!r}); make it anew") from error
    pairs = _pairs(traces)
    data["traces"] = [_shown(plain, fast) for plain, fast in _spread(pairs, config.shown)]
    data["acceptance"] = acceptance_tables([fast for _, fast in pairs])
    for name in _PARTS:
        measured = {(part["name"], part["target"]) for part in data[name] if "name" in part}
        parts = [part for other in others for part in other[name]]
        data[name] += [part for part in parts if (part.get("name"), part.get("target")) not in measured]
    data["missing"] = {name: command for name, command in COMMANDS.items() if not data[name]}
    return data


def write_page(data: Figures, path: Path) -> int:
    """Write the page; returns its bytes. Raises ValueError for one that is too large."""
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = (_FOLDER / _STYLE).read_text(encoding="utf-8")
    # No text of a trace may end the element that holds it.
    data_text = json.dumps(null_for_nan(data), ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    for mark, content in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ('"DATA"', data_text)):
        before, _, after = text.partition(mark)
        text = before + content + after
    size = len(text.encode())
    if size > LARGEST_PAGE:
        raise ValueError(f"the page would have {size} bytes, more than {LARGEST_PAGE}; give page.shown fewer traces")
    write_text(path, text)
    return size


def _saved(path: Path) -> Figures:
    """What another page shows. Raises ValueError for a file that is no page's data."""
    try:
        found: Figures = read_json(path)
        if found["version"] != VERSION or not all(isinstance(found[name], list) for name in _PARTS):
            raise ValueError(f"version {found['version']!r}")
        if odd := [part for name in _PARTS for part in found[name] if not isinstance(part, dict) or not part]:
            raise ValueError(f"it holds {odd[0]!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"page.runs holds {str(path)!r}, which is not the data of a page ({error!r}); page.data=FILE writes one"
        ) from error
    return found


def _last(name: str) -> str:
    """A target or drafter without the folders around it; the one of a run by the run's name."""
    names = ([part for part in each.split("/") if part] or [each] for each in name.split("+"))
    return "+".join("/".join(parts[-2:] if parts[-1] in ("target", "drafter") else parts[-1:]) for parts in names)


def _target(name: str) -> str:
    """As it is loaded: the folder of a packaged target has the package's version behind its name."""
    return re.sub(r"^(smollm2)-[0-9.]+$", r"\1", _last(name))


def _comparison(figures: Figures) -> Figures:
    config = figures["config"]
    columns = ["T", "arm", "nodes", "prompts", "tau", "tau_interval", "speedup", "limit", "same"]
    columns += ["milliseconds_per_pass", "draft_steps"]
    rows = []
    for row in figures["rows"]:
        groups = {
            group: {key: part[key] for key in ("prompts", "tau", "tau_interval", "speedup") if key in part}
            for group, part in row["groups"].items()
        }
        rows.append({key: row[key] for key in columns if key in row} | {"arm": _last(row["arm"]), "groups": groups})
    header = {"name": config["name"], "engine": config["engine"], "target": _target(config["target"])}
    return header | {"machine": figures.get("machine", ""), "command": figures.get("command", ""), "rows": rows}


def _curves(figures: Figures) -> list[Figures]:
    config, curves = figures["config"], list[Figures]()
    header = {"target": _target(figures["target"]), "machine": figures.get("machine", "")}
    header |= {"command": figures.get("command", ""), "name": config["name"]}
    machine = {"size": figures["bytes"]} | {key: figures[key] for key in ("products", "bandwidth", "peak")}
    for engine in ("eager", "compiled"):
        passes = sorted(figures["passes"], key=lambda row: row["nodes"])
        curve = {"sizes": [row["nodes"] for row in passes], "seconds": [row[engine] for row in passes]}
        curves.append({**header, "engine": engine, **curve, **machine})
    return curves


def _pairs(traces: Iterable[Trace]) -> list[tuple[Trace | None, Trace]]:
    """Exact speculative calls, each with the plain decoding of the same prompt where there is one. Lossy ones are left
    out: the page says that the text is unchanged."""
    plain: dict[str, Trace] = {}
    pairs = []
    for trace in traces:
        key = json.dumps([trace.header[name] for name in _CALL])
        if trace.header["drafter"] == "plain":
            plain[key] = trace
        elif trace.passes and trace.header["lossy"] is None:
            pairs.append((plain.get(key), trace))
    return pairs


def _spread(pairs: Sequence[tuple[Trace | None, Trace]], count: int) -> list[tuple[Trace | None, Trace]]:
    """So many of them, of every drafter, temperature and group before a second one of any."""
    kinds: dict[tuple[object, ...], list[tuple[Trace | None, Trace]]] = {}
    for pair in pairs:
        header = pair[1].header
        kinds.setdefault((header["drafter"], header["temperature"], header.get("group")), []).append(pair)
    # Groups in turn, so that few traces are not all of one.
    order: list[tuple[Trace | None, Trace]] = []
    turn = 0
    while len(order) < len(pairs):
        drafters = dict.fromkeys((kind[0], kind[1]) for kind in kinds)
        for at, drafter in enumerate(drafters):
            groups = [kind for kind in kinds if kind[:2] == drafter and kinds[kind]]
            if groups:
                order.append(kinds[groups[(turn + at) % len(groups)]].pop(0))
        turn += 1
    return order[:count]


def _shown(plain: Trace | None, fast: Trace) -> Figures:
    """A trace with every text of a token once."""
    header = {key: value for key, value in fast.header.items() if key not in ("trace", "prompts")}
    header |= {"target": _target(header["target"]), "drafter": _last(header["drafter"])}
    header["sources"] = [_last(name) for name in header["sources"]]
    passes = [line for line in fast.passes if line["row"] == 0]
    texts: dict[int, str] = {}
    lines = []
    for line in passes:
        texts |= dict(zip(line["tokens"], line["texts"], strict=True))
        texts |= {choice[0]: choice[1] for choices in line["choices"] for choice in choices}
        shown = {key: value for key, value in line.items() if key not in ("texts", "row", "pass")}
        lines.append(shown | {"choices": [[[c[0], c[2], c[3]] for c in choices] for choices in line["choices"]]})
    beside = None
    if plain is not None:
        plain_passes = [line for line in plain.passes if line["row"] == 0]
        pieces = [piece for line in plain_passes for piece in line["pieces"]]
        seconds = [round(sum(line["seconds"].values()), 6) for line in plain_passes]
        beside = {"pieces": pieces, "seconds": seconds, "seconds_prefill": plain.header["seconds_prefill"]}
    return {"header": header, "texts": texts, "passes": lines, "plain": beside}


def acceptance_tables(traces: Sequence[Trace]) -> list[Figures]:
    """Acceptance by depth and rank of each target, drafter, temperature and group of text, and of all groups together,
    counted in the nodes that walks came to: how often the child of that rank (in the tree's order) was the pick. A walk
    that comes to a node without children counts only at the root: further down the budget may have ended there.
    masks: mask rows in a pass for each node, where there are any. A drafter that drafted nothing has no table."""
    kinds: dict[tuple[str, str, float, str, str], list[Trace]] = {}
    names = Counter(_last(name) for name in {trace.header["drafter"] for trace in traces})
    for trace in traces:
        header, name = trace.header, trace.header["drafter"]
        name = _last(name) if names[_last(name)] == 1 else name  # several runs may be called alike
        how = str([header.get(key) for key in ("nodes", "top_k", "top_p", "min_p", "dtype")])
        for group in dict.fromkeys(("all", str(header.get("group", "all")))):
            kinds.setdefault((_target(header["target"]), name, header["temperature"], group, how), []).append(trace)
    tables = []
    for (target, drafter, temperature, group, _), traces_of in kinds.items():
        visits = [0] * _DEPTHS
        right = [[0] * _RANKS for _ in range(_DEPTHS)]
        passes = tokens = 0
        for line in (line for trace in traces_of for line in trace.passes if not _undrafted(trace, line)):
            passes, tokens = passes + 1, tokens + len(line["emitted"])
            for depth, (node, token) in enumerate(zip(line["path"], line["emitted"], strict=False)):
                children = [n for n, parent in enumerate(line["parents"]) if parent == node and n]
                if depth >= _DEPTHS or not (children or depth == 0):
                    break
                visits[depth] += 1
                drafted = [line["tokens"][n] for n in children]
                if token in drafted[:_RANKS]:
                    right[depth][drafted.index(token)] += 1
        table = [
            [count / seen for count in counts] for counts, seen in zip(right, visits, strict=True) if seen >= _FEWEST
        ]
        lines = [line for trace in traces_of for line in trace.passes]
        counted = sum(len(line["tokens"]) for line in lines)
        if table and counted > len(lines):
            labels = {"target": target, "drafter": drafter, "T": temperature, "group": group, "table": table}
            labels |= {"masks": masks / counted} if (masks := sum(line["masks"] for line in lines)) else {}
            nodes = max(len(line["tokens"]) for line in lines)
            tables.append(labels | {"passes": passes, "tau": tokens / passes, "nodes": nodes})
    return tables


def _undrafted(trace: Trace, line: Figures) -> bool:
    """Whether `auto` left the drafter alone in a pass."""
    return trace.header["nodes"] == "auto" and len(line["tokens"]) == 1
