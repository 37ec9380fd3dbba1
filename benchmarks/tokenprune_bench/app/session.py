# SPDX-License-Identifier: Apache-2.0
"""One visitor's page: only the latest request counts, and what was drawn at each keep is there for the slider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, PagePrompt


class Superseded(Exception):
    """The visitor wants something else by now."""


@dataclass
class AppSession:
    """The state of one visitor. wanted: file, question and methods of the prompt. at: comparisons of it, by keep."""

    wanted: tuple = ()
    prompt: PagePrompt | None = None
    at: dict[float, Comparison] = field(default_factory=dict)
    _requests: int = 0

    def begin(self) -> Callable[[], None]:
        """Begin a request, and return `latest`."""
        self._requests += 1
        return self.latest()

    def latest(self) -> Callable[[], None]:
        """Return a call that raises Superseded once a later request than the latest so far has begun."""
        number = self._requests

        def still_wanted() -> None:
            if number != self._requests:
                raise Superseded

        return still_wanted

    def ask(self, wanted: tuple, prompt: PagePrompt) -> None:
        """Take another prompt; what was drawn for the one before is forgotten."""
        self.wanted, self.prompt, self.at = wanted, prompt, {}
