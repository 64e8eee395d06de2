"""`python -m quality.runtime.webgpu [WORD...]`: graphs for `web` on the WebGPU provider, as onnxruntime-web
has it.

Each form that is not refused computes calls of 5 to 300 tokens, and every call of the list; with words, those
whose name contains one of them. It prints what is wrong, and the providers that the nodes of each form ran on.

It needs `pip install onnxruntime-ep-webgpu` beside onnxruntime, and a GPU or a software adapter. To use
SwiftShader, install chromium and libvulkan1 of Debian, and set

    export ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1
    export VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json

SwiftShader cannot compute in float16, so it refuses calls of that dtype. Calls in bfloat16 are left out: a page
cannot pass it, so the exporter refuses them for `web`.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from internals import DEFAULT_RUNTIME, ExportCall, Runtime, checked_call, nodes_of_profile, run_session

from quality.runtime.jobs import Job, jobs, jobs_of_features
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

TARGET = Runtime.parse("runtime.webgpu", DEFAULT_RUNTIME.replace("cpu", "web"))
PROVIDER = "WebGpuExecutionProvider"
LENGTHS = (5, 31, 32, 33, 100, 300)
"""The tokens of a call; kernels of attention change at 32."""


def main(words: list[str]) -> int:
    """Run everything; 1 if something is wrong."""
    import onnxruntime_ep_webgpu  # no package of the tests

    onnxruntime.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
    calls = [
        job
        for job in [*by_length(), *jobs()]
        if job.call.query.dtype != "bfloat16" and (not words or any(word in job.name for word in words))
    ]
    wrong = 0
    for form in FORMS:
        right, ran = 0, Counter[str]()
        for job in calls:
            if unsupported_reason(form, job.call, TARGET):
                continue
            fault = computed(export_call(job.call, form=form, runtime=str(TARGET)), job, ran)
            right += fault is None
            wrong += fault is not None
            if fault is not None:
                print(f"{form}: {job.name}: {fault}", flush=True)
        print(f"{form}: {right} calls are right; its nodes ran on {dict(ran)}", flush=True)
    return int(wrong > 0)


def by_length() -> Iterator[Job]:
    """Calls of each of `LENGTHS`, with equal and with grouped heads."""
    rules: dict[str, dict[str, Any]] = {
        "all pairs": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "attn_mask": masks.sliding_window(20, 0)},
        "padding": {"attn_mask": masks.padding(TensorSpec("int64", (1,)))},
    }
    for length in LENGTHS:
        query, shared = (TensorSpec("float32", (1, heads, length, 64)) for heads in (4, 2))
        calls: dict[str, ExportCall] = {}
        for name, rule in rules.items():
            for key in (query, shared):
                what = f"{length} tokens, {name}, {key.shape[1]} key heads"
                calls[what] = checked_call("runtime.webgpu", query, key, key, **rule)
        yield from jobs_of_features(calls, "float32")


def computed(model: onnx.ModelProto, job: Job, ran: Counter[str]) -> str | None:
    """Run a model on WebGPU; what is wrong with its outputs. `ran` counts its nodes by their provider."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        devices = [entry for entry in onnxruntime.get_ep_devices() if entry.ep_name == PROVIDER]
        options.add_provider_for_devices(devices[:1], {})
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
            runs = [run_session(session, feeds) for feeds in job.feeds]
        except Exception as error:  # those of onnxruntime have no common base
            return str(error).splitlines()[0]
        if PROVIDER not in session.get_providers():  # without an adapter it silently falls back to the CPU
            raise RuntimeError(f"{PROVIDER} found no adapter")
        ran.update(provider for *_, provider in nodes_of_profile(Path(session.end_profiling())))
    return job.fault(runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
