//! Owns decoding what travels through the ring, as a pure function of bytes.
//! Refuses to resolve: processes are ids, GPUs are the kernel side's own numbers.

use cotenant_abi::{
    EVENT_DUPLICATE_LIBRARY, EVENT_FAILED, EVENT_KILLED, EVENT_PROCESS_ENDED, EVENT_PROCESS_SEEN,
    EVENT_RETRIED, EVENT_SLOW, EVENT_XID, MAX_HOLDERS, Operation,
};
use cotenant_model::{
    CudaError, ProcessId,
    report::{FailedCall, KilledThread, RetriedCall, SlowCall},
    sample::StackId,
    xid::{PciAddress, XidDetail, XidGpu, XidReport, XidSource},
};

use crate::{LibraryId, watch::Happening};

/// A rare fact for the model. The GPU of a call is a code that [`crate::Reader::gpu`] resolves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Failed { gpu: u8, call: FailedCall },
    Killed(KilledThread),
    Slow { gpu: u8, call: SlowCall },
    Retried { gpu: u8, call: RetriedCall },
    Fault(XidReport),
}

/// Reads integers in order; `None` once the record is too short.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// An unknown tag, or a record that is too short, is nothing.
pub(crate) fn decode(bytes: &[u8]) -> Option<Happening> {
    let mut fields = Cursor(bytes);
    // Of an Xid the second word is the code, and the third the time.
    let (tag, tgid, process) = (fields.u32()?, fields.u32()?, fields.u64()?);
    let id = ProcessId(process);
    match tag {
        EVENT_PROCESS_SEEN => {
            let (_at, cgroup_id) = (fields.u64()?, fields.u64()?);
            Some(Happening::ProcessSeen { id, tgid, cgroup_id })
        }
        EVENT_PROCESS_ENDED => Some(Happening::ProcessEnded { id, tgid }),
        EVENT_DUPLICATE_LIBRARY => {
            let (_at, _cgroup_id) = (fields.u64()?, fields.u64()?);
            Some(Happening::DuplicateLibrary {
                goes: LibraryId(fields.u32()?),
                stays: LibraryId(fields.u32()?),
            })
        }
        EVENT_FAILED => failed(id, tgid, fields).map(Happening::Reported),
        EVENT_KILLED => killed(process, tgid, fields).map(Happening::Reported),
        EVENT_RETRIED => retried(id, fields).map(Happening::Reported),
        EVENT_SLOW => slow(id, tgid, fields).map(Happening::Reported),
        EVENT_XID => fault(tgid, process, fields).map(|report| Happening::Reported(Report::Fault(report))),
        _ => None,
    }
}

fn failed(process: ProcessId, tgid: u32, mut fields: Cursor<'_>) -> Option<Report> {
    let (at, requested, total) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let code = fields.u32()?;
    let (operation, gpu) = (Operation::from_tag(fields.u8()?)?, fields.u8()?);
    let [unplaced, _pad] = fields.take::<2>()?;
    let own = fields.u64()?;
    let mut holders = Vec::new();
    for _ in 0..MAX_HOLDERS {
        let (holder, bytes) = (fields.u64()?, fields.u64()?);
        if holder != 0 {
            holders.push((ProcessId(holder), bytes));
        }
    }
    let requested = (requested > 0).then_some(requested);
    let error = CudaError(code);
    let call = FailedCall {
        process,
        tgid,
        at,
        operation,
        error,
        requested,
        total,
        own,
        holders,
        complete: unplaced == 0,
    };
    Some(Report::Failed { gpu, call })
}

fn killed(process: u64, tgid: u32, mut fields: Cursor<'_>) -> Option<Report> {
    let (marked_at, ended_at, cgroup_id) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (thread, uid, trigger, _pad) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let trigger_cgroup_id = fields.u64()?;
    let comm: [u8; 16] = fields.take()?;
    let comm = comm.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(Report::Killed(KilledThread {
        process: (process != 0).then_some(ProcessId(process)),
        tgid,
        tid: thread,
        uid,
        comm: String::from_utf8_lossy(comm).into_owned(),
        cgroup_id,
        marked_at,
        ended_at,
        trigger,
        trigger_cgroup_id,
    }))
}

fn slow(process: ProcessId, tgid: u32, mut fields: Cursor<'_>) -> Option<Report> {
    let (start, duration_ns, blocked_ns) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (runnable_ns, bytes, longest_ns) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let culprit = fields.u64()?;
    let longest_stack = StackId::new(i32::from_ne_bytes(fields.take()?));
    let thread = fields.u32()?;
    let (operation, gpu) = (Operation::from_tag(fields.u8()?)?, fields.u8()?);
    let shared = fields.u8()? != 0;
    fields.u8()?;
    let call = SlowCall {
        process,
        tgid,
        tid: thread,
        operation,
        error: CudaError(fields.u32()?),
        start,
        duration_ns,
        blocked_ns,
        runnable_ns,
        bytes: (bytes > 0).then_some(bytes),
        longest_ns,
        longest_stack,
        longest_culprit: (culprit != 0).then_some(ProcessId(culprit)),
        shared,
    };
    Some(Report::Slow { gpu, call })
}

