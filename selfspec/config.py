"""Hydra schemas: what may stand in configs/. Each part is a dataclass that lives beside its consumer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from selfspec.evaluation.audit import AuditConfig
from selfspec.evaluation.compare import CompareConfig
from selfspec.evaluation.runs import DecodeConfig
from selfspec.evaluation.verifiers import VerifiersConfig
from selfspec.generate import MAX_NODES
from selfspec.log import WandbConfig
from selfspec.spec import NODES
from selfspec.training.heads import HeadsConfig
from selfspec.training.loop import LoopConfig
from selfspec.training.pretrain import PretrainConfig


@dataclass
class TargetConfig:
    """name: an embedded name, a folder or a hub id; dtype: `auto` takes the checkpoint's own."""

    name: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None


@dataclass
class TrainRun:
    name: str = MISSING
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = MISSING
    data: Any = MISSING
    heads: HeadsConfig = field(default_factory=HeadsConfig)
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
class DrafterConfig:
    """name: an embedded name, a run folder, a hub id, or a kind that needs no training; `hybrid` with the names of its
    drafters, or several names joined by +, share one tree."""

    name: str = MISSING
    drafters: list[str] = field(default_factory=list)

    def names(self) -> str | list[str]:
        """What `selfspec.load` is given. Raises ValueError for a list beside another name than hybrid."""
        if self.drafters and self.name != "hybrid":
            raise ValueError(f"drafter.drafters belongs to drafter=hybrid, not to drafter={self.name}")
        if self.name == "hybrid" and not self.drafters:
            raise ValueError('drafter=hybrid needs its members: "drafter.drafters=[a,b]", or drafter=a+b')
        return list(self.drafters) if self.name == "hybrid" else self.name


@dataclass
class Measurement:
    """What every measurement of a drafter on its target is told."""

    name: str = MISSING
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    target: str | None = None
    dtype: str = "auto"
    device: str | None = None
    data: Any = MISSING
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class EvalRun(Measurement):
    tree: TreeConfig = field(default_factory=TreeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass
class CompareRun:
    """A comparison has one target and many drafters."""

    name: str = MISSING
    target: str = MISSING
    dtype: str = "auto"
    device: str | None = None
    data: Any = MISSING
    wandb: WandbConfig = field(default_factory=WandbConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)


@dataclass
class ReportRun:
    """sweep: the folder of a multirun."""

    sweep: str = MISSING


@dataclass
class AuditRun(Measurement):
    audit: AuditConfig = field(default_factory=AuditConfig)


@dataclass
class VerifiersRun(Measurement):
    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)


def spell_out_drafter(arguments: list[str]) -> list[str]:
    """`drafter=x` becomes `drafter.name=x`: for Hydra `drafter` alone is the group that training chooses from."""
    return [a.replace("drafter=", "drafter.name=", 1) if a.startswith("drafter=") else a for a in arguments]


def register() -> None:
    """Make the schemas known to Hydra; call before `hydra.main`."""
    store = ConfigStore.instance()
    store.store(name="pretrain_schema", node=PretrainRun)
    store.store(name="train_schema", node=TrainRun)
    store.store(name="eval_schema", node=EvalRun)
    store.store(name="audit_schema", node=AuditRun)
    store.store(name="compare_schema", node=CompareRun)
    store.store(name="report_schema", node=ReportRun)
    store.store(name="verifiers_schema", node=VerifiersRun)
