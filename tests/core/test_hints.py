"""The last sentence of a refusal says what mends it, for the mistakes that callers make."""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import ones
from libraries import Library

from sdpa_xp import (
    KVCache,
    attention_scores,
    attention_weights,
    biases,
    dot_product_attention,
    layers,
    masks,
    scaled_dot_product_attention,
    varlen_attention,
)
from sdpa_xp.layers import Linear

F = np.float32


Q, K = ones(2, 4, 5, 8), ones(2, 4, 7, 8)


@pytest.mark.parametrize(
    ("call", "layout"),
    [
        (lambda: scaled_dot_product_attention(ones(2, 5, 4, 8), ones(2, 7, 4, 8), ones(2, 7, 4, 8)), "...LHE"),
        (lambda: scaled_dot_product_attention(ones(5, 4, 8), ones(7, 2, 8), ones(7, 2, 3)), "...LHE"),
        (lambda: attention_weights(ones(2, 5, 4, 8), ones(2, 7, 4, 8)), "...LHE"),
        (lambda: scaled_dot_product_attention(Q, K, K, layout="...LHE"), "...HLE"),
        (lambda: KVCache(ones(1, 7, 4, 8), ones(1, 7, 4, 8)).attend(ones(1, 5, 4, 8)), "...LHE"),
        (lambda: varlen_attention(ones(4, 5, 8), ones(4, 7, 8), ones(4, 7, 8), [0, 5], [0, 7]), "...HLE"),
    ],
)
def test_shapes_of_the_other_layout(call: Any, layout: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'`layout="{layout}"`.')):
        call()


def test_a_function_without_a_layout_names_the_one_that_has_it() -> None:
    with pytest.raises(
        ValueError, match="If the heads come before the length, it is `scaled_dot_product_attention`"
    ):
        dot_product_attention(Q, K, K)


def test_shapes_that_fit_no_layout_get_no_such_hint() -> None:
    with pytest.raises(ValueError, match="must agree on axis -1") as error:
        scaled_dot_product_attention(Q, ones(2, 4, 7, 9), K)
    assert "layout" not in str(error.value)


@pytest.mark.parametrize(
    ("rules", "hint"),
    [
        ({"attn_mask": "causal"}, "`is_causal=True` and `masks.causal()` are the causal mask;"),
        ({"bias": "alibi"}, "`biases.alibi(heads)`."),
        ({"attn_mask": [[True]]}, "Convert the list: numpy.asarray(attn_mask)."),
        ({"scale": ones(4)}, "One for each Hq has the shape (4, 1, 1): scale[:, None, None]."),
        ({"scale": ones(2)}, "One for each B has the shape (2, 1, 1, 1): scale[:, None, None, None]."),
        ({"scale": ones(5)}, "One for each L has the shape (5, 1): scale[:, None]."),
        ({"scale": ones(2, 4)}, "One for each B and Hq has the shape (2, 4, 1, 1): scale[:, :, None, None]."),
        ({"scale": ones(4, 5)}, "One for each Hq and L has the shape (4, 5, 1): scale[:, :, None]."),
        ({"attn_mask": ones(2, 7) > 0}, "attn_mask[:, None, None, :]."),
    ],
    ids=str,
)
def test_keywords(rules: dict[str, Any], hint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(hint)):
        scaled_dot_product_attention(Q, K, K, **rules)


