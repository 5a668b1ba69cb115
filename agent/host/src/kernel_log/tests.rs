use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::Write as _;

use cotenant_model::GpuId;
use cotenant_model::kill::{CgroupKills, Kill, KillLine, Kills, OomLine, OomSummary, Scope};
use cotenant_model::xid::{PciAddress, XidDetail, XidGpu, XidReport, XidSource};

use super::*;

fn record(line: &str) -> Record {
    Record::parse(line.as_bytes()).unwrap_or_else(|| panic!("not a record: {line}"))
}

fn notice(line: &str) -> Option<Notice> {
    record(line).notice(5)
}

fn summary(line: &str) -> OomSummary {
    match notice(line) {
        Some(Notice::Oom(OomLine::Summary(summary))) => summary,
        other => panic!("{line}: {other:?}"),
    }
}

fn killed(line: &str) -> KillLine {
    match notice(line) {
        Some(Notice::Oom(OomLine::Killed(line))) => line,
        other => panic!("{line}: {other:?}"),
    }
}

fn xid(text: &str) -> XidReport {
    match notice(&format!("3,900,77,-;{text}")) {
        Some(Notice::Xid(report)) => report,
        other => panic!("{text}: {other:?}"),
    }
}

/// Scope, limit owner, task cgroup, comm, pid.
fn told(summary: &OomSummary) -> (Scope, Option<&str>, Option<&str>, Option<&str>, u32) {
    let OomSummary { scope, limit_owner, task_cgroup, comm, pid } = summary;
    (*scope, limit_owner.as_deref(), task_cgroup.as_deref(), comm.as_deref(), *pid)
}

#[test]
fn a_record_is_its_prefix_and_its_text() {
    let found = record("6,409,13858362230,-;text; with , all");
    assert_eq!((found.facility, found.level, found.sequence, found.usec), (0, 6, 409, 13_858_362_230));
    assert_eq!(found.text, "text; with , all");
    assert_eq!(record("30,1,2,-,caller=T676;x").facility, 3);
    for junk in [
        "",
        " SUBSYSTEM=pci",
        "6,409;x",
        "6,409,1",
        "a,b,c,-;x",
        "-6,1,1,-;x",
        "99999999999999999999,1,1,-;x",
    ] {
        assert_eq!(Record::parse(junk.as_bytes()), None, "{junk}");
    }
    assert_eq!(Record::parse(b"6,1,2,-;\xff"), None, "the kernel escapes such bytes");
}

#[test]
fn memcg_kills_of_old_and_new_kernels() {
    // Linux 5.15 with kubelet on cgroup v1, 6.1 with systemd on v2, 6.18 as on the H200 host.
    let old = summary(
        "6,1201,88,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=9f2,mems_allowed=0-1,\
         oom_memcg=/kubepods/burstable/pod77/9f2,task_memcg=/kubepods/burstable/pod77/9f2,task=python3,pid=4711,uid=1000",
    );
    let container = Some("/kubepods/burstable/pod77/9f2");
    assert_eq!(told(&old), (Scope::Memcg, container, container, Some("python3"), 4711));
    let newer = summary(
        "6,1202,88,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=user.slice,mems_allowed=0,\
         oom_memcg=/user.slice,task_memcg=/user.slice/user-1000.slice/session-3.scope,task=tail,pid=99,uid=1000",
    );
    let session = Some("/user.slice/user-1000.slice/session-3.scope");
    assert_eq!(told(&newer), (Scope::Memcg, Some("/user.slice"), session, Some("tail"), 99));
    let newest = summary(
        "6,409,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/t1,\
         task_memcg=/t1,task=python3,pid=1056,uid=0",
    );
    assert_eq!(told(&newest), (Scope::Memcg, Some("/t1"), Some("/t1"), Some("python3"), 1056));
}

#[test]
fn global_and_cpuset_kills_have_no_limit_owner() {
    let global = summary(
        "6,5,1,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
         task_memcg=/system.slice/x.service,task=java,pid=7,uid=0",
    );
    assert_eq!(told(&global), (Scope::Global, None, Some("/system.slice/x.service"), Some("java"), 7));
    let cpuset = summary(
        "6,5,1,-;oom-kill:constraint=CONSTRAINT_CPUSET,nodemask=0,cpuset=box,mems_allowed=0,2-3,global_oom,\
         task_memcg=/box,task=java,pid=7,uid=0",
    );
    assert_eq!(told(&cpuset), (Scope::Cpuset, None, Some("/box"), Some("java"), 7));
    let bare = summary(
        "6,5,1,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,task=java,pid=7,uid=0",
    );
    assert_eq!(told(&bare), (Scope::Global, None, None, Some("java"), 7));
}

