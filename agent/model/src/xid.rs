//! Owns Xid faults: the reports of kernel log, tracepoint and NVML joined to one record a fault, and which fault followed which.
//! Refuses to fold equal faults: two Xid 31 are two, however alike.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use crate::{GpuId, Tenant};

/// Where a GPU sits. Its function is always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
}

impl PciAddress {
    /// `0000:3b:00`, `0000:3b:00.0` (kernel), `00000000:3B:00.0` (NVML).
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (domain, bus, slot) = (parts.next()?, parts.next()?, parts.next()?);
        let device = match slot.split_once('.') {
            Some((device, function)) => hex(function, 1).map(|_| device)?,
            None => slot,
        };
        let byte = |text: &str| (text.len() == 2).then(|| hex(text, 2)).flatten()?.try_into().ok();
        let whole = parts.next().is_none() && domain.len() >= 4;
        whole.then_some(Self { domain: hex(domain, 8)?, bus: byte(bus)?, device: byte(device)? })
    }
}

fn hex(digits: &str, most: usize) -> Option<u32> {
    let shaped = (1..=most).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    shaped.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

impl fmt::Display for PciAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XidSource {
    Kmsg,
    Tracepoint,
    Nvml,
}

impl XidSource {
    pub const ALL: &'static [Self] = &[Self::Kmsg, Self::Tracepoint, Self::Nvml];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kmsg => "kmsg",
            Self::Tracepoint => "tracepoint",
            Self::Nvml => "nvml",
        }
    }
}

/// Which GPU a source speaks of, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XidGpu {
    Pci(PciAddress),
    Id(GpuId),
}

/// One source's word about one fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidReport {
    pub source: XidSource,
    /// Monotonic.
    pub time_ns: u64,
    pub gpu: XidGpu,
    pub code: u32,
    pub detail: XidDetail,
}

/// What only some sources say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XidDetail {
    /// In the host's namespace.
    pub pid: Option<u32>,
    /// Its name, which the process chose itself.
    pub name: Option<String>,
    pub gpu_instance: Option<u32>,
    pub message: Option<String>,
    /// The code that this one follows, in the driver's own words.
    pub caused_by: Option<u32>,
}

impl XidDetail {
    /// Keeps what is known and takes what is new.
    fn learn(&mut self, other: Self) {
        self.pid = self.pid.or(other.pid);
        self.name = self.name.take().or(other.name);
        self.gpu_instance = self.gpu_instance.or(other.gpu_instance);
        self.message = self.message.take().or(other.message);
        self.caused_by = self.caused_by.or(other.caused_by);
    }
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// Counts up with each fault that this agent saw.
    pub number: u64,
    /// Of the first report.
    pub time_ns: u64,
    /// `None` as long as nobody said which GPU sits at `pci`.
    pub gpu: Option<GpuId>,
    pub pci: Option<PciAddress>,
    pub code: u32,
    pub tenant: Option<Tenant>,
    pub detail: XidDetail,
    /// In the order of [`XidSource::ALL`].
    pub sources: Vec<XidSource>,
    /// The number of the fault that this one follows; `None` for a root.
    pub echo_of: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidCount {
    pub count: u64,
    pub last_ns: u64,
}

/// Codes that come after others, with the roots they come after; none named means any other code.
///
/// From NVIDIA's Xid catalogue and `nverror.h` (515 to 595): 45 removes the channels left after a fault, 43 resets one, 154
/// announces what recovery needs, 13 shows on engines whose memory went away, 63/64 retire the page of an ECC error, 94/95
/// say whether such an error was contained. A code is never its own echo.
const FOLLOWERS: &[(u32, &[u32])] = &[
    (43, &[]),
    (45, &[]),
    (154, &[]),
    (13, &[31, 48, 79, 94, 95, 119, 120]),
    (63, &[48, 94, 95, 171]),
    (64, &[48, 94, 95, 171]),
    (94, &[48]),
    (95, &[48]),
];

/// The last faults and the counts of all.
#[derive(Clone, Debug, Default)]
pub struct Xids {
    recent: VecDeque<Xid>,
    counts: BTreeMap<(Option<GpuId>, u32), XidCount>,
    reports: BTreeMap<(Option<GpuId>, u32, XidSource), u64>,
    faults: u64,
    uncounted: u64,
}

impl Xids {
    /// Faults kept as records.
    pub const MOST: usize = 256;
    /// Counters: GPUs times the codes there are would be 16 × 176; a node that shows a tenth of them is in the workshop.
    pub const MOST_COUNTS: usize = 512;
    /// How far apart the reports of one fault may be: NVML's events come through a thread that waits.
    const JOIN_NS: u64 = 5_000_000_000;
    /// How long after its root a follower is an echo.
    const ECHO_NS: u64 = 10_000_000_000;

