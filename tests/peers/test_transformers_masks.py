"""The masks of transformers as masks of sdpa_xp: the same pairs, and no array of L x S."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from peers.tiny_models import DECODER, SIZES

from sdpa_xp import masks

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from internals import MaskTensor, transformers_masks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as theirs

from sdpa_xp.integrations.transformers import register

pytestmark = [pytest.mark.needs("torch", "transformers"), pytest.mark.slow]

PLACES = {
    "prompt": (7, 7, 0, 0),
    "short": (3, 3, 0, 0),
    "step": (1, 7, 6, 0),
    "pieces": (3, 7, 4, 0),
    "static": (3, 9, 2, 0),
    "empty static": (5, 9, 0, 0),
    "window of a cache": (3, 6, 9, 6),
    "step of a window": (1, 4, 9, 6),
}
"""Queries, keys, and the position of the first of each."""


IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3], [0] * 12])
CHUNK = theirs.chunked_causal_mask_function(3, torch.tensor([1, 0]))
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window of no key": theirs.sliding_window_causal_mask_function(0),
    "both sides": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": CHUNK,
    "documents": theirs.and_masks(theirs.packed_sequence_mask_function(IDS), theirs.causal_mask_function),
    "either": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(IDS)),
    "either, all": theirs.or_masks(CHUNK, theirs.bidirectional_mask_function),
    "of a user": lambda b, h, i, j: (j + b) % 3 != i % 3,
}
"""What transformers' own code passes, with numbers for a batch of 2."""


def padded(name: str, length: int) -> Any:
    index = torch.arange(length)
    rows = {"none": index < length, "right": index < 5, "left": index >= 3, "holes": index % 3 > 0}
    return torch.stack([rows["none"], rows[name]])


def call_of(name: str, place: str, padding: str) -> dict[str, Any]:
    places = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), PLACES[place], strict=True))
    real = None if padding == "absent" else padded(padding, places["q_offset"] + places["q_length"])
    return {"batch_size": 2, **places, "mask_function": FUNCTIONS[name], "attention_mask": real}


@pytest.mark.parametrize("padding", ["none", "right", "left", "holes", "absent"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_pairs(name: str, place: str, padding: str) -> None:
    call = call_of(name, place, padding)
    for dtype in (torch.float32, torch.bfloat16):
        expected = theirs.eager_mask(**call, dtype=dtype)
        mask = transformers_masks.create_mask(**call, dtype=dtype)
        assert isinstance(mask, MaskTensor)
        assert (mask.shape, mask.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(mask.to_tensor(), expected)
    skipped = transformers_masks.create_mask(**call, allow_is_bidirectional_skip=True)
    assert (skipped is None) == (mask.mask is transformers_masks.EVERY_PAIR)


@pytest.mark.parametrize(
    ("name", "place", "padding", "written"),
    [
        ("causal", "prompt", "none", "causal()"),
        ("causal", "step", "none", "None"),
        ("causal", "pieces", "none", "causal(4)"),
        ("causal", "prompt", "left", "causal() & from_array(<bool (2, 1, 1, 7)>)"),
        ("bidirectional", "prompt", "absent", "None"),
        ("bidirectional", "prompt", "right", "from_array(<bool (2, 1, 1, 7)>)"),
        ("window", "short", "none", "causal()"),
        ("window", "prompt", "none", "sliding_window(left=3, right=0)"),
        ("window", "step of a window", "none", "None"),
        ("window", "window of a cache", "none", "sliding_window(left=3, right=0, offset=3)"),
        ("both sides", "prompt", "none", "sliding_window(left=2, right=2)"),
    ],
)
def test_values(name: str, place: str, padding: str, written: str) -> None:
    """Masks of the library, which skip tiles; parts that mask nothing are left out, for the sake of kernels."""
    mask = transformers_masks.create_mask(**call_of(name, place, padding))
    assert str(None if mask.mask is transformers_masks.EVERY_PAIR else mask.mask) == written


def test_what_cannot_be_a_value_is_an_array() -> None:
    """A function that takes single indices, and the one query of a step with a static cache."""
    table = torch.tensor([True, False, True, True])
    create = partial(transformers_masks.create_mask, batch_size=1, kv_length=4)
    single = create(q_length=4, mask_function=lambda b, h, i, j: table[j], use_vmap=True)
    step = create(q_length=1, q_offset=torch.tensor(2), allow_is_causal_skip=False)
    assert type(single) is type(step) is torch.Tensor
    assert (single == 0).tolist() == [[[table.tolist()] * 4]]
    assert (step == 0).tolist() == [[[[True, True, True, False]]]]


def test_a_mask_that_is_computed_with_has_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of eager attention, for models that have an attention of their own."""

    mask = MaskTensor.from_mask(masks.causal(1), (2, 1, 3, 4), torch.float32, "cpu")
    expected = theirs.eager_mask(2, 3, 4, 1)
    uses: list[Callable[[Any], Any]] = [
        lambda x: torch.arange(4.0) + x,
        lambda x: x + 1,
        lambda x: x[:, :, -1:, :2],
        lambda x: x < 0,
        lambda x: x.mT,
        lambda x: torch.where(x == 0, 1.0, -1.0),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: x.amin(),
    ]
    for use in uses:
        result = use(mask)
        assert type(result) is torch.Tensor
        assert torch.equal(result, use(expected))
    with monkeypatch.context() as patch:
        patch.setattr(MaskTensor, "to_tensor", None)  # what is asked of a mask before it is used needs no array
        assert (mask.shape, mask.size(-1), mask.ndim, mask.dim()) == ((2, 1, 3, 4), 4, 4, 4)
        assert (mask.dtype, mask.device.type, len(mask.shape)) == (torch.float32, "cpu", 4)


def test_no_array_of_all_pairs() -> None:
    """A window over 4,096 tokens, padded: no tensor has as many elements as there are pairs."""

    length = 4096

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, torch.Tensor):
                    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
                    self.elements = max(self.elements, elements)
            return output

    sizes = SIZES | DECODER | {"num_hidden_layers": 1, "sliding_window": 64, "max_position_embeddings": length}
    model = transformers.MistralModel(transformers.MistralConfig(**sizes)).eval()
    ids = torch.ones(1, length, dtype=torch.long)
    real = (torch.arange(length) >= 100)[None]
    largest = {}
    for implementation in ("eager", register()):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), Largest() as counted:
            model(ids, attention_mask=real, use_cache=False)
        largest[implementation] = counted.elements
    assert largest[register()] < length**2 / 8 < length**2 <= largest["eager"]
