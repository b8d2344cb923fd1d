"""vLLM's connector for hidden states where there is no CUDA, whose streams and events the original needs. vLLM imports
this file from its own environment (`selfspec serve-target` says how); nothing of selfspec is imported here."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as original


class CpuHiddenStatesConnector(original.ExampleHiddenStatesConnector):
    """Writes a request's states at once, under the lock that the original holds."""

    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = original.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        path, held = Path(pending.filename), self._lock_fds.pop(pending.req_id, None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
            save_file(tensors, str(path))
        finally:
            if held is not None:
                os.close(held)  # which frees the lock
        self._done = {*getattr(self, "_done", ()), pending.req_id}

    def get_finished(self, finished_req_ids):
        super().get_finished(finished_req_ids)
        done, self._done = getattr(self, "_done", set()), set()
        return done or None, None
