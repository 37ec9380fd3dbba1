# SPDX-License-Identifier: Apache-2.0
"""A model that returns embeddings: requests get the server's setting, and cannot select a profile by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from server import serve, write_messages

NAME, PATH = "llava", "/v1/embeddings"
FULL, QUARTER, TENTH = 36, 9, 4  # tokens of an image


def test_profiles_at_other_endpoints(folder: Callable[[str], Path], tmp_path: Path) -> None:
    setting = DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}, "same": {"keep": 0.25}}, "log": "json"}
    arguments = ["--runner", "pooling", "--convert", "embed", "--trust-request-mm-kwargs"]
    arguments += ["--served-model-name", "tiny", "tiny:fast", "tiny:same", "tiny:default", "tiny:fsat"]
    messages = write_messages(CHECKPOINTS[NAME].images(1), "what? ")
    with serve(folder(NAME), tmp_path, setting, *arguments) as server:

        def ask(model: str, path: str = PATH, **more: Any) -> Any:
            answer = server.post_json(path, {"model": model, "messages": messages, **more})
            return answer if isinstance(answer, int) else answer["usage"]["prompt_tokens"]

        def by_key(value: dict[str, Any]) -> Any:
            return ask("tiny", mm_processor_kwargs={"tokenprune": value})

        text = ask("tiny") - QUARTER
        assert ask("tiny:fast") == ask("tiny:fsat") == ask("tiny:fast", "/pooling") == 400
        assert ask("tiny:default") == ask("tiny:same") == text + QUARTER
        assert by_key({"profile": "fast"}) == text + TENTH and by_key({"off": True}) == text + FULL
        refusals = {labels: value for labels, value in server.counted("tokenprune:refusals_total").items() if value}
        assert refusals == {'model_name="tiny",reason="setting"': 2, 'model_name="tiny",reason="profile"': 1}
