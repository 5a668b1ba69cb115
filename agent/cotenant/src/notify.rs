//! Owns what the service manager is told: ready, alive, stopping, and how it is going in one line.
//! Refuses a thread of its own: it is the tick that says alive, so that a tick that hangs is noticed.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::{Duration, Instant},
};

use cotenant_model::view::{Feature, FeatureState};
use tracing::warn;

/// The socket and the watchdog of `sd_notify(3)`; without them every call does nothing.
#[derive(Debug, Default)]
pub(crate) struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    fed: Option<Instant>,
    status: String,
}

impl Notify {
    pub(crate) fn from_environment() -> Self {
        let watchdog =
            watchdog(env::var_os("WATCHDOG_USEC"), env::var_os("WATCHDOG_PID"), std::process::id());
        Self::to(env::var_os("NOTIFY_SOCKET").as_deref(), watchdog)
    }

    fn to(name: Option<&OsStr>, watchdog: Option<Duration>) -> Self {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Self::default() };
        let opened = address(name).and_then(|to| Ok((UnixDatagram::unbound()?, to)));
        let socket = opened
            .and_then(|(socket, to)| socket.set_nonblocking(true).map(|()| (socket, to)))
            .inspect_err(|error| warn!(%error, ?name, "NOTIFY_SOCKET cannot be used: the service manager is told nothing"))
            .ok();
        Self { watchdog: watchdog.filter(|_| socket.is_some()), socket, ..Self::default() }
    }

    /// The manager's patience must outlast several ticks.
    pub(crate) fn expect_ticks(&mut self, interval: Duration) {
        let least = interval.saturating_mul(4);
        if let Some(watchdog) = self.watchdog.filter(|watchdog| *watchdog < least) {
            warn!(?watchdog, ?interval, "ticks are too rare for the watchdog: it is told to wait longer");
            self.watchdog = Some(least);
            self.send(&format!("WATCHDOG_USEC={}", least.as_micros()));
        }
    }

    /// A tick is through. The first one means ready: something can be scraped.
    pub(crate) fn ticked(&mut self, gpus: usize, tenants: usize, features: &[Feature]) {
        if self.socket.is_none() {
            return;
        }
        let mut words = String::new();
        let first = self.fed.is_none();
        if first {
            words.push_str("READY=1\n");
        }
        // Four times in its patience; with every tick would be one datagram a second for nothing.
        if first
            || self.watchdog.is_some_and(|watchdog| self.fed.is_none_or(|fed| fed.elapsed() >= watchdog / 4))
        {
            self.fed = Some(Instant::now());
            words.push_str("WATCHDOG=1\n");
        }
        let status = line(gpus, tenants, features);
        if status != self.status {
            words.push_str("STATUS=");
            words.push_str(&status);
            self.status = status;
        }
        if !words.is_empty() {
            self.send(words.trim_end());
        }
    }

    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=detaching the probes");
    }

    fn send(&self, words: &str) {
        let Some((socket, to)) = &self.socket else { return };
        if let Err(error) = socket.send_to_addr(words.as_bytes(), to) {
            warn!(%error, "the service manager could not be told");
        }
    }
}

/// `@name` is an abstract socket.
fn address(name: &OsStr) -> std::io::Result<SocketAddr> {
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    }
}

/// Meant for this process only: a child inherits the variables, not the duty.
fn watchdog(microseconds: Option<OsString>, pid: Option<OsString>, own: u32) -> Option<Duration> {
    let number = |text: OsString| text.to_str().and_then(|text| text.parse::<u64>().ok());
    if pid.is_some_and(|pid| number(pid) != Some(u64::from(own))) {
        return None;
    }
    microseconds.and_then(number).filter(|microseconds| *microseconds > 0).map(Duration::from_micros)
}

