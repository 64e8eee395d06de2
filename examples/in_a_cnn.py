"""Attention as a module of torch inside a convolutional network: each pixel attends to all pixels.

    image (B, 5, H, W) -- convolution --> (B, C, H, W), its pixels as tokens (B, H * W, C)
        -- attention --> (B, H * W, C), as an image (B, C, H, W), added to its input
        -- convolution --> which pixels have the colour of the marked one, (B, H, W)

A convolution of width 3 sees only the neighbours of a pixel; the marked pixel may be anywhere.

Run it: python examples/in_a_cnn.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sdpa_xp.layers import MultiHeadAttention

COLOURS, SIZE, CHANNELS, HEADS, STEPS = 4, 6, 32, 2, 400


class PixelAttention(nn.Module):
    """Attention between all pixels: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int, num_heads: int, rng: torch.Generator) -> None:
        super().__init__()
        self.layer = MultiHeadAttention.init(rng, channels, num_heads=num_heads)
        # The name of a torch parameter must not have a dot.
        self.attributes = {name: name.replace(".", "_") for name in self.layer.parameters}
        for name, array in self.layer.parameters.items():
            self.register_parameter(self.attributes[name], nn.Parameter(array))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer.with_parameters(
            {name: getattr(self, attribute) for name, attribute in self.attributes.items()}
        )
        pixels = x.flatten(2).mT
        return x + layer(pixels).mT.unflatten(-1, x.shape[2:])


def network(between: nn.Module) -> nn.Module:
    """Return two convolutions with the module `between` in the middle."""
    return nn.Sequential(
        nn.Conv2d(COLOURS + 1, CHANNELS, 3, padding=1),
        nn.ReLU(),
        between,
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 1, 1),
        nn.Flatten(0, 1),
    )


def images(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of random colours with a marked pixel, and the mask of the pixels of its colour."""
    colours = torch.randint(COLOURS, (count, SIZE * SIZE), generator=rng)
    marked = torch.randint(SIZE * SIZE, (count, 1), generator=rng)
    same = colours == colours.gather(1, marked)
    mark = torch.zeros(count, SIZE * SIZE).scatter(1, marked, 1.0)
    x = torch.cat([nn.functional.one_hot(colours, COLOURS), mark[..., None]], dim=-1)
    return x.mT.unflatten(-1, (SIZE, SIZE)), same.unflatten(-1, (SIZE, SIZE)).float()


def trained(net: nn.Module, rng: torch.Generator) -> list[float]:
    """Train the network and return the loss of each step."""
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, same = images(32, rng)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x), same)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == STEPS - 1:
            print(f"  step {step:3}  loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    """Train the network with attention and without, and compare them on images that neither has seen."""
    right = {}
    print(f"An image has {SIZE} x {SIZE} pixels of {COLOURS} colours, one of them marked.")
    print("The network must find all pixels with the colour of the marked one.")
    for name in ("attention", "no attention"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            rng = torch.Generator().manual_seed(0)
            net = network(PixelAttention(CHANNELS, HEADS, rng) if name == "attention" else nn.Identity())
        print(f"Training with {name} for {STEPS} steps:")
        losses = trained(net, rng)
        x, same = images(200, rng)
        right[name] = ((net(x) > 0) == (same > 0)).float().mean().item()
        print(f"  {right[name]:.0%} of the pixels of {len(x)} new images are right")
        if name == "attention":
            assert losses[-1] < losses[0] / 4
    assert right["attention"] > 0.95
    assert right["no attention"] < 0.85  # all that it learns: most pixels differ
    print("Without attention a pixel sees only its neighbours, so the network learns the most frequent answer.")


if __name__ == "__main__":
    main()
