//! Owns the device as the agent sees it: the latest sample, its supervisor and its polling thread.
//! Refuses to wait for NVML: a call that does not come back costs one thread, and is itself a finding.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use cotenant_model::{Absence, DeviceSample, GpuSample};

use crate::alarms::{Ears, Hearing, Listener, Rung};
use crate::cadence::MAX_REST;
use crate::config::NvmlConfig;
use crate::desk::{Board, Desk, Done, Order, Wish};
use crate::nvml::{Bell, Fault, Nvml, Opener};
use crate::poll::{Memory, forget, poll};
use crate::raw;
use crate::state::{Outcome, State, next_state};

const OPEN: &str = "nvmlInit_v2";
/// How much further apart dear figures go before memory and processes do.
const FIGURES_FIRST: u32 = 4;
const EVENTS: &str = "nvmlEventSetWait_v2";
const CLOSE: &str = "nvmlShutdown";

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("could not start the thread {name}; raise the process limit (`ulimit -u`, pids.max)")]
    Spawn { name: &'static str, source: std::io::Error },
    #[error("NVML's handles are still held: {function} has not come back; they are dropped when it does")]
    StillHeld { function: &'static str },
}

/// NVML on this node.
#[derive(Debug)]
pub struct Device {
    desk: Arc<Desk>,
    board: Arc<Published>,
    deadline: Duration,
    restraint: Arc<AtomicU32>,
    listener: Arc<Listener>,
}

#[derive(Debug)]
struct Published {
    sample: ArcSwap<DeviceSample>,
    health: ArcSwap<Health>,
}

/// How NVML is doing. Never a reason to call the agent dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    pub condition: Condition,
    /// From the end of the last poll to the next, after stretching and back-off.
    pub delay: Duration,
    /// When the last poll that ran to its end began, since the agent's start.
    pub completed: Option<Duration>,
    /// How often the library was opened.
    pub opened: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Starting,
    Answering,
    /// Answers are missing, and the library is opened anew with back-off.
    Degraded(Absence),
    /// A call has not come back.
    Hung {
        function: &'static str,
        since: Duration,
    },
    Released,
}

impl Health {
    pub const fn is_hung(&self) -> bool {
        matches!(self.condition, Condition::Hung { .. })
    }
}

impl Device {
    /// Starts polling the real NVML.
    pub fn spawn(config: NvmlConfig, started: Instant) -> Result<Self, DeviceError> {
        let (library, events) = (config.library.clone(), config.library.clone());
        let opener = Box::new(move || raw::open(library.as_deref()));
        let bell: Bell = Box::new(move || raw::alarms::open(events.as_deref()));
        Self::spawn_with(config, started, opener, bell)
    }

    /// Starts polling whatever `opener` gives, and listening to whatever `bell` gives once a poll was answered.
    pub fn spawn_with(
        config: NvmlConfig,
        started: Instant,
        opener: Opener,
        bell: Bell,
    ) -> Result<Self, DeviceError> {
        let desk = Arc::new(Desk::new(started));
        let deadline = config.deadline;
        let interval = config.effective_interval();
        let health = Health { condition: Condition::Starting, delay: interval, completed: None, opened: 0 };
        let board = Arc::new(Published {
            sample: ArcSwap::from_pointee(DeviceSample::absent(started.elapsed(), Absence::NotYet)),
            health: ArcSwap::from_pointee(health),
        });
        let restraint = Arc::new(AtomicU32::new(1));
        let listener = Arc::new(Listener::new());
        let device = Self {
            listener: Arc::clone(&listener),
            desk: Arc::clone(&desk),
            board: Arc::clone(&board),
            deadline,
            restraint: Arc::clone(&restraint),
        };
        let (mine, mine_too) = (Arc::clone(&desk), Arc::clone(&restraint));
        start("cotenant-nvml", move || {
            let memory = Memory::default();
            Worker { desk: mine, config, opener, nvml: None, opened: 0, memory, restraint: mine_too }.run();
        })?;
        let health = Arc::clone(&board);
        let ears = Ears {
            desk: Arc::clone(&desk),
            listener,
            bell,
            deadline,
            answered: Box::new(move || health.health.load().condition == Condition::Answering),
        };
        start("cotenant-nvml-events", move || ears.run())?;
        let supervisor = Supervisor {
            desk,
            board,
            deadline,
            interval,
            restraint,
            state: State { reopen: true, ..State::default() },
            due: Instant::now(),
            missed: None,
        };
        start("cotenant-nvml-watch", move || supervisor.run())?;
        Ok(device)
    }

