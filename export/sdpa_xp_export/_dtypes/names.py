"""The dtypes of values, which are their names. It is also the array API of a spec, which computes nothing."""

from __future__ import annotations

from sdpa_xp_export._dtypes.standard import __array_namespace_info__ as __array_namespace_info__
from sdpa_xp_export._dtypes.standard import result_type as result_type

bool = "bool"
int8 = "int8"
int16 = "int16"
int32 = "int32"
int64 = "int64"
uint8 = "uint8"
uint16 = "uint16"
uint32 = "uint32"
uint64 = "uint64"
float16 = "float16"
bfloat16 = "bfloat16"
float32 = "float32"
float64 = "float64"
