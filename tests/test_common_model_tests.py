"""The script that runs Transformers' common model tests: how it fetches and counts them, and (slow) that all pass."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import common_model_tests
import pytest


SCRIPT = Path(common_model_tests.__file__)


@pytest.mark.slow
def test_gated_models_pass_what_qwen3_passes():
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    if result.returncode == 2:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout[-6000:]


def test_one_line_when_they_cannot_be_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["common_model_tests.py"])
    assert common_model_tests.main() == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "cannot be fetched: pip download failed: ERROR: No matching distribution" in out
    assert not list((tmp_path / "gated-llama").iterdir())


def cases(**settings):
    """`Setting=[("test", outcome)]` as pytest writes it."""
    tags = {"passed": "", "failed": "<failure/>", "skipped": '<skipped message="why"/>'}
    for setting, tests in settings.items():
        for name, outcome in tests:
            text = f'<testcase classname="cases.{setting}Test" name="{name}">{tags[outcome]}</testcase>'
            yield ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("gated", "control", "fine"),
    [
        ("passed", "passed", True),
        ("skipped", "skipped", True),
        ("skipped", "passed", False),
        ("failed", "failed", False),
        ("failed", "skipped", False),
        ("passed", "failed", False),
    ],
)
def test_what_counts_as_a_pass(gated, control, fine, capsys, monkeypatch):
    found = list(cases(Gated=[("test_a", gated), ("test_b", "passed")], Qwen3=[("test_a", control)]))
    assert common_model_tests.report(found) == fine
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("Gated")).split()[1:]
    counts = [1 + (gated == "passed"), int(gated == "failed"), int(gated == "skipped")]
    assert row == [str(count) for count in counts]
    monkeypatch.setattr(common_model_tests, "EXPECTED_SKIPS", {"test_a": "because"})
    assert common_model_tests.report(found) == (fine or (gated, control) == ("skipped", "passed"))
