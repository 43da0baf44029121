"""What the emulation says where it cannot be set up."""

from __future__ import annotations

import pytest

from emulation import setting_up, windows


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


def test_another_distribution_has_no_unstable_python(monkeypatch, tmp_path):
    monkeypatch.setattr(setting_up, "FOLDER", tmp_path)
    monkeypatch.setattr(setting_up, "_run", lambda *_, **__: "https://packages.example/ubuntu/\n")
    monkeypatch.setattr(setting_up.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(SystemExit, match="the system's package lists are not Debian's, whose unstable distribution is wanted"):
        setting_up.fetch_unstable("3.14")


def test_an_unstable_python_that_is_there_is_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(setting_up, "FOLDER", tmp_path)
    monkeypatch.setattr(setting_up, "_run", lambda *command, **_: pytest.fail(f"runs {command}"))
    (tmp_path / "unstable-python3.14").mkdir()
    assert setting_up.fetch_unstable("3.14") == tmp_path / "unstable-python3.14"


def test_missing_wine_is_named(monkeypatch):
    monkeypatch.setattr(windows.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"this needs Wine: install wine64 and wine \(apt-get install wine64 wine\)"):
        windows.set_up()
