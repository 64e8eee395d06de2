"""A plugin of pytest that removes complex numbers from array-api-tests, since no graph holds them.

The environment variable by which these tests leave out dtypes cannot leave out both complex ones.
"""

from __future__ import annotations

import array_api_tests.dtype_helpers as helpers
import pytest

from quality.array_api.namespace import complex64, complex128

for _name, _dtypes in [*vars(helpers).items()]:
    if isinstance(_dtypes, tuple | list) and any(x is complex64 or x is complex128 for x in _dtypes):
        kept = type(_dtypes)(x for x in _dtypes if x is not complex64 and x is not complex128)
        setattr(helpers, _name, kept)
helpers.promotion_table = helpers.EqualityMapping(
    [(pair, joint) for pair, joint in helpers.promotion_table.items() if joint.kind != "c"]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the special cases of complex numbers."""
    items[:] = [item for item in items if "real(" not in item.name]
