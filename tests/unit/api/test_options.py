# SPDX-License-Identifier: Apache-2.0
"""Options of methods: types and their errors, and descriptions in docstrings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

import tokenprune
from each import each
from tokenprune.errors import OptionError
from tokenprune.selection.docstrings import Docstring
from tokenprune.selection.options import describe_type, get_option_types, matches_type

if TYPE_CHECKING:
    from torch import Tensor

SHARE = Annotated[float, Gt(0), Le(1)]
HINTS = {
    "an int": int,
    "an int >= 1": Annotated[int, Ge(1)],
    "a number > 0 and <= 1": SHARE,
    "a number >= 0 and < 1": Annotated[float, Interval(ge=0, lt=1)],
    "an int < 3": Annotated[int, "a note", Lt(3)],
    "'a' or 'b'": Literal["a", "b"],
    "'a', 'b' or 'c'": Literal["a", "b", "c"],
    "'a'": Literal["a"],
    "True or False": bool,
    "an int >= 1 or None": Annotated[int, Ge(1)] | None,
    "a tuple, each entry an int >= 0": tuple[Annotated[int, Ge(0)], ...],
    "a string or a path": str | Path,
    "a list, each entry a number > 0 and <= 1": Sequence[SHARE],
    "a function or None": Callable[[str], Any] | None,
}


@each("words", HINTS)
def test_types_are_described(words: str) -> None:
    assert describe_type(HINTS[words]) == words


@each(
    ("hint", "good", "bad"),
    [
        (int, [0, -3, 10**30], [0.0, 1.5, True, "1", None, float("nan")]),
        (float, [0, 0.5, float("inf")], [True, "0.5", None, 1j]),
        (SHARE, [1, 1.0, 1e-9], [0, 1.1, -1, float("nan"), True]),
        (Annotated[int, Ge(1)], [1, 7], [0, -1, 1.0, True]),
        (bool, [True, False], [0, 1, "true", None]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0, ["a"], {}]),
        (tuple[int, ...], [(), (1, 2)], [[1], (1, "x"), 1, (True,)]),
        (Annotated[int, Ge(1)] | None, [None, 1], [0, "x"]),
        (str | Path, ["x", Path("x")], [b"x", None]),
        (Sequence[str], [[], (), ["a"], ("a", "b")], ["ab", [1], {"a"}, None]),
        (Callable[[str], Any], [print, str], ["print", None]),
        (Any, [None, print], []),
    ],
)
def test_values_match_types(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(matches_type(value, hint) for value in good)
    assert not any(matches_type(value, hint) for value in bad)


@each(
    ("name", "options", "says"),
    [
        ("fastv", {"layer": 0}, "fastv: layer=0 must be an int >= 1"),
        ("fastv", {"layer": True}, "fastv: layer=True must be an int >= 1"),
        ("fastv", {"layer": "2"}, "fastv: layer='2' must be an int >= 1"),
        ("fastv", {"query": "first"}, "fastv: query='first' must be 'last' or 'all'"),
        ("fastv", {"query": ["last"]}, "fastv: query=['last'] must be 'last' or 'all'"),
        ("random", {"seed": 0.5}, "random: seed=0.5 must be an int"),
        ("vscan", {"local_layer": 1.0}, "vscan: local_layer=1.0 must be an int or a number > 0 and < 1"),
        ("dyrate", {"ema": 1}, "dyrate: ema=1 must be a number >= 0 and < 1"),
        ("pevlm", {"dense_layers": [0, -1]}, "must be a list, each entry an int >= 0"),
        ("dynres", {"min_scale": 0}, "dynres: min_scale=0 must be a number > 0 and <= 1"),
    ],
)
def test_methods_reject_invalid_options(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        tokenprune.method(name, **options)
    with pytest.raises(OptionError, match=re.escape(says)):
        tokenprune.read_config({"method": name, "keep": 0.5, **options}).steps()


def test_options_equal_fields() -> None:
    @dataclass(frozen=True)
    class Made(tokenprune.Method):
        share: SHARE = 0.5

    assert get_option_types(Made) == {"share": SHARE}
    Made()
    with pytest.raises(OptionError, match=r"share=2 must be a number > 0 and <= 1"):
        Made(share=2)


def test_lists_become_tuples() -> None:
    """Whoever wrote it, Python or JSON; tome, which takes lists and tuples for different things, has what was given."""
    listed, other = (tokenprune.method("pyramiddrop", ratios=one) for one in ([0.5, 0.25], (0.5, 0.25)))
    assert listed == other and hash(listed) == hash(other)
    assert tokenprune.method("tome", r=[1, 2]).r == [1, 2] and tokenprune.method("tome", r=(1, 0.5)).r == (1, 0.5)


def test_type_checking_import_is_reported() -> None:
    @dataclass(frozen=True)
    class Made(tokenprune.Method):
        weights: Tensor | None = None

    with pytest.raises(OptionError, match=r"Made: the option type Tensor is not defined .* `if TYPE_CHECKING`"):
        Made()


class Documented:
    """Keep the first tokens.

    A paragraph over
    two lines.

    Args:
        center: Subtract the mean
            of the tokens.
        layer: The layer: a number.

    Source:
        Alvar et al.,
        Algorithm 1.

    Differences from the paper:
        - Distances are computed
          in float32.
        - Ties keep the lower index.

    Examples:
        >>> 1 + 1
        2
    """


def test_sections_are_split_and_joined() -> None:
    doc = Docstring.from_class(Documented)
    assert doc.paragraphs == ["Keep the first tokens.", "A paragraph over two lines."]
    assert doc.args == {"center": "Subtract the mean of the tokens.", "layer": "The layer: a number."}
    assert doc.sections == {
        "Source": ["Alvar et al., Algorithm 1."],
        "Differences from the paper": ["- Distances are computed in float32.", "- Ties keep the lower index."],
        "Examples": [">>> 1 + 1", "2"],
    }


def test_a_class_without_a_docstring_has_no_sections() -> None:
    assert Docstring.from_class(type("Empty", (Documented,), {})) == Docstring([""], {}, {})


def test_every_option_of_a_method_is_described() -> None:
    missing = {
        name: options
        for name in tokenprune.available_methods()
        if (info := tokenprune.method_info(name)).cls.__module__.startswith("tokenprune.")
        and (options := sorted(set(info.options) - set(Docstring.from_class(info.cls).args)))
    }
    assert not missing
