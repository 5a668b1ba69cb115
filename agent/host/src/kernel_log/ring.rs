//! Owns the kernel's log where `/dev/kmsg` may not be opened: texts as `syslog(2)` gives them, to the records that are new.
//! Refuses a line that may be a part of another: it begins as the kernel's own, and its words can be a tenant's.
//!
//! A pod's device cgroup stands before `/dev/kmsg` and before no system call. `SYSLOG_ACTION_READ_ALL` gives the last bytes of
//! the log and takes nothing away; which of them are new is known by the last lines of the text before.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

/// Asked for each time: some hundred lines. The whole log only where the last known line is not among them.
const TAIL: usize = 64 << 10;
/// Of a log of any length (`log_buf_len`).
const MOST: usize = 16 << 20;
/// The last lines of a text, by which it is found again.
const MARK: usize = 1024;
/// The kernel walks its whole log each time, 1.7 ms for 128 KiB: at most one hundredth of a processor, and no later than
/// what kills are joined within.
const SHARE: u32 = 100;
const SOONEST: Duration = Duration::from_millis(900);
const LATEST: Duration = Duration::from_secs(4);

/// Reads as `/dev/kmsg` does, over texts of `syslog(2)`.
pub(super) struct Ring<F> {
    tell: F,
    /// Of the whole log as text.
    size: usize,
    buffer: Vec<u8>,
    mark: Vec<u8>,
    /// Priority and time of the last line: a line with the same may be a part of it.
    before: Vec<u8>,
    sequence: u64,
    ready: Vec<u8>,
    given: usize,
    overrun: bool,
    next: Option<Instant>,
}

impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Ring<F> {
    /// `tell` fills its buffer with the last whole lines of the log; `size` bytes are what the log may have.
    pub(super) fn new(tell: F, size: usize) -> Self {
        Self {
            tell,
            // Each line has its priority and time before it, which the kernel keeps apart.
            size: size.saturating_mul(2).clamp(TAIL, MOST),
            buffer: vec![0; TAIL],
            mark: Vec::new(),
            before: Vec::new(),
            sequence: 0,
            ready: Vec::new(),
            given: 0,
            overrun: false,
            next: None,
        }
    }

    /// What is there already is not new. An error where lines have no time: they could not be told apart.
    pub(super) fn skip(&mut self) -> io::Result<()> {
        let text = self.ask(TAIL)?;
        if last_lines(&text).next().is_some_and(|line| Line::parse(line).is_none()) {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                "lines have no time; write Y to /sys/module/printk/parameters/time",
            ));
        }
        self.remember(&text);
        Ok(())
    }

    fn ask(&mut self, most: usize) -> io::Result<Vec<u8>> {
        self.buffer.resize(most, 0);
        let length = (self.tell)(&mut self.buffer)?;
        let text = self.buffer[..length.min(most)].to_vec();
        self.buffer.truncate(TAIL);
        self.buffer.shrink_to(TAIL);
        Ok(text)
    }

    fn remember(&mut self, text: &[u8]) {
        if let Some(line) = last_lines(text).next().and_then(Line::parse) {
            self.before = line.prefix.to_vec();
        }
        let mut from = text.len();
        for line in last_lines(text) {
            let begin = from - line.len() - 1;
            if text.len() - begin > MARK && from < text.len() {
                break;
            }
            from = begin;
        }
        self.mark = text[from..].to_vec();
    }

    /// Makes records of what is new.
    fn look(&mut self) -> io::Result<()> {
        let begun = Instant::now();
        let mut text = self.ask(TAIL)?;
        let mut known = after(&text, &self.mark);
        if known.is_none() && self.size > TAIL {
            text = self.ask(self.size)?;
            known = after(&text, &self.mark);
        }
        // Overwritten, or cleared by somebody: what is left is new.
        self.overrun = known.is_none();
        let fresh = text.get(known.unwrap_or(0)..).unwrap_or_default();
        (self.ready, self.given) = (Vec::new(), 0);
        for line in fresh.split(|byte| *byte == b'\n') {
            let Some(line) = Line::parse(line) else { continue };
            if line.prefix == self.before {
                continue;
            }
            self.before = line.prefix.to_vec();
            self.sequence += 1;
            line.write(self.sequence, &mut self.ready);
        }
        if !text.is_empty() {
            self.remember(&text);
        }
        self.next = Some(Instant::now() + (begun.elapsed() * SHARE).clamp(SOONEST, LATEST));
        Ok(())
    }
}

impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for Ring<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.given == self.ready.len() {
            if self.next.is_some_and(|next| Instant::now() < next) {
                return Err(ErrorKind::WouldBlock.into());
            }
            self.look()?;
            if std::mem::take(&mut self.overrun) {
                return Err(ErrorKind::BrokenPipe.into());
            }
            if self.ready.is_empty() {
                return Err(ErrorKind::WouldBlock.into());
            }
        }
        let rest = &self.ready[self.given..];
        let length = rest.len().min(into.len());
        into[..length].copy_from_slice(&rest[..length]);
        self.given += length;
        Ok(length)
    }
}

/// Where what comes after `mark` begins, at its last place in a text. A mark begins and ends with a line.
fn after(text: &[u8], mark: &[u8]) -> Option<usize> {
    if mark.is_empty() {
        return Some(0);
    }
    let mut begin = text.len();
    for line in last_lines(text) {
        begin -= line.len() + 1;
        if text[begin..].starts_with(mark) {
            return Some(begin + mark.len());
        }
    }
    None
}

/// The lines of a text from its end, without their ends. What is behind the last end is no line.
fn last_lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(&[][..], |end| &text[..end]);
    let none = whole.is_empty() && text.first() != Some(&b'\n');
    whole.rsplit(|byte| *byte == b'\n').take(if none { 0 } else { usize::MAX })
}

/// `<3>[   12.345678] text`, or `<3>[   12.345678][    T7] text` where the kernel says who wrote (`CONFIG_PRINTK_CALLER`).
struct Line<'a> {
    /// Priority and time, as they stand there.
    prefix: &'a [u8],
    priority: u32,
    usec: u64,
    text: &'a [u8],
}

