//! Owns what real readers say of the page: promtool's linter and Python's strict `OpenMetrics` parser.
//! Refuses to skip: a reader that is not there fails the test with the command that installs it.

use std::io::Write as _;
use std::process::{Command, Stdio};

use cotenant_export::Format;
use cotenant_model::view::View;

use crate::cases::hostile;
use crate::fixture::{page, view};

/// Runs a reader on a page and demands that it has nothing to say.
fn accepts(mut command: Command, install: &str, page: &str) {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => panic!("{command:?}: {error}; install it with `make setup` or `{install}`"),
    };
    // A reader that stops early closes the pipe; its own words are the better message.
    let _ = child.stdin.take().unwrap().write_all(page.as_bytes());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.trim().is_empty(),
        "{command:?} says:\n{said}\nIf it is not installed: `make setup` or `{install}`"
    );
}

fn promtool(view: &View) {
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]);
    accepts(command, "apt-get install -y prometheus", &page(view, Format::Text));
}

fn strict_parser(view: &View) {
    const READ: &str = "import sys\n\
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as read\n\
        families = list(read(sys.stdin.buffer.read().decode('utf-8')))\n\
        assert len(families) > 40, len(families)\n";
    let mut command = Command::new("python3");
    command.args(["-c", READ]);
    accepts(command, "pip install prometheus-client", &page(view, Format::OpenMetrics));
}

#[test]
fn c113_promtool_is_content() {
    promtool(&view());
}

#[test]
fn c113_promtool_is_content_with_hostile_names() {
    promtool(&hostile());
}

#[test]
fn c113_strict_openmetrics_parser_is_content() {
    strict_parser(&view());
}

#[test]
fn c113_strict_openmetrics_parser_is_content_with_hostile_names() {
    strict_parser(&hostile());
}
