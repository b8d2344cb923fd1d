"""Records of text and of conversations: JSON lines, Parquet files, and data sets by name."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from selfspec.data.documents import Records
from selfspec.utils.checks import at_least, integer


def files_of(path: object, key: str = "data.path") -> list[Path]:
    """Files by their paths, or by patterns. Raises ValueError for what is neither. key: whose value they are."""
    paths = list(path) if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    files_found = list[Path]()
    for one in paths:
        names = sorted(glob.glob(one, recursive=True)) if isinstance(one, str) and not Path(one).is_file() else [one]
        files = [Path(name) for name in names if isinstance(name, str) and Path(name).is_file()]
        if not files:
            such = f"{one}/*.jsonl" if isinstance(one, str) and Path(one).is_dir() else "data/*.jsonl"
            raise ValueError(f"{key}={one!r} is not a file, and matches none as a pattern such as {such}")
        files_found += files
    if not files_found:
        raise ValueError(f"{key}=[] names no file")
    return list({file.resolve(): file for file in files_found}.values())  # each once, however it is named


def _hashed(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _datasets(data: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data={data} needs the package datasets: pip install 'selfspec[data]'") from error
    datasets.disable_progress_bars()
    return cast(ModuleType, datasets)


@dataclass(frozen=True, kw_only=True)
class _Files(Records):
    path: Any

    def __str__(self) -> str:
        return f"data.path={self.path!r}"

    def fingerprint(self) -> str:
        return _hashed(files_of(self.path))


@dataclass(frozen=True, kw_only=True)
class JsonLines(_Files):
    """Files of one JSON object a line, plain or gzipped (.gz). path: a file, a pattern, or a list of them; record_mb:
    megabytes of a record at most."""

    record_mb: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "data", 1, "record_mb")
        integer("data.record_mb", self.record_mb)

    def records(self) -> Iterator[tuple[str, object]]:
        return (pair for path in files_of(self.path) for pair in json_lines(path, self.record_mb))


def json_lines(path: Path, record_mb: int = 64) -> Iterator[tuple[str, object]]:
    """(place, what a line holds) of a file, plain or gzipped; an unreadable line is yielded as a ValueError that says
    why. Blank lines are passed over. Raises ValueError for a line of more megabytes than record_mb."""
    for number, line in enumerate(_lines(path, record_mb << 20), 1):
        if line.strip():
            yield (place := f"{path}, line {number}"), _parsed(line, place)


def _lines(path: Path, most: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        packed = path.suffix == ".gz" or file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as file:
        for number in count(1):
            try:
                line = file.readline(most + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(
                    f"{path} can not be read to its end ({error}); it may be cut off or damaged"
                ) from error
            if len(line) > most:
                raise ValueError(
                    f"{path}, line {number}: more than data.record_mb={most >> 20} MB; raise it if that is right"
                )
            if not line:
                return
            yield line


def _parsed(line: bytes, place: str) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        return ValueError(f"{place}: not UTF-8 text ({error})")
    except json.JSONDecodeError as error:
        array = "; one object a line is read, no JSON array" if line.lstrip().startswith(b"[") else ""
        return ValueError(f"{place}: not JSON ({error.msg} at character {error.pos + 1}){array}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"{place}: not JSON ({error})")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


@dataclass(frozen=True, kw_only=True)
class Parquet(_Files):
    """Parquet files. path: a file, a pattern, or a list of them."""

    def records(self) -> Iterator[tuple[str, object]]:
        datasets = _datasets("parquet")
        from pyarrow.parquet import read_metadata  # which datasets needs

        for path in files_of(self.path):
            try:
                if not read_metadata(path).num_rows:  # which datasets takes for damaged
                    continue
                rows = datasets.load_dataset(
                    "parquet", data_files=glob.escape(str(path)), split="train", streaming=True
                )
                yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
            except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # pyarrow's are ValueErrors
                raise ValueError(f"{path} can not be read as Parquet ({error})") from error


@dataclass(frozen=True, kw_only=True)
class Hub(Records):
    """A data set of the hub, or a folder in one of its forms, one that `Dataset.save_to_disk` wrote included. name,
    subset, split, revision: as `datasets.load_dataset` takes them; a saved one has its name alone."""

    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def __str__(self) -> str:
        return f"data.name={self.name!r}"

    def _loaded(self) -> Any:
        datasets = _datasets("hub")
        try:
            if (Path(self.name) / "state.json").is_file():  # of `Dataset.save_to_disk`, which has one split
                if (self.subset, self.split, self.revision) != (None, "train", None):
                    raise ValueError("a saved data set has no subset, split or revision; leave them out")
                return datasets.load_from_disk(self.name).with_format(None)  # a saved one may give tensors
            return datasets.load_dataset(self.name, self.subset, split=self.split, revision=self.revision)
        except Exception as error:  # whatever a builder raises
            raise ValueError(
                f"data.name={self.name!r} (subset {self.subset}, split {self.split}, revision {self.revision}) can not "
                f"be loaded: {error.__cause__ or error}"
            ) from error

    def fingerprint(self) -> str:
        loaded = self._loaded()
        return f"{loaded._fingerprint} {self.subset} {self.split} {len(loaded)}"

    def records(self) -> Iterator[tuple[str, object]]:
        return ((f"{self.name}, row {number}", row) for number, row in enumerate(self._loaded(), 1))
