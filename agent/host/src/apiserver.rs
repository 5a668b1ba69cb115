//! Owns the watch of this node's pods at the API server: what they are called and labelled, heard on a thread of its own.
//! Refuses every other node's pods, to be waited for, and to forget what was heard once the server fails.

mod access;
mod call;
mod decode;
mod roster;

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use access::Access;
pub use access::AccessError;
use arc_swap::ArcSwap;
use call::{CallError, Door};
use decode::{Event, Lines};
use http::StatusCode;
use http_body_util::BodyExt;
pub use roster::{NoteKind, PodNote, Roster, Team, Wishes};
use tokio::sync::Notify;

use crate::{
    HostError,
    heard::{Asked, Heard},
    kubelet::chain,
};

/// Between two questions, before doubling; also when a watch ends at once.
const PAUSE: Duration = Duration::from_millis(500);
const MOST_PAUSE: Duration = Duration::from_secs(30);
/// A watch that lived this long was a good one.
const FIRM: Duration = Duration::from_secs(1);
/// How long the server is asked to keep a watch open, and as much again at random.
const LASTING: Duration = Duration::from_mins(5);
/// What a server may be late in ending it.
const MARGIN: Duration = Duration::from_secs(30);
const MAX_PAGES: usize = 64;

#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// `https://…`; empty: as the pod's environment says.
    pub server: String,
    /// A directory with `token` and `ca.crt`.
    pub credentials: PathBuf,
    /// This node's name; empty: as the pod's environment says.
    pub node: String,
    /// Of a connection, a page, and the beginning of a watch.
    pub deadline: Duration,
    pub wishes: Wishes,
}

impl ApiConfig {
    pub const CREDENTIALS: &'static str = "/var/run/secrets/kubernetes.io/serviceaccount";
    pub const DEADLINE: Duration = Duration::from_secs(10);
}

#[derive(Debug, thiserror::Error)]
pub enum PodWatchError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Thread(#[from] HostError),
}

/// The thread, and what it last heard.
#[derive(Debug)]
pub struct PodWatch {
    pub heard: Heard<Roster>,
    stop: Arc<(AtomicBool, Notify)>,
}

impl PodWatch {
    pub fn spawn(config: ApiConfig) -> Result<Self, PodWatchError> {
        let ApiConfig { server, credentials, node, deadline, wishes } = config;
        let access = Access::find(&server, &node, &credentials, |name| std::env::var(name).ok())?;
        let roster = Roster::new(wishes);
        let latest = Arc::new(ArcSwap::from_pointee(roster.clone()));
        let stop = Arc::new((AtomicBool::new(false), Notify::new()));
        let watcher = Watcher {
            access,
            deadline,
            door: None,
            version: None,
            opened: None,
            roster,
            latest: Arc::clone(&latest),
        };
        let failed = |source| HostError::Thread { what: "API watch", source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let asked = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("apiserver".to_owned())
            .spawn(move || runtime.block_on(watcher.run(&asked)))
            .map_err(failed)?;
        Ok(Self { heard: Heard::new(latest, thread), stop })
    }
}

impl Asked for Roster {
    fn rounds(&self) -> u64 {
        self.tries
    }
}

impl Drop for PodWatch {
    /// The thread ends by itself, and at once: nobody's exit waits for the server.
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::Relaxed);
        self.stop.1.notify_one();
    }
}

struct Watcher {
    access: Access,
    deadline: Duration,
    /// Made anew after a failure: the authority's file may have changed.
    door: Option<Door>,
    /// From where the watch goes on; `None` before the list.
    version: Option<String>,
    /// Since when the last watch was open.
    opened: Option<Instant>,
    roster: Roster,
    latest: Arc<ArcSwap<Roster>>,
}

impl Watcher {
    async fn run(mut self, stop: &(AtomicBool, Notify)) {
        let mut failures = 0;
        while !stop.0.load(Ordering::Relaxed) {
            self.opened = None;
            let ended = tokio::select! {
                ended = self.follow() => ended,
                () = stop.1.notified() => return,
            };
            let firm = self.opened.is_some_and(|since| since.elapsed() >= FIRM);
            failures = if firm { 0 } else { failures + 1 };
            let after = ended.as_ref().err().and_then(CallError::after);
            if let Err(error) = ended {
                self.fail(&error);
            }
            tokio::select! {
                () = tokio::time::sleep(pause(failures, after, chance())) => {}
                () = stop.1.notified() => return,
            }
        }
    }

