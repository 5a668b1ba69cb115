"""Owns the shapes: what a board, a panel and a query are in Grafana's JSON (schema 39, Grafana 11 and later).

Refuses a panel without a unit or a description, and knows nothing of what is measured.
"""

import json
import urllib.parse

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "cotenant"
WIDTH = 24


def query(expr, legend="", instant=False):
    """One PromQL query. `legend` is a Grafana format, `instant` for tables and single figures.

    A histogram's exemplars are asked for with it: points that lead to traces.
    """
    made = {"expr": " ".join(expr.split()), "legendFormat": legend or "__auto", "instant": instant}
    return {**made, "exemplar": True} if "_bucket{" in expr else made


def graph(title, description, unit, *queries, stack=False, bars=False, overrides=(), width=12, height=8, low=None, links=()):
    """Series over time. A gap stays a gap."""
    custom = {
        "drawStyle": "bars" if bars else "line",
        "fillOpacity": 60 if bars else (35 if stack else 5),
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
        "axisSoftMin": 0,
    }
    defaults = {"unit": unit, "custom": custom, "links": list(links), "color": {"mode": "palette-classic"}}
    if low is not None:
        defaults["min"] = low
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    made = panel("timeseries", title, description, defaults, options, queries, overrides, width, height)
    if bars:
        # Bars that overlap in time would show an event more than once.
        made["interval"] = "1m"
    return made


def figure(title, description, unit, expr, steps=(), width=4, height=4):
    """One figure. `steps` are (from, colour) in rising order; the first begins at minus infinity."""
    defaults = {"unit": unit, **thresholds(steps)}
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return panel("stat", title, description, defaults, options, [query(expr, instant=True)], (), width, height)


def table(title, description, unit, *queries, names=None, order=(), hide=(), matrix=None, overrides=(), sort=None, width=12, height=8):
    """Rows of labels and figures. `names` renames columns, `order` puts them, `matrix` is (row label, column label)."""
    queries = [dict(one, instant=True, format="table") for one in queries]
    defaults = {"unit": unit, "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": matrix is None}}
    transformations = []
    if matrix:
        row, column = matrix
        options = {"rowField": row, "columnField": column, "valueField": "Value", "emptyValue": "null"}
        transformations.append({"id": "groupingToMatrix", "options": options})
        defaults["custom"]["cellOptions"] = {"type": "color-background", "mode": "gradient"}
        defaults["color"] = {"mode": "continuous-YlRd"}
    else:
        if len(queries) > 1:
            transformations.append({"id": "merge", "options": {}})
        organize = {
            "excludeByName": {name: True for name in ("Time", *hide)},
            "indexByName": {name: place for place, name in enumerate(order)},
            "renameByName": names or {},
        }
        transformations.append({"id": "organize", "options": organize})
    options = {"cellHeight": "sm", "showHeader": True, "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": []}}
    if sort:
        options["sortBy"] = [{"displayName": sort, "desc": True}]
    made = panel("table", title, description, defaults, options, queries, overrides, width, height)
    made["transformations"] = transformations
    return made


