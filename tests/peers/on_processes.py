"""Tensors of torch that lie on two processes: `python on_processes.py FILE`, where the processes meet.

test_torch_distributed.py starts it, since torch's groups of processes stay in a process that has joined one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch._dynamo  # which the first tensor on two processes imports
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

import sdpa_xp
from sdpa_xp import AttentionState, attention_state, masks, merge_states, scaled_dot_product_attention


def refused(function: Callable[..., object], *arrays: torch.Tensor) -> str:
    """Return the message with which a call is refused."""
    try:
        function(*arrays)
    except TypeError as error:
        return str(error)
    raise AssertionError("it was not refused")


def work(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(3))
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)

    def shards(axis: int) -> list[torch.Tensor]:
        return [distribute_tensor(x, mesh, [Shard(axis)]) for x in (query, key, value)]

    for axis in range(4):
        message = refused(scaled_dot_product_attention, *shards(axis))
        assert message.startswith("scaled_dot_product_attention: `query` must be a plain array"), message
        assert "`.to_local()`" in message, message
        assert "`merge_states`" in message, message
    assert "`key`" in refused(attention_state, query, *shards(1)[1:])
    assert "to_local" in refused(sdpa_xp.attention_weights, *shards(1)[:2])

    # The ways that the message names: heads by themselves, and keys by their states.
    heads = scaled_dot_product_attention(*(x.to_local() for x in shards(1)), is_causal=True)
    torch.testing.assert_close(heads, expected[:, 2 * rank : 2 * rank + 2], atol=1e-6, rtol=0)
    _, local_key, local_value = (x.to_local() for x in shards(2))
    state = attention_state(query, local_key, local_value, masks.causal(-3 * rank))
    parts = [[torch.empty_like(array) for _ in range(2)] for array in state]
    for array, received in zip(state, parts, strict=True):
        dist.all_gather(received, array)
    states = [AttentionState(*part) for part in zip(*parts, strict=True)]
    merged = merge_states(states, key_ranges=[(0, 3), (3, 6)], keys=6).output
    torch.testing.assert_close(merged, expected, atol=1e-6, rtol=0)

    scaled_dot_product_attention(query, key, value)  # an equal call has been made before
    buffers = [x.clone() for x in (query, key, value)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        assert "`context_parallel`" in refused(scaled_dot_product_attention, *buffers)
        assert "`context_parallel`" in refused(scaled_dot_product_attention, query, key, value)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, is_causal=True), expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    # To import all this takes longer than the work, so the processes are forks of this one.
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")
