"""`python build.py FOLDER`: CUDA libraries that compute nothing, for the onnxruntime-gpu in FOLDER.

FOLDER has onnxruntime-gpu and the headers of CUDA's runtime, as `make cuda-placement` installs them. The CUDA
provider says which libraries and functions it needs; cuda.c has the functions that must return something, and
all others return 0. FOLDER/cuda then has the libraries: with these and the packages, a process sees a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda.c")
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
LOADED = ("libcudnn.so.9",)
"""Libraries that are loaded when a session starts."""


def build(packages: Path) -> Path:
    """Build the libraries, and return their folder."""
    folder = packages / "cuda"
    folder.mkdir(exist_ok=True)
    provider = packages / PROVIDER
    needed = re.findall(r"NEEDED.*\[(libcu\S+)\]", _output("readelf", "-d", str(provider)))
    by_version = defaultdict(list)
    for symbol in _output("nm", "-D", "--undefined-only", "--format=just-symbols", str(provider)).split():
        name, _, version = symbol.partition("@")
        if version in needed or (not version and re.match(r"cu[A-Z]", name)):
            by_version[version].append(name)
    # cuDNN is loaded when a session starts, and its functions are looked up by their names.
    by_version[""] += {name.decode() for name in re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", provider.read_bytes())}
    names = sorted({name for names in by_version.values() for name in names})
    (folder / "stubs.c").write_text(
        "".join(f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in names)
    )
    listed = ((version, "; ".join(names)) for version, names in by_version.items() if version)
    (folder / "versions").write_text(
        "".join(f"{version} {{ global: {names}; }};\n" for version, names in listed)
    )
    library = folder / "libstandin.so"
    headers = {path.parent for name in ("driver_types.h", "crt") for path in packages.rglob(f"include/{name}")}
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", *(f"-I{path}" for path in sorted(headers))]
    command += [f"-Wl,--version-script={folder / 'versions'}", "-o", str(library)]
    subprocess.run([*command, str(SOURCE), str(folder / "stubs.c")], check=True)
    for name in {*needed, *LOADED}:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return folder


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).resolve()))
