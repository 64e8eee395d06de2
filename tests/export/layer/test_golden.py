"""The file of a layer, verified where the layer's code is not: by the golden file that `verify_layer` wrote."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import onnx
import pytest
from command import printed, refused, run
from internals import override
from onnx import numpy_helper
from short_runs import agreed

from sdpa_xp import KVCache, scaled_dot_product_attention
from sdpa_xp.layers import Linear, MultiHeadAttention
from sdpa_xp_export import TensorSpec, save, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")


def decode(layer: Any, x: Any, past_key: Any, past_value: Any) -> dict[str, Any]:
    cache = KVCache(past_key, past_value).append(*layer.project_key_value(x))
    return {"output": layer.attend(x, cache), "key": cache.key, "value": cache.value}


HALF = MultiHeadAttention.init(
    np.random.default_rng(0), 16, num_heads=4, num_kv_heads=2, like=np.ones(1, np.float16)
)
STEP = MethodType(decode, HALF)
PAST = TensorSpec("float16", ("B", 2, "P", 4))


@cache
def decoder() -> onnx.ModelProto:
    return to_onnx(STEP, TensorSpec("float16", ("B", "L", 16)), PAST, PAST)


@pytest.fixture(scope="module")
def written() -> list[bytes]:
    """The golden file of the decoder, once a test has written it."""
    return []


@pytest.fixture
def files(tmp_path: Path, written: list[bytes]) -> tuple[Path, Path]:
    """A decoder with its golden file."""
    golden = tmp_path / "a.npz"
    if not written:
        assert verify_layer(decoder(), STEP, golden=golden, seed=0).agrees
        written.append(golden.read_bytes())
    golden.write_bytes(written[0])
    return save(decoder(), tmp_path / "a.onnx"), golden


def edited(golden: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Change the facts and the arrays of a golden file."""
    with np.load(golden) as stored:
        arrays = dict(stored)
    facts = json.loads(str(arrays["facts"]))
    edit(facts, arrays)
    if "facts" in arrays:
        arrays["facts"] = np.array(json.dumps(facts))
    np.savez(golden, **arrays)
    return golden


def with_other_weights(path: Path) -> None:
    """Change one number of one weight in a file."""
    model = onnx.load(path)
    large = max(model.graph.initializer, key=lambda tensor: np.prod(tensor.dims))
    weight = numpy_helper.to_array(large).copy()
    weight.flat[0] += 1
    large.CopyFrom(numpy_helper.from_array(weight, large.name))
    onnx.save(model, path)


def test_a_decoder_agrees_where_its_code_is_not(files: tuple[Path, Path]) -> None:
    """The runs, the errors and the bounds are those of `verify_layer`, but for bounds of more errors."""
    model, golden = files
    out = printed("verify", model, "--golden", golden, "--json", "--require-provider", "cpu")
    facts = json.loads(out)
    assert (facts["holds"], facts["agrees"], facts["seed"], facts["reference"]) == (True, True, 0, "float64")
    assert not {"call", "call_from_metadata", "computed_in"} & facts.keys()
    report = verify_layer(decoder(), STEP, seed=0, provider="cpu")
    assert report.left_out == tuple(facts["left_out"])
    assert [one["inputs"] for one in facts["runs"]] == [one.inputs for one in report.runs]
    assert {"B=2 L=2 P=0"} < {one.inputs for one in report.runs}
    assert any("large tokens" in one.inputs for one in report.runs)
    wider = 0
    for one, other in zip(report.runs, facts["runs"], strict=True):
        if one.is_plain:  # the same error, since the same engine ran the same inputs
            assert one.agreement.absolute == other["agreement"]["absolute"]
            assert other["agreement"]["bound"] <= 8 * one.agreement.bound  # large tokens may flip a softmax
        assert one.agreement.bound <= other["agreement"]["bound"]
        wider += other["agreement"]["bound"] > one.agreement.bound
    assert wider > len(report.runs) / 2  # since the layer cannot be called again if a bound is small by luck


