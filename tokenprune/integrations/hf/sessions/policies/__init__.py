# SPDX-License-Identifier: Apache-2.0
"""One policy of sessions per module; the registry imports all of them. To add one, see docs/guides/chats.md."""
