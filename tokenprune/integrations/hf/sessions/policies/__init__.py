# SPDX-License-Identifier: Apache-2.0
"""Session policies, one per module. The registry imports all modules. See docs/guides/chats.md to add a policy."""
