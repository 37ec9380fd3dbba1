# SPDX-License-Identifier: Apache-2.0
"""Write the rules of deploy/alerts.yaml as a PrometheusRule of Prometheus' operator.

python dev/prometheus_rule.py
"""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "alerts.yaml"
RULE = DEPLOY / "kubernetes/monitoring/alerts.yaml"
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Generated from ../../alerts.yaml by dev/prometheus_rule.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tokenprune
spec:
"""


def render_rule() -> str:
    """Return the text of the file."""
    rules = RULES.read_text()
    lines = rules[rules.index("groups:") :].splitlines()
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    RULE.write_text(render_rule())
