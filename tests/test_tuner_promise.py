# SPDX-License-Identifier: Apache-2.0
"""benchmarks/tuner_promise.py, which proves the tuner: its arithmetic by hand, and the page that shows its results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenprune.bench.scenes import KINDS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("tuner_promise")
    for name in set(sys.modules) - before:  # `common` and the like are nobody else's names
        if str(getattr(sys.modules[name], "__file__", "")).startswith((f"{ROOT}/benchmarks", f"{ROOT}/training")):
            del sys.modules[name]


def test_questions_are_drawn_like_those_held_out(script: Any) -> None:
    first, again, other = script.draw(3, 1), script.draw(3, 1), script.draw(3, 2)
    assert Counter(one.kind for one in first) == dict.fromkeys(KINDS, 3)
    assert len({one.path for one in first}) == 3 and not {one.path for one in first} & {one.path for one in other}
    assert [(one.question, one.answers, one.image.tobytes()) for one in first] == [
        (one.question, one.answers, one.image.tobytes()) for one in again
    ]


def test_what_was_promised_is_held_against_what_was_measured(script: Any, tmp_path: Path) -> None:
    """Two processes; one promise is kept, one is not, one seed found nothing, and one is not measured yet."""
    good, bad, later = ({"method": "pool", "keep": keep} for keep in (0.5, 0.25, 0.1))

    def tuned(seed: int, setting: Any) -> dict[str, Any]:
        held = {"questions": 60, "drop": setting and 0.01, "below": setting and 0.019}
        return {"record": "tuning", "seed": seed, "setting": setting, "prefill_flops_ratio": 0.5, "held_out": held}

    def fresh(setting: Any, lost: int) -> dict[str, Any]:
        return {"record": "fresh", "setting": setting, "right": "0" * lost + "1" * (100 - lost)}

    parts = [
        [fresh(None, 0), tuned(0, good), fresh(good, 1), tuned(2, None)],
        [tuned(1, bad), fresh(bad, 2), tuned(3, good), tuned(5, later)],
    ]
    out = tmp_path / "promise.jsonl"
    for rank, records in enumerate(parts):
        script._part(out, rank).write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "other.part0.jsonl").write_text(json.dumps(fresh(good, 90)) + "\n")  # of another run
    plan = argparse.Namespace(out=out, max_drop=0.02, confidence=0.95, methods="pool", keep="0.5", pictures=10, fresh=5)
    script.collect(plan)
    _, *records = map(json.loads, out.read_text().splitlines())
    kept = {one["seed"]: one.get("kept") for one in records if one["record"] == "tuning"}
    assert kept == {0: True, 1: False, 2: None, 3: True}
    table = script.table(out)
    assert "Kept in 2 of 3 choices, of 4 seeds" in table
    assert "| 1 | pool 0.25 | 50% | 1.00 | 1.9 | 2.00 ± 1.40 | no |" in table and "| 2 | none |" in table


def test_the_page_shows_the_results(script: Any) -> None:
    page = (ROOT / "docs/tune.md").read_text()
    shown = page.split(script.BEGIN)[1].split(script.END)[0]
    assert shown.strip() == script.table(script.RESULTS).strip()
