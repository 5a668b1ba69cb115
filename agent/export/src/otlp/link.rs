//! Owns one signal's way to its receiver: when to try, when to wait, when to give up, and the account of it.
//! Refuses to try a request that is older than half an hour again, and to log the same trouble twice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use tracing::{info, warn};

use super::client::{Client, Outcome};
use super::settings::{Pauses, Signal};
use super::tally::{Dropped, Failure, Tally};

/// What could not be delivered for this long is given up.
const MAX_AGE: Duration = Duration::from_mins(30);

/// A message and what is in it.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) body: Bytes,
    pub(super) items: u64,
    pub(super) born: Instant,
}

/// What one attempt led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Done,
    /// Dropped and counted: it will not be taken.
    GivenUp,
    /// Not before this long from now.
    Wait(Duration),
}

/// When the agent stops, and until when what is left may be sent.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    signal: watch::Receiver<Option<Instant>>,
}

impl Stop {
    pub(super) const fn new(signal: watch::Receiver<Option<Instant>>) -> Self {
        Self { signal }
    }

    /// A sender that was dropped leaves no time at all.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let asked = *self.signal.borrow();
        asked.or_else(|| self.signal.has_changed().is_err().then(Instant::now))
    }

    /// Comes back when the agent stops, also when nobody is left who could say so.
    pub(super) async fn asked(&mut self) {
        let _ = self.signal.wait_for(Option::is_some).await;
    }

    /// Comes back when there is no time left, never while nobody has asked for a stop.
    async fn over(mut self) {
        self.asked().await;
        match self.deadline() {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => std::future::pending().await,
        }
    }
}

#[derive(Debug)]
pub(super) struct Link {
    signal: Signal,
    client: Client,
    pub(super) tally: Arc<Tally>,
    pauses: Pauses,
    failed: u32,
    /// What a receiver complained of last.
    complaint: String,
    random: SystemRandom,
}

impl Link {
    pub(super) fn new(signal: Signal, client: Client, tally: Arc<Tally>, pauses: Pauses) -> Self {
        Self {
            signal,
            client,
            tally,
            pauses,
            failed: 0,
            complaint: String::new(),
            random: SystemRandom::new(),
        }
    }

    /// Tries until it is delivered or given up. While the agent stops there is one try.
    pub(super) async fn deliver(&mut self, parcel: &Parcel, stop: &mut Stop) {
        loop {
            let Step::Wait(pause) = self.attempt(parcel, stop).await else { return };
            if stop.deadline().is_some() {
                self.tally.lose(Dropped::Stopped, parcel.items);
                return;
            }
            // Also for a request that is given up then: the next one must not come sooner.
            tokio::select! { () = tokio::time::sleep(pause) => {}, () = stop.asked() => {} }
            if parcel.born.elapsed() > MAX_AGE {
                self.tally.lose(Dropped::TooOld, parcel.items);
                return;
            }
        }
    }

    pub(super) async fn attempt(&mut self, parcel: &Parcel, stop: &Stop) -> Step {
        let outcome = match self.renewed() {
            Ok(()) => tokio::select! {
                outcome = self.client.attempt(&parcel.body) => outcome,
                () = stop.clone().over() => Outcome::Retry {
                    failure: Failure::Timeout,
                    after: None,
                    words: "the agent stopped first".to_owned(),
                },
            },
            Err(words) => Outcome::Retry { failure: Failure::Tls, after: None, words },
        };
        match outcome {
            Outcome::Accepted { rejected, words } => {
                let rejected = rejected.min(parcel.items);
                self.tally.export(parcel.items - rejected);
                self.tally.lose(Dropped::Rejected, rejected);
                self.recovered();
                // A receiver may also have advice without rejecting anything.
                self.complain(rejected, words);
                Step::Done
            }
            Outcome::Refused { words } => {
                self.tally.fail(Failure::Refused);
                self.tally.lose(Dropped::Refused, parcel.items);
                self.complain(parcel.items, words);
                Step::GivenUp
            }
            Outcome::Retry { failure, after, words } => {
                self.tally.fail(failure);
                if self.failed == 0 {
                    warn!(
                        signal = self.signal.as_str(),
                        endpoint = self.client.place(),
                        reason = failure.as_str(),
                        "OTLP is not delivered, tried again from now on without a word: {words}"
                    );
                }
                let pause = self.pause();
                self.failed = self.failed.saturating_add(1);
                Step::Wait(after.map_or(pause, |after| after.max(self.pauses.first.min(pause))))
            }
        }
    }

    fn renewed(&mut self) -> Result<(), String> {
        if self.failed == 0 {
            return Ok(());
        }
        self.client.refresh().map_err(|error| error.to_string())
    }

    fn recovered(&mut self) {
        if self.failed > 0 {
            info!(signal = self.signal.as_str(), attempts = self.failed, "OTLP is delivered again");
        }
        self.failed = 0;
    }

    fn complain(&mut self, items: u64, words: String) {
        if !words.is_empty() && words != self.complaint {
            warn!(signal = self.signal.as_str(), items, "the OTLP receiver did not take everything: {words}");
            self.complaint = words;
        }
    }

    /// Doubles with each failure up to the cap; of that, half is fixed and half is chance, so that the agents of a
    /// fleet do not come back in one moment.
    fn pause(&self) -> Duration {
        let full = self.pauses.first.saturating_mul(1 << self.failed.min(16)).min(self.pauses.most);
        let mut chance = [0; 4];
        let chance = match self.random.fill(&mut chance) {
            Ok(()) => f64::from(u32::from_le_bytes(chance)) / f64::from(u32::MAX),
            Err(_) => 1.0,
        };
        full.mul_f64(0.5 + chance / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::otlp::settings::{Settings, Wishes};

    #[test]
    fn c112_pauses_double_to_the_cap_and_half_of_each_is_chance() {
        let settings = Settings::resolve(&Wishes::default(), &|_| None).unwrap();
        let client = Client::new(Signal::Logs, settings.targets[&Signal::Logs].clone()).unwrap();
        let pauses = Pauses { first: Duration::from_secs(1), most: Duration::from_secs(30) };
        let mut link = Link::new(Signal::Logs, client, Arc::new(Tally::new(Signal::Logs)), pauses);
        for (failed, seconds) in [(0, 1.0), (1, 2.0), (4, 16.0), (5, 30.0), (1000, 30.0)] {
            link.failed = failed;
            let drawn: Vec<f64> = (0..64).map(|_| link.pause().as_secs_f64()).collect();
            assert!(
                drawn.iter().all(|pause| (seconds / 2.0..=seconds).contains(pause)),
                "{failed}: {drawn:?}"
            );
            let (least, most) = drawn
                .iter()
                .fold((f64::MAX, 0.0_f64), |(least, most), pause| (least.min(*pause), most.max(*pause)));
            assert!(most - least > seconds / 8.0, "{failed}: no chance in {drawn:?}");
        }
    }
}
