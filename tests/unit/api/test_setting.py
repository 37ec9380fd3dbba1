# SPDX-License-Identifier: Apache-2.0
"""Equal settings have one form, and forbidden values in a request are refused at any depth."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenprune
from each import each
from tokenprune import Budget, BudgetError, Method, OptionError, Pruner, TokenPruneError
from tokenprune.integrations.vllm.settings.items import get_cache_key
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.methods import registry
from tokenprune.selection.files import File
from tokenprune.selection.options import get_file_options
from tokenprune.settings import Setting

SERVER = {"method": "divprune", "keep": 0.25}


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Fail a test after 120 seconds."""

    def ring(*_: Any) -> None:
        raise AssertionError("the test exceeds the time limit")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- files


def test_file_options_are_listed() -> None:
    methods = {name: registry.method_class(name) for name in registry.available_methods()}
    found = {(name, option) for name, cls in methods.items() for option in get_file_options(cls)}
    fitted = {("dyrate", "predictor"), ("d2pruner", "prior"), ("fitprune", "recipe"), ("hawk", "heads")}
    assert found == {("dymu", "thresholds"), ("learned", "selector"), *fitted}

    @dataclass(frozen=True)
    class Typed(Method):
        """File options are marked or have a path type."""

        where: str | Path = ""
        marked: str = field(default="", metadata={"file": True})
        other: str = ""

    assert get_file_options(Typed) == {"where", "marked"}


@each("server", [SERVER, {"method": "dymu", "keep": 0.5, "exact": True}, {"off": True}])
@each("value", ["/etc/passwd", "/no/such/file", "", None, 7, ["/etc/passwd"], {"a": 1}])
def test_request_with_file_is_rejected(server: dict, value: Any) -> None:
    dymu = {"exact": True, "thresholds": value}
    layers_with_file = [
        {"method": "dymu", **dymu},
        {"method": {"method": "dymu", **dymu}},
        {"method": [{"method": "dymu", **dymu}]},
        {"method": ["dynres", {"method": "dymu", **dymu}]},
        {"method": [{"method": "dymu", **dymu}, "downsample"], "keep": [0.5, 0.5]},
        {"method": {"method": "dymu", "exact": True}, "thresholds": value},
        {"method": {"method": "dyrate", "rate": "predictor", "predictor": value}},
    ]
    if server.get("method") == "dymu":
        layers_with_file += [dymu, {"thresholds": value, "keep": 0.5}, {"method": "dymu", "thresholds": value}]
    texts = set()
    for layer in layers_with_file:
        with forbid_file_access(), pytest.raises(OptionError, match="names a file") as caught:
            parse_setting(server, layer, trusted=False)
        texts.add(str(caught.value).replace("predictor of dyrate", "thresholds of dymu"))
    assert len(texts) == 1 and "passwd" not in texts.pop()


def list_options() -> Iterator[tuple[str, str]]:
    for name in registry.available_methods():
        for option_field in dataclasses.fields(registry.method_class(name)):
            yield name, option_field.name


def has_path(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_path, value.values()))
    return any(map(has_path, value)) if isinstance(value, list) else isinstance(value, str) and value.startswith("/")


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["/etc/passwd", "/proc/self/environ", "/", ""]),
    st.sampled_from([10**400, -(10**400), 2**63 - 1, 1e300, -0.0]),
)  # fmt: skip
names = st.sampled_from(registry.available_methods())
options = sorted({option for _, option in list_options()})
keys = st.sampled_from([*options, "method", "keep", "per", "off", "experimental_in_llm", "config", "x"])
any_value = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
option_values = st.dictionaries(st.sampled_from(options), any_value, max_size=3)


