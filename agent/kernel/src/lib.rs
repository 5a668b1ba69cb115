//! Owns the kernel side as the agent sees it: plan, load, attach, watch, read.
//! Refuses tenants, NVML and `/proc`: facts come in as arguments, samples go out.

mod attach;
mod calibrate;
mod error;
mod load;
mod maps;
mod multi;
mod perf;
mod plan;
mod raw;
mod read;
mod recent;
mod reports;
mod rows;
mod syslog;
mod trial;
mod waits;
mod watch;

pub use attach::{Attached, Group, LibraryId, Probes};
pub use calibrate::{Calibration, Site, calibrate, site};
pub use error::KernelError;
pub use load::{Kernel, MapSizes, object, start};
pub use plan::{Boundary, Choices, ExitRule, FLOOR, HostFacts, Plan, TaskOffsets, Waits, XidOffsets, decide};
pub use read::Reader;
pub use reports::Report;
pub use syslog::{log_size, log_tail};
pub use trial::{Trials, Tried, trials};
pub use watch::{Happening, Watcher};
