"""Hydra schemas: what may stand in configs/. Each part is a dataclass that lives beside its consumer."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.api import NODES
from selfspec.cli.errors import one_line_error
from selfspec.cli.precheck import store
from selfspec.cli.show import ShowConfig
from selfspec.core.rows import MAX_NODES
from selfspec.drafters.base import Drafter, DrafterConfig
from selfspec.drafters.registry import config_class, drafter_class, installed, kinds
from selfspec.engine.choose import check_engine
from selfspec.evaluation.audit import AuditConfig
from selfspec.evaluation.compare import CompareConfig
from selfspec.evaluation.decode import DecodeConfig
from selfspec.evaluation.limits import LimitsConfig
from selfspec.page.build import PageConfig
from selfspec.training.calibrate import CalibrateConfig
from selfspec.training.drafter_data import DrafterTraining
from selfspec.training.loop_config import LoopConfig
from selfspec.training.pretrain import PretrainConfig
from selfspec.utils.errors import one_line
from selfspec.utils.machine import check_device_name, dtype_name
from selfspec.utils.tracking import Logged


@dataclass
class TargetConfig:
    """name: an embedded name, a folder or a hub id; dtype: auto takes the checkpoint's own (float32 where
    loop.precision=auto finds a CPU slower in bfloat16), int8 quantizes; device: cpu, cuda or the like (null, auto:
    CUDA where it works, else the CPU); revision: of a hub id."""

    name: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        dtype_name(self.dtype)
        check_device_name(self.device)


@dataclass
class TrainRun(Logged):
    """drafter: its kind, below; data: what to train on, below; check: only tell what would be read and what it would
    take (--check does the same); trust_code: whether checkpoints that are read may name drafters of other packages."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = MISSING
    data: Any = MISSING
    check: bool = False
    trust_code: bool = False
    train: DrafterTraining = field(default_factory=DrafterTraining)
    loop: LoopConfig = field(default_factory=LoopConfig)


@dataclass
class TargetRun(Logged):
    """data: what to train on, below."""

    data: Any = MISSING
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)


@dataclass
class TreeConfig:
    """nodes: of the draft tree, root included; auto sizes every pass by what it costs here."""

    nodes: Any = NODES

    def __post_init__(self) -> None:
        if self.nodes != "auto" and not (isinstance(self.nodes, int) and 1 <= self.nodes <= MAX_NODES):
            raise ValueError(f"tree.nodes={self.nodes!r} must be auto, or lie between 1 and {MAX_NODES}")


@dataclass
class Loaded(Logged):
    """target: an embedded name, a folder or a hub id; dtype: auto takes the checkpoint's own; device: cpu, cuda or the
    like (null, auto: CUDA where it works, else the CPU)."""

    target: str = MISSING
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype_name(self.dtype)
        check_device_name(self.device)


@dataclass
class OneTarget(Loaded):
    """engine: eager, or compiled (auto: where a compiler is found); data: where questions and text come from, below;
    trust_code: whether checkpoints may name drafters of other packages."""

    engine: str = "auto"
    data: Any = MISSING
    trust_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine(self.engine)


@dataclass
class Measurement(OneTarget):
    """drafter: an embedded name, a run folder, a hub id, or several joined by +, which share one tree; target: null
    takes the one that the drafter was trained for."""

    drafter: str = MISSING
    target: str | None = None  # type: ignore[assignment]


@dataclass
class Decoded(Measurement):
    """width: nodes of every pass, plain ones included, so that 16-bit dtypes are exact on library kernels too (null: as
    many as are drafted)."""

    width: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = self.tree.nodes if isinstance(self, (EvalRun, ShowRun)) else 1
        if self.width is not None and (nodes == "auto" or nodes > self.width):
            raise ValueError(
                f"tree.nodes={nodes}: every pass runs width={self.width} nodes; give fewer, or a larger width"
            )


