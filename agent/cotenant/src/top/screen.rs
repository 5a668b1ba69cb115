//! Owns how a look at the node is drawn: the same picture in a live terminal and as text.
//! Refuses figures of its own, and raw tenant text: names are cleaned before they reach a terminal.

use std::collections::BTreeMap;

use cotenant_model::{
    explain::{clean, clock, gib},
    risk::warning::Bar,
};
use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::Line as Words,
    widgets::{Cell, Row, Table, Widget},
};

use super::{
    Look, Told,
    rates::{self, Line, Order},
};
use crate::snapshot::Gpu;

/// As text: wide enough for the names of pods.
const WIDTH: u16 = 140;
/// Incidents shown at the most; `cotenant explain` has the rest.
const INCIDENTS: usize = 5;
const KEYS: &str =
    "q leaves, s sorts, space holds, arrows scroll; `cotenant explain` has the incidents in words";
const HEADING: Style = Style::new().add_modifier(Modifier::BOLD);

/// One picture.
pub(super) struct View<'a> {
    pub(super) before: Option<&'a Look>,
    pub(super) now: &'a Look,
    pub(super) order: Order,
    pub(super) address: &'a str,
    /// What else there is to say: no answer, held.
    pub(super) state: &'a str,
    /// Tenants scrolled away.
    pub(super) skipped: usize,
}

/// The whole picture as lines, nothing scrolled away.
pub(super) fn text(before: Option<&Look>, now: &Look, order: Order) -> String {
    let view = View { before, now, order, address: "", state: "", skipped: 0 };
    let lines = view.lines();
    let height = view.heights(lines.len()).iter().sum::<usize>();
    let area = Rect::new(0, 0, WIDTH, u16::try_from(height).unwrap_or(u16::MAX));
    let mut buffer = Buffer::empty(area);
    view.put(&lines, area, &mut buffer);
    let line = |y: u16| (0..area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..area.height).fold(String::new(), |text, y| text + line(y).trim_end() + "\n")
}

