# SPDX-License-Identifier: Apache-2.0
"""One method per module; the registry imports all of them. To add one, see docs/add-a-method.md."""

# The method of `patch(model)` without a name; docs/guide/which-method.md has the reasons.
DEFAULT_METHOD = "divprune"
