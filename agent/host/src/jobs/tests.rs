//! Owns the directory of the prolog and `devices.list`, as sites write them and as somebody else might.
//! Refuses a running Slurm: that one is in the tests with runtimes.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
};

use super::*;

const U: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

fn root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        eprintln!("not root: no file here can be root's");
    }
    root
}

fn host() -> (tempfile::TempDir, Host, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let mapping = directory.path().join("mapping");
    fs::create_dir(&mapping).unwrap();
    fs::create_dir_all(directory.path().join("sys/fs/cgroup")).unwrap();
    fs::write(directory.path().join("sys/fs/cgroup/cgroup.procs"), "").unwrap();
    let host = Host::at(directory.path());
    (directory, host, mapping)
}

fn look(host: &Host, mapping: &Path) -> JobListing {
    let mut listing = JobListing::default();
    listing.look(host, Some(mapping));
    listing
}

fn jobs(listing: &JobListing) -> Vec<&str> {
    listing.grants.iter().map(|grant| grant.job.as_str()).collect()
}

#[test]
fn c24_a_file_a_gpu_and_a_line_a_job_are_a_grant() {
    if !root() {
        return;
    }
    let (_directory, host, mapping) = host();
    fs::write(mapping.join("0"), "42\n43\n\n").unwrap();
    fs::write(mapping.join("10"), "42").unwrap();
    fs::write(mapping.join(format!("GPU-{U}")), " 44 \n").unwrap();
    fs::write(mapping.join(format!("MIG-{U}")), "45\n").unwrap();
    for other in ["README", "0.3", "-1", "00", "4294967296", "GPU-1"] {
        fs::write(mapping.join(other), "46\n").unwrap();
    }
    fs::create_dir(mapping.join("7")).unwrap();
    let listing = look(&host, &mapping);
    let uuid = |kind: &str| JobDevice::Uuid(GpuId::from_nvml(&format!("{kind}-{U}")));
    let expected = [
        ("42", vec![JobDevice::Index(0), JobDevice::Index(10)]),
        ("43", vec![JobDevice::Index(0)]),
        ("44", vec![uuid("GPU")]),
        ("45", vec![uuid("MIG")]),
    ];
    let expected: Vec<JobGrant> = expected
        .into_iter()
        .map(|(job, devices)| JobGrant { job: job.into(), devices: devices.into_iter().collect() })
        .collect();
    assert_eq!(listing.grants, expected);
    assert!(listing.mapped && listing.error.is_none());
    // The directory.
    assert_eq!((listing.distrusted, listing.unread), (1, 0));
}

