"""A full disk, and a folder for temporary files that cannot be written to, are no faults of a model: exit 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdpa_xp_export import TensorSpec, export_attention, jit, save, to_onnx, verify, verify_layer

SPEC = TensorSpec("float32", (1, 2, "L", 8))
HINT = "It is the folder for temporary files: free space there, lift the limit, or name another folder."
LIMITED = """
import resource, sys
from sdpa_xp_export.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.argv = ["sdpa-xp", *{arguments}]
main()
"""


def double(x: Any) -> Any:
    return x + x


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(export_attention(SPEC, SPEC, SPEC), tmp_path_factory.mktemp("models") / "model.onnx")


def limited(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process whose files may have that many bytes."""
    code = LIMITED.format(limit=limit, arguments=[*map(str, arguments)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_profile_that_is_cut_off(model: Path) -> None:
    """onnxruntime writes what it can, and says nothing."""
    done = limited(1024, "verify", model)
    why = f"`TMPDIR` must be writable (File too large); got TMPDIR={tempfile.gettempdir()}. {HINT}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"sdpa-xp: verify: {why}\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_files_of_the_user_are_named_by_their_flag(tmp_path: Path) -> None:
    done = limited(0, "export", "--query", "float32[1,2,L,8]", "-o", tmp_path / "a.onnx")
    assert done.returncode == 2
    assert done.stderr == (
        f"sdpa-xp: export: `--output` must be writable (File too large); got --output={tmp_path / 'a.onnx'}.\n"
    )
    assert not [*tmp_path.iterdir()]


def test_no_folder_can_be_written_to(model: Path) -> None:
    """In a process of its own: other tests share one that has its folder already."""
    code = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/no/such/folder']" + LIMITED
    code = code.format(limit=2**40, arguments=["verify", str(model)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    why = "No usable temporary directory found in ['/no/such/folder']"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"sdpa-xp: verify: `TMPDIR` must be writable ({why}); got TMPDIR=None. {HINT}\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each function that runs a model says so, and the error keeps its class and number."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number), "/tmp/unknown")

    call, layer = export_attention(SPEC, SPEC, SPEC), to_onnx(double, TensorSpec("float32", ("L",)))
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    runs = {
        "verify": lambda: verify(call),
        "verify ": lambda: verify_layer(layer, double),
        "jit": lambda: jit(double)(np.ones(3, np.float32)),
    }
    for function, run_model in runs.items():
        with pytest.raises(OSError, match=rf"^{function.strip()}: `TMPDIR` must be writable \(") as caught:
            run_model()
        assert os.strerror(number) in str(caught.value)
        assert HINT in str(caught.value)
        assert "unknown" not in str(caught.value)
        assert caught.value.errno == number