def states(title, description, *queries, width=12, height=8):
    """Words over time: 1 is on, 0 is off, a gap is unknown."""
    mapping = {"type": "value", "options": {"0": {"text": "no", "color": "transparent", "index": 0}, "1": {"text": "yes", "color": "orange", "index": 1}}}
    defaults = {"unit": "bool_yes_no", "mappings": [mapping], "custom": {"fillOpacity": 70, "lineWidth": 0}}
    options = {
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "never",
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return panel("state-timeline", title, description, defaults, options, queries, (), width, height)


def words(title, description, markdown, width=24, height=5):
    """Text. It has no unit, being no figure."""
    made = panel("text", title, description, None, {"mode": "markdown", "content": markdown}, (), (), width, height)
    del made["fieldConfig"]
    return made


def panel(kind, title, description, defaults, options, queries, overrides, width, height):
    assert title and description, title
    assert defaults is None or defaults["unit"], title
    targets = []
    for place, one in enumerate(queries):
        target = {"datasource": SOURCE, "refId": chr(ord("A") + place), "editorMode": "code", **one}
        target["range"] = not one["instant"]
        targets.append(target)
    made = {
        "type": kind,
        "title": title,
        "description": description,
        "gridPos": {"w": width, "h": height},
        "options": options,
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
    }
    if targets:
        made["datasource"] = SOURCE
        made["targets"] = targets
    return made


def thresholds(steps):
    if not steps:
        return {"color": {"mode": "fixed", "fixedColor": "text"}}
    written = [{"value": None if place == 0 else value, "color": colour} for place, (value, colour) in enumerate(steps)]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": written}}


def column(name, **properties):
    """How one column or series differs, by its name."""
    return override("byName", name, properties)


def matching(pattern, **properties):
    """How the series whose name matches differ."""
    return override("byRegexp", pattern, properties)


def override(matcher, name, properties):
    """Property names have `__` where Grafana has a dot."""
    listed = [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()]
    return {"matcher": {"id": matcher, "options": name}, "properties": listed}


def link(title, board, **variables):
    """A way to another board that takes values along: a variable's name and Grafana's expression for its value."""
    carried = "".join(f"&var-{name}={value}" for name, value in variables.items())
    return {"title": title, "url": f"/d/cotenant-{board}?${{__url_time_range}}&var-datasource=${{datasource}}&${{cluster:queryparam}}{carried}", "targetBlank": False}


def variable(name, label, description, expr, every=None):
    """A label's values to choose from: one, or several, beginning with `every`, which matches them all."""
    made = {
        "type": "query",
        "name": name,
        "label": label,
        "description": description,
        "datasource": SOURCE,
        "query": {"query": expr, "refId": name},
        "refresh": 2,
        "sort": 1,
        "regex": "",
        "hide": 0,
        "multi": every is not None,
        "includeAll": every is not None,
        "options": [],
    }
    if every is not None:
        made["allValue"] = every
        made["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return made


def source(name, label, kind, description):
    """A data source to choose: the first of its kind, until another one is."""
    return {
        "type": "datasource",
        "name": name,
        "label": label,
        "description": description,
        "query": kind,
        "refresh": 1,
        "regex": "",
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "options": [],
    }


def traces(title, tooltip, variable, query):
    """A way to traces of the board's time, in Explore."""
    source = {"type": "tempo", "uid": f"${{{variable}}}"}
    asked = {"refId": "A", "datasource": source, "queryType": "traceql", "query": query, "limit": 50}
    panes = {"traces": {"datasource": source["uid"], "queries": [asked], "range": {"from": "${__from}", "to": "${__to}"}}}
    # Grafana fills in its variables where it finds them as they are.
    encoded = urllib.parse.quote(json.dumps(panes, separators=(",", ":")), safe="${}")
    return {
        "type": "link",
        "title": title,
        "tooltip": tooltip,
        "url": f"/explore?schemaVersion=1&panes={encoded}",
        "icon": "external link",
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": False,
        "targetBlank": True,
    }


def row(title):
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": WIDTH, "h": 1}}


def board(name, title, description, variables, panels, refresh="30s", links=()):
    """Puts panels from left to right into lines, gives them ids, and makes the JSON that Grafana imports."""
    x = y = line = 0
    for number, one in enumerate(panels, start=1):
        place = one["gridPos"]
        if x + place["w"] > WIDTH or one["type"] == "row":
            x, y, line = 0, y + line, 0
        place.update(x=x, y=y)
        one["id"] = number
        x, line = x + place["w"], max(line, place["h"])
    firing = {
        "name": "Cotenant's alerts",
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{cluster=~"$cluster",alertname=~"Cotenant.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{tenant}} {{culprit}} {{hw_id}}",
        "step": "60s",
    }
    others = {
        "type": "dashboards",
        "title": "Cotenant",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
    return {
        "uid": f"cotenant-{name}",
        "title": f"Cotenant / {title}",
        "description": description,
        "tags": [TAG, "gpu"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "weekStart": "",
        "timezone": "browser",
        "refresh": refresh,
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "templating": {"list": [source("datasource", "Data source", "prometheus", "A Prometheus, or what speaks its language"), *variables]},
        "annotations": {"list": [firing]},
        "links": [others, *links],
        "panels": panels,
    }