    /// Asks this many times as seldom as declared, though never less than every ten minutes: whoever shares the driver's
    /// locks pays for each call. Figures that are not of memory give way first, polls as a whole from four times on.
    pub fn hold_back(&self, times: u32) {
        self.restraint.store(times.max(1), Ordering::Relaxed);
    }

    /// The latest sample. Never blocks, and never is a poll.
    pub fn latest(&self) -> Arc<DeviceSample> {
        self.board.sample.load_full()
    }

    pub fn health(&self) -> Arc<Health> {
        self.board.health.load_full()
    }

    /// Faults that NVML told of since the last time, oldest first.
    pub fn faults(&self) -> Vec<Rung> {
        self.listener.fetch()
    }

    /// Faults that found no room.
    pub fn faults_dropped(&self) -> u64 {
        self.listener.dropped()
    }

    pub fn hearing(&self) -> Hearing {
        self.listener.hearing()
    }

    /// Whether nothing of the driver is held, by the polls or by whoever waits for faults.
    pub fn is_released(&self) -> bool {
        self.health().condition == Condition::Released && !self.listener.is_open()
    }

    /// Has every handle dropped and the library unloaded, so that the driver can be replaced; [`Device::is_released`] says when.
    pub fn ask_release(&self) {
        self.desk.board().wish = Wish::Release;
        self.desk.changed.notify_all();
    }

    /// As [`Device::ask_release`], and waits for it until the deadline.
    pub fn release(&self) -> Result<(), DeviceError> {
        let until = Instant::now() + self.deadline;
        self.ask_release();
        let mut board = self.desk.board();
        while !board.released || self.listener.is_open() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let function = match board.in_flight {
                    Some((function, _)) => function,
                    None if board.released => EVENTS,
                    None => "the poll",
                };
                return Err(DeviceError::StillHeld { function });
            }
            board = self.desk.wait(board, left);
        }
        Ok(())
    }

    /// Polls again after [`Device::release`].
    pub fn resume(&self) {
        self.desk.board().wish = Wish::Run;
        self.desk.changed.notify_all();
    }
}

impl Drop for Device {
    /// Tells the threads to end. Does not wait: one of them may never come back from the driver.
    fn drop(&mut self) {
        self.desk.board().wish = Wish::Stop;
        self.desk.changed.notify_all();
    }
}

fn start(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<(), DeviceError> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).map_err(|source| DeviceError::Spawn { name, source })
}

/// The thread that calls NVML, and nothing else does.
struct Worker {
    desk: Arc<Desk>,
    config: NvmlConfig,
    opener: Opener,
    nvml: Option<Box<dyn Nvml>>,
    opened: u64,
    memory: Memory,
    restraint: Arc<AtomicU32>,
}

impl Worker {
    fn run(mut self) {
        loop {
            let done = match self.desk.next_order() {
                Order::Stop => return self.close(),
                Order::Release => {
                    self.close();
                    Done::Released
                }
                Order::Poll { reopen } => {
                    let (outcome, inside) = self.poll(reopen);
                    Done::Poll { outcome, inside, opened: self.opened }
                }
            };
            let mut board = self.desk.board();
            board.done = Some(done);
            board.busy = false;
            drop(board);
            self.desk.changed.notify_all();
        }
    }

    fn close(&mut self) {
        if let Some(nvml) = self.nvml.take() {
            // Runs even when the order was given up: the handles must go.
            self.desk.board().in_flight = Some((CLOSE, Instant::now()));
            drop(nvml);
            self.desk.board().in_flight = None;
        }
    }