@dataclass
class EvalRun(Decoded):
    tree: TreeConfig = field(default_factory=TreeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass
class ShowRun(Decoded):
    tree: TreeConfig = field(default_factory=TreeConfig)
    show: ShowConfig = field(default_factory=ShowConfig)


@dataclass
class CompareRun(OneTarget):
    """A comparison has one target and many drafters."""

    compare: CompareConfig = field(default_factory=CompareConfig)


@dataclass
class ReportRun:
    """sweep: the folder of a sweep; against: another's, or two comparisons, to be set beside each other."""

    sweep: str = MISSING
    against: str | None = None

    def __post_init__(self) -> None:
        for key in ("sweep", "against"):
            if (place := getattr(self, key)) is not None and not (place and Path(place).is_dir()):
                what = " is a file; give the folder of runs" if Path(place).is_file() else ": there is no such folder"
                raise ValueError(f"{key}={place}{what}")


@dataclass
class PageRun:
    page: PageConfig = field(default_factory=PageConfig)


@dataclass
class LimitsRun(Loaded):
    """results: a Markdown file whose section `limits NAME` is written anew; trust_code: whether checkpoints may name
    drafters of other packages."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    results: str | None = None
    trust_code: bool = False


@dataclass
class AuditRun(Measurement):
    audit: AuditConfig = field(default_factory=AuditConfig)


@dataclass
class CalibrateRun(Measurement):
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)


def _folder_name(text: str) -> str:
    """A text as the name of one folder, of at most 200 bytes."""
    flat = text.replace("/", "_") or "default"
    if len(flat.encode()) <= 200:
        return flat
    return f"{flat.encode()[:180].decode(errors='ignore')}-{hashlib.sha256(flat.encode()).hexdigest()[:12]}"


# When this module is imported: workers of a sweep import it, and never call `register`.
OmegaConf.register_new_resolver("folder_name", _folder_name, replace=True)


def register(drafters: bool = False) -> None:
    """Make the schemas known to Hydra; call before `hydra.main`. drafters: whether `drafter` is the group that training
    chooses from, one config for each kind; elsewhere it is the name of a drafter."""
    ours = {kind: config_class(drafter_class(kind)) for kind in kinds()} if drafters else None
    store(globals(), ours)
    for name, entry in installed().items() if drafters else ():
        if name in kinds():
            print(f"the drafter {name} of {entry.value} has the name of one of selfspec's own", file=sys.stderr)
            continue
        try:
            register_class(name, drafter_class(name))
        except Exception as error:  # of another package, which this run may not need
            print(f"the drafter {name} of {entry.value} can not be loaded: {one_line(error)}", file=sys.stderr)


def register_class(name: str, kind: type[Drafter]) -> None:
    """Make a drafter class of another package the choice `drafter=name`; its config then names the class."""
    node = OmegaConf.create({"_target_": f"{kind.__module__}.{kind.__qualname__}"})
    node.merge_with(OmegaConf.create(asdict(config_class(kind)())))
    ConfigStore.instance().store(group="drafter", name=name, node=node)


def with_classes(arguments: list[str]) -> list[str]:
    """Command-line arguments in which `drafter._target_=package.module.Class` has become a choice of the group
    `drafter`. Raises ValueError for what is no drafter class."""
    replaced = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "drafter._target_":
            paths = value.strip("'\"[]").split(",")
            for path in paths:
                register_class(path, drafter_class(path, trust=True))
            argument = f"drafter={','.join(paths)}"
        replaced.append(argument)
    return replaced


def drafter_of(config: Any) -> tuple[type[Drafter], DrafterConfig]:
    """The class and the config that `drafter` stands for in a composed run. Raises ValueError for unknown keys and
    wrong types of a class of another package."""
    if isinstance(config, DrafterConfig):
        return drafter_class(type(config).__module__.rsplit(".", 1)[-1]), config
    settings = dict(config)
    kind = drafter_class(settings.pop("_target_"), trust=True)
    schema = OmegaConf.structured(config_class(kind))
    try:
        drafter_config = OmegaConf.to_object(OmegaConf.merge(schema, settings))
    except OmegaConfBaseException as error:
        why = one_line_error(error).replace("there is no ", "there is no drafter.")
        why = f"drafter.{why}" if "must be of type" in why else why
        raise ValueError(f"{why}; {kind.__qualname__} has {', '.join(schema)}") from error
    assert isinstance(drafter_config, DrafterConfig)
    return kind, drafter_config
