"""Pictures: the numbers that are in them, and that nothing in them is cut off."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import Scores
from libraries import Library

from sdpa_xp import attention_statistics, masks, plot, scaled_dot_product_attention

matplotlib = pytest.importorskip("matplotlib")
agg = pytest.importorskip("matplotlib.backends.backend_agg")
colors = pytest.importorskip("matplotlib.colors")
image = pytest.importorskip("matplotlib.image")

pytestmark = pytest.mark.slow

WORDS = ["it", "took", "one", "minute"]
LONG = ["pneumonoultramicroscopicsilicovolcanoconiosis", "$x$", "a\nb", "[SEP]"]
F = np.float32
SETTINGS = dict(matplotlib.rcParams)


def drawn(axes: Any) -> np.ndarray:
    return np.asarray(axes.images[0].get_array())


def panels(figure: Any) -> list[Any]:
    """The axes with a picture of pairs, and not those of the colour bar."""
    return [axes for axes in figure.axes if axes.get_visible() and axes.images and axes.get_label() == ""]


def hatched(axes: Any, shape: tuple[int, int]) -> np.ndarray:
    """The pairs whose centre lies in a hatched area."""
    places = [(key, query) for query in range(shape[0]) for key in range(shape[1])]
    pairs = np.zeros(shape, bool)
    for bars in axes.collections:
        assert bars.get_hatch()
        for bar in bars.get_paths():
            pairs |= bar.contains_points(places).reshape(shape)
    return pairs


def of_random_weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(20170612).dirichlet(np.ones(shape[-1]), shape[:-1])


def test_a_mask_is_drawn_as_it_is() -> None:
    mask = masks.causal() & masks.sliding_window(2, 0)
    figure = plot.mask(mask, (5, 7))
    (axes,) = figure.axes
    np.testing.assert_array_equal(drawn(axes), masks.to_array(mask, (5, 7)))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert axes.get_title() == "causal() & sliding_window(left=2, right=0)"


@pytest.mark.parametrize(("length", "ticks"), [(1, [0]), (3, [0, 1, 2]), (40, [*range(0, 40, 5)])])
def test_ticks_are_round_numbers(length: int, ticks: list[int]) -> None:
    *_, axes = panels(plot.attention(of_random_weights(5, length, length)))
    assert [*axes.get_xticks()] == [*axes.get_yticks()] == ticks


def test_a_panel_for_each_batch_entry_and_head() -> None:
    lengths = masks.padding([1, 2, 3])
    figure = plot.mask(lengths, (3, 2, 4, 4))
    titles = [f"batch {entry}, head {head}" for entry in range(3) for head in range(2)]
    assert [axes.get_title() for axes in panels(figure)] == titles
    for axes, length in zip(panels(figure), [1, 1, 2, 2, 3, 3], strict=True):
        assert drawn(axes).sum() == 4 * length


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(6, 6), (3, 6), (6, 3), (1, 8), (1, 1), (2, 1, 3, 6), (6, 2, 2, 2)])
@pytest.mark.parametrize("mask", [masks.causal(), ~masks.causal("lower_right") | masks.chunked(2)], ids=str)
def test_cells_of_small_masks_are_squares_of_one_size(mask: masks.Mask, shape: tuple[int, ...]) -> None:
    """So pictures of several shapes can stand side by side, whatever their titles."""
    figure = plot.mask(mask, shape)
    agg.FigureCanvasAgg(figure).draw()
    for axes in panels(figure):
        panel = axes.get_position().size * figure.get_size_inches()
        np.testing.assert_allclose(panel, [0.32 * shape[-1], 0.32 * shape[-2]], rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_drawn_as_they_are(library: Library, dtype: str) -> None:
    library.needs(dtype)
    weights = library.put(of_random_weights(3, 2, 4).astype(F).astype(dtype))
    figure = plot.attention(weights, heads=[2, 0])
    assert [axes.get_title() for axes in panels(figure)] == ["head 2", "head 0"]
    for axes, head in zip(panels(figure), [2, 0], strict=True):
        np.testing.assert_array_equal(drawn(axes), np.asarray(library.get(weights), F)[head])


@pytest.mark.parametrize("heads", [None, 1, [1, 2]])
def test_one_scale_for_all_heads(heads: Any) -> None:
    """To 1 if all weights are 0."""
    (axes,) = panels(plot.attention(np.zeros((2, 2))))
    assert axes.images[0].get_clim() == (0, 1)
    weights = of_random_weights(3, 2, 4) * np.asarray([1, 2, 3])[:, None, None]
    figure = plot.attention(weights, heads=heads)
    numbers = weights if heads is None else weights[np.atleast_1d(heads)]
    assert {axes.images[0].get_clim() for axes in panels(figure)} == {(0, numbers.max())}
    assert figure.axes[-1].get_ylabel() == "weight"


MASKS: dict[str, tuple[Any, Callable[[], np.ndarray]]] = {
    "causal": (masks.causal(), lambda: np.tri(4, dtype=bool)),
    "all": (masks.prefix(4), lambda: np.ones((4, 4), bool)),
    "none": (masks.prefix(0), lambda: np.zeros((4, 4), bool)),
    "holes": (np.eye(4, dtype=bool)[:, ::-1], lambda: np.eye(4, dtype=bool)[:, ::-1]),
    "keys": (np.asarray([True, False, True, False]), lambda: np.tile([True, False, True, False], (4, 1))),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("leading", [(), (2,)])
def test_hatched_where_the_mask_forbids(name: str, leading: tuple[int, ...]) -> None:
    mask, allowed = MASKS[name]
    figure = plot.attention(of_random_weights(*leading, 4, 4), mask=mask)
    assert len(panels(figure)) == 2 ** len(leading)
    for axes in panels(figure):
        np.testing.assert_array_equal(hatched(axes, (4, 4)), ~allowed())
    assert figure.axes[-1].get_ylabel() == "weight\n(hatched: masked)"


def test_each_head_has_its_own_hatches(library: Library) -> None:
    allowed = np.random.default_rng(0).random((3, 2, 5)) < 0.5
    figure = plot.attention(of_random_weights(3, 2, 5), mask=library.put(allowed), heads=[1, 2])
    for axes, head in zip(panels(figure), [1, 2], strict=True):
        np.testing.assert_array_equal(hatched(axes, (2, 5)), ~allowed[head])


def test_tokens_stand_on_the_axes() -> None:
    figure = plot.attention(of_random_weights(2, 4), query_tokens=["a", "b"], key_tokens=WORDS)
    (axes,) = panels(figure)
    for axis, tokens in ((axes.xaxis, WORDS), (axes.yaxis, ["a", "b"])):
        assert [label.get_text() for label in axis.get_ticklabels()] == tokens
        assert [*axis.get_ticklocs()] == [*range(len(tokens))]


def test_tokens_are_shown_as_they_are() -> None:
    """No formula, no line of their own, and a long one cut."""
    (axes,) = panels(plot.attention(of_random_weights(1, 4), key_tokens=LONG))
    labels = axes.get_xticklabels()
    assert [label.get_text() for label in labels] == ["pneumonoultramicroscopi…", "$x$", r"a\nb", "[SEP]"]
    assert not any(label.get_parse_math() for label in labels)


def between(weights: np.ndarray, queries: list[str], keys: list[str], **options: Any) -> Callable[[Any], Any]:
    return lambda theme: plot.attention(weights, query_tokens=queries, key_tokens=keys, theme=theme, **options)


PICTURES: dict[str, Callable[[Any], Any]] = {
    "one": between(of_random_weights(4, 4), WORDS, WORDS, mask=masks.causal()),
    "single": between(np.ones((1, 1)), LONG[:1], LONG[:1]),
    **{
        f"{words[0]} x {n}": between(np.eye(n), words[:n], words[:n], mask=masks.causal())
        for n in (1, 2, 3, 5)
        for words in (["dogs", "chase", "cats", "and", "mice"], ["The", "animal", "was", "too", "tired"])
    },
    "long": between(of_random_weights(12, 4, 4), LONG, LONG),
    "many": between(of_random_weights(5, 64, 64), WORDS * 16, LONG * 16),
    "small": lambda theme: plot.attention(np.eye(3), theme=theme),
    "square": lambda theme: plot.attention(np.eye(8), theme=theme),
    "numbers": lambda theme: plot.attention(of_random_weights(2, 3, 40), theme=theme),
    "mask": lambda theme: plot.mask(masks.causal(), (4, 4), theme=theme),
    "wide mask": lambda theme: plot.mask(masks.causal(), (1, 60), theme=theme),
    "small masks": lambda theme: plot.mask(masks.padding([1, 2, 2]), (3, 2, 2, 2), theme=theme),
    "long title": lambda theme: plot.mask(
        masks.causal() & masks.sliding_window(2, 0) & ~masks.dilated(3) & masks.padding(4), (4, 4), theme=theme
    ),
    "saturation": lambda theme: plot.saturation([1, 8], rng=np.random.default_rng(0), theme=theme),
    "memory": lambda theme: plot.memory([2**7, 2**12], theme=theme),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_cut_off_or_overlaps(name: str) -> None:
    figure = PICTURES[name]("light")
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    assert dict(matplotlib.rcParams) == SETTINGS  # no setting of matplotlib is left changed
    whole, box = figure.bbox_inches, figure.get_tightbbox(canvas.get_renderer())
    assert whole.x0 <= box.x0 <= box.x1 <= whole.x1
    assert whole.y0 <= box.y0 <= box.y1 <= whole.y1
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        shown = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [label.get_window_extent() for label in shown if label.get_visible() and label.get_text()]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes)), axis.axis_name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PICTURES)
def test_ink_is_for_the_page_and_the_ground_is_clear(name: str) -> None:
    inks = []
    for theme in ("light", "dark"):
        figure = PICTURES[name](theme)
        shown = [axes for axes in figure.axes if axes.get_visible()]
        texts = [text for axes in shown for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
        texts += [label for axes in shown for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        colours_used = {colors.to_hex(text.get_color()) for text in texts if text.get_text()}
        colours_used |= {
            colors.to_hex(spine.get_edgecolor()) for axes in shown for spine in axes.spines.values()
        }
        assert len(colours_used) == 1
        inks.append(sum(bytes.fromhex(colours_used.pop()[1:])))
        assert figure.get_facecolor()[3] == 0
        assert all(axes.get_facecolor()[3] == 0 for axes in shown)
    assert inks[0] < 0.3 * 3 * 255 < 0.7 * 3 * 255 < inks[1]


def test_saturation_is_what_the_paper_says() -> None:
    """Variance E without the scale and 1 with it, off by at most 5 standard deviations of its estimate.

    Of `draws` queries with `keys` scores s each, the mean V of s^2 has E[V] = E and, as the scores of a query
    share its length, Var[V] = ((2 E^2 + 6 E) / keys + (1 - 1 / keys) 2 E) / draws. The sample variance is V
    less the square of the mean, which is below 25 E / (draws keys) unless it is off by 5 of its own.
    """
    widths, draws, keys = [1, 4, 64, 512], 200, 16
    figure = plot.saturation(widths[::-1], rng=np.random.default_rng(0), keys=keys)
    spread, largest = figure.axes
    for width, *measured in zip(widths, *[line.get_ydata() for line in spread.lines[:2]], strict=True):
        variance = ((2 * width**2 + 6 * width) / keys + (1 - 1 / keys) * 2 * width) / draws
        bound = 5 * variance**0.5 + 25 * width / (draws * keys)
        assert abs(measured[0] - width) < bound < width
        assert abs(measured[1] - 1) < bound / width
    without, scaled = (line.get_ydata() for line in largest.lines[:2])
    assert all(np.diff(without) > 0)
    np.testing.assert_allclose(without[0], scaled[0])  # the scale is 1 there
    assert without[-1] > 0.9 > 0.5 > scaled[-1] > 1 / keys
    assert [*spread.lines[0].get_xdata()] == widths
    assert spread.get_ylim()[0] < spread.get_ylim()[1]
    assert largest.get_ylim() == (0, 1.05)  # upwards, and all weights are inside


def test_saturation_is_the_same_again() -> None:
    first, again, other = (plot.saturation([8], rng=np.random.default_rng(seed)) for seed in (1, 1, 2))
    drawn = [figure.axes[0].lines[0].get_ydata()[0] for figure in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_memory_is_what_a_call_holds(dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tile of each thread that has one."""
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", str(threads))
    lengths = [300, 1100, 2048]
    (axes,) = plot.memory(lengths, width=32, like=np.empty(0, dtype)).axes
    all_scores, arrays, tile_bytes = ([*line.get_ydata()] for line in axes.lines)
    tiles: list[tuple[range, int]] = []
    compute = Scores.computed_tiles

    def computed_tiles(*arguments: Any, **keywords: Any) -> Any:
        for computed in compute(*arguments, **keywords):
            tiles.append((computed[0].rows, computed[1].nbytes))
            yield computed

    monkeypatch.setattr(Scores, "computed_tiles", computed_tiles)
    element = 8 if dtype == "float64" else 4
    for index, length in enumerate(lengths):
        x = np.ones((length, 32), dtype)
        output = scaled_dot_product_attention(x, x, x)
        assert tile_bytes[index] == max(size for _, size in tiles) * min(
            threads, len({rows for rows, _ in tiles})
        )
        assert arrays[index] == 3 * x.nbytes + output.nbytes
        assert all_scores[index] == element * length**2
        tiles.clear()


