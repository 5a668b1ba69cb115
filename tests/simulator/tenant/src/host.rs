//! Owns the steps that need no driver: its locks taken from outside, host memory, sudden death, short pauses.
//! Refuses to give back what it eats.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use cotenant_sim_state::{LockName, Mode, Node};

use crate::script::Step;

/// What is eaten between two looks at how much it was.
const BITE: u64 = 4 << 20;

fn node() -> Result<&'static Node, String> {
    static NODE: OnceLock<Node> = OnceLock::new();
    if let Some(node) = NODE.get() {
        return Ok(node);
    }
    let node = Node::open().map_err(|error| error.to_string())?;
    Ok(NODE.get_or_init(|| node))
}

pub(crate) fn one(step: &Step) -> Result<(), String> {
    match step.word.as_str() {
        "hold" => {
            let name = step.text(0)?;
            let name = match name.strip_prefix("gpu").map(str::parse) {
                Some(Ok(gpu)) if gpu < node()?.gpu_count() => LockName::Gpu(gpu),
                None if name == "api" => LockName::Api,
                _ => return Err(format!("{name:?} is no lock of this node; api, gpu0 are")),
            };
            let mode = if step.optional(2) == Some("shared") { Mode::Shared } else { Mode::Exclusive };
            let held = node()?.hold(name, mode).map_err(|error| error.to_string())?;
            std::thread::sleep(Duration::from_millis(step.number(1)?));
            drop(held);
        }
        "eat" => eat(step.bytes(0)?),
        "oom" => eat(u64::MAX),
        "die" => {
            // SAFETY: takes no argument; the signal goes to this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            std::thread::sleep(Duration::MAX);
        }
        "pause" => {
            let until = Instant::now() + Duration::from_micros(step.number(0)?);
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        other => return Err(format!("unknown step {other:?}; the steps are in the program's source")),
    }
    Ok(())
}

/// Every page is written, so that it counts.
fn eat(bytes: u64) {
    let mut left = bytes;
    while left > 0 {
        let bite = left.min(BITE);
        std::hint::black_box(vec![1u8; usize::try_from(bite).unwrap_or(0)].leak());
        left -= bite;
    }
}
