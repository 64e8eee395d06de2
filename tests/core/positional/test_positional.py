"""Encodings of positions and rotations by them: their formulas in float64, and the laws that they obey."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cache_formula import rotated
from internals import judge
from libraries import Library

from sdpa_xp import biases, positional
from sdpa_xp.positional import Rotary

F = np.float32
EPS = 2.0**-23
DTYPES = ("float16", "bfloat16", "float32", "float64")
SCALINGS = {
    "none": None,
    "linear": positional.LinearScaling(4),
    "NTK": positional.NTKScaling(4),
    "Llama 3": positional.Llama3Scaling(8, 64),
    "YaRN": positional.YaRNScaling(4, 64, beta_fast=8),
    "YaRN, attention factor": positional.YaRNScaling(4, 64, attention_factor=0.7),
    "YaRN, whole ramp": positional.YaRNScaling(4, 64, beta_fast=8, truncate=False),
}


def frequencies(width: int, base: float, scaling: Any) -> np.ndarray:
    """By the formulas as they are published, pair by pair."""
    pair = np.arange(width // 2)
    plain = 1 / base ** (2 * pair / width)
    if isinstance(scaling, positional.LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, positional.NTKScaling):
        return 1 / (base * scaling.factor ** (width / (width - 2))) ** (2 * pair / width)
    if isinstance(scaling, positional.Llama3Scaling):
        wavelength = 2 * math.pi / plain
        low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * plain / scaling.factor + smooth * plain
        long = wavelength > length / low
        return np.where(long, plain / scaling.factor, np.where(wavelength < length / high, plain, between))
    if isinstance(scaling, positional.YaRNScaling):
        turns = np.asarray([scaling.beta_fast, scaling.beta_slow])
        low, high = width * np.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
        low, high = (math.floor(low), math.ceil(high)) if scaling.truncate else (low, high)
        low, high = max(low, 0), min(high, width - 1)
        kept = 1 - np.clip((pair - low) / (high - low), 0, 1)
        return plain / scaling.factor * (1 - kept) + plain * kept
    return plain


def magnitude(rotary: Rotary) -> float:
    """What is turned gets longer with YaRN, by its section 3.4 where no other factor is given."""
    if not isinstance(rotary.scaling, positional.YaRNScaling):
        return 1.0
    return rotary.scaling.attention_factor or 0.1 * math.log(rotary.scaling.factor) + 1


def exact(x: np.ndarray, positions: Any, rotary: Rotary) -> np.ndarray:
    """(..., H, L, E) in float64, as products of complex numbers."""
    angles = np.asarray(positions)[..., None] * frequencies(rotary.width, rotary.base, rotary.scaling)
    angles = angles if angles.ndim == 2 else angles[..., None, :, :]
    return rotated(x, magnitude(rotary) * np.exp(1j * angles), interleaved=rotary.interleaved)


def waves_dtype(library: Library, dtype: str) -> Any:
    """What a sine is exact to: half dtypes take that of float32, and MLX does for float64 too."""
    return np.float64 if dtype == "float64" and library.name != "mlx" else F


def plain(x: np.ndarray, positions: Any, rotary: Rotary, wide: Any) -> np.ndarray:
    """As it is written for torch, `x * cos + rotate_half(x) * sin`, in the dtype of `x`."""
    width, half = rotary.width, rotary.width // 2
    x, rest = x[..., :width], x[..., width:]
    angles = np.asarray(positions, wide)[..., None]
    angles = angles * frequencies(width, rotary.base, rotary.scaling).astype(wide)
    angles = angles if angles.ndim == 2 else angles[..., None, :, :]
    if rotary.interleaved:
        angles = np.repeat(angles, 2, axis=-1)
        other = np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    else:
        angles = np.concatenate([angles, angles], axis=-1)
        other = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    cos, sin = (f(angles).astype(x.dtype) * x.dtype.type(magnitude(rotary)) for f in (np.cos, np.sin))
    return np.concatenate([x * cos + other * sin, rest], axis=-1)


def assert_turned(library: Library, result: np.ndarray, x: np.ndarray, positions: Any, rotary: Rotary) -> None:
    textbook = plain(x, positions, rotary, waves_dtype(library, x.dtype.name))
    agreement = judge(result, exact(x, positions, rotary), textbook, x.dtype.name)
    assert agreement.agrees, agreement


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((2, 3, 5, 12)).astype(F)


# rotary


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary(library: Library, x: np.ndarray, scaling: str, interleaved: bool) -> None:
    """There and back, which is exact but for the rounding, also if YaRN multiplies."""
    rotary = Rotary(12, interleaved=interleaved, scaling=SCALINGS[scaling])
    rotated = library.get(library.call(rotary.apply, x, positions=7))
    assert_turned(library, rotated, x, 7 + np.arange(5), rotary)
    back = library.get(library.call(rotary.inverse, rotated, positions=7))
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("width", [2, 8, 12])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_a_part_of_the_width(library: Library, x: np.ndarray, width: int, interleaved: bool) -> None:
    """What stands behind is not touched."""
    rotary = Rotary(width, base=100.0, interleaved=interleaved)
    rotated = library.get(library.call(rotary.apply, x, positions=3))
    assert_turned(library, rotated, x, 3 + np.arange(5), rotary)
    np.testing.assert_array_equal(rotated[..., width:], x[..., width:])


ROWS = np.asarray([[4, 0, 9, -2, 4], [0, 1, 2, 3, 100]], np.int32)
POSITIONS: dict[str, tuple[Any, Any]] = {
    "start": (3, [3, 4, 5, 6, 7]),
    "start, of NumPy": (np.int64(3), [3, 4, 5, 6, 7]),
    "behind 0": (-2, [-2, -1, 0, 1, 2]),
    "range": (range(9, -1, -2), [9, 7, 5, 3, 1]),
    "list": ([5, 5, 0, 1, -3], [5, 5, 0, 1, -3]),
    "array": (ROWS[0], ROWS[0]),
    "a row each": (ROWS, ROWS),
    "a row for all": (ROWS[:1], ROWS[:1]),
    "floating": (ROWS.astype(F) / 4, ROWS / 4),
}


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions(library: Library, x: np.ndarray, name: str, layout: Any) -> None:
    rotary, (positions, meant) = Rotary(8), POSITIONS[name]
    arranged = x if layout == "...HLE" else np.ascontiguousarray(x.swapaxes(-2, -3))
    rotated = library.get(library.call(rotary.apply, arranged, positions=positions, layout=layout))
    assert_turned(library, rotated if layout == "...HLE" else rotated.swapaxes(-2, -3), x, meant, rotary)


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_one_head_without_batch(library: Library, x: np.ndarray, layout: Any) -> None:
    rotary = Rotary(12)
    rotated = library.call(rotary.apply, x[0, 0], positions=1, layout=layout)
    assert_turned(library, library.get(rotated), x[0, 0], np.arange(1, 6), rotary)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(library: Library, x: np.ndarray, dtype: str) -> None:
    """Half dtypes are turned in float32 and rounded once."""
    library.needs(dtype)
    x, rotary = x.astype(dtype), Rotary(8)
    rotated = library.call(rotary.apply, x, positions=20)
    assert str(rotated.dtype).rpartition(".")[2] == dtype
    rotated = library.get(rotated)
    assert_turned(library, rotated, x, 20 + np.arange(5), rotary)
    if rounding := {"float16": 2**-11, "bfloat16": 2**-8}.get(dtype):
        expected = exact(x, 20 + np.arange(5), rotary)
        error = np.abs(rotated.astype(np.float64) - expected).max()
        assert error <= rounding * np.abs(expected).max() + 16 * EPS


def test_far_positions(library: Library, x: np.ndarray) -> None:
    """Angles of 100,000 turns are exact to the last digits of float32, where there is a float64."""
    library.needs("float64")
    rotary = Rotary(12)
    rotated = library.get(library.call(rotary.apply, x, positions=600_000))
    assert np.abs(rotated - exact(x, 600_000 + np.arange(5), rotary)).max() <= 8 * EPS * np.abs(x).max()


def test_empty(library: Library, x: np.ndarray) -> None:
    library.needs_empty_arrays()
    assert library.call(Rotary(8).apply, x[:, :, :0].copy(), positions=3).shape == (2, 3, 0, 12)


def test_the_caller_s_array_stays(x: np.ndarray) -> None:
    before = x.copy()
    assert not np.shares_memory(Rotary(12).apply(x, 0), x)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies(name: str) -> None:
    """A table of many pairs, on each part of each ramp."""
    scaling = SCALINGS[name]
    for width, base in ((64, 10000.0), (128, 500000.0)):
        result = Rotary(width, base, scaling=scaling).frequencies
        np.testing.assert_allclose(result, frequencies(width, base, scaling), rtol=1e-14)


def test_where_a_ramp_ends() -> None:
    """A single pair, a length in which all pairs turn often, and one that grows by nothing."""
    assert Rotary(2, scaling=positional.NTKScaling(4.0)).frequencies == (1.0,)
    often = Rotary(8, base=100.0, scaling=positional.YaRNScaling(4.0, 2**20))
    np.testing.assert_allclose(often.frequencies, Rotary(8, base=100.0).frequencies, rtol=1e-14)
    assert positional.YaRNScaling(0.5, 64).magnitude == 1


def test_tables(library: Library) -> None:
    """Those that a rotation multiplies by, in the library of what is given."""
    rotary, positions = Rotary(8, scaling=SCALINGS["YaRN"]), np.asarray([[0, 3], [70, 1]], np.int32)
    angles = positions[..., None] * frequencies(8, 10000.0, rotary.scaling)
    with library.guard():
        tables = rotary.cos_sin(library.put(positions))
        same = rotary.cos_sin(positions.reshape(-1).tolist(), like=library.put(np.zeros(1, F)))
    for result, alike, function in zip(tables, same, (np.cos, np.sin), strict=True):
        expected = magnitude(rotary) * function(angles)
        assert library.get(result).dtype == (np.float64 if library.holds("float64") else F)
        bound = 2**-17 if library.name in ("jax", "strict-no_x64") else 4 * EPS  # 70 in float32
        np.testing.assert_allclose(library.get(result), expected, rtol=0, atol=bound)
        assert library.get(alike).dtype == F
        np.testing.assert_allclose(library.get(alike).reshape(2, 2, 4), expected, rtol=0, atol=bound)


def test_rotaries_are_values() -> None:
    one, other = (Rotary(8, scaling=positional.Llama3Scaling(factor)) for factor in (8.0, 4.0))
    assert one == Rotary(8, scaling=positional.Llama3Scaling(8.0))
    assert one != other
    assert len({one, other, Rotary(8, scaling=positional.Llama3Scaling(8.0))}) == 2
    np.testing.assert_array_equal(Rotary(8).cos_sin(range(2))[0][0], np.ones(4))


# encodings


def waves(positions: Any, width: int, base: float) -> np.ndarray:
    """By the paper's formulas, entry by entry, in more digits than float64."""
    p, base = np.asarray(positions, np.longdouble), np.longdouble(base)
    encoding = np.empty((*p.shape, width), np.longdouble)
    for i in range(width // 2):
        encoding[..., 2 * i] = np.sin(p / base ** (np.longdouble(2 * i) / width))
        encoding[..., 2 * i + 1] = np.cos(p / base ** (np.longdouble(2 * i) / width))
    return encoding.astype(np.float64)


def plain_waves(library: Library, positions: Any, width: int, base: float, dtype: str) -> np.ndarray:
    """By the library's own sine, of angles in the dtype of the result; in float32 for a half one."""
    wide = np.float64 if dtype == "float64" else F
    angles = np.asarray(positions, wide)[..., None] / (base ** (np.arange(0, width, 2) / width)).astype(wide)
    pair = [library.get(library.call(wave, angles)) for wave in (library.xp.sin, library.xp.cos)]
    return np.stack(pair, axis=-1).reshape(*np.shape(positions), width).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [10000.0, 50.0])