def test_memory_is_for_the_library(library: Library) -> None:
    """A lazy graph is one tile; others hold less than all scores."""
    figure = plot.memory([4096], like=library.put(np.zeros(1, F)))
    all_scores, _, tile_bytes = (line.get_ydata()[0] for line in figure.axes[0].lines)
    assert (tile_bytes == all_scores) == library.lazy


def test_memory_names_its_units() -> None:
    (axes,) = plot.memory([2**7, 2**17]).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylabel() == "bytes, one head"
    shown = [axes.yaxis.get_major_formatter()(size) for size in (1000, 2**10, 3 * 2**19, 2**30)]
    assert shown == ["1000 B", "1 KiB", "1.5 MiB", "1 GiB"]


def test_nothing_is_shown_or_kept() -> None:
    """pyplot, which keeps figures and picks a window system, is not imported."""
    code = (
        "import sys; import numpy as np; from sdpa_xp import masks, plot;"
        "assert 'matplotlib' not in sys.modules;"
        "plot.mask(masks.causal(), (3, 3)); plot.attention(np.ones((2, 2)), mask=masks.causal());"
        "plot.saturation([2], rng=np.random.default_rng(0)); plot.memory([8]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(("theme", "paper"), [("light", "#ffffff"), ("dark", "#0d1117")])
def test_a_file_has_a_background(name: str, theme: str, paper: str) -> None:
    corner = [*(round(255 * part) for part in colors.to_rgb(paper)), 255]
    figure = PICTURES[name](theme)
    assert saved(figure)[0, 0].tolist() == corner
    assert saved(figure, transparent=True)[0, 0, 3] == 0
    assert saved(figure, facecolor="red")[0, 0].tolist() == [255, 0, 0, 255]


def saved(figure: Any, **keywords: Any) -> np.ndarray:
    """The pixels of a file, (rows, columns, RGBA), of the figure itself: what is in it takes time to draw."""
    file = io.BytesIO()
    figure.set_layout_engine("none")
    for child in (*figure.axes, *figure.legends, *figure.texts):
        child.set_visible(False)
    figure.savefig(file, format="png", dpi=20, **keywords)
    return np.round(255 * image.imread(io.BytesIO(file.getvalue()))).astype(int)


@pytest.mark.needs("dask")
def test_a_lazy_array_is_computed_once() -> None:
    import dask.array

    computed: list[int] = []

    def weights(block: np.ndarray) -> np.ndarray:
        computed.append(block.size)
        return block

    whole = dask.array.from_array(of_random_weights(3, 4))
    lazy = dask.array.map_blocks(weights, whole, meta=np.empty((0, 0)))
    plot.attention(lazy)
    assert computed == [12]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_of_weights_differ_in_lightness(theme: Any) -> None:
    """So they are told apart without colour vision: the luminance of sRGB goes one way, in even steps."""
    (axes,) = panels(plot.attention(of_random_weights(2, 2), theme=theme))
    red, green, blue = (axes.images[0].cmap(np.linspace(0, 1, 33))[:, :3] ** 2.2).T
    steps = np.diff(np.cbrt(0.2126 * red + 0.7152 * green + 0.0722 * blue))
    steps = steps if theme == "dark" else -steps
    assert 0 < steps.max() < 3 * steps.min()


def test_sums_of_blocks_count_tokens(rng: np.random.Generator) -> None:
    x = rng.standard_normal((70, 4)).astype(np.float32)
    sums = attention_statistics(x, x, of="block_sums", block_size=(10, 20)).block_sums
    figure = plot.attention(sums, block_size=(10, 20))
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(n) for n in range(0, 70, 10)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "20", "40", "60"]
    assert bar.get_ylabel() == "sum of weights"
    np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), sums, rtol=1e-6)


def test_inside_a_jit_there_is_nothing_to_draw(library: Library) -> None:
    library.needs_jit()
    with pytest.raises(TypeError, match="numbers that can be read"):
        library.jit(lambda x: plot.attention(x) and x)(library.put(np.full((2, 2), 0.5, F)))