#[test]
fn c24_what_somebody_else_can_write_is_no_grant() {
    if !root() {
        return;
    }
    let (directory, host, mapping) = host();
    fs::write(mapping.join("0"), "1\n").unwrap();
    fs::write(mapping.join("1"), "2\n").unwrap();
    chown(mapping.join("1"), Some(1000), None).unwrap();
    fs::write(mapping.join("2"), "3\n").unwrap();
    fs::set_permissions(mapping.join("2"), fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(directory.path().join("theirs"), "4\n").unwrap();
    chown(directory.path().join("theirs"), Some(1000), None).unwrap();
    symlink(directory.path().join("theirs"), mapping.join("3")).unwrap();
    symlink("/dev/zero", mapping.join("4")).unwrap();
    fs::write(mapping.join("5"), vec![b'9'; 1 << 20]).unwrap();
    let listing = look(&host, &mapping);
    assert_eq!((jobs(&listing), listing.distrusted), (vec!["1"], 5));

    fs::write(mapping.join("0"), "../../etc\n-1\n1_2\n1+0\n\u{1b}[2J\n99999999999999999999999\n7\n").unwrap();
    let listing = look(&host, &mapping);
    assert_eq!((jobs(&listing), listing.unread), (vec!["7"], 6));

    // A directory that anybody may write in says nothing, and what was known stays.
    let mut listing = look(&host, &mapping);
    for mode in [0o777, 0o1777, 0o775] {
        fs::set_permissions(&mapping, fs::Permissions::from_mode(mode)).unwrap();
        fs::write(mapping.join("0"), "8\n").unwrap();
        listing.look(&host, Some(&mapping));
        assert!(listing.error.as_ref().is_some_and(|error| error.contains("chmod 755")), "{mode:o}");
        assert_eq!(jobs(&listing), ["7"]);
        let fresh = look(&host, &mapping);
        assert!(!fresh.mapped && fresh.grants.is_empty());
    }
    fs::set_permissions(&mapping, fs::Permissions::from_mode(0o755)).unwrap();
    listing.look(&host, Some(&mapping));
    assert_eq!((jobs(&listing), listing.error.is_none()), (vec!["8"], true));
}

#[test]
fn c24_a_job_is_there_by_its_cgroup_or_its_slurmstepd() {
    let (directory, host, mapping) = host();
    let cgroups = directory.path().join("sys/fs/cgroup");
    for path in [
        "freezer/slurm/uid_1000/job_1/step_0",
        "memory/slurm_node7/uid_0/job_2",
        "system.slice/slurmstepd.scope/job_3/step_batch",
        "system.slice/node7_slurmstepd.scope/job_4",
        // Nobody's, or not in the only spelling.
        "memory/slurm/uid_1000/job_007",
        "system.slice/evil.service/slurmstepd.scope/job_8",
        "user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_9",
        "memory/docker/slurm/uid_0/job_10",
    ] {
        fs::create_dir_all(cgroups.join(path)).unwrap();
    }
    let live = host.live_jobs().unwrap();
    assert_eq!(live.iter().map(String::as_str).collect::<Vec<_>>(), ["1", "2", "3", "4"]);
    assert_eq!(Host::at(directory.path().join("nothing")).live_jobs(), None);
    if !root() {
        return;
    }
    // One without cgroups, and somebody who calls himself one.
    for (pid, uid, job) in [(10, 0, 20), (11, 1000, 21)] {
        let process = directory.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "slurmstepd\n").unwrap();
        fs::write(process.join("status"), format!("Name:\tslurmstepd\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"))
            .unwrap();
        fs::write(process.join("cmdline"), format!("slurmstepd: [{job}.batch]\0")).unwrap();
    }
    fs::write(mapping.join("0"), "1\n20\n21\n22\n").unwrap();
    let live = look(&host, &mapping).live.unwrap();
    assert_eq!(live.iter().map(String::as_str).collect::<Vec<_>>(), ["1", "2", "20", "3", "4"]);
}

#[test]
fn c24_the_devices_that_a_cgroup_may_have_are_a_grant_if_the_kernel_lists_them() {
    let node = |minors: &[u32]| Some(minors.iter().map(|minor| JobDevice::Node(*minor)).collect());
    // As Linux 6.18 showed after `a` was denied and these allowed.
    assert_eq!(listed("c 195:1 rwm\nc 195:255 rwm\nc 1:3 rwm\nb 8:0 r\n"), node(&[1]));
    assert_eq!(listed("c 195:254 rwm\nc 195:0 rw\nc 195:12 rwm\nc 510:1 rwm\n"), node(&[0, 12]));
    assert_eq!(listed("c 1:3 rwm\nc 136:* rwm\n"), node(&[]));
    // As it showed after `c 195:0 rwm` was denied and nothing else: what is forbidden cannot be read.
    for text in ["a *:* rwm\n", "c *:* rwm\n", "c 195:* rwm\n", "c 195:x rwm\n", "c 195\n"] {
        assert_eq!(listed(text), None, "{text}");
    }
    let (directory, host, _) = host();
    let jobs = directory.path().join("sys/fs/cgroup/devices/slurm/uid_1000");
    for (job, text) in
        [("job_1", "c 195:0 rwm\nc 195:255 rwm\n"), ("job_2", "a *:* rwm\n"), ("job_3", "c 1:3 rwm\n")]
    {
        fs::create_dir_all(jobs.join(job)).unwrap();
        fs::write(jobs.join(job).join("devices.list"), text).unwrap();
    }
    let mut listing = JobListing::default();
    listing.look(&host, None);
    let grant = |job: &str, devices: &[u32]| JobGrant {
        job: job.into(),
        devices: devices.iter().map(|minor| JobDevice::Node(*minor)).collect(),
    };
    assert_eq!(listing.grants, [grant("1", &[0]), grant("3", &[])]);
    assert!(listing.constrained() && !listing.mapped && listing.error.is_none());
    assert_eq!(listing.live.map(|live| live.len()), Some(3));
}
