"""Hydra schemas: what may stand in configs/. Each part is a dataclass that lives beside its consumer."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

import selfspec.drafters
from selfspec.api import NODES
from selfspec.checkpoint import config_class, drafter_class
from selfspec.core.generate import MAX_NODES
from selfspec.evaluation.audit import AuditConfig
from selfspec.evaluation.benchmark import DecodeConfig
from selfspec.evaluation.compare import CompareConfig
from selfspec.evaluation.limits import LimitsConfig
from selfspec.evaluation.show import ShowConfig
from selfspec.evaluation.verifiers import VerifiersConfig
from selfspec.log import WandbConfig, one_line
from selfspec.training.loop import LoopConfig
from selfspec.training.pretrain import PretrainConfig
from selfspec.training.rows import DrafterTraining


@dataclass
class TargetConfig:
    """name: an embedded name, a folder or a hub id; dtype: `auto` takes the checkpoint's own."""

    name: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None


@dataclass
class TrainRun:
    """check: only tell what would be read and what it would take."""

    name: str = MISSING
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = MISSING
    data: Any = MISSING
    check: bool = False
    train: DrafterTraining = field(default_factory=DrafterTraining)
    loop: LoopConfig = field(default_factory=LoopConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class PretrainRun:
    name: str = MISSING
    data: Any = MISSING
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class TreeConfig:
    """nodes: of the draft tree, root included; `auto` sizes every pass by what it costs here."""

    nodes: Any = NODES

    def __post_init__(self) -> None:
        if self.nodes != "auto" and not (isinstance(self.nodes, int) and 1 <= self.nodes <= MAX_NODES):
            raise ValueError(f"tree.nodes={self.nodes!r} must be auto, or lie between 1 and {MAX_NODES}")


@dataclass
class Measurement:
    """What every measurement of a drafter on its target is told. drafter: what `selfspec.load` takes (several names
    joined by + share one tree)."""

    name: str = MISSING
    drafter: str = MISSING
    target: str | None = None
    dtype: str = "auto"
    device: str | None = None
    engine: str = "eager"
    data: Any = MISSING
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class EvalRun(Measurement):
    tree: TreeConfig = field(default_factory=TreeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass
class ShowRun(Measurement):
    tree: TreeConfig = field(default_factory=TreeConfig)
    show: ShowConfig = field(default_factory=ShowConfig)


@dataclass
class CompareRun:
    """A comparison has one target and many drafters."""

    name: str = MISSING
    target: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    engine: str = "eager"
    data: Any = MISSING
    wandb: WandbConfig = field(default_factory=WandbConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)


@dataclass
class ReportRun:
    """sweep: the folder of a multirun; against: another's, or two comparisons, to be set beside each other."""

    sweep: str = MISSING
    against: str | None = None


@dataclass
class LimitsRun:
    """results: a Markdown file whose section `limits <name>` is written anew."""

    name: str = MISSING
    target: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    wandb: WandbConfig = field(default_factory=WandbConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    results: str | None = None


@dataclass
class AuditRun(Measurement):
    audit: AuditConfig = field(default_factory=AuditConfig)


@dataclass
class VerifiersRun(Measurement):
    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)


def _folder_name(text: str) -> str:
    """A text as the name of one folder."""
    flat = text.replace("/", "_") or "default"
    return flat if len(flat) < 200 else f"{flat[:180]}-{hashlib.sha256(flat.encode()).hexdigest()[:12]}"


# When this module is imported: workers of a sweep import it, and never call `register`.
OmegaConf.register_new_resolver("folder_name", _folder_name, replace=True)


def register(drafters: bool = False) -> None:
    """Make the schemas known to Hydra; call before `hydra.main`. drafters: whether `drafter` is the group that training
    chooses from, one config for each file of selfspec/drafters/; elsewhere it is the name of a drafter."""
    store = ConfigStore.instance()
    store.repo.pop("drafter", None)
    if drafters:
        for kind in (m.name for m in pkgutil.iter_modules(selfspec.drafters.__path__) if not m.ispkg):
            if kind not in ("base", "hybrid"):
                store.store(group="drafter", name=kind, node=config_class(drafter_class(kind)))
    store.store(name="pretrain_schema", node=PretrainRun)
    store.store(name="train_schema", node=TrainRun)
    store.store(name="eval_schema", node=EvalRun)
    store.store(name="audit_schema", node=AuditRun)
    store.store(name="compare_schema", node=CompareRun)
    store.store(name="limits_schema", node=LimitsRun)
    store.store(name="report_schema", node=ReportRun)
    store.store(name="show_schema", node=ShowRun)
    store.store(name="verifiers_schema", node=VerifiersRun)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Bad input ends in one line that names it, and exit code 2; HYDRA_FULL_ERROR=1 shows the traceback instead."""
    before = {name: os.environ.get(name) for name in ("HYDRA_FULL_ERROR", "SELFSPEC_ERRORS")}
    if before["HYDRA_FULL_ERROR"] == "1" and before["SELFSPEC_ERRORS"] is None:
        yield
        return
    os.environ |= {"HYDRA_FULL_ERROR": "1", "SELFSPEC_ERRORS": "1"}  # Hydra then leaves errors to us
    try:
        yield
    except MissingMandatoryValue as error:
        print(
            f"{os.path.basename(sys.argv[0])}: {error.full_key} is missing; give {error.full_key}=...", file=sys.stderr
        )
        sys.exit(2)
    except (ValueError, OSError, MemoryError, ImportError, HydraException, OmegaConfBaseException) as error:
        print(f"{os.path.basename(sys.argv[0])}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
