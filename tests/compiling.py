"""The marks of tests of `torch.compile`."""

import pytest

COMPILES = [
    pytest.mark.usefixtures("fresh_graphs"),
    # torch's own, while it traces.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]
