//! Owns what lines of the kernel's log mean: OOM kills, Xid faults, which GPU sits where.
//! Refuses to read a tenant's text as the kernel's: names of processes and cgroups may hold commas, `pid=`, `)` or newlines.

use cotenant_model::GpuId;
use cotenant_model::kill::{KillLine, OomLine, OomSummary, Scope};
use cotenant_model::xid::{PciAddress, XidDetail, XidGpu, XidReport, XidSource};

/// `TASK_COMM_LEN` less its end. What is longer between the marks is no process name.
const LONGEST_COMM: usize = 15;
/// Bytes of an Xid's text that are kept.
const LONGEST_MESSAGE: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    Oom(OomLine),
    Xid(XidReport),
    /// Before its first Xid the driver says which GPU sits where.
    Gpu {
        pci: PciAddress,
        gpu: GpuId,
    },
}

impl Notice {
    /// Pure over the text of a record that the kernel wrote. No prefix here is short enough to be a process name, with which
    /// some of the kernel's lines begin.
    pub(super) fn parse(text: &str, time_ns: u64) -> Option<Self> {
        if let Some(rest) = text.strip_prefix("oom-kill:constraint=CONSTRAINT_") {
            return summary(rest).map(|summary| Self::Oom(OomLine::Summary(summary)));
        }
        if let Some(rest) = text.strip_prefix("NVRM: Xid (") {
            return xid(rest, time_ns).map(Self::Xid);
        }
        if let Some(rest) = text.strip_prefix("NVRM: GPU at PCI:") {
            let (pci, gpu) = rest.split_once(": ")?;
            let gpu = GpuId::from_nvml(gpu.trim_end());
            gpu.uuid()?;
            return Some(Self::Gpu { pci: PciAddress::parse(pci)?, gpu });
        }
        if let Some(rest) = text.strip_prefix("Tasks in /") {
            // mm/memcontrol.c, `mem_cgroup_print_oom_group`.
            let path = rest.strip_suffix(" are going to be killed due to memory.oom.group set")?;
            return Some(Self::Oom(OomLine::Group { cgroup: unescape(&format!("/{path}")) }));
        }
        killed(text).map(|line| Self::Oom(OomLine::Killed(line)))
    }
}

/// `MEMCG,nodemask=(null),cpuset=C,mems_allowed=0,oom_memcg=/A,task_memcg=/B,task=COMM,pid=N,uid=N` or
/// `NONE,…,global_oom,task_memcg=/B,…`: `dump_oom_summary` of `mm/oom_kill.c`, the same from 5.0 to 6.18.
///
/// C and COMM are a tenant's words, A and B may be. The numbers stand behind all of them, so they are read from the right.
/// C has no `/`, so the first mark with a `/` behind it is the kernel's. For the rest all readings are tried in which COMM can
/// be a process name and B is A or below it: what is not the same in all of them is not known.
fn summary(rest: &str) -> Option<OomSummary> {
    let (constraint, rest) = rest.split_once(',')?;
    let scope = match constraint {
        "MEMCG" => Scope::Memcg,
        "CPUSET" | "MEMORY_POLICY" => Scope::Cpuset,
        "NONE" => Scope::Global,
        _ => return None,
    };
    let (rest, uid) = rest.rsplit_once(",uid=")?;
    number(uid)?;
    let (rest, pid) = rest.rsplit_once(",pid=")?;
    let pid = number(pid)?;
    let mark = if scope == Scope::Memcg { ",oom_memcg=" } else { ",global_oom,task_memcg=" };
    let begin =
        rest.match_indices(mark).map(|(at, _)| at + mark.len()).find(|at| rest[*at..].starts_with('/'));
    let Some(begin) = begin else {
        // A kernel without memory cgroups names none.
        let comm = rest.rsplit_once(",task=").map(|(_, comm)| unescape(comm));
        return Some(OomSummary { scope, limit_owner: None, task_cgroup: None, comm, pid });
    };
    let readings: Vec<(Option<&str>, &str, &str)> = match scope {
        Scope::Memcg => splits(&rest[begin..], ",task_memcg=")
            .filter(|(_, task)| task.starts_with('/'))
            .flat_map(|(owner, task)| tasks(task).map(move |(cgroup, comm)| (Some(owner), cgroup, comm)))
            .filter(|(owner, cgroup, _)| owner.is_some_and(|owner| is_inside(cgroup, owner)))
            .collect(),
        Scope::Cpuset | Scope::Global => {
            tasks(&rest[begin..]).map(|(cgroup, comm)| (None, cgroup, comm)).collect()
        }
    };
    let limit_owner = only(readings.iter().map(|reading| reading.0)).flatten().map(unescape);
    let task_cgroup = only(readings.iter().map(|reading| reading.1)).map(unescape);
    let comm = only(readings.iter().map(|reading| reading.2)).map(unescape);
    Some(OomSummary { scope, limit_owner, task_cgroup, comm, pid })
}

