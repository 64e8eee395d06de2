"""A model is written whole or not at all, and never over another file unless told to."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from internals import peak_above, without_numbers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from sdpa_xp_export import TensorSpec, export_attention, save

MODEL = export_attention(*[TensorSpec("float32", (2, 4))] * 3)


def gathering(*arrays: NDArray[Any]) -> onnx.ModelProto:
    """A model that returns one row of each of its initializers."""
    row = helper.make_tensor_value_info("row", TensorProto.INT64, ["N"])
    graph = helper.make_graph([], "rows", [row], [])
    for index, array in enumerate(arrays):
        name = f"array_{index}"
        graph.initializer.append(numpy_helper.from_array(array, name))
        gather_row_of(graph, name, graph.initializer[-1].data_type, array.shape[-1])
    return finished(graph)


def gather_row_of(graph: onnx.GraphProto, name: str, data_type: int, width: int) -> None:
    graph.node.append(helper.make_node("Gather", [name, "row"], [f"row_of_{name}"]))
    graph.output.append(helper.make_tensor_value_info(f"row_of_{name}", data_type, ["N", width]))


def finished(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def row(path: Path, index: int) -> list[NDArray[Any]]:
    """Row `index` of each initializer, as onnxruntime reads it."""
    return [output[0] for output in rows(path, index)]


def rows(path: Path, *indices: int) -> list[NDArray[Any]]:
    """These rows of each initializer."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"row": np.asarray(indices)}))


def read(path: Path) -> onnx.ModelProto:
    """The model with its data in it, as onnx reads it."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.ClearField("data_location")
    return model


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def ones(size: int = 1000) -> onnx.ModelProto:
    return gathering(np.ones((2, size), np.float32))


def twos() -> onnx.ModelProto:
    return gathering(np.full((2, 1000), 2, np.float32))


def test_never_over_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("mine")
    with monkeypatch.context() as patch:  # it is refused before anything is written
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileExistsError, match="must not exist"):
            save(MODEL, path)
    assert path.read_text() == "mine"
    assert names(tmp_path) == ["a.onnx"]
    save(MODEL, path, overwrite=True)
    assert onnx.load(path) == MODEL


@pytest.mark.parametrize("links", [True, False])
def test_never_over_a_file_that_came_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def other(*args: Any) -> None:
        (tmp_path / "a.onnx").write_text("theirs")
        if not links:
            raise OSError(errno.EPERM, "no links here")
        link(*args)

    link = os.link
    monkeypatch.setattr(os, "link", other)
    with pytest.raises(FileExistsError, match="must not exist"):
        save(ones(), tmp_path / "a.onnx", external_above=0)
    assert (tmp_path / "a.onnx").read_text() == "theirs"
    assert names(tmp_path) == ["a.onnx"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert onnx.load(save(MODEL, tmp_path / "a.onnx")) == MODEL
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(MODEL, tmp_path / "b.onnx")
    assert names(tmp_path) == ["a.onnx"]


@pytest.mark.parametrize("external_above", [0, 2**30])
def test_mode_follows_the_umask(tmp_path: Path, external_above: int) -> None:
    before = os.umask(0o027)
    try:
        save(ones(), tmp_path / "a.onnx", external_above=external_above)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("external_above", [0, 2**30])
@pytest.mark.parametrize("failing_step", [1, 2, 3])
def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, external_above: int, failing_step: int
) -> None:
    """It fails at the first or the second file, or at the name."""
    if overwrite:
        save(ones(), tmp_path / "a.onnx", external_above=0)
    before = names(tmp_path)
    steps = iter(range(1, 9))

    def counted(step: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **named: full() if next(steps) == failing_step else step(*args, **named)

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "link", counted(os.link))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    if failing_step == 3 and external_above:  # there are two steps
        save(twos(), tmp_path / "a.onnx", overwrite=overwrite, external_above=external_above)
        return
    with pytest.raises(OSError, match="No space left") as caught:
        save(twos(), tmp_path / "a.onnx", overwrite=overwrite, external_above=external_above)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == before
    if overwrite:
        np.testing.assert_array_equal(row(tmp_path / "a.onnx", 1), np.ones((1, 1000)))


SAVE_WITH_A_LIMIT = """
import resource, signal, sys
import onnx
from sdpa_xp_export import save
model = onnx.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(model, sys.argv[2], overwrite=True, external_above=int(sys.argv[3]))
except OSError as error:
    print(error)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("external_above", ["0", "1000000000"])