#[test]
fn c100_hostile_names_do_not_move_the_blame() {
    // Recorded on Linux 6.18: the cgroup is called `host-oom,task=x,pid=1`, the process `x,pid=1,u)\n0`.
    let recorded = summary(
        r"6,409,13858362230,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/host-oom,task=x,pid=1,task_memcg=/host-oom,task=x,pid=1,task=x,pid=1,u)\x0a0,pid=676,uid=0",
    );
    let cgroup = Some("/host-oom,task=x,pid=1");
    assert_eq!(told(&recorded), (Scope::Memcg, cgroup, cgroup, Some("x,pid=1,u)\n0"), 676));
    let recorded = killed(
        r"3,410,13858362246,-;Memory cgroup out of memory: Killed process 676 (x,pid=1,u)\x0a0) total-vm:33012kB, anon-rss:23168kB, file-rss:6652kB, shmem-rss:0kB, UID:0 pgtables:96kB oom_score_adj:0",
    );
    assert_eq!(recorded, KillLine { memcg: true, pid: 676, comm: "x,pid=1,u)\n0".to_owned() });
    // A cpuset that plays the rest of the line.
    let line = summary(
        "6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=x,task_memcg=x,\
         task=y,pid=1,uid=0,mems_allowed=0,oom_memcg=/real,task_memcg=/real/in,task=a,pid=2,uid=3,pid=55,uid=66",
    );
    assert_eq!(told(&line), (Scope::Memcg, Some("/real"), Some("/real/in"), Some("a,pid=2,uid=3"), 55));
    // A process called `a) total-vm:1`.
    let line = killed("3,1,1,-;Out of memory: Killed process 8 (a) total-vm:1) total-vm:9kB, anon-rss:1kB");
    assert_eq!((line.pid, line.comm.as_str(), line.memcg), (8, "a) total-vm:1", false));
}

#[test]
fn what_has_two_readings_is_unknown() {
    // Either the cgroup is `/p/c,task=a` and the process `b`, or `/p/c` and `a,task=b`.
    let line = summary(
        "6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/p,\
         task_memcg=/p/c,task=a,task=b,pid=9,uid=0",
    );
    assert_eq!(
        told(&line),
        (Scope::Memcg, Some("/p"), None, None, 9),
        "but not the PID, and not whose limit it was"
    );
    let line = summary(
        "6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/p,\
         task_memcg=/q,task=a,pid=9,uid=0",
    );
    assert_eq!(
        told(&line),
        (Scope::Memcg, None, None, None, 9),
        "a task that is not below the limit it died of"
    );
}

#[test]
fn kill_lines_of_each_kind() {
    let tail = "total-vm:4194304kB, anon-rss:3071000kB, file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:6200kB oom_score_adj:0";
    let line = killed(&format!("3,1,1,-;Memory cgroup out of memory: Killed process 1056 (python3) {tail}"));
    assert_eq!(line, KillLine { memcg: true, pid: 1056, comm: "python3".to_owned() });
    assert!(!killed(&format!("3,1,1,-;Out of memory: Killed process 7 (java) {tail}")).memcg);
    let allocating =
        format!("3,1,1,-;Out of memory (oom_kill_allocating_task): Killed process 7 (java) {tail}");
    assert_eq!(killed(&allocating).pid, 7);
    let group = notice("6,1,1,-;Tasks in /job,1/x are going to be killed due to memory.oom.group set");
    assert_eq!(group, Some(Notice::Oom(OomLine::Group { cgroup: "/job,1/x".to_owned() })));
}

#[test]
fn only_the_kernel_is_believed() {
    let kill = "Memory cgroup out of memory: Killed process 1 (init) total-vm:1kB, anon-rss:1kB";
    assert!(notice(&format!("3,1,1,-;{kill}")).is_some());
    for facility in [1, 3, 16] {
        assert_eq!(notice(&format!("{},1,1,-;{kill}", facility << 3 | 3)), None);
        let fault = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.";
        assert_eq!(notice(&format!("{},1,1,-;{fault}", facility << 3 | 3)), None);
    }
}

