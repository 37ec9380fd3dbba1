# SPDX-License-Identifier: Apache-2.0
"""Try a method, or a policy of sessions, without a model: make the view that it gets from plain tensors, and check that
it keeps its word. Try a model that no table knows: check that pruning is right on it."""

from tokenprune.errors import ConformanceError
from tokenprune.testing.conformance import check_method
from tokenprune.testing.models import ModelCheck, check_model
from tokenprune.testing.policies import check_policy
from tokenprune.testing.view import visual_tokens

__all__ = ["ConformanceError", "ModelCheck", "check_method", "check_model", "check_policy", "visual_tokens"]