    /// Joins a report to the oldest fault that its source has not spoken of, or begins a fault. `gpus` says which GPU sits
    /// where, `tenant_of` whose a PID is.
    pub fn observe(
        &mut self,
        report: XidReport,
        gpus: &BTreeMap<PciAddress, GpuId>,
        tenant_of: impl Fn(u32) -> Option<Tenant>,
    ) {
        let (pci, gpu) = match report.gpu {
            XidGpu::Pci(pci) => (Some(pci), gpus.get(&pci).cloned()),
            XidGpu::Id(gpu) => (gpus.iter().find(|(_, id)| **id == gpu).map(|(pci, _)| *pci), Some(gpu)),
        };
        let told = (gpu.clone(), report.code, report.source);
        if self.reports.len() < Self::MOST_COUNTS * XidSource::ALL.len() || self.reports.contains_key(&told) {
            *self.reports.entry(told).or_default() += 1;
        }
        let same = |xid: &&mut Xid| {
            is_one_gpu(xid, gpu.as_ref(), pci)
                && xid.code == report.code
                && !xid.sources.contains(&report.source)
                && xid.time_ns.abs_diff(report.time_ns) <= Self::JOIN_NS
                && is_same_text(xid.detail.message.as_deref(), report.detail.message.as_deref())
        };
        if let Some(xid) = self.recent.iter_mut().find(same) {
            xid.sources.push(report.source);
            xid.sources.sort_unstable();
            xid.detail.learn(report.detail);
            xid.tenant = xid.tenant.take().or_else(|| tenant_of(xid.detail.pid?));
        } else {
            self.faults += 1;
            self.count(gpu.clone(), report.code, report.time_ns);
            if self.recent.len() >= Self::MOST {
                // Roots stay longer: what follows in a storm still has to find them.
                let echo = self.recent.iter().position(|xid| xid.echo_of.is_some());
                self.recent.remove(echo.unwrap_or(0));
            }
            self.recent.push_back(Xid {
                number: self.faults,
                time_ns: report.time_ns,
                gpu,
                pci,
                code: report.code,
                tenant: report.detail.pid.and_then(tenant_of),
                detail: report.detail,
                sources: vec![report.source],
                echo_of: None,
            });
        }
        self.relate();
    }

    /// Of the last faults at most [`Self::MOST`], as they were first reported.
    pub fn recent(&self) -> impl Iterator<Item = &Xid> {
        self.recent.iter()
    }

    /// Counts by GPU and code since start. Monotonic: a fault is counted when its first report comes.
    pub fn counts(&self) -> impl Iterator<Item = (Option<&GpuId>, u32, XidCount)> {
        self.counts.iter().map(|((gpu, code), count)| (gpu.as_ref(), *code, *count))
    }

    /// Reports by GPU, code and source: what one source told and another did not shows here.
    pub fn reports(&self) -> impl Iterator<Item = (Option<&GpuId>, u32, XidSource, u64)> {
        self.reports.iter().map(|((gpu, code, source), count)| (gpu.as_ref(), *code, *source, *count))
    }

    /// Faults that found no counter.
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    fn count(&mut self, gpu: Option<GpuId>, code: u32, time_ns: u64) {
        let key = (gpu, code);
        if self.counts.len() >= Self::MOST_COUNTS && !self.counts.contains_key(&key) {
            self.uncounted += 1;
            return;
        }
        let count = self.counts.entry(key).or_insert(XidCount { count: 0, last_ns: 0 });
        count.count += 1;
        count.last_ns = count.last_ns.max(time_ns);
    }

    /// Says of each fault whether it is an echo, and of which: the last root before it on its GPU, within
    /// [`Self::ECHO_NS`], that its code follows. Done again at each report: sources are not in order, so a root may come
    /// after its echo, and a cause may be told by the second source.
    fn relate(&mut self) {
        let mut order: Vec<usize> = (0..self.recent.len()).collect();
        order.sort_by_key(|at| (self.recent[*at].time_ns, self.recent[*at].number));
        let mut roots: Vec<usize> = Vec::new();
        for at in order {
            let xid = &self.recent[at];
            let root = roots.iter().rev().map(|root| &self.recent[*root]).find(|root| {
                is_one_gpu(xid, root.gpu.as_ref(), root.pci)
                    && xid.time_ns - root.time_ns <= Self::ECHO_NS
                    && follows(xid, root)
            });
            // A root that has left the list is still the root.
            let echo_of = root.map(|root| root.number).or(xid.echo_of);
            if echo_of.is_none() {
                roots.push(at);
            }
            self.recent[at].echo_of = echo_of;
        }
    }
}

fn is_one_gpu(xid: &Xid, gpu: Option<&GpuId>, pci: Option<PciAddress>) -> bool {
    (gpu.is_some() && gpu == xid.gpu.as_ref()) || (pci.is_some() && pci == xid.pci)
}

fn follows(xid: &Xid, root: &Xid) -> bool {
    if let Some(cause) = xid.detail.caused_by {
        return cause == root.code && xid.code != root.code;
    }
    let roots = FOLLOWERS.iter().find(|(code, _)| *code == xid.code).map(|(_, roots)| *roots);
    xid.code != root.code && roots.is_some_and(|roots| roots.is_empty() || roots.contains(&root.code))
}

/// The log's text goes on where the tracepoint's ends (a cause), and a name with a comma in it may stand before it.
fn is_same_text(one: Option<&str>, other: Option<&str>) -> bool {
    one.zip(other).is_none_or(|(one, other)| {
        let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
        long.contains(short.trim())
    })
}

#[cfg(test)]
mod tests;