#[test]
fn lines_that_begin_with_a_process_name_say_nothing() {
    for text in [
        "NVRM: Xid (PCI: invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "NVRM: Xid (PCI:[77]: segfault at 0 ip 0 sp 0 error 4",
        "oom-kill:constr invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "Out of memory: invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "Tasks in / invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    ] {
        assert_eq!(notice(&format!("4,1,1,-;{text}")), None, "{text}");
    }
}

#[test]
fn spoilt_lines_are_refused() {
    let good = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/t1,\
                task_memcg=/t1,task=python3,pid=1056,uid=0";
    let fault = "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 31, pid=1234, name=python3, Ch 00000010";
    for line in [good, fault] {
        for end in 0..line.len() {
            // Cut anywhere: never a panic, and never a process that is not named.
            match Notice::parse(&line[..end], 0) {
                Some(Notice::Oom(OomLine::Summary(summary))) => assert_eq!(summary.pid, 1056, "{end}"),
                Some(Notice::Xid(report)) => assert!(line.contains(&format!(": {}", report.code)), "{end}"),
                Some(other) => panic!("{other:?}"),
                None => {}
            }
        }
    }
    for text in [
        "oom-kill:constraint=CONSTRAINT_MOON,nodemask=(null),task=x,pid=1,uid=0",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=x,pid=+1,uid=0",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=x,pid=99999999999,uid=0",
        "Memory cgroup out of memory: Killed process -1 (x) total-vm:1kB",
        "Memory cgroup out of memory: Killed process 1 (sixteen_letters_) total-vm:1kB",
        "NVRM: Xid (PCI:0000:3b:zz): 31, pid=1",
        "NVRM: Xid (PCI:0000:3b:00): , pid=1",
        "NVRM: GPU at PCI:0000:3b:00: GPU-junk",
    ] {
        assert_eq!(notice(&format!("3,1,1,-;{text}")), None, "{text}");
    }
}

#[test]
fn the_longest_hostile_line_is_read_at_once() {
    let mut path = String::new();
    while path.len() < 7000 {
        write!(path, "/a,task_memcg=/a,task=b").unwrap();
    }
    let line = format!(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg={path},\
         pid=3,uid=0"
    );
    let began = std::time::Instant::now();
    let Some(Notice::Oom(OomLine::Summary(summary))) = Notice::parse(&line, 0) else { panic!("{line}") };
    assert_eq!(summary.pid, 3);
    assert!(began.elapsed() < std::time::Duration::from_secs(1), "{:?}", began.elapsed());
}

#[test]
fn xids_of_old_and_new_drivers() {
    let place = PciAddress::parse("0000:3b:00").unwrap();
    let pid = |text: &str| (xid(text).detail.pid, xid(text).detail.name);
    let named = Some("python3".to_owned());

    let new =
        xid("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python3, Ch 00000010, intr 00000000. MMU Fault");
    assert_eq!(
        (new.source, new.time_ns, new.gpu.clone(), new.code),
        (XidSource::Kmsg, 5, XidGpu::Pci(place), 31)
    );
    let message = Some("Ch 00000010, intr 00000000. MMU Fault".to_owned());
    let detail = XidDetail { pid: Some(1234), name: named.clone(), message, ..XidDetail::default() };
    assert_eq!(new.detail, detail);

    assert_eq!(
        pid("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, Ch 00000010, engmask 00000101"),
        (Some(1234), None)
    );
    let lost = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
    assert_eq!(pid(&format!("NVRM: Xid (PCI:0000:3b:00): 79, {lost}")), (None, None));
    assert_eq!(pid("NVRM: Xid (PCI:0000:3b:00): 79, pid=<unknown>, GPU has fallen off"), (None, None));
    let none = xid("NVRM: Xid (PCI:0000:3b:00.0): 79, GPU has fallen off the bus.");
    assert_eq!(none.gpu, XidGpu::Pci(place));
    assert_eq!(none.detail.message.as_deref(), Some("GPU has fallen off the bus."));
    let oldest = xid("NVRM: Xid (0000:03:00): 13, Graphics Exception");
    assert_eq!((oldest.gpu, oldest.code), (XidGpu::Pci(PciAddress::parse("0000:03:00").unwrap()), 13));
    let mig = xid(
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:01): 94, pid=7194, name=x, Contained: CE User Channel",
    );
    assert_eq!((mig.code, mig.detail.gpu_instance, mig.detail.pid), (94, Some(5), Some(7194)));
    let echo = xid("NVRM: Xid (PCI:0000:3b:00): 45, pid=9, name=x, Ch 00000008 caused by previous Xid 31");
    assert_eq!(echo.detail.caused_by, Some(31));
    assert_eq!(xid("NVRM: Xid (PCI:0000:3b:00): 45").code, 45);
}

