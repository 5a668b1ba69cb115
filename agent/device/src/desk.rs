//! Owns what the polling thread and its supervisor tell each other: the order, the call in flight, the draft.
//! Refuses to be held during an NVML call: every lock here is for a few stores.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cotenant_model::{Absence, GpuSample, Reading, device::LibraryFacts};

use crate::costs::Costs;
use crate::nvml::{Answer, Fault};
use crate::state::Outcome;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Poll { reopen: bool },
    Release,
    Stop,
}

/// How an order ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Poll { outcome: Outcome, inside: Duration, opened: u64 },
    Released,
}

/// One poll as far as it got.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) taken: Duration,
    pub(crate) library: Reading<LibraryFacts>,
    pub(crate) gpus: Vec<GpuSample>,
}

#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) order: Option<Order>,
    /// The worker is on an order.
    pub(crate) busy: bool,
    pub(crate) done: Option<Done>,
    pub(crate) in_flight: Option<(&'static str, Instant)>,
    /// The supervisor gave the current order up: no further call is made for it.
    pub(crate) abandoned: bool,
    pub(crate) draft: Draft,
    pub(crate) costs: Costs,
    pub(crate) wish: Wish,
    pub(crate) released: bool,
}

/// What the owner of the device wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Run,
    Release,
    Stop,
}

#[derive(Debug)]
pub(crate) struct Desk {
    board: Mutex<Board>,
    pub(crate) changed: Condvar,
    pub(crate) started: Instant,
}

impl Desk {
    pub(crate) fn new(started: Instant) -> Self {
        let draft = Draft { taken: Duration::ZERO, library: Err(Absence::NotYet), gpus: Vec::new() };
        let board = Board {
            order: None,
            busy: false,
            done: None,
            in_flight: None,
            abandoned: false,
            draft,
            costs: Costs::default(),
            wish: Wish::Run,
            released: false,
        };
        Self { board: Mutex::new(board), changed: Condvar::new(), started }
    }

    /// The board. A panic elsewhere does not make its plain values wrong.
    pub(crate) fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait<'a>(&self, board: MutexGuard<'a, Board>, at_most: Duration) -> MutexGuard<'a, Board> {
        self.changed.wait_timeout(board, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Worker: the next order.
    pub(crate) fn next_order(&self) -> Order {
        let mut board = self.board();
        loop {
            if let Some(order) = board.order.take() {
                return order;
            }
            board = self.changed.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Worker: one NVML call, timed, and refused once the order was given up.
    pub(crate) fn call<T>(
        &self,
        function: &'static str,
        spent: &mut Duration,
        ask: impl FnOnce() -> Answer<T>,
    ) -> Answer<T> {
        let begun = Instant::now();
        {
            let mut board = self.board();
            if board.abandoned {
                return Err(Fault::Abandoned);
            }
            board.in_flight = Some((function, begun));
        }
        let answer = ask();
        let took = begun.elapsed();
        let mut board = self.board();
        board.in_flight = None;
        // A missing symbol is no call.
        if !matches!(answer, Err(Fault::SymbolMissing)) {
            let error = answer.as_ref().is_err_and(Fault::is_error);
            board.costs.returned(function, took, error);
            *spent += took;
        }
        if board.abandoned { Err(Fault::Abandoned) } else { answer }
    }

    /// Worker: changes the draft, unless the poll was given up.
    pub(crate) fn draft<T>(&self, change: impl FnOnce(&mut Draft) -> T) -> T {
        change(&mut self.board().draft)
    }
}
