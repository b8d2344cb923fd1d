"""The files a benchmark leaves behind, and reading them again; answer files in Spec-Bench's form
(github.com/hemingkx/Spec-Bench), one per arm: what its evaluation/speed.py and equal.py read."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from selfspec.api import Spec
from selfspec.data.questions import Question
from selfspec.evaluation.figures import PARTS, grouped
from selfspec.evaluation.records import RECORDS, Record, lines_of
from selfspec.evaluation.tables import table
from selfspec.utils.errors import visible
from selfspec.utils.files import ORIGIN, Figures, mean, read_json, write_text
from selfspec.utils.tracking import flat

OWN = (RECORDS, ORIGIN, "summary.json", "figures.jsonl", "config.yaml")  # files of a benchmark's run folder


def write_point(folder: Path, point: Figures, records: list[Record]) -> None:
    """records.jsonl and summary.json in `folder`, the summary last and whole."""
    write_text(folder / RECORDS, lines_of(records))
    write_text(folder / "summary.json", json.dumps(point, indent=1) + "\n")


def finished_point(path: Path) -> Figures | None:
    """The point in a summary.json; None where there is none that is whole, which the records beside it make anew."""
    with suppress(ValueError, OSError):
        point: Figures = read_json(path)
        return point if _whole(point) else None
    return None


def read_points(folder: Path) -> tuple[list[Figures], list[tuple[Path, str]]]:
    """The points of all runs below `folder`, in the order of their folders, and the runs that are broken: their
    folders, and why."""
    marks = ("summary.json", RECORDS, "figures.jsonl", "error.txt", ".lock")
    below = {p for p in folder.rglob("*") if p.is_dir() and any((p / mark).exists() for mark in marks)}
    below |= {folder} if (folder / "summary.json").exists() else set()
    run_folders = {p.resolve(): p for p in sorted(below, key=Path.is_symlink, reverse=True)}.values()  # each once
    points, broken = [], []
    for home in sorted(run_folders, key=lambda p: [(len(part), part) for part in p.parts]):
        try:
            point = read_json(home / "summary.json")
            wrong = not _whole(point)
        except FileNotFoundError:
            why, failed = "summary.json is missing: the run did not end", home / "error.txt"
            if failed.exists():
                why = failed.read_text(errors="replace").strip()
            if any((home / name).exists() for name in _OTHERS):
                why = "it is no measurement of eval/decode.py"
            broken.append((home, why))
        except (ValueError, OSError) as error:
            broken.append((home, f"summary.json is not whole ({error})"))
        else:
            if wrong:
                broken.append((home, "summary.json holds no point of eval/decode.py"))
            else:
                points.append(point)
    labelled(points)
    return points, broken


_UNTOLD = ("name", "logger", "wandb", "trust_code", "data/root", "decode/answers")  # keys that no label names


def varying(points: Sequence[Figures]) -> list[str]:
    """The keys of their configs in which points differ, joined by `/`."""
    configs = [leaves_of(point) for point in points]
    keys = [key for config in configs for key in config]
    return [key for key in dict.fromkeys(keys) if len({str(config.get(key)) for config in configs}) > 1]


def labelled(points: Sequence[Figures], keys: Sequence[str] | None = None) -> None:
    """Give every point the `label` that tells it from the others: what differs between them (or `keys`), in few words;
    the drafter where nothing does. `runs/a`, 8 nodes -> `a nodes=8`."""
    keys = varying(points) if keys is None else keys
    last = [key.rsplit("/", 1)[-1] for key in keys]
    named = {
        key: name if last.count(name) == 1 else key.replace("/", ".") for key, name in zip(keys, last, strict=True)
    }
    configs = [leaves_of(point) for point in points]
    shown = {key: _shown(key, [config.get(key) for config in configs]) for key in named}
    for i, (point, config) in enumerate(zip(points, configs, strict=True)):
        values = {key: values_of[i] for key, values_of in shown.items()}
        parts = [values[key] if key in ("drafter", "target") else f"{named[key]}={values[key]}" for key in named]
        point["label"] = visible(" ".join(parts) or shortened("drafter", config.get("drafter")))


def leaves_of(point: Figures) -> Figures:
    """A point's config without nesting; a list is one value."""
    leaves: Figures = {}
    for key, value in flat(point["config"]):
        head, _, number = key.rpartition("/")
        if number.isdigit():
            leaves[head] = f"{leaves[head]},{value}" if head in leaves else str(value)
        else:
            leaves[key] = value
    return {key: value for key, value in leaves.items() if not any(f"{key}/".startswith(f"{u}/") for u in _UNTOLD)}


