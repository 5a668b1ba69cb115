//! Owns what waits to be sent: bounded in items and bytes, the oldest goes first when there is no room.
//! Refuses to make a producer wait.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::Notify;

use super::settings::Bounds;
use super::tally::{Dropped, Tally};

/// One thing in the queue.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) thing: T,
    /// Data points, spans or log records in it.
    pub(super) items: u64,
    pub(super) bytes: usize,
    pub(super) born: Instant,
}

#[derive(Debug)]
struct Waiting<T> {
    entries: VecDeque<Entry<T>>,
    items: u64,
    bytes: usize,
    closed: bool,
}

#[derive(Debug)]
pub(super) struct Queue<T> {
    waiting: Mutex<Waiting<T>>,
    bounds: Bounds,
    tally: Arc<Tally>,
    arrived: Notify,
}

impl<T> Queue<T> {
    pub(super) fn new(bounds: Bounds, tally: Arc<Tally>) -> Self {
        let waiting = Waiting { entries: VecDeque::new(), items: 0, bytes: 0, closed: false };
        Self { waiting: Mutex::new(waiting), bounds, tally, arrived: Notify::new() }
    }

    pub(super) fn push(&self, thing: T, items: u64, bytes: usize) {
        let Ok(mut waiting) = self.waiting.lock() else { return };
        if waiting.closed {
            self.tally.lose(Dropped::Stopped, items);
            return;
        }
        if bytes > self.bounds.bytes {
            self.tally.lose(Dropped::QueueFull, items);
            return;
        }
        while waiting.entries.len() >= self.bounds.items || waiting.bytes + bytes > self.bounds.bytes {
            let Some(oldest) = waiting.pop() else { break };
            self.tally.lose(Dropped::QueueFull, oldest.items);
        }
        waiting.entries.push_back(Entry { thing, items, bytes, born: Instant::now() });
        waiting.items += items;
        waiting.bytes += bytes;
        self.publish(&waiting);
        drop(waiting);
        self.arrived.notify_one();
    }

    /// The oldest things, as many as stay within both bounds; one at least when there is one.
    pub(super) fn fetch(&self, most: usize, bytes: usize) -> Vec<Entry<T>> {
        let Ok(mut waiting) = self.waiting.lock() else { return Vec::new() };
        let (mut entries, mut size) = (Vec::new(), 0);
        while let Some(next) = waiting.entries.front() {
            if !entries.is_empty() && (entries.len() >= most || size + next.bytes > bytes) {
                break;
            }
            let Some(entry) = waiting.pop() else { break };
            size += entry.bytes;
            entries.push(entry);
        }
        self.publish(&waiting);
        entries
    }

    /// From now on nothing is taken. What waits is dropped and counted.
    pub(super) fn close(&self) {
        let Ok(mut waiting) = self.waiting.lock() else { return };
        waiting.closed = true;
        self.tally.lose(Dropped::Stopped, waiting.items);
        *waiting = Waiting { entries: VecDeque::new(), items: 0, bytes: 0, closed: true };
        self.publish(&waiting);
    }

    pub(super) async fn arrival(&self) {
        self.arrived.notified().await;
    }

    fn publish(&self, waiting: &Waiting<T>) {
        self.tally.queued.store(waiting.items, Relaxed);
        self.tally.queued_bytes.store(waiting.bytes as u64, Relaxed);
    }
}

impl<T> Waiting<T> {
    fn pop(&mut self) -> Option<Entry<T>> {
        let entry = self.entries.pop_front()?;
        self.items -= entry.items;
        self.bytes -= entry.bytes;
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::otlp::settings::Signal;

    fn queue(items: usize, bytes: usize) -> (Queue<u32>, Arc<Tally>) {
        let tally = Arc::new(Tally::new(Signal::Logs));
        (Queue::new(Bounds { items, bytes }, Arc::clone(&tally)), tally)
    }

    fn dropped(tally: &Tally, reason: &str) -> u64 {
        tally.view().dropped.into_iter().find(|(name, _)| *name == reason).unwrap().1
    }

    #[test]
    fn c112_the_oldest_makes_room_and_is_counted() {
        let (queue, tally) = queue(3, 100);
        (0..5).for_each(|n| queue.push(n, 1, 10));
        assert_eq!(
            (dropped(&tally, "queue_full"), tally.view().queued, tally.view().queued_bytes),
            (2, 3, 30)
        );
        queue.push(5, 7, 85);
        assert_eq!((dropped(&tally, "queue_full"), tally.view().queued), (4, 8));
        let things: Vec<u32> = queue.fetch(9, 1000).into_iter().map(|entry| entry.thing).collect();
        assert_eq!(things, [4, 5]);
        assert_eq!((tally.view().queued, tally.view().queued_bytes), (0, 0));
    }

    #[test]
    fn what_is_larger_than_the_queue_does_not_empty_it() {
        let (queue, tally) = queue(3, 100);
        queue.push(1, 1, 10);
        queue.push(2, 4, 101);
        assert_eq!((dropped(&tally, "queue_full"), tally.view().queued), (4, 1));
    }

    #[test]
    fn a_fetch_keeps_to_both_bounds_and_gives_one_at_least() {
        let (queue, _) = queue(10, 1000);
        (0..5).for_each(|n| queue.push(n, 1, 60));
        assert_eq!(queue.fetch(10, 100).len(), 1);
        assert_eq!(queue.fetch(2, 1000).len(), 2);
        assert_eq!(queue.fetch(10, 10).len(), 1);
    }

    #[test]
    fn a_closed_queue_counts_what_was_in_it_and_what_still_comes() {
        let (queue, tally) = queue(10, 1000);
        queue.push(1, 2, 60);
        queue.close();
        queue.push(2, 3, 60);
        assert_eq!((dropped(&tally, "stopped"), tally.view().queued), (5, 0));
        assert!(queue.fetch(10, 1000).is_empty());
    }
}
