//! Owns the claims about waits: who made whom wait for what, against the driver's own record of holders and sleeps.
//! Refuses a scenario in which hardly anybody waited: it would show nothing.
//!
//! At scale 1 and without spinning, where it says nothing else: a spinner that gets a lock is a turn that nobody saw.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use cotenant_model::Operation;
use cotenant_node::{
    Agent, Cgroup, SimulatedNode, Tenant, losses,
    scrape::Scrape,
    slowness,
    waits::{SYMBOLS, WaitTruth},
};
use cotenant_sim_state::{NodeConfig, truth::Class};

const BLAME: &str = "cotenant_gpu_blame_seconds_total";
const WAIT: &str = "cotenant_gpu_driver_wait_seconds_total";
const EXCESS: &str = "cotenant_gpu_contention_excess_seconds_total";
/// Some ticks of 200 ms, on a busy machine. An emulated one (tests/kernels) asks for more: a tick takes seconds there.
fn settling() -> Duration {
    Duration::from_millis(1_200) * slowness()
}
/// Of the true wait, on its true culprit and in its class. In an emulated machine a time stamp costs microseconds (its clock is
/// the HPET), and a wait of a tenth of a millisecond has four.
fn accuracy() -> f64 {
    if slowness() > 1 { 0.9 } else { 0.95 }
}
const INNOCENT: f64 = 0.01;
/// Two ticks take at most this.
const TICKS: Duration = Duration::from_secs(20);
/// Less than this in all proves nothing about a victim.
const ENOUGH: f64 = 0.1;

struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

/// Drop order: who is on the node goes before it.
struct Stage {
    agent: Agent,
    guests: Vec<Guest>,
    _warm: (Tenant, Cgroup),
    node: SimulatedNode,
    _directory: tempfile::TempDir,
}

/// What was published and what is true, at one moment.
struct Moment {
    scrape: Scrape,
    truth: WaitTruth,
}

impl Stage {
    fn open(gpus: usize, spin_us: u64) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let config = NodeConfig { spin_us, ..NodeConfig::h200(gpus, 1.0) };
        let node = SimulatedNode::create(directory.path(), &config)?;
        let agent = node.agent(SYMBOLS)?;
        let cgroup = Cgroup::create(&format!("system.slice/waits-{}-warm.service", std::process::id()))?;
        let mut warm = node.tenant("warm", &cgroup, "print loaded\nwait\n", &[])?;
        warm.expect("loaded")?;
        agent.until_probed(&directory.path().join("lib/libcuda.so.1"))?;
        Ok(Self { agent, guests: Vec::new(), _warm: (warm, cgroup), node, _directory: directory })
    }

    /// Runs a script up to its `ready`; it goes on with everybody else's.
    fn guest(&mut self, name: &str, script: &str, gpus: &str) -> Result<String> {
        let unit = format!("waits-{}-{name}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let mut tenant = self.node.tenant(name, &cgroup, script, &[("CUDA_VISIBLE_DEVICES", gpus)])?;
        tenant.expect("ready")?;
        let label = format!("systemd:{unit}");
        self.guests.push(Guest { tenant, label: label.clone(), _cgroup: cgroup });
        Ok(label)
    }

    /// A guest on one GPU that is ready when it has a context.
    fn busy(&mut self, name: &str, gpu: &str, before: &str, body: &str) -> Result<String> {
        let script = format!("init\nuuid 0\nretain 0\n{before}print ready\nwait\n{body}\nprint done\nwait\n");
        self.guest(name, &script, gpu)
    }

    fn go(&mut self, label: &str) -> Result<()> {
        self.of(label).tenant.go()
    }

    fn done(&mut self, label: &str) -> Result<()> {
        self.of(label).tenant.expect("done")
    }

    fn of(&mut self, label: &str) -> &mut Guest {
        self.guests.iter_mut().find(|guest| guest.label == label).expect("a guest of this stage")
    }

    fn moment(&self) -> Result<Moment> {
        sleep(settling());
        self.two_ticks()?;
        Ok(Moment { scrape: self.agent.scrape()?, truth: WaitTruth::read(&self.node.directory)? })
    }

    /// Until a tick that began after this call is through, however long one takes.
    fn two_ticks(&self) -> Result<()> {
        let taken = || Ok::<_, anyhow::Error>(self.agent.status()?["taken"].as_f64().unwrap_or_default());
        let begun = Instant::now();
        for _ in 0..2 {
            let before = taken()?;
            while taken()? <= before {
                ensure!(begun.elapsed() < TICKS * slowness(), "the agent does not tick");
                sleep(Duration::from_millis(20) * slowness());
            }
        }
        Ok(())
    }

    /// Lets everybody go on at once, and waits for each `done`.
    fn act(&mut self) -> Result<Act> {
        let before = self.moment()?;
        for guest in &mut self.guests {
            guest.tenant.go()?;
        }
        for guest in &mut self.guests {
            guest.tenant.expect("done")?;
        }
        self.since(&before)
    }

    fn since(&self, before: &Moment) -> Result<Act> {
        let now = self.moment()?;
        let names: BTreeMap<u32, String> =
            self.guests.iter().map(|guest| (guest.tenant.pid(), guest.label.clone())).collect();
        let truth = now.truth.since(&before.truth);
        Ok(Act { truth: truth.by_tenant(&names), before: before.scrape.clone(), now: now.scrape })
    }
}

