"""Array programs in OpenVINO, with fixed and with open lengths, in a process that a crash may end."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_strict
import numpy as np
import pytest

from sdpa_xp_export import TensorSpec, to_onnx

CHILD = """
import pickle, sys
import numpy, openvino
jobs, results = pickle.load(open(sys.argv[1], "rb")), {}
for name, (model, x) in jobs.items():
    print(name, flush=True)  # the last one that is printed ended the process
    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        outputs = compiled({"x": x})
        results[name] = [numpy.array(outputs[output]) for output in compiled.outputs]
    except RuntimeError as error:
        results[name] = str(error)
pickle.dump(results, open(sys.argv[2], "wb"))
"""
VECTOR = np.asarray([0.5, 2.0, 3.0, -1.0, 2.5], np.float32)
INTEGERS = np.asarray([1, 2, 3, 4, 5], np.int32)
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
Layer = Callable[[Any, Any], Any]
OF_VECTORS: dict[str, Layer] = {
    "where of booleans": lambda xp, x: xp.where(x > 2, x > 2, x > 2),
    "where of other booleans": lambda xp, x: xp.where(x > 2, x < 4, x == x),
    "where of a boolean": lambda xp, x: (xp.where(x > 2, x < 3, False), xp.where(x > 2, True, x < 1)),
    "where of booleans of two axes": lambda xp, x: xp.where(x > 2, (x < 4)[None, :], (x > 1)[:, None]),
    "where": lambda xp, x: (xp.where(x > 2, x, x + x), xp.where(x > 2, x, 0 * x)),
    "logic": lambda xp, x: (
        xp.logical_xor(x > 2, x < 4),
        (x > 2) ^ (x < 4) ^ (x == 3),
        (x > 2) == (x < 4),
        ~(x > 2) | (x < 1),
        xp.tril(xp.broadcast_to(x > 1, (2, *x.shape))),
    ),
    "tensordot": lambda xp, x: (xp.tensordot(x, x, axes=1), xp.tensordot(x, x, axes=0)),
    "vecdot": lambda xp, x: (xp.vecdot(x, x), x @ x, x[None, :] @ x[:, None]),
    "outer": lambda xp, x: x[:, None] * x[None, :],
    "repeat": lambda xp, x: (xp.repeat(x, 2), xp.repeat(x, 0)),
    "no index": lambda xp, x: (xp.take(x, xp.asarray([], dtype=xp.int64)), x[:0], xp.tile(x, (0,))),
    "a computed start": lambda xp, x: (x[x.shape[0] // 2 :], x[x.shape[0] // 2 : x.shape[0] - 1]),
}
OF_FLOATS: dict[str, Layer] = {
    "a boolean of NaN": lambda xp, x: xp.astype(xp.where(x > 2, x * xp.nan, x - x), xp.bool),
    "half a selection": lambda xp, x: (lambda y: y[y.shape[0] // 2 :] + xp.ones(y[y.shape[0] // 2 :].shape[0]))(
        x[x > 1]
    ),
    "the length of half": lambda xp, x: (lambda y: xp.zeros(y[y.shape[0] // 2 :].shape[0]))(x[x > 1]),
    "two halves": lambda xp, x: (lambda y: xp.concat([y[y.shape[0] // 2 :], y[: y.shape[0] // 2]]) + y)(
        x[x > 1]
    ),
    "from the second": lambda xp, x: (lambda y: y[1:] + y[:-1] + xp.ones(y[1:].shape[0]))(x[x > 1]),
    "every second": lambda xp, x: (lambda y: (y[::2], xp.zeros(y[::2].shape[0]), y[::-1]))(x[x > 1]),
    "products of a selection": lambda xp, x: (lambda y: (y @ y, xp.tensordot(y, y, axes=1)))(x[x > 1]),
    "a selection and ones": lambda xp, x: x[x > 1] * 2 + xp.ones(x[x > 1].shape[0]),
    "where of a selection": lambda xp, x: (lambda y: xp.where(y > 2, y, 0.0))(x[x > 1]),
}
OF_MATRICES: dict[str, Layer] = {
    "tensordot of matrices": lambda xp, x: (
        *(xp.tensordot(x, x.mT if n == 1 else x, axes=n) for n in (0, 1, 2)),
        xp.tensordot(x, x, axes=((0, 1), (0, 1))),
        xp.tensordot(x, x, axes=((1,), (1,))),
        xp.tensordot(x, x[0, :], axes=1),
        xp.tensordot(xp.stack([x, x]), x, axes=((2, 1), (1, 0))),
    ),
    "repeat of rows": lambda xp, x: (xp.repeat(x, 0, axis=0), xp.repeat(x, 0, axis=1), xp.repeat(x, 2, axis=0)),
}


def jobs() -> dict[str, tuple[Layer, TensorSpec, np.ndarray]]:
    with_inputs = [
        (OF_VECTORS, x) for x in (VECTOR, INTEGERS, INTEGERS.astype("int8"), VECTOR.astype("float16"))
    ]
    with_inputs += [(OF_FLOATS, VECTOR), (OF_MATRICES, MATRIX)]
    return {
        f"{name}, {x.dtype}, {shape}": (layer, TensorSpec(x.dtype, shape), x)
        for layers, x in with_inputs
        for name, layer in layers.items()
        for shape in (x.shape, ("N", "M")[: x.ndim])
    }


def strictly(layer: Layer, x: np.ndarray) -> list[np.ndarray]:
    wide = x.astype(np.float32) if x.dtype == "float16" else x  # which the standard lacks
    results = layer(array_api_strict, array_api_strict.asarray(wide))
    return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.needs("openvino")
def test_what_openvino_computes(tmp_path: Path) -> None:
    models = {
        name: (
            to_onnx(
                lambda x, layer=layer: layer(x.__array_namespace__(), x), spec, runtime="openvino>=2026.4;cpu"
            ).SerializeToString(),
            x,
        )
        for name, (layer, spec, x) in jobs().items()
    }
    (tmp_path / "jobs").write_bytes(pickle.dumps(models))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "jobs"), str(tmp_path / "results")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout.splitlines()[-1:]
    results = pickle.loads((tmp_path / "results").read_bytes())
    for name, (layer, _, x) in jobs().items():
        assert not isinstance(results[name], str), (name, results[name])
        close = 1e-2 if x.dtype == "float16" else 1e-6
        for output, expected in zip(results[name], strictly(layer, x), strict=True):
            assert output.shape == expected.shape, name
            np.testing.assert_allclose(output.astype(float), expected.astype(float), rtol=close, err_msg=name)
