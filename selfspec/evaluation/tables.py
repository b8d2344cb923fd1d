"""Tables of benchmark points, and the files a benchmark leaves behind."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec.evaluation.audit import Audit, LawTest, law_verdict
from selfspec.evaluation.runs import Record

_COLUMNS = (
    "point",
    "tau",
    "full acceptance by depth",
    "tok/s plain",
    "tok/s spec",
    "vs autoregressive",
    "vs hf_generate",
    "predicted / measured",
    "pass cost",
    "draft/target/other",
    "bookkeeping",
    "identical",
    "distinct 4-grams",
)


def table(points: list[dict[str, Any]]) -> str:
    """A Markdown table, one row a point. Pass cost: plain steps that one pass takes, its draft included."""
    rows = [_row(point) for point in points]
    widths = [max(len(column), *(len(row[i]) for row in rows)) for i, column in enumerate(_COLUMNS)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    head = "| " + " | ".join(c.ljust(w) for c, w in zip(_COLUMNS, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines])


def _label(point: dict[str, Any]) -> str:
    if (lossy := point.get("lossy")) is None:
        return str(point["label"])
    rule, exact = point["config"]["decode"]["lossy"], lossy.get("log_prob_autoregressive")
    beside = "" if exact is None else f" (exact {exact:.2f})"
    altered = f"{100 * lossy['altered']:.1f}% of tokens altered"
    return f"{point['label']}, LOSSY {rule}: {altered}, log p per token {lossy['log_prob_speculative']:.2f}{beside}"


def _row(point: dict[str, Any]) -> list[str]:
    spec, arms = point.get("speculative"), point["arms"]

    def ratio(name: str) -> str:
        found = point["speedup"].get(name)
        return f"{found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]" if found else "-"

    def rate(name: str) -> str:
        return f"{arms[name]['tokens_per_second']:.0f}" if name in arms else "-"

    if spec is None:
        return [point["label"], "-", "-", rate("autoregressive"), *["-"] * (len(_COLUMNS) - 4)]
    same = point["identical"].get("autoregressive")
    return [
        _label(point),
        f"{spec['acceptance_length']:.2f}",
        " ".join(f"{a:.2f}" for a in spec["full_acceptance"]),
        rate("autoregressive"),
        rate("speculative"),
        ratio("autoregressive"),
        ratio("hf_generate"),
        f"{spec['forecast']['speedup']:.2f} / {spec['decode']:.2f}" if {"forecast", "decode"} <= spec.keys() else "-",
        f"{spec['cost']:.2f}" if "cost" in spec else "-",
        "/".join(f"{100 * spec['share_of_step'][p]:.0f}" for p in ("draft", "target", "other")) + " %",
        f"{100 * spec['bookkeeping']:.1f} %" if "bookkeeping" in spec else "-",
        f"{same['rows']}/{same['of']}" if same else "-",
        f"{arms['speculative']['distinct_4grams']:.2f}",
    ]


def audit_report(audit: Audit, tests: list[LawTest]) -> str:
    """The audit as Markdown: verdict, figures, every divergence, and the distribution test."""
    lines = [
        f"**{audit.verdict}** ({audit.dtype}): {audit.rows} texts, {audit.tokens} tokens up to each one's end or first "
        f"divergence, {len(audit.divergences)} divergences.",
        f"Noise between one-token and many-token passes of stock transformers: median {audit.noise_median:.2g}, "
        f"largest {audit.noise:.2g} logits; between them and plain decoding at most {audit.deviation_plain:.2g}, "
        f"between plain and speculative decoding at most {audit.deviation:.2g}. Any of these, or a margin below, would "
        f"be a bug beyond {audit.bound:.2g}.",
    ]
    if audit.divergences:
        lines += ["", "| prompt | T | seed | nodes | batch | position | plain | speculative | margin | explained |"]
        lines += ["|---" * 10 + "|"]
        for d in sorted(audit.divergences, key=lambda d: -d.margin):
            where = f"{d.prompt} | {d.temperature:g} | {d.seed} | {d.nodes} | {d.batch_size} | {d.position}"
            explained = "yes" if d.margin <= audit.bound else "**BUG**"
            lines.append(f"| {where} | {d.plain_token} | {d.speculative_token} | {d.margin:.3g} | {explained} |")
    if tests:
        lines += ["", f"Law of the first three tokens: **{law_verdict(tests)}**", ""]
        lines += ["| test | texts | bins | chi-square | p |", "|---|---|---|---|---|"]
        lines += [f"| {t.name} | {t.samples} | {t.bins} | {t.statistic:.1f} | {t.p:.2g} |" for t in tests]
    return "\n".join(lines)


def write_point(folder: Path, point: dict[str, Any], records: list[Record]) -> None:
    """records.jsonl and summary.json in `folder`, the summary last and whole."""
    with (folder / "records.jsonl").open("w") as f:
        f.writelines(json.dumps(asdict(record)) + "\n" for record in records)
    scratch = folder / "summary.tmp"
    scratch.write_text(json.dumps(point, indent=1) + "\n")
    os.replace(scratch, folder / "summary.json")


def read_points(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[Path, str]]]:
    """The points of all runs below `folder`, in the order of their folders, and the runs that are broken: their
    folders, and why."""
    marks = ("summary.json", "records.jsonl", "figures.jsonl", ".hydra")
    homes = {p for p in folder.rglob("*") if p.is_dir() and any((p / mark).exists() for mark in marks)}
    homes |= {p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()}
    homes |= {folder} if (folder / "summary.json").exists() else set()
    points, broken = [], []
    for home in sorted(homes, key=lambda p: [(len(part), part) for part in p.parts]):
        try:
            point = json.loads((home / "summary.json").read_text())
            wrong = (
                not isinstance(point, dict) or not {"label", "config", "arms", "speedup", "identical"} <= point.keys()
            )
        except FileNotFoundError:
            broken.append((home, "summary.json is missing: the run did not end"))
        except ValueError as error:
            broken.append((home, f"summary.json is not whole ({error})"))
        else:
            if wrong:
                broken.append((home, "summary.json holds no point of eval/decode.py"))
            else:
                points.append(point)
    return points, broken
