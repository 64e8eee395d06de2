"""`python -m quality.cpus`: run the tests, and count false alarms, as on CPUs older than this one.

Array libraries look at the CPU when they are loaded, and choose kernels: how many numbers are added at once, in
which order, whether a product is rounded. `CPUS` lists the switches by which they choose as on an older CPU. A
result is off by something else then, and still has to agree. onnxruntime has no switch. So a few tests and
models run under qemu-user, which emulates a CPU, if it is installed.

`make test-cpus PART=3/40` runs the third, 43rd, 83rd part of the tests and so on, and verifies one model of 40.
What passed is kept in build/cpus, and does not run again while no file changes: a run that was ended goes on.
`python -m quality.cpus haswell COMMAND` runs any command as on that CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "cpus"
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
CPUS: dict[str, dict[str, str]] = {
    "haswell": {
        "NPY_DISABLE_CPU_FEATURES": "AVX512 X86_V4",
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        **AVX2,
    },
    "sandybridge": {
        "NPY_DISABLE_CPU_FEATURES": "AVX F16C FMA X86_V3 X86_V4",
        "OPENBLAS_CORETYPE": "Sandybridge",
        "ATEN_CPU_CAPABILITY": "default",
        **AVX2,
    },
}
"""The switches of each CPU. `haswell` has AVX2 and FMA without AVX-512 and VNNI, as have Zen 1 to 3.
`sandybridge` has AVX in OpenBLAS, and SSE in NumPy and torch. XLA and oneDNN stay at AVX2: with less, XLA has
no halves, and kernels of OpenVINO do not fit its oneDNN. NumPy's features are named by their first letters."""
EMULATED = "Haswell"
"""The CPU that qemu-user emulates, which has AVX2 and no VNNI."""
OF_ONNXRUNTIME = (
    "tests/export/jit/test_jit_models.py::test_other_engines",
    "tests/export/layer/test_layer_references.py::test_boolean_inputs_alone",
    "tests/export/verify/test_other_orders.py",
    "tests/tools/test_table.py::test_quantize_static_of_products",
    "tests/tools/test_tools.py",
)
"""The tests that depend on the kernels of onnxruntime: of int8, and of sums of equal terms."""
SELECTED = "test_other_engines or boolean or layers_of_two_kinds or of_products or quantize_dynamic"
EMULATED_MODELS = 40
"""One of so many models is verified under emulation, which is some 20 times slower."""
ALARMS = ("-m", "quality.faults.false_alarms")


@dataclass(frozen=True)
class Job:
    """A command, as on a CPU."""

    cpu: str
    name: str
    command: tuple[str, ...]


def disabled(*prefixes: str) -> str:
    """Return the features that NumPy may use here and that begin with one of `prefixes`, by NumPy's names."""
    from numpy._core import _multiarray_umath as numpy_core

    is_here: Mapping[str, bool] = numpy_core.__cpu_features__
    return " ".join(name for name in numpy_core.__cpu_dispatch__ if is_here[name] and name.startswith(prefixes))


def environment(cpu: str) -> dict[str, str]:
    """Return the variables of a process that computes as on that CPU; an emulated one needs no switch."""
    switches = dict(CPUS.get(cpu, {}))
    if switches:
        switches["NPY_DISABLE_CPU_FEATURES"] = disabled(*switches["NPY_DISABLE_CPU_FEATURES"].split())
        for name in ("NPY_DISABLE_CPU_FEATURES", "XLA_FLAGS"):  # this process may run as on an older CPU, too
            switches[name] = f"{os.environ.get(name, '')} {switches[name]}".strip()
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _paths())), **one_thread, **switches}


def _paths() -> Iterator[Path | str]:
    yield from (ROOT, ROOT / "export", ROOT / "tests")
    yield from filter(None, [os.environ.get("PYTHONPATH")])


def jobs(parts: Sequence[str], part: str) -> Iterator[Job]:
    """Yield all jobs of a part such as 3/40; `parts` are the targets of the Makefile that run tests."""
    first, _, step = part.partition("/")
    tests = [Job(cpu, name, ("make", "--no-print-directory", name)) for cpu in CPUS for name in parts]
    emulator = shutil.which("qemu-x86_64")
    emulated = (emulator or "qemu-x86_64", "-cpu", EMULATED, sys.executable)
    pytest = ("-m", "pytest", "-q", "-p", "no:benchmark", *OF_ONNXRUNTIME, "-k", SELECTED)
    tests += [Job("emulated", "tests of onnxruntime", (*emulated, *pytest))] if emulator else []
    yield from tests[int(first) - 1 :: int(step)]
    for cpu in CPUS:
        yield Job(cpu, f"false alarms {part}", (sys.executable, *ALARMS, "--part", part))
    if emulator:
        few = f"{first}/{int(step) * EMULATED_MODELS}"
        yield Job("emulated", f"false alarms {few}", (*emulated, *ALARMS, "--here", "--part", few))


def tree() -> str:
    """Return a digest of the programs, so that what passed is only kept for them."""
    digest = hashlib.sha256()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def outcome(job: Job, kept: Path) -> tuple[bool, str]:
    """Run a job, or read what it printed if it has passed; return whether it did, and its last line."""
    path = kept / f"{job.cpu}, {job.name}.txt".replace("/", " of ")
    if path.exists():
        passed, printed = True, path.read_text()
    else:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ran: Any = subprocess.run(job.command, cwd=ROOT, env=environment(job.cpu), **both)
        passed, printed = ran.returncode == 0, ran.stdout
        path.with_suffix(".txt" if passed else ".failed").write_text(printed)
        print("" if passed else printed, end="", flush=True)
    lines = [line for line in printed.splitlines() if " passed" in line or " false alarms in " in line]
    return passed, lines[-1] if lines else "no summary"


def main(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in CPUS:
        return subprocess.run(arguments[1:], env=environment(arguments[0])).returncode
    parser = argparse.ArgumentParser(prog="quality.cpus", description=__doc__)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("parts", nargs="*", help="targets of the Makefile")
    chosen = parser.parse_args(arguments)
    kept = KEPT / tree()
    kept.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    for job in jobs(chosen.parts, chosen.part):
        start = time.monotonic()
        passed, line = outcome(job, kept)
        failed += not passed
        rows.append(f"{job.cpu:12} {job.name:24} {'ok  ' if passed else 'FAIL'} {line}")
        print(f"{rows[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
    if not shutil.which("qemu-x86_64"):
        rows.append("emulated     not run: qemu-x86_64 is not installed (Debian's qemu-user)")
    print("\n".join(["", "Summary", *rows]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