def _shown(key: str, values: Sequence[Any]) -> list[str]:
    """Values in few characters; as they are, where that would make different ones alike."""
    short = [shortened(key, value) for value in values]
    clear = len(set(short)) == len({str(value) for value in values})
    return short if clear else [str(value) for value in values]


def shortened(key: str, value: Any) -> str:
    """A value in few characters: of paths the last part."""
    if isinstance(value, str) and key == "drafter":
        return "+".join(name.rstrip("/").rsplit("/", 1)[-1] for name in value.split("+"))
    if isinstance(value, str):
        return value.rstrip("/").rsplit("/", 1)[-1] if "," not in value else value
    return f"{value:g}" if isinstance(value, float) else str({None: "null"}.get(value, value))


def _whole(point: Any) -> bool:
    """Whether this is what `write_point` wrote, as far as tables and plots read it."""
    try:
        ratios = [part[key] for part in point["speedup"].values() for key in ("ratio", "low", "high")]
        known = point["identical"], point["config"]["tree"]["nodes"]
        figures = point.get("speculative", dict.fromkeys(_OURS, ()))
        parts = [point["arms"], point.get("groups", {}), *point.get("columns", {}).values()]
        return (
            None not in known
            and [type(value) for value in parts] == [dict, dict, *[str] * (len(parts) - 2)]
            and figures.keys() >= _OURS
            and all(type(r) in (int, float) and not math.isinf(r) for r in ratios)
            and ("speculative" not in point or figures["share_of_step"].keys() >= set(PARTS))
            and isinstance(point["config"].get("decode", {}).get("columns", []), list)
            and all("tokens_per_second" in figures and "right" in figures for figures in point["arms"].values())
            and all({"rows", "of"} <= counts.keys() for counts in point["identical"].values())
            and bool(table([_row(point, _label({**point, "label": ""}), "")]))
        )
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError, IndexError):
        return False


# What other commands leave in their folders
_OTHERS = ("train.jsonl", "audit.json", "calibration.json", "compare.json", "limits.json", "distill")
# Figures of the speculative arm that tables and plots read
_OURS = {"full_acceptance", "conditional_acceptance", "milliseconds_per_pass", "share_of_step", "acceptance_length"}


# -- as rows of figures, which tables and plots take


def rows_of(points: Sequence[Figures]) -> list[Figures]:
    """Labelled points as rows, as those of a comparison are; what was not measured has no key. line: the label
    without nodes; points that share it form one line of a plot."""
    lines = [dict(point) for point in points]
    drafted = [point for point in points if "speculative" in point]
    labelled(lines, [key for key in varying(drafted) if key != "tree/nodes"])
    marks = [f", LOSSY {point['config']['decode']['lossy']}" if "lossy" in point else "" for point in points]
    names = [line["label"] + mark for line, mark in zip(lines, marks, strict=True)]
    return [_row(point, _label(point), name) for point, name in zip(points, names, strict=True)]


def _row(point: Figures, label: str, line: str) -> Figures:
    fast, same = point.get("speculative", {}), point["identical"].get("autoregressive", {})
    row: Figures = {"label": label, "line": line, "nodes": str(point["config"]["tree"]["nodes"])}
    row |= _renamed(point, drift="drift", columns="columns") | _arms(point["arms"])
    row |= _renamed(point["speedup"], autoregressive="speedup", hf_generate="over_hf")
    row |= _renamed(same, rows="same", of="prompts") | _renamed(fast, acceptance_length="tau")
    row |= {key: fast[key] for key in _AS_THEY_STAND if key in fast}
    if "share_of_step" in fast:
        parts = fast["share_of_step"].items()
        row["milliseconds_per_pass"] = {part: fast["milliseconds_per_pass"] * share for part, share in parts}
    if (expected := fast.get("forecast")) and expected["passes"]:
        row |= {"mean_nodes": mean(expected["nodes"], expected["passes"]), **_renamed(expected, speedup="predicted")}
    return row | {"groups": {group: _group(figures) for group, figures in point.get("groups", {}).items()}}


_AS_THEY_STAND = ("full_acceptance", "conditional_acceptance", "cost", "decode", "host_overhead")


def _group(figures: Figures) -> Figures:
    return _arms(figures["arms"]) | _renamed(figures, acceptance_length="tau", speedup="speedup")


