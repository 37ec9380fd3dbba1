# SPDX-License-Identifier: Apache-2.0
"""State of one visitor: only the latest request counts, and the slider uses cached comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, PagePrompt


class Superseded(Exception):
    """A later request of the visitor replaced this one."""


@dataclass
class AppSession:
    """State of one visitor.

    Attributes:
        request: File, question and methods of the prompt.
        prompt: The prompt.
        comparisons: Comparisons of the prompt by keep.
    """

    request: tuple = ()
    prompt: PagePrompt | None = None
    comparisons: dict[float, Comparison] = field(default_factory=dict)
    _requests: int = 0

    def begin(self) -> Callable[[], None]:
        """Begin a request, and return its check (see `latest`)."""
        self._requests += 1
        return self.latest()

    def latest(self) -> Callable[[], None]:
        """Return a function that raises Superseded after a later request has begun."""
        request_index = self._requests

        def still_wanted() -> None:
            if request_index != self._requests:
                raise Superseded

        return still_wanted

    def ask(self, request: tuple, prompt: PagePrompt) -> None:
        """Set another prompt and clear the cached comparisons."""
        self.request, self.prompt, self.comparisons = request, prompt, {}
