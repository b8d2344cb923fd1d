"""What `make gpu` runs, and graphs."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made, refused, tiny_model

from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.engine.capture import Captured, _Graph, devices_of, parts_of, weights_of
from selfspec.engine.engine import Engine

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "eval" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_a_drafter_that_is_missing_fails_in_its_piece(gpu):
    (_, first), *others = gpu.speeds(replace(gpu.CPU, drafters=("nobody",)))
    assert others
    refused("nobody", first, error=FileNotFoundError)


def test_parts_take_turns_and_go_on_with_what_is_missing(gpu, tmp_path, monkeypatch):
    asked = list[str]()

    def part(sizes: Any) -> Any:
        """What it measures."""
        for line in ("a", "b", "c"):
            yield line, lambda line=line: asked.append(line) or [[line]]

    def broken(sizes: Any) -> Any:
        def fails() -> Any:
            raise RuntimeError("no kernel")

        yield "a", lambda: asked.append("x") or [["x"]]
        yield "b", fails

    monkeypatch.setattr(gpu, "PARTS", {"part": (("x",), part), "broken": (("x",), broken)})

    def last(end: float = float("inf")) -> Any:
        *_, last = gpu.run(["part", "broken"], gpu.CPU, tmp_path, end)
        return last

    clock = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(gpu.time, "monotonic", lambda: next(clock))
        left = "without b and what is behind it: the minutes were over"
        assert last(1.0) == {"part": ([["a"]], left), "broken": ([["x"]], left)}
    for _ in range(2):  # what was measured is read
        assert last() == {
            "part": ([["a"], ["b"], ["c"]], ""),
            "broken": ([["x"]], "failed at b: RuntimeError: no kernel"),
        }
    assert asked == ["a", "x", "b", "c"]
    monkeypatch.setattr(gpu, "code_hash", lambda *folders: "other")
    last()  # of other code: measured again
    assert asked[4:] == ["a", "x", "b", "c"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA devices alone")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_graphs_give_the_tokens_of_eager_passes(temperature):
    model, options = tiny_model(dtype=torch.float32).to("cuda"), Options(60, Sampling(temperature), 5)
    eager, target = Target(model), Target(model, engine=Engine("inductor", quiet=True))
    drafter = made("medusa", target, heads=3, rank=4).eval()
    prompts = [[5, 9, 2, 7, 7, 1], [8, 1, 30]]
    for _ in range(3):  # as it is, captured, replayed
        plain = autoregressive(eager, prompts, options)
        assert autoregressive(target, prompts, options).token_ids == plain.token_ids
        assert speculative(target, prompts, options, drafter, 8).token_ids == plain.token_ids
    assert all(isinstance(function, Captured) for function in target.engine.compiled.values())


def test_what_stays_and_what_is_copied():
    """Tensors in lists and weights stay where they are, all others are loose; dicts and tuples keep their form."""
    store, loose, layer = torch.zeros(3), torch.ones(2), torch.nn.Linear(2, 2)
    found = list(parts_of(([(store, None)], {"x": loose}, layer, 5)))
    assert [(part.data_ptr(), stays) for part, stays in found] == [(store.data_ptr(), True), (loose.data_ptr(), False)]
    arguments = ([(store, None)], {"x": loose}, (layer, 5))
    assert [part.data_ptr() for part in weights_of(arguments)] == [layer.weight.data_ptr(), layer.bias.data_ptr()]
    assert devices_of(arguments) == {torch.device("cpu")}


class _Recorded:
    """Stands for a CUDA graph and its events: a replay computes from the addresses that the capture saw."""

    def __init__(self, layer: torch.nn.Linear, store: torch.Tensor) -> None:
        self.weight, self.store, self.input, self.output = layer.weight.data, store, torch.zeros(3), torch.zeros(3)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.weight @ self.input + self.store)

    def wait(self, stream: Any) -> None: ...

    def record(self, stream: Any) -> None: ...


def test_a_graph_belongs_to_the_storage_that_it_was_captured_over(monkeypatch):
    made: list[_Recorded] = []

    def capture(self: Captured, args: Any) -> _Graph:
        recorded: Any = _Recorded(args[0], args[1][0])
        made.append(recorded)
        return _Graph(recorded, [recorded.input], recorded.output, recorded)

    monkeypatch.setattr(Captured, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    slow: list[int] = []
    layer, stores = torch.nn.Linear(3, 3, bias=False), [torch.ones(3), torch.full((3,), 5.0)]
    function = lambda layer, store, x: layer.weight.detach() @ x + store[0]  # noqa: E731
    captured = Captured(function, torch.device("cuda"), print, lambda: slow.append(1))

    def right(store: torch.Tensor) -> None:
        x = torch.randn(3)
        torch.testing.assert_close(captured(layer, [store], x), layer.weight.detach() @ x + store)

    for store in stores:
        for _ in range(3):  # as it is, captured, replayed
            right(store)
    assert [each.replays for each in made] == [2, 2]
    assert len(slow) == 4  # as it is, and captured, over each storage
    layer.weight.data.mul_(2)  # trained in place: the same graphs
    right(stores[0])
    assert [each.replays for each in made] == [3, 2]
    layer.weight.data = torch.randn(3, 3)  # elsewhere: another graph
    for _ in range(2):
        right(stores[0])
    assert [each.replays for each in made] == [3, 2, 1]


def test_what_is_laid_out_anew_is_not_replayed_from_where_it_lay():
    target = Target(tiny_model(), engine=Engine("eager", quiet=True))
    drafter = made("medusa", target, heads=3, rank=4).eval()
    speculative(target, [[5, 9, 2, 7]], Options(8), drafter, 6)
    known, code = next((k, c) for k, c in target.engine.compiled.items() if drafter in k)
    captured = target.engine.compiled[known] = Captured(code, torch.device("cuda"), print, lambda: None)
    captured.weights = list(weights_of([drafter]))
    drafter.train()
    drafter.eval()
    assert captured.weights is None


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_runs_the_same(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    before = (ROOT / "notebooks" / "results" / "gpu.md").read_text()
    done = subprocess.run(
        [sys.executable, "eval/gpu.py", f"hydra.run.dir={tmp_path / 'gpu'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU here" in done.stdout
    found = (tmp_path / "gpu" / "gpu.md").read_text()
    assert "failed at " not in found
    assert " 0 faults of 7" in found
    assert all(f"**{part}**" in found for part in ("speeds", "passes", "exactness", "training"))
    assert (ROOT / "notebooks" / "results" / "gpu.md").read_text() == before
