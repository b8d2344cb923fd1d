"""Tiny random targets, built from config; nothing is downloaded."""

import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny; two processes share the tests instead
os.environ["SELFSPEC_ENGINE"] = "eager"  # what auto is; tests of compiled passes name them
os.environ["SELFSPEC_CACHE"] = tempfile.mkdtemp()  # costs of passes are measured for these tests alone

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import selfspec.evaluation.plots
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.cli.config import TrainRun, register, with_classes
from selfspec.cli.main import main
from selfspec.core.contract import Accepted, Context, Drafts, Session
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Drafter
from selfspec.drafters.registry import config_class, drafter_class
from selfspec.engine.keys import ROUNDS
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.pretrain import train_tokenizer

torch.set_num_threads(1)

VOCAB, HIDDEN = 61, 32
SPEC_BENCH = Path(__file__).parents[2] / "shared" / "data" / "spec_bench" / "question.jsonl"
HUMAN_EVAL = SPEC_BENCH.parents[1] / "human_eval" / "HumanEval.jsonl.gz"


# Of compiled passes; older torch leaves out roundings, and compiles by inductor alone
TORCH_ROUNDS = pytest.mark.skipif(not ROUNDS, reason=f"torch {torch.__version__} is older than 2.13")


def write_lines(path: Path, records: list[Any]) -> str:
    """JSON lines; a string is a line as it stands."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def typed(*arguments: str) -> int:
    """A line of the terminal, in this process: its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["selfspec", *arguments])
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0)
    return 0


def refused(message: str, call: Callable[..., Any], *args: Any, error: Any = ValueError, **named: Any) -> None:
    """The call raises an error that says so. message: a regular expression."""
    with pytest.raises(error, match=message):
        call(*args, **named)


_SIZES = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
_FULL = "full_attention"
_OWN: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "qwen3": {**_SIZES, "head_dim": 8},
    "gemma3_text": {**_SIZES, "head_dim": 8, "sliding_window": 6, "layer_types": [*["sliding_attention"] * 2, _FULL]},
}


def tiny_config(family: str, **changes: object) -> object:
    ends = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    return AutoConfig.for_model(family, **{**ends, **_OWN.get(family, _SIZES), **changes})


def losses(run: Path) -> list[float]:
    """Of a training's steps, as its log has them."""
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    return [line["train"]["loss"] for line in lines if "train" in line]


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """Random weights, large enough that logits differ clearly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2 if "embed" not in name and "wte" not in name else 0.5)
    return model.to(dtype).eval()


@pytest.fixture(scope="session", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def target(request) -> Target:
    return Target(tiny_model(request.param))


@pytest.fixture(scope="session")
def llama() -> Target:
    return Target(tiny_model())


_NAMES = ("abc", "argparse", "ast", "cmd", "contextlib", "dis", "glob", "heapq", "inspect", "pdb", "pickle", "queue")
LIBRARY = [Path(sysconfig.get_paths()["stdlib"], f"{name}.py") for name in (*_NAMES, "statistics")]


@pytest.fixture(scope="session")
def source_root(tmp_path_factory) -> Path:
    """A small standard library: the first 16 kB of modules to train on and of two that validate; two for evaluation."""
    root = tmp_path_factory.mktemp("library")
    for path in LIBRARY:
        name, text = path.name, path.read_text()
        whole = len(text) <= 16_000 or name in ("heapq.py", "argparse.py")
        end = len(text) if whole else text.rfind("\n\n\n", 0, 16_000)  # between two definitions
        (root / name).write_text(text[:end] + "\n")
    return root


@pytest.fixture(scope="session", autouse=True)
def plots() -> Iterator[Callable[..., dict[str, Path]]]:
    """Plots, a fifth of the time of a tiny training; drawn by the tests that ask for them."""
    drawing = selfspec.evaluation.plots.plot_training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfspec.evaluation.plots, "plot_training", lambda records, folder: {})
        for place in ("evaluation_runs", "reports"):
            patch.setattr(f"selfspec.cli.{place}.plot_points", lambda rows, folder: {})
        patch.setattr("selfspec.budget.learned.crowded", lambda: False)  # whatever runs beside the tests
        yield drawing


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    # Not on the standard library: another Python would have other tokens, and random models other texts
    made = train_tokenizer([(Path(__file__).parents[1] / "LICENSE").read_text()], 320)
    made.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


def save_tiny(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str = "llama", **changes: object) -> str:
    """A tiny random model of a family with the tests' tokenizer, in the hub's format."""
    model = tiny_model(family, torch.float32, **{"vocab_size": len(tokenizer), **changes})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tokenizer) -> str:
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def heads_folder(tmp_path_factory, tiny_folder) -> Path:
    """A saved Medusa drafter for `tiny_folder`, random but not trained."""
    target, tokenizer = load_target(tiny_folder)
    drafter = made("medusa", target, heads=3, rank=4)
    randomize(drafter)
    folder = tmp_path_factory.mktemp("heads") / "drafter"
    save_drafter(drafter, folder, target, tiny_folder, tokenizer, "For tests.")
    return folder


def made(kind: type[Drafter] | str, target: Target, **settings: Any) -> Any:
    """A drafter of this class, or kind, with these settings beside its config's defaults."""
    kind = drafter_class(kind) if isinstance(kind, str) else kind
    return kind(target, config_class(kind)(**settings))


