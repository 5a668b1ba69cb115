//! Owns whether the library is initialised, and with which node.
//! Refuses to initialise without a node: there is no driver then, and stderr says that this is no real NVML.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cotenant_sim_state::NODE_VARIABLE;

use crate::host::Host;
use crate::{DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, NO_PERMISSION, Outcome, UNINITIALIZED, write};

struct Session {
    initialised: u32,
    host: Option<Arc<Host>>,
    /// The node's `dev/nvidia*`, held open as the real library holds the driver's.
    devices: Vec<File>,
}

static SESSION: Mutex<Session> = Mutex::new(Session { initialised: 0, host: None, devices: Vec::new() });

fn session() -> MutexGuard<'static, Session> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open() -> Outcome<Arc<Host>> {
    let Some(directory) = std::env::var_os(NODE_VARIABLE) else {
        write::warn(&format!("{NODE_VARIABLE} names no node, so there is no driver"));
        return Err(DRIVER_NOT_LOADED);
    };
    let directory = Path::new(&directory);
    Host::open(directory).map(Arc::new).map_err(|error| {
        write::warn(&format!("{}: {error}", directory.display()));
        DRIVER_NOT_LOADED
    })
}

pub(crate) fn initialise(function: &str) -> Outcome {
    // Without the lock, which a call that hangs must not hold.
    let known = session().host.clone();
    let host = known.map_or_else(open, Ok)?;
    let faults = host.faults.now()?;
    faults.strike(function, None, |takes| host.hold(takes))?;
    if faults.version_mismatch {
        return Err(LIB_RM_VERSION_MISMATCH);
    }
    if faults.no_permission {
        return Err(NO_PERMISSION);
    }
    let mut session = session();
    if session.devices.is_empty() {
        session.devices = host.devices().map_err(|_| NO_PERMISSION)?;
    }
    session.host.get_or_insert(host);
    session.initialised += 1;
    Ok(())
}

pub(crate) fn shut_down(function: &str) -> Outcome {
    let host = current()?;
    host.faults.now()?.strike(function, None, |takes| host.hold(takes))?;
    let mut session = session();
    session.initialised = session.initialised.checked_sub(1).ok_or(UNINITIALIZED)?;
    if session.initialised == 0 {
        // Calls under way keep the node mapped until they end.
        session.host = None;
        session.devices.clear();
    }
    Ok(())
}

pub(crate) fn current() -> Outcome<Arc<Host>> {
    session().host.clone().ok_or(UNINITIALIZED)
}
