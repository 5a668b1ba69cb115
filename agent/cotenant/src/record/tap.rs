//! Owns who listens to the moments of this agent: a bounded queue of finished blocks each.
//! Refuses to wait for a listener: one that does not keep up is let go.

use std::sync::Mutex;

use cotenant_model::risk::{Forecaster, Moment};
use cotenant_recording::{Written, head, pack};
use hyper::body::Bytes;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tracing::warn;

/// Moments a block: what a crash costs.
const MOMENTS: usize = 10;
/// Blocks that a listener may be behind.
const BEHIND: usize = 16;
/// Recorders at the same time.
const LISTENERS: usize = 4;

#[derive(Debug, Default)]
pub(crate) struct Tap(Mutex<Vec<Listener>>);

#[derive(Debug)]
struct Listener {
    to: Sender<Bytes>,
    begun: bool,
    moments: Vec<Moment>,
}

impl Tap {
    /// A new listener; `None` when there are enough.
    pub(crate) fn listen(&self) -> Option<Receiver<Bytes>> {
        let mut listeners = self.0.lock().ok()?;
        listeners.retain(|listener| !listener.to.is_closed());
        if listeners.len() >= LISTENERS {
            return None;
        }
        let (to, from) = channel(BEHIND);
        listeners.push(Listener { to, begun: false, moments: Vec::with_capacity(MOMENTS) });
        Some(from)
    }

    /// Hands a moment on. `before` is what the forecaster knows without it.
    pub(crate) fn pass(&self, before: &Forecaster, moment: &Moment) {
        let Ok(mut listeners) = self.0.lock() else { return };
        listeners.retain_mut(|listener| listener.pass(before, moment));
    }
}

impl Listener {
    fn pass(&mut self, before: &Forecaster, moment: &Moment) -> bool {
        if !self.begun {
            self.begun = true;
            if !self.send(head()) || !self.block(&Written::Start(before)) {
                return false;
            }
        }
        self.moments.push(moment.clone());
        if self.moments.len() < MOMENTS {
            return !self.to.is_closed();
        }
        let moments = std::mem::take(&mut self.moments);
        self.block(&Written::Moments(&moments))
    }

    fn block(&mut self, block: &Written<'_>) -> bool {
        match pack(block) {
            Ok(bytes) => self.send(bytes),
            Err(error) => {
                warn!(%error, "a recording ends: a block could not be made");
                false
            }
        }
    }

    fn send(&self, bytes: Vec<u8>) -> bool {
        let sent = self.to.try_send(bytes.into());
        if let Err(tokio::sync::mpsc::error::TrySendError::Full(_)) = sent {
            warn!("a recording ends: its reader does not keep up");
        }
        sent.is_ok()
    }
}