def random_drafter(kind: type[Drafter] | str, target: Target, **settings: Any) -> Any:
    drafter = made(kind, target, **settings)
    randomize(drafter)
    return drafter


def randomize(drafter: Drafter) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.trained().values():
            parameter.normal_(std=0.1)


def stock(model: PreTrainedModel, prompt: list[int], count: int, pad: int = 0) -> list[int]:
    """What transformers itself writes behind a prompt, greedily."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": pad}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def trains(drafter: Any, target: Target, rows: int = 2, length: int = 12) -> Any:
    """A trained drafter, random, after a step whose loss gave every parameter a gradient."""
    randomize(drafter)
    tokens = torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(0))
    loss, _ = DraftLoss(drafter.train(), target)({"tokens": tokens, "mask": torch.ones_like(tokens).bool()})
    loss.backward()
    assert all(p.grad is not None for p in drafter.trained().values())
    return drafter.eval()


class RandomTrees:
    """Drafts arbitrary trees, another one each pass and row, of half the time right tokens; spare nodes included."""

    reads: tuple[int, ...] = ()

    def __init__(self, oracle: list[list[int]], seed: int = 0) -> None:
        self.oracle, self.seed = oracle, seed
        self.generator = torch.Generator().manual_seed(seed)

    def session(self, target: Target, rows: int) -> Session:
        return type(self)(self.oracle, self.seed)

    def propose(self, context: Context) -> DraftTree:
        tokens, parents = [], []
        for root, row in zip(context.roots.tolist(), context.tokens, strict=True):
            full = next(o for o in self.oracle if o[: len(row)] == row)
            drafted, above, depth = [root], [-1], [0]
            for node in range(1, context.nodes):
                parent = int(torch.randint(-1, node, (1,), generator=self.generator))
                at = len(row) + (depth[parent] if parent >= 0 else 0)
                right = parent >= 0 and at < len(full) and torch.rand(1, generator=self.generator) < 0.7
                drafted.append(full[at] if right else int(torch.randint(VOCAB, (1,), generator=self.generator)))
                above.append(parent)
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            tokens.append(drafted)
            parents.append(above)
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    def observe(self, accepted: Accepted) -> None:
        pass


class Watch:
    """A drafter with one session under observation: keeps every context's text and tree."""

    def __init__(self, drafter: Drafts) -> None:
        self.drafter, self.reads = drafter, drafter.reads
        self.inner: Any = None
        self.seen: list[tuple[list[list[int]], DraftTree]] = []

    def session(self, target: Target, rows: int) -> Session:
        self.inner = self.drafter.session(target, rows)
        return self

    def propose(self, context: Context) -> DraftTree:
        tree: DraftTree = self.inner.propose(context)
        self.seen.append(([list(row) for row in context.tokens], tree))
        return tree

    def observe(self, accepted: Accepted) -> None:
        self.inner.observe(accepted)


def compose_config(config_name: str, *overrides: str) -> DictConfig:
    trains, known = config_name == "train", ConfigStore.instance().repo
    node = getattr(known.get("train_schema.yaml"), "node", None)
    ours = node is not None and OmegaConf.get_type(node) is TrainRun  # not as the command's own check reads it
    if not ours or ("drafter" in known) != trains:  # it takes as long as composing
        register(drafters=trains)
    overrides = tuple(with_classes(list(overrides)))
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base="1.3"):
        return compose(config_name, overrides=list(overrides))
