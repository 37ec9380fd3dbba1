# SPDX-License-Identifier: Apache-2.0
"""The tuner with a fake vLLM engine and a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from pretender import pretending
from tests.unit.bench.test_bench_engines import CONFIG, Killed, MadeUp
from tokenprune.cli import app
from tokenprune.errors import UnsupportedSetupError
from tokenprune_bench.run_folder import RunFolder, config_of
from tokenprune_bench.tuning import Evaluator, Promise, Search, Tuner, Tuning, build_grid
from tokenprune_bench.tuning.report import build_tuned_config
from tokenprune_bench.vllm_backend import VllmBackend
from tokenprune_demo.heldout import load_heldout

QUESTIONS = load_heldout(limit=5)
# The engine refuses dart and answers all other settings like the unpatched model.
CANDIDATES = [*build_grid(["dart"], [0.5]), *build_grid(["uniform"], [0.5, 0.25])]
SEARCH = Search([setting.to_json() for setting in CANDIDATES], 0, 4)


def tune(engine: MadeUp, folder: Path | None = None) -> tuple[Tuning, Evaluator]:
    backend = VllmBackend(engine, "", 4)

    def run(run_folder: RunFolder | None) -> tuple[Tuning, Evaluator]:
        panel = Evaluator(backend, QUESTIONS, batch_size=4, folder=run_folder)
        return Tuner(panel, CANDIDATES, Promise(0.3), repeats=1, objective="flops").run(), panel

    if folder is None:
        return run(None)
    with RunFolder(folder, config_of(backend, SEARCH, "exact", {})) as run_folder:
        return run(run_folder)


def test_an_engine_is_tuned() -> None:
    engine = MadeUp()
    tuning, panel = tune(engine)
    assert tuning.choice.candidate.to_json() == {"method": "uniform", "keep": 0.25}
    states = [trial.state for trial in tuning.trials]
    assert states == ["skipped: dart cannot be served", "keeps the promise", "chosen"]
    assert tuning.choice.cost["keep_ratio"] == 0.25 and tuning.choice.timing["ttft_ratio"]["p50"] == 0.5
    assert tuning.choice.cost["kv_bytes"] < tuning.choice.cost["kv_bytes_full"]
    settings = [setting for _, setting in engine.asked]
    assert settings.count({"off": True}) == 10 == settings.count({"method": "uniform", "keep": 0.25})
    tuned = build_tuned_config(tuning, panel, {"name": "mine"}).tuned
    # A fingerprint would differ from the transformers model, and `patch` would warn about it.
    assert tuned["model"] == {"name": "m", "type": "made_up"} and tuned["environment"]["engine"] == "vllm"


@pytest.mark.parametrize("calls", [0, 3, 11, 23])
def test_a_killed_tuning_resumes(calls: int, tmp_path: Path) -> None:
    uninterrupted, _ = tune(MadeUp())
    with pytest.raises(Killed):
        tune(MadeUp(calls), tmp_path / "run")
    engine = MadeUp()
    resumed, _ = tune(engine, tmp_path / "run")
    assert len(engine.asked) == 30 - calls  # 4 batches of search and 6 held-out batches, for three settings
    for tuning in (uninterrupted, resumed):
        for trial in tuning.trials:
            trial.timing = None
    assert resumed.trials == uninterrupted.trials


def test_a_model_without_a_config_is_refused() -> None:
    with pytest.raises(UnsupportedSetupError, match="The config of m is not available"):
        Evaluator(VllmBackend(MadeUp(config=None), "", 4), QUESTIONS)
    Evaluator(VllmBackend(MadeUp(config=CONFIG), "", 4), QUESTIONS)
    video = SimpleNamespace(is_video=True, where="line 3")
    with pytest.raises(Exception, match="line 3: is about a video"):
        Evaluator(VllmBackend(MadeUp(), "", 4), [video])


def run_command(*arguments: str) -> Result:
    fixed = "tune --methods uniform --keep 0.25 --limit 40 --max-drop 40% --objective kv"
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*fixed.split(), *arguments])


def test_incompatible_options_are_refused() -> None:
    """test_bench_engines.py has the checks that `bench` shares."""
    result = run_command("--server", "http://localhost:1")
    assert result.exit_code == 2 and "--server goes with --backend vllm" in result.stderr


def test_a_server_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="the client of --server: pip install 'tokenprune-bench[server]'")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "tokenprune.json"
    with pretending() as server:
        options = ["--backend", "vllm", "--server", server.url, "--out", str(out), "--repeats", "1"]
        refused = run_command(*options)
        assert (
            refused.exit_code == 2
            and "The config of one is not available, so savings cannot be computed" in refused.stderr
        )
        monkeypatch.setattr("tokenprune_bench.vllm_server._load_config", lambda model: CONFIG)
        result = run_command(*options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("uniform, keep 0.25: less than 40 points lost, with a confidence of 95 %.")
    written = json.loads(out.read_text())
    assert written["setting"] == {"method": "uniform", "keep": 0.25} and "fingerprint" not in written["tuned"]["model"]