def _arms(arms: Figures) -> Figures:
    """Speed and right answers of plain and speculative decoding, and what the plain text is like."""
    plain, fast = arms.get("autoregressive", {}), arms.get("speculative", {})
    answers = _renamed(plain, right="right", of="of") | _renamed(fast, right="right", of="of")
    rate, text = "tokens_per_second", plain or fast
    rates = _renamed(plain, **{rate: f"plain_{rate}"}) | _renamed(fast, **{rate: rate})
    regime = {key: text[key] for key in ("entropy", "top1", "distinct_4grams") if key in text}
    return {"of": 0, **answers, **_renamed(plain, right="plain_right"), **rates, **regime}


def _renamed(figures: Figures, **names: str) -> Figures:
    """Figures under other names, those that are there."""
    return {name: figures[key] for key, name in names.items() if key in figures}


def regimes_of(points: Sequence[Figures]) -> list[Figures]:
    """What the text of plain decoding is like, by point and group."""
    rows = [
        {"label": point["label"], "group": group, **figures["arms"].get("autoregressive", {})}
        for point in points
        for group, figures in point.get("groups", {}).items()
    ]
    return [row for row in rows if "entropy" in row]


def _label(point: Figures) -> str:
    if (lossy := point.get("lossy")) is None:
        return str(point["label"])
    rule, exact = point["config"]["decode"]["lossy"], lossy.get("log_prob_autoregressive")
    beside = "" if exact is None else f" (exact {exact:.2f})"
    altered = f"{100 * lossy['altered']:.1f}% of tokens altered"
    return f"{point['label']}, LOSSY {rule}: {altered}, log p per token {lossy['log_prob_speculative']:.2f}{beside}"


# -- answer files


def answer_files(folder: Path, name: str, arms: Sequence[str], again: bool = False) -> dict[str, Path]:
    """The file of each arm, in folders that exist then: the speculative one's is `name`, relative to the run's folder,
    any other's has the arm's name behind the stem. again: they may be this run's own. Raises ValueError where one
    exists or can not be written."""
    path = folder / name
    if not name or name.endswith("/") or path.is_dir():
        raise ValueError(f"decode.answers={name!r} must name a file, such as answers.jsonl")
    names = {arm: path if arm == "speculative" else path.with_name(f"{path.stem}-{arm}{path.suffix}") for arm in arms}
    for file in names.values():
        if file.parent.resolve() == folder.resolve() and file.name in OWN:
            raise ValueError(f"decode.answers={name}: the run writes its own {file.name}; choose another name")
        if file.exists() and not again:
            raise ValueError(f"decode.answers: {file} exists; choose another file, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} can not be written to")
    except OSError as error:
        raise ValueError(f"decode.answers={name}: {error}; choose another folder") from error
    return names


def check_ids(questions: Sequence[Question]) -> None:
    """Raises ValueError for two questions of one id, which an answer file can not tell apart."""
    ids = [_id(question) for question in questions]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise ValueError(
            f"decode.answers: two questions have the id {twice!r}; give each line a question_id of its own"
        )


def _id(question: Question) -> Any:
    return (question.record or {}).get("question_id", question.id)


def write_answers(
    files: dict[str, Path], questions: Sequence[Question], records: list[Record], spec: Spec, model_id: str
) -> None:
    """One line per question with all its turns, in the order of the questions, into the file of each arm. Questions of
    which a turn was not asked are left out. Every record holds one row."""
    for arm, rows in grouped(records, attrgetter("arm")).items():
        by_question = {record.questions[0]: record for record in rows}
        lines = []
        for question in questions:
            turns = [by_question.get((question.id, turn)) for turn in range(question.asks)]
            answered = [turn for turn in turns if turn is not None]
            if len(answered) == len(turns):
                lines.append(json.dumps(_line(question, answered, spec, f"{model_id}-{arm}")) + "\n")
        write_text(files[arm], "".join(lines))


def _line(question: Question, turns: list[Record], spec: Spec, model_id: str) -> Figures:
    lengths = [turn.stats.lengths or [1] * turn.tokens for turn in turns]
    choice = {
        "index": 0,
        "turns": [str(spec.tokenizer.decode(t.token_ids[0], skip_special_tokens=True)) for t in turns],  # type: ignore[union-attr]
        "decoding_steps": [len(passes) for passes in lengths],
        "new_tokens": [turn.tokens for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for passes in lengths for length in passes],
    }
    return {
        "question_id": _id(question),
        "category": question.group,
        "answer_id": f"{zlib.crc32(f'{model_id} {question.id}'.encode()):08x}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }
