# SPDX-License-Identifier: Apache-2.0
"""Tests with the actual lmms-eval, without a network, in a separate environment that `make test-lmms` sets up."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set before lmms_eval and datasets are imported, so that their files go into this folder.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LMMS_EVAL_DATASETS_CACHE=tempfile.mkdtemp(prefix="tokenprune-lmms-")
)

import pytest
import torch
from lmms_eval import evaluator
from lmms_eval.tasks import TaskManager
from loguru import logger

from checkpoints import CHECKPOINTS
from more_checkpoints import MORE
from tokenprune_bench.lmms_eval import get_tasks_folder
from tokenprune_demo import MODELS

DEMO = MODELS["demo_vlm"]
CPU = "device=cpu,device_map=cpu"
# Images and videos keep their order in the message. The processors write the tokens.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["LMMS_EVAL_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the checkpoint of a model type, with a chat template, on first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            checkpoint = (CHECKPOINTS | MORE)[name]
            written[name] = checkpoint.write(tmp_path_factory.mktemp(name))
            processor = checkpoint.processor()
            template = TEMPLATE.replace("IMAGE", checkpoint.image).replace("VIDEO", checkpoint.video or "")
            processor.chat_template = processor.tokenizer.chat_template = template
            processor.save_pretrained(written[name])
        return written[name]

    return get


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., dict[str, Any]]:
    """Return a function that calls `simple_evaluate` of lmms-eval: evaluate(model_args, *tasks, limit, ...)."""
    manager = TaskManager("WARNING", include_path=str(get_tasks_folder()), include_defaults=False)

    def run(args: str, *tasks: str, limit: int | None = 2, model: str = "tokenprune", **further: Any) -> dict[str, Any]:
        settings = dict(batch_size=1, bootstrap_iters=0, process_docs_parallel=1) | further
        return evaluator.simple_evaluate(
            model=model, model_args=args, tasks=list(tasks), task_manager=manager, limit=limit, **settings
        )

    return run


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the lines that lmms-eval's logger writes from now on."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="DEBUG")
    yield lines
    logger.remove(sink)


def answers(out: dict[str, Any]) -> dict[str, list[str]]:
    """Return the answers of each task, in the order of its questions."""
    return {task: [sample["filtered_resps"][0] for sample in samples] for task, samples in out["samples"].items()}


def read_values(out: dict[str, Any]) -> dict[str, float]:
    """Return tokenprune's values in a results file."""
    return {name.removeprefix("avg_"): value for name, value in out["throughput"].items() if name.startswith("avg_")}