    /// The list, if there is none to go on from, then the watch until it ends.
    async fn follow(&mut self) -> Result<(), CallError> {
        let door = match self.door.take() {
            Some(door) => door,
            None => Door::open(&self.access, self.deadline)?,
        };
        let version = match self.version.clone() {
            Some(version) => version,
            None => self.list(&door).await?,
        };
        let lasting = LASTING + LASTING.mul_f64(chance());
        let mut body = door.watch(&version, lasting).await?;
        self.hear(|roster| roster.watching = true);
        self.opened = Some(Instant::now());
        let end = tokio::time::Instant::now() + lasting + MARGIN;
        let mut lines = Lines::default();
        loop {
            let frame = match tokio::time::timeout_at(end, body.frame()).await {
                Err(_) => {
                    let server = self.access.server.clone();
                    return Err(CallError::Deadline { server, deadline: lasting + MARGIN });
                }
                Ok(None) => break,
                Ok(Some(frame)) => frame.map_err(|source| CallError::Cut(source.into()))?,
            };
            let Ok(data) = frame.into_data() else { continue };
            let events = lines.feed(&data)?.iter().map(|line| decode::event(line)).collect::<Vec<_>>();
            self.take(events)?;
        }
        self.door = Some(door);
        Ok(())
    }

    async fn list(&mut self, door: &Door) -> Result<String, CallError> {
        let (mut pods, mut more) = (Vec::new(), String::new());
        for _ in 0..MAX_PAGES {
            let mut page = decode::page(&door.page(&more).await?)?;
            pods.append(&mut page.pods);
            more = page.more;
            if more.is_empty() {
                self.version = Some(page.version.clone());
                self.hear(|roster| roster.hear_list(pods));
                return Ok(page.version);
            }
        }
        Err(CallError::Endless { pages: MAX_PAGES })
    }

    /// All that came together becomes known together.
    fn take(&mut self, events: Vec<Result<Event, decode::DecodeError>>) -> Result<(), CallError> {
        let mut heard = Vec::new();
        let mut ended = Ok(());
        for event in events {
            match event {
                Ok(Event::Error(code, _)) if code == StatusCode::GONE.as_u16() => {
                    ended = Err(CallError::Expired);
                }
                Ok(Event::Error(code, words)) => {
                    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                    ended = Err(CallError::Refused { status, words, after: None });
                }
                Ok(event) => heard.push(event),
                Err(error) => ended = Err(error.into()),
            }
            if ended.is_err() {
                break;
            }
        }
        let version = heard.iter().rev().find_map(|event| match event {
            Event::Is(pod) | Event::Gone(pod) => Some(&pod.resource_version),
            Event::Bookmark(version) => Some(version),
            Event::Error(..) | Event::Other => None,
        });
        if let Some(version) = version.filter(|version| !version.is_empty()) {
            self.version = Some(version.clone());
        }
        if !heard.is_empty() {
            self.hear(|roster| heard.into_iter().for_each(|event| roster.hear_event(event)));
        }
        ended
    }

    /// The server answered.
    fn hear(&mut self, change: impl FnOnce(&mut Roster)) {
        change(&mut self.roster);
        let source = &mut self.roster.source;
        source.answered = Some(Instant::now());
        if self.roster.watching {
            source.error = None;
            self.roster.remedy.clear();
        }
        self.roster.tries += 1;
        self.latest.store(Arc::new(self.roster.clone()));
    }

    fn fail(&mut self, error: &CallError) {
        if matches!(error, CallError::Expired | CallError::Decode(_)) || is_bad_version(error) {
            self.version = None;
        }
        self.roster.watching = false;
        self.roster.tries += 1;
        self.roster.source.failures += 1;
        self.roster.source.error = Some(chain(error));
        self.roster.remedy = error.remedy(&self.access);
        self.latest.store(Arc::new(self.roster.clone()));
    }
}

/// A server that was made anew knows nothing of the version of its predecessor.
fn is_bad_version(error: &CallError) -> bool {
    matches!(error, CallError::Refused { status: StatusCode::BAD_REQUEST | StatusCode::GATEWAY_TIMEOUT, .. })
}

/// `chance`: 0 to 1, so that a cluster's agents do not come back in step.
fn pause(failures: u32, after: Option<Duration>, chance: f64) -> Duration {
    let doubled = PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(MOST_PAUSE);
    let wanted = doubled.mul_f64(0.5 + chance / 2.0);
    after.map_or(wanted, |after| after + wanted)
}

fn chance() -> f64 {
    let random = RandomState::new().build_hasher().finish();
    f64::from(u32::try_from(random >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests;