/// What `systemctl status` shows. No tenant's name is in it: it goes to the journal of everybody.
fn line(gpus: usize, tenants: usize, features: &[Feature]) -> String {
    let lacking: Vec<String> = features
        .iter()
        .filter(|feature| !matches!(feature.state, FeatureState::Active | FeatureState::Disabled))
        .map(|feature| format!("{} {}", feature.name, feature.state.as_str()))
        .collect();
    let lacking = if lacking.is_empty() {
        "everything active".to_owned()
    } else {
        format!("lacking: {}", lacking.join(", "))
    };
    format!("{gpus} GPUs, {tenants} tenants; {lacking}")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn waits(state: FeatureState) -> [Feature; 1] {
        [Feature { name: "waits", state, reason: String::new(), lost: String::new(), remedy: String::new() }]
    }

    fn manager() -> (tempfile::TempDir, UnixDatagram, OsString) {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("not blocking");
        (place, socket, path.into())
    }

    fn heard(socket: &UnixDatagram) -> Vec<String> {
        let mut messages = Vec::new();
        let mut bytes = [0; 4096];
        while let Ok(length) = socket.recv(&mut bytes) {
            messages.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
        }
        messages
    }

    #[test]
    fn the_first_tick_is_ready_and_each_quarter_of_the_patience_alive() {
        let (_place, socket, name) = manager();
        let mut notify = Notify::to(Some(&name), Some(Duration::from_millis(40)));
        assert_eq!(heard(&socket), Vec::<String>::new(), "not before a tick");
        notify.ticked(2, 5, &waits(FeatureState::Active));
        assert_eq!(heard(&socket), ["READY=1\nWATCHDOG=1\nSTATUS=2 GPUs, 5 tenants; everything active"]);
        notify.ticked(2, 5, &waits(FeatureState::Active));
        assert_eq!(heard(&socket), Vec::<String>::new(), "nothing new");
        std::thread::sleep(Duration::from_millis(15));
        notify.ticked(2, 5, &waits(FeatureState::Broken));
        assert_eq!(heard(&socket), ["WATCHDOG=1\nSTATUS=2 GPUs, 5 tenants; lacking: waits broken"]);
        notify.stopping();
        assert!(heard(&socket)[0].starts_with("STOPPING=1"));
    }

    #[test]
    fn a_watchdog_shorter_than_four_ticks_is_told_to_wait() {
        let (_place, socket, name) = manager();
        let mut notify = Notify::to(Some(&name), Some(Duration::from_secs(3)));
        notify.expect_ticks(Duration::from_secs(1));
        assert_eq!(heard(&socket), ["WATCHDOG_USEC=4000000"]);
        notify.expect_ticks(Duration::from_secs(1));
        assert_eq!(heard(&socket), Vec::<String>::new());
    }

    #[test]
    fn an_abstract_socket_is_reached() {
        let name = format!("cotenant-notify-{}", std::process::id());
        let bound = SocketAddr::from_abstract_name(&name).expect("a name");
        let socket = UnixDatagram::bind_addr(&bound).expect("a socket");
        socket.set_nonblocking(true).expect("not blocking");
        Notify::to(Some(&OsString::from(format!("@{name}"))), None).stopping();
        assert_eq!(heard(&socket).len(), 1);
    }

    #[test]
    fn nobody_is_told_where_nobody_asked() {
        for name in [None, Some(OsString::new()), Some(OsString::from("/no/such/socket"))] {
            let mut notify = Notify::to(name.as_deref(), Some(Duration::from_secs(1)));
            notify.ticked(2, 5, &waits(FeatureState::Active));
            notify.stopping();
        }
    }

    #[test]
    fn the_watchdog_of_another_process_is_not_ours() {
        let text = |text: &str| Some(OsString::from(text));
        assert_eq!(watchdog(text("3000000"), None, 7), Some(Duration::from_secs(3)));
        assert_eq!(watchdog(text("3000000"), text("7"), 7), Some(Duration::from_secs(3)));
        assert_eq!(watchdog(text("3000000"), text("8"), 7), None);
        assert_eq!(watchdog(text("0"), None, 7), None);
        assert_eq!(watchdog(text("soon"), None, 7), None);
        assert_eq!(watchdog(None, None, 7), None);
    }
}
