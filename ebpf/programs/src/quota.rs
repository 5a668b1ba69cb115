//! Owns how many rows of the maps that live memory fills one process may take: a part of what the others leave.
//! Refuses a fixed number a process: a tenant that forks would fill the map all the same. With a part of one half, one
//! process gets half of a map, two get a third each, and there is always room for the next.

use cotenant_abi::{Loss, Table, WHOLE};

use crate::{
    atomic::{self, below_eight},
    ledger,
    maps::{HOST, PROCESSES, SETTINGS, SWEPT, lose},
};

/// Rows come or go. Gives how many there are: the process's own and everybody's, without what the agent has removed.
#[inline(always)]
fn change(process: u64, table: Table, rows: i64) -> Option<(i64, i64)> {
    let entry = PROCESSES.get_ptr_mut(&process)?;
    let place = below_eight(table as u64);
    // SAFETY: a live map value; the index is within the array.
    let own = unsafe { atomic::fetch_add((&raw mut (*entry).rows).cast::<i64>().add(place), rows) };
    Some((own.wrapping_add(rows), HOST.count_rows(place, rows).wrapping_add(rows)))
}

/// A row that is there whether it may or not: one that comes back (1), or one that goes (-1).
#[inline(never)]
pub fn count(process: u64, table: Table, rows: i64) {
    change(process, table, rows);
}

/// One row more, if the process may have it. False: it may not, and that is counted.
#[inline(never)]
pub fn claim(process: u64, table: Table) -> bool {
    let (Some((own, all)), Some(settings)) = (change(process, table, 1), SETTINGS.get(0)) else {
        return true;
    };
    let place = below_eight(table as u64);
    // SAFETY: the index is within the arrays.
    let (limit, swept) = unsafe {
        (*settings.row_limits.as_ptr().add(place) as i64, *settings.swept.as_ptr().add(place) as i64)
    };
    let (free, share) = (limit - (all - swept), settings.row_share as i64);
    // With what the agent has removed of its rows still among them.
    if within(own, free, share) {
        return true;
    }
    if let Some(removed) = SWEPT.get_ptr(&process) {
        // SAFETY: a live map value; the index is within the array.
        let removed = unsafe { *(&raw const (*removed).rows).cast::<u64>().add(place) } as i64;
        if within(own - removed, free, share) {
            return true;
        }
    }
    change(process, table, -1);
    lose(Loss::Quota);
    ledger::mark_lost(process);
    false
}

#[inline(always)]
fn within(own: i64, free: i64, share: i64) -> bool {
    own.wrapping_mul(WHOLE as i64) <= share.wrapping_mul(own.wrapping_add(free))
}