impl View<'_> {
    fn lines(&self) -> Vec<Line> {
        rates::lines(self.before.map(|look| &look.node), &self.now.node, self.order)
    }

    fn incidents(&self) -> Vec<&Told> {
        let (open, closed): (Vec<_>, Vec<_>) =
            self.now.incidents.iter().partition(|told| told.state == "open");
        open.into_iter().chain(closed).take(INCIDENTS).collect()
    }

    /// Lines of each part: title, GPUs, tenants, incidents, what is degraded.
    fn heights(&self, tenants: usize) -> [usize; 5] {
        let parts = [self.now.node.gpus.len().max(1) + 1, tenants + 1, self.incidents().len().max(1) + 1];
        [1, parts[0] + 1, parts[1] + 1, parts[2], self.now.node.degraded.len()]
    }

    /// Draws, and gives how many tenants are really scrolled away.
    pub(super) fn draw(&self, area: Rect, buffer: &mut Buffer) -> usize {
        self.put(&self.lines(), area, buffer)
    }

    fn put(&self, lines: &[Line], area: Rect, buffer: &mut Buffer) -> usize {
        let [title, gpus, _, incidents, degraded] =
            self.heights(lines.len()).map(|lines| u16::try_from(lines).unwrap_or(u16::MAX));
        let keys = u16::from(!self.address.is_empty());
        // The tenants take what is left.
        let rooms = [title, gpus, 0, incidents, degraded.min(3), keys].map(Constraint::Length);
        let mut rooms = rooms.to_vec();
        rooms[2] = Constraint::Min(3);
        let [title, gpus, tenants, incidents, degraded, keys] = *Layout::vertical(rooms).split(area) else {
            return 0;
        };
        self.title().render(title, buffer);
        self.gpus().render(gpus, buffer);
        let shown = usize::from(tenants.height.saturating_sub(2)).max(1);
        let skipped = self.skipped.min(lines.len().saturating_sub(shown));
        tenant_table(&lines[skipped..], self.order).render(tenants, buffer);
        self.draw_incidents(incidents, buffer);
        for (at, of) in (0..).zip(&self.now.node.degraded) {
            let words = format!("{} {}: {}", clean(&of.feature), clean(&of.state), clean(&of.reason));
            line(degraded, at, &words, Style::new().fg(Color::Yellow), buffer);
        }
        Words::styled(KEYS, Style::new().add_modifier(Modifier::DIM)).render(keys, buffer);
        skipped
    }

    fn title(&self) -> Words<'_> {
        let node = &self.now.node;
        let oldest = node.gpus.iter().map(|gpu| gpu.age_seconds).fold(f64::NAN, f64::max);
        let age = if oldest.is_finite() {
            format!("; NVML's figures up to {oldest:.0} s old")
        } else {
            String::new()
        };
        let compared = self.before.map_or(String::new(), |before| {
            format!(", rates over {:.1} s", (node.taken - before.node.taken).max(0.0))
        });
        let from = if self.address.is_empty() { String::new() } else { format!(" on {}", self.address) };
        let title = format!("cotenant{from}: {} UTC{compared}{age}", clock(node.taken));
        if self.state.is_empty() {
            return Words::styled(title, HEADING);
        }
        Words::styled(format!("{title}  {}", clean(self.state)), HEADING.fg(Color::Red))
    }

    fn gpus(&self) -> Table<'_> {
        let head = ["GPU", "NAME", "MEMORY", "FREE", "BUSY", "SHARED", "RISK 60s", "FULL IN", "DRIVEN BY"];
        let widths = [4, 22, 24, 10, 6, 12, 9, 9].map(Constraint::Length);
        let gpus = &self.now.node.gpus;
        let none = gpus.is_empty().then(|| Row::new(["-", "no GPU is known: see `cotenant doctor`"]));
        Table::new(gpus.iter().map(gpu_row).chain(none), widths.into_iter().chain([Constraint::Min(12)]))
            .header(Row::new(head).style(HEADING))
    }

    fn draw_incidents(&self, area: Rect, buffer: &mut Buffer) {
        let told = self.incidents();
        let open = self.now.incidents.iter().filter(|told| told.state == "open").count();
        line(area, 0, &format!("INCIDENTS of 15 minutes ({open} open)"), HEADING, buffer);
        if told.is_empty() {
            line(area, 1, "  none", Style::new(), buffer);
        }
        for (at, told) in (1..).zip(told) {
            let style = if told.state == "open" { Style::new().fg(Color::Red) } else { Style::new() };
            // It is one line, of any length: the words of a tenant in it are cleaned by the agent.
            let headline: String =
                told.explanation.headline.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
            line(area, at, &format!("  {:6} {headline}", clean(&told.state)), style, buffer);
        }
    }
}

/// One line of an area, cut at its end.
fn line(area: Rect, at: u16, words: &str, style: Style, buffer: &mut Buffer) {
    if at < area.height {
        buffer.set_stringn(area.x, area.y + at, words, usize::from(area.width), style);
    }
}

fn dash<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// As narrow as a column is.
fn part(part: f64) -> String {
    match 100.0 * part {
        some if some > 0.0 && some < 0.05 => "<0.1 %".to_owned(),
        some if some < 9.95 => format!("{some:.1} %"),
        some => format!("{some:.0} %"),
    }
}

fn gpu_row(gpu: &Gpu) -> Row<'_> {
    let memory = match (gpu.used, gpu.limit) {
        (Some(used), Some(limit)) => format!("{} of {}", gib(used), gib(limit)),
        _ => "-".to_owned(),
    };
    let risk = gpu.reclaim_risk.get("60s").copied();
    let style = match risk {
        Some(risk) if risk >= Bar::CRITICAL.minute => Style::new().fg(Color::Red),
        Some(risk) if risk >= Bar::WARNING.minute => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    let cells = [
        gpu.index.to_string(),
        clean(&gpu.name),
        memory,
        dash(gpu.free, gib),
        dash(gpu.utilization, part),
        clean(&gpu.sharing),
        dash(risk, part),
        dash(gpu.exhaustion_seconds, |seconds| format!("{seconds:.0} s")),
        dash(gpu.driver.as_deref(), clean),
    ];
    Row::new(cells).style(style)
}

