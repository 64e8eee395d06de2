"""Side by side with torch.nn.MultiheadAttention: its weights copied, its boolean masks inverted."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import pytest
import torch
from internals import judge, reference, stages

from sdpa_xp.layers import MultiHeadAttention

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 4, 6
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no bias": {"bias": False},
    "separate": {"kdim": 7, "vdim": 5},
    "separate, no bias": {"kdim": 7, "vdim": EMBED, "bias": False},
    "a key of zeros": {"add_zero_attn": True},
}


def module(batch_first: bool = True, **rules: Any) -> Any:
    torch.manual_seed(3)
    attention = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first, **rules).eval()
    for name, array in attention.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(array)  # torch's own are 0
    return attention.requires_grad_(False)


def draw(rng: np.random.Generator, rules: dict[str, Any]) -> list[Any]:
    widths = (EMBED, rules.get("kdim", EMBED), rules.get("vdim", EMBED))
    lengths = (QUERIES, KEYS, KEYS)
    shapes = [(BATCH, length, width) for length, width in zip(lengths, widths, strict=True)]
    return [torch.asarray(rng.standard_normal(shape), dtype=torch.float32) for shape in shapes]


def plainly(xp: Any, layer: MultiHeadAttention, attend: Any, inputs: Any, allowed: Any) -> tuple[Any, Any]:
    """The layer in the words of a textbook: output and weights."""
    apart = []
    for x, role in zip(inputs, (layer.query, layer.key, layer.value), strict=True):
        y = x @ role.weight.T if role.bias is None else x @ role.weight.T + role.bias
        apart.append(xp.moveaxis(xp.reshape(y, (*y.shape[:-1], HEADS, EMBED // HEADS)), -2, -3))
    output, weights = attend(*apart, attn_mask=allowed, sinks=layer.sinks)
    joined = xp.reshape(xp.moveaxis(output, -3, -2), (*output.shape[:-3], QUERIES, EMBED))
    out: Any = layer.out
    y = joined @ out.weight.T
    return (y if out.bias is None else y + out.bias), weights


def judged(layer: MultiHeadAttention, inputs: Any, allowed: Any, outputs: dict[str, Any], which: int) -> None:
    """Each of `outputs` is as near to float64 as the textbook's formula in float32."""
    wide = layer.with_parameters({name: x.double().numpy() for name, x in layer.parameters.items()})
    numbers = [x.double().numpy() for x in inputs]
    mask = None if allowed is None else allowed.numpy()
    expected = plainly(np, wide, lambda *x, **r: reference.attention(*x, **r)[::2], numbers, mask)[which]

    def attend(*x: Any, **rules: Any) -> Any:
        every = stages(xp, *x, **rules)
        return every["output"], every["weights"]

    plain = plainly(xp, layer, attend, inputs, allowed)[which]
    for name, x in outputs.items():
        agreement = judge(x.numpy(), expected, plain.numpy(), "float32")
        assert agreement.agrees, (name, agreement)


def swapped(*arrays: Any) -> list[Any]:
    return [x.transpose(0, 1) for x in arrays]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("rules", VARIANTS.values(), ids=VARIANTS)
def test_output(rng: np.random.Generator, rules: dict[str, Any], need_weights: bool, batch_first: bool) -> None:
    theirs, inputs = module(batch_first, **rules), draw(rng, rules)
    layer = MultiHeadAttention.from_torch(theirs)
    masked = torch.asarray(rng.random((QUERIES, KEYS)) < 0.4)
    padding = torch.arange(KEYS) >= torch.tensor([[3], [6]])
    masked[:, 0] = False
    arranged = inputs if batch_first else swapped(*inputs)
    output, _ = theirs(*arranged, attn_mask=masked, key_padding_mask=padding, need_weights=need_weights)
    (output,) = [output] if batch_first else swapped(output)
    allowed = ~masked & ~padding[:, None, None, :]
    ours = layer(*inputs, attn_mask=allowed)
    judged(layer, inputs, allowed, {"torch": output, "ours": ours}, which=0)
    turned = layer(*inputs, attn_mask=masked | padding[:, None, None, :])
    assert torch.max(torch.abs(turned - output)) > 0.05


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rules", VARIANTS.values(), ids=VARIANTS)
def test_weights(rng: np.random.Generator, rules: dict[str, Any], batch_first: bool, average: bool) -> None:
    """Of each head; the mean over heads is the caller's. A key of zeros has a column there."""
    theirs, inputs = module(batch_first, **rules), draw(rng, rules)
    layer = MultiHeadAttention.from_torch(theirs)
    arranged = inputs if batch_first else swapped(*inputs)
    _, weights = theirs(*arranged, average_attn_weights=average)
    weights = weights[..., :KEYS]
    ours = layer.weights(*inputs[:2])
    if average:
        torch.testing.assert_close(ours.mean(1), weights, rtol=0, atol=1e-6)
    else:
        judged(layer, inputs, None, {"torch": weights, "ours": ours}, which=1)