impl<'a> Line<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let until = |bytes: &'a [u8], mark: u8| {
            let at = bytes.iter().position(|byte| *byte == mark)?;
            Some((str::from_utf8(&bytes[..at]).ok()?, &bytes[at + 1..]))
        };
        let (priority, rest) = until(line.strip_prefix(b"<")?, b'>')?;
        let (time, rest) = until(rest.strip_prefix(b"[")?, b']')?;
        let (seconds, micros) = time.trim_start().split_once('.')?;
        let usec = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros.parse().ok()?)?;
        let prefix = &line[..line.len() - rest.len()];
        let text = rest.strip_prefix(b" ").or_else(|| {
            let (caller, rest) = until(rest.strip_prefix(b"[")?, b']')?;
            let of = caller.trim_start().strip_prefix(['T', 'C'])?;
            of.parse::<u32>().ok()?;
            rest.strip_prefix(b" ")
        })?;
        Some(Self { prefix, priority: priority.parse().ok()?, usec, text })
    }

    /// As `/dev/kmsg` has it.
    fn write(&self, sequence: u64, into: &mut Vec<u8>) {
        let mut line = format!("{},{sequence},{},-;", self.priority, self.usec);
        for byte in self.text {
            if (b' '..127).contains(byte) && *byte != b'\\' {
                line.push(char::from(*byte));
            } else {
                let _ = write!(line, "\\x{byte:02x}");
            }
        }
        line.push('\n');
        into.extend_from_slice(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use super::super::{KernelLog, Notice};
    use super::*;

    /// A log that grows and forgets, as `syslog(2)` tells it.
    #[derive(Clone, Default)]
    struct Told(Rc<RefCell<Vec<String>>>);

    impl Told {
        fn say(&self, line: &str) {
            self.0.borrow_mut().push(format!("{line}\n"));
        }

        fn forget(&self, lines: usize) {
            self.0.borrow_mut().drain(..lines);
        }

        fn log(&self) -> KernelLog<Ring<impl FnMut(&mut [u8]) -> io::Result<usize> + use<>>> {
            let told = self.clone();
            let mut ring = Ring::new(
                move |buffer: &mut [u8]| {
                    let mut text = Vec::new();
                    for line in told.0.borrow().iter().rev() {
                        if text.len() + line.len() > buffer.len() {
                            break;
                        }
                        text.splice(0..0, line.bytes());
                    }
                    buffer[..text.len()].copy_from_slice(&text);
                    Ok(text.len())
                },
                1 << 20,
            );
            ring.skip().unwrap();
            KernelLog::over(std::path::Path::new("syslog(2)"), ring)
        }
    }

    /// The texts that are new, whenever the last look was.
    fn new(log: &mut KernelLog<Ring<impl FnMut(&mut [u8]) -> io::Result<usize>>>) -> Vec<(u32, String)> {
        log.source.next = None;
        let records = log.read(100_000).unwrap();
        records.into_iter().map(|record| (record.facility, record.text)).collect()
    }

    fn texts(found: &[(u32, String)]) -> Vec<&str> {
        found.iter().map(|(_, text)| text.as_str()).collect()
    }

    #[test]
    fn only_what_came_since_is_read_and_once() {
        let told = Told::default();
        told.say("<6>[    0.000000] Linux version");
        told.say("<6>[    1.000001] before the agent");
        let mut log = told.log();
        assert_eq!(new(&mut log), []);
        told.say("<3>[    2.000002] one");
        told.say("<3>[    2.000003][  T123] two, by a thread");
        told.say("<12>[    2.000004][    C1] from user space");
        let found = new(&mut log);
        assert_eq!(texts(&found), ["one", "two, by a thread", "from user space"]);
        assert_eq!(found.iter().map(|(facility, _)| *facility).collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!(new(&mut log), []);
        assert_eq!(log.lost(), 0);
    }

    #[test]
    fn an_empty_log_and_a_cleared_one_are_logs() {
        let told = Told::default();
        let mut log = told.log();
        assert_eq!(new(&mut log), []);
        told.say("<3>[    2.000002] first");
        assert_eq!(texts(&new(&mut log)), ["first"]);
        told.forget(1);
        assert_eq!((new(&mut log), log.lost()), (vec![], 0), "dmesg --clear, and nothing since");
        told.say("<3>[    3.000002] after");
        assert_eq!((texts(&new(&mut log)), log.lost()), (vec!["after"], 1));
    }

    #[test]
    fn a_flood_is_read_whole_where_the_kernel_still_has_it_and_counted_where_it_has_not() {
        let told = Told::default();
        told.say("<3>[    1.000001] known");
        let mut log = told.log();
        for at in 0..5_000 {
            told.say(&format!("<3>[    2.{at:06}] line {at} {}", "x".repeat(60)));
        }
        let found = new(&mut log);
        assert_eq!((found.len(), log.lost()), (5_000, 0));
        assert!(found[0].1.starts_with("line 0 ") && found[4_999].1.starts_with("line 4999 "));
        assert!(log.source.buffer.capacity() <= TAIL, "what was borrowed is given back");
        for at in 0..10 {
            told.say(&format!("<3>[    3.{at:06}] more {at}"));
        }
        told.forget(5_003);
        let found = new(&mut log);
        assert_eq!((found.len(), log.lost()), (8, 1), "the mark is gone: something was not seen");
    }

    #[test]
    fn a_line_within_a_record_is_not_believed() {
        let told = Told::default();
        told.say("<3>[    1.000001] known");
        let mut log = told.log();
        // A file's name with a newline in it; the kernel begins each line of a record as the record.
        told.say("<6>[    2.000002] tenant[7]: segfault at 0 ip 0 sp 0 error 4 in x");
        told.say("<6>[    2.000002] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=forged[55d0+1000]");
        told.say("<3>[    2.000003] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=true, Ch 1");
        // The next look begins within a record that the last one ended in.
        let found = new(&mut log);
        assert_eq!(found.len(), 2, "{found:?}");
        let known = |text: &str| matches!(Notice::parse(text, 0), Some(Notice::Xid(xid)) if xid.code == 31);
        assert!(known(&found[1].1) && Notice::parse(&found[0].1, 0).is_none(), "{found:?}");
        told.say("<3>[    2.000003] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=late");
        assert_eq!(new(&mut log), []);
    }

    #[test]
    fn what_is_not_printable_is_written_as_kmsg_writes_it() {
        let told = Told::default();
        told.say("<3>[    1.000001] known");
        let mut log = told.log();
        told.say("<3>[    2.000001] a\tb\\c é");
        assert_eq!(texts(&new(&mut log)), ["a\\x09b\\x5cc \\xc3\\xa9"]);
    }

    #[test]
    fn lines_without_a_time_are_refused_at_the_start() {
        let mut ring = Ring::new(
            |buffer: &mut [u8]| {
                buffer[..11].copy_from_slice(b"<6>no time\n");
                Ok(11)
            },
            1 << 17,
        );
        let refused = ring.skip().unwrap_err();
        assert!(refused.to_string().contains("printk/parameters/time"), "{refused}");
    }
}
