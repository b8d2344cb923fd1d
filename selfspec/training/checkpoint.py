"""Where a training is, on disk: `state.pt` of its run folder; and weights that it begins with."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from selfspec.drafters.base import Drafter
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.training import shard
from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures, atomic, differences, digest


def checkpoint_path(folder: Path) -> Path:
    return folder / "state.pt"


def _save(path: Path, state: Figures) -> None:
    with atomic(path) as scratch:
        torch.save(state, scratch)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")}


def _load(path: Path) -> Figures:
    try:
        saved: Figures = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, LookupError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is damaged ({one_line(error):.100}); delete it to start over, or choose another name="
        ) from error
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is damaged; delete it to start over, or choose another name=")
    if "digest" in saved and saved["digest"] != _digest(saved):
        raise ValueError(f"{path} was changed on the disk: its hash differs; delete it to start over")
    return saved


def saved_config(path: Path) -> Figures | None:
    """The config of the run that a checkpoint is of; None for one that an older version wrote. Raises ValueError for a
    damaged file."""
    return _load(path).get("config")


def _digest(saved: object) -> str:
    """A hash of all that a checkpoint holds, but of itself."""
    if isinstance(saved, Tensor):
        plain = saved.detach().cpu().contiguous().flatten().view(torch.uint8)
        return digest(saved.dtype, list(saved.shape), plain.numpy().data)
    if isinstance(saved, dict):
        return digest(*((key, _digest(value)) for key, value in saved.items() if key != "digest"))
    return digest(*map(_digest, saved)) if isinstance(saved, (list, tuple)) else digest(saved)


@dataclass
class State:
    """What a checkpoint holds beside weights and moments. pending: whether the validation of this step is still to be
    made; best: of the validations so far, by the figure that is to be high: its value, its step and the parameters;
    loss: of that one; since: validations after it."""

    step: int = 0
    seconds: float = 0.0
    pending: bool = False
    best: tuple[float, int, dict[str, Tensor]] | None = None
    loss: float = math.nan
    since: int = 0

    def judge(self, value: float, loss: float, checkpoint: Checkpoint) -> None:
        """A validation's figure: the weights are kept where it is the highest so far, or as high with a lower loss: as
        long as no draft is accepted all figures are alike."""
        self.since += 1
        alike = self.best is not None and value == self.best[0] and loss < self.loss
        if self.best is None or value > self.best[0] or math.isnan(self.best[0]) or alike:
            self.best, self.loss, self.since = (value, self.step, checkpoint.taken()), loss, 0


class Checkpoint:
    """`state.pt` of a run: trained parameters, buffers, optimizers, and where the run is. data: keys of the training
    data and of the validation data; target: hash of the weights that stay and settings of their model, empty where all
    are trained; config: the run's, kept beside."""

    def __init__(
        self,
        path: Path,
        owned: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        optimizers: list[torch.optim.Optimizer],
        world: int,
        data: tuple[str, str],
        target: Figures,
        config: Figures,
    ) -> None:
        self.path, self.owned, self.buffers, self.optimizers = path, owned, buffers, optimizers
        self.world, self.data, self.target, self.config = world, list(data), target, config

    def read(self) -> tuple[State, list[str]]:
        """Where the run goes on, its weights put in place, and what to say of differences. Raises ValueError for a
        file that is damaged or of other parameters."""
        if not self.path.exists():
            return State(), []
        saved_run = _load(self.path)
        try:
            return self._take(saved_run)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error!r}); delete it to start over") from error

    def _take(self, saved_run: Figures) -> tuple[State, list[str]]:
        before = saved_run.get("target") or self.target
        before = before if isinstance(before, dict) else {**self.target, "weights": before}  # of an older version
        if odd := differences(before, self.target):
            same = before.get("weights") == self.target.get("weights")
            what = f"settings ({'; '.join(odd)})" if same else "weights"
            raise ValueError(
                f"{self.path}: the target's {what} are not those of the steps before; bring them back, or choose "
                "another name="
            )
        if "state" not in saved_run:
            raise ValueError(f"{self.path} was written by an older version; delete it, or choose another name=")
        if {n: p.shape for n, p in saved_run["parameters"].items()} != {n: p.shape for n, p in self.owned.items()}:
            raise ValueError(f"{self.path} holds other parameters than this configuration trains; choose another name=")
        self.put(saved_run["parameters"])
        notes = []
        if self.buffers and "buffers" not in saved_run:
            notes.append(f"{self.path} is of an older version: the draft vocabulary is made anew of the data")
        with torch.no_grad():  # such as a draft vocabulary, by which heads hold rows
            for name, saved in saved_run.get("buffers", {}).items():
                self.buffers[name].copy_(saved)
        for optimizer, saved in zip(self.optimizers, saved_run["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        notes += [
            f"resumed with {name} {now}, begun with {saved_run['versions'][name]}: results may differ in rounding"
            for name, now in _versions().items()
            if saved_run["versions"][name] != now
        ]
        if saved_run["world"] != self.world:
            notes.append(
                f"resumed in {self.world} processes, begun in {saved_run['world']}: each step reads the same rows, and "
                "results differ in rounding alone"
            )
        state, (train, validation) = State(**saved_run["state"]), saved_run.get("data", self.data)
        if train != self.data[0]:
            stays = "; the draft vocabulary stays that of the old data" if self.buffers else ""
            notes.append(f"the training data are not those of the steps before: later steps read the new data{stays}")
        if validation != self.data[1]:
            notes.append("the validation data are not those of the steps before: the best weights are found anew")
            if state.best is not None:  # until the next validation
                state.best, state.since = (-math.inf, *state.best[1:]), 0
        return state, notes

    @torch.no_grad()
    def put(self, parameters: dict[str, Tensor]) -> None:
        for name, saved in parameters.items():
            self.owned[name].copy_(saved)

    def taken(self) -> dict[str, Tensor]:
        """A copy of the trained parameters, on the CPU."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.owned.items()}

    def write(self, state: State) -> None:
        record: Figures = {"state": vars(state), "optimizers": [o.state_dict() for o in self.optimizers]}
        record |= {"parameters": {name: p.detach() for name, p in self.owned.items()}, "buffers": self.buffers}
        record |= {"step": state.step, "world": self.world, "data": self.data, "versions": _versions()}
        record |= {"config": self.config, "target": self.target}
        _save(self.path, {**record, "digest": _digest(record)})


# What a training may have other than the one that it goes on from: how deep and wide it drafts, and how it learns
_FREE = {"loss", "depth_decay", "depth", "width", "min_prob", "anchors", "unroll", "passes"}


@torch.no_grad()
def warm_start(drafter: Drafter, source: Drafter, name: str) -> None:
    """Give a drafter the trained weights and the draft vocabulary of another; optimizer and data begin anew. Raises
    ValueError, with `name`, where they are not of the same kind and shapes."""
    into, saved = ({**d.trained(), **d.saved_buffers()} for d in (drafter, source))
    shapes = [{key: list(p.shape) for key, p in tensors.items()} for tensors in (into, saved)]
    if drafter.kind != source.kind or shapes[0] != shapes[1]:
        odd = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
        raise ValueError(
            f"train.init_from={name!r} is a {source.kind} drafter that does not fit this {drafter.kind} drafter"
            + (f" ({odd[0]}: {shapes[1].get(odd[0])} instead of {shapes[0].get(odd[0])})" if odd else "")
            + "; give one of the same configuration"
        )
    ours, theirs = asdict(drafter.config), asdict(source.config)
    odd = [key for key in ours if key not in _FREE and ours[key] != theirs.get(key)]
    odd = [key for key in odd if key != "layers" or drafter.reads != source.reads]
    said = "; ".join(f"{key}={theirs.get(key)!r}, here {ours[key]!r}" for key in odd)
    shard.say([f"warning: train.init_from={name!r} was trained with {said}"] if odd else [])
    if isinstance(drafter, Reduced) and drafter.vocabulary is not None:
        drafter.drafts_only(saved["vocabulary"])  # heads hold rows of lm_head by it
    for key, p in into.items():
        p.copy_(saved[key])
