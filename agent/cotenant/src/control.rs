//! Owns who may have NVML let go, and for how long: a command, a signal, a file.
//! Refuses the network: commands come through a socket of this host, from root or the agent's own user.

mod ask;
mod door;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use cotenant_device::Device;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

pub(crate) use ask::{Ask, HealthOptions, ReleaseOptions, ResumeOptions, run};
pub(crate) use door::Door;

/// Where commands are heard by default.
pub(crate) const SOCKET: &str = "/run/cotenant/control.sock";
/// Between two looks at what is wanted.
const LOOK: Duration = Duration::from_millis(200);
/// Within this, nothing of the driver is held any more; a command waits for as long.
const WITHIN: Duration = Duration::from_secs(5);
/// An annotation's value.
const LONGEST_FILE: u64 = 4096;

/// Who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    Command,
    Signal,
    File,
}

impl Asker {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Signal => "signal",
            Self::File => "file",
        }
    }
}

/// What was asked for by hand: the last word counts.
#[derive(Clone, Copy, Debug)]
struct Order {
    by: Asker,
    /// Until it is taken back, when it has no end.
    end: Option<Instant>,
}

/// What is wanted at this moment, and what came of it.
#[derive(Debug, Default)]
struct Standing {
    order: Option<Order>,
    /// The file says so.
    filed: bool,
    /// A resume by hand that came while the file said `true` holds until the file changes its mind.
    overruled: bool,
}

impl Standing {
    fn wanted(&self, now: Instant) -> Option<Order> {
        let by_hand = self.order.filter(|order| order.end.is_none_or(|end| now < end));
        by_hand.or_else(|| (self.filed && !self.overruled).then_some(Order { by: Asker::File, end: None }))
    }

    fn file(&mut self, says: bool) {
        if self.filed != says {
            (self.filed, self.overruled) = (says, false);
        }
    }
}

/// Heard from the agent's first moments on: unheard, these signals end a process.
pub(crate) struct Signals {
    out: Signal,
    back: Signal,
}

impl Signals {
    /// Within the runtime.
    pub(crate) fn hear() -> Result<Self> {
        let of = |kind| signal(kind).context("SIGUSR1 and SIGUSR2 cannot be heard");
        Ok(Self { out: of(SignalKind::user_defined1())?, back: of(SignalKind::user_defined2())? })
    }
}

/// Whether NVML is held, as the rest of the agent asks it.
#[derive(Debug)]
pub(crate) struct Release {
    device: Option<Arc<Device>>,
    standing: Mutex<Standing>,
    /// Libraries that nobody maps are let go as well: a probe on one keeps its file system busy.
    pub(crate) asked: Arc<AtomicBool>,
}

