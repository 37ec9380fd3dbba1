# SPDX-License-Identifier: Apache-2.0
"""Methods, one per module. The registry imports every module. See docs/extend/add-a-method.md to add a method."""

# Method of `patch(model)` without a method. docs/start/choose.md gives the reasons.
DEFAULT_METHOD = "divprune"
