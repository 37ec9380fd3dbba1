# SPDX-License-Identifier: Apache-2.0
"""Try a method, or a policy of sessions, without a model: make the view that it gets from plain tensors, and check that
it keeps its word."""

from tokenprune.errors import ConformanceError
from tokenprune.testing.conformance import check_method
from tokenprune.testing.policies import check_policy
from tokenprune.testing.view import visual_tokens

__all__ = ["ConformanceError", "check_method", "check_policy", "visual_tokens"]
