//! Owns what is told of an agent whose tick hangs.
//! Refuses a switch of the agent's for it: the thread is stopped from outside.

use std::{
    fs,
    io::Read,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::served::Served;

/// Stops one thread for as long as it lives, as a lock that nobody gives back would.
const STOPPER: &str = r"
import ctypes, os, sys
libc, thread = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
for request in (0x4206, 0x4207):
    if libc.ptrace(request, thread, None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(thread, 0x40000000)
print('stopped', flush=True)
sys.stdin.read()
";

#[test]
fn a_tick_that_hangs_is_seen_by_the_liveness_probe_and_the_pages_stay() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let served = Served::start(directory.path(), "")?;
    assert_eq!(served.status("http", "/healthz", &[])?, 200);
    let tick = fs::read_dir(format!("/proc/{}/task", served.child.id()))?
        .filter_map(|task| Some(task.ok()?.path()))
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "tick"))
        .context("a thread called tick")?;
    let thread = tick.file_name().and_then(|name| name.to_str()).context("its number")?.to_owned();
    let mut stopper = Command::new("python3")
        .args(["-c", STOPPER, &thread])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let mut said = [0; 7];
    stopper.stdout.take().context("stdout")?.read_exact(&mut said)?;
    let begun = Instant::now();
    let mut answer = served.curl("http", "/healthz", &[])?;
    while matches!(&answer, Ok((200, _))) && begun.elapsed() < Duration::from_mins(1) {
        sleep(Duration::from_millis(500));
        answer = served.curl("http", "/healthz", &[])?;
    }
    let seen = begun.elapsed();
    assert!(
        matches!(&answer, Ok((503, text)) if text.contains("no tick has come to its end")),
        "{answer:?} after {seen:?}"
    );
    // Ten intervals, and 30 s at least; not at the first slow tick.
    assert!((Duration::from_secs(28)..Duration::from_secs(45)).contains(&seen), "{seen:?}");
    assert_eq!(served.status("http", "/readyz", &[])?, 503);
    assert_eq!(served.status("http", "/metrics", &[])?, 200, "what was read last is still there to be read");
    // The thread goes on, and so it is alive again.
    drop(stopper.stdin.take());
    stopper.wait()?;
    sleep(Duration::from_secs(3));
    assert_eq!(served.status("http", "/healthz", &[])?, 200);
    Ok(())
}