def test_another_engine_agrees(files: tuple[Path, Path]) -> None:
    """It adds in another order, as another CPU does."""
    code, out, _ = run("verify", files[0], "--golden", files[1], "--engine", "reference")
    assert code == 0, out


def test_what_the_command_shows(files: tuple[Path, Path]) -> None:
    model, golden = files
    page = model.with_suffix(".html")
    out = printed("verify", model, "--golden", golden, "--runs", "--html", page)
    assert "the inputs and the results of the layer, in float64, were read from the golden file" in out
    assert "--seed" not in out
    assert "golden file" in page.read_text()
    code, out, _ = run("verify", model, "--golden", golden, "--require-runtime", "--engine", "reference")
    assert code == 1
    assert "FAILS: the file is for onnxruntime" in out


def test_the_file_is_plain_arrays(files: tuple[Path, Path]) -> None:
    """NumPy alone can use it: of each run the inputs, the reference, and the layer in its own dtype."""
    with np.load(files[1], allow_pickle=False) as golden:
        runs = json.loads(str(golden["facts"]))["runs"]
        for number, one_run in enumerate(runs):
            past, new = one_run["lengths"]["P"], one_run["lengths"]["L"]
            assert golden[f"{number}/inputs/past_key"].shape[2] == past
            exact, direct = (golden[f"{number}/{part}/key"] for part in ("exact", "direct"))
            assert (exact.dtype, direct.dtype) == (np.float64, np.float16)
            assert exact.shape[2] == direct.shape[2] == past + new
    assert {part.split("/")[1] for part in golden.files if "/" in part} == {"inputs", "exact", "direct"}


def test_external_data_are_weights_of_the_model(files: tuple[Path, Path]) -> None:
    model, golden = files
    wide = save(decoder(), model.with_name("b.onnx"), external_above=0)
    assert run("verify", wide, "--golden", golden)[0] == 0


def test_other_weights_disagree(files: tuple[Path, Path]) -> None:
    """Also if the digest is right, as if an engine computed another model than the file has."""
    model, golden = files
    with_other_weights(model)
    err = refused("verify", model, "--golden", golden)
    assert "the digest of nodes and weights" in err
    digest = err.rpartition("model=")[2].strip(". \n")
    edited(golden, lambda facts, _: facts["model"].update({"digest of nodes and weights": digest}))
    code, out, _ = run("verify", model, "--golden", golden)
    assert code == 1
    assert "DISAGREES" in out
    assert "FAILS: output of B=8 L=1 P=3 on CPUExecutionProvider: error" in out


@pytest.mark.parametrize("output", ["output", "key"])
def test_a_wrong_number_disagrees(files: tuple[Path, Path], output: str) -> None:
    """An engine that computes one output wrong, in one run."""

    def wrong(_: Any, arrays: dict[str, Any]) -> None:
        for part in ("exact", "direct"):  # the bound stays
            arrays[f"3/{part}/{output}"].flat[-1] += 0.5

    code, out, _ = run("verify", files[0], "--golden", edited(files[1], wrong), "--json")
    assert (code, len(json.loads(out)["failures"])) == (1, 1)


CUT = "`--golden` must be a golden file of verify_layer (it is cut short, or of another format)"


class Running:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (f"{self.path}.ran",)


