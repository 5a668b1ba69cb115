"""Owns what OpenTelemetry's published registry says of the names that are not this project's own.

Refuses a list of its own: the registry is read from its package, which tests/setup.sh brings below target/tools.
"""

import re
import unittest

import shipped

REGISTRY = shipped.ROOT / "target/tools/python/opentelemetry/semconv"
OWN = "cotenant."


def registry(part):
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(REGISTRY.rglob(f"{part}/*.py")))


def entries():
    """(name, instrument, unit, attributes) of each metric on the reference page."""
    page = (shipped.DASHBOARDS / "METRICS.md").read_text(encoding="utf-8")
    for entry in page.split("\n### ")[1:]:
        name, instrument, unit = re.search(r"^OpenTelemetry: `([\w.]+)`, (\w+), unit `([^`]+)`", entry, re.M).groups()
        yield name, instrument, unit, set(re.findall(r"^\| `\w+` \| `([\w.]+)` \|", entry, re.M))


class Conventions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not REGISTRY.is_dir():
            raise AssertionError("OpenTelemetry's registry is not here: tests/setup.sh brings it")

    def test_metrics_have_the_registry_s_instrument_and_unit(self):
        said = re.findall(r'^[A-Z_0-9]+: Final = "([\w.]+)"\n"""\n.*?Instrument: (\w+)\nUnit: (\S+)', registry("metrics"), re.M | re.S)
        known = {name: (instrument, unit) for name, instrument, unit in said}
        found = 0
        for name, instrument, unit, _ in entries():
            if not name.startswith(OWN):
                self.assertEqual((instrument, unit), known.get(name), name)
                found += 1
        self.assertGreater(found, 5)

    def test_attributes_are_the_registry_s_or_our_own(self):
        known = set(re.findall(r'^[A-Z_0-9]+: Final = "([\w.]+)"', registry("attributes"), re.M))
        used = set().union(*(attributes for *_, attributes in entries()))
        others = {name for name in used if not name.startswith(OWN)}
        self.assertGreater(len(others), 8)
        self.assertEqual(others - known, set())
        for path in sorted((shipped.ROOT / "agent/export/src/otlp").rglob("*.rs")):
            code = path.read_text(encoding="utf-8").split("#[cfg(test)]")[0]
            told = set(re.findall(r'"((?:host|k8s|process|service|thread)\.[\w.]+)"', code))
            self.assertLessEqual(told, known, path.name)


if __name__ == "__main__":
    unittest.main()
