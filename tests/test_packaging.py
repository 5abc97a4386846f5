"""What is installed: every package of every room, every command, and no torch for the client."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("bench", "client", "models", "server", "shared")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    found = {
        "paceline." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_data_files_of_packages_exist() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        if package != "*":
            folder = ROOT / Path(*package.split(".")[1:])
            assert all(list(folder.glob(pattern)) for pattern in patterns), package


def test_extras_are_those_of_the_contract() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"client", "server", "models", "desktop", "demo", "test"}
    assert not [entry for entry in extras["client"] if entry.startswith(("torch", "transformers", "accelerate"))]


def test_installed_metadata_is_that_of_the_tree() -> None:
    installed = requires("paceline") or []
    assert any(entry.startswith("numpy") for entry in installed)
    assert any('extra == "client"' in entry and entry.startswith("onnxruntime") for entry in installed)


def test_licence_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"