@st.composite
def layers(draw: Any, value: Any = any_value) -> dict[str, Any]:
    """Draw dicts that resemble settings, with arbitrary values in any key."""
    entry = st.one_of(names, st.builds(lambda name, more: {"method": name} | more, names, option_values), value)
    layer: dict[str, Any] = draw(option_values) if draw(st.booleans()) else {}
    layer["method"] = draw(entry | st.lists(entry, max_size=3))
    for key, other in (("keep", st.lists(value, max_size=3) | value), ("per", value), ("off", value), ("x", value)):
        if draw(st.integers(0, 5)) == 0:
            layer[key] = draw(other)
    return layer


@contextmanager
def forbid_file_access() -> Iterator[None]:
    """Fail if a file is opened or inspected inside the block."""
    opened: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "open"), (os, "stat")):
            original = getattr(module, name)
            patch.setattr(module, name, lambda *a, _real=original, **k: (opened.append(a), _real(*a, **k))[1])
        yield
    assert not opened


@settings(max_examples=300, deadline=None)
@given(layers(), st.sampled_from([SERVER, {"off": True}]))
def test_fuzzed_settings_raise_library_errors(layer: dict[str, Any], server: dict[str, Any]) -> None:
    with forbid_file_access():
        try:
            setting = parse_setting(server, layer, trusted=False)
            assert not has_path(setting.to_json()), "a path was taken"
            assert parse_setting(setting.to_json()) == setting
        except (TokenPruneError, ValueError) as error:
            assert isinstance(error, TokenPruneError) and isinstance(error, ValueError)
            assert 0 < len(str(error)) < 6000


PATH = "/etc/passwd"
DEPTHS = [lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: [[0.5], {"b": [x]}]]
# Forms of a method with a path as an option.
FORMS = [
    lambda entry: entry,
    lambda entry: {"method": entry},
    lambda entry: {"method": [entry]},
    lambda entry: {"method": ["downsample", entry]},
    lambda entry: {"method": [entry, "divprune"], "keep": 0.5},
    lambda entry: {"method": entry, "keep": PATH},
    lambda entry: {"method": entry, "per": PATH},
    lambda entry: {"method": entry, PATH: PATH},
]
WITHOUT_OPTION = [
    {"method": PATH}, {"method": [PATH]}, {"config": PATH}, {"off": PATH}, {"method": "pool", "keep": [PATH]},
    {"method": "pool", "keep": {"average_tokens": PATH}},
]  # fmt: skip


def check_refused(layer: Any) -> None:
    with forbid_file_access(), pytest.raises(ValueError) as caught:
        parse_setting(SERVER, layer, trusted=False)
    assert isinstance(caught.value, TokenPruneError) and "root:" not in str(caught.value)


@each(("method", "option"), sorted(list_options()))
@each("depth", DEPTHS)
@each("write", FORMS)
def test_path_is_rejected_everywhere(method: str, option: str, depth: Any, write: Any) -> None:
    check_refused(write({"method": method, option: depth(PATH)}))


test_path_is_rejected_for_other_options = each("layer", WITHOUT_OPTION)(check_refused)


def test_a_server_reads_its_own_files_once(tmp_path: Path) -> None:
    path = Path(tokenprune.__file__).parent / "methods/encoder/data/demo_vlm.safetensors"
    copy = tmp_path / "mine.safetensors"
    copy.write_bytes(path.read_bytes())
    server = {"method": {"method": "dymu", "exact": True, "thresholds": str(copy)}, "keep": 0.5}
    setting = parse_setting(server)
    assert [*setting.digests] == ["thresholds"] and get_cache_key(setting)["thresholds"] == setting.digests[
        "thresholds"
    ]
    copy.unlink()
    for request in ({"keep": 0.25}, {"max_r": 3}, {"method": "dymu", "keep": 0.5}, {"method": {"method": "dymu"}}):
        with forbid_file_access():
            assert parse_setting(setting.to_json(), request, trusted=False).digests == setting.digests