    /// Opening is not counted as time inside: it is backed off by itself and would silence the first polls.
    fn poll(&mut self, reopen: bool) -> (Outcome, Duration) {
        if reopen {
            self.close();
        }
        if self.nvml.is_none() {
            match self.desk.call(OPEN, &mut Duration::default(), || (self.opener)()) {
                Ok(nvml) => {
                    self.opened += 1;
                    self.memory.opened();
                    self.nvml = Some(nvml);
                }
                Err(Fault::Abandoned) => return (Outcome::Abandoned, Duration::ZERO),
                Err(fault) => {
                    let reason = fault.absence();
                    tracing::debug!(%fault, "NVML did not open");
                    self.desk.draft(|draft| {
                        draft.library = Err(reason);
                        draft.gpus.iter_mut().for_each(|gpu| *gpu = forget(gpu, reason));
                    });
                    return (Outcome::OpenFailed(reason), Duration::ZERO);
                }
            }
        }
        match self.nvml.as_deref() {
            Some(nvml) => {
                let held_back = self.restraint.load(Ordering::Relaxed);
                poll(nvml, &self.desk, &self.config, &mut self.memory, held_back)
            }
            None => (Outcome::OpenFailed(Absence::Failed), Duration::ZERO),
        }
    }
}

/// The thread that orders polls, notices the call that does not come back, and publishes.
struct Supervisor {
    desk: Arc<Desk>,
    board: Arc<Published>,
    deadline: Duration,
    interval: Duration,
    restraint: Arc<AtomicU32>,
    state: State,
    due: Instant,
    /// While a call hangs: when the next poll would have been.
    missed: Option<Instant>,
}

impl Supervisor {
    fn run(mut self) {
        let desk = Arc::clone(&self.desk);
        let mut board = desk.board();
        loop {
            let now = Instant::now();
            if let Some(done) = board.done.take() {
                self.finish(&mut board, done, now);
            }
            let wake = if board.busy {
                self.watch(&mut board, now)
            } else if board.wish == Wish::Stop {
                board.order = Some(Order::Stop);
                self.desk.changed.notify_all();
                return;
            } else {
                self.order(&mut board, now)
            };
            board = desk.wait(board, wake.saturating_duration_since(Instant::now()));
        }
    }

    /// Idle: gives the next order when it is time for one; says when to look again.
    fn order(&mut self, board: &mut Board, now: Instant) -> Instant {
        let order = match (board.wish, board.released) {
            (Wish::Release, true) => return now + self.interval,
            (Wish::Release, false) => Order::Release,
            (_, true) => {
                board.released = false;
                self.due = now;
                self.state = State { reopen: true, ..State::default() };
                Order::Poll { reopen: true }
            }
            (_, false) if now >= self.due => Order::Poll { reopen: self.state.reopen },
            (_, false) => return self.due,
        };
        if matches!(order, Order::Poll { .. }) {
            board.draft.taken = self.desk.started.elapsed();
            board.draft.library = Err(Absence::NotYet);
            board.draft.gpus.iter_mut().for_each(|gpu| *gpu = forget(gpu, Absence::NotYet));
        }
        board.abandoned = false;
        board.busy = true;
        board.order = Some(order);
        self.desk.changed.notify_all();
        now + self.deadline
    }

    /// Busy: gives the order up when a call is past its deadline; says when to look again.
    fn watch(&mut self, board: &mut Board, now: Instant) -> Instant {
        // A call that begins after this look has its whole deadline before it.
        let Some((function, since)) = board.in_flight else { return now + self.deadline };
        let late = since + self.deadline;
        if now < late {
            return late;
        }
        let missed = self.missed.unwrap_or(late);
        if now < missed {
            return missed;
        }
        if !board.abandoned {
            tracing::warn!(function, deadline = ?self.deadline, "an NVML call passed its deadline");
        }
        // Polls that fall into the hang are timeouts too, of the call they would have waited for.
        board.abandoned = true;
        board.costs.timed_out(function);
        let gpus = board.draft.gpus.iter().map(timed_out).collect();
        let sample = DeviceSample {
            taken: board.draft.taken,
            library: Err(Absence::Timeout),
            gpus,
            calls: board.costs.all(),
        };
        self.publish(sample);
        let since = since.saturating_duration_since(self.desk.started);
        self.health(|health| health.condition = Condition::Hung { function, since });
        let next = now + self.interval;
        self.missed = Some(next);
        next
    }

