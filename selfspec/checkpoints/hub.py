"""Drafters on the hub: uploaded with a card that shows what was measured, and found there by name."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from selfspec.checkpoints.card import PLACE, is_path, repository
from selfspec.checkpoints.drafter_folder import check_files, files_hash, read_meta
from selfspec.utils.errors import one_line
from selfspec.utils.files import ORIGIN, Figures, atomic, interval, markdown, read_json

_MEASURED = "## Measured"


def fetch(name: str, revision: str | None = None, parts: str | list[str] | None = None, **fetching: Any) -> Path:
    """The folder of a hub repository: downloads what the cache lacks; without a connection the cached copy is used.
    parts: only files of this pattern, or of these; fetching: further arguments of snapshot_download.

    Raises FileNotFoundError where the hub has none of this name, or can not be asked.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=parts, **fetching))
    except (OSError, HFValidationError) as error:
        lines = str(error).strip().splitlines()
        at = f" at revision {revision!r}" if revision is not None else ""
        raise FileNotFoundError(
            f"{name!r}{at} is no folder here, and the hub gives none: {type(error).__name__}, {' '.join(lines[:1])}"
        ) from None  # the hub's own chain of causes is a hundred lines


def measured(results: Sequence[Path], folder: Path, located: Callable[[str], Path]) -> list[Figures]:
    """Figures of eval/decode.py for the drafter in `folder`, from run folders or their summary.json. located: where a
    drafter of this name lies.

    Points of other drafters are named and left out. Raises ValueError for what is no such result, and where all are of
    another drafter; FileNotFoundError where there is none.
    """
    points, others, now = [], [], files_hash(read_meta(folder))
    for place in results:
        if not place.exists():
            raise FileNotFoundError(f"results: {place} does not exist")
        files = sorted(place.rglob("summary.json")) if place.is_dir() else [place]
        if not files:
            raise FileNotFoundError(f"{place} holds no summary.json of eval/decode.py")
        for path in files:
            try:
                point = read_json(path)
                named = str(point["config"]["drafter"])
                _table([point]), _index(point)
                if not all(math.isfinite(v.metric_value) and v.metric_value > 0 for v in _index(point)):
                    raise ValueError("its figures are no positive numbers")
            except FileNotFoundError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"{path} holds no figures of eval/decode.py with its speculative arm") from error
            try:
                same = located(named).resolve() in (folder.resolve(), folder.resolve().parent)
            except FileNotFoundError:
                same = False
            origin = read_json(path.with_name(ORIGIN)) if path.with_name(ORIGIN).is_file() else {}
            if not same:
                others.append(f"{path} was measured with drafter={named!r}, not with {str(folder)!r}")
            elif origin.get(f"files {named}", now) != now:
                others.append(
                    f"{path} was measured with another state of {named!r}: its weights or its calibration have changed"
                )
            else:
                points.append(point)
    if others and not points:
        raise ValueError(others[0])
    for line in others:
        print(f"left out: {line}")
    return points


def prepare(source: Path, folder: Path, repo: str, points: Sequence[Figures] = ()) -> None:
    """Write what is to be uploaded to a repository: the drafter's own files, and its card with the table of `points`,
    the same figures as the hub's model-index and the target's name."""
    meta = read_meta(source)
    check_files(source, meta)  # the hub gets nothing damaged, and nothing that only lay beside it
    for name in (*meta["files"], "drafter.json", "README.md", "training.json"):
        if (source / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    path = folder / "README.md"
    card = ModelCard(path.read_text() if path.is_file() else f"---\nlibrary_name: selfspec\n---\n# {meta['kind']}\n")
    card.text = card.text.split(_MEASURED)[0].rstrip().replace(PLACE, repo) + "\n"
    data: ModelCardData = card.data  # type: ignore[assignment]
    target = str(meta["target"]["name"])
    if is_path(target):
        print(f"target {target!r} is a folder of this machine: whoever loads {repo} gives target=, as its card says")
    data.base_model = repository(target)
    data.pipeline_tag = "text-generation"
    data.eval_results = data.model_name = None
    if points:
        card.text += f"\n{_MEASURED}\n\n{_table(points)}\n"
        data.model_name = f"{meta['kind']} drafter"
        data.eval_results = [result for point in points if "lossy" not in point for result in _index(point)]
    path.write_text(str(card))


def _table(points: Sequence[Figures]) -> str:
    lines = []
    for point in points:
        decode, ratio = point["config"]["decode"], point["speedup"].get("autoregressive")
        fast, nodes = point["speculative"], point["config"]["tree"]["nodes"]
        if (lossy := point.get("lossy")) is not None:
            nodes = f"{nodes}, LOSSY {decode['lossy']}: {100 * lossy['altered']:.1f}% of tokens altered"
        speedup, prompts = "-" if ratio is None else interval(ratio), fast.get("prompts", decode["prompts"])
        lines.append([decode["temperature"], nodes, f"{fast['acceptance_length']:.2f}", speedup, prompts])
    heads = ["T", "nodes", "acceptance length τ", "speedup over plain decoding (95%)", "prompts"]
    table = markdown(heads, lines)
    return f"{table}\n\nBy selfspec's `eval/decode.py`; a speedup holds for one machine, dtype and target."


def _index(point: Figures) -> list[EvalResult]:
    decode, nodes = point["config"]["decode"], point["config"]["tree"]["nodes"]
    values = {"acceptance_length": point["speculative"]["acceptance_length"]}
    if (ratio := point["speedup"].get("autoregressive")) is not None:
        values["speedup"] = ratio["ratio"]
    name = str(decode.get("questions") or "held-out prompts")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_name=f"{metric.replace('_', ' ')}, T={decode['temperature']}, {nodes} nodes",
            metric_value=round(value, 4),
            metric_args={"temperature": decode["temperature"], "nodes": nodes},
        )
        for metric, value in values.items()
    ]


def push(
    source: Path,
    repo: str,
    points: Sequence[Figures] = (),
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    dry_run: Path | None = None,
) -> str:
    """Upload a drafter's folder to the hub repository `repo`, which is made where there is none. revision: a branch.
    dry_run: write what would be uploaded to this new folder instead. Returns where it is.

    Raises ValueError for a name that no repository can have, and for a dry run into a folder that exists; OSError where
    the hub refuses.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo={repo!r} can be no repository's name: {error}") from error
    if "/" not in repo:
        raise ValueError(f"repo={repo!r} names no owner; give owner/name, by which it is loaded")
    if dry_run is not None:
        if dry_run.exists():
            raise ValueError(f"dry run: {str(dry_run)!r} exists; give a new folder")
        if source.resolve() in dry_run.resolve().parents:
            raise ValueError(f"dry run: {str(dry_run)!r} lies in the drafter's folder; give another place")
        with atomic(dry_run) as folder:
            prepare(source, folder, repo, points)
        return str(dry_run)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        prepare(source, folder, repo, points)
        api = HfApi(token=token)
        try:
            repository = api.create_repo(repo, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository.repo_id, folder_path=folder, revision=revision, commit_message="Drafter by selfspec"
            )
        except Exception as error:
            if not type(error).__module__.startswith(("httpx", "requests")):  # releases of huggingface_hub differ
                raise
            raise ConnectionError(f"the hub does not answer: {one_line(error)}") from error
    return str(commit.commit_url)
