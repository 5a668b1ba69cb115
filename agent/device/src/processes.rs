//! Owns how process rows are read, believed and merged.
//! Refuses half a list: one row that cannot be makes the whole list implausible.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_model::{Absence, GpuProcess, Reading};

use crate::config::ProcessCheck;
use crate::nvml::{List, ListVersion, RawRows};

/// `NVML_VALUE_NOT_AVAILABLE`.
pub(crate) const NOT_AVAILABLE: u64 = u64::MAX;
/// The kernel's own bound on PIDs (`PID_MAX_LIMIT`).
const MAX_PID: u32 = 4 << 20;
/// `comm` is cut at 15 bytes.
const MPS_SERVER: &str = "nvidia-cuda-mps-server";
const COMM_BYTES: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) pid: u32,
    pub(crate) bytes: Reading<u64>,
}

/// Row widths to try, in words. Early R535 libraries wrote four words under the `_v3` symbol.
const fn strides(version: ListVersion) -> &'static [usize] {
    match version {
        ListVersion::V3 => &[3, 4],
        ListVersion::V2 => &[3],
        ListVersion::Unversioned => &[2],
    }
}

/// Rows at the first width at which every one of them can be true; `total` is the device's size if known.
pub(crate) fn decode(
    raw: &RawRows,
    version: ListVersion,
    total: Option<u64>,
    exists: &dyn Fn(u32) -> bool,
) -> Reading<Vec<Row>> {
    strides(version)
        .iter()
        .find_map(|stride| at_stride(raw, *stride, total, exists))
        .ok_or(Absence::Implausible)
}

fn at_stride(
    raw: &RawRows,
    stride: usize,
    total: Option<u64>,
    exists: &dyn Fn(u32) -> bool,
) -> Option<Vec<Row>> {
    let rows = raw.words.chunks_exact(stride).take(raw.count).map(|words| {
        let [low, second, third, fourth, ..] = words[0].to_ne_bytes();
        let pid = u32::from_ne_bytes([low, second, third, fourth]);
        let bytes = if words[1] == NOT_AVAILABLE { Err(Absence::NotAvailable) } else { Ok(words[1]) };
        Row { pid, bytes }
    });
    let rows: Vec<Row> = rows.collect();
    let can_be = |row: &Row| {
        let fits = match (row.bytes, total) {
            (Ok(bytes), Some(total)) => bytes <= total,
            _ => true,
        };
        row.pid != 0 && row.pid <= MAX_PID && fits && exists(row.pid)
    };
    (rows.len() == raw.count && rows.iter().all(can_be)).then_some(rows)
}

/// The lists of one GPU by PID. A process is in several of them with the same bytes; it is one process. `servers`: those
/// that were MPS servers when this GPU's lists were last merged.
pub(crate) fn merge(
    lists: &[(List, Vec<Row>)],
    servers: &BTreeSet<u32>,
    check: &ProcessCheck,
) -> Vec<GpuProcess> {
    let mut merged: BTreeMap<u32, GpuProcess> = BTreeMap::new();
    for (list, rows) in lists {
        for row in rows {
            let process = merged.entry(row.pid).or_insert_with(|| GpuProcess {
                pid: row.pid,
                bytes: row.bytes,
                compute: false,
                graphics: false,
                mps_client: false,
                mps_server: false,
            });
            process.bytes = match (process.bytes, row.bytes) {
                (Ok(known), Ok(new)) => Ok(known.max(new)),
                (known, new) => known.or(new),
            };
            match list {
                List::Compute => process.compute = true,
                List::Graphics => process.graphics = true,
                List::Mps => process.mps_client = true,
            }
        }
    }
    for pid in mps_servers(&merged, servers, check) {
        if let Some(process) = merged.get_mut(&pid) {
            process.mps_server = true;
        }
    }
    merged.into_values().collect()
}

/// A process may call itself what it likes, so its name is not enough: only where NVML lists MPS clients is there a server,
/// and only one. Where two that are new go by its name, one lies, and neither is believed.
fn mps_servers(merged: &BTreeMap<u32, GpuProcess>, known: &BTreeSet<u32>, check: &ProcessCheck) -> Vec<u32> {
    // The server is not a client of itself.
    let others = || merged.values().filter(|process| !process.mps_client).map(|process| process.pid);
    let still: Vec<u32> = others().filter(|pid| known.contains(pid)).collect();
    if !still.is_empty() || !merged.values().any(|process| process.mps_client) {
        return still;
    }
    let named = |pid: &u32| (check.command)(*pid).is_some_and(|command| is_mps_server(&command));
    let named: Vec<u32> = others().filter(named).collect();
    if named.len() == 1 { named } else { Vec::new() }
}

