# SPDX-License-Identifier: Apache-2.0
"""One method per module; the registry imports all of them. To add one, see docs/add-a-method.md."""