fn tenant_table(lines: &[Line], order: Order) -> Table<'_> {
    let mut heads: BTreeMap<&str, String> = BTreeMap::new();
    for head in ["LIVE", "CHURN/s", "WAITED", "CAUSED", "TENANT"] {
        let sorted = head.trim_end_matches("/s").eq_ignore_ascii_case(order.as_str())
            || (head == "TENANT" && order == Order::Name);
        heads.insert(head, if sorted { format!("{head}*") } else { head.to_owned() });
    }
    let head = |name: &str| heads.get(name).cloned().unwrap_or_else(|| name.to_owned());
    let names =
        ["TENANT", "GPU", "LIVE", "NVML", "CHURN/s", "CALLS/s", "FAILED", "WAITED", "CAUSED", "WAITS FOR"];
    let widths = [5, 10, 10, 10, 8, 7, 8, 8].map(Constraint::Length);
    let widths = [Constraint::Min(30)].into_iter().chain(widths).chain([Constraint::Min(36)]);
    let none = lines.is_empty().then(|| Row::new(["no tenant was seen"]));
    Table::new(lines.iter().map(tenant_row).chain(none), widths)
        .header(Row::new(names.map(head)).style(HEADING))
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, not below zero")]
fn whole(rate: f64) -> String {
    gib(rate.round() as u64)
}

fn tenant_row(of: &Line) -> Row<'_> {
    let live = dash(of.live, gib) + if of.partial { "+" } else { "" };
    let cells = [
        clean(&of.tenant),
        of.gpus.join(","),
        live,
        dash(of.nvml, gib),
        dash(of.churn, whole),
        dash(of.calls, |rate| format!("{rate:.1}")),
        of.failures.to_string(),
        // Above 100 % several threads wait at once.
        dash(of.waited, part),
        dash(of.caused, part),
        dash(of.mostly.as_ref(), |(culprit, most)| format!("{} {}", part(*most), clean(culprit))),
    ];
    let hot = of.caused.is_some_and(|caused| caused >= 0.05);
    Row::new(cells.map(Cell::new)).style(if hot { Style::new().fg(Color::Red) } else { Style::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Degraded, Name, Row as Of, Snapshot};

    fn look() -> Look {
        let tenant = Of {
            name: Name { tenant: "systemd:\u{1b}[31mevil\u{202e}.service".to_owned(), container: None },
            processes: 1,
            confidence: "joined_late".to_owned(),
            live: BTreeMap::from([("GPU-gone".to_owned(), 3 << 30)]),
            nvml: BTreeMap::new(),
            host: 0,
            allocated: 3 << 30,
            calls: 1,
            failures: 0,
            blocked_seconds: 0.0,
        };
        let degraded = Degraded {
            feature: "waits".to_owned(),
            state: "broken".to_owned(),
            reason: "no\nBTF".to_owned(),
        };
        let node = Snapshot {
            taken: 3_600.0,
            started: 1.0,
            gpus: Vec::new(),
            tenants: vec![tenant],
            blame: Vec::new(),
            degraded: vec![degraded],
        };
        Look { node, incidents: Vec::new() }
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_names_do_nothing_to_a_terminal() {
        let text = text(None, &look(), Order::Name);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
        let line = text.lines().find(|line| line.contains("evil")).expect("the tenant");
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["systemd:?[31mevil?.service", "?", "3.0", "GiB+", "-", "-", "-", "0", "-", "-", "-"],
        );
        for words in
            ["01:00:00 UTC", "no GPU is known", "(0 open)", "none", "waits broken: no?BTF", "TENANT*"]
        {
            assert!(text.contains(words), "{words} in\n{text}");
        }
    }

    #[test]
    fn a_terminal_of_any_size_is_drawn_on() {
        let now = look();
        for (width, height) in [(0, 0), (1, 1), (5, 3), (20, 8), (300, 2), (80, 100)] {
            let area = Rect::new(0, 0, width, height);
            let view = View {
                before: None,
                now: &now,
                order: Order::Caused,
                address: "node:1",
                state: "held",
                skipped: 9,
            };
            assert_eq!(view.draw(area, &mut Buffer::empty(area)), 0);
        }
    }
}