/// What happened between two moments.
struct Act {
    truth: BTreeMap<(String, String, Class), f64>,
    before: Scrape,
    now: Scrape,
}

impl Act {
    fn published(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.now.sum(name, labels) - self.before.sum(name, labels)
    }

    fn blame(&self, victim: &str, culprit: &str, class: &str) -> f64 {
        self.published(BLAME, &[("victim", victim), ("culprit", culprit), ("wait_class", class)])
    }

    fn truly(&self, victim: &str) -> f64 {
        self.truth.iter().filter(|((of, _, _), _)| of == victim).map(|(_, seconds)| seconds).sum()
    }

    /// Everything about one victim that is not as it should be, in words.
    fn wrongs(&self, victim: &str, innocents: &[&str]) -> Vec<String> {
        let mut wrongs = Vec::new();
        let all = self.truly(victim);
        if all < ENOUGH {
            wrongs.push(format!("{victim} waited {all:.3} s: too little to show anything"));
        }
        let of_victim = || self.truth.iter().filter(|((of, _, _), _)| of == victim);
        let right: f64 = of_victim()
            .map(|((_, culprit, class), seconds)| self.blame(victim, culprit, class.as_str()).min(*seconds))
            .sum();
        if right < accuracy() * all {
            wrongs.push(format!("{victim}: {right:.4} s of {all:.4} s are on their true culprits"));
        }
        let blamed = self.published(BLAME, &[("victim", victim)]);
        if blamed > all * (2.0 - accuracy()) + 0.005 {
            wrongs.push(format!("{victim}: {blamed:.4} s are blamed on somebody, {all:.4} s were waited"));
        }
        for innocent in innocents {
            let blamed = self.published(BLAME, &[("victim", victim), ("culprit", innocent)]);
            if blamed > INNOCENT * all {
                wrongs.push(format!("{victim}: {blamed:.4} s of {all:.4} s are on {innocent}, an innocent"));
            }
        }
        for class in Class::ALL {
            let truly: f64 = of_victim().filter(|((_, _, of), _)| *of == class).map(|(_, s)| s).sum();
            let waited = self.published(WAIT, &[("tenant", victim), ("wait_class", class.as_str())]);
            // A class of its own right, or nothing worth a word.
            let allowed = (truly * (1.0 - accuracy())).max(INNOCENT * all);
            if (waited - truly).abs() > allowed {
                wrongs.push(format!("{victim}: {waited:.4} s of {}, true {truly:.4} s", class.as_str()));
            }
        }
        wrongs
    }

    /// Both sides in full, for whoever reads a failure.
    fn table(&self) -> String {
        let mut text = String::from("true:\n");
        for ((victim, culprit, class), seconds) in &self.truth {
            if *seconds > 0.0005 {
                let _ = writeln!(text, "  {victim} <- {culprit} {}: {seconds:.4} s", class.as_str());
            }
        }
        text.push_str("published:\n");
        for sample in self.now.of(BLAME) {
            let labels: Vec<(&str, &str)> =
                sample.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let seconds = self.published(BLAME, &labels);
            if seconds > 0.0005 {
                let [victim, culprit, class, relation] =
                    ["victim", "culprit", "wait_class", "relation"].map(|key| sample.label(key));
                let _ = writeln!(text, "  {victim} <- {culprit} {class} ({relation}): {seconds:.4} s");
            }
        }
        text
    }

    fn hold_to(&self, victims: &[&str], innocents: &[&str]) {
        let mut wrongs: Vec<String> =
            victims.iter().flat_map(|victim| self.wrongs(victim, innocents)).collect();
        wrongs.extend(losses(&self.now).iter().map(|(reason, count)| format!("{count} lost: {reason}")));
        assert!(wrongs.is_empty(), "{wrongs:#?}\n{}", self.table());
        println!("{}", self.table());
    }
}

fn all(labels: &[String]) -> Vec<&str> {
    labels.iter().map(String::as_str).collect()
}

/// Part of each allocation is scrubbing: the lock is held and no processor is, however busy the machine.
const EQUAL: &str = "for 3000 {\nalloc a 1GiB\nfree a\n}";