#[test]
fn a_name_in_an_xid_does_not_move_the_blame() {
    let report = xid(r"NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=a, pid=1, b\x0a, Ch 00000010");
    assert_eq!((report.detail.pid, report.detail.name.as_deref()), (Some(1234), Some("a")));
    assert!(report.detail.message.is_some_and(|message| message.ends_with("Ch 00000010")));
    let report = xid("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=a): 79, b, Ch 00000010");
    assert_eq!((report.code, report.detail.pid), (31, Some(1234)));
    let long = xid(&format!("NVRM: Xid (PCI:0000:3b:00): 31, {}", "é".repeat(4000)));
    assert!(long.detail.message.is_some_and(|message| message.len() <= 512));
}

#[test]
fn the_driver_says_which_gpu_sits_where() {
    let line = "3,1,1,-;NVRM: GPU at PCI:0000:3b:00: GPU-12345678-9abc-def0-0102-030405060708";
    let gpu = GpuId::from_nvml("GPU-12345678-9abc-def0-0102-030405060708");
    assert_eq!(notice(line), Some(Notice::Gpu { pci: PciAddress::parse("0000:3b:00").unwrap(), gpu }));
}

/// Answers of a `/dev/kmsg`, one a read.
struct Answers(VecDeque<Result<&'static [u8], rustix::io::Errno>>);

impl Read for Answers {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let answer = self.0.pop_front().unwrap_or(Err(rustix::io::Errno::AGAIN))?;
        buffer[..answer.len()].copy_from_slice(answer);
        Ok(answer.len())
    }
}

#[test]
fn overwritten_records_are_counted() {
    use rustix::io::Errno;
    let answers = [
        Err(Errno::PIPE),
        Ok(&b"6,10,1,-;a\n SUBSYSTEM=pci\n DEVICE=+pci:0\n"[..]),
        Ok(b"6,11,1,-;b\n"),
        Err(Errno::INTR),
        Err(Errno::PIPE),
        Err(Errno::PIPE),
        Ok(b"6,61,1,-;c\n"),
        Ok(b"what\n"),
        Err(Errno::AGAIN),
        Ok(b"6,62,1,-;d\n"),
        Err(Errno::IO),
    ];
    let mut log = KernelLog::over(Path::new("/dev/kmsg"), Answers(VecDeque::from(answers)));
    let texts = |records: Vec<Record>| records.into_iter().map(|record| record.text).collect::<Vec<_>>();
    assert_eq!(texts(log.read(2).unwrap()), ["a", "b"]);
    assert_eq!(log.lost(), 1, "at least one was overwritten before the first read");
    assert_eq!(texts(log.read(100).unwrap()), ["c"]);
    assert_eq!((log.lost(), log.malformed()), (1 + 49, 1));
    let error = log.read(100).unwrap_err();
    assert!(matches!(error, KernelLogError::Read { .. }), "{error}");
}

#[test]
fn a_file_is_followed_over_cuts_and_endless_lines() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("dev")).unwrap();
    let path = root.path().join("dev/kmsg");
    let host = Host::at(root.path());
    assert!(matches!(host.kernel_log(Start::End), Err(KernelLogError::Open { .. })));
    std::fs::write(&path, "6,1,1,-;before\n").unwrap();
    let mut all = host.kernel_log(Start::Beginning).unwrap();
    let mut new = host.kernel_log(Start::End).unwrap();
    let mut writer = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    let mut write = |text: &str| writer.write_all(text.as_bytes()).unwrap();
    assert_eq!(all.read(9).unwrap().len(), 1);
    assert_eq!(new.read(9).unwrap(), []);
    write("6,2,1,-;cut he");
    assert_eq!(new.read(9).unwrap(), []);
    write("re\n6,3,1,-;");
    write(&"x".repeat(5 * LONGEST));
    assert_eq!(
        new.read(9).unwrap().iter().map(|record| record.text.as_str()).collect::<Vec<_>>(),
        ["cut here"]
    );
    write(&"x".repeat(3 * LONGEST));
    write("\n6,4,1,-;after\n");
    let after = new.read(9).unwrap();
    assert_eq!(after.iter().map(|record| record.sequence).collect::<Vec<_>>(), [4]);
    assert_eq!((new.malformed(), new.lost()), (1, 0));
    assert!(new.pending.capacity() < 4 * LONGEST);
}

