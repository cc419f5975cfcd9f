"""What cannot be a cluster is rejected before anything is started."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from sharded_loader.ray import cluster as connect


def test_ray_client_has_no_object_store_and_is_rejected() -> None:
    with pytest.raises(ValueError, match='Ray Client.*address="auto"'):
        connect.check_address("ray://10.0.0.1:10001")


@pytest.mark.parametrize("address", [7, b"auto"])
def test_an_address_is_a_string(address: Any) -> None:
    with pytest.raises(TypeError, match="address is"):
        connect.check_address(address)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install ray"):
        connect.check_installed()