fn equals(count: usize) -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let labels =
        (0..count).map(|at| stage.busy(&format!("equal{at}"), "0", "", EQUAL)).collect::<Result<Vec<_>>>()?;
    stage.act()?.hold_to(&all(&labels), &[]);
    Ok(())
}

#[test]
fn c108_two_equal_processes_wait_for_each_other() -> Result<()> {
    equals(2)
}

/// Who, and roughly how much: what a machine whose clock is slow and whose timers are late still has to show.
#[test]
fn c108_each_of_two_names_the_other_whatever_the_clock() -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let labels = ["first", "second"].map(|name| stage.busy(name, "0", "", EQUAL));
    let [first, second] = labels.map(|label| label.expect("a guest"));
    let act = stage.act()?;
    for (victim, culprit) in [(&first, &second), (&second, &first)] {
        let of = act
            .truth
            .iter()
            .find(|((of, by, class), _)| of == victim && by == culprit && class.as_str() == "rm_api_lock");
        let truly = of.map_or(0.0, |(_, seconds)| *seconds);
        let told = act.blame(victim, culprit, "rm_api_lock");
        assert!(
            truly > ENOUGH && told > truly / 2.0 && told < truly * 1.5,
            "{told} of {truly}\n{}",
            act.table()
        );
        let of_victim = act.published(BLAME, &[("victim", victim)]);
        let right: f64 = [culprit, "device"]
            .iter()
            .map(|by| act.published(BLAME, &[("victim", victim), ("culprit", by)]))
            .sum();
        assert!(of_victim - right < 0.05 * of_victim, "{victim} blames others\n{}", act.table());
    }
    assert_eq!(losses(&act.now), BTreeMap::new());
    println!("{}", act.table());
    Ok(())
}

#[test]
fn c108_eight_equal_processes_wait_for_each_other() -> Result<()> {
    equals(8)
}

#[test]
fn c108_the_neighbour_that_takes_30_gib_is_blamed_and_the_innocent_are_not() -> Result<()> {
    let mut stage = Stage::open(2, 0)?;
    let victim = stage.busy("victim", "0", "", "for 3000 {\nalloc a 2MiB\nfree a\n}")?;
    let hog = stage.busy("hog", "0", "", "for 3000 {\nalloc b 30GiB\nfree b\npause 300\n}")?;
    let light = stage.busy("light", "0", "", "for 3000 {\nalloc c 2MiB\nfree c\nsleep 100\n}")?;
    let grown = "alloc d 64MiB cuMemAllocAsync\nfree d cuMemFreeAsync\n";
    let pool = format!("for 3000 {{\n{grown}pause 200\n}}");
    let other = stage.busy("other", "1", grown, &pool)?;
    let act = stage.act()?;
    // The hog's own wait is its GPU's: nobody made it wait for that.
    act.hold_to(&[&victim, &hog, &light], &[&light, &other]);
    assert_eq!(act.truly(&other).to_bits(), 0f64.to_bits(), "{}", act.table());
    Ok(())
}

#[test]
fn c108_processes_on_two_gpus_wait_for_one_lock() -> Result<()> {
    let mut stage = Stage::open(2, 0)?;
    let first = stage.busy("first", "0", "", EQUAL)?;
    let second = stage.busy("second", "1", "", EQUAL)?;
    stage.act()?.hold_to(&[&first, &second], &[]);
    Ok(())
}

#[test]
fn a_gpus_own_lock_is_between_those_on_that_gpu() -> Result<()> {
    let mut stage = Stage::open(2, 0)?;
    let mapped = "create h 64MiB 0\nmap h\ndelay cuMemSetAccess device 1 1000000\n";
    let body = "for 2000 {\naccess h\n}";
    let first = stage.busy("first", "0", mapped, body)?;
    let second = stage.busy("second", "0", mapped, body)?;
    let apart = stage.busy("apart", "1", mapped, body)?;
    stage.act()?.hold_to(&[&first, &second], &[&apart]);
    Ok(())
}

#[test]
fn threads_of_one_process_are_nobody_elses_fault() -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let body = "threads 4 {\nfor 2000 {\nalloc t 256MiB\nfree t\n}\n}";
    let label = stage.busy("threads", "0", "", body)?;
    let act = stage.act()?;
    act.hold_to(&[&label], &[]);
    let own = [("victim", label.as_str()), ("culprit", label.as_str()), ("relation", "neighbour")];
    assert_eq!(act.published(BLAME, &own).to_bits(), 0f64.to_bits(), "{}", act.table());
    Ok(())
}

