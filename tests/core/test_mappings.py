"""No mapping is read loosely: each argument that is one refuses unknown keys and absent names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import sdpa_xp
from sdpa_xp import (
    KVCache,
    layers,
    masks,
    positional,
    scaled_dot_product_attention_jvp,
    scaled_dot_product_attention_laplacian,
    scaled_dot_product_attention_vjp,
)
from sdpa_xp.layers import Layer, Linear, MultiHeadAttention, SingleHeadAttention
from sdpa_xp.typing import Pullback

F = np.float32
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 2, 4, 8)).astype(F)
SELF = MultiHeadAttention.init(RNG, 8, num_heads=2)
SINGLE = SingleHeadAttention.init(RNG, 8, 8)
STORED = KVCache(X, X).quantised("int8").stored


class Argument(NamedTuple):
    """An argument that is a mapping: the function, a call with it, and a mapping that is right."""

    function: Callable[..., Any]
    name: str
    call: Callable[[Any], Any]
    right: Mapping[Any, Any]
    slip: str
    """A key of the mapping, misspelt, and ..."""
    meant: str
    """... the key that is meant."""
    needed: str = ""
    """A key that must be there."""


def moved(tangents: Any) -> Any:
    return scaled_dot_product_attention_jvp(X, X, X, tangents)


def moved_twice(tangents: Any, laplacians: Any = None) -> Any:
    return scaled_dot_product_attention_laplacian(X, X, X, tangents, laplacians=laplacians)


def pulled_back(tangents: Any) -> Any:
    return scaled_dot_product_attention_vjp(X, X, X)[1].jvp(X, tangents)


def with_heads(names: Any) -> Any:
    return MultiHeadAttention.from_mapping(SELF.parameters, num_heads=2, names=names)


def with_one_head(names: Any) -> Any:
    return SingleHeadAttention.from_mapping(SINGLE.parameters, names=names)


JVP, LAPLACIAN = scaled_dot_product_attention_jvp, scaled_dot_product_attention_laplacian
QUERY = {"query": X}
ARGUMENTS = {
    "of jvp": Argument(JVP, "tangents", moved, QUERY, "qurey", "query"),
    "by another word": Argument(JVP, "tangents", moved, QUERY, "q", "query"),
    "of the Laplacian": Argument(LAPLACIAN, "tangents", moved_twice, {"value": X[None]}, "vlaue", "value"),
    "laplacians": Argument(
        LAPLACIAN, "laplacians", lambda bends: moved_twice({"key": X[None]}, bends), {"key": X}, "keys", "key"
    ),
    "of a pullback": Argument(Pullback.jvp, "tangents", pulled_back, QUERY, "Query", "query"),
    "stored": Argument(
        KVCache.from_stored, "stored", KVCache.from_stored, STORED, "key_scales", "key_scale", "value_scale"
    ),
    "parameters": Argument(
        Layer.with_parameters,
        "parameters",
        SELF.with_parameters,
        {"out.bias": np.ones(8, F)},
        "out.bais",
        "out.bias",
    ),
    "names": Argument(
        MultiHeadAttention.from_mapping, "names", with_heads, {"query": "query"}, "output", "out"
    ),
    "names by other words": Argument(
        MultiHeadAttention.from_mapping, "names", with_heads, {"query": "query"}, "o_proj", "out"
    ),
    "names of one head": Argument(
        SingleHeadAttention.from_mapping, "names", with_one_head, {"key": "key"}, "k_proj", "key"
    ),
}


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_each_mapping_is_read_strictly(argument: Argument) -> None:
    argument.call(argument.right)
    with pytest.raises(ValueError, match=rf"`{argument.name}` must have keys among .*; got key=0\.$"):
        argument.call({**argument.right, 0: X})
    words = rf"`{argument.name}` must have keys among .*{argument.meant}.*; got key='{argument.slip}'\. "
    with pytest.raises(ValueError, match=rf"{words}Write '{argument.meant}' instead\.$"):
        argument.call({**argument.right, argument.slip: X})
    for no_mapping in ([X], 3, "query"):
        with pytest.raises(TypeError, match=rf"`{argument.name}` must be a mapping with keys among .*; got"):
            argument.call(no_mapping)
    if argument.needed:
        less = {name: x for name, x in argument.right.items() if name != argument.needed}
        with pytest.raises(ValueError, match=rf"`{argument.name}` must have the key '{argument.needed}'; got"):
            argument.call(less)


FILES = ("mapping",)
"""Arguments that may have more arrays than are read: files of whole models."""


def public_functions() -> dict[str, Any]:
    """The functions of the library, and the methods of its classes, by name."""
    functions: dict[str, Any] = {}
    for module in (sdpa_xp, layers, positional, masks, sdpa_xp.biases, sdpa_xp.plot, sdpa_xp.typing):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                functions[name] = value
            elif inspect.isclass(value) and value.__module__.startswith("sdpa_xp"):
                members = inspect.getmembers(value, callable)
                functions |= {f"{name}.{key}": x for key, x in members if not key.startswith("_")}
    return functions


def test_each_argument_that_is_a_mapping_is_in_the_table() -> None:
    known = {(argument.function.__name__, argument.name) for argument in ARGUMENTS.values()}
    missing = []
    for name, function in public_functions().items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # of a builtin
            continue
        for parameter in parameters:
            is_mapping = "Mapping" in str(parameter.annotation) or "dict" in str(parameter.annotation)
            is_known = (name.rpartition(".")[2], parameter.name) in known or parameter.name in FILES
            if is_mapping and not is_known:
                missing.append(f"{name}: {parameter.name}")
    assert not missing


W = {name: RNG.standard_normal((8, 8)).astype(F) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
FILE = {f"{name}.weight": x for name, x in W.items()}
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def from_file(names: Any, file: Any = FILE) -> MultiHeadAttention:
    return MultiHeadAttention.from_mapping(file, num_heads=2, names=names)


def test_what_names_asks_for_must_be_there() -> None:
    """Without the projection, the output of the layer is another one."""
    assert from_file(NAMES | {"out": "o_proj"}).out is not None
    with pytest.raises(
        ValueError, match=r"must have 'out_proj.weight'; got names=.*nearest is 'o_proj.weight'"
    ):
        from_file(NAMES | {"out": "out_proj"})
    for field in ("scale", "temperature", "sinks"):
        with pytest.raises(ValueError, match=r"^MultiHeadAttention.from_mapping: `mapping` must have 'factor'"):
            from_file(NAMES | {field: "factor"})
    with pytest.raises(ValueError, match=r"`mapping` must have '3\.weight'"):
        from_file(NAMES | {"out": 3})
    with pytest.raises(ValueError, match=r"must have 'o_proj.weight.weight'; .*nearest is 'o_proj.weight'"):
        from_file(NAMES | {"out": "o_proj.weight"})


def test_a_name_of_another_map_is_not_suggested() -> None:
    file = {f"{role}.weight": x for role, x in zip(("key", "value", "out"), W.values(), strict=False)}
    with pytest.raises(ValueError, match=r"must have 'query.weight'; got names=key.weight") as error:
        MultiHeadAttention.from_mapping(file, num_heads=2)
    assert "nearest" not in str(error.value)
    file["qurey.weight"] = W["q_proj"]
    with pytest.raises(ValueError, match=r"The nearest is 'qurey.weight'\.$"):
        MultiHeadAttention.from_mapping(file, num_heads=2)
    with pytest.raises(ValueError, match=r"must have 'query.weight'; got names=1, a\."):
        MultiHeadAttention.from_mapping({1: 2, "a": 3}, num_heads=2)


def test_a_bias_without_its_weight_is_not_left_out() -> None:
    file = {name: x for name, x in SELF.parameters.items() if name != "out.weight"}
    with pytest.raises(ValueError, match=r"`mapping` must have 'out.weight'"):
        MultiHeadAttention.from_mapping(file, num_heads=2)


def test_names_beside_those_of_torch() -> None:
    """The names that a caller gives are read, and not those of torch.nn.MultiheadAttention."""
    file = {"in_proj_weight": np.ones((24, 8), F), "out_proj.weight": np.ones((8, 8), F)}
    assert MultiHeadAttention.from_mapping(file, num_heads=2).out is not None
    with pytest.raises(ValueError, match=r"`mapping` must have 'query.weight'"):
        MultiHeadAttention.from_mapping(file, num_heads=2, names={"out": "out_proj"})


def test_a_layer_says_that_it_lacks_out() -> None:
    assert repr(from_file(NAMES)) == "MultiHeadAttention(8 -> 8, num_heads=2, without out, float32)"
    assert "without" not in repr(from_file(NAMES | {"out": "o_proj"}))
    assert "without" not in repr(SINGLE)


@pytest.mark.parametrize("wrong", [None, "x", [1.0], masks.causal()], ids=str)
def test_a_parameter_must_be_an_array(wrong: Any) -> None:
    """None would leave the bias out."""
    with pytest.raises(TypeError, match=r'`parameters\["query.bias"\]` must be an array; got query.bias='):
        SELF.with_parameters({"query.bias": wrong})


def test_a_scale_without_axes_may_have_become_a_number() -> None:
    layer = MultiHeadAttention(*[Linear(x) for x in W.values()], num_heads=2, scale=np.asarray(0.5, F))
    (scale,) = [x for name, x in layer.parameters.items() if name == "scale"]
    assert layer.with_parameters({"scale": scale * F(2)}).scale == 1


def test_scalings_of_transformers_are_classes_here() -> None:
    with pytest.raises(
        TypeError, match=r"`scaling` must be a Scaling or None; got .*Llama3Scaling or YaRNScaling"
    ):
        positional.Rotary(8, scaling={"rope_type": "llama3", "factor": 8.0})  # type: ignore[arg-type]
