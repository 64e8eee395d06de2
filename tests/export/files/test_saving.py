"""Saves that are killed, that run at once, and that replace files: nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from internals import PathArgument, demo, program, publish
from onnx import TensorProto, helper, numpy_helper

from sdpa_xp_export import TensorSpec, export_attention, save, verify

MODEL = export_attention(*[TensorSpec("float32", (2, 4))] * 3)


def filled(number: float, size: int = 1000) -> onnx.ModelProto:
    """A model that returns its one initializer."""
    array = np.full(size, number, np.float32)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["array"], ["copy"])],
        "copy",
        [],
        [helper.make_tensor_value_info("copy", TensorProto.FLOAT, [size])],
        [numpy_helper.from_array(array, "array")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def number_in(path: Path) -> float:
    """What `filled` was given."""
    array = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    assert (array == array[0]).all()
    return float(array[0])


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def assert_one_model(folder: Path, number: float) -> None:
    """`a.onnx` with its data file, and nothing else."""
    assert number_in(folder / "a.onnx") == number
    model = onnx.load(folder / "a.onnx", load_external_data=False)
    (location,) = (entry.value for entry in model.graph.initializer[0].external_data if entry.key == "location")
    assert names(folder) == ["a.onnx", location]


def assert_whole_model(folder: Path) -> None:
    """`a.onnx` with its data file, and beside them nothing but data files to which no model refers."""
    assert number_in(folder / "a.onnx") in range(6)
    assert all(re.fullmatch(r"a\.onnx\..{32}\.data", name) for name in {*names(folder)} - {"a.onnx"})


DYING = """
import json, os, signal, sys
from pathlib import Path
import onnx
from sdpa_xp_export import save

