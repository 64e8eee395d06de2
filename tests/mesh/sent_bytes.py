"""What devices of a compiled program send each other: its collective permutes, as often as they run."""

from __future__ import annotations

import math
import re

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
PERMUTE = re.compile(r"= (.+?) collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?\})\}")
CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count[\\"]*:\{[\\"]*n[\\"]*:[\\"]*(\d+)')


def received(program: str, device: int) -> int:
    """Bytes that a device gets from others while a compiled program runs, from its text."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        if begun := COMPUTATION.match(line):
            name = begun[1]
            lines[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            lines[name].append(line)

    def bytes_of(computation: str) -> int:
        total = 0
        for line in lines[computation]:
            if permute := PERMUTE.search(line):
                pairs = re.findall(r"\{(\d+),(\d+)\}", permute[2] + "}")
                total += sum(int(to) == device != int(start) for start, to in pairs) * size(permute[1])
            names_called = [name for names in CALLED.findall(line) for name in ",".join(names).split(",")]
            called = [name.strip(" %") for name in names_called]
            trips = TRIPS.search(line)
            assert trips or " while(" not in line, line
            total += sum(bytes_of(n) for n in called if n in lines) * int(trips[1] if trips else 1)
        return total

    return bytes_of(entry)


def size(shapes: str) -> int:
    """Bytes of an array, or of several, as a program names them: `f32[2,4]{1,0}`."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    return sum(SIZES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)