fn retried(process: ProcessId, mut fields: Cursor<'_>) -> Option<Report> {
    let (at, bytes, failed_at) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (operation, gpu) = (Operation::from_tag(fields.u8()?)?, fields.u8()?);
    Some(Report::Retried { gpu, call: RetriedCall { process, operation, at, failed_at, bytes } })
}

/// The message is the driver's, without the process that stands before it in the kernel's log: that one is learned when
/// the log's line joins this report.
fn fault(code: u32, time_ns: u64, mut fields: Cursor<'_>) -> Option<XidReport> {
    let (device, message): ([u8; 32], [u8; 128]) = (fields.take()?, fields.take()?);
    let text = |bytes: &[u8]| {
        String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
    };
    let gpu = XidGpu::Pci(PciAddress::parse(&text(&device))?);
    let message = Some(text(&message)).filter(|message| !message.is_empty());
    let detail = XidDetail { message, ..XidDetail::default() };
    Some(XidReport { source: XidSource::Tracepoint, time_ns, gpu, code, detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(tag: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(tag.to_ne_bytes());
        bytes.extend(7u32.to_ne_bytes());
        bytes.extend(8u64.to_ne_bytes());
        bytes
    }

    fn event(tag: u32) -> Vec<u8> {
        let mut bytes = head(tag);
        bytes.extend(9u64.to_ne_bytes());
        bytes.extend(10u64.to_ne_bytes());
        bytes.extend(11u32.to_ne_bytes());
        bytes.extend(12u32.to_ne_bytes());
        bytes
    }

    #[test]
    fn every_tag_decodes_and_others_are_nothing() {
        let seen = Happening::ProcessSeen { id: ProcessId(8), tgid: 7, cgroup_id: 10 };
        assert_eq!(decode(&event(EVENT_PROCESS_SEEN)), Some(seen));
        let ended = Happening::ProcessEnded { id: ProcessId(8), tgid: 7 };
        assert_eq!(decode(&event(EVENT_PROCESS_ENDED)), Some(ended));
        let duplicate = Happening::DuplicateLibrary { goes: LibraryId(11), stays: LibraryId(12) };
        assert_eq!(decode(&event(EVENT_DUPLICATE_LIBRARY)), Some(duplicate));
        assert_eq!(decode(&event(99)), None);
        assert_eq!(decode(&event(EVENT_PROCESS_SEEN)[..31]), None);
    }

    #[test]
    fn c59_a_failure_carries_who_held_the_gpu() {
        let mut bytes = head(EVENT_FAILED);
        for word in [9u64, 1 << 30, 5 << 30] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(2u32.to_ne_bytes());
        bytes.extend([Operation::MemAlloc as u8, 3, 0, 0]);
        bytes.extend((1u64 << 30).to_ne_bytes());
        for (process, held) in [(21u64, 4u64 << 30), (8, 1 << 30)] {
            bytes.extend(process.to_ne_bytes());
            bytes.extend(held.to_ne_bytes());
        }
        bytes.extend([0; 16 * (MAX_HOLDERS - 2)]);
        assert_eq!(bytes.len(), size_of::<cotenant_abi::Failed>());
        let Some(Happening::Reported(Report::Failed { gpu: 3, call })) = decode(&bytes) else {
            panic!("not a failure")
        };
        assert_eq!(call.holders, [(ProcessId(21), 4 << 30), (ProcessId(8), 1 << 30)]);
        assert_eq!((call.requested, call.total, call.own), (Some(1 << 30), 5 << 30, 1 << 30));
    }

    #[test]
    fn c107_a_fault_announced_by_tracepoint_has_its_place_and_its_text() {
        let mut bytes = Vec::new();
        for word in [EVENT_XID, 79] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(1_000u64.to_ne_bytes());
        let padded = |text: &str, size| {
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(size, 0);
            bytes
        };
        bytes.extend(padded("0000:3b:00.0", 32));
        bytes.extend(padded("GPU has fallen off the bus.", 128));
        assert_eq!(bytes.len(), size_of::<cotenant_abi::XidFault>());
        let Some(Happening::Reported(Report::Fault(fault))) = decode(&bytes) else { panic!("not a fault") };
        let place = PciAddress { domain: 0, bus: 0x3b, device: 0 };
        assert_eq!((fault.code, fault.time_ns, fault.gpu), (79, 1_000, XidGpu::Pci(place)));
        assert_eq!(fault.source, XidSource::Tracepoint);
        assert_eq!(fault.detail.message.as_deref(), Some("GPU has fallen off the bus."));
        bytes[16] = b'x';
        assert_eq!(decode(&bytes), None, "no place, no fault");
    }

    #[test]
    fn c97_a_kill_tells_victim_and_trigger_apart() {
        let mut bytes = head(EVENT_KILLED);
        for word in [100u64, 200, 300] {
            bytes.extend(word.to_ne_bytes());
        }
        for word in [17u32, 1000, 99, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(301u64.to_ne_bytes());
        bytes.extend(*b"python3\0\0\0\0\0\0\0\0\0");
        assert_eq!(bytes.len(), size_of::<cotenant_abi::Killed>());
        let Some(Happening::Reported(Report::Killed(killed))) = decode(&bytes) else { panic!("not a kill") };
        assert_eq!((killed.tgid, killed.tid, killed.trigger), (7, 17, 99));
        assert_eq!((killed.cgroup_id, killed.trigger_cgroup_id, killed.comm.as_str()), (300, 301, "python3"));
    }
}
