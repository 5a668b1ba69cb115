//! Owns the claims about waiting for the simulated driver: in which kernel function, for whom, alone, and past the dead.
//! Refuses threads: processes wait for each other here, as tenants do.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::exit,
    sync::atomic::{AtomicU64, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use cotenant_sim_state::{LockName, Mode, Node, NodeConfig, Sleep, Waited};

/// A node of its own, removed on drop.
struct Place(PathBuf);

impl Place {
    fn make(name: &str, gpus: usize) -> (Self, Node) {
        let directory = std::env::temp_dir().join(format!("sim-waiting-{}-{name}", std::process::id()));
        let config = NodeConfig { spin_us: 0, ..NodeConfig::h200(gpus, 1.0) };
        let node = Node::create(&directory, &config).expect("created");
        (Self(directory), node)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process that does `work` and ends; killed on drop.
struct Child(i32);

impl Child {
    fn start(work: impl FnOnce()) -> Self {
        // SAFETY: the child does its work and ends without handlers or destructors.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work();
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        Self(pid)
    }

    fn kill(&self) {
        // SAFETY: a signal to our own child, which has not been waited for.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }

    /// True: it ended by itself, well.
    fn end(self) -> bool {
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        std::mem::forget(self);
        status == 0
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// Shared with children that are forked later.
fn shared<T>() -> &'static T {
    // SAFETY: fresh zeroed pages, which are valid for the atomics that this is used with; never unmapped.
    unsafe {
        let pages = libc::mmap(
            std::ptr::null_mut(),
            size_of::<T>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(pages, libc::MAP_FAILED);
        &*pages.cast()
    }
}

fn hold(node: &Node, name: LockName) -> Option<Waited> {
    let (held, waited) = node.hold(name, Mode::Exclusive).expect("a lock of this node");
    drop(held);
    waited
}

/// The functions that a process sleeps in, once it sleeps in `function`.
fn blocked_in(child: &Child, function: &str) -> io::Result<()> {
    let path = format!("/proc/{}/stack", child.0);
    let begun = Instant::now();
    let mut stack = String::new();
    while begun.elapsed() < Duration::from_secs(5) {
        stack = fs::read_to_string(Path::new(&path))?;
        if stack.contains(&format!("] {function}")) {
            return Ok(());
        }
        sleep(Duration::from_millis(5));
    }
    panic!("not in {function}, but\n{stack}");
}

#[test]
fn each_class_of_wait_blocks_in_a_kernel_function_of_its_own() {
    let (_place, node) = Place::make("stack", 1);
    let check = |function, work: &dyn Fn()| match blocked_in(&Child::start(work), function) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            eprintln!("kernel stacks are root's to read: not checked");
        }
        outcome => outcome.expect("a stack"),
    };
    let locks = [(LockName::Api, "locks_lock_inode_wait"), (LockName::Gpu(0), "fcntl_setlk")];
    for (name, function) in locks {
        let held = node.hold(name, Mode::Exclusive).expect("free");
        check(function, &|| {
            hold(&node, name);
        });
        drop(held);
    }
    for (kind, function) in [
        (Sleep::Reclaim, "hrtimer_nanosleep"),
        (Sleep::UvmEviction, "do_sigtimedwait"),
        (Sleep::Device, "do_sys_poll"),
    ] {
        check(function, &|| {
            kind.wait(Duration::from_secs(10));
        });
    }
}

#[test]
fn one_at_a_time_and_whoever_waited_knows_for_whom() {
    const CHILDREN: usize = 4;
    const ROUNDS: u64 = 300;
    for name in [LockName::Api, LockName::Gpu(0)] {
        let (_place, node) = Place::make(&format!("alone-{name:?}"), 1);
        let inside: &AtomicU64 = shared();
        let waits: &AtomicU64 = shared();
        let children: Vec<_> = (0..CHILDREN)
            .map(|_| {
                Child::start(|| {
                    for _ in 0..ROUNDS {
                        let (held, waited) = node.hold(name, Mode::Exclusive).expect("a lock");
                        if inside.fetch_add(1, Ordering::SeqCst) != 0 {
                            exit(1);
                        }
                        Sleep::Reclaim.wait(Duration::from_micros(100));
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                        let Some(waited) = waited else { continue };
                        waits.fetch_add(1, Ordering::SeqCst);
                        let mut at = waited.blocked;
                        for turn in &waited.turns {
                            let sane = turn.from == at && turn.to > turn.from && turn.to <= waited.acquired;
                            if !sane || turn.pid == std::process::id() {
                                exit(2);
                            }
                            at = turn.to;
                        }
                    }
                })
            })
            .collect();
        assert!(children.into_iter().all(Child::end), "{name:?}");
        let waits = waits.load(Ordering::SeqCst);
        assert!(waits > ROUNDS * CHILDREN as u64 / 2, "{waits} of {} waited", ROUNDS * CHILDREN as u64);
    }
}

#[test]
fn readers_hold_together_and_wait_for_the_one_who_writes() {
    let (_place, node) = Place::make("readers", 1);
    let reader = node.hold(LockName::Api, Mode::Shared).expect("free");
    let together = Child::start(|| {
        let (_held, waited) = node.hold(LockName::Api, Mode::Shared).expect("a lock");
        assert!(waited.is_none());
    });
    assert!(together.end());
    drop(reader);
    let writer = node.hold(LockName::Api, Mode::Exclusive).expect("free").0;
    let me = std::process::id();
    let waiting = Child::start(|| {
        let (_held, waited) = node.hold(LockName::Api, Mode::Shared).expect("a lock");
        let pids: Vec<_> = waited.iter().flat_map(|waited| &waited.turns).map(|turn| turn.pid).collect();
        if pids != [me] {
            exit(1);
        }
    });
    sleep(Duration::from_millis(100));
    drop(writer);
    assert!(waiting.end());
}

#[test]
fn who_died_while_waiting_holds_nobody_up_and_who_died_holding_is_named() {
    let (_place, node) = Place::make("dead", 1);
    let held = node.hold(LockName::Api, Mode::Exclusive).expect("free").0;
    let waiter = Child::start(|| {
        hold(&node, LockName::Api);
    });
    sleep(Duration::from_millis(50));
    drop(waiter);
    drop(held);
    // Once the courtesy towards the dead is used up there is no more of it.
    hold(&node, LockName::Api);
    let begun = Instant::now();
    assert!(hold(&node, LockName::Api).is_none());
    assert!(begun.elapsed() < Duration::from_millis(2), "{:?}", begun.elapsed());

    let holder = Child::start(|| {
        let _held = node.hold(LockName::Api, Mode::Exclusive).expect("free");
        sleep(Duration::from_secs(10));
    });
    let pid = holder.0.unsigned_abs();
    sleep(Duration::from_millis(50));
    let waiting = Child::start(|| {
        let turns = hold(&node, LockName::Api).map(|waited| waited.turns).unwrap_or_default();
        let sum: u64 = turns.iter().map(|turn| turn.to - turn.from).sum();
        if turns.iter().any(|turn| turn.pid != pid) || !(50_000_000..1_000_000_000).contains(&sum) {
            exit(1);
        }
    });
    sleep(Duration::from_millis(100));
    drop(holder);
    assert!(waiting.end());
}