@pytest.mark.parametrize("wrong", [None, 0.0, 3, "query", object()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_list_is_not_told_how_a_list_becomes_an_array(name: str, wrong: object) -> None:
    arrays: dict[str, Any] = {"query": Q, "key": K, "value": K} | {name: wrong}
    with pytest.raises(TypeError, match=f"`{name}` must be a plain array") as error:
        scaled_dot_product_attention(**arrays)
    assert "list" not in str(error.value)


@pytest.mark.needs("torch")
def test_arrays_of_two_libraries_are_converted_by_one_of_them() -> None:
    import torch

    for query, key, code in ((Q, torch.asarray(K), "query"), (torch.asarray(Q), K, "key")):
        with pytest.raises(
            TypeError, match=rf"arrays of one library.*Convert one: torch\.asarray\({code}\)\.$"
        ):
            scaled_dot_product_attention(query, key, key)


@pytest.mark.needs("torch", "jax")
def test_arrays_of_torch_and_jax_are_exchanged() -> None:
    """`torch.asarray` would take an array of JAX for its bytes."""
    import jax.numpy as jnp
    import torch

    for query, key in ((jnp.asarray(Q), torch.asarray(K)), (torch.asarray(Q), jnp.asarray(K))):
        with pytest.raises(
            TypeError, match=r"arrays of one library.*Convert one, for example with `from_dlpack`\.$"
        ):
            scaled_dot_product_attention(query, key, key)


def test_complex_numbers_are_not_told_to_drop_a_part() -> None:
    with pytest.raises(TypeError, match=r"xp\.real\(key\) and xp\.imag\(key\)") as error:
        scaled_dot_product_attention(Q, K.astype(np.complex64), K)
    assert "astype" not in str(error.value)
    with pytest.raises(TypeError, match=r"key\.astype\('float32'\)"):
        scaled_dot_product_attention(Q, K.astype(np.int32), K)


@pytest.mark.leaves_out("cupy-rules-device1")
def test_the_code_of_a_hint_runs(library: Library) -> None:
    """It is written for the library of the arrays; `xp` is a namespace of the standard."""
    wrong, right = library.put(np.ones((3, 4), np.int32)), library.put(np.ones((3, 4), F))
    with library.guard(), pytest.raises(TypeError, match="Convert it first") as error:
        scaled_dot_product_attention(wrong, right, right)
    code = str(error.value).partition("Convert it first: ")[2].removesuffix(".")
    names = {"query": wrong, "xp": library.xp, **sys.modules}
    with library.guard():
        assert scaled_dot_product_attention(eval(code, names), right, right).dtype == right.dtype


def test_a_layer_asks_for_another_input_and_not_for_other_weights() -> None:
    layer = layers.MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
    x = np.ones((3, 8))
    with pytest.raises(TypeError, match=r"Convert the input: query\.astype\('float32'\)"):
        layer(x)
    with pytest.raises(TypeError, match=r"Convert one: value\.astype\(query\.dtype\)"):
        layer(x.astype(F), x.astype(F), x)
    with pytest.raises(TypeError, match=r"Convert the input: x\.astype\('float32'\)"):
        layer.query(x)


WRONG_CONDITIONS: dict[str, Any] = {
    "and": lambda b, h, i, j: i >= j and j > 0,
    "or": lambda b, h, i, j: j > i or i > 2,
    "not": lambda b, h, i, j: not j > i,
    "if": lambda b, h, i, j: j if j > 2 else i,
    "chained": lambda b, h, i, j: 0 < j < i,
}


@pytest.mark.parametrize("mask_mod", WRONG_CONDITIONS.values(), ids=WRONG_CONDITIONS)
def test_a_condition_of_python_in_a_mask_function(library: Library, mask_mod: Any) -> None:
    if library.lazy:
        pytest.skip("Dask's own error says what it is about, and a mask is computed to find it")
    query = np.ones((1, 5, 2), F)
    with pytest.raises(
        (TypeError, ValueError, RuntimeError),
        match=r"the function of `attn_mask` .* combine with `&`, `|` and `~`",
    ):
        library.call(attention_scores, query, query, attn_mask=masks.from_function(mask_mod))


def test_an_error_in_a_score_function_names_the_argument() -> None:
    bias = biases.from_function(lambda s, b, h, i, j: s if j > i else s - 1)
    with pytest.raises(
        ValueError, match=r"the function of `bias` must compute with arrays .* its error=.*ambiguous"
    ):
        scaled_dot_product_attention(Q, K, K, bias=bias)
    wrong = biases.from_function(lambda s, b, h, i, j: s + "1")
    with pytest.raises(TypeError, match="raised by the function of `bias`"):  # a class of NumPy's own
        scaled_dot_product_attention(Q, K, K, bias=wrong)


ONCE = "The indices are arrays: index a table once, as in table[b, q_idx], not table[b][q_idx]."
CHAINED: dict[str, Callable[[Any, Any, Any, Any, Any], Any]] = {
    "a row, then a column": lambda table, b, h, i, j: table[b][i],
    "three times": lambda table, b, h, i, j: table[b][h][i],
    "at last": lambda table, b, h, i, j: table[b, h][i],
    "too many": lambda table, b, h, i, j: table[b, h, i, j],
}


@pytest.mark.parametrize("index", CHAINED)
@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_a_table_that_is_indexed_twice(library: Library, index: str, name: str) -> None:
    """As in FlexAttention, whose functions get numbers."""
    read, shape = CHAINED[index], (2, 9) if index == "a row, then a column" else (2, 4, 9)
    x = np.ones((2, 4, 5, 8), F)
    with library.guard():
        table = library.put(np.ones(shape, F))
        rules: dict[str, Any] = {
            "bias": biases.from_function(lambda s, b, h, i, j: s + read(table, b, h, i, j))
        }
        if name == "attn_mask":
            rules = {"attn_mask": masks.from_function(lambda b, h, i, j: read(table, b, h, i, j) > 0)}
    of_dask = (AssertionError,) if library.name == "dask" else ()  # Dask asserts what its blocks have
    with pytest.raises((IndexError, ValueError, *of_dask)) as error:
        library.call(scaled_dot_product_attention, x, x, x, **rules)
    if not isinstance(error.value, AssertionError):
        assert name in str(error.value)
    if isinstance(error.value, IndexError):
        start = (
            f"scaled_dot_product_attention: the function of `{name}` must compute with arrays of indices; got"
        )
        assert str(error.value).startswith(start)
    if library.name in ("numpy", "torch"):  # JAX clips indices, and so finds other shapes
        assert ONCE in str(error.value)


def test_other_errors_of_an_index_get_no_such_hint() -> None:
    table = np.ones((2, 9), F)
    bias = biases.from_function(lambda s, b, h, i, j: s + table[b, i / 2])
    with pytest.raises(IndexError, match="the function of `bias` must compute with arrays of indices") as error:
        scaled_dot_product_attention(Q, K, K, bias=bias)
    assert "once" not in str(error.value)
    assert "Conditions" not in str(error.value)


def test_a_function_of_another_number_of_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"`mask_mod` must be a function of 4 arguments \(b, h, q_idx, kv_idx\); got"
    ):
        masks.from_function(lambda i, j: i >= j)
    with pytest.raises(
        TypeError, match=r"`score_mod` must be a function of 5 arguments \(score, b, h, q_idx, kv_idx\)"
    ):
        biases.from_function(lambda s, i, j: s)
    masks.from_function(lambda *indices: indices[2] >= indices[3])
    masks.from_function(lambda b, h, i, j, window=3: i - j < window)


class OwnError(ValueError):
    """What a caller's function raises, and the caller expects."""


@pytest.mark.parametrize("error", [LookupError, OwnError, NotImplementedError, KeyboardInterrupt])
def test_an_error_of_the_callers_own_comes_out_as_it_is(error: type[BaseException]) -> None:
    def mask_mod(*_: Any) -> Any:
        raise error("no such table")

    with pytest.raises(error, match="no such table") as raised:
        scaled_dot_product_attention(Q, K, K, masks.from_function(mask_mod))
    assert type(raised.value) is error


def test_an_error_about_something_else_gets_no_hint_about_conditions() -> None:
    mask = masks.from_function(lambda b, h, i, j: (i > j) & np.ones(9, bool))
    with pytest.raises(ValueError, match="the function of `attn_mask` must compute with arrays") as error:
        scaled_dot_product_attention(Q, K, K, mask)
    assert "Conditions" not in str(error.value)


def test_a_decorated_function_counts_by_its_own_arguments() -> None:
    def with_width(function: Any) -> Any:
        @functools.wraps(function)
        def inner(b: Any, h: Any, i: Any, j: Any) -> Any:
            return function(b, h, i, j, 3)

        return inner

    @with_width
    def window(b: Any, h: Any, i: Any, j: Any, width: int) -> Any:
        del b, h
        return i - j < width

    assert scaled_dot_product_attention(Q, K, K, masks.from_function(window)).shape == (2, 4, 5, 8)


@pytest.mark.parametrize(
    "rules",
    [{"sinks": ones(2)}, {"attn_mask": ones(3) > 0}, {"bias": ones(3)}],
    ids=str,
)
def test_what_is_not_one_number_a_row_gets_no_such_hint(rules: dict[str, Any]) -> None:
    q, k = ones(2, 1, 3, 4), ones(2, 1, 1, 4)
    for name, value in rules.items():
        with pytest.raises(ValueError, match=f"`{name}` must broadcast") as error:
            scaled_dot_product_attention(
                q, k if name != "sinks" else q, k if name != "sinks" else q, **{name: value[:2]}
            )
        assert "One for each" not in str(error.value)


@pytest.mark.parametrize(
    "mask", [np.tri(5, dtype=F), np.ones((5, 1), F) * (np.arange(5) < 3)], ids=["causal", "keys"]
)
def test_a_floating_mask_of_zeros_and_ones_is_warned_of(library: Library, mask: np.ndarray) -> None:
    """It is added to the scores. The warning shows the line of the caller."""
    if library.lazy or library.name.startswith(("cupy", "torch-cuda")):
        pytest.skip("no values yet, or none without waiting for a device")
    x, passed = library.put(np.ones((5, 4), F)), library.put(mask.astype(F))
    with pytest.warns(UserWarning, match="`attn_mask` must be boolean to mask") as record:
        scaled_dot_product_attention(x, x, x, passed)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_weights(x, x, bias=passed)
        attention_weights(x, x, attn_mask=passed != 0)
        for other in (passed * 2, passed * 0, passed * 0 + 1, (passed - 1) * 1e9):
            attention_weights(x, x, attn_mask=other)


def warnings_of(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in record if "must be boolean to mask" in str(warning.message)]


@pytest.mark.needs("torch")
def test_zeros_and_ones_while_torch_differentiates() -> None:
    import torch

    x, mask = torch.ones((5, 4), requires_grad=True), torch.ones((5, 5)).tril()

    def attend(query: Any, mask: Any = mask) -> Any:
        return scaled_dot_product_attention(query, x, x, mask).sum()

    assert warnings_of(lambda: attend(x))
    assert warnings_of(lambda: attend(x, mask.requires_grad_()))
    assert warnings_of(lambda: torch.func.grad(attend)(x.detach()))
    assert not warnings_of(lambda: torch.func.vmap(attend, (0, 0))(x.detach()[None], mask[None]))


@pytest.mark.needs("jax")
def test_zeros_and_ones_while_jax_traces() -> None:
    """Inside of `jit` and `grad` a mask that is no argument has values."""
    import jax

    x, mask = jax.numpy.ones((5, 4)), jax.numpy.tril(jax.numpy.ones((5, 5)))

    def attend(query: Any, mask: Any = mask) -> Any:
        return scaled_dot_product_attention(query, query, query, mask).sum()

    assert warnings_of(lambda: jax.eval_shape(jax.grad(attend), x))  # traced alike, and nothing is compiled
    assert warnings_of(lambda: jax.eval_shape(jax.jit(attend), x))
    assert not warnings_of(lambda: jax.eval_shape(jax.jit(attend), x, mask))


@pytest.mark.needs("dask")
def test_zeros_and_ones_of_numpy_beside_dask() -> None:
    import dask.array as da

    x, mask = da.ones((5, 4), chunks=2), np.tri(5)
    assert warnings_of(lambda: scaled_dot_product_attention(x, x, x, mask))
    assert not warnings_of(lambda: scaled_dot_product_attention(x, x, x, da.tri(5, chunks=2)))


WORDS = "Words are not vectors: pass one row of numbers for each word."
UNLIKE_ROWS = (
    "The rows have different lengths: pad them to one length, and mask the padding with masks.padding."
)
CONVERT = "Convert the list: numpy.asarray(query)."


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        (["dogs"], WORDS),
        ([["dogs", "run"], ["cats"]], WORDS),
        (np.asarray(["dogs"]), WORDS),
        (np.asarray([b"dogs"]), WORDS),
        (np.asarray(["dogs"], object), WORDS),
        ([np.ones((2, 3)), np.ones((4, 3))], UNLIKE_ROWS),
        ([[1.0, 2.0], [3.0]], UNLIKE_ROWS),
        ([[[1.0], [2.0]], [[3.0]]], UNLIKE_ROWS),
        (np.asarray([[1.0, 2.0], [3.0]], object), UNLIKE_ROWS),
        ([[1.0, 2.0], [3.0, 4.0]], CONVERT),
        ([np.ones((2, 3)), np.ones((2, 3))], CONVERT),
        ([], CONVERT),
        (np.asarray([[1.0]], object), "Convert it first: query.astype('float32')."),
    ],
)
def test_words_and_rows_of_different_lengths(query: Any, hint: str) -> None:
    key = np.ones((2, 3))
    for call in (lambda: scaled_dot_product_attention(query, key, key), lambda: attention_weights(query, key)):
        with pytest.raises(TypeError, match=rf"`query` must be .*\. {re.escape(hint)}$"):
            call()


