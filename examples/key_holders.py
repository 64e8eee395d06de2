"""Keys in two processes, and queries in a third, which sends them to both and merges the states they return.

    ask --- query, 256 bytes ----------> holder of keys 0 to 29,999
        <-- output and lse, 260 bytes -- holder of keys 30,000 to 49,999

The bytes are for one query of one head with E = Ev = 64 in float32. They do not depend on the number of keys.
The pipes stand for any transport: a state is two arrays and the range of its keys.

Run it: python examples/key_holders.py
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from sdpa_xp import AttentionState, attention_state, masks, merge_states, scaled_dot_product_attention

KEYS, WIDTH = 50_000, 64
HALVES = [(0, 30_000), (30_000, KEYS)]


def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values; a real holder would read its own from a disk."""
    angle = np.arange(start, stop, dtype=np.float32)[:, None] * np.linspace(0.01, 1, WIDTH, dtype=np.float32)
    return np.sin(angle), np.cos(angle)


def hold(connection: Connection, start: int, stop: int) -> None:
    """Answer each query with the state over the keys of this process, until the connection closes."""
    key, value = rows(start, stop)
    while True:
        try:
            message, position = connection.recv_bytes(), connection.recv()
        except EOFError:
            return
        query = np.frombuffer(message, np.float32).reshape(-1, WIDTH)
        # Query i attends to the keys up to its position, and the first key here has number `start`.
        state = attention_state(query, key, value, masks.causal(position - start))
        connection.send_bytes(state.output.tobytes() + state.lse.tobytes())
        connection.send((start, stop))


def main() -> None:
    """Send a query to both holders, and compare the merged states with one call that has all keys."""
    processes = multiprocessing.get_context("spawn")
    holders, connections = [], []
    for half in HALVES:
        asking_end, holding_end = processes.Pipe()
        holder = processes.Process(target=hold, args=(holding_end, *half))
        holder.start()
        holding_end.close()
        holders.append(holder)
        connections.append(asking_end)

    query, position = rows(7, 8)[0], 40_000
    for connection in connections:
        connection.send_bytes(query.tobytes())
        connection.send(position)
    states, key_ranges = [], []
    for connection in connections:
        message = connection.recv_bytes()
        print(f"{query.nbytes} bytes out, {len(message)} bytes back")
        numbers = np.frombuffer(message, np.float32)
        states.append(AttentionState(numbers[:WIDTH].reshape(1, WIDTH), numbers[WIDTH:]))
        key_ranges.append(connection.recv())
        connection.close()
    for holder in holders:
        holder.join()

    merged = merge_states(states, key_ranges=key_ranges, keys=KEYS)
    key, value = rows(0, KEYS)
    expected = scaled_dot_product_attention(query, key, value, masks.causal(position))
    np.testing.assert_allclose(merged.output, expected, atol=1e-5)

    for delivered, problem in (([0, 1, 1], "twice"), ([0], "lost")):
        try:
            merge_states(
                [states[n] for n in delivered], key_ranges=[key_ranges[n] for n in delivered], keys=KEYS
            )
        except ValueError as error:
            print(f"{problem}: {error}")
        else:
            raise AssertionError("a state that came twice or not at all was merged")


if __name__ == "__main__":
    main()
