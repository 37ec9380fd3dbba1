# SPDX-License-Identifier: Apache-2.0
"""Startup: settings and setups that are refused, and servers without a setting, which are unchanged."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import CHECKPOINTS, VOCABULARY, text
from conftest import DIVPRUNE, OPTIONS, Engine
from front_end import config
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm import compat, plugin
from tokenprune.integrations.vllm.settings.configuration import check_engine
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import get_server_config
from tokenprune.integrations.vllm.worker import runner
from tokenprune.models.families import SERVED


def test_all_hooks_exist() -> None:
    assert compat.missing_hooks("weights", "setting", "worker") == []
    assert compat.vllm_version() == compat.TESTED


def test_missing_hooks_are_refused_by_name(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = compat.HOOKS["setting"] | {
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_hashes": "self moved",
        "vllm.multimodal:Gone": "",
    }
    monkeypatch.setitem(compat.HOOKS, "setting", hooks)
    problems = compat.missing_hooks("weights", "setting")
    assert len(problems) == 2 and "no parameter moved" in problems[0] and "Gone" in problems[1]

    class Fake:
        multimodal_config = type("", (), {"mm_processor_kwargs": None})
        hf_config = None

    assert plugin._configure_model(problems, "result", Fake) == "result"
    Fake.multimodal_config.mm_processor_kwargs = {"tokenprune": DIVPRUNE}
    with pytest.raises(UnsupportedSetupError, match=f"vLLM {compat.TESTED}.*no parameter moved"):
        plugin._configure_model(problems, "result", Fake)


def test_an_untested_version_is_refused_only_with_a_setting(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    config(folder("llava"))
    with pytest.raises(UnsupportedSetupError, match=r"vLLM 0\.99\.0 is not tested .*TOKENPRUNE_UNTESTED=1"):
        config(folder("llava"), DIVPRUNE)
    monkeypatch.setenv("TOKENPRUNE_UNTESTED", "1")
    config(folder("llava"), DIVPRUNE)


def test_installed_vllm_matches_the_recorded_code() -> None:
    dev = Path(__file__).parents[2] / "dev"
    command = [
        sys.executable,
        str(dev / "vllm_hooks.py"),
        str(Path(importlib.import_module("vllm").__file__).parents[1]),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"0 hooks with other code than vLLM {compat.TESTED}" in result.stdout, result.stdout


def test_other_runners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs when a model is created, and only for runners that are loaded."""
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=1))
    hooks = {"vllm.v1.worker.gpu_model_runner:Gone": "", "vllm.v1.worker.xpu_model_runner:Gone": ""}
    monkeypatch.setitem(compat.HOOKS, "worker", hooks)
    with pytest.raises(UnsupportedSetupError, match=r"lacks Gone \(module 'vllm\.v1\.worker\.gpu_\S+ has .*\)\."):
        runner.prepare_runner(vllm_config)
    monkeypatch.setitem(compat.HOOKS, "worker", {})
    monkeypatch.setattr(runner, "_RUNNERS", ("vllm.gone",))
    with pytest.raises(UnsupportedSetupError, match=r"lacks vllm\.gone"):
        runner.prepare_runner(vllm_config)


def test_hooks_read_from_source_match_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that reads the source of other versions agrees with Python's view of this version."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "dev"))
    import vllm
    import vllm_hooks

    has = vllm_hooks.read(Path(vllm.__file__).parents[1], vllm_hooks.hooks())
    assert has["vllm"] == compat.TESTED and vllm_hooks.lacks(has, vllm_hooks.hooks(), list(SERVED)) == []
    checked = 0
    for target, names in has["hooks"].items():
        module, _, path = target.partition(":")
        attribute = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        if names is not None and not isinstance(attribute, property):
            known = [name.lstrip("*") for name in names]
            assert set(inspect.signature(attribute).parameters) <= set(known) and len(known) == len(names), target
            checked += 1
    assert checked > 50