def test_mask_of_each_head(rng: np.random.Generator) -> None:
    """A mask of three axes is (batch * heads, L, S) there."""
    theirs, inputs = module(), draw(rng, {})
    masked = torch.asarray(rng.random((BATCH, HEADS, QUERIES, KEYS)) < 0.4)
    masked[..., 0] = False
    output, _ = theirs(*inputs, attn_mask=masked.flatten(0, 1), need_weights=False)
    layer = MultiHeadAttention.from_torch(theirs)
    ours = layer(*inputs, attn_mask=~masked)
    judged(layer, inputs, ~masked, {"torch": output, "ours": ours}, which=0)


def test_row_without_a_key_differs(rng: np.random.Generator) -> None:
    """NaN if the weights are asked for, and the bias of the output alone if not; here always the bias."""
    theirs, inputs = module(), draw(rng, {})
    layer: Any = MultiHeadAttention.from_torch(theirs)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    bias = layer.out.bias.expand(QUERIES, EMBED)
    for weights, expected in ((True, torch.full_like(bias, math.nan)), (False, bias)):
        output, _ = theirs(*inputs, key_padding_mask=padding, need_weights=weights)
        torch.testing.assert_close(output[1], expected, equal_nan=True)
    torch.testing.assert_close(layer(*inputs, attn_mask=~padding[:, None, None])[1], bias)


def test_no_batch_and_causal(rng: np.random.Generator) -> None:
    """`is_causal` is a hint there, which stands beside a mask; here it is the mask."""
    theirs = module()
    layer, x = MultiHeadAttention.from_torch(theirs), draw(rng, {})[0][0]
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True)
    output, _ = theirs(x, x, x, attn_mask=later)
    ours = layer(x, is_causal=True)
    judged(layer, [x] * 3, ~later, {"torch": output, "ours": ours}, which=0)


@pytest.mark.parametrize("rules", [VARIANTS["packed"], VARIANTS["separate"]], ids=["packed", "separate"])
def test_names_of_torch_in_a_file(rules: dict[str, Any]) -> None:
    """`from_mapping` reads them, behind a prefix, as `from_torch` does."""
    theirs = module(**rules)
    file = {f"layers.0.self_attn.{name}": x for name, x in theirs.state_dict().items()}
    read = MultiHeadAttention.from_mapping(file, "layers.0.self_attn.", num_heads=HEADS).parameters
    copied = MultiHeadAttention.from_torch(theirs).parameters
    assert read.keys() == copied.keys()
    assert all(torch.equal(x, copied[name]) for name, x in read.items())


def test_the_weights_are_copies() -> None:
    """What an optimiser does to the module afterwards is not seen in the layer."""
    theirs = module()
    layer = MultiHeadAttention.from_torch(theirs)
    before = layer.query.weight.clone()
    theirs.in_proj_weight.zero_()
    assert torch.equal(layer.query.weight, before)
    assert not any(x.requires_grad for x in layer.parameters.values())


def test_a_file_holds_it() -> None:
    """safetensors takes no tensors that share memory, as thirds of a packed weight would."""
    safetensors = pytest.importorskip("safetensors.torch")
    layer = MultiHeadAttention.from_torch(module())
    again = safetensors.load(safetensors.save(layer.parameters))
    read = MultiHeadAttention.from_mapping(again, num_heads=HEADS)
    assert read.parameters.keys() == layer.parameters.keys()
    assert all(torch.equal(x, layer.parameters[name]) for name, x in read.parameters.items())


def test_xavier_is_that_of_torch() -> None:
    """Not the same numbers, but as far apart: the bound of nn.init.xavier_uniform_ for the same shape."""
    layer = MultiHeadAttention.init(torch.Generator().manual_seed(0), 96, 32, num_heads=4)
    for weight in (layer.query.weight, layer.key.weight):
        theirs = torch.nn.init.xavier_uniform_(torch.empty(weight.shape), generator=torch.Generator())
        assert theirs.abs().max() == pytest.approx(weight.abs().max().item(), rel=0.01)
        assert theirs.std() == pytest.approx(weight.std().item(), rel=0.05)


def test_the_attention_of_a_block() -> None:
    layer = MultiHeadAttention.from_torch(torch.nn.TransformerEncoderLayer(8, 2).self_attn)
    assert layer.num_heads == 2
