"""Starting fresh processes, with a child that only pretends to load a model."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from bench import startup
from jaxserve.config import ServeConfig

CHILD = """\
#!{python}
import json, pathlib, sys, time
config = json.loads(sys.argv[3])
marker = pathlib.Path(config["engine"]["compile_cache"]) / "compiled"
print("a line that is no mark")
time.sleep(0.0 if marker.exists() else 1.0)
marker.touch()
print(json.dumps({{"first_token": True}}), flush=True)
time.sleep(1.0)
print(json.dumps({{"peak_bytes": 3, "weight_bytes": 1, "kv_bytes": 2}}))
"""


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    child = tmp_path / "python"
    child.write_text(script.format(python=sys.executable))
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))


@pytest.mark.slow
def test_the_second_start_finds_the_cache_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, CHILD)
    cold, warm = startup.measure(ServeConfig(model="m"))
    # The clock stops at the first token, not when the process ends a second later.
    assert 1.0 <= cold.first_token_seconds < 2.0
    assert warm.first_token_seconds < 1.0
    assert (cold.peak_bytes, cold.weight_bytes, cold.kv_bytes) == (3, 1, 2)
    assert cold.allowed_bytes == 3 + startup.ALLOWANCE_BYTES


@pytest.mark.parametrize("end", ["sys.exit('no such model')", "sys.stderr.write('no such model')"])
def test_a_child_that_gives_no_figures_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    pretend(tmp_path, monkeypatch, f"#!{{python}}\nimport sys\nprint('{{{{}}}}')\n{end}\n")
    with pytest.raises(RuntimeError, match="no such model"):
        startup.measure(ServeConfig(model="m"))


def test_peak_memory_is_what_the_system_says() -> None:
    assert startup.peak_resident_bytes() == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rel=0.05)


def test_the_child_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.startup"])
    assert startup.main() == 2
    assert "ServeConfig as JSON" in capsys.readouterr().err


def test_the_config_survives_the_way_to_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen.json"
    pretend(tmp_path, monkeypatch, CHILD.replace("1.0", "0") + f"open({str(seen)!r}, 'w').write(sys.argv[3])\n")
    startup.measure(ServeConfig(model="m"))
    written = json.loads(seen.read_text())
    assert written["model"] == "m"
    assert written["engine"].keys() == ServeConfig(model="m").engine.__dataclass_fields__.keys()