def test_a_mask_of_lists_is_no_list_of_words() -> None:
    with pytest.raises(TypeError, match=r"Convert the list: numpy\.asarray\(attn_mask\)\.$"):
        scaled_dot_product_attention(Q, Q, Q, [[True], [True, False]])


@pytest.mark.parametrize("heads", [1, 3])
def test_a_layer_that_is_given_an_axis_of_heads(heads: int) -> None:
    layer = layers.MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
    x = ones(2, heads, 6, 8)
    hint = r"\. If you called a layer: it takes \(batch, length, width\), without an axis of heads\.$"
    for mask in (masks.padding([4, 6]), np.ones((2, 1, 1, 6), bool)):
        with pytest.raises(ValueError, match=hint):
            layer(x, attn_mask=mask)
    with pytest.raises(ValueError, match=hint):
        layer.weights(x, attn_mask=masks.padding([4, 6]))


@pytest.mark.parametrize(
    ("heads", "key_width", "options", "hint"),
    [
        (4, 4, {}, " For grouped heads, pass num_kv_heads=2."),
        (8, 2, {}, " For grouped heads, pass num_kv_heads=2."),
        (4, 4, {"num_kv_heads": 4}, " For grouped heads, pass num_kv_heads=2."),
        (4, 8, {"num_kv_heads": 2}, " The heads are not grouped: leave out num_kv_heads."),
        (4, 3, {}, ""),
        (6, 4, {}, ""),
    ],
)
def test_the_number_of_key_heads_that_fits(
    heads: int, key_width: int, options: dict[str, int], hint: str
) -> None:
    widths = {"query": 8, "key": key_width, "value": key_width}
    mapping = {f"{name}.weight": ones(width, 8) for name, width in widths.items()}
    rule = r"must (have the same width|be a multiple of `num_(kv_)?heads`); got [^.]*"
    with pytest.raises(ValueError, match=rf"{rule}\.{re.escape(hint)}$"):
        layers.MultiHeadAttention.from_mapping(mapping, num_heads=heads, **options)


