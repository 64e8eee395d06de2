"""The dtypes of values by name: this is also the array API of a spec, which computes nothing."""

from __future__ import annotations

from .dtype import Dtype, __array_namespace_info__, can_cast, finfo, iinfo, isdtype, result_type

bool = Dtype("bool")
int8 = Dtype("int8")
int16 = Dtype("int16")
int32 = Dtype("int32")
int64 = Dtype("int64")
uint8 = Dtype("uint8")
uint16 = Dtype("uint16")
uint32 = Dtype("uint32")
uint64 = Dtype("uint64")
float16 = Dtype("float16")
bfloat16 = Dtype("bfloat16")
float32 = Dtype("float32")
float64 = Dtype("float64")

__all__ = ["__array_namespace_info__", "bfloat16", "bool", "can_cast", "finfo", "float16", "float32"]
__all__ += ["float64", "iinfo", "int8", "int16", "int32", "int64", "isdtype", "result_type", "uint8"]
__all__ += ["uint16", "uint32", "uint64"]
