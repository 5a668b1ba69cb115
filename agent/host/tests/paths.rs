//! Owns the recorded cgroup shapes and the identity that each must give, with where each was seen.
//! Refuses stores: no runtime's files are there, so names are ids. `names/tests.rs` has the stores.

use std::{collections::BTreeMap, fs};

use cotenant_host::{CgroupView, Host, HostNames, Identity, identify};

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const ID2: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
const UID2: &str = "ffffffff-0000-4444-8888-123456789abc";
const HASH: &str = "0123456789abcdef0123456789abcdef";
const BUILD: &str = "5cf82fwiumld3vcs5d5l5pzyv";
/// Keys that tell tenants apart: absent unless the row lists them.
const APART: [&str; 6] = ["pod_uid", "container_id", "runtime", "unit", "slurm_job", "slurm_step"];

fn fill(text: &str) -> String {
    text.replace("{id}", ID)
        .replace("{id2}", ID2)
        .replace("{id12}", &ID[..12])
        .replace("{uid}", UID)
        .replace("{uid_}", &UID.replace('-', "_"))
        .replace("{uid2}", UID2)
        .replace("{uid2_}", &UID2.replace('-', "_"))
        .replace("{task}", UID)
        .replace("{hash}", HASH)
        .replace("{build}", BUILD)
}

fn fields(identity: &Identity) -> BTreeMap<&'static str, String> {
    let uid = identity.uid.map(|uid| uid.to_string());
    let runtime = identity.runtime.map(|runtime| runtime.as_str().to_owned());
    let reason = identity.reason.map(str::to_owned);
    [
        ("kind", Some(identity.kind.as_str().to_owned())),
        ("tenant", Some(identity.tenant.name.clone())),
        ("id", identity.id.clone()),
        ("name", identity.name.clone()),
        ("pod_uid", identity.pod_uid.clone()),
        ("container_id", identity.container_id.clone()),
        ("runtime", runtime),
        ("unit", identity.unit.clone()),
        ("slurm_job", identity.slurm_job.clone()),
        ("slurm_step", identity.slurm_step.clone()),
        ("uid", uid),
        ("reason", reason),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key, value?)))
    .collect()
}

#[test]
fn c83_c85_c87_c88_c89_c92_c95_c96_every_recorded_path() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    fs::write(
        root.path().join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n",
    )
    .unwrap();
    let names = HostNames::new(Host::at(root.path()));
    let mut wrong = Vec::new();
    let mut rows = 0;
    for line in include_str!("paths.tsv").lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [path, uid, expected, source] = columns.as_slice() else { panic!("four columns: {line}") };
        assert!(!source.is_empty(), "{line}");
        rows += 1;
        let path = fill(path);
        let text = if path.starts_with('/') { format!("0::{path}\n") } else { path.replace('|', "\n") };
        let identity = identify(&text, Some(uid.parse().unwrap()), &CgroupView::Host, &names);
        let found = fields(&identity);
        let expected: BTreeMap<&str, String> = expected
            .split(' ')
            .map(|field| field.split_once('=').unwrap())
            .map(|(key, value)| (key, fill(value)))
            .collect();
        let listed = expected.iter().all(|(key, value)| found.get(key) == Some(value));
        let absent = APART.iter().all(|key| expected.contains_key(key) || !found.contains_key(key));
        if !(listed && absent && expected.contains_key("kind") && expected.contains_key("tenant")) {
            wrong.push(format!("{path} ({source})\n  expected {expected:?}\n  found    {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {rows} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(rows >= 150, "{rows} rows");
}