    /// The worker came back: publishes what it brought and plans the next order.
    fn finish(&mut self, board: &mut Board, done: Done, now: Instant) {
        self.missed = None;
        let (outcome, inside, opened) = match done {
            Done::Poll { outcome, inside, opened } => (outcome, inside, opened),
            Done::Released => {
                board.released = true;
                self.desk.changed.notify_all();
                let gpus = board.draft.gpus.iter().map(|gpu| forget(gpu, Absence::Released)).collect();
                let taken = self.desk.started.elapsed();
                let library = Err(Absence::Released);
                self.publish(DeviceSample { taken, library, gpus, calls: board.costs.all() });
                self.health(|health| health.condition = Condition::Released);
                return;
            }
        };
        self.state = next_state(self.state, outcome, inside, self.interval);
        let held_back = self
            .interval
            .saturating_mul(self.restraint.load(Ordering::Relaxed) / FIGURES_FIRST)
            .min(MAX_REST.max(self.interval));
        let delay = self.state.delay.max(if outcome == Outcome::Polled { held_back } else { Duration::ZERO });
        self.due = now + delay;
        self.health(|health| {
            health.delay = delay;
            health.opened = opened;
        });
        if outcome == Outcome::Abandoned {
            // What is published already says so. A hang while opening leaves nothing open.
            return;
        }
        let draft = &board.draft;
        let (condition, completed) = match outcome {
            Outcome::Trouble(reason) => (Condition::Degraded(reason), Some(draft.taken)),
            Outcome::OpenFailed(reason) => (Condition::Degraded(reason), None),
            Outcome::Polled | Outcome::Abandoned => (Condition::Answering, Some(draft.taken)),
        };
        self.health(|health| {
            health.condition = condition;
            health.completed = completed.or(health.completed);
        });
        let (library, gpus) = (draft.library.clone(), draft.gpus.clone());
        self.publish(DeviceSample { taken: draft.taken, library, gpus, calls: board.costs.all() });
    }

    fn publish(&self, sample: DeviceSample) {
        self.board.sample.store(Arc::new(sample));
    }

    fn health(&self, change: impl FnOnce(&mut Health)) {
        let mut health = Health::clone(&self.board.health.load());
        change(&mut health);
        self.board.health.store(Arc::new(health));
    }
}

/// What was not read when the poll was given up, timed out.
fn timed_out(gpu: &GpuSample) -> GpuSample {
    fn late<T: Clone>(reading: &Result<T, Absence>) -> Result<T, Absence> {
        match reading {
            Err(Absence::NotYet) => Err(Absence::Timeout),
            known => known.clone(),
        }
    }
    GpuSample {
        id: gpu.id.clone(),
        index: gpu.index,
        name: gpu.name.clone(),
        pci: gpu.pci.clone(),
        parent: gpu.parent.clone(),
        memory: late(&gpu.memory),
        processes: late(&gpu.processes),
        process_utilization: late(&gpu.process_utilization),
        utilization: late(&gpu.utilization),
        memory_bandwidth_utilization: late(&gpu.memory_bandwidth_utilization),
        power_watts: late(&gpu.power_watts),
        energy_joules: late(&gpu.energy_joules),
        temperature_celsius: late(&gpu.temperature_celsius),
        pcie_transmit_bytes_per_second: late(&gpu.pcie_transmit_bytes_per_second),
        pcie_receive_bytes_per_second: late(&gpu.pcie_receive_bytes_per_second),
        clocks_event_reasons: late(&gpu.clocks_event_reasons),
        ecc_corrected: late(&gpu.ecc_corrected),
        ecc_uncorrected: late(&gpu.ecc_uncorrected),
        mig_enabled: late(&gpu.mig_enabled),
        compute_mode: late(&gpu.compute_mode),
        read: gpu.read.clone(),
    }
}