def test_registering_again_changes_nothing() -> None:
    from vllm import ModelRegistry
    from vllm.config import ModelConfig

    plugin.register()
    before = ModelConfig.__post_init__, dict(ModelRegistry.models)
    plugin.register()
    assert (ModelConfig.__post_init__, dict(ModelRegistry.models)) == before


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"method": "fastv", "keep": 0.25}, "true allows it, with limits"),
        ({"method": "divprune", "keep": 2.0}, "not a valid share"),
        ({"method": "divprun"}, "did you mean 'divprune'"),
        (3, "must be an object"),
        (DIVPRUNE | {"profiles": {"v": {"method": "evs"}}}, "profile 'v': evs compares the frames"),
        (DIVPRUNE | {"profiles": {"v": {"config": "gone.json"}}}, "profile 'v': cannot read gone.json"),
        (DIVPRUNE | {"min_keep": 0.3}, "profile 'default': .*below min_keep=0.3 of this server"),
        (DIVPRUNE | {"profile": "v"}, "no key 'profile': did you mean 'profiles'"),
    ],
)
def test_bad_settings_stop_the_server(folder: Any, setting: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(folder("llava"), setting)


def start_command(run: Callable[[], Any]) -> Any:
    """Call a function like a command of vLLM."""
    command: dict[str, Any] = {"__name__": "vllm.entrypoints.cli.serve"}
    exec("def start(run): return run()", command)
    return command["start"](run)


def test_a_wrong_setting_ends_a_command_with_one_line(folder: Any) -> None:
    for setting, says in (({"method": "divprun"}, "unknown method 'divprun'"), (3, "must be an object")):
        with pytest.raises(SystemExit, match=f"^tokenprune.*{says}") as ended:
            start_command(lambda: config(folder("llava"), setting))  # noqa: B023
        assert "\n" not in str(ended.value)
    assert start_command(lambda: config(folder("llava"), DIVPRUNE)).multimodal_config.tokenprune


@pytest.mark.parametrize("option", ["compile_mm_encoder", "cudagraph_mm_encoder"])
def test_options_of_the_engine_are_refused_before_the_model_loads(folder: Any, option: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def create(setting: Any) -> Any:
        arguments = OPTIONS | {"mm_processor_kwargs": setting, "limit_mm_per_prompt": {"image": 1}}
        return EngineArgs(str(folder("llava")), compilation_config={option: True}, **arguments).create_engine_config()

    with pytest.raises(UnsupportedSetupError, match=f"Start without {option}"):
        create({"tokenprune": DIVPRUNE})
    with pytest.raises(SystemExit, match=f"Start without {option}"):
        start_command(lambda: create({"tokenprune": DIVPRUNE}))
    assert getattr(create(None).compilation_config, option)


def test_a_server_ends_with_one_line(folder: Any) -> None:
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder("llava")), "--max-model-len",
        "256", "--mm-processor-kwargs", '{"tokenprune": {"method": "divprun"}}',
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == 1 and "Traceback" not in output, output
    assert result.stderr.splitlines()[-1].startswith("tokenprune: unknown method 'divprun': did you mean 'divprune'")


def test_two_prunings_of_videos_are_refused(folder: Any) -> None:
    with pytest.raises(ValueError, match="Leave one of them out"):
        config(folder("qwen2_5_vl"), DIVPRUNE, video_pruning_rate=0.5)
    assert config(folder("qwen2_5_vl"), video_pruning_rate=0.5).multimodal_config.video_pruning_rate == 0.5


@pytest.mark.parametrize("option", ["compile_mm_encoder", "cudagraph_mm_encoder"])
def test_compiled_or_captured_tower_is_refused(option: str) -> None:
    compilation = SimpleNamespace(**{"compile_mm_encoder": False, "cudagraph_mm_encoder": False, option: True})
    vllm_config = SimpleNamespace(lora_config=None, compilation_config=compilation)
    with pytest.raises(UnsupportedSetupError, match=f"Start without {option}"):
        check_engine(vllm_config, SERVED["LlavaForConditionalGeneration"])


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "Use --tensor-parallel-size instead of --pipeline"),
        ("", "speculative_config", object(), "Start without --speculative-config"),
    ],
)
def test_unsupported_options_with_original_positions(part: str, name: str, value: Any, says: str) -> None:
    """Models with renumbered positions on one axis support both."""
    vllm_config = SimpleNamespace(
        lora_config=None,
        compilation_config=SimpleNamespace(compile_mm_encoder=False, cudagraph_mm_encoder=False),
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    families = SERVED["Qwen2VLForConditionalGeneration"], SERVED["LlavaForConditionalGeneration"]
    for family in families:
        check_engine(vllm_config, family)
    setattr(getattr(vllm_config, part) if part else vllm_config, name, value)
    check_engine(vllm_config, families[1])
    with pytest.raises(UnsupportedSetupError, match=f"on a model with M-RoPE.*{says}"):
        check_engine(vllm_config, families[0])
    with pytest.raises(UnsupportedSetupError, match=f'with "positions": "original".*{says}.*or leave positions out'):
        check_engine(vllm_config, families[1], original=True)


def test_other_models_are_refused(tmp_path: Path, folder: Any) -> None:
    from transformers import LlamaConfig, PaliGemmaConfig

    plain = {key: value for key, value in text("llama").items() if key != "model_type"}
    for model in (
        PaliGemmaConfig(text_config=text("gemma"), architectures=["MiniCPMV"]),
        LlamaConfig(**plain, architectures=["LlamaForCausalLM"]),
    ):
        model_folder = tmp_path / model.model_type
        model.save_pretrained(model_folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            if (folder("llava") / name).exists():
                (model_folder / name).write_text((folder("llava") / name).read_text())
    with pytest.raises(TypeError, match=r"does not serve MiniCPMV, because .*Leave the tokenprune setting out"):
        config(tmp_path / "paligemma", DIVPRUNE)
    assert config(tmp_path / "paligemma").architecture == "MiniCPMV"
    config(tmp_path / "llama")


def write_checkpoint(plain: Path, folder: Path, setting: Any) -> None:
    """Write a checkpoint like `plain` whose config has a setting."""
    for path in plain.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((plain / "config.json").read_text()) | {"tokenprune": setting}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


def test_checkpoint_may_contain_the_setting(folder: Any, tmp_path: Path) -> None:
    write_checkpoint(folder("llava"), tmp_path, {"method": "random", "keep": 0.3, "seed": 5})
    from_checkpoint = config(tmp_path).multimodal_config
    assert from_checkpoint.tokenprune == {"method": "random", "keep": 0.3, "seed": 5}
    overridden = config(tmp_path, {"keep": 0.5}).multimodal_config
    assert overridden.tokenprune == {"method": "random", "keep": 0.5, "seed": 5}
    assert overridden.mm_processor_kwargs is None
    assert not hasattr(config(folder("llava")).multimodal_config, "tokenprune")


def test_profiles_override_checkpoint_and_server(folder: Any, tmp_path: Path) -> None:
    """One profile is a file. With profiles only, the server itself does not prune."""
    write_checkpoint(folder("llava"), tmp_path, {"method": "random", "keep": 0.3, "seed": 5, "min_keep": 0.05})
    tuned = write_tuned_file(tmp_path / "tuned.json", {"method": "pool", "keep": 0.2})
    server = config(tmp_path, {"keep": 0.5, "profiles": {"tuned": {"config": str(tuned)}, "less": {"keep": 0.1}}})
    assert dict(get_server_config(server).profiles) == {
        "default": {"method": "random", "seed": 5, "keep": 0.5}, "less": {"method": "random", "seed": 5, "keep": 0.1},
        "tuned": {"method": "pool", "keep": 0.2},
    }  # fmt: skip
    assert get_server_config(server).rules["default"].min_keep == 0.05
    only_profiles = config(folder("llava"), {"profiles": {"less": {"method": "pool", "keep": 0.1}}})
    assert only_profiles.multimodal_config.tokenprune == {"off": True} and get_server_config(only_profiles).names == [
        "less"
    ]


def write_tuned_file(path: Path, setting: dict[str, Any], model_type: str = "llava") -> Path:
    """Write a file like `tokenprune tune`."""
    path.write_text(json.dumps({"schema": 1, "setting": setting, "tuned": {"model": {"type": model_type}}}))
    return path


@pytest.mark.parametrize("key", ["config", None])
@pytest.mark.parametrize("source", ["kwargs", "overrides"])
def test_tuned_file_is_used_as_the_setting(
    folder: Any, tmp_path: Path, source: str, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write_tuned_file(tmp_path / "tokenprune.json", DIVPRUNE))
    named = {key: path} if key else path
    arguments = {"setting": named} if source == "kwargs" else {"hf_overrides": {"tokenprune": named}}
    actual = config(folder("llava"), **arguments).multimodal_config.tokenprune
    assert actual == config(folder("llava"), DIVPRUNE).multimodal_config.tokenprune
    assert "tuned on" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"config": "gone.json"}, "cannot read gone.json"),
        ({"config": "tokenprune.json", "keep": 0.5}, "whole setting. Leave out keep"),
        ("fastv.json", "fastv cannot be served by vLLM"),
    ],
)
def test_bad_tuned_files_stop_the_server(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tuned_file(tmp_path / "tokenprune.json", DIVPRUNE)
    write_tuned_file(tmp_path / "fastv.json", {"method": "fastv", "keep": 0.25})
    with pytest.raises(ValueError, match=says):
        config(folder("llava"), setting)


def test_a_file_that_was_tuned_on_another_model_is_served_with_a_warning(
    folder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tuned_file(tmp_path / "tokenprune.json", DIVPRUNE, "qwen2_vl")
    assert config(folder("llava"), str(path)).multimodal_config.tokenprune["method"] == "divprune"
    assert "tuned on qwen2_vl, not on llava" in caplog.text


def test_a_request_cannot_name_a_file(folder: Any, tmp_path: Path) -> None:
    path = str(write_tuned_file(tmp_path / "tokenprune.json", DIVPRUNE))
    with pytest.raises(OptionError, match="config names a file"):
        parse_setting(DIVPRUNE, {"config": path})
    with pytest.raises(OptionError, match="must be an object"):
        parse_setting(DIVPRUNE, path)


def test_without_a_setting_nothing_changes(start: Callable[..., Engine], reference: Any) -> None:
    engine = start("qwen2_vl")
    checkpoint = CHECKPOINTS["qwen2_vl"]
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    (output,) = engine.generate([engine.request(prompt, images)])
    engine.compare(reference, output, prompt, images, {"off": True})
    assert list(output.prompt_token_ids) == reference("qwen2_vl").inputs(prompt, images)["input_ids"][0].tolist()
    assert not hasattr(engine.model, "supports_multimodal_pruning")
    with pytest.raises(OptionError, match="has no tokenprune setting"):
        engine.generate([engine.request(prompt, images, {"keep": 0.5})])
    (second,) = engine.generate([engine.request(prompt, images)])
    assert second.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_memory_is_measured_with_full_images(folder: Any, name: str) -> None:
    """A request may switch pruning off, and the encoder always gets full images."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    counts = {"image": 1} | ({"video": 1} if CHECKPOINTS[name].video else {})
    sizes = []
    for setting in (None, DIVPRUNE):
        processor = MULTIMODAL_REGISTRY.create_processor(config(folder(name), setting))
        placeholders = processor.get_dummy_mm_inputs(counts)["mm_placeholders"]
        sizes.append(
            {
                modality: [placeholder.get_num_embeds() for placeholder in items]
                for modality, items in placeholders.items()
            }
        )
    assert sizes[0] == sizes[1] and set(sizes[0]) == set(counts)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_memory_of_a_modality_is_measured_alone(folder: Any, name: str) -> None:
    """Runner V1 on a GPU measures one modality with the cache of its engine; the other modality then has zero items."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache

    processor = MULTIMODAL_REGISTRY.create_processor(model_config := config(folder(name), DIVPRUNE))
    for modality in ("image", "video") if CHECKPOINTS[name].video else ("image",):
        inputs = processor.get_dummy_mm_inputs({modality: 1}, cache=MultiModalProcessorOnlyCache(model_config))
        assert len(inputs["mm_placeholders"][modality]) == 1


def test_ambiguous_placeholders_are_refused(start: Callable[..., Engine]) -> None:
    engine = start("qwen2_vl", DIVPRUNE)
    images = CHECKPOINTS["qwen2_vl"].images(2)
    with pytest.raises(OptionError, match="start and end tags"):
        engine.generate([engine.request("<|image_pad|><|image_pad|> what? ", images)])
    with pytest.raises(OptionError, match="3 image placeholders for 2 images"):
        engine.generate([engine.request("<|image_pad|> <|image_pad|> <|image_pad|> what? ", images)])
    engine.generate([engine.request("<|image_pad|> <|image_pad|> what? ", images)])
    with pytest.raises(OptionError, match=r"prompt ends with an image, .*end tag after it"):
        engine.generate([engine.request("what? <|image_pad|>", images[:1])])
    engine.generate([engine.request("what? <|image_pad|>", images[:1], {"off": True})])


def test_package_does_not_import_vllm() -> None:
    code = "import sys, tokenprune, tokenprune.cli; tokenprune.available_methods(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert VOCABULARY > 256


def test_checkpoints_of_transformers_5_load_where_a_hook_is_missing(folder: Any, tmp_path: Path) -> None:
    """In a separate process, with a simulated vLLM that lacks a hook. Such a vLLM loads models without a setting."""
    code = (
        "import sys; from tokenprune.integrations.vllm import compat; compat.HOOKS['setting']['vllm:Gone'] = ''\n"
        "from vllm import LLM, SamplingParams; import json\n"
        "llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))\n"
        "prompt, params = {'prompt_token_ids': [30, 31, 32]}, SamplingParams(temperature=0, max_tokens=3)\n"
        "print('answer', llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)\n"
        "llm.llm_engine.engine_core.shutdown()"
    )
    options = OPTIONS | {"limit_mm_per_prompt": {"image": 1}}
    command = [sys.executable, "-c", code, str(folder("llava")), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "answer [" in result.stdout, result.stderr[-3000:]