def test_only_regular_files_are_read(tmp_path: Path, time_limit: None) -> None:
    """Pipes are refused at once, because reading a pipe without a writer would block."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 100)
    for path, why in (
        (tmp_path / "pipe", "not a regular file"), (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "none", "No such file"), ("a\0b", "null character"), ("", "No such file"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=f"cannot read .*{why}"):
            tokenprune.method("dymu", thresholds=path)
        with pytest.raises(OptionError, match=f"cannot read .*{why}"):
            parse_setting({"method": "dymu", "exact": True, "thresholds": str(path)})
        with pytest.raises(tokenprune.errors.ConfigError, match=f"cannot read .*{why}"):
            tokenprune.read_config(path)
    with pytest.raises(OSError, match="larger than 99 bytes"):
        File.read(tmp_path / "large", 99)
    assert File.read(tmp_path / "large", 100).content == b"x" * 100


# -- bounds


def nest(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested


BAD = {
    "large": 10**400, "negative and large": -(10**400), "unprintable": 10**6000, "infinite": float("1e400"),
    "no number": float("nan"), "deep": nest(5000), "deep enough": nest(20), "long": "x" * 10**6, "many": [0] * 10**6,
    "wide": {str(i): i for i in range(5000)}, "a set": {1}, "an object": object(), "bytes": b"x", "odd keys": {1: 2},
    "too long a key": {"k" * 5000: 1}, "half a letter": "\ud800", "half a letter as a key": {"\ud800": 1},
}  # fmt: skip


@each("name", BAD)
def test_out_of_range_error_names_the_option(name: str) -> None:
    for option, layer in (
        ("keep", {"method": "pool", "keep": BAD[name]}),
        ("keep", {"method": ["dynres", "pool"], "keep": [0.5, BAD[name]]}),
        ("seed", {"method": "random", "seed": BAD[name]}),
        ("min_scale", {"method": [{"method": "dynres", "min_scale": BAD[name]}, "pool"]}),
    ):
        for read in (
            lambda layer: parse_setting(SERVER, layer, trusted=False),
            lambda layer: tokenprune.read_config({"schema": 1, "setting": layer}),
            lambda layer: tokenprune.read_config(layer),
        ):
            with pytest.raises((OptionError, BudgetError)) as caught:
                read(layer)
            text = str(caught.value)
            assert option in text or name in ("wide", "many"), text
            assert len(text) < 400


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1e400", "NaN", "-Infinity", "[" * 5000 + "]" * 5000, "1" * 5000])
def test_bounds_from_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenprune.json"
    path.write_text('{"method": "pool", "keep": ' + text + "}")
    with pytest.raises((tokenprune.errors.ConfigError, BudgetError, OptionError), match=r"keep|not JSON"):
        tokenprune.read_config(path)


@each(("method", "option"), sorted(list_options()))
def test_booleans_are_rejected_as_numbers(method: str, option: str) -> None:
    default = registry.method_info(method).options[option]
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        with pytest.raises(OptionError, match=option):
            Setting.from_json({"method": method, option: True}, "it").methods()


# -- one form


SAME = [
    [
        {"method": "random", "seed": 3, "keep": 0.5}, {"method": {"method": "random", "seed": 3}, "keep": 0.5},
        {"method": [{"method": "random", "seed": 3}], "keep": [0.5]}, {"method": ["random"], "seed": 3, "keep": 0.5},
        {"method": {"method": "random"}, "seed": 3, "keep": 0.5, "per": "image"},
    ],
    [{"method": ["dynres", "pool"], "keep": 0.5}, {"method": [{"method": "dynres"}, "pool"], "keep": [0.5, 0.5]}],
]  # fmt: skip


@pytest.mark.parametrize("forms", SAME, ids=["one", "two"])
def test_one_form(forms: list[dict]) -> None:
    assert len({json.dumps(parse_setting(form).to_json()) for form in forms}) == 1
    assert len({str(tokenprune.read_config(form).steps()) for form in forms}) == 1


def test_the_same_methods_keep_their_options() -> None:
    below = [{"method": "random", "seed": 3}, {"method": [{"method": "random", "seed": 3}]}]
    above = [{"method": "random"}, {"method": {"method": "random"}}, {"keep": 0.25}, {"off": False}]
    assert {parse_setting(layer_below, layer_above).method.seed for layer_below in below for layer_above in above} == {
        3
    }
    stack = {"method": [{"method": "dynres", "min_scale": 0.3}, {"method": "random", "seed": 3}], "keep": [0.5, 0.4]}
    setting = parse_setting(stack, {"method": ["dynres", {"method": "random", "seed": 4}]})
    assert (setting.pixel_method.min_scale, setting.method.seed, setting.keep) == (0.3, 4, [0.5, 0.4])
    assert parse_setting(stack, {"method": ["dynres", "pool"]}).pixel_method.min_scale == 0.25
    for layer in ({"seed": 1}, {"method": "random", "seed": 1} | {"method": {"method": "random", "seed": 2}}):
        with pytest.raises(OptionError, match=r"ambiguous|set twice"):
            parse_setting(stack, layer)


def test_budgets_in_settings() -> None:
    steps = tokenprune.read_config({"method": "fastv", "keep": {"average_tokens": 192}}).steps()
    assert steps[1] == [Budget(average_tokens=192)]
    several = {"method": ["pool", "fastv"], "keep": [0.5, {"kv_share": 0.3}], "per": "prompt"}
    assert tokenprune.read_config(several).steps()[1] == [
        Budget(keep=0.5, per="prompt"), Budget.from_kv_share(0.3, per="prompt"),
    ]  # fmt: skip
    for keep, message in (
        ({"token": 3}, "keep has no key token. Pass a number.*average_tokens, average_share, kv_share"),
        ({}, "exactly one of"),
        ({"kv_share": 0.5, "flops_share": 0.5}, "exactly one of"), ({"kv_share": 2}, "out of range"),
        ({"kv_share": "x"}, "must be a number"),
    ):  # fmt: skip
        with pytest.raises(BudgetError, match=message):
            tokenprune.read_config({"method": "fastv", "keep": keep})
    with pytest.raises(BudgetError, match=r'Write "keep": {"average_tokens": 192}'):
        tokenprune.read_config({"method": "fastv", "average_tokens": 192})
    for keep in ({"average_tokens": 192}, {}, [{"share": 0.5}]):
        with pytest.raises(
            BudgetError,
            match=r"must be a number \(4 for four tokens, 0\.25 for a share\), optionally with age and step, not {",
        ):
            parse_setting({"method": "divprune", "keep": keep})


def test_errors_inside_a_method_become_option_errors() -> None:
    @registry.register("careless")
    @dataclass(frozen=True)
    class Careless(Pruner):
        """Does not check its options."""

        rates: tuple[float, ...] = ()
        power: int = 1

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", 1 / sum(self.rates or (1,)))

        def score(self, tokens: Any) -> Any:
            return tokens.hidden.sum(-1).reshape(self.power, -1)

    try:
        for options in ({"rates": [0]}, {"rates": 3}, {"rates": {"a": "b"}}, {"power": 3}, {"power": "x"}):
            with pytest.raises(OptionError, match="careless"):
                parse_setting(SERVER, {"method": "careless"} | options, trusted=False)
    finally:
        registry._METHODS.pop("careless")


@each("name", registry.available_methods())
def test_no_option_value_blocks_a_server(name: str, time_limit: None) -> None:
    """The front end processes requests in sequence, so no value may block it."""
    values = [0, 1, -1, 2**62, 1e-300, 1e18, 0.5, True, None, "x", [1], [2**62], {"a": 1}, [0.5] * 900]
    for option in [option for method, option in list_options() if method == name]:
        for value in values:
            try:
                parse_setting(SERVER, {"method": name, option: value}, trusted=False)
            except TokenPruneError as error:
                assert isinstance(error, ValueError)
