//! Owns a mount namespace in which runtimes have the places of a bare host for themselves, and the end of all they started.
//! Refuses to touch the host's own: `/run` and the runtimes' stores are empty file systems of this namespace alone.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::slowness;

const PATIENCE: Duration = Duration::from_mins(1);
const REMEDY: &str = "`bash tests/setup.sh runtimes` brings it";

/// Where runtimes keep what they have, in the places that distributions give them.
const MOUNTS: &str = "mount -t tmpfs none /run && mkdir -p /run/lock && \
     for store in docker containerd containers munge; do \
     mkdir -p /var/lib/$store && mount -t tmpfs none /var/lib/$store || exit 1; done && \
     mount -t tmpfs none /var/log && echo ready && exec cat";

pub(crate) struct Enclosure {
    /// Words that a command is started with to be inside.
    words: Vec<String>,
    holder: Child,
    _open: ChildStdin,
}

impl Enclosure {
    /// `programs`: without them there is nothing to test, and that is no success.
    pub(crate) fn create(programs: &[&str]) -> Result<Self> {
        for program in programs {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&path).any(|directory| directory.join(program).exists());
            ensure!(found, "NOT TESTED: {program} is not installed here; {REMEDY}");
        }
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "/bin/sh", "-c", MOUNTS])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start unshare")?;
        let open = holder.stdin.take().context("a pipe was asked for")?;
        let mut line = String::new();
        BufReader::new(holder.stdout.take().context("a pipe was asked for")?).read_line(&mut line)?;
        ensure!(line.trim() == "ready", "no mount namespace of one's own can be made here (root?)");
        let words = ["nsenter".to_owned(), format!("--mount=/proc/{}/ns/mnt", holder.id()), "--".to_owned()];
        Ok(Self { words: words.to_vec(), holder, _open: open })
    }

    pub(crate) fn launcher(&self) -> Vec<&str> {
        self.words.iter().map(String::as_str).collect()
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(words).stdin(Stdio::null());
        command
    }

    /// What a command printed; its words are the error when it failed.
    pub(crate) fn run(&self, words: &[&str]) -> Result<String> {
        said(&mut self.command(words))
    }

    /// A daemon that ends with the test, whatever becomes of it.
    pub(crate) fn daemon(&self, name: &str, words: &[&str], environment: &[(&str, &str)]) -> Result<Daemon> {
        let log = std::env::temp_dir().join(format!("cotenant-{}-{name}.log", std::process::id()));
        let file = fs::File::create(&log)?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM"])
            .args(&self.words)
            .args(words)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Daemon { name: name.to_owned(), child, log })
    }
}

impl Drop for Enclosure {
    /// Whoever is still inside, such as the shim of a container that a failed test left, ends with it.
    fn drop(&mut self) {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let (own, inside) = (self.holder.id().to_string(), of(&self.holder.id().to_string()));
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Ok(pid) = entry.file_name().into_string() else { continue };
            if inside.is_some() && pid != own && of(&pid) == inside {
                let _ = Command::new("kill").args(["-KILL", &pid]).status();
            }
        }
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

pub(crate) fn said(command: &mut Command) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("cannot start {command:?}; {REMEDY}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(status.success(), "{command:?}: {status}: {} {}", text(&stdout), text(&stderr));
    Ok(text(&stdout))
}

pub(crate) struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Waits until it answers.
    pub(crate) fn until(&mut self, mut ready: impl FnMut() -> bool) -> Result<()> {
        let begun = Instant::now();
        while !ready() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || begun.elapsed() > PATIENCE * slowness() {
                bail!("{} is not ready ({ended:?}): {}", self.name, self.log());
            }
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    pub(crate) fn log(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20)
            && self.child.try_wait().is_ok_and(|end| end.is_none())
        {
            sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.log);
    }
}

/// The cgroups that a runtime makes at the root of each hierarchy and leaves there. What was there before stays.
pub(crate) struct Leavings(Vec<PathBuf>);

impl Leavings {
    pub(crate) fn of(names: &[&str]) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/mounts")?;
        let roots: BTreeSet<&str> = mounts
            .lines()
            .filter_map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                matches!(fields.get(2), Some(&"cgroup" | &"cgroup2")).then_some(fields[1])
            })
            .collect();
        let places = roots.iter().flat_map(|root| names.iter().map(move |name| Path::new(root).join(name)));
        Ok(Self(places.filter(|place| !place.exists()).collect()))
    }
}

impl Drop for Leavings {
    fn drop(&mut self) {
        for place in &self.0 {
            let begun = Instant::now();
            while place.exists() && !clear(place) && begun.elapsed() < Duration::from_secs(5) {
                sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Ends who is in it and removes it, from the leaves up. False while somebody is still there.
fn clear(place: &Path) -> bool {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            clear(&entry.path());
        }
    }
    let inside = fs::read_to_string(place.join("cgroup.procs")).unwrap_or_default();
    for pid in inside.lines() {
        let _ = Command::new("kill").args(["-KILL", pid]).status();
    }
    fs::remove_dir(place).is_ok()
}