def test_a_write_that_the_system_cuts_off(tmp_path: Path, external_above: str) -> None:
    onnx.save(ones(100_000), tmp_path / "large.onnx")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "a.onnx"
    target.write_text("mine")
    arguments = [tmp_path / "large.onnx", target, external_above]
    done = subprocess.run(
        [sys.executable, "-c", SAVE_WITH_A_LIMIT, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"save: `path` must be writable (File too large); got path={target}.\n"
    assert target.read_text() == "mine"
    assert names(tmp_path / "out") == ["a.onnx"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody can write to")
def test_a_folder_that_nobody_can_write_to() -> None:
    with pytest.raises(OSError, match="must be writable"):
        save(MODEL, "/proc/self/a.onnx")


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(PermissionError, match="must be writable"):
        save(MODEL, tmp_path / "a.onnx")


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, dangling: bool) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "a.onnx"
    if not dangling:
        target.write_text("mine")
        (tmp_path / "a.onnx").symlink_to(target)
        with pytest.raises(FileExistsError, match="must not exist"):
            save(MODEL, tmp_path / "a.onnx")
    else:
        target = tmp_path / "real.onnx"
        (tmp_path / "a.onnx").symlink_to("real.onnx")
    assert save(MODEL, tmp_path / "a.onnx", overwrite=not dangling) == target
    assert (tmp_path / "a.onnx").is_symlink()
    assert onnx.load(target) == MODEL
    assert names(target.parent) == (["a.onnx", "real", "real.onnx"] if dangling else ["a.onnx"])


def test_data_of_a_linked_model_is_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b.onnx").touch()
    (tmp_path / "a.onnx").symlink_to(tmp_path / "real" / "b.onnx")
    path = save(ones(), tmp_path / "a.onnx", external_above=0, overwrite=True)
    assert path == tmp_path / "real" / "b.onnx"
    assert len(names(tmp_path / "real")) == 2
    np.testing.assert_array_equal(row(path, 1), np.ones((1, 1000)))


ODD = np.asarray(
    [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x80000000], np.uint32
)


@pytest.mark.parametrize("external_above", [0, 2**30])
def test_every_bit_is_kept(tmp_path: Path, external_above: int) -> None:
    """NaN with its payload, inf, subnormals and -0, in the data and in what stays in the model."""
    half = (ODD >> 16).astype(np.uint16).view(np.float16)
    arrays = [np.tile(ODD.view(np.float32), (2, 200)), ODD.view(np.float32)[None], np.tile(half, (2, 500))]
    model = gathering(*arrays)
    path = save(model, tmp_path / "a.onnx", external_above=external_above)
    assert len(names(tmp_path)) == (1 if external_above else 2)
    assert read(path) == model
    for written, array in zip(row(path, 0), arrays, strict=True):
        assert written.tobytes() == array[0].tobytes()


def test_external_data_is_one_file_beside_the_model(tmp_path: Path) -> None:
    first, second = np.arange(1000.0), np.arange(600, dtype=np.int64)
    model = gathering(first[None], second[None], np.ones((1, 2)))
    model.graph.initializer[0].doc_string = "kept"
    helper.set_model_props(model, {"sdpa_xp.call": "kept"})
    before = model.SerializeToString(deterministic=True)
    path = save(model, tmp_path / "a b[c].onnx", external_above=8000)
    assert model.SerializeToString(deterministic=True) == before
    (data,) = [file for file in tmp_path.iterdir() if file != path]
    assert data.name.startswith("a b[c].onnx.")
    assert data.name.endswith(".data")
    graph = onnx.load(path, load_external_data=False).graph
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    assert entries == [
        {"location": data.name, "offset": "0", "length": "8000"},
        {"location": data.name, "offset": "65536", "length": "4800"},
        {},  # small: shape inference may have to see it
    ]
    assert data.stat().st_size == 65536 + 4800
    assert read(path) == model
    assert save(model, tmp_path / "b.onnx", external_above=8000 + 4800 + 16).stat().st_size > 12816


def test_data_goes_with_the_model_that_is_replaced(tmp_path: Path) -> None:
    path = save(ones(), tmp_path / "a.onnx", external_above=0)
    save(ones(), tmp_path / "b.onnx", external_above=0)
    theirs = tmp_path / f"a.onnx.{'0' * 32}.data"
    theirs.write_text("named alike, but nothing refers to it")
    (old,) = [file for file in tmp_path.glob("a.onnx.*.data") if file != theirs]
    save(twos(), path, overwrite=True, external_above=0)
    assert not old.exists()
    assert theirs.exists()
    np.testing.assert_array_equal(row(path, 1), np.full((1, 1000), 2))
    np.testing.assert_array_equal(row(tmp_path / "b.onnx", 1), np.ones((1, 1000)))
    save(twos(), path, overwrite=True)
    assert len(list(tmp_path.glob("a.onnx*"))) == 2
    np.testing.assert_array_equal(row(path, 1), np.full((1, 1000), 2))


def test_data_of_others_is_left(tmp_path: Path) -> None:
    onnx.save(ones(), tmp_path / "a.onnx", save_as_external_data=True, location="a.onnx.data")
    save(twos(), tmp_path / "a.onnx", overwrite=True, external_above=0)
    assert (tmp_path / "a.onnx.data").stat().st_size == 8000
    (tmp_path / "a.onnx").write_text("garbage")
    save(twos(), tmp_path / "a.onnx", overwrite=True)
    np.testing.assert_array_equal(row(tmp_path / "a.onnx", 1), np.full((1, 1000), 2))


def test_memory_is_that_of_one_initializer(tmp_path: Path) -> None:
    nbytes = 2**25
    model = gathering(*[np.ones((2, nbytes // 8), np.float32)] * 6)
    _, peak = peak_above(lambda: save(model, tmp_path / "a.onnx", external_above=0))
    if peak is None:
        pytest.skip("the system does not tell")
    assert peak < 3 * nbytes


def test_without_numbers_is_what_a_checker_reads() -> None:
    model = gathering(np.ones((2, 1000), np.float32), np.ones((2, 2)))
    small = without_numbers(model)
    onnx.checker.check_model(small, full_check=True)
    assert [info.name for info in small.graph.input] == ["row", "array_0"]
    assert [tensor.name for tensor in small.graph.initializer] == ["array_1"]
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    with pytest.raises(onnx.shape_inference.InferenceError, match="Gather"):
        onnx.checker.check_model(without_numbers(model), full_check=True)


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_over_2_gib(tmp_path: Path) -> None:
    """One initializer that protobuf cannot hold."""
    length, width = 2**15 + 1, 2**14
    last = np.arange(width, dtype=np.float32)
    last[: ODD.size] = ODD.view(np.float32)
    graph = helper.make_graph([], "rows", [helper.make_tensor_value_info("row", TensorProto.INT64, ["N"])], [])
    gather_row_of(graph, "big", TensorProto.FLOAT, width)
    model = finished(graph)
    big = model.graph.initializer.add(name="big", data_type=TensorProto.FLOAT, dims=[length, width])
    big.raw_data = b"".join([bytes(4 * (length - 1) * width), last.tobytes()])
    with pytest.raises(ValueError, match="under 2 GiB"):
        save(model, tmp_path / "a.onnx", external_above=2**40)
    assert names(tmp_path) == []
    path = save(model, tmp_path / "a.onnx")
    big.raw_data = b""
    try:
        assert [file.stat().st_size for file in tmp_path.glob("*.data")] == [4 * length * width]
        onnx.checker.check_model(path, full_check=True)
        ((first, last_row),) = rows(path, 0, length - 1)
        assert last_row.tobytes() == last.tobytes()
        assert not first.any()
    finally:  # pytest keeps the folders of three runs
        for file in tmp_path.iterdir():
            file.unlink()
