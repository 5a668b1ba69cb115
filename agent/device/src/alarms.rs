//! Owns NVML's events of faults: the thread that waits for them, and what it heard since somebody last asked.
//! Refuses to say what a fault means, and to wait for anybody: what finds no room is counted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cotenant_model::{Absence, GpuId};

use crate::desk::{Desk, Wish};
use crate::nvml::{Alarm, Alarms, Answer, Bell, Fault};

/// Faults that wait to be fetched. A GPU in trouble tells some tens of them.
const ROOM: usize = 256;
/// One wait. Handles are let go between two, so this is well below any deadline for that.
const WAIT: Duration = Duration::from_millis(400);
/// After a failure, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_mins(5);
/// Between two looks at whether there is anything to do.
const IDLE: Duration = Duration::from_millis(50);

/// A fault as NVML told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rung {
    /// When this process heard of it.
    pub at: Instant,
    pub alarm: Alarm,
}

/// How listening for faults goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hearing {
    /// NVML has not answered a poll yet, so it is not asked for events either.
    NotYet,
    Listening {
        gpus: usize,
    },
    Failed(Absence),
    /// A call has not come back.
    Hung {
        since: Duration,
    },
    Released,
}

#[derive(Debug)]
struct Ear {
    heard: VecDeque<Rung>,
    hearing: Hearing,
    /// A call into NVML under way, and when it must be back.
    until: Option<Instant>,
    /// This thread has NVML open.
    open: bool,
}

/// What was heard, shared by the thread and whoever asks.
#[derive(Debug)]
pub(crate) struct Listener {
    ear: Mutex<Ear>,
    dropped: AtomicU64,
}

impl Listener {
    pub(crate) fn new() -> Self {
        let ear = Ear { heard: VecDeque::new(), hearing: Hearing::NotYet, until: None, open: false };
        Self { ear: Mutex::new(ear), dropped: AtomicU64::new(0) }
    }

    fn ear(&self) -> MutexGuard<'_, Ear> {
        self.ear.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fetch(&self) -> Vec<Rung> {
        self.ear().heard.drain(..).collect()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(crate) fn hearing(&self) -> Hearing {
        let ear = self.ear();
        match ear.until {
            Some(until) if Instant::now() > until => Hearing::Hung { since: until.elapsed() },
            _ => ear.hearing,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.ear().open
    }

    fn set(&self, hearing: Hearing) {
        self.ear().hearing = hearing;
    }

    fn hear(&self, alarm: Alarm) {
        let mut ear = self.ear();
        if ear.heard.len() >= ROOM {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        ear.heard.push_back(Rung { at: Instant::now(), alarm });
    }

    /// A call into NVML, with the time by which it must be back.
    fn call<T>(&self, deadline: Duration, ask: impl FnOnce() -> T) -> T {
        self.ear().until = Some(Instant::now() + deadline);
        let answer = ask();
        self.ear().until = None;
        answer
    }
}

/// The thread.
pub(crate) struct Ears {
    pub(crate) desk: Arc<Desk>,
    pub(crate) listener: Arc<Listener>,
    pub(crate) bell: Bell,
    pub(crate) deadline: Duration,
    /// Whether a poll has been answered: NVML is there, and open.
    pub(crate) answered: Box<dyn Fn() -> bool + Send>,
}

impl Ears {
    pub(crate) fn run(self) {
        let mut alarms: Option<Box<dyn Alarms>> = None;
        let mut pause = FIRST_PAUSE;
        let mut not_before = Instant::now();
        loop {
            let wish = self.desk.board().wish;
            if wish != Wish::Run {
                self.close(&mut alarms);
                if wish == Wish::Stop {
                    return;
                }
                self.listener.set(Hearing::Released);
                thread::sleep(IDLE);
                continue;
            }
            let Some(open) = &mut alarms else {
                if !(self.answered)() || Instant::now() < not_before {
                    thread::sleep(IDLE);
                    continue;
                }
                match self.open() {
                    Ok(opened) => alarms = Some(opened),
                    Err(fault) => {
                        not_before = Instant::now() + pause;
                        pause = (pause * 2).min(LAST_PAUSE);
                        self.failed(&fault);
                    }
                }
                continue;
            };
            // The library is let go of first: it comes back before this call's time is up, or it hangs.
            let wait = WAIT.min(self.deadline / 4);
            let heard = self.listener.call(wait + self.deadline, || open.wait(wait));
            match heard {
                Ok(alarm) => {
                    pause = FIRST_PAUSE;
                    if let Some(alarm) = alarm {
                        self.listener.hear(alarm);
                    }
                }
                Err(fault) => {
                    self.close(&mut alarms);
                    not_before = Instant::now() + pause;
                    pause = (pause * 2).min(LAST_PAUSE);
                    self.failed(&fault);
                }
            }
        }
    }

    fn open(&self) -> Answer<Box<dyn Alarms>> {
        self.listener.ear().open = true;
        let opened = self.listener.call(self.deadline, || (self.bell)());
        match &opened {
            Ok(alarms) => self.listener.set(Hearing::Listening { gpus: alarms.watched() }),
            Err(_) => self.listener.ear().open = false,
        }
        opened
    }

    fn close(&self, alarms: &mut Option<Box<dyn Alarms>>) {
        if let Some(open) = alarms.take() {
            self.listener.call(self.deadline, || drop(open));
        }
        self.listener.ear().open = false;
        // Whoever waits for the handles is told.
        self.desk.changed.notify_all();
    }

    fn failed(&self, fault: &Fault) {
        tracing::debug!(%fault, "NVML's events are not heard");
        self.listener.set(Hearing::Failed(fault.absence()));
    }
}

/// Which GPU an event's handle is, from those that were registered.
pub(crate) fn gpu_of<H: PartialEq + Copy>(registered: &[(H, GpuId)], handle: H) -> Option<GpuId> {
    registered.iter().find(|(known, _)| *known == handle).map(|(_, id)| id.clone())
}
