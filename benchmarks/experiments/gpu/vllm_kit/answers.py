# SPDX-License-Identifier: Apache-2.0
"""Run one case of h_vllm_answers.py: an engine with a small random model, compared with transformers."""

from __future__ import annotations

import engine  # isort: skip
import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from cases import CASES, OFF, Case
from engine import TINY, say

SETTINGS: dict[str, dict[str, Any]] = {
    "off": OFF,
    "keep 1.0": {"method": "divprune", "keep": 1.0},
    "divprune": {"method": "divprune", "keep": 0.25},
    "divprune 0.11": {"method": "divprune", "keep": 0.11},
    "pool": {"method": "pool", "keep": 0.5},
    "uniform": {"method": "uniform", "keep": 0.5},
}
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "llava": {"visionzip": {"method": "visionzip", "keep": 0.5}, "tome": {"method": "tome", "keep": 0.5}},
    "qwen2_5_vl": {"vscan": {"method": "vscan", "stage2": False, "keep": 0.5}},
}
STEPS, LONG, TOGETHER = (4, 8, 4) if TINY else (8, 24, 16)


class Run:
    """A vLLM engine with a checkpoint, and the same checkpoint in transformers on the CPU."""

    def __init__(self, case: Case, folder: Path, setting: dict[str, Any] | None, **more: Any) -> None:
        import conftest
        from reference import Reference

        dtype, attention = case.dtype
        if dtype == "float32":
            engine.exact()
        self.checkpoint = conftest.ALL[case.checkpoint]
        options = dict(conftest.OPTIONS) | {"max_num_seqs": 16, "gpu_memory_utilization": 0.05}
        options |= {"kv_cache_memory_bytes": 768 * 2**20, "attention_backend": attention, "dtype": dtype}
        options["limit_mm_per_prompt"] = {"image": 3} | ({"video": 1} if self.checkpoint.video else {})
        self.llm = engine.start(str(folder), setting, case.runner, **options | case.options | more)
        self.about, self.reference = engine.about(self.llm), Reference(self.checkpoint, folder)

    def generate(self, requests: list[dict[str, Any]], steps: int = STEPS) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=steps, logprobs=5, ignore_eos=True)
        return self.llm.generate(requests, params, use_tqdm=False)

    def forget(self) -> None:
        """Empty all caches."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def row(self, comparison: str, setting: str, equal: int, total: int, gap: float, **more: Any) -> None:
        """Print a row. `equal` of `of` tokens (from the start) or answers are equal."""
        verdict = "equal" if equal == total else "differs"
        say(
            what=comparison,
            setting=setting,
            verdict=verdict,
            equal=equal,
            of=total,
            gap=round(gap, 7),
            **more,
            **self.about,
        )

    def compare(self, comparison: str, setting: str, output: Any, expected: tuple[list[int], Any], **more: Any) -> None:
        """Compare an answer with expected tokens and log-probabilities, and print a row."""
        equal, gap = compared(output, *expected)
        self.row(comparison, setting, equal, len(expected[0]), gap, prompt=len(output.prompt_token_ids), **more)


def compared(output: Any, tokens: list[int], logprobs: Any) -> tuple[int, float]:
    """Return the number of equal tokens from the start, and the maximum gap of log-probabilities up to there."""
    equal, gap = 0, 0.0
    for step, (mine, theirs) in enumerate(zip(output.outputs[0].token_ids, tokens, strict=True)):
        top = output.outputs[0].logprobs[step]
        gap = max(gap, *(abs(entry.logprob - float(logprobs[step][token])) for token, entry in top.items()))
        if mine != theirs:
            break
        equal += 1
    return equal, gap


def between(first: Any, other: Any) -> tuple[bool, float]:
    """Return whether two answers of vLLM are equal, and the maximum gap up to the first different token."""
    gap, answers = 0.0, (first.outputs[0], other.outputs[0])
    for step, (mine, theirs) in enumerate(zip(answers[0].token_ids, answers[1].token_ids, strict=True)):
        if mine != theirs:
            return False, gap
        a, b = (each.logprobs[step] for each in answers)
        gap = max([gap, *(abs(a[token].logprob - b[token].logprob) for token in a.keys() & b.keys())])
    return True, gap


def by_request(case: Case, folder: Path) -> None:
    """Compare settings per request with transformers, and concurrent and cached requests with single ones."""
    run = Run(case, folder, OFF)
    settings = SETTINGS | MORE.get(case.checkpoint, {})
    prompt, images = run.checkpoint.prompt(2), run.checkpoint.images(2)
    outputs = {name: run.generate([engine.request(prompt, images, setting)])[0] for name, setting in settings.items()}
    same, gap = between(outputs["keep 1.0"], outputs["off"])
    run.row("off", "keep 1.0", STEPS * same, STEPS, gap)
    for name, output in outputs.items():
        setting = None if name == "off" else settings[name]
        run.compare("transformers, CPU", name, output, run.reference.greedy(prompt, images, STEPS, setting))
    requests = []
    for index in range(TOGETHER):
        text = run.checkpoint.prompt(1 + index % 3, f"case {index}? ")
        images_of_request = run.checkpoint.images(1 + index % 3, seed=10 + index)
        requests.append(engine.request(text, images_of_request, [*settings.values()][index % len(settings)]))
    run.forget()
    together, again = run.generate(requests), run.generate(requests)
    run.forget()
    single = [run.generate([request])[0] for request in requests]
    for comparison, others in (("alone", together), ("alone, from the caches", again)):
        pairs = [between(*pair) for pair in zip(others, single, strict=True)]
        equal, cached = sum(same for same, _ in pairs), sum(bool(output.num_cached_tokens) for output in others)
        run.row(comparison, f"{TOGETHER} at once", equal, TOGETHER, max(gap for _, gap in pairs), cached=cached)


def in_llm(case: Case, folder: Path) -> None:
    """Compare a method inside the decoder with transformers, for prompts with zero to three images."""
    import test_in_llm as tests
    from tokenprune.methods.in_llm.dart import Dart
    from tokenprune.methods.in_llm.fastv import FastV

    if case.method == "dart":
        method, more = Dart(pivot_text=0), tests.TIGHT | {"num_gpu_blocks_override": 200}
        theirs: Any = tests.aligned(method)
    else:
        method = theirs = FastV()
        more = dict(enable_prefix_caching=False, enable_chunked_prefill=False)
        more |= dict(max_num_batched_tokens=512, max_model_len=512)
    run = Run(case, folder, tests.setting(method), **more)
    prompts = tests.mixed(run, run.checkpoint.images)
    outputs = run.generate([engine.request(*prompt, None) for prompt in prompts], LONG)
    for (prompt, images), output in zip(prompts, outputs, strict=True):
        expected = run.reference.generate(prompt, images, LONG, {"method": theirs, "keep": 0.25})
        run.compare("transformers, CPU", f"{case.method}, {len(images)} images", output, expected)


def without_plugin(case: Case, folder: Path) -> None:
    """Compare vLLM without the plugin with transformers. `off` is compared with the same answers."""
    os.environ["VLLM_PLUGINS"] = ""
    if case.checkpoint == "llava":  # without the plugin, vLLM needs parameter names of transformers 4
        import re

        from safetensors.torch import load_file, save_file

        from checkpoints import TOWER

        path = folder / "model.safetensors"
        weights = {re.sub(*TOWER[0], name): value for name, value in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    run = Run(case, folder, None)
    prompt, images = run.checkpoint.prompt(2), run.checkpoint.images(2)
    (output,) = run.generate([engine.request(prompt, images, None)])
    run.compare("transformers, CPU", "no plugin", output, run.reference.greedy(prompt, images, STEPS, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--tiny", action="store_true")
    case = CASES[parser.parse_args().case]
    import conftest

    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        conftest.ALL[case.checkpoint].write(folder)
        kind = without_plugin if not case.plugin else in_llm if case.method else by_request
        kind(case, folder)
        engine.leave()


if __name__ == "__main__":
    main()
