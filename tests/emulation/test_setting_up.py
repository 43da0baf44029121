"""What the emulation says where it cannot be set up."""

from __future__ import annotations

import pytest

from emulation import setting_up


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr(setting_up.shutil, "which", lambda name: None if name.startswith("apt") else f"/usr/bin/{name}")
    with pytest.raises(SystemExit, match="the emulation needs apt-get, apt-cache: set it up on Debian or Ubuntu"):
        setting_up.fetch()


def test_a_command_that_fails_is_named():
    with pytest.raises(SystemExit, match=r"^false --packages ended with 1$"):
        setting_up._run("false", "--packages")


def test_packages_of_other_versions_are_not_ready(monkeypatch, tmp_path):
    monkeypatch.setattr(setting_up, "READY", tmp_path / "ready")
    assert not setting_up.is_ready()
    setting_up.READY.write_text("\n".join([*setting_up.wanted(), setting_up.TORCH]))
    assert setting_up.is_ready()
    setting_up.READY.write_text("numpy==1.0")
    assert not setting_up.is_ready()
