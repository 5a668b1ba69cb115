//! Owns what a thread last heard from its source, for those who never wait for it.
//! Refuses half an answer: what is read was told whole.

use std::{sync::Arc, thread::JoinHandle, time::Duration};

use arc_swap::ArcSwap;

/// Something that a thread asks for again and again.
pub trait Asked {
    /// How often it has been asked for, whatever came of it.
    fn rounds(&self) -> u64;
}

/// The thread, and what it told last.
#[derive(Debug)]
pub struct Heard<T> {
    latest: Arc<ArcSwap<T>>,
    thread: JoinHandle<()>,
}

impl<T: Asked> Heard<T> {
    pub(crate) fn new(latest: Arc<ArcSwap<T>>, thread: JoinHandle<()>) -> Self {
        Self { latest, thread }
    }

    pub fn latest(&self) -> Arc<T> {
        self.latest.load_full()
    }

    /// What the first round brings; for commands that ask once. Each source ends a round at its own deadline.
    pub fn first(&self) -> Arc<T> {
        while self.latest.load().rounds() == 0 && !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.latest()
    }

    pub(crate) fn share(&self) -> Arc<ArcSwap<T>> {
        Arc::clone(&self.latest)
    }

    pub(crate) fn wake(&self) {
        self.thread.thread().unpark();
    }
}
