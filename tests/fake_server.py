"""A stand-in of vLLM's HTTP interface over a tiny target: chat, completions, hidden states in files, counters. What it
does wrong is set from outside."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target


class FakeServer:
    """layers: whose states it hands out (None: none). asked: bodies of all requests; refuse: statuses of the next
    requests; fails: words of those at which it always fails; name: what it calls itself in answers; ids: whether it
    returns token ids; change: what is done to states before they are written; dies_after: requests after which it
    answers no more."""

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        layers: list[int] | None = None,
        port: int = 0,
    ) -> None:
        self.target, self.tokenizer, self.folder, self.layers = target, tokenizer, folder, layers
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.refuse: list[int] = []
        self.fails = ""
        self.name, self.ids, self.ends = "tiny", True, {tokenizer.eos_token_id} - {None}
        self.change: Any = lambda states: states
        self.dies_after: int | None = None
        self.said: dict[str, Any] = {}  # put into each answer's message
        self.finish: str | None = None
        self.template: Any = None  # of prompts, where it is another
        self._lock, self._count = threading.Lock(), 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def send(self, body: Any, code: int = 200) -> None:
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                fake.keys.add(self.headers.get("Authorization"))
                if self.path == "/metrics":
                    self.send(fake.metrics())
                else:
                    self.send({"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    if fake.dies_after is not None and len(fake.asked) >= fake.dies_after:
                        self.close_connection = True
                        return
                    fake.asked.append(body)
                    if fake.refuse:
                        self.send({"error": {"message": "no"}}, fake.refuse.pop(0))
                        return
                    if fake.fails and fake.fails in json.dumps(body):
                        self.send({"error": {"message": "no"}}, 500)
                        return
                    self.send(fake.answer(self.path, body))

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def metrics(self) -> str:
        drafts = float(len(self.asked))
        rows = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}']
        rows += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1.5 * drafts}']
        rows += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {drafts * share}'
            for i, share in enumerate((1.0, 0.5))
        ]
        return "# HELP of counters\n" + "\n".join(rows) + "\n"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path == "/v1/chat/completions"
        if chat:
            tokenizer = self.template or self.tokenizer
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            prompt = body["prompt"]
        options = Options(
            body["max_tokens"], Sampling(body["temperature"]), [body.get("seed", 0)], frozenset(self.ends)
        )
        with torch.no_grad():
            new = autoregressive(self.target, [prompt], options).token_ids[0]
        why = self.finish or ("stop" if new and new[-1] in self.ends else "length")
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": why}
        choice |= {"message": {"role": "assistant", "content": text, **self.said}} if chat else {"text": text}
        answer = {"model": self.name, "choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        answer["usage"]["completion_tokens"] = len(new)
        if self.ids:
            choice["token_ids"] = new
            (answer if chat else choice)["prompt_token_ids"] = prompt
        if self.layers is not None:
            answer["kv_transfer_params"] = {"hidden_states_path": str(self.write(prompt))}
        return answer

    def write(self, prompt: list[int]) -> Path:
        """A file of states, as vLLM's connector writes it."""
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            out = self.target.text(tokens, False, reads=tuple(layer - 1 for layer in self.layers or ()))
        states = torch.stack([out.features[layer - 1][0] for layer in self.layers or ()], 1)
        self._count += 1
        path = self.folder / f"cmpl-{self._count}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": self.change(states).contiguous(), "token_ids": tokens[0].clone()}, path)
        path.with_name(path.name + ".lock").touch()
        return path