impl Release {
    pub(crate) fn new(device: Option<Arc<Device>>) -> Self {
        Self { device, standing: Mutex::default(), asked: Arc::default() }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Standing) -> T) -> Option<T> {
        self.standing.lock().ok().map(|mut standing| change(&mut standing))
    }

    fn release(&self, by: Asker, length: Option<Duration>) {
        let end = length.and_then(|length| Instant::now().checked_add(length));
        info!(
            by = by.as_str(),
            seconds = length.map(|length| length.as_secs()),
            "release of the driver asked for"
        );
        self.change(|standing| standing.order = Some(Order { by, end }));
    }

    fn resume(&self, by: Asker) {
        info!(by = by.as_str(), "the driver may be used again");
        self.change(|standing| {
            standing.order = None;
            standing.overruled = standing.filed;
        });
    }

    /// Nothing of the driver's is held: the library is unloaded, and with it its handles are gone.
    fn is_done(&self) -> bool {
        self.device.as_ref().is_none_or(|device| device.is_released())
    }

    /// One look: what is wanted becomes the device's wish. The device gets there by itself.
    fn look(&self) {
        let Some(wanted) = self.change(|standing| standing.wanted(Instant::now()).is_some()) else { return };
        if self.asked.swap(wanted, Ordering::Relaxed) == wanted {
            return;
        }
        if let Some(device) = &self.device {
            if wanted {
                device.ask_release();
            } else {
                device.resume();
            }
        }
    }

    /// In words, for whoever reads a feature's reason; `None` when nothing is released.
    pub(crate) fn reason(&self) -> Option<String> {
        let order = self.change(|standing| standing.wanted(Instant::now())).flatten()?;
        let how = match order.by {
            Asker::Command => "`cotenant release`",
            Asker::Signal => "SIGUSR1",
            Asker::File => "nvml.release_file",
        };
        let end = order.end.map_or_else(
            || match order.by {
                Asker::File => "until the file says otherwise".to_owned(),
                _ => "until `cotenant resume` or SIGUSR2".to_owned(),
            },
            |end| format!("for {} s more", end.saturating_duration_since(Instant::now()).as_secs()),
        );
        let held = if self.is_done() { "" } else { "; its handles are still held: a call has not come back" };
        Some(format!("released by {how}, {end}{held}"))
    }

    fn describe(&self) -> Value {
        let order = self.change(|standing| standing.wanted(Instant::now())).flatten();
        let until = order.and_then(|order| order.end).map(|end| {
            let left = end.saturating_duration_since(Instant::now());
            (SystemTime::now() + left).duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
        });
        let state = match (order.is_some(), self.is_done()) {
            (true, true) => "released",
            (true, false) => "releasing",
            (false, _) => "held",
        };
        json!({ "state": state, "by": order.map(|order| order.by.as_str()), "until_unix": until })
    }

    /// Until the runtime ends: signals, the file, the time.
    pub(crate) async fn heed(self: Arc<Self>, signals: Signals, file: PathBuf) {
        let Signals { mut out, mut back } = signals;
        let mut clock = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = out.recv() => self.release(Asker::Signal, None),
                _ = back.recv() => self.resume(Asker::Signal),
                _ = clock.tick() => {
                    if !file.as_os_str().is_empty() {
                        let says = says_so(&file);
                        self.change(|standing| standing.file(says));
                    }
                }
            }
            self.look();
        }
    }
}

/// Whether the file's first word is `true`. A file that is not there says nothing.
fn says_so(file: &Path) -> bool {
    use std::io::Read;
    let mut text = String::new();
    let read = std::fs::File::open(file).and_then(|file| file.take(LONGEST_FILE).read_to_string(&mut text));
    read.is_ok() && text.split_whitespace().next().is_some_and(|word| word.trim_matches('"') == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c80_the_last_word_counts_and_an_end_is_kept() {
        let mut standing = Standing::default();
        let now = Instant::now();
        assert!(standing.wanted(now).is_none());
        let end = now + Duration::from_secs(10);
        standing.order = Some(Order { by: Asker::Command, end: Some(end) });
        assert!(standing.wanted(now).is_some());
        assert!(standing.wanted(end).is_none());
        standing.file(true);
        assert_eq!(standing.wanted(end).map(|order| order.by), Some(Asker::File));
    }

    #[test]
    fn c80_a_resume_by_hand_stands_until_the_file_changes_its_mind() {
        let release = Release::new(None);
        let wanted = || release.change(|standing| standing.wanted(Instant::now()).is_some()).unwrap_or(false);
        release.change(|standing| standing.file(true));
        assert!(wanted());
        release.resume(Asker::Command);
        release.change(|standing| standing.file(true));
        assert!(!wanted());
        release.change(|standing| standing.file(false));
        release.change(|standing| standing.file(true));
        assert!(wanted());
    }

    #[test]
    fn a_file_says_it_by_its_first_word() -> std::io::Result<()> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("released");
        assert!(!says_so(&file));
        for (text, says) in
            [("true\n", true), ("\"true\"", true), ("", false), ("false\n", false), ("truer", false)]
        {
            std::fs::write(&file, text)?;
            assert_eq!(says_so(&file), says, "{text:?}");
        }
        std::fs::write(&file, [0xff; 16])?;
        assert!(!says_so(&file));
        Ok(())
    }
}