#[test]
fn live_log_does_not_believe_a_forged_kill() {
    let (Ok(mut log), Ok(mut writer)) =
        (Host::live().kernel_log(Start::End), std::fs::OpenOptions::new().write(true).open("/dev/kmsg"))
    else {
        eprintln!("skipped: /dev/kmsg may not be opened");
        return;
    };
    let mark = std::process::id();
    let lie = format!("<3>NVRM: Xid (PCI:0000:3b:00): 79, pid={mark}, name=forged, nothing happened\n");
    writer.write_all(lie.as_bytes()).unwrap();
    let records = log.read(1000).unwrap();
    let found = records.iter().find(|record| record.text.contains(&format!("pid={mark}")));
    let Some(found) = found else { return eprintln!("skipped: the write was rate-limited") };
    assert!(Notice::parse(&found.text, 0).is_some(), "it looks like one");
    assert_eq!((found.facility, found.notice(0)), (1, None));
}

/// A memory cgroup of 16 MiB with a name that a tenant might choose.
struct SmallCgroup {
    path: String,
    directory: PathBuf,
}

impl SmallCgroup {
    fn make() -> Option<Self> {
        let path = format!("/cotenant-test,task=x,pid=1,uid=0-{}", std::process::id());
        let hierarchies =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        hierarchies.iter().find_map(|(hierarchy, limit)| {
            let cgroup = Self { path: path.clone(), directory: PathBuf::from(format!("{hierarchy}{path}")) };
            std::fs::create_dir(&cgroup.directory).ok()?;
            std::fs::write(cgroup.directory.join(limit), "16M").ok()?;
            Some(cgroup)
        })
    }

    /// Runs `tail /dev/zero` in it, which never stops to take memory; its PID.
    fn kill_one(&self) -> u32 {
        let script = r#"echo $$ > "$0/cgroup.procs" && exec tail /dev/zero"#;
        let mut command = std::process::Command::new("sh");
        command.arg("-c").arg(script).arg(&self.directory).stdout(std::process::Stdio::null());
        let mut child = command.spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        pid
    }
}

impl Drop for SmallCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.directory);
    }
}

#[test]
fn c99_live_kills_are_in_log_and_counter_with_their_cgroup() {
    let host = Host::live();
    let (Ok(mut log), Some(cgroup)) = (host.kernel_log(Start::End), SmallCgroup::make()) else {
        eprintln!("skipped: no access to /dev/kmsg or to memory cgroups");
        return;
    };
    let count = || host.memory_events(&cgroup.path).unwrap().unwrap().oom_kill.unwrap();
    assert_eq!(count(), 0);
    let victims: Vec<u32> = (0..5).map(|_| cgroup.kill_one()).collect();
    assert_eq!(count(), 5);
    // The kernel leaves summaries out after ten in five seconds: what other tests make die counts as well.
    let mut summaries = Vec::new();
    let mut kills = Kills::default();
    kills.count(CgroupKills { since_ns: 0, time_ns: 9, cgroup: cgroup.path.clone(), kills: 5 });
    for record in log.read(10_000).unwrap() {
        if let Some(Notice::Oom(line)) = record.notice(7) {
            if let OomLine::Summary(summary) = &line {
                summaries.push(summary.pid);
            }
            kills.log(7, record.sequence, line);
        }
    }
    let settled = kills.settle(u64::MAX, |_, _| None);
    let kills: Vec<&Kill> = settled.incidents.iter().flat_map(|incident| &incident.kills).collect();
    let told: Vec<u32> = kills.iter().map(|kill| kill.tgid).filter(|tgid| victims.contains(tgid)).collect();
    assert_eq!(told, victims);
    for kill in kills.iter().filter(|kill| victims.contains(&kill.tgid)) {
        assert_eq!((kill.scope, kill.comm.as_deref()), (Some(Scope::Memcg), Some("tail")));
        let owner = summaries.contains(&kill.tgid).then_some(cgroup.path.as_str());
        assert_eq!((kill.limit_owner.as_deref(), kill.task_cgroup.as_deref()), (owner, owner));
    }
    assert_eq!((settled.unseen, log.lost(), log.malformed()), (vec![], 0, 0));
}
