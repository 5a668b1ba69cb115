"""Owns what the chart must and must not make, over every set of values, and that it says so when a value is wrong."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import yaml

import chart

sys.path.insert(0, str(chart.TOOLS / "python"))
import kubernetes_validate  # noqa: E402

VERSIONS = ("1.25", "1.28", "1.31", "1.34", "1.37")
# Not Kubernetes' own.
OPERATOR = "monitoring.coreos.com/v1"
RENDERED = {name: chart.rendered(*values) for name, values in chart.SETS.items()}


class Objects(unittest.TestCase):
    def each(self):
        for name, objects in RENDERED.items():
            with self.subTest(name):
                yield objects

    def test_helm_lints_every_set(self):
        for name, values in chart.SETS.items():
            code, out, words = chart.helm("lint", "--strict", "--quiet", str(chart.CHART), *values)
            self.assertEqual(code, 0, f"{name}: {out}{words}")

    def test_kubernetes_takes_every_object_strictly(self):
        checked = 0
        for name, objects in RENDERED.items():
            for one in objects:
                if one["apiVersion"] == OPERATOR:
                    continue
                for version in VERSIONS:
                    with self.subTest(set=name, kind=one["kind"], version=version):
                        kubernetes_validate.validate(one, version, strict=True)
                        checked += 1
        self.assertGreater(checked, len(RENDERED) * len(VERSIONS) * 2)

    def test_the_validation_would_find_a_wrong_field(self):
        one = json.loads(json.dumps(chart.of_kind(RENDERED["default"], "DaemonSet")[0]))
        one["spec"]["template"]["spec"]["hostPid"] = True
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(one, VERSIONS[0], strict=True)

    def test_no_pod_is_privileged_or_can_become_it(self):
        for objects in self.each():
            pod, container = chart.pod(objects), chart.container(objects)
            security = container["securityContext"]
            self.assertIs(security["privileged"], False)
            self.assertIs(security["allowPrivilegeEscalation"], False)
            self.assertIs(security["readOnlyRootFilesystem"], True)
            self.assertEqual(security["capabilities"]["drop"], ["ALL"])
            self.assertTrue(pod["hostPID"])
            self.assertIn(pod["securityContext"]["seccompProfile"]["type"], ("RuntimeDefault", "Localhost"))

    def test_the_capabilities_are_those_of_the_values(self):
        values = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))
        wanted = values["securityContext"]["capabilities"]["add"]
        for name, objects in RENDERED.items():
            more = ["SYS_ADMIN"] if name == "everything" else []
            with self.subTest(name):
                added = chart.container(objects)["securityContext"]["capabilities"]["add"]
                self.assertEqual(added, wanted + more)

    def test_c78_no_gpu_is_requested_and_all_are_asked_for(self):
        for objects in self.each():
            for amounts in chart.container(objects)["resources"].values():
                self.assertLessEqual(set(amounts), {"cpu", "memory"})
            self.assertNotIn("resourceClaims", chart.pod(objects))
        environment = {one["name"]: one.get("value") for one in chart.container(RENDERED["default"])["env"]}
        self.assertEqual(environment["NVIDIA_VISIBLE_DEVICES"], "all")
        self.assertEqual(environment["NVIDIA_DRIVER_CAPABILITIES"], "utility")

    def test_c81_memory_is_limited(self):
        for objects in self.each():
            self.assertIn("memory", chart.container(objects)["resources"]["limits"])

    def test_each_host_path_is_read_only_and_has_its_volume(self):
        for objects in self.each():
            pod, container = chart.pod(objects), chart.container(objects)
            mounts = container["volumeMounts"]
            own = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
            self.assertEqual(own, {"run"})
            self.assertTrue(all(mount.get("readOnly") for mount in mounts if mount["name"] not in own))
            self.assertEqual({mount["name"] for mount in mounts}, {volume["name"] for volume in pod["volumes"]})
            for volume in pod["volumes"]:
                path = volume.get("hostPath", {}).get("path", "/x")
                self.assertNotIn(path.rstrip("/"), ("", "/proc", "/sys", "/dev", "/var", "/run", "/etc"))

    def test_c80_the_driver_is_let_go_by_the_pod_s_annotation(self):
        objects = RENDERED["default"]
        (volume,) = [one for one in chart.pod(objects)["volumes"] if "downwardAPI" in one]
        (item,) = volume["downwardAPI"]["items"]
        self.assertEqual(item["fieldRef"]["fieldPath"], "metadata.annotations['cotenant.io/release-driver']")
        (mount,) = [one for one in chart.container(objects)["volumeMounts"] if one["name"] == volume["name"]]
        self.assertIn(f'release_file = "{mount["mountPath"]}/{item["path"]}"', chart.configuration(objects).splitlines())

    def test_all_probes_are_there(self):
        wanted = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
        for name, objects in RENDERED.items():
            container = chart.container(objects)
            with self.subTest(name):
                for probe, path in wanted.items():
                    if name == "client-certificates":
                        # Kubelet has no certificate.
                        command = container[probe]["exec"]["command"]
                        self.assertEqual("--ready" in command, path == "/readyz")
                        self.assertEqual(command[:2], ["/usr/bin/cotenant", "health"])
                    else:
                        scheme = {"scheme": "HTTPS"} if name == "tls" else {}
                        self.assertEqual(container[probe]["httpGet"], {"path": path, "port": "metrics", **scheme})

    def test_the_web_configuration_is_a_secret_of_the_administrator_s(self):
        for name, objects in RENDERED.items():
            volumes = [one for one in chart.pod(objects)["volumes"] if "secret" in one]
            lines = chart.configuration(objects).splitlines()
            with self.subTest(name):
                if name not in ("tls", "client-certificates", "passwords"):
                    self.assertEqual(volumes, [])
                    continue
                (volume,) = volumes
                self.assertEqual(volume["secret"], {"secretName": "cotenant-web", "defaultMode": 0o400})
                (mount,) = [one for one in chart.container(objects)["volumeMounts"] if one["name"] == volume["name"]]
                self.assertIn(f'web_config = "{mount["mountPath"]}/web.yml"', lines)
        for kind, endpoints in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")):
            (plain,) = chart.of_kind(RENDERED["everything"], kind)
            self.assertFalse({"scheme", "tlsConfig", "basicAuth"} & set(plain["spec"][endpoints][0]))
            (monitor,) = chart.of_kind(RENDERED["tls"], kind)
            (endpoint,) = monitor["spec"][endpoints]
            self.assertEqual(endpoint["scheme"], "https")
            self.assertIn("tlsConfig", endpoint)
        (endpoint,) = chart.of_kind(RENDERED["tls"], "PodMonitor")[0]["spec"]["podMetricsEndpoints"]
        self.assertEqual(endpoint["basicAuth"]["password"], {"name": "scraper", "key": "password"})

    def test_no_right_in_the_api_is_given_unless_the_watch_is_on(self):
        for name, objects in RENDERED.items():
            if name == "teams":
                continue
            with self.subTest(name):
                self.assertFalse([one["kind"] for one in objects if "Role" in one["kind"]])
                self.assertIs(chart.pod(objects)["automountServiceAccountToken"], False)
                self.assertNotIn("api_watch", chart.configuration(objects))

    def test_c82_the_watch_gets_to_read_pods_and_no_more(self):
        objects = RENDERED["teams"]
        (role,) = chart.of_kind(objects, "ClusterRole")
        self.assertEqual(role["rules"], [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}])
        (binding,) = chart.of_kind(objects, "ClusterRoleBinding")
        self.assertEqual(binding["roleRef"]["name"], role["metadata"]["name"])
        (account,) = chart.of_kind(objects, "ServiceAccount")
        where = {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": account["metadata"]["namespace"]}
        self.assertEqual(binding["subjects"], [where])
        self.assertEqual(chart.pod(objects)["serviceAccountName"], account["metadata"]["name"])
        self.assertIs(chart.pod(objects)["automountServiceAccountToken"], True)
        names = {one["name"]: one.get("valueFrom") for one in chart.container(objects)["env"]}
        self.assertEqual(names["K8S_NODE_NAME"], {"fieldRef": {"fieldPath": "spec.nodeName"}})
        lines = chart.configuration(objects).splitlines()
        for line in ("api_watch = true", 'tenant_label = "team"', 'labels = ["team", "app.kubernetes.io/name"]'):
            self.assertIn(line, lines)
        (policy,) = chart.of_kind(objects, "NetworkPolicy")
        ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        self.assertEqual(ports, {53, 443, 6443})

    def test_c24_the_prolog_s_directory_is_mounted_read_only_where_the_agent_looks(self):
        objects = RENDERED["everything"]
        self.assertIn('job_mapping = "/run/gpu-jobs"', chart.configuration(objects).splitlines())
        (mount,) = [one for one in chart.container(objects)["volumeMounts"] if one["name"] == "slurm-job-mapping"]
        self.assertEqual((mount["mountPath"], mount["readOnly"]), ("/run/gpu-jobs", True))
        (volume,) = [one for one in chart.pod(objects)["volumes"] if one["name"] == "slurm-job-mapping"]
        self.assertEqual(volume["hostPath"], {"path": "/run/gpu-jobs", "type": "Directory"})
        self.assertNotIn("job_mapping", chart.configuration(RENDERED["default"]))

    def test_the_policy_lets_through_to_those_who_are_sent_to_and_to_nobody_else(self):
        enabled = "--set=networkPolicy.enabled=true"
        collector = "--set=otlp.endpoint=https://collector.example:4317"
        alerts = '--set-json=config.alertmanager={"enabled":true,"urls":["http://a:9093/x","https://b","http://[::1]:9093"]}'
        own = [{"to": [{"podSelector": {"matchLabels": {"app": "collector"}}}]}]
        for values, ports, more in (
            ((), set(), []),
            ((collector,), {4317}, []),
            ((collector, alerts), {4317, 9093, 443}, []),
            (("--set=config.otlp.enabled=true,config.otlp.endpoint=http://c",), {80}, []),
            # What the administrator wrote is all there is.
            ((collector, f"--set-json=networkPolicy.egress={json.dumps(own)}"), set(), own),
        ):
            with self.subTest(values):
                objects = chart.rendered(enabled, *values)
                (policy,) = chart.of_kind(objects, "NetworkPolicy")
                dns, *rest = policy["spec"]["egress"]
                self.assertEqual({port["port"] for port in dns["ports"]}, {53})
                self.assertEqual({port["port"] for rule in rest for port in rule.get("ports", [])}, ports)
                self.assertEqual([rule for rule in rest if "ports" not in rule], more)
                kubernetes_validate.validate(policy, VERSIONS[-1], strict=True)

    def test_c10_the_scrape_leaves_a_tenant_s_labels_alone(self):
        for kind, endpoints in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")):
            (monitor,) = chart.of_kind(RENDERED["everything"], kind)
            (endpoint,) = monitor["spec"][endpoints]
            self.assertIs(endpoint["honorLabels"], True)
            self.assertIn({"action": "labeldrop", "regex": "pod|container|endpoint"}, endpoint["relabelings"])

    def test_the_agent_reads_the_configuration_that_the_chart_writes(self):
        for objects in self.each():
            with tempfile.TemporaryDirectory() as place:
                # What a Secret brings in a pod.
                (pathlib.Path(place) / "web.yml").write_text("basic_auth_users: {}\n", encoding="utf-8")
                file = pathlib.Path(place) / "cotenant.toml"
                file.write_text(chart.configuration(objects).replace("/etc/cotenant-web", place), encoding="utf-8")
                done = subprocess.run([chart.AGENT, "config", "check", file], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
        text = chart.configuration(RENDERED["everything"])
        for line in ('endpoint = "https://collector:4317"', "pointers = 1048576", 'listen = "0.0.0.0:9468"'):
            self.assertIn(line, text.splitlines())


class Values(unittest.TestCase):
    def refused(self, *values):
        with self.assertRaises(ValueError) as caught:
            chart.rendered(*values)
        return str(caught.exception)

    def test_a_typo_is_refused_with_its_place(self):
        for value, place, word in (
            ("gpu.runtimeClas=nvidia", "'/gpu'", "runtimeClas"),
            ("tolerationz=x", "''", "tolerationz"),
            ("config.nvml.intervall=30s", "'/config/nvml'", "intervall"),
            ("server.webConfig.secretName=x", "'/server/webConfig'", "secretName"),
            ("config.server.web_config=/x", "'/config/server'", "web_config"),
            ("monitoring.podMonitor.enable=true", "'/monitoring/podMonitor'", "enable"),
        ):
            said = self.refused(f"--set={value}")
            self.assertIn(f"at {place}", said)
            self.assertIn(f"additional properties '{word}' not allowed", said)

    def test_a_wrong_kind_of_value_is_refused(self):
        for value in ("server.port=http", "server.port=70000", "image.digest=latest", "otlp.protocol=smtp"):
            self.assertIn("at '/", self.refused(f"--set={value}"), value)

    def test_c78_a_gpu_cannot_be_requested_nor_privilege_set(self):
        self.assertIn("nvidia.com/gpu", self.refused("--set=resources.limits.nvidia\\.com/gpu=1"))
        self.assertIn("privileged", self.refused("--set=securityContext.privileged=true"))

    def test_every_default_meets_the_schema_and_every_key_of_the_agent_is_in_it(self):
        self.assertEqual(chart.CHART.joinpath("values.schema.json").read_text(encoding="utf-8"), chart.generate.schema(), "run `make chart`")


class Copies(unittest.TestCase):
    def test_the_plain_manifest_is_the_chart_s(self):
        files = {chart.generate.MANIFEST: chart.generate.manifest(), chart.generate.API_WATCH: chart.generate.api_watch()}
        for file, wanted in files.items():
            self.assertEqual(file.read_text(encoding="utf-8"), wanted, "run `make chart`")
        for one in [one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]:
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)

    def test_the_chart_has_every_board_and_the_rules_unchanged(self):
        boards = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (chart.ROOT / "dashboards/grafana").glob("*.json")}
        carried = {
            name.removeprefix("cotenant-"): json.loads(text)
            for one in chart.of_kind(RENDERED["everything"], "ConfigMap")
            if one["metadata"]["labels"].get("grafana_dashboard") == "1"
            for name, text in one["data"].items()
        }
        self.assertEqual(carried, boards)
        (rule,) = chart.of_kind(RENDERED["everything"], "PrometheusRule")
        rules = yaml.safe_load((chart.ROOT / "dashboards/rules/cotenant.rules.yml").read_text(encoding="utf-8"))
        self.assertEqual(rule["spec"], rules)

    def test_they_are_links_and_no_second_copies(self):
        for path in (chart.CHART / "files").rglob("*"):
            if not path.is_dir():
                self.assertTrue(path.is_symlink() and path.resolve().is_relative_to(chart.ROOT / "dashboards"), path)

    def test_promtool_accepts_the_rules_that_the_chart_makes(self):
        (rule,) = chart.of_kind(RENDERED["everything"], "PrometheusRule")
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place) / "rules.yml"
            file.write_text(yaml.safe_dump(rule["spec"]), encoding="utf-8")
            done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_packed_chart_is_whole(self):
        with tempfile.TemporaryDirectory() as place:
            self.assertEqual(chart.helm("package", str(chart.CHART), "--destination", place)[0], 0)
            (packed,) = pathlib.Path(place).glob("*.tgz")
            code, out, words = chart.helm("template", "cotenant", str(packed), "--namespace", "gpu", *chart.SETS["everything"])
        self.assertEqual(code, 0, words)
        self.assertEqual([each for each in yaml.safe_load_all(out) if each], RENDERED["everything"])


if __name__ == "__main__":
    unittest.main()
