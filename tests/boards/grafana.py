"""Owns the check of boards against the types that Grafana publishes (npm @grafana/schema), by TypeScript's compiler.

Refuses to call a board right for what the types leave open: a panel's options and field settings are checked against
the types of its own plugin, beside the dashboard's.
"""

import copy
import json
import pathlib
import subprocess

SCHEMA = pathlib.Path(__file__).parent / "schema"
PLUGINS = {
    "timeseries": ("timeseries", "TimeSeriesPanelCfg", True),
    "stat": ("stat", "StatPanelCfg", False),
    "table": ("table", "TablePanelCfg", True),
    "state-timeline": ("statetimeline", "StateTimelinePanelCfg", True),
    "text": ("text", "TextPanelCfg", False),
}


# What the Prometheus plugin keeps in an annotation, which the dashboard's type leaves out.
OF_THE_PLUGIN = ("expr", "titleFormat", "textFormat", "step")


def can_check():
    return (SCHEMA / "node_modules/@grafana/schema").is_dir()


def source(boards):
    """A TypeScript file that compiles when every board is what the types say."""
    raw = "@grafana/schema/dist/esm/raw"
    lines = [
        f"import type {{ Dashboard }} from '{raw}/dashboard/x/dashboard_types.gen';",
        "import type { Loose } from './loose';",
    ]
    for place, (folder, name, _) in enumerate(PLUGINS.values()):
        lines.append(f"import type * as plugin{place} from '{raw}/composable/{folder}/panelcfg/x/{name}_types.gen';")
    for number, board in enumerate(copy.deepcopy(boards)):
        for annotation in board["annotations"]["list"]:
            for key in OF_THE_PLUGIN:
                annotation.pop(key)
        lines.append(f"export const board{number}: Loose<Dashboard> = {json.dumps(board)};")
        for panel in board["panels"]:
            if panel["type"] == "row":
                continue
            place = list(PLUGINS).index(panel["type"])
            has_fields = list(PLUGINS.values())[place][2]
            name = f"{number}_{panel['id']}"
            lines.append(f"export const options{name}: Partial<Loose<plugin{place}.Options>> = {json.dumps(panel['options'])};")
            custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
            if custom is not None:
                assert has_fields, f"{panel['title']}: a {panel['type']} has no field settings of its own"
                lines.append(f"export const custom{name}: Partial<Loose<plugin{place}.FieldConfig>> = {json.dumps(custom)};")
    return "\n".join(lines) + "\n"


def complaints(boards):
    """What the compiler says, or nothing."""
    file = SCHEMA / "boards.ts"
    file.write_text(source(boards), encoding="utf-8")
    try:
        done = subprocess.run(
            ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext", "--moduleResolution", "node10", file.name],
            cwd=SCHEMA,
            capture_output=True,
            text=True,
        )
    finally:
        file.unlink()
    return "" if done.returncode == 0 else done.stdout + done.stderr
