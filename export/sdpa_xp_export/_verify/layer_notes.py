"""What the metadata of a layer's model say: the forms of its attention, and the arguments of the export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sdpa_xp_export._model.entries import exported_models
from sdpa_xp_export._model.large_model import Model


def missing_arguments_note(model: Model, layer: Callable[..., Any], keywords: Mapping[str, Any]) -> str:
    """Return which arguments `to_onnx` was given, and `verify_layer` was not; empty if there are none."""
    try:
        texts = [exported.get("sdpa_xp.arguments", "[]") for exported in exported_models(model)]
        recorded = dict.fromkeys(str(name) for text in texts for name in json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return ""
    known = {*keywords, *(layer.keywords if isinstance(layer, partial) else ())}
    missing = [name for name in recorded if name not in known]
    if not missing:
        return ""
    return f"to_onnx was called with {', '.join(missing)}, and verify_layer was not; pass the same arguments"


def stated_forms(model: Model) -> tuple[str, str]:
    """Return the forms of the attention in a model, and the reasons for them."""
    chosen = []
    for exported in exported_models(model):
        if "sdpa_xp.form" in exported:  # a call that was merged with others
            chosen.append({key: exported.get(f"sdpa_xp.{key}", "") for key in ("form", "reason")})
        chosen += json.loads(exported.get("sdpa_xp.forms", "[]"))
    forms, reasons = (dict.fromkeys(choice[key] for choice in chosen) for key in ("form", "reason"))
    return ", ".join(forms) or "no attention", "; ".join(reasons)