#[test]
fn c103_a_culprit_that_dies_while_it_holds_is_still_named() -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let victim = stage.busy("victim", "0", "", "for 1500 {\nalloc a 2MiB\nfree a\n}")?;
    // The other thread takes its context before the lock is held.
    let script = "background {\nsleep 900\ndie\n}\nsleep 300\nhang cuMemAlloc 60000\nalloc b 2MiB";
    let dying = stage.busy("dying", "0", "", script)?;
    let before = stage.moment()?;
    let begun = Instant::now();
    stage.go(&dying)?;
    sleep(Duration::from_millis(500));
    stage.go(&victim)?;
    stage.done(&victim)?;
    assert!(begun.elapsed() < Duration::from_secs(20) * slowness(), "it did not die while it held the lock");
    let act = stage.since(&before)?;
    act.hold_to(&[&victim], &[]);
    assert!(act.blame(&victim, &dying, "rm_api_lock") > ENOUGH, "{}", act.table());
    Ok(())
}

#[test]
fn a_waker_that_is_in_no_call_and_loads_no_driver_is_named() -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let victim = stage.busy("victim", "0", "", "for 2000 {\nalloc a 2MiB\nfree a\npause 500\n}")?;
    let script = "nodriver\nprint ready\nwait\nfor 2000 {\nhold api 50\nsleep 20\n}\nprint done\nwait\n";
    let neither = stage.guest("neither", script, "0")?;
    let act = stage.act()?;
    act.hold_to(&[&victim], &[]);
    assert!(act.blame(&victim, &neither, "rm_api_lock") > ENOUGH, "{}", act.table());
    Ok(())
}

#[test]
fn each_class_of_wait_is_told_from_the_others() -> Result<()> {
    let mut stage = Stage::open(1, 0)?;
    let body = "loop 20 {\ndelay cuMemAlloc uvm_eviction 20 1\nalloc a 2MiB\ndelay cuMemFree device 10 1\nfree a\n\
                delay cuMemAlloc reclaim 15 1\nalloc a 2MiB\nfree a\n}";
    let label = stage.busy("classes", "0", "", body)?;
    let act = stage.act()?;
    act.hold_to(&[&label], &[]);
    for class in [Class::Reclaim, Class::UvmEviction, Class::Device] {
        assert!(act.blame(&label, "device", class.as_str()) > ENOUGH, "{}", act.table());
    }
    Ok(())
}

/// A tenant alone and then beside a neighbour, that spins for up to `spin_us` before it blocks.
fn spun(spin_us: u64, neighbour: impl FnOnce(&mut Stage) -> Result<String>) -> Result<()> {
    let mut stage = Stage::open(1, spin_us)?;
    let label = stage.busy("spinner", "0", "", &format!("{SPUN}\nprint alone\nwait\n{SPUN}"))?;
    let before = stage.moment()?;
    stage.go(&label)?;
    stage.of(&label).tenant.expect("alone")?;
    let alone = stage.moment()?;
    let neighbour = neighbour(&mut stage)?;
    let beside = stage.moment()?;
    stage.go(&label)?;
    stage.go(&neighbour)?;
    stage.done(&label)?;
    stage.done(&neighbour)?;
    let act = stage.since(&beside)?;
    let pid = stage.of(&label).tenant.pid();
    let truth = WaitTruth::read(&stage.node.directory)?.since(&beside.truth);
    let solo = alone.truth.since(&before.truth);
    let mut inflation = act.truly(&label);
    for operation in [Operation::MemAlloc, Operation::MemFree] {
        let (shared, solo) = (truth.calls[&(pid, operation)], solo.calls[&(pid, operation)]);
        inflation += shared.excess(&solo).expect("solo calls") / 1e9;
    }
    let of_label = [("tenant", label.as_str())];
    let (excess, waited) = (act.published(EXCESS, &of_label), act.published(WAIT, &of_label));
    let told = format!("excess {excess:.4} s and waits {waited:.4} s for {inflation:.4} s\n{}", act.table());
    assert!(inflation > ENOUGH, "{told}");
    assert!(excess + waited >= 0.9 * inflation && excess + waited <= 1.1 * inflation, "{told}");
    println!("{told}");
    Ok(())
}

const SPUN: &str = "for 2000 {\nalloc a 64MiB\nfree a\n}";

#[test]
fn spinning_is_estimated_beside_what_was_measured() -> Result<()> {
    // They spin for as long as it takes.
    spun(1_000_000, |stage| stage.busy("neighbour", "0", "", SPUN))
}

#[test]
fn spinning_for_a_process_in_no_call_is_estimated_too() -> Result<()> {
    // Longer than it holds the lock, more often than not: it is seen by the rest.
    let script = "nodriver\nprint ready\nwait\nfor 2000 {\nhold api 1\nsleep 1\n}\nprint done\nwait\n";
    spun(4_000, |stage| stage.guest("stranger", script, "0"))
}