class Narrow:
    """Arrays of NumPy, of a library whose namespace lacks int64."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        del api_version
        namespace = types.ModuleType("narrow")
        for name, value in vars(np).items():
            if name not in ("int64", "__name__"):
                setattr(namespace, name, value)
        namespace.astype = lambda x, dtype, copy=True: Narrow(np.astype(x.values, dtype, copy=copy))  # type: ignore[attr-defined]
        return namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_unsigned_integers_of_a_library_without_int64(dtype: str) -> None:
    numbers: Any = Narrow(np.asarray([1, 2], dtype))
    rule = r"must hold signed integers.*\.dtype=" + dtype + r"\. Pass signed integers, such as int32\.$"
    for mask, name, shape in (
        (masks.padding(numbers), "key_lengths", (2, 1, 2, 2)),
        (masks.document(numbers), "ids", (2, 2)),
    ):
        with pytest.raises(TypeError, match=rf"^to_array: `attn_mask\.\w*{name}` {rule}"):
            masks.to_array(mask, shape)


X = np.ones((2, 3, 8), F)
BATCH = np.ones((2, 1, 3, 4))

# A hint, a call that it mends, and one that is refused for a like reason, which it would mislead.
HINTS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "an array where a number belongs": (
        "Convert it with `int`.",
        lambda: masks.sliding_window(np.ones(1, int), 0),
        lambda: masks.sliding_window(1.5, 0),
    ),
    "conditions joined by words": (
        "`&`, `|` and `~` combine conditions.",
        lambda: scaled_dot_product_attention(X, X, X, bias=biases.from_function(lambda s, b, h, i, j: True)),
        lambda: scaled_dot_product_attention(X, X, X, bias=biases.from_function(lambda s, b, h, i, j: 1)),
    ),
    "documents of the queries alone": (
        "If S is not L, pass the ids of the keys as `key_ids`.",
        lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2], masks.document([0, 0, 1])),
        lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2], masks.document([0, 0, 1], [0])),
    ),
    "a function for an array": (
        "`from_function` takes a function of the indices.",
        lambda: masks.causal() & (lambda *_: True),
        lambda: masks.causal() & 1,
    ),
    "a mask that was not called": (
        "Call it: causal(...) returns a mask.",
        lambda: scaled_dot_product_attention(X, X, X, masks.causal),
        lambda: scaled_dot_product_attention(X, X, X, len),
    ),
    "a bias that was not called, as a mask": (
        "Call it: alibi(...) returns a bias.",
        lambda: scaled_dot_product_attention(X, X, X, biases.alibi),
        lambda: scaled_dot_product_attention(X, X, X, masks.causal),
    ),
    "a mask of a tokenizer": (
        "counts the 1s of a mask",
        lambda: scaled_dot_product_attention(*[BATCH] * 3, masks.padding(np.ones((2, 3), int))),
        lambda: scaled_dot_product_attention(*[BATCH] * 3, masks.causal(np.ones((2, 3), int))),
    ),
    "a batch without heads": (
        "Inputs of three axes are (heads, length, width).",
        lambda: scaled_dot_product_attention(X, X, X, masks.padding([1, 2])),
        lambda: scaled_dot_product_attention(*[X[:, None]] * 3, masks.padding([1, 2, 3])),
    ),
    "a batch without heads, and a mask of it": (
        "and the mask attn_mask[:, None, None, :].",
        lambda: scaled_dot_product_attention(X, X, X, np.ones((2, 3), bool)),
        lambda: scaled_dot_product_attention(X, X, X, np.ones((4, 3), bool)),
    ),
    "a mask in the place of an array": (
        "Pass it by its keyword: attn_mask=...",
        lambda: scaled_dot_product_attention(X, X, masks.causal()),
        lambda: scaled_dot_product_attention(X, X, biases.alibi(2)),
    ),
    "a bias in the place of an array": (
        "Pass it by its keyword: bias=...",
        lambda: scaled_dot_product_attention(X, biases.alibi(2), X),
        lambda: scaled_dot_product_attention(X, "alibi", X),
    ),
    "a value without a place": (
        "attention_weights takes no value: its third argument is `attn_mask`.",
        lambda: attention_weights(X, X, attn_mask=X),
        lambda: scaled_dot_product_attention(X, X, X, X),
    ),
    "a mask that is added": (
        "Combine masks with `&`, `|` and `~`.",
        lambda: masks.causal() + X,
        lambda: masks.causal() & 1,
    ),
    "a mask with a batch as an array": (
        "Pass a `shape` with the batch: (2, 1, L, S).",
        lambda: masks.to_array(masks.padding([1, 2]), (3, 3)),
        lambda: masks.to_array(masks.padding([1, 2]), (3, 1, 3, 3)),
    ),
    "a mask of tokens for their number": (
        "attn_mask.key_lengths.sum(axis=-1) counts the 1s of a mask.",
        lambda: scaled_dot_product_attention(*[X[None, None]] * 3, masks.padding(np.ones((1, 3), int))),
        lambda: scaled_dot_product_attention(*[X[None, None]] * 3, masks.padding(np.ones((2, 3), int))),
    ),
    "a number for a condition": (
        "Return a condition, such as `kv_idx <= q_idx`.",
        lambda: scaled_dot_product_attention(X, X, X, masks.from_function(lambda b, h, i, j: i - j)),
        lambda: scaled_dot_product_attention(X, X, X, masks.from_function(lambda b, h, i, j: 1)),
    ),
    "a window without a limit": (
        "None is a side without a limit.",
        lambda: masks.sliding_window(2**31 - 1, 0),
        lambda: masks.sliding_window(2.5, 0),
    ),
    "integers for a condition": (
        "attn_mask != 0",
        lambda: scaled_dot_product_attention(X, X, X, np.ones((3, 3), int)),
        lambda: scaled_dot_product_attention(X, X, X, np.ones((3, 3), np.complex64)),
    ),
    "names in a file": (
        ", ...",
        lambda: Linear.from_mapping({f"layer{n}.weight": X for n in range(9)}),
        lambda: Linear.from_mapping({f"layer{n}.weight": X for n in range(8)}),
    ),
}


@pytest.mark.parametrize(("hint", "fits", "misleads"), HINTS.values(), ids=HINTS)
def test_hint(hint: str, fits: Callable[[], Any], misleads: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as one:
        fits()
    with pytest.raises((TypeError, ValueError)) as other:
        misleads()
    assert hint in str(one.value)
    assert hint not in str(other.value)