def save_and_die(model, target, step, overwrite):
    def dying(name, function):
        def called(*args, **named):
            if step == name:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **named)
            if step == f"after {name}":
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return called

    def counted(name, function):
        counts = iter(range(1, 99))
        return lambda *args, **named: dying(f"{name} {next(counts)}", function)(*args, **named)

    os.fsync = counted("sync", os.fsync)
    os.link = counted("name", os.link)
    Path.replace = counted("name", Path.replace)
    Path.unlink = counted("unlink", Path.unlink)
    save(onnx.load(model), target, overwrite=overwrite, external_above=0)

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            save_and_die(*json.loads(line))
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def dying() -> Iterator[Callable[..., int]]:
    """The exit status of a save in a process of its own that is killed at a step; all share their imports."""
    command = [sys.executable, "-c", program(DYING)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = process.stdin, process.stdout

        def save_and_die(*arguments: Any) -> int:
            print(json.dumps(arguments, default=str), file=pipes[0], flush=True)
            return int(pipes[1].readline())

        yield save_and_die
        process.stdin.close()


STEPS = [f"{when}{step}" for step in ("sync 1", "sync 2", "name 1", "unlink 1") for when in ("", "after ")]


@pytest.mark.parametrize("step", [*STEPS, "unlink 2", "after unlink 2"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_save_that_is_killed_leaves_a_whole_model(
    tmp_path: Path, dying: Callable[..., int], step: str, overwrite: bool
) -> None:
    """The old or the new one; beside it only an unfinished file, or data to which no model refers."""
    if step.endswith("unlink 2") and not overwrite:
        return  # there are no old data
    folder = tmp_path / "out"
    folder.mkdir()
    onnx.save(filled(2), tmp_path / "in.onnx")
    if overwrite:
        save(filled(1), folder / "a.onnx", external_above=0)
    assert dying(tmp_path / "in.onnx", folder / "a.onnx", step, overwrite) == -signal.SIGKILL
    is_named = step == "after name 1" or "unlink" in step
    number = number_in(folder / "a.onnx") if (folder / "a.onnx").exists() else None
    assert number == (2 if is_named else 1 if overwrite else None)
    save(filled(3), folder / "a.onnx", external_above=0, overwrite=number is not None)
    save(filled(4), folder / "b.onnx", external_above=0)
    assert (number_in(folder / "a.onnx"), number_in(folder / "b.onnx")) == (3, 4)
    left = [name for name in names(folder) if re.fullmatch(r"\..{32}\.unfinished|a\.onnx\..{32}\.data", name)]
    assert len(left) <= 3
    for name in left:  # as the page says, whatever no model refers to can be removed
        if name.encode() not in (folder / "a.onnx").read_bytes():
            (folder / name).unlink()
    (folder / "b.onnx").unlink()
    for file in folder.glob("b.onnx.*"):
        file.unlink()
    assert_one_model(folder, 3)


PAUSED = """
import os, sys
import onnx
from sdpa_xp_export import save

model, target = sys.argv[1:]
sync = os.fsync

def paused(descriptor):
    print("writing", flush=True)
    sys.stdin.readline()
    sync(descriptor)

os.fsync = paused
save(onnx.load(model), target, overwrite=True, external_above=0)
"""


@pytest.mark.parametrize("step_number", [1, 2])
def test_files_of_a_save_that_runs_are_left(tmp_path: Path, step_number: int) -> None:
    """Two saves meanwhile, of the same file and of another; then it goes on, and is the last."""
    folder = tmp_path / "out"
    folder.mkdir()
    onnx.save(filled(2), tmp_path / "in.onnx")
    command = [sys.executable, "-c", PAUSED, tmp_path / "in.onnx", folder / "a.onnx"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for step in (1, 2):
            assert process.stdout.readline() == "writing\n"
            if step == step_number:
                before = names(folder)
                save(filled(1), folder / "a.onnx", external_above=0)
                save(filled(4), folder / "b.onnx")
                assert {*before} < {*names(folder)}
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    (folder / "b.onnx").unlink()
    assert_one_model(folder, 2)


SEVERAL = """
import sys
import onnx
from sdpa_xp_export import save
model = onnx.load(sys.argv[1])
for _ in range(12):
    save(model, sys.argv[2], overwrite=True, external_above=0)
"""


def test_saves_at_once_leave_a_whole_model(tmp_path: Path) -> None:
    """Of several processes; none removes the data of another's model."""
    folder = tmp_path / "out"
    folder.mkdir()
    processes = []
    for number in (1, 2, 3):
        onnx.save(filled(number), tmp_path / f"{number}.onnx")
        command = [sys.executable, "-c", SEVERAL, tmp_path / f"{number}.onnx", folder / "a.onnx"]
        processes.append(subprocess.Popen(command))
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert_whole_model(folder)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("times", range(5))
def test_saves_of_several_threads_leave_a_whole_model(tmp_path: Path, times: int) -> None:
    def saves(number: int) -> None:
        for _ in range(6 + times):
            save(filled(number), tmp_path / "a.onnx", overwrite=True, external_above=0)

    threads = [threading.Thread(target=saves, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_whole_model(tmp_path)


def test_files_that_are_named_alike_are_left(tmp_path: Path) -> None:
    """Also what a save has left that was killed: it may be of one that still runs."""
    (tmp_path / f".{'0' * 32}.unfinished").mkdir()
    (tmp_path / f".{'1' * 32}.unfinished").symlink_to(tmp_path / "none")
    (tmp_path / f".{'2' * 32}.unfinished").touch()
    (tmp_path / f"a.onnx.{'2' * 32}.data").touch()
    before = names(tmp_path)
    save(filled(1), tmp_path / "a.onnx")
    save(filled(1), tmp_path / "a.onnx", overwrite=True)
    assert names(tmp_path) == sorted([*before, "a.onnx"])


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755, 0o400])
@pytest.mark.parametrize("external_above", [0, 2**30])
def test_what_replaces_a_file_has_its_mode(tmp_path: Path, mode: int, external_above: int) -> None:
    """And its data have it, whatever the umask."""
    path = tmp_path / "a.onnx"
    save(filled(1), path)
    path.chmod(mode)
    before = os.umask(0o027)
    try:
        save(filled(2), path, overwrite=True, external_above=external_above)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}
    page = tmp_path / "r.html"
    page.touch()
    page.chmod(mode)
    publish(b"text", page, PathArgument("verify", "html"), overwrite=True)
    assert page.stat().st_mode & 0o777 == mode


def test_nobody_reads_what_replaces_a_private_file_before_it_has_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def looking(file: int | Path, mode: int) -> None:
        modes.append(os.stat(file).st_mode & 0o777)
        chmod(file, mode)

    chmod = os.chmod
    path = save(filled(1), tmp_path / "a.onnx")
    path.chmod(0o640)
    monkeypatch.setattr(os, "chmod", looking)
    save(filled(2), path, overwrite=True, external_above=0)
    assert modes == [0o600, 0o600]


def linked(folder: Path, target: Path) -> Path:
    link = folder / "named" / "a.onnx"
    link.parent.mkdir()
    link.symlink_to(target)
    return link


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["absolute", "..", "through a folder", "below", "two links"])
def test_a_link_to_nothing_leads_into_no_other_folder(tmp_path: Path, to: str, overwrite: bool) -> None:
    outside = tmp_path / ("named/below" if to == "below" else "outside")
    targets = {"absolute": outside / "a.onnx", "..": Path("..") / "outside" / "a.onnx"}
    targets |= {"below": Path("below") / "a.onnx", "two links": Path("b.onnx")}
    (tmp_path / "folder").symlink_to(outside)
    link = linked(tmp_path, targets.get(to, Path("..") / "folder" / "a.onnx"))
    outside.mkdir()
    if to == "two links":
        link.with_name("b.onnx").symlink_to(outside / "a.onnx")
    argument = PathArgument("save", "path")
    for write in (
        lambda: save(MODEL, link, overwrite=overwrite),
        lambda: publish(b"", link, argument, overwrite=overwrite),
    ):
        with pytest.raises(FileExistsError, match="link to nothing"):
            write()
    assert names(outside) == []
    (outside / "a.onnx").touch()  # a link to a file is followed
    assert save(MODEL, link, overwrite=True) == outside / "a.onnx"


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux a pipe has a path, as /dev/stdout")
def test_a_pipe_is_no_file() -> None:
    """Its path is a link to a name that no file has."""
    ends = os.pipe()
    try:
        path = f"/dev/fd/{ends[1]}"
        with pytest.raises(FileExistsError, match="must be a file"):
            save(MODEL, path)
    finally:
        for end in ends:
            os.close(end)


def test_the_demo_follows_no_link_to_nothing(tmp_path: Path) -> None:
    linked(tmp_path, tmp_path / "elsewhere.onnx").rename(tmp_path / "named" / demo.MODEL)
    with pytest.raises(FileExistsError, match="must not exist yet"):
        demo.check_folder(tmp_path / "named", overwrite=False)
    demo.check_folder(tmp_path / "named", overwrite=True)


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    """It is the one that was named; and a link to nothing may stay in it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    assert save(MODEL, tmp_path / "folder" / "a.onnx") == tmp_path / "real" / "a.onnx"
    (tmp_path / "real" / "b.onnx").symlink_to("c.onnx")
    assert save(MODEL, tmp_path / "folder" / "b.onnx") == tmp_path / "real" / "c.onnx"


def test_an_object_may_name_a_file(tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path / "a.onnx")

    path = Named()
    assert save(MODEL, path) == tmp_path / "a.onnx"
    assert verify(path, provider="cpu").agrees
