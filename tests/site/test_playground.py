"""The playground's files: what its script asks for is there, and says what the encoder computes."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "docs" / "_site"), str(ROOT / "examples")]

minilm = pytest.importorskip("minilm", reason="needs the tokenizer of the encoder", exc_type=ImportError)
try:
    minilm.load()
except (ImportError, FileNotFoundError) as reason:
    pytest.skip(f"the weights of the encoder are not installed: {reason}", allow_module_level=True)

import playground  # noqa: E402
import playground_encoder as encoder  # noqa: E402
import playground_form as page  # noqa: E402

from sdpa_xp_export import verify, verify_layer  # noqa: E402

SCRIPTS = ROOT / "docs" / "assets" / "playground"
BY_NAME = {sentence.name: sentence for sentence in encoder.SENTENCES}


class Elements(HTMLParser):
    """The attributes of the options and of the inputs of a form."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def elements(tag: str, html: str) -> list[dict[str, str | None]]:
    parser = Elements()
    parser.feed(html)
    return [attributes for name, attributes in parser.elements if name == tag]


@pytest.fixture(scope="module")
def served() -> dict[str, bytes]:
    return dict(encoder.files())


def test_files_have_the_names_that_the_script_asks_for(served: dict[str, bytes]) -> None:
    """Templates of JavaScript, filled with all that the form offers."""
    script = (SCRIPTS / "texts.js").read_text()
    templates = re.findall(r"model: `(.+)`", script) + re.findall(r"file\(`(.+)`\)", script)
    assert len(templates) == 3
    (weights,) = re.findall(r'weights: "(.+)"', script)
    choices = [
        (m, c, h, s)
        for m in playground.MASKS
        for c in playground.SOFTCAPS
        for h in playground.HEADS
        for s in BY_NAME
    ]
    expected = {weights}
    for template in templates:
        for values in choices:
            name = template
            for key, value in zip(("mask", "softcap", "heads", "text"), values, strict=True):
                name = name.replace(f"${{{key}}}", str(value))
            expected.add(name if name.endswith(".bin") else f"{name}.onnx")
    combinations = product(playground.MASKS, playground.SOFTCAPS, playground.HEADS)
    assert expected == set(served) | {playground.name_of(*combination) for combination in combinations}


def test_the_form_offers_what_the_files_are_made_of() -> None:
    form = page.form()
    radios = [attributes["value"] for attributes in elements("input", form) if attributes.get("name") == "mask"]
    assert radios == list(playground.MASKS) == list(page.NAMES)
    offered = [attributes.get("value") for attributes in elements("option", form)]
    assert set(BY_NAME) | {"own"} <= set(offered)
    assert "{" not in re.sub(r'"[^"]*"', "", form)


@pytest.mark.parametrize("sentence", encoder.SENTENCES, ids=lambda sentence: sentence.name)
def test_what_enters_the_layer_is_what_the_encoder_has(sentence: encoder.Sentence) -> None:
    """And the strongest key of the marked row is the one that the note speaks of."""
    content = encoder.entering(sentence.text)
    tokens = minilm.words([sentence.text])[0]
    size = len(tokens) * encoder.WIDTH
    hidden = np.frombuffer(content, np.float32, size)
    expected = encoder.encoder().tokens(*minilm.tokenized([sentence.text]), encoder.LAYER)[0]
    np.testing.assert_array_equal(hidden.reshape(-1, encoder.WIDTH), expected)
    heads = np.frombuffer(content, np.float64, offset=hidden.nbytes)
    query, key, _ = heads.reshape(3, minilm.HEADS, len(tokens), -1)
    scores = query[sentence.head, sentence.row] @ key[sentence.head].T
    assert int(np.argmax(scores)) == sentence.most
    assert np.argmax(page.weights(sentence)[sentence.head, sentence.row]) == sentence.most
    option = next(
        attributes
        for attributes in elements("option", page.texts())
        if attributes.get("value") == sentence.name
    )
    assert json.loads(option["data-tokens"] or "") == list(tokens)
    quoted = re.findall("“(.+?)”", sentence.note)
    whole = "".join(token.removeprefix("##") for token in tokens)
    assert all(word.lower() in whole or word in ("tiny",) for word in quoted), (quoted, whole)


def test_the_page_opens_with_the_map_of_its_first_sentence() -> None:
    first = encoder.SENTENCES[0]
    shares = np.frombuffer(b64decode(page.opening(first)), "<u2") / page.MOST
    expected = page.weights(first)
    np.testing.assert_allclose(shares.reshape(expected.shape), expected, rtol=0, atol=0.51 / page.MOST)
    np.testing.assert_allclose(expected.sum(-1), 1, rtol=1e-12)
    assert page.MOST == 65535
    assert "2 ** 16 - 1" in (SCRIPTS / "texts.js").read_text()


def test_a_graph_that_refers_to_the_weights_computes_the_map(tmp_path: Path, served: dict[str, bytes]) -> None:
    first = encoder.SENTENCES[0]
    name = encoder.name_of("none", 0)
    for file in (name, encoder.WEIGHTS):
        (tmp_path / file).write_bytes(served[file])
    assert len(served[name]) < 50_000, "has its weights within"
    session = onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
    x = encoder.vectors(first.text)
    scale = np.asarray(1 / np.sqrt(encoder.WIDTH // minilm.HEADS), np.float32)
    _, weights = session.run(["output", "weights"], {"x": x, "scale": scale})
    bound = 4 * encoder.WIDTH * np.finfo(np.float32).eps
    np.testing.assert_allclose(weights, page.weights(first), rtol=0, atol=bound)


@pytest.mark.parametrize("mask", ["prefix", "future"])
def test_graphs_are_verified(mask: str) -> None:
    """The build of the site verifies all of them."""
    layer, model = encoder.layers()[encoder.name_of(mask, 4)]
    assert verify_layer(model, layer, draw={"x": encoder._vectors_of_any_length}).agrees
    assert verify(playground.models()[playground.name_of(mask, 4, 2)]).agrees


def test_a_graph_that_disagrees_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = encoder.layers()[encoder.name_of("none", 0)]
    other = encoder.layers()[encoder.name_of("causal", 0)][1]
    monkeypatch.setattr(encoder, "layers", lambda: {"wrong.onnx": (layer, other)})
    with pytest.raises(ValueError, match=r"wrong\.onnx"):
        encoder.verified()
