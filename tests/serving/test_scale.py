"""A trainer of a 70B target, by shapes: what it holds of a checkpoint without its layers, and how its memory stays over
100,000 sequences of states that a simulated server hands out."""

import json
import os
import resource
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import save
from transformers import LlamaConfig

from selfspec.utils.files import write_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs/serving/scale.json"
H, V, LAYERS = 8192, 128256, 80  # of Llama-3.1-70B
SEQUENCES, TOKENS = 100_000, 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def keep_figures(**figures: Any) -> None:
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write_text(RESULTS, json.dumps(before | figures, indent=1) + "\n")


def checkpoint(folder: Path, tokenizer: Any) -> None:
    """A folder of Llama-70B's shapes: two shards, sparse on the disk, with all tensors of all layers."""
    config = LlamaConfig(
        hidden_size=H,
        vocab_size=V,
        num_hidden_layers=LAYERS,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        dtype="bfloat16",
    )
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kv = 8 * 128
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [V, H],
        "model.norm.weight": [H],
        "lm_head.weight": [V, H],
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.q_proj.weight": [H, H], f"{at}.self_attn.o_proj.weight": [H, H]}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": [kv, H] for n in "kv"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": [28672, H] for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": [H, 28672], f"{at}.input_layernorm.weight": [H]}
        shapes[f"{at}.post_attention_layernorm.weight"] = [H]
    files: dict[str, list[str]] = {"model-00001.safetensors": [], "model-00002.safetensors": []}
    for name in shapes:
        files["model-00001.safetensors" if ".layers." not in name else "model-00002.safetensors"].append(name)
    for file, names in files.items():
        header, end = {}, 0
        for name in names:
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


_TRAINER = """
import json, resource, sys, torch
from selfspec.checkpoints.target_parts import load_parts
from selfspec.drafters.registry import build, config_class, drafter_class
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**30
begin = rss()
target, _ = load_parts(sys.argv[1], device="cpu")
loaded = rss()
drafter = build(drafter_class("eagle3"), target, config_class(drafter_class("eagle3"))(draft_vocab=32000))
trained = sum(p.numel() for p in drafter.trained().values())
print(json.dumps({"begin": begin, "loaded": loaded, "built": rss(), "trained": trained, "reads": list(drafter.reads),
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))
"""


def test_a_70b_checkpoint_without_its_layers(tmp_path, tokenizer):
    checkpoint(tmp_path / "llama-70b", tokenizer)
    size = sum(path.stat().st_size for path in (tmp_path / "llama-70b").glob("*.safetensors"))
    assert size > 140e9
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _TRAINER, str(tmp_path / "llama-70b")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    three, layer = (2 * V * H + H) * 2 / 2**30, found["trained"] * 4 / 2**30
    keep_figures(checkpoint={**found, "three_tensors": three, "drafter": layer, "seconds": time.perf_counter() - start})
    assert found["loaded"] - found["begin"] < 1.05 * three + 0.3
    assert found["built"] - found["begin"] < 1.05 * (three + layer) + 0.6  # nothing else is held
    assert found["reads"] == [1, 39, 76]


class Simulated:
    """In the place of `Servers`: writes states of the target's shapes as vLLM's connector does, after a delay."""

    urls = ("simulated",)

    def __init__(self, folder: Path, layers: int, seconds_per_token: float) -> None:
        self.folder, self.delay, self.count, self.lock = folder, seconds_per_token, 0, threading.Lock()
        states = torch.randn(TOKENS, layers, H, dtype=torch.bfloat16)
        self.states = {"hidden_states": states, "token_ids": torch.zeros(TOKENS, dtype=torch.int64)}
        folder.mkdir()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.count += 1
            number = self.count
        time.sleep(self.delay * len(body["prompt"]))
        place = self.folder / f"{number}.safetensors"
        place.write_bytes(save({**self.states, "token_ids": torch.tensor(body["prompt"])}))
        place.with_name(place.name + ".lock").touch()
        return {
            "choices": [{"prompt_token_ids": body["prompt"]}],
            "kv_transfer_params": {"hidden_states_path": str(place)},
        }


def test_memory_stays_over_100_000_sequences(tmp_path):
    from selfspec.core.target import Target
    from selfspec.data.packing import Packed
    from selfspec.data.store import joined
    from selfspec.training.states_server import Ahead, FromServer

    target = Target(tiny_model(dtype=torch.bfloat16, num_hidden_layers=LAYERS))
    target.hidden_size = H  # of the states, which nothing else reads here
    tokens = (torch.arange(SEQUENCES * TOKENS) * 7919) % 1_000_003
    starts, mask = torch.arange(0, len(tokens) + 1, TOKENS), torch.ones(len(tokens), dtype=torch.bool)
    corpus = joined(tokens, mask, starts, torch.ones(SEQUENCES, dtype=torch.bool))
    del tokens, mask
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    folder = place / f"selfspec-states-{os.getpid()}"
    server = Simulated(folder, 4, 1e-5)
    states = FromServer(target, (1, 39, 76), server, None, 0.2)
    batches, read, most = Ahead(Packed(corpus, 64, 8, 0), states, 10**6, None), 0, list[float]()
    begun = time.perf_counter()
    step, on_disk = 0, 0
    while read < SEQUENCES:
        batches.prepare(step)
        batch = batches(step)
        features = states.features(batch)
        read += sum(int(row.max()) + 1 for row in batch["documents"])
        step += 1
        if step % 50 == 0:
            most.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
            on_disk = max(on_disk, sum(1 for _ in folder.iterdir()))
        assert states.held <= 0.2e9
    assert set(features) == {1, 39, 76, 79}
    seconds = time.perf_counter() - begun
    states._pool.shutdown(cancel_futures=True)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    first, last = max(most[2 : len(most) // 4]), max(most[-len(most) // 4 :])
    keep_figures(
        sequences={
            "count": read,
            "tokens": read * TOKENS,
            "bytes_read": read * TOKENS * 4 * H * 2,
            "seconds": seconds,
            "memory_mb_first_quarter": first,
            "memory_mb_last_quarter": last,
            "memory_mb_each_tenth": [
                round(max(most[i * len(most) // 10 : (i + 1) * len(most) // 10])) for i in range(10)
            ],
            "files_on_disk_at_most": on_disk,
            "said": states.summary,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )
    assert last < first + 200  # what is asked for in advance comes and goes
