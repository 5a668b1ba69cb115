"""Owns what the unit, the packages' papers and the seccomp profile must be; systemd's own tools judge the unit."""

import json
import re
import subprocess
import tempfile
import tomllib
import unittest

import yaml

import chart

# Of systemd 252; a lower one is better.
EXPOSURE = 3.5


class Unit(unittest.TestCase):
    def test_systemd_knows_every_line(self):
        with tempfile.TemporaryDirectory() as place:
            unit = f"{place}/cotenant.service"
            text = chart.UNIT.read_text(encoding="utf-8")
            # Not installed here: a program and a manual that are.
            text = text.replace("ExecStart=/usr/bin/cotenant", "ExecStart=/bin/true").replace("man:cotenant(1) ", "")
            with open(unit, "w", encoding="utf-8") as file:
                file.write(text)
            done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
            # Unknown keys are said and do not count in its status.
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
            with open(unit, "a", encoding="utf-8") as file:
                file.write("[Service]\nNoNewPrivilege=yes\n")
            done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
            self.assertIn("NoNewPrivilege", done.stderr, "this check sees nothing")

    def test_its_exposure_is_what_the_readme_says(self):
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(chart.UNIT)]
        done = subprocess.run(command, capture_output=True, text=True)
        level = re.search(r"Overall exposure level for cotenant.service: ([\d.]+)", done.stdout)[1]
        self.assertLessEqual(float(level), EXPOSURE)
        self.assertIn(f"exposure of {level}", (chart.DEPLOY / "README.md").read_text(encoding="utf-8"))

    def test_its_capabilities_are_the_chart_s(self):
        values = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))
        wanted = {f"CAP_{name}" for name in values["securityContext"]["capabilities"]["add"]}
        unit = chart.unit()
        for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
            self.assertEqual(set(unit[key][0].split()), wanted, key)
        text = (chart.DEPLOY / "README.md").read_text(encoding="utf-8")
        self.assertEqual({f"CAP_{name}" for name in re.findall(r"--cap-add=(\w+)", text)}, wanted)

    def test_it_lets_the_agent_do_its_work(self):
        unit = chart.unit()
        self.assertEqual(unit["Type"], ["notify"])
        self.assertRegex(unit["WatchdogSec"][0], r"^\d+s$")
        for hides in ("ProtectKernelTunables", "ProtectKernelLogs", "ProtectProc", "ProcSubset", "PrivateDevices", "PrivateUsers"):
            self.assertNotIn(hides, unit, hides)
        allowed = " ".join(unit["SystemCallFilter"]).split()
        self.assertIn("bpf", allowed)
        self.assertIn("perf_event_open", allowed)

    def test_its_memory_is_the_chart_s_limit(self):
        values = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))
        self.assertEqual(chart.unit()["MemoryMax"][0] + "i", values["resources"]["limits"]["memory"])


class Papers(unittest.TestCase):
    def test_each_package_has_boards_rules_and_examples(self):
        assets = tomllib.loads((chart.ROOT / "agent/cotenant/Cargo.toml").read_text(encoding="utf-8"))["package"]["metadata"]["deb"]["assets"]
        shared = {to.removeprefix("usr/share/cotenant/").rstrip("/"): source.removeprefix("../../") for source, to, _ in assets if to.startswith("usr/share/cotenant/")}
        tarball = (chart.DEPLOY / "tarball.sh").read_text(encoding="utf-8")
        self.assertEqual(shared, {to: source for to, source in re.findall(r"^put 644 share/(\w+) (\S+)$", tarball, re.M) if to != "completions" and to != "doc"})
        packed = {path for source in shared.values() for path in chart.ROOT.glob(source)}
        for place in ("dashboards/grafana/*.json", "dashboards/rules/*.yml", "dashboards/runbooks/*", "deploy/otlp/*", "deploy/prometheus/*", "deploy/alertmanager/*"):
            there = set(chart.ROOT.glob(place))
            self.assertTrue(there, place)
            self.assertLessEqual(there, packed, place)

    def test_the_manual_has_a_page_for_every_command(self):
        with tempfile.TemporaryDirectory() as place:
            subprocess.run([chart.AGENT, "man", place], check=True)
            done = subprocess.run([chart.AGENT, "--help"], check=True, capture_output=True, text=True)
            commands = re.findall(r"^  (\w+) ", done.stdout.split("Commands:")[1].split("Options:")[0], re.M)
            self.assertIn("run", commands)
            for command in set(commands) - {"help"}:
                with open(f"{place}/cotenant-{command}.1", encoding="utf-8") as page:
                    self.assertIn(f"cotenant\\-{command}", page.read())

    def test_each_shell_has_its_completions(self):
        for shell, word in (("bash", "complete -F"), ("zsh", "#compdef cotenant"), ("fish", "complete -c cotenant")):
            done = subprocess.run([chart.AGENT, "completions", shell], check=True, capture_output=True, text=True)
            self.assertIn(word, done.stdout)
            self.assertIn("identify", done.stdout)

    def test_bash_reads_its_completions(self):
        script = (
            f"source <({chart.AGENT} completions bash); COMP_WORDS=(cotenant ide); COMP_CWORD=1; "
            "_cotenant cotenant ide cotenant; echo ${COMPREPLY[*]}"
        )
        done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
        self.assertEqual(done.stdout.strip(), "identify")


class Versions(unittest.TestCase):
    def test_one_version_everywhere(self):
        version = tomllib.loads((chart.ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]["version"]
        about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text(encoding="utf-8"))
        self.assertEqual((about["version"], about["appVersion"]), (version, version))
        self.assertTrue((chart.DEPLOY / "debian/changelog").read_text(encoding="utf-8").startswith(f"cotenant ({version}-"))


class Seccomp(unittest.TestCase):
    def test_the_profile_lets_through_what_the_agent_is_about_and_no_more(self):
        profile = json.loads((chart.DEPLOY / "seccomp/cotenant.json").read_text(encoding="utf-8"))
        self.assertEqual(profile["defaultAction"], "SCMP_ACT_ERRNO")
        self.assertEqual({one["action"] for one in profile["syscalls"]}, {"SCMP_ACT_ALLOW"})
        names = [name for one in profile["syscalls"] for name in one["names"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertLessEqual({"bpf", "perf_event_open"}, set(names))
        beyond = "mount umount2 setns unshare pivot_root chroot ptrace process_vm_writev init_module kexec_load reboot".split()
        self.assertFalse(set(names) & set(beyond))


if __name__ == "__main__":
    unittest.main()
