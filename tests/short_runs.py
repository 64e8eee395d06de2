"""A model against the reference at a few short lengths: what `verify` does, in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from sdpa_xp_export._runtime.releases import PROVIDERS
from sdpa_xp_export._runtime.session import open_session, run
from sdpa_xp_export._verify.stated_call import check_interface, computed_dtype, stated_call
from sdpa_xp_export._verify.trial_settings import short_settings
from sdpa_xp_export._verify.trials import judge, outcome, trials


def assert_right(model: onnx.ModelProto, *, seed: int = 0, **functions: Any) -> None:
    """Run a model on the CPU at three lengths, with scores of ordinary size and with large ones.

    `functions` are the mask and the bias that its metadata cannot hold.
    """
    call = stated_call(model, functions)
    check_interface(model, call)
    computed_in = computed_dtype(model, call)
    session = open_session(model, PROVIDERS["cpu"])
    drawn = trials(call, short_settings(call), np.random.default_rng(seed), computed_in=computed_in)
    outcomes = [outcome(call, trial, run(session, trial.inputs)) for trial in drawn]
    for name, agreements in judge(call, outcomes, computed_in).items():
        for each, agreement in zip(outcomes, agreements, strict=True):
            assert agreement.agrees, (name, each.shown, agreement)
            if name == "output" and "large" not in each.shown and computed_in == call.query.dtype:
                assert agreement.bound < 1e-4, (each.shown, agreement)  # no bound that says nothing
