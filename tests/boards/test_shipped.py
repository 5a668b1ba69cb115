"""Owns what boards and rules must be without data: valid, complete, of the catalogue only."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

import yaml

import grafana
import promql
import shipped

sys.path.insert(0, str(shipped.DASHBOARDS / "grafana"))
import boards as source  # noqa: E402


def said(*command, **options):
    """What a tool says, and whether it is content."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return done.returncode == 0, done.stdout + done.stderr


class Rules(unittest.TestCase):
    def test_promtool_accepts_the_rules(self):
        content, words = said("promtool", "check", "rules", str(shipped.RULES))
        self.assertTrue(content, words)

    def test_each_alert_fires_clears_and_is_silent_on_a_quiet_node(self):
        tests = sorted(path.name for path in (shipped.RULES.parent / "tests").glob("*.yml"))
        content, words = said("promtool", "test", "rules", *tests, cwd=shipped.RULES.parent / "tests")
        self.assertTrue(content, words)

    def test_no_alert_is_without_those_tests(self):
        fired, silent, quiet = set(), set(), set()
        for path in (shipped.RULES.parent / "tests").glob("*.yml"):
            for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
                after = set()
                for check in test.get("alert_rule_test", []):
                    name = check["alertname"]
                    if check.get("exp_alerts"):
                        fired.add(name)
                        after.add(name)
                    elif name in after:
                        silent.add(name)
                    if path.name == "quiet.yml":
                        quiet.add(name)
        alerts = {rule["alert"] for rule in shipped.rules() if "alert" in rule}
        self.assertEqual(fired, alerts)
        self.assertEqual(silent, alerts, "these do not clear in any test")
        self.assertEqual(quiet, alerts)

    def test_an_alert_says_whom_where_and_what_to_do(self):
        for rule in shipped.rules():
            if "alert" not in rule:
                continue
            name, notes = rule["alert"], rule["annotations"]
            self.assertIn(rule["labels"]["severity"], {"critical", "warning", "info"}, name)
            self.assertEqual(set(notes), {"summary", "description", "runbook_url"}, name)
            self.assertIn("$labels.instance", notes["summary"], name)
            page = shipped.DASHBOARDS / "runbooks" / f"{name}.md"
            self.assertTrue(notes["runbook_url"].endswith(f"/dashboards/runbooks/{name}.md"), name)
            text = page.read_text(encoding="utf-8")
            for part in ("## What it means", "## First three looks", "## What to do", "## How it clears"):
                self.assertIn(part, text, name)
            looks = text.split("## First three looks")[1].split("##")[0]
            self.assertEqual(len(re.findall(r"^\d\. ", looks, re.M)), 3, name)

    def test_every_runbook_has_its_alert(self):
        pages = {path.stem for path in (shipped.DASHBOARDS / "runbooks").glob("*.md")}
        self.assertEqual(pages, {rule["alert"] for rule in shipped.rules() if "alert" in rule})

    def test_the_hardware_s_xids_are_those_that_the_agent_names(self):
        text = (shipped.ROOT / "agent/model/src/incident/action.rs").read_text(encoding="utf-8")
        codes = re.search(r"const HARDWARE: &\[u32\] = &\[([\d, ]+)\]", text)[1].split(", ")
        for rule in shipped.rules():
            if rule.get("alert") == "CotenantGpuXid":
                self.assertEqual(re.search(r'xid[!=]~"([\d|]+)"', rule["expr"])[1].split("|"), codes)

    def test_what_comes_by_otlp_gets_the_labels_of_a_scrape(self):
        page = (shipped.DASHBOARDS / "METRICS.md").read_text(encoding="utf-8")
        attributes = {(name.replace(".", "_"), label) for label, name in re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", page, re.M)}
        # The agent's version is on everything that it sends, as it is the resource's.
        wanted = {(name, label) for name, label in attributes if name != label} - {("service_version", "version")}
        made, dropped = set(), None
        for rule in yaml.safe_load((shipped.ROOT / "deploy/otlp/relabel.yml").read_text(encoding="utf-8")):
            if rule.get("action") == "labeldrop":
                dropped = re.compile(rule["regex"])
            elif len(rule["source_labels"]) == 1:
                made.add((rule["source_labels"][0], rule["target_label"]))
        self.assertEqual(wanted - made, set())
        self.assertEqual({label for _, label in made - wanted}, {"job", "instance"})
        self.assertEqual([name for name, label in wanted if not dropped.fullmatch(name)], [], "these stand twice")
        self.assertEqual([label for _, label in attributes if dropped.fullmatch(label)], [], "these are lost")

    def test_alertmanager_accepts_the_example(self):
        content, words = said("amtool", "check-config", str(shipped.ALERTMANAGER))
        self.assertTrue(content, words)

    def test_alertmanager_sends_each_alert_where_the_example_says(self):
        for labels, receiver in [
            (["alertname=CotenantGpuXid", "severity=critical", "hw_id=GPU-a"], "pager"),
            (["alertname=CotenantNoisyNeighbour", "severity=warning", "tenant=pod:a/b"], "chat"),
            (["alertname=CotenantLedgerDrift", "severity=info", "tenant=pod:a/b"], "record"),
            (["alertname=CotenantAgentDown", "severity=warning"], "chat"),
        ]:
            content, words = said("amtool", "config", "routes", "test", "--config.file", str(shipped.ALERTMANAGER), *labels)
            self.assertTrue(content, words)
            self.assertEqual(words.splitlines()[0], receiver, labels)

    def test_promtool_accepts_the_example_configuration(self):
        with tempfile.TemporaryDirectory() as place:
            place = pathlib.Path(place)
            (place / "rules").mkdir()
            (place / "rules" / shipped.RULES.name).write_bytes(shipped.RULES.read_bytes())
            settings = yaml.safe_load(shipped.PROMETHEUS.read_text(encoding="utf-8"))
            for job in settings["scrape_configs"]:
                # Debian's Prometheus is built without Kubernetes; the relabelling is checked all the same.
                if job.pop("kubernetes_sd_configs", None):
                    job["file_sd_configs"] = [{"files": ["pods.json"]}]
            (place / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
            content, words = said("promtool", "check", "config", str(place / "prometheus.yml"))
        self.assertTrue(content, words)


class Boards(unittest.TestCase):
    def test_the_files_are_what_their_source_writes(self):
        for name in source.BOARDS:
            text = (shipped.DASHBOARDS / "grafana" / f"{name}.json").read_text(encoding="utf-8")
            self.assertEqual(text, source.written(name), "run: python3 dashboards/grafana/boards.py")

    def test_every_panel_has_a_unit_and_a_description(self):
        for board in shipped.boards():
            for panel in board["panels"]:
                if panel["type"] == "row":
                    continue
                self.assertTrue(panel["description"].endswith("."), panel["title"])
                if panel["type"] != "text":
                    self.assertTrue(panel["fieldConfig"]["defaults"]["unit"], panel["title"])

    def test_a_board_imports_untouched(self):
        uids = set()
        for board in shipped.boards():
            uids.add(board["uid"])
            variables = [variable["name"] for variable in board["templating"]["list"]]
            self.assertEqual(variables[:3], ["datasource", "cluster", "node"])
            ids = [panel["id"] for panel in board["panels"]]
            self.assertEqual(len(ids), len(set(ids)))
            taken = set()
            for panel in board["panels"]:
                place = panel["gridPos"]
                cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
                self.assertFalse(cells & taken, f"{panel['title']} lies on another panel")
                self.assertLessEqual(place["x"] + place["w"], 24)
                taken |= cells
                for target in panel.get("targets", []):
                    self.assertEqual(target["datasource"]["uid"], "${datasource}", panel["title"])
        self.assertEqual(len(uids), 4)

    def test_links_lead_to_boards_and_variables_that_there_are(self):
        variables = {board["uid"]: {one["name"] for one in board["templating"]["list"]} for board in shipped.boards()}
        found = 0
        for board in shipped.boards():
            for uid, query in re.findall(r'"url": "/d/([\w-]+)\?([^"]*)"', source.written(board["uid"].removeprefix("cotenant-"))):
                self.assertLessEqual(set(re.findall(r"var-(\w+)=", query)), variables[uid], query)
                found += 1
        self.assertGreater(found, 10)

    def test_incidents_lead_to_their_traces(self):
        (board,) = (board for board in shipped.boards() if board["title"] == "Cotenant / Incident")
        (link,) = (link for link in board["links"] if link["type"] == "link")
        panes = json.loads(urllib.parse.parse_qs(urllib.parse.urlsplit(link["url"]).query)["panes"][0])["traces"]
        (variable,) = (one for one in board["templating"]["list"] if one["query"] == "tempo")
        self.assertEqual({panes["datasource"], panes["queries"][0]["datasource"]["uid"]}, {f"${{{variable['name']}}}"})
        self.assertEqual(panes["range"], {"from": "${__from}", "to": "${__to}"})
        name = re.search(r'name =~ "([^"]+)"', panes["queries"][0]["query"])[1]
        # As the agent names them, and as whom it sends.
        told = (shipped.ROOT / "agent/export/src/otlp/incident.rs").read_text(encoding="utf-8")
        self.assertRegex(re.search(r'format!\("(incident \{\})", incident.kind', told)[1], f"^{name}$")
        self.assertIn('resource.service.name = "cotenant"', panes["queries"][0]["query"])

    def test_histograms_are_asked_for_their_exemplars(self):
        asked = [target for board in shipped.boards() for panel in board["panels"] for target in panel.get("targets", [])]
        marked = [target["expr"] for target in asked if target.get("exemplar")]
        self.assertEqual(marked, [target["expr"] for target in asked if "_bucket" in target["expr"]])
        self.assertGreater(len(marked), 3)

    def test_runbooks_and_patterns_name_panels_that_there_are(self):
        titles = {panel["title"] for board in shipped.boards() for panel in board["panels"]}
        found = 0
        for page in (shipped.DASHBOARDS / "patterns.md", *(shipped.DASHBOARDS / "runbooks").glob("*.md")):
            for name in re.findall(r'"([A-Z][^"]+)"', page.read_text(encoding="utf-8")):
                self.assertTrue(any(title.startswith(name) for title in titles), f"{page.name}: {name}")
                found += 1
        self.assertGreater(found, 40)

    def test_unknown_is_never_drawn_as_zero(self):
        for board, panel, _, expr in shipped.panel_queries():
            self.assertNotRegex(expr, r"vector\s*\(|\bor\s+0\b", f"{board}: {panel}")
        for board in shipped.boards():
            self.assertNotIn('"noValue"', str(board))
            for panel in board["panels"]:
                custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
                self.assertFalse(custom.get("spanNulls", False), panel["title"])

    def test_the_types_of_grafana_11_accept_the_boards(self):
        if not grafana.can_check():
            self.skipTest("Grafana's types are not here: npm ci --prefix tests/boards/schema")
        self.assertEqual(grafana.complaints(shipped.boards()), "")
        # The check would see it.
        broken = shipped.boards()
        broken[0]["panels"][-1]["gridPos"]["w"] = "8"
        self.assertIn("not assignable", grafana.complaints(broken))


class Expressions(unittest.TestCase):
    def every(self):
        for board, panel, letter, expr in shipped.panel_queries():
            yield f"{board}: {panel} ({letter})", expr
        for rule in shipped.rules():
            yield rule.get("record") or rule["alert"], rule["expr"]

    def test_every_one_parses(self):
        recorded = []
        for number, (_, expr) in enumerate(self.every()):
            expr = promql.filled(expr, "node", "GPU-a", "pod:a/b", "1m", "1h")
            recorded.append({"record": f"panel:{number}", "expr": expr})
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}, file)
            file.flush()
            content, words = said("promtool", "check", "rules", file.name)
        self.assertTrue(content, words)

    def test_no_cluster_is_taken_for_another(self):
        for where, expr in self.every():
            if ":" in where and "/" in where:
                selected = re.findall(r"(?<![\w:])((?:cotenant|hw|ALERTS|[a-z_]+:cotenant)[\w:]*)(?!\s*[(\w:])(\{[^}]*\})?", re.sub(promql.LABELS, "", expr))
                self.assertTrue(selected, where)
                for name, labels in selected:
                    if name != "cotenant_agent_build_info":
                        self.assertTrue(labels.startswith('{cluster=~"$cluster"'), f"{where}: {name}{labels}")
            for labels in re.findall(r"\b(?:on|by)\s*\(([^)]*instance[^)]*)\)", expr):
                if "hw_id" not in labels and "job" in labels:
                    self.assertIn("cluster", labels, where)
        for rule in shipped.rules():
            for labels in re.findall(r"\{([^{}]*instance=%q[^{}]*)\}", rule.get("annotations", {}).get("description", "")):
                self.assertTrue(labels.startswith("cluster=%q,"), f"{rule['alert']}: {labels}")

    def test_a_thousand_nodes_fit_on_the_fleet_board(self):
        found = 0
        for board, panel, letter, expr in shipped.panel_queries():
            if board == "Cotenant / Fleet" and re.search(r"by \([^)]*instance", expr):
                # A row or a line for each node: the worst ones only, or those in trouble.
                self.assertRegex(expr, r"\b(?:topk|bottomk)\b|> 0|max by \(severity|xid", f"{panel} ({letter})")
                found += 1
        self.assertGreater(found, 8)

    def test_every_one_reads_only_what_there_is(self):
        known = set(shipped.series()) | {rule["record"] for rule in shipped.rules() if "record" in rule} | {"up", "ALERTS"}
        for where, expr in self.every():
            self.assertLessEqual(promql.metrics(expr), known, where)
            self.assertTrue(promql.metrics(expr), where)

    def test_every_metric_is_on_a_board_in_a_rule_or_raw(self):
        series = shipped.series()
        used = {series[name] for _, expr in self.every() for name in promql.metrics(expr) if name in series}
        self.assertEqual(set(shipped.raw()), set(shipped.catalogue()) - used)

    def test_annotations_read_only_what_there_is(self):
        known = set(shipped.series()) | {rule["record"] for rule in shipped.rules() if "record" in rule}
        found = 0
        for rule in shipped.rules():
            for text in re.findall(r'printf "((?:\\.|[^"\\])*)"', rule.get("annotations", {}).get("description", "")):
                self.assertLessEqual(promql.metrics(text.replace('\\"', '"').replace("%q", '"x"')), known, text)
                found += 1
        self.assertGreater(found, 5)

    def test_metrics_are_found_in_expressions(self):
        expr = 'sum by (a, b) (rate(x_total{l="y{z"}[5m])) / on (job) group_left (w) max_over_time(v:w:sum[1h] offset 5m) > bool 0.1 unless up'
        self.assertEqual(promql.metrics(expr), {"x_total", "v:w:sum", "up"})


if __name__ == "__main__":
    unittest.main()
