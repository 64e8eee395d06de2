"""The library on a CUDA device, held against the reference. quality/gpu/run.py runs it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
from internals import Feature, compare

from quality.agreement.features import feature_jobs, features
from quality.gpu.devices import on_cuda

DTYPES = ("float32", "float16", "bfloat16", "float64")


@functools.cache
def jobs(dtype: str) -> Mapping[str, Feature]:
    return feature_jobs(dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("feature", features("float32"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_feature_agrees_on_the_device(name: str, dtype: str, feature: str) -> None:
    devices = on_cuda(name)
    for row in compare({feature: jobs(dtype)[feature]}, dtype, devices, []):
        (result,) = row.results
        assert result.refused == ""
        assert result.agrees, result.agreement