def test_files_that_may_not_be_read(files: tuple[Path, Path]) -> None:
    """No pickle is run, and nothing large is read."""
    np.savez(files[1], facts=np.array([Running(files[1])], object))
    assert CUT in refused("verify", files[0], "--golden", files[1])
    assert not Path(f"{files[1]}.ran").exists()
    with zipfile.ZipFile(files[1], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("facts.npy", bytes(2**24))
    words = "must have at most 2147483647 bytes, without compression"
    assert words in refused("verify", files[0], "--golden", files[1])


def test_a_file_that_is_damaged(files: tuple[Path, Path]) -> None:
    """Cut anywhere it is refused. A wrong byte raises nothing else: NumPy's archives have checksums."""
    data, rng = files[1].read_bytes(), np.random.default_rng(0)
    for place in rng.integers(0, len(data), 20):
        files[1].write_bytes(data[:place])
        assert CUT in refused("verify", files[0], "--golden", files[1])
        files[1].write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        assert run("verify", files[0], "--golden", files[1])[0] in (0, 1, 2)


def test_too_large_a_file_is_not_read(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    override(monkeypatch, "LARGEST_GOLDEN", 1000)
    assert "at most 1000 bytes" in refused("verify", files[0], "--golden", files[1])


def simple(x: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


X = TensorSpec("float32", ("B", 2, "L", 8))


def test_a_model_that_disagrees_has_no_golden_file(tmp_path: Path) -> None:
    model = to_onnx(lambda x: scaled_dot_product_attention(x, x, x), X)
    report = verify_layer(model, simple, golden=tmp_path / "a.npz")
    assert not report.agrees
    assert report.notes[-1] == "the golden file was not written, since the model disagrees"
    assert os.listdir(tmp_path) == []


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    path = save(to_onnx(simple, X), tmp_path / "a.onnx")
    before, golden = path.read_bytes(), tmp_path / "a.npz"
    with pytest.raises(FileExistsError):
        verify_layer(path, simple, golden=path, overwrite=True)
    golden.write_text("before")
    with pytest.raises(FileExistsError):
        verify_layer(path, simple, golden=golden)
    assert (path.read_bytes(), golden.read_text()) == (before, "before")
    assert verify_layer(path, simple, golden=golden, overwrite=True).agrees
    assert golden.read_bytes()[:2] == b"PK"


def test_large_runs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override(monkeypatch, "LARGEST_GOLDEN_RUN", 2**14)
    model = save(to_onnx(simple, X), tmp_path / "a.onnx")
    whole = verify_layer(model, simple, golden=tmp_path / "a.npz", seed=0)
    code, out, _ = run("verify", model, "--golden", tmp_path / "a.npz", "--json")
    facts = json.loads(out)
    kept = [one["inputs"] for one in facts["runs"]]
    dropped = [line.partition(":")[0] for line in facts["left_out"] if "too large for a golden file" in line]
    assert code == 0
    assert dropped
    assert sorted([*kept, *dropped]) == sorted(one.inputs for one in whole.runs)


def test_layers_of_other_dtypes(tmp_path: Path) -> None:
    """bfloat16, of which NumPy knows nothing; integers and booleans in and out; no lengths; no float64."""

    def chosen(x: Any, ids: Any, keep: Any) -> Any:
        xp = x.__array_namespace__()
        kept = xp.where(keep, x, 0 * x)
        return {"best": xp.argmax(kept, axis=-1), "is_large": kept > 0.5, "sum": kept + xp.astype(ids, x.dtype)}

    def expected(ids: Any) -> Any:
        xp = ids.__array_namespace__()
        return xp.exp(xp.astype(ids, xp.float32) / 10)

    fixed = (2, 5, 8)
    layers: dict[str, tuple[Any, list[TensorSpec]]] = {
        "bfloat16": (simple, [TensorSpec("bfloat16", ("B", 2, "L", 8))]),
        "several": (chosen, [TensorSpec(name, fixed) for name in ("float32", "int64", "bool")]),
        "expected": (expected, [TensorSpec("int64", ("B", 4))]),
        "float64": (Linear(np.eye(4)), [TensorSpec("float64", ("B", 4))]),
    }
    for name, (layer, specs) in layers.items():
        golden = tmp_path / f"{name}.npz"
        model = save(to_onnx(layer, *specs), tmp_path / f"{name}.onnx")
        report = agreed(verify_layer(model, layer, golden=golden))
        code, out, err = run("verify", model, "--golden", golden, "--json")
        assert code == 0, out + err
        facts = json.loads(out)
        assert (facts["reference"], len(facts["runs"])) == (report.reference, len(report.runs))
        for one, other in zip(report.runs, facts["runs"], strict=True):
            assert one.agreement.bound <= other["agreement"]["bound"]
