# SPDX-License-Identifier: Apache-2.0
"""One method per module; the registry imports all of them. To add one, see docs/extend/add-a-method.md."""

# The method of `patch(model)` without a name; docs/start/choose.md has the reasons.
DEFAULT_METHOD = "divprune"
