# SPDX-License-Identifier: Apache-2.0
"""Checks for methods, session policies and models.

`check_method` and `check_policy` need no model. `visual_tokens` builds the input of a method from plain tensors.
`check_model` checks that pruning is correct on any model.
"""

from tokenprune.errors import ConformanceError
from tokenprune.selection.tensors import visual_tokens
from tokenprune.testing.conformance import check_method
from tokenprune.testing.models import ModelCheck, check_model
from tokenprune.testing.policies import check_policy

__all__ = ["ConformanceError", "ModelCheck", "check_method", "check_model", "check_policy", "visual_tokens"]
