# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tokenprune
from tokenprune.selection.docstrings import Docstring


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
