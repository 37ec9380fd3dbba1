# SPDX-License-Identifier: Apache-2.0
"""The shipped model, served as in docs/serving/reference.md for a machine without a GPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from checkpoints import Checkpoint
from reference import Reference
from server import Server, launch
from test_server import ask
from tokenprune_demo import MODELS
from tokenprune_demo.heldout import FOLDER

MODEL = MODELS["demo_qwen"]
DOCS = Path(__file__).resolve().parents[2] / "docs/serving/reference.md"


def read_example() -> tuple[dict[str, str], list[str]]:
    """Return environment and command of the page's example for a machine without a GPU."""
    (block,) = [text for text in DOCS.read_text().split("```")[1::2] if "api_server" in text]
    words = shlex.split(block.replace("\\\n", " ").strip())
    start = words.index("python")
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment, words = read_example()
    assert words[words.index("--host") + 1] == "127.0.0.1", "it would be open to the network"
    assert 0 < int(environment["VLLM_CPU_KVCACHE_SPACE"]) <= 4, "it would not start where memory is in use"
    model_path = str(MODEL.relative_to(DOCS.parents[2]))
    assert model_path in words
    command = [
        {"python": sys.executable, model_path: str(MODEL), "demo_qwen": "tiny"}.get(word, word) for word in words
    ]
    command.append("--trust-request-mm-kwargs")
    with launch(command, tmp_path_factory.mktemp("demo"), **environment) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(Checkpoint("demo_qwen", dict, dict, "<image>", mrope=True), MODEL)


def load_questions() -> list[tuple[Image.Image, str, str]]:
    """Return one question of each kind, with its answer."""
    lines = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text().splitlines()[:8]]
    picked = [(line, line["questions"][index]) for index, line in enumerate(lines)]
    return [(Image.open(FOLDER / line["picture"]), entry["question"], entry["answer"]) for line, entry in picked]


@pytest.mark.parametrize("override", [None, {"keep": 0.5}, {"method": "pool", "keep": 0.25}, {"off": True}], ids=str)
def test_it_answers_as_in_transformers(server: Server, reference: Reference, override: Any) -> None:
    right = 0
    for image, question, answer in load_questions():
        reply = ask(server, [image], question, override, add_special_tokens=True)
        steps = reply.choices[0].logprobs.content
        prompt = reference.processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
            add_generation_prompt=True,
        )
        setting = None if override == {"off": True} else {"method": "divprune", "keep": 0.25} | (override or {})
        tokens, logprobs = reference.greedy(prompt, [image], len(steps), setting)
        assert [int(step.token.removeprefix("token_id:")) for step in steps] == tokens
        for step_index, step in enumerate(steps):
            # On even backgrounds many tokens are nearly equal, so the choice of divprune depends on rounding.
            for likely in step.top_logprobs if setting is None or setting["method"] == "pool" else ():
                token = int(likely.token.removeprefix("token_id:"))
                assert likely.logprob == pytest.approx(float(logprobs[step_index, token]), abs=1e-4)
        ids = reference.inputs(prompt, [image])["input_ids"][0].tolist()
        visual = ids.count(reference.model.config.image_token_id)
        num_kept = visual if setting is None else round(visual * setting["keep"])
        assert reply.usage.prompt_tokens == len(ids) - visual + num_kept
        right += answer in reference.processor.tokenizer.decode(tokens)
    assert override != {"off": True} or right >= 6
