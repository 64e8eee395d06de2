"""The playground's files: what its script asks for is there, and says what the encoder computes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
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
import playground_start as start  # noqa: E402

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
    return {**dict(encoder.files()), **dict(start.files())}


def test_files_have_the_names_that_the_script_asks_for(served: dict[str, bytes]) -> None:
    """Templates of JavaScript, filled with all that the form offers."""
    script = (SCRIPTS / "texts.js").read_text()
    templates = re.findall(r"model: `(.+)`", script) + re.findall(r"file\(`(.+?)`\)", script)
    assert len(templates) == 3
    constants = (SCRIPTS / "encoder.js").read_text()
    (before,) = re.findall(r'model: "(.+?)"', constants)
    choices = [
        (m, c, h, s)
        for m in playground.MASKS
        for c in playground.SOFTCAPS
        for h in playground.HEADS
        for s in BY_NAME
    ]
    expected = {f"{before}.onnx", *re.findall(r'"([\w-]+\.(?:bin|txt))"', constants)}
    for template in templates:
        for values in choices:
            name = template
            for key, value in zip(("mask", "softcap", "heads", "chosen.text"), values, strict=True):
                name = name.replace(f"${{{key}}}", str(value))
            expected.add(name if name.endswith(".bin") else f"{name}.onnx")
    combinations = product(playground.MASKS, playground.SOFTCAPS, playground.HEADS)
    assert expected == set(served) | {playground.name_of(*combination) for combination in combinations}


def test_the_form_offers_what_the_files_are_made_of() -> None:
    form = page.form()
    radios = [attributes["value"] for attributes in elements("input", form) if attributes.get("name") == "mask"]
    assert radios == list(playground.MASKS) == list(page.NAMES)
    offered = [attributes.get("value") for attributes in elements("option", form)]
    assert set(BY_NAME) | {"own", "typed"} <= set(offered)
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


def test_the_vectors_of_fewer_bits_are_nearly_those_of_the_encoder() -> None:
    """A map shows two digits."""
    assert start.largest_difference() < 0.02
    scales = start.start().parameters[start.SCALES]
    whole = encoder.encoder().parameters[start.WORDS]
    off = start.start().parameters[start.WORDS] * scales[:, None] - whole
    assert np.all(np.abs(off) <= 0.501 * scales[:, None])


def test_the_graph_before_the_layer_computes_its_vectors(tmp_path: Path, served: dict[str, bytes]) -> None:
    for file in (start.NAME, start.WEIGHTS):
        (tmp_path / file).write_bytes(served[file])
    session = onnxruntime.InferenceSession(tmp_path / start.NAME, providers=["CPUExecutionProvider"])
    ids = minilm.tokenized([encoder.SENTENCES[1].text])[0][0]
    (output,) = session.run(None, {"ids": ids})
    bound = 4 * encoder.WIDTH * np.finfo(np.float32).eps
    np.testing.assert_allclose(output, start.start()(ids), rtol=0, atol=bound)
    loaded = sum(len(served[name]) for name in (start.WEIGHTS, encoder.WEIGHTS, start.VOCABULARY))
    (told,) = re.findall(r"MEGABYTES = (\d+)", (SCRIPTS / "encoder.js").read_text())
    assert abs(loaded / 1e6 - int(told)) < 1


def test_another_graph_before_the_layer_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    other = start.Start({**start.start().parameters, start.SCALES: 2 * start.start().parameters[start.SCALES]})
    graph = start.graph()
    monkeypatch.setattr(start, "start", lambda: other)
    monkeypatch.setattr(start, "graph", lambda: graph)
    with pytest.raises(ValueError, match=re.escape(start.NAME)):
        start.verified()


LETTERS = "aàÀßΣ\u03c3çİ\u0131\u017f9 .,!'\"-[]#éñü漢字ひ한국\u0301\u200d\t\n😀ﬁ…—“”$CLSMASKPUNQ"
WORDS = (
    "unbelievably",
    "The",
    "[MASK]",
    "[CLS]",
    "x" * 101,
    "don't",
    "naïve",
    "3.14",
    "ΟΔΟΣ",
    "straße",
    "##ing",
)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_cuts_a_text_as_the_tokenizer_does() -> None:
    rng = np.random.default_rng(0)
    texts = ["", " ", *(sentence.text for sentence in encoder.SENTENCES), *minilm.SENTENCES, *start.ODD]
    texts += ["".join(rng.choice(list(LETTERS), size)) for size in rng.integers(0, 40, 400)]
    texts += [("", " ")[size % 2].join(rng.choice(WORDS, size)) for size in rng.integers(0, 9, 400)]
    split = minilm.tokenizer()
    split.no_padding()
    split.no_truncation()
    expected = split.encode_batch(texts)
    module = b64encode((SCRIPTS / "wordpiece.js").read_bytes()).decode()
    program = (
        'import { readFileSync } from "node:fs";'
        f'const {{ tokenizer }} = await import("data:text/javascript;base64,{module}");'
        'const { vocabulary, texts } = JSON.parse(readFileSync(0, "utf8"));'
        "console.log(JSON.stringify(texts.map(tokenizer(vocabulary))));"
    )
    vocabulary = start.vocabulary()
    command = ["node", "--input-type=module", "--eval", program]
    written = json.dumps({"vocabulary": vocabulary, "texts": texts})
    answer = subprocess.run(
        command, input=written, capture_output=True, text=True, encoding="utf-8", check=True
    )
    cut = json.loads(answer.stdout)
    assert cut == [encoding.tokens for encoding in expected]
    ids = {token: place for place, token in enumerate(vocabulary)}
    assert [[ids[token] for token in tokens] for tokens in cut] == [encoding.ids for encoding in expected]
