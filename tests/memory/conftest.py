"""Full collections are what measurements of memory ask for, several in each test: they skip what earlier files have left."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_left_is_frozen() -> None:
    gc.collect()
    gc.freeze()
