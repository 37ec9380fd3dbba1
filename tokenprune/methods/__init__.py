# SPDX-License-Identifier: Apache-2.0
"""Methods, one per module. The registry imports every module. See docs/add-a-method.md to add a method."""

# Method of `patch(model)` without a method. docs/guide/which-method.md gives the reasons.
DEFAULT_METHOD = "divprune"