fn is_mps_server(command: &str) -> bool {
    command.len() >= COMM_BYTES && MPS_SERVER.starts_with(command)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn rows(stride: usize, listed: &[(u32, u64)], filler: u64) -> RawRows {
        let mut words = vec![];
        for (pid, bytes) in listed {
            words.extend([u64::from(*pid), *bytes]);
            words.extend(std::iter::repeat_n(filler, stride - 2));
        }
        words.resize(words.len() + 64, 0);
        RawRows { count: listed.len(), words }
    }

    fn known(pid: u32) -> bool {
        (11..=19).contains(&pid)
    }

    fn check() -> ProcessCheck {
        ProcessCheck {
            exists: Arc::new(known),
            command: Arc::new(|pid| Some(if pid == 19 { "nvidia-cuda-mps" } else { "python" }.to_owned())),
        }
    }

    #[test]
    fn c32_c33_every_known_stride_is_read() {
        let listed = [(11, GIB), (12, 2 * GIB), (13, 3 * GIB)];
        let expected: Vec<Row> =
            listed.iter().map(|(pid, bytes)| Row { pid: *pid, bytes: Ok(*bytes) }).collect();
        for (stride, version) in
            [(2, ListVersion::Unversioned), (3, ListVersion::V2), (3, ListVersion::V3), (4, ListVersion::V3)]
        {
            for filler in [0, u64::MAX] {
                let read = decode(&rows(stride, &listed, filler), version, Some(80 * GIB), &known);
                assert_eq!(read.as_ref(), Ok(&expected), "stride {stride} as {version:?}");
            }
        }
    }

    #[test]
    fn c32_a_row_that_cannot_be_spoils_the_list() {
        for listed in [
            [(11, GIB), (12, 81 * GIB)],
            [(11, GIB), (4_000, GIB)],
            [(11, GIB), (0, GIB)],
            [(11, GIB), (u32::MAX, GIB)],
        ] {
            let read = decode(&rows(3, &listed, 0), ListVersion::V3, Some(80 * GIB), &known);
            assert_eq!(read, Err(Absence::Implausible), "{listed:?}");
        }
        let four_words = rows(4, &[(11, GIB), (12, GIB)], 0);
        assert_eq!(decode(&four_words, ListVersion::V2, None, &known), Err(Absence::Implausible));
    }

    #[test]
    fn c38_all_ones_is_unknown_and_never_summed() {
        let read = decode(&rows(3, &[(11, u64::MAX)], 0), ListVersion::V3, Some(GIB), &known);
        assert_eq!(read, Ok(vec![Row { pid: 11, bytes: Err(Absence::NotAvailable) }]));
    }

    #[test]
    fn c07_mps_clients_are_merged_and_the_server_is_named() {
        let row = |pid, bytes| Row { pid, bytes: Ok(bytes) };
        let lists = [
            (List::Compute, vec![row(11, GIB), row(12, 2 * GIB), row(19, 69 << 20)]),
            (List::Mps, vec![row(11, GIB), row(12, 2 * GIB)]),
        ];
        let merged = merge(&lists, &BTreeSet::new(), &check());
        assert_eq!(merged.iter().map(|process| process.pid).collect::<Vec<_>>(), [11, 12, 19]);
        assert_eq!(merged.iter().filter_map(|process| process.bytes.ok()).sum::<u64>(), 3 * GIB + (69 << 20));
        assert!(merged[0].mps_client && merged[0].compute && !merged[0].mps_server);
        assert!(merged[2].mps_server && !merged[2].mps_client);
    }

    #[test]
    fn c07_a_name_alone_makes_no_server() {
        let row = |pid| Row { pid, bytes: Ok(GIB) };
        let all_are_named = ProcessCheck { command: Arc::new(|_| Some("nvidia-cuda-mps".into())), ..check() };
        let servers = |compute: &[u32], mps: &[u32], known: &[u32]| -> Vec<u32> {
            let rows = |pids: &[u32]| pids.iter().map(|pid| row(*pid)).collect();
            let lists = [(List::Compute, rows(compute)), (List::Mps, rows(mps))];
            let known = known.iter().copied().collect();
            let merged = merge(&lists, &known, &all_are_named);
            merged.iter().filter(|process| process.mps_server).map(|process| process.pid).collect()
        };
        assert_eq!(servers(&[11, 19], &[], &[]), [0; 0], "no clients, no server");
        assert_eq!(servers(&[11, 19], &[11], &[]), [19]);
        assert_eq!(servers(&[11, 18, 19], &[11], &[]), [0; 0], "one of two lies");
        assert_eq!(servers(&[11, 18, 19], &[11], &[19]), [19], "who came later lies");
        assert_eq!(servers(&[19], &[], &[19]), [19], "it stays what it was when its clients are gone");
    }

    #[test]
    fn mps_server_needs_its_whole_name() {
        assert!(is_mps_server("nvidia-cuda-mps-server"));
        assert!(!is_mps_server("nvidia-cuda"));
        assert!(!is_mps_server("nvidia-cuda-mps-control"));
    }
}
