"""Fixtures of the training library's tests."""

import gc
import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_is_loaded_whole() -> None:
    """What torch loads with the first optimizer, its compiler and sympy, stays until the end: the collections that look
    for what a test left need not go through it. They took a third of these tests' time."""
    importlib.import_module("torch._dynamo")  # not at collection: only a process that runs these tests needs it
    gc.collect()
    gc.freeze()