/// Every reading of `CGROUP,task=COMM`.
fn tasks(text: &str) -> impl Iterator<Item = (&str, &str)> {
    splits(text, ",task=").filter(|(_, comm)| is_comm(comm))
}

/// An escaped byte is four characters.
fn is_comm(text: &str) -> bool {
    text.len() <= 4 * LONGEST_COMM && unescaped(text).len() <= LONGEST_COMM
}

fn splits<'a>(text: &'a str, mark: &'static str) -> impl Iterator<Item = (&'a str, &'a str)> {
    text.match_indices(mark).map(move |(at, _)| (&text[..at], &text[at + mark.len()..]))
}

/// The one value that all have.
fn only<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

fn is_inside(cgroup: &str, outer: &str) -> bool {
    let rest = cgroup.strip_prefix(outer.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// `[Memory cgroup out|Out] of memory[ (…)]: Killed process N (COMM) total-vm:…kB, …`: `__oom_kill_process`, 5.0 to 6.18.
fn killed(text: &str) -> Option<KillLine> {
    let in_cgroup = text.strip_prefix("Memory cgroup out of memory");
    let rest = in_cgroup.or_else(|| text.strip_prefix("Out of memory"))?;
    let rest = rest.strip_prefix(" (oom_kill_allocating_task)").unwrap_or(rest);
    let rest = rest.strip_prefix(": Killed process ")?;
    let (pid, rest) = rest.split_once(" (")?;
    // Behind the last of these only numbers come.
    let (comm, figures) = rest.rsplit_once(") total-vm:")?;
    let shaped = figures.starts_with(|first: char| first.is_ascii_digit()) && is_comm(comm);
    let line = KillLine { memcg: in_cgroup.is_some(), pid: number(pid)?, comm: unescape(comm) };
    shaped.then_some(line)
}

/// `PCI:0000:3b:00 GPU-I:05): 31, pid=1234, name=python3, Ch 00000010, …`: `kernel_rc.c` of the open modules 515 to 595. Older
/// ones have no `name`, the oldest no `PCI:`; since 570 both are left out where there is no process.
fn xid(rest: &str, time_ns: u64) -> Option<XidReport> {
    let (place, rest) = rest.split_once("): ")?;
    let mut words = place.split(' ');
    let address = words.next()?;
    let pci = PciAddress::parse(address.strip_prefix("PCI:").unwrap_or(address))?;
    let gpu_instance = words.next().and_then(|word| word.strip_prefix("GPU-I:")).and_then(number);
    let (code, mut rest) = rest.split_once(", ").unwrap_or((rest.trim_end(), ""));
    let code = number(code)?;
    let mut detail = XidDetail { gpu_instance, ..XidDetail::default() };
    // The PID stands before the name, so the first one is the driver's.
    if let Some(value) = field(&mut rest, "pid=") {
        detail.pid = number(value).filter(|pid| *pid != 0);
        detail.name =
            field(&mut rest, "name=").filter(|name| *name != "<unknown>" && !name.is_empty()).map(unescape);
    }
    let message = unescape(rest);
    detail.caused_by =
        message.rsplit_once(" caused by previous Xid ").and_then(|(_, code)| number(code.trim_end()));
    detail.message = bounded(message.trim_end());
    Some(XidReport { source: XidSource::Kmsg, time_ns, gpu: XidGpu::Pci(pci), code, detail })
}

/// Takes `key` and its value off the front of comma-separated text.
fn field<'a>(rest: &mut &'a str, key: &str) -> Option<&'a str> {
    let value = rest.strip_prefix(key)?;
    let (value, after) = value.split_once(", ").unwrap_or((value, ""));
    *rest = after;
    Some(value)
}

fn bounded(text: &str) -> Option<String> {
    let end = text.floor_char_boundary(LONGEST_MESSAGE);
    (!text.is_empty()).then(|| text[..end].to_owned())
}

/// Digits alone: `parse` would take a sign as well.
fn number(digits: &str) -> Option<u32> {
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// The bytes behind the log's `\xNN`.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escape = after
            .strip_prefix(b"x")
            .and_then(|digits| digits.split_at_checked(2))
            .filter(|_| *first == b'\\');
        let byte = escape.and_then(|(digits, after)| {
            let digit = |at: usize| char::from(digits[at]).to_digit(16);
            Some((u8::try_from(digit(0)? << 4 | digit(1)?).ok()?, after))
        });
        let (byte, after) = byte.unwrap_or((*first, after));
        bytes.push(byte);
        rest = after;
    }
    bytes
}

fn unescape(text: &str) -> String {
    String::from_utf8_lossy(&unescaped(text)).into_owned()
}