@pytest.mark.leaves_out("cupy-rules-device1")
def test_sinusoidal(library: Library, dtype: str, base: float) -> None:
    library.needs(dtype)
    with library.guard():
        like = library.put(np.zeros(1, dtype))
        length = positional.sinusoidal(6, 8, base=base, like=like)
        rows = positional.sinusoidal(library.put(ROWS), 8, base=base, like=like)
        listed = positional.sinusoidal(range(90, 100), 8, base=base, like=like)
    for result, positions in ((length, range(6)), (rows, ROWS), (listed, range(90, 100))):
        assert result.dtype == like.dtype
        textbook = plain_waves(library, positions, 8, base, dtype)
        agreement = judge(library.get(result), waves(positions, 8, base), textbook, dtype)
        assert agreement.agrees, agreement


def test_sinusoidal_without_like(library: Library) -> None:
    result = library.call(positional.sinusoidal, ROWS, width=6)
    assert library.get(result).dtype == (np.float64 if library.holds("float64") else F)
    assert result.shape == (2, 5, 6)
    assert type(positional.sinusoidal(3, 6)) is np.ndarray


@pytest.mark.parametrize("dtype", DTYPES)
def test_learned(library: Library, rng: np.random.Generator, dtype: str) -> None:
    library.needs(dtype)
    table = rng.standard_normal((7, 4)).astype(dtype)
    rows = np.asarray([[0, 6, 2], [3, 3, 1]], np.int32)
    for positions, meant in ((5, range(5)), (range(6, 2, -2), [6, 4]), ([1, 6], [1, 6]), (rows, rows)):
        result = library.call(positional.learned, table, positions=positions)
        np.testing.assert_array_equal(
            library.get(result), table[np.asarray(meant)].astype(library.get(result).dtype)
        )
        assert str(result.dtype).rpartition(".")[2] == dtype


def test_learned_beyond_the_table(library: Library) -> None:
    """Refused wherever positions can be read: from a list always."""
    table = np.ones((7, 4), F)
    if not library.lazy:
        for positions in ([0, 7], [-1, 3]):
            with pytest.raises(ValueError, match="`positions` must"):
                library.call(positional.learned, table, positions=np.asarray(positions, np.int32))


def test_slopes() -> None:
    """Those of the paper for 8 heads; of 6, the four of 4 and every other of 8."""
    assert positional.alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert positional.alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    arrays = [biases.to_array(biases.alibi(x), (12, 4, 5)) for x in (12, positional.alibi_slopes(12))]
    np.testing.assert_array_equal(*arrays)
