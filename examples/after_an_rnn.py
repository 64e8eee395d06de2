"""Attention pooling after a recurrent network, over packed sequences of different lengths.

    ragged sequences, packed -- GRU --> states, padded (B, L, C), as heads (B, H, L, E)
    a learned query a head (H, 1, E) -- attention, padding masked --> (B, H, 1, E) -> (B, C) --> the class

The class of a sequence is the class of its one marked token, which may be anywhere.

Run it: python examples/after_an_rnn.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from sdpa_xp import attention_weights, masks, scaled_dot_product_attention

CLASSES, LONGEST, CHANNELS, HEADS, STEPS = 4, 24, 32, 2, 200


class Pooling(nn.Module):
    """Pool states (B, L, C) of sequences with their lengths -> (B, C)."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(num_heads, 1, channels // num_heads))

    def heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.query.shape[0], -1)).transpose(1, 2)

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        keys = self.heads(states)
        return scaled_dot_product_attention(self.query, keys, keys, masks.padding(lengths)).flatten(1)

    def weights(self, states: Tensor, lengths: Tensor) -> Tensor:
        """Return the attention weights of each head over the states, (B, H, L)."""
        return attention_weights(self.query, self.heads(states), attn_mask=masks.padding(lengths)).squeeze(-2)


class Classifier(nn.Module):
    """Packed sequences -> a logit for each class, (B, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(CLASSES + 1, CHANNELS, batch_first=True)
        self.pooling = Pooling(CHANNELS, HEADS)
        self.classify = nn.Linear(CHANNELS, CLASSES)

    def states(self, packed: PackedSequence, **padding: float) -> tuple[Tensor, Tensor]:
        """Return the states of the network, padded to the longest sequence, (B, L, C), and the lengths."""
        states, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, **padding)
        return states, lengths

    def forward(self, packed: PackedSequence, **padding: float) -> Tensor:
        return self.classify(self.pooling(*self.states(packed, **padding)))


def sequences(count: int, rng: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Return sequences of random tokens, (length, CLASSES + 1), and the class of the marked token of each."""
    batch, labels = [], []
    for _ in range(count):
        length = int(torch.randint(LONGEST // 3, LONGEST + 1, (), generator=rng))
        classes = torch.randint(CLASSES, (length,), generator=rng)
        marked = torch.randint(length, (), generator=rng)
        mark = nn.functional.one_hot(marked, length)[:, None]
        batch.append(torch.cat([nn.functional.one_hot(classes, CLASSES), mark], dim=-1).float())
        labels.append(classes[marked])
    return batch, torch.stack(labels)


def packed(batch: list[Tensor]) -> PackedSequence:
    return pack_sequence(batch, enforce_sorted=False)


def main() -> None:
    """Train the classifier, and check that padding never changes its results, even if it holds NaN."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Classifier()
    rng = torch.Generator().manual_seed(0)
    optimiser, losses = torch.optim.Adam(net.parameters(), lr=1e-2), []
    print(
        f"Each sequence has up to {LONGEST} tokens, one of them marked. Its class is that of the marked token."
    )
    print(f"Training a GRU with attention pooling for {STEPS} steps:")
    for step in range(STEPS):
        batch, labels = sequences(32, rng)
        loss = nn.functional.cross_entropy(net(packed(batch)), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == STEPS - 1:
            print(f"  step {step:3}  loss {losses[-1]:.3f}", flush=True)
    assert losses[-1] < losses[0] / 4

    batch, labels = sequences(200, rng)
    with torch.no_grad():
        logits = net(packed(batch))
        alone = torch.cat([net(packed([sequence])) for sequence in batch])
        weights = net.pooling.weights(*net.states(packed(batch)))
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(net(packed(batch), padding_value=torch.nan), logits, rtol=0, atol=1e-5)
    assert all((row[:, len(sequence) :] == 0).all() for row, sequence in zip(weights, batch, strict=True))
    right = (logits.argmax(-1) == labels).float().mean().item()
    assert right > 0.95
    print(f"It classifies {right:.0%} of {len(batch)} new sequences correctly.")
    mark, attended = int(batch[0][:, -1].argmax()), weights[0].argmax(-1).tolist()
    print(f"In the first of them the mark is on token {mark}. The heads attend most to the tokens {attended},")
    print("the states there and after it, into which the network has carried what it read at the mark.")
    print("The results do not change if a sequence is classified alone, or if its padding holds NaN.")


if __name__ == "__main__":
    main()
