# SPDX-License-Identifier: Apache-2.0
"""Sessions that are forked, saved and loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tokenprune
from session_oracle import images_of, played, recorded
from tokenprune.errors import BudgetError, ConfigError, UnknownPolicyError
from zoo import FAMILIES

POLICIES = ["random", "infinipot_v"]


def ask(session: tokenprune.sessions.Session) -> torch.Tensor:
    return session.ask([30, 31], max_new_tokens=4, return_dict=True).logits


def continue_session(session: tokenprune.sessions.Session, name: str) -> torch.Tensor:
    """Add images until the memory is compressed again, and answer."""
    for image in images_of(FAMILIES[name], 4, seed=9):
        session.see(input_ids=image.ids, **FAMILIES[name].collate([[image]]))
    return ask(session)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_loaded_session_goes_on_bit_equal(name: str, policy: str, build, tmp_path: Path) -> None:
    model = build(FAMILIES[name])
    session = played(recorded(FAMILIES[name], model, memory=110, policy=policy, seed=3)).session
    session.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", model)
    assert other.stats == session.stats and other.policy == session.policy
    assert torch.equal(ask(other), ask(session))
    assert torch.equal(continue_session(other, name), continue_session(session, name))
    assert other.stats == session.stats and session.stats.compressions > 3
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_session_is_loaded_by_another_process(build, tmp_path: Path) -> None:
    session = played(recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=110)).session
    session.save(tmp_path / "s.safetensors")
    support = Path(__file__).parents[1] / "support"
    code = (
        f"import sys; sys.path.insert(0, {str(support)!r})\n"
        "import torch, tokenprune; from zoo import FAMILIES; torch.set_num_threads(1)\n"
        f"s = tokenprune.sessions.Session.load({str(tmp_path / 's.safetensors')!r}, FAMILIES['llava'].build())\n"
        "print(s.ask([30, 31], max_new_tokens=4, return_dict=True).ids.tolist())"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = session.ask([30, 31], max_new_tokens=4, return_dict=True).ids.tolist()
    assert json.loads(completed.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_forks_go_on_apart(name: str, build) -> None:
    session = played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=110)).session
    fork = session.fork()
    layers = zip(session._stream.memory.cache.layers, fork._stream.memory.cache.layers, strict=True)
    assert all(a.keys.data_ptr() == b.keys.data_ptr() for a, b in layers)
    before = ask(session)
    after = continue_session(fork, name)
    assert torch.equal(ask(session), before) and not torch.equal(after, before)
    assert torch.equal(continue_session(session, name), after)
    second_fork = session.fork()
    session.reset()
    assert torch.equal(ask(second_fork), after) and session.stats.tokens_seen == 0


def test_an_empty_session_is_saved_and_loaded(build, tmp_path: Path) -> None:
    model = build(FAMILIES["llava"])
    tokenprune.sessions.session(model, memory=110, policy="uniform").save(tmp_path / "s")
    assert tokenprune.sessions.Session.load(tmp_path / "s", model).stats.tokens_seen == 0


@pytest.fixture
def saved_path(build, tmp_path: Path) -> Path:
    played(recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=110)).session.save(tmp_path / "s")
    return tmp_path / "s"


def change_file(path: Path, change) -> Path:
    """Rewrite the file after `change(facts, tensors)`."""
    with safe_open(path, "pt") as opened:
        facts = json.loads(opened.metadata()["tokenprune.session"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(facts, tensors)
    save_file(tensors, path, {"tokenprune.session": json.dumps(facts)})
    return path


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda f, t: f.update(schema=3), ConfigError, "has schema 3"),
        (lambda f, t: f.pop("settings"), ConfigError, "is not a session file"),
        (lambda f, t: f["settings"].pop("policy"), ConfigError, "corrupt"),
        (lambda f, t: f["settings"].update(colour="red"), ConfigError, "corrupt"),
        (lambda f, t: f["settings"].update(memory=-1), BudgetError, "memory=-1"),
        (lambda f, t: f["settings"]["policy"].update(name="gone"), UnknownPolicyError, "gone"),
        (lambda f, t: f["progress"].update(next=-5), ConfigError, "the progress is not valid"),
        (lambda f, t: f["progress"].update(next="x"), ConfigError, "the progress is not valid"),
        (lambda f, t: f["progress"].pop("next"), ConfigError, "corrupt"),
        (lambda f, t: f.update(visual=3), ConfigError, "sizes disagree"),
        (lambda f, t: t.update({"table.0": t["table.0"].long()}), ConfigError, "tables do not fit"),
        (lambda f, t: t.pop("table.0"), ConfigError, "corrupt"),
        (lambda f, t: t.pop("keys.2"), ConfigError, "corrupt"),
        (lambda f, t: t.update({"keys.1": t["keys.1"][:, :, 1:].clone()}), ConfigError, "do not fit the tables"),
        (
            lambda f, t: t.update({n: v[:, :1].clone() for n, v in t.items() if n.endswith("s.1")}),
            ConfigError,
            "do not",
        ),
    ],
)
def test_a_file_that_was_changed_is_refused(change, error: type, message: str, saved_path: Path, build) -> None:
    with pytest.raises(error, match=message):
        tokenprune.sessions.Session.load(change_file(saved_path, change), build(FAMILIES["llava"]))


def test_other_files_and_other_models_are_refused(saved_path: Path, build, tmp_path: Path) -> None:
    model = build(FAMILIES["llava"])
    (tmp_path / "text").write_text("no tensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    for name, message in (("text", "cannot read"), ("absent", "cannot read"), ("other", "is not a session file")):
        with pytest.raises(ConfigError, match=message):
            tokenprune.sessions.Session.load(tmp_path / name, model)
    with pytest.raises(ConfigError, match="another model"):
        tokenprune.sessions.Session.load(saved_path, build(FAMILIES["qwen2_5_vl"]))
    with pytest.raises(ConfigError, match="cannot write"):
        tokenprune.sessions.session(model, memory=110, policy="random").save(tmp_path / "no" / "folder")
    patch_message = "needs a model with no patch, not tokenprune: divprune"
    with tokenprune.patched(model, "divprune", keep=0.5), pytest.raises(ConfigError, match=patch_message):
        tokenprune.sessions.Session.load(saved_path, model)
