"""Owns what can be told of a PromQL expression without running it: which metrics it reads.

Refuses to judge syntax: promtool does that.
"""

import re

DURATION = r"\[[^\]]*\]"
STRING = r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
LABELS = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"
NAME = r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])"
WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right", "inf", "nan", "start", "end"}


def metrics(expr):
    """The names of the series that an expression selects."""
    text = re.sub(STRING, '""', expr)
    text = re.sub(r"\{[^}]*\}", " ", text)
    text = re.sub(DURATION, " ", text)
    text = re.sub(LABELS, " ", text)
    text = re.sub(r"\boffset\s+\S+", " ", text)
    return {name for name in re.findall(NAME, text) if name.lower() not in WORDS}


# A board's variables in the form that they have in an expression, by what Grafana would put there.
def filled(expr, node, gpu, tenant, rate_interval, span):
    values = {
        '"$cluster"': '".*"',
        "$__rate_interval": rate_interval,
        "$__interval": rate_interval,
        "$__range": span,
        'instance="$node"': f'instance="{node}"',
        '"$gpu"': f'"{gpu}"',
        '"$tenant"': f'"{tenant}"',
        # The boards' value for all.
        '"$node"': '".+"',
        '"$victim"': '".+"',
    }
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert not re.search(r"\$[a-z_{]", expr), expr
    return expr
