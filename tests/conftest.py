"""One thread for each of several test processes (`pytest -n`): more would only wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the commands that tests start inherit it
